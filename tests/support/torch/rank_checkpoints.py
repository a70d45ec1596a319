"""A run that two ranks begin and four go on with, and the same run on two ranks to its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from polymp.torch import GradScaler
from tests.support.torch.run_ranks import INF, WAYS, Plant, Run
from tests.support.torch.sharded_models import CUTS

SETTINGS: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 3, "hysteresis": 1}
# It is saved after one overflow, which hysteresis forgives, with a second one to come.
HISTORY = (
    None,
    None,
    Plant(-INF, "b.weight", -1),
    None,
    Plant(INF, "a.weight", -1),
    Plant(INF, "a.weight", 0),
    None,
    Plant("loss", "", 1),
    None,
    None,
    Plant(INF, "gain", 0),
)
SAVED = 5  # steps before
HOW = ("checkpoint", "file")


def start() -> Run:
    return Run(CUTS["fsdp2"](), WAYS["sgd"], GradScaler("cpu", **SETTINGS))


def go(run: Run, first: int, last: int) -> None:
    for at in range(first, last):
        run.step(at, HISTORY[at])


def save(run: Run, folder: Path) -> None:
    model, optimizer = get_state_dict(run.cut.model, run.optimizer)
    state = {"model": model, "optimizer": optimizer, "scaler": run.scaler}
    dcp.save(state, checkpoint_id=folder / "checkpoint")
    if dist.get_rank() == 0:
        torch.save(run.scaler.state_dict(), folder / "scaler.pt")


def load(run: Run, folder: Path, how: str) -> None:
    """Bring a fresh run to where the saved one was; its scaler from the checkpoint or a file."""
    model, optimizer = get_state_dict(run.cut.model, run.optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if how == "checkpoint":
        state["scaler"] = run.scaler
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    set_state_dict(run.cut.model, run.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    if how == "file":
        run.scaler.load_state_dict(torch.load(folder / "scaler.pt", weights_only=True))


def all_cases(folder: Path) -> dict[Any, Any]:
    if dist.get_world_size() == 2:
        run = start()
        go(run, 0, SAVED)
        save(run, folder)
        go(run, SAVED, len(HISTORY))
        return {"unstopped": run.notes}
    notes: dict[Any, Any] = {}
    for how in HOW:
        run = start()
        load(run, folder, how)
        go(run, SAVED, len(HISTORY))
        notes["resumed", how] = run.notes
    forgotten = start()
    load(forgotten, folder, "without the scaler")
    go(forgotten, SAVED, len(HISTORY))
    return notes | {"forgotten": forgotten.notes}
