"""Quantisation: the scale of an array, and the array in 8 bits.

    scale     = float32(largest of the format / max(amax, 1e-12))     amax: the largest magnitude
    quantised = to 8 bits(clip(float32(array) * scale))
    array     = about float32(quantised) * (1 / scale)

An operand is quantised from the dtype that it comes in, float32, bfloat16 or float16, with no
rounding in between. So both frameworks get the same operands; their sums have other orders.

An amax that is Inf or NaN makes the scale NaN, and with it all that is quantised by it. Casts to 8
bits would hide it: torch's make 448 of Inf, and a scale of 0 makes 0 of the finite numbers beside
it. As it is, an Inf or NaN reaches the result, the gradients and the check of a loss scaler.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from polymp import dtypes
from polymp.fp8.recipes import Axis, Recipe

# An amax below this counts as this, so that an array of zeros has a finite scale.
SMALLEST_AMAX = 1e-12


Verb = Callable[[Any], Any]


class Verbs(NamedTuple):
    """A framework's functions of arrays.

    Besides these, quantisation uses `*`, `/` and `<=` of float32 arrays, and never divides a number
    by an array except 1.
    """

    # (float array, axis, axes or None) to the largest magnitude, float32: [] for None, else with
    # length 1 at the axes. NaN if there is a NaN.
    amax: Callable[[Any, Axis], Any]
    float32: Verb  # a float array to float32
    # (bool, array or number, array or number) to one of the two, element by element; the result is
    # float32, also of two numbers.
    where: Callable[[Any, Any, Any], Any]
    # (float32, lowest, highest) to the numbers between the two; NaN stays NaN.
    clip: Callable[[Any, float, float], Any]
    # (float32, name of an 8-bit format) to that dtype, to nearest, ties to even.
    cast: Callable[[Any, str], Any]
    isfinite: Verb  # a float32 array to bool
    # Positive float32 to the largest power of two that is not larger, by its bits.
    power_of_two: Verb


def scale_of(verbs: Verbs, array: Any, recipe: Recipe, role: str, axis: Axis) -> Any:
    """Return the scale that an operand is multiplied by before it is cast to 8 bits.

    Source:
        torchao 0.18, `torchao/float8/float8_utils.py`, `amax_to_scale`, which divides in float64:
        the same number, except below `SMALLEST_AMAX`, where it is a constant here.
    """
    largest = dtypes.get(recipe.format_of(role)).max
    amax = verbs.amax(array, axis)
    tiny = amax <= SMALLEST_AMAX
    # Both are arrays: torch divides a number by an array as number * (1 / array), in two roundings.
    dividend = verbs.where(tiny, largest / SMALLEST_AMAX, largest)
    scale = dividend / verbs.where(tiny, 1.0, amax)
    if recipe.power_of_two:
        scale = verbs.power_of_two(scale)
    return verbs.where(verbs.isfinite(amax), scale, float("nan"))


def quantised(verbs: Verbs, array: Any, scale: Any, format: str) -> Any:
    """Return an array in 8 bits: multiplied by a scale in float32, clipped, and cast."""
    largest = dtypes.get(format).max
    return verbs.cast(verbs.clip(verbs.float32(array) * scale, -largest, largest), format)


def inverse(scale: Any) -> Any:
    """Return what a product of quantised operands is multiplied by for one of them; float32."""
    return 1.0 / scale
