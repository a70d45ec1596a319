"""A loss scaler in a trainer, which calls backward, unscale and step, and never `update`.

The scale changes when all optimizers that share a backward pass have stepped: after an update, the
gradients of the others would be divided by another scale. Where a trainer does not know all its
optimizers, the scale changes before the next backward pass.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from polymp.backends.torch.scaler.grad_scaler import GradScaler


def begin_backward(scaler: GradScaler | None) -> None:
    """Update the scale if that is due, and note whose gradients are unscaled already."""
    update_pending(scaler)
    if scaler is not None:
        for entry in scaler._per_optimizer_states.values():
            entry["mixed"] = entry["stage"] is OptState.UNSCALED


def unscale_each(
    scaler: GradScaler, optimizers: Iterable[torch.optim.Optimizer], write: str
) -> None:
    """Unscale the gradients of optimizers, of each once."""
    for optimizer in optimizers:
        entry = scaler._per_optimizer_states[id(optimizer)]
        if entry.get("mixed"):
            raise RuntimeError(
                "these gradients were clipped before the last backward pass, which has added "
                f"scaled ones. Clip once, before the step. {write}"
            )
        if entry["stage"] is OptState.READY:
            scaler.unscale_(optimizer)


def step(
    scaler: GradScaler,
    optimizer: torch.optim.Optimizer,
    closure: Callable[[], Any] | None,
    together: Iterable[torch.optim.Optimizer] = (),
    **kwargs: Any,
) -> Any:
    """Step or skip; then update the scale if all optimizers that step together have stepped."""
    if closure is None:
        result = scaler.step(optimizer, **kwargs)
    else:
        update_pending(scaler)  # not in the closure, where this step has begun
        result = scaler.step(optimizer, closure, **kwargs)
    entries = [scaler._per_optimizer_states[id(one)] for one in together]
    if entries and all(entry["stage"] is OptState.STEPPED for entry in entries):
        scaler.update()
    return result


def update_pending(scaler: GradScaler | None) -> None:
    """Update the scale if an optimizer has stepped since the last update."""
    entries = () if scaler is None else scaler._per_optimizer_states.values()
    if scaler is not None and any(entry["stage"] is OptState.STEPPED for entry in entries):
        scaler.update()


def metrics(scaler: GradScaler | None) -> dict[str, float]:
    """Return `loss_scale` and `skipped_steps`, for a logger; nothing without a scaler."""
    if scaler is None:
        return {}
    return {"loss_scale": scaler.get_scale(), "skipped_steps": float(scaler.skipped_steps)}


def check_scaler(scaler: object, asked: str, half: bool, write: str) -> None:
    """Raise if a loss scaler that a user gave does not scale, or is for bfloat16."""
    if scaler is None:
        return
    if not half:
        raise ValueError(
            f"{asked} takes no scaler: loss scaling is for float16. Leave it out, or write {write}."
        )
    instead = "scaler=polymp.torch.GradScaler(device), with the device that is used"
    if not isinstance(scaler, GradScaler):
        given = f"{type(scaler).__module__}.{type(scaler).__qualname__}".removeprefix("builtins.")
        raise TypeError(
            f"{asked} takes a polymp.torch.GradScaler, got {given}. Leave scaler out, or write "
            f"{instead}."
        )
    if not scaler.is_enabled():
        raise ValueError(
            f"{asked} needs a loss scaler, and the one given is disabled, so that small gradients "
            f"would become zero. Leave scaler out, or write {instead}."
        )
