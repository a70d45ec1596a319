"""The contraction in 8 bits: a format and a scale for each operand by its role, as a recipe says.

    result           activation x weight
    input_gradient   gradient x weight
    weight_gradient  gradient x activation

One primitive stands for `dot_general`. An operand comes in as it is, and is quantised by its role;
or in 8 bits, with its scale as one operand more. The derivative is taken at operands in 8 bits,
which are saved for the backward pass, but for parameters, which are there in any case. The
transpose is a product of the same kind, with the gradient in its own format.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as core
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.interpreters import ad, batching, mlir

from polymp.backends.jax import compat
from polymp.backends.jax.autocast import contraction as programs
from polymp.backends.jax.autocast.contraction import Params, contract
from polymp.backends.jax.autocast.fp8_operands import (
    In8Bits,
    Part,
    Quantised,
    Shared,
    Value,
    dequantised,
    flattened,
    main,
    operands_of,
    quantised,
    quantised_once,
)
from polymp.fp8 import GRADIENT, ROW, WEIGHT, inverse

fp8_contraction_p: core.Primitive = core.Primitive("polymp_fp8_contraction")


def contract_in_8_bits(
    lhs: Value, rhs: Value, params: Mapping[str, Any], how: In8Bits, run: str, out: str
) -> jax.Array:
    """`dot_general(lhs, rhs)` of operands in 8 bits, added up in float32."""
    flat, how = flattened(lhs, rhs, how)
    names = ("dimension_numbers", "out_sharding")
    kept = tuple(sorted({"precision": None, **{name: params[name] for name in names}}.items()))
    made: jax.Array = fp8_contraction_p.bind(
        *compat.varying_alike(*flat), of=lax.dot_general_p, params=kept, how=how, run=run, out=out
    )
    return made


def _abstract(
    *avals: ShapedArray, of: core.Primitive, params: Params, how: In8Bits, run: str, out: str
) -> ShapedArray:
    low = [programs.low(aval, run) for aval in avals[:2]]
    made: ShapedArray
    made, _ = of.abstract_eval(*low, **dict(params), preferred_element_type=np.dtype(out))
    return made


def _jvp(
    primals: Sequence[jax.Array],
    tangents: Sequence[Any],
    of: core.Primitive,
    params: Params,
    how: In8Bits,
    run: str,
    out: str,
) -> tuple[jax.Array, object]:
    operands, own = operands_of(primals, how), dict(params)
    saved = list(operands)
    for at, x in enumerate(operands):
        moves = type(tangents[1 - at]) is not ad.Zero
        if moves and not isinstance(x, Quantised):
            saved[at] = _saved(x, at, own, how, run)
            if isinstance(x, Shared):
                continue
            axes = how.axes(at, main(x).ndim, own["dimension_numbers"][0][at])
            if isinstance(saved[at], Quantised) and _is_along(saved[at], axes):
                operands[at] = saved[at]  # what this product takes, too
    made = contract_in_8_bits(operands[0], operands[1], own, how, run, out)
    parts = []
    for at, moved in enumerate(tangents[:2]):
        if type(moved) is ad.Zero:
            continue
        if how.rules.scaling == ROW:
            moved = _through_bfloat16(moved)
        lhs, rhs = (moved, saved[1]) if at == 0 else (saved[0], moved)
        if how.rules.weight_gradient_high and how.both[at].role == WEIGHT:
            parts.append(contract(of, lhs, rhs, params=own, run=run, out=out))
        else:
            parts.append(contract_in_8_bits(lhs, rhs, own, how, run, out))
    return made, programs.tangent(made, parts)


def _through_bfloat16(tangent: jax.Array) -> jax.Array:
    """Round a tangent to bfloat16, and so the gradient that its transpose makes.

    XLA may leave out a cast down and up again, but not this.
    """
    wide = tangent.dtype == np.float32
    return lax.reduce_precision(tangent, 8, 7) if wide else tangent


def _saved(
    x: jax.Array | Shared, at: int, params: Mapping[str, Any], how: In8Bits, run: str
) -> jax.Array | Quantised:
    """An operand as it is saved for the product with the gradient."""
    part, moving, wide = how.both[at], how.both[1 - at], main(x)
    if part.given:
        return wide
    if how.rules.weight_gradient_high and moving.role == WEIGHT:
        return lax.convert_element_type(wide, run)
    axes = how.axes_when_saved(at, wide.ndim, params)
    if isinstance(x, Shared) and _is_along(x.low, axes):
        return x.low
    return quantised_once(wide, how.recipe, part.role, axes)


def _transpose(
    ct: object, *flat: Any, of: core.Primitive, params: Params, how: In8Bits, run: str, out: str
) -> list[object]:
    moving = 0 if ad.is_undefined_primal(flat[0]) else 1
    aval = flat[moving].aval
    grads: list[object] = [None] * len(flat)
    if type(ct) is ad.Zero:
        grads[moving] = ad.Zero(aval)
        return grads
    other, part = operands_of(flat, how)[1 - moving], how.both[1 - moving]
    of_ct = Part(how.role_of_result)
    wide = main(other)
    avals = [programs.low(x, run) for x in (aval, ct, wide)]
    program = programs.transposed(of, params, run, moving, *avals)

    def product(_: core.Primitive, *values: jax.Array, params: Mapping[str, object]) -> jax.Array:
        (lhs, left), (rhs, right) = ((x, of_ct) if x is ct else (other, part) for x in values)
        own = how._replace(lhs=left, rhs=right)
        return contract_in_8_bits(lhs, rhs, params, own, run, aval.dtype.name)

    grads[moving] = programs.with_products(program, (ct, wide), product, aval.dtype.name)
    return grads


def _batch(
    flat: Sequence[jax.Array],
    dims: Sequence[int | None],
    of: core.Primitive,
    params: Params,
    how: In8Bits,
    run: str,
    out: str,
) -> tuple[jax.Array, int]:
    """Under vmap a product runs by rule `lower`, as in torch."""

    def lowered(*flat: jax.Array) -> jax.Array:
        return contract(of, *_wide(flat, how, run), params=dict(params), run=run, out=out)

    return jax.vmap(lowered, tuple(dims))(*flat), 0


def _wide(flat: Sequence[jax.Array], how: In8Bits, run: str) -> list[jax.Array]:
    """The two operands, those in 8 bits as low numbers."""
    operands = operands_of(flat, how)
    return [dequantised(*x, run) if isinstance(x, Quantised) else main(x) for x in operands]


compat.run_eagerly(fp8_contraction_p)

fp8_contraction_p.def_abstract_eval(_abstract)

ad.primitive_jvps[fp8_contraction_p] = _jvp
ad.primitive_transposes[fp8_contraction_p] = _transpose
batching.primitive_batchers[fp8_contraction_p] = _batch
compat.remat_rules[fp8_contraction_p] = programs.remat_rule


def product(
    *flat: jax.Array, of: core.Primitive, params: Params, how: In8Bits, run: str, out: str
) -> jax.Array:
    """The product of quantised operands, and of those that are quantised here.

    On GPUs this is the direct form of XLA's fp8 gemm. On an H100, jax 0.11.2 ran it in 8 bits, and
    in 16 where operands are cast up and scaled before: benchmarks/results/FIGURES.md, "Products of
    8-bit operands". Source: XLA, xla/service/gpu/transforms/gemm_rewriter.cc, MatchFp8Param.
    """
    operands, own = operands_of(flat, how), dict(params)
    (lc, rc), _ = own["dimension_numbers"]
    pairs = zip(operands, (lc, rc), strict=True)
    scales = [(x.scale, summed) for x, summed in pairs if isinstance(x, Quantised)]
    if any(scale.shape[d] != 1 for scale, summed in scales for d in summed):
        # Forward mode meets an operand that was quantised for the backward product, which sums
        # over other dimensions: its scales differ along those of this one.
        return contract(of, *_wide(flat, how, run), params=own, run=run, out=out)
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
    made = made * _over_result(inverse(lhs.scale), lc, 0, rhs.values.ndim - len(rc))
    made = made * _over_result(inverse(rhs.scale), rc, lhs.values.ndim - len(lc), 0)
    return lax.convert_element_type(made, out)


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
