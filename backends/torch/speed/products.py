"""The matrix products and convolutions of a torch model, forward and backward, as they run low.

    model, inputs -> one run in a bfloat16 region, watched -> products, and FLOPs of other kernels

A product is described by the kernel that ran it, the layouts of its operands and the casts that the
region made for it; `product_bench` can run it again, in any dtype.
"""

from collections.abc import Hashable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves

from polymp.backends.torch.autocast.api import autocast
from polymp.backends.torch.compat import flop_count, storage
from polymp.backends.torch.diagnostics.op_call import OpCall, Ran
from polymp.backends.torch.diagnostics.op_tracer import OpTracer
from polymp.speed.advice import Found, Product

LOW = torch.bfloat16
ATEN = torch.ops.aten
MATMULS = (ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default, ATEN.baddbmm.default)
CONVS = (ATEN.convolution.default, ATEN.convolution_backward.default)


class Operand(NamedTuple):
    """A float operand of a kernel.

    Attributes:
        shape: its shape.
        stride: its strides.
        cast: True if the region casts it from float32 for this kernel.
        weight: True if it is a parameter of the model.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    cast: bool = False
    weight: bool = False


class Kernel(NamedTuple):
    """The call that runs a product.

    Attributes:
        func: the op.
        args: its arguments; an `Operand` for each float tensor.
        kwargs: likewise, as pairs.
        widened: the places of results that are cast to float32 after it, as gradients of weights.
    """

    func: Any
    args: tuple[Hashable, ...]
    kwargs: tuple[tuple[str, Hashable], ...] = ()
    widened: tuple[int, ...] = ()


def products_of(model: nn.Module, inputs: tuple[Any, ...]) -> Found:
    """Find the products of a call of a model, which runs once in a bfloat16 region.

    A model in training mode whose result needs gradients runs backward, too, from the sum of its
    results. Attention kernels are not taken apart: they are among the kernels left out.

    Args:
        model: on the device that it will run on.
        inputs: of the call.

    Returns:
        The products, and the FLOPs of other kernels.

    Raises:
        Exception: any that the call raises.
    """
    parameters = list(model.parameters())
    device = device_of(model)
    tracer = _Products(model)
    with ExitStack() as stack:
        trains = model.training and any(p.requires_grad for p in parameters)
        stack.enter_context(torch.set_grad_enabled(trains))
        with tracer:
            with autocast(device, LOW):
                made = model(*inputs)
            ends = [t for t in tree_leaves(made) if isinstance(t, torch.Tensor) and t.requires_grad]
            if ends:
                torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
    counted: dict[Product, int] = {}
    for product in map(_product, tracer.seen):
        counted[product] = counted.get(product, 0) + 1
    return Found([p._replace(times=times) for p, times in counted.items()], tracer.left_out)


def device_of(model: nn.Module) -> str:
    """Return the device type that a model is on; "cpu" if it has no parameters."""
    return next((p.device.type for p in model.parameters()), "cpu")


class _Seen:
    """A product that ran; which of its results are widened is known later."""

    def __init__(self, ran: Ran, sizes: tuple[str, int, int, int, int], flops: int) -> None:
        self.func = ran.func
        self.sizes = sizes
        self.flops = flops
        self.direction = ran.op_call.direction
        self.args: tuple[Hashable, ...] = ()
        self.kwargs: tuple[tuple[str, Hashable], ...] = ()
        self.results: tuple[int, ...] = ()  # how many numbers each has
        self.widened: set[int] = set()


class _Products(OpTracer):
    """Notes every product, with the casts that were made for it.

    Args:
        model: the model.

    Attributes:
        seen: the products.
        left_out: FLOPs of other kernels that are made of products, by name.
    """

    counts = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.seen: list[_Seen] = []
        self.left_out: dict[str, int] = {}
        self._weights = {storage.storage_key(p) for p in model.parameters()}
        # By storage, with a reference so that the key stays its own.
        self._casts: dict[int, tuple[Any, bool]] = {}
        self._made: dict[int, tuple[Any, _Seen, int]] = {}

    def after_cast(self, op_call: OpCall, source: torch.Tensor, result: torch.Tensor) -> None:
        if result.dtype is LOW:
            weight = storage.storage_key(source) in self._weights
            self._casts[storage.storage_key(result)] = storage.storage_reference(result), weight
        elif (known := self._made.get(storage.storage_key(source))) is not None:
            _, seen, at = known
            seen.widened.add(at)

    def after(self, ran: Ran, result: Any, made: list[torch.Tensor], kept: Any) -> None:
        flops = flop_count.flops(ran.func, ran.args, ran.kwargs, result)
        if not flops:
            return
        name = ran.func.overloadpacket.__name__
        if ran.func not in (*MATMULS, *CONVS):
            self._leave_out(name.strip("_"), flops)
        elif {t.dtype for t in ran.reads} != {LOW}:
            self._leave_out(f"{name}, not lowered", flops)
        else:
            seen = _Seen(ran, _sizes(ran.func, ran.args, made[0]), flops)
            seen.args = tuple(self._plain(x) for x in ran.args)
            seen.kwargs = tuple((name, self._plain(x)) for name, x in ran.kwargs.items())
            every = result if isinstance(result, tuple) else (result,)
            seen.results = tuple(0 if t is None else t.numel() for t in every)
            self.seen.append(seen)
            for at, t in enumerate(every):
                if t is not None:
                    self._made[storage.storage_key(t)] = storage.storage_reference(t), seen, at

    def _leave_out(self, name: str, flops: int) -> None:
        self.left_out[name] = self.left_out.get(name, 0) + flops

    def _plain(self, x: Any) -> Hashable:
        if not isinstance(x, torch.Tensor):
            return tuple(x) if isinstance(x, list) else x
        _, weight = cast = self._casts.pop(storage.storage_key(x), (None, False))
        return Operand(tuple(x.shape), tuple(x.stride()), cast[0] is not None, weight)


def _sizes(func: Any, args: Any, made: torch.Tensor) -> tuple[str, int, int, int, int]:
    """Return op, batch, m, k and n of a kernel; `made` is its first result."""
    if func in MATMULS:
        left, right = args[-2:]
        batch = left.shape[0] if left.dim() == 3 else 1
        return "matmul", batch, left.shape[-2], left.shape[-1], right.shape[-1]
    if func is ATEN.convolution_backward.default:
        made, *args = args  # the gradient of the result; the others are those of the convolution
    given, weight, transposed, groups = args[0], args[1], args[6], args[8]
    at = given if transposed else made
    positions = at.numel() // at.shape[1]
    return "conv", groups, positions, weight[0].numel(), weight.shape[0] // groups


def _product(seen: _Seen) -> Product:
    operands = [(x, torch.Size(x.shape).numel()) for x in seen.args if isinstance(x, Operand)]
    return Product(
        *seen.sizes,
        seen.flops,
        sum(size for _, size in operands) + sum(seen.results),
        sum(size for x, size in operands if x.cast) + sum(seen.results[at] for at in seen.widened),
        sum(size for x, size in operands if x.cast and x.weight),
        seen.direction,
        call=Kernel(seen.func, seen.args, seen.kwargs, tuple(sorted(seen.widened))),
    )
