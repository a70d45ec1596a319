"""Shared by the adapters of training frameworks for torch.

An adapter says what cannot work before anything is changed, in the words of its framework.
"""

from functools import cache
from typing import Any

from polymp import integrations
from polymp.backends.torch.scaler.grad_scaler import GradScaler


def check_scaler(scaler: object, asked: str, half: bool, write: str) -> None:
    """Raise if a loss scaler cannot be used; see `polymp.integrations.check_scaler`."""
    made = "polymp.torch.GradScaler(device), with the device that is used"
    integrations.check_scaler(
        scaler, made, GradScaler, GradScaler.is_enabled, asked=asked, half=half, write=write
    )


def extend(instance: Any, mixin: type) -> None:
    """Give an object the methods of a mixin, before those of its own class."""
    instance.__class__ = _extended(type(instance), mixin)  # type: ignore[arg-type]


@cache
def _extended(base: type, mixin: type) -> type:
    return type(base.__name__, (mixin, base), {"__module__": base.__module__})
