"""Gradients that are clipped while they are still multiplied by a loss scale: noticed here.

torch.amp says nothing of it, and accelerate does it where `accelerator.scaler` is set under
`mixed_precision="no"`: the gradients that remain are too small by the loss scale. A scaler knows
its optimizers from the iteration before, so that the first iteration shows nothing.
"""

import warnings
import weakref
from collections.abc import Sequence
from functools import cache

import torch

from polymp.backends.torch.compat import nn_modules
from polymp.backends.torch.scaler.findings import Findings
from polymp.code_origin import outside
from polymp.errors import ScalerWarning

# What is watched, and whether the warning was given for it.
_warned: "weakref.WeakKeyDictionary[Findings, bool]" = weakref.WeakKeyDictionary()

TOO_EARLY = (
    "gradients were clipped while they were still multiplied by the loss scale, so what is left of "
    "them is too small by that factor. Call scaler.unscale_(optimizer) before clipping. With "
    'accelerate, whose clipping does so only under mixed_precision="fp16", write '
    "accelerator.scaler.unscale_(optimizer.optimizer) before accelerator.clip_grad_norm_(...)."
)


def watch(findings: Findings) -> None:
    """Have clipping noticed between a scaler's `scale` and its `unscale_`."""
    _warned[findings] = False
    _install()


@cache
def _install() -> None:
    nn_modules.before_clipping(_look)


def _look(parameters: Sequence[torch.Tensor]) -> None:
    """Gradients are about to be clipped: warn once for a scaler that has not unscaled them."""
    if torch.compiler.is_compiling():
        return
    for findings, warned in list(_warned.items()):
        if not warned and findings.has_yet_to_unscale(parameters):
            _warned[findings] = True
            warnings.warn(TOO_EARLY, ScalerWarning, stacklevel=outside())
