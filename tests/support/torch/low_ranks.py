"""Low weights on the ranks of FSDP2 and DDP; the tests compare them with those of one process.

Gradients of `Toy` are exact in bfloat16, so that a whole model and pieces of it take equal steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from polymp.torch import low_weights
from tests.support.torch.ranks import bits
from tests.support.torch.sharded_models import BATCH, CUTS, Cut, Toy, data, named, whole

MODES = ("master", "split", "stochastic")
STEPS, SAVED = 6, 3


def optimizer_of(model: nn.Module, mode: str) -> Any:
    return low_weights(torch.optim.AdamW(model.parameters(), lr=0.01), mode)


def go(
    model: nn.Module, optimizer: Any, share: int, shares: int, first: int = 0, last: int = STEPS
) -> None:
    for step in range(first, last):
        x, t = (part.bfloat16().chunk(shares)[share] for part in data(step))
        optimizer.zero_grad()
        model(x, t).backward()
        optimizer.step()


def notes(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The bits of the whole weights and of what stands beside them, as a checkpoint has them."""
    state = optimizer.state_dict()["state"]
    found = {}
    for number, (name, p) in enumerate(named(model).items()):
        own = state[number]
        tensors = [p, *(own[key] for key in ("beside", "exp_avg") if key in own)]
        found[name] = [bits(whole(t).view(torch.uint8)) for t in tensors]
    return found


def alone(mode: str) -> dict[str, Any]:
    """The result of one process without a group, on the whole batches."""
    model = Toy()
    optimizer = optimizer_of(model, mode)
    go(model, optimizer, 0, 1)
    return notes(model, optimizer)


def fsdp2(mode: str) -> tuple[Cut, Any]:
    cut = CUTS["fsdp2"]()
    return cut, optimizer_of(cut.model, mode)


def ddp(mode: str) -> dict[str, Any]:
    model = Toy()
    optimizer = optimizer_of(model, mode)
    wrapped = nn.parallel.DistributedDataParallel(model)
    go(wrapped, optimizer, dist.get_rank(), dist.get_world_size())
    return notes(model, optimizer)


def main(rank: int, ranks: int, folder: Path) -> dict[Any, Any]:
    assert BATCH % ranks == 0
    found: dict[Any, Any] = {}
    for mode in MODES:
        cut, optimizer = fsdp2(mode)
        go(cut.model, optimizer, cut.share, cut.shares)
        found["fsdp2", mode] = notes(cut.model, optimizer)
        found["ddp", mode] = ddp(mode)
        found["resumed", mode] = resumed(mode, folder)
    return found


def resumed(mode: str, folder: Path) -> dict[str, Any]:
    """Save after some steps, load in a fresh run, and go on."""
    where = folder / f"checkpoint-{mode}-{dist.get_world_size()}"
    cut, optimizer = fsdp2(mode)
    go(cut.model, optimizer, cut.share, cut.shares, last=SAVED)
    model, state = get_state_dict(cut.model, optimizer)
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=where)
    cut, optimizer = fsdp2(mode)
    model, state = get_state_dict(cut.model, optimizer)
    dcp.load({"model": model, "optimizer": state}, checkpoint_id=where)
    set_state_dict(cut.model, optimizer, model_state_dict=model, optim_state_dict=state)
    go(cut.model, optimizer, cut.share, cut.shares, SAVED)
    return notes(cut.model, optimizer)
