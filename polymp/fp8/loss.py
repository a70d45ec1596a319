"""The loss of a product in 8 bits: how far its operands and its result would be off.

    rounded = float32(quantised) * (1 / scale)               both by `quantise`
    zero    = share of values that are zero when rounded and are not before
    error   = norm(rounded - array) / norm(array)

Of an operand, `error` is taken for each row that the product sums over, and is the mean of all rows
that are not zero: one large row does not hide what the others lose. Of the result, it is that of
the whole array; both products are computed in float32, so that nothing but the quantisation of the
operands is in it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from polymp import dtypes
from polymp.fp8 import quantise
from polymp.fp8.quantise import Verbs
from polymp.fp8.recipes import (
    ACTIVATION,
    GRADIENT,
    INPUT_GRADIENT,
    RESULT,
    WEIGHT,
    WEIGHT_GRADIENT,
    Axis,
    Recipe,
)

# The roles of the operands of each product.
ROLES = {
    RESULT: (ACTIVATION, WEIGHT),
    INPUT_GRADIENT: (GRADIENT, WEIGHT),
    WEIGHT_GRADIENT: (GRADIENT, ACTIVATION),
}


class Operand(NamedTuple):
    """An operand of a product that would run in 8 bits."""

    array: Any  # of a float dtype of 16 or 32 bits
    role: str  # "activation", "weight" or "gradient"
    scaled: Axis  # the axis or axes along which a scale is computed; None for one scale
    summed: tuple[int, ...]  # the axes that the product sums over


def product_loss(
    verbs: Verbs,
    recipe: Recipe,
    operands: Sequence[Operand],
    product: Callable[[Any, Any], Any],
) -> tuple[Any, ...]:
    """Measure the loss of a product and of its operands."""
    exact, rounded, numbers = [], [], list[Any]()
    for operand in operands:
        array = verbs.float32(operand.array)
        scale = quantise.scale_of(verbs, operand.array, recipe, operand.role, operand.scaled)
        low = quantise.quantised(verbs, operand.array, scale, recipe.format_of(operand.role))
        back = verbs.float32(low) * quantise.inverse(scale)
        gone = verbs.where((back == 0) & (array != 0), 1.0, 0.0)
        numbers += [gone.sum() / math.prod(array.shape), _error(verbs, back, array, operand.summed)]
        exact.append(array)
        rounded.append(back)
    made = product(*exact)
    everything = tuple(range(len(made.shape)))
    return *numbers, _error(verbs, product(*rounded), made, everything)


def _error(verbs: Verbs, rounded: Any, array: Any, axes: tuple[int, ...]) -> Any:
    """The norm of the difference over the norm, along axes; the mean of those that are not zero."""
    largest = verbs.amax(array, axes)
    there = largest != 0
    unit = verbs.where(there, largest, 1.0)  # so that no square overflows
    off, norm = (((x / unit) ** 2).sum(axes, keepdims=True) for x in (rounded - array, array))
    each = verbs.where(there, off / verbs.where(there, norm, 1.0), 0.0) ** 0.5
    count = verbs.where(there, 1.0, 0.0).sum()
    return each.sum() / verbs.where(count > 0, count, 1.0)


def rounding_error(format: str) -> float:
    """Return the error of a row of numbers that its format holds as normal numbers.

    A number from 2**e to 2**(e + 1) is rounded to a multiple of s = 2**(e - m), with m digits after
    the leading one: by an error that is even between -s/2 and s/2, whose root mean square is
    s / sqrt(12). Numbers spread evenly there have the root mean square 2**e * sqrt(7 / 3).
    """
    return float(2.0 ** -dtypes.get(format).mantissa / math.sqrt(28))


def product_rounding_error(recipe: Recipe, product: str) -> float:
    """Return the error of a product whose operands have no other error than `rounding_error`."""
    return math.hypot(*(rounding_error(recipe.format_of(role)) for role in ROLES[product]))
