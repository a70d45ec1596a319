"""The decoder of `tests.support.decoder` in torch, and a step of its training."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polymp.torch
from tests.support import decoder
from tests.support.decoder import EPS, OTHER_EPS, RATE, Config


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Attention(nn.Module):
    """Causal, with rotary embeddings; spelled out."""

    cos: Tensor
    sin: Tensor
    seen: Tensor

    def __init__(self, config: Config, fault: str) -> None:
        super().__init__()
        width, self.heads, self.mask = config.width, config.heads, config.mask
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        cos, sin = map(torch.tensor, decoder.rotation(config))
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        self.register_buffer("seen", torch.tensor(decoder.seen(config, fault)))
        self.scale = 1.0 if fault == "scale" else (width // config.heads) ** -0.5
        self.turned = None
        if fault == "rope":
            self.turned = tuple(map(torch.tensor, decoder.rotation(config, 1)))

    def forward(self, x: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(-2, -3)

        q = _rotated(split(self.query(x)), *(self.turned or (self.cos, self.sin)))
        k = _rotated(split(self.key(x)), self.cos, self.sin)
        scores = q @ k.transpose(-1, -2)
        if self.scale != 1.0:
            scores = scores * self.scale
        scores = scores.masked_fill(~self.seen, self.mask)
        mixed = F.softmax(scores, -1).to(q.dtype) @ split(self.value(x))
        return self.out(mixed.transpose(-2, -3).flatten(-2))


class Feed(nn.Module):
    def __init__(self, config: Config, fault: str) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.hidden, bias=fault != "bias")
        self.down = nn.Linear(config.hidden, config.width)
        self.approximate = "tanh" if fault == "gelu" else "none"

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class Block(nn.Module):
    def __init__(self, config: Config, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.wide = fault == "dtype" and bool(config.low)
        eps = OTHER_EPS if fault == "eps" else EPS
        self.before, self.after = nn.LayerNorm(config.width, eps), nn.LayerNorm(config.width, EPS)
        self.attention, self.feed = Attention(config, fault), Feed(config, fault)
        if fault == "dtype" and not config.low:
            self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        if self.wide:
            with polymp.torch.autocast(x.device.type, enabled=False):
                return self._layer(x.float())
        return self._layer(x.bfloat16()).float() if self.fault == "dtype" else self._layer(x)

    def _layer(self, x: Tensor) -> Tensor:
        mixed = self.attention(self.before(x))
        x = x + mixed
        if self.fault == "residual":
            x = x + mixed
        if self.fault == "dropout":
            x = F.dropout(x, 0.1, training=True)
        return x + self.feed(self.after(x))


class Decoder(nn.Module):
    """Tokens [batch, time] to scores [batch, time, words]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.table = nn.Embedding(config.words, config.width)
        self.blocks = nn.ModuleList(
            Block(config, config.fault_of(at)) for at in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.width, EPS)
        self.head = nn.Linear(config.width, config.words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Training:
    """A decoder, its batch, and Adam; `compiled` is the model, and not the loss."""

    def __init__(
        self,
        config: Config,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        compiled: bool = False,
        device: str = "cpu",
    ) -> None:
        self.config, self.device = config, device
        with torch.device(device):
            self.model = Decoder(config)
        if dtype != torch.float32:
            self.model.to(dtype)
        self._forward: Any = torch.compile(self.model) if compiled else self.model
        if config.low:
            polymp.torch.scoped(self.model, config.policy("blocks."))
        self.start(seed)

    def start(self, seed: int, order: Sequence[int] | None = None) -> None:
        """Begin anew with the weights and tokens of a seed, the rows of the batch in some order."""
        made = decoder.weights(self.config, seed)
        self.model.load_state_dict({p: torch.tensor(x) for p, x in made.items()}, strict=False)
        rows = decoder.tokens(self.config, seed)
        self.tokens = torch.tensor(rows if order is None else rows[order], device=self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), RATE, eps=self.config.adam_eps)

    def step(self) -> Tensor:
        region: Any = contextlib.nullcontext()
        if self.config.low:
            low = getattr(torch, self.config.low)
            region = polymp.torch.autocast(self.device, dtype=low, policy="amp")
        torch.manual_seed(1)
        self.optimizer.zero_grad()
        with region:
            scores = self._forward(self.tokens[:, :-1])
            loss = F.cross_entropy(scores.flatten(0, 1), self.tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        return loss.detach()
