"""The weights of recurrent layers on CUDA, cast into the one buffer that cuDNN reads.

cuDNN wants all weights of a layer in one buffer, in an order of its own. A model's parameters lie
in such a buffer. Casts that are made one by one do not: torch warns, and puts them together at
every call.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from polymp.backends.torch.compat import modes, nn_modules

Prepare = Callable[[Sequence[Any], torch.dtype], Sequence[Any]]

# By op: cuDNN's number for the kind of cell (torch v2.13 torch/backends/cudnn/rnn.py), and how many
# gates it has.
_CELLS = {"rnn_relu": (0, 1), "rnn_tanh": (1, 1), "lstm": (2, 4), "gru": (3, 3)}


@cache
def prepare(name: str, device: str) -> Prepare | None:
    """Return a function that changes an op's arguments before they are cast; None without one."""
    if device != "cuda":
        return None
    if name == "_cudnn_rnn":
        return _without_buffer
    base, _, variant = name.partition(".")
    if base not in _CELLS or variant not in ("input", "data"):
        return None
    return lambda args, dtype: _together(base, variant, args, dtype)


def _without_buffer(args: Sequence[Any], dtype: torch.dtype) -> Sequence[Any]:
    """Take the buffer of weights out of the arguments of `_cudnn_rnn`, if weights will be cast.

    The kernel then makes the buffer from the weights.
    """
    _, weights, _, buffer, *_ = args
    if buffer is None or not _changes(weights, dtype):
        return args
    return (*args[:3], None, *args[4:])


def _together(base: str, variant: str, args: Sequence[Any], dtype: torch.dtype) -> Sequence[Any]:
    """Cast the weights among the arguments of a recurrent layer into one buffer."""
    at = 2 if variant == "input" else 3  # sequences of several lengths have their sizes in between
    weights = args[at]
    if len(args) <= at + 5 or not weights or not _changes(weights, dtype) or modes.is_recorded():
        return args
    first = weights[0]
    with torch.inference_mode(False), torch.no_grad():
        lows = [w.detach().to(dtype) for w in weights]
        if not torch.cudnn_is_acceptable(lows[0]):
            return args  # torch will not run cuDNN on it either
        has_biases, layers, *_ = args[at + 1 :]
        both = bool(args[at + 5])
        mode, gates = _CELLS[base]
        per_layer = len(weights) // (layers * (2 if both else 1))
        projects = per_layer == (5 if has_biases else 3)
        with torch.cuda.device_of(first):
            nn_modules.flatten_rnn_weights(
                lows,
                per_layer,
                first.size(1),
                mode,
                first.size(0) // gates,
                lows[per_layer - 1].size(0) if projects else 0,
                layers,
                variant == "input" and bool(args[at + 6]),
                both,
            )
    wants = torch.is_grad_enabled()
    cast = [
        _as_cast(w, low) if wants and w.requires_grad else low
        for w, low in zip(weights, lows, strict=True)
    ]
    return (*args[:at], cast, *args[at + 1 :])


def _changes(weights: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    """Return whether all weights are of one dtype, another one, that a region casts."""
    dtypes = {w.dtype for w in weights}
    wide = torch.float64 in dtypes or not all(d.is_floating_point for d in dtypes)
    return dtypes != {dtype} and len(dtypes) == 1 and not wide


def _as_cast(t: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return the numbers of `low` as a cast of `t`, which autograd can differentiate."""
    node: torch.Tensor = _Cast.apply(t, _Box(low))  # type: ignore[no-untyped-call]
    return node


class _Box(NamedTuple):
    """A tensor that autograd does not see, for it looks for tensors in arguments alone."""

    tensor: torch.Tensor


class _Cast(torch.autograd.Function):
    """A cast: forward returns the numbers that are in the buffer, backward casts the gradient."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, low: _Box) -> torch.Tensor:
        ctx.dtype = t.dtype
        return low.tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        return grad.to(ctx.dtype), None
