"""Regions: entering and leaving them, here and in code that torch.compile traces; their policies.

The state in force is always torch's own, per thread: enabled flag, low dtype, cache flag, and the
policies as a code. torch's kernels, torch.compile's guards and torch's own autocast class read and
write the same state. The stack of regions keeps what leaving has to restore.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import cache
from hashlib import sha256
from itertools import count
from typing import Any, Literal, ParamSpec, Self, TypeVar

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
from torch.compiler import is_dynamo_compiling

from polymp.backends.torch.autocast import region_casts
from polymp.backends.torch.autocast.dtype_names import DTYPES, NAMES
from polymp.backends.torch.autocast.region_casts import Code as Code
from polymp.backends.torch.autocast.region_casts import Frame, dtypes, end, keep, owner
from polymp.backends.torch.autocast.region_casts import local as local
from polymp.backends.torch.compat import dispatcher, dynamo
from polymp.backends.torch.compat.modes import are_functions_watched
from polymp.errors import PolicyError
from polymp.rules.policy import Policy, Region
from polymp.versions import __version__

P = ParamSpec("P")
R = TypeVar("R")


class PreparedRegion:
    """A prepared region as a context manager: the base of `autocast`.

    Both methods run at every `with`: a call of Python more shows in the overhead of regions.
    """

    # Open entries in code that torch.compile traces, linked from the youngest to the oldest. On the
    # object from the start: a graph is guarded by what attributes it has.
    _traced: "_Entries | None"

    def __init__(self, ticket: str) -> None:
        self._ticket, self._traced = ticket, None

    @dynamo.no_frame
    def __enter__(self) -> Self:
        if is_dynamo_compiling():
            self._traced = (CompiledRegion(self._ticket), self._traced)
            self._traced[0].__enter__()
            return self
        if are_functions_watched():
            tell_export(self._ticket)
        region, device, enabled, dtype, cache = prepared[self._ticket]
        thread = local.thread
        code = NONE
        inside: Code = ()
        if _policies:
            code = code_in_force()
            inside = code_inside(region, code)
        was, low = is_autocast_enabled(device), get_autocast_dtype(device)
        cached = is_autocast_cache_enabled()
        depth = autocast_increment_nesting()  # torch's own regions count
        thread.frames.append((region, was, low, cached, code))
        if not enabled:
            dynamo.compile_by(codes.digest)
        if enabled is not was:
            set_autocast_enabled(device, enabled)
        if dtype is not low:
            set_autocast_dtype(device, dtype)
        mine = thread.reference
        if depth == 1 and cache and enabled and owner.setdefault("thread", mine) is mine:
            dtypes[device] = dtype  # as in `keep`: there are no casts yet
        else:
            cache = cache and keep(thread, device, dtype, enabled, depth)
        if cache is not cached:
            set_autocast_cache_enabled(cache)
        if inside:
            write_code(inside)
        return self

    @dynamo.no_frame
    def __exit__(self, kind: Any = None, error: Any = None, trace: Any = None) -> Literal[False]:
        if self._traced is not None:
            traced, self._traced = self._traced
            traced.__exit__()
            return False
        region, device, _, _, _ = prepared[self._ticket]
        thread = local.thread
        frames = thread.frames
        # The youngest open region of this thread that is equal to this one.
        last = frames and frames[-1][0] is region
        _, enabled, dtype, cache, code = frames.pop() if last else _pull(region)
        if not frames:
            end(thread)
        elif cache:
            # Back in a region of another dtype, the casts to this one go. It is not the outermost.
            keep(thread, device, dtype, enabled, len(frames) + 1)
        set_autocast_enabled(device, enabled)
        if get_autocast_dtype(device) is not dtype:  # it takes less time than to set it
            set_autocast_dtype(device, dtype)
        set_autocast_cache_enabled(cache)
        if _policies:
            write_code(code)
        autocast_decrement_nesting()
        if are_functions_watched():
            tell_export(None)
        return False


def _pull(region: Region) -> Frame:
    """Take the youngest frame of a region out from under others; return the state to restore."""
    # Tasks of an event loop interleave, and so do generators. Flag and dtype belong to a device and
    # go to its next younger frame. Cache flag and policies belong to the thread: the frames that
    # are left change them, from those before the first.
    frames, device = local.thread.frames, region.device
    mine = [at for at, frame in enumerate(frames) if frame[0] is region]
    if not mine:
        raise RuntimeError(f"cannot leave {region}: it is not open in this thread")
    cache, code = frames[0][3:]
    _, enabled, dtype, *_ = frames.pop(mine[-1])
    for at in range(mine[-1], len(frames)):
        if frames[at][0].device == device:
            frames[at] = frames[at][0], enabled, dtype, cache, code
            enabled, dtype = is_autocast_enabled(device), get_autocast_dtype(device)
            break
    for at, (younger, was, low, *_) in enumerate(frames):
        frames[at] = younger, was, low, cache, code
        cache, code = younger.cache and region_casts.mine(), code_inside(younger, code)
    return region, enabled, dtype, cache, code


# The regions that can be entered, by ticket, each with its device, whether it is enabled, its low
# dtype and its cache flag.
prepared: dict[str, tuple[Region, str, bool, torch.dtype, bool]] = {}
_tickets: Iterator[str] = map("region {}".format, count())


# Policy codes: the policies in force in a thread, as two dtypes in torch's autocast state.
#
# torch has no place for a policy. It has an autocast state in each thread, though, which torch
# restores around backward and checkpoints, by which torch.compile guards its graphs, and which
# torch's own autocast class restores. So the policies in force are written there: every set of
# policies by device gets a code, a pair of dtypes, and the code is written as the low dtypes of
# two devices that no build of torch has tensors on. Pairs are enough for two thousand sets; when
# they are gone, a policy is refused.
#
# Devices whose tensors no torch build has, but whose autocast state every one keeps: a flag and a
# low dtype, restored and guarded like any other's. Since torch 2.4. Dynamo compares the dtype only
# where the flag is on, so it is on while a policy is coded here.
SLOTS = ("ipu", "maia")
NONE: Code = (get_autocast_dtype(SLOTS[0]), get_autocast_dtype(SLOTS[1]))


class Codes:
    """The codes that this process has given out, none of which is ever given to other policies."""

    def __init__(self) -> None:
        # By code, which guards the graphs that torch.compile made under it, the policies by device;
        # `NONE` has none. As long as this is empty, no policy was ever used, and the code in force
        # need not be read.
        self.policies: dict[Code, dict[str, Policy]] = {}
        self.free: Iterator[Code] = iter([(a, b) for a in NAMES for b in NAMES if (a, b) != NONE])
        # What the policies and their codes are known by in other processes.
        self.digest = f"polymp {__version__}"
        self.lock = threading.Lock()  # held while a code is given out


codes: Codes = Codes()


# What entering and leaving read: a name of this module costs less than an attribute.
_policies = codes.policies


@cache
def ticket(region: Region) -> str:
    """Return a name for the region, equal for equal ones; compiled graphs are guarded by it."""
    # A number would not do: dynamo makes a symbol of a number that changes.
    code_inside(region, NONE)  # from now on policies are read and written, if it has one
    name = next(_tickets)
    prepared[name] = region, region.device, region.enabled, DTYPES[region.dtype], region.cache
    return name


def in_force(device: str) -> Region:
    """Return the region in force for the device in this thread, read from torch's own state."""
    return _region(
        device,
        is_autocast_enabled(device),
        get_autocast_dtype(device),
        is_autocast_cache_enabled(),
        code_in_force() if codes.policies else NONE,
    )


def low_dtype(device: str) -> str:
    """Return the low dtype of the region of ours in force for the device; "" outside of any."""
    # It is read from the stack: below autocast, torch reports every region as disabled.
    opened = (frame[0] for frame in reversed(local.thread.frames))
    inner = next((region for region in opened if region.device == device), None)
    return inner.dtype if inner is not None and inner.enabled else ""


@dynamo.no_frame
def wants_cache() -> bool:
    """Return the cache flag of the region around, even if another thread has torch's map."""
    frames = local.thread.frames
    return bool(frames[-1][0].cache if frames else is_autocast_cache_enabled())


@cache
def _region(device: str, enabled: bool, dtype: torch.dtype, cache: bool, code: Code) -> Region:
    policy = policy_at(device, *code)
    return Region("torch", device, enabled, NAMES[dtype], cache, policy)


# In a set of policies by device: that of the module which is running, for devices without one.
SCOPE = ""


@dynamo.at_trace_time
def policy_at(device: str, *code: torch.dtype) -> Policy | None:
    """Return the policy for a device under the policies of a code; None for torch's table."""
    policies = codes.policies.get(code, {})
    return policies.get(device, policies.get(SCOPE))


@dynamo.no_frame
def code_in_force() -> Code:
    """Return the code of the policies in force in this thread."""
    return get_autocast_dtype(SLOTS[0]), get_autocast_dtype(SLOTS[1])


@dynamo.no_frame
def write_code(code: Code) -> None:
    """Put the policies of a code in force in this thread."""
    if code != NONE:
        dynamo.compile_by(codes.digest)
    for slot, dtype in zip(SLOTS, code, strict=True):
        set_autocast_enabled(slot, code != NONE)
        set_autocast_dtype(slot, dtype)


def code_inside(region: Region, outer: Code) -> Code:
    """Return the code of the policies inside a region that is entered where `outer` is in force."""
    if region.device in SLOTS and codes.policies:
        raise PolicyError(
            f"autocast({region.device!r}) cannot be used in a process that has used policies: "
            "polymp writes them into torch's autocast state of that device. Use it in a process "
            "without policies."
        )
    policies = {d: p for d, p in codes.policies.get(outer, {}).items() if d != region.device}
    if region.policy is not None:
        policies[region.device] = region.policy
    return _code(frozenset(policies.items()))


def of_scope(policy: Policy) -> Code:
    """Return the code of a policy for all devices, as `scoped` gives it to a module."""
    return _code(frozenset({(SCOPE, policy)}))


@cache
def _code(policies: frozenset[tuple[str, Policy]]) -> Code:
    if not policies:
        return NONE
    with codes.lock:
        code = next(codes.free, None)
        if code is None:
            names = " and ".join(sorted({repr(policy.name) for _, policy in policies}))
            raise PolicyError(
                f"no code is left for policy {names}: this process has used as many sets of "
                f"policies as torch's autocast state can tell apart, {len(NAMES) ** 2 - 1:,}. Use "
                "fewer policies, of which equal ones count once, or start another process."
            )
        known = sorted(
            (device, p.name, p.halves, p.fp8, [astuple(row)[:-1] for row in p.rows])  # no source
            for device, p in policies
        )
        codes.digest = sha256(f"{codes.digest} {known}".encode()).hexdigest()
        codes.policies[code] = dict(policies)
        return code


# Regions in code that torch.compile traces, or torch.export writes into a program. There the same
# state is written as outside, by calls in the graph that also run while the graph is made. What a
# trace has entered and not left when it is given up is left here.


class CompiledRegion:
    """A region entered in code that torch.compile traces.

    It holds what leaving restores: the stack of regions cannot, for it belongs to code that runs,
    and traced code does not run. Dynamo enters only context managers made in the code it traces,
    and guards what they were made from.
    """

    def __init__(self, ticket: str) -> None:
        _allow()
        self.ticket = ticket

    def __enter__(self) -> None:
        inside = _inside(self.ticket, *code_in_force())
        self.outside = _state(inside[0])
        _put(self.ticket, *inside)

    def __exit__(self, *exc: object) -> None:
        _put(None, *self.outside)


_Entries = tuple[CompiledRegion, "_Entries | None"]


def _state(device: str) -> tuple[Any, ...]:
    """Return the state in force, as arguments of `_set`."""
    enabled, dtype = is_autocast_enabled(device), get_autocast_dtype(device)
    return device, enabled, dtype, is_autocast_cache_enabled(), *code_in_force()


def _put(ticket: str | None, device: str, enabled: bool, dtype: torch.dtype, *state: Any) -> None:
    """Enter the ticket's region, or leave one (None), as a call in a graph."""
    tell_export(ticket)
    if ticket is not None:
        undo = functools.partial(_restore, autocast_increment_nesting(), *_state(device))
        dynamo.after_tracing(undo)
        if not enabled:
            dynamo.compile_by(codes.digest)
    elif autocast_decrement_nesting() == 0:
        region_casts.forget_mine()
    _set(device, enabled, dtype, *state)


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
    write_code(code)


def tell_export(ticket: str | None) -> None:
    """Write entering the ticket's region, or leaving one (None), into a program being exported."""
    for mode in dynamo.export_modes():
        if ticket is None:
            mode.__torch_function__(dynamo.LEAVE, (), ())
            continue
        region, device, enabled, dtype, cache = prepared[ticket]
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
def _inside(ticket: str, *outer: torch.dtype) -> tuple[Any, ...]:
    """Return the state inside the ticket's region, entered where a code is in force: see `_set`."""
    region, *settings = prepared[ticket]
    return *settings, *code_inside(region, outer)


# Activation checkpointing: recomputation runs under the policies of the forward pass.
#
# torch.utils.checkpoint recomputes under a torch.autocast that it builds from the enabled flag,
# the dtype and the cache flag, so a policy would be lost. `keep_policies` changes torch's own
# classes, so that libraries which imported torch's function before keep their policies, too.


@cache
def keep_policies() -> None:
    """Have torch's checkpoints recompute under the policies of their forward pass; once."""
    dispatcher.carry_into_recomputation(_carry)


def _carry(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that each call of it runs under the policies in force here and now."""
    # torch restores the rest of the state.
    code = code_in_force()

    @functools.wraps(function)
    def carried(*args: P.args, **kwargs: P.kwargs) -> R:
        outer = code_in_force()
        write_code(code)
        try:
            return function(*args, **kwargs)
        finally:
            write_code(outer)
            if code != NONE or outer != NONE:
                region_casts.drop_unknown()  # made in a region of torch's: its end is not seen

    return carried
