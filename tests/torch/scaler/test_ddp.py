"""Data-parallel training in two processes: regions, scaler, and an overflow on one rank only.

`main` is run on each rank: it trains with polymp's classes, then the same with torch's, and returns
what it saw. The tests compare the ranks' notes.
"""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.torch.models import seen
from tests.support.torch.ranks import launch
from tests.support.torch.training import Amp, entries

STEPS = 6
# The iteration in which the data of one rank is spoiled, and that rank.
SPOILED, BY = 2, 1


def setting(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's data for the step."""
    made = torch.Generator().manual_seed(10 * step + rank)
    x, y = torch.randn(6, 8, generator=made), torch.randn(6, 3, generator=made)
    if (step, rank) == (SPOILED, BY):
        y[0] = float("inf")
    return x, y


def train(amp: Amp, rank: int, dtype: torch.dtype, kind: str) -> list[Any]:
    """A few steps; after each: scale, count, skipped or not, dtype, gradients, parameters."""
    torch.manual_seed(rank)  # DDP sends rank 0's parameters to all
    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 3)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=kind == "fused")
    scaler = amp.scaler("cpu", init_scale=2.0**10, growth_interval=2)
    notes: list[Any] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = 2 if kind == "accumulated" else 1
        for part in range(parts):
            quiet = model.no_sync() if part + 1 < parts else contextlib.nullcontext()
            x, y = setting(rank, step if part == 0 else step + 100)
            with quiet, amp.autocast("cpu", dtype=dtype):
                out = model(x)
                loss = nn.functional.mse_loss(out, y) / parts
                scaler.scale(loss).backward()
        if kind == "clipped":
            scaler.unscale_(optimizer)
            notes.append(seen(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        parameters = list(model.parameters())
        before = seen(parameters)
        scaler.step(optimizer)
        scaler.update()
        notes.append(
            {
                "scale": scaler.get_scale(),
                "count": scaler._get_growth_tracker(),
                "skipped": seen(parameters) == before,
                "dtype": str(out.dtype),
                "gradients": seen([p.grad for p in parameters]),
                "parameters": seen(parameters),
            }
        )
    return notes


def sharded(base: type, rank: int, fused: bool) -> list[Any]:
    """torch's scaler for FSDP, set on another base; every rank has gradients of its own."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Sharded

    names = ("scale", "_unscale_grads_", "unscale_", "_amp_update_scale_cpu_", "update")
    members = {name: vars(Sharded)[name] for name in names}
    scaler = type("Sharded", (base,), members)("cpu", init_scale=8.0, growth_interval=2)
    scaler.process_group = dist.group.WORLD
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.25, fused=fused)
    notes = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = scaler.scale(weight.sum().half())
        assert loss.dtype is torch.float16
        (loss * (float("inf") if (step, rank) == (SPOILED, BY) else 1.0)).backward()
        scaler.unscale_(optimizer)
        notes.append((scaler.step(optimizer), weight.tolist()))
        scaler.update()
        notes.append(entries(scaler.state_dict()))
    return notes


DTYPES = (torch.float16, torch.bfloat16)
KINDS = ("plain", "fused", "clipped", "accumulated")


def main(rank: int, ranks: int, folder: Path) -> dict[Any, Any]:
    """Return the notes of a rank."""
    from polymp.torch import GradScaler, autocast  # here, for the tests import this file's names

    warnings.filterwarnings("ignore", "GradScaler is not needed in a bfloat16 region")
    amps = {"polymp": Amp(autocast, GradScaler), "torch": Amp(torch.autocast, torch.amp.GradScaler)}
    notes = {
        (name, str(dtype), kind): train(amp, rank, dtype, kind)
        for name, amp in amps.items()
        for dtype in DTYPES
        for kind in KINDS
    }
    return notes | {
        (name, "sharded", fused): sharded(amp.scaler, rank, fused)
        for name, amp in amps.items()
        for fused in (False, True)
    }


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the notes of all ranks."""
    return launch("tests.torch.scaler.test_ddp", 2, tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ranks_agree_bit_for_bit(notes: Any, dtype: torch.dtype, kind: str) -> None:
    one, other = (of_rank["polymp", str(dtype), kind] for of_rank in notes)
    steps = [note for note in one if isinstance(note, dict)]
    assert len(steps) == STEPS
    assert one == other
    assert {note["dtype"] for note in steps} == {str(dtype)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_train_as_with_torch_s_classes(notes: Any, dtype: torch.dtype, kind: str) -> None:
    """In the step whose loss is lost, too."""
    for of_rank in notes:
        ours, theirs = (of_rank[name, str(dtype), kind] for name in ("polymp", "torch"))
        assert repr(ours) == repr(theirs)  # a norm that was clipped is NaN


@pytest.mark.parametrize("fused", [False, True])
def test_torch_s_sharded_scaler_on_our_base(notes: Any, fused: bool) -> None:
    for of_rank in notes:
        assert of_rank["polymp", "sharded", fused] == of_rank["torch", "sharded", fused]
    ours, other = (of_rank["polymp", "sharded", fused] for of_rank in notes)
    assert ours == other
    assert [state["scale"] for state in ours[1::2]] == [8.0, 16.0, 8.0, 8.0, 16.0, 16.0]
    assert [w[0] for _, w in ours[::2]] == [0.75, 0.5, 0.5, 0.25, 0.0, -0.25]
