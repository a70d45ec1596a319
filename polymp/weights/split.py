"""A float32 number as a bfloat16 number and a 16-bit remainder, without any loss.

    high      = (bits + 0x8000) >> 16        the nearest bfloat16; ties go away from zero
    remainder = bits - (high << 16)          from -0x8000 to 0x7fff: the lower 16 bits, as int16
    bits      = (high << 16) + remainder     modulo 2**32

`high` differs from the usual cast at ties alone, which the cast rounds to even. Infinity stays, and
finite numbers above the largest bfloat16 by half its last place or more become Inf in `high`, as in
the cast; the remainder brings them back.

For NaN the formula is not enough: 0x7fffffff, the NaN that NVIDIA GPUs return, would get the high
part -0.0. So the upper 7 bits of the mantissa of a NaN are inverted first if bit 15 is set, and
after the rebuild once more. There are as many pairs as float32 numbers, so some NaN must get a
`high` that is none: signaling NaN, which no arithmetic returns, with these 7 bits zero. Those from
0x7f808000 to 0x7f80ffff get zero, and those from 0x7f800001 to 0x7f807fff get Inf.

Source: the formula is that of AdamW_BF16-style "split" optimizers (Zamirai et al., "Revisiting
BFloat16 Training", arXiv:2010.06192, keep the same 16 bits); the treatment of NaN is our own.
"""

from typing import Any

from polymp.weights.verbs import Verbs

# A NaN whose high part could round up beyond the exponent: the exponent and bit 15 are all ones.
_CARRIES, _UPPER = 0x7F808000, 0x007F0000


def split(verbs: Verbs, full: Any) -> tuple[Any, Any]:
    """Return the bfloat16 part and the remainder of float32 numbers."""
    bits = _nan_moved(verbs, verbs.bits(full))
    high = (bits + 0x8000) >> 16
    return verbs.bfloat16(verbs.to_int16(high)), verbs.to_int16(bits)


def join(verbs: Verbs, high: Any, remainder: Any) -> Any:
    """Return the float32 numbers that `split` has taken apart, to the last bit."""
    bits = verbs.bits(verbs.wide(high)) + verbs.to_int32(remainder)
    return verbs.float32(_nan_moved(verbs, bits))


def is_torn(verbs: Verbs, high: Any, remainder: Any) -> Any:
    """Return where the pair is NaN and its high part is none, which no arithmetic makes.

    Signaling NaN aside, `split` never returns such a pair: the high part was written by hand.
    """
    pair = verbs.bits(join(verbs, high, remainder)) & 0x7FFFFFFF
    alone = verbs.to_int32(verbs.bits16(high)) & 0x7FFF
    return (pair > 0x7F800000) & (alone < 0x7F81)


def _nan_moved(verbs: Verbs, bits: Any) -> Any:
    return verbs.where((bits & _CARRIES) == _CARRIES, bits ^ _UPPER, bits)
