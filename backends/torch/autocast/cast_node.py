"""A held cast as autograd sees it: a node of its own for each use, the numbers shared."""

from typing import Any, NamedTuple

import torch


def as_cast(t: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The numbers of `low`, which autograd takes for a cast of `t`."""
    node: torch.Tensor = _Node.apply(t, _Box(low))  # type: ignore[no-untyped-call]
    return node


class _Box(NamedTuple):
    """A tensor that autograd is not to look at."""

    tensor: torch.Tensor


class _Node(torch.autograd.Function):
    """The cast as autograd sees it: the held numbers forward, a cast back backward."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, low: _Box) -> torch.Tensor:
        ctx.dtype = t.dtype
        return low.tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        return grad.to(ctx.dtype), None
