"""The contraction in 8 bits: a format and a scale for each operand by its role, as a recipe says.

    result           activation x weight
    input_gradient   gradient x weight
    weight_gradient  gradient x activation

One primitive stands for `dot_general`. An operand comes in as it is, and is quantised by its role;
or in 8 bits, with its scale as one operand more; or both, where several products share it. The
derivative is taken at operands in 8 bits, which are saved for the backward pass, but for
parameters, which are there in any case. The transpose is a product of the same kind, with the
gradient in its own format.
"""

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
from polymp.backends.jax.autocast import contraction as programs
from polymp.backends.jax.autocast.contraction import Contraction, contract
from polymp.dtypes import FORMATS
from polymp.fp8 import (
    ACTIVATION,
    E4M3,
    E5M2,
    GRADIENT,
    INPUT_GRADIENT,
    RECIPES,
    RESULT,
    ROW,
    WEIGHT,
    WEIGHT_GRADIENT,
    Axis,
    Recipe,
    Verbs,
)

# Operands: as they are, in 8 bits, or both; and each one's part in a product.


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
    both: tuple[Part, Part]  # the parts of the two operands

    @property
    def rules(self) -> Recipe:
        """The formats and scales of the recipe."""
        return RECIPES[self.recipe]

    @property
    def format(self) -> str:
        """The 8-bit format of the product, by that of its gradient, if it has one, or operands."""
        return self.rules.format_of(GRADIENT if GRADIENT in self.roles else self.roles[0])

    @property
    def roles(self) -> tuple[str, str]:
        """The roles of the two operands."""
        return self.both[0].role, self.both[1].role

    @property
    def role_of_result(self) -> str:
        """The role of what has the result's shape in the transposes: a gradient, as a rule."""
        return next(role for role in (GRADIENT, ACTIVATION, WEIGHT) if role not in self.roles)

    def axes(self, at: int, ndim: int, summed: Collection[int], other: str = "") -> tuple[int, ...]:
        """The dimensions along which a scale of an operand is computed."""
        roles = self.both[at].role, other or self.both[1 - at].role
        product = RESULT
        if GRADIENT in roles:
            product = INPUT_GRADIENT if WEIGHT in roles else WEIGHT_GRADIENT
        axes = self.rules.scale_axis(product, roles[0], tuple(sorted(summed)))
        if axes is None:
            return tuple(range(ndim))
        return (axes,) if isinstance(axes, int) else axes

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
        elif not ad.is_undefined_primal(x) and jax.typeof(x).dtype.name in (E4M3, E5M2):
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
    return [main(lhs), main(rhs), *rest], how._replace(both=(parts[0], parts[1]))


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


# Products.

fp8_contraction_p: core.Primitive = core.Primitive("polymp_fp8_contraction")


def contract_in_8_bits(spec: Contraction, lhs: Value, rhs: Value, how: In8Bits) -> jax.Array:
    """`dot_general(lhs, rhs)` of operands in 8 bits, added up in float32."""
    flat, how = flattened(lhs, rhs, how)
    operands = compat.varying_alike(*flat)
    made: jax.Array = fp8_contraction_p.bind(*operands, spec=spec, how=how)
    return made


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Any], spec: Contraction, how: In8Bits
) -> tuple[jax.Array, object]:
    operands, own = operands_of(primals, how), spec.params
    saved = list(operands)
    for at, x in enumerate(operands):
        moves = type(tangents[1 - at]) is not ad.Zero
        if moves and not isinstance(x, Quantised):
            saved[at] = _saved(x, at, spec, how)
            if isinstance(x, Shared):
                continue
            axes = how.axes(at, main(x).ndim, own["dimension_numbers"][0][at])
            if isinstance(saved[at], Quantised) and _is_along(saved[at], axes):
                operands[at] = saved[at]  # what this product takes, too
    made = contract_in_8_bits(spec, operands[0], operands[1], how)
    parts = []
    for at, moved in enumerate(tangents[:2]):
        if type(moved) is ad.Zero:
            continue
        if how.rules.scaling == ROW:
            moved = _through_bfloat16(moved)
        lhs, rhs = (moved, saved[1]) if at == 0 else (saved[0], moved)
        if how.rules.weight_gradient_high and how.both[at].role == WEIGHT:
            parts.append(contract(spec, lhs, rhs))
        else:
            parts.append(contract_in_8_bits(spec, lhs, rhs, how))
    return made, programs.tangent(made, parts)


def _through_bfloat16(tangent: jax.Array) -> jax.Array:
    """Round a tangent to bfloat16, and so the gradient that its transpose makes."""
    # XLA may leave out a cast down and up again, but not this.
    wide = tangent.dtype == np.float32
    return lax.reduce_precision(tangent, 8, 7) if wide else tangent


def _saved(
    x: jax.Array | Shared, at: int, spec: Contraction, how: In8Bits
) -> jax.Array | Quantised:
    """An operand as it is saved for the product with the gradient."""
    part, moving, wide = how.both[at], how.both[1 - at], main(x)
    if part.given:
        return wide
    if how.rules.weight_gradient_high and moving.role == WEIGHT:
        return lax.convert_element_type(wide, spec.run)
    axes = how.axes_when_saved(at, wide.ndim, spec.params)
    if isinstance(x, Shared) and _is_along(x.low, axes):
        return x.low
    return quantised_once(wide, how.recipe, part.role, axes)


def _transpose(ct: object, *flat: Any, spec: Contraction, how: In8Bits) -> list[object]:
    still = 1 if ad.is_undefined_primal(flat[0]) else 0
    operands, of_ct = operands_of(flat, how), Part(how.role_of_result)
    other, part = operands[still], how.both[still]

    def product(spec: Contraction, *values: jax.Array) -> jax.Array:
        (lhs, left), (rhs, right) = ((x, of_ct) if x is ct else (other, part) for x in values)
        return contract_in_8_bits(spec, lhs, rhs, how._replace(both=(left, right)))

    grads = programs.transpose(ct, *map(main, operands), spec=spec, product=product)
    return [*grads, *[None] * (len(flat) - 2)]


def _batch(
    flat: Sequence[jax.Array], dims: Sequence[int | None], spec: Contraction, how: In8Bits
) -> tuple[jax.Array, int]:
    """Under vmap a product runs by rule `lower`, as in torch."""

    def lowered(*flat: jax.Array) -> jax.Array:
        return contract(spec, *_wide(flat, how, spec.run))

    return jax.vmap(lowered, tuple(dims))(*flat), 0


def _wide(flat: Sequence[jax.Array], how: In8Bits, run: str) -> list[jax.Array]:
    """The two operands, those in 8 bits as low numbers."""
    operands = operands_of(flat, how)
    return [dequantised(*x, run) if isinstance(x, Quantised) else main(x) for x in operands]


compat.run_eagerly(fp8_contraction_p)
fp8_contraction_p.def_abstract_eval(programs.abstract)
ad.primitive_jvps[fp8_contraction_p] = _jvp
ad.primitive_transposes[fp8_contraction_p] = _transpose
batching.primitive_batchers[fp8_contraction_p] = _batch
compat.remat_rules[fp8_contraction_p] = programs.remat_rule


def product(*flat: jax.Array, spec: Contraction, how: In8Bits) -> jax.Array:
    """The product of quantised operands, and of those that are quantised here."""
    # On GPUs this is the direct form of XLA's fp8 gemm. On an H100, jax 0.11.2 ran it in 8 bits,
    # and in 16 where operands are cast up and scaled before: benchmarks/results/FIGURES.md,
    # "Products of 8-bit operands". Source: XLA, xla/service/gpu/transforms/gemm_rewriter.cc,
    # MatchFp8Param.
    operands, own = operands_of(flat, how), spec.params
    (lc, rc), _ = own["dimension_numbers"]
    pairs = zip(operands, (lc, rc), strict=True)
    scales = [(x.scale, summed) for x, summed in pairs if isinstance(x, Quantised)]
    if any(scale.shape[d] != 1 for scale, summed in scales for d in summed):
        # Forward mode meets an operand that was quantised for the backward product, which sums
        # over other dimensions: its scales differ along those of this one.
        return contract(spec, *_wide(flat, how, spec.run))
    lhs, rhs = (_in_8_bits(x, at, own, how) for at, x in enumerate(operands))
    # XLA's gemm adds up fast, with fewer digits, unless it is asked not to. As torchao's recipes
    # have it, results do, and gradients do not.
    precise = GRADIENT in how.roles
    made = lax.dot_general(
        lhs.values,
        rhs.values,
        own["dimension_numbers"],
        precision=lax.Precision.HIGHEST if precise else lax.Precision.DEFAULT,
        preferred_element_type=np.dtype("float32"),
        out_sharding=own["out_sharding"],
    )
    made = made * _over_result(fp8.inverse(lhs.scale), lc, 0, rhs.values.ndim - len(rc))
    made = made * _over_result(fp8.inverse(rhs.scale), rc, lhs.values.ndim - len(lc), 0)
    return lax.convert_element_type(made, spec.out)


mlir.register_lowering(fp8_contraction_p, mlir.lower_fun(product, multiple_results=False))


def _in_8_bits(x: Value, at: int, params: Mapping[str, Any], how: In8Bits) -> Quantised:
    """An operand as this product takes it."""
    if isinstance(x, Quantised):
        return x
    wide = main(x)
    axes = how.axes(at, wide.ndim, params["dimension_numbers"][0][at])
    if isinstance(x, Shared) and _is_along(x.low, axes):
        return x.low
    return quantised(wide, how.rules, how.both[at].role, axes)


def _is_along(x: Quantised, axes: Sequence[int]) -> bool:
    """True if the scales of an operand were computed along these dimensions."""
    shape = [1 if d in axes else size for d, size in enumerate(x.values.shape)]
    return bool(x.scale.shape == tuple(shape))


def _over_result(scale: jax.Array, summed: Sequence[int], before: int, after: int) -> jax.Array:
    """The scales of an operand in the dimensions of the result, to be multiplied by it."""
    if all(size == 1 for size in scale.shape):
        return lax.reshape(scale, ())  # which XLA can make part of a gemm
    end = before + scale.ndim - len(summed)
    return lax.expand_dims(lax.squeeze(scale, summed), [*range(before), *range(end, end + after)])
