"""How polymp's regions, policies and scalers get into a training framework; its adapters share it.

An adapter says what cannot work before anything is changed, in the words of its framework.
"""

from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn

from polymp import integrations
from polymp.backends.torch.autocast import dtype_names, regions
from polymp.backends.torch.autocast.api import autocast
from polymp.backends.torch.modules.scoped import open_region, opens_region, scoped
from polymp.backends.torch.scaler.grad_scaler import GradScaler
from polymp.errors import PolicyError
from polymp.rules.policy import Policy


def check_scaler(scaler: object, asked: str, half: bool, write: str) -> None:
    """Raise if a loss scaler cannot be used; see `polymp.integrations.check_scaler`."""
    made = "polymp.torch.GradScaler(device), with the device that is used"
    integrations.check_scaler(
        scaler, made, GradScaler, GradScaler.is_enabled, asked=asked, half=half, write=write
    )


class RegionSettings(NamedTuple):
    """The region of an adapter, and who opens it."""

    device: str  # the device type
    dtype: torch.dtype
    policy: Policy | None  # `attach` puts rules by module path on models
    name: str  # of who opens it, for the message
    write: str  # how the adapter is given a policy, for the message

    def region(self) -> autocast:
        """Return the region."""
        return autocast(self.device, dtype=self.dtype, policy=self._here)

    @property
    def _here(self) -> Policy | None:
        return None if self.policy is None else self.policy.at("")

    def check(self) -> None:
        """Raise if this thread is in a region of polymp's with another dtype or policy."""
        # Regions of torch.autocast around it are allowed: they have no policy that would be lost.
        here = [
            region for region, *_ in regions.stack.thread.frames if region.device == self.device
        ]
        if not here or not here[-1].enabled:
            return
        outer, name = here[-1], dtype_names.NAMES[self.dtype]
        if (outer.dtype, outer.policy) != (name, self._here):
            raise PolicyError(
                f"{self.name} opens {_text(name, self._here)} inside "
                f"{_text(outer.dtype, outer.policy)}, which would have no effect. Leave the outer "
                f"region out, and write {self.write}."
            )

    def __call__(self, module: nn.Module, args: object) -> None:
        """Check before a module's forward, as a hook."""
        if not torch.compiler.is_compiling():
            self.check()


# By model, the settings of its region, and the handles of the policy and of the check on it.
_Attached = tuple[RegionSettings | None, tuple[Any, ...]]
_attached: WeakKeyDictionary[nn.Module, _Attached] = WeakKeyDictionary()


def attach(model: nn.Module, settings: RegionSettings) -> None:
    """Put a policy on a model whose forward a framework calls in a region, in place of another."""
    # Nothing changes for a model whose calls open a region.
    before, handles = _attached.get(model, (None, ()))
    if opens_region(model) or before is settings:
        return
    for handle in handles:
        handle.remove()
    scopings = () if settings.policy is None else (scoped(model, settings.policy),)
    check: Any = settings
    _attached[model] = settings, (*scopings, model.register_forward_pre_hook(check))


def open_in(model: nn.Module, settings: RegionSettings) -> None:
    """Have the calls of a model open the region, for a framework that opens none."""
    if not opens_region(model):
        open_region(model, settings.policy, settings.dtype, settings.device)


def extend(instance: Any, mixin: type) -> None:
    """Give an object the methods of a mixin, before those of its own class."""
    instance.__class__ = _extended(type(instance), mixin)  # type: ignore[arg-type]


@cache
def _extended(base: type, mixin: type) -> type:
    return type(base.__name__, (mixin, base), {"__module__": base.__module__})


def _text(dtype: str, policy: Policy | None) -> str:
    named = "no policy" if policy is None else f"policy {policy.name!r}"
    return f"a region of {dtype} with {named}"
