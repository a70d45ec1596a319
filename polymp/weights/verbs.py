"""`Verbs`: the functions of a framework that the rules of low weights call."""

from collections.abc import Callable
from typing import Any, NamedTuple

Verb = Callable[[Any], Any]


class Verbs(NamedTuple):
    """A framework's functions of arrays.

    Besides these, the rules use operators of integer arrays, which wrap around as two's complement
    does: `+ - * & | ^ << >>` (the last one keeps the sign), comparisons, and `&` of bool arrays.

    Attributes:
        bits: float32 to int32 with the same bits.
        float32: int32 to float32 with the same bits.
        bits16: bfloat16 or float16 to int16 with the same bits.
        bfloat16: int16 to bfloat16 with the same bits.
        to_int32: int16 to int32 with the same value.
        to_int16: int32 to int16, the low 16 bits.
        wide: bfloat16 to float32 with the same value, by its bits under a compiler, which
            removes a cast to bfloat16 and back to float32 (XLA by default, torch's inductor in
            `pointless_convert`), and with it a rounding that is wanted.
        narrow: (float32, "bfloat16" or "float16") to that dtype, to nearest, ties to even.
        from_half: float16 to float32 with the same value.
        where: (bool, array or number, array or number) to one of the two, element by element.
    """

    bits: Verb
    float32: Verb
    bits16: Verb
    bfloat16: Verb
    to_int32: Verb
    to_int16: Verb
    wide: Verb
    narrow: Callable[[Any, str], Any]
    from_half: Verb
    where: Callable[[Any, Any, Any], Any]
