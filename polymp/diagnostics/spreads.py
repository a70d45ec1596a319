"""How far rounding moves the numbers of a record: as its probes have measured, or by an estimate.

The estimate is made of magnitudes alone: errors are relative to the root mean square, independent,
and go from call to call by the `effect` of the op. It is often ten times too large, or more.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from polymp.diagnostics.call_record import BACKWARD
from polymp.diagnostics.rounding import JUMPS, MASK, effect, unit_roundoff
from polymp.diagnostics.run_record import (
    AMAX,
    ELEMENTS,
    INPUT,
    MEAN,
    MOST,
    ORDERLESS,
    PROJECTIONS,
    RESULT,
    RMS,
    UPDATE,
    VALUES,
    RecordedArray,
)
from polymp.dtypes import FORMATS
from polymp.rules.vocabulary import vocabulary

_RARE = 1e-3  # numbers that jump; fewer are passed over
_LARGE = 1e4  # with negative numbers that are larger, scores have no effect


def spreads(arrays: Sequence[RecordedArray], probes: int) -> Any:
    """How far rounding moves the numbers of each array, as far as it is known: [arrays, VALUES]."""
    known = [a.spread if a.spread and math.inf not in a.spread else (0.0,) * VALUES for a in arrays]
    spread = np.array(known).reshape(-1, VALUES) if probes else _estimated(arrays)
    # Of one element: in the mean over signs, the square of a projection is the mean square. A
    # number's own rounding to a low dtype may move it in no probe.
    own = np.array([a.own * a.values[RMS] for a in arrays])[:, None] / math.sqrt(3)
    element = np.sqrt((spread[:, PROJECTIONS] ** 2).mean(1, keepdims=True))
    element = np.maximum(element, own)
    mean = own / np.sqrt([a.size or 1 for a in arrays])[:, None]
    spread[:, ORDERLESS] = np.maximum(spread[:, ORDERLESS], mean)
    spread[:, PROJECTIONS] = element
    for part in (slice(AMAX, AMAX + 1), ELEMENTS):
        spread[:, part] = np.maximum(spread[:, part], element)
    return spread


def roundoff_of_inputs(arrays: Sequence[RecordedArray]) -> Any:
    """The unit roundoff of the inputs and constants that each array is made of."""
    units: list[float] = []
    for a in arrays:
        given = a.dtype in FORMATS and (a.kind == INPUT or not a.reads)
        own = unit_roundoff(a.dtype) if given else 0.0
        units.append(max((own, *(units[r] for r in a.reads))))
    return np.array(units, np.float64)


def large_mask(a: RecordedArray) -> bool:
    """True of a mask whose number may be another in the other run, and of what has it added."""
    number = a.kind == INPUT and a.size == 1 and bool(a.source)  # and no parameter
    named = number or a.name in ("where", "masked_fill") or effect(a.name) == "added"
    return a.values[AMAX] > _LARGE and a.values[MEAN] < 0 and named and a.direction != BACKWARD


def hidden(a: RecordedArray, read: Sequence[RecordedArray]) -> bool:
    """True of scores with a large mask: their numbers are those of the mask alone."""
    scores = (x for x in read if x.dtype in FORMATS and x.size > 1)
    return large_mask(a) and not all(map(large_mask, scores))


def unknown(a: RecordedArray) -> bool:
    """True if the magnitudes do not tell how far rounding moves the result of a call."""
    custom = "::" in a.name  # of another library than torch
    return a.kind == RESULT and (custom or effect(a.name) == "unknown")


def _estimated(arrays: Sequence[RecordedArray]) -> Any:
    """The spread of each array, without probes."""
    errors: list[tuple[float, float]] = []  # of each, and the size that it is relative to
    spread = np.zeros((len(arrays), VALUES))
    weights = {a.name: a.values[RMS] for a in arrays if a.kind == INPUT}
    for i, a in enumerate(arrays):
        size, least, unit = a.values[RMS] or 1.0, 0.0, 0.0
        read_in = [arrays[r] for r in a.reads]
        if effect(a.name) == "scattered":
            # Of sums in places, the terms are not in the record: of each place, about as many.
            norms = (x.values[RMS] * max(x.size / max(a.size, 1), 1.0) ** 0.5 for x in read_in)
            terms = min(max((*norms, size)) / size, MOST)
            a = a._replace(terms=terms, own=a.own * terms)
        elif hidden(a, read_in):  # it is that of the scores
            scores = (x for x in read_in if x.values[AMAX] <= _LARGE)
            size = max((x.values[RMS] for x in scores), default=0.0) or 1.0
        if a.kind != INPUT and a.dtype in FORMATS:
            least, unit = FORMATS[a.dtype].smallest_subnormal / 2, unit_roundoff(a.dtype)
            if a.kind == UPDATE:  # rounded as the new weight is
                least = max(least, unit * weights.get(a.name, 0.0))
        wide = any(x.dtype in FORMATS and unit_roundoff(x.dtype) < unit for x in read_in)
        own = 1.0 if unknown(a) else max(a.own, unit if wide else 0.0)  # a cast has no row
        read = [(*errors[r], arrays[r]) for r in a.reads if errors[r][0]]
        error = math.hypot(
            max(own, least / size) if own else 0.0, _carried(a, size, read) if read else 0.0
        )
        errors.append((min(error, 1.0) if a.values[RMS] else error, size))
        spread[i] = size * min(error, MOST)
        large = np.maximum(np.abs(a.values) / size, 1.0)
        for part in (slice(AMAX, AMAX + 1), ELEMENTS):  # that of a large element is a share of it
            spread[i, part] *= large[part]
    return spread


_Read = tuple[float, float, RecordedArray]  # the error of an array, and the size it is relative to


def _carried(a: RecordedArray, own: float, read: Sequence[_Read]) -> float:
    """The error of a result by those of the arrays that the call reads, which are not 0."""
    how, kind, largest = effect(a.name), vocabulary().op(a.name).kind, max(r for r, *_ in read)
    if a.kind == UPDATE:  # an optimizer may hand on the sign alone: that of noise is any
        noise = (abs(v) <= r * x.values[RMS] for r, _, x in read for v in x.values[ELEMENTS])
        return math.sqrt(max(largest, sum(noise) / (ELEMENTS.stop - ELEMENTS.start)))
    if a.kind != RESULT:
        return largest * a.terms
    if how == "added":
        # Of arrays that are smaller than the sum together, larger parts are read.
        whole = sum(size for _, size, _ in read)
        return math.hypot(*(r * size for r, size, _ in read)) / min(own, whole)
    forward = [each for each in read if each[2].direction != BACKWARD]
    if kind in vocabulary().moving:
        error = largest
    else:  # of gradients, of which a result is the sum, the largest counts
        back = max((r * a.terms for r, _, x in read if x.direction == BACKWARD), default=0.0)
        error = math.hypot(back, *(r * _gain(a, how, size, x) for r, size, x in forward))
    turns = a.direction == BACKWARD and not JUMPS.isdisjoint((a.name, kind))
    if forward and (turns or a.name == "sign"):
        count = a.size * max(r for r, *_ in forward)
        error += 2 * math.sqrt(max(count, 0.01) / a.size) if count > _RARE else 0.0
    return error


def _gain(a: RecordedArray, how: str, x: float, read: RecordedArray) -> float:
    """How many times larger the error of an array is in the result of a call that reads it."""
    back = a.direction == BACKWARD
    change = x / (a.values[RMS] or 1.0)
    if how == "centred":
        variance = x**2 - read.values[MEAN] ** 2
        return a.terms * (x / math.sqrt(variance) if variance > 0 else MOST)
    if how in ("absolute", "log") and not back:
        return max(a.terms, change)
    if how not in ("steep", "sloped", "log"):
        return a.terms
    near = (abs(v) for v in read.values[ELEMENTS] if abs(v) < MASK)
    steep = max(1.0, min(x, max(near, default=MASK)))
    if how == "sloped" and not back:
        steep = min(steep, max(1.0, 1.2 * change))
    return a.terms * steep
