"""One rank of many: every way to cut a model, every kind of step, and plants on one rank only.

What is planted, and where, is in `HISTORY`. The notes say what this rank saw after each step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import clip_grad_norm_

from polymp.backends.torch.scaler import unscale
from polymp.errors import StuckError
from polymp.torch import GradScaler, autocast
from tests.support.sizes import LONG
from tests.support.torch.models import seen
from tests.support.torch.sharded_models import (
    CUTS,
    FOR_FOUR,
    Cut,
    cuts,
    data,
    fsdp2,
    groups,
    named,
    whole,
)
from tests.support.torch.training import Amp, Log, entries

INF, NAN = float("inf"), float("nan")


class Plant(NamedTuple):
    """A fault that is planted in a step, and its rank; -1 is the last."""

    # a value for one element of a gradient, "loss" to multiply the loss by NaN, or "apart" to add
    # NaN to it, which leaves the gradients finite
    what: Any
    where: str  # the parameter's name
    rank: int  # the only one that sees it


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


class Way(NamedTuple):
    optimizer: Callable[[Any], torch.optim.Optimizer]
    clip: bool = False


sgd = partial(torch.optim.SGD, lr=0.125, momentum=0.5)
adamw = partial(torch.optim.AdamW, lr=0.125)
fused_sgd, fused_adamw = partial(sgd, fused=True), partial(adamw, fused=True)
WAYS = {
    "sgd": Way(sgd),
    "sgd, clipped": Way(sgd, clip=True),
    "sgd, fused": Way(fused_sgd),
    "adamw": Way(adamw),
    "adamw, foreach": Way(partial(adamw, foreach=True)),
    "adamw, fused": Way(fused_adamw),
    "adamw, fused, clipped": Way(fused_adamw, clip=True),
}
PLAIN_ONLY = ("sgd, fused",)  # torch 2.13 has no fused SGD for DTensors
FEW = ("sgd", "adamw, foreach", "adamw, fused, clipped")


def tried(ranks: int) -> list[str]:
    """The names of the cuts: on four ranks, in `make test`, those that need four."""
    return [cut for cut in cuts(ranks) if LONG or ranks == 2 or cut in FOR_FOUR]


def ways(cut: str, ranks: int) -> list[str]:
    """The names of the ways that are tried with the cut.

    One of a few, another one for the next cut, and all of these few where nothing is cut. In
    `make test-long` the few on two ranks; and all ways of DDP and of FSDP2.
    """
    if LONG and ranks == 2:
        ddp = cut == "ddp"
        every = [way for way in WAYS if ddp or way not in PLAIN_ONLY]
        return every if ddp or cut == "fsdp2" else list(FEW)
    if cut == "ddp":
        return list(FEW)
    return [FEW[[*tried(ranks), "ddp_grouped"].index(cut) % len(FEW)]]


def some(names: Sequence[str], ranks: int) -> Sequence[str]:
    """All of the names on two ranks; on four in `make test-long` alone."""
    return names if LONG or ranks == 2 else ()


def local(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def is_of_this_rank(plant: Plant) -> bool:
    return dist.get_rank() == plant.rank % dist.get_world_size()


@torch.no_grad()
def put(plant: Plant, params: dict[str, torch.nn.Parameter]) -> bool:
    """Plant a value in a gradient, if it is this rank's; in any that it has, if not in that one."""
    if not is_of_this_rank(plant):
        return False
    by_choice = [params[plant.where]] if plant.where in params else []
    for p in (*by_choice, *params.values()):
        if p.grad is not None and local(p.grad).numel():
            local(p.grad).view(-1)[-1] = plant.what
            return True
    raise AssertionError("this rank has no gradient at all")


def before_adding(cut: Cut, plant: Plant) -> Any:
    """For DDP: plant a value in what this rank adds to the gradient."""
    mine = is_of_this_rank(plant)
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
    def __init__(self, cut: Cut, way: Way, scaler: GradScaler, *, early: bool = False) -> None:
        self.cut, self.way, self.scaler, self.early = cut, way, scaler, early
        self.optimizer = way.optimizer(groups(cut.model))
        names = {id(p): name for name, p in cut.model.named_parameters()}
        for group in self.optimizer.param_groups:  # as torch names them in reports
            group["param_names"] = [names[id(p)] for p in group["params"]]
        self.notes: list[dict[str, Any]] = []

    def part(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
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
        here = plant is not None and is_of_this_rank(plant)
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
        here = self.backward(at, plant)
        if self.way.clip:
            self.scaler.unscale_(self.optimizer)
            clip(self.cut, self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.note(here)

    def note(self, here: bool) -> None:
        full, report = self.cut.full(), self.scaler.report()
        note = {
            "here": here,
            "skipped": self.scaler.step_skipped(self.optimizer).item(),
            "bad": [(g.name, g.inf, g.nan) for g in report.bad],
            "values": sum(g.size for g in report.gradients),
            "state": self.scaler.state_dict(),
            "parameters": {name: seen(p) for name, p in full.items()},
            "finite": all(bool(p.isfinite().all()) for p in full.values()),
        }
        self.notes.append(note)


def go(
    run: Run, history: Sequence[Plant | None] = HISTORY, first: int = 0, last: int | None = None
) -> list[dict[str, Any]]:
    for at in range(first, len(history) if last is None else last):
        run.step(at, history[at])
    return run.notes


def table(ranks: int) -> dict[Any, Any]:
    notes: dict[Any, Any] = {}
    for name in tried(ranks):
        for way in ways(name, ranks):
            chosen = WAYS[way]
            scaler = GradScaler("cpu", **SETTINGS)
            notes[name, way] = go(Run(CUTS[name](), chosen, scaler, early=name == "ddp"))
    for way in ways("ddp", ranks):
        chosen = WAYS[way]
        scaler = GradScaler("cpu", **SETTINGS, process_group=dist.group.WORLD)
        notes["ddp_grouped", way] = go(Run(CUTS["ddp"](), chosen, scaler))
    return notes


def main(rank: int, ranks: int, folder: Path) -> dict[Any, Any]:
    if dist.get_backend() == "nccl":
        return on_gpus(rank, ranks)
    return table(ranks) | single_cases() | checkpoint_cases(folder)


RESUMED_SETTINGS: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 3, "hysteresis": 1}
# It is saved after one overflow, which hysteresis forgives, with a second one to come.
RESUMED_HISTORY = (
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


def start_resumed() -> Run:
    return Run(CUTS["fsdp2"](), WAYS["sgd"], GradScaler("cpu", **RESUMED_SETTINGS))


def save(run: Run, folder: Path) -> None:
    model, optimizer = get_state_dict(run.cut.model, run.optimizer)
    state = {"model": model, "optimizer": optimizer, "scaler": run.scaler}
    dcp.save(state, checkpoint_id=folder / "checkpoint")
    if dist.get_rank() == 0:
        torch.save(run.scaler.state_dict(), folder / "scaler.pt")


def load(run: Run, folder: Path, how: str) -> None:
    model, optimizer = get_state_dict(run.cut.model, run.optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if how == "checkpoint":
        state["scaler"] = run.scaler
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    set_state_dict(run.cut.model, run.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    if how == "file":
        run.scaler.load_state_dict(torch.load(folder / "scaler.pt", weights_only=True))


def checkpoint_cases(folder: Path) -> dict[Any, Any]:
    if dist.get_world_size() == 2:
        run = start_resumed()
        go(run, RESUMED_HISTORY, last=SAVED)
        save(run, folder)
        return {"unstopped": go(run, RESUMED_HISTORY, SAVED)}
    notes: dict[Any, Any] = {}
    for how in HOW:
        run = start_resumed()
        load(run, folder, how)
        notes["resumed", how] = go(run, RESUMED_HISTORY, SAVED)
    return notes


Notes = dict[Any, Any]
LAST = Plant(INF, "a.weight", -1)
FIRST_WAYS = ("sgd", "adamw, foreach", "adamw, fused")


def below_one() -> Notes:
    """A gradient on one rank that is finite when scaled, and Inf when not."""
    notes = {}
    for way in some(FIRST_WAYS, dist.get_world_size()):
        scaler = GradScaler("cpu", init_scale=2.0**-60, growth_interval=2)
        history = (Plant(1e30, "a.weight", -1), None, None, Plant(1e30, "b.bias", 0))
        notes["below one", way] = go(Run(CUTS["fsdp2"](), WAYS[way], scaler), history)
    return notes


def absent() -> Notes:
    """Ranks without gradients, of one parameter or of all, while others have them."""
    notes = {}
    for way in some(FIRST_WAYS, dist.get_world_size()):
        scaler = GradScaler("cpu", **SETTINGS)
        run = Run(CUTS["fsdp2"](), WAYS[way], scaler)
        every = list(named(run.cut.model))
        # Whose gradients are gone, and what the others find.
        for at, (ranks, names, plant) in enumerate(
            (
                ([], every, None),
                ([0], every, LAST),
                ([0], every, None),
                ([0], ["b.weight"], None),
                ([0], ["b.weight"], LAST),
                (range(dist.get_world_size()), every, None),
            )
        ):
            here = run.backward(at, plant)
            if dist.get_rank() in ranks:
                for name in names:
                    named(run.cut.model)[name].grad = None
            run.scaler.step(run.optimizer)
            try:
                run.scaler.update()
            except AssertionError:
                assert at == 5
            run.note(here)
        notes["absent", way] = run.notes
    return notes


def pipeline() -> Notes:
    """Every rank has other parameters, and only the last one a loss."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    params = [nn.Parameter(torch.full((2,), float(i))) for i in range(rank + 1)]
    optimizer = torch.optim.SGD(params, lr=0.125)
    scaler = GradScaler("cpu", **SETTINGS, process_group=dist.group.WORLD)
    scaler.scale(torch.zeros(()))  # every stage has to have a scale
    seen = []
    # The loss on the last rank, and what the first rank's gradients are multiplied by.
    for loss, factor in ((1.0, 1.0), (NAN, 1.0), (1.0, INF), (1.0, NAN), (1.0, 1.0)):
        optimizer.zero_grad()
        scale = torch.tensor(scaler.get_scale())
        if rank == ranks - 1:
            leaf = torch.tensor(loss, requires_grad=True)
            (scale,) = torch.autograd.grad(scaler.scale(leaf), leaf)
        for p in params:
            p.grad = torch.ones(2) * scale * (factor if rank == 0 else 1.0)
            p.grad *= loss if rank == ranks - 1 else 1.0
        scaler.step(optimizer)
        scaler.update()
        skipped = scaler.step_skipped(optimizer).item()
        seen.append((scaler.state_dict(), skipped, [p.tolist() for p in params]))
    return {"pipeline": seen}


def subgroup() -> Notes:
    """A group of some ranks only does not settle what a loss was; the gradients are exchanged."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    scaler = GradScaler("cpu", **SETTINGS, process_group=pairs[rank // 2])
    run = Run(CUTS["ddp"](), WAYS["sgd"], scaler, early=True)
    return {"subgroup": go(run, (Plant("loss", "", 3), Plant("apart", "", 0), None))}


def stuck() -> Notes:
    """Note the message to each rank after three skips in a row, and that every rank raises."""
    told: list[Any] = []
    cut = CUTS["fsdp2"]()
    scaler = GradScaler("cpu", stuck_after=3, on_stuck=told.append)
    go(Run(cut, WAYS["sgd"], scaler), [LAST] * 4)
    cut = CUTS["fsdp2"]()
    run = Run(cut, WAYS["sgd"], GradScaler("cpu", stuck_after=2, on_stuck="raise"))
    said = ""
    try:
        go(run, [LAST] * 4)
    except StuckError as error:
        said = str(error)
    return {"stuck": told, "raised": (len(run.notes), said)}


def partial_sums() -> Notes:
    """Gradients whose ranks hold terms of a sum: each finite, the sum perhaps not."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    notes = {}
    for way in FIRST_WAYS:
        for size in (2.0, 3e38):
            start = torch.full((3, 2), 1e-30)
            w = nn.Parameter(distribute_tensor(start, mesh, [Replicate()]))
            x = distribute_tensor(torch.full((ranks, 3), size), mesh, [Shard(0)])
            optimizer = WAYS[way].optimizer([w])
            scaler = GradScaler("cpu", init_scale=1.0)
            scaler.scale((x @ w).sum()).backward()
            assert isinstance(w.grad, DTensor)
            placed = str(w.grad.placements), bool(local(w.grad).isfinite().all())
            scaler.step(optimizer)
            scaler.update()
            notes["partial", way, size] = (
                *placed,
                seen(whole(w)),
                scaler.step_skipped(optimizer).item(),
                scaler.state_dict(),
            )
    return notes


class Twice(torch.optim.SGD):
    """Goes to another point, looks at the gradients there, comes back and uses them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"]]
        with torch.enable_grad():
            loss = closure()
        moves = [0.25 * p.grad for p in params]
        for p, move in zip(params, moves, strict=True):
            p.add_(move)
        with torch.enable_grad():
            closure()
        for p, move in zip(params, moves, strict=True):
            p.sub_(move)
        super().step()
        return loss


def closure() -> Notes:
    """A step with a closure; in the second one its second evaluation overflows on one rank."""
    cut = CUTS["fsdp2"]()
    scaler = GradScaler("cpu", **SETTINGS)
    run = Run(cut, WAYS["sgd"], scaler)
    optimizer = Twice(cut.model.parameters(), lr=0.125, momentum=0.5)
    steps = []
    for at in range(3):
        calls: list[int] = []

        def evaluate(at: int = at, calls: list[int] = calls) -> torch.Tensor:
            optimizer.zero_grad()
            x, t = run.part(at)
            loss = cut.model(x, t)
            scaler.scale(loss).backward()
            calls.append(at)
            if at == 1 and len(calls) == 2 and dist.get_rank() == dist.get_world_size() - 1:
                grad = named(cut.model)["a.weight"].grad
                local(grad).fill_(NAN)
            return loss

        result = scaler.step(optimizer, evaluate)
        scaler.update()
        full = {name: seen(p) for name, p in cut.full().items()}
        steps.append((result is None, len(calls), scaler.state_dict(), full))
    return {"closure": steps}


def mute_cases(ranks: int) -> list[tuple[str, str]]:
    """The cuts and ways in which a plant is not told to all ranks, if these do not talk."""
    plain = [(cut, way) for cut in ("fsdp2", "fsdp1") for way in ("sgd", "adamw, fused")]
    grid = [("fsdp2_and_tp", way) for way in ("sgd", "adamw, fused")]
    return plain if ranks == 2 else [*(plain if LONG else ()), *grid]


def mute() -> Notes:
    """A plant, and the library as it would be if ranks did not talk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unscale, "agreed", lambda found, loss, *_: (found, loss))
        return {
            ("mute", cut, way): go(
                Run(CUTS[cut](), WAYS[way], GradScaler("cpu", **SETTINGS)), [LAST]
            )
            for cut, way in mute_cases(dist.get_world_size())
        }


DTYPES = (torch.float16, torch.bfloat16)
KINDS = ("plain", "fused", "clipped", "accumulated")
SPOILED = 2, 1  # the step in which a loss is not finite, and the rank


def beside_torch() -> Notes:
    """Run DDP and torch's scaler for FSDP on our classes, and on torch's."""
    amps = {"polymp": Amp(autocast, GradScaler), "torch": Amp(torch.autocast, torch.amp.GradScaler)}
    notes: Notes = {}
    for name, amp in amps.items():
        for fused in (False, True):
            notes[name, "sharded", fused] = sharded(amp.scaler, fused)
        for dtype in DTYPES:
            for kind in KINDS:
                notes[name, dtype, kind] = in_regions(amp, dtype, kind)
    return notes


def in_regions(amp: Amp, dtype: torch.dtype, kind: str) -> Log:
    """Six steps of a model with batch norm, of data of this rank's own."""
    rank, log = dist.get_rank(), Log()
    torch.manual_seed(rank)  # DDP sends rank 0's parameters to all
    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 3)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=kind == "fused")
    scaler = amp.scaler("cpu", **SETTINGS)
    for step in range(6):
        optimizer.zero_grad()
        for last in (False, True) if kind == "accumulated" else (True,):
            x, y = torch.randn(6, 8), torch.randn(6, 3)
            if (step, rank) == SPOILED and last:
                y[0] = INF
            quiet = contextlib.nullcontext() if last else model.no_sync()
            with quiet, amp.autocast("cpu", dtype=dtype):
                out = model(x)
                scaler.scale(nn.functional.mse_loss(out, y)).backward()
        if kind == "clipped":
            scaler.unscale_(optimizer)
            log.bits(clip_grad_norm_(model.parameters(), 0.5))
        scaler.step(optimizer)
        scaler.update()
        log.append(str(out.dtype))
        log.scaler(scaler)
        log.model(model)
    return log


def sharded(base: type, fused: bool) -> list[Any]:
    """torch's scaler for FSDP, set on another base; every rank has gradients of its own."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Sharded

    names = ("scale", "_unscale_grads_", "unscale_", "_amp_update_scale_cpu_", "update")
    members = {name: vars(Sharded)[name] for name in names}
    scaler = type("Sharded", (base,), members)("cpu", init_scale=8.0, growth_interval=2)
    scaler.process_group = dist.group.WORLD
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.25, fused=fused)
    notes = []
    for step in range(6):
        optimizer.zero_grad()
        loss = scaler.scale(weight.sum().half())
        assert loss.dtype is torch.float16
        (loss * (INF if (step, dist.get_rank()) == SPOILED else 1.0)).backward()
        scaler.unscale_(optimizer)
        notes.append((scaler.step(optimizer), weight.tolist()))
        scaler.update()
        notes.append(entries(scaler.state_dict()))
    return notes


def single_cases() -> Notes:
    cases = [below_one, absent, pipeline, stuck, partial_sums, closure, mute]
    if dist.get_world_size() == 2:
        cases.append(beside_torch)
    else:  # in `make test` what two ranks cannot show
        cases = [*(cases if LONG else [mute]), subgroup]
    notes: Notes = {}
    for case in cases:
        notes |= case()
    return notes


def on_gpus(rank: int, ranks: int) -> dict[Any, Any]:
    torch.cuda.set_device(rank)
    mesh = init_device_mesh("cuda", (ranks,))
    notes: dict[Any, Any] = {}
    for name in ("sgd", "adamw, fused"):
        way = WAYS[name]
        notes["fsdp2", name] = go(Run(fsdp2(mesh), way, GradScaler(**SETTINGS)))
    return notes
