"""Regions in code that torch.compile traces, or torch.export writes into a program.

There the same state is written as outside, by calls in the graph that also run while the graph is
made. Regions that a graph has entered and not left when it raises, or is given up, are left here.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import ParamSpec, TypeVar

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


class OpenInGraphs(threading.local):
    """The regions and scopes that graphs have entered in this thread and not left."""

    def __init__(self) -> None:
        self.leaving: list[Callable[[], None]] = []  # a function for each, which leaves it

    def enter(self, leave: Callable[[], None]) -> None:
        """Note an entry, and how to leave it if the trace is given up."""
        self.leaving.append(leave)
        dynamo.after_tracing(functools.partial(_give_up, self.leaving, leave))

    def leave(self) -> None:
        """Note that the youngest entry was left."""
        if self.leaving:
            self.leaving.pop()


def _give_up(entries: list[Callable[[], None]], leave: Callable[[], None]) -> None:
    if leave in entries:
        entries.remove(leave)
        leave()


open_regions: OpenInGraphs = OpenInGraphs()


def in_region() -> bool:
    """Return whether this thread is in a region of polymp's, running or being traced."""
    return bool(regions.stack.thread.frames or open_regions.leaving)


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
        if autocast_increment_nesting() == 1:  # nothing is open: these are of a graph that raised
            open_regions.leaving.clear()
        autocast_decrement_nesting()
        state = is_autocast_enabled(device), get_autocast_dtype(device), is_autocast_cache_enabled()
        before = functools.partial(_set, device, -1, *state, *regions.code_in_force())
        open_regions.enter(before)
    else:
        open_regions.leave()
    _set(device, 1 if ticket else -1, enabled, dtype, cache, *code)


def _set(
    device: str, nesting: int, enabled: bool, dtype: torch.dtype, cache: bool, *code: torch.dtype
) -> None:
    if nesting > 0:
        autocast_increment_nesting()
        if enabled:
            regions.note(device, dtype)
        else:
            dynamo.compile_by(regions.codes.digest)
    elif autocast_decrement_nesting() == 0:
        region_casts.forget_mine()
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
        region, device, enabled, dtype, cache = regions.prepared.by_ticket[ticket]
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
    return regions.code_inside(regions.prepared.by_ticket[ticket][0], outer)


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
    """Wrap a function so that each call of it runs under the policies in force here and now."""
    code, entered = regions.code_in_force(), in_region()

    @functools.wraps(function)
    def carried(*args: P.args, **kwargs: P.kwargs) -> R:
        with _resumed(code, entered):
            return function(*args, **kwargs)

    return carried


@contextmanager
def _resumed(code: Code, entered: bool) -> Iterator[None]:
    """Put policies in force once more, for code that runs again; torch restores the rest."""
    outer = regions.code_in_force()
    regions.write_code(code)
    if entered:
        open_regions.leaving.append(_nothing)
    try:
        yield
    finally:
        if entered and _nothing in open_regions.leaving:
            open_regions.leaving.remove(_nothing)
        regions.write_code(outer)
        if code != NONE or outer != NONE:
            region_casts.drop_unknown()  # made in a region of torch's: its end is not seen


def _nothing() -> None:
    """Do nothing: leaving an entry that needs no undoing."""
