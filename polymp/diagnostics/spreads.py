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


def spreads(arrays: Sequence[RecordedArray], probes: int) -> Any:
    """How far rounding moves the numbers of each array, as far as it is known: [arrays, VALUES]."""
    known = [a.spread if a.spread and math.inf not in a.spread else (0.0,) * VALUES for a in arrays]
    spread = np.array(known).reshape(-1, VALUES) if probes else _estimated(arrays)
    # Of one element as of a projection: in the mean over signs, the square of that is the mean
    # square. A number's own rounding to a low dtype may move it in no probe.
    own = np.array([a.own * a.values[RMS] for a in arrays])[:, None] / math.sqrt(3)
    element = np.maximum(spread[:, PROJECTIONS].max(1, keepdims=True), own)
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


def unknown(a: RecordedArray) -> bool:
    """True if the magnitudes do not tell how far rounding moves the result of a call."""
    custom = "::" in a.name  # of another library than torch
    return a.kind == RESULT and (custom or effect(a.name) == "unknown")


def _estimated(arrays: Sequence[RecordedArray]) -> Any:
    """The spread of each array, without probes."""
    errors: list[float] = []  # of each, relative to its size
    spread = np.zeros((len(arrays), VALUES))
    weights = {a.name: a.values[RMS] for a in arrays if a.kind == INPUT}
    for i, a in enumerate(arrays):
        size, least, unit = _size(a), 0.0, 0.0
        read_in = [arrays[r] for r in a.reads]
        if effect(a.name) == "scattered":
            # Of sums in places, the terms are not in the record: of each place, about as many.
            norms = (x.values[RMS] * max(x.size / max(a.size, 1), 1.0) ** 0.5 for x in read_in)
            terms = min(max((*norms, size)) / size, MOST)
            a = a._replace(terms=terms, own=a.own * terms)
        if a.kind != INPUT and a.dtype in FORMATS:
            least, unit = FORMATS[a.dtype].smallest_subnormal / 2, unit_roundoff(a.dtype)
            if a.kind == UPDATE:  # rounded as the new weight is
                least = max(least, unit * weights.get(a.name, 0.0))
        wide = any(x.dtype in FORMATS and unit_roundoff(x.dtype) < unit for x in read_in)
        own = 1.0 if unknown(a) else max(a.own, unit if wide else 0.0)  # a cast has no row
        read = [(errors[r], arrays[r]) for r in a.reads if errors[r]]
        error = math.hypot(
            max(own, least / size) if own else 0.0, _carried(a, read) if read else 0.0
        )
        errors.append(min(error, 1.0) if a.values[RMS] else error)
        spread[i] = size * min(error, MOST)
        large = np.maximum(np.abs(a.values) / size, 1.0)
        for part in (slice(AMAX, AMAX + 1), ELEMENTS):  # that of a large element is a share of it
            spread[i, part] *= large[part]
    return spread


def _size(a: RecordedArray) -> float:
    """The size that the error of an array is relative to."""
    return a.values[RMS] or 1.0


def _carried(a: RecordedArray, read: Sequence[tuple[float, RecordedArray]]) -> float:
    """The error of a result by those of the arrays that the call reads, which are not 0."""
    how, kind, largest = effect(a.name), vocabulary().op(a.name).kind, max(r for r, _ in read)
    if a.kind == UPDATE:  # an optimizer may hand on the sign alone: that of noise is any
        noise = (abs(v) <= r * x.values[RMS] for r, x in read for v in x.values[ELEMENTS])
        return math.sqrt(max(largest, sum(noise) / (ELEMENTS.stop - ELEMENTS.start)))
    if a.kind != RESULT:
        return largest * a.terms
    if how == "added":
        # Of arrays that are smaller than the sum together, larger parts are read.
        whole = sum(_size(x) for _, x in read)
        return math.hypot(*(r * _size(x) for r, x in read)) / min(_size(a), whole)
    forward = [(r, x) for r, x in read if x.direction != BACKWARD]
    if kind in vocabulary().moving:
        error = largest
    else:  # of gradients, of which a result is the sum, the largest counts
        back = max((r * a.terms for r, x in read if x.direction == BACKWARD), default=0.0)
        error = math.hypot(back, *(r * _gain(a, how, x) for r, x in forward))
    turns = a.direction == BACKWARD and not JUMPS.isdisjoint((a.name, kind))
    if forward and (turns or a.name == "sign"):
        count = a.size * max(r for r, _ in forward)
        error += 2 * math.sqrt(max(count, 0.01) / a.size) if count > _RARE else 0.0
    return error


def _gain(a: RecordedArray, how: str, read: RecordedArray) -> float:
    """How many times larger the error of an array is in the result of a call that reads it."""
    back, x = a.direction == BACKWARD, _size(read)
    change = x / _size(a)
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
