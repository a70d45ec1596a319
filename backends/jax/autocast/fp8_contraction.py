"""The contraction in 8 bits: a format and a scale for each operand by its role, as a recipe says.

    result           activation x weight
    input_gradient   gradient x weight
    weight_gradient  gradient x activation

One primitive stands for `dot_general`. An operand comes in as it is, and is quantised by its role;
or in 8 bits, with its scale as one operand more. In an operand that is not in 8 bits yet, the
product is linear, as `contraction_p` is. The derivative is taken at operands in 8 bits: they are
what is saved for the backward pass, but for parameters, which are there in any case. Its transpose
is a product of the same kind, with the gradient in its own format.

XLA multiplies the 8-bit operands as they are, and the result is multiplied by the scales. On GPUs
that is the direct form of XLA's fp8 gemm: nothing has to be recognised, as where operands are cast
up and scaled before a product in a wider dtype.
Source: XLA, xla/service/gpu/transforms/gemm_rewriter.cc, MatchFp8Param, F8ScaleD; flax #3922.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as core
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.interpreters import ad, batching, mlir

from polymp.backends.jax import compat
from polymp.backends.jax.autocast import contraction_programs as programs
from polymp.backends.jax.autocast.contraction import contract
from polymp.backends.jax.autocast.contraction_forms import Params
from polymp.backends.jax.autocast.fp8_quantise import (
    TWICE,
    Quantised,
    dequantised,
    differentiated_p,
    is_quantised,
    quantised,
    scale_axes,
)
from polymp.fp8.quantise import inverse
from polymp.fp8.recipes import ACTIVATION, GRADIENT, RECIPES, WEIGHT, Recipe

fp8_contraction_p: core.Primitive = core.Primitive("polymp_fp8_contraction")


class Operand(NamedTuple):
    """An operand's part in a product in 8 bits.

    Attributes:
        role: "activation", "weight" or "gradient".
        given: True for a parameter, which is saved for the backward pass as it is.
        own: the dimensions that vmap batches it by: each element of a batch has its own scales.
    """

    role: str
    given: bool = False
    own: tuple[int, ...] = ()


class In8Bits(NamedTuple):
    """How a product runs in 8 bits.

    Attributes:
        recipe: the name of the one in force.
        lhs: the first operand's part.
        rhs: the second operand's part.
    """

    recipe: str
    lhs: Operand
    rhs: Operand

    @property
    def rules(self) -> Recipe:
        """The formats and scales of the recipe."""
        return RECIPES[self.recipe]

    @property
    def both(self) -> tuple[Operand, Operand]:
        """The parts of the two operands."""
        return self.lhs, self.rhs

    @property
    def role_of_result(self) -> str:
        """The role of what has the result's shape in the transposes: a gradient, as a rule."""
        roles = {self.lhs.role, self.rhs.role}
        return next(role for role in (GRADIENT, ACTIVATION, WEIGHT) if role not in roles)

    def axes(self, at: int, ndim: int, summed: Sequence[int], other: str = "") -> tuple[int, ...]:
        """The dimensions along which a scale of an operand is computed.

        Args:
            at: the operand's place.
            ndim: how many dimensions it has.
            summed: those that the product sums over.
            other: the role of what it meets; "" for the role of the other operand.

        Returns:
            The dimensions, sorted.
        """
        roles = self.both[at].role, other or self.both[1 - at].role
        return scale_axes(ndim, self.rules, roles, summed, self.both[at].own)


def contraction_params(
    params: Mapping[str, object], how: In8Bits, run: str, out: str
) -> jax.core.ParamDict:
    """The parameters of a contraction in 8 bits.

    Args:
        params: of the `dot_general` that it stands for.
        how: it runs.
        run: low dtype of what cannot run in 8 bits: a tangent, or what the recipe leaves high.
        out: dtype of the result, `run` or "float32".

    Returns:
        The parameters.
    """
    own = {"dimension_numbers": params["dimension_numbers"], "precision": None}
    kept = tuple(sorted({**own, "out_sharding": params["out_sharding"]}.items()))
    return {"of": lax.dot_general_p, "params": kept, "how": how, "run": run, "out": out}


def _bind(
    lhs: "jax.Array | Quantised",
    rhs: "jax.Array | Quantised",
    params: Mapping[str, object],
    how: In8Bits,
    run: str,
    out: str,
) -> jax.Array:
    values = [x.values if isinstance(x, Quantised) else x for x in (lhs, rhs)]
    scales = [x.scale for x in (lhs, rhs) if isinstance(x, Quantised)]
    operands = compat.varying_alike(*values, *scales)
    made: jax.Array = fp8_contraction_p.bind(*operands, **contraction_params(params, how, run, out))
    return made


def _operands(flat: Sequence[Any]) -> list[Any]:
    """The two operands, each with its scale if it is in 8 bits."""
    scales = iter(flat[2:])
    return [
        Quantised(x, next(scales)) if not ad.is_undefined_primal(x) and is_quantised(x) else x
        for x in flat[:2]
    ]


def _abstract(
    *avals: ShapedArray, of: core.Primitive, params: Params, how: In8Bits, run: str, out: str
) -> ShapedArray:
    low = [programs.low(aval, run) for aval in avals[:2]]
    made: ShapedArray
    made, _ = of.abstract_eval(*low, **dict(params), preferred_element_type=np.dtype(out))
    return made


def _product(
    *flat: jax.Array, of: core.Primitive, params: Params, how: In8Bits, run: str, out: str
) -> jax.Array:
    """The product of quantised operands, and of those that are quantised here."""
    operands, own = _operands(flat), dict(params)
    (lc, rc), (lb, rb) = own["dimension_numbers"]
    pairs = list(zip(operands, (lc, rc), strict=True))
    if any(isinstance(x, Quantised) and _differs(x.scale, summed) for x, summed in pairs):
        # Forward mode meets an operand that was quantised for the backward product, which sums
        # over other dimensions: its scales differ along those of this one.
        wide = [dequantised(*x, run) if isinstance(x, Quantised) else x for x in operands]
        return contract(of, *wide, params=own, run=run, out=out)
    lhs, rhs = (
        x
        if isinstance(x, Quantised)
        else quantised(x, how.rules, part.role, how.axes(at, x.ndim, pairs[at][1]))
        for at, (x, part) in enumerate(zip(operands, how.both, strict=True))
    )
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


def _differs(scale: jax.Array, dims: Sequence[int]) -> bool:
    return any(scale.shape[d] != 1 for d in dims)


def _over_result(
    scale: jax.Array, summed: Sequence[int], batch: Sequence[int], before: int, after: int
) -> jax.Array:
    """The scales of an operand in the dimensions of the result, to be multiplied by it.

    Args:
        scale: of length 1 along what is summed over.
        summed: dimensions of the operand.
        batch: likewise, in the order of the result.
        before: how many dimensions of the other operand come before its own.
        after: how many come after them.
    """
    if all(size == 1 for size in scale.shape):
        return lax.reshape(scale, ())  # which XLA can make part of a gemm
    free = [d for d in range(scale.ndim) if d not in (*summed, *batch)]
    turned = lax.transpose(scale, (*batch, *free, *summed))
    kept = lax.squeeze(turned, range(len(batch) + len(free), scale.ndim))
    places = [*range(len(batch), len(batch) + before)]
    first = len(batch) + before + len(free)
    return lax.expand_dims(kept, [*places, *range(first, first + after)])


# Derivatives


def _jvp(
    primals: Sequence[jax.Array],
    tangents: Sequence[object],
    of: core.Primitive,
    params: Params,
    how: In8Bits,
    run: str,
    out: str,
) -> tuple[jax.Array, object]:
    if any(type(t) is not ad.Zero for x, t in zip(primals, tangents, strict=True)
           if is_quantised(x)):  # fmt: skip
        raise NotImplementedError(TWICE)
    operands, own = _operands(primals), dict(params)
    saved = list(operands)
    for at, x in enumerate(operands):
        if type(tangents[1 - at]) is not ad.Zero and not isinstance(x, Quantised):
            saved[at], serves = _saved(x, at, own, how, run)
            operands[at] = saved[at] if serves else x
    made = _bind(operands[0], operands[1], own, how, run, out)
    parts = []
    for at, moved in enumerate(tangents[:2]):
        if type(moved) is ad.Zero:
            continue
        pair = [moved, saved[1]] if at == 0 else [saved[0], moved]
        if how.rules.weight_gradient_high and how.both[at].role == WEIGHT:
            parts.append(contract(of, *pair, params=own, run=run, out=out))
        else:
            parts.append(_bind(*pair, own, how, run, out))
    if not parts:
        return made, ad.instantiate_zeros(ad.Zero(jax.typeof(made)))
    return made, parts[0] if len(parts) == 1 else ad.add_jaxvals(*parts)


def _saved(
    x: jax.Array, at: int, params: Mapping[str, Any], how: In8Bits, run: str
) -> "tuple[jax.Array | Quantised, bool]":
    """An operand as it is saved for the product with the gradient; if it serves this one, too."""
    part, moving = how.both[at], how.both[1 - at]
    if part.given:
        return x, False
    x = differentiated_p.bind(x)
    if how.rules.weight_gradient_high and moving.role == WEIGHT:
        return lax.convert_element_type(x, run), False
    contracted, batch = params["dimension_numbers"]
    free = [d for d in range(x.ndim) if d not in (*contracted[at], *batch[at])]
    axes = how.axes(at, x.ndim, free, how.role_of_result)
    serves = axes == how.axes(at, x.ndim, contracted[at])
    return quantised(x, how.rules, part.role, axes), serves


def _transpose(
    ct: object, *flat: Any, of: core.Primitive, params: Params, how: In8Bits, run: str, out: str
) -> list[object]:
    moving = 0 if ad.is_undefined_primal(flat[0]) else 1
    aval = flat[moving].aval
    grads: list[object] = [None] * len(flat)
    if type(ct) is ad.Zero:
        grads[moving] = ad.Zero(aval)
        return grads
    other, part = _operands(flat)[1 - moving], how.both[1 - moving]
    of_ct = Operand(how.role_of_result, own=_own_of_result(params, flat, how))
    wide = other.values if isinstance(other, Quantised) else other
    avals = [programs.low(aval, run), *map(programs.low_type(run), (ct, wide))]
    program = programs.transposed(of, params, run, moving, *avals)

    def product(_: core.Primitive, *values: jax.Array, params: Mapping[str, object]) -> jax.Array:
        (lhs, left), (rhs, right) = ((x, of_ct) if x is ct else (other, part) for x in values)
        own = In8Bits(how.recipe, left, right)
        return _bind(lhs, rhs, params, own, run, aval.dtype.name)

    grads[moving] = programs.with_products(program, (ct, wide), product, aval.dtype.name)
    return grads


def _own_of_result(params: Params, flat: Sequence[Any], how: In8Bits) -> tuple[int, ...]:
    """The dimensions of the result that vmap batches an operand by."""
    contracted, batch = dict(params)["dimension_numbers"]
    ndims = [(x.aval if ad.is_undefined_primal(x) else x).ndim for x in flat[:2]]
    own, first = set(), len(batch[0])
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
    scales = iter(zip(flat[2:], dims[2:], strict=True))
    operands: list[Any] = []
    parts, places = [], []
    for x, at, part in zip(flat, dims[:2], how.both, strict=False):
        if is_quantised(x):
            x, at = _batched_alike((x, at), next(scales))
        parts.append(part if at is None else part._replace(own=_with_batch(part.own, at)))
        places.append(at)
        operands.append(x)
    how = In8Bits(how.recipe, *parts)
    wide = [x.values if isinstance(x, Quantised) else x for x in operands]
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
mlir.register_lowering(fp8_contraction_p, mlir.lower_fun(_product, multiple_results=False))
