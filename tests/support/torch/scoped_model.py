"""A model with a head in float32, by scope or by hand; run as a program, one rank that trains it.

The processes meet in a file and talk gloo over the loopback interface.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import polymp
from polymp.torch import autocast, scoped

BF16 = torch.bfloat16
HEAD = polymp.policy("torch-cpu").override(name="head", scopes={"*.lm_head": {"linear": "fp32"}})


def seeded(made: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return made()


class Model(nn.Module):
    """A body in the region's dtype, and a head; by hand, the head is outside of it."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.lm_head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        if not self.by_hand:
            return self.lm_head(h)
        with torch.autocast("cpu", enabled=False):
            return self.lm_head(h.float())


def train(model: nn.Module, wrap: Callable[[nn.Module], nn.Module], rank: int) -> list[Any]:
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    notes = []
    for step in range(3):
        made = torch.Generator().manual_seed(10 * step + rank)
        with autocast("cpu", BF16):
            y = wrapped(torch.randn(6, 8, generator=made))
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        notes.append((str(y.dtype), [p.detach().numpy().tobytes() for p in model.parameters()]))
    return notes


def main(rank: int, ranks: int, folder: Path) -> list[Any]:
    """Return the notes of a rank."""
    ddp = nn.parallel.DistributedDataParallel
    model, before, by_hand = (seeded(functools.partial(Model, b)) for b in (False, False, True))
    scoped(model, HEAD)

    def scoped_after(inner: nn.Module) -> nn.Module:
        wrapped = ddp(inner)
        scoped(wrapped.module, HEAD)
        return wrapped

    notes = [train(model, ddp, rank), train(before, scoped_after, rank)]
    return [*notes, train(by_hand, ddp, rank)]
