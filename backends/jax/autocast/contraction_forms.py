"""How the contraction is lowered on each platform: forms of one product that XLA runs fast there.

A form takes the operands and parameters of a contraction, and binds JAX's own primitive. Low
operands, a sum in float32 and one rounding are what all of them compute.
"""

from collections.abc import Callable, Mapping
from math import inf, prod
from types import MappingProxyType
from typing import Any

import jax
import jax.extend.core as core
import numpy as np
from jax import lax
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding

# What a contraction is lowered as: itself, in the platform's form.
form_p: core.Primitive = core.Primitive("polymp_contraction_form")

# The parameters of the primitive that a contraction stands for, by name, sorted.
Params = tuple[tuple[str, Any], ...]


def result_as_asked(
    *operands: jax.Array, of: core.Primitive, params: Params, run: str, out: str
) -> jax.Array:
    """Low operands, and the product's own result in the dtype asked for."""
    return _plain(*operands, of=of, params=params, run=run, out=out, accumulator=out)


def convolutions_low(
    *operands: jax.Array, of: core.Primitive, params: Params, run: str, out: str
) -> jax.Array:
    """As asked, but the result of a convolution is low, and cast afterwards."""
    accumulator = run if of.name == "conv_general_dilated" else out
    return _plain(*operands, of=of, params=params, run=run, out=out, accumulator=accumulator)


def float32_result(
    *operands: jax.Array, of: core.Primitive, params: Params, run: str, out: str
) -> jax.Array:
    """Low operands and a float32 result, rounded afterwards."""
    return _plain(*operands, of=of, params=params, run=run, out=out, accumulator="float32")


def _plain(
    *operands: jax.Array, of: core.Primitive, params: Params, run: str, out: str, accumulator: str
) -> jax.Array:
    lhs, rhs, *rest = operands
    made = of.bind(
        lax.convert_element_type(lhs, run),
        lax.convert_element_type(rhs, run),
        *rest,
        **dict(params),
        preferred_element_type=np.dtype(accumulator),
    )
    return lax.convert_element_type(made, out)


def row_by_row(
    *operands: jax.Array, of: core.Primitive, params: Params, run: str, out: str
) -> jax.Array:
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


def _few_rows(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    dimension_numbers: lax.DotDimensionNumbers,
    out_sharding: NamedSharding | None,
    **_: object,
) -> bool:
    """True for a matrix by few vectors, as in decoding."""
    batch = dimension_numbers[1][0]
    rows, columns = free_sizes(lhs, rhs, dimension_numbers)
    asked = out_sharding is not None and AxisType.Explicit in out_sharding.mesh.axis_types
    return not batch and not asked and (rows <= _FEW or columns <= _THIN)


def free_sizes(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: lax.DotDimensionNumbers
) -> tuple[float, float]:
    """How many rows and columns; infinitely many where a size is a symbol, as in an export."""
    sizes = []
    for operand, contracted in zip((lhs, rhs), dimension_numbers[0], strict=True):
        size = prod(n for d, n in enumerate(operand.shape) if d not in contracted)
        sizes.append(size if isinstance(size, int) else inf)
    rows, columns = sizes
    return rows, columns


def _of_few_rows(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    dimension_numbers: lax.DotDimensionNumbers,
    precision: lax.PrecisionLike,
    out_sharding: NamedSharding | None,
    run: str,
    out: str,
) -> jax.Array:
    """The product of few rows, without the copy that the general form makes of the other operand.

    XLA on CPU has the fast kernel for low operands from two rows on, so a single row gets a row of
    zeros beside it.
    The few rows are laid out as in the general form. The other operand is left to XLA: a transpose
    of it becomes part of the product, for which there is a kernel either way.
    """
    (lc, rc), _ = dimension_numbers
    rows, columns = free_sizes(lhs, rhs, dimension_numbers)
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
# cuda        measured on an H100, by `make gpu`: a dot adds up in float32 whatever the dtype of
#             its result; with a low one it takes 0.8 to 1.1 of the time, least where the result is
#             large. A convolution of low operands with a float32 result is run in float32, up to
#             three times as slow: so it rounds its result, a parameter's gradient too.
#             Source: XLA, xla/service/gpu/gpu_float_support.cc, SupportsMixedPrecisions.
# rocm        by reasoning, not measured: as cuda.
# tpu         by reasoning, not measured: the matrix unit adds up in float32, as above.
FORMS: Mapping[str, Callable[..., object]] = MappingProxyType(
    {
        "cpu": row_by_row,
        "cuda": convolutions_low,
        "rocm": convolutions_low,
        "tpu": result_as_asked,
    }
)


def lower_as(form: Callable[..., object], platform: str | None = None) -> None:
    """Lower the contraction in a form from here on, on a platform or where none is named.

    Programs that are compiled stay as they are. For FORMS, and for measuring the forms.
    """
    rule = mlir.lower_fun(form, multiple_results=False)
    mlir.register_lowering(form_p, rule, platform=platform)


lower_as(result_as_asked)
for _platform, _form in FORMS.items():
    lower_as(_form, _platform)
