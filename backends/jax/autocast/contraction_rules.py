"""Contractions under the transformations of jax.experimental that have rules of their own.

`jet`, `sparsify`, `checkify` and `roofline` look a primitive up in a table. They are not imported
here: their tables get an entry once somebody has loaded them.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.extend.core as core

from polymp.backends.jax import compat
from polymp.backends.jax.autocast.contraction import contraction_p
from polymp.backends.jax.autocast.contraction_forms import Params, float32_result
from polymp.backends.jax.autocast.fp8_contraction import fp8_contraction_p
from polymp.backends.jax.autocast.fp8_operands import In8Bits, main, operands_of
from polymp.backends.jax.autocast.fp8_quantise import Quantised, dequantised, fp8_quantise_p


def register_rules() -> None:
    """Enter the contractions into the tables of the transformations that are loaded by now."""
    for name, rules in _RULES.items():
        table = compat.rules_of(name)
        if table is not None:
            for primitive, rule in rules.items():
                table.setdefault(primitive, rule)


def _jet(
    primals: Sequence[jax.Array], series: Sequence[Sequence[jax.Array]], **params: object
) -> tuple[jax.Array, list[jax.Array]]:
    """Taylor coefficients of a bilinear op: each a sum of products of those of the operands."""
    ls, rs = ([x, *terms] for x, terms in zip(primals[:2], series[:2], strict=True))
    rest = primals[2:]
    bind = partial(contraction_p.bind, **params)
    out, *terms = (
        reduce(operator.add, (bind(ls[i], rs[k - i], *rest) for i in range(k + 1)))
        for k in range(len(ls))
    )
    return out, terms


def _sparse(env: object, *values: object, **params: Any) -> object:
    """A product of sparse arrays: what the contraction is made of."""
    return compat.sparsified(partial(float32_result, **params), env, values)


def _sparse_in_8_bits(env: object, *values: object, how: In8Bits, **params: Any) -> object:
    """A product of sparse arrays that would be in 8 bits: as by rule `lower`."""

    def lower(*flat: jax.Array) -> jax.Array:
        wide = [
            dequantised(*x, params["run"]) if isinstance(x, Quantised) else main(x)
            for x in operands_of(flat, how)
        ]
        return float32_result(*wide, **params)

    return compat.sparsified(lower, env, values)


def _sparse_quantised(env: object, *values: object, **params: Any) -> object:
    """A sparse operand that is saved in 8 bits for the backward pass: a dense one."""
    return compat.densified(partial(fp8_quantise_p.bind, **params), env, values)


def _cost(
    context: object, *values: object, of: core.Primitive, params: Params, **_: object
) -> object:
    """Count the cost of jax's own product, at the types that go in and come out."""
    table = compat.rules_of("roofline")
    assert table is not None, "it asks"
    return table[of](context, *values, **dict(params))


_RULES: Mapping[str, Mapping[core.Primitive, Callable[..., object]]] = {
    "jet": {contraction_p: _jet},
    "sparsify": {
        contraction_p: _sparse,
        fp8_contraction_p: _sparse_in_8_bits,
        fp8_quantise_p: _sparse_quantised,
    },
    # A NaN that a product made is reported as one of jax's own products.
    "checkify": {p: partial(compat.nan_checked, p) for p in (contraction_p, fp8_contraction_p)},
    "roofline": {contraction_p: _cost},
}
