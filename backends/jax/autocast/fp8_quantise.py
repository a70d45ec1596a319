"""Operands of 8-bit products in JAX: an array in 8 bits, and the scale that it was multiplied by.

The formulas are those of `polymp.fp8.quantise`. Here are JAX's verbs for them, and the axes that a
scale is computed along in a product of any number of dimensions, over a batch of vmap's too.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.extend.core as core
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.interpreters import ad, batching, mlir

from polymp.backends.jax.arrays import largest_magnitude
from polymp.backends.jax.autocast.contraction_programs import eager
from polymp.dtypes import FORMATS
from polymp.fp8 import quantise
from polymp.fp8.recipes import (
    E4M3,
    E5M2,
    GRADIENT,
    INPUT_GRADIENT,
    RECIPES,
    RESULT,
    WEIGHT,
    WEIGHT_GRADIENT,
    Axis,
    Recipe,
)
from polymp.fp8.verbs import Verbs

IN_8_BITS = frozenset({E4M3, E5M2})


class Quantised(NamedTuple):
    """An operand in 8 bits.

    Attributes:
        values: the operand multiplied by the scale, in an 8-bit format.
        scale: float32, of as many dimensions as the values; of length 1 where it was computed along
            a dimension.
    """

    values: jax.Array
    scale: jax.Array


def is_quantised(x: jax.Array) -> bool:
    """True for an array of an 8-bit format."""
    return jax.typeof(x).dtype.name in IN_8_BITS


def product_of(roles: Collection[str]) -> str:
    """The name of a product by the roles of its operands, as recipes have it."""
    if GRADIENT not in roles:
        return RESULT
    return INPUT_GRADIENT if WEIGHT in roles else WEIGHT_GRADIENT


def scale_axes(
    ndim: int,
    recipe: Recipe,
    roles: Sequence[str],
    summed: Collection[int],
    own: Collection[int],
) -> tuple[int, ...]:
    """The dimensions along which a scale of an operand is computed."""
    axes = recipe.scale_axis(product_of(roles), roles[0], tuple(sorted(summed)))
    if axes is None:
        return tuple(d for d in range(ndim) if d in summed or d not in own)
    return (axes,) if isinstance(axes, int) else axes


def quantised(x: jax.Array, recipe: Recipe, role: str, axes: Sequence[int]) -> Quantised:
    """An operand in 8 bits."""
    scale = quantise.scale_of(VERBS, x, recipe, role, tuple(axes))
    return Quantised(quantise.quantised(VERBS, x, scale, recipe.format_of(role)), scale)


def dequantised(values: jax.Array, scale: jax.Array, dtype: str) -> jax.Array:
    """An operand as it was, but for its rounding to 8 bits, in a dtype."""
    wide = lax.convert_element_type(values, "float32") * quantise.inverse(scale)
    return lax.convert_element_type(wide, dtype)


def _amax(x: jax.Array, axis: Axis) -> jax.Array:
    axes = range(x.ndim) if axis is None else [axis] if isinstance(axis, int) else axis
    largest = largest_magnitude(_float32(x), tuple(axes))
    return largest if axis is None else lax.expand_dims(largest, tuple(axes))


def _where(test: jax.Array, one: jax.Array | float, other: jax.Array | float) -> jax.Array:
    both = [lax.full_like(test, x, np.float32) if isinstance(x, float) else x for x in (one, other)]
    return lax.select(test, *both)


def _clip(x: jax.Array, lowest: float, highest: float) -> jax.Array:
    return lax.clamp(np.float32(lowest), x, np.float32(highest))


def _power_of_two(x: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(x, np.uint32)
    return lax.bitcast_convert_type(bits & np.uint32(0x7F800000), np.float32)


def _float32(x: jax.Array) -> jax.Array:
    """The numbers of a low array, and no others: XLA may leave out a rounding before a cast up."""
    wide = lax.convert_element_type(x, np.float32)
    digits = FORMATS[x.dtype.name].mantissa
    return wide if digits == 23 else lax.reduce_precision(wide, 8, digits)


def _cast(x: jax.Array, format: str) -> jax.Array:
    return lax.convert_element_type(x, np.dtype(format))


VERBS = Verbs(
    amax=_amax,
    float32=_float32,
    where=_where,
    clip=_clip,
    cast=_cast,
    isfinite=lax.is_finite,
    power_of_two=_power_of_two,
)


# An operand in 8 bits as an equation of its own: several products may share it, and it is saved for
# the backward pass once. It has no derivative: products have one in the operand as it was.
fp8_quantise_p: core.Primitive = core.Primitive("polymp_fp8_quantise")
fp8_quantise_p.multiple_results = True

TWICE = (
    "A product in 8 bits has a first derivative only, and a function with such products is "
    "differentiated twice here. Run it with a policy without rule fp8, such as 'lean'."
)


def quantised_once(x: jax.Array, recipe: str, role: str, axes: Sequence[int]) -> Quantised:
    """An operand in 8 bits, from which no derivative is taken: one that is saved for it."""
    params = quantise_params(recipe, role, axes, differentiated=True)
    return Quantised(*fp8_quantise_p.bind(x, **params))


def quantise_params(
    recipe: str, role: str, axes: Sequence[int], differentiated: bool = False
) -> jax.core.ParamDict:
    """The parameters of `fp8_quantise_p`; `differentiated` once the derivative has been taken."""
    return {
        "recipe": recipe, "role": role, "axes": tuple(axes), "differentiated": differentiated,
    }  # fmt: skip


def _quantise(x: jax.Array, *, recipe: str, role: str, axes: Sequence[int], **_: bool) -> Quantised:
    return quantised(x, RECIPES[recipe], role, axes)


def _quantise_abstract(
    x: ShapedArray, *, recipe: str, role: str, axes: tuple[int, ...], **_: bool
) -> Sequence[ShapedArray]:
    return _types(x, recipe, role, axes)


@lru_cache(maxsize=1024)
def _types(x: ShapedArray, recipe: str, role: str, axes: tuple[int, ...]) -> Sequence[ShapedArray]:
    quantise = partial(_quantise, recipe=recipe, role=role, axes=axes)
    types: Sequence[ShapedArray] = jax.make_jaxpr(quantise)(x).out_avals
    return types


def _quantise_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[object], **params: Any
) -> tuple[Sequence[jax.Array], list[object]]:
    if type(tangents[0]) is not ad.Zero:
        if params["differentiated"]:
            raise NotImplementedError(TWICE)
        params["differentiated"] = True
    outs = fp8_quantise_p.bind(*primals, **params)
    return outs, [ad.Zero(jax.typeof(out)) for out in outs]


def _quantise_transpose(cts: Sequence[object], x: Any, **_: object) -> list[object]:
    return [ad.Zero(x.aval)]


def _quantise_batch(
    operands: Sequence[jax.Array], dims: Sequence[int], *, axes: Sequence[int], **params: Any
) -> tuple[Sequence[jax.Array], list[int]]:
    (x,), (at,) = operands, dims
    moved = tuple(d + (d >= at) for d in axes)
    return fp8_quantise_p.bind(x, axes=moved, **params), [at, at]


fp8_quantise_p.def_impl(eager(fp8_quantise_p, ("recipe", "role", "axes", "differentiated")))
fp8_quantise_p.def_abstract_eval(_quantise_abstract)
ad.primitive_jvps[fp8_quantise_p] = _quantise_jvp
ad.primitive_transposes[fp8_quantise_p] = _quantise_transpose
batching.primitive_batchers[fp8_quantise_p] = _quantise_batch
mlir.register_lowering(fp8_quantise_p, mlir.lower_fun(_quantise, multiple_results=True))
