"""A bfloat16 weight with a bfloat16 compensation: what rounding the weight has cut off.

    full         = float32(low) + float32(compensation)
    low          = bfloat16(new)                                  to nearest, ties to even
    compensation = bfloat16(new - float32(low))                   none where low is Inf, NaN, or
                                                                  smaller than 2**-118

A compensation is at most half of the last place of `low`. If it is rounded up to just that half and
`low` is odd, `full` would be rounded to the other neighbour; then the compensation is the number
before it. So a pair that is read and stored again keeps its bits, as a skipped step has to. No
compensation is -0.0, which, unlike 0.0, added to -0.0 gives -0.0.

This is Kahan's sum of all updates, with each sum in float32: `new` is the weight plus what was cut
off before plus the update. The pair holds about 16 bits of the mantissa, and more where the second
half happens to start with zeros.

Source: Kahan, "Further remarks on reducing truncation errors", CACM 8 (1965); for weights in
bfloat16, Zamirai et al., "Revisiting BFloat16 Training", arXiv:2010.06192, algorithm 3.
"""

from typing import Any

from polymp.weights.verbs import Verbs

_INF = 0x7F80
_HALF = 8 << 7  # 2**8 in the exponent
NONE = -0x8000  # the bits of -0.0


def store(verbs: Verbs, full: Any) -> tuple[Any, Any]:
    """Return the weight and the compensation of float32 numbers; both bfloat16, of one shape."""
    low = verbs.narrow(full, "bfloat16")
    rounded = verbs.wide(low)
    rest = verbs.narrow(full - rounded, "bfloat16")
    half = (verbs.bits16(low) & _INF) - _HALF  # the bits of half of the last place of low
    bits = verbs.bits16(rest)
    size, most = bits & 0x7FFF, half - (verbs.bits16(low) & 1)
    bits = verbs.where(size > most, bits - 1, bits)  # toward zero
    return low, verbs.bfloat16(verbs.where((size > 0) & (size <= half), bits, NONE))


def load(verbs: Verbs, low: Any, compensation: Any) -> Any:
    """Return the float32 numbers that a weight and its compensation stand for."""
    return verbs.wide(low) + verbs.wide(compensation)
