"""Casts of weights that are held from region to region, and how a change of a weight is noticed.

A cast is used again as long as its weight, or the view of it that was cast, has the version,
address, shape and strides that it had when the cast was made, and no optimizer that has the weight
has stepped. Every cast keeps the memory it was made from alive, so that no other tensor gets that
address. docs/fast.md lists the writes that none of this shows.

Only the numbers are held. Where gradients are wanted, each use, or each region that keeps casts,
gets a node of its own in the graph: gradients are then added up as they are without.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from polymp.backends.torch.autocast.cast_node import as_cast
from polymp.backends.torch.compat import dtensor, modes
from polymp.errors import StaleCastError

# A weight with fewer elements, used where gradients are wanted, is cast again: that costs less than
# a node of ours. Measured on a CPU, where the two meet near 60,000 elements.
SMALL = 2**16

# Device types on which casts that went stale together are made again in one call.
TOGETHER = frozenset({"cuda"})


# Version, address, shape, strides and dtype of a tensor; () of none.
Stamp = tuple[object, ...]

# What a weight is cast to: a dtype, or 8 bits in a way that is known by its value, which returns
# the 8-bit tensor and its scale.
How = torch.dtype | Callable[[torch.Tensor], Sequence[torch.Tensor]]

# A `How` and the stream of a cast; of a view's, its place, shape and strides, too.
Key = tuple[Any, ...]


class Held(NamedTuple):
    """A cast, and the state of its source when it was made.

    Attributes:
        stamp: version, address, shape, strides and dtype of the source.
        source: an alias of the source; keeps its memory.
        low: the cast.
        version: of the cast; an op may return it, or a view of it, and that may be written.
        scale: of a cast to 8 bits; an empty tensor for others.
    """

    stamp: Stamp
    source: torch.Tensor
    low: torch.Tensor
    version: int
    scale: torch.Tensor

    def is_of(self, stamp: Stamp) -> bool:
        """Return whether the cast was not written since, and its source has this stamp."""
        return self.stamp == stamp and self.low._version == self.version


class Weight:
    """A parameter or buffer whose casts are held.

    Args:
        tensor: the parameter or buffer.
        name: its name in the model, for messages.

    Attributes:
        tensor: likewise.
        name: likewise.
        blocks: the number of open blocks that hold it.
        checked: the number of those that check every use.
        casts: by dtype, stream and, for views, geometry.
        made: casts made so far.
        served: uses of casts so far.
    """

    __slots__ = ("blocks", "casts", "checked", "made", "name", "served", "tensor")

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self.tensor: torch.Tensor = tensor
        self.name: str = name
        self.blocks: int
        self.checked: int
        self.made: int
        self.served: int
        self.blocks = self.checked = self.made = self.served = 0
        self.casts: dict[Key, Held] = {}

    def forget(self) -> None:
        """Drop the casts. On devices of `TOGETHER`, casts of whole weights leave a place."""
        together = self.tensor.device.type in TOGETHER
        self.casts = {key: _GONE for key in self.casts if together and len(key) == 2}


_NOTHING = torch.empty(0)
_GONE = Held((), _NOTHING, _NOTHING, 0, _NOTHING)  # of no source: the next use makes it again


class HeldWeights:
    """The weights of this process whose casts are held.

    Attributes:
        by_id: by the identity of the tensor; empty unless a block is open.
        lock: held while weights come or go.
        refresh: brings the casts that compiled code reads up to date, for a device and a dtype;
            None if it reads none.
        fresh: whether they are; compiled graphs are guarded by it.
        deferred: of blocks whose kernels are not there yet: each puts them there if it has to.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, Weight] = {}
        self.lock: threading.Lock = threading.Lock()
        self.refresh: Callable[[str, torch.dtype], None] | None = None
        self.fresh: bool = False
        self.deferred: list[Callable[[], None]] = []


held: HeldWeights = HeldWeights()


def hold(named: Iterable[tuple[str, torch.Tensor]], check: bool) -> list[Weight]:
    """Hold the casts of named tensors until `release`; with `check`, compare them at each use."""
    with held.lock:
        taken = []
        for name, tensor in named:
            weight = held.by_id.setdefault(id(tensor), Weight(tensor, name))
            weight.blocks += 1
            weight.checked += check
            taken.append(weight)
        return taken


def release(weights: Iterable[Weight], check: bool) -> None:
    """Undo one `hold`."""
    with held.lock:
        for weight in weights:
            weight.blocks -= 1
            weight.checked -= check
            if not weight.blocks:
                del held.by_id[id(weight.tensor)]
                weight.casts.clear()


def entered(device: str, dtype: torch.dtype) -> None:
    """Do what blocks need at the start of an enabled region."""
    if held.refresh is not None:
        held.refresh(device, dtype)
    if held.deferred and torch.is_grad_enabled():
        for lend in tuple(held.deferred):
            lend()


def written(into: torch.Tensor) -> None:
    """Note that a tensor is about to be written: compiled code may not read its cast."""
    if id(into) in held.by_id or (into._is_view() and id(into._base) in held.by_id):
        held.fresh = False


def stepped(optimizer: torch.optim.Optimizer) -> None:
    """Drop the casts of all that an optimizer has written."""
    if not held.by_id:
        return
    held.fresh = False
    memory: dict[int, list[Weight]] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if (weight := held.by_id.get(id(p))) is not None and weight.tensor is p:
                weight.forget()
            elif isinstance(p, torch.Tensor):  # a flat or sharded stand-in for weights, perhaps
                memory = memory or _by_memory()
                for weight in memory.get(_address(p), ()):
                    weight.forget()


def _by_memory() -> dict[int, list[Weight]]:
    found: dict[int, list[Weight]] = {}
    for weight in list(held.by_id.values()):
        for one in list(weight.casts.values()):
            found.setdefault(_address(one.source), []).append(weight)
    return found


def _address(t: torch.Tensor) -> int:
    t = dtensor.local(t)
    return t.untyped_storage().data_ptr() if t.layout is torch.strided else -1


def cast(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a tensor; a held weight, or a view of one, by the cast that is held."""
    wants = t.requires_grad and torch.is_grad_enabled()
    if wants and t.numel() < SMALL:
        return t.to(dtype)
    found = find(t, dtype)
    if found is None:
        return t.to(dtype)
    if not wants:
        return found.low
    return as_cast(t, found.low)


def find(t: torch.Tensor, how: How) -> Held | None:
    """Return the held cast of `t`, made if there is none; None if `t` is no held weight."""
    weight = held.by_id.get(id(t))
    key: Key = how, None
    if weight is None or weight.tensor is not t:
        if not t._is_view():
            return None
        weight = held.by_id.get(id(t._base))
        if weight is None or weight.tensor is not t._base:
            return None
        if t.is_neg():  # another number in the same place
            return None
        key = how, None, t.storage_offset(), t.size(), t.stride()
    if modes.is_recorded() or t.is_inference():
        return None
    if t.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return None
        key = how, torch.cuda.current_stream(t.device).stream_id, *key[2:]
    found = weight.casts.get(key)
    if found is None or not found.is_of(_stamp(t)):
        if not _is_plain(t) or not (len(key) == 2 or _has_room(weight, t, key)):
            return None
        found = _made_again(weight, t, key)
    elif weight.checked:
        _check(weight, t, how, found)
    weight.served += 1
    return found


def _stamp(t: torch.Tensor) -> Stamp:
    return t._version, t.data_ptr(), t.size(), t.stride(), t.dtype


def _is_plain(t: torch.Tensor) -> bool:
    """Return whether a tensor is of torch's own classes, and so has an address."""
    return type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout is torch.strided


def _has_room(weight: Weight, view: torch.Tensor, key: Key) -> bool:
    """Return whether casts of views, this one among them, are no larger than one of the weight.

    Casts of an older version are dropped before: a buffer that is written in every step has a new
    view in each.
    """
    casts, version = weight.casts, view._version
    known = [(k, cast) for k, cast in list(casts.items()) if len(k) > 2]
    for other in [k for k, cast in known if cast.stamp[0] != version]:
        casts.pop(other, None)  # another thread may have dropped it
    views = sum(cast.low.numel() for k, cast in known if k in casts and k[:2] == key[:2])
    return views + view.numel() <= weight.tensor.numel()


def _made_again(weight: Weight, t: torch.Tensor, key: Key) -> Held:
    together = t.device.type in TOGETHER and isinstance(key[0], torch.dtype)
    if key in weight.casts and t is weight.tensor and together:
        _make_together(key)
        again = weight.casts.get(key)  # another thread may have dropped it
        if again is not None and again.is_of(_stamp(t)):
            return again
    # Made with gradients off, but not in inference mode: other regions will want to differentiate.
    with torch.inference_mode(False), torch.no_grad():
        source = t.detach()
        low, scale = _made(source, key[0])
        weight.casts[key] = found = Held(_stamp(t), source, low, low._version, scale)
    weight.made += 1
    return found


def _made(source: torch.Tensor, how: How) -> Sequence[torch.Tensor]:
    if isinstance(how, torch.dtype):
        return source.to(how), _NOTHING
    return how(source)


def _make_together(key: Key) -> None:
    """Make every stale cast of whole weights with the same dtype and stream, in one call.

    Each has memory of its own, which is free again when the cast is: weights do not all change at
    once. It is new memory, because the old casts may still be waiting for a backward pass.
    """
    dtype, stream = key
    by_device: dict[torch.device, list[tuple[Weight, Stamp, torch.Tensor]]] = {}
    for weight in list(held.by_id.values()):
        t, found = weight.tensor, weight.casts.get(key)
        if found is None or not _is_plain(t) or not _is_dense(t):
            continue
        stamp = _stamp(t)
        same_stream = not t.is_cuda or torch.cuda.current_stream(t.device).stream_id == stream
        if not found.is_of(stamp) and same_stream:
            by_device.setdefault(t.device, []).append((weight, stamp, t.detach()))
            weight.casts[key] = _GONE  # before there are new ones
    with torch.inference_mode(False), torch.no_grad():
        for stale in by_device.values():
            sources = [source for *_, source in stale]
            lows = [torch.empty_like(source, dtype=dtype) for source in sources]
            torch._foreach_copy_(lows, sources)
            for (weight, stamp, source), low in zip(stale, lows, strict=True):
                weight.casts[key] = Held(stamp, source, low, low._version, _NOTHING)
                weight.made += 1


def _is_dense(t: torch.Tensor) -> bool:
    """Return whether a tensor fills its memory without gaps, in an order that a cast keeps."""
    return (
        t.is_contiguous()
        or (t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last))
        or (t.dim() == 5 and t.is_contiguous(memory_format=torch.channels_last_3d))
    )


def _check(weight: Weight, t: torch.Tensor, how: How, found: Held) -> None:
    low = found.low
    with torch.inference_mode(False), torch.no_grad():
        now, scale = _made(t.detach(), how)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[low.element_size()]
    same_scale = torch.equal(scale.view(torch.int32), found.scale.view(torch.int32))
    if not same_scale or not torch.equal(now.view(bits), low.view(bits)):
        raise StaleCastError(
            f"hold_casts: the cast of {weight.name!r} to {str(low.dtype).removeprefix('torch.')} "
            "is stale. The weight was written in a way that shows in no version, address or "
            f"optimizer step, such as {weight.name}.data.copy_(...). Call invalidate() of the "
            "block after such a write, or write to the parameter itself under torch.no_grad()."
        )


def bytes_of(weights: Iterable[Weight]) -> int:
    """Bytes of the casts that are held now."""
    casts = [cast for weight in weights for cast in list(weight.casts.values())]
    return sum(cast.low.nbytes + cast.scale.nbytes for cast in casts)


def drop(tensors: Iterable[torch.Tensor]) -> None:
    """Drop the casts of tensors; they are made again when they are asked for."""
    held.fresh = False
    for tensor in tensors:
        weight = held.by_id.get(id(tensor))
        if weight is not None and weight.tensor is tensor:
            weight.forget()


def is_checked(t: torch.Tensor) -> bool:
    """Return whether a tensor is a weight that a block checks at every use."""
    weight = held.by_id.get(id(t))
    return weight is not None and weight.tensor is t and weight.checked > 0
