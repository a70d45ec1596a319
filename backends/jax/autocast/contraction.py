"""The contraction: low operands, a float32 accumulator, and derivative rules that keep both.

One primitive stands for `dot_general`, `conv_general_dilated` and `ragged_dot_general`. It casts
its operands to the low dtype, adds the products up in float32 and returns the dtype asked for.
It is linear in each operand, and each of its transposes is a contraction again: low operands,
float32 accumulator, rounded once to the dtype of the operand it is the gradient of. So an operand
that goes in as float32, a parameter, gets a gradient that was never rounded; but for convolutions
on GPUs, see `contraction_forms`.

The transposes and batched forms of JAX's own primitive are traced at one dtype, and every
contraction in them is replaced; no rule of JAX's is repeated here.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.extend.core as core
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Literal
from jax.interpreters import ad, batching, mlir

from polymp.backends.jax import compat
from polymp.backends.jax.autocast.contraction_forms import Params, form_p
from polymp.backends.jax.autocast.op_facts import CONTRACTIONS
from polymp.backends.jax.compat.programs import ClosedProgram, Equation
from polymp.backends.jax.jaxprs import interpreted

contraction_p: core.Primitive = core.Primitive("polymp_contraction")

# What remat asks of a rule: the forward and the backward equation, whether the result is unknown
# and whether the backward pass has it, and the variables to save.
_Halves = tuple[
    core.JaxprEqn | None, core.JaxprEqn | None, Sequence[bool], Sequence[bool], list[core.Var]
]


def contract(
    of: core.Primitive,
    lhs: jax.Array,
    rhs: jax.Array,
    *rest: jax.Array,
    params: Mapping[str, object],
    run: str,
    out: str,
) -> jax.Array:
    """`of(lhs, rhs)` on low operands, added up in float32.

    Args:
        of: the primitive, bilinear in its first two operands.
        lhs: float32 or low.
        rhs: float32 or low.
        rest: operands that are not differentiated, such as the group sizes of a ragged product.
        params: of the primitive; `preferred_element_type` among them is ours to choose.
        run: low dtype of the operands.
        out: dtype of the result, `run` or "float32".

    Returns:
        The result, in dtype `out`.
    """
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


@partial(jax.jit, static_argnames=("of", "params", "run", "out"))
def _run(*operands: jax.Array, of: core.Primitive, params: Params, run: str, out: str) -> jax.Array:
    result: jax.Array = contraction_p.bind(*operands, of=of, params=params, run=run, out=out)
    return result


def _eagerly(*operands: jax.Array, **params: object) -> jax.Array:
    with jax.disable_jit(False):  # as for jax's own primitives: one kernel, not what it is made of
        result: jax.Array = _run(*operands, **params)
    return result


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
    if not parts:
        return out, ad.instantiate_zeros(ad.Zero(jax.typeof(out)))
    return out, parts[0] if len(parts) == 1 else ad.add_jaxvals(*parts)


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
    jaxpr = _transposed(of, params, run, moving, _low(aval, run), *map(_typeof(run), (ct, *rest)))
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
    jaxpr = _batched(of, params, run, tuple(dims), *map(_typeof(run), operands))
    return _with_contractions(jaxpr, operands, run, out), 0


def _remat(
    saveable: Callable[..., compat.RematAnswer],
    unknown: Sequence[bool],
    kept: Sequence[bool],
    eqn: core.JaxprEqn,
) -> _Halves:
    """Ask a rematerialisation policy about the primitive that the contraction stands for.

    Args:
        saveable: the policy.
        unknown: for each operand, whether it is known only in the backward pass.
        kept: for each operand, whether the backward pass has it.
        eqn: the contraction.

    Returns:
        What runs forward, what runs backward, whether the result is unknown and whether the
        backward pass has it, and what has to be saved.
    """
    missing = [
        x for x, has in zip(eqn.invars, kept, strict=True) if not has and not isinstance(x, Literal)
    ]
    if any(unknown):
        return None, eqn, [True], [True], missing
    params = eqn.params
    avals = [_low(x.aval, params["run"]) for x in eqn.invars]
    preferred = np.dtype(params["out"])
    asked = saveable(
        params["of"], *avals, **dict(params["params"]), preferred_element_type=preferred
    )
    case = compat.remat_case(asked)
    if case == "save":
        return eqn, None, [False], [False], []
    if case == "recompute":
        return eqn, eqn, [False], [True], missing
    there, back = case
    (out,) = eqn.outvars

    def offloaded(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        made = contraction_p.bind(*operands, **params)
        return made, jax.device_put(made, there)

    forward = jax.make_jaxpr(jax.jit(offloaded))(*(x.aval for x in eqn.invars)).eqns[0]
    saved = forward.outvars[1]
    backward = jax.make_jaxpr(lambda x: jax.device_put(x, back))(saved.aval).eqns[0]
    forward = forward.replace(invars=eqn.invars, outvars=[out, saved])
    return forward, backward.replace(invars=[saved], outvars=[out]), [False], [True], [saved]


def _low(aval: Any, run: str) -> ShapedArray:
    if not jax.numpy.issubdtype(aval.dtype, np.floating):
        return aval  # type: ignore[no-any-return]
    low: ShapedArray = aval.update(dtype=np.dtype(run), weak_type=False)
    return low


def _typeof(run: str) -> Callable[[object], ShapedArray]:
    return lambda x: _low(jax.typeof(x), run)


@lru_cache(maxsize=1024)
def _transposed(
    of: core.Primitive,
    params: Params,
    run: str,
    moving: int,
    aval: ShapedArray,
    *avals: ShapedArray,
) -> ClosedProgram:
    """The transpose of the plain primitive: a program of the cotangent and the other operands."""

    def program(ct: jax.Array, *rest: jax.Array) -> jax.Array:
        def linear(x: jax.Array) -> jax.Array:
            operands = list(rest)
            operands.insert(moving, x)
            result: jax.Array = of.bind(
                *operands, **dict(params), preferred_element_type=np.dtype(run)
            )
            return result

        out: jax.Array
        (out,) = jax.linear_transpose(linear, aval)(ct)
        return out

    return jax.make_jaxpr(program)(*avals)


@lru_cache(maxsize=1024)
def _batched(
    of: core.Primitive, params: Params, run: str, dims: tuple[object, ...], *avals: ShapedArray
) -> ClosedProgram:
    """The plain primitive over a batch, which comes out in front."""

    def program(*operands: jax.Array) -> jax.Array:
        result: jax.Array = of.bind(*operands, **dict(params), preferred_element_type=np.dtype(run))
        return result

    return jax.make_jaxpr(jax.vmap(program, dims))(*avals)


def _with_contractions(closed: ClosedProgram, args: Sequence[Any], run: str, out: str) -> jax.Array:
    """Evaluate a program of one dtype with each contraction in it replaced by ours."""
    eqns = compat.opened(closed)[0].eqns
    turned = set()  # results of contractions that were made the other way round

    def equation(at: int, eqn: Equation, values: list[jax.Array]) -> Sequence[jax.Array]:
        name = eqn.primitive.name
        if name in CONTRACTIONS:
            params = eqn.params
            if swapped := _swapped(eqn, eqns[at + 1] if at + 1 < len(eqns) else None):
                params, values = {**params, **swapped}, values[::-1]
                turned.add(eqn.outvars[0])
            return [contract(eqn.primitive, *values, params=params, run=run, out=out)]
        if name == "jit":
            return [_with_contractions(eqn.params["jaxpr"], values, run, out)]
        if name == "convert_element_type" or (name == "transpose" and eqn.invars[0] in turned):
            return values
        return compat.put(eqn.primitive, values, eqn.params)

    (result,) = interpreted(closed, args, equation)
    return lax.convert_element_type(result, out)


def _swapped(eqn: Equation, after: Equation | None) -> dict[str, object] | None:
    """The parameters of a product whose operands change places, if only a transpose follows it.

    The transpose of a product is the product of its operands the other way round. XLA on CPU would
    find that out late, and then has no kernel for what it made.
    """
    if eqn.primitive.name != "dot_general" or after is None:
        return None
    if after.primitive.name != "transpose" or after.invars[0] is not eqn.outvars[0]:
        return None
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    lhs, rhs = (v.aval.ndim for v in eqn.invars)
    batch = len(lb)
    of_lhs, of_rhs = lhs - batch - len(lc), rhs - batch - len(rc)
    turned = (*range(batch), *range(batch + of_lhs, batch + of_lhs + of_rhs))
    order = (*turned, *range(batch, batch + of_lhs))
    if after.params["permutation"] != order:
        return None
    sharding = eqn.params["out_sharding"]
    if sharding is not None:
        spec = [*sharding.spec, *[None] * len(order)]
        spec = sharding.spec.update(partitions=tuple(spec[d] for d in order))
        sharding = sharding.update(spec=spec)
    return {"dimension_numbers": ((rc, lc), (rb, lb)), "out_sharding": sharding}


contraction_p.def_impl(_eagerly)
contraction_p.def_abstract_eval(_abstract)
form_p.def_abstract_eval(_abstract)
ad.primitive_jvps[contraction_p] = _jvp
ad.primitive_transposes[contraction_p] = _transpose
batching.primitive_batchers[contraction_p] = _batch
compat.remat_rules[contraction_p] = _remat
_lower_form = mlir.lower_fun(form_p.bind, multiple_results=False)
# JAX would keep the program of the first contraction, and copy it for equal ones.
mlir.register_lowering(contraction_p, _lower, cacheable=False)
compat.lower_in_place(_casts)
