"""The contraction in 8 bits: a format and a scale for each operand by its role, as a recipe says.

    result           activation x weight
    input_gradient   gradient x weight
    weight_gradient  gradient x activation

One primitive stands for `dot_general`. An operand comes in as it is, and is quantised by its role;
or in 8 bits, with its scale as one operand more. In an operand that is not in 8 bits yet, the
product is linear, as `contraction_p` is. The derivative is taken at operands in 8 bits: they are
what is saved for the backward pass, but for parameters, which are there in any case. Its transpose
is a product of the same kind, with the gradient in its own format.
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
    is_quantised,
    main,
    operands_of,
    quantised,
    quantised_once,
)
from polymp.fp8.quantise import inverse
from polymp.fp8.recipes import GRADIENT, ROW, WEIGHT

fp8_contraction_p: core.Primitive = core.Primitive("polymp_fp8_contraction")


def contraction_params(
    params: Mapping[str, object], how: In8Bits, run: str, out: str
) -> jax.core.ParamDict:
    """The parameters of a contraction in 8 bits."""
    own = {"dimension_numbers": params["dimension_numbers"], "precision": None}
    kept = tuple(sorted({**own, "out_sharding": params["out_sharding"]}.items()))
    return {"of": lax.dot_general_p, "params": kept, "how": how, "run": run, "out": out}


def _bind(
    lhs: Value, rhs: Value, params: Mapping[str, object], how: In8Bits, run: str, out: str
) -> jax.Array:
    flat, how = flattened(lhs, rhs, how)
    operands = compat.varying_alike(*flat)
    made: jax.Array = fp8_contraction_p.bind(*operands, **contraction_params(params, how, run, out))
    return made


def _abstract(
    *avals: ShapedArray, of: core.Primitive, params: Params, how: In8Bits, run: str, out: str
) -> ShapedArray:
    low = [programs.low(aval, run) for aval in avals[:2]]
    made: ShapedArray
    made, _ = of.abstract_eval(*low, **dict(params), preferred_element_type=np.dtype(out))
    return made


# Derivatives


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
            if isinstance(saved[at], Quantised) and _serves(saved[at], at, own, how):
                operands[at] = saved[at]
    made = _bind(operands[0], operands[1], own, how, run, out)
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
            parts.append(_bind(lhs, rhs, own, how, run, out))
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
    if isinstance(x, Shared) and x.low.scale.shape == scale_shape(wide, axes):
        return x.low
    return quantised_once(wide, how.recipe, part.role, axes)


def _serves(x: Quantised, at: int, params: Mapping[str, Any], how: In8Bits) -> bool:
    """True if an operand that is saved is what this product takes, too."""
    axes = how.axes(at, x.values.ndim, params["dimension_numbers"][0][at])
    return bool(x.scale.shape == scale_shape(x.values, axes))


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
    of_ct = Part(how.role_of_result, own=_own_of_result(params, flat, how))
    wide = main(other)
    avals = [programs.low(x, run) for x in (aval, ct, wide)]
    program = programs.transposed(of, params, run, moving, *avals)

    def product(_: core.Primitive, *values: jax.Array, params: Mapping[str, object]) -> jax.Array:
        (lhs, left), (rhs, right) = ((x, of_ct) if x is ct else (other, part) for x in values)
        own = how._replace(lhs=left, rhs=right)
        return _bind(lhs, rhs, params, own, run, aval.dtype.name)

    grads[moving] = programs.with_products(program, (ct, wide), product, aval.dtype.name)
    return grads


def _own_of_result(params: Params, flat: Sequence[Any], how: In8Bits) -> tuple[int, ...]:
    """The dimensions of the result that vmap batches an operand by."""
    contracted, batch = dict(params)["dimension_numbers"]
    ndims = [(x.aval if ad.is_undefined_primal(x) else x).ndim for x in flat[:2]]
    own: set[int] = set()
    first = len(batch[0])
    for at, part in enumerate(how.both):
        free = [d for d in range(ndims[at]) if d not in (*contracted[at], *batch[at])]
        places = {d: i for i, d in enumerate(batch[at])}
        places |= {d: first + i for i, d in enumerate(free)}
        own.update(places[d] for d in part.own if d in places)
        first += len(free)
    return tuple(sorted(own))


# Batches


def _batch(
    flat: Sequence[jax.Array],
    dims: Sequence[Any],
    of: core.Primitive,
    params: Params,
    how: In8Bits,
    run: str,
    out: str,
) -> tuple[jax.Array, int]:
    rest = iter(zip(flat[2:], dims[2:], strict=True))
    operands: list[Any] = []
    parts, places = [], []
    for x, at, part in zip(flat, dims[:2], how.both, strict=False):
        value: Value = x
        if part.shared:
            low = [next(rest), next(rest)]
            if at is not None:
                value = Shared(jax.numpy.moveaxis(x, at, 0), _batched_alike(*low)[0])
                at = 0
            else:
                value = Shared(x, Quantised(*(y for y, _ in low)))
        elif is_quantised(x):
            value, at = _batched_alike((x, at), next(rest))
        if at is not None:
            part = part._replace(own=tuple(sorted([at, *(d + (d >= at) for d in part.own)])))
        parts.append(part)
        places.append(at)
        operands.append(value)
    how = how._replace(lhs=parts[0], rhs=parts[1])
    wide = list(map(main, operands))
    avals = [programs.low(x, run) for x in wide]
    program = programs.batched(of, params, run, tuple(places), *avals)

    def product(_: core.Primitive, *values: jax.Array, params: Mapping[str, object]) -> jax.Array:
        order = (0, 1) if values[0] is wide[0] else (1, 0)
        own = how._replace(lhs=how.both[order[0]], rhs=how.both[order[1]])
        return _bind(operands[order[0]], operands[order[1]], params, own, run, out)

    return programs.with_products(program, wide, product, out), 0


def _batched_alike(
    values: tuple[jax.Array, Any], scale: tuple[jax.Array, Any]
) -> tuple[Quantised, int | None]:
    """An operand and its scale, with the batch in front of both if either has one."""
    (x, at), (s, of_scale) = values, scale
    if at is None and of_scale is None:
        return Quantised(x, s), None
    if at is None:
        x = lax.broadcast(x, (s.shape[of_scale],))
    else:
        x = jax.numpy.moveaxis(x, at, 0)
    s = lax.expand_dims(s, (0,)) if of_scale is None else jax.numpy.moveaxis(s, of_scale, 0)
    return Quantised(x, s), 0


fp8_contraction_p.def_impl(programs.eager(fp8_contraction_p, ("of", "params", "how", "run", "out")))

fp8_contraction_p.def_abstract_eval(_abstract)

ad.primitive_jvps[fp8_contraction_p] = _jvp
ad.primitive_transposes[fp8_contraction_p] = _transpose
batching.primitive_batchers[fp8_contraction_p] = _batch
compat.remat_rules[fp8_contraction_p] = programs.remat_rule


def product(
    *flat: jax.Array, of: core.Primitive, params: Params, how: In8Bits, run: str, out: str
) -> jax.Array:
    """The product of quantised operands, and of those that are quantised here."""
    operands, own = operands_of(flat, how), dict(params)
    (lc, rc), (lb, rb) = own["dimension_numbers"]
    pairs = zip(operands, (lc, rc), strict=True)
    scales = [(x.scale, summed) for x, summed in pairs if isinstance(x, Quantised)]
    if any(scale.shape[d] != 1 for scale, summed in scales for d in summed):
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


mlir.register_lowering(fp8_contraction_p, mlir.lower_fun(product, multiple_results=False))


# The program of a contraction in 8 bits, as XLA gets it.
#
# XLA multiplies the 8-bit operands as they are, and the result is multiplied by the scales. On
# GPUs that is the direct form of XLA's fp8 gemm: nothing has to be recognised, as where operands
# are cast up and scaled before a product in a wider dtype. On an H100, jax 0.11.2 ran the direct
# form in 8 bits, and the other one in 16: benchmarks/results/FIGURES.md, "Products of 8-bit
# operands". Source: XLA, xla/service/gpu/transforms/gemm_rewriter.cc, MatchFp8Param, F8ScaleD;
# flax #3922.


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
