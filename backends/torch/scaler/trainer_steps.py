"""A loss scaler in a trainer, which calls backward, unscale and step, and never `update`.

The scale changes when all optimizers that share a backward pass have stepped: after an update, the
gradients of the others would be divided by another scale. Where a trainer does not know all its
optimizers, the scale changes before the next backward pass.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from polymp import scaling
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


def metrics_on_device(scaler: GradScaler) -> dict[str, Any]:
    """Return `metrics` as tensors of the device, for a logger that reads them later: no wait."""
    skipped = scaler.skipped_steps.float()
    return {"loss_scale": scaler._get_scale_async(), "skipped_steps": skipped}


def known_metrics(scaler: GradScaler) -> tuple[float, int] | None:
    """Return the scale and the number of skipped steps; None where the host does not know them."""
    known = scaler._recall()
    return None if known is None else (float(known.scale), int(known.skipped))


def check_scaler(scaler: object, asked: str, half: bool, write: str) -> None:
    """Raise if a loss scaler cannot be used; see `polymp.scaling.check_scaler`."""
    made = "polymp.torch.GradScaler(device), with the device that is used"
    scaling.check_scaler(
        scaler, made, GradScaler, GradScaler.is_enabled, asked=asked, half=half, write=write
    )
