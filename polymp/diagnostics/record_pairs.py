"""The arrays of two recorded steps, matched, and held to what rounding explains: see `compare`.

A number may be off by

    t(1e-6 / numbers; squares) * sqrt(spread_one^2 + spread_other^2) + 5e-7 RMS

where t is Student's quantile: a spread is a mean of squares, one for each probe of both records, of
projections eight for each, and is less certain the fewer these are. The last part is the error of
the numbers themselves. Without probes, `spread` is an estimate: each call's own rounding, and of
what it reads, as far as the magnitudes tell.

    partner   the array of the other run that one is held against: that in its place of the program,
              by module, op, shape and order, or its twin, or what is its counterpart for sure,
              with other values: the update of one parameter
    twin      the array of the other run that has the same values, but for rounding
    passed    what only one run has, but all that reads it has a twin, or is passed itself
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from polymp.diagnostics.alignment import blocks, shared_name
from polymp.diagnostics.call_record import BACKWARD
from polymp.diagnostics.rounding import (
    ABSOLUTE,
    ADDED,
    CENTRED,
    EXACT,
    SCATTERED,
    SLOPED,
    STEEP,
    UNKNOWN,
    effect,
    factor,
    jumps,
    unit_roundoff,
)
from polymp.diagnostics.run_record import (
    AMAX,
    COMPILED,
    ELEMENTS,
    GRADIENT,
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
    RecordedStep,
)
from polymp.dtypes import FORMATS
from polymp.rules.vocabulary import vocabulary

_ERROR = 2.0**-21  # of sums in float32, relative to the root mean square
_ROUGH = 1e-3  # a root mean square that is known to this tells arrays apart
_SAME = 0.85  # of the calls of the shorter program; with fewer aligned, values match the calls
_POOLED = 64  # elements from which on projections are sums of many

# How a pair of arrays compares.
EXPLAINED, UNEXPLAINED, ALONE, PASSED = "explained", "not explained", "only one run", "passed over"
UNJUDGED = "not judged"  # it is not known how far rounding moves one of them


class Compared(NamedTuple):
    """An array of one run beside that of the other."""

    one: RecordedArray | None  # None if only the other run has it
    other: RecordedArray | None
    verdict: str  # "explained", "not explained", "only one run", "passed over", "not judged"
    # The largest difference of two numbers, beside what rounding explains, as a fraction of the
    # root mean square; 0 where only one run has the array.
    difference: float = 0.0
    allowed: float = 0.0
    share: float = 0.0  # of what rounding explains: 1 for all of it
    # The same of the whole array: of the root mean square difference, or between two frameworks of
    # the difference of the root mean squares.
    mean_difference: float = 0.0
    mean_allowed: float = 0.0

    @property
    def array(self) -> RecordedArray:
        """The array of the first run, or else of the other.

        Of compiled code that is off, the code's own: beside it stands one of the calls that it is.
        """
        compiled = self.other is not None and self.other.name == COMPILED
        array = self.other if compiled and self.verdict == UNEXPLAINED else self.one or self.other
        assert array is not None
        return array

    @property
    def parts(self) -> str:
        """How the programs differ here; "" if both make the same call in the same dtypes."""
        if self.one is None or self.other is None:
            return "only one run has it"
        if not _alike(self.one, self.other):
            return f"{self.other.name} in the other run"
        same = (self.one.run, self.one.dtype) == (self.other.run, self.other.dtype)
        return "" if same else "in other dtypes"

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data, without the numbers of the arrays."""

        def side(array: RecordedArray | None) -> dict[str, Any] | None:
            if array is None:
                return None
            left_out = ("values", "spread", "reads", "own", "terms")
            data = {k: v for k, v in array._asdict().items() if k not in left_out}
            return data | {"rms": array.values[RMS], "amax": array.values[AMAX]}

        finite = math.isfinite(self.difference)  # JSON has no Inf
        return {
            "one": side(self.one),
            "other": side(self.other),
            "verdict": self.verdict,
            "difference": self.difference if finite else None,
            "allowed": self.allowed if math.isfinite(self.allowed) else None,
        }


class Side:
    """The arrays of one run as numpy arrays."""

    def __init__(self, step: RecordedStep, probes: int, names: Mapping[str, str]) -> None:
        self.arrays, self.probes = step.arrays, probes
        self.compiled = COMPILED in step.left_out
        self.modules = [names.get(a.module, a.module) for a in step.arrays]
        self.values = np.array([a.values for a in step.arrays], np.float64).reshape(-1, VALUES)
        self.spread = _spread(step.arrays, probes)
        # Arrays that rounding moves by so much as no one knows, and the calls that they are of.
        self.unjudged = {i for i, row in enumerate(self.spread) if math.isinf(row[RMS])}
        self.lost = {self.call(i) for i in self.unjudged}
        self.spread[[*self.unjudged]] = 0.0
        self.rms, self.largest = self.values[:, RMS], self.values[:, AMAX]
        self.roundoff = _roundoff_of_inputs(step.arrays)
        self.sizes = np.array([a.size for a in step.arrays], np.int64)
        self.results = [i for i, a in enumerate(step.arrays) if a.kind == RESULT]
        groups: dict[tuple[str, int], list[int]] = {}
        for i, a in enumerate(step.arrays):
            if i not in self.unjudged:
                groups.setdefault(_group(a), []).append(i)
        self.groups = {key: np.array(at) for key, at in groups.items()}
        self.readers: list[list[int]] = [[] for _ in step.arrays]
        for i, a in enumerate(step.arrays):
            for source in a.reads:
                self.readers[source].append(i)

    def call(self, i: int) -> tuple[str, ...]:
        """The kind, op, direction and module of an array."""
        a = self.arrays[i]
        return a.kind, shared_name(a.name), a.direction, self.modules[i]

    def masks(self, i: int) -> bool:
        """True if only a mask can have made the Inf of an array; others may overflow in one run."""
        a = self.arrays[i]
        within = a.dtype in FORMATS and self.largest[i] < FORMATS[a.dtype].max / 4
        if not within or not (a.name in EXACT or effect(a.name) == ADDED):
            return False
        read = (self.arrays[r] for r in a.reads)
        return not any(0 < x.bad < x.size == a.size for x in read)


def _spread(arrays: Sequence[RecordedArray], probes: int) -> Any:
    """How far rounding moves the numbers of each array: [arrays, VALUES]."""
    if probes:
        moved = [a.spread or (0.0,) * VALUES for a in arrays]
        spread = np.array(moved, np.float64).reshape(-1, VALUES)
    else:
        spread = _estimated(arrays)
    # Of one element: in the mean over signs, the square of a projection is the mean square. A
    # number's own rounding to a low dtype may move it in no probe.
    own = np.array([[a.own * a.values[RMS] / math.sqrt(3)] for a in arrays])
    element = np.sqrt((spread[:, PROJECTIONS] ** 2).mean(1, keepdims=True))
    element = np.maximum(element, own)
    mean = own / np.sqrt([[a.size or 1] for a in arrays])
    spread[:, ORDERLESS] = np.maximum(spread[:, ORDERLESS], mean)
    spread[:, PROJECTIONS] = element
    for part in (slice(AMAX, AMAX + 1), ELEMENTS):
        spread[:, part] = np.maximum(spread[:, part], element)
    return spread


def _roundoff_of_inputs(arrays: Sequence[RecordedArray]) -> Any:
    """The unit roundoff of what each array is made of: no call rounded inputs and constants."""
    units: list[float] = []
    for a in arrays:
        stored = a.dtype in FORMATS and (a.kind == INPUT or not a.reads)
        own = unit_roundoff(a.dtype) if stored else 0.0
        units.append(max((own, *(units[r] for r in a.reads))))
    return np.array(units, np.float64)


def _group(a: RecordedArray) -> tuple[str, int]:
    """Arrays of other sizes, or of another part of the step, are never the same."""
    back = a.direction == BACKWARD or a.kind == GRADIENT
    return UPDATE if a.kind == UPDATE else BACKWARD if back else "", a.size


# How far rounding moves arrays, from their magnitudes alone: errors are relative to the root mean
# square, independent, and go from call to call by the class of the op.

_MASK = 88.0  # larger numbers are a mask's: exp(-88) is zero
_RARE = 1e-3  # numbers that jump; fewer are passed over


def _estimated(arrays: Sequence[RecordedArray]) -> Any:
    """The spread of each array, without probes."""
    relative: list[float] = []
    spread = np.zeros((len(arrays), VALUES))
    weights = {a.name: a.values[RMS] for a in arrays if a.kind == INPUT}
    for i, a in enumerate(arrays):
        size, least, unit = a.values[RMS] or 1.0, 0.0, 0.0
        read_in = [arrays[r] for r in a.reads]
        if effect(a.name) == SCATTERED:
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
        read = [(relative[r], arrays[r]) for r in a.reads if relative[r]]
        error = math.hypot(max(own, least / size), _carried(a, read) if read else 0.0)
        relative.append(min(error, 1.0) if a.values[RMS] else error)
        spread[i] = size * min(error, MOST)
        large = np.maximum(np.abs(a.values) / size, 1.0)
        for part in (slice(AMAX, AMAX + 1), ELEMENTS):  # that of a large element is a share of it
            spread[i, part] *= large[part]
    return spread


def _carried(a: RecordedArray, read: Sequence[tuple[float, RecordedArray]]) -> float:
    """The error of a result by those of the arrays that the call reads, which are not 0."""
    how, largest = effect(a.name), max(r for r, _ in read)
    if a.kind == UPDATE:
        return math.sqrt(largest)  # an optimizer may hand on the sign alone
    if a.kind != RESULT or a.name == "to":
        return largest * a.terms
    if how == ADDED:
        sizes = [x.values[RMS] for _, x in read]
        parts = (r * size for (r, _), size in zip(read, sizes, strict=True))
        # Of arrays that are smaller than the sum together, larger parts are read.
        return math.hypot(*parts) / min(a.values[RMS] or 1.0, sum(sizes) or 1.0)
    forward = [(r, x) for r, x in read if x.direction != BACKWARD]
    if vocabulary().op(a.name).kind in vocabulary().moving:
        error = largest
    else:  # of gradients, of which a result is the sum, the largest counts
        back = max((r * a.terms for r, x in read if x.direction == BACKWARD), default=0.0)
        error = math.hypot(back, *(r * _gain(a, how, x) for r, x in forward))
    if forward and jumps(a.name, a.direction == BACKWARD):
        count = a.size * max(r for r, _ in forward)
        error += 2 * math.sqrt(max(count, 0.01) / a.size) if count > _RARE else 0.0
    return error


def unknown(a: RecordedArray) -> bool:
    """True if the magnitudes do not tell how far rounding moves the result of a call."""
    custom = "::" in a.name  # of another library than torch
    return a.kind == RESULT and (custom or effect(a.name) == UNKNOWN)


def _gain(a: RecordedArray, how: str, read: RecordedArray) -> float:
    """How many times larger the error of an array is in the result of a call that reads it."""
    x, back = read.values[RMS] or 1.0, a.direction == BACKWARD
    change = x / (a.values[RMS] or 1.0)
    if how == CENTRED:
        variance = x**2 - read.values[MEAN] ** 2
        return a.terms * (x / math.sqrt(variance) if variance > 0 else MOST)
    if how == ABSOLUTE and not back:
        return max(a.terms, change)
    if how not in (STEEP, SLOPED, ABSOLUTE):
        return a.terms
    near = (abs(v) for v in read.values[ELEMENTS] if abs(v) < _MASK)
    steep = max(1.0, min(x, max(near, default=_MASK)))
    if how == SLOPED and not back:
        steep = min(steep, max(1.0, 1.2 * change))
    return a.terms * steep


class Pairs:
    """The arrays of two runs, matched."""

    def __init__(self, one: Side, other: Side, ported: bool) -> None:
        self.one, self.other = one, other
        self.ported = ported  # True of two frameworks
        self.deviations = factor(VALUES * (len(one.arrays) + len(other.arrays)))
        paths = [{side.modules[i] for i in side.results} - {""} for side in (one, other)]
        self.shared = paths[0] & paths[1]  # module paths that both have, and the top level
        if self.shared:
            self.shared.add("")
        # Of the first run: the array of the other that it is held against.
        self.partner = {} if ported else _by_name(one, other)
        calls = {} if ported else _by_place(one, other, bool(self.shared))
        # Of another program, as a port is, or what a region makes of it, values match the calls.
        self.by_values = len(calls) < _SAME * min(len(one.results), len(other.results))
        if not self.by_values:
            self.partner |= calls
        self.twins: dict[int, int] = {}  # of the first run: the array of the other with its values
        for i in range(len(one.arrays)):
            j = self.partner.get(i)
            if i in one.unjudged or j in other.unjudged:
                continue
            if (j := self._twin_of(i, j)) is not None:
                self.twins[i] = j
        self.partner |= self.twins  # where a call was aligned wrongly, the other one is left
        # Of the other run: the arrays whose values the first one has.
        rest = {*range(len(other.arrays))}.difference(self.partner.values())
        self.found = {*self.twins.values(), *filter(self._has_twin, rest)}
        left = [i for i in range(len(one.arrays)) if i not in self.partner]
        self._add((i, k) for i in left for k in (*self._of_parameter(i), *self._masked(i)))

    @np.errstate(over="ignore", invalid="ignore")
    def differences(self, i: int, j: Any) -> tuple[Any, Any]:
        """The differences of the numbers of two arrays, and what rounding explains of each."""
        a, b = self.one, self.other
        squares = a.spread[i] ** 2, b.spread[j] ** 2
        spread = np.sqrt(sum(squares))
        size = np.maximum(a.rms[i], b.rms[j])
        floor = np.zeros(VALUES)
        floor[RMS : PROJECTIONS.stop] = _ERROR
        # A spread is the root of a mean of so many squares: one of each probe; of the projections
        # of an array, which are pooled, eight.
        many = (a.sizes[i] >= _POOLED) & (b.sizes[j] >= _POOLED)
        pooled = np.where(many, PROJECTIONS.stop - PROJECTIONS.start, 1)
        counts = np.multiply.outer(pooled, np.ones(VALUES))
        counts[..., RMS : PROJECTIONS.start] = 1
        certain = _certainty(squares, (a.probes, b.probes)) * counts
        allowed = _quantile(self.deviations, certain) * spread + np.multiply.outer(size, floor)
        # Noise adds to a mean square: of a result that is mostly noise, a change of second order.
        element = spread[..., PROJECTIONS.start]
        noise = element * np.minimum(element / np.maximum(size, np.finfo(float).tiny), 1.0)
        allowed[..., ORDERLESS] += noise[..., None]
        low = np.where(
            a.roundoff[i] == b.roundoff[j], 0.0, np.maximum(a.roundoff[i], b.roundoff[j])
        )
        stored = np.maximum(a.largest[i], b.largest[j]) + self.deviations * size / math.sqrt(3)
        allowed += np.multiply.outer(low * stored, np.ones(VALUES))
        return np.abs(a.values[i] - b.values[j]), allowed

    def comparable(self, i: int, j: int, strict: bool = False) -> tuple[Any, Any]:
        """The same of those that can be compared; `strict` where they alone say what is a pair."""
        one, other = self.one.arrays[i], self.other.arrays[j]
        difference, allowed = self.differences(i, j)
        if bool(one.bad) != bool(other.bad):
            difference = np.full(VALUES, math.inf)  # rounding alone moves none of these
        ordered = self._in_order(i, j, allowed[RMS])
        if one.kind == UPDATE and not strict:
            # Adam's first steps have the sign of the gradient. Where that is as small as its
            # rounding, an element jumps, which no probe may have shown: up to two are let pass.
            if ordered:
                if _of_two_elements(difference[PROJECTIONS], float(allowed[PROJECTIONS].max())):
                    allowed = np.maximum(allowed, difference)
            elif one.size >= _POOLED:  # of fewer, two are too much
                allowed[ORDERLESS] += 4 * max(one.values[AMAX], other.values[AMAX]) / one.size
        part = slice(0, VALUES) if ordered else ORDERLESS
        return difference[part], allowed[part]

    def excess(self, i: int, j: int, strict: bool = False) -> float:
        """How many times larger the largest difference is than what rounding explains."""
        return _worst(*self.comparable(i, j, strict))[0]

    def _in_order(self, i: int, j: int, allowed: float) -> bool:
        """True if two arrays have their elements in the same order.

        Between frameworks equal lengths may be other axes. Without any it is taken for granted
        where the other numbers are `allowed` to be off by so much that they tell nothing.
        """
        mine, theirs = self.one.arrays[i].shape, self.other.arrays[j].shape
        if not self.by_values:
            # The gradient of a matrix may come as its transpose, which is turned later.
            one = self.one.arrays[i]
            turned = one.direction == BACKWARD and vocabulary().op(one.name).kind == "matmul"
            return mine == theirs and not (turned and len({*mine}) < len(mine))
        if allowed <= _ROUGH * max(self.one.rms[i], self.other.rms[j]):
            return False
        lengths = [n for n in mine if n > 1]
        return mine == theirs and len({*lengths}) == len(lengths)

    def _twin_of(self, i: int, placed: int | None) -> int | None:
        """The array of the other run that has the values of one of the first; None without.

        The one in its place may be wrong: of another call in the module, as a product with a bias
        beside one without.
        """
        if placed is not None and self.excess(i, placed) <= 1:
            return placed
        array = self.one.arrays[i]
        if placed is not None and array.kind not in (RESULT, INPUT):
            return None
        fits = [j for _, j in self._with_values(i, self.other.groups.get(_group(array)))]
        fits = [j for j in fits if _alike(self.other.arrays[j], array)] or fits
        if placed is not None:
            modules = self.other.modules, self.one.modules[i]
            fits = [j for j in fits if modules[0][j] == modules[1] and self.one.rms[i]]
        return next(iter(fits), None)

    def _has_twin(self, j: int) -> bool:
        """True if some array of the first run has the values of one of the other."""
        at = self.one.groups.get(_group(self.other.arrays[j]))
        return bool(self._with_values(at, j))

    def _with_values(self, i: Any, j: Any) -> list[tuple[int, int]]:
        """Of arrays of the first run and of the other, one on one side, the pairs that agree."""
        if i is None or j is None:
            return []
        difference, allowed = self.differences(i, j)
        fits = (difference[:, ORDERLESS] <= allowed[:, ORDERLESS]).all(1)
        ones, others = np.broadcast_arrays(i, j)
        pairs = zip(ones[fits].tolist(), others[fits].tolist(), strict=True)
        return [
            pair for pair in pairs if self._near(*pair) and self.excess(*pair, strict=True) <= 1
        ]

    def _near(self, i: int, j: int) -> bool:
        """True if two arrays may be of one call: not in other modules, of those that both have."""
        pair = self.one.arrays[i], self.other.arrays[j]
        if RESULT not in [a.kind for a in pair] or any(map(_is_returned, pair)):
            return True
        modules = {self.one.modules[i], self.other.modules[j]}
        return len(modules) == 1 or not modules <= self.shared

    def _add(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Pair what has one counterpart in the other run, even where that has other values."""
        taken = {*self.partner.values()}
        for i, k in pairs:
            if i not in self.partner and k not in taken:
                self.partner[i] = k
                taken.add(k)

    def _of_parameter(self, i: int) -> Iterator[int]:
        """The other run's updates of the parameter that has the same values as that of an update.

        Zeros have no counterpart: they may be the state of an optimizer.
        """
        one, other = self.one.arrays, self.other.arrays
        if one[i].kind == UPDATE:
            inputs = (t for t in self.twins if one[t].kind == INPUT and one[t].name == one[i].name)
            names = {other[self.twins[t]].name for t in inputs if self.one.rms[t]}
            yield from (k for k, a in enumerate(other) if a.kind == UPDATE and a.name in names)

    def _masked(self, i: int) -> Iterator[int]:
        """The masked scores of the other run, of masked scores.

        What reads them may have the same values in both runs, but for rounding: the Inf tell more.
        """
        array, other = self.one.arrays[i], self.other
        if array.bad and self.one.masks(i):
            for k in (
                k for r in array.reads if r in self.twins for k in other.readers[self.twins[r]]
            ):
                alike = other.arrays[k].bad and _group(other.arrays[k]) == _group(array)
                if alike and k not in self.found and other.masks(k):
                    yield k

    def _compiled(self, ours: set[int], theirs: set[int]) -> list[tuple[int, int]]:
        """Results of compiled code that are off, with those of their shape, the nearest first."""
        one, other, taken = self.one.arrays, self.other.arrays, {*self.partner.values()}
        off = {i for i in self.one.results if one[i].name == COMPILED} - ours
        off_there = {k for k in self.other.results if other[k].name == COMPILED} - theirs
        calls = [k for k in self.other.results if k not in taken]
        rest = (i for i in self.one.results if i not in self.partner)
        pairs = ((i, k) for i in rest for k in calls if i in off or k in off_there)
        alike = [(i, k) for i, k in pairs if _end_of(one[i]) == _end_of(other[k])]
        return sorted(alike, key=lambda pair: self.differences(*pair)[0][PROJECTIONS].max())

    def rows(self) -> tuple[list[Compared], Compared | None]:
        """All pairs in program order, and the first that rounding does not explain."""
        ours, theirs = self._passed()
        self._add(self._compiled(ours, theirs))
        rows: list[Compared] = []
        for i, j in self._places():
            if i is not None and j is not None:
                rows.append(self._pair(i, j))
            elif i is not None:
                verdict = _alone(self.one, i, self.other, i in ours)
                rows.append(Compared(self.one.arrays[i], None, verdict))
            elif j is not None:
                verdict = _alone(self.other, j, self.one, j in theirs)
                rows.append(Compared(None, self.other.arrays[j], verdict))
        first = next((r for r in rows if r.verdict in (UNEXPLAINED, ALONE)), None)
        if first is None or (first.one is not None and first.other is not None):
            return rows, first
        return rows, self._beside(first)

    def _places(self) -> Iterator[tuple[int | None, int | None]]:
        """The arrays of both runs in program order, pairs and those that only one has."""
        other, partners = self.other, {*self.partner.values()}
        lone = [j for j in range(len(other.arrays)) if j not in partners]
        ends: list[int] = []
        if self.by_values:
            # Where ops are split otherwise, what only the other run has says nothing but at an end.
            calls = [j for j in lone if other.arrays[j].kind == RESULT]
            lone = [j for j in calls if other.arrays[j].name == COMPILED]
            ends = [j for j in calls if j not in lone and not other.readers[j]]
        for i in range(len(self.one.arrays)):
            j = self.partner.get(i)
            while j is not None and lone and lone[0] < j:
                yield None, lone.pop(0)
            yield i, j
        yield from ((None, j) for j in (*lone, *ends))

    def _passed(self) -> tuple[set[int], set[int]]:
        """Of both runs, the arrays that need no counterpart."""
        shared = self.shared if self.ported else set()
        left = self._not_comparable() if self.by_values else set()
        kept = left.union(self.partner, self.one.unjudged)
        ours = _vouched_for(self.one, kept, {*self.twins}, shared)
        kept = self.found.union(self.partner.values(), self.other.unjudged)
        return ours | left, _vouched_for(self.other, kept, self.found, shared)

    def _not_comparable(self) -> set[int]:
        """Updates and gradients of inputs that only the first run has, and what these alone read.

        Such inputs are the state of an optimizer, or weights that one framework packs into one.
        Between frameworks they are not compared.
        """
        arrays, other = self.one.arrays, self.other.arrays
        news = {a.name for i, a in enumerate(arrays) if a.kind == INPUT and i not in self.twins}
        lost = {_group(a) for j, a in enumerate(other) if j not in self.found}
        left: set[int] = set()
        for i in reversed(range(len(arrays))):
            a, readers = arrays[i], self.one.readers[i]
            state = a.kind == UPDATE and _group(a) not in lost
            end = state or (a.kind in (GRADIENT, UPDATE) and a.name in news)
            if i not in self.twins and (end or (readers and left.issuperset(readers))):
                left.add(i)
        return left

    def _pair(self, i: int, j: int) -> Compared:
        one, other = self.one.arrays[i], self.other.arrays[j]
        if i in self.one.unjudged or j in self.other.unjudged:
            return Compared(one, other, UNJUDGED)
        difference, allowed = self.comparable(i, j)
        share, at = _worst(difference, allowed)
        size = max(one.values[RMS], other.values[RMS]) or 1.0
        off = float(difference[at]) / size
        part = PROJECTIONS if len(difference) == VALUES else slice(RMS, RMS + 1)
        means = [float((x[part] ** 2).mean() ** 0.5) / size for x in (difference, allowed)]
        verdict = EXPLAINED if share <= 1 else UNEXPLAINED
        return Compared(one, other, verdict, off, float(allowed[at]) / size, share, *means)

    def _beside(self, row: Compared) -> Compared:
        """A call that only one run has, beside the call of the other that reads the same values."""
        mine, theirs, twins = self.one, self.other, self.twins
        # Within one framework, a call that is aligned with another is no counterpart.
        aligned = self.twins if self.by_values else self.partner
        taken = {*aligned.values()}
        if row.one is None:
            mine, theirs, taken = theirs, mine, {*aligned}
            twins = {j: i for i, j in twins.items()}
        at = next(i for i, a in enumerate(mine.arrays) if a is row.array)
        sources = {twins[s] for s in mine.arrays[at].reads if s in twins}
        computed = {s for s in sources if theirs.arrays[s].kind == RESULT}  # inputs have others
        found: list[tuple[bool, bool, int]] = []
        for k in (k for s in computed or sources for k in theirs.readers[s] if k not in taken):
            a = theirs.arrays[k]
            size, name = a.size != row.array.size, not _alike(a, row.array)
            fits = not (size and name) if self.by_values else not name  # nor is one of another op
            if fits and a.direction == row.array.direction and k not in theirs.unjudged:
                found.append((size, name, k))
        if not found:
            return row
        size, name, k = min(found)
        if not (size or name):
            pair = (at, k) if row.one is not None else (k, at)
            return self._pair(*pair)._replace(verdict=UNEXPLAINED)
        beside = theirs.arrays[k]
        return row._replace(one=row.one or beside, other=row.other or beside)


def in_another_dtype(row: Compared) -> bool:
    """True if two frameworks run one op in other dtypes: a product, a softmax or a norm."""
    one, other = row.one, row.other
    if one is None or other is None or not _alike(one, other):
        return False
    large = ("matmul", "convolution", "softmax", "normalisation")
    return vocabulary().op(one.name).kind in large and one.run != other.run


# --- calls side by side ---------------------------------------------------------------------------


def _by_name(one: Side, other: Side) -> dict[int, int]:
    """Inputs, gradients and updates by name and size; not the ones and zeros of a backward pass."""

    def named(side: Side) -> Iterator[tuple[tuple[Any, ...], int]]:
        counts: dict[tuple[Any, ...], int] = {}
        for i, (a, module) in enumerate(zip(side.arrays, side.modules, strict=True)):
            if a.kind != RESULT and not (a.kind == INPUT and a.direction == BACKWARD):
                key = a.kind, a.name.rpartition(".")[2], module, a.shape
                counts[key] = counts.get(key, 0) + 1
                yield (*key, counts[key]), i

    theirs = dict(named(other))
    return {i: theirs[key] for key, i in named(one) if key in theirs}


def _by_place(one: Side, other: Side, common: bool) -> dict[int, int]:
    """Calls by module, if both runs have these in common, direction, op and shape, in order."""

    def keys(side: Side) -> list[tuple[Any, ...]]:
        arrays = [(side.modules[i] if common else "", side.arrays[i]) for i in side.results]
        return [(module, a.direction, shared_name(a.name), a.shape) for module, a in arrays]

    pairs: dict[int, int] = {}
    for part, i, end, j, last in blocks(keys(one), keys(other)):
        if part == "equal":
            pairs.update(zip(one.results[i:end], other.results[j:last], strict=True))
    return pairs


def _alike(one: RecordedArray, other: RecordedArray) -> bool:
    return one.kind == other.kind and (
        one.kind != RESULT or shared_name(one.name) == shared_name(other.name)
    )


# --- what only one run has ------------------------------------------------------------------------


def _alone(side: Side, i: int, other: Side, passed: bool) -> str:
    """The verdict of an array that only one run has."""
    if side.call(i) in side.lost | other.lost:
        return UNJUDGED
    array = side.arrays[i]
    # The other run may have made it in compiled code.
    hidden = other.compiled and array.kind == RESULT and array.name != COMPILED
    return PASSED if passed or hidden or array.kind == INPUT else ALONE


def _vouched_for(side: Side, kept: set[int], vouchers: set[int], shared: set[str]) -> set[int]:
    """The arrays of one run that need no counterpart: all that reads them has the same values.

    A reader is one of the `vouchers`, which have a twin, or is vouched for itself; one that is
    `kept`, and has other values, tells nothing.
    Readers in the backward pass count for what has no others: the gradient of a loss reads the
    scores, for their shape, and is made of the targets alone. So all that reads such an array
    counts. It does, too, of what only single numbers tell of, such as a loss, which may be the same
    by chance.
    Two frameworks split the modules that both have into other calls, but have the same numbers
    where such a module, one of `shared`, hands them on.
    """
    vouched = {*vouchers}
    weak = {i for i in vouchers if side.arrays[i].size == 1}  # and what these alone tell of
    late = _after_backward(side.arrays)
    parts = [_group(a)[0] for a in side.arrays]
    for i in reversed(range(len(side.arrays))):
        if i in kept or i in vouched:
            continue
        readers = side.readers[i]
        near = [r for r in readers if parts[r] == parts[i]]
        handed = side.modules[i] in shared and side.arrays[i].direction != BACKWARD
        if handed and any(side.modules[r] != side.modules[i] for r in near):
            continue
        told = [r for r in near or readers if r in vouched]
        if not near or weak.issuperset(told):
            near = readers
            weak.add(i)
        if (told and all(r in vouched or r in kept for r in near)) or (not readers and i in late):
            vouched.add(i)
    return vouched


def _after_backward(arrays: Sequence[RecordedArray]) -> set[int]:
    """The results of what only looks at gradients, as the norm of all of them."""
    late: set[int] = set()
    for i, a in enumerate(arrays):
        back = (r in late or arrays[r].direction == BACKWARD for r in a.reads)
        if a.kind == RESULT and a.direction != BACKWARD and any(back):
            late.add(i)
    return late


def _end_of(a: RecordedArray) -> tuple[Any, ...]:
    """In which the result of compiled code and the last call in it agree."""
    return a.shape, a.direction


def _is_returned(a: RecordedArray) -> bool:
    """True for what a function returns, which no call of its own makes."""
    return a.kind == RESULT and not a.run and a.name != COMPILED


# --- numbers --------------------------------------------------------------------------------------


def _worst(difference: Any, allowed: Any) -> tuple[float, int]:
    """How many times larger a difference is than what is allowed, at most, and of which number."""
    ratios = np.divide(difference, allowed, out=np.full_like(difference, np.inf), where=allowed > 0)
    ratios = np.where(difference == 0, 0.0, ratios)
    at = int(ratios.argmax())
    return float(ratios[at]), at


def _of_two_elements(projections: Any, noise: float) -> bool:
    """True if two elements at most make the difference: projections have their sum, or difference.

    A projection has each element with a sign; of many elements, all sums differ. Beside much noise
    that is not seen.
    """
    sizes = np.sort(projections)
    most = float(sizes[-1])
    return noise < 0.1 * most and int((np.diff(sizes) > max(noise, 1e-3 * most)).sum()) <= 1


def _certainty(squares: tuple[Any, Any], probes: tuple[int, int]) -> Any:
    """Degrees of freedom of the sum of two mean squares, each of so many.

    Source:
        Welch, "The generalization of 'Student's' problem when several different population
        variances are involved", Biometrika 34 (1947).
    """
    one, other = (count or math.inf for count in probes)  # an estimate without probes is no sample
    own, theirs = squares
    parts = own**2 / one + theirs**2 / other
    whole = np.full_like(parts, one + other)
    return np.divide((own + theirs) ** 2, parts, out=whole, where=parts > 0)


def _quantile(normal: float, degrees: Any) -> Any:
    """Student's quantile where a normal distribution has the given one.

    Source:
        Wallace, "Bounds on normal approximations to Student's and the chi-square distributions",
        Ann. Math. Statist. 30 (1959).
    """
    degrees = np.minimum(degrees, 1e9)
    scaled = normal * (8 * degrees + 3) / (8 * degrees + 1)
    return np.sqrt(degrees * np.expm1(scaled**2 / degrees))
