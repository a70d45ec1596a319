"""`FrozenModule`: the class of a frozen model, which enters its region when it is called."""

from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch.compiler import is_dynamo_compiling

from polymp.backends.torch.autocast import dtype_names, policy_code, regions
from polymp.backends.torch.autocast.api import autocast
from polymp.backends.torch.compat import dynamo
from polymp.backends.torch.modules import subclass
from polymp.backends.torch.modules.scoped import Scoped
from polymp.errors import PolicyError


class FrozenFor(NamedTuple):
    """The data of a frozen model.

    Attributes:
        region: the region that it runs in.
        scope: its scope when it was frozen, from `scoped`; None without one.
        name: the name of its class.
    """

    region: autocast
    scope: Any
    name: str


class FrozenModule(subclass.Extension):
    """A model's class, once frozen."""

    KEY: ClassVar[str] = "_polymp_freeze"

    def _call_impl(self, *args: object, **kwargs: object) -> Any:
        """Call the module, also by a `__call__` that was bound before. Since torch 1.8."""
        frozen_for = self.__dict__.get(FrozenModule.KEY)
        if frozen_for is None:
            above: Any = super() if isinstance(self, FrozenModule) else self  # bound, then removed
            return above._call_impl(*args, **kwargs)
        region, scope = frozen_for.region, self.__dict__.get(Scoped.KEY)
        if scope is not frozen_for.scope:
            _refuse_scope(frozen_for.name)
        device = region.device
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        code = policy_code.in_force()
        if _fits(region._ticket, frozen_for.name, scope is not None, enabled, dtype, *code):
            return super()._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        with region._again() if is_dynamo_compiling() else region:
            return super()._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


@dynamo.at_trace_time
def _refuse_scope(name: str) -> NoReturn:
    raise PolicyError(
        f"{name} has other rules from scoped() than when it was frozen. Call remove() of the "
        "handle that freeze() returned, and freeze the model again."
    )


@dynamo.at_trace_time
def _fits(
    ticket: str, name: str, scoped: bool, enabled: bool, dtype: torch.dtype, *code: torch.dtype
) -> bool:
    """Return whether the region in force is equal to the ticket's; False if there is none."""
    if not enabled:
        return False
    if is_same(ticket, scoped, dtype, *code):
        return True
    region = regions.prepared.by_ticket[ticket][0]
    policy = policy_code.policy_at(region.device, *code)
    here = _spelled(region.device, dtype_names.NAMES[dtype], policy)
    frozen = _spelled(region.device, region.dtype, region.policy)
    raise PolicyError(
        f"{name} was frozen for {frozen}, and is called in {here}. Call it in the first region, or "
        "outside of regions, where it enters that one by itself; or freeze it for the second."
    )


def is_same(ticket: str, scoped: bool, dtype: torch.dtype, *code: torch.dtype) -> bool:
    """Return whether a region of this dtype and these policies is equal to the ticket's."""
    region = regions.prepared.by_ticket[ticket][0]
    policy = policy_code.policy_at(region.device, *code)
    same = scoped or policy is region.policy or policy == region.policy
    return same and dtype is dtype_names.DTYPES[region.dtype]


def _spelled(device: str, dtype: str, policy: Any) -> str:
    rules = "" if policy is None else f", policy={policy.name!r}"
    return f"autocast({device!r}, torch.{dtype}{rules})"
