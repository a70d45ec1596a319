"""Trainings for the tests of `audit` and `locate`: all that a run leaves, as tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import polymp.torch
from polymp.torch import autocast

# Of each dtype: dtype, and the scaler that goes with it.
DTYPES: dict[str, tuple[torch.dtype | None, Any]] = {
    "fp32": (None, None),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, polymp.torch.GradScaler),
    "fp16, torch's scaler": (torch.float16, torch.amp.GradScaler),
}


class Attention(nn.Module):
    """A small transformer's block and head, on [batch, 6, 8]."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 3)
        self.again = again

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return seen.transpose(1, 2).flatten(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = checkpoint(self.attend, x, use_reentrant=False) if self.again else self.attend(x)
        return self.down(nn.functional.gelu(self.up(x + seen)).mean(1))


def mlp() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), torch.randn(4, 8)


def convolution() -> tuple[nn.Module, torch.Tensor]:
    """With batch norm, whose statistics are state, and dropout, which draws random numbers."""
    parts = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Dropout(0.3), nn.Flatten()
    return nn.Sequential(*parts, nn.Linear(4 * 9, 3)), torch.randn(4, 2, 5, 5)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    return Attention(), torch.randn(2, 6, 8)


def checkpointed() -> tuple[nn.Module, torch.Tensor]:
    return Attention(again=True), torch.randn(2, 6, 8)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    made.__name__: made for made in (mlp, convolution, transformer, checkpointed)
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "foreach": lambda p: torch.optim.Adam(p, 1e-2, foreach=True),
    "plain": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, foreach=False),
}

# Some of all kinds.
CASES = [
    ("mlp", "fp16", "fused", 1), ("mlp", "fp16, torch's scaler", "foreach", 2),
    ("convolution", "fp16", "plain", 1), ("convolution", "bf16", "fused", 1),
    ("checkpointed", "fp32", "foreach", 1),
]  # fmt: skip


class Training:
    """A model, its optimizer and scaler, and the step that trains it."""

    def __init__(
        self, model: str = "mlp", dtype: str = "fp16", optimizer: str = "plain", parts: int = 1
    ) -> None:
        torch.manual_seed(0)
        self.model, self.x = MODELS[model]()
        self.dtype, scaler = DTYPES[dtype]
        self.scaler = None if scaler is None else scaler("cpu", 2.0**10, growth_interval=2)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.parts = parts

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        region = nullcontext() if self.dtype is None else autocast(x.device.type, self.dtype)
        with region:
            return self.model(x).float().square().mean()

    def step(self, factor: float = 1.0) -> torch.Tensor:
        self.optimizer.zero_grad()
        for _ in range(self.parts):
            loss = self.loss(self.x * factor)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss

    def state(self) -> list[torch.Tensor]:
        """Copies of all that there is: parameters, gradients, states, the scale, random numbers."""
        found = [*self.model.state_dict().values()]
        for p in self.model.parameters():
            found += [] if p.grad is None else [p.grad]
            found += [x for x in self.optimizer.state.get(p, {}).values() if torch.is_tensor(x)]
        scales = {} if self.scaler is None else self.scaler.state_dict()
        numbers = [float(x) for x in scales.values() if isinstance(x, (int, float))]
        return [x.detach().clone() for x in (*found, torch.get_rng_state(), torch.tensor(numbers))]
