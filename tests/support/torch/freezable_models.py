"""Models with weights of every kind, and readers of their state, for the tests of `freeze`.

They are apart from `models`, whose program runs torch.autocast where polymp is not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from polymp.backends.torch.weights import freeze_usage
from polymp.torch import autocast

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def frozen_weights(module: nn.Module) -> Any:
    return module.requires_grad_(False)


class Mixed(nn.Module):
    """Weights of every kind: two that are only cast, and one for each reason to stay."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5, 8)
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 8, bias=False)
        self.asked = nn.Linear(8, 8, bias=False)
        self.unused = nn.Linear(2, 2, bias=False)
        self.trained = nn.Linear(8, 8, bias=False)
        self.batch = nn.BatchNorm1d(8)
        self.register_buffer("doubles", torch.ones(8, dtype=torch.float64))
        self.requires_grad_(False)
        self.trained.requires_grad_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.last(self.norm(self.first(x)).relu())
        h = self.asked(h.to(self.asked.weight.dtype))
        h = self.batch(self.trained(h) + self.table.weight[1])
        return h * self.doubles


def bits(t: torch.Tensor) -> bytes:
    return t.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def held(model: nn.Module) -> dict[str, Any]:
    """All that a model is, to the bit: objects, dtypes, memory, version, class, attributes."""
    every = {
        name: (id(t), t.dtype, t.data_ptr(), t._version, t.requires_grad, bits(t))
        for name, t in freeze_usage.names(model).items()
    }
    return every | {
        path: (type(m), sorted(map(str, vars(m)))) for path, m in model.named_modules() if path
    } | {"": (type(model), sorted(map(str, vars(model))))}  # fmt: skip


def plainly(model: nn.Module, x: torch.Tensor, **given: Any) -> torch.Tensor:
    with autocast("cpu", **given):
        return model(x)


class Uses(nn.Module):
    """Two weights, used as a function says."""

    def __init__(self, use: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.use = use
        self.weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.other = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self, self.other(x))
