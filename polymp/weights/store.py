"""How a weight is stored low, and read back for the optimizer: one rule for every mode.

    mode         stored low                      beside it                  read back
    master       cast, to nearest                the float32 number         what is beside
    split        to nearest, ties from zero      the other 16 bits          both joined: exact
    stochastic   up or down at random            nothing                    the low number

An optimizer takes its step on what `load` returns, in float32, and `store` keeps the result.
"""

from typing import Any

from polymp.weights import split, stochastic
from polymp.weights.modes import Mode
from polymp.weights.verbs import Verbs


def store(verbs: Verbs, mode: Mode, dtype: str, full: Any, random: Any = None) -> tuple[Any, Any]:
    """Return a float32 weight as it is kept."""
    if mode.name == "split":
        return split.split(verbs, full)
    if mode.name == "stochastic":
        return stochastic.rounded(verbs, full, random), None
    return verbs.narrow(full, dtype), full


def first(verbs: Verbs, mode: Mode, dtype: str, full: Any) -> tuple[Any, Any]:
    """Return a float32 weight as it is kept before any step: as `store`, without random bits.

    A mode without anything beside rounds to nearest here, as the cast does.
    """
    if mode.name == "stochastic":
        return verbs.narrow(full, dtype), None
    return store(verbs, mode, dtype, full)


def load(verbs: Verbs, mode: Mode, low: Any, beside: Any) -> Any:
    """Return the float32 weight that an optimizer steps on."""
    if mode.name == "split":
        return split.join(verbs, low, beside)
    if mode.name == "stochastic":
        return verbs.wide(low)
    return beside


def beside_written(verbs: Verbs, mode: Mode, dtype: str, low: Any, beside: Any) -> Any:
    """Return what has to stand beside weights some of which were written by hand.

    A weight that was written holds the value that was written, and what stood beside it no longer
    belongs to it. In `master` every such element shows: rounding the copy does not give the weight.
    In `split` nothing shows, and the error is at most half of the last place of what was written; a
    caller who knows that an array was written avoids that, too.
    """
    if mode.name == "master":
        same = verbs.bits16(verbs.narrow(beside, dtype)) == verbs.bits16(low)
        return verbs.where(same, beside, as_float32(verbs, low, dtype))
    if mode.name == "split":
        return verbs.where(split.is_torn(verbs, low, beside), 0, beside)
    return beside


def as_float32(verbs: Verbs, low: Any, dtype: str) -> Any:
    """Return a low weight of that dtype as float32 with the same value."""
    return verbs.wide(low) if dtype == "bfloat16" else verbs.from_half(low)
