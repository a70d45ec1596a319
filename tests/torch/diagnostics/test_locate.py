"""`locate`: the op that is named, what it was given, and all that is put back."""

from __future__ import annotations

import math
import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polymp.torch
from polymp.backends.torch.diagnostics import locate as module
from polymp.diagnostics.bad_step import BadStep
from polymp.torch import autocast, locate
from tests.support.reports import operand
from tests.support.torch.audit_trainings import CASES, OPTIMIZERS, Training
from tests.support.torch.models import same

pytestmark = pytest.mark.usefixtures("left_as_found")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("started", [False, True], ids=["first step", "later step"])
@pytest.mark.parametrize("what", CASES, ids=lambda what: "-".join(map(str, what)))
def test_all_that_a_step_writes_is_put_back(what: tuple[Any, ...], started: bool) -> None:
    """The state is that of before, and the run goes on as if nobody had looked."""
    replayed, plain = Training(*what), Training(*what)
    for training in (replayed, plain) if started else ():
        torch.manual_seed(2)
        training.step()
    parameters = list(replayed.model.parameters())
    before, grads = replayed.state(), [p.grad for p in parameters]
    for factor in (1.0, 1e6):
        found = locate(replayed.step, factor, model=replayed.model)
        assert (found is None) == (factor == 1.0 or not what[1].startswith("fp16"))
        assert same(replayed.state(), before)
        assert all(p.grad is grad for p, grad in zip(parameters, grads, strict=True))
    assert len(replayed.optimizer.state) == len(plain.optimizer.state)
    after = []
    for training in (replayed, plain):
        torch.manual_seed(1)
        after.append([training.step(), training.step(), *training.state()])
    assert same(*after)


SCHEDULERS: dict[str, Any] = {
    "steps": lambda o: torch.optim.lr_scheduler.StepLR(o, 1),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, 10),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "several": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.StepLR(o, 1)], [2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_is_put_back(name: str) -> None:
    """Where the scaler skips the optimizer, and the step is called again to try what helps."""
    p = nn.Parameter(torch.full((2, 2), 10.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)

    def step(factor: float) -> None:
        loss = (overflowing(p) * factor).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step(*[loss.item()] * (name == "plateau"))
        optimizer.zero_grad()

    def state() -> tuple[Any, ...]:
        settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        return scheduler.state_dict(), settings, p.tolist()

    step(1e-4)
    before = str(state())
    fault: Any = locate(step, 1.0)
    assert fault.op == "mul"
    assert str(state()) == before


@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_gradients_that_zero_grad_drops_are_put_back(factor: float) -> None:
    """Of parameters that no op has read yet, wherever the step has its optimizer from."""
    p, leaf = nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
    p.grad = grad = torch.ones(2)
    leaf.grad = leaf_grad = torch.ones(2)
    trainer = SimpleNamespace(optimizers={"sgd": torch.optim.SGD([p, leaf], lr=0.1)})

    def step() -> None:
        for by in (factor, 1.0):  # the second reads what the first has made
            trainer.optimizers["sgd"].zero_grad()
            (p * leaf * by).sum().backward()
            trainer.optimizers["sgd"].step()

    found = locate(step)
    assert (found and found.kind) == (None if factor == 1.0 else "operation")
    assert p.grad is grad
    assert leaf.grad is leaf_grad


def test_under_torch_func_a_remedy_is_said_to_be_untried() -> None:
    """It takes linear apart, but where a policy has a row for it: its addmm does not run then."""
    weight, x, bias = torch.full((4, 4), 300.0), torch.full((2, 4), 300.0), torch.zeros(4)

    def loss(weight: torch.Tensor, policy: Any = None) -> torch.Tensor:
        with autocast("cpu", torch.float16, policy=policy):
            return F.linear(x, weight, bias).float().sum()

    fault: Any = locate(torch.func.grad_and_value(loss), weight)
    assert (fault.op, fault.kind) == ("addmm", "overflow")
    assert fault.remedy.endswith("That was not tried.")
    policy = polymp.policy("torch-cpu")
    for op, finite in (("addmm", False), ("linear", True)):
        _, value = torch.func.grad_and_value(loss)(weight, policy.override(fp32=[op]))
        assert value.isfinite() == finite


def test_a_parameter_whose_name_has_grad_is_no_gradient() -> None:
    model = nn.Module()
    model.grad_scale = nn.Parameter(torch.tensor([math.inf]))
    fault: Any = locate(lambda model: model.grad_scale * 2, model)
    assert fault.remedy == "Look at the data or the parameters."


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, polymp.torch.GradScaler])
def test_a_scaler_or_scheduler_that_was_refused_is_nobodys(scaler: Any) -> None:
    """Its traceback keeps an object that has no state yet."""
    with pytest.raises((AssertionError, ValueError)) as _kept:
        scaler("cpu", growth_factor=0.5)
    with pytest.raises(TypeError) as _kept_too:
        torch.optim.lr_scheduler.StepLR("no optimizer", 1)  # type: ignore[arg-type]
    fault: Any = locate(overflowing, torch.full((2, 2), 10.0))
    assert fault.op == "mul"


def test_random_numbers_are_those_of_the_step_and_are_put_back() -> None:
    """So that a step which draws them is the same one when it is called again."""
    seen: list[float] = []

    def drawn() -> float:
        return torch.rand(()).item() + np.random.rand() + random.random()

    def step() -> torch.Tensor:
        seen.append(drawn())
        return overflowing(torch.full((2, 2), 10.0 + seen[-1]))

    fault: Any = locate(step)
    assert fault.remedy.startswith("Give mul the rule fp32, with which this step was tried and is")
    assert len(seen) > 1
    assert {*seen} == {drawn()}, "as if nobody had looked"


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_row_that_is_masked_as_a_whole_is_told_alike(written: int) -> None:
    """The cast of a mask's constant is no loss that is infinite, nor is a write beside it."""

    def scores(x: torch.Tensor) -> torch.Tensor:
        scores = (x @ x).masked_fill(x > 0, -math.inf)
        scores[0, :written] = x[0, :written]
        return scores

    def step(x: torch.Tensor) -> torch.Tensor:
        with autocast("cpu", torch.float16, policy="amp"):
            return scores(x).softmax(-1).sum()

    x = torch.ones(2, 2)
    with polymp.torch.audit() as audit:
        step(x)
    for fault in (locate(step, x), audit.fault):
        assert fault is not None
        assert (fault.op, fault.kind) == ("softmax", "operation")
        assert fault.why.startswith("its result is NaN, from infinities that the program has")
    assert locate(step, torch.eye(2)) is None, "no row is masked as a whole"
    assert locate(lambda x: (1 / scores(x.half())).sum(), x) is None


def test_a_replay_that_puts_nothing_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.LocateValues, "put_back", lambda _: None)
    training = Training("convolution", "bf16")
    before = training.state()
    locate(training.step, model=training.model)
    assert not same(training.state(), before)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_that_raises_after_its_optimizer_is_put_back_too(optimizer: str) -> None:
    training = Training("mlp", "fp32", optimizer)
    before = training.state()

    def step() -> None:
        training.step()
        raise ValueError("after all that")

    with pytest.raises(ValueError, match="after all that"):
        locate(step, model=training.model)
    assert same(training.state(), before)


@pytest.mark.parametrize("error", [FloatingPointError, SystemExit])
def test_a_step_that_raises_for_a_value_it_made_is_explained(error: Any) -> None:
    """Code that checks its loss raises; the fault is what it should have said."""

    def step(x: torch.Tensor) -> None:
        loss = (x * 1e3).sum()
        if not loss.isfinite():
            raise error("loss is not finite")

    assert locate(step, torch.ones(2)) is None
    found: Any = locate(step, torch.full((2,), 1e3).half())
    assert (found.op, found.kind) == ("mul", "overflow")


@pytest.mark.parametrize("written_over", [True, False])
def test_a_value_that_is_gone_is_no_fault_unless_a_leaf_had_it(written_over: bool) -> None:
    """Of log at 0, behind a `where`, the gradient is NaN; that of x, only if x was 0 itself."""
    x = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([x], 0.0)

    def step() -> None:
        c = x + 0
        if written_over:
            c[:] = 0
        torch.where(c > 0, c.log(), 0.0).sum().backward()
        c.detach().log()  # dropped
        optimizer.step()
        optimizer.zero_grad()

    located = locate(step)
    with polymp.torch.audit() as audit:
        step()
    for fault in (located, audit.fault):
        found = fault and (fault.op, fault.direction)
        assert found == (None if written_over else ("log", "backward"))
    for ends in (lambda x: (x.log(), x.sqrt())[1], lambda x: x.sqrt() is None):
        assert getattr(locate(ends, torch.tensor([-1.0, -1.0])), "op", None) == "sqrt"


def test_the_fault_of_an_overflow_in_full() -> None:
    net = nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU())
    with torch.no_grad():
        net[0].weight.fill_(3e3)
    x = torch.tensor([[30.0, 0.0, -1.0, 2.0], [0.5, 0.0, 0.0, 0.0]])

    def step() -> torch.Tensor:
        with autocast("cpu", torch.float16):
            return net(x)  # type: ignore[no-any-return]

    fault: Any = locate(step, model=net)
    assert (fault.op, fault.module, fault.direction) == ("linear", "0", "forward")
    assert (fault.kind, fault.run, fault.region) == ("overflow", "float16", "float16")
    assert str(fault.row).startswith("class:matmul = lower") or "linear" in str(fault.row)
    assert fault.found == "Inf"
    assert fault.inputs == (operand(x.half()), operand(net[0].weight.detach().half().t()))


def test_a_loss_is_found_though_its_gradients_are_zero() -> None:
    """The mean of no targets: its own backward alone reads it, and makes zeros of it."""
    net, x = nn.Linear(8, 4), torch.randn(3, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(net(x), torch.full((3,), -100))
        loss.backward()
        return loss.detach()

    found = locate(step, x, model=net)
    assert (found.op, found.kind) == ("nll_loss", "operation")


def test_what_an_op_was_given_is_exact_to_subnormal_numbers() -> None:
    x, y = torch.randn(5, 7), torch.randn(5, 7)
    x[0, :3] = torch.tensor([0.0, 1e38, 1e-40])
    y[0, 1:3] = torch.tensor([1e38, 3.0])
    fault: Any = locate(lambda x: x * y, x)
    assert fault.kind == "operation"
    names = "an argument (float32 5x7)", "a tensor that no op computed (float32 5x7)"
    assert fault.inputs == (operand(x, names[0]), operand(y, names[1]))
    fault = locate(lambda x: x * x, torch.tensor([1e300], dtype=torch.float64))
    assert fault.inputs[0].largest == 1e300, "beyond float32"


def test_what_is_in_an_object_is_an_argument() -> None:
    x = torch.tensor([1.0, math.nan])
    fault: Any = locate(lambda batch: batch.x * 2, SimpleNamespace(x=x))
    assert fault.why.startswith("an argument (float32 2)")


def test_what_the_step_has_of_no_op_is_not_called_an_argument() -> None:
    class FromNumpy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(np.full(gradient.shape, np.nan, np.float32))

    x = torch.ones(3, requires_grad=True)
    fault: Any = locate(lambda x: FromNumpy.apply(x * 2).sum().backward(), x)
    assert (fault.kind, fault.direction) == ("input", "backward")
    assert fault.why.startswith("a tensor that no op computed (float32 3) is not finite")


def test_the_backward_op_that_breaks_is_named_with_its_line() -> None:
    def step(x: torch.Tensor) -> None:
        x.sqrt().sum().backward()  # 1 / (2 * sqrt(0))

    fault: Any = locate(step, torch.zeros(2, requires_grad=True))
    assert (fault.op, fault.direction, fault.kind) == ("sqrt", "backward", "operation")
    assert fault.source == f"test_locate.py:{step.__code__.co_firstlineno + 1}"


def test_the_callers_graph_is_as_it_was() -> None:
    x = torch.ones(3, requires_grad=True)
    y = (x * 2).exp()
    node, version = y.grad_fn, y._version
    x.grad = kept = torch.full((3,), 5.0)

    def step() -> torch.Tensor:
        (y * 3e38).sum().backward(retain_graph=True)
        return y

    assert locate(step) is not None
    assert y.grad_fn is node
    assert y._version == version
    assert x.grad is kept
    assert torch.equal(x.grad, torch.full((3,), 5.0))
    y.sum().backward()
    assert torch.equal(x.grad, 5 + 2 * y.detach()), "its graph can still run"


def test_memory_is_put_back_whatever_view_of_it_was_written() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    before = whole.clone()
    counter = torch.zeros((), dtype=torch.int64)

    def step() -> torch.Tensor:
        whole[1].mul_(3)
        whole.t()[2].zero_()
        counter.add_(1)
        return whole * 3e38

    assert locate(step) is not None
    assert torch.equal(whole, before)
    assert counter == 0


def test_a_model_is_found_among_the_arguments() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    x = torch.full((1, 2), math.nan)
    for fault in (locate(net, x), locate(lambda m, x: m(x), net, x), locate(lambda: net(x))):
        assert (fault.module, fault.kind) == ("0", "input")


MANY = {
    "_linalg_slogdet": (torch.linalg.slogdet, 0.0),
    "_foreach_mul": (lambda x: torch._foreach_mul([x[0], x + 1e30], 1e30), 0.0),
    "exp": (lambda x: x.exp().aminmax(), 1e3),
}


@pytest.mark.parametrize("tool", ["locate", "audit"])
@pytest.mark.parametrize("op", MANY)
def test_any_result_of_an_op_may_be_the_one_that_is_not_finite(op: str, tool: str) -> None:
    fn, value = MANY[op]

    def step(x: torch.Tensor) -> torch.Tensor:
        _, second = fn(x)
        return (second * 0).sum()

    x = torch.full((2, 2), value).requires_grad_()
    if tool == "locate":
        fault: Any = locate(step, x)
    else:
        with polymp.torch.audit() as report:
            step(x)
        fault = report.fault
    assert (fault.op, fault.kind, fault.found) == (op, "operation", "Inf")
    assert not any(x.inf or x.nan for x in fault.inputs)


def test_lists_of_float16_tensors_are_compared_with_float32() -> None:
    x = torch.full((2,), 300.0, dtype=torch.float16)
    fault: Any = locate(lambda x: torch._foreach_mul([x * 0, x], [x[:1], x])[1], x)
    assert (fault.op, fault.kind) == ("_foreach_mul", "overflow")


def test_what_code_outside_of_torch_has_written_is_no_fault_of_the_op_that_reads_it() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        h = x.exp()
        h.numpy()[0, 0] = math.nan  # as a kernel of Triton does
        return h.sum()

    fault: Any = locate(step, torch.zeros(2, 2))
    assert (fault.op, fault.kind, fault.inputs[0].nan) == ("sum", "input", 0.25)
    assert fault.why.startswith("what code outside of torch's ops wrote into the result of exp is")
    assert fault.remedy == "Look at that code."


@pytest.mark.parametrize("foreach", [True, False])
def test_a_gradient_that_was_clipped_is_followed_to_the_op_that_made_it(foreach: bool) -> None:
    net = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(net.weight)  # so that the loss is finite
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (net(x) * 1e38).sum().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=foreach)  # 0 * Inf is NaN
        optimizer.step()

    fault: Any = locate(step, torch.ones(4, 2), model=net)
    assert (fault.op, fault.direction, fault.kind) == ("mm", "backward", "operation")


@pytest.mark.parametrize(
    ("dtype", "value", "op", "table"),
    [(torch.float16, 300.0, "linear", "policies/torch-cpu.toml"), (None, 3e38, "mm", "")],
)
def test_in_torchs_own_regions_and_without_any(
    dtype: Any, value: float, op: str, table: str
) -> None:
    x = torch.full((4, 4), value)

    def step() -> torch.Tensor:
        with torch.autocast("cpu", dtype) if dtype else nullcontext():
            return nn.functional.linear(x, x)

    fault: Any = locate(step)
    assert (fault.op, fault.run) == (op, "float16" if dtype else "float32")
    assert (fault.row.source if fault.row else "") == table, "of torch, not of policy amp"


def test_a_model_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^locate\(model=...\) needs a torch.nn.Module, got 'net'"):
        locate(lambda: None, model="net")  # type: ignore[arg-type]


def test_a_large_learning_rate_is_not_blamed_on_an_eps_that_is_zero() -> None:
    w = nn.Parameter(torch.ones(4, dtype=torch.float16))
    adam = torch.optim.Adam([w], lr=1e6, eps=1e-8)

    def step() -> None:
        w.sum().backward()
        adam.step()

    fault = locate(step)
    assert fault is not None
    assert (fault.op, fault.kind) == ("Adam.step", "overflow")


@pytest.mark.parametrize("region", [False, True])
def test_a_running_variance_that_is_corrupt_is_no_overflow(region: bool) -> None:
    """A batch norm may write its running statistics; of float16 it is repeated in float32."""
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    net[1].running_var.fill_(-1.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        with autocast("cpu", torch.float16, enabled=region):
            return net[1](net[0](x) if region else x.half())  # type: ignore[no-any-return]

    fault: Any = locate(step, torch.randn(4, 8), model=net)
    assert (fault.op, fault.kind, fault.run) == ("batch_norm", "operation", "float16")


def test_a_batch_norm_in_training_is_repeated_with_its_statistics_kept() -> None:
    """A repeat that wrote them would move them twice."""
    norm = nn.BatchNorm1d(8)
    with torch.no_grad():
        norm.weight.fill_(1e6)
    means: list[torch.Tensor] = []

    def step(x: torch.Tensor) -> None:
        assert not norm(x.half()).isfinite().all()
        means.append(norm.running_mean.clone())  # type: ignore[union-attr]

    x = torch.randn(4, 8)
    fault: Any = locate(step, x, model=norm)
    assert (fault.op, fault.kind) == ("batch_norm", "overflow")
    step(x)
    assert torch.equal(*means)


@pytest.mark.parametrize(
    ("op", "kind", "why"),
    [
        (lambda x: x * 1e3, "overflow", "largest number, 65504; in float32 it is finite"),
        (lambda x: x.mul_(1e3), "overflow", "largest number, 65504; in float32 it was not tried"),
        (lambda x: x.div_(1e-4), "operation", "not, in float16; in float32 it was not tried"),
        (lambda x: (-x).sqrt_(), "operation", "not, in float16; in float32 it was not tried"),
    ],
)
def test_an_op_in_place_is_said_not_to_be_tried_in_float32(op: Any, kind: str, why: str) -> None:
    fault: Any = locate(lambda x: op(x.half()), torch.full((3,), 300.0))
    assert fault.kind == kind
    assert fault.why.endswith(why)
    assert "in float32 either" not in BadStep(0, "the loss is Inf", fault).remedy


def test_an_iterator_that_has_ended_is_told() -> None:
    net, batches = nn.Linear(2, 1), iter([torch.ones(1, 2)])

    def step() -> torch.Tensor:
        return net(next(batches)).sum()  # type: ignore[no-any-return]

    step()
    with pytest.raises(
        RuntimeError,
        match=r"an iterator that it reads, .* has ended\. Give the step its batch as an argument: "
        r"locate\(step_fn, batch\)\.$",
    ):
        locate(step, model=net)


def test_scalers_of_classes_that_are_derived_are_put_back() -> None:
    class Derived(torch.amp.GradScaler):
        pass

    training = Training("mlp")
    training.scaler = Derived("cpu", 8.0, growth_interval=1)
    training.step()
    assert locate(training.step) is None
    assert training.scaler.get_scale() == 16.0


@pytest.mark.parametrize("how", ["copy_", "out="])
def test_what_is_written_over_is_not_what_an_op_was_given(how: str) -> None:
    """Memory of torch.empty, which may have any numbers."""

    def step(x: torch.Tensor) -> torch.Tensor:
        y = torch.full((4,), math.nan, dtype=torch.float16)
        if how == "copy_":
            y.copy_(x.float() * 1e5)
        else:
            torch.mul(x, 1e5, out=y)
        return y.sum()

    fault: Any = locate(step, torch.ones(4, dtype=torch.float16))
    assert (fault.op, fault.kind) == ("copy_" if how == "copy_" else "mul", "overflow")


@pytest.mark.parametrize("optimizer", ["plain", "fused"])
def test_gradients_that_a_scaler_has_divided_are_still_the_step_s(optimizer: str) -> None:
    """Else zero_grad() would be said to be missing."""
    training = Training("mlp", "fp16", optimizer)
    training.step()
    fault: Any = locate(training.step, math.nan, model=training.model)
    assert (fault.op, fault.kind) == ("mul", "operation")


# --- the trial: see also tests/shared/test_remedies.py -------------------------------------------


def overflowing(x: torch.Tensor) -> torch.Tensor:
    """A step whose products are beyond float16, in a region of torch's own."""
    with torch.autocast("cpu", torch.float16):
        return (x @ x) * 1e4


@pytest.mark.parametrize("why", ["the batches end", "it is made for its dtypes"])
def test_a_step_that_cannot_be_tried_says_so(why: str) -> None:
    batches = iter([torch.full((2, 2), 10.0)] if why.startswith("the") else [])

    def step(x: torch.Tensor | None) -> torch.Tensor:
        made = overflowing(next(batches) if x is None else x)
        assert made.dtype is torch.float16
        return made

    fault: Any = locate(step, None if why.startswith("the") else torch.full((2, 2), 10.0))
    assert fault.op == "mul"
    assert fault.remedy == "Give mul the rule fp32, or use bfloat16. That was not tried."


def test_a_remedy_names_the_module_that_it_is_for() -> None:
    class Square(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x

    net = nn.Sequential(nn.Linear(2, 2), Square())
    with torch.no_grad():
        net[0].weight.fill_(300.0)

    def step() -> torch.Tensor:
        with autocast("cpu", torch.float16, policy="amp"):
            return net(torch.ones(2, 2))  # type: ignore[no-any-return]

    fault: Any = locate(step, model=net)
    assert fault.remedy.startswith("Give mul the rule fp32 in module '1', with which this step")
    polymp.torch.scoped(net, polymp.policy("amp").override(scopes={"1": {"mul": "fp32"}}))
    assert step().isfinite().all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_cast_that_overflows_in_a_decoding_is_no_input(mode: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        with mode(), autocast("cpu", torch.float16):
            return nn.functional.linear(x * 240_000, torch.ones(8, 8)).softmax(-1)

    fault = locate(step, torch.ones(1, 8))
    assert (fault.op, fault.kind) == ("linear", "overflow")
    assert "the rule fp32, with which this step was tried and is finite" in fault.remedy


def test_a_buffer_that_the_step_replaces_is_put_back() -> None:
    net = nn.BatchNorm1d(3)
    before = net.running_mean

    def step(x: torch.Tensor) -> torch.Tensor:
        net.running_mean = 0.9 * net.running_mean + x.mean(0)
        return net(x).sum()

    locate(step, torch.ones(2, 3))
    assert net.running_mean is before
    assert not before.any()


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_parameters_that_the_step_makes_are_as_before_its_update() -> None:
    net = nn.ModuleList([nn.LazyLinear(1), nn.LazyLinear(1)])  # the second is never called
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        (net[0](x) - math.inf).sum().backward()
        optimizer.step()

    with polymp.torch.audit(net) as audit:
        net[0](torch.ones(1, 2)).sum().backward()
    assert {m.module for m in audit.gradients} == {"0.weight", "0.bias"}
    net[0] = nn.LazyLinear(1)
    optimizer.param_groups[0]["params"] = [*net.parameters()]
    fault: Any = locate(step, torch.full((1, 2), math.inf), model=net)
    assert fault.kind == "input"
    assert net[0].weight.isfinite().all()


@pytest.mark.filterwarnings("ignore:.* prototype stage")
def test_nested_tensors_are_not_measured() -> None:
    net = nn.Linear(3, 3)

    def step(factor: float) -> torch.Tensor:
        nested = torch.nested.as_nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
        padded = torch.nested.to_padded_tensor(net(nested), 0.0)
        return ((padded.square() + 2) * factor).sum()

    for factor in (1.0, 3e38):
        fault = locate(step, factor)
        with polymp.torch.audit() as audit:
            step(factor).backward()
        assert (fault and fault.op) == (audit.fault and audit.fault.op)
        assert (fault and fault.op) == (None if factor == 1.0 else "mul")
