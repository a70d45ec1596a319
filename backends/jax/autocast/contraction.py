"""The contraction: low operands, a float32 accumulator, and derivative rules that keep both.

One primitive stands for `dot_general`, `conv_general_dilated` and `ragged_dot_general`. It casts
its operands to the low dtype, adds the products up in float32 and returns the dtype asked for.
It is linear in each operand, and each of its transposes is a contraction again: low operands,
float32 accumulator, rounded once to the dtype of the operand it is the gradient of. So an operand
that goes in as float32, a parameter, gets a gradient that was never rounded; but for convolutions
on GPUs, see `convolutions_low`.

Its transposes and batched forms are those of JAX's own primitive, with every contraction in them
replaced.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from math import inf, prod
from typing import Any, NamedTuple, TypeVar

import jax
import jax.extend.core as core
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Literal
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

from polymp.backends import processor
from polymp.backends.jax import compat
from polymp.backends.jax.autocast.known_functions import CONTRACTIONS
from polymp.backends.jax.compat import ClosedProgram, Equation
from polymp.backends.jax.jaxprs import interpreted

T = TypeVar("T")

contraction_p: core.Primitive = core.Primitive("polymp_contraction")


class Contraction(NamedTuple):
    """A contraction as its equation holds it: JAX's primitive, and the dtypes it runs in."""

    of: core.Primitive
    items: tuple[tuple[str, Any], ...]  # the parameters of that primitive, by name, sorted
    run: str  # the low dtype of the operands
    out: str  # the dtype of the result

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of JAX's primitive, but for the dtype of its result."""
        return dict(self.items)

    def plain(self, *operands: jax.Array, dtype: str) -> jax.Array:
        """JAX's primitive on operands as they are, with a result in a dtype."""
        out = np.dtype(dtype)
        made: jax.Array = self.of.bind(*operands, **self.params, preferred_element_type=out)
        return made


def spec_of(of: core.Primitive, params: Mapping[str, object], run: str, out: str) -> Contraction:
    """The contraction that stands for a primitive with some parameters."""
    kept = sorted((k, v) for k, v in params.items() if k != "preferred_element_type")
    return Contraction(of, tuple(kept), run, out)


def contract(spec: Contraction, *operands: jax.Array) -> jax.Array:
    """The primitive, which casts its operands to the low dtype and adds up in float32."""
    result: jax.Array = contraction_p.bind(*compat.varying_alike(*operands), spec=spec)
    return result


def _lower(
    ctx: mlir.LoweringRuleContext, *operands: "mlir.ir.Value[Any]", **params: object
) -> "Sequence[mlir.ir.Value[Any]]":
    """Lower a contraction; what it makes of operands is what earlier ones have made of them."""
    # A parameter is cast in the forward pass and again in the backward pass. XLA would merge the
    # two casts only after it has divided the program among devices, and would gather each alone.
    before = compat.readers(operands)
    outs: Sequence[mlir.ir.Value[Any]] = _lower_form(ctx, *operands, **params)
    for op in compat.readers(operands):
        if op not in before:
            compat.merge_repeated(op)
    return outs


def abstract(*avals: ShapedArray, spec: Contraction, **_: object) -> ShapedArray:
    """The type of a contraction's result."""
    own = [low(aval, spec.run) for aval in own_operands(avals, spec.of)]
    out = np.dtype(spec.out)
    made: ShapedArray
    made, _ = spec.of.abstract_eval(*own, **spec.params, preferred_element_type=out)
    return made


def own_operands(operands: Sequence[T], of: core.Primitive) -> Sequence[T]:
    """Those of the primitive itself: a product in 8 bits has scales behind them."""
    return operands[:2] if of is lax.dot_general_p else operands


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[object], spec: Contraction
) -> tuple[jax.Array, object]:
    bind = partial(contraction_p.bind, spec=spec)
    out = bind(*primals)
    moved = [(at, t) for at, t in enumerate(tangents[:2]) if type(t) is not ad.Zero]
    return out, tangent(out, [bind(*primals[:at], t, *primals[at + 1 :]) for at, t in moved])


def transpose(
    ct: object,
    *operands: Any,
    spec: Contraction,
    product: Callable[..., jax.Array] = contract,
) -> list[object]:
    """The gradient of the operand that moves, and None for the others; see `with_products`."""
    moving = 0 if ad.is_undefined_primal(operands[0]) else 1
    aval = operands[moving].aval
    grads: list[object] = [None] * len(operands)
    if type(ct) is ad.Zero:
        grads[moving] = ad.Zero(aval)
        return grads
    rest = [x for i, x in enumerate(operands) if i != moving]
    jaxpr = transposed(spec, moving, *(low(x, spec.run) for x in (aval, ct, *rest)))
    own = spec._replace(out=aval.dtype.name)
    grads[moving] = with_products(jaxpr, (ct, *rest), own, product)
    return grads


def _batch(
    operands: Sequence[jax.Array], dims: Sequence[object], spec: Contraction
) -> tuple[jax.Array, int]:
    jaxpr = batched(spec, tuple(dims), *(low(x, spec.run) for x in operands))
    return with_products(jaxpr, operands, spec), 0


compat.run_eagerly(contraction_p)
contraction_p.def_abstract_eval(abstract)
ad.primitive_jvps[contraction_p] = _jvp
ad.primitive_transposes[contraction_p] = transpose
batching.primitive_batchers[contraction_p] = _batch

# A contraction is lowered as this primitive, which is the same in the platform's form.
form_p: core.Primitive = core.Primitive("polymp_contraction_form")
form_p.def_abstract_eval(abstract)


def remat_rule(
    saveable: Callable[..., Any],
    unknown: Sequence[bool],
    kept: Sequence[bool],
    eqn: core.JaxprEqn,
) -> tuple[Any, ...]:
    """Ask a rematerialisation policy about the primitive that an equation stands for."""
    # Returns the forward and the backward equation, whether the result is unknown and whether the
    # backward pass has it, and the variables to save.
    missing = [
        x for x, has in zip(eqn.invars, kept, strict=True) if not has and not isinstance(x, Literal)
    ]
    if any(unknown):
        return None, eqn, [True], [True], missing
    spec: Contraction = eqn.params["spec"]
    operands = [low(x.aval, spec.run) for x in own_operands(eqn.invars, spec.of)]
    params = {**spec.params, "preferred_element_type": np.dtype(spec.out)}
    case = compat.remat_case(saveable(spec.of, *operands, **params))
    if case == "save":
        return eqn, None, [False], [False], []
    if case == "recompute":
        return eqn, eqn, [False], [True], missing
    there, back = case
    (out,) = eqn.outvars

    def offloaded(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        made = eqn.primitive.bind(*operands, **eqn.params)
        return made, jax.device_put(made, there)

    forward = jax.make_jaxpr(jax.jit(offloaded))(*(x.aval for x in eqn.invars)).eqns[0]
    saved = forward.outvars[1]
    backward = jax.make_jaxpr(lambda x: jax.device_put(x, back))(saved.aval).eqns[0]
    forward = forward.replace(invars=eqn.invars, outvars=[out, saved])
    return forward, backward.replace(invars=[saved], outvars=[out]), [False], [True], [saved]


compat.remat_rules[contraction_p] = remat_rule
_lower_form = mlir.lower_fun(form_p.bind, multiple_results=False)
# Cached, the program of the first contraction would be copied for equal ones.
mlir.register_lowering(contraction_p, _lower, cacheable=False)


# Forms of one product: each binds JAX's own primitive as XLA runs it fast on some platform. All
# compute the same: low operands, a sum in float32 and one rounding. But `convolutions_low` rounds
# the result of a convolution to the low dtype also where float32 is asked for.


def result_as_asked(
    *operands: jax.Array, spec: Contraction, read: str = "", accumulator: str = ""
) -> jax.Array:
    """Low operands, and the product's own result in the dtype asked for."""
    # Or operands that are cast once more before, or a result in another dtype that is cast after.
    lhs, rhs, *rest = operands
    low = (lax.convert_element_type(x, spec.run) for x in (lhs, rhs))
    both = (lax.convert_element_type(x, read or spec.run) for x in low)
    made = spec.plain(*both, *rest, dtype=accumulator or spec.out)
    return lax.convert_element_type(made, spec.out)


def convolutions_low(*operands: jax.Array, spec: Contraction) -> jax.Array:
    """As asked, but the result of a convolution is low, and cast afterwards."""
    low_result = spec.run if spec.of.name == "conv_general_dilated" else ""
    return result_as_asked(*operands, spec=spec, accumulator=low_result)


def widened(*operands: jax.Array, spec: Contraction) -> jax.Array:
    """Low operands, widened again for a float32 product: products of low values are exact in it."""
    return result_as_asked(*operands, spec=spec, read="float32", accumulator="float32")


def multiplied(lhs: jax.Array, rhs: jax.Array, spec: Contraction) -> jax.Array:
    """bfloat16 values, all products of them, and their sums: a loop that XLA fuses with others."""
    # A library that XLA on CPU calls for sums leaves out a cast there and back.
    (lc, rc), (lb, rb) = spec.params["dimension_numbers"]
    lf, rf = (
        [d for d in range(x.ndim) if d not in (*contracted, *batch)]
        for x, contracted, batch in ((lhs, lc, lb), (rhs, rc, rb))
    )
    lhs, rhs = (lax.reduce_precision(x.astype("float32"), 8, 7) for x in (lhs, rhs))
    rows, columns, summed = len(lb) + len(lf), len(rf), len(lc)
    lhs = lax.expand_dims(lax.transpose(lhs, (*lb, *lf, *lc)), range(rows, rows + columns))
    rhs = lax.expand_dims(lax.transpose(rhs, (*rb, *rf, *rc)), range(len(lb), rows))
    made = (lhs * rhs).sum(tuple(range(rows + columns, rows + columns + summed)))
    return lax.convert_element_type(made, spec.out)


def row_by_row(*operands: jax.Array, spec: Contraction) -> jax.Array:
    """Low operands laid out for XLA's fast kernel on CPU, which adds up in float32; see FORMS."""
    # The kernel takes a lhs of two rows or more that is contracted on its last dimensions, and both
    # operands row by row in memory. A unit dimension after a transpose makes one lie so; the rhs of
    # few rows is not copied for it. The barriers keep XLA from folding the transpose into the
    # product: it would then run a slower kernel, or have none and raise.
    if spec.run != "bfloat16" or spec.of.name != "dot_general":
        # XLA's CPU kernels for these take float32.
        return widened(*operands, spec=spec)
    own, (lhs, rhs) = spec.params, operands
    numbers, sharding = own["dimension_numbers"], own["out_sharding"]
    (lc, rc), (lb, rb) = numbers
    lf = [d for d in range(lhs.ndim) if d not in (*lc, *lb)]
    _, rows, columns, _ = sizes_of(lhs, rhs, numbers)
    asked = sharding is not None and AxisType.Explicit in sharding.mesh.axis_types
    few = (rows <= _FEW or columns <= _THIN) and not (lb or asked)
    if few and columns <= _THIN and columns < rows:
        turned = {**own, "dimension_numbers": ((rc, lc), (rb, lb))}
        made = row_by_row(rhs, lhs, spec=spec._replace(items=tuple(turned.items())))
        rf = made.ndim - len(lf)
        return lax.transpose(made, (*range(rf, made.ndim), *range(rf)))
    lhs, rhs = (lax.convert_element_type(x, spec.run) for x in operands)
    lhs = lax.transpose(lhs, (*lb, *lf, *lc))
    single = few and rows == 1
    if single:  # it gets a row of zeros beside it
        lhs = lax.reshape(lhs, (1, *lhs.shape[len(lf) :]))
        lhs = lax.pad(lhs, np.zeros((), lhs.dtype), [(0, 1, 0), *[(0, 0, 0)] * len(lc)])
    at = len(lb)  # where the unit dimensions come out, first that of the lhs
    lhs = lax.expand_dims(lhs, (at,))
    after = lhs.ndim - len(lc)
    if few:
        lhs, units = lax.optimization_barrier(lhs), [at]
    else:
        rhs, units = lax.expand_dims(rhs, (0,)), [at, after]
        lhs, rhs = map(lax.optimization_barrier, (lhs, rhs))
        rc, rb = (tuple(d + 1 for d in dims) for dims in (rc, rb))
    if sharding is not None and not few:
        parts = [*sharding.spec, *[None] * (lhs.ndim + rhs.ndim)]
        parts = [*parts[:at], None, *parts[at : after - 1], None, *parts[after - 1 :]]
        parts = parts[: after + rhs.ndim - len(rc) - len(rb)]
        sharding = sharding.update(spec=sharding.spec.update(partitions=tuple(parts)))
    made = lax.dot_general(
        lhs,
        rhs,
        ((tuple(range(after, lhs.ndim)), rc), (tuple(range(at)), rb)),
        precision=own["precision"],
        preferred_element_type=np.dtype("float32"),
        out_sharding=None if few else sharding,
    )
    if single:
        made = lax.reshape(made[:, :1], (*[1] * (1 + len(lf)), *made.shape[2:]))
    made = lax.optimization_barrier(made) if spec.out == "float32" else made
    return lax.convert_element_type(lax.squeeze(made, units), spec.out)


# Up to so many rows, to copy the other operand costs as much as to multiply by it. Measured at 1 to
# 128 rows and weights of 1024 x 4096.
_FEW = 128

# A right operand of so few columns becomes the left one, if that has more rows.
_THIN = 8


class Sizes(NamedTuple):
    """How large a product is; infinitely large where a size is a symbol, as in an export."""

    batch: float
    rows: float
    columns: float
    summed: float


def sizes_of(lhs: Any, rhs: Any, dimension_numbers: lax.DotDimensionNumbers) -> Sizes:
    """How large a product of two arrays, or of their types, is."""
    (lc, rc), (lb, rb) = dimension_numbers
    rows = (d for d in range(len(lhs.shape)) if d not in (*lc, *lb))
    columns = (d for d in range(len(rhs.shape)) if d not in (*rc, *rb))
    parts = ((lhs, lb), (lhs, rows), (rhs, columns), (lhs, lc))
    sizes = (prod(x.shape[d] for d in dims) for x, dims in parts)
    return Sizes(*(size if isinstance(size, int) else inf for size in sizes))


def widened_or_few(*operands: jax.Array, spec: Contraction) -> jax.Array:
    """Widened, but where few rows meet a large operand, which is read low; see FORMS."""
    lhs, rhs, *_ = operands
    if spec.of.name == "dot_general" and rhs.size >= _LARGE:
        if sizes_of(lhs, rhs, spec.params["dimension_numbers"]).rows <= _FEW_OF_IT:
            return row_by_row(*operands, spec=spec)
    return widened(*operands, spec=spec)


# To read so many values takes longer than to multiply so many rows by them. Measured at 1 to 256
# rows and weights of 512 x 2048, and in decoding with a cache.
_LARGE = 2**16
_FEW_OF_IT = 32


def of_this_processor(*operands: jax.Array, spec: Contraction) -> jax.Array:
    """The form for the CPU that this process runs on."""
    lhs, rhs, *_ = operands
    fast = not _MULTIPLY_BFLOAT16.isdisjoint(processor()[1] or ())
    if spec.of.name == "dot_general":
        sizes = sizes_of(lhs, rhs, spec.params["dimension_numbers"])
        vector = min(sizes.rows, sizes.columns) <= 1  # which XLA multiplies in a loop by itself
        if spec.run == "bfloat16" and prod(sizes) <= _TINY and not vector:
            return multiplied(lhs, rhs, spec)
        fast = fast and prod(sizes) > _SMALL
    return (row_by_row if fast else widened_or_few)(*operands, spec=spec)


# To multiply so few numbers takes less time than to call a kernel, and of few more, laying out the
# operands takes longer than the faster kernel saves. Measured at 1 to 64 rows and weights of 8 x 8
# to 128 x 128, and on the programs of benchmarks/jax_corpus.py.
_TINY, _SMALL = 2**10, 2**15

# The CPU features for which XLA has kernels that multiply bfloat16.
_MULTIPLY_BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16"})

# How the contraction is lowered, platform by platform; elsewhere, the result is as asked.
#
# cpu         measured by benchmarks/contraction.py. With instructions for bfloat16, a float32
#             result is faster than a low one or float32 operands, in all but small products; laid
#             out row by row it stays so where an operand is transposed. Without them, XLA has no
#             kernel for low operands that is faster than widening them, but where it reads a large
#             one for a few rows. Exported programs and those for several devices: row by row.
# cuda        measured on an H100, by `make gpu`: a dot adds up in float32 whatever the dtype of
#             its result. A convolution of low operands with a float32 result is run in float32, up
#             to three times as slow: so it rounds its result, a parameter's gradient too.
#             Source: XLA, xla/service/gpu/gpu_float_support.cc, SupportsMixedPrecisions.
# rocm, tpu   by reasoning, not measured.
FORMS: Mapping[str, Callable[..., object]] = {
    "cpu": of_this_processor,
    "cuda": convolutions_low,
    "rocm": convolutions_low,
    "tpu": result_as_asked,
}


def lower_as(form: Callable[..., object], platform: str | None = None) -> None:
    """Lower the contraction in a form from here on, on a platform or where none is named."""
    # Programs that are compiled stay as they are. For FORMS, and for measuring the forms.
    elsewhere = row_by_row if form is of_this_processor else form

    def rule(
        ctx: mlir.LoweringRuleContext, *operands: "mlir.ir.Value[Any]", **how: object
    ) -> "Sequence[mlir.ir.Value[Any]]":
        lowered = mlir.lower_fun(form if compat.is_for_one_device(ctx) else elsewhere, False)
        made: Sequence[mlir.ir.Value[Any]] = lowered(ctx, *operands, **how)
        return made

    mlir.register_lowering(form_p, rule, platform=platform)


lower_as(result_as_asked)

for _platform, _form in FORMS.items():
    lower_as(_form, _platform)


def low(x: Any, run: str) -> ShapedArray:
    """A type, or that of an array, in a low dtype if it is one of floats."""
    aval: ShapedArray = x if isinstance(x, ShapedArray) else jax.typeof(x)
    if not jax.numpy.issubdtype(aval.dtype, np.floating):
        return aval
    made: ShapedArray = aval.update(dtype=np.dtype(run), weak_type=False)
    return made


@lru_cache(maxsize=1024)
def transposed(
    spec: Contraction, moving: int, aval: ShapedArray, *avals: ShapedArray
) -> ClosedProgram:
    """The transpose of a plain primitive: a program of the cotangent and the other operands."""

    def program(ct: jax.Array, *rest: jax.Array) -> jax.Array:
        def linear(x: jax.Array) -> jax.Array:
            return spec.plain(*rest[:moving], x, *rest[moving:], dtype=spec.run)

        out: jax.Array
        (out,) = jax.linear_transpose(linear, aval)(ct)
        return out

    return jax.make_jaxpr(program)(*avals)


@lru_cache(maxsize=1024)
def batched(spec: Contraction, dims: tuple[object, ...], *avals: ShapedArray) -> ClosedProgram:
    """The plain primitive over a batch, which comes out in front."""
    return jax.make_jaxpr(jax.vmap(partial(spec.plain, dtype=spec.run), dims))(*avals)


def with_products(
    closed: ClosedProgram,
    args: Sequence[Any],
    spec: Contraction,
    product: Callable[..., jax.Array] = contract,
) -> jax.Array:
    """The result of a program of one dtype, with each product in it replaced by one of ours."""
    # `product` makes it of the contraction that it is, in the dtypes of `spec`, and its operands.
    eqns = compat.opened(closed)[0].eqns
    turned = set()  # results of products that were made the other way round

    def equation(at: int, eqn: Equation, values: list[jax.Array]) -> Sequence[jax.Array]:
        name = eqn.primitive.name
        if name in CONTRACTIONS:
            params: Mapping[str, object] = eqn.params
            if swapped := _swapped(eqn, eqns[at + 1] if at + 1 < len(eqns) else None):
                params, values = {**params, **swapped}, values[::-1]
                turned.add(eqn.outvars[0])
            return [product(spec_of(eqn.primitive, params, spec.run, spec.out), *values)]
        if name == "jit":
            return [with_products(eqn.params["jaxpr"], values, spec, product)]
        if name == "convert_element_type" or (name == "transpose" and eqn.invars[0] in turned):
            return values
        return compat.put(eqn.primitive, values, eqn.params)

    (result,) = interpreted(closed, args, equation)
    return lax.convert_element_type(result, spec.out)


def _swapped(eqn: Equation, after: Equation | None) -> dict[str, object] | None:
    """The parameters of a product whose operands change places, if only a transpose follows it."""
    # XLA on CPU would find that out late, and then has no kernel for what it made.
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


def tangent(made: jax.Array, parts: Sequence[jax.Array]) -> object:
    """The tangent of a product: the sum of those by its operands."""
    if not parts:
        return ad.instantiate_zeros(ad.Zero(jax.typeof(made)))
    return parts[0] if len(parts) == 1 else ad.add_jaxvals(*parts)
