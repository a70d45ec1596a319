"""Dispatch modes, transforms of torch.func, tensor classes, storages and FLOPs."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as without_classes
from torch._C import _is_torch_function_mode_enabled as are_functions_watched
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from polymp.backends.torch.compat.dynamo import no_frame

# True under a TorchFunctionMode; a context in which tensor classes override no function: those of
# lazy parameters refuse hooks.
__all__ = ["OpMode", "are_functions_watched", "without_classes"]


# The arguments of `OpMode.op`.
Op = torch._ops.OpOverload
Types = Sequence[type]
Args = Sequence[Any]
Kwargs = dict[str, Any]


class OpMode(TorchDispatchMode):
    """A dispatch mode: `op` is called in place of every op of the thread, below autograd."""

    def __init__(self, compiled: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._compiled = compiled  # True to let code that torch.compile compiled run as it is

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        """Return whether compiled code runs under this mode; torch asks as it enters it."""
        return self._compiled

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch leaves `__torch_dispatch__` as it is."""
        # torch would wrap it in `torch._disable_dynamo`, which takes 7 us more at each op than
        # `no_frame` and does the same.
        return False

    @partial(no_frame, inside=True)
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.op(func, types, args, kwargs or {})

    def op(self, func: Op, types: Types, args: Args, kwargs: Kwargs) -> Any:
        """Run an op, or have it run by the classes of its arguments."""
        raise NotImplementedError


def is_recorded() -> bool:
    """Return whether a mode sees the ops, torch.func transforms them, or they have tangents."""
    # Ops may then be written into a program, where a number computed earlier would be a constant,
    # or be differentiated in ways that a node of ours has no rule for. Modes of ours that only look
    # on do not count.
    if depth := torch._C._len_torch_dispatch_stack():
        modes = map(torch._C._get_dispatch_stack_at, range(depth))
        if any(not getattr(mode, "looks_on", False) for mode in modes):
            return True
    return torch._C._get_tracing_state() is not None or is_transformed()


def innermost_mode() -> Any:
    """Return the mode that sees ops below autograd first; None without one."""
    from torch.utils import _python_dispatch

    return _python_dispatch._get_current_dispatch_mode()


def sees(mode: Any) -> bool:
    """Return whether a mode sees the ops of this thread."""
    depths = range(torch._C._len_torch_dispatch_stack())
    return any(torch._C._get_dispatch_stack_at(depth) is mode for depth in depths)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return False if the tensor's class overrides ops, as DTensor does."""
    kind = type(tensor)
    if kind is torch.Tensor:
        return True
    free = kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    silent = kind.__torch_function__ is torch._C._disabled_torch_function_impl
    return free and silent


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether kernels for a device's dense tensors run on a tensor: no sparse, no nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def unwrapped_first(types: Sequence[type]) -> bool:
    """Return whether a mode has to let the classes of an op's arguments run the op first."""
    # So it is for DTensor and all classes that hold other tensors, which have `__tensor_flatten__`:
    # they have no memory of their own, and a mode that runs their ops does not see the ops on the
    # tensors inside.
    return bool(types) and any(hasattr(kind, "__tensor_flatten__") for kind in types)


def in_transform(tensor: torch.Tensor) -> bool:
    """Return whether a transform of torch.func (vmap, grad) wraps a tensor."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def has_tangents() -> bool:
    """Return whether forward-mode derivatives are computed."""
    return bool(torch.autograd.forward_ad._current_level >= 0)


def is_transformed() -> bool:
    """Return whether a transform of torch.func is at work, or forward-mode differentiation."""
    # A kernel on the autocast key cannot call an autograd.Function in the first, for torch finds no
    # kernel of `custom_function_call`; in the second, it would need a rule of its own.
    return torch._C._functorch.peek_interpreter_stack() is not None or has_tangents()


def matched_tangent(tensor: torch.Tensor) -> torch.Tensor:
    """Return a float tensor whose tangent, in a jvp of torch.func, has its dtype, too."""
    # Derivatives of ops with mixed inputs leave a float32 tangent on a low tensor, which a cast to
    # the tensor's own dtype would not touch.
    functorch = torch._C._functorch
    kinds = [transform.key() for transform in functorch.get_interpreter_stack() or ()]
    if functorch.TransformType.Jvp not in kinds or not tensor.is_floating_point():
        return tensor
    cast: torch.Tensor = torch.ops.aten._to_copy(tensor, dtype=tensor.dtype)
    return cast


# The memory that a tensor is on, by a number that its views share.


_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number for the memory of a tensor, the same for all its views; 0 without memory."""
    # Unique among the storages that are alive, or kept by `storage_reference`.
    try:
        return int(tensor.untyped_storage()._cdata)
    # Sparse tensors, those that wrap others, and lazy parameters that no call has made.
    except (NotImplementedError, RuntimeError, ValueError):
        return 0


def storage_reference(tensor: torch.Tensor) -> Any:
    """Return an object that keeps a storage's key from being used again, but frees its memory."""
    return StorageWeakRef(tensor.untyped_storage())


class KeptKeys:
    """Storages whose keys are not used again while this object is there; their memory is freed."""

    def __init__(self) -> None:
        # Numbers: `StorageWeakRef`, which does the same for one storage, is two objects that
        # Python's garbage collector goes through again and again.
        self._references: list[Any] = []
        self._free: Any = torch.UntypedStorage._free_weak_ref  # torch may be gone when Python ends

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the key of a tensor's storage."""
        self._references.append(tensor.untyped_storage()._weak_ref())

    def is_freed(self, key: int) -> bool:
        """Return whether the memory of a storage with a kept key is freed: no tensor has it."""
        return bool(torch.UntypedStorage._expired(key))  # a key is its reference

    def __del__(self) -> None:
        for reference in self._references:
            self._free(reference)


def stored_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the numbers in a tensor; of a sparse one, of those that it stores."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values().nbytes
    return tensor.values().nbytes if tensor.layout in _COMPRESSED else tensor.nbytes


# FLOPs of an op, by torch's formulas where these are correct.


def flops(op: torch._ops.OpOverload, args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of a product, convolution or attention kernel; 0 for any other op."""
    # Others than these by torch.utils.flop_counter's formulas, which take 70 us for a product,
    # count too many in convolutions with groups, lack the attention kernel of CPUs, and before
    # torch 2.13 raise where queries share keys.
    if (first := _PRODUCTS.get(op.overloadpacket)) is not None:
        return 2 * int(result.numel()) * int(args[first].shape[-1])
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
    formula = _formulas().get(op.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


@cache  # an import takes long at each op
def _formulas() -> dict[Any, Any]:
    from torch.utils import flop_counter

    return flop_counter.flop_registry


# Where the first matrix stands among the arguments of a product of two.
_PRODUCTS = {
    torch.ops.aten.mm: 0,
    torch.ops.aten.bmm: 0,
    torch.ops.aten.addmm: 1,
    torch.ops.aten.baddbmm: 1,
}


def _attention(inputs: Sequence[torch.Tensor], products: tuple[int, int]) -> int:
    """Count two FLOPs for each product of a number of a query, or of a value, with a key."""
    # Forward computes the scores and the result; backward the scores again, and then the gradients
    # of scores, values, queries and keys.
    query, key, value = inputs
    width = products[0] * query.shape[3] + products[1] * value.shape[3]
    return 2 * query.shape[:3].numel() * key.shape[2] * width


def _convolution(
    transposed: bool, given: torch.Tensor, weight: torch.Tensor, made: torch.Tensor
) -> int:
    """Count two FLOPs for each product of a weight with a number of the input or the result."""
    return 2 * (given if transposed else made).numel() * (weight.numel() // len(weight))
