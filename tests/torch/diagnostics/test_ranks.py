"""`locate`, `catch` and `record` of steps whose ranks talk."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import polymp
from polymp.backends.torch.diagnostics import locate as module
from polymp.diagnostics.run_record import GRADIENT, UPDATE
from polymp.errors import BadStepError
from polymp.torch import GradScaler, autocast, catch, locate, record
from tests.support.sizes import LONG
from tests.support.torch.models import seen
from tests.support.torch.sharded_models import CUTS, Cut, cuts, data

PATIENCE = timedelta(seconds=1)
# One that has plain tensors and one that has DTensors; in `make test-long` all.
MODELS = tuple(cuts(2)) if LONG else ("ddp", "fsdp2")


def step_of(
    cut: Cut, optimizer: torch.optim.Optimizer, scaled: bool = False
) -> Callable[[float], torch.Tensor]:
    scaler = GradScaler("cpu", enabled=scaled)

    def step(factor: float) -> torch.Tensor:
        optimizer.zero_grad()
        x, t = (part.chunk(cut.shares)[cut.share] for part in data(0))
        loss = cut.model(x * factor, t)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()  # type: ignore[no-any-return]

    return step


def state(cut: Cut) -> list[Any]:
    return [seen(cut.full()[name]) for name in sorted(cut.full())]


def _message(call: Callable[[], object]) -> str:
    try:
        return f"returned {call()}"
    except RuntimeError as error:
        return str(error)


def replayed(name: str, rank: int) -> dict[str, Any]:
    """A step of a model in pieces, replayed by all ranks, by the first alone, and by all again."""
    cut = CUTS[name]()
    optimizer = torch.optim.SGD(cut.model.parameters(), lr=0.5, foreach=False)
    step = step_of(cut, optimizer)
    step(1.0)
    before = state(cut)
    notes: dict[str, Any] = {"good": locate(step, 1.0), "bad": locate(step, 8e37)}
    module._Meeting.patience = PATIENCE
    dist.barrier()
    notes["alone"] = _message(lambda: locate(step, 1.0)) if rank == 0 else ""
    dist.barrier()
    module._Meeting.patience = timedelta(seconds=60)
    notes["again"] = locate(step, 1.0)
    notes["put back"] = state(cut) == before
    step(1.0)
    notes["goes on"] = state(cut) != before
    return notes


def caught(name: str, rank: int, scaled: bool = False) -> dict[str, Any]:
    """Two good steps, a bad one, and what was found."""
    cut = CUTS[name]()
    optimizer = torch.optim.Adam(cut.model.parameters(), lr=0.01)
    step = catch(step_of(cut, optimizer, scaled), every=10)
    step(1.0)
    step(0.5)
    before = state(cut)
    try:
        step(float("nan") if rank == 0 else 1.0)
        return {"step": None}
    except BadStepError as error:
        report: Any = error.report
    notes = {"step": report.step, "found": report.found, "put back": state(cut) == before}
    notes["said"] = str(report)
    step(1.0)
    return {**notes, "goes on": state(cut) != before}


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


def recorded(name: str) -> tuple[bool, set[str], int | None]:
    """Steps in float32 and in bfloat16: what is said of the ends, and of steps."""
    records = []
    for low in (False, True):
        cut = CUTS[name]()
        step = step_of(cut, torch.optim.SGD(cut.model.parameters(), lr=0.5))
        recorder = record(None, cut.model)
        for _ in range(2):
            with recorder, autocast("cpu", enabled=low):
                step(0.3)
        records.append(recorder.record)
    compared = polymp.compare(*records)
    ends = (row for row in compared.rows if row.array.kind in (GRADIENT, UPDATE))
    return compared.explained, {row.verdict for row in ends if row.difference}, compared.until


def main(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    alone = torch.ones(2)
    notes: dict[str, Any] = {name: replayed(name, rank) for name in MODELS}
    notes["caught"] = {name: caught(name, rank) for name in ("ddp", "fsdp2")}
    notes["scaled"] = caught("fsdp2", rank, scaled=True)
    notes["recorded"] = {name: recorded(name) for name in ("ddp", "fsdp2")}
    notes["written"] = written()
    notes["received"] = received(rank)
    # A step without communication needs no other rank.
    notes["silent"] = locate(lambda: (alone / 0).sum()) if rank == 0 else None
    return notes


pytestmark = pytest.mark.usefixtures("left_as_found")


@pytest.mark.sized
@pytest.mark.parametrize("name", MODELS)
def test_a_step_that_talks_is_replayed_by_all_ranks(ranks: list[Any], name: str) -> None:
    for notes in ranks:
        found = notes[name]
        assert found["good"] is None
        assert found["again"] is None
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
        assert fault.op == "add"
        assert torch.equal(notes["written"]["w"], torch.ones(2))


def test_numbers_that_another_rank_spoiled_are_said_to_be_received(ranks: list[Any]) -> None:
    here, there = (notes["received"] for notes in ranks)
    assert (here.op, here.kind) == ("div", "operation")
    assert (there.op, there.kind) == ("mul", "input")
    assert there.why == "what other ranks sent (float32 2) is not finite before any op runs"


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_what_ranks_make_of_rounded_numbers_is_not_judged(ranks: list[Any], name: str) -> None:
    for notes in ranks:
        assert notes["recorded"][name] == (True, {"not judged"}, 1)


def test_what_does_not_talk_is_replayed_by_one_rank(ranks: list[Any]) -> None:
    assert ranks[0]["silent"] is not None


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_ranks_stop_at_the_same_step(ranks: list[Any], name: str) -> None:
    """One rank's batch is bad; all go back, and the training is that without the step."""
    for notes in ranks:
        it = notes["caught"][name]
        assert (it["step"], it["put back"], it["goes on"]) == (2, True, True)
    assert ranks[0]["caught"][name]["found"] == "the loss is NaN"


def test_a_rank_without_a_bad_value_says_where_to_look(ranks: list[Any]) -> None:
    """Its gradients are the scaler's to look at."""
    said = ranks[1]["scaled"]["said"]
    assert "another rank has a bad value" in said
    assert said.endswith("Read the errors of all ranks."), said
