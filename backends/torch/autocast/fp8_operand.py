"""Operands of products in 8 bits: how torch quantises, and what is quantised only once.

The activation that was quantised last is kept as long as it lives: the queries, keys and values of
attention are products of one activation, and save it for backward once. `fp8_weight` has weights.
"""

import threading
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from polymp.backends.torch.autocast.dtype_names import DTYPES
from polymp.backends.torch.compat import modes
from polymp.fp8 import quantise
from polymp.fp8.recipes import Axis, Recipe
from polymp.fp8.verbs import Verbs

_EXPONENT = 0x7F800000  # the bits of a float32 that say its power of two


def _amax(array: torch.Tensor, axis: Axis) -> torch.Tensor:
    keep, top = axis is not None, float("inf")
    amax: torch.Tensor
    amax = torch.linalg.vector_norm(array, top, dim=axis, keepdim=keep, dtype=torch.float32)
    return amax


def _where(condition: torch.Tensor, one: Any, other: Any) -> torch.Tensor:
    return torch.where(condition, one, other).float()  # of two numbers, the default dtype


VERBS = Verbs(
    amax=_amax,
    float32=torch.Tensor.float,
    where=_where,
    clip=torch.clamp,
    cast=lambda array, name: array.to(DTYPES[name]),
    isfinite=torch.isfinite,
    power_of_two=lambda scale: (scale.view(torch.int32) & _EXPONENT).view(torch.float32),
)


class InBits(NamedTuple):
    """An array in 8 bits.

    Attributes:
        array: of an 8-bit dtype, contiguous.
        scale: that it was multiplied by; float32, [] or with length 1 at the axis.
    """

    array: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True)
class Quantisation:
    """How an operand is quantised; equal for operands that get the same bits.

    Attributes:
        recipe: the formats and scales.
        role: of the operand: "activation", "weight" or "gradient".
        axis: along which scales are computed; None for one scale.
    """

    recipe: Recipe
    role: str
    axis: Axis

    def __call__(self, array: torch.Tensor) -> InBits:
        """Quantise a tensor of two dimensions."""
        scale = quantise.scale_of(VERBS, array, self.recipe, self.role, self.axis)
        format = self.recipe.format_of(self.role)
        return InBits(quantise.quantised(VERBS, array, scale, format).contiguous(), scale)


class _Latest(threading.local):
    """The activation that this thread quantised last, as far as it is alive.

    Attributes:
        of: a weak reference to it.
        stamp: its version and address, and the stream, when it was quantised.
        found: what it became, by the way of quantisation.
    """

    def __init__(self) -> None:
        self.of: weakref.ref[torch.Tensor] | None = None
        self.stamp: tuple[Any, ...] = ()
        self.found: dict[Quantisation, InBits] = {}


_latest = _Latest()


def of_activation(x: torch.Tensor, how: Quantisation) -> InBits:
    """Quantise an activation, flattened to two dimensions; the latest one once."""
    flat = x.reshape(-1, x.shape[-1])
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_inference() or modes.is_recorded():
        return how(flat)
    stamp = x._version, x.data_ptr(), x.shape, x.stride(), _stream(x)
    mine = _latest
    if mine.of is None or mine.of() is not x or mine.stamp != stamp:
        found: dict[Quantisation, InBits] = {}
        mine.found, mine.stamp = found, stamp
        mine.of = weakref.ref(x, lambda _: found.clear())
    if how not in mine.found:
        mine.found[how] = how(flat)
    return mine.found[how]


def _stream(x: torch.Tensor) -> tuple[int, bool] | None:
    if not x.is_cuda:
        return None
    capturing = torch.cuda.is_current_stream_capturing()
    return torch.cuda.current_stream(x.device).stream_id, capturing
