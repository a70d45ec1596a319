"""`audit`: not a bit of a run is changed, and what it says is what hooks by hand see."""

from __future__ import annotations

import gc
import math
import sys
import threading
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks
from torch.utils.checkpoint import checkpoint

import polymp.torch
from polymp.backends.torch.diagnostics import values
from polymp.torch import GradScaler, audit, autocast, explain, locate, record
from tests.support.reports import magnitudes
from tests.support.torch.audit_trainings import DTYPES, Training
from tests.support.torch.each_op import EachOp
from tests.support.torch.models import same

pytestmark = pytest.mark.usefixtures("left_as_found")
FACTORS = (1.0, 1.0, 1e6, 1.0)  # the third overflows in float16


def trained(audited: bool, *what: Any) -> tuple[list[torch.Tensor], Any]:
    """Train, and return the losses and the final state, and the audit."""
    training = Training(*what)
    with audit(training.model, training.scaler) if audited else nullcontext() as found:
        losses = [training.step(factor) for factor in FACTORS]
    return [*losses, *training.state()], found


CASES = [
    ("mlp", "fp32", "plain", 1), ("mlp", "bf16", "foreach", 1),
    ("mlp", "fp16, torch's scaler", "fused", 1), ("mlp", "fp16", "foreach", 3),
    ("convolution", "fp32", "foreach", 1), ("convolution", "bf16", "fused", 1),
    ("convolution", "fp16", "plain", 2), ("convolution", "fp16, torch's scaler", "foreach", 1),
    ("transformer", "bf16", "plain", 1), ("transformer", "fp16", "fused", 1),
    ("checkpointed", "bf16", "fused", 1), ("checkpointed", "fp16", "foreach", 2),
]  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("what", CASES, ids=lambda what: "-".join(map(str, what)))
def test_a_training_under_audit_is_the_same_to_the_last_bit(what: tuple[Any, ...]) -> None:
    plain, _ = trained(False, *what)
    watched, found = trained(True, *what)
    assert same(plain, watched)
    assert found.steps == len(FACTORS) * what[3]
    assert [g.module for g in found.gradients]
    if what[1].startswith("fp16"):
        assert found.fault is not None, "the third step overflows"
        assert found.fault.kind == "overflow"


def test_an_audit_that_disturbs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = trained(False, "convolution", "bf16")

    def draws(t: torch.Tensor) -> torch.Tensor:
        torch.rand(1)
        return t

    monkeypatch.setattr(values, "comparable", draws)
    assert not same(plain, trained(True, "convolution", "bf16")[0])


def test_gradients_of_gradients_are_the_same() -> None:
    def run(audited: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4, requires_grad=True)
        with audit(net) if audited else nullcontext() as found:
            with autocast("cpu", torch.bfloat16):
                y = net(x).float().sum()
            (g,) = torch.autograd.grad(y, x, create_graph=True)
            g.square().sum().backward()
        assert not audited or found.steps == 2
        return [y, g, *(p.grad for p in net.parameters() if p.grad is not None)]

    assert same(run(False), run(True))


# What it says


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", ["mlp", "transformer"])
def test_the_numbers_are_those_that_hooks_see(model: str, dtype: str) -> None:
    training = Training(model, dtype)
    seen: dict[str, list[torch.Tensor]] = {}

    def see(name: str) -> Any:
        return lambda _, __, out: seen.setdefault(name, []).append(out.detach().clone())

    for name, part in training.model.named_modules():
        if not list(part.children()):
            part.register_forward_hook(see(name))
    with audit(training.model, training.scaler) as found:
        for factor in (1.0, 0.5):
            training.step(factor)
    rows = {r.module: r.magnitudes for r in found.results if r.direction == "forward"}
    assert len(seen) >= 3
    for name, outs in seen.items():
        exact = magnitudes(torch.cat([t.float().flatten() for t in outs]).numpy())
        said = rows[name]
        assert (said.bins, said.values, said.largest) == (exact.bins, exact.values, exact.largest)
        assert (said.inf, said.nan) == (exact.inf, exact.nan)


@pytest.mark.parametrize("kind", [polymp.torch.GradScaler, torch.amp.GradScaler])
def test_gradients_are_those_of_parameters_without_the_scale(kind: Any) -> None:
    """Measured before they are unscaled; powers of two, so that both are exact."""
    plain, scaled = Training(dtype="fp32"), Training(dtype="fp32")
    scaled.scaler = kind("cpu", 2.0**16)
    with audit(plain.model) as without:
        plain.step()
    with audit(scaled.model, scaled.scaler) as with_scale:
        scaled.step()
    assert (without.scale, with_scale.scale) == (1.0, 2.0**16)
    named = dict(plain.model.named_parameters())
    assert {g.module for g in without.gradients} == {*named}
    for g, h in zip(without.gradients, with_scale.gradients, strict=True):
        exact = magnitudes(named[g.module].grad.numpy())
        assert (g.magnitudes.bins, g.magnitudes.largest) == (exact.bins, exact.largest)
        assert (h.module, h.magnitudes) == (g.module, g.magnitudes)
    for one, two in zip(without.results, with_scale.results, strict=False):
        if one.direction == two.direction == "forward" and one.op == two.op == "linear":
            assert one.magnitudes == two.magnitudes


def test_each_backward_pass_has_its_own_scale() -> None:
    training = Training(dtype="fp16")
    with audit(training.model, training.scaler) as found:
        for _ in range(3):
            training.step()
    assert (found.steps, found.scale) == (3, 2.0**11), "it grew after two"
    again = Training(dtype="fp16")
    exact: dict[str, float] = {}
    for _ in range(3):
        scale = again.scaler.get_scale()
        again.scaler.scale(again.loss(again.x)).backward()
        for name, p in again.model.named_parameters():
            exact[name] = max(exact.get(name, 0.0), float(p.grad.abs().max()) / scale)
        again.scaler.step(again.optimizer)
        again.scaler.update()
        again.optimizer.zero_grad()
    assert {g.module: g.magnitudes.largest for g in found.gradients} == exact


def test_a_scale_of_zero_is_survived() -> None:
    training = Training(dtype="fp32")
    training.scaler = torch.amp.GradScaler("cpu", 0.0)
    with audit(training.model, training.scaler) as found:
        training.scaler.scale(training.loss(training.x)).backward()
    assert found.gradients[0].magnitudes.largest == 0.0


def test_without_a_model_ops_are_named_by_the_outermost_module_that_runs() -> None:
    training = Training("mlp", "bf16")
    with audit() as found:
        training.step()
    assert found.gradients == []
    assert {"0", "1", "2"} <= {r.module for r in found.results}


def test_several_models_and_gradient_passes_without_a_scaler_count_as_steps() -> None:
    net = nn.Linear(2, 2)
    with audit(net) as found:
        pass
    assert (found.steps, found.results, found.fault) == (0, [], None)
    with audit(net) as found:
        net(torch.ones(1, 2)).sum().backward()
        net(torch.ones(1, 2)).sum().backward()
    assert found.steps == 2
    (weight,) = (g for g in found.gradients if g.module == "weight")
    assert weight.magnitudes.values == 2 * 4
    assert weight.magnitudes.largest == 2.0, "accumulated in the second"


# What it is given


@pytest.mark.parametrize(("factor", "zeros"), [(1e-6, 0.5), (1e-7, 1.0)])
def test_a_model_in_float16_needs_a_scale_without_a_region_too(factor: float, zeros: float) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).half()
    x = torch.randn(4, 8).half()

    def step(scale: float = 1.0) -> Any:
        net.zero_grad()
        with audit(net) as found:
            (net(x).float().mean() * factor * scale).backward()
        return found.suggest()

    suggestion = step()
    share = max((p.grad == 0).float().mean() for p in net.parameters())  # type: ignore[union-attr]
    assert float(share) == pytest.approx(zeros, rel=0.5)
    assert "are zero in float16 at a loss scale of 1" in suggestion.reasons[0]
    assert not step(suggestion.init_scale)
    assert all((p.grad != 0).all() for p in net.parameters())  # type: ignore[union-attr]


def test_an_error_in_the_block_still_fills_it() -> None:
    with pytest.raises(RuntimeError, match="mine"), audit() as found:
        raise RuntimeError("mine", (torch.ones(2) * 3).shape)
    assert [r.magnitudes.largest for r in found.results] == [3.0]


@pytest.mark.parametrize("low", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_is_measured(low: torch.dtype) -> None:
    net = nn.Linear(2, 2)
    net.kept = nn.Parameter(torch.full((2, 2), 3.0).to(low), requires_grad=False)
    with audit(net) as found:
        net(torch.ones(1, 2)) * net.kept.to(torch.float32)
    assert found.results[-1].op == "mul"
    with audit() as found:
        made = torch.full((3,), 3.0).to(low)
        torch.full((3,), math.nan).to(low).to(torch.float32) * made.to(torch.float32)
    assert found.fault is not None


def test_what_has_no_numbers_to_measure_is_passed_over() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with audit() as found:
        torch.ones(0, 3) * 2
        torch.ones(2, dtype=torch.int32) * 2
        torch.ones(3, device="meta") * 2
        torch.eye(3).to_sparse() * 2
        with FakeTensorMode():
            torch.ones(3) * 2
    assert found.results == []
    table = nn.Embedding(5, 3, sparse=True)
    with audit(table) as found:
        table(torch.tensor([1, 2])).sum().backward()
    assert table.weight.grad.is_sparse
    assert found.gradients == []
    assert found.fault is None


def test_numbers_without_dimensions_and_without_gradients() -> None:
    with torch.inference_mode(), audit() as found:
        torch.tensor(-3.0) * 2
    assert found.results[0].magnitudes.largest == 6.0
    line = sys._getframe().f_lineno - 2
    assert found.results[0].source == f"test_audit.py:{line}", "of the user's code"
    with audit() as found, torch.no_grad():
        torch.ones(2, requires_grad=True) * 4
    assert found.results[0].magnitudes.largest == 4.0


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Have measurements wait on the device until they are read."""
    patch.setattr(torch.Tensor, "is_cpu", property(lambda _: False))


def test_ends_that_wait_on_a_device_are_those_of_their_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    _, once = trained(True, "mlp", "fp16", "plain", 1)
    as_on_a_gpu(monkeypatch)
    _, waited = trained(True, "mlp", "fp16", "plain", 1)
    assert len({m.magnitudes.largest for m in once.results}) > 6
    assert (waited.results, waited.gradients) == (once.results, once.gradients)


def test_another_thread_is_not_watched_nor_does_its_optimizer_blind_the_watch() -> None:
    stepping, seen = threading.Event(), threading.Event()
    weight = nn.Parameter(torch.ones(2))

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            stepping.set()
            assert seen.wait(10)
            weight.data.mul_(7)

    optimizer = Slow([weight])
    thread = threading.Thread(target=optimizer.step)
    with audit() as found:
        thread.start()
        assert stepping.wait(10)
        torch.ones(2) * 3
        seen.set()
        thread.join()
        torch.ones(2) * 5
    assert [r.magnitudes.largest for r in found.results] == [3.0, 5.0]


# Where the first value that is not finite comes from


def bad(net: nn.Module, *batches: torch.Tensor) -> Any:
    with audit(net) as found:
        for batch in batches:
            net(batch).relu().sum()
    return found.fault


def test_a_bad_batch_is_found_in_memory_that_was_used_before() -> None:
    """Storages are made where others were: what wrote there long ago made none of the batch."""
    net = nn.Linear(300, 300)
    for _ in range(3):
        with audit(net) as found:
            for at in range(6):
                batch = np.ones((2, 300), np.float32)
                batch[0] = math.nan if at == 5 else 1.0
                net(torch.from_numpy(batch)).relu().sum()
        assert found.fault.kind == "input"
        assert "a tensor that no op computed (float32 2x300)" in found.fault.why


def test_a_part_of_a_tensor_is_looked_at_by_itself() -> None:
    x = torch.ones(4, 3)
    x[3, 1] = math.nan
    fault = bad(nn.Linear(3, 3), *x.chunk(2))
    assert fault.kind == "input"
    assert bad(nn.Linear(3, 3), *x[:3].split(1)) is None


def test_a_bad_parameter_is_called_by_its_name() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with torch.no_grad():
        net[1].bias[2] = math.inf
    fault = bad(net, torch.ones(1, 3))
    assert (fault.kind, fault.module) == ("input", "1")
    assert fault.why.startswith("1.bias is not finite")


# What a gradient is


class Square(torch.autograd.Function):
    """The square, by a user's own formula."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return (x + x).mul_(gradient)


class Unseen(torch.autograd.Function):
    """The identity, whose backward no op computes, as one in Triton."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(gradient)
        made.numpy()[...] = gradient.numpy()
        return made


class Again(torch.autograd.Function):
    """A checkpoint of the user's: its backward runs the forward again, and a pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x * 3).pow(2).sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor | None:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = (x * 3).pow(2).sin()
        torch.autograd.backward(y, gradient)
        return x.grad


def checkpointed(x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    return checkpoint(lambda x: (x * 3).pow(2).sin(), x, use_reentrant=reentrant)  # type: ignore[no-any-return]


# Functions of a tensor, and ops that have gradients in its backward pass.
DIFFERENTIATED: dict[str, tuple[Any, str]] = {
    "pow": (lambda x: x.pow(2), "pow"),
    "abs": (torch.abs, "abs"),
    "relu": (torch.relu, "relu"),
    "gelu": (nn.functional.gelu, "gelu"),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), "clamp"),
    "where": (lambda x: torch.where(x > 0, x, x * 2), "where"),
    "std": (lambda x: x.std(-1), "std"),
    "own": (Square.apply, "mul"),
    "unseen": (lambda x: Unseen.apply(x.tanh()), "tanh"),
    "again": (Again.apply, "sin"),
    "checkpoint": (lambda x: checkpointed(x, reentrant=False), "sin"),
    "reentrant": (lambda x: checkpointed(x, reentrant=True), "sin"),
}


@pytest.mark.parametrize("own_seed", [False, True], ids=["loss", "own seed"])
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_are_what_is_linear_in_that_of_the_loss(name: str, own_seed: bool) -> None:
    """Factors, masks, and what is computed again are other values, as large as they were."""
    fn, op = DIFFERENTIATED[name]

    def largest(factor: float) -> dict[tuple[str, str, str], float]:
        torch.manual_seed(0)
        x = torch.randn(4, 8, requires_grad=True)
        with audit() as found:
            y = fn(x * 5)
            if own_seed:
                y.backward(torch.full_like(y, factor))
            else:
                (y.sum() * factor).backward()
        rows = [m for m in found.results if m.direction == "backward"]
        return {(m.op, m.spelling, m.source): m.magnitudes.largest for m in rows}

    once, scaled = largest(1.0), largest(2.0**10)
    assert op in {key[0] for key in once}
    assert "mul" in {key[0] for key in once}, "the first op of the forward, the last here"
    assert scaled == {key: 2.0**10 * size for key, size in once.items()}


def test_gradients_of_gradients_are_told_from_those_of_the_first_pass() -> None:
    x = torch.linspace(100.0, 200.0, 8).requires_grad_()
    with audit() as found:
        (g,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
        (g.pow(2).sum() * 2.0**-40).backward()
    assert found.steps == 2
    own = [m for m in found.backward if m.op == "pow" and m.magnitudes.largest < 1]
    assert own, "its factor 2 * g is of the first pass"


# What it leaves, and what it waits for


def test_nothing_is_left_behind() -> None:
    training = Training("transformer")
    before = len(hooks)
    with audit(training.model, training.scaler) as found:
        assert len(hooks) == before + 1
        training.step()
    assert len(hooks) == before
    assert torch._C._len_torch_dispatch_stack() == 0
    for p in training.model.parameters():
        assert not p._post_accumulate_grad_hooks
        assert not p._backward_hooks
    for part in training.model.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
    count = len(found.results)
    training.step()
    assert len(found.results) == count, "what runs afterwards is not watched"


def test_tensors_of_the_run_are_let_go() -> None:
    net = nn.Linear(4, 4)
    with audit(net) as found:
        x, seen = torch.ones(2, 4), []
        y = net(x)
        seen = [weakref.ref(x), weakref.ref(y)]
        y.sum().backward()
        del x, y
    gc.collect()
    assert [ref() for ref in seen] == [None, None]
    assert not [t for r in (*found.results, *found.gradients) for t in r if torch.is_tensor(t)]
    inside = weakref.ref(net)
    del net
    gc.collect()
    assert inside() is None


class Waits(EachOp):
    """Notes what the host reads: the op for it, and the methods that lead there."""

    OPS = ("_local_scalar_dense", "nonzero", "equal", "bincount")
    METHODS = ("item", "tolist", "__bool__", "__float__", "numpy", "cpu")

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(lambda op, *_: str(op) if op.overloadpacket.__name__ in self.OPS else None)
        self.patch = patch

    def watch(self) -> None:
        for name in self.METHODS:
            given = getattr(torch.Tensor, name)

            def noted(t: Any, *args: Any, name: str = name, given: Any = given) -> Any:
                self.seen.append(name)
                return given(t, *args)

            self.patch.setattr(torch.Tensor, name, noted)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_nothing_is_read_before_the_block_ends(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training("transformer", dtype, "fused")
    training.step()  # the scaler's first step makes things
    waits = Waits(monkeypatch)
    as_on_a_gpu(monkeypatch)
    with waits:
        with audit(training.model, training.scaler):
            waits.watch()
            training.step()
            training.step()
            monkeypatch.undo()
            during = [*waits.seen]
        assert during == []
        waits.watch()
        assert float(torch.ones(1)) == 1.0
    assert {"__float__", "aten._local_scalar_dense.default"} <= {*waits.seen}, "it can tell"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_is_not_waited_for() -> None:
    training = Training("transformer", "fp16", "fused")
    training.model.cuda()
    training.x, training.scaler = training.x.cuda(), GradScaler("cuda")
    training.step()
    with audit(training.model, training.scaler) as found:
        training.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            training.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert found.steps == 2
    assert len(found.gradients) == len([*training.model.parameters()])


def test_gradients_that_are_all_zero_in_bfloat16_have_no_scale_that_fits() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).to(torch.bfloat16)
    with polymp.torch.audit(model) as audit:
        (model(torch.ones(4, 8, dtype=torch.bfloat16)).sum() * 1e-44).backward()
    assert not audit.suggest()


def test_a_step_that_raises_hides_nothing_that_comes_after_the_next_step() -> None:
    class Raises(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("no step")

    model, x = nn.Linear(4, 1), torch.ones(2, 4)
    bad, good = Raises(model.parameters(), 0.1), torch.optim.SGD(model.parameters(), 0.1)
    with audit(model) as found:
        model(x).sum().backward()
        with pytest.raises(RuntimeError, match="no step"):
            bad.step()
        good.step()
        (x * 2).exp()
    assert [m.op for m in found.results][-2:] == ["mul", "exp"]


def test_a_view_of_a_buffer_with_an_odd_number_of_bytes_is_measured() -> None:
    x = torch.randn(8, 16)
    with audit() as found:
        pool = torch.zeros(8 * 16 * 2 + 1, dtype=torch.uint8)
        low = pool[:256].view(torch.bfloat16).view(8, 16)
        low.copy_((x * 1.1).bfloat16()).mul_(low)
    assert "mul" in [m.op for m in found.results]


def test_a_second_result_of_an_op_is_no_value_of_it() -> None:
    """`cross_entropy` also makes the total weight of its targets: the number of tokens."""
    logits, targets = torch.randn(70_000, 4), torch.zeros(70_000, dtype=torch.long)
    with polymp.torch.audit() as a:
        nn.functional.cross_entropy(logits, targets)
    (loss,) = (m.magnitudes for m in a.results if m.op == "nll_loss")
    assert loss.values == 1
    assert loss.largest < 10
    assert loss.shares("float16").overflow == 0


# Closures, masks, scales that do not fit, and other tools beside it


def test_gradients_that_overflow_by_a_large_scale_need_another_scale() -> None:
    """The loss is cast up after the model, so the first Inf is made by a cast on the way in."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    scaler, optimizer = GradScaler("cpu", init_scale=2.0**24), torch.optim.SGD(model.parameters())
    with audit(model, scaler) as a:
        with autocast("cpu", torch.float16):
            loss = model(x).float().pow(2).mean() * 50
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert a.fault.direction == "backward"
    suggestion = a.suggest()
    assert suggestion.dtype is None
    assert suggestion.init_scale is not None
    assert suggestion.init_scale < 2.0**16


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SGD])
def test_what_a_closure_runs_is_measured(kind: type[torch.optim.Optimizer]) -> None:
    def trained(watched: bool) -> tuple[list[torch.Tensor], Any]:
        torch.manual_seed(0)
        net, x = nn.Linear(4, 2), torch.randn(8, 4)
        optimizer: Any = kind(net.parameters(), lr=0.1)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            with autocast("cpu", torch.bfloat16):
                loss = net(x).float().square().mean()
            loss.backward()
            return loss

        with audit(net) if watched else nullcontext() as found:
            optimizer.step(closure)
        return [p.detach() for p in net.parameters()], found

    (plain, _), (same, found) = trained(False), trained(True)
    assert all(map(torch.equal, plain, same))
    ops = [m.op for m in found.results if m.direction == "forward"]
    assert ops == ["linear", "pow", "mean"]
    assert {m.module for m in found.gradients} == {"weight", "bias"}


def test_an_audit_inside_an_explanation_leaves_no_rows_of_its_own() -> None:
    net, x = nn.Linear(4, 2), torch.randn(8, 4)

    def rows(audited: bool) -> list[tuple[str, str]]:
        net.zero_grad()
        with polymp.torch.explain(model=net) as report, autocast("cpu", torch.bfloat16):
            with audit(net) if audited else nullcontext():
                net(x).sum().backward()
        return [(call.op, call.direction) for call in report]

    assert rows(audited=True) == rows(audited=False)


def test_a_mask_that_float16_rounds_to_inf_is_no_fault() -> None:
    """Scores and the lowest float16: below that is -Inf, of which a softmax makes 0 as well."""
    scores, mask = torch.full((4, 4), -20.0), torch.full((4, 4), torch.finfo(torch.float16).min)
    mask = mask.half().triu(1)

    def attend(weight: torch.Tensor) -> torch.Tensor:
        return (scores.half() + mask * weight.half()).softmax(-1)

    assert locate(attend, torch.ones(())) is None
    assert locate(lambda: 1 / (scores.half() * 1e4)) is not None, "x / Inf hides an overflow"


def spread(p: torch.Tensor) -> torch.Tensor:
    return (p.half() - p.half().mean()) / (p.half().std() + 1e-8)


SCALED: dict[str, tuple[Any, torch.Tensor, bool]] = {
    "a quotient": (lambda p: p.half() / (p.half().abs().amax() + 1e-8), torch.zeros(3, 4), True),
    "a root": (lambda p: (p.half() + 1e-12).sqrt(), torch.zeros(3, 4), True),
    "a spread": (spread, torch.ones(3, 4), False),
    "two products": (lambda p: (p.half() * 3e4).float() * 1e6, torch.zeros(3, 4), False),
}


@pytest.mark.filterwarnings("ignore:GradScaler is not needed")
@pytest.mark.parametrize("name", SCALED)
def test_suggestions_end(name: str) -> None:
    """Each is followed; a scale is not halved again and again: that which fits was measured."""
    forward, x, helps = SCALED[name]
    policy, scale, dtype, seen = polymp.policy("torch-cpu"), 2.0**16, torch.float16, list[Any]()
    for _ in range(8):
        p, scaler = nn.Parameter(x.clone()), GradScaler("cpu", init_scale=scale)
        with audit(None, scaler) as found:
            with autocast("cpu", dtype, policy=policy):
                loss = forward(p).sum().float()
            scaler.scale(loss).backward()
        suggestion = found.suggest(policy)
        seen.append(suggestion)
        if not suggestion:
            break
        policy, scale = suggestion.apply(policy), suggestion.init_scale or scale
        dtype = torch.bfloat16 if suggestion.dtype else dtype
    assert not seen[-1]
    assert sum(one.init_scale is not None for one in seen) <= 2
    assert bool(p.grad.isfinite().all()) == helps
    assert helps or seen[-1].reasons[0].endswith("asks for float16: change that.")


def test_no_scale_is_said_to_fit_where_gradients_overflowed_on_the_way() -> None:
    """The first op that overflows hides how large later gradients are, and the true scale is 256.

    An op of the backward pass multiplies by 300, after others have made Inf already.
    """
    torch.manual_seed(0)
    net, x, scale = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 4)), torch.randn(4, 8), 2.0**16
    for _ in range(4):
        scaler = GradScaler("cpu", init_scale=scale)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        with audit(net, scaler) as found:
            for _ in range(2):
                optimizer.zero_grad()
                with autocast("cpu", torch.float16):
                    loss = (net(x) * 300).norm(dim=-1).mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        suggestion = found.suggest("torch-cpu")
        assert (found.fitting_scale() is None) == (int(scaler.skipped_steps) > 0)
        if not suggestion:
            break
        scale = suggestion.init_scale or 0.0
        assert suggestion.reasons[0].endswith(f"; try {scale:g}.")
    assert not int(scaler.skipped_steps)
    assert 2.0**4 < scale < 2.0**16


def test_the_fitting_scale_is_of_gradients_that_float16_holds() -> None:
    """A float32 gradient of 2**20 does not keep the scale down."""
    net, x = nn.Linear(4, 1), torch.ones(1, 4)
    with audit(net) as found:
        with autocast("cpu", torch.float16):
            low = net(x)
        (low.float() * torch.full((1, 1), 2.0**20) * 2.0**-20).sum().backward()
    largest = max(m.magnitudes.largest for m in found.backward if m.run == "float16")
    assert largest == 1
    assert found.fitting_scale() == 2.0**14
    with audit(net) as found:
        with autocast("cpu", torch.float16):
            loss = (net(x) * 1e-4).sum()
        loss.backward()  # its own gradient is 1, and times the scale
    assert (loss.dtype, found.fitting_scale()) == (torch.float16, 2.0**14)


def test_what_was_not_measured_gets_no_suggestion() -> None:
    with (block := audit()):
        pass
    for unused in (block, audit(nn.Linear(2, 2))):
        with pytest.raises(ValueError, match="nothing was measured"):
            unused.suggest()
    with pytest.raises(TypeError, match=r"around steps, and needs .* a GradScaler, got 0\.5"):
        audit(nn.Linear(2, 2), 0.5)
    with pytest.raises(RuntimeError, match="was entered before"), block:
        raise AssertionError("entered")
    with (again := audit()), pytest.raises(RuntimeError, match="was entered before"), again:
        raise AssertionError("entered")
    sgd = torch.optim.SGD(nn.Linear(2, 2).parameters())
    for no_module, said in ((sgd, r"SGD \( Parameter .* \)"), ("net", r"'net'")):
        with pytest.raises(TypeError, match=rf"torch.nn.Module, got {said}\. It is .*with audit\("):
            audit(no_module)


def test_only_what_ran_ops_without_a_fault_is_called_healthy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert locate(lambda x: x**0.5, 2.0) is None
    assert "the step ran no op of torch on floats in this thread" in capsys.readouterr().err
    assert locate(lambda: torch.ones(3) / 0) is not None
    assert not capsys.readouterr().err


@pytest.mark.parametrize("tool", ["audit", "explain", "locate", "record"])
def test_no_tensor_is_left_when_a_tool_has_ended(tool: str) -> None:
    """And none waits for Python's collector, which may come many steps later."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tools: Any = {"audit": audit, "explain": explain, "record": partial(record, None)}

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        with autocast("cpu", torch.bfloat16):
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    def looked_at() -> int:
        if tool == "locate":
            assert locate(step, model=model) is None
        else:
            with tools[tool](model=model):
                step()
        return sum(isinstance(it, torch.Tensor) for it in gc.get_objects())

    looked_at()
    gc.collect()
    gc.disable()
    try:
        assert len({looked_at() for _ in range(3)}) == 1
    finally:
        gc.enable()
