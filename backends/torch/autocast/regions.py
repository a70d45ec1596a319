"""Entering and leaving regions: core regions on one side, torch's autocast state on the other.

The state in force is always torch's own, per thread: enabled flag, low dtype, cache flag. Compiled
kernels, torch.compile's guards and torch's own autocast class read and write the same. The one
thing torch has no place for, which policies are in force, is coded into the low dtypes of two
devices that no build of torch has tensors on; so it is restored, guarded and read just as the rest.
What leaving has to restore is kept on the core's stack.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import (
    autocast_decrement_nesting,
    autocast_increment_nesting,
    get_autocast_dtype,
    is_autocast_cache_enabled,
    is_autocast_enabled,
    is_grad_enabled,
    set_autocast_cache_enabled,
    set_autocast_dtype,
    set_autocast_enabled,
)
from torch._C import _is_torch_function_mode_enabled
from torch.compiler import is_dynamo_compiling

from polymp.backends.torch.autocast import cast_cache
from polymp.backends.torch.compat import dynamo, export
from polymp.errors import PolicyError
from polymp.rules.policy import Policy
from polymp.rules.region import Region, Stack

# Every dtype of this torch by its name without "torch.", aliases left out, and the other way round.
FORMATS: dict[torch.dtype, str] = {
    d: str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in FORMATS.items()}

# Devices whose tensors no torch build has, but whose autocast state every one keeps: a flag and a
# low dtype, restored and guarded like any other's. Since torch 2.4. Dynamo compares the dtype only
# where the flag is on, so it is on while a policy is coded here.
_SLOTS = ("ipu", "maia")
_Code = tuple[torch.dtype, ...]
_NONE: _Code = (get_autocast_dtype(_SLOTS[0]), get_autocast_dtype(_SLOTS[1]))

# In a set of policies by device: that of the module which is running, for devices without one.
_SCOPE = ""

# A frame: the region entered, and before it: enabled, low dtype, cache flag, code of the policies.
stack: Stack[tuple[Region, bool, torch.dtype, bool, _Code]] = Stack()


class Entries(threading.local):
    """What of the regions that this thread has entered, open or not, concerns scalers.

    Attributes:
        latest: by device type, the low format of the region that was entered last.
        unscaled: device types of float16 regions entered with gradients on since a step.
    """

    def __init__(self) -> None:
        self.latest: dict[str, torch.dtype] = {}
        self.unscaled: set[str] = set()


entries = Entries()


@dynamo.no_frame
def enter(ticket: str) -> None:
    """Enter a prepared region in this thread. It runs at every `with`, so every call counts.

    Raises:
        PolicyError: policies cannot be in force with it; nothing has changed then.
    """
    region, device, enabled, dtype, cache = known[ticket]
    code = inside = _NONE
    if len(_policies) > 1:
        code = code_in_force()
        inside = _code_inside(region, code)
    stack.frames.append(
        (region, is_autocast_enabled(device), get_autocast_dtype(device),
         is_autocast_cache_enabled(), code)
    )  # fmt: skip
    if enabled:
        _note(device, dtype)
    depth = autocast_increment_nesting()  # torch's own regions count
    set_autocast_enabled(device, enabled)
    set_autocast_dtype(device, dtype)
    set_autocast_cache_enabled(cache and cast_cache.keep(device, dtype, enabled, depth))
    if len(_policies) > 1:
        _write_code(inside)


@dynamo.no_frame
def leave(ticket: str) -> None:
    """Leave the youngest open region equal to the ticket's.

    Raises:
        RuntimeError: it is not open in this thread.
    """
    region, device, *_ = known[ticket]
    frames = stack.frames
    frame = frames.pop() if frames and frames[-1][0] is region else _pull(region)
    depth = autocast_decrement_nesting()
    if not frames:
        cast_cache.end()
    _, enabled, dtype, cache, code = frame
    if frames and cache:
        # Back in a region of another format, the casts to this one go. It is not the outermost.
        cast_cache.keep(device, dtype, enabled, depth + 1)
    set_autocast_enabled(device, enabled)
    set_autocast_dtype(device, dtype)
    set_autocast_cache_enabled(cache)
    if len(_policies) > 1:
        _write_code(code)


def _pull(region: Region) -> tuple[Region, bool, torch.dtype, bool, _Code]:
    """Take a frame out from under younger ones; the state that is to be in force then.

    Flag and dtype are a device's and go to the next younger frame of it. Cache flag and policies
    are the thread's: they are what the frames that are left make of those before the first.
    """
    frames = stack.frames
    cache, code = frames[0][3:] if frames else (True, _NONE)
    pulled = stack.pull(region)
    for at, (younger, enabled, dtype, *_) in enumerate(frames):
        frames[at] = younger, enabled, dtype, cache, code
        cache, code = younger.cache and cast_cache.mine(), _code_inside(younger, code)
    if pulled is None:
        device = region.device
        return region, is_autocast_enabled(device), get_autocast_dtype(device), cache, code
    return *pulled[:3], cache, code


class Traced:
    """A region entered in code that torch.compile traces.

    The same state is written, by one call in the graph that also runs while the graph is made.
    What leaving restores stays here, for the core's stack is real while the code being traced is
    not running. Dynamo enters only context managers made in the code it traces, and guards what
    they were made from.
    """

    def __init__(
        self, device: str, enabled: bool, dtype: torch.dtype, cache: bool, ticket: str
    ) -> None:
        _allow()
        self.device = device
        self.inside = enabled, dtype, cache
        self.ticket = ticket

    def __enter__(self) -> None:
        device, code = self.device, code_in_force()
        self.outside = (
            is_autocast_enabled(device),
            get_autocast_dtype(device),
            is_autocast_cache_enabled(),
        )
        self.outer = code
        _put(self.ticket, device, *self.inside, *_code_traced(self.ticket, *code))

    def __exit__(self, *exc: object) -> None:
        _put(None, self.device, *self.outside, *self.outer)


class _Open(threading.local):
    """What the calls of `_put` and `_put_scope` in this thread have entered and not left."""

    def __init__(self) -> None:
        self.entries: list[Callable[[], None]] = []
        self.scopes: list[Callable[[], None]] = []


_open = _Open()


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
            _open.entries.clear()
        autocast_decrement_nesting()
        state = is_autocast_enabled(device), get_autocast_dtype(device), is_autocast_cache_enabled()
        _open.entries.append(functools.partial(_set, device, -1, *state, *code_in_force()))
        dynamo.after_tracing(functools.partial(_close, _open.entries, _open.entries[-1]))
    elif _open.entries:
        _open.entries.pop()
    _set(device, 1 if ticket else -1, enabled, dtype, cache, *code)


def _close(entries: list[Callable[[], None]], entry: Callable[[], None]) -> None:
    """Leave what a trace that was given up has entered and not left."""
    if entry in entries:
        entries.remove(entry)
        entry()


def _set(
    device: str, nesting: int, enabled: bool, dtype: torch.dtype, cache: bool, *code: torch.dtype
) -> None:
    if nesting > 0:
        autocast_increment_nesting()
        if enabled:
            _note(device, dtype)
    elif autocast_decrement_nesting() == 0:
        cast_cache.forget_mine()
    set_autocast_enabled(device, enabled)
    set_autocast_dtype(device, dtype)
    set_autocast_cache_enabled(cache)
    _write_code(code)


def scope_code(policy: Policy) -> _Code:
    """What `enter_scope` takes to put a policy in force."""
    return _code(frozenset({(_SCOPE, policy)}))


@dynamo.no_frame
def enter_scope(code: _Code) -> None:
    """Put a module's policy in force in this thread, whatever the device.

    It speaks for every enabled region, the one around and those entered inside that have no policy
    of their own. Region, format and cache stay as they are.

    Raises:
        PolicyError: the call is being exported.
    """
    if is_dynamo_compiling():
        _allow()
        _put_scope(True, *code)
        return
    if _is_torch_function_mode_enabled():
        _refuse_export(code)
    _write_code(code)


@dynamo.no_frame
def leave_scope(outer: _Code) -> None:
    """Put back what `code_in_force` said before a scope was entered."""
    if is_dynamo_compiling():
        _put_scope(False, *outer)
        return
    _write_code(outer)
    if outer == _NONE and not stack.frames:
        cast_cache.end()  # a region of torch's own ends without a word to us


def _put_scope(entering: bool, *code: torch.dtype) -> None:
    """Enter or leave a scope, as a call in a graph."""
    if entering:
        _refuse_export(code)
        before = code_in_force()
        if before == _NONE:  # nothing is open: these are of a graph that raised
            _open.scopes.clear()
        _open.scopes.append(functools.partial(_write_code, before))
        dynamo.after_tracing(functools.partial(_close, _open.scopes, _open.scopes[-1]))
    elif _open.scopes:
        _open.scopes.pop()
    _write_code(code)


def _refuse_export(code: _Code) -> None:
    if export.export_modes():
        raise PolicyError(
            f"torch.export cannot record the scopes of policy {_policies[code][_SCOPE].name!r}. "
            "Take them off, by remove() of the handle that scoped() returned, and export then."
        )


def tell_export(ticket: str | None) -> None:
    """Write entering the ticket's region, or leaving (None), into a program being exported.

    Raises:
        PolicyError: the region has a policy of its own, which a program cannot hold.
    """
    for mode in export.export_modes():
        if ticket is None:
            mode.__torch_function__(torch.amp._exit_autocast, (), ())  # type: ignore[attr-defined]
            continue
        region, device, enabled, dtype, cache = known[ticket]
        if region.policy is not None:
            raise PolicyError(
                f"torch.export cannot record policy {region.policy.name!r}: an exported region "
                "says only device, dtype and whether it is enabled. Export with policy=None."
            )
        state = device, dtype, enabled, cache
        mode.__torch_function__(torch.amp._enter_autocast, (), state)  # type: ignore[attr-defined]


@dynamo.at_trace_time
def _allow() -> None:
    torch.compiler.allow_in_graph(_put)
    torch.compiler.allow_in_graph(_put_scope)


known: dict[str, tuple[Region, str, bool, torch.dtype, bool]] = {}  # prepared regions, by ticket


@cache
def ticket(region: Region) -> str:
    """A name for the region, equal for equal ones; what a compiled graph is guarded by.

    A number would not do: dynamo makes a symbol of a number that changes.
    """
    _code_inside(region, _NONE)  # from now on policies are read and written, if it has one
    dtype = DTYPES[region.format]
    name = f"region {len(known)}"
    known[name] = region, region.device, region.enabled, dtype, region.cache
    return name


def in_force(device: str) -> Region:
    """The region that holds for the device in this thread, read from torch's own state."""
    return _region(
        device,
        is_autocast_enabled(device),
        get_autocast_dtype(device),
        is_autocast_cache_enabled(),
        _NONE if len(_policies) == 1 else code_in_force(),
    )


@dynamo.no_frame
def _note(device: str, dtype: torch.dtype) -> None:
    """Note, for scalers, that an enabled region was entered."""
    entries.latest[device] = dtype
    if dtype is torch.float16 and is_grad_enabled():
        entries.unscaled.add(device)


def latest_low(device: str) -> torch.dtype | None:
    """The low format of the region for the device that is in force, or was the latest entered.

    A loss is as often scaled after its region as in it. None if there was none in this thread.
    """
    if is_autocast_enabled(device):
        return get_autocast_dtype(device)
    return entries.latest.get(device)


def policy_of(device: str) -> Policy | None:
    """The policy in force for the device in this thread; None for torch's own table."""
    return policy_at(device, *code_in_force())


@dynamo.at_trace_time
def policy_at(device: str, *code: torch.dtype) -> Policy | None:
    """The policy for a device where the policies in force have this code."""
    policies = _policies.get(code, {})
    return policies.get(device, policies.get(_SCOPE))


def entered() -> bool:
    """True in a region of polymp's, in this thread, running or being traced."""
    return bool(stack.frames or _open.entries)


@dynamo.no_frame
def wants_cache() -> bool:
    """The cache flag asked for where this is called, even if another thread has the map."""
    frames = stack.frames
    return bool(frames[-1][0].cache if frames else is_autocast_cache_enabled())


@contextmanager
def resumed(code: _Code, entered: bool) -> Iterator[None]:
    """Put policies in force once more, for code that runs again; torch restores the rest.

    Args:
        code: what `code_in_force` said where it ran first.
        entered: what `entered` said there.
    """
    outer = code_in_force()
    _write_code(code)
    if entered:
        _open.entries.append(_nothing)
    try:
        yield
    finally:
        if entered and _nothing in _open.entries:
            _open.entries.remove(_nothing)
        _write_code(outer)
        if code != _NONE or outer != _NONE:
            cast_cache.drop_unknown()  # made in a region of torch's, which ends behind our back


def _nothing() -> None:
    """An entry that nothing has to be undone for."""


@cache
def _region(device: str, enabled: bool, dtype: torch.dtype, cache: bool, code: _Code) -> Region:
    policy = policy_at(device, *code)
    return Region("torch", device, enabled, FORMATS[dtype], cache, policy)


@dynamo.at_trace_time
def _code_traced(ticket: str, *outer: torch.dtype) -> _Code:
    """`_code_inside`, for code that torch.compile traces: plain arguments only."""
    return _code_inside(known[ticket][0], outer)


def _code_inside(region: Region, outer: _Code) -> _Code:
    """The code of the policies inside `region`, entered where `outer` is in force."""
    if region.device in _SLOTS and len(_policies) > 1:
        raise PolicyError(
            f"autocast({region.device!r}) cannot be used in a process that has used policies: "
            "polymp notes them in the state of that device."
        )
    policies = {d: p for d, p in _policies.get(outer, {}).items() if d != region.device}
    if region.policy is not None:
        policies[region.device] = region.policy
    return _code(frozenset(policies.items()))


@dynamo.no_frame
def code_in_force() -> _Code:
    """What the policies in force in this thread are coded as, for code that is traced."""
    return get_autocast_dtype(_SLOTS[0]), get_autocast_dtype(_SLOTS[1])


@dynamo.no_frame
def _write_code(code: _Code) -> None:
    for slot, dtype in zip(_SLOTS, code, strict=True):
        set_autocast_enabled(slot, code != _NONE)
        set_autocast_dtype(slot, dtype)


# Sets of policies as pairs of dtypes, one code for ever for each set that was ever in force. A
# graph that torch.compile made under one code is never reused under another; codes are not
# recycled, for graphs are kept.
_free = iter([(a, b) for a in FORMATS for b in FORMATS if (a, b) != _NONE])
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
