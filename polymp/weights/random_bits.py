"""Random bits by an integer hash of (seed, step, parameter, index).

The bits of an element do not depend on the device, on the framework, or on how the array is cut in
pieces, and no state has to be saved besides the step. Everything is int32 arithmetic that wraps
around. A key of two words is made of (seed, step, parameter); the words go into the hash at two
places, so that two keys give two permutations and not one that is shifted.

Source: the hash is `lowbias32` of Chris Wellons' "hash-prospector" (public domain), without its
last line, which changes none of the upper 16 bits.
"""

from typing import Any

_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32  # as int32
_STARTS = (0x243F6A88, 0x13198A2E)  # words of pi, one for each chain


def key(seed: int, step: Any, parameter: int) -> tuple[Any, Any]:
    """Return the two words of a key."""
    words = (_int32(seed), _int32(seed >> 32), _int32(parameter), _int32(step))
    one, two = _STARTS
    for word in words:
        one, two = _mixed(one ^ word), _mixed(two ^ word)
    return one, two


def random16(key: tuple[Any, Any], index: Any) -> Any:
    """Return 16 random bits for each element."""
    one, two = key
    x = index ^ one
    x = _int32((x ^ _shifted(x, 16)) * _FIRST) ^ two
    x = _int32((x ^ _shifted(x, 15)) * _SECOND)
    return _shifted(x, 16)


def _mixed(x: Any) -> Any:
    """Return a permutation of the int32 numbers: the whole hash."""
    x = _int32((x ^ _shifted(x, 16)) * _FIRST)
    x = _int32((x ^ _shifted(x, 15)) * _SECOND)
    return x ^ _shifted(x, 16)


def _shifted(x: Any, by: int) -> Any:
    """Shift to the right and fill with zeros."""
    return (x >> by) & ((1 << (32 - by)) - 1)


def _int32(x: Any) -> Any:
    """Wrap a Python number around, as int32 arrays do by themselves."""
    return ((x + 2**31) & 0xFFFFFFFF) - 2**31 if isinstance(x, int) else x
