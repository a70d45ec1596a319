"""`locate` on ranks: a step that talks, replayed by all of them and by one. For `ranks.launch`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from polymp.backends.torch.diagnostics import locate as module
from polymp.torch import locate
from tests.support.sizes import LONG
from tests.support.torch.ranks import bits
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
