"""The contraction under the transformations of jax.experimental that have rules of their own.

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


def register_rules() -> None:
    """Enter the contraction into the tables of the transformations that are loaded by now."""
    for name, rule in _RULES.items():
        table = compat.rules_of(name)
        if table is not None:
            table.setdefault(contraction_p, rule)


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


def _checked(error: object, enabled: object, *values: object, **params: object) -> object:
    """A NaN that a product made is reported as one of jax's own products."""
    return compat.nan_checked(contraction_p, error, enabled, *values, **params)


def _cost(
    context: object, *values: object, of: core.Primitive, params: Params, **_: object
) -> object:
    """Count the cost of jax's own product, at the types that go in and come out."""
    table = compat.rules_of("roofline")
    assert table is not None, "it asks"
    return table[of](context, *values, **dict(params))


_RULES: Mapping[str, Callable[..., object]] = {
    "jet": _jet,
    "sparsify": _sparse,
    "checkify": _checked,
    "roofline": _cost,
}
