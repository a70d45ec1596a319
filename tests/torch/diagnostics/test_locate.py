"""`locate`: the op that is named, what it was given, and all that is put back."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import polymp.torch
from polymp.backends.torch.diagnostics import locate as module
from polymp.torch import autocast, locate
from tests.support.reports import operand
from tests.support.sizes import LONG
from tests.support.torch.audit_trainings import OPTIMIZERS, Training, same
from tests.support.torch.ranks import bits, launch
from tests.support.torch.sharded_models import CUTS, Cut, cuts, data

PATIENCE = timedelta(seconds=1)
# One that has plain tensors and one that has DTensors; in `make test-long` all.
MODELS = tuple(cuts(2)) if LONG else ("ddp", "fsdp2")


def _step(cut: Cut, optimizer: torch.optim.Optimizer) -> Callable[[float], None]:
    def step(factor: float) -> None:
        optimizer.zero_grad()
        x, t = (part.chunk(cut.shares)[cut.share] for part in data(0))
        cut.model(x * factor, t).backward()
        optimizer.step()

    return step


def _state(cut: Cut) -> list[Any]:
    return [bits(cut.full()[name]) for name in sorted(cut.full())]


def _message(call: Callable[[], object]) -> str:
    try:
        return f"returned {call()}"
    except RuntimeError as error:
        return str(error)


def replayed(name: str, rank: int) -> dict[str, Any]:
    """A step of a model in pieces, replayed by all ranks, by the first alone, and by all again."""
    cut = CUTS[name]()
    optimizer = torch.optim.SGD(cut.model.parameters(), lr=0.5, foreach=False)
    step = _step(cut, optimizer)
    step(1.0)
    before = _state(cut)
    notes: dict[str, Any] = {"good": locate(step, 1.0), "bad": locate(step, 8e37)}
    module._Meeting.patience = PATIENCE
    dist.barrier()
    notes["alone"] = _message(lambda: locate(step, 1.0)) if rank == 0 else ""
    dist.barrier()
    module._Meeting.patience = timedelta(seconds=60)
    notes["again"] = locate(step, 1.0)
    notes["put back"] = _state(cut) == before
    step(1.0)
    notes["goes on"] = _state(cut) != before
    return notes


def written() -> dict[str, Any]:
    """DTensors that are written in place: their values after, and what was found."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    w = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    assert isinstance(w, DTensor)
    faults = [
        locate(lambda: (w.add_(1.0), w.to_local().sum())[1]),
        locate(lambda: (w.mul_(3e38).add_(3e38), w.to_local().sum())[1]),
    ]
    return {"faults": faults, "w": w.to_local()}


def received(rank: int) -> Any:
    """Locate the fault in a sum over ranks to which the first rank adds Inf."""

    def step() -> torch.Tensor:
        x = torch.ones(2) / (1.0 if rank else 0.0)
        dist.all_reduce(x)
        return x * 2

    return locate(step)


def main(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Notes by the name of the model."""
    alone = torch.ones(2)
    notes: dict[str, Any] = {name: replayed(name, rank) for name in MODELS}
    notes["written"] = written()
    notes["received"] = received(rank)
    # A step without communication needs no other rank.
    notes["silent"] = locate(lambda: (alone / 0).sum()) if rank == 0 else None
    return notes


pytestmark = pytest.mark.usefixtures("left_as_found")


def gradients(training: Training) -> list[Any]:
    return [p.grad for p in training.model.parameters()]


CASES = [
    ("mlp", "fp16", "fused", 1), ("mlp", "fp16, torch's scaler", "foreach", 2),
    ("convolution", "fp16", "plain", 1), ("convolution", "bf16", "fused", 1),
    ("checkpointed", "fp32", "foreach", 1),
]  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("started", [False, True], ids=["first step", "later step"])
@pytest.mark.parametrize("what", CASES, ids=lambda what: "-".join(map(str, what)))
def test_all_that_a_step_writes_is_put_back(what: tuple[Any, ...], started: bool) -> None:
    """The state is that of before, and the run goes on as if nobody had looked."""
    replayed, plain = Training(*what), Training(*what)
    for training in (replayed, plain) if started else ():
        torch.manual_seed(2)
        training.step()
    before, grads = replayed.state(), gradients(replayed)
    for factor in (1.0, 1e6):
        found = locate(replayed.step, factor, model=replayed.model)
        assert (found is None) == (factor == 1.0 or not what[1].startswith("fp16"))
        assert same(replayed.state(), before)
        assert all(a is b for a, b in zip(gradients(replayed), grads, strict=True))
    assert len(replayed.optimizer.state) == len(plain.optimizer.state)
    after = []
    for training in (replayed, plain):
        torch.manual_seed(1)
        after.append([training.step(), training.step(), *training.state()])
    assert same(*after)


def test_a_replay_that_puts_nothing_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def nothing(_: Any) -> Any:
        yield nullcontext()

    monkeypatch.setattr(module, "_put_back", nothing)
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


def test_a_step_that_raises_for_a_value_it_made_is_explained() -> None:
    """Code that checks its loss raises; the fault is what it should have said."""

    def step(x: torch.Tensor) -> None:
        loss = (x * 1e3).sum()
        if not loss.isfinite():
            raise FloatingPointError("loss is not finite")

    assert locate(step, torch.ones(2)) is None
    found: Any = locate(step, torch.full((2,), 1e3).half())
    assert (found.op, found.kind) == ("mul", "overflow")


def test_nothing_is_found_in_a_healthy_step_nor_in_a_mask() -> None:
    training = Training("transformer", "fp16")
    assert locate(training.step, model=training.model) is None

    def masked(x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(x < 0, -math.inf).softmax(-1)

    assert locate(masked, torch.randn(3, 4)) is None
    fault = locate(masked, -torch.ones(3, 4))
    assert fault is not None, "rows that are masked as a whole are NaN"
    assert (fault.op, fault.kind) == ("softmax", "operation")
    assert fault.why.startswith("its result is NaN, from infinities that the program has")


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


def test_the_share_of_what_is_bad_in_an_input() -> None:
    x = torch.ones(10, 10)
    x[0, :3], x[1, :2] = math.nan, math.inf
    fault: Any = locate(lambda x: (x * 2).sum(), x)
    assert (fault.kind, fault.op) == ("input", "mul")
    (given,) = fault.inputs
    assert (given.nan, given.inf, given.largest) == pytest.approx((0.03, 0.02, 1.0))


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


def test_random_numbers_are_those_of_the_step() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    seen: list[torch.Tensor] = []
    locate(lambda: seen.append(torch.rand(4) * 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(seen[0], torch.rand(4) * 2)


def test_a_model_is_found_among_the_arguments() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    x = torch.full((1, 2), math.nan)
    for fault in (locate(net, x), locate(lambda m, x: m(x), net, x), locate(lambda: net(x))):
        assert fault is not None
        assert (fault.module, fault.kind) == ("0", "input")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return launch("tests.torch.diagnostics.test_locate", 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.sized
@pytest.mark.parametrize("name", MODELS)
def test_a_step_that_talks_is_replayed_by_all_ranks(ranks: list[Any], name: str) -> None:
    for notes in ranks:
        found = notes[name]
        assert found["good"] is None
        assert found["again"] is None
        assert found["bad"] is not None
        assert (found["bad"].op, found["bad"].kind) == ("addmm", "operation")
        assert found["put back"]
        assert found["goes on"]


@pytest.mark.sized
@pytest.mark.parametrize("name", MODELS)
def test_a_step_that_talks_is_not_replayed_by_one_rank(ranks: list[Any], name: str) -> None:
    message = ranks[0][name]["alone"]
    assert re.fullmatch(
        r"locate\(\) replays a step that talks to other ranks \(.+\), and 1 of 2 ranks called it "
        r"within 1 seconds. Call it on every rank: let them agree first, for example by an "
        r"all_reduce of loss.isfinite\(\). Or replay what one rank can do alone, for example the "
        r"forward pass of model.module.",
        message,
    )


def test_dtensors_that_are_written_are_put_back(ranks: list[Any]) -> None:
    for notes in ranks:
        fine, fault = notes["written"]["faults"]
        assert fine is None
        assert fault is not None
        assert fault.op == "add"
        assert torch.equal(notes["written"]["w"], torch.ones(2))


def test_numbers_that_another_rank_spoiled_are_said_to_be_received(ranks: list[Any]) -> None:
    here, there = (notes["received"] for notes in ranks)
    assert (here.op, here.kind) == ("div", "operation")
    assert (there.op, there.kind) == ("mul", "input")
    assert there.why == "what other ranks sent (float32 2) is not finite before any op runs"


def test_what_does_not_talk_is_replayed_by_one_rank(ranks: list[Any]) -> None:
    assert ranks[0]["silent"] is not None


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
