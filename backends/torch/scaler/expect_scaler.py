"""`expect_scaler`: hear of an optimizer that steps on float16 gradients which nobody has scaled.

A check to switch on. Regions note that they were entered; a hook of torch's, which every optimizer
calls before it steps, looks at that note.
"""

import inspect
import warnings
import weakref
from typing import Any, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from polymp.backends.torch.autocast import regions
from polymp.backends.torch.compat import optimizers
from polymp.backends.torch.scaler import grad_scaler, loss_scalers, unscale
from polymp.errors import ScalerWarning, UnscaledError

# Modules whose functions step optimizers for a scaler.
_SCALERS = frozenset(
    module.__name__ for module in (grad_scaler, loss_scalers, torch.amp.grad_scaler)
)


def expect_scaler(action: Literal["warn", "raise"] = "warn") -> RemovableHandle:
    """Flag every optimizer step on gradients that came out of a float16 region without a scaler.

        with expect_scaler("raise"):
            train()

    A step is flagged if a float16 region of polymp's was entered, with gradients on, since the last
    step, the optimizer has gradients on that device, and neither polymp's scaler, `LossScalers` nor
    torch.amp's takes the step or has unscaled its gradients. A scaler that is disabled counts: it
    is there on purpose. An optimizer whose gradients torch.amp's has unscaled for a step by hand is
    not looked at again. Nothing is flagged in compiled code, nor in another thread than that of the
    regions. Where a model in float16 without a scaler and one in float32 are trained in turns, the
    step of the second may be flagged: the check does not follow gradients through the graph.

    Args:
        action: "warn" warns, once for each optimizer; "raise" raises before the step.

    Returns:
        The check; `remove()` ends it, and so does leaving it as a context manager.

    Raises:
        ValueError: `action` is another word.
    """
    if action not in ("warn", "raise"):
        raise ValueError(f"action must be 'warn' or 'raise', got {action!r}.")
    regions.entries.unscaled.clear()
    settled: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        entered = regions.entries.unscaled
        if not entered:
            return
        on = sorted(entered & {g.device.type for g in unscale.gradients(optimizer)})
        if not on:
            return
        if optimizer not in settled and not _stepped_by_a_scaler():
            if not optimizers.unscaled_by_torch(optimizer):
                if action == "raise":
                    raise UnscaledError(_message(optimizer, on))
                warnings.warn(_message(optimizer, on), ScalerWarning, stacklevel=3)
            settled.add(optimizer)
        entered.clear()

    return register_optimizer_step_pre_hook(look)


def _stepped_by_a_scaler() -> bool:
    """True if a scaler's function is among those that are running."""
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
