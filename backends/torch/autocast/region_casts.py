"""The casts of parameters that a region keeps: which thread has them, and when they are dropped.

torch's own kernels keep a cast of every float32 parameter until the outermost region ends, in
one map for the whole process, keyed by the parameter alone. That is right for one thread, one low
dtype and constant weights. This module makes it right in all cases:

    another low dtype on the device   drop                       `keep`
    a parameter is written in place    drop                       kernels on the writing ops
    an optimizer steps                 drop                       torch's optimizer hook
    a second thread enters a region    it keeps no casts          `keep`, `end`

Our own kernels keep theirs in `cast`, per thread and keyed by dtype, version and epoch.
docs/differences.md lists the writes that are not seen.
"""

import threading
import weakref
from functools import cache
from typing import Any

import torch
from torch import clear_autocast_cache
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook

from polymp.backends.torch.autocast import op_facts, torch_table
from polymp.backends.torch.compat import dispatcher, dynamo, modes
from polymp.rules.policy import Region

Code = tuple[torch.dtype, ...]  # of policies: see `regions`

# A frame: the region entered, and before it: enabled, low dtype, cache flag, code of the policies.
# It does not hold the object that the user entered, which may be entered twice or by many threads.
Frame = tuple[Region, bool, torch.dtype, bool, Code]


class Thread:
    """The open regions of one thread and the casts of our own kernels; it lives as long as that."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []  # oldest first
        self.reference = weakref.ref(self)
        self.epoch = 0  # of the map when `casts` were made
        self.casts: dict[  # by identity of the parameter and dtype
            tuple[int, torch.dtype], tuple[weakref.ref[Any], tuple[int, int], torch.Tensor]
        ] = {}


class _Local(threading.local):
    """The state of this thread, all behind one attribute: each look into it takes 50 ns."""

    def __init__(self) -> None:
        self.thread = Thread()


class _Map:
    """The state of torch's map of casts, one for the process."""

    def __init__(self) -> None:
        # Under "thread", a reference to the thread whose casts it holds; dead when that is. It is a
        # dict because `setdefault` claims the map in one step, without a lock.
        self.owner: dict[str, weakref.ref[Thread]] = {}
        self.dtypes: dict[str, torch.dtype] = {}  # by device, of the casts in it
        self.epoch = 0  # raised by every drop; casts of our own kernels from before it are stale
        self.lock = threading.Lock()  # held to take the map over from a dead thread


_map = _Map()
local: _Local = _Local()
owner, dtypes = _map.owner, _map.dtypes  # read at every entry of a region


def drop() -> None:
    """Forget every kept cast, of every thread."""
    _map.epoch += 1
    clear_autocast_cache()


def drop_unknown() -> None:
    """Forget every kept cast, and the low dtypes of the devices."""
    drop()
    _map.dtypes.clear()


@dynamo.no_frame
def keep(thread: Thread, device: str, dtype: torch.dtype, casting: bool, depth: int) -> bool:
    """Give torch's map to this thread, so that it can keep casts there, if the map is free."""
    # Casts to another dtype, or to an unknown one, are dropped.
    mine = thread.reference
    if owner.setdefault("thread", mine) is not mine and not _take_over(mine):
        return False
    if casting and dtypes.get(device) is not dtype:
        if depth > 1:  # else there is none yet
            drop()
        dtypes[device] = dtype
    return True


def _take_over(mine: "weakref.ref[Thread]") -> bool:
    """Give the map to this thread if its owner died in a region."""
    with _map.lock:
        owner = _map.owner.get("thread")
        if owner is not None and owner() is not None:
            return False
        drop_unknown()
        _map.owner["thread"] = mine
        return True


@dynamo.no_frame
def mine() -> bool:
    """Return whether torch's map belongs to this thread."""
    return _map.owner.get("thread") is local.thread.reference


@dynamo.no_frame
def end(thread: Thread) -> None:
    """Drop the casts of this thread and give the map up: it left its last region."""
    if thread.casts:
        thread.casts.clear()
    if owner.get("thread") is thread.reference:
        _map.epoch += 1  # autograd's own threads have casts, too, and never leave a region
        clear_autocast_cache()
        dtypes.clear()
        del owner["thread"]


@cache
def watch(device: str) -> None:
    """Drop casts when parameters are written in regions of the device; once for each device."""
    key = dispatcher.autocast_key(device)
    if key is None:
        return
    torch_table.kernels(device)  # torch's must be read before ours stand beside them
    _watch_steps()
    for name in op_facts.WRITERS:
        packet = getattr(torch.ops.aten, name)
        ops = (getattr(packet, variant) for variant in packet.overloads())
        for op in filter(dispatcher.is_dispatched, ops):
            name = op.name().removeprefix("aten::")
            dispatcher.put(dispatcher.library_of(name), {name: _writer(op, key)}, key)


@cache
def _watch_steps() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(*_: object) -> None:
    if not is_dynamo_compiling():  # a compiled step would be guarded by the epoch
        drop()


def _writer(op: torch._ops.OpOverload, key: str) -> Any:
    pass_on = dispatcher.passing_on(op, key)

    def writer(keys: torch._C.DispatchKeySet, *args: object, **kwargs: object) -> Any:
        into: Any = args[0]
        # Most tensors are neither: two frames of Python less at each op in place.
        if not isinstance(into, torch.Tensor) or into.requires_grad or into._is_view():
            writing(into)
        return pass_on(keys, args, kwargs)

    return dynamo.no_frame(writer, inside=True)


def writing(into: Any) -> None:
    """Drop all casts if a tensor, or one of a list, that is about to be written is a parameter."""
    one = isinstance(into, torch.Tensor)
    if _is_parameter(into) if one else any(map(_is_parameter, into)):
        drop()


def _is_parameter(t: torch.Tensor) -> bool:
    """Return whether a tensor, or its base, is a leaf with gradients: torch keeps its casts."""
    base = t._base if t._is_view() else t
    return base is not None and base.requires_grad and base.is_leaf


def cast(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a tensor to the low dtype for our kernels; a parameter's cast is kept."""
    # When it may be kept: torch v2.13 aten/src/ATen/autocast_mode.cpp, `cached_cast`.
    may_keep = (
        t.dtype is torch.float32
        and type(t) in (torch.Tensor, torch.nn.Parameter)  # a fake tensor has no address,
        and t.layout is torch.strided  # nor has a sparse one
        and t.requires_grad
        and t.is_leaf
        and not t._is_view()
        and torch.is_autocast_cache_enabled()
        and not torch.is_inference_mode_enabled()
        and not modes.in_transform(t)  # a wrapper has no address either
    )
    if not may_keep:
        return t.to(dtype)
    mine = local.thread
    if mine.epoch != _map.epoch:
        mine.casts.clear()
        mine.epoch = _map.epoch
    stamp, key = (t._version, t.data_ptr()), (id(t), dtype)
    kept = mine.casts.get(key)
    if kept is not None and kept[0]() is t and kept[1] == stamp:
        return kept[2]
    with torch.enable_grad():  # else a cast made under no_grad would cut later gradients off
        low = t.to(dtype)
    mine.casts[key] = (weakref.ref(t), stamp, low)
    return low


def forget_mine() -> None:
    """Drop this thread's casts, where a region ends in a graph."""
    local.thread.casts.clear()
    clear_autocast_cache()
