"""A bfloat16 weight with a bfloat16 compensation: what rounding the weight has cut off.

    full         = float32(low) + float32(compensation)
    low          = bfloat16(new)                                  to nearest, ties to even
    compensation = bfloat16(new - float32(low))                   none where low is Inf or NaN

Where rounding the compensation up would bring `full` nearer to another bfloat16 number than `low`,
it is rounded toward zero. So a pair that is read and stored again keeps its bits, as a skipped step
has to. No compensation is -0.0, which, unlike 0.0, added to -0.0 gives -0.0.

This is Kahan's sum of all updates, with each sum in float32: `new` is the weight plus what was cut
off before plus the update. The pair holds about 16 bits of the mantissa, and more where the second
half happens to start with zeros.

Source: Kahan, "Further remarks on reducing truncation errors", CACM 8 (1965); for weights in
bfloat16, Zamirai et al., "Revisiting BFloat16 Training", arXiv:2010.06192, algorithm 3.
"""

from typing import Any

from polymp.weights.verbs import Verbs, wide

_INF = 0x7F800000
NONE = -0x8000  # the bits of -0.0


def store(verbs: Verbs, full: Any) -> tuple[Any, Any]:
    """Return the weight and the compensation of float32 numbers; both bfloat16, of one shape."""
    low = verbs.narrow(full, "bfloat16")
    rounded = wide(verbs, low)
    finite = (verbs.bits(rounded) & _INF) < _INF
    rest = verbs.narrow(full - rounded, "bfloat16")
    again = verbs.narrow(rounded + wide(verbs, rest), "bfloat16")
    bits = verbs.bits16(rest)
    stays = (verbs.bits16(again) == verbs.bits16(low)) | _is_zero(bits)
    bits = verbs.where(stays, bits, bits - 1)  # the next number toward zero
    return low, verbs.bfloat16(verbs.where(finite & ~_is_zero(bits), bits, NONE))


def load(verbs: Verbs, low: Any, compensation: Any) -> Any:
    """Return the float32 numbers that a weight and its compensation stand for."""
    return wide(verbs, low) + wide(verbs, compensation)


def _is_zero(bits: Any) -> Any:
    return (bits & 0x7FFF) == 0
