"""Checks and figures that the adapters of training frameworks share.

`polymp.lightning`, `polymp.accelerate` and `polymp.transformers` say with these what cannot work,
before anything is changed, in the words of their own framework.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from polymp.backends.torch.autocast import dtype_names, regions
from polymp.backends.torch.autocast.api import PolicyLike
from polymp.backends.torch.scaler.grad_scaler import GradScaler
from polymp.errors import PolicyError
from polymp.rules import policy_files
from polymp.rules.policy import Policy


def region_policy(policy: PolicyLike | None, write: str) -> Policy | None:
    """Return a policy for the region that an adapter opens.

    Args:
        policy: as given by the user.
        write: the adapter's line without a policy, for the message.

    Returns:
        The policy, None for torch's own table.

    Raises:
        PolicyError: the policy cannot be read, or has rules for modules.
    """
    if policy is None:
        return None
    loaded = policy_files.load(policy)
    if loaded.scopes:
        raise PolicyError(
            f"policy {loaded.name!r} has rules for modules ({', '.join(loaded.scopes)}), whose "
            "paths a region does not see. Write polymp.torch.scoped(model, policy), and then "
            f"{write}."
        )
    return loaded


def check_scaler(scaler: object, asked: str) -> None:
    """Raise if a loss scaler that a user gave does not scale.

    Args:
        scaler: as given by the user.
        asked: what asked for float16, for the message.

    Raises:
        TypeError: it is no `polymp.torch.GradScaler`.
        ValueError: it is disabled.
    """
    if not isinstance(scaler, GradScaler):
        kind = f"{type(scaler).__module__}.{type(scaler).__qualname__}"
        raise TypeError(
            f"{asked} takes a polymp.torch.GradScaler, got {kind}. Leave scaler out, or write "
            "scaler=polymp.torch.GradScaler(device, ...)."
        )
    if not scaler.is_enabled():
        raise ValueError(
            f"{asked} needs a loss scaler, and the one given is disabled, so that small gradients "
            f"would become zero. It was made for {scaler._device!r}; leave scaler out, or write "
            "scaler=polymp.torch.GradScaler(device) for the device that is used."
        )


def metrics(scaler: GradScaler | None) -> dict[str, float]:
    """Return `loss_scale` and `skipped_steps`, for a logger; nothing without a scaler.

    Waits for the device if the host does not know them.
    """
    if scaler is None:
        return {}
    return {"loss_scale": scaler.get_scale(), "skipped_steps": float(scaler.skipped_steps)}


def figures(scaler: GradScaler) -> tuple[float, int] | None:
    """Return the scale and the number of skipped steps; None where the host does not know them."""
    known = scaler._state.recall()
    return None if known is None else (float(known.scale), int(known.skipped))


def update_pending(scaler: GradScaler | None) -> None:
    """Update the scale if an optimizer has stepped since the last update.

    Called before the next backward pass. All optimizers that share a backward pass have stepped
    then: after an update, gradients of the others would be divided by another scale.
    """
    entries = () if scaler is None else scaler._per_optimizer_states.values()
    if scaler is not None and any(entry["stage"] is OptState.STEPPED for entry in entries):
        scaler.update()


def update_after(scaler: GradScaler, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Update the scale if all optimizers of a training have stepped since the last update."""
    if all(stage(scaler, one) is OptState.STEPPED for one in optimizers):
        scaler.update()


def stage(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> OptState:
    """Return whether an optimizer is ready, has unscaled gradients, or has stepped."""
    entry = scaler._per_optimizer_states.get(id(optimizer))
    return OptState.READY if entry is None else entry["stage"]


def refuse_outer_region(
    device: str, dtype: torch.dtype, policy: Policy | None, opener: str, write: str
) -> None:
    """Raise if an adapter is about to open its region in another one of polymp's.

    Regions of torch.autocast around it are allowed: they have no policy that would be lost.

    Args:
        device: the device type of the adapter's region.
        dtype: its low dtype.
        policy: its policy.
        opener: who opens it, for the message.
        write: how the adapter is given a policy, for the message.

    Raises:
        PolicyError: this thread is in a region with another dtype or another policy.
    """
    here = [region for region, *_ in regions.stack.frames if region.device == device]
    if not here or not here[-1].enabled:
        return
    outer, name = here[-1], dtype_names.NAMES[dtype]
    if (outer.dtype, outer.policy) != (name, policy):
        raise PolicyError(
            f"{opener} opens {_text(name, policy)} inside {_text(outer.dtype, outer.policy)}, "
            f"which would have no effect. Leave the outer region out, and write {write}."
        )


def extend(instance: Any, mixin: type) -> None:
    """Give an object the methods of a mixin, before those of its own class."""
    instance.__class__ = _extended(type(instance), mixin)  # type: ignore[arg-type]


@cache
def _extended(base: type, mixin: type) -> type:
    return type(base.__name__, (mixin, base), {"__module__": base.__module__})


def _text(dtype: str, policy: Policy | None) -> str:
    named = "no policy" if policy is None else f"policy {policy.name!r}"
    return f"a region of {dtype} with {named}"
