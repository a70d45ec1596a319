"""How far rounding moves the arrays of a record without probes, from their magnitudes alone.

    error^2 = own^2 + what the errors of the arrays that the call reads become in its result

All are relative to the root mean squares. By the class of the op, an error `r` of an array of the
magnitude `x` is in a result of the magnitude `y`:

    a sum of its operands                    r x / y
    cat, where and others that pick          r, the largest of all that is read
    a product, or a sum of its terms         r times the size of the terms, relative to y
    what subtracts a mean                    r x / deviation
    exp, softmax, activations, powers        r, or r x where x is large
    log, sin, losses                         r, or r x / y if that is larger
    the gradient of abs, max, relu           r, and a jump where a number may have another sign
    an update, which may have signs alone    sqrt(r)
    an inverse, an op that users registered  not known: all of the result

The errors of what is read are independent, and their squares are added; but of several gradients,
of which a result is the sum, the largest counts. Nothing here knows a framework.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from polymp.diagnostics.call_record import BACKWARD
from polymp.diagnostics.rounding import unit_roundoff
from polymp.diagnostics.run_record import (
    AMAX,
    ELEMENTS,
    INPUT,
    MEAN,
    RESULT,
    RMS,
    UPDATE,
    VALUES,
    RecordedArray,
)
from polymp.dtypes import FORMATS
from polymp.rules.vocabulary import vocabulary

_ADDS = frozenset("add sub rsub".split())
_PRODUCTS = frozenset("mul div addcmul addcdiv lerp sqrt rsqrt reciprocal".split())
_CENTRED = frozenset("var std var_mean std_mean".split())
_ABSOLUTE = frozenset("log log2 log10 log1p logsumexp log_softmax sin cos tan".split())
_STEEP = frozenset(("softmax", "activation", "attention", "power", "inverse", "special"))
_JUMPS = frozenset("abs sign relu relu6 leaky_relu hardtanh threshold l1_loss".split())
_UNKNOWN = frozenset(("linear_algebra", "iteration", "custom"))

_MASK = 88.0  # larger numbers are a mask's: exp(-88) is zero
_RARE = 1e-3  # numbers that jump; fewer are passed over


def estimated(arrays: Sequence[RecordedArray], probes: int) -> Any:
    """The spread of each array, [arrays, VALUES]: measured, and what no probe shows."""
    relative: list[float] = []
    spread = np.zeros((len(arrays), VALUES))
    weights = {a.name: a.values[RMS] for a in arrays if a.kind == INPUT}
    for i, a in enumerate(arrays):
        size, own = a.values[RMS] or 1.0, a.own
        if probes and (any(a.spread) or not a.spread):  # else all of a constant rounds alike
            own = 0.0
        if a.kind != INPUT and a.dtype in FORMATS:
            least = FORMATS[a.dtype].smallest_subnormal / 2
            if a.kind == UPDATE and not probes:  # rounded as the new weight is
                least = max(least, unit_roundoff(a.dtype) * weights.get(a.name, 0.0))
            own = max(own, least / size)
        error = math.hypot(own, _carried(a, [(relative[r], arrays[r]) for r in a.reads]))
        relative.append(min(error, 1.0) if a.values[RMS] else error)
        spread[i] = size * (error if math.isfinite(error) else 1.0)
        # That of a large element is a share of it, too.
        large = np.maximum(np.abs(a.values) / size, 1.0)
        for part in (slice(AMAX, AMAX + 1), ELEMENTS):
            spread[i, part] *= large[part]
        if probes and a.spread:
            spread[i] = np.hypot(spread[i], a.spread)
    return spread


def _carried(a: RecordedArray, reads: Sequence[tuple[float, RecordedArray]]) -> float:
    """What the errors of the arrays that a call reads become in its result."""
    size, kind = a.values[RMS] or 1.0, vocabulary().op(a.name).kind
    reads = [(r, read) for r, read in reads if r]
    if not reads:
        return 0.0
    largest = max(r for r, _ in reads)
    if a.kind == UPDATE:
        return math.sqrt(largest)
    if a.kind != RESULT or a.name == "to":
        return largest * a.terms
    if kind in _UNKNOWN:
        return math.inf
    if a.name in _ADDS:
        sizes = [read.values[RMS] for _, read in reads]
        parts = (r * x for (r, _), x in zip(reads, sizes, strict=True))
        # Of arrays that are smaller than the sum together, larger parts are read.
        return math.hypot(*parts) / min(size, sum(sizes) or size)
    if kind in vocabulary().moving:
        carried = largest
    else:
        flows = [r * a.terms for r, read in reads if read.direction == BACKWARD]
        others = (r * _gain(a, kind, x) for r, x in reads if x.direction != BACKWARD)
        carried = math.hypot(max(flows, default=0.0), *others)
    back = a.direction == BACKWARD and (kind in ("comparison", "pooling") or a.name in _JUMPS)
    if back or a.name == "sign":
        jumps = a.size * max((r for r, x in reads if x.direction != BACKWARD), default=0.0)
        if jumps > _RARE:
            carried += 2 * math.sqrt(max(jumps, 0.01) / a.size)
    return carried


def _gain(a: RecordedArray, kind: str, read: RecordedArray) -> float:
    """How many times larger the error of an array is in the result of a call that reads it."""
    x, back = read.values[RMS] or 1.0, a.direction == BACKWARD
    change = x / (a.values[RMS] or 1.0)
    if a.name in _CENTRED or kind == "normalisation":
        rest = x**2 - read.values[MEAN] ** 2
        return a.terms * (x / math.sqrt(rest) if rest > 0 else math.inf)
    if not back and (a.name in _ABSOLUTE or kind == "loss"):
        return max(a.terms, change)
    if kind in _STEEP and a.name not in _PRODUCTS:
        near = [abs(v) for v in read.values[ELEMENTS] if abs(v) < _MASK]
        steep = a.terms * max(1.0, min(x, max(near, default=_MASK)))
        slope = 1.2 * change if kind == "activation" and not back else steep
        return max(a.terms, min(steep, slope))
    return a.terms
