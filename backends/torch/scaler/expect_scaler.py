"""`expect_scaler`: a check that no optimizer steps on float16 gradients without a loss scaler.

Regions note that they were entered; a hook that torch calls before every optimizer's step reads
these notes.
"""

import inspect
import warnings
import weakref
from typing import Literal

import torch
import torch.utils.hooks as hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook

from polymp.backends.torch.autocast import regions
from polymp.backends.torch.scaler import grad_scaler, unscale
from polymp.errors import ScalerWarning, UnscaledError

# Modules whose functions step optimizers for a scaler.
_SCALERS = (grad_scaler.__name__, torch.amp.grad_scaler.__name__)


def expect_scaler(action: Literal["warn", "raise"] = "warn") -> hooks.RemovableHandle:
    """Flag optimizer steps on gradients of a float16 region that no scaler has scaled.

        with expect_scaler("raise"):
            train()

    A step is flagged if a float16 region of polymp's was entered, with gradients on, since the last
    step, the optimizer has gradients on that device, no scaler of polymp's or torch.amp's takes the
    step, and none of polymp's has unscaled the gradients. A disabled scaler counts as one. So a
    step by hand after `unscale_` of torch.amp's scaler is flagged.
    Nothing is flagged in compiled code, or in another thread than that of the regions. Where a
    model in float16 without a scaler and one in float32 are trained in turns, the step of the
    second may be flagged: the check does not follow gradients through the graph.

    Args:
        action: "warn" warns, once for each optimizer; "raise" raises before the step.

    Returns:
        A handle. `remove()` ends the check, and so does leaving the handle as a context manager.

    Raises:
        ValueError: `action` is neither "warn" nor "raise".
        UnscaledError: later, before a step that is flagged, if `action` is "raise".

    Warns:
        ScalerWarning: later, at a step that is flagged, if `action` is "warn".
    """
    if action not in ("warn", "raise"):
        raise ValueError(f"action must be 'warn' or 'raise', got {action!r}.")
    regions.stack.thread.unscaled.clear()
    settled: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def look(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if torch.compiler.is_compiling():
            return
        entered = regions.stack.thread.unscaled
        if not entered:
            return
        on = sorted(entered & {g.device.type for g in unscale.gradients(optimizer)})
        if not on:
            return
        if optimizer not in settled and not _stepped_by_a_scaler():
            if action == "raise":
                raise UnscaledError(_message(optimizer, on))
            warnings.warn(_message(optimizer, on), ScalerWarning, stacklevel=3)
            settled.add(optimizer)
        entered.clear()

    return register_optimizer_step_pre_hook(look)


def _stepped_by_a_scaler() -> bool:
    """Return whether a function of a scaler is running."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") in _SCALERS:
            return True
        frame = frame.f_back
    return False


def _message(optimizer: torch.optim.Optimizer, devices: list[str]) -> str:
    named = " and ".join(map(repr, devices))
    return (
        f"{type(optimizer).__name__} steps on gradients that came out of a float16 region "
        f"({named}) without a scaler: gradients below float16's smallest number are lost there. "
        f"Make scaler = GradScaler({devices[0]!r}), and in each iteration call "
        "scaler.scale(loss).backward(), scaler.step(optimizer) in place of optimizer.step(), and "
        "scaler.update(). Or use bfloat16, which needs no scaler."
    )
