"""The autograd node of a held cast: one for each use, all with the same numbers."""

from typing import Any, NamedTuple

import torch


def as_cast(t: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return the numbers of `low` as a cast of `t`, which autograd can differentiate."""
    node: torch.Tensor = _Node.apply(t, _Box(low))  # type: ignore[no-untyped-call]
    return node


class _Box(NamedTuple):
    """A tensor that autograd does not see, for it looks for tensors in arguments alone."""

    tensor: torch.Tensor


class _Node(torch.autograd.Function):
    """A cast: forward returns the held numbers, backward casts the gradient back."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, low: _Box) -> torch.Tensor:
        ctx.dtype = t.dtype
        return low.tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        return grad.to(ctx.dtype), None
