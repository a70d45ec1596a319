"""Weights kept in 16 bits: how one is stored, what stands beside it, and updates that are lost.

    mode         stored in bfloat16              beside it                  read back
    master       cast, to nearest                the float32 number         what is beside
    split        to nearest, ties from zero      the other 16 bits          both joined: exact
    stochastic   up or down at random            nothing                    the low number

An optimizer takes its step on what `load` returns, in float32, and `store` keeps the result.
Pure functions of arrays, given a record of the framework's verbs; nothing here knows a framework.
"""

import reprlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from polymp.code_origin import outside
from polymp.errors import LowWeightsWarning


class Mode(NamedTuple):
    """One way to keep weights low."""

    name: str  # as the user gives it
    beside: str  # dtype of what stands beside each weight; "" if nothing does


def mode(name: object) -> Mode:
    """Return the mode of a name."""
    found = MODES.get(name) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(repr(each) for each in MODES)
        raise ValueError(f"low_weights(): mode {reprlib.repr(name)} is not one of {known}.")
    return found


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (Mode("master", "float32"), Mode("split", "int16"), Mode("stochastic", ""))
}


Verb = Callable[[Any], Any]


class Verbs(NamedTuple):
    """A framework's functions of arrays.

    Besides these, the rules use operators of integer arrays, which wrap around as two's complement
    does: `+ - * & | ^ << >>` (the last one keeps the sign), comparisons, and `&` of bool arrays.
    """

    bits: Verb  # float32 to int32 with the same bits
    float32: Verb  # int32 to float32 with the same bits
    bits16: Verb  # bfloat16 to int16 with the same bits
    bfloat16: Verb  # int16 to bfloat16 with the same bits
    to_int32: Verb  # int16 to int32 with the same value
    to_int16: Verb  # int32 to int16, the low 16 bits
    # bfloat16 to float32 with the same value, by its bits under a compiler, which removes a cast to
    # bfloat16 and back to float32 (XLA by default, torch's inductor in `pointless_convert`), and
    # with it a rounding that is wanted.
    wide: Verb
    narrow: Verb  # float32 to bfloat16, to nearest, ties to even
    where: Callable[[Any, Any, Any], Any]  # of two arrays or numbers, element by element


def store(verbs: Verbs, mode: Mode, full: Any, random: Any = None) -> tuple[Any, Any]:
    """Return a float32 weight as it is kept; rounded to nearest in every mode without `random`."""
    if mode.name == "split":
        return split(verbs, full)
    if random is not None and not mode.beside:
        return rounded(verbs, full, random), None
    return verbs.narrow(full), full if mode.beside else None


def load(verbs: Verbs, mode: Mode, low: Any, beside: Any) -> Any:
    """Return the float32 weight that an optimizer steps on."""
    if mode.name == "split":
        return join(verbs, low, beside)
    if mode.name == "stochastic":
        return verbs.wide(low)
    return beside


def beside_written(verbs: Verbs, mode: Mode, low: Any, beside: Any) -> Any:
    """Return what has to stand beside weights some of which were written by hand."""
    # What stood beside such a weight no longer belongs to it. In `master` every such element shows:
    # rounding the copy does not give the weight. In `split` nothing shows, and the error is at most
    # half of the last place of what was written.
    if mode.name == "master":
        same = verbs.bits16(verbs.narrow(beside)) == verbs.bits16(low)
        return verbs.where(same, beside, verbs.wide(low))
    if mode.name == "split":
        return verbs.where(is_torn(verbs, low, beside), 0, beside)
    return beside


# A float32 number as a bfloat16 number and a 16-bit remainder, without any loss.
#
#     high      = (bits + 0x8000) >> 16        the nearest bfloat16; ties go away from zero
#     remainder = bits - (high << 16)          from -0x8000 to 0x7fff: the lower 16 bits, as int16
#     bits      = (high << 16) + remainder     modulo 2**32
#
# `high` differs from the usual cast at ties alone, which the cast rounds to even. Infinity
# stays, and finite numbers above the largest bfloat16 by half its last place or more become Inf
# in `high`, as in the cast; the remainder brings them back.
#
# For NaN the formula is not enough: 0x7fffffff, the NaN that NVIDIA GPUs return, would get the
# high part -0.0. So the upper 7 bits of the mantissa of a NaN are inverted first if bit 15 is
# set, and after the rebuild once more. There are as many pairs as float32 numbers, so some NaN
# must get a `high` that is none: signaling NaN, which no arithmetic returns, with these 7 bits
# zero. Those from 0x7f808000 to 0x7f80ffff get zero, and those from 0x7f800001 to 0x7f807fff get
# Inf.
#
# Source: the formula is that of AdamW_BF16-style "split" optimizers (Zamirai et al., "Revisiting
# BFloat16 Training", arXiv:2010.06192, keep the same 16 bits); the treatment of NaN is our own.


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
    """Return where the pair is NaN and its high part is none: that was written by hand."""
    # Signaling NaN aside, which no arithmetic makes, `split` never returns such a pair.
    pair = verbs.bits(join(verbs, high, remainder)) & 0x7FFFFFFF
    alone = verbs.to_int32(verbs.bits16(high)) & 0x7FFF
    return (pair > 0x7F800000) & (alone < 0x7F81)


def _nan_moved(verbs: Verbs, bits: Any) -> Any:
    return verbs.where((bits & _CARRIES) == _CARRIES, bits ^ _UPPER, bits)


# float32 rounded to one of the two bfloat16 neighbours at random, so that the mean stays.
#
#     fraction = bits & 0xffff           how far beyond the neighbour nearer to zero, in 2**16ths
#     rounded = (bits >> 16) + (random < fraction)
#
# Numbers that bfloat16 holds stay as they are. Infinity and NaN stay, and a finite number never
# becomes Inf: between the largest bfloat16 and 2**128 it becomes the former.
#
# Source: De Sa et al., "Understanding and Optimizing Asynchronous Low-Precision SGD", ISCA 2017;
# Zamirai et al., arXiv:2010.06192. Given the same random bits, torchao's `_fp32_to_bf16_sr`
# gives the same numbers up to the largest bfloat16.


_LARGEST, _INF, _MAGNITUDE, _QUIET = 0x7F7F0000, 0x7F800000, 0x7FFFFFFF, 0x40


def rounded(verbs: Verbs, full: Any, random: Any) -> Any:
    """Return float32 numbers rounded to bfloat16 at random."""
    bits = verbs.bits(full)
    magnitude = bits & _MAGNITUDE
    up = (random < (bits & 0xFFFF)) & (magnitude < _LARGEST)
    high = bits >> 16
    high = verbs.where(magnitude > _INF, high | _QUIET, verbs.where(up, high + 1, high))
    return verbs.bfloat16(verbs.to_int16(high))


# Random bits by an integer hash of (seed, step, parameter, index).
#
# The bits of an element do not depend on the device, on the framework, or on how the array is cut
# in pieces, and no state has to be saved besides the step. Everything is int32 arithmetic that
# wraps around. A key of two words is made of (seed, step, parameter); the words go into the hash at
# two places, so that two keys give two permutations and not one that is shifted.
#
# Source: the hash is `lowbias32` of Chris Wellons' "hash-prospector" (public domain), without its
# last line, which changes none of the upper 16 bits.

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


# The text that an optimizer of `low_weights` shows of itself.


def summary(mode: str, kept: Mapping[str, str], low: int | None = None) -> str:
    """Return which parameters are not stored low, and why, as text."""
    count = "" if low is None else f"{low} in "
    lines = [f"low weights: {count}bfloat16, mode {mode!r}"]
    if kept:
        lines += ["not stored low:", *(f"    {name}: {why}" for name, why in kept.items())]
    return "\n".join(lines)


# Updates that rounding takes away. A low weight that an optimizer writes directly moves by at least
# one last place or not at all. The share of weights with a gradient that is not 0, and whose step
# has changed no bit, says how much of the training is lost.

# A warning is given from this share of all updates on.
TOO_MANY = 0.1


class LostUpdates(NamedTuple):
    """The updates of one parameter in a step, and how many of them were lost."""

    name: str  # of the parameter
    dtype: str  # its dtype, by its full name
    updates: int  # elements whose gradient is not 0
    lost: int  # those of them that the step left as they were

    @property
    def share(self) -> float:
        """The part of the updates that were lost, from 0 to 1."""
        return self.lost / self.updates if self.updates else 0.0


class LostUpdatesWatch:
    """The base of `UpdateWatch`: counts on their way to the host, which never waits; a warning."""

    def __init__(self, instead: str) -> None:
        self.records: tuple[LostUpdates, ...] = ()
        self._instead = instead  # what to write in place of the user's optimizer
        self._warned = False
        # Names and dtypes of parameters, a copy of their counts, and whether these are of updates
        # whose gradient is not 0, or of all; the oldest first.
        self._sent: tuple[tuple[Sequence[tuple[str, str]], Any, bool], ...] = ()

    def _send(self, names: Sequence[tuple[str, str]], copy: Any, *, gradients: bool = True) -> None:
        """Note counts that are on their way, an `AsyncCopy`."""
        self._sent = (*self._sent, (names, copy, gradients))

    def _arrive(self, *, wait: bool = False) -> None:
        """Read the counts that have arrived, and warn of them, once."""
        while self._sent and (wait or self._sent[0][1].is_ready()):
            (names, copy, gradients), *rest = self._sent
            self._sent = tuple(rest)
            rows = zip(names, copy.values().tolist(), strict=True)
            self.records = tuple(LostUpdates(*name, *row) for name, row in rows)
            if not self._warned and share(self.records) >= TOO_MANY:
                self._warned = True
                text = message(self.records, self._instead, gradients=gradients)
                warnings.warn(text, LowWeightsWarning, stacklevel=outside())


def share(records: Sequence[LostUpdates]) -> float:
    """Return the part of all updates that were lost, from 0 to 1."""
    updates = sum(each.updates for each in records)
    return sum(each.lost for each in records) / updates if updates else 0.0


def message(records: Sequence[LostUpdates], instead: str, *, gradients: bool = True) -> str:
    """Return the warning about a step that lost updates."""
    updated = (each for each in records if each.updates)
    worst = sorted(updated, key=lambda each: (-each.share, -each.updates))[:3]
    most = ", ".join(f"{each.name} ({each.dtype}) {each.share:.0%}" for each in worst)
    seen = "the gradient is not 0, and " if gradients else ""
    return (
        f"{share(records):.0%} of the updates of low weights were rounded away in this step: "
        f"{seen}the weight keeps its bits, because the update is below half of its last place. "
        f"Most in: {most}. Such weights hardly learn. Write {instead}, which keeps the rest of "
        "each weight beside it."
    )
