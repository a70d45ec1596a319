"""`GradScaler` does not make the host wait: values read on the CPU, and on a GPU torch's own check.

Whole iterations, many of them, with overflows and growth; only the first may wait, for it makes
things.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import optim
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from polymp import scaling
from polymp.backends.torch import compat, unscaling
from polymp.scaling import ScaleRule, ScaleState
from polymp.torch import GradScaler, autocast

STEPS = 64
BAD = (0, 7, 8, 9, 30, 63)  # iterations with Inf,
IN_LOSS = (0, 8, 30)  # where the loss itself has it
Make = Callable[[Any], optim.Optimizer]

# What never waits after the first iteration: the optimizer, and what skips its step.
FREE: dict[str, tuple[Make, dict[str, Any]]] = {
    "SGD, fused": (partial(optim.SGD, lr=0.1, momentum=0.9, fused=True), {}),
    "Adam, fused": (partial(optim.Adam, fused=True), {}),
    "AdamW, fused": (partial(optim.AdamW, fused=True), {}),
    "Adagrad, fused": (partial(optim.Adagrad, fused=True), {}),
    "Adam, capturable": (partial(optim.Adam, capturable=True), {}),
    "NAdam, capturable foreach": (partial(optim.NAdam, capturable=True, foreach=True), {}),
    "SGD, on device": (partial(optim.SGD, lr=0.1), {"skip_on": "device"}),
    "SGD, momentum, foreach, on device": (
        partial(optim.SGD, lr=0.1, momentum=0.9, foreach=True),
        {"skip_on": "device"},
    ),
    "Muon, on device": (partial(optim.Muon, lr=0.1), {"skip_on": "device"}),
}


@pytest.fixture(autouse=True)
def capturable_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch allows `capturable` on accelerators only, but what it does works on the CPU."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.optim.") and hasattr(module, "_get_capturable_supported_devices"):
            monkeypatch.setattr(
                module, "_get_capturable_supported_devices", lambda *_, **__: ["cpu", "cuda"]
            )


class Reads(TorchDispatchMode):
    """Counts values that the host reads: calls of `item` and its like, and the op that they are."""

    def __init__(self) -> None:
        super().__init__()
        self.items = self.ops = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += op is torch.ops.aten._local_scalar_dense.default
        return op(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        self.patch = pytest.MonkeyPatch()
        item = torch.Tensor.item

        def counted(tensor: torch.Tensor) -> Any:
            self.items += 1
            return item(tensor)

        self.patch.setattr(torch.Tensor, "item", counted)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        self.patch.undo()
        super().__exit__(*exc)


def backward(scaler: Any, weights: list[torch.Tensor], factor: float) -> None:
    x = weights[0].detach() * 0 + factor
    scaler.scale(sum((w * x).square().sum() for w in weights)).backward()


def loop(
    make: Make, options: dict[str, Any], *, clip: bool, kind: Any = GradScaler
) -> tuple[list[int], Any]:
    """Reads in each iteration, and the scaler in the end."""
    weights = [torch.full((3, 3), 0.5, requires_grad=True) for _ in range(3)]
    optimizer = make(weights)
    scaler = kind("cpu", 4.0, growth_interval=5, **options)
    counts = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with Reads() as reads:
            backward(scaler, weights, float("inf") if step in IN_LOSS else 1e-3)
            if step in BAD:
                grad = weights[1].grad
                assert grad is not None
                grad[0, 0] = float("inf")
            if clip:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if step % 10 == 0 and kind is GradScaler:  # nothing waits before they are read
                scaler.found_inf(optimizer), scaler.step_skipped(optimizer), scaler.skipped_steps
        counts.append(max(reads.items, reads.ops))
    for w in weights:
        assert w.isfinite().all()
        assert not torch.equal(w, torch.full((3, 3), 0.5))
    return counts, scaler


@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("name", FREE)
def test_nothing_is_read_after_the_first_iteration(name: str, clip: bool) -> None:
    make, options = FREE[name]
    counts, scaler = loop(make, options, clip=clip)
    assert counts[0] <= 1
    # The first step is skipped: the one after it makes the state.
    assert sum(counts[1:2]) <= 1
    assert counts[2:] == [0] * (STEPS - 2)
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
    ours, scaler = loop(make, {}, clip=clip)
    # A second one says, where something was found, whether it was in the loss.
    assert ours == [2 if step in BAD else 1 for step in range(STEPS)]
    assert scaler.skipped_steps.item() == len(BAD)
    assert loop(make, {"check_loss": False}, clip=clip)[0] == [1] * STEPS
    theirs, _ = loop(make, {}, clip=clip, kind=torch.amp.GradScaler)
    assert theirs == [1] * STEPS


def test_the_count_notices_reads() -> None:
    t = torch.ones(())
    for read in (t.item, lambda: bool(t), lambda: float(t), lambda: int(t)):
        with Reads() as reads:
            read()
        assert max(reads.items, reads.ops) == 1


# --- on a device that is not here ----------------------------------------------------------------


class NeverThere:
    """An event of a GPU that is for ever behind."""

    def __init__(self, *_: Any) -> None: ...

    def record(self) -> None: ...

    def query(self) -> bool:
        return False


class Waiting(TorchDispatchMode):
    """Notes what would wait on a GPU: values read, and copies to the CPU that block."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op is torch.ops.aten._local_scalar_dense.default:
            self.seen.append("read")
        to_cpu = str(kwargs.get("device", "")) == "cpu"
        if op is torch.ops.aten._to_copy.default and to_cpu and args[0].device.type == "cuda":
            self.seen.append("late" if kwargs.get("non_blocking") else "copy")
        return op(*args, **kwargs)


@pytest.mark.parametrize("name", ["SGD, on device", "Adam, capturable", "Muon, on device"])
def test_on_a_fake_gpu_nothing_waits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have no values: whatever reads one raises."""
    monkeypatch.setattr(torch, "Event", NeverThere)
    monkeypatch.setattr(compat, "cuda_missing", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    make, options = FREE[name]
    with FakeTensorMode():
        weights = [torch.ones((3, 3), device="cuda", requires_grad=True) for _ in range(3)]
        optimizer = make(weights)
        for w in weights:
            w.grad = torch.ones_like(w)
        optimizer.step()  # makes the state
        scaler = GradScaler("cuda", growth_interval=5, **options)
        with Waiting() as waiting:
            for _ in range(12):
                scaler.scale(torch.ones((), device="cuda"))  # autograd needs a true GPU
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
    assert waiting.seen == ["late"]  # the copy that the Watch asks for, and never reads


def test_the_fake_gpu_notices_a_wait() -> None:
    with FakeTensorMode(), Waiting() as waiting:
        t = torch.ones((), device="cuda")
        t.cpu()
        unscaling.moved(t, torch.device("cpu"))
        t.to("cpu", non_blocking=True)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            t.item()
    assert waiting.seen == ["copy", "copy", "late", "read"]


def test_in_a_graph_that_is_replayed_nothing_the_host_knew_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the inverse scale as a number, nor that the scale is above 1, nor the state after."""
    capturing = False
    monkeypatch.setattr(compat, "cuda_missing", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    with FakeTensorMode():
        scaler = GradScaler("cuda", 4.0)
        scaler.scale(torch.ones((), device="cuda"))
        assert scaler._recall() is not None
        assert not scaler._may_be_below_one()
        capturing = True
        assert scaler._recall() is None
        assert scaler._may_be_below_one()
        capturing = False  # replayed from now on
        assert scaler._recall() is None
        assert scaler._may_be_below_one()


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.fixture
def syncs_raise() -> Iterator[Callable[[bool], None]]:
    def switch(on: bool) -> None:
        torch.cuda.set_sync_debug_mode("error" if on else "default")

    yield switch
    switch(False)


def train_on_gpu(make: Make, options: dict[str, Any], switch: Callable[[bool], None]) -> Any:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(16, 16, bias=False), torch.nn.ReLU(), torch.nn.Linear(16, 16, bias=False)
    ).cuda()
    optimizer = make(net.parameters())
    scaler = GradScaler("cuda", 2.0**10, growth_interval=5, on_stuck="raise", **options)
    x = torch.randn(4, 16, device="cuda")
    inf = torch.full_like(x, float("inf"))
    for step in range(STEPS):
        # The step that makes the state is the first good one.
        switch(step > 1)
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = net(inf if step in BAD else x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        skipped = scaler.step_skipped(optimizer), scaler.found_inf(optimizer), scaler.skipped_steps
        scaler.update()
        assert all(t.is_cuda for t in skipped)
    switch(False)
    assert scaler.skipped_steps.item() == len(BAD)
    assert all(p.isfinite().all() for p in net.parameters())
    return scaler


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", FREE)
def test_on_a_gpu_nothing_waits(name: str, syncs_raise: Callable[[bool], None]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        train_on_gpu(*FREE[name], syncs_raise)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_the_host_waits_where_it_is_told_to(
    syncs_raise: Callable[[bool], None],
) -> None:
    """The check above can fail."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        with pytest.raises(RuntimeError, match="synchronizing"):
            train_on_gpu(partial(optim.SGD, lr=0.1), {"skip_on": "host"}, syncs_raise)
