"""Models whose products run in 8 bits, and what a step of them makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import polymp
from polymp.torch import GradScaler, autocast
from tests.support.torch import saved_dtypes

RECIPES = ("tensorwise", "rowwise", "rowwise_gw_hp")


def policy(recipe: str = "tensorwise") -> polymp.Policy:
    return polymp.policy("fp8").override(name="fp8", recipe=recipe)


class Net(nn.Module):
    """Four products of one input, or of results of others, without an op that rounds otherwise."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.a = nn.Linear(width, 2 * width, bias=False)
        self.b = nn.Linear(2 * width, width, bias=False)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x))) + torch.maximum(self.q(x), self.k(x))


class Llama(nn.Module):
    """A block as Llama has it: normalisation, attention, a gated network; no biases."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        shape = batch, length, self.heads, width // self.heads
        q, k, v = (part(y).view(shape).transpose(1, 2) for part in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LowRank(nn.Module):
    """A frozen layer, and a pair of small ones beside it that are trained."""

    def __init__(self, width: int = 64, rank: int = 16) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def step(
    model: nn.Module,
    x: torch.Tensor,
    policy: Any,
    run: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """The output, the input's gradient and the gradients of the parameters of one step."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    with autocast(x.device.type, torch.bfloat16, policy=policy):
        y = (model if run is None else run)(x)
    (y.float() ** 2).sum().backward()
    found = {"output": y.detach(), "input": x.grad}
    for name, p in model.named_parameters():
        if p.grad is not None:
            found[name] = p.grad.clone()
    return found


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """The names of the tensors that differ in a bit, in their dtype, or are there once only."""
    return sorted(
        name
        for name in one.keys() | other.keys()
        if name not in one
        or name not in other
        or one[name].dtype is not other[name].dtype
        or not torch.equal(one[name], other[name])
    )


def saved(
    model: nn.Module, x: torch.Tensor, policy: Any, loss: Callable[[torch.Tensor], Any] | None
) -> list[torch.UntypedStorage]:
    """All memory that a forward pass saves for backward, parameters aside."""
    with autocast("cpu", torch.bfloat16, policy=policy):
        found = saved_dtypes.held(lambda: (loss or model)(x), list(model.parameters()))
    return list({m.data_ptr(): m for m in (t.untyped_storage() for t in found)}.values())


def saved_bytes(
    model: nn.Module,
    x: torch.Tensor,
    policy: Any,
    loss: Callable[[torch.Tensor], Any] | None = None,
) -> int:
    return sum(memory.nbytes() for memory in saved(model, x, policy, loss))


def saved_casts(model: nn.Module, x: torch.Tensor, policy: Any) -> int:
    """Of these bytes, those of bfloat16 casts of parameters."""
    parameters = [p.detach().bfloat16() for p in model.parameters()]
    casts = {p.view(torch.uint8).numpy().tobytes() for p in parameters}
    empty = torch.empty(0, dtype=torch.uint8)
    found = saved(model, x, policy, None)
    return sum(m.nbytes() for m in found if empty.set_(m).numpy().tobytes() in casts)


PARTS = ("model", "optimizer", "scaler")


class Run:
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
        states = self.optimizer.state_dict()["state"].values()
        tensors = [*self.model.parameters(), *(t for state in states for t in state.values())]
        return [t.detach().numpy().tobytes() for t in tensors], self.scaler.state_dict()

    def save(self, path: Path) -> None:
        torch.save({part: getattr(self, part).state_dict() for part in PARTS}, path)

    def load(self, path: Path, without: str = "") -> None:
        for part, state in torch.load(path, weights_only=True).items():
            if part != without:
                getattr(self, part).load_state_dict(state)
