"""`explain`: where and in which direction each call ran, and that nothing of it is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from polymp.backends.torch.compat import modes
from polymp.diagnostics.call_record import BACKWARD, FORWARD, RECOMPUTE
from polymp.torch import autocast, explain
from tests.support.processes import in_thread
from tests.support.reports import line_of, only
from tests.support.torch.each_op import EachOp

pytestmark = pytest.mark.usefixtures("left_as_found")
BF16, FP16 = torch.bfloat16, torch.float16


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.pow(3)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return g * x.square().mul(3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.softmax(self.first(x), -1)
        hidden = Cubed.apply(hidden)
        hidden = hidden.mT.contiguous().mT.chunk(2, 0)[0]
        return self.second(hidden)


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MSELoss()

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return self.inner(y.float(), torch.zeros_like(y, dtype=torch.float32)).sqrt()


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


def step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    with autocast("cpu", BF16, policy="amp"):
        y = model(x)
    y.float().sum().backward()


def test_backward_calls_carry_the_module_and_the_line_of_their_forward(
    model: Net, x: torch.Tensor
) -> None:
    with explain(model=model) as report:
        step(model, x)
    for module in ("first", "second"):
        forward, backward = (c for c in report.of("linear") if c.module == module)
        assert (forward.direction, backward.direction) == (FORWARD, BACKWARD)
        assert forward.source == backward.source
        assert forward.row == backward.row is not None
    assert report.of("linear")[0].source == line_of(Net.forward, "self.first(x)")
    softmax, back = report.of("softmax")
    assert softmax.source == back.source == line_of(Net.forward, "softmax")
    assert (softmax.module, back.direction) == ("", BACKWARD)
    backward = {c.source for c in report if c.direction == BACKWARD}
    assert line_of(Net.forward, "chunk") in backward, "the backward of a view is a call"


def test_the_user_s_own_backward_has_its_own_lines(model: Net, x: torch.Tensor) -> None:
    with explain(model=model) as report:
        step(model, x)
    assert only(report, "pow", FORWARD).source == line_of(Cubed.forward, "x.pow(3)")
    (square,) = report.of("square") or [c for c in report.of("pow") if c.direction == BACKWARD]
    assert square.source == line_of(Cubed.backward, "square()")
    assert square.direction == BACKWARD
    assert {c.source for c in report.of("mul")} == {square.source}
    assert sum(c.times for c in report.of("mul")) == 2, "each is its own call, not the forward's"


@pytest.mark.parametrize("policy", [None, "amp"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_runs_again_is_a_recomputation(
    model: Net, x: torch.Tensor, reentrant: bool, policy: str | None
) -> None:
    with explain(model=model) as report:
        with autocast("cpu", BF16, policy=policy):
            y = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
        assert not [c for c in report if c.direction == RECOMPUTE]
        y.float().sum().backward()
    for op, module in (("linear", "first"), ("softmax", "")):
        forward, again = (
            next(c for c in report.of(op) if c.module == module and c.direction == d)
            for d in (FORWARD, RECOMPUTE)
        )
        assert again == forward._replace(direction=RECOMPUTE, kept=again.kept)
        backward = next(c for c in report.of(op) if c.module == module and c.direction == BACKWARD)
        assert backward.source == forward.source
    counts = {c.direction: c.times for c in report.of("softmax")}
    assert counts == {FORWARD: 1, RECOMPUTE: 1, BACKWARD: 1}


def test_two_backward_passes_count_twice(model: Net, x: torch.Tensor) -> None:
    with explain(model=model) as once:
        step(model, x)
    with explain(model=model) as report:
        with autocast("cpu", BF16, policy="amp"):
            y = model(x).float().sum()
        y.backward(retain_graph=True)
        y.backward()
    for direction, factor in ((FORWARD, 1), (BACKWARD, 2)):
        flops = [sum(c.flops for c in r if c.direction == direction) for r in (once, report)]
        assert flops[1] == factor * flops[0] > 0


def test_a_second_derivative_is_put_down_to_its_forward(x: torch.Tensor) -> None:
    layer, x = nn.Linear(8, 8), x.requires_grad_()
    with explain(model=layer) as report:
        y = torch.tanh(layer(x)).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        g.square().sum().backward()
    here = [c for c in report.of("tanh") if c.direction == BACKWARD]
    assert {c.source for c in here} == {report.of("tanh")[0].source}
    assert {c.direction for c in report} == {FORWARD, BACKWARD}
    matmuls = [c for c in report if c.flops]
    assert [c for c in matmuls if c.direction == FORWARD] == report.of("addmm")[:1]
    assert (
        sum(c.flops for c in matmuls if c.direction == BACKWARD) > 2 * report.of("addmm")[0].flops
    )


def test_modules_that_are_several_and_losses_outside(x: torch.Tensor, model: Net) -> None:
    loss, other = Loss(), nn.Sequential(nn.Linear(8, 8))
    with explain() as report, autocast("cpu", BF16):
        loss(other(model(x)))
    assert [c.module for c in report.of("linear")] == ["first", "second", "0"]
    assert only(report, "mse_loss", FORWARD).module == "inner"
    with explain(model=model) as named, autocast("cpu", BF16):
        loss(other(model(x)))
    assert [c.module for c in named.of("linear")] == ["first", "second", ""], "not in the model"
    assert only(named, "mse_loss", FORWARD).module == ""


def test_regions_inside_of_regions(x: torch.Tensor, w: torch.Tensor) -> None:
    with explain() as report:
        x @ w
        with autocast("cpu", BF16):
            x @ w
            with autocast("cpu", FP16):
                x @ w
            with autocast("cpu", enabled=False):
                x @ w
            with torch.autocast("cpu", FP16):
                torch.relu(x @ w)
            x.clone().relu_()
    products = [c for c in report if c.flops]
    assert [c.region for c in products] == ["", "bfloat16", "float16", "", "float16"]
    assert [c.run for c in products] == ["float32", "bfloat16", "float16", "float32", "float16"]
    assert [c.rule for c in products] == ["", "lower", "lower", "", "lower"]
    assert (report.low, report.policy) == ("bfloat16", "torch-cpu")
    plain, inside = report.of("relu")
    assert (plain.region, inside.region, inside.rule) == ("float16", "bfloat16", "no row")
    assert inside.spelling == "aten:relu_"


def test_no_region_at_all(model: Net, x: torch.Tensor) -> None:
    with explain(model=model) as report:
        model(x).sum().backward()
    assert (report.low, report.policy, report.casts) == ("", "", 0)
    assert {(c.region, c.row, c.rule) for c in report} == {("", None, "")}
    assert set(report.flops) == {"float32"}
    assert report.of("softmax")[0].module == ""


def test_other_threads_are_not_in_it(x: torch.Tensor, w: torch.Tensor) -> None:
    def other() -> None:
        with autocast("cpu", BF16):
            torch.softmax(x @ w, -1)

    with explain() as report:
        in_thread(other)
        torch.exp(x)
    assert [c.op for c in report] == ["exp"]


def test_a_report_has_what_ran_until_an_error(model: Net, x: torch.Tensor) -> None:
    modules = [dict(vars(m)) for m in model.modules()]
    fails = pytest.raises(RuntimeError, match="shapes cannot be multiplied")
    with fails, explain(model=model) as report, autocast("cpu", BF16, policy="amp"):
        assert modes.is_recorded() is False, "it only looks on"
        model(x)
        model(x[:, :3])
    assert [dict(vars(m)) for m in model.modules()] == modules
    assert [c.module for c in report.of("linear")] == ["first", "second", "first"]
    calls = report.calls
    model(x)
    assert report.calls is calls, "what runs later is not in it"


def test_explained_twice_the_report_is_the_same(model: Net, x: torch.Tensor) -> None:
    reports = []
    for _ in range(2):
        with explain(model=model) as report:
            step(model, x)
        reports.append(report)
    assert reports[0].calls == reports[1].calls
    with explain(model=model) as outer, explain(model=model) as inner:
        step(model, x)
    assert inner.calls == reports[0].calls
    assert outer.casts == inner.casts, "the outer one sees what runs, too"


def test_what_is_compiled_runs_as_it_is_written(model: Net, x: torch.Tensor) -> None:
    with explain(model=model) as eager:
        step(model, x)
    compiled: Any = torch.compile(model, backend="aot_eager")
    for named in (model, compiled):
        with explain(model=named) as report:
            step(compiled, x)
        assert [c for c in report if c.flops] == [c for c in eager if c.flops]
        assert report.casts == eager.casts


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_transforms_of_torch_func_run_and_have_their_rows(model: Net, x: torch.Tensor) -> None:
    layer, parameters = model.first, dict(model.first.named_parameters())

    def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, parameters, (x,)).float().sum()  # type: ignore[no-any-return]

    def transformed() -> list[torch.Tensor]:
        with autocast("cpu", BF16):
            one = torch.func.grad(loss)(parameters, x)
            each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
            return [*one.values(), *each.values(), torch.func.vmap(layer)(x)]

    plain = transformed()
    with explain(model=model) as report:
        explained = transformed()
    assert all(map(torch.equal, plain, explained))
    # The transforms take the layer apart, as without a report.
    products = [c for op in ("addmm", "matmul") for c in report.of(op) if c.flops]
    assert {(c.rule, c.run, c.module) for c in products} == {("lower", "bfloat16", "first")}
    assert sum(c.times for c in products) == 3
    assert BACKWARD in {c.direction for c in report}
    own: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: own.append(t) or t, lambda t: t):
        with explain(), pytest.raises(RuntimeError, match="saved tensor hooks"):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                transformed()  # the user's hooks are refused as ever


def test_the_user_s_own_modes_still_see_what_runs(x: torch.Tensor) -> None:
    outside, inside = (EachOp(lambda op, *_: op.overloadpacket.__name__) for _ in range(2))
    with outside, explain() as report, inside:
        torch.exp(x).sum()
    assert outside.seen == inside.seen == ["exp", "sum"]
    assert [c.op for c in report] == ["exp", "sum"]


def test_a_backward_pass_inside_the_region_belongs_to_the_ops_of_the_forward() -> None:
    """There, what a backward is made of meets the region's kernels, too."""
    model, x = torch.nn.Linear(8, 4, bias=False), torch.randn(2, 3, 8)

    def rows(inside: bool) -> list[tuple[str, str, int, int]]:
        with explain(model=model) as report:
            with autocast("cpu", torch.bfloat16):
                loss = model(x).sum()
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
        return [(c.op, c.direction, c.flops, c.casts) for c in report if c.op in ("linear", "mm")]

    assert rows(inside=True) == rows(inside=False)
    assert [op for op, *_ in rows(inside=True)] == ["linear", "linear"]
