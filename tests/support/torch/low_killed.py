"""A run on low weights that saves after every step and can be killed at any moment.

python -m tests.support.torch.low_killed MODE FOLDER        train, or go on from FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tests.support.torch.low_training import loss_of, low, made

STEPS = 100
FILE = "run.pt"


def start(mode: str) -> tuple[Any, Any]:
    model = made("mlp")
    return model, low("mlp", model, torch.optim.AdamW(model.parameters(), lr=1e-3), mode)


def step(model: Any, optimizer: Any, at: int) -> None:
    optimizer.zero_grad()
    loss_of("mlp", model, at).backward()
    optimizer.step()


def train(mode: str, folder: Path | None = None) -> tuple[Any, Any]:
    """Train to the end, from the beginning or from where the folder's file ends."""
    model, optimizer = start(mode)
    first = 0
    if folder is not None and (folder / FILE).exists():
        saved = torch.load(folder / FILE, weights_only=True)
        first = saved["step"]
        optimizer.load_state_dict(saved["optimizer"])
        model.load_state_dict(saved["model"])
    for at in range(first, STEPS):
        step(model, optimizer, at)
        if folder is not None:
            saved = {
                "step": at + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
            }  # fmt: skip
            torch.save(saved, folder / "draft.pt")
            (folder / "draft.pt").replace(folder / FILE)
    return model, optimizer


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]))
