"""`catch` on ranks: a bad batch on one of them. For `ranks.launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from polymp.errors import BadStepError
from polymp.torch import catch
from tests.support.torch.ranks import bits
from tests.support.torch.sharded_models import CUTS, Cut, data


def _state(cut: Cut) -> list[Any]:
    return [bits(cut.full()[name]) for name in sorted(cut.full())]


def caught(name: str, rank: int) -> dict[str, Any]:
    """Two good steps, a bad one, and what was found."""
    cut = CUTS[name]()
    optimizer = torch.optim.Adam(cut.model.parameters(), lr=0.01)

    def train(factor: float) -> torch.Tensor:
        optimizer.zero_grad()
        x, t = (part.chunk(cut.shares)[cut.share] for part in data(0))
        loss = cut.model(x * factor, t)
        loss.backward()
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    step = catch(train, every=10)
    step(1.0)
    step(0.5)
    before = _state(cut)
    try:
        step(float("nan") if rank == 0 else 1.0)
        return {"step": None}
    except BadStepError as error:
        report: Any = error.report
    notes = {"step": report.step, "found": report.found, "put back": _state(cut) == before}
    step(1.0)
    return {**notes, "goes on": _state(cut) != before}


def main(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    return {name: caught(name, rank) for name in ("ddp", "fsdp2")}
