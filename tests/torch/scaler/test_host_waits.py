"""`GradScaler` does not make the host wait: values read on the CPU, and copies from a GPU made up.

Whole iterations, many of them, with overflows and growth; only the first may wait, for it makes
things. tests/torch/autocast/test_gpu.py has torch's own check on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import optim
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from polymp import scaling
from polymp.backends.torch.compat import accelerators
from polymp.backends.torch.scaler import device_state, unscale
from polymp.backends.torch.scaler.device_state import AsyncRead, DeviceState
from polymp.scaling import ScaleRule, ScaleState
from polymp.torch import GradScaler
from tests.support.torch.each_op import EachOp
from tests.support.torch.training import Loop

STEPS = 64
BAD = (0, 7, 8, 9, 30, 63)  # iterations with Inf,
IN_LOSS = (0, 8, 30)  # where the loss itself has it
Make = Callable[[Any], optim.Optimizer]

# What never waits after the first iteration: fused optimizers, which skip by themselves.
FREE: dict[str, Make] = {
    "SGD, fused": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam, fused": partial(optim.Adam, fused=True),
    "AdamW, fused": partial(optim.AdamW, fused=True),
    "Adagrad, fused": partial(optim.Adagrad, fused=True),
}


def reads() -> EachOp:
    return EachOp(lambda op, *_: op is torch.ops.aten._local_scalar_dense.default or None)


def backward(scaler: Any, weights: list[torch.Tensor], factor: float) -> None:
    x = weights[0].detach() * 0 + factor
    scaler.scale(sum((w * x).square().sum() for w in weights)).backward()


def loop(make: Make, *, clip: bool, kind: Any = GradScaler) -> tuple[list[int], Any]:
    """Reads in each iteration, and the scaler in the end."""
    weights = [torch.full((3, 3), 0.5, requires_grad=True) for _ in range(3)]
    optimizer = make(weights)
    scaler = kind("cpu", 4.0, growth_interval=5)
    counts = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with reads() as read:
            backward(scaler, weights, float("inf") if step in IN_LOSS else 1e-3)
            if step in BAD:
                weights[1].grad[0, 0] = float("inf")
            if clip:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if step % 10 == 0 and kind is GradScaler:  # nothing waits before they are read
                scaler.step_skipped(optimizer), scaler.skipped_steps
        counts.append(len(read.seen))
    for w in weights:
        assert w.isfinite().all()
        assert not torch.equal(w, torch.full((3, 3), 0.5))
    return counts, scaler


@pytest.mark.one_in(3)
@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("name", FREE)
def test_nothing_is_read_after_the_first_iteration(name: str, clip: bool) -> None:
    counts, scaler = loop(FREE[name], clip=clip)
    assert counts[0] <= 1
    assert counts[1:] == [0] * (STEPS - 1)
    assert scaler.skipped_steps.item() == len(BAD)
    rule, state = ScaleRule(interval=5), ScaleState(4.0)
    for step in range(STEPS):
        state = scaling.step(rule, state, step not in BAD, loss_finite=step not in IN_LOSS)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == state[:2]


@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize(
    "make", [partial(optim.SGD, lr=0.1), partial(optim.SGD, lr=0.1, foreach=True)]
)
def test_on_the_host_one_value_is_read_in_a_step_as_by_torch(make: Make, clip: bool) -> None:
    ours, scaler = loop(make, clip=clip)
    # A second one says, where something was found, whether it was in the loss.
    assert ours == [2 if step in BAD else 1 for step in range(STEPS)]
    assert scaler.skipped_steps.item() == len(BAD)
    theirs, _ = loop(make, clip=clip, kind=torch.amp.GradScaler)
    assert theirs == [1] * STEPS


def test_the_count_notices_reads() -> None:
    t = torch.ones(())
    for ask in (t.item, lambda: bool(t), lambda: float(t), lambda: int(t)):
        with reads() as read:
            ask()
        assert len(read.seen) == 1


# --- on a device that is not here ----------------------------------------------------------------


class NeverThere:
    """An event of a GPU that is for ever behind."""

    def __init__(self, *_: Any) -> None: ...

    def record(self) -> None: ...

    def query(self) -> bool:
        return False


def waits(op: Any, args: Any, kwargs: Any) -> str | None:
    """Name the way in which a call would wait on a GPU: a read value, or a copy to the CPU."""
    if op is torch.ops.aten._local_scalar_dense.default:
        return "read"
    to_cpu = str(kwargs.get("device", "")) == "cpu"
    if op is torch.ops.aten._to_copy.default and to_cpu and args[0].device.type == "cuda":
        return "late" if kwargs.get("non_blocking") else "copy"
    return None


def on_a_fake_gpu(name: str) -> tuple[optim.Optimizer, GradScaler]:
    weights = [torch.ones((3, 3), device="cuda", requires_grad=True) for _ in range(3)]
    optimizer = FREE[name](weights)
    for w in weights:
        w.grad = torch.ones_like(w)
    optimizer.step()  # makes the state
    return optimizer, GradScaler("cuda", growth_interval=5)


def run(optimizer: optim.Optimizer, scaler: GradScaler, *, steps: int) -> None:
    for _ in range(steps):
        scaler.scale(torch.ones((), device="cuda"))  # autograd needs a true GPU
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("name", ["Adam, fused", "AdamW, fused"])
def test_on_a_fake_gpu_nothing_waits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have no values: whatever reads one raises."""
    monkeypatch.setattr(torch, "Event", NeverThere)
    monkeypatch.setattr(accelerators, "cuda_missing", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with FakeTensorMode():
        optimizer, scaler = on_a_fake_gpu(name)
        with EachOp(waits) as waiting:
            run(optimizer, scaler, steps=12)
    assert waiting.seen == ["late"]  # the copy that an AsyncRead asks for, and never reads


def test_the_fake_gpu_notices_a_wait() -> None:
    with FakeTensorMode(), EachOp(waits) as waiting:
        t = torch.ones((), device="cuda")
        t.cpu()
        unscale.moved(t, torch.device("cpu"))
        t.to("cpu", non_blocking=True)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            t.item()
    assert waiting.seen == ["copy", "copy", "late", "read"]


def copies(op: Any, args: Any, kwargs: Any) -> str | None:
    """Tensors that are made of numbers or brought over from the host: none can be captured.

    `torch.tensor(1.0, device="cuda")` makes one on the CPU and copies it.
    """
    inputs = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
    return str(op) if any(t.device.type == "cpu" for t in inputs) else None


@pytest.mark.parametrize("name", ["Adam, fused", "AdamW, fused"])
def test_nothing_comes_over_from_the_host_in_a_capture(name, monkeypatch) -> None:
    """Not in the first `scale`, which makes the state, nor in the first step on the device."""
    monkeypatch.setattr(accelerators, "cuda_missing", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with FakeTensorMode():
        optimizer, scaler = on_a_fake_gpu(name)
        scaler._init_counts = (3, 1, 7)  # as a state that was loaded before
        with EachOp(copies) as seen:
            run(optimizer, scaler, steps=6)
    assert seen.seen == []


def test_a_copy_from_the_host_is_seen() -> None:
    with FakeTensorMode(), EachOp(copies) as seen:
        torch.tensor(1.0, device="cuda")
    assert "aten._to_copy.default" in seen.seen


class Graph(TorchDispatchMode):
    """Records ops, and runs them again on the same memory, without Python: as CUDA graphs do."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        self.ops.append((op, args, kwargs or {}, made))
        return made

    def replay(self) -> None:
        with torch.no_grad():
            for op, args, kwargs, made in self.ops:
                again = op(*args, **kwargs)
                pairs = zip(*map(torch.utils._pytree.tree_leaves, (made, again)), strict=True)
                for old, new in pairs:
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.data.copy_(new)


WHOLE = [("iterate", name, False) for name in ("SGD, fused", "Adam, fused")]


@pytest.mark.parametrize(
    ("captured", "name", "clip"),
    [*WHOLE, *(("forward_and_backward", "SGD, host", clip) for clip in (False, True))],
)
def test_what_is_replayed_is_what_eager_code_does(captured: str, name: str, clip: bool) -> None:
    """An iteration, or a graph that only scales, which notes what it finds when it is replayed."""

    def run(graphed: bool) -> list[Any]:
        make = FREE.get(name, partial(optim.SGD, lr=0.1))
        loop, graph, seen = Loop(make, clip=clip), Graph(), []
        loop.iterate()
        part = getattr(loop, captured)
        with pytest.MonkeyPatch.context() as patch:
            if graphed:
                patch.setattr(DeviceState, "_capturing", lambda self: True)
            with graph if graphed else nullcontext():
                part()
        for step in range(60):
            loop.spoil.fill_({7: 1e38, 20: float("inf"), 21: float("nan")}.get(step, 1.0))
            graph.replay() if graphed else part()
            if captured != "iterate":
                loop.finish()
            seen.append(loop.noted())
        assert name != "SGD, host" or loop.scaler._recall() is not None
        return seen

    eager = run(False)
    assert run(True) == eager
    assert (eager[-1][0]["skipped"], eager[21][0]["spoiled"]) == (3, 2)


# Ops that start nothing on a device.
FREE_OF_CHARGE = "view unbind select slice detach empty alias profiler record".split()


def launches(kind: Any, count: int, steps: int = 24, **options: Any) -> list[tuple[int, ...]]:
    """In `scale`, `step` and `update` of a fused optimizer; one for a list of tensors."""
    weights = [torch.ones(3, requires_grad=True) for _ in range(count)]
    optimizer = torch.optim.AdamW(weights, fused=True)
    scaler, seen = kind("cpu", **options), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = sum(w.sum() for w in weights)
        parts = [
            EachOp(lambda op, *_: not any(free in str(op) for free in FREE_OF_CHARGE))
            for _ in range(3)
        ]
        with parts[0]:
            scaled = scaler.scale(loss)
        scaled.backward()
        with parts[1]:
            scaler.step(optimizer)
        with parts[2]:
            scaler.update()
        seen.append(tuple(sum(part.seen) for part in parts))
    return seen


@pytest.mark.parametrize("count", [4, 300])
def test_launches_of_a_fused_step(count: int) -> None:
    theirs = launches(torch.amp.GradScaler, count)[-1]
    assert theirs[::2] == (1, 1)
    ours = launches(GradScaler, count)
    # Once what was copied to the host has said that the scale is above 1.
    settled = ours[8:]
    assert {row[0] for row in ours[1:]} == {2}
    assert {row[1] for row in settled} == {theirs[1] - 1}
    # Every fourth update sends the state to the host, in one piece; the copy is none here.
    assert [row[2] for row in settled] == [5 + (at % 4 == 3) for at in range(8, 24)]
    assert {row[1] for row in launches(GradScaler, count, min_scale=1.0)[1:]} == {theirs[1] - 1}


# --- the copy of a scale that the host reads later ------------------------------------------------


# What was found, and what of it in the loss: the finding of a loss is one of the step.
FOUND = ((0, None), (1, None), (0, 0), (1, 0), (1, 1))


def after(rule: ScaleRule, state: ScaleState, found: tuple[int, int | None]) -> ScaleState:
    return scaling.step(rule, state, not found[0], loss_finite=not found[1])


class Late:
    """An event that comes after it was asked for so many times."""

    waits: ClassVar[list[int]] = []  # of the events still to be made

    def __init__(self, *_: Any) -> None:
        self.left = Late.waits.pop(0) if Late.waits else 0

    def record(self) -> None: ...

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0

    def synchronize(self) -> None: ...


class FarAway(torch.Tensor):
    """A tensor that says it is on a GPU; its copies to the CPU are true ones."""

    @property
    def device(self) -> Any:  # type: ignore[override]
        return torch.device("cuda:0")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return torch.device("cuda:0")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result.clone() if isinstance(result, torch.Tensor) else result


def tensors(state: ScaleState, kind: type[torch.Tensor]) -> list[torch.Tensor]:
    made = (
        torch.tensor(state.scale), torch.tensor(state.tracker, dtype=torch.int32),
        torch.tensor(device_state.counted(state), dtype=torch.float32),
    )  # fmt: skip
    return [t.as_subclass(kind) for t in made]


# A bound that float32 does not hold; `checked` rounds it, and the scale comes to rest on it.
THOUSANDTH = scaling.checked(ScaleRule(2.0, 0.1, 1, 1e-3))


@given(
    st.lists(st.sampled_from(FOUND), min_size=1, max_size=60),
    st.lists(st.integers(0, 9), max_size=20),
    st.sampled_from((ScaleRule(interval=2), ScaleRule(1.1, 0.7, 3), THOUSANDTH)),
    st.booleans(),
)
@example([(0, None)] * 5 + [(1, None)] * 7 + [(0, None)], [], THOUSANDTH, False)
def test_its_bound_is_never_above_the_scale(history, waits, rule, far) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Event", Late)
        patch.setattr(Late, "waits", list(waits))
        watch, state, past = AsyncRead(), ScaleState(16.0), []
        assert watch.at_least(rule.backoff) == 0
        for found in history:
            state = after(rule, state, found)
            past.append(state)
            new = watch.updated(*tensors(state, FarAway if far else torch.Tensor))
            assert watch.at_least(rule.backoff) <= state.scale
            if watch.seen is None:
                assert not new
            else:  # it is a state that was there, as long ago as it says
                assert past[-1 - watch.age] == watch.seen
            if not far:
                assert (watch.seen is not None) == (len(past) > 4)
                assert watch.seen is None or watch.age <= 4


def test_it_forgets_the_age_and_is_seen() -> None:
    """The oracle above notices a AsyncRead that takes what arrives for new."""

    class Ageless(AsyncRead):
        def updated(self, *state: torch.Tensor) -> bool:
            new = super().updated(*state)
            self.age = 0
            return new

    rule, state, watch = ScaleRule(), ScaleState(16.0), Ageless()
    above = False
    for _ in range(12):
        state = after(rule, state, (1, None))
        watch.updated(*tensors(state, torch.Tensor))
        above |= watch.at_least(rule.backoff) > state.scale
    assert above


def test_counts_beyond_float32_s_whole_numbers_come_over_exactly() -> None:
    watch = AsyncRead()
    tracker = torch.tensor(2**31 - 1, dtype=torch.int32)
    for _ in range(5):
        watch.updated(torch.tensor(8.0), tracker, torch.tensor([1.0, 1.0, 2.0**24]))
    assert watch.seen == ScaleState(8.0, 2**31 - 1, 1, 0, 2**24)
