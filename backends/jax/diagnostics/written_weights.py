"""Low weights that a measured call writes, and the updates that rounding takes away.

    a measured program  ->  which input comes back as which result, changed
    bits before and after a call, the gradient's sample  ->  `LostUpdates`

A weight is a low input that the forward pass reads. A result is its new value if it has its dtype
and shape, and is made of it without an op of the model between: optimizers and sums are none.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from polymp.backends.jax import compat
from polymp.backends.jax.autocast.values import LOW
from polymp.backends.jax.diagnostics.measured_call import MeasuredCall, names
from polymp.backends.jax.diagnostics.measures import ABSENT, Facts
from polymp.diagnostics.call_record import FORWARD
from polymp.weights.lost_updates import LostUpdates


class Written(NamedTuple):
    """A low weight that a program reads and returns changed.

    Attributes:
        name: as the caller would write it.
        dtype: its dtype.
        before: its number among the inputs.
        after: its number among the results.
    """

    name: str
    dtype: str
    before: int
    after: int


class Sampled(NamedTuple):
    """The weights that a call wrote, as bits of samples before and after it."""

    written: list[Written]
    before: list[jax.Array]
    after: list[jax.Array]


def written(program: MeasuredCall, arrays: Sequence[jax.Array]) -> list[Written]:
    """The low weights that a program writes; its twin was run."""
    kinds = [(str(x.dtype), tuple(np.shape(x))) for x in arrays]
    ahead = (e.outside for e in program.twin.events if e.site.scope.direction == FORWARD)
    read: frozenset[int] = frozenset().union(*ahead)
    found, words = [], names(program)
    outs = compat.opened(program.traced.closed)[0].outvars
    for after, (origin, out) in enumerate(zip(program.twin.results, outs, strict=True)):
        kind = str(getattr(out.aval, "dtype", "")), tuple(getattr(out.aval, "shape", ()))
        places = [i for i in origin.outside & read if i < len(kinds) and kinds[i] == kind]
        changed = bool(origin.events) or len(origin.outside) > 1
        if kind[0] in LOW and changed and len(places) == 1:
            found.append(Written(words[places[0]], kind[0], places[0], after))
    return found


def lost(
    calls: Sequence[tuple[Sampled, Sequence[Facts], Mapping[str, int], Sequence[str]]],
) -> list[LostUpdates]:
    """Updates and those that were lost, of each weight over all calls."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for samples, facts, gradients, results in calls:
        for weight, old, new in zip(*samples, strict=True):
            moves: Any = np.ones(old.shape, bool)
            event = gradients.get(results[weight.after], gradients.get(weight.name))
            if event is not None:
                bins = facts[event].sample.reshape(-1)
                if bins.shape == moves.shape:
                    moves = (bins != 0) & (bins != ABSENT)
            kept = moves & np.equal(old, new)
            updates, before = found.get(weight[:2], (0, 0))
            found[weight[:2]] = updates + int(moves.sum()), before + int(kept.sum())
    return [LostUpdates(*key, *counts) for key, counts in found.items()]
