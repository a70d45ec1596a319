"""Outputs multiplied by the scale; those that are not finite by NaN."""

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


def scaled(
    outputs: Outputs,
    scale_for: Callable[[torch.device], torch.Tensor],
    factor_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Outputs:
    """Multiply every tensor of a structure by its factor.

    Args:
        outputs: a tensor, or an iterable of outputs.
        scale_for: returns the scale, float32 []; called with the device of the first tensor.
        factor_of: returns the factor of a tensor, from the tensor and the scale on its device.

    Returns:
        The same structure; lists and tuples keep their type, other iterables become iterators.

    Raises:
        ValueError: something in `outputs` is neither a tensor nor an iterable.
    """
    if isinstance(outputs, torch.Tensor):
        scale = unscale.moved(scale_for(outputs.device), outputs.device)
        return cast(Outputs, outputs * factor_of(outputs, scale))
    copies: list[unscale.OnDevices] = []

    def factor_on_device(loss: torch.Tensor) -> torch.Tensor:
        if not copies:  # so that `update` between two backwards does not change what is saved
            copies.append(unscale.OnDevices(scale_for(loss.device)))
        return factor_of(loss, copies[0].get(loss.device))

    return cast(Outputs, _multiply(outputs, factor_on_device))


def _multiply(outputs: object, factor_of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Multiply every tensor of a structure by its factor."""
    if isinstance(outputs, torch.Tensor):
        return outputs * factor_of(outputs)
    if isinstance(outputs, Iterable):
        items = map(lambda item: _multiply(item, factor_of), outputs)
        if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
            return type(outputs)(*items)
        return type(outputs)(items) if isinstance(outputs, (list, tuple)) else items
    raise ValueError("outputs must be a Tensor or an iterable of Tensors")


def warned_of_bfloat16(device: str) -> bool:
    """Warn if the region that a loss comes from is bfloat16, where scaling has no effect.

    Args:
        device: the device type of the loss.

    Returns:
        False if no region was entered for the device yet.
    """
    low = regions.latest_low(device)
    if low is torch.bfloat16:
        level = 5 if torch.compiler.is_compiling() else outside()
        warnings.warn(NO_EFFECT, ScalerWarning, stacklevel=level)
    return low is not None


def factor(loss: torch.Tensor, scale: torch.Tensor, noted: torch.Tensor) -> torch.Tensor:
    """Return the factor of a loss: the scale, or NaN if the loss is not finite.

    With NaN its gradients are NaN, and whichever step uses them is skipped; a loss that never goes
    backward has no effect. It is also noted on the device that a loss was not finite, which tells
    it apart from an overflow. The host waits for neither.

    Args:
        loss: not scaled.
        scale: float32 [], on the loss's device.
        noted: float32 []; becomes NaN if the loss is not finite.

    Returns:
        float32 [].
    """
    values = dtensor.local(loss.detach())
    if values.is_complex():
        values = values.abs()
    if torch.compiler.is_compiling():  # inductor takes x * 0 for 0
        fine = values.isfinite().all()
        noted.copy_(torch.where(unscale.moved(fine, noted.device), noted, math.nan))
        return torch.where(fine, scale, math.nan)
    if values.dim():
        values = (values * 0).sum()
    scale = torch.add(scale, values, alpha=0)
    if not modes.in_transform(scale):  # torch.func's transforms cannot write to tensors outside
        noted.add_(unscale.moved(scale, noted.device), alpha=0)
    return scale
