"""Everything private of torch that polymp touches, in one place.

Each name says why it is needed and since when it has been there;
`tests/torch/compat/test_private_names.py` fails when one changes. Supported: torch 2.11 to 2.15.
"""

import ctypes
import functools
import gc
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import nn
from torch._C import _dynamo
from torch._C import _ExcludeDispatchKeyGuard as ExcludeKeys
from torch.library import Library
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    _use_grad_for_differentiable,
)

__all__ = ["ExcludeKeys"]

F = TypeVar("F", bound=Callable[..., Any])

# Where an op looks first while a torch.func transform is active. Since torch 2.0.
FUNC_FRONT = "FuncTorchDynamicLayerFrontMode"


def autocast_key(device: str) -> str | None:
    """The name of the dispatch key that autocast uses on the device type. Since torch 1.10.

    None where Python cannot name it, as for XLA: nothing can be registered there from Python.
    """
    private = device == torch._C._get_privateuse1_backend_name()
    key = "AutocastPrivateUse1" if private else f"Autocast{device.upper()}"
    return key if hasattr(torch._C.DispatchKey, key) else None


def keyset(key: str) -> torch._C.DispatchKeySet:
    """The set of one dispatch key, for `ExcludeKeys`. Since torch 1.13."""
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))


def autocast_keys(devices: Sequence[str]) -> torch._C.DispatchKeySet:
    """The set of the autocast keys of device types, for `ExcludeKeys`. Since torch 1.13."""
    return functools.reduce(
        lambda one, other: one | other, map(keyset, filter(None, map(autocast_key, devices)))
    )


def below(key: str) -> torch._C.DispatchKeySet:
    """All keys that the dispatcher asks after `key`. Since torch 2.0."""
    return torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, key))


def registered(key: str) -> frozenset[str]:
    """Names of the aten overloads that have a kernel on the key, without "aten::".

    Needed to know which compiled autocast kernels this torch has. Since torch 2.0.
    """
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return frozenset(n.removeprefix("aten::") for n in names if n.startswith("aten::"))


def overload(name: str) -> torch._ops.OpOverload | None:
    """The overload "mm", "softmax.int" or "mylib::my_op", None if torch has none of that name."""
    space, _, name = name.rpartition("::")
    base, _, variant = name.partition(".")
    packet = getattr(getattr(torch.ops, space or "aten"), base, None)
    if packet is None or variant == "default":  # which is written "mm", not "mm.default"
        return None
    return getattr(packet, variant or "default", None)


def takes_names(name: str) -> bool:
    """True if an overload takes named dimensions, from torch 1.3 to 2.12.

    Schemas say str of them; only the names of overloads tell.
    """
    return "dimname" in name.lower() or ".names_" in name


def qualified_name(op: Any) -> str | None:
    """The name "mylib::my_op" of a name, an op or what `custom_op` returned; None for all else.

    Since torch 2.4: `CustomOpDef._qualname`, `OpOverload._name`.
    """
    if isinstance(op, str):
        return op
    if isinstance(op, torch._ops.OpOverload):
        return op._name.removesuffix(".default")
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op._qualified_op_name
    return op._qualname if isinstance(op, torch._library.custom_ops.CustomOpDef) else None


def has_kernel(name: str, key: str) -> bool:
    """True if an op has a kernel of its own on a dispatch key. Since torch 1.10."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def tensors_of(op: torch._ops.OpOverload) -> list[int]:
    """The places of an op's arguments that must be tensors. Since torch 1.13."""
    return [at for at, a in enumerate(op._schema.arguments) if str(a.type) == "Tensor"]


def calling(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """A function that calls an op, also with a Python number where the schema says Tensor.

    The dispatcher hands such numbers to a Python kernel as they were written: `x % 4` comes as
    (x, 4). Most overloads refuse them; the packet finds the one that takes a number. Since
    torch 1.13.
    """
    tensors = tensors_of(op)
    packet, entry = op.overloadpacket, op._op  # without the Python of OpOverload.__call__
    if tensors in ([], [0]):
        return entry

    def call(*args: Any, **kwargs: Any) -> Any:
        for at in tensors:
            if at < len(args) and not isinstance(args[at], torch.Tensor):
                return packet(*args, **kwargs)
        return entry(*args, **kwargs)

    return call


def passing_on(op: torch._ops.OpOverload, key: str) -> Callable[..., Any]:
    """A function of (keys, args, kwargs) that does what the dispatcher does had `key` no kernel.

    `OpOverload.redispatch` (since torch 2.0) refuses a Python number where the schema says Tensor;
    then the op is called anew, with the key excluded.
    """
    after, excluded = below(key), keyset(key)
    tensors = tensors_of(op)
    again = calling(op)

    def call(keys: torch._C.DispatchKeySet, args: Any, kwargs: Any) -> Any:
        for at in tensors:
            if at < len(args) and not isinstance(args[at], torch.Tensor):
                with ExcludeKeys(excluded):
                    return again(*args, **kwargs)
        return op.redispatch(keys & after, *args, **kwargs)

    return call


@contextmanager
def temporary_library(namespace: str) -> Iterator[Library]:
    """A library whose kernels go when the block ends, and those that they replaced come back."""
    library = Library(namespace, "IMPL")
    try:
        yield library
    finally:
        destroy(library)


def destroy(library: Library) -> None:
    """Take away a library's kernels; those that they replaced come back.

    `Library._destroy`, since torch 2.0; `torch.library._scoped_library` does the same.
    """
    library._destroy()


def put(library: Library, name: str, kernel: Callable[..., Any], key: str) -> None:
    """Register a kernel that takes the keyset first, over whatever is on the key.

    torch warns once when a kernel is replaced; here that is the intention. `with_keyset` since
    torch 2.1, `allow_override` since 2.7, and by itself since 2.13.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library.impl(name, kernel, key, with_keyset=True, allow_override=True)


def cuda_missing() -> bool:
    """True if neither CUDA nor torch_xla can be used: torch.amp then disables itself.

    Read from torch so that a test which patches it there is seen here. Since torch 1.10.
    """
    return not _standing_in.get() and bool(torch.cuda.amp.common.amp_definitely_not_available())


_standing_in: ContextVar[bool] = ContextVar("polymp.standing_in", default=False)


@contextmanager
def stand_in(device: str) -> Iterator[bool]:
    """Code that runs on fake tensors of a device: regions are then as on a machine that has it.

    A torch that is built without the device has no guard for it, which autograd, indexing and many
    fake kernels ask for, and which has nothing to do for tensors without memory. Meanwhile it gets
    the guard of meta tensors, as torch gives a build for CUDA on a machine without a GPU
    (`_ensureCUDADeviceGuardSet`). `c10::impl::device_guard_impl_registry`, by the numbers of
    `c10::DeviceType`, since torch 1.0.

    Yields:
        True if the device has a guard now, so that gradients can be taken.
    """
    token = _standing_in.set(True)
    there = device in ("cpu", "meta") or torch._C._get_accelerator().type == device
    guards: Any = None if there or device not in _NUMBERS else _guards()
    lent = guards is not None and not guards[_NUMBERS[device]]
    if lent:
        guards[_NUMBERS[device]] = guards[_META]
    try:
        yield there or guards is not None
    finally:
        if lent:
            guards[_NUMBERS[device]] = None
        _standing_in.reset(token)


_META = 14
_NUMBERS = {"cuda": 1, "xpu": 12, "mps": 13}


@functools.cache
def _guards() -> Any:
    """The guards of all device types; None where the library does not show them."""
    path = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        name = "_ZN3c104impl26device_guard_impl_registryE"
        return (ctypes.c_void_p * (_META + 1)).in_dll(ctypes.CDLL(str(path)), name)
    except (OSError, ValueError):
        return None


def is_here(device: str) -> bool:
    """True if there can be real tensors on the device type. `_get_accelerator` since torch 2.3."""
    return device == "cpu" or (
        torch._C._get_accelerator().type == device and torch.accelerator.is_available()
    )


def cuda_lacks_bfloat16() -> bool:
    """True if the GPU that is there cannot compute in bfloat16."""
    return not _standing_in.get() and not torch.cuda.is_bf16_supported()


def private_dtypes(device: str) -> list[torch.dtype]:
    """Low dtypes of a device that an extension registered as PrivateUse1. Since torch 2.1.

    Raises:
        AssertionError: the extension has not registered its module, or not all of it.
    """
    if not hasattr(getattr(torch, device, None), "get_amp_supported_dtype"):
        torch.autocast(device)  # raises, in the words of this version of torch
    found: list[torch.dtype] = getattr(torch, device).get_amp_supported_dtype()
    return found


def no_frame(fn: F, *, inside: bool = False) -> F:
    """Keep torch.compile from compiling `fn` by itself; inlining it into a caller still works.

    A region's entry has no tensor in it, so a frame compiled for it alone would be an empty graph
    and the region would silently be lost. `torch.compiler.disable` would forbid inlining as well.
    Since torch 2.6 (`torch._dynamo.eval_frame.skip_code` is the same call, but imports all of
    dynamo).

    Args:
        fn: a function of ours.
        inside: True to leave what it calls alone, too: kernels, which eager code calls between
            compiled graphs.
    """
    assert isinstance(fn, FunctionType)
    frame = _dynamo.eval_frame
    called = frame._FrameAction.SKIP if inside else frame._FrameAction.DEFAULT
    strategy = frame._FrameExecStrategy(frame._FrameAction.SKIP, called)
    frame.set_code_exec_strategy(fn.__code__, strategy)
    return fn


def untraced(reason: str) -> Callable[[F], F]:
    """Have torch.compile break the graph for a call of a function, and leave what it calls alone.

    `torch.compiler.disable` sets the same marks, but imports all of dynamo. Since torch 2.7; the
    reason, which the error under fullgraph shows, since torch 2.8.
    """

    def mark(fn: F) -> F:
        no_frame(fn, inside=True)
        fn._torchdynamo_disable = True  # type: ignore[attr-defined]
        fn._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return fn

    return mark


def at_trace_time(fn: F) -> F:
    """Have torch.compile run `fn` while it traces and take what it returns as a constant.

    `torch.compiler.assume_constant_result` sets the same mark, but imports all of dynamo.
    Since torch 2.0.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def after_tracing(undo: Callable[[], object]) -> None:
    """If dynamo is tracing in this thread, have it call `undo` when it is done or has given up.

    Dynamo's own handlers of the autocast setters do the same, but in torch 2.13 they fail in the
    bodies of higher-order ops (autograd functions, checkpoint). Since torch 2.1.
    """
    convert = sys.modules.get("torch._dynamo.symbolic_convert")
    translator = getattr(convert and convert.tls, "current_tx", None)
    if translator is not None:
        translator.output.add_cleanup_hook(undo)


def export_modes() -> list[Any]:
    """The function modes with which torch.export traces, non-strictly; none at other times.

    Export notes entering and leaving a region through them: torch's own autocast class calls
    `mode.__torch_function__(torch.amp._enter_autocast, (), state)`. Since torch 2.5.
    """
    from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

    modes = torch.overrides._get_current_function_mode_stack()
    return [mode for mode in modes if isinstance(mode, PreDispatchTorchFunctionMode)]


# What enters and leaves a region in a graph, and a region that holds a graph. Since torch 2.5.
ENTER, LEAVE = torch.amp._enter_autocast, torch.amp._exit_autocast  # type: ignore[attr-defined]
WITHIN = "wrap_with_autocast"

# Where the dispatcher finds an op's kernel that is made of other ops, if the device has none.
COMPOSITE = tuple(
    f"Composite{kind}"
    for kind in ("ImplicitAutograd", "ExplicitAutograd", "ExplicitAutogradNonFunctional")
)


def all_ops() -> list[torch._ops.OpOverload]:
    """Every op of the dispatcher; new ones come with the libraries that define them."""
    found = (
        overload(name.removeprefix("aten::")) for name in torch._C._dispatch_get_all_op_names()
    )
    return [op for op in found if isinstance(op, torch._ops.OpOverload)]


def called_at(op: torch._ops.OpOverload, key: str) -> Callable[..., Any]:
    """The op's kernel on a dispatch key, as a function of the op's arguments. Since torch 2.0.

    `op.decompose` asks for a decomposition in Python first, and some take another way than the
    compiled kernel: upsampling without the op that has a rule. `get_kernel` has no alias keys.
    """
    return functools.partial(op._op_dk, getattr(torch._C.DispatchKey, key))


def proxy_mode() -> Any:
    """The mode with which torch.export records ops, None while none does. Since torch 2.0."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode()


def decompositions(mode: Any) -> dict[Any, Callable[..., Any]]:
    """The table, by op, that a recording mode asks first; graphs inside the graph inherit it.

    Since torch 2.13 the mode has it, before that its module, in 2.12 as a context variable.
    """
    from torch.fx.experimental import proxy_tensor

    table = getattr(mode, "decomposition_table", None)
    if table is None:
        table = proxy_tensor.CURRENT_DECOMPOSITION_TABLE  # type: ignore[attr-defined]
        table = table.get() if isinstance(table, ContextVar) else table
    return table  # type: ignore[no-any-return]


def is_recorded() -> bool:
    """True where ops are shown to somebody, transformed by torch.func or have tangents.

    What runs then may be written into a program, where a number computed earlier would be a
    constant, or be differentiated in ways that a node of ours has no rule for. A mode of ours that
    only looks on counts for nothing.
    `_len_torch_dispatch_stack` since torch 1.13, `_get_dispatch_stack_at` and
    `peek_interpreter_stack` since 2.0, `forward_ad._current_level` since 1.9,
    `_get_tracing_state`, of torch.jit.trace, since 1.0.
    """
    modes = map(torch._C._get_dispatch_stack_at, range(torch._C._len_torch_dispatch_stack()))
    return bool(
        any(not getattr(mode, "looks_on", False) for mode in modes)
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def flatten_rnn_weights(weights: list[torch.Tensor], *options: Any) -> None:
    """Move the weights of a recurrent layer into one buffer, in cuDNN's order, in place.

    What `torch.nn.RNNBase.flatten_parameters` calls, with the same options. Since torch 1.0, with
    the size of projections since 1.8; in builds with cuDNN alone.
    """
    torch._cudnn_rnn_flatten_weight(weights, *options)


def storage_key(tensor: torch.Tensor) -> int:
    """A number for the memory that a tensor is on, the same for all views of it; 0 without one.

    Unique among the storages that are alive, or held by `storage_reference`. `_cdata` since
    torch 2.0.
    """
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors, and those that wrap others
        return 0


def storage_reference(tensor: torch.Tensor) -> Any:
    """What keeps the key of a storage from being given to another, and its memory from nothing.

    `StorageWeakRef` since torch 1.0.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


def carry_into_recomputation(carry: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have torch.utils.checkpoint run again `carry(function)` in place of `function`.

    `carry` is called in the forward pass, in every checkpoint of both kinds. A `context_fn`, the
    official way, is for those who call `checkpoint`, and for one kind. `CheckpointFunction` is
    public, its `ctx.run_function` since torch 1.0; `_CheckpointFrame` since torch 2.1.
    """
    from torch.utils import checkpoint

    function: Any = checkpoint.CheckpointFunction
    frame: Any = checkpoint._CheckpointFrame
    forward, make = function.forward, frame.__init__

    @functools.wraps(forward)
    def carried_forward(ctx: Any, *args: Any) -> Any:
        outputs = forward(ctx, *args)
        ctx.run_function = carry(ctx.run_function)
        return outputs

    @functools.wraps(make)
    def carried_make(self: Any, recompute_fn: Any, *args: Any, **kwargs: Any) -> None:
        make(self, carry(recompute_fn), *args, **kwargs)

    function.forward = staticmethod(carried_forward)
    frame.__init__ = carried_make


# A module's call is its `_call_impl`, since torch 1.8.
MODULE_CALL = nn.Module._call_impl.__code__


def running_modules() -> Iterator[nn.Module]:
    """The modules whose calls run in this thread, the innermost first; read off the stack."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is MODULE_CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back


def latest_node() -> int:
    """The number of the autograd node that was made last in this thread.

    Below autograd, where an op runs that wants gradients, it is the op's own; it is made before the
    op runs. `_get_sequence_nr` since torch 2.1; torch.fx.traceback goes by it, too.
    """
    return int(torch._C._autograd._get_sequence_nr()) - 1


def backward_node() -> int | None:
    """The number of the node whose backward runs here; None outside of a backward pass.

    Nodes that accumulate into leaves have no number of their own; for them it is -1.
    `_current_graph_task_id` and `_current_autograd_node` since torch 2.0.
    """
    if torch._C._current_graph_task_id() < 0:
        return None
    node = torch._C._current_autograd_node()
    number = -1 if node is None else int(node._sequence_nr())
    return -1 if number >= 2**63 else number


def innermost_mode() -> Any:
    """The mode that sees ops below autograd first; None without one. Since torch 2.0."""
    from torch.utils import _python_dispatch

    return _python_dispatch._get_current_dispatch_mode()


def sees(mode: Any) -> bool:
    """True if a mode sees the ops of this thread. Since torch 2.0."""
    depths = range(torch._C._len_torch_dispatch_stack())
    return any(torch._C._get_dispatch_stack_at(depth) is mode for depth in depths)


def backward_task() -> int | None:
    """A number for the backward pass that runs here; None outside of one. Since torch 2.0."""
    number = int(torch._C._current_graph_task_id())
    return None if number < 0 else number


# Kernels that write running statistics and do not say so in their schemas, as of torch 2.13.
_SILENT = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
_STATISTICS = frozenset({"running_mean", "running_var"})


def writes(op: torch._ops.OpOverload) -> bool:
    """True if an op writes into its arguments. `is_mutable` since torch 1.12."""
    return bool(op._schema.is_mutable) or op.overloadpacket.__name__ in _SILENT


def written(op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors among an op's arguments that it writes. `alias_info` since torch 1.8."""
    silent = op.overloadpacket.__name__ in _SILENT
    for at, argument in enumerate(op._schema.arguments):
        says = argument.alias_info is not None and argument.alias_info.is_write
        if says or (silent and argument.name in _STATISTICS):
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            for t in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(t, torch.Tensor):
                    yield t


@contextmanager
def saved_tensors_shown(see: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Show every tensor that is saved for backward in this thread to a function.

    torch.func's transforms refuse to run under hooks on saved tensors; they run without these, as
    they would if nobody looked. They ask by `torch.autograd.graph.disable_saved_tensors_hooks`,
    which is documented, as is no way to step aside for it: it is replaced meanwhile.
    `_top_saved_tensors_default_hooks` since torch 2.3.
    """

    def pack(t: torch.Tensor) -> torch.Tensor:
        see(t)
        return t

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    _showing[pack] = hooks
    torch.autograd.graph.disable_saved_tensors_hooks = _disable_hooks  # type: ignore[assignment]
    try:
        with hooks:
            yield
    finally:
        del _showing[pack]
        if not _showing:
            torch.autograd.graph.disable_saved_tensors_hooks = _DISABLE


_DISABLE = torch.autograd.graph.disable_saved_tensors_hooks
_showing: dict[Any, Any] = {}  # hooks of `saved_tensors_shown` that are in force, in all threads


@contextmanager
def _disable_hooks(message: str) -> Iterator[None]:
    with ExitStack() as stack:
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top is not None and (hooks := _showing.get(top[0])) is not None:
            hooks.__exit__(None, None, None)
            stack.callback(hooks.__enter__)
            stack.enter_context(_disable_hooks(message))  # there may be more below
        else:
            stack.enter_context(_DISABLE(message))
        yield


def flops(op: torch._ops.OpOverload, args: Any, kwargs: Any, result: Any) -> int:
    """FLOPs of a product, convolution or attention kernel; 0 of any other op.

    By torch.utils.flop_counter's formulas, which are documented; its table of them,
    `flop_registry`, is not. It counts too many in convolutions with groups, lacks the attention
    kernel of CPUs, and before torch 2.13 raises where queries share keys. Since torch 2.2.
    """
    from torch.utils import flop_counter

    if op is torch.ops.aten.convolution.default:
        return _convolution(args[6], args[0], args[1], result)
    if op is torch.ops.aten.convolution_backward.default:
        made, given, weight = args[:3]  # one convolution for each gradient of these two
        wanted = int(args[10][0]) + int(args[10][1])
        return wanted * _convolution(args[7], given, weight, made)
    name = op.overloadpacket.__name__
    if name.startswith("_scaled_dot_product_"):
        if name.endswith("_backward"):
            return _attention(args[1:4], (3, 2))
        return _attention(args[:3], (1, 1))
    formula = flop_counter.flop_registry.get(op.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _attention(inputs: Sequence[torch.Tensor], products: tuple[int, int]) -> int:
    """Two for each number of a query, or of a value, that meets a key, in so many products.

    Forward these are the scores and the result. Backward computes the scores again, and then the
    gradients of the scores, of values, queries and keys.

    Args:
        inputs: query [batch, heads, queries, width], key [batch, heads, keys, width] and value
            [batch, heads, keys, width of a value]; the last two may have fewer heads.
        products: how many have the width of a query, and of a value.
    """
    query, key, value = inputs
    width = products[0] * query.shape[3] + products[1] * value.shape[3]
    return 2 * query.shape[:3].numel() * key.shape[2] * width


def _convolution(
    transposed: bool, given: torch.Tensor, weight: torch.Tensor, made: torch.Tensor
) -> int:
    """Two for each weight that meets a number of the input, or of the result, if not transposed."""
    return 2 * (given if transposed else made).numel() * (weight.numel() // len(weight))


def is_plain(tensor: torch.Tensor) -> bool:
    """True unless the tensor's class has a say in what ops on it do, as DTensor's does.

    `_disabled_torch_dispatch_impl` and `_disabled_torch_function_impl` mark classes that have not;
    since torch 1.11 and 1.5.
    """
    kind = type(tensor)
    free = kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    silent = kind.__torch_function__ is torch._C._disabled_torch_function_impl
    return kind is torch.Tensor or (free and silent)


def unwrapped_first(types: Sequence[type]) -> bool:
    """True if a mode is to pass an op on to its arguments' classes, and see what they make of it.

    Such are DTensor and all classes that hold other tensors: their own memory is nowhere, and a
    mode that runs their ops itself does not see what happens to the tensors inside. Says the
    protocol of torch.utils._python_dispatch: `__tensor_flatten__`, since torch 2.1.

    Args:
        types: what `__torch_dispatch__` of a mode is given.
    """
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def unrecorded() -> Any:
    """A context in which torch.export records no ops. Since torch 2.0."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    return disable_proxy_modes_tracing()


def without_recorder() -> Any:
    """A context without the mode in which torch.export records regions. Since torch 2.5."""
    from torch.fx.experimental import proxy_tensor

    return proxy_tensor._temp_remove_pre_dispatch_torch_function_mode()


def in_transform(tensor: torch.Tensor) -> bool:
    """True for a tensor that a transform of torch.func (vmap, grad) stands for. Since torch 2.0."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def stays(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, marked as one whose address compiled code may rely on.

    What `torch._dynamo.mark_static_address(tensor, guard=True)` does, without importing dynamo:
    CUDA graphs of `mode="reduce-overhead"` write to no other inputs. Since torch 2.1.
    """
    tensor._dynamo_static_input_type = "guarded"  # type: ignore[attr-defined]
    return tensor


def unscales(device: str, dtype: torch.dtype) -> bool:
    """True if torch's fused kernel can unscale such gradients.

    On CUDA it has no bfloat16 (pytorch/pytorch#127176).
    """
    return device == "cpu" or dtype is not torch.bfloat16


def _dtensor() -> type | None:
    """DTensor's class if anybody has imported it; nothing can be one before."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that this process holds, sharing its memory; any other as it is."""
    kind = _dtensor()
    if kind is None or not isinstance(tensor, kind):
        return tensor
    if not torch.is_grad_enabled():
        return tensor.to_local()  # type: ignore[attr-defined,no-any-return]
    with torch.no_grad():  # otherwise it would be a new node in the graph
        return tensor.to_local()  # type: ignore[attr-defined,no-any-return]


def is_partial(tensor: torch.Tensor) -> bool:
    """True for a DTensor whose ranks hold terms of a sum, as gradients of replicated ones may be.

    The answer is the same on every rank of the mesh.
    """
    kind = _dtensor()
    if kind is None or not isinstance(tensor, kind):
        return False
    return any(p.is_partial() for p in tensor.placements)  # type: ignore[attr-defined]


def added_up(tensor: Any) -> Any:
    """The DTensor with every sum over ranks made, and held by each of them. Talks to them."""
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    return tensor.redistribute(placements=placements)


def meshes(tensors: list[torch.Tensor]) -> list[Any]:
    """The meshes of the DTensors among them that this process is in, in the order of first use.

    Each once, and equal ones count as one: they have the same process groups.
    """
    kind = _dtensor()
    if kind is None or not any(issubclass(t, kind) for t in set(map(type, tensors))):
        return []
    dtensors: Any = (t for t in tensors if isinstance(t, kind))
    found = {id(t.device_mesh): t.device_mesh for t in dtensors}  # to compare meshes takes longer
    return [m for m in dict.fromkeys(found.values()) if m.get_coordinate() is not None]


def talks(op: torch._ops.OpOverload) -> bool:
    """True if an op talks to other ranks. The namespaces of such ops: since torch 2.0 and 2.1."""
    return op.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd")


def will_talk(module: nn.Module) -> bool:
    """True if a call of a module, or the backward pass of it, is sure to talk to other ranks.

    FSDP's classes are public; `require_backward_grad_sync` of DDP is what its `no_sync` sets.
    """
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return torch.is_grad_enabled() and bool(module.require_backward_grad_sync)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # else nothing can be one
    names = ("FullyShardedDataParallel", "FSDPModule")  # the second since torch 2.6
    kinds = tuple(getattr(fsdp, name) for name in names if hasattr(fsdp, name))
    return isinstance(module, kinds)


def default_store() -> Any:
    """The key-value store of the default process group. `_get_default_store`: since torch 1.8."""
    return torch.distributed.distributed_c10d._get_default_store()


def speaking(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it on a device that the process group can exchange.

    A group is for the devices in `get_backend_config`, such as "cpu:gloo,cuda:nccl".
    """
    parts = torch.distributed.get_backend_config(group).split(",")
    kinds = [part.split(":")[0] for part in parts if ":" in part]
    if not kinds or tensor.device.type in kinds:
        return tensor
    return tensor.to(kinds[0])


def before_clipping(see: Callable[[Sequence[torch.Tensor]], None]) -> None:
    """Call `see` with the parameters whose gradients torch.nn.utils is about to clip.

    Both of its public functions for norms end in `_clip_grads_with_norm_`, which they look up in
    their module: so callers are reached that imported them before. Since torch 2.6.
    `clip_grad_value_` is replaced where it is looked up.
    """
    from torch.nn import utils
    from torch.nn.utils import clip_grad

    def seen(clip: F) -> F:
        @functools.wraps(clip)
        def clipping(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            one = isinstance(parameters, torch.Tensor)
            parameters = [parameters] if one else list(parameters)  # which may come but once
            see(parameters)
            return clip(parameters, *args, **kwargs)

        return clipping  # type: ignore[return-value]

    clip_grad._clip_grads_with_norm_ = seen(clip_grad._clip_grads_with_norm_)
    utils.clip_grads_with_norm_ = clip_grad._clip_grads_with_norm_
    clip_grad.clip_grad_value_ = utils.clip_grad_value_ = seen(clip_grad.clip_grad_value_)


def unscaled_by_torch(optimizer: torch.optim.Optimizer) -> bool:
    """True if a torch.amp scaler has unscaled the optimizer's gradients since its `update`.

    Nobody keeps a list of scalers, so all objects of the process are looked through; a fraction of
    a second. `_per_optimizer_states`: since torch 1.6.
    """
    for one in gc.get_objects():
        if issubclass(type(one), torch.amp.GradScaler):
            states = vars(one).get("_per_optimizer_states", {})
            if id(optimizer) in states and states[id(optimizer)]["stage"].name == "UNSCALED":
                return True
    return False


def in_fsdp1(tensor: torch.Tensor) -> bool:
    """True for a parameter that FSDP1 has taken over. `_fsdp_flattened`: since torch 2.0."""
    return getattr(tensor, "_fsdp_flattened", False)


def optimizer_step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
    """`optimizer.step(*args, **kwargs)`, traced by dynamo without a graph break where it can be.

    torch's optimizers ask for a graph break around their step, so that inductor sees that no
    gradient is wanted (a note in torch/optim/optimizer.py says so). What they wrap is called here
    instead: `Optimizer.profile_hook_step` and `_use_grad_for_differentiable`, since torch 2.0. What
    a learning-rate scheduler puts around the step (`_wrapped_by_lr_sched`, since torch 2.4) only
    sets an attribute, and dynamo drops what is written to attributes of optimizers. Dynamo of torch
    2.15 knows `getattr` of such a step, and no `hasattr`.
    """
    kind: Any = type(optimizer)
    if (
        not torch.compiler.is_dynamo_compiling()
        or not _breaks_graphs(kind)
        or optimizer.defaults["differentiable"]
        or ("step" in vars(optimizer) and not _scheduled(optimizer.step))
    ):
        return optimizer.step(*args, **kwargs)
    for hook in (
        *_global_optimizer_pre_hooks.values(),
        *optimizer._optimizer_step_pre_hooks.values(),
    ):
        if (given := hook(optimizer, args, kwargs)) is not None:
            args, kwargs = given
    with torch.no_grad():
        result = kind.step.__wrapped__.__wrapped__(optimizer, *args, **kwargs)
    for hook in (
        *_global_optimizer_post_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
    ):
        hook(optimizer, args, kwargs)
    return result


def _scheduled(step: Any) -> bool:
    """True if a learning-rate scheduler put something around the step."""
    return bool(getattr(step, "_wrapped_by_lr_sched", False))


@at_trace_time
def _breaks_graphs(kind: type[torch.optim.Optimizer]) -> bool:
    """True if a class's `step` is in these two wrappers and no others."""
    step: Any = kind.step
    inner: Any = getattr(step, "__wrapped__", None)
    return (
        getattr(step, "hooked", False)
        and getattr(inner, "__code__", None) is _USE_GRAD.__code__
        and not hasattr(inner.__wrapped__, "__wrapped__")
    )


_USE_GRAD: Any = _use_grad_for_differentiable(inspect.unwrap)  # any function will do


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """While dynamo traces, make the state that an optimizer of torch's makes in its first step.

    Dynamo runs `_init_group` when it traces it, since torch 2.1; by then the state is there, for
    whoever looks at it next. Every class has arguments of its own: a group, and lists to fill.
    """
    lists = _lists_of(type(optimizer))
    if lists is not None:
        for group in optimizer.param_groups:
            filled: list[list[Any]] = []
            for _ in range(lists):
                filled.append([])
            optimizer._init_group(group, *filled)  # type: ignore[attr-defined]


@at_trace_time
def _lists_of(kind: type[torch.optim.Optimizer]) -> int | None:
    """How many lists `_init_group` fills; None if there is none, or it is not torch's own."""
    make = getattr(kind, "_init_group", None)
    if make is None or not inspect.unwrap(make).__module__.startswith("torch.optim"):
        return None
    return len(inspect.signature(inspect.unwrap(make)).parameters) - 2
