"""Single steps in torch that break, each with a float16 or bfloat16 region around it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polymp.torch import audit, autocast, locate


class Step:
    def __init__(self, forward: Callable[[Tensor], Tensor], x: Tensor, dtype: str = "float16"):
        self.forward, self.x, self.dtype = forward, x, dtype
        self.policy: Any = "torch-cpu"
        self.batch = (x,)

    def step(self, x: Tensor) -> Tensor:
        with autocast("cpu", getattr(torch, self.dtype), policy=self.policy):
            loss = self.forward(x)
        if loss.requires_grad:
            loss.backward()
        return loss.detach()

    def is_finite(self) -> bool:
        self.x.grad = None
        finite = bool(self.step(self.x).isfinite())
        return finite and (self.x.grad is None or bool(self.x.grad.isfinite().all()))

    def located(self) -> Any:
        return locate(self.step, *self.batch)

    def audited(self) -> Any:
        with audit() as found:
            self.step(*self.batch)
        return found


class Stale(Step):
    """A step after another one has left its gradient."""

    def is_finite(self) -> bool:
        self.x.grad = torch.full_like(self.x, math.nan)
        self.step(self.x)
        return bool(self.x.grad.isfinite().all())


def ones(*shape: int, value: float = 1.0) -> Tensor:
    return torch.full(shape, value)


class Heads(nn.Module):
    """Eager attention: queries and keys are transposed views, which a product copies first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1e-4))

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (2, 8)).transpose(1, 2)
        scores = (q @ q.mT).float() * self.scale
        return scores.softmax(-1).square().sum()


def filled(x: Tensor, value: float) -> Tensor:
    h = x.clone()
    h[:, 1] = value
    return (h * 2).sum()


def masked(x: Tensor) -> Tensor:
    h = x.clone()
    h[h > 0] = math.inf
    return h.relu().sum()


def inside(x: Tensor) -> Tensor:
    eps = torch.tensor(1e-9)
    return (x.half() / (x.half().norm(dim=-1, keepdim=True) + eps)).sum()


def beside(x: Tensor) -> Tensor:
    h = x / (x - 1)
    h[:, 1] = x[:, 1]
    return (h * 2).mean()


def removed(x: Tensor) -> Tensor:
    h = x.half() * 1e5
    h[h.isinf()] = 0
    return (h / (h * 0)).float().sum()


STEPS: dict[str, Callable[[], Step]] = {
    "scores of a view": lambda: Step(Heads().forward, ones(2, 5, 16, value=100.0)),
    "scores with a gradient": lambda: Step(
        Heads().forward, ones(2, 5, 16, value=100.0).requires_grad_()
    ),
    "complex product": lambda: Step(
        lambda x: (torch.complex(x, x) ** 2).abs().sum(), ones(3) * 3e38
    ),
    "complex quotient": lambda: Step(
        lambda x: (torch.complex(x, x) / torch.complex(x - 1, x - 1)).real.sum(), ones(3)
    ),
    "complex conjugate": lambda: Step(
        lambda x: (torch.complex(x, x).conj() * 3e38).imag.sum(), ones(3, value=2.0)
    ),
    "transform": lambda: Step(lambda x: torch.fft.rfft(x).abs().sum(), ones(64, value=1e38)),
    "upper bound": lambda: Step(
        lambda x: torch.log1p(-x.half().clamp(1e-3, 1 - 1e-6)).sum(), ones(3).requires_grad_()
    ),
    "upper bound in bfloat16": lambda: Step(
        lambda x: torch.log1p(-x.bfloat16().clamp(max=1 - 1e-4)).sum(), ones(3), "bfloat16"
    ),
    "sigmoid of 10": lambda: Step(
        lambda x: torch.log1p(-x.half().sigmoid()).sum(), ones(3, value=10.0).requires_grad_()
    ),
    "lower bound": lambda: Step(
        lambda x: x.half().clamp_min(1e-8).log().sum(), torch.zeros(3).requires_grad_()
    ),
    "bound in place": lambda: Step(lambda x: (1 / x.half().clamp_min_(1e-8)).sum(), torch.zeros(3)),
    "fill of where": lambda: Step(
        lambda x: torch.where(x > 0, x.half(), 1e-9).log().sum(), torch.zeros(3)
    ),
    "fill of a mask": lambda: Step(
        lambda x: x.half().masked_fill(x <= 0, 1e-9).log().sum(), torch.zeros(3)
    ),
    "eps inside": lambda: Step(
        lambda x: F.cosine_similarity(x.half(), x.half() + 1, dim=-1).sum(), torch.zeros(3, 4)
    ),
    "eps in a tensor": lambda: Step(inside, torch.zeros(3, 4)),
    "inf in a column": lambda: Step(lambda x: filled(x, math.inf), ones(3, 4)),
    "nan in a column": lambda: Step(lambda x: filled(x, math.nan), ones(3, 4)),
    "inf by a mask": lambda: Step(masked, ones(3, 4)),
    "fill_": lambda: Step(lambda x: (torch.empty_like(x).fill_(math.nan) * x).sum(), ones(3, 4)),
    "full": lambda: Step(lambda x: (torch.full((3, 4), math.inf) * x).sum(), ones(3, 4)),
    "stale gradient": lambda: Stale(lambda x: (x * 2).sum(), ones(3).requires_grad_()),
    "underflow of softmax": lambda: Step(
        lambda x: x.half().softmax(-1).log().sum(), torch.tensor([[0.0, 30.0]])
    ),
    "empty mask": lambda: Step(
        lambda x: (x.softmax(-1).half()[:, 0] * (x[:, 0] > 9)).sum() / (x[:, 0] > 9).float().sum(),
        torch.tensor([[0.0, 30.0], [1.0, 2.0]]),
    ),
    "a column beside Inf": lambda: Step(beside, ones(3, 4)),
    "Inf that was removed": lambda: Step(removed, ones(3, 4)),
    "root of a negative": lambda: Step(lambda x: x.sqrt().sum(), torch.tensor([6e-5, -2.0, 1.0])),
    "past 1": lambda: Step(lambda x: x.acos().sum(), torch.tensor([0.5, 1 + 2**-23])),
}
