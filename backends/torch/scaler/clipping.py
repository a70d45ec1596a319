"""A warning for gradients that are clipped while they are still multiplied by a loss scale.

The gradients that remain are then too small by the loss scale. torch.amp does not notice it, and
accelerate does it where `accelerator.scaler` is set under `mixed_precision="no"`. A scaler knows
its optimizers from the iteration before, so that nothing is noticed in the first one.
"""

import threading
import warnings
import weakref
from collections.abc import Sequence
from functools import cache

import torch

from polymp.backends.torch.compat import nn_modules
from polymp.backends.torch.scaler.findings import Findings
from polymp.code_origin import outside
from polymp.errors import ScalerWarning


class Watched:
    """The scalers of this process whose gradients must not be clipped before they are unscaled.

    Attributes:
        warned: by the findings of a scaler, whether the warning was given for it.
        lock: held while it changes or is gone through.
    """

    def __init__(self) -> None:
        self.warned: weakref.WeakKeyDictionary[Findings, bool] = weakref.WeakKeyDictionary()
        self.lock: threading.Lock = threading.Lock()


watched: Watched = Watched()

TOO_EARLY = (
    "gradients were clipped while they were still multiplied by the loss scale, so what is left of "
    "them is too small by that factor. Call scaler.unscale_(optimizer) before clipping. With "
    'accelerate, whose clipping does so only under mixed_precision="fp16", write '
    "accelerator.scaler.unscale_(optimizer.optimizer) before accelerator.clip_grad_norm_(...)."
)


def watch(findings: Findings) -> None:
    """Warn of clipping between a scaler's `scale` and its `unscale_` from now on."""
    with watched.lock:
        watched.warned[findings] = False
    _install()


@cache
def _install() -> None:
    nn_modules.before_clipping(_look)


def _look(parameters: Sequence[torch.Tensor]) -> None:
    """Warn once for each scaler that has not unscaled gradients that are about to be clipped."""
    if torch.compiler.is_compiling():
        return
    with watched.lock:
        unwarned = [findings for findings, warned in watched.warned.items() if not warned]
    for findings in unwarned:
        if findings.has_yet_to_unscale(parameters):
            watched.warned[findings] = True
            warnings.warn(TOO_EARLY, ScalerWarning, stacklevel=outside())
