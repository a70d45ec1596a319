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
from polymp.backends.jax.autocast import contraction_programs as programs
from polymp.backends.jax.autocast import fp8_program
from polymp.backends.jax.autocast.contraction import contract
from polymp.backends.jax.autocast.contraction_forms import Params
from polymp.backends.jax.autocast.fp8_operands import (
    In8Bits,
    Operand,
    Shared,
    Value,
    flattened,
    main,
    operands_of,
)
from polymp.backends.jax.autocast.fp8_quantise import Quantised, is_quantised, quantised_once
from polymp.fp8.recipes import ROW, WEIGHT

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
        if moves and not isinstance(x, Quantised) and not how.trial:
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
        if how.rules.scaling == ROW and not how.trial:
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
    if isinstance(x, Shared) and x.low.scale.shape == fp8_program.scale_shape(wide, axes):
        return x.low
    return quantised_once(wide, how.recipe, part.role, axes)


def _serves(x: Quantised, at: int, params: Mapping[str, Any], how: In8Bits) -> bool:
    """True if an operand that is saved is what this product takes, too."""
    axes = how.axes(at, x.values.ndim, params["dimension_numbers"][0][at])
    return bool(x.scale.shape == fp8_program.scale_shape(x.values, axes))


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
    of_ct = Operand(how.role_of_result, own=_own_of_result(params, flat, how))
    wide = main(other)
    avals = [programs.low(aval, run), *map(programs.low_type(run), (ct, wide))]
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
        parts.append(part if at is None else part._replace(own=_with_batch(part.own, at)))
        places.append(at)
        operands.append(value)
    how = how._replace(lhs=parts[0], rhs=parts[1])
    wide = list(map(main, operands))
    avals = map(programs.low_type(run), wide)
    program = programs.batched(of, params, run, tuple(places), *avals)

    def product(_: core.Primitive, *values: jax.Array, params: Mapping[str, object]) -> jax.Array:
        order = (0, 1) if values[0] is wide[0] else (1, 0)
        own = how._replace(lhs=how.both[order[0]], rhs=how.both[order[1]])
        return _bind(operands[order[0]], operands[order[1]], params, own, run, out)

    return programs.with_products(program, wide, product, out), 0


def _with_batch(own: Sequence[int], at: int) -> tuple[int, ...]:
    return tuple(sorted([at, *(d + (d >= at) for d in own)]))


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


def _stands_for(
    eqn: core.JaxprEqn,
) -> tuple[core.Primitive, Sequence[ShapedArray], Mapping[str, object]]:
    avals = [programs.low(x.aval, eqn.params["run"]) for x in eqn.invars[:2]]
    return eqn.params["of"], avals, dict(eqn.params["params"])


fp8_contraction_p.def_impl(programs.eager(fp8_contraction_p, ("of", "params", "how", "run", "out")))
fp8_contraction_p.def_abstract_eval(_abstract)
ad.primitive_jvps[fp8_contraction_p] = _jvp
ad.primitive_transposes[fp8_contraction_p] = _transpose
batching.primitive_batchers[fp8_contraction_p] = _batch
compat.remat_rules[fp8_contraction_p] = programs.remat_rule(_stands_for)
mlir.register_lowering(
    fp8_contraction_p, mlir.lower_fun(fp8_program.product, multiple_results=False)
)
