"""The contraction: low operands, a float32 accumulator, and derivative rules that keep both.

One primitive stands for `dot_general`, `conv_general_dilated` and `ragged_dot_general`. It casts
its operands to the low dtype, adds the products up in float32 and returns the dtype asked for.
It is linear in each operand, and each of its transposes is a contraction again: low operands,
float32 accumulator, rounded once to the dtype of the operand it is the gradient of. So an operand
that goes in as float32, a parameter, gets a gradient that was never rounded; but for convolutions
on GPUs, see `contraction_forms`.

Its transposes and batched forms are those of JAX's own primitive, with every contraction in them
replaced; see `contraction_programs`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.core as core
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import ad, batching, mlir

from polymp.backends.jax import compat
from polymp.backends.jax.autocast import contraction_programs as programs
from polymp.backends.jax.autocast.contraction_forms import Params, form_p
from polymp.backends.jax.compat.programs import ClosedProgram

contraction_p: core.Primitive = core.Primitive("polymp_contraction")


def contract(
    of: core.Primitive,
    lhs: jax.Array,
    rhs: jax.Array,
    *rest: jax.Array,
    params: Mapping[str, object],
    run: str,
    out: str,
) -> jax.Array:
    """`of(lhs, rhs)` on low operands, added up in float32."""
    operands = compat.varying_alike(lhs, rhs, *rest)
    result: jax.Array = contraction_p.bind(*operands, **contraction_params(of, params, run, out))
    return result


def contraction_params(
    of: core.Primitive, params: Mapping[str, object], run: str, out: str
) -> jax.core.ParamDict:
    """The parameters of a contraction that stands for `of` with its own."""
    kept = tuple(sorted((k, v) for k, v in params.items() if k != "preferred_element_type"))
    return {"of": of, "params": kept, "run": run, "out": out}


def _lower(
    ctx: mlir.LoweringRuleContext, *operands: "mlir.ir.Value[Any]", **params: object
) -> "Sequence[mlir.ir.Value[Any]]":
    """Lower a contraction; what it makes of its operands is what earlier contractions made of them.

    A parameter is cast in the forward pass and again in the backward pass. XLA would merge the two
    casts, but only after it has divided the program among devices, and by then it has gathered each
    of them by itself. Here they are one from the start, with what follows them as far as it is the
    same too. Nothing is kept for that between the passes: in a scan, a residual would be a low copy
    of the parameters of all layers.
    """
    before = compat.readers(operands)
    outs: Sequence[mlir.ir.Value[Any]] = _lower_form(ctx, *operands, **params)
    for op in compat.readers(operands):
        if op not in before:
            compat.merge_repeated(op)
    return outs


def _casts(jaxpr: ClosedProgram) -> bool:
    """True if a contraction in a program, or in a function jitted in it, casts an operand.

    The forward and the backward pass of a jitted function are two functions: to have their casts
    merged, both are lowered into their caller.
    """
    for eqn in compat.opened(jaxpr)[0].eqns:
        if eqn.primitive is contraction_p:
            if any(v.aval.dtype != eqn.params["run"] for v in eqn.invars[:2]):
                return True
        elif eqn.primitive.name == "jit" and _casts(eqn.params["jaxpr"]):
            return True
    return False


def _abstract(
    *avals: ShapedArray, of: core.Primitive, params: Params, run: str, out: str
) -> ShapedArray:
    lhs, rhs, *rest = avals
    low = [aval.update(dtype=np.dtype(run), weak_type=False) for aval in (lhs, rhs)]
    made: ShapedArray
    made, _ = of.abstract_eval(*low, *rest, **dict(params), preferred_element_type=np.dtype(out))
    return made


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[object], **params: object
) -> tuple[jax.Array, object]:
    lhs, rhs, *rest = primals
    dl, dr = tangents[:2]
    bind = partial(contraction_p.bind, **params)
    out = bind(lhs, rhs, *rest)
    parts = []
    if type(dl) is not ad.Zero:
        parts.append(bind(dl, rhs, *rest))
    if type(dr) is not ad.Zero:
        parts.append(bind(lhs, dr, *rest))
    return out, programs.tangent(out, parts)


def _transpose(
    ct: object, *operands: Any, of: core.Primitive, params: Params, run: str, out: str
) -> list[object]:
    moving = 0 if ad.is_undefined_primal(operands[0]) else 1
    aval = operands[moving].aval
    nones: list[object] = [None] * len(operands)
    if type(ct) is ad.Zero:
        nones[moving] = ad.Zero(aval)
        return nones
    rest = [x for i, x in enumerate(operands) if i != moving]
    avals = [programs.low(aval, run), *map(programs.low_type(run), (ct, *rest))]
    jaxpr = programs.transposed(of, params, run, moving, *avals)
    nones[moving] = _with_contractions(jaxpr, (ct, *rest), run, aval.dtype.name)
    return nones


def _batch(
    operands: Sequence[jax.Array],
    dims: Sequence[object],
    of: core.Primitive,
    params: Params,
    run: str,
    out: str,
) -> tuple[jax.Array, int]:
    avals = map(programs.low_type(run), operands)
    jaxpr = programs.batched(of, params, run, tuple(dims), *avals)
    return _with_contractions(jaxpr, operands, run, out), 0


def _with_contractions(closed: ClosedProgram, args: Sequence[Any], run: str, out: str) -> jax.Array:
    """The result of a program of one dtype, with each contraction in it replaced by ours."""
    product = partial(contract, run=run, out=out)
    return programs.with_products(closed, args, product, out)


def _stands_for(
    eqn: core.JaxprEqn,
) -> tuple[core.Primitive, Sequence[ShapedArray], Mapping[str, object]]:
    avals = [programs.low(x.aval, eqn.params["run"]) for x in eqn.invars]
    return eqn.params["of"], avals, dict(eqn.params["params"])


contraction_p.def_impl(programs.eager(contraction_p, ("of", "params", "run", "out")))
contraction_p.def_abstract_eval(_abstract)
form_p.def_abstract_eval(_abstract)
ad.primitive_jvps[contraction_p] = _jvp
ad.primitive_transposes[contraction_p] = _transpose
batching.primitive_batchers[contraction_p] = _batch
compat.remat_rules[contraction_p] = programs.remat_rule(_stands_for)
_lower_form = mlir.lower_fun(form_p.bind, multiple_results=False)
# JAX would keep the program of the first contraction, and copy it for equal ones.
mlir.register_lowering(contraction_p, _lower, cacheable=False)
compat.lower_in_place(_casts)
