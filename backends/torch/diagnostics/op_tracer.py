"""Every op that runs, seen below autograd, and put down to the call that it is part of.

    an op of the vocabulary is called        -> a `Running` opens          (kernels)
    its casts, and what it is made of, run   -> they are noted on it       (the dispatch mode)
    the engine runs its backward             -> a second `Running` for it  (by autograd node)

What is noted goes to the methods of a `Watch`; `explain` adds up casts, `audit` measures. Nothing
here changes what runs.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from polymp.backends.torch.autocast import dtype_names, regions, weight_cast_cache
from polymp.backends.torch.compat import autograd, dispatcher, flop_count, modes, storage
from polymp.backends.torch.diagnostics.call_site import Place, Places
from polymp.diagnostics.call import BACKWARD, FORWARD, RECOMPUTE
from polymp.rules import decisions
from polymp.rules.row import Row
from polymp.rules.vocabulary import vocabulary

# Kernels that are an op of the vocabulary under another name.
_KERNELS = {
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "native_layer_norm": "layer_norm",
    "_fused_rms_norm": "rms_norm",
    "native_group_norm": "group_norm",
    "native_batch_norm": "batch_norm",
    "_native_batch_norm_legit": "batch_norm",
    "nll_loss_forward": "nll_loss",
    "nll_loss2d_forward": "nll_loss2d",
    "convolution": "conv",
    "_scaled_dot_product_flash_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_efficient_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_cudnn_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention",
    "_scaled_dot_product_attention_math": "scaled_dot_product_attention",
    "native_dropout": "dropout",
    "_to_copy": "to",
}


class Running:
    """One call of an op, or the backward of one.

    Attributes:
        op: its name in the vocabulary, or torch's own.
        spelling: torch's name, with a prefix.
        place: where it was called.
        direction: "forward", "backward" or "recompute".
        region: the low format of the region, "" outside.
        row: that decided; None if none spoke of it.
        inputs: formats of its float inputs as they came; None until they are known.
        run: formats of the float inputs of its first op that computes; of a product, of the first.
        outputs: formats of its float results.
        casts: how many.
        cast_bytes: read and written by them.
        saved: casts spared, by reason.
        flops: of products, convolutions and attention.
        kept: bytes of float32 kept for backward.
        backward: the backward of this call, once a part of it has run.
        ops: how many ops ran in it, casts aside.
    """

    def __init__(
        self,
        op: str,
        spelling: str,
        place: Place,
        direction: str,
        region: str = "",
        row: Row | None = None,
        inputs: tuple[str, ...] | None = None,
    ) -> None:
        self.op = op
        self.spelling = spelling
        self.place = place
        self.direction = direction
        self.region = region
        self.row = row
        self.inputs = inputs
        self.run: tuple[str, ...] = ()
        self.outputs: tuple[str, ...] = ()
        self.casts = 0
        self.cast_bytes = 0
        self.saved: dict[str, int] = {}
        self.flops = 0
        self.kept = 0
        self.backward: Running | None = None
        self.ops = 0
        self.cast_storages: set[int] = set()

    def cast(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """Note a cast that was made for it."""
        if self.inputs is None:
            self.inputs, self.outputs = formats([source]), formats([result])
        self.casts += 1
        self.cast_bytes += source.nbytes + result.nbytes
        self.cast_storages.add(storage.storage_key(source))

    def computed(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        read: tuple[str, ...],
        made: tuple[str, ...],
    ) -> None:
        """Note an op that it is made of, with the formats that it read and made."""
        if self.inputs is None:
            self.inputs = read
        flops = flop_count.flops(func, args, kwargs, result)
        if flops and not self.flops:
            self.run = read[:1]  # attention's statistics are float32 in any case
        elif not self.run:
            self.run = read or made
        self.flops += flops
        self.outputs = made or self.outputs
        self.ops += 1


class Watch(decisions.Recorder):
    """Follows what runs in a thread, and in the backward passes that it starts.

    Args:
        model: whose module paths are used; None for those of the outermost module that runs.
    """

    # False for a watch that does not ask for formats, casts and FLOPs, and has no list of calls.
    counts = True

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.calls: list[Running] = []
        self._places = Places(model)
        self._open: list[Running] = []
        self._next: decisions.Entry | None = None  # of a registered op, whose casts come first
        self._of_node: dict[int, Running] = {}
        self._first_node = 0
        self._stack = ExitStack()
        self.looks_away = False  # while it runs ops of its own
        self._mode = _Mode(self)
        self._paused = False
        self._pauses = 0
        self.region = "", ""  # low format and policy of the first region that was met

    # What those that watch more override

    def before(self, ran: "Ran") -> Any:
        """An op is about to run. What this returns is handed to `after`."""

    def after(self, ran: "Ran", result: Any, made: list[torch.Tensor], kept: Any) -> None:
        """An op that is no cast has run, with these float tensors in its result."""

    def after_cast(self, running: Running, source: torch.Tensor, result: torch.Tensor) -> None:
        """A cast has run."""

    def unwatched(self, result: Any) -> None:
        """An op has run that reads no float, and is no view."""

    # Called by the kernels on the autocast keys

    def around(
        self, entry: decisions.Entry, run: Callable[..., Any], *args: Any
    ) -> Any:  # `args` are a kernel's: ruling, keys, args, kwargs
        """Run an op that a kernel was called for; what runs meanwhile is part of it."""
        super().note(entry)
        return self._within(entry, run, *args)

    def _within(self, entry: decisions.Entry, run: Callable[..., Any], *args: Any) -> Any:
        if isinstance(self.outer, Watch):
            run = partial(self.outer._within, entry, run)
        if not self.region[0]:
            self.region = entry.low, entry.policy
        if entry.row is None and entry.op and vocabulary().ops[entry.op].kind in _MOVING:
            return run(*args)  # what it is made of is watched
        place, direction, origin = self._where(sys._getframe(1))
        if origin is not None:  # a part of the backward of another call, in a region
            return run(*args)
        given = args[-2:]
        running = Running(
            entry.op or entry.spelling.removeprefix("aten:").partition(".")[0],
            entry.spelling,
            place,
            direction,
            entry.low,
            entry.row,
            formats(float_tensors(given)) if self.counts else (),
        )
        if self.counts:
            self.calls.append(running)
        self._open.append(running)
        try:
            result = run(*args)
        finally:
            self._open.pop()
        if not self.counts:
            return result
        if entry.row is None and not running.ops and not running.casts:
            at = next(i for i in reversed(range(len(self.calls))) if self.calls[i] is running)
            del self.calls[at]  # a view, or made of others, which speak for themselves
        running.outputs = formats(float_tensors(result))
        if entry.decision.run == "float32" and running.run:
            running.run = ("float32",)  # also of an op that widens inside, as softmax(dtype=) does
        spared(running, given)
        return result

    def note(self, entry: decisions.Entry) -> None:
        """A registered op was decided; its casts, and it, run next."""
        super().note(entry)
        self._next = entry

    # Called by the dispatch mode

    def running(self, func: Any, frame: Any) -> Running:
        """The call that an op is part of; a new one if it is one by itself."""
        if self._open and (autograd.backward_node() is None or self._open[-1].direction != FORWARD):
            return self._open[-1]
        node = autograd.backward_node()
        known = None if node is None else self._of_node.get(node)
        if known is not None and known.backward is not None and not torch.is_grad_enabled():
            return known.backward  # no recomputation: that has gradients on
        place, direction, origin = self._where(frame)
        if origin is not None:
            if origin.backward is None:
                origin.backward = Running(
                    origin.op, origin.spelling, place, BACKWARD, origin.region, origin.row
                )
                if self.counts:
                    self.calls.append(origin.backward)
            return origin.backward
        made = self._alone(func, place, direction)
        if self.counts:
            self.calls.append(made)
        return made

    def _where(self, frame: Any) -> tuple[Place, str, Running | None]:
        """Place and direction of what runs, and the call whose backward of torch's own it is in."""
        place, node = self._places.here(frame), autograd.backward_node()
        if place.recomputed or node is None:
            return place, RECOMPUTE if place.recomputed else FORWARD, None
        origin = self._of_node.get(node)
        if origin is None:
            return place, BACKWARD, None
        if not place.source:
            return origin.place, BACKWARD, origin
        # The user's own backward, or a hook, in which ops are called as anywhere.
        return place._replace(module=place.module or origin.place.module), BACKWARD, None

    def _alone(self, func: Any, place: Place, direction: str) -> Running:
        entry, name = self._next, func.overloadpacket.__name__
        overload = func.name().removeprefix("aten::")
        spelling = f"aten:{overload}"
        if entry is not None and entry.spelling == spelling:
            self._next = None
            at = place, direction, entry.low, entry.row
            return Running(entry.op, spelling, *at, entry.formats)
        return Running(name_of(overload, name), spelling, place, direction)

    def made_by(self, running: Running) -> None:
        """Remember which call the autograd node that was made last belongs to."""
        number = autograd.latest_node()
        if number >= self._first_node and number not in self._of_node:
            self._of_node[number] = running

    def viewed(self, func: Any, args: Any, frame: Any) -> None:
        """A view is made, which is no call; the backward of one may be."""
        number = autograd.latest_node()
        if number >= self._first_node and number not in self._of_node:
            place, direction, _ = self._where(frame)
            self._of_node[number] = self._alone(func, place, direction)

    # Entering and leaving

    def __enter__(self) -> "Watch":
        self._first_node = autograd.latest_node() + 1
        with ExitStack() as stack:
            stack.enter_context(decisions.recorded_by(self))
            stack.enter_context(self._mode)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._pauses = 0
        self.go_on()
        self._stack.__exit__(*error)

    def pause(self) -> None:
        """Watch nothing until `go_on`, at no cost where no other mode is inside of this one.

        Pauses may be inside each other.
        """
        self._pauses += 1
        self.looks_away = True
        if modes.innermost_mode() is self._mode:
            self._paused = True
            self._mode.__exit__(None, None, None)

    def go_on(self) -> None:
        """End a `pause`, in the same thread."""
        self._pauses = max(self._pauses - 1, 0)
        if self._pauses:
            return
        self.looks_away = False
        if self._paused:
            self._paused = False
            self._mode.__enter__()  # type: ignore[no-untyped-call]


class _Busy(threading.local):
    """How many measurements run in this thread: their ops are of no program."""

    def __init__(self) -> None:
        self.depth = 0


_busy = _Busy()


class Own:
    """`with Own(keys):` ops of a watch's own, which no watch sees and no region casts.

    Args:
        keys: autocast's dispatch keys.
    """

    def __init__(self, keys: torch._C.DispatchKeySet) -> None:
        self._keys = keys

    def __enter__(self) -> None:
        _busy.depth += 1
        self._guard = dispatcher.ExcludeKeys(self._keys)
        self._guard.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._guard.__exit__(*error)
        _busy.depth -= 1


class _Mode(TorchDispatchMode):
    """Hands every op to a watch."""

    supports_higher_order_operators = True
    looks_on = True  # it changes and records nothing: see `modes.is_recorded`

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if modes.unwrapped_first(types):
            return NotImplemented
        kwargs = dict(kwargs or {})
        watch = self.watch
        if not isinstance(func, torch._ops.OpOverload) or watch.looks_away or _busy.depth:
            return func(*args, **kwargs)
        kind = kind_of(func)
        if kind == "view":
            watch.viewed(func, args, sys._getframe(1))
            return func(*args, **kwargs)
        copies = func is torch.ops.aten._to_copy.default
        source: Any = args[0] if copies else None
        casts = copies and is_cast(source, kwargs)
        reads = [source] if casts else float_tensors((args, kwargs))
        if kind == "makes" or not reads:
            result = func(*args, **kwargs)
            watch.unwatched(result)
            return result
        running = watch.running(func, sys._getframe(1))
        watch.made_by(running)
        if running.inputs is None and not running.region:
            running.region = _low(reads[0])
        if casts:
            result = func(*args, **kwargs)
            if watch.counts:
                running.cast(source, result)
            watch.after_cast(running, source, result)
            return result
        ran = Ran(running, func, args, kwargs, reads)
        read = formats(reads) if watch.counts else ()  # before an op writes into one
        kept = watch.before(ran)
        result = func(*args, **kwargs)
        made = float_tensors(result)
        if watch.counts:
            running.computed(func, args, kwargs, result, read, formats(made))
        watch.after(ran, result, made, kept)
        return result


class Ran(NamedTuple):
    """An op that runs or has run.

    Attributes:
        running: the call that it is part of.
        func: the op.
        args: that it was called with.
        kwargs: that it was called with.
        reads: the float tensors among them.
    """

    running: Running
    func: torch._ops.OpOverload
    args: Any
    kwargs: Any
    reads: list[torch.Tensor]


def name_of(overload: str, name: str) -> str:
    """The name of an op that no kernel was asked for, as one in place: "relu_", "add_.Tensor".

    Args:
        overload: its full name.
        name: without the overload's: "add_".
    """
    op = vocabulary().of_aten(overload) or _KERNELS.get(name)
    if not op and name.endswith("_"):
        op = vocabulary().of_aten(overload.replace(name, name[:-1], 1))
    return op or name


def _low(t: torch.Tensor) -> str:
    """The low format of our region that is in force for a tensor; "" outside of any.

    Read off the regions that are open: below autocast, where this is asked, torch says of every
    region that it is disabled.
    """
    opened = (frame[0] for frame in reversed(regions.stack.frames))
    inner = next((region for region in opened if region.device == t.device.type), None)
    return inner.format if inner is not None and inner.enabled else ""


# Classes of ops that only move numbers.
_MOVING = frozenset({"layout", "indexing"})

_FACTORIES = frozenset(
    "empty_like ones_like zeros_like full_like rand_like randn_like new_empty new_zeros new_ones "
    "new_full new_empty_strided bernoulli_ normal_ uniform_ zero_ fill_ "
    "_local_scalar_dense is_same_size _has_same_storage_numel".split()
)
_kinds: dict[Any, str] = {}


def kind_of(func: torch._ops.OpOverload) -> str:
    """Of an op: "view" of its argument, "makes" what no float is read for, or "computes"."""
    found = _kinds.get(func)
    if found is None:
        aliases = [r.alias_info for r in func._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in aliases)
        if view or func.namespace in ("prim", "profiler"):
            found = "view"
        elif func.overloadpacket.__name__ in ("_unsafe_view", "detach_"):
            found = "view"
        else:
            found = "makes" if func.overloadpacket.__name__ in _FACTORIES else "computes"
        _kinds[func] = found
    return found


def is_cast(source: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
    """True if a copy is from one float format to another, on one device."""
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    return (
        isinstance(dtype, torch.dtype)
        and dtype.is_floating_point
        and source.is_floating_point()
        and dtype is not source.dtype
        and (device is None or torch.device(device).type == source.device.type)
    )


def float_tensors(tree: Any) -> list[torch.Tensor]:
    """The float tensors in an op's arguments or results, in order."""
    found: list[torch.Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        if tree.is_floating_point():
            found.append(tree)
    elif isinstance(tree, (tuple, list)):
        for inner in tree:
            _collect(inner, found)
    elif isinstance(tree, dict):
        for inner in tree.values():
            _collect(inner, found)


def formats(tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
    """The formats of tensors."""
    return tuple(dtype_names.NAMES[t.dtype] for t in tensors)


def spared(running: Running, given: Any) -> None:
    """Note the casts of parameters that a call was spared: it ran low, and none was made."""
    low = dtype_names.DTYPES.get(running.region)
    if running.row is None or not running.run or set(running.run) != {running.region}:
        return
    kind = "held" if weight_cast_cache.weights else "cached"
    for t in float_tensors(given):
        if t.is_leaf and t.dtype is torch.float32 is not low:
            key = storage.storage_key(t)  # 0 of what torch.func wraps
            if key and key not in running.cast_storages:
                running.saved[kind] = running.saved.get(kind, 0) + 1
