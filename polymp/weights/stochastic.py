"""float32 rounded to one of the two bfloat16 neighbours at random, so that the mean stays.

    fraction = bits & 0xffff           how far beyond the neighbour nearer to zero, in 2**16ths
    rounded = (bits >> 16) + (random < fraction)

Numbers that bfloat16 holds stay as they are. Infinity and NaN stay, and a finite number never
becomes Inf: between the largest bfloat16 and 2**128 it becomes the former.

Source: De Sa et al., "Understanding and Optimizing Asynchronous Low-Precision SGD", ISCA 2017;
Zamirai et al., arXiv:2010.06192. Given the same random bits, torchao's `_fp32_to_bf16_sr` gives the
same numbers up to the largest bfloat16.
"""

from typing import Any

from polymp.weights.verbs import Verbs

_LARGEST, _INF, _MAGNITUDE, _QUIET = 0x7F7F0000, 0x7F800000, 0x7FFFFFFF, 0x40


def rounded(verbs: Verbs, full: Any, random: Any) -> Any:
    """Return float32 numbers rounded to bfloat16 at random."""
    bits = verbs.bits(full)
    magnitude = bits & _MAGNITUDE
    up = (random < (bits & 0xFFFF)) & (magnitude < _LARGEST)
    high = bits >> 16
    high = verbs.where(magnitude > _INF, high | _QUIET, verbs.where(up, high + 1, high))
    return verbs.bfloat16(verbs.to_int16(high))
