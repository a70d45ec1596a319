"""A training in 8 bits that can be saved and loaded; its twin is in tests/support/jax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from polymp.torch import GradScaler, autocast
from tests.support.torch.fp8_models import Net

PARTS = ("model", "optimizer", "scaler")


class Run:
    """A model with its optimizer and a scaler, whose scale doubles every two steps.

    Args:
        policy: of the region of every step.
        seed: of the model's weights.
    """

    def __init__(self, policy: Any, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.policy = policy
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def step(self, number: int) -> Any:
        """Train on the batch of that number; the bits of the loss and of all that is left."""
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(number))
        self.optimizer.zero_grad()
        with autocast("cpu", torch.bfloat16, policy=self.policy):
            loss = (self.model(x).float() ** 2).mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item(), self.bits()

    def bits(self) -> Any:
        """The bits of weights and of the optimizer's state, and the numbers of the scaler."""
        states = self.optimizer.state_dict()["state"].values()
        tensors = [*self.model.parameters(), *(t for state in states for t in state.values())]
        return [t.detach().numpy().tobytes() for t in tensors], self.scaler.state_dict()

    def save(self, path: Path) -> None:
        torch.save({part: getattr(self, part).state_dict() for part in PARTS}, path)

    def load(self, path: Path, without: str = "") -> None:
        """Go on from a file; one of `PARTS` may be left as it is."""
        for part, state in torch.load(path, weights_only=True).items():
            if part != without:
                getattr(self, part).load_state_dict(state)
