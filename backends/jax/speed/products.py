"""The matrix products and convolutions of a JAX program, as they run low.

    function, arguments -> traced under a bfloat16 autocast -> products, and what is none of them

A product is known by the contraction that stands for it in the program; `product_bench` can run it
again, in any dtype. The gradient of a function has the products of its backward pass.
"""

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import jax
import jax.extend.core as core

from polymp.backends.jax import compat
from polymp.backends.jax.autocast.api import autocast
from polymp.backends.jax.autocast.contraction_forms import Params
from polymp.backends.jax.compat.programs import Atom, Equation
from polymp.backends.jax.diagnostics.flops import flops
from polymp.backends.jax.diagnostics.sites import equations
from polymp.backends.jax.diagnostics.traced_call import traced
from polymp.backends.jax.modules import nnx
from polymp.speed.advice import BFLOAT16, FLOAT32, Found, Product

_CONTRACTION = "polymp_contraction"
_OPS = {"dot_general": "matmul", "conv_general_dilated": "conv"}


class Kernel(NamedTuple):
    """How a product runs.

    Attributes:
        of: the primitive that the contraction stands for.
        params: of it.
        shapes: of the two operands.
        casts: for each operand, whether it comes in float32.
        weights: for each operand, whether it is a parameter of the program.
        wide: True if the result is float32.
    """

    of: core.Primitive
    params: Params
    shapes: tuple[tuple[int, ...], ...]
    casts: tuple[bool, ...]
    weights: tuple[bool, ...]
    wide: bool


def products_of(fn: Callable[..., object], args: tuple[object, ...]) -> Found:
    """The products of a call of a function, which is traced under a bfloat16 autocast, not run."""
    fn, args = nnx.owned(fn, args)
    closed = traced(autocast(fn, dtype=BFLOAT16), args, {}).closed
    first = 0 if nnx.among(args) else len(jax.tree.leaves(args[:1]))
    parameters = set(compat.binders(closed)[1][:first])
    counted: dict[Product, int] = {}
    left_out: dict[str, int] = {}
    for site in equations(closed):
        eqn = site.eqn
        if eqn.primitive.name == _CONTRACTION and eqn.params["of"].name in _OPS:
            product = _product(eqn, site.scope.direction, parameters)
            counted[product] = counted.get(product, 0) + site.times
        elif work := flops(eqn) * site.times:
            own = eqn.primitive.name
            name = eqn.params["of"].name if own == _CONTRACTION else f"{own}, not lowered"
            left_out[name] = left_out.get(name, 0) + work
    return Found([p._replace(times=times) for p, times in counted.items()], left_out)


def _product(eqn: Equation, direction: str, parameters: set[Atom]) -> Product:
    of, params = eqn.params["of"], eqn.params["params"]
    operands, (made,) = eqn.invars[:2], eqn.outvars
    shapes = tuple(tuple(map(int, v.aval.shape)) for v in operands)
    casts = tuple(v.aval.dtype.name == FLOAT32 for v in operands)
    weights = tuple(not hasattr(v, "val") and v in parameters for v in operands)
    sizes = [prod(shape) for shape in shapes]
    result = prod(made.aval.shape)
    kernel = Kernel(of, params, shapes, casts, weights, eqn.params["out"] == FLOAT32)
    return Product(
        *_sizes(of.name, dict(params), shapes, result),
        flops(eqn),
        sum(sizes) + result,
        sum(size for size, cast in zip(sizes, casts, strict=True) if cast),
        sum(s for s, *both in zip(sizes, casts, weights, strict=True) if all(both)),
        direction,
        call=kernel,
    )


def _sizes(
    name: str, params: jax.core.ParamDict, shapes: tuple[tuple[int, ...], ...], result: int
) -> tuple[str, int, int, int, int]:
    """Op, batch, m, k and n."""
    left, right = shapes
    if name == "dot_general":
        (lc, _), (lb, _) = params["dimension_numbers"]
        batch, k = prod(left[d] for d in lb), prod(left[d] for d in lc)
        return _OPS[name], batch, prod(left) // (batch * k), k, prod(right) // (batch * k)
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    out = right[numbers.rhs_spec[0]]
    return _OPS[name], groups, result // out, prod(right) // out, out // groups
