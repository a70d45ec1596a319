"""torch's dispatcher and autograd: keys, ops, kernels on them, and nodes of the graph."""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C import _ExcludeDispatchKeyGuard as ExcludeKeys

__all__ = ["ExcludeKeys"]


# Where an op looks first while a torch.func transform is active.
FUNC_FRONT = "FuncTorchDynamicLayerFrontMode"


def autocast_key(device: str) -> str | None:
    """Return the name of the dispatch key that autocast uses on a device type."""
    # None where Python cannot name it, as for XLA: nothing can be registered there from Python.
    private = device == torch._C._get_privateuse1_backend_name()
    key = "AutocastPrivateUse1" if private else f"Autocast{device.upper()}"
    return key if hasattr(torch._C.DispatchKey, key) else None


def keyset(key: str) -> torch._C.DispatchKeySet:
    """Return the set of one dispatch key, for `ExcludeKeys`."""
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))


def autocast_keys(devices: Sequence[str]) -> torch._C.DispatchKeySet:
    """Return the set of autocast keys of device types, for `ExcludeKeys`."""
    return functools.reduce(
        lambda one, other: one | other, map(keyset, filter(None, map(autocast_key, devices)))
    )


def below(key: str) -> torch._C.DispatchKeySet:
    """Return all keys that the dispatcher asks after `key`."""
    return torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, key))


def registered(key: str) -> frozenset[str]:
    """Return the names of the aten overloads with a kernel on the key, without "aten::"."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return frozenset(n.removeprefix("aten::") for n in names if n.startswith("aten::"))


def overload(name: str) -> torch._ops.OpOverload | None:
    """Return the overload "mm", "softmax.int" or "mylib::my_op"; None if torch has none."""
    space, _, name = name.rpartition("::")
    base, _, variant = name.partition(".")
    packet = getattr(getattr(torch.ops, space or "aten"), base, None)
    if packet is None or variant == "default":  # which is written "mm", not "mm.default"
        return None
    return getattr(packet, variant or "default", None)


def takes_names(name: str) -> bool:
    """Return whether an overload takes named dimensions, until torch 2.12; only its name tells."""
    return "dimname" in name.lower() or ".names_" in name


def qualified_name(op: object) -> str | None:
    """Return the name "mylib::my_op" of a name, an op or a result of `custom_op`; else None."""
    if isinstance(op, str):
        return op
    if isinstance(op, torch._ops.OpOverload):
        return op._name.removesuffix(".default")
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op._qualified_op_name
    return op._qualname if isinstance(op, torch._library.custom_ops.CustomOpDef) else None


def has_kernel(name: str, key: str) -> bool:
    """Return whether an op has a kernel of its own on a dispatch key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def is_dispatched(op: torch._ops.OpOverload) -> bool:
    """Return whether the dispatcher has the op: `add_.t` is TorchScript alone."""
    return bool(torch._C._dispatch_has_kernel(op.name()))


@functools.cache  # reading a schema takes long, and each record of decisions asks for 500 ops
def tensors_of(op: torch._ops.OpOverload) -> tuple[int, ...]:
    """Return the places of an op's arguments that must be tensors."""
    return tuple(at for at, a in enumerate(op._schema.arguments) if str(a.type) == "Tensor")


def calling(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Make a function that calls an op, with a Python number for a Tensor of the schema, too."""
    # The dispatcher passes such numbers to a Python kernel as they were written: `x % 4` as (x, 4).
    # Most overloads refuse them; the packet finds the overload that takes a number.
    tensors = tensors_of(op)
    packet, entry = op.overloadpacket, op._op  # without the Python of OpOverload.__call__
    if tensors in ((), (0,)):
        return entry

    def call(*args: object, **kwargs: object) -> Any:
        for at in tensors:
            if at < len(args) and not isinstance(args[at], torch.Tensor):
                return packet(*args, **kwargs)
        return entry(*args, **kwargs)

    return call


def passing_on(op: torch._ops.OpOverload, key: str) -> Callable[..., Any]:
    """Make a function of (keys, args, kwargs) that calls an op as if `key` had no kernel."""
    # `OpOverload.redispatch` refuses a Python number where the schema says Tensor; then the op is
    # called again, with the key excluded. `_handle.redispatch_boxed` is all that `redispatch`
    # calls; a frame of Python less is a tenth of what a small op in place takes.
    after, excluded = below(key), keyset(key)
    tensors = tensors_of(op)
    again, redispatch = calling(op), op._handle.redispatch_boxed

    def call(keys: torch._C.DispatchKeySet, args: Any, kwargs: Any) -> Any:
        for at in tensors:
            if at < len(args) and not isinstance(args[at], torch.Tensor):
                with ExcludeKeys(excluded):
                    return again(*args, **kwargs)
        return redispatch(keys & after, *args, **kwargs)

    return call


@functools.cache  # asked of every op that runs
def calls_no_other(op: torch._ops.OpOverload, device: str) -> bool:
    """Return whether torch has a kernel for the device's dense tensors that calls no cast op."""
    key, name = device.upper(), op.overloadpacket.__name__
    own = op.namespace == "aten" and hasattr(torch._C.DispatchKey, key)
    return own and has_kernel(op.name(), key) and name not in _CALLERS


# Of the kernels that are written for a device, these call matmul, or linear, as of torch 2.13.
_CALLERS = frozenset(
    "_scaled_mm _scaled_mm_v2 _native_multi_head_attention _transformer_encoder_layer_fwd".split()
)


@functools.cache
def parts_of(op: torch._ops.OpOverload, device: str) -> Callable[..., Any] | None:
    """Return what runs the ops that one such as `linear` is made of; None of one with a kernel."""
    # `OpOverload.decompose` takes torch's Python functions, which for `gru` round otherwise.
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    whole = not has_kernel(op.name(), key.name) or has_kernel(op.name(), device.upper())
    return None if whole else functools.partial(op._op_dk, key)


def in_region(op: Callable[..., Any], args: Any, kwargs: Any, device: str) -> Any:
    """Run an op that a dispatch mode was given, with autocast as it was where it was called."""
    # Below the keys of modes torch has autocast off, so that ops which a kernel calls in turn, as
    # that of `linalg_pinv` does, would not be cast. Only the snapshot of torch has how it was; it
    # is of the outermost call: the user's, also inside an autocast kernel. In torch 2.13 and 2.15.
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if not enabled:
        return op(*args, **kwargs)
    torch.set_autocast_enabled(device, True)
    try:
        return op(*args, **kwargs)
    finally:
        torch.set_autocast_enabled(device, False)


def library_of(name: str) -> torch.library.Library:
    """Return the library for kernels of an op that stay; one for each namespace."""
    return _library(name.rpartition("::")[0] or "aten")


@functools.cache
def _library(namespace: str) -> torch.library.Library:
    return torch.library.Library(namespace, "IMPL")


def destroy(library: torch.library.Library) -> None:
    """Take away a library's kernels, as `torch.library._scoped_library` does; old ones return."""
    library._destroy()


def put(
    library: torch.library.Library, kernels: Mapping[str, Callable[..., Any]], key: str
) -> None:
    """Register kernels that take the keyset first, in place of any other on the key."""
    # torch warns once when a kernel is replaced; here that is intended.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name, kernel in kernels.items():
            library.impl(name, kernel, key, with_keyset=True, allow_override=True)


# The keys of kernels that are made of other ops, which run if the device has none of its own.
COMPOSITE = tuple(
    f"Composite{kind}"
    for kind in ("ImplicitAutograd", "ExplicitAutograd", "ExplicitAutogradNonFunctional")
)


def all_ops() -> list[torch._ops.OpOverload]:
    """Return every op of the dispatcher; libraries that are imported later may add some."""
    found = (
        overload(name.removeprefix("aten::")) for name in torch._C._dispatch_get_all_op_names()
    )
    return [op for op in found if isinstance(op, torch._ops.OpOverload)]


def called_at(op: torch._ops.OpOverload, key: str) -> Callable[..., Any]:
    """Return an op's kernel on a dispatch key, as a function of the op's arguments."""
    # `op.decompose` would look for a decomposition in Python first, and some of these call other
    # ops than the compiled kernel: upsampling without the op that has a row. `get_kernel` has no
    # alias keys.
    return functools.partial(op._op_dk, getattr(torch._C.DispatchKey, key))


# Kernels that write running statistics without a mark in their schemas, as of torch 2.13.
_SILENT = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
_STATISTICS = frozenset({"running_mean", "running_var"})


@functools.cache  # asked of every op that runs
def writes(op: torch._ops.OpOverload) -> bool:
    """Return whether an op writes into its arguments."""
    return bool(op._schema.is_mutable) or op.overloadpacket.__name__ in _SILENT


@functools.cache
def repeatable(op: torch._ops.OpOverload) -> bool:
    """Return whether an op writes into running statistics at most, which it then never reads."""
    marked = {a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write}
    return marked <= _STATISTICS


def written(op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among an op's arguments that it writes."""
    for at, name in _written_places(op):
        value = args[at] if at < len(args) else kwargs.get(name)
        for t in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(t, torch.Tensor):
                yield t


@functools.cache
def _written_places(op: torch._ops.OpOverload) -> list[tuple[int, str]]:
    named = _STATISTICS if op.overloadpacket.__name__ in _SILENT else ()
    return [
        (at, a.name)
        for at, a in enumerate(op._schema.arguments)
        if (a.alias_info is not None and a.alias_info.is_write) or a.name in named
    ]


# Autograd: the nodes of the graph, tensors saved for backward, checkpoints.


def carry_into_recomputation(carry: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have torch.utils.checkpoint recompute `carry(function)` in place of `function`."""
    # `carry` is called in the forward pass, in every checkpoint of both kinds. A `context_fn`, the
    # documented way, has to be given in each call of `checkpoint`, and works for one kind only.
    from torch.utils import checkpoint

    function: Any = checkpoint.CheckpointFunction
    frame: Any = checkpoint._CheckpointFrame
    forward, make = function.forward, frame.__init__

    @functools.wraps(forward)
    def carried_forward(ctx: Any, *args: object) -> Any:
        outputs = forward(ctx, *args)
        ctx.run_function = carry(ctx.run_function)
        return outputs

    @functools.wraps(make)
    def carried_make(self: Any, recompute_fn: Any, *args: object, **kwargs: object) -> None:
        make(self, carry(recompute_fn), *args, **kwargs)

    function.forward = staticmethod(carried_forward)
    frame.__init__ = carried_make


def leaves(roots: Iterable[Any], dtype: torch.dtype) -> dict[torch.Tensor, bool]:
    """Return the leaves of a graph, and whether a gradient of this dtype is on the way to each."""
    seen: dict[Any, int] = {}
    todo = [(node, False) for node in roots]
    while todo:
        node, through = todo.pop()
        if node is not None and seen.get(node, -1) < through:  # not seen, or not through it
            seen[node] = through = through or any(g.dtype is dtype for g in node._input_metadata)
            todo += ((inner, through) for inner, _ in node.next_functions)
    return {node.variable: bool(seen[node]) for node in seen if hasattr(node, "variable")}


def latest_node() -> int:
    """Return the number of the autograd node that was made last in this thread."""
    # Below autograd, where an op with gradients runs, it is the op's own node, for that is made
    # before the op runs; torch.fx.traceback goes by it, too.
    return int(torch._C._autograd._get_sequence_nr()) - 1


def backward_node() -> int | None:
    """Return the number of the node whose backward runs here; None outside of a backward pass."""
    # Nodes that accumulate into leaves have no number of their own; for them it is -1.
    if torch._C._current_graph_task_id() < 0:
        return None
    node: Any = torch._C._current_autograd_node()
    number = -1 if node is None else int(node._sequence_nr())
    return -1 if number >= 2**63 else number


def backward_task() -> int | None:
    """Return a number for the backward pass that runs here; None outside."""
    number = int(torch._C._current_graph_task_id())
    return None if number < 0 else number


def saved_tensors_shown(stack: ExitStack, see: Callable[[torch.Tensor], None]) -> None:
    """Call a function with each tensor saved for backward in this thread, until a stack closes."""
    # torch.func's transforms refuse to run under hooks on saved tensors, which they find out by the
    # documented `torch.autograd.graph.disable_saved_tensors_hooks`. That function is replaced for
    # the time by one that first takes these hooks off, so that transforms run as without them.

    def pack(t: torch.Tensor) -> torch.Tensor:
        see(t)
        return t

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    graph: Any = torch.autograd.graph

    def end() -> None:
        showing.pop(pack, None)
        if not showing:
            graph.disable_saved_tensors_hooks = _DISABLE

    stack.callback(end)
    stack.callback(end)  # an interrupt may end one of the two
    showing[pack] = hooks
    graph.disable_saved_tensors_hooks = _disable_hooks
    stack.enter_context(hooks)


_DISABLE = torch.autograd.graph.disable_saved_tensors_hooks
showing: dict[Any, Any] = {}  # the hooks that are in force, in all threads, by what packs


@contextmanager
def _disable_hooks(message: str) -> Iterator[None]:
    with ExitStack() as stack:
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top is not None and (hooks := showing.get(top[0])) is not None:
            hooks.__exit__(None, None, None)
            stack.callback(hooks.__enter__)
            stack.enter_context(_disable_hooks(message))  # there may be more below
        else:
            stack.enter_context(_DISABLE(message))
        yield
