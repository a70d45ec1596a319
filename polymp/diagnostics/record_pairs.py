"""The arrays of two recorded steps, matched, and held to what rounding explains: see `compare`.

A number may be off by

    t(1e-6 / numbers; squares) * sqrt(spread_one^2 + spread_other^2) + 5e-7 RMS

where t is Student's quantile: a spread is a mean of squares, one for each probe of both records, of
projections eight for each, and is less certain the fewer these are. The last part is the error of
the numbers themselves. `spreads` has the spread.

    partner   the array of the other run that one is held against: that in its place of the program,
              by module, op, shape and order, or its twin
    twin      the array of the other run that has the same values, but for rounding
    weak      of twins: rounding explains so much that arrays of other values would be twins, too
    passed    what only one run has, but what reads it has a twin: it vouches for what it reads
"""

import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from polymp.diagnostics.alignment import blocks, shared_name
from polymp.diagnostics.call_record import BACKWARD
from polymp.diagnostics.rounding import CHANCE, effect, exact, factor
from polymp.diagnostics.run_record import (
    AMAX,
    COMPILED,
    ELEMENTS,
    GRADIENT,
    INPUT,
    MEAN,
    ORDERLESS,
    PROJECTIONS,
    RESULT,
    RMS,
    UPDATE,
    VALUES,
    RecordedArray,
    RecordedStep,
)
from polymp.diagnostics.spreads import roundoff_of_inputs, spreads
from polymp.dtypes import FORMATS
from polymp.rules.vocabulary import vocabulary

_ERROR = 2.0**-21  # of sums in float32, relative to the root mean square
_LEAST = 2.0**-126  # that float32 can tell, in which spreads are shares of the largest magnitude
_IN_ORDER = 0.5  # of the standard deviation: numbers that are off by less have one order
_FAR = 20.0  # times what a mean is allowed to be off, and the root of the number of elements
_ROUGH = 1e-3  # a root mean square that is known to this tells arrays apart
_SAME = 0.85  # of the calls of the shorter program; with fewer aligned, values match the calls
_POOLED = 64  # elements from which on the mean of their squares is certain
_FEW = 16  # elements, of which two are too many
_MOST = 1e150  # with a square in the range of float64
_BY_CHANCE = 0.1  # arrays that agree with another: from there on, it says nothing
_NOISE = 0.1  # of the root mean square: an array that rounding moves by more tells nothing

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
        off = compiled and self.verdict in (UNEXPLAINED, ALONE)
        array = self.other if off else self.one or self.other
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
        values = np.array([a.values for a in step.arrays], np.float64).reshape(-1, VALUES)
        scale = _MOST / values[:, [AMAX]].clip(_MOST)
        self.values = (values * scale).clip(-_MOST, _MOST)
        self.rms, self.largest = self.values[:, RMS], self.values[:, AMAX]
        self.sizes = np.array([a.size for a in step.arrays], np.int64)
        self.spread = spreads(step.arrays, probes) * scale
        self.roundoff = roundoff_of_inputs(step.arrays)
        self.masks: set[int] = set()  # arrays of which only a mask can have made the Inf
        for i, a in enumerate(step.arrays):
            if a.bad and self._is_mask(i):
                self.masks.add(i)
        # Arrays that rounding moves by so much as no one knows.
        self.unjudged = {i for i, a in enumerate(step.arrays) if math.inf in a.spread}
        self.results = [i for i, a in enumerate(step.arrays) if a.kind == RESULT]
        inputs = [i for i, a in enumerate(step.arrays) if a.kind == INPUT]
        self.input_bits = {i: 1 << n for n, i in enumerate(inputs)}
        self.inputs = {step.arrays[i].name: i for i in inputs}
        groups: dict[tuple[str, int], list[int]] = {}
        self.readers: list[list[int]] = [[] for _ in step.arrays]
        for i, a in enumerate(step.arrays):
            for source in a.reads:
                self.readers[source].append(i)
            if i not in self.unjudged:
                groups.setdefault(_group(a), []).append(i)
        self.groups = {key: np.array(at) for key, at in groups.items()}

    def place(self, array: RecordedArray) -> int:
        """Where an array is among those of the run."""
        return next(i for i, a in enumerate(self.arrays) if a is array)

    def call(self, i: int) -> tuple[str, ...]:
        """The kind, op, direction and module of an array."""
        a = self.arrays[i]
        return a.kind, shared_name(a.name), a.direction, self.modules[i]

    def forward(self, i: int) -> bool:
        """True if an array is of the forward pass."""
        return self.arrays[i].direction != BACKWARD

    def made_of(self, calls: set[tuple[str, ...]]) -> set[int]:
        """The arrays of some calls, all that is made of them, and the backward of these calls.

        The gradient of a sum has the shape of what was added up, and is made of none of it.
        """
        made: set[int] = set()
        backward: set[tuple[str, ...]] = set()
        for i, a in enumerate(self.arrays) if calls else ():
            call = self.call(i)
            if call in calls or call in backward or not made.isdisjoint(a.reads):
                made.add(i)
                kind, op, _, module = call
                backward.add((kind, op, BACKWARD, module))
        return made

    def made_of_compiled(self) -> set[int]:
        """The arrays that compiled code makes, or that are made of these."""
        code = {self.call(i) for i in self.results if self.arrays[i].name == COMPILED}
        ends = {i for i, a in enumerate(self.arrays) if a.kind in (GRADIENT, UPDATE)}
        return self.made_of(code) | ends

    def ends(self) -> Iterator[int]:
        """Results that no forward call reads; of compiled code, another may be read."""
        forward = set(filter(self.forward, self.results))
        ends = (i for i in forward if forward.isdisjoint(self.readers[i]))
        return (i for i in ends if self.arrays[i].name != COMPILED)

    def sizes_of_ends(self, kept: set[int]) -> set[int]:
        """The sizes of all ends but those that are `kept`."""
        return {int(self.sizes[i]) for i in self.ends() if i not in kept}

    def is_state(self, name: str) -> bool:
        """True of an input that updates alone read, and not its own alone: of an optimizer."""
        readers = self.readers[self.inputs[name]] if name in self.inputs else []
        return len(readers) > 1 and all(self.arrays[r].kind == UPDATE for r in readers)

    def above_noise(self, i: int) -> bool:
        """True if an array is more than rounding, which the gradient of a key's bias is."""
        return i not in self.unjudged and not self.spread[i][RMS] > _NOISE * self.rms[i]

    def varies(self, i: int) -> bool:
        """True if not all elements of an array are the same, by which their order is known."""
        return bool(self.rms[i] - abs(self.values[i][MEAN]) > _ERROR * self.rms[i])

    def _is_mask(self, i: int) -> bool:
        """True if only a mask can have made the Inf of an array; others may overflow in one run."""
        a = self.arrays[i]
        if a.dtype not in FORMATS or self.largest[i] > FORMATS[a.dtype].max / 4:
            return False
        bad = {r for r in a.reads if self.arrays[r].bad}
        makes = a.kind == INPUT or exact(a.name) or effect(a.name) == "added"
        return bad <= self.masks if bad else makes


def _group(a: RecordedArray) -> tuple[str, int]:
    """Arrays of other sizes, or of another part of the step, are never the same."""
    back = a.direction == BACKWARD or a.kind == GRADIENT
    return UPDATE if a.kind == UPDATE else BACKWARD if back else "", a.size


def part(a: RecordedArray) -> str:
    """The part of a step that an array is of, which a run may be without; "" if it is forward."""
    if a.kind in (GRADIENT, UPDATE):
        return a.kind
    return BACKWARD if a.direction == BACKWARD else ""


class Pairs:
    """The arrays of two runs, matched."""

    def __init__(self, one: Side, other: Side, ported: bool, held: Mapping[str, str]) -> None:
        self.one, self.other = one, other
        self.ported = ported  # True of two frameworks
        if one.compiled and other.compiled:  # no one knows how far rounding moves what both make
            for side in (one, other):
                side.unjudged |= side.made_of_compiled()
        self.deviations = factor(VALUES * (len(one.arrays) + len(other.arrays)))
        paths = [{side.modules[i] for i in side.results} - {""} for side in (one, other)]
        self.shared = paths[0] & paths[1]  # module paths that both have, and the top level
        if self.shared:
            self.shared.add("")
        # Of the first run: the array that it is held against.
        self.partner = {} if ported else _by_name(one, other)
        calls = {} if ported else _by_place(one, other, bool(self.shared))
        # Those of another program, as a port or what a region makes of it, are matched by values.
        self.by_values = ported or len(calls) < _SAME * min(len(one.results), len(other.results))
        if not self.by_values:
            self.partner |= calls
        self.twins: dict[int, int] = {}  # of the first run: the array of the other with its values
        for i in range(len(one.arrays)):
            if (j := self._twin_of(i, self.partner.get(i))) is not None:
                self.twins[i] = j
        # Those whose values tell nothing.
        self.weak = {i: j for i, j in self.twins.items() if not self._tells(i, j)}
        # Where a call was aligned wrongly, its twin is its partner, and the other one is left; as
        # are two that read different arrays.
        taken, apart = {*self.twins.values()}, self._reading_other_arrays()
        pairs = self.partner.items()
        self.partner = {i: j for i, j in pairs if j not in taken and i not in apart} | self.twins
        self.partners = {*self.partner.values()}
        # Of the other run: the arrays whose values the first one has.
        rest = (j for j in range(len(other.arrays)) if j not in self.partners)
        self.found = {*self.twins.values(), *filter(self._with_values_of, rest)}
        self.ends = self._ends()
        self.partner |= self.ends
        self.partners |= {*self.ends.values()}
        # Weights that were `held` against each other in the step before, by their names.
        for i, array in enumerate(one.arrays):
            k = self._update_of(i) if array.kind == UPDATE else self._other_mask(i)
            k = other.inputs.get(held.get(array.name, "")) if array.kind == INPUT else k
            if i not in self.partner and k is not None and k not in self.partners:
                self.partner[i] = k
                self.partners.add(k)

    def _reading_other_arrays(self) -> set[int]:
        """Calls aligned with one that reads other arrays of those that both runs have."""
        apart, known = set[int](), self.partner | self.twins
        both_have = {*known.values()}
        for i, j in self.partner.items():
            if self.one.arrays[i].kind == RESULT:
                ours = {known[r] for r in self.one.arrays[i].reads if r in known}
                theirs = both_have.intersection(self.other.arrays[j].reads)
                if ours and theirs and ours.isdisjoint(theirs):
                    apart.add(i)
        return apart

    def _ends(self) -> dict[int, int]:
        """Compiled code that reads results of the other run, with the end of its module there.

        That is its partner if it has no twin, or none of the calls that read it has: a sum without
        one of its terms has a twin, too.
        """
        pairs: dict[int, int] = {}
        ours, theirs = (self.one, {*self.twins}), (self.other, self.found)
        for (mine, told), (side, known) in ((ours, theirs), (theirs, ours)):
            for at in (i for i in mine.results if mine.arrays[i].name == COMPILED):
                readers = mine.readers[at]
                off = at not in told or (readers and told.isdisjoint(readers))
                if off and told.issuperset({*mine.arrays[at].reads}.intersection(mine.results)):
                    end = _same_end(mine, at, side)
                    if end is not None and end not in known and side.arrays[end].name != COMPILED:
                        i, j = (at, end) if mine is self.one else (end, at)
                        pairs[i] = j
        return pairs

    def differences(self, i: int, j: Any) -> tuple[Any, Any]:
        """The differences of the numbers of two arrays, and what rounding explains of each."""
        a, b = self.one, self.other
        squares = a.spread[i] ** 2, b.spread[j] ** 2
        # Of compiled code it is not known: it is taken to be that of the other run.
        same = a.compiled or b.compiled
        spread = np.sqrt(2 * np.maximum(*squares) if same else sum(squares))
        size = np.maximum(a.rms[i], b.rms[j])
        floor = np.zeros(VALUES)
        floor[RMS : PROJECTIONS.stop] = _ERROR
        # A spread is the root of a mean of so many squares: one of each probe; of projections, for
        # which all elements are squared, as many as there are of these.
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
            a.roundoff[i] == b.roundoff[j], _LEAST, np.maximum(a.roundoff[i], b.roundoff[j])
        )
        stored = np.maximum(a.largest[i], b.largest[j]) + self.deviations * size / math.sqrt(3)
        allowed += np.multiply.outer(low * stored, np.ones(VALUES))
        return np.abs(a.values[i] - b.values[j]), allowed

    def comparable(self, i: int, j: int, strict: bool = False) -> tuple[Any, Any]:
        """The same of those that can be compared; `strict` where they alone say what is a pair."""
        one, other = self.one.arrays[i], self.other.arrays[j]
        difference, allowed = self.differences(i, j)
        masks = i in self.one.masks and j in self.other.masks
        if (one.bad != other.bad) if masks else (bool(one.bad) != bool(other.bad)):
            difference = np.full(VALUES, math.inf)  # rounding alone moves none of these
        ordered = self._in_order(i, j, allowed[RMS])
        if one.kind == UPDATE and not strict:
            # Adam's first steps have the sign of the gradient. Where that is as small as its
            # rounding, an element jumps: each may, and so many that no probe has shown; two alone
            # are told from other differences by their projections.
            jump = 2 * max(one.values[AMAX], other.values[AMAX])
            allowed[ELEMENTS] += jump
            jumps = self._jumps(i, j)
            if not ordered or jumps > 2:
                allowed[ORDERLESS] += max(jumps, 2) * jump / one.size
                allowed[PROJECTIONS] += jumps * jump / math.sqrt(one.size)
            elif _of_two_elements(difference[PROJECTIONS], float(allowed[PROJECTIONS].max())):
                allowed = np.maximum(allowed, difference)
        part = slice(0, VALUES) if ordered else ORDERLESS
        return difference[part], allowed[part]

    def _jumps(self, i: int, j: int) -> int:
        """How many elements of an update may jump that no probe has shown.

        The sign of a gradient turns where it is as small as its noise: a Poisson number of them, of
        which probes show some where one is likely.
        """
        noise = 0.0
        for side, at in ((self.one, i), (self.other, j)):
            read = [r for r in side.arrays[at].reads if side.rms[r] and r not in side.unjudged]
            shares = (side.spread[r][PROJECTIONS.start] / side.rms[r] for r in read)
            noise = math.hypot(noise, max(shares, default=0.0))
        rate = float(self.one.sizes[i]) * noise / math.pi
        if rate > 1:
            return 0
        return next(k for k in range(10) if rate ** (k + 1) < CHANCE * math.factorial(k + 1))

    def _other_mask(self, i: int) -> int | None:
        """The masked scores of the other run where those of the first have no twin; None of others.

        What reads them may have the same values in both runs, but for rounding: the Inf tell more.
        """
        array, other = self.one.arrays[i], self.other
        if i not in self.one.masks:
            return None
        read = [self.twins[r] for r in array.reads if r in self.twins]
        for k in (k for j in read for k in other.readers[j]):
            if k in other.masks - self.found and _group(other.arrays[k]) == _group(array):
                return k
        return None

    def _update_of(self, i: int) -> int | None:
        """The other run's update of the parameter with the same values; None if none is known."""
        name, other = (INPUT, self.one.arrays[i].name), self.other.arrays
        for at, j in self.twins.items():
            a = self.one.arrays[at]
            if (a.kind, a.name) == name and self.one.rms[at]:  # zeros may be an optimizer's state
                updates = (k for k, b in enumerate(other) if b.kind == UPDATE)
                return next((k for k in updates if other[k].name == other[j].name), None)
        return None

    def excess(self, i: int, j: int, strict: bool = False) -> float:
        """How many times larger the largest difference is than what rounding explains."""
        return _worst(*self.comparable(i, j, strict))[0]

    def _in_order(self, i: int, j: int, allowed: float) -> bool:
        """True if two arrays have their elements in the same order.

        Between frameworks leading axes may be one, and equal lengths other axes: the values tell
        it, as numbers in another order are off by as much as those of any two arrays; and means
        that are off by no more than is `allowed` are of elements that are not off by much more, or
        in another order. Shapes without equal lengths tell it of arrays whose means tell nothing.
        """
        one, other, mine = self.one.arrays[i], self.other.arrays[j], self.one.values[i]
        if self.by_values:
            if one.kind in (GRADIENT, UPDATE):
                if self.one.compiled or self.other.compiled:
                    return False  # it adds up in float32 where torch's norms do in float64
                # The order is that of the weight; Adam's first update has two values alone.
                k, n = self.one.inputs.get(one.name), self.other.inputs.get(other.name)
                if k is not None and n is not None and self.twins.get(k) == n:
                    if self.one.varies(k):
                        return self._in_order(k, n, self.differences(k, n)[1][RMS])
            ends = [{*itertools.accumulate(a.shape, operator.mul)} for a in (one, other)]
            off = ((mine - self.other.values[j])[PROJECTIONS.start :] ** 2).mean()
            most = _IN_ORDER**2 * (mine[RMS] ** 2 - mine[MEAN] ** 2)
            near = off < min(most, (_FAR * allowed) ** 2 * one.size)
            lengths = [n for n in one.shape if n > 1]
            vague = len({*lengths}) == len(lengths) and allowed > _ROUGH * mine[RMS]
            same = vague and one.shape == other.shape
            return bool(same or (near and (ends[0] <= ends[1] or ends[1] <= ends[0])))
        # The gradient of a matrix may come as its transpose, which is turned later.
        turned = one.direction == BACKWARD and vocabulary().op(one.name).kind == "matmul"
        return one.shape == other.shape and not (turned and len({*one.shape}) < len(one.shape))

    def _twin_of(self, i: int, placed: int | None) -> int | None:
        """The array of the other run that has the values of one of the first; None without.

        The one in its place may be wrong: of another call in the module, as a product with a bias
        beside one without.
        """
        array = self.one.arrays[i]
        if i in self.one.unjudged or placed in self.other.unjudged:
            return None
        if placed is not None and self.excess(i, placed) <= 1:
            return placed
        if placed is not None and array.kind not in (RESULT, INPUT):
            return None
        fits = [j for _, j in self._with_values(i, self.other.groups.get(_group(array)))]
        fits = [j for j in fits if _alike(self.other.arrays[j], array)] or fits
        if placed is not None:
            fits = [j for j in fits if self.one.rms[i] and self._near(i, j)]
        return next(iter(fits), None)

    def _with_values_of(self, j: int) -> list[int]:
        """The arrays of the first run that have the values of one of the other."""
        at = self.one.groups.get(_group(self.other.arrays[j]))
        return [i for i, _ in self._with_values(at, j)]

    def _with_values(self, i: Any, j: Any) -> list[tuple[int, int]]:
        """Of arrays of the first run and of the other, one on one side, the pairs that agree."""
        return [pair for pair, others in self._agreeing(i, j) if others <= 1]

    def _agreeing(self, i: Any, j: Any) -> Iterator[tuple[tuple[int, int], float]]:
        """All of them, and about how many would that have other values."""
        if i is None or j is None:
            return
        difference, allowed = self.differences(i, j)
        fits = (difference[:, ORDERLESS] <= allowed[:, ORDERLESS]).all(1)
        ones, others = np.broadcast_arrays(i, j)
        for one, other in zip(ones[fits].tolist(), others[fits].tolist(), strict=True):
            if self._near(one, other):
                numbers = self.comparable(one, other, strict=True)
                if _worst(*numbers)[0] <= 1:
                    yield (one, other), self._chance(one, other, numbers[1]) * len(fits)

    def _chance(self, i: int, j: int, allowed: Any) -> float:
        """About the probability that two arrays with other values agree as well.

        Of the orderless numbers, two say something that the others do not.
        """
        size = max(self.one.rms[i], self.other.rms[j])
        told = np.concatenate([allowed[AMAX:MEAN], allowed[PROJECTIONS.start :]])
        return float((told / size).clip(max=1.0).prod()) if size else 0.0

    def _tells(self, i: int, j: int) -> bool:
        """True if it says something that two arrays agree."""
        if not (self.one.above_noise(i) and self.other.above_noise(j)):
            return False
        others = self.other.groups.get(_group(self.one.arrays[i]), ())
        chance = self._chance(i, j, self.comparable(i, j, strict=True)[1])
        return chance * (len(others) if self.by_values else 1) < _BY_CHANCE

    def _vague(self) -> tuple[dict[int, int], dict[int, int]]:
        """Of both runs, the arrays that may be some of the other, by values that tell nothing."""
        one, other = self.one, self.other
        groups = [other.groups.get(_group(a)) for a in one.arrays]
        rest = (i for i in range(len(groups)) if i not in self.twins)
        ours = [i for i in rest if any(self._agreeing(i, groups[i]))]
        groups = [one.groups.get(_group(a)) for a in other.arrays]
        left = (j for j in range(len(groups)) if j not in self.found)
        theirs = [j for j in left if any(self._agreeing(groups[j], j))]
        return dict.fromkeys([*ours, *self.weak], -1), dict.fromkeys(
            [*theirs, *self.weak.values()], -1
        )

    def _near(self, i: int, j: int) -> bool:
        """True if two arrays may be of one call: not in other modules, of those that both have.

        What a module makes may be made in the one around it, as where a scale is taken out.
        """
        pair = self.one.arrays[i], self.other.arrays[j]
        if RESULT not in [a.kind for a in pair] or any(map(_is_returned, pair)):
            return True
        one, other = self.one.modules[i], self.other.modules[j]
        around = one == other.rpartition(".")[0] or other == one.rpartition(".")[0]
        return one == other or around or not {one, other} <= self.shared

    def share(self) -> bool:
        """True if the runs have an array in common that tells it: no zeros, ones or numbers."""
        varied = [i for i in range(len(self.one.arrays)) if self.one.varies(i)]
        return not varied or not (self.twins.keys() - self.weak).isdisjoint(varied)

    def rows(self) -> tuple[list[Compared], Compared | None]:
        """All pairs in program order, and the first that rounding does not explain."""
        rows = [*self._in_program_order(*self._alone())]
        off = [row for row in rows if row.verdict in (UNEXPLAINED, ALONE)]
        if self.by_values:  # what stacks weights, say, is named if nothing that computes is off
            off = [r for r in off if not (r.verdict == ALONE and _arranges(r.array))] or off
        # What is made of nothing that both have, as a mask, may be a part of what the other splits.
        first = next(filter(self._reads_shared, off), next(iter(off), None))
        if first is None or not _lone(first):
            return rows, first
        pair = self._with_partner(first)
        if pair.verdict == UNEXPLAINED:  # a call of both runs after all
            halves = {id(pair.one), id(pair.other)}
            rows = [r for r in rows if r is first or not (_lone(r) and id(r.array) in halves)]
            rows[next(i for i, r in enumerate(rows) if r is first)] = pair
        return rows, pair

    def apart(
        self, row: Compared, called: bool = False
    ) -> tuple[list[RecordedArray], list[RecordedArray]]:
        """The arrays that a call reads in one run alone; of compiled code, floats among them.

        The other run has not their values or, `called`, its call does not read them.
        """
        reads: list[list[RecordedArray]] = []
        one, other, known = row.one, row.other, ({*self.twins}, self.found)
        alike = row.verdict != ALONE
        if one is None or other is None or not _alike(one, other):
            alike = False
        elif called and alike and row.array.name != COMPILED:
            both = itertools.product(one.reads, other.reads)
            near = [pair for pair in both if self.excess(*pair, strict=True) <= 1]
            known = {i for i, _ in near}, {j for _, j in near}
        for array, side, both_have in zip((one, other), (self.one, self.other), known, strict=True):
            own = array is not None and (array is row.array or alike)
            at = array.reads if array is not None and own else ()
            found = [side.arrays[r] for r in at if r not in both_have]
            reads.append([a for a in found if row.array.name != COMPILED or a.dtype in FORMATS])
        return reads[0], reads[1]

    def in_order(self, row: Compared) -> bool:
        """True if it is known that what a call of both runs reads is in the same order."""
        alike = row.one is not None and row.other is not None and _alike(row.one, row.other)
        reads = row.one.reads if row.one is not None and alike else ()
        if any(self.one.arrays[r].bad for r in reads):
            return False  # a record has not the places of Inf
        pairs = ((r, self.twins[r]) for r in reads if r in self.twins and self.one.sizes[r] > 1)
        return all(len(self.comparable(*pair)[0]) == VALUES for pair in pairs)

    def _reads_shared(self, row: Compared) -> bool:
        """True if both runs have an array, or one of those that it is made of first."""
        side, known = (self.other, self.found) if row.one is None else (self.one, self.twins.keys())
        both = row.one is not None and row.other is not None
        return both or not {*known}.isdisjoint(side.arrays[side.place(row.array)].reads)

    def _in_program_order(self, ours: Sequence[str], theirs: Sequence[str]) -> Iterator[Compared]:
        """Pairs, and what only one run has, with the verdicts of it."""
        other, ends = self.other.arrays, list[int]()
        lone = [j for j in range(len(other)) if j not in self.partners]
        if self.by_values:
            # Where ops are split otherwise, what only the other run has says nothing but at an end.
            calls = [j for j in lone if other[j].kind == RESULT]
            ends = [j for j in calls if other[j].name != COMPILED and not self.other.readers[j]]
            made = (j for j in lone if other[j].kind in (GRADIENT, UPDATE))
            ends += [j for j in made if theirs[j] == ALONE]
            lone = [j for j in calls if other[j].name == COMPILED]
        alone = [Compared(None, *found) for found in zip(other, theirs, strict=True)]
        for i, array in enumerate(self.one.arrays):
            j = self.partner.get(i)
            while j is not None and lone and lone[0] < j:
                yield alone[lone.pop(0)]
            yield Compared(array, None, ours[i]) if j is None else self._pair(i, j)
        yield from (alone[j] for j in (*lone, *ends))

    def _alone(self) -> tuple[list[str], list[str]]:
        """Of both runs, the verdict of each array if only this run has it."""
        shared = self.shared if self.ported else set()
        turned = {j: i for i, j in self.partner.items()}
        left = self._not_comparable(self.one, self.other, self.partner)
        left_there = self._not_comparable(self.other, self.one, turned)
        folded = self._folded()
        kept, evidence = {*self.partner, *left} - folded, self._evidence()
        known = functools.reduce(operator.or_, evidence.values(), 0)
        evidence |= dict.fromkeys(_losses(self.one, self.other), known)
        evidence |= dict.fromkeys(self.ends, known)
        nothing = _telling_nothing(
            self.one, {*kept, *evidence}, self.other.sizes_of_ends(self.found | self.partners)
        )
        vague, vague_there = self._vague()
        passed = _vouched_for(self.one, kept | nothing, evidence, shared) | left | nothing
        maybe = _vouched_for(self.one, kept | nothing, vague | evidence, shared)
        for i in folded & passed:
            self.partners.discard(self.partner.pop(i))
        told = self.found.difference(self.weak.values())
        every = dict.fromkeys(filter(self.other.above_noise, told), -1)
        every |= dict.fromkeys((*_losses(self.other, self.one), *self.ends.values()), -1)
        kept = self.found | self.partners | left_there
        sizes = self.one.sizes_of_ends({*self.partner})
        nothing = _telling_nothing(self.other, {*kept, *every}, sizes)
        passed_there = _vouched_for(self.other, kept | nothing, every, shared)
        passed_there |= self.found | nothing | left_there
        maybe_there = _vouched_for(self.other, kept | nothing, vague_there | every, shared)
        # Calls that read what is judged and make what is not, in one run, but perhaps not in both.
        first = ((s, i) for s in (self.one, self.other) for i in s.unjudged)
        failed = {s.call(i) for s, i in first if s.unjudged.isdisjoint(s.arrays[i].reads)}
        ours = _alone(self.one, self.other, passed, maybe, failed)
        return ours, _alone(self.other, self.one, passed_there, maybe_there, failed)

    def _folded(self) -> set[int]:
        """Inputs of other numbers that may be of no effect, as folded weights.

        No call of both runs reads them: what is made of them has to agree.
        """
        off = (i for i in self.partner.keys() - self.twins.keys() if self.one.readers[i])
        inputs = (i for i in off if self.one.arrays[i].kind == INPUT)
        return {i for i in inputs if self.partner.keys().isdisjoint(self.one.readers[i])}

    def _not_comparable(self, mine: Side, theirs: Side, pairs: Mapping[int, int]) -> set[int]:
        """Updates and gradients that one run alone can have, and what these alone read."""
        known = _counterparts(mine, theirs, pairs)
        graded = {a.name for a in theirs.arrays if a.kind == GRADIENT}
        of_port = self.ported and mine is self.other
        found = self.found | self.partners if theirs is self.other else pairs.values()
        lacked = {_group(a) for j, a in enumerate(theirs.arrays) if j not in found}
        left: set[int] = set()
        for i in reversed(range(len(mine.arrays))):
            a, readers = mine.arrays[i], mine.readers[i]
            if i in pairs and mine.above_noise(i):  # noise may be held against any other
                continue
            end = a.kind in (GRADIENT, UPDATE)
            # What a port returns need not be of an input; it may have gradients of which the first
            # run has none.
            names = known.get(a.name, set() if of_port else {a.name})
            alone = not (names & graded if of_port and a.kind == GRADIENT else names)
            # Another program has other state in its optimizer and, if it lacks no update, others:
            # none of weights, which vary and have counterparts.
            weight = bool(names) and mine.varies(mine.inputs.get(a.name, i))
            free = mine.is_state(a.name) or (not weight and _group(a) not in lacked)
            state = a.kind == UPDATE and self.by_values and free
            if (end and alone) or state or (readers and left.issuperset(readers)):
                left.add(i)
        return left

    def _evidence(self) -> dict[int, int]:
        """Of arrays of the first run with a twin, the inputs that it is made of: a bit for each.

        All of one that is made of none, as updates of running means are in torch.
        """
        bits: dict[int, int] = {}  # of the other run's inputs: ours with the same values
        others = self.other.input_bits.keys() & self.found - {*self.twins.values()}
        again = ((i, j) for j in others for i in self._with_values_of(j))
        for i, j in itertools.chain(self.twins.items(), again):
            if i in self.one.input_bits:
                bits[j] = bits.get(j, 0) | self.one.input_bits[i]
        made = _made_of(self.other, bits)
        return {i: made[self.twins[i]] or -1 for i in self.twins.keys() - self.weak}

    def _pair(self, i: int, j: int) -> Compared:
        one, other = self.one.arrays[i], self.other.arrays[j]
        known = self.one.unjudged.isdisjoint([i]) and self.other.unjudged.isdisjoint([j])
        if not known and _own_numbers(one) == _own_numbers(other):
            return Compared(one, other, EXPLAINED)
        # Two elements, which may jump, are too much of a few: of these, no values agreed.
        few = one.kind == UPDATE and one.size < _FEW and self.twins.get(i) != j
        difference, allowed = self.comparable(i, j, strict=few)
        share, at = _worst(difference, allowed)
        size = max(self.one.rms[i], self.other.rms[j]) or 1.0
        ends = float(difference[at]) / size, float(allowed[at]) / size
        whole = PROJECTIONS if len(difference) == VALUES else slice(RMS, RMS + 1)
        mean, limit = (float((x[whole] ** 2).mean() ** 0.5) / size for x in (difference, allowed))
        if mean > limit:  # what is off is not some elements alone
            ends = mean, limit
        verdict = UNEXPLAINED if share > 1 else EXPLAINED
        if not known:
            verdict, ends, share = UNJUDGED, (mean, math.inf), 0.0
        return Compared(one, other, verdict, *ends, share, mean, limit)

    def _with_partner(self, row: Compared) -> Compared:
        """A call that only one run has, beside the call of the other that reads the same values."""
        mine, theirs, twins = self.one, self.other, self.twins
        # Within one framework, a call that is aligned with another is no counterpart.
        aligned = self.twins if self.by_values else self.partner
        taken = {*aligned.values()}
        if row.one is None:
            mine, theirs, taken = theirs, mine, {*aligned}
            twins = {j: i for i, j in twins.items()}
        at = mine.place(row.array)
        sources = {twins[s] for s in mine.arrays[at].reads if s in twins}
        computed = {s for s in sources if theirs.arrays[s].kind == RESULT}  # inputs have others
        made = _made_of(theirs, {s: 1 << n for n, s in enumerate(sources)})
        whole = {k for k, bits in enumerate(made) if bits == (1 << len(sources)) - 1}
        found: list[tuple[bool, bool, bool, int]] = []
        readers = {k for s in computed or sources for k in theirs.readers[s]}
        readers |= {k for s in sources for k in theirs.readers[s] if k in whole}
        for k in readers - taken - theirs.unjudged:
            a, less = theirs.arrays[k], k not in whole  # as a product without its bias
            size, name = a.size != row.array.size, not _alike(a, row.array)
            fits = not (size and name) if self.by_values else not name  # nor is one of another op
            if fits and a.direction == row.array.direction:
                found.append((size, less, name, k))
        size, less, name, k = min(found, default=(True, True, True, -1))
        if not (size or less or name):
            pair = self._pair(*((at, k) if row.one is not None else (k, at)))
            return pair._replace(verdict=UNEXPLAINED)
        # What a row shows beside a call of the first run is of the other.
        return row._replace(other=theirs.arrays[k]) if found and row.one is not None else row


def _lone(row: Compared) -> bool:
    return row.one is None or row.other is None


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
        counts = Counter[tuple[Any, ...]]()
        for i, (a, module) in enumerate(zip(side.arrays, side.modules, strict=True)):
            if a.kind != RESULT and not (a.kind == INPUT and a.direction == BACKWARD):
                key = a.kind, a.name.removeprefix(f"{a.module}."), module, a.shape
                counts[key] += 1
                yield (*key, counts[key]), i

    theirs = dict(named(other))
    return {i: theirs[key] for key, i in named(one) if key in theirs}


def _by_place(one: Side, other: Side, common: bool) -> dict[int, int]:
    """Calls by module, if both runs have these in common, direction, op and shape, in order."""

    def keys(side: Side) -> list[tuple[Any, ...]]:
        arrays = [(side.modules[i] if common else "", side.arrays[i]) for i in side.results]
        return [(module, a.direction, *named(side, a), a.shape) for module, a in arrays]

    def named(side: Side, a: RecordedArray) -> tuple[Any, ...]:
        """The op and, of a sum, how many numbers it adds up: a mean of means has two."""
        sums = vocabulary().op(a.name).kind == "reduction"
        return shared_name(a.name), sums and max((side.arrays[r].size for r in a.reads), default=0)

    pairs: dict[int, int] = {}
    for part, i, end, j, last in blocks(keys(one), keys(other)):
        if part == "equal":
            pairs.update(zip(one.results[i:end], other.results[j:last], strict=True))
    return pairs


def _alike(one: RecordedArray, other: RecordedArray) -> bool:
    return one.kind == other.kind and (
        one.kind != RESULT or shared_name(one.name) == shared_name(other.name)
    )


def _arranges(a: RecordedArray) -> bool:
    return a.kind == RESULT and vocabulary().op(a.name).kind == "layout"


# --- what only one run has ------------------------------------------------------------------------


def _alone(
    side: Side, other: Side, passed: set[int], maybe: set[int], failed: set[tuple[str, ...]]
) -> list[str]:
    """The verdict of each array of one run if only this run has it."""
    lost = side.unjudged | side.made_of(failed) | maybe
    lacking = {*map(part, side.arrays)} - {*map(part, other.arrays)}
    verdicts: list[str] = []
    for i, a in enumerate(side.arrays):
        passes = i in passed or a.kind == INPUT or part(a) in lacking
        verdicts.append(PASSED if passes else UNJUDGED if i in lost else ALONE)
    return verdicts


def _counterparts(mine: Side, theirs: Side, pairs: Mapping[int, int]) -> dict[str, set[str]]:
    """By name of an input of one run, the inputs of the other with its numbers, or its partner.

    There are none of what the other run packs into one weight, which zeros of one size are told by
    their shape. If one run has more inputs of equal numbers, as zeros, some are new, and nothing
    tells which. Of the model's input, which has a line of the program in torch, the other run may
    have no gradient.
    """

    def numbers(side: Side) -> list[tuple[RecordedArray, Any]]:
        inputs = ((side.arrays[i], side.varies(i)) for i in side.input_bits)
        lengths = ((a, [n for n in a.shape if n > 1], varies) for a, varies in inputs)
        return [
            (a, (a.size if varies else (*long,), _own_numbers(a))) for a, long, varies in lengths
        ]

    counts = Counter(key for _, key in numbers(mine))
    alike: dict[Any, set[str]] = {}
    for a, key in numbers(theirs):
        alike.setdefault(key, set()).add(a.name)
    given = {a.name for a, _ in numbers(theirs) if a.source}
    found: dict[str, set[str]] = {}
    for i, (a, key) in zip(mine.input_bits, numbers(mine), strict=True):
        names = alike.get(key, set())
        paired = {theirs.arrays[pairs[i]].name} if i in pairs else set()
        found[a.name] = set() if counts[key] > max(len(names), 1) else (names | paired) - given
    return found


def _losses(side: Side, other: Side) -> list[int]:
    """The losses of one run of which the other has the gradient alone, or neither of the two."""

    def ends(s: Side) -> list[int]:
        numbers = (i for i in s.results if s.arrays[i].size == 1 and s.forward(i))
        return [i for i in numbers if not any(map(s.forward, s.readers[i]))]

    # Another number, as a count of steps, is made of nothing that the backward pass reads; a norm
    # of gradients is made of its results.
    back = {i: 2 for i, a in enumerate(other.arrays) if a.direction == BACKWARD}
    made = _made_of(other, {r: 1 for i in back for r in other.arrays[i].reads} | back)
    graded = back or any(a.direction == BACKWARD for a in side.arrays)
    own = [i for i in ends(other) if made[i] == 1 or not back]
    return ends(side) if graded and not own else []


def _vouched_for(
    side: Side, kept: set[int], vouchers: Mapping[int, int], shared: set[str]
) -> set[int]:
    """The arrays of one run that need no counterpart: what reads them has the same values in both.

    Such a reader, one of the `vouchers`, comes with the inputs that its counterpart is made of: it
    vouches for what is made of one of these, too. The gradient of a loss reads the scores, for
    their shape, and is made of the targets alone. The backward pass counts for what it alone reads;
    not for a loss, whose value it does not use.
    Two frameworks split the modules that both have into other calls, but have the same numbers
    where such a module, one of `shared`, hands them on.
    Values may be the same by chance, far behind a fault: none vouch for an array if another call of
    its pass that reads it is neither vouched for nor `kept`; one number, or an update, as Adam's
    first, which is signs, does not if any such call reads it, or another one that such alone vouch
    for. A forward call of which only updates with a counterpart are made, as those of running
    means, is a part of these: what is off is an update.
    """
    updated = {i for i in kept if side.arrays[i].kind == UPDATE}  # and what only these are made of
    inputs = dict(vouchers)  # and of those that are vouched for
    few = (i for i in vouchers if side.arrays[i].size == 1 or side.arrays[i].kind == UPDATE)
    lone = {*few}  # and those that these alone tell of
    # An input without a counterpart is no part of what is known of a counterpart.
    known = functools.reduce(operator.or_, (bits for bits in vouchers.values() if bits >= 0), 0)
    made = _made_of(side, {i: known & bit for i, bit in side.input_bits.items()})
    parts = [_group(a)[0] for a in side.arrays]
    for i in range(len(side.arrays) - 1, -1, -1):
        if i in kept or i in inputs:
            continue
        readers = side.readers[i]
        if made[i]:
            readers = [r for r in readers if r not in inputs or inputs[r] & made[i]]
        near = [r for r in readers if parts[r] == parts[i]]
        if not near and vocabulary().op(side.arrays[i].name).kind == "loss":
            continue
        handed = side.modules[i] in shared and side.forward(i)
        if handed and any(side.modules[r] != side.modules[i] for r in near):
            continue
        told = [r for r in near or readers if r in inputs]
        alone = lone.issuperset(told)
        rest = {*(readers if alone else near)} - kept - updated
        if told and rest <= {*told} | (inputs.keys() - lone):
            lone |= {i} if alone else set()
            inputs[i] = functools.reduce(operator.or_, (inputs[r] & made[i] for r in told))
        elif side.forward(i) and side.readers[i] and updated.issuperset(side.readers[i]):
            updated.add(i)
    return {*inputs} | updated


def _telling_nothing(side: Side, kept: set[int], lone: set[int]) -> set[int]:
    """Calls whose result a program prints, and those of which only noise, or a count, is made.

    Nothing reads a result that it prints, and it has another end, which is kept or which the
    backward pass reads. If ends of the other run, that this one lacks, are of its size, one of the
    `lone`, both may be what the programs return; single numbers are not. A count of steps may be an
    integer in the other run, which has no update.
    """
    prints = any(i in kept or side.readers[i] for i in side.ends())
    backward = {i for i, a in enumerate(side.arrays) if part(a)} - side.unjudged
    found = {i for i in backward if not side.above_noise(i)}
    found |= {i for i, a in enumerate(side.arrays) if a.kind == UPDATE and a.size == 1} - kept
    for i in sorted({*side.results} - kept, reverse=True):
        readers, size = side.readers[i], side.sizes[i]
        printed = prints and side.forward(i) and (size == 1 or size not in lone)
        if found.issuperset(readers) and (readers or printed):
            found.add(i)
    return found


def _made_of(side: Side, bits: Mapping[int, int]) -> list[int]:
    """The inputs that each array is made of, as the bits of these."""
    made: list[int] = []
    for i, a in enumerate(side.arrays):
        made.append(functools.reduce(operator.or_, (made[r] for r in a.reads), bits.get(i, 0)))
    return made


def _is_returned(a: RecordedArray) -> bool:
    """True for what a function returns, which no call of its own makes."""
    return a.kind == RESULT and not a.run and a.name != COMPILED


def _same_end(side: Side, at: int, other: Side) -> int | None:
    """The result with which the other run ends what is compiled here; None if it is not known.

    In both, the same ops come after it in the module. It is the last of the same shape and module
    that none of the calls before these reads.
    """
    array = side.arrays[at]

    def ran(run: Side, start: int) -> list[int]:
        top = _path(side.modules[at])
        inside = (i for i in run.results if _path(run.modules[i])[: len(top)] == top)
        return [i for i in inside if i >= start and run.arrays[i].direction == array.direction]

    after, calls = ran(side, at + 1), ran(other, 0)
    calls, rest = calls[: len(calls) - len(after)], calls[len(calls) - len(after) :]
    if [side.call(i)[1] for i in after] != [other.call(j)[1] for j in rest]:
        return None
    ends = (j for j in reversed(calls) if not {*calls}.intersection(other.readers[j]))
    return next((j for j in ends if other.arrays[j].shape == array.shape), None)


def _path(module: str) -> list[str]:
    """The parts of a module path."""
    return module.split(".") if module else []


# --- numbers --------------------------------------------------------------------------------------


def _own_numbers(a: RecordedArray) -> tuple[float, ...]:
    """The numbers that are the same of equal arrays to the last digit, as sums are not."""
    return a.zeros, a.bad, a.values[AMAX], *a.values[ELEMENTS]


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
    whole = sum(squares)
    share = np.divide(squares[0], whole, out=np.full_like(whole, 0.5), where=whole > 0)
    parts = share**2 / one + (1 - share) ** 2 / other
    return np.divide(1.0, parts, out=np.full_like(parts, one + other), where=parts > 0)


def _quantile(normal: float, degrees: Any) -> Any:
    """Student's quantile where a normal distribution has the given one.

    Source:
        Wallace, "Bounds on normal approximations to Student's and the chi-square distributions",
        Ann. Math. Statist. 30 (1959).
    """
    degrees = np.minimum(degrees, 1e9)
    scaled = normal * (8 * degrees + 3) / (8 * degrees + 1)
    return np.sqrt(degrees * np.expm1(scaled**2 / degrees))
