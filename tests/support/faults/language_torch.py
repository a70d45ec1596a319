"""A small language model in torch, in the shapes of the example and of Llama, that can break."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polymp.torch import GradScaler, autocast

WIDTH, HEADS, TOKENS = 16, 2, 11


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        scores = (q @ k.mT) * (WIDTH // HEADS) ** -0.5
        seen: Tensor = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return seen


class Feed(nn.Module):
    """The part after attention: with a GELU, or gated as in Llama."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH) if gated else None
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        up = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        found: Tensor = self.down(up)
        return found


class Block(nn.Module):
    def __init__(self, llama: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = (
            nn.RMSNorm(WIDTH) if llama else nn.LayerNorm(WIDTH) for _ in range(2)
        )
        self.attention, self.feed = Attention(), Feed(llama)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))  # type: ignore[no-any-return]


class Language(nn.Module):
    def __init__(self, llama: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(llama) for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: Tensor, sizes: Tensor) -> Tensor:
        x = self.embed(tokens) * sizes[..., None]
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Broken:
    """A training of it, and its step.

    Args:
        llama: the shape.
        dtype: "float16" or "bfloat16".
        scaled: whether a scaler scales the loss.
        by: "polymp", "torch.amp" for torch's region and scaler, or "" for no region.
    """

    def __init__(self, llama: bool, dtype: str, scaled: bool, by: str = "polymp") -> None:
        torch.manual_seed(0)
        self.model, self.dtype, self.by = Language(llama), getattr(torch, dtype), by
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.scaler: Any = GradScaler("cpu", enabled=scaled and dtype == "float16")
        if scaled and (dtype == "bfloat16" or by == "torch.amp"):
            self.scaler = torch.amp.GradScaler("cpu")  # ours says that it is of no use in bfloat16

    def region(self) -> AbstractContextManager[Any]:
        if self.by == "torch.amp":
            return torch.autocast("cpu", self.dtype)
        return autocast("cpu", self.dtype, policy="amp") if self.by else nullcontext()

    def step(self, tokens: Tensor, sizes: Tensor, gap: Tensor, rate: float) -> Tensor:
        self.optimizer.zero_grad()
        self.optimizer.param_groups[0]["lr"] = rate
        with self.region():
            scores = self.model(tokens[:, :-1], sizes[:, :-1])
            loss = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()) + gap.log()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def weight(self, path: str) -> Tensor:
        return self.model.get_parameter(path)

    def run(self, step: Any, batch: dict[str, Any]) -> None:
        """Do a step with numpy arrays."""
        given = {k: torch.from_numpy(v) for k, v in batch.items() if k != "rate"}
        step(**given, rate=batch["rate"])

    def multiply(self, path: str, factor: float) -> None:
        with torch.no_grad():
            self.weight(f"{path}.weight").mul_(factor)
