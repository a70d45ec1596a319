"""A product in 8 bits, with its derivative: three products of quantised operands.

    result           x [m, k]        @ weight.T [k, n]     bfloat16
    input_gradient   gradient [m, n] @ weight   [n, k]     in the dtype of x
    weight_gradient  gradient.T [n, m] @ x      [m, k]     in the dtype of the weight

For backward, x is saved in 8 bits. A parameter is saved as it is, which takes no memory, and is
quantised again; any other weight is saved in 8 bits. In a recipe with scales by row, x and the
weight are quantised twice: with scales along the axis that each product sums over.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from polymp.backends.torch.autocast.fp8_operand import InBits, Quantisation, of_activation
from polymp.backends.torch.autocast.fp8_weight import of_weight
from polymp.backends.torch.compat import dispatcher
from polymp.fp8 import quantise
from polymp.fp8.recipes import (
    ACTIVATION,
    GRADIENT,
    INPUT_GRADIENT,
    RESULT,
    WEIGHT,
    WEIGHT_GRADIENT,
    Recipe,
)


def product(x: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Multiply in 8 bits; differentiable once."""
    made: torch.Tensor = _Product.apply(x, weight, recipe)  # type: ignore[no-untyped-call]
    return made


def sum_of(result: torch.Tensor, added: torch.Tensor, beta: float) -> torch.Tensor:
    """Return `result + added * beta` in the result's dtype; sum the gradient of `added` in its own.

    A bias's gradient is float32, as where torchao's layer runs in float32.
    """
    made: torch.Tensor = _Sum.apply(result, added, beta)  # type: ignore[no-untyped-call]
    return made


def _how(recipe: Recipe, product: str, role: str, summed: int) -> Quantisation:
    return Quantisation(recipe, role, recipe.scale_axis(product, role, summed))


def _without_rows(gradient: torch.Tensor) -> dispatcher.ExcludeKeys:
    """A backward pass that runs inside a region: its ops have no rows."""
    key = dispatcher.autocast_key(gradient.device.type)
    return dispatcher.ExcludeKeys(dispatcher.keyset(str(key)))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> torch.Tensor:
        low_x = of_activation(x, _how(recipe, RESULT, ACTIVATION, 1))
        low_weight = of_weight(weight, _how(recipe, RESULT, WEIGHT, 1))
        ctx.recipe, ctx.x_shape, ctx.x_dtype = recipe, x.shape, x.dtype
        ctx.weight_dtype, ctx.weight_kept = weight.dtype, _is_parameter(weight)
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        saved: list[torch.Tensor | None] = [None] * 4
        if wants_x:
            saved[:2] = (
                (weight, None)
                if ctx.weight_kept
                else of_weight(weight, _how(recipe, INPUT_GRADIENT, WEIGHT, 0))
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
        with _without_rows(gradient):
            if wants[0]:
                low = how(gradient)
                low_weight = InBits(weight, weight_scale)
                if ctx.weight_kept:
                    low_weight = of_weight(weight, _how(recipe, INPUT_GRADIENT, WEIGHT, 0))
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


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, added: torch.Tensor, beta: float) -> torch.Tensor:
        ctx.shape, ctx.dtype, ctx.beta = added.shape, added.dtype, beta
        return torch.add(result, added.to(result.dtype), alpha=beta)

    @staticmethod
    def backward(
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        (gradient,) = gradients
        if not ctx.needs_input_grad[1]:
            return gradient, None, None
        before = gradient.dim() - len(ctx.shape)
        repeated = [*range(before), *(before + i for i, n in enumerate(ctx.shape) if n == 1)]
        with _without_rows(gradient):
            total = gradient.sum(repeated, dtype=ctx.dtype) if repeated else gradient.to(ctx.dtype)
            total = total.view(ctx.shape)
            return gradient, total if ctx.beta == 1 else total * ctx.beta, None


def _is_parameter(weight: torch.Tensor) -> bool:
    """Return whether a tensor, or what it is a view of, is there without being saved."""
    base = weight._base if weight._is_view() else weight
    return base is not None and base.is_leaf


def _turned(scale: torch.Tensor) -> torch.Tensor:
    """The scales of a transposed array."""
    return scale.t() if scale.dim() == 2 else scale


def _scaled(a: InBits, b: InBits, dtype: torch.dtype, *, fast: bool = False) -> torch.Tensor:
    """Multiply two quantised operands, and undo their scales.

    GPUs take a row-major first operand and a column-major second one (pytorch #198126). Products
    with scales by row return bfloat16; without fast accumulation their kernel is so slow that the
    one for single scales runs, and the scales are undone behind it.

    Source:
        torchao 0.18, `torchao/float8/float8_ops.py`, `addmm_float8_unwrapped`.
    """
    first = a.array.contiguous()
    second = b.array.t().contiguous().t()
    undo_a, undo_b = quantise.inverse(a.scale), quantise.inverse(b.scale)
    rows = undo_a.dim() == 2 or undo_b.dim() == 2
    behind = None
    if rows and not fast:
        behind = undo_a * undo_b
        undo_a = undo_b = torch.ones((), dtype=torch.float32, device=first.device)
    result = torch._scaled_mm(
        first,
        second,
        scale_a=undo_a,
        scale_b=undo_b,
        out_dtype=torch.bfloat16 if rows else dtype,
        use_fast_accum=fast,
    )
    if behind is not None:
        result *= behind
    return result.to(dtype)
