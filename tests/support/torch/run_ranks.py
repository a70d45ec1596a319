"""One rank of many: every way to cut a model, every kind of step, and plants on one rank only.

What is planted, and where, is in `HISTORY`. The notes say what this rank saw after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from polymp.torch import GradScaler
from tests.support.sizes import LONG
from tests.support.torch.ranks import bits
from tests.support.torch.sharded_models import CUTS, FOR_FOUR, Cut, cuts, data, groups, named

INF, NAN = float("inf"), float("nan")


class Plant(NamedTuple):
    """A fault that is planted in a step, and its rank; -1 is the last.

    Attributes:
        what: a value for one element of a gradient, "loss" to multiply the loss by NaN, or "apart"
            to add NaN to it, which leaves the gradients finite.
        where: the parameter's name.
        rank: the only one that sees it.
    """

    what: Any
    where: str
    rank: int


HISTORY: tuple[Plant | None, ...] = (
    Plant(INF, "a.weight", -1),
    None,
    Plant("loss", "", 1),
    None,
    None,
    Plant(NAN, "b.bias", 0),
    Plant("apart", "", -1),
    None,
    None,
    Plant(-INF, "gain", 1),
)
SETTINGS: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.125, momentum=0.5)


def fused_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.125, momentum=0.5, fused=True)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.125)


def fused_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.125, fused=True)


class Way(NamedTuple):
    """How a step is made."""

    optimizer: Callable[[Any], torch.optim.Optimizer]
    options: dict[str, Any]
    clip: bool = False


ON_DEVICE = {"skip_on": "device"}
WAYS = {
    "sgd": Way(sgd, {}),
    "sgd, clipped": Way(sgd, {}, clip=True),
    "sgd, device": Way(sgd, ON_DEVICE),
    "sgd, fused": Way(fused_sgd, {}),
    "adamw": Way(adamw, {}),
    "adamw, device": Way(adamw, ON_DEVICE),
    "adamw, fused": Way(fused_adamw, {}),
    "adamw, fused, clipped": Way(fused_adamw, {}, clip=True),
}
PLAIN_ONLY = ("sgd, fused",)  # torch 2.13 has no fused SGD for DTensors


FEW = ("sgd", "adamw, device", "adamw, fused, clipped")


def tried(ranks: int) -> list[str]:
    """The names of the cuts: on four ranks, in `make test`, those that need four, and one other."""
    return [cut for cut in cuts(ranks) if LONG or ranks == 2 or cut in ("ddp", *FOR_FOUR)]


def ways(cut: str, ranks: int) -> list[str]:
    """The names of the ways that are tried with the cut.

    In `make test-long` all on two ranks, and a few on four; in `make test` one of these few,
    another one for the next cut, and all of them where nothing is cut.
    """
    if not LONG and cut != "ddp":
        return [FEW[[*tried(ranks), "ddp_grouped"].index(cut) % len(FEW)]]
    if not LONG or ranks != 2:
        return list(FEW)
    plain = cut.startswith(("ddp", "fsdp1"))
    return [way for way in WAYS if plain or way not in PLAIN_ONLY]


def some(names: Sequence[str], ranks: int) -> Sequence[str]:
    """All of the names on two ranks; on four, in `make test`, the last of them alone."""
    return names if LONG or ranks == 2 else names[-1:]


def local(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


@torch.no_grad()
def put(plant: Plant, params: dict[str, torch.nn.Parameter]) -> bool:
    """Plant a value in a gradient, if it is this rank's; in any that it has, if not in that one."""
    if dist.get_rank() != plant.rank % dist.get_world_size():
        return False
    by_choice = [params[plant.where]] if plant.where in params else []
    for p in (*by_choice, *params.values()):
        if p.grad is not None and local(p.grad).numel():
            local(p.grad).view(-1)[-1] = plant.what
            return True
    raise AssertionError("this rank has no gradient at all")


def before_adding(cut: Cut, plant: Plant) -> Any:
    """For DDP: plant a value in what this rank adds to the gradient."""
    mine = dist.get_rank() == plant.rank % dist.get_world_size()
    return named(cut.model)[plant.where].register_hook(
        lambda grad: grad.index_fill(0, torch.tensor(0), plant.what) if mine else grad
    )


def clip(cut: Cut, optimizer: torch.optim.Optimizer) -> None:
    """Clip to far above what there is, mesh by mesh: not a bit changes."""
    if hasattr(cut.model, "clip_grad_norm_"):
        cut.model.clip_grad_norm_(1e6)  # type: ignore[operator]
        return
    for group in optimizer.param_groups:
        clip_grad_norm_(group["params"], 1e6)


class Run:
    """A model, an optimizer and a scaler, and what they went through on this rank."""

    def __init__(self, cut: Cut, way: Way, scaler: Any, *, early: bool = False) -> None:
        self.cut, self.way, self.scaler, self.early = cut, way, scaler, early
        self.optimizer = way.optimizer(groups(cut.model))
        self.notes: list[dict[str, Any]] = []

    def part(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's share of the step's data."""
        device = next(self.cut.model.parameters()).device
        x, t = (whole.to(device) for whole in data(at))
        return x[self.cut.share :: self.cut.shares], t[self.cut.share :: self.cut.shares]

    def backward(self, at: int, plant: Plant | None = None) -> bool:
        """Gradients of the step, with the plant in them; True if it was planted here."""
        cut = self.cut
        self.optimizer.zero_grad()
        x, t = self.part(at)
        early = self.early and plant is not None and plant.where
        hook = before_adding(cut, plant) if early and plant else None
        loss = cut.model(x, t)
        here = plant is not None and dist.get_rank() == plant.rank % dist.get_world_size()
        if here and plant and plant.what == "loss":
            loss = loss * NAN
        if here and plant and plant.what == "apart":
            loss = loss + NAN
        self.scaler.scale(loss).backward()
        if hook is not None:
            hook.remove()
        elif plant is not None and plant.where:
            here = put(plant, named(cut.model))
        return here

    def step(self, at: int, plant: Plant | None = None) -> None:
        """One iteration, noted."""
        here = self.backward(at, plant)
        if self.way.clip:
            self.scaler.unscale_(self.optimizer)
            clip(self.cut, self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.note(here)

    def note(self, here: bool) -> None:
        full = self.cut.full()
        note = {
            "here": here,
            "state": self.scaler.state_dict(),
            "parameters": {name: bits(p) for name, p in full.items()},
            "finite": all(bool(p.isfinite().all()) for p in full.values()),
        }
        if isinstance(self.scaler, GradScaler):
            note["found"] = self.scaler.found_inf(self.optimizer).item()
            note["skipped"] = self.scaler.step_skipped(self.optimizer).item()
            report = self.scaler.report(self.cut.model)
            note["bad"] = [(g.name, g.inf, g.nan) for g in report.bad]
            note["values"] = sum(g.size for g in report.gradients)
        self.notes.append(note)


def go(run: Run, history: Iterable[Plant | None] = HISTORY) -> list[dict[str, Any]]:
    for at, plant in enumerate(history):
        run.step(at, plant)
    return run.notes


def table(ranks: int) -> dict[Any, Any]:
    """Every cut in every way."""
    notes: dict[Any, Any] = {}
    for name in tried(ranks):
        for way in ways(name, ranks):
            chosen = WAYS[way]
            scaler = GradScaler("cpu", **SETTINGS, **chosen.options)
            notes[name, way] = go(Run(CUTS[name](), chosen, scaler, early=name == "ddp"))
    for way in ways("ddp", ranks):
        chosen = WAYS[way]
        scaler = GradScaler("cpu", **SETTINGS, **chosen.options, process_group=dist.group.WORLD)
        notes["ddp_grouped", way] = go(Run(CUTS["ddp"](), chosen, scaler))
    return notes


def main(rank: int, ranks: int, folder: Path) -> dict[Any, Any]:
    from tests.support.torch import rank_cases, rank_checkpoints

    return table(ranks) | rank_cases.all_cases() | rank_checkpoints.all_cases(folder)
