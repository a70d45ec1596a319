"""Gradients that are clipped while they are still multiplied by a loss scale: noticed here.

torch.amp says nothing of it, and accelerate does it where `accelerator.scaler` is set under
`mixed_precision="no"`: the gradients that remain are too small by the loss scale. A scaler knows
its optimizers from the iteration before, so that the first iteration shows nothing.
"""

import warnings
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from polymp.backends.torch import compat
from polymp.callsite import outside
from polymp.errors import ScalerWarning

_scalers: "weakref.WeakSet[Any]" = weakref.WeakSet()
_told: "weakref.WeakSet[Any]" = weakref.WeakSet()

TOO_EARLY = (
    "gradients were clipped while they were still multiplied by the loss scale, so what is left of "
    "them is too small by that factor. Call scaler.unscale_(optimizer) before clipping. With "
    'accelerate, whose clipping does so only under mixed_precision="fp16", write '
    "accelerator.scaler.unscale_(optimizer.optimizer) before accelerator.clip_grad_norm_(...)."
)


def watch(scaler: Any) -> None:
    """Have clipping noticed between a scaler's `scale` and its `unscale_`."""
    _scalers.add(scaler)
    _install()


@cache
def _install() -> None:
    compat.before_clipping(_look)


def _look(parameters: Sequence[torch.Tensor]) -> None:
    """Gradients are about to be clipped: warn once for a scaler that has not unscaled them."""
    if torch.compiler.is_compiling():
        return
    for scaler in list(_scalers):
        if scaler not in _told and scaler._has_yet_to_unscale(parameters):
            _told.add(scaler)
            warnings.warn(TOO_EARLY, ScalerWarning, stacklevel=outside())
