"""Entering and leaving regions: core regions on one side, torch's autocast state on the other.

The state in force is always torch's own, per thread: enabled flag, low dtype, cache flag. Compiled
kernels, torch.compile's guards and torch's own autocast class read and write the same. The one
thing torch has no place for, which policies are in force, is coded into the low dtypes of two
devices that nobody has; so it is restored, guarded and read just as the rest.
What leaving has to restore is kept on the core's stack.
"""

from functools import cache
from typing import Any, NamedTuple

import torch

from polymp import dtypes
from polymp.backends.torch import casts, compat
from polymp.errors import PolicyError
from polymp.region import Region, Stack
from polymp.rules import Policy

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in dtypes.FORMATS}
FORMATS: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


# Devices whose tensors no torch build has, but whose autocast state every one keeps: a flag and a
# low dtype, restored and guarded like any other's. Since torch 2.4. Dynamo compares the dtype only
# where the flag is on, so it is on while a policy is coded here.
_SLOTS = ("ipu", "maia")


class State(NamedTuple):
    """torch's autocast state of one device in this thread, and the code of the policies."""

    enabled: bool
    dtype: torch.dtype
    cache: bool
    high: torch.dtype
    low: torch.dtype


stack: Stack[State] = Stack()


def format_of(dtype: torch.dtype) -> str:
    """A dtype's name, without "torch."."""
    return FORMATS.get(dtype) or str(dtype).removeprefix("torch.")


@compat.no_frame
def read(device: str) -> State:
    """The state in force."""
    code = _NONE
    if torch.compiler.is_dynamo_compiling() or len(_policies) > 1:
        code = torch.get_autocast_dtype(_SLOTS[0]), torch.get_autocast_dtype(_SLOTS[1])
    return State(
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.is_autocast_cache_enabled(),
        *code,
    )


@compat.no_frame
def write(device: str, state: State) -> None:
    """Put a state in force."""
    torch.set_autocast_enabled(device, state.enabled)
    torch.set_autocast_dtype(device, state.dtype)
    torch.set_autocast_cache_enabled(state.cache)
    if torch.compiler.is_dynamo_compiling() or len(_policies) > 1:
        coded = (state.high, state.low) != _NONE
        for slot, dtype in ((_SLOTS[0], state.high), (_SLOTS[1], state.low)):
            torch.set_autocast_enabled(slot, coded)
            torch.set_autocast_dtype(slot, dtype)


@compat.no_frame
def enter(region: Region) -> None:
    """Enter a prepared region in this thread."""
    previous = read(region.device)
    state = _state(region, previous)
    if state.cache and not casts.own():
        state = state._replace(cache=False)
    if state.cache and state.enabled:
        casts.hold(region.device, state.dtype)
    stack.push(region, previous)
    torch.autocast_increment_nesting()
    write(region.device, state)


@compat.no_frame
def leave(region: Region) -> None:
    """Leave the youngest open region equal to `region`."""
    previous = stack.pop(region)
    if torch.autocast_decrement_nesting() == 0 and casts.own():
        casts.drop()
    if previous is not None:
        if previous.enabled and previous.cache:
            casts.hold(region.device, previous.dtype)
        write(region.device, previous)
    if not stack:
        casts.forget()
        casts.disown()


class Traced:
    """A region entered in code that torch.compile traces.

    The same state is written, as calls in the graph. What leaving restores stays here, for the
    core's stack is real while the code being traced is not running. Dynamo enters only context
    managers made in the code it traces, and guards them by their plain attributes: the ticket.
    """

    def __init__(self, device: str, ticket: int) -> None:
        self.device = device
        self.ticket = ticket

    def __enter__(self) -> None:
        self.previous = read(self.device)
        torch.autocast_increment_nesting()
        write(self.device, State(*_inside(self.ticket, *self.previous)))

    def __exit__(self, *exc: object) -> None:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        write(self.device, self.previous)


known: list[Region] = []  # every prepared region, by ticket


@cache
def ticket(region: Region) -> int:
    """A number for the region, equal for equal ones; what a compiled graph is guarded by."""
    known.append(region)
    return len(known) - 1


def in_force(device: str) -> Region:
    """The region that holds for the device in this thread, read from torch's own state."""
    return _region(device, read(device))


@cache
def _region(device: str, state: State) -> Region:
    policy = _policies[state.high, state.low].get(device)
    return Region("torch", device, state.enabled, format_of(state.dtype), state.cache, policy)


@compat.at_trace_time
def _inside(ticket: int, *previous: Any) -> State:
    """`_state`, for code that torch.compile traces: plain arguments only."""
    return _state(known[ticket], State(*previous))


@cache
def _state(region: Region, previous: State) -> State:
    """The state inside `region`, entered from `previous`."""
    policies = {d: p for d, p in _policies[previous[3:]].items() if d != region.device}
    if region.policy is not None:
        policies[region.device] = region.policy
    dtype = DTYPES.get(region.format) or getattr(torch, region.format)
    return State(region.enabled, dtype, region.cache, *_code(frozenset(policies.items())))


# Sets of policies as pairs of dtypes, one code for ever for each set that was ever in force. A
# graph that torch.compile made under one code is never reused under another; codes are not
# recycled, for graphs are kept.
_Code = tuple[torch.dtype, torch.dtype]
_NONE: _Code = (torch.get_autocast_dtype(_SLOTS[0]), torch.get_autocast_dtype(_SLOTS[1]))
_LETTERS = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
_free = iter([(a, b) for a in _LETTERS for b in _LETTERS if (a, b) != _NONE])
_policies: dict[_Code, dict[str, Policy]] = {_NONE: {}}


@cache
def _code(policies: frozenset[tuple[str, Policy]]) -> _Code:
    if not policies:
        return _NONE
    try:
        code = next(_free)
    except StopIteration:
        raise PolicyError(
            f"this process has used {len(_policies)} different sets of policies, and there are no "
            "more. Build a policy once and use it again."
        ) from None
    _policies[code] = dict(policies)
    return code
