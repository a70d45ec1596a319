"""Outputs multiplied by the scale, and a note of those that are not finite."""

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch

from polymp.backends.torch.autocast import regions
from polymp.backends.torch.compat import dtensor, modes
from polymp.backends.torch.scaler import unscale
from polymp.code_origin import outside
from polymp.errors import ScalerWarning
from polymp.scaling.gradient_report import NO_EFFECT

Outputs = TypeVar("Outputs")


def scaled(outputs: Outputs, scale_of: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
    """Multiply every tensor of a structure by the scale.

    Autograd saves the scale itself, where it is on the tensor's device: a backward pass after an
    update that has changed it raises, as with torch.amp.

    Args:
        outputs: a tensor, or an iterable of outputs.
        scale_of: returns the scale, float32 []; called with each tensor.

    Returns:
        The same structure; lists and tuples keep their type, other iterables become iterators.

    Raises:
        ValueError: something in `outputs` is neither a tensor nor an iterable.
    """
    if isinstance(outputs, torch.Tensor):
        return cast(Outputs, outputs * unscale.moved(scale_of(outputs), outputs.device))
    if isinstance(outputs, Iterable):
        items: Any = map(lambda item: scaled(item, scale_of), outputs)
        if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
            return type(outputs)(*items)
        return type(outputs)(items) if isinstance(outputs, (list, tuple)) else items
    raise ValueError("outputs must be a Tensor or an iterable of Tensors")


def warned_of_bfloat16(device: str) -> bool:
    """Warn if the region that a loss comes from is bfloat16, where scaling has no effect."""
    low = regions.latest_low(device)
    if low is torch.bfloat16:
        level = 5 if torch.compiler.is_compiling() else outside()
        warnings.warn(NO_EFFECT, ScalerWarning, stacklevel=level)
    return low is not None


def note(loss: torch.Tensor, noted: torch.Tensor) -> None:
    """Make `noted`, float32 [], NaN if the loss is not finite. The host does not wait."""
    values = dtensor.local(loss.detach())
    if values.is_complex():
        values = values.abs()
    if torch.compiler.is_compiling():  # inductor takes x * 0 for 0
        fine = unscale.moved(values.isfinite().all(), noted.device)
        noted.copy_(torch.where(fine, noted, math.nan))
    elif not modes.in_transform(values):  # torch.func's transforms cannot write to tensors outside
        values = (values * 0).sum() if values.dim() else values
        noted.add_(unscale.moved(values, noted.device), alpha=0)
