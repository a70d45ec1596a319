"""Small trainings, to compare low weights with float32 weights under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from polymp.torch import autocast, low_weights

Batch = tuple[torch.Tensor, torch.Tensor]


class Tokens(nn.Module):
    """One block of a transformer: embedding, norms, attention, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 16)
        self.norm, self.last = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.head = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        h = h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.head(self.last(h))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 4)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp, "convolutions": convolutions, "tokens": Tokens,
}  # fmt: skip


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def batch(name: str, step: int) -> Batch:
    g = torch.Generator().manual_seed(step)
    if name == "tokens":
        x = torch.randint(0, 16, (4, 9), generator=g)
        return x[:, :-1], x[:, 1:]
    shape = (16, 8) if name == "mlp" else (8, 1, 6, 6)
    x = torch.randn(shape, generator=g)
    return x, x.flatten(1)[:, :4].sin()


def loss_of(name: str, model: nn.Module, step: int, dtype: torch.dtype | None = None) -> Any:
    """The loss of one batch; the model runs in a region of the low dtype."""
    x, y = batch(name, step)
    with autocast("cpu", dtype=dtype or torch.bfloat16):
        out = model(x)
    if name == "tokens":
        return F.cross_entropy(out.float().flatten(0, 1), y.flatten())
    return F.mse_loss(out.float(), y)


def step(model: nn.Module, optimizer: Any, at: int) -> None:
    optimizer.zero_grad()
    loss_of("mlp", model, at).backward()
    optimizer.step()


def low(name: str, model: nn.Module, optimizer: Any, mode: str | None, **options: Any) -> Any:
    """The optimizer with low weights, as the model's uses of them allow; None: as it is."""
    if mode is None:
        return optimizer
    return low_weights(optimizer, mode, keep=lambda: loss_of(name, model, 0), **options)


def train(
    name: str,
    mode: str | None,
    steps: int,
    make: Callable[[Any], Any] | None = None,
    **options: Any,
) -> tuple[nn.Module, Any, list[float]]:
    """Train a model; every step with a closure, which any optimizer takes."""
    model = made(name)
    parameters = list(model.parameters())
    optimizer = make(parameters) if make else torch.optim.AdamW(parameters, lr=1e-3)
    optimizer = low(name, model, optimizer, mode, **options)
    losses = []
    for step in range(steps):

        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            loss = loss_of(name, model, step)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return model, optimizer, losses


def weights(model: nn.Module, optimizer: Any = None) -> dict[str, torch.Tensor]:
    """The weights in float32: what an optimizer with low weights steps on."""
    if hasattr(optimizer, "float32_state_dict"):
        return optimizer.float32_state_dict(model)
    return {name: t.detach().float() for name, t in model.state_dict().items()}
