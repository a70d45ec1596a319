"""The contraction: low operands, a float32 accumulator, and derivative rules that keep both.

One primitive stands for `dot_general`, `conv_general_dilated` and `ragged_dot_general`. It casts
its operands to the low format, adds the products up in float32 and returns the format asked for.
It is linear in each operand, and each of its transposes is a contraction again: low operands,
float32 accumulator, rounded once to the format of the operand it is the gradient of. So an operand
that goes in as float32, a parameter, gets a gradient that was never rounded; but for convolutions
on GPUs, see FORMS.

The transposes and batched forms of JAX's own primitive are traced at one dtype, and every
contraction in them is replaced; no rule of JAX's is repeated here.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from math import inf, prod
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

from polymp.backends.jax import compat
from polymp.backends.jax.autocast.op_facts import CONTRACTIONS

contraction_p = Primitive("polymp_contraction")
# What a contraction is lowered as: itself, in the platform's form.
_form_p = Primitive("polymp_contraction_form")


def contract(
    of: Any, lhs: Any, rhs: Any, *rest: Any, params: Mapping[str, Any], run: str, out: str
) -> Any:
    """`of(lhs, rhs)` on low operands, added up in float32.

    Args:
        of: the primitive, bilinear in its first two operands.
        lhs: float32 or low.
        rhs: float32 or low.
        rest: operands that are not differentiated, such as the group sizes of a ragged product.
        params: of the primitive; `preferred_element_type` among them is ours to choose.
        run: low format of the operands.
        out: format of the result, `run` or "float32".
    """
    operands = compat.varying_alike(lhs, rhs, *rest)
    return contraction_p.bind(*operands, **contraction_params(of, params, run, out))


def contraction_params(of: Any, params: Mapping[str, Any], run: str, out: str) -> dict[str, Any]:
    """The parameters of a contraction that stands for `of` with its own."""
    kept = tuple(sorted((k, v) for k, v in params.items() if k != "preferred_element_type"))
    return {"of": of, "params": kept, "run": run, "out": out}


def result_as_asked(*operands: Any, of: Any, params: Any, run: str, out: str) -> Any:
    """Low operands, and the product's own result in the format asked for."""
    return _plain(*operands, of=of, params=params, run=run, out=out, accumulator=out)


def convolutions_low(*operands: Any, of: Any, params: Any, run: str, out: str) -> Any:
    """As asked, but the result of a convolution is low, and cast afterwards."""
    accumulator = run if of.name == "conv_general_dilated" else out
    return _plain(*operands, of=of, params=params, run=run, out=out, accumulator=accumulator)


def float32_result(*operands: Any, of: Any, params: Any, run: str, out: str) -> Any:
    """Low operands and a float32 result, rounded afterwards."""
    return _plain(*operands, of=of, params=params, run=run, out=out, accumulator="float32")


def _plain(*operands: Any, of: Any, params: Any, run: str, out: str, accumulator: str) -> Any:
    lhs, rhs, *rest = operands
    made = of.bind(
        lax.convert_element_type(lhs, run),
        lax.convert_element_type(rhs, run),
        *rest,
        **dict(params),
        preferred_element_type=np.dtype(accumulator),
    )
    return lax.convert_element_type(made, out)


def row_by_row(*operands: Any, of: Any, params: Any, run: str, out: str) -> Any:
    """Low operands laid out for XLA's fast kernel on CPU, and a float32 result; see FORMS."""
    if run != "bfloat16" or of.name != "dot_general":
        # XLA's CPU kernels for these take float32; products of low values are exact in it.
        lhs, rhs, *rest = operands
        wide = [
            lax.convert_element_type(lax.convert_element_type(x, run), "float32")
            for x in (lhs, rhs)
        ]
        made = of.bind(*wide, *rest, **dict(params), preferred_element_type=np.dtype("float32"))
        return lax.convert_element_type(made, out)
    if _few_rows(*operands, **dict(params)):
        return _of_few_rows(*operands, **dict(params), run=run, out=out)
    # XLA on CPU has a fast kernel for low operands where the lhs is contracted on its last
    # dimensions and both lie row by row in memory. An operand that a transpose made lies otherwise,
    # and is computed in float32; a unit dimension, put in after the transpose, sets that right. The
    # barriers keep XLA from folding a transpose into the product afterwards: it would then run a
    # slower kernel, or have none and raise.
    lhs, rhs = (lax.convert_element_type(x, run) for x in operands)
    own = dict(params)
    (lc, rc), (lb, rb) = own["dimension_numbers"]
    lf = [d for d in range(lhs.ndim) if d not in (*lc, *lb)]
    at, after = len(lb), len(lb) + 1 + len(lf)  # where the unit dimensions come out
    lhs = lax.expand_dims(lax.transpose(lhs, (*lb, *lf, *lc)), (at,))
    rhs = lax.expand_dims(rhs, (0,))
    lhs, rhs = map(lax.optimization_barrier, (lhs, rhs))
    dims = (
        (tuple(range(after, lhs.ndim)), tuple(d + 1 for d in rc)),
        (tuple(range(at)), tuple(d + 1 for d in rb)),
    )
    sharding = own["out_sharding"]
    if sharding is not None:
        spec = [*sharding.spec, *[None] * (lhs.ndim + rhs.ndim)]
        spec = [*spec[:at], None, *spec[at : after - 1], None, *spec[after - 1 :]]
        spec = spec[: after + rhs.ndim - len(rc) - len(rb)]
        sharding = sharding.update(spec=sharding.spec.update(partitions=tuple(spec)))
    made = lax.dot_general(
        lhs,
        rhs,
        dims,
        precision=own["precision"],
        preferred_element_type=np.dtype("float32"),
        out_sharding=sharding,
    )
    made = lax.optimization_barrier(made) if out == "float32" else made
    return lax.convert_element_type(lax.squeeze(made, (at, after)), out)


# Up to so many rows, to copy the other operand costs as much as to multiply by it. Measured at 1 to
# 128 rows and weights of 1024 x 4096.
_FEW = 128
# A right operand of so few columns becomes the left one, if that has more rows.
_THIN = 8


def _few_rows(lhs: Any, rhs: Any, *, dimension_numbers: Any, out_sharding: Any, **_: Any) -> bool:
    """True for a matrix by few vectors, as in decoding."""
    _, (batch, _) = dimension_numbers
    rows, columns = _free_sizes(lhs, rhs, dimension_numbers)
    asked = out_sharding is not None and AxisType.Explicit in out_sharding.mesh.axis_types
    return not batch and not asked and (rows <= _FEW or columns <= _THIN)


def _free_sizes(lhs: Any, rhs: Any, dimension_numbers: Any) -> tuple[float, float]:
    """How many rows and columns; infinitely many where a size is a symbol, as in an export."""
    sizes = []
    for operand, contracted in zip((lhs, rhs), dimension_numbers[0], strict=True):
        size = prod(n for d, n in enumerate(operand.shape) if d not in contracted)
        sizes.append(size if isinstance(size, int) else inf)
    rows, columns = sizes
    return rows, columns


def _of_few_rows(
    lhs: Any,
    rhs: Any,
    *,
    dimension_numbers: Any,
    precision: Any,
    out_sharding: Any,
    run: str,
    out: str,
) -> Any:
    """The product where the copy that the general form makes of the other operand would show.

    XLA on CPU has the fast kernel for low operands from two rows on, so a single one gets company.
    The few rows are laid out as in the general form. The other operand is left to XLA: a transpose
    of it becomes part of the product, for which there is a kernel either way.
    """
    (lc, rc), _ = dimension_numbers
    rows, columns = _free_sizes(lhs, rhs, dimension_numbers)
    lf = [d for d in range(lhs.ndim) if d not in lc]
    if columns <= _THIN and columns < rows:
        turned = _of_few_rows(
            rhs,
            lhs,
            dimension_numbers=((rc, lc), ((), ())),
            precision=precision,
            out_sharding=None,
            run=run,
            out=out,
        )
        rf = turned.ndim - len(lf)
        return lax.transpose(turned, (*range(rf, turned.ndim), *range(rf)))
    few, other = (lax.convert_element_type(x, run) for x in (lhs, rhs))
    shape = [lhs.shape[d] for d in lf]
    few = lax.transpose(few, (*lf, *lc))
    if rows == 1:
        few = lax.reshape(few, (1, *few.shape[len(lf) :]))
        zero = np.zeros((), few.dtype)
        few = lax.pad(few, zero, [(0, 1, 0), *[(0, 0, 0)] * len(lc)])
    few = lax.optimization_barrier(lax.expand_dims(few, (0,)))
    made = lax.dot_general(
        few,
        other,
        ((tuple(range(few.ndim - len(lc), few.ndim)), rc), ((), ())),
        precision=precision,
        preferred_element_type=np.dtype("float32"),
    )
    if rows == 1:
        made = lax.reshape(made[:, :1], (1, *shape, *made.shape[2:]))
    made = lax.optimization_barrier(made) if out == "float32" else made
    return lax.convert_element_type(lax.squeeze(made, (0,)), out)


# How the contraction is lowered, platform by platform; elsewhere, the result is as asked.
#
# cpu         measured by benchmarks/contraction.py: in large products a float32 result is faster
#             than a low one or float32 operands, and nothing is rounded in between. Plain, it falls
#             back to float32 operands where one of them is transposed, as in some gradients; laid
#             out row by row it does not, and costs up to a third more where it would not have.
# cuda        measured on an H100, by `make gpu`: a dot adds up in float32 whatever the format of
#             its result; with a low one it takes 0.8 to 1.1 of the time, least where the result is
#             large. A convolution of low operands with a float32 result is run in float32, up to
#             three times as slow: so it rounds its result, a parameter's gradient too.
#             Source: XLA, xla/service/gpu/gpu_float_support.cc, SupportsMixedPrecisions.
# rocm        by reasoning, not measured: as cuda.
# tpu         by reasoning, not measured: the matrix unit adds up in float32, as above.
FORMS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "cpu": row_by_row,
        "cuda": convolutions_low,
        "rocm": convolutions_low,
        "tpu": result_as_asked,
    }
)


def lower_as(form: Callable[..., Any], platform: str | None = None) -> None:
    """Lower the contraction in a form from here on, on a platform or where none is named.

    Programs that are compiled stay as they are. For FORMS, and for measuring the forms.
    """
    rule = mlir.lower_fun(form, multiple_results=False)
    mlir.register_lowering(_form_p, rule, platform=platform)


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
    """Lower a contraction; what it makes of its operands is what earlier contractions made of them.

    A parameter is cast in the forward pass and again in the backward pass. XLA would merge the two
    casts, but only after it has divided the program among devices, and by then it has gathered each
    of them by itself. Here they are one from the start, with what follows them as far as it is the
    same too. Nothing is kept for that between the passes: in a scan, a residual would be a low copy
    of the parameters of all layers.
    """
    before = compat.readers(operands)
    outs = _lower_form(ctx, *operands, **params)
    for op in compat.readers(operands):
        if op not in before:
            compat.merge_repeated(op)
    return outs


def _casts(jaxpr: Any) -> bool:
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
def _run(*operands: Any, of: Any, params: Any, run: str, out: str) -> Any:
    return contraction_p.bind(*operands, of=of, params=params, run=run, out=out)


def _eagerly(*operands: Any, **params: Any) -> Any:
    with jax.disable_jit(False):  # as for jax's own primitives: one kernel, not what it is made of
        return _run(*operands, **params)


def _abstract(*avals: Any, of: Any, params: Any, run: str, out: str) -> Any:
    lhs, rhs, *rest = avals
    low = [aval.update(dtype=np.dtype(run), weak_type=False) for aval in (lhs, rhs)]
    made, _ = of.abstract_eval(*low, *rest, **dict(params), preferred_element_type=np.dtype(out))
    return made


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
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


def _transpose(ct: Any, *operands: Any, of: Any, params: Any, run: str, out: str) -> Any:
    moving = 0 if ad.is_undefined_primal(operands[0]) else 1
    aval = operands[moving].aval
    nones: list[Any] = [None] * len(operands)
    if type(ct) is ad.Zero:
        nones[moving] = ad.Zero(aval)
        return nones
    rest = [x for i, x in enumerate(operands) if i != moving]
    jaxpr = _transposed(of, params, run, moving, _low(aval, run), *map(_typeof(run), (ct, *rest)))
    nones[moving] = _mold(jaxpr, (ct, *rest), run, aval.dtype.name)
    return nones


def _batch(
    operands: Sequence[Any], dims: Sequence[Any], of: Any, params: Any, run: str, out: str
) -> Any:
    jaxpr = _batched(of, params, run, tuple(dims), *map(_typeof(run), operands))
    return _mold(jaxpr, operands, run, out), 0


def _remat(saveable: Any, unknown: Sequence[bool], kept: Sequence[bool], eqn: Any) -> Any:
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

    def offloaded(*operands: Any) -> Any:
        made = contraction_p.bind(*operands, **params)
        return made, jax.device_put(made, there)

    forward = jax.make_jaxpr(jax.jit(offloaded))(*(x.aval for x in eqn.invars)).eqns[0]
    saved = forward.outvars[1]
    backward = jax.make_jaxpr(lambda x: jax.device_put(x, back))(saved.aval).eqns[0]
    forward = forward.replace(invars=eqn.invars, outvars=[out, saved])
    return forward, backward.replace(invars=[saved], outvars=[out]), [False], [True], [saved]


def _low(aval: Any, run: str) -> Any:
    if not jax.numpy.issubdtype(aval.dtype, np.floating):
        return aval
    return aval.update(dtype=np.dtype(run), weak_type=False)


def _typeof(run: str) -> Callable[[Any], Any]:
    return lambda x: _low(jax.typeof(x), run)


@lru_cache(maxsize=1024)
def _transposed(of: Any, params: Any, run: str, moving: int, aval: Any, *avals: Any) -> Any:
    """The transpose of the plain primitive: a program of the cotangent and the other operands."""

    def program(ct: Any, *rest: Any) -> Any:
        def linear(x: Any) -> Any:
            operands = list(rest)
            operands.insert(moving, x)
            return of.bind(*operands, **dict(params), preferred_element_type=np.dtype(run))

        (out,) = jax.linear_transpose(linear, aval)(ct)
        return out

    return jax.make_jaxpr(program)(*avals)


@lru_cache(maxsize=1024)
def _batched(of: Any, params: Any, run: str, dims: Any, *avals: Any) -> Any:
    """The plain primitive over a batch, which comes out in front."""

    def program(*operands: Any) -> Any:
        return of.bind(*operands, **dict(params), preferred_element_type=np.dtype(run))

    return jax.make_jaxpr(jax.vmap(program, dims))(*avals)


def _mold(closed: Any, args: Sequence[Any], run: str, out: str) -> Any:
    """Evaluate a program of one dtype with each contraction in it replaced by ours."""
    jaxpr, consts = compat.opened(closed)
    constvars, invars = compat.binders(closed)
    env = dict(zip((*constvars, *invars), (*consts, *args), strict=True))
    turned = {}  # results of contractions that were made the other way round
    for at, eqn in enumerate(jaxpr.eqns):
        values = [a.val if isinstance(a, Literal) else env[a] for a in eqn.invars]
        name = eqn.primitive.name
        if name in CONTRACTIONS:
            after = jaxpr.eqns[at + 1] if at + 1 < len(jaxpr.eqns) else None
            params = eqn.params
            if swapped := _swapped(eqn, after):
                params, values = {**params, **swapped}, values[::-1]
                turned[eqn.outvars[0]] = True
            outs = [contract(eqn.primitive, *values, params=params, run=run, out=out)]
        elif name == "transpose" and eqn.invars[0] in turned:
            outs = values
        elif name == "jit":
            outs = [_mold(eqn.params["jaxpr"], values, run, out)]
        elif name == "convert_element_type":
            outs = values
        else:
            made = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
            outs = made if eqn.primitive.multiple_results else [made]
        env.update(zip(eqn.outvars, outs, strict=True))
    (result,) = jaxpr.outvars
    return lax.convert_element_type(env[result], out)


def _swapped(eqn: Any, after: Any) -> Any:
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
_form_p.def_abstract_eval(_abstract)
ad.primitive_jvps[contraction_p] = _jvp
ad.primitive_transposes[contraction_p] = _transpose
batching.primitive_batchers[contraction_p] = _batch
compat.remat_rules[contraction_p] = _remat
_lower_form = mlir.lower_fun(_form_p.bind, multiple_results=False)
# JAX would keep what the rule makes of the first contraction, and copy it for its likes.
mlir.register_lowering(contraction_p, _lower, cacheable=False)
compat.lower_in_place(_casts)
lower_as(result_as_asked)
for _platform, _form in FORMS.items():
    lower_as(_form, _platform)
