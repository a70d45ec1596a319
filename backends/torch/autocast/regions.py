"""Entering and leaving regions: the core's stack on one side, torch's autocast state on the other.

The state in force is always torch's own, per thread: enabled flag, low dtype, cache flag, and the
policies as a code. Compiled kernels, torch.compile's guards and torch's own autocast class read and
write the same state. The stack of regions keeps what leaving has to restore.
"""

import threading
from functools import cache
from typing import TypeVar

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

from polymp.backends.torch.autocast import policy_code, region_casts
from polymp.backends.torch.autocast.dtype_names import DTYPES, NAMES
from polymp.backends.torch.autocast.policy_code import NONE, Code, codes
from polymp.backends.torch.autocast.region_casts import end, keep
from polymp.backends.torch.compat import dynamo
from polymp.rules.region import Region, Stack

# A frame: the region entered, and before it: enabled, low dtype, cache flag, code of the policies.
Frame = tuple[Region, bool, torch.dtype, bool, Code]
T = TypeVar("T")

stack: Stack[Frame] = Stack()


class Entries(threading.local):
    """The regions that this thread has entered, as far as loss scalers need to know them.

    Attributes:
        latest: by device type, the low dtype of the region that was entered last.
        unscaled: device types of float16 regions entered with gradients on since a step.
    """

    def __init__(self) -> None:
        self.latest: dict[str, torch.dtype] = {}
        self.unscaled: set[str] = set()


entries: Entries = Entries()


@dynamo.no_frame
def enter(ticket: str, entered: T) -> T:
    """Enter a prepared region in this thread.

    It runs at every `with`: a call more shows in the overhead of regions.

    Args:
        ticket: of the region.
        entered: to be returned, so that no interrupt comes between this call and the caller's end.

    Returns:
        The same.

    Raises:
        PolicyError: policies cannot be in force with it; nothing has changed then.
    """
    region, device, enabled, dtype, cache = _by_ticket[ticket]
    code = inside = NONE
    if len(_policies) > 1:
        code = policy_code.in_force()
        inside = policy_code.inside(region, code)
    frames, depth = stack.frames, 0
    before = is_autocast_enabled(device), get_autocast_dtype(device), is_autocast_cache_enabled()
    frame = region, *before, code
    try:
        depth = autocast_increment_nesting()  # torch's own regions count
        frames.append(frame)
        if enabled:
            if dtype is torch.float16:
                note(device, dtype)
            else:
                entries.latest[device] = dtype
        else:
            dynamo.compile_by(codes.digest)
        set_autocast_enabled(device, enabled)
        set_autocast_dtype(device, dtype)
        set_autocast_cache_enabled(cache and keep(device, dtype, enabled, depth))
        if len(_policies) > 1:
            policy_code.write(inside)
        return entered
    except BaseException:  # an interrupt may come at any line
        if frames and frames[-1] is frame:
            leave(ticket, frames)
        elif depth:
            autocast_decrement_nesting()
        raise


@dynamo.no_frame
def leave(ticket: str, frames: list[Frame]) -> None:
    """Leave the youngest open region that is equal to the ticket's.

    The frame goes last, so that after an interrupt the same call again does all that is left.

    Args:
        ticket: of the region.
        frames: of the stack.

    Raises:
        RuntimeError: it is not open in this thread.
    """
    region, device, _, _, _ = _by_ticket[ticket]
    if not frames or frames[-1][0] is not region:
        frames.append(_pull(region))
    _, enabled, dtype, cache, code = frames[-1]
    if len(frames) == 1:
        end()
    elif cache:
        # Back in a region of another dtype, the casts to this one go. It is not the outermost.
        keep(device, dtype, enabled, len(frames))
    set_autocast_enabled(device, enabled)
    set_autocast_dtype(device, dtype)
    set_autocast_cache_enabled(cache)
    if len(_policies) > 1:
        policy_code.write(code)
    _ = frames.pop(), autocast_decrement_nesting()


def _pull(region: Region) -> Frame:
    """Take a frame out from under younger ones; return the state that is to be in force then.

    Flag and dtype belong to a device and go to its next younger frame. Cache flag and policies
    belong to the thread: the frames that are left change them, from those before the first.
    """
    frames = stack.frames
    cache, code = frames[0][3:] if frames else (True, NONE)
    pulled = stack.pull(region)
    for at, (younger, enabled, dtype, *_) in enumerate(frames):
        frames[at] = younger, enabled, dtype, cache, code
        cache, code = younger.cache and region_casts.mine(), policy_code.inside(younger, code)
    if pulled is None:
        device = region.device
        return region, is_autocast_enabled(device), get_autocast_dtype(device), cache, code
    return *pulled[:3], cache, code


class Prepared:
    """The regions of this process that can be entered.

    Attributes:
        by_ticket: each with its device, whether it is enabled, its low dtype and its cache flag.
        tickets: their names.
        lock: held while one is added.
    """

    def __init__(self) -> None:
        self.by_ticket: dict[str, tuple[Region, str, bool, torch.dtype, bool]] = {}
        self.tickets: dict[Region, str] = {}
        self.lock: threading.Lock = threading.Lock()


prepared: Prepared = Prepared()

# What entering and leaving read: a name of this module costs less than an attribute.
_by_ticket, _policies = prepared.by_ticket, codes.policies


def ticket(region: Region) -> str:
    """Return a name for the region, equal for equal ones; compiled graphs are guarded by it.

    A number would not do: dynamo makes a symbol of a number that changes.
    """
    policy_code.inside(region, NONE)  # from now on policies are read and written, if it has one
    with prepared.lock:
        if region not in prepared.tickets:
            name, dtype = f"region {len(prepared.tickets)}", DTYPES[region.dtype]
            prepared.by_ticket[name] = region, region.device, region.enabled, dtype, region.cache
            prepared.tickets[region] = name
        return prepared.tickets[region]


def in_force(device: str) -> Region:
    """Return the region in force for the device in this thread, read from torch's own state."""
    return _region(
        device,
        is_autocast_enabled(device),
        get_autocast_dtype(device),
        is_autocast_cache_enabled(),
        NONE if len(codes.policies) == 1 else policy_code.in_force(),
    )


def low_dtype(device: str) -> str:
    """Return the low dtype of the region of ours in force for the device; "" outside of any.

    It is read from the stack: below autocast, torch reports every region as disabled.
    """
    opened = (frame[0] for frame in reversed(stack.frames))
    inner = next((region for region in opened if region.device == device), None)
    return inner.dtype if inner is not None and inner.enabled else ""


@dynamo.no_frame
def note(device: str, dtype: torch.dtype) -> None:
    """Note for loss scalers that an enabled region was entered."""
    entries.latest[device] = dtype
    if dtype is torch.float16 and is_grad_enabled():
        entries.unscaled.add(device)


def latest_low(device: str) -> torch.dtype | None:
    """Return the low dtype of the region in force for the device, or else of the latest one.

    A loss is as often scaled after its region as in it. None if this thread has entered none.
    """
    if is_autocast_enabled(device):
        return get_autocast_dtype(device)
    return entries.latest.get(device)


@dynamo.no_frame
def wants_cache() -> bool:
    """Return the cache flag of the region around, even if another thread has torch's map."""
    frames = stack.frames
    return bool(frames[-1][0].cache if frames else is_autocast_cache_enabled())


@cache
def _region(device: str, enabled: bool, dtype: torch.dtype, cache: bool, code: Code) -> Region:
    policy = policy_code.policy_at(device, *code)
    return Region("torch", device, enabled, NAMES[dtype], cache, policy)
