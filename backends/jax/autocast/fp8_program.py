"""The program of a contraction in 8 bits, as XLA gets it.

XLA multiplies the 8-bit operands as they are, and the result is multiplied by the scales. On GPUs
that is the direct form of XLA's fp8 gemm: nothing has to be recognised, as where operands are cast
up and scaled before a product in a wider dtype. On an H100, jax 0.11.2 ran the direct form in 8
bits, and the other one in 16: benchmarks/results/FIGURES.md, "Products of 8-bit operands".
Source: XLA, xla/service/gpu/transforms/gemm_rewriter.cc, MatchFp8Param, F8ScaleD; flax #3922.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as core
import numpy as np
from jax import lax

from polymp.backends.jax.autocast.contraction import contract
from polymp.backends.jax.autocast.contraction_forms import Params
from polymp.backends.jax.autocast.fp8_operands import In8Bits, Shared, Value, main, operands_of
from polymp.backends.jax.autocast.fp8_quantise import Quantised, dequantised, quantised
from polymp.fp8.quantise import inverse
from polymp.fp8.recipes import GRADIENT


def product(
    *flat: jax.Array, of: core.Primitive, params: Params, how: In8Bits, run: str, out: str
) -> jax.Array:
    """The product of quantised operands, and of those that are quantised here."""
    operands, own = operands_of(flat, how), dict(params)
    if how.trial:
        return contract(of, *operands, params=own, run=run, out=out)
    (lc, rc), (lb, rb) = own["dimension_numbers"]
    pairs = list(zip(operands, (lc, rc), strict=True))
    if any(isinstance(x, Quantised) and _differs(x.scale, summed) for x, summed in pairs):
        # Forward mode meets an operand that was quantised for the backward product, which sums
        # over other dimensions: its scales differ along those of this one.
        wide = [dequantised(*x, run) if isinstance(x, Quantised) else x for x in operands]
        return contract(of, *wide, params=own, run=run, out=out)
    lhs, rhs = (_in_8_bits(x, at, own, how) for at, x in enumerate(operands))
    # XLA's gemm adds up fast, with fewer digits, unless it is asked not to. As torchao's recipes
    # have it, results do, and gradients do not.
    precise = GRADIENT in (how.lhs.role, how.rhs.role)
    made = lax.dot_general(
        lhs.values,
        rhs.values,
        own["dimension_numbers"],
        precision=lax.Precision.HIGHEST if precise else lax.Precision.DEFAULT,
        preferred_element_type=np.dtype("float32"),
        out_sharding=own["out_sharding"],
    )
    of_lhs, of_rhs = lhs.values.ndim - len(lb) - len(lc), rhs.values.ndim - len(rb) - len(rc)
    made = made * _over_result(inverse(lhs.scale), lc, lb, 0, of_rhs)
    made = made * _over_result(inverse(rhs.scale), rc, rb, of_lhs, 0)
    return lax.convert_element_type(made, out)


def _in_8_bits(x: Value, at: int, params: Mapping[str, Any], how: In8Bits) -> Quantised:
    """An operand as this product takes it."""
    if isinstance(x, Quantised):
        return x
    wide = main(x)
    axes = how.axes(at, wide.ndim, params["dimension_numbers"][0][at])
    if isinstance(x, Shared) and x.low.scale.shape == scale_shape(wide, axes):
        return x.low
    return quantised(wide, how.rules, how.both[at].role, axes)


def scale_shape(x: jax.Array, axes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales that are computed along some dimensions of an operand."""
    return tuple(1 if d in axes else size for d, size in enumerate(x.shape))


def _differs(scale: jax.Array, dims: Sequence[int]) -> bool:
    return any(scale.shape[d] != 1 for d in dims)


def _over_result(
    scale: jax.Array, summed: Sequence[int], batch: Sequence[int], before: int, after: int
) -> jax.Array:
    """The scales of an operand in the dimensions of the result, to be multiplied by it."""
    if all(size == 1 for size in scale.shape):
        return lax.reshape(scale, ())  # which XLA can make part of a gemm
    free = [d for d in range(scale.ndim) if d not in (*summed, *batch)]
    turned = lax.transpose(scale, (*batch, *free, *summed))
    kept = lax.squeeze(turned, range(len(batch) + len(free), scale.ndim))
    places = [*range(len(batch), len(batch) + before)]
    first = len(batch) + before + len(free)
    return lax.expand_dims(kept, [*places, *range(first, first + after)])
