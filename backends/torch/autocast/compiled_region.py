"""Regions in code that torch.compile traces, or torch.export writes into a program.

There the same state is written as outside, by calls in the graph that also run while the graph is
made. What a trace has entered and not left when it is given up is left here.
"""

import functools
from collections.abc import Callable
from functools import cache
from typing import Any, ParamSpec, TypeVar

import torch
from torch import (
    autocast_decrement_nesting,
    autocast_increment_nesting,
    get_autocast_dtype,
    is_autocast_cache_enabled,
    is_autocast_enabled,
    set_autocast_cache_enabled,
    set_autocast_dtype,
    set_autocast_enabled,
)

from polymp.backends.torch.autocast import region_casts, regions
from polymp.backends.torch.autocast.regions import NONE, Code
from polymp.backends.torch.compat import dispatcher, dynamo
from polymp.errors import PolicyError


class CompiledRegion:
    """A region entered in code that torch.compile traces.

    It holds what leaving restores: the stack of regions cannot, for it belongs to code that runs,
    and traced code does not run. Dynamo enters only context managers made in the code it traces,
    and guards what they were made from.
    """

    def __init__(
        self, device: str, enabled: bool, dtype: torch.dtype, cache: bool, ticket: str
    ) -> None:
        _allow()
        self.device = device
        self.inside: tuple[bool, torch.dtype, bool] = (enabled, dtype, cache)
        self.ticket = ticket

    def __enter__(self) -> None:
        device, code = self.device, regions.code_in_force()
        self.outside: tuple[bool, torch.dtype, bool] = (
            is_autocast_enabled(device),
            get_autocast_dtype(device),
            is_autocast_cache_enabled(),
        )
        self.outer = code
        _put(self.ticket, device, *self.inside, *_code_traced(self.ticket, *code))

    def __exit__(self, *exc: object) -> None:
        _put(None, self.device, *self.outside, *self.outer)


def _put(
    ticket: str | None,
    device: str,
    enabled: bool,
    dtype: torch.dtype,
    cache: bool,
    *code: torch.dtype,
) -> None:
    """Enter the ticket's region, or leave one (None), as a call in a graph."""
    tell_export(ticket)
    if ticket is not None:
        state = is_autocast_enabled(device), get_autocast_dtype(device), is_autocast_cache_enabled()
        before = device, *state, *regions.code_in_force()
        dynamo.after_tracing(functools.partial(_restore, autocast_increment_nesting(), *before))
        if enabled:
            regions.note(device, dtype)
        else:
            dynamo.compile_by(regions.codes.digest)
    elif autocast_decrement_nesting() == 0:
        region_casts.forget_mine()
    _set(device, enabled, dtype, cache, *code)


def _restore(depth: int, *before: Any) -> None:
    """Restore the state from before an entry, if the trace was given up inside of it."""
    autocast_increment_nesting()
    if autocast_decrement_nesting() == depth:
        if autocast_decrement_nesting() == 0:
            region_casts.forget_mine()
        _set(*before)


def _set(device: str, enabled: bool, dtype: torch.dtype, cache: bool, *code: torch.dtype) -> None:
    set_autocast_enabled(device, enabled)
    set_autocast_dtype(device, dtype)
    set_autocast_cache_enabled(cache)
    regions.write_code(code)


def tell_export(ticket: str | None) -> None:
    """Write entering the ticket's region, or leaving one (None), into a program being exported."""
    for mode in dynamo.export_modes():
        if ticket is None:
            mode.__torch_function__(dynamo.LEAVE, (), ())
            continue
        region, device, enabled, dtype, cache = regions.prepared[ticket]
        if region.policy is not None:
            raise PolicyError(
                f"torch.export cannot record policy {region.policy.name!r}: an exported region "
                "holds a device, a dtype and whether it is enabled, and no policy. Export with "
                "policy=None, or with polymp.torch.bake(model, inputs), which writes the casts out."
            )
        state = device, dtype, enabled, cache
        mode.__torch_function__(dynamo.ENTER, (), state)


@dynamo.at_trace_time
def _allow() -> None:
    dynamo.in_graph(_put)


@dynamo.at_trace_time
def _code_traced(ticket: str, *outer: torch.dtype) -> Code:
    """`regions.code_inside`, for code that torch.compile traces: plain arguments only."""
    return regions.code_inside(regions.prepared[ticket][0], outer)


# Activation checkpointing: recomputation runs under the policies of the forward pass.
#
# torch.utils.checkpoint recomputes under a torch.autocast that it builds from the enabled flag,
# the dtype and the cache flag, so a policy would be lost. `keep_policies` changes torch's own
# classes, so that libraries which imported torch's function before keep their policies, too.


P = ParamSpec("P")
R = TypeVar("R")


@cache
def keep_policies() -> None:
    """Have torch's checkpoints recompute under the policies of their forward pass; once."""
    dispatcher.carry_into_recomputation(_carry)


def _carry(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that each call of it runs under the policies in force here and now.

    torch restores the rest of the state.
    """
    code = regions.code_in_force()

    @functools.wraps(function)
    def carried(*args: P.args, **kwargs: P.kwargs) -> R:
        outer = regions.code_in_force()
        regions.write_code(code)
        try:
            return function(*args, **kwargs)
        finally:
            regions.write_code(outer)
            if code != NONE or outer != NONE:
                region_casts.drop_unknown()  # made in a region of torch's: its end is not seen

    return carried
