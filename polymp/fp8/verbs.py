"""`Verbs`: the functions of a framework that quantisation calls."""

from collections.abc import Callable
from typing import Any, NamedTuple

from polymp.fp8.recipes import Axis

Verb = Callable[[Any], Any]


class Verbs(NamedTuple):
    """A framework's functions of arrays.

    Besides these, quantisation uses `*`, `/` and `<=` of float32 arrays, and never divides a number
    by an array except 1.

    Attributes:
        amax: (float array, axis, axes or None) to the largest magnitude, float32: [] for None, else
            with length 1 at the axes. NaN if there is a NaN.
        float32: a float array to float32.
        where: (bool, array or number, array or number) to one of the two, element by element; the
            result is float32, also of two numbers.
        clip: (float32, lowest, highest) to the numbers between the two; NaN stays NaN.
        cast: (float32, name of an 8-bit format) to that dtype, to nearest, ties to even.
        isfinite: a float32 array to bool.
        power_of_two: positive float32 to the largest power of two that is not larger, by its bits.
    """

    amax: Callable[[Any, Axis], Any]
    float32: Verb
    where: Callable[[Any, Any, Any], Any]
    clip: Callable[[Any, float, float], Any]
    cast: Callable[[Any, str], Any]
    isfinite: Verb
    power_of_two: Verb
