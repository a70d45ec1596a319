"""A module whose calls open a region: for trainers that call the model and open none."""

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn as nn

from polymp.backends.torch.autocast import dtype_names
from polymp.backends.torch.autocast.api import autocast
from polymp.backends.torch.modules import subclass
from polymp.backends.torch.modules.scoped import scoped
from polymp.rules.policy import Policy


class RegionOptions(NamedTuple):
    """The arguments of the region of a module's calls.

    Attributes:
        device: its type.
        dtype: the name of the low dtype.
        policy: of the region; None for torch's own table, and for a policy that `scoped` has put on
            the modules inside.
    """

    device: str
    dtype: str
    policy: Policy | None


class InRegion(subclass.Extension):
    """The class of a module whose calls open a region."""

    KEY: ClassVar[str] = "_polymp_region"

    def _call_impl(self, *args: object, **kwargs: object) -> Any:
        """Call the module in its region. Since torch 1.8."""
        options = self.__dict__.get(InRegion.KEY)
        if options is None:
            above: Any = super() if isinstance(self, InRegion) else self
            return above._call_impl(*args, **kwargs)
        dtype = dtype_names.DTYPES[options.dtype]
        with autocast(options.device, dtype, policy=options.policy):
            return super()._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def opens_region(model: nn.Module) -> bool:
    """Return whether the calls of a model open a region."""
    return InRegion.KEY in model.__dict__


def open_region(model: nn.Module, policy: Policy | None, dtype: torch.dtype, device: str) -> None:
    """Have every call of a model open a region, in place."""
    subclass.check(model, "", "use")
    if policy is not None and policy.scopes:
        scoped(model, policy)
        policy = None
    options = RegionOptions(device, dtype_names.NAMES[dtype], policy)
    subclass.extend(model, InRegion, options)
