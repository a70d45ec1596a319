"""Operands of 8-bit products: as they are, in 8 bits, or both; and each one's part in a product."""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.extend.core as core
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.interpreters import ad, batching, mlir

from polymp import fp8
from polymp.backends.jax import compat
from polymp.backends.jax.arrays import largest_magnitude
from polymp.dtypes import FORMATS
from polymp.fp8 import (
    ACTIVATION,
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
    Verbs,
)


class Part(NamedTuple):
    """An operand's part in a product in 8 bits."""

    role: str  # "activation", "weight" or "gradient"
    given: bool = False  # True for a parameter, which is saved for the backward pass as it is
    # True if it also comes in 8 bits, in the form that is saved for the backward pass, which
    # several products share.
    shared: bool = False


class Quantised(NamedTuple):
    """An operand in 8 bits."""

    values: jax.Array  # the operand multiplied by the scale, in an 8-bit format
    # Float32, of as many dimensions as the values; of length 1 where it was computed along a
    # dimension.
    scale: jax.Array


class Shared(NamedTuple):
    """An operand as it is, and in 8 bits."""

    wide: jax.Array  # as it is
    low: Quantised  # in 8 bits


# An operand: as it is, in 8 bits, or both.
Value = jax.Array | Quantised | Shared


class In8Bits(NamedTuple):
    """How a product runs in 8 bits."""

    recipe: str  # the name of the one in force
    lhs: Part  # the first operand's part
    rhs: Part  # the second operand's part

    @property
    def rules(self) -> Recipe:
        """The formats and scales of the recipe."""
        return RECIPES[self.recipe]

    @property
    def format(self) -> str:
        """The 8-bit format of the product, by that of its gradient, if it has one, or operands."""
        roles = (self.lhs.role, self.rhs.role)
        return self.rules.format_of(GRADIENT if GRADIENT in roles else roles[0])

    @property
    def both(self) -> tuple[Part, Part]:
        """The parts of the two operands."""
        return self.lhs, self.rhs

    @property
    def role_of_result(self) -> str:
        """The role of what has the result's shape in the transposes: a gradient, as a rule."""
        roles = {self.lhs.role, self.rhs.role}
        return next(role for role in (GRADIENT, ACTIVATION, WEIGHT) if role not in roles)

    def axes(self, at: int, ndim: int, summed: Sequence[int], other: str = "") -> tuple[int, ...]:
        """The dimensions along which a scale of an operand is computed."""
        roles = self.both[at].role, other or self.both[1 - at].role
        return scale_axes(ndim, self.rules, roles, summed)

    def axes_when_saved(self, at: int, ndim: int, params: Mapping[str, Any]) -> tuple[int, ...]:
        """The same for the product with the gradient, which sums over the other dimensions."""
        contracted, _ = params["dimension_numbers"]
        free = [d for d in range(ndim) if d not in contracted[at]]
        return self.axes(at, ndim, free, self.role_of_result)


def main(x: Value) -> jax.Array:
    """The array of an operand that has a derivative, if one has."""
    return x.values if isinstance(x, Quantised) else x.wide if isinstance(x, Shared) else x


def as_wide(x: Value) -> jax.Array:
    """An operand in float32."""
    if isinstance(x, Quantised):
        return dequantised(*x, "float32")
    return main(x).astype("float32")


def operands_of(flat: Sequence[Any], how: In8Bits) -> list[Any]:
    """The two operands, each with what comes with it."""
    rest = iter(flat[2:])
    operands: list[Any] = []
    for x, part in zip(flat, how.both, strict=False):
        if part.shared:
            operands.append(Shared(x, Quantised(next(rest), next(rest))))
        elif not ad.is_undefined_primal(x) and is_quantised(x):
            operands.append(Quantised(x, next(rest)))
        else:
            operands.append(x)
    return operands


def flattened(lhs: Value, rhs: Value, how: In8Bits) -> tuple[list[jax.Array], In8Bits]:
    """The arrays of two operands, and how a product of these runs; see `operands_of`."""
    rest: list[jax.Array] = []
    parts = []
    for x, part in zip((lhs, rhs), how.both, strict=True):
        if isinstance(x, Quantised):
            rest.append(x.scale)
        elif isinstance(x, Shared):
            rest += x.low
        parts.append(part._replace(shared=isinstance(x, Shared)))
    return [main(lhs), main(rhs), *rest], how._replace(lhs=parts[0], rhs=parts[1])


IN_8_BITS = frozenset({E4M3, E5M2})


def is_quantised(x: jax.Array) -> bool:
    """True for an array of an 8-bit format."""
    return jax.typeof(x).dtype.name in IN_8_BITS


def product_of(roles: Collection[str]) -> str:
    """The name of a product by the roles of its operands, as recipes have it."""
    if GRADIENT not in roles:
        return RESULT
    return INPUT_GRADIENT if WEIGHT in roles else WEIGHT_GRADIENT


def scale_axes(
    ndim: int, recipe: Recipe, roles: Sequence[str], summed: Collection[int]
) -> tuple[int, ...]:
    """The dimensions along which a scale of an operand is computed."""
    axes = recipe.scale_axis(product_of(roles), roles[0], tuple(sorted(summed)))
    if axes is None:
        return tuple(range(ndim))
    return (axes,) if isinstance(axes, int) else axes


def quantised(x: jax.Array, recipe: Recipe, role: str, axes: Sequence[int]) -> Quantised:
    """An operand in 8 bits."""
    scale = fp8.scale_of(VERBS, x, recipe, role, tuple(axes))
    return Quantised(fp8.quantised(VERBS, x, scale, recipe.format_of(role)), scale)


def dequantised(values: jax.Array, scale: jax.Array, dtype: str) -> jax.Array:
    """An operand as it was, but for its rounding to 8 bits, in a dtype."""
    wide = lax.convert_element_type(values, "float32") * fp8.inverse(scale)
    return lax.convert_element_type(wide, dtype)


def _amax(x: jax.Array, axis: Axis) -> jax.Array:
    axes = range(x.ndim) if axis is None else [axis] if isinstance(axis, int) else axis
    largest = largest_magnitude(_float32(x), tuple(axes))
    return largest if axis is None else lax.expand_dims(largest, tuple(axes))


def _where(test: jax.Array, one: jax.Array | float, other: jax.Array | float) -> jax.Array:
    both = [lax.full_like(test, x, np.float32) if isinstance(x, float) else x for x in (one, other)]
    return lax.select(test, *both)


def _power_of_two(x: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(x, np.uint32)
    return lax.bitcast_convert_type(bits & np.uint32(0x7F800000), np.float32)


def _float32(x: jax.Array) -> jax.Array:
    """The numbers of a low array, and no others: XLA may leave out a rounding before a cast up."""
    wide = lax.convert_element_type(x, np.float32)
    digits = FORMATS[x.dtype.name].mantissa
    return wide if digits == 23 else lax.reduce_precision(wide, 8, digits)


VERBS = Verbs(
    amax=_amax,
    float32=_float32,
    where=_where,
    clip=lambda x, lowest, highest: lax.clamp(np.float32(lowest), x, np.float32(highest)),
    cast=lambda x, format: lax.convert_element_type(x, np.dtype(format)),
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


def quantised_once(
    x: jax.Array, recipe: str, role: str, axes: Sequence[int], differentiated: bool = True
) -> Quantised:
    """An operand in 8 bits as one equation; `differentiated` once the derivative is taken."""
    how = {"recipe": recipe, "role": role, "axes": tuple(axes), "differentiated": differentiated}
    return Quantised(*fp8_quantise_p.bind(x, **how))


def _quantise(x: jax.Array, *, recipe: str, role: str, axes: Sequence[int], **_: bool) -> Quantised:
    return quantised(x, RECIPES[recipe], role, axes)


@lru_cache(maxsize=1024)
def _quantise_abstract(x: ShapedArray, **how: Any) -> Sequence[ShapedArray]:
    types: Sequence[ShapedArray] = jax.make_jaxpr(partial(_quantise, **how))(x).out_avals
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


compat.run_eagerly(fp8_quantise_p)

fp8_quantise_p.def_abstract_eval(_quantise_abstract)

ad.primitive_jvps[fp8_quantise_p] = _quantise_jvp
ad.primitive_transposes[fp8_quantise_p] = _quantise_transpose
batching.primitive_batchers[fp8_quantise_p] = _quantise_batch

mlir.register_lowering(fp8_quantise_p, mlir.lower_fun(_quantise, multiple_results=True))
