"""Products in 8 bits: of which ops, why a call may not run so, and the product with its derivative.

    linear(x, weight, bias)   mm(a, b)   matmul(a, b)   addmm(c, a, b)

Three products of quantised operands:

    result           x [m, k]        @ weight.T [k, n]     bfloat16
    input_gradient   gradient [m, n] @ weight   [n, k]     in the dtype of x
    weight_gradient  gradient.T [n, m] @ x      [m, k]     in the dtype of the weight

For backward, x is saved in 8 bits. A parameter is saved as it is, which takes no memory, and is
quantised again; any other weight is saved in 8 bits. In a recipe with scales by row, x and the
weight are quantised twice: with scales along the axis that each product sums over.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.compiler import is_dynamo_compiling

from polymp import fp8
from polymp.backends import processor
from polymp.backends.torch.autocast.dtype_names import DTYPES, NAMES
from polymp.backends.torch.compat import dispatcher, modes
from polymp.fp8 import (
    ACTIVATION,
    GRADIENT,
    INPUT_GRADIENT,
    RESULT,
    WEIGHT,
    WEIGHT_GRADIENT,
    Axis,
    Recipe,
    Verbs,
)
from polymp.rules.policy import Region
from polymp.rules.vocabulary import vocabulary


class Parts(NamedTuple):
    """The parts of a call: `added * beta + x @ weight.T * alpha`."""

    x: torch.Tensor  # [..., k]
    weight: torch.Tensor  # [n, k]
    added: torch.Tensor | None = None  # a bias
    beta: float = 1
    alpha: float = 1


# The parts of a call, by overload.
OPS: Mapping[str, Callable[..., Parts]] = {
    "linear": Parts,
    "mm": lambda a, b: Parts(a, b.t()),
    "matmul": lambda a, b: Parts(a, b.t()),
    "addmm": lambda c, a, b, beta=1, alpha=1: Parts(a, b.t(), c, beta, alpha),
}


def why_not(name: str, region: Region, recipe: Recipe, args: Sequence[Any]) -> str:
    """Return why a call runs by rule `lower` instead."""
    op = vocabulary().of_aten(name) or name
    if name not in OPS:
        return f"{op} has no 8-bit product; linear, matmul, mm and addmm have one"
    a, b = args[1:3] if name == "addmm" else args[:2]
    if modes.has_tangents():
        return "forward-mode derivatives are computed"
    if modes.is_transformed():
        return "it runs inside a transform of torch.func"
    for operand in args:
        if operand is None:  # no bias
            continue
        if not isinstance(operand, torch.Tensor):
            return "an operand is a Python number"
        if hasattr(type(operand), "__tensor_flatten__"):
            kind = type(operand).__name__
            return f"an operand is a {kind}, whose numbers are in other tensors"
    m, k = (a.shape[:-1].numel(), a.shape[-1]) if a.dim() else (1, 1)
    batch = 1 if b.dim() <= 2 else b.shape[:-2].numel()
    n = 1 if b.dim() < 2 else b.shape[-2 if name == "linear" else -1]
    asked = fp8.Product(
        op,
        m // batch if batch > 1 else m,
        k,
        n,
        (NAMES[a.dtype], NAMES[b.dtype]),
        a.device.type,
        region.dtype,
        batch,
        a.layout is not torch.strided or b.layout is not torch.strided,
        _capability(a.device),
    )
    return fp8.why_not(asked, recipe)


@cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def run(name: str, recipe: Recipe, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a call in 8 bits for which `why_not` has no reason; its result is bfloat16."""
    parts = OPS[name](*args, **kwargs)
    made: Any = _Product.apply(parts.x, parts.weight, recipe)  # type: ignore[no-untyped-call]
    if parts.alpha != 1:
        made = made * parts.alpha
    if parts.added is None or parts.beta == 0:
        return made
    return torch.add(made, parts.added.to(made.dtype), alpha=parts.beta)


# A product with its derivative.


class InBits(NamedTuple):
    """An array in 8 bits."""

    array: torch.Tensor  # of an 8-bit dtype, contiguous
    scale: torch.Tensor  # that it was multiplied by; float32, [] or with length 1 at the axis


@dataclass(frozen=True)
class Quantisation:
    """How an operand is quantised; equal for operands that get the same bits."""

    recipe: Recipe  # the formats and scales
    role: str  # of the operand: "activation", "weight" or "gradient"
    axis: Axis  # along which scales are computed; None for one scale

    def __call__(self, array: torch.Tensor) -> InBits:
        """Quantise a tensor of two dimensions."""
        scale = fp8.scale_of(VERBS, array, self.recipe, self.role, self.axis)
        format = self.recipe.format_of(self.role)
        return InBits(fp8.quantised(VERBS, array, scale, format).contiguous(), scale)


def _how(recipe: Recipe, product: str, role: str, summed: int) -> Quantisation:
    return Quantisation(recipe, role, recipe.scale_axis(product, role, summed))


class _Product(torch.autograd.Function):
    """A product in 8 bits; differentiable once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> torch.Tensor:
        low_x = of_activation(x, _how(recipe, RESULT, ACTIVATION, 1))
        low_weight = _how(recipe, RESULT, WEIGHT, 1)(weight)
        ctx.recipe, ctx.x_shape, ctx.x_dtype = recipe, x.shape, x.dtype
        ctx.weight_dtype, ctx.weight_kept = weight.dtype, _is_parameter(weight)
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        saved: list[torch.Tensor | None] = [None] * 4
        if wants_x:
            saved[:2] = (
                (weight, None)
                if ctx.weight_kept
                else _how(recipe, INPUT_GRADIENT, WEIGHT, 0)(weight)
            )
        if wants_weight and recipe.weight_gradient_high:
            saved[2] = x.to(torch.bfloat16)
        elif wants_weight:
            saved[2:] = of_activation(x, _how(recipe, WEIGHT_GRADIENT, ACTIVATION, 0))
        ctx.save_for_backward(*saved)
        weight_t = InBits(low_weight.array.t(), _turned(low_weight.scale))
        result = _scaled(low_x, weight_t, torch.bfloat16, fast=True)
        # As torch's own products do: a view as output would be one to FSDP2, which warns of them.
        shape = [*x.shape[:-1], weight.shape[0]]
        shaped: torch.Tensor = torch.ops.aten._unsafe_view(result, shape)
        return shaped

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        (gradient,) = gradients
        weight, weight_scale, x, x_scale = ctx.saved_tensors  # once: checkpoints allow no second
        recipe, wants = ctx.recipe, ctx.needs_input_grad
        gradient = gradient.reshape(-1, gradient.shape[-1])
        how = _how(recipe, INPUT_GRADIENT, GRADIENT, 1)
        low = of_x = of_weight_ = None
        key = dispatcher.autocast_key(gradient.device.type)
        with dispatcher.ExcludeKeys(dispatcher.keyset(str(key))):  # no rows, also in a region
            if wants[0]:
                low = how(gradient)
                low_weight = InBits(weight, weight_scale)
                if ctx.weight_kept:
                    low_weight = _how(recipe, INPUT_GRADIENT, WEIGHT, 0)(weight)
                of_x = _scaled(low, low_weight, ctx.x_dtype).view(ctx.x_shape)
            if wants[1] and recipe.weight_gradient_high:
                x = x.reshape(-1, x.shape[-1])
                of_weight_ = torch.mm(gradient.to(x.dtype).t(), x).to(ctx.weight_dtype)
            elif wants[1]:
                again = _how(recipe, WEIGHT_GRADIENT, GRADIENT, 0)
                low = low if low is not None and again == how else again(gradient)
                turned = InBits(low.array.t(), _turned(low.scale))
                of_weight_ = _scaled(turned, InBits(x, x_scale), ctx.weight_dtype)
        return of_x, of_weight_, None


def _is_parameter(weight: torch.Tensor) -> bool:
    """Return whether a tensor, or what it is a view of, is there without being saved."""
    base = weight._base if weight._is_view() else weight
    return base is not None and base.is_leaf


def _turned(scale: torch.Tensor) -> torch.Tensor:
    """The scales of a transposed array."""
    return scale.t() if scale.dim() == 2 else scale


def _scaled(a: InBits, b: InBits, dtype: torch.dtype, *, fast: bool = False) -> torch.Tensor:
    """Multiply two quantised operands, and undo their scales."""
    # GPUs take a row-major first operand and a column-major second one (pytorch #198126). Products
    # with scales by row return bfloat16; without fast accumulation their kernel is so slow that the
    # one for single scales runs, and the scales are undone behind it.
    # Source: torchao 0.18, `torchao/float8/float8_ops.py`, `addmm_float8_unwrapped`.
    first = a.array.contiguous()
    second = b.array.t().contiguous().t()
    undo_a, undo_b = fp8.inverse(a.scale), fp8.inverse(b.scale)
    rows = undo_a.dim() == 2 or undo_b.dim() == 2
    behind = None
    if rows and not fast:
        behind = undo_a * undo_b
        undo_a = undo_b = torch.ones((), dtype=torch.float32, device=first.device)
    slow = first.is_cpu and not is_dynamo_compiling() and _onednn_is_slow() and _onednn.enabled
    if slow:
        _onednn.enabled = False
    try:
        result = torch._scaled_mm(
            first,
            second,
            scale_a=undo_a,
            scale_b=undo_b,
            out_dtype=torch.bfloat16 if rows else dtype,
            use_fast_accum=fast,
        )
    finally:
        if slow:
            _onednn.enabled = True
    if behind is not None:
        result *= behind
    return result.to(dtype)


_onednn: Any = torch.backends.mkldnn


def _onednn_is_slow() -> bool:
    """Return whether torch multiplies 8 bits by oneDNN on this CPU, as it does with AMX."""
    # In torch 2.13 to 2.15 that takes 100 times as long as the float32 product that torch calls on
    # other CPUs, or without oneDNN.
    return "amx_int8" in (processor()[1] or ())


# Operands of products in 8 bits: how torch quantises, and what is quantised only once.
#
# The activation that was quantised last is kept as long as it lives: the queries, keys and
# values of attention are products of one activation, and save it for backward once.


_EXPONENT = 0x7F800000  # the bits of a float32 that say its power of two


def _amax(array: torch.Tensor, axis: Axis) -> torch.Tensor:
    keep, top = axis is not None, float("inf")
    amax: torch.Tensor
    amax = torch.linalg.vector_norm(array, top, dim=axis, keepdim=keep, dtype=torch.float32)
    return amax


def _where(condition: torch.Tensor, one: Any, other: Any) -> torch.Tensor:
    return torch.where(condition, one, other).float()  # of two numbers, the default dtype


VERBS = Verbs(
    amax=_amax,
    float32=torch.Tensor.float,
    where=_where,
    clip=torch.clamp,
    cast=lambda array, name: array.to(DTYPES[name]),
    isfinite=torch.isfinite,
    power_of_two=lambda scale: (scale.view(torch.int32) & _EXPONENT).view(torch.float32),
)


class _Latest(threading.local):
    """The activation that this thread quantised last, as far as it is alive."""

    def __init__(self) -> None:
        self.of: weakref.ref[torch.Tensor] | None = None
        self.stamp: tuple[Any, ...] = ()  # its version, address and stream when it was quantised
        self.found: dict[Quantisation, InBits] = {}  # by the way of quantisation


_latest = _Latest()


def of_activation(x: torch.Tensor, how: Quantisation) -> InBits:
    """Quantise an activation, flattened to two dimensions; the latest one once."""
    flat = x.reshape(-1, x.shape[-1])
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_inference() or modes.is_recorded():
        return how(flat)
    stamp = x._version, x.data_ptr(), x.shape, x.stride(), _stream(x)
    mine = _latest
    if mine.of is None or mine.of() is not x or mine.stamp != stamp:
        found: dict[Quantisation, InBits] = {}
        mine.found, mine.stamp = found, stamp
        mine.of = weakref.ref(x, lambda _: found.clear())
    if how not in mine.found:
        mine.found[how] = how(flat)
    return mine.found[how]


def _stream(x: torch.Tensor) -> tuple[int, bool] | None:
    if not x.is_cuda:
        return None
    capturing = torch.cuda.is_current_stream_capturing()
    return torch.cuda.current_stream(x.device).stream_id, capturing
