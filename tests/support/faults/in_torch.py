"""Six trainings in torch: a model, a batch, a loss and an optimizer, on the CPU.

`Training.step` is what a user writes: a region, a loss, a scaler that scales it, an update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import polymp
import polymp.torch

Loss = Callable[..., Tensor]


class Training:
    """A model and all that trains it; one of its steps is `step(*batch)`."""

    def __init__(
        self,
        model: nn.Module,
        batch: tuple[Tensor, ...],
        loss: Loss,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        *,
        policy: str = "torch-cuda",
        scaled: bool = True,
    ) -> None:
        self.model, self.batch, self.loss, self.policy = model, batch, loss, policy
        self.optimizer = optimizer(model.parameters())
        self.scaler = polymp.torch.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        self.dtype = torch.float16
        self.outside = polymp.policy(policy)
        self.scopes = polymp.torch.scoped(model, self.outside)

    def use(self, policy: polymp.Policy) -> None:
        """Compute by a policy from now on, in the modules by its scopes too."""
        self.scopes.remove()
        self.scopes, self.outside = polymp.torch.scoped(self.model, policy), policy.at("")

    def scale_by(self, scale: float) -> None:
        self.scaler = polymp.torch.GradScaler("cpu", init_scale=scale)

    def compute_in(self, dtype: str) -> None:
        self.dtype = getattr(torch, dtype)
        self.scaler = polymp.torch.GradScaler("cpu", enabled=dtype == "float16")

    def step(self, *batch: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        with polymp.torch.autocast("cpu", self.dtype, policy=self.outside):
            loss = self.loss(self.model, *batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def train(self, steps: int = 30) -> list[float]:
        return [self.step(*self.batch).item() for _ in range(steps)]


def adam(rate: float, eps: float = 1e-8) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.Adam(parameters, rate, eps=eps)


class Attention(nn.Module):
    """One head, causal: a token sees itself and what is before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.temperature = width**-0.5

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.matmul(self.q(x), self.k(x).transpose(1, 2)) * self.temperature
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -math.inf).softmax(-1)
        return torch.matmul(weights, self.v(x))


class Block(nn.Module):
    """A token embedding, a block of attention, and the logits of the next token."""

    def __init__(self, tokens: int = 11, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.norm, self.attention = nn.LayerNorm(width), Attention(width)
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.attention(self.norm(x)))


def attention() -> Training:
    """A token that follows from the two before it."""
    rows = torch.arange(12) * torch.randint(1, 11, (8, 1)) % 11

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return Training(Block(), (rows,), loss, adam(2e-2))


class Whiten(nn.Module):
    """Each channel of each image to variance 1, written out."""

    def forward(self, x: Tensor) -> Tensor:
        away = x - x.mean((2, 3), keepdim=True)
        variance = (away * away).mean((2, 3), keepdim=True)
        return away * torch.rsqrt(variance)


class Conv(nn.Module):
    """Two convolutions; what comes out of the first is whitened."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.whiten = nn.Conv2d(1, 8, 3, bias=False), Whiten()
        self.second, self.head = nn.Conv2d(8, 8, 3), nn.Linear(8, 2)

    def forward(self, images: Tensor) -> Tensor:
        x = functional.relu(self.whiten(self.first(images)))
        return self.head(functional.relu(self.second(x)).mean((2, 3)))


def convolution() -> Training:
    """Upright stripes or lying ones."""
    up = torch.tensor([1.0, -1.0]).repeat(4) * torch.ones(8, 1)
    labels = torch.arange(16) % 2
    images = torch.stack([(up, up.T)[int(label)] for label in labels])[:, None]
    images = images + torch.randn_like(images)

    def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(model(images), labels)

    return Training(Conv(), (images, labels), loss, adam(1e-2))


class Rates(nn.Module):
    """Logarithms of how often something happens in one unit of time."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.gelu(self.body(x)))[:, 0]


class Counts:
    """Counts in a time: the loss of a Poisson distribution, written out."""

    time = 1.0

    def __call__(self, model: nn.Module, x: Tensor, counts: Tensor) -> Tensor:
        logs = model(x)
        return (torch.exp(logs) * self.time - counts * logs).mean()


def counting() -> Training:
    """Counts that grow with one of the inputs; torch's table for CPUs leaves exp low."""
    x = torch.randn(64, 8)
    counts = torch.exp(x[:, 0] + 0.5)
    return Training(Rates(), (x, counts), Counts(), adam(2e-2), policy="torch-cpu")


class Recurrent(nn.Module):
    """A cell, written out, and what is read from its last state."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.into, self.round = nn.Linear(2, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 1)

    def forward(self, sequence: Tensor) -> Tensor:
        state = torch.zeros(len(sequence), self.round.in_features)
        for x in sequence.unbind(1):
            state = torch.tanh(self.into(x) + self.round(state))
        return self.head(state)[:, 0]


class Weighted:
    """The squared error, with a weight as where there are several losses."""

    weight = 1.0

    def __call__(self, model: nn.Module, sequence: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(model(sequence), target) * self.weight


def recurrent() -> Training:
    """The mean of a sequence, by an optimizer that does not see how large gradients are."""
    sequence = torch.randn(32, 6, 2)
    batch = (sequence, sequence.mean((1, 2)) * 3)
    return Training(Recurrent(), batch, Weighted(), adam(1e-2, eps=1e-24), scaled=False)


class Unit(nn.Module):
    """Each row divided by its mean magnitude; rows of zeros stay zero."""

    eps = 1e-4

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().mean(-1, keepdim=True) + self.eps)


class Bag(nn.Module):
    """The mean of the words of a sentence; word 0 fills short sentences up and is zero."""

    def __init__(self, words: int = 20, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width, padding_idx=0)
        self.mix, self.unit = nn.Linear(width, width, bias=False), Unit()
        self.head = nn.Linear(width, 2)

    def forward(self, words: Tensor) -> Tensor:
        there = (words != 0)[..., None]
        x = self.unit(self.mix(self.embedding(words))) * there
        return self.head(x.sum(1) / there.sum(1))


def embedding() -> Training:
    """Is word 3 in the sentence?"""
    words = torch.randint(4, 20, (32, 6))
    words[:, 4:] = 0
    words[::2, 1] = 3
    labels = (words == 3).any(1).long()

    def loss(model: nn.Module, words: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(model(words), labels)

    return Training(Bag(), (words, labels), loss, adam(2e-2))


class Residual(nn.Module):
    """A branch of two layers, added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.up, self.down = nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Stream(nn.Module):
    """Three residual blocks; what is read from their stream is normalised first."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.start = nn.Linear(4, width)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(3)))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-6), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.start(x))))[:, 0]


def stream() -> Training:
    """The product of two inputs; the weights of the stream are frozen where it starts."""
    x = torch.randn(64, 4)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(model(x), y)

    return Training(Stream(), (x, x[:, 0] * x[:, 1]), loss, adam(1e-2))


MADE = {f.__name__: f for f in (attention, convolution, counting, recurrent, embedding, stream)}


def made(name: str) -> Training:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MADE[name]()
