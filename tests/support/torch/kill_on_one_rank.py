"""Inf on one rank of two, under polymp's scaler and torch.amp's. A program for `ranks.launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import polymp.torch
from tests.support import kills

SICK, STEP, STEPS = 1, 3, 6  # the rank and the step that get an Inf gradient


def scalers() -> dict[str, Any]:
    return {
        "polymp, torch": polymp.torch.GradScaler("cpu", process_group=dist.group.WORLD),
        "torch.amp": torch.amp.GradScaler("cpu"),
    }


def main(rank: int, ranks: int, folder: Path) -> dict[str, dict[str, tuple[float, bool]]]:
    """For each way to share the work and each scaler: the scale, and if parameters are finite."""
    notes: dict[str, dict[str, tuple[float, bool]]] = {}
    for way in kills.WAYS:
        for name, scaler in scalers().items():
            torch.manual_seed(0)
            linear = torch.nn.Linear(4, 1)
            model = DistributedDataParallel(linear) if way == kills.DATA else linear
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for step in range(STEPS):
                optimizer.zero_grad()
                x, y = map(torch.from_numpy, kills.batch(2 * step + rank, kills.GOOD))
                loss = ((model(x)[:, 0] - y) ** 2).mean()
                if (rank, step) == (SICK, STEP):
                    loss = loss + (loss - loss.detach()).sqrt()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            finite = all(bool(p.isfinite().all()) for p in linear.parameters())
            notes.setdefault(way, {})[name] = scaler.get_scale(), finite
    return notes
