"""A model with a weight of each kind, for the tests of held casts, and its loss in a region."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from polymp.torch import autocast


class Net(nn.Module):
    """Two trained layers, a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("table", torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.b(torch.tanh(self.a(self.frozen(x) @ self.table)))
        return found


def loss_of(model: nn.Module, x: torch.Tensor, **given: Any) -> torch.Tensor:
    with autocast("cpu", **given):
        return model(x).float().square().mean()  # type: ignore[no-any-return]
