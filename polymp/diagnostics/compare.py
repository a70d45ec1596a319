"""`compare`: two records of what should be one computation, and the first call that rounding
cannot explain.

    read both -> align the calls -> hold each pair to what rounding explains -> the first that fails

Within one framework, calls are aligned by module path, direction, op and shape. A call that only
one side has, as where a compiled program or another library fuses ops, is looked for by its values:
it may be any array of that size on the other side, and where there is none it is passed over if
what reads it has one. Between two frameworks all calls are matched so, by the numbers that do not
depend on the order of the elements; a matrix and its transpose have the same. So
`assert_parity` finds the first op that differs.

A number may be off by

    t(1e-6 / numbers; squares) * sqrt(spread_one^2 + spread_other^2) + 5e-7 RMS

where t is Student's quantile: a spread is a mean of squares, one for each probe of both records, of
projections eight for each, and is less certain the fewer these are. The last part is the error of
the numbers themselves. Without probes, `spread` is an estimate:
each call's own rounding, and of what it reads, as far as the magnitudes tell.
"""

import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from polymp import text_table
from polymp.diagnostics import page, run_record, tables
from polymp.diagnostics.call_record import BACKWARD, RECOMPUTE, SECTIONS
from polymp.diagnostics.report_diff import matched
from polymp.diagnostics.rounding import factor, unit_roundoff
from polymp.diagnostics.run_record import (
    AMAX,
    COMPILED,
    ELEMENTS,
    GRADIENT,
    INPUT,
    ORDERLESS,
    PROJECTIONS,
    RESULT,
    RMS,
    UPDATE,
    VALUES,
    RecordedArray,
    RecordedStep,
    RecordError,
    RunRecord,
)
from polymp.dtypes import FORMATS
from polymp.errors import escaped
from polymp.rules.vocabulary import vocabulary

_ERROR = 2.0**-21  # of sums in float32, relative to the root mean square
_ROUGH = 1e-3  # a root mean square that is known to this tells arrays apart
_SAME = 0.85  # of the calls; two programs with fewer that are aligned are matched by values
_POOLED = 64  # elements from which on projections are sums of many
_COMMON = 0.5  # of the module paths; with fewer, calls are aligned by op and shape alone

# How a pair of arrays compares.
EXPLAINED, UNEXPLAINED, ALONE, PASSED = "explained", "not explained", "only one run", "passed over"


class Compared(NamedTuple):
    """An array of one run beside that of the other."""

    one: RecordedArray | None  # None if only the other run has it
    other: RecordedArray | None
    verdict: str  # "explained", "not explained", "only one run" or "passed over"
    # The largest difference of two numbers, beside what rounding explains, as a fraction of the
    # root mean square; 0 where only one run has the array.
    difference: float = 0.0
    allowed: float = 0.0
    # The same of the whole array: of the root mean square difference, or between two frameworks of
    # the difference of the root mean squares.
    mean_difference: float = 0.0
    mean_allowed: float = 0.0

    @property
    def array(self) -> RecordedArray:
        """The array of the first run, or else of the other."""
        array = self.one or self.other
        assert array is not None
        return array

    def share(self) -> float:
        """Return how much of what rounding explains the difference takes: 1 for all."""
        if not self.difference:
            return 0.0
        return self.difference / self.allowed if self.allowed else math.inf

    @property
    def dtypes_differ(self) -> bool:
        """True if both runs have it in other dtypes."""
        if self.one is None or self.other is None:
            return False
        return (self.one.run, self.one.dtype) != (self.other.run, self.other.dtype)

    @property
    def parts(self) -> str:
        """How the programs differ here; "" if both make the same call in the same dtypes."""
        if self.one is None or self.other is None:
            return "only one run has it"
        if not _alike(self.one, self.other):
            return f"{self.other.name} in the other run"
        return "in other dtypes" if self.dtypes_differ else ""

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data, without the numbers of the arrays."""

        def side(array: RecordedArray | None) -> dict[str, Any] | None:
            if array is None:
                return None
            left_out = ("values", "spread", "reads", "own")
            data = {k: v for k, v in array._asdict().items() if k not in left_out}
            return data | {"rms": array.values[RMS], "amax": array.values[AMAX]}

        finite = math.isfinite(self.difference)  # JSON has no Inf
        return {
            "one": side(self.one),
            "other": side(self.other),
            "verdict": self.verdict,
            "difference": self.difference if finite else None,
            "allowed": self.allowed,
        }


class Comparison:
    """The comparison of two records; true if there is a difference that rounding cannot explain.

    `print` shows: whether it is the same program, or where the two part; the first call that
    rounding cannot explain; how the difference grows from module to module; and what was not
    compared, and why.

    Attributes:
        names: of the two records.
        step: the number of the step that is shown: the first that differs, or else the last.
        rank: its rank; 0 without ranks.
        rows: all arrays of the step, in program order.
        parted: the first call that only one run has, or that runs in another dtype; None if there
            is none.
        first: the first array that rounding cannot explain; None if it explains all.
        headers: of the two records; see `RunRecord`.
        notes: what was not compared, and why, a sentence each.

    Args:
        names: see the attributes, as of all others.
        step: likewise.
        rank: likewise.
        rows: likewise.
        first: likewise.
        headers: likewise.
        notes: likewise.
    """

    def __init__(
        self,
        names: tuple[str, str],
        step: int,
        rank: int,
        rows: Sequence[Compared],
        first: Compared | None,
        headers: tuple[Mapping[str, Any], Mapping[str, Any]],
        notes: Sequence[str],
    ) -> None:
        self.names: tuple[str, str] = names
        self.step: int = step
        self.rank: int = rank
        self.rows: tuple[Compared, ...] = tuple(rows)
        self.first: Compared | None = first
        self.headers: tuple[Mapping[str, Any], Mapping[str, Any]] = headers
        self.notes: tuple[str, ...] = tuple(notes)

    @property
    def explained(self) -> bool:
        """True if rounding explains all differences."""
        return self.first is None

    @functools.cached_property
    def parted(self) -> Compared | None:
        """The first call that only one run has, or that runs in another dtype."""
        calls = (row for row in self.rows if row.array.kind == RESULT)
        if self._across:  # which split ops in their own ways, and have small ones in other dtypes
            return next((row for row in calls if _other_policy(row.one, row.other)), None)
        return next((row for row in calls if row.parts), None)

    @property
    def _across(self) -> bool:
        return len({header.get("framework") for header in self.headers}) > 1

    def growth(self) -> list[tuple[str, str, float, float]]:
        """Return how the difference grows: direction, module, difference, what is allowed.

        The last array of each module in program order; `mean_difference` and `mean_allowed`.
        """
        ends: dict[tuple[str, str], Compared] = {}
        for row in self.rows:
            if row.array.kind == RESULT and row.one is not None and row.other is not None:
                place = row.array.direction, row.array.module
                ends.pop(place, None)
                ends[place] = row
        return [(*place, row.mean_difference, row.mean_allowed) for place, row in ends.items()]

    def table(self, width: int | None = None) -> str:
        """Return the text that `print` shows.

        Args:
            width: of a line, in characters; by default the terminal's, and 100 without one.

        Returns:
            The text.
        """
        lines = text_table.folded(f"{self._about()}\n{self._program()}\n\n{self._verdict()}", width)
        if self.first is not None:
            lines += [
                "",
                *text_table.columns(("", *self.names), self._sides(self.first), (), width),
            ]
        if grown := self._grown():
            heads = ("module", "direction", "difference", "rounding explains")
            lines += ["", "the difference from module to module, of the root mean square:", ""]
            lines += text_table.columns(heads, grown, heads[2:], width)
        for note in self.notes:
            lines += ["", *text_table.folded(note, width)]
        return escaped("\n".join(lines))

    def _about(self) -> str:
        parts = []
        for name, header in zip(self.names, self.headers, strict=True):
            versions = header.get("versions", {})
            libraries = " ".join(f"{k} {v}" for k, v in versions.items())
            parts.append(f"{name} ({libraries or header.get('framework')})")
        rank = f", rank {self.rank}" if int(self.headers[0].get("ranks", 1)) > 1 else ""
        return f"{' and '.join(parts)}, step {self.step}{rank}"

    def _program(self) -> str:
        calls = [row for row in self.rows if row.array.kind == RESULT]
        ours, theirs = (len({id(r[side]) for r in calls if r[side]}) for side in range(2))
        counts = f"{ours:,} and {theirs:,} calls"
        if self._across:
            called = text_table.plural(ours, "call")  # of the other run, the rows have these alone
            return (
                f"two frameworks: {called} of {self.names[0]}, {theirs:,} matched by their values"
            )
        if self.parted is None:
            return f"the same program: {text_table.plural(ours, 'call')}"
        differ = sum(bool(row.parts) for row in calls)
        return (
            f"the programs part at {_called(self.parted.array)}: {self.parted.parts} "
            f"({counts}; calls that differ: {differ:,})"
        )

    def _verdict(self) -> str:
        row = self.first
        if row is None:
            pairs = [r for r in self.rows if r.one is not None and r.other is not None]
            worst = max(pairs, key=Compared.share, default=None)
            if worst is None or not worst.difference:
                return "rounding explains all: no number differs"
            return (
                f"rounding explains all. The largest difference, beside what rounding explains, is "
                f"at {_called(worst.array)}: {_number(worst.difference)} of its root mean square; "
                f"rounding explains {_number(worst.allowed)}"
            )
        what = _called(row.array)
        if row.verdict == ALONE:
            here, there = self.names if row.one is not None else self.names[::-1]
            both = row.one is not None and row.other is not None
            beside = ". Beside it stands the first call there that reads the same" if both else ""
            verb = "runs" if row.array.kind == RESULT else "is"
            return (
                f"ROUNDING DOES NOT EXPLAIN: {what} {verb} in {here}, and nothing in {there} has "
                f"its values{beside}"
            )
        off = f"{_number(row.difference)} of its root mean square"
        if row.array.kind == INPUT:
            return f"THE RUNS BEGIN WITH OTHER NUMBERS: {what} differs by {off}"
        return (
            f"ROUNDING DOES NOT EXPLAIN {what}: off by {off}; rounding explains "
            f"{_number(row.allowed)}. {self._before(row)}"
        )

    def _before(self, row: Compared) -> str:
        if any(r.array.name == COMPILED for r in self.rows):
            return (
                "The calls before it ran in compiled code, where it may begin: compile block by "
                "block, `block.compile()`, to see the result of each"
            )
        return "All that it reads agrees, as far as it was compared"

    def _sides(self, row: Compared) -> list[tuple[str, ...]]:
        def cells(a: RecordedArray | None) -> tuple[str, ...]:
            if a is None:
                return ("no such call", *[""] * 7)
            dtypes = text_table.dtypes(a.inputs, a.run, (a.dtype,)) if a.kind == RESULT else a.dtype
            shape = " x ".join(map(str, a.shape)) or "a number"
            bad = f"{a.bad:,}" if a.bad else ""
            first = ", ".join(f"{v:.6g}" for v in a.values[ELEMENTS][: min(a.size, 3)])
            return (
                a.name, a.module or "(top level)", a.source, dtypes, shape,
                f"{a.values[RMS]:.7g}, {a.values[AMAX]:.7g}", bad, first,
            )  # fmt: skip

        heads = ("op", "module", "source", "dtypes", "shape", "rms, largest", "Inf and NaN",
                 "some elements")  # fmt: skip
        both = cells(row.one), cells(row.other)
        return [(head, *pair) for head, *pair in zip(heads, *both, strict=True)]

    def _grown(self) -> list[tuple[str, ...]]:
        """Rows of the growth: equal layers' as ranges of numbers would hide it, so some of them."""
        grown = self.growth()
        step = max(1, math.ceil(len(grown) / 24))
        at = sorted({*range(0, len(grown), step), len(grown) - 1} - {-1})
        return [
            (module or "(top level)", direction, _number(difference), _number(allowed))
            for direction, module, difference, allowed in (grown[i] for i in at)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data; docs/compare.md has the schema."""
        return {
            "names": list(self.names),
            "step": self.step,
            "rank": self.rank,
            "explained": self.explained,
            "parted": self.parted and self.parted.to_dict(),
            "first": self.first and self.first.to_dict(),
            "rows": [row.to_dict() for row in self.rows],
            "notes": list(self.notes),
        }

    def to_html(self, path: "str | PathLike[str] | None" = None) -> str:
        """Return an HTML page: the text, a curve of the difference over depth, and all arrays.

        Args:
            path: file to write it to as well, in UTF-8.

        Returns:
            The page as text.
        """
        heads = ("difference", "rounding explains")
        columns = (
            tables.Column("array", breaks="parts"),
            tables.Column("direction", on_page=True),
            tables.Column("verdict", on_page=True),
            *(tables.Column(head, True, "of the root mean square") for head in heads),
            tables.Column("dtypes"),
            tables.Column("source"),
        )
        lines = []
        for row in self.rows:
            array, verdict = row.array, row.verdict
            sides = [f"{a.run or a.dtype}" for a in (row.one, row.other) if a is not None]
            cells = (
                tables.Cell(array.name),
                tables.Cell(array.direction),
                tables.Cell(verdict),
                tables.number(row.difference, _number(row.difference)),
                tables.number(row.allowed, _number(row.allowed)),
                tables.Cell(", ".join(dict.fromkeys(map(text_table.short, sides)))),
                tables.Cell(array.source),
            )
            section = SECTIONS.get(array.direction, array.direction)
            kinds = (array.direction, verdict)
            lines.append(tables.Line(section, array.module or tables.OUTSIDE, cells, kinds))
        made = page.Page(
            title=" and ".join(self.names),
            about=self._about(),
            notes=[self._program(), self._verdict(), *self.notes],
            table=tables.Table(columns, ("direction", "verdict"), lines),
            sorted=("#", True),
            what="array",
            curve=[
                (f"{m or '(top level)'}, {d}", x, allowed) for d, m, x, allowed in self.growth()
            ],
        )
        return page.html(made, path)

    def __bool__(self) -> bool:
        return not self.explained

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        first = "rounding explains all" if self.first is None else _called(self.first.array)
        return f"Comparison({self.names[0]!r}, {self.names[1]!r}, {first})"


def compare(
    one: "str | PathLike[str] | RunRecord",
    other: "str | PathLike[str] | RunRecord",
    *,
    modules: Mapping[str, str] | None = None,
) -> Comparison:
    """Compare two records of what should be one computation.

        print(polymp.compare("eager.rec", "compiled.rec"))

    Steps with the same number are compared, and ranks with the same number, until one differs. A
    step that begins with weights which rounding has moved apart in the step before is the end.

    Args:
        one: a record, or its path; of several ranks, the path without "rank0".
        other: likewise.
        modules: where the other run names modules in another way: from beginnings of its module
            paths to those of the first run, such as {"model.layers": "blocks"}. Without it, paths
            that differ by the containers are matched, and of models that share few paths the order
            of the calls counts.

    Returns:
        The comparison.

    Raises:
        RecordError: a file is no record, the runs have other numbers of ranks, or they share no
            step, or no call.
        TypeError: an argument is neither a path nor a record, or `modules` no dict of paths.
    """
    if modules is not None and not (
        isinstance(modules, Mapping) and all(isinstance(x, str) for p in modules.items() for x in p)
    ):
        raise TypeError(
            f"compare(): modules={modules!r} is no dict of module paths. Write "
            '{"model.layers": "blocks"}: from the other record\'s paths to those of the first.'
        )
    sides = [_records(record) for record in (one, other)]
    if len(sides[0]) != len(sides[1]):
        raise RecordError(
            f"{sides[0][0].name!r} has {text_table.plural(len(sides[0]), 'rank')}, "
            f"{sides[1][0].name!r} has {len(sides[1])}. Compare runs on the same number of ranks; "
            "a rank's own file can be compared with another rank's."
        )
    found: Comparison | None = None
    for ours, theirs in zip(*sides, strict=True):
        numbered = {step.number: step for step in theirs.steps}
        shared = [step for step in ours.steps if step.number in numbered]
        if not shared:
            have = ", ".join(
                f"{r.name!r} has steps {_listed([s.number for s in r.steps])}"
                for r in (ours, theirs)
            )
            raise RecordError(f"the records share no step: {have}.")
        moved: set[str] = set()  # arrays that the steps before have left, apart by rounding
        for step in shared:
            last, found = found, _compared(ours, theirs, step, numbered[step.number], modules)
            apart = [r for r in found.rows if r.array.kind == INPUT and r.verdict == UNEXPLAINED]
            news = [r for r in apart if r.array.name not in moved and r.array.direction != BACKWARD]
            if moved and apart and not news and last is not None:
                found = last
                found.notes += (
                    f"not compared: steps from {step.number} on. They begin with the weights that "
                    "the step before has left, and rounding has moved these apart",
                )
                break
            if moved and news:
                found.first = news[0]
            if not found.explained:
                return found
            updates = (r for r in found.rows if r.array.kind == UPDATE and r.difference)
            moved |= {row.array.name for row in updates}
    assert found is not None
    return found


def _records(given: "str | PathLike[str] | RunRecord") -> list[RunRecord]:
    """The records of a run, one for each rank."""
    if isinstance(given, RunRecord):
        return [given]
    if not isinstance(given, (str, PathLike)):
        raise TypeError(
            f"compare() compares records and paths of records, got {type(given).__name__}."
        )
    path = Path(given)
    if path.is_dir():
        raise RecordError(f"{str(given)!r} is a folder. Write the path of a record in it.")
    first = run_record.for_rank(path, 0, 2)
    if path.exists() or not first.exists():
        return [run_record.read(path)]
    ranks = int(run_record.read(first).header.get("ranks", 1))
    return [
        run_record.read(run_record.for_rank(path, rank, max(ranks, 2))) for rank in range(ranks)
    ]


def _listed(numbers: Sequence[int]) -> str:
    if len(numbers) > 8:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


# --- one step -------------------------------------------------------------------------------------


def _compared(
    ours: RunRecord,
    theirs: RunRecord,
    one: RecordedStep,
    other: RecordedStep,
    modules: Mapping[str, str] | None,
) -> Comparison:
    headers = ours.header, theirs.header
    across = headers[0].get("framework") != headers[1].get("framework")
    named = _renamed(one, other, modules)
    left, right = (
        _Side(step, int(header.get("probes", 0)), names)
        for step, header, names in ((one, headers[0], {}), (other, headers[1], named))
    )
    if not left.results or not right.results:
        empty = ours if not left.results else theirs
        raise RecordError(f"step {one.number} of {empty.name!r} has no calls to compare.")
    pairs = _Pairs(left, right, across)
    if not pairs.twins:
        raise RecordError(
            f"{ours.name!r} and {theirs.name!r} share nothing: no array of one has a counterpart "
            "in the other by name, op or values. Are they records of the same model?"
        )
    rows, first = pairs.rows()
    names = _names(ours, theirs)
    notes = _notes(names, (ours, theirs), (one, other), rows, first)
    rank = int(headers[0].get("rank", 0))
    return Comparison(names, one.number, rank, rows, first, headers, notes)


def _names(ours: RunRecord, theirs: RunRecord) -> tuple[str, str]:
    return (ours.name, theirs.name) if ours.name != theirs.name else ("one", "other")


def _renamed(
    one: RecordedStep, other: RecordedStep, modules: Mapping[str, str] | None
) -> dict[str, str]:
    """From the other's module paths to ours."""
    mine, theirs = (dict.fromkeys(a.module for a in step.arrays) for step in (one, other))
    if modules is None:
        return matched(mine, theirs)
    names = {}
    for start in modules:
        if start and not any(path == start or path.startswith(f"{start}.") for path in theirs):
            some = ", ".join(path for path in list(theirs)[:4] if path)
            raise RecordError(
                f"compare(modules=): no module path of the other record begins with {start!r}. "
                f"Its paths are {some}, ..."
            )
    for path in theirs:
        fits = [p for p in modules if path == p or path.startswith(f"{p}.") or not p]
        longest = max(fits, key=len, default=None)
        if longest is None:
            names[path] = path
        else:
            rest = path[len(longest) :].lstrip(".")
            names[path] = ".".join(filter(None, (modules[longest], rest)))
    return names


class _Side:
    """The arrays of one run as numpy arrays."""

    def __init__(self, step: RecordedStep, probes: int, names: Mapping[str, str]) -> None:
        import numpy as np

        self.arrays = step.arrays
        self.compiled = COMPILED in step.left_out
        self.modules = [names.get(m, m) for m in _below([a.module for a in step.arrays])]
        self.values = np.array([a.values for a in step.arrays], np.float64).reshape(-1, VALUES)
        self.probes = probes
        if probes:
            moved = [a.spread or (0.0,) * VALUES for a in step.arrays]
            self.spread = np.array(moved, np.float64).reshape(-1, VALUES)
        else:
            self.spread = _estimated(step.arrays)
        # Of one element: in the mean over signs, the square of a projection is the mean square.
        whole = np.sqrt((self.spread[:, PROJECTIONS] ** 2).mean(1, keepdims=True))
        self.spread[:, PROJECTIONS] = whole
        for part in (slice(AMAX, AMAX + 1), ELEMENTS):
            self.spread[:, part] = np.maximum(self.spread[:, part], whole)
        self.rms, self.largest = self.values[:, RMS], self.values[:, AMAX]
        # The unit roundoff of the inputs that an array is made of: what rounded these is no call.
        units: list[float] = []
        for a in step.arrays:
            own = unit_roundoff(a.dtype) if a.kind == INPUT and a.dtype in FORMATS else 0.0
            units.append(max((own, *(units[r] for r in a.reads))))
        self.units = np.array(units, np.float64)
        self.bad = np.array([a.bad for a in step.arrays], np.int64)
        self.sizes = np.array([a.size for a in step.arrays], np.int64)
        self.results = [i for i, a in enumerate(step.arrays) if a.kind == RESULT]
        inputs = [i for i, a in enumerate(step.arrays) if a.kind == INPUT]
        self.bits = {i: 1 << n for n, i in enumerate(inputs)}
        self.by_size: dict[tuple[str, int], Any] = {}
        for i, a in enumerate(step.arrays):
            self.by_size.setdefault(_size(a), []).append(i)
        self.by_size = {key: np.array(at) for key, at in self.by_size.items()}
        # Of calls outside of the backward pass, those that read what it made.
        self.looks: set[int] = set()
        self.readers: list[list[int]] = [[] for _ in step.arrays]
        for i, a in enumerate(step.arrays):
            for source in a.reads:
                self.readers[source].append(i)
                back = step.arrays[source].direction == BACKWARD or source in self.looks
                if back and a.kind == RESULT and a.direction != BACKWARD:
                    self.looks.add(i)


def _below(modules: list[str]) -> list[str]:
    """Module paths; the module that all others are in is the top level, as flax linen's first is.

    Calls outside of it, such as a loss, have no path.
    """
    first = min(filter(None, modules), key=len, default="")
    inside = {path for path in modules if path and path != first}
    if inside and all(path.startswith(f"{first}.") for path in inside):
        return ["" if path == first else path for path in modules]
    return modules


def _size(a: RecordedArray) -> tuple[str, int]:
    """Arrays of other sizes, or of another part of the step, are never the same."""
    back = a.direction == BACKWARD or a.kind == GRADIENT
    return UPDATE if a.kind == UPDATE else BACKWARD if back else "", a.size


_ADDS = frozenset("add sub rsub sum mean layer_norm rms_norm group_norm batch_norm".split())


def _estimated(arrays: Sequence[RecordedArray]) -> Any:
    """The spread without probes: of relative errors that add up from call to call."""
    import numpy as np

    relative = [0.0] * len(arrays)
    spread = np.zeros((len(arrays), VALUES))
    for i, a in enumerate(arrays):
        size = a.values[RMS] or 1.0
        squares = a.own**2
        for source in a.reads:
            share = arrays[source].values[RMS] / size if a.name in _ADDS else 1.0
            squares += (relative[source] * max(share, 1.0)) ** 2
        relative[i] = min(math.sqrt(squares), 1.0)
        spread[i] = relative[i] * size
    return spread


class _Pairs:
    """The arrays of two runs, matched."""

    def __init__(self, one: _Side, other: _Side, across: bool) -> None:
        self.one, self.other, self.ported = one, other, across
        self.across = across  # True if the calls are matched by their values
        numbers = VALUES * (len(one.arrays) + len(other.arrays))
        self.chance = factor(numbers)
        # A spread is the root of a mean of so many squares: one of each probe; of the projections
        # of an array, which are pooled, eight.
        probes = one.probes + other.probes
        pooled = PROJECTIONS.stop - PROJECTIONS.start
        self.limit = _quantile(self.chance, probes), _quantile(self.chance, pooled * probes)
        paths = [{side.modules[i] for i in side.results} - {""} for side in (one, other)]
        shared = paths[0] & paths[1]
        self.common = bool(shared) and len(shared) >= _COMMON * min(map(len, paths))
        self.shared = {"", *shared}  # module paths that both have
        self.aligned: dict[int, int] = {}
        if not across:
            self.aligned = _inputs(one, other)
            calls = _aligned(one, other, self.common)
            if len(calls) >= _SAME * max(len(one.results), len(other.results)):
                self.aligned |= calls
            else:  # another program, such as a port, or what a region makes of it
                self.across = True
        self.twins: dict[int, int] = {}  # of the first run: the array of the other with its values
        self.ordered: set[int] = set()  # of these, those that have the same order of elements
        for i in range(len(one.arrays)):
            j = self.aligned.get(i)
            if j is None or self.excess(i, j) > 1:
                j = self.search(i, alone=j is None)
            if j is not None:
                self.twins[i] = j
                if len(self.held(i, j)[0]) == VALUES:
                    self.ordered.add(i)
        self.aligned |= self.twins  # where a call was aligned wrongly, the other one is left
        taken = {*self.twins.values(), *self.aligned.values()}
        # Of the other run: the arrays whose values the first one has.
        self.met = {*self.twins.values()}
        self.met |= {j for j in range(len(other.arrays)) if j not in taken and self.has_twin(j)}

    def numbers(self, i: int, j: Any) -> tuple[Any, Any]:
        """The differences of the numbers of two arrays, and what rounding explains of each."""
        import numpy as np

        a, b = self.one, self.other
        spread = np.sqrt(a.spread[i] ** 2 + b.spread[j] ** 2)
        size = np.maximum(a.rms[i], b.rms[j])
        floor = np.zeros(VALUES)
        floor[RMS : PROJECTIONS.stop] = _ERROR
        many = (a.sizes[i] >= _POOLED) & (b.sizes[j] >= _POOLED)
        limit = np.multiply.outer(np.where(many, self.limit[1], self.limit[0]), np.ones(VALUES))
        limit[..., RMS : PROJECTIONS.start] = self.limit[0]
        allowed = limit * spread + np.multiply.outer(size, floor)
        # Noise adds to a mean square: of a result that is mostly noise, a change of second order.
        whole = spread[..., PROJECTIONS.start]
        noise = whole * np.minimum(whole / np.maximum(size, np.finfo(float).tiny), 1.0)
        allowed[..., ORDERLESS] += noise[..., None]
        low = np.where(a.units[i] == b.units[j], 0.0, np.maximum(a.units[i], b.units[j]))
        stored = np.maximum(a.largest[i], b.largest[j]) + self.chance * size / math.sqrt(3)
        allowed += np.multiply.outer(low * stored, np.ones(VALUES))
        return np.abs(a.values[i] - b.values[j]), allowed

    def held(self, i: int, j: int) -> tuple[Any, Any]:
        """The same of the numbers of two arrays that can be compared."""
        import numpy as np

        one, other = self.one.arrays[i], self.other.arrays[j]
        difference, allowed = self.numbers(i, j)
        ordered = self._in_order(i, j, allowed[RMS])
        if one.kind == UPDATE:
            # Adam's first steps have the sign of the gradient. Where that is as small as its
            # rounding, an element jumps, which no probe may have shown: up to two are let pass.
            if not ordered:
                allowed[ORDERLESS] += 4 * max(one.values[AMAX], other.values[AMAX]) / one.size
            elif _of_two_elements(difference[PROJECTIONS], float(allowed[PROJECTIONS].max())):
                allowed = np.maximum(allowed, difference)
        part = slice(0, VALUES) if ordered else ORDERLESS
        return difference[part], allowed[part]

    def excess(self, i: int, j: int) -> float:
        """How many times larger the largest difference is than what rounding explains."""
        if bool(self.one.bad[i]) != bool(self.other.bad[j]):
            return math.inf
        return _worst(*self.held(i, j))[0]

    def _in_order(self, i: int, j: int, allowed: float) -> bool:
        """True if two arrays have their elements in the same order.

        Between frameworks equal lengths may be other axes. Without any it is taken for granted
        where the other numbers are `allowed` to be off by so much that they tell nothing; leading
        axes may be one, if it is so in what the call reads.
        """
        mine, theirs = self.one.arrays[i].shape, self.other.arrays[j].shape
        if not self.across:
            return mine == theirs
        if allowed <= _ROUGH * max(self.one.rms[i], self.other.rms[j]):
            return False
        shape = max(mine, theirs, key=len)
        lengths = [n for n in shape if n > 1]
        if len({*lengths}) < len(lengths):
            return False
        known = not self.ordered.isdisjoint(self.one.arrays[i].reads)
        parts = _ends(mine) <= _ends(theirs) or _ends(theirs) <= _ends(mine)
        return mine == theirs or (known and parts)

    def search(self, i: int, alone: bool) -> int | None:
        """The array of the other run that has the values of one of the first; None without.

        One that is aligned with another may have been aligned wrongly, with a call in its module.
        """
        array = self.one.arrays[i]
        if not alone and array.kind not in (RESULT, INPUT):
            return None
        fits = self._with_values(i, self.other.by_size.get(_size(array)))
        alike = [j for _, j in fits if _alike(self.other.arrays[j], array)]
        if not alone:
            module = self.one.modules[i]
            alike = [j for j in alike if self.other.modules[j] == module]
            return next(iter(alike), None) if self.one.rms[i] else None
        return next((j for j in (*alike, *(j for _, j in fits))), None)

    def has_twin(self, j: int) -> bool:
        """True if some array of the first run has the values of one of the other."""
        at = self.one.by_size.get(_size(self.other.arrays[j]))
        return bool(self._with_values(at, j))

    def _with_values(self, i: Any, j: Any) -> list[tuple[int, int]]:
        """Of arrays of the first run and of the other, one on one side, the pairs that agree."""
        import numpy as np

        if i is None or j is None:
            return []
        difference, allowed = self.numbers(i, j)
        fits = (difference[:, ORDERLESS] <= allowed[:, ORDERLESS]).all(1)
        ones, others = np.broadcast_arrays(i, j)
        pairs = zip(ones[fits].tolist(), others[fits].tolist(), strict=True)
        return [pair for pair in pairs if self._near(*pair) and self.excess(*pair) <= 1]

    def _near(self, i: int, j: int) -> bool:
        """True if two arrays may be of one call: not in other modules, of those that both have."""
        if not self.common or RESULT not in (self.one.arrays[i].kind, self.other.arrays[j].kind):
            return True
        modules = {self.one.modules[i], self.other.modules[j]}
        return len(modules) == 1 or not modules <= self.shared

    def rows(self) -> tuple[list[Compared], Compared | None]:
        """All pairs in program order, and the first that rounding does not explain."""
        backed = {j: i for i, j in self.aligned.items()}
        shown = backed.keys() | self.twins.values()  # beside an array of the first run
        stays = self.twins.keys() | self.aligned.keys()
        whole = self.shared if self.ported and self.common else set()
        left = self._left() if self.across else set()
        healed = _healed(self.one, stays, self._evidence(), whole) | left
        every = dict.fromkeys(self.met, -1)
        healed_other = _healed(self.other, self.met | backed.keys(), every, whole)
        rows: list[Compared] = []
        todo = 0  # of the other run
        for i, array in enumerate(self.one.arrays):
            j = self.aligned.get(i)
            if j is not None:
                rows += [self._alone(k, healed_other) for k in range(todo, j) if k not in shown]
                todo = max(todo, j + 1)
            j = self.twins.get(i, j)
            if j is None:
                hidden = _is_hidden(array, self.other)
                healthy = i in healed or array.kind == INPUT or hidden
                rows.append(Compared(array, None, PASSED if healthy else ALONE))
            else:
                rows.append(self._pair(i, j))
        rest = range(todo, len(self.other.arrays))
        rows += [self._alone(k, healed_other) for k in rest if k not in shown]
        if self.across:  # what only the other run has says nothing: its ops are split otherwise
            rows = [r for r in rows if r.one is not None or r.array.name == COMPILED]
        first = next((r for r in rows if r.verdict in (UNEXPLAINED, ALONE)), None)
        if first is not None and (first.one is None or first.other is None):
            first = self._with_partner(first)
        return rows, first

    def _left(self) -> set[int]:
        """Updates and gradients of inputs that only the first run has, and what these alone read.

        Such inputs are the state of an optimizer, or weights that one framework packs into one.
        Between frameworks they are not compared.
        """
        arrays, other = self.one.arrays, self.other.arrays
        news = {a.name for i, a in enumerate(arrays) if a.kind == INPUT and i not in self.twins}
        lost = {_size(a) for j, a in enumerate(other) if j not in self.met}
        left: set[int] = set()
        for i in reversed(range(len(arrays))):
            a, readers = arrays[i], self.one.readers[i]
            state = a.kind == UPDATE and _size(a) not in lost
            end = state or (a.kind in (GRADIENT, UPDATE) and a.name in news)
            if i not in self.twins and (end or (readers and left.issuperset(readers))):
                left.add(i)
        return left

    def _evidence(self) -> dict[int, int]:
        """Of arrays of the first run with a twin, the inputs that it is made of: a bit for each.

        All of one that is made of none, as updates of running means are in torch.
        """
        bits: dict[int, int] = {}  # of the other run's inputs: ours with the same values
        for i, j in self.twins.items():
            if i in self.one.bits:
                bits[j] = bits.get(j, 0) | self.one.bits[i]
        made = _made_of(self.other, bits)
        return {i: made[j] or -1 for i, j in self.twins.items()}

    def _pair(self, i: int, j: int) -> Compared:
        one, other = self.one.arrays[i], self.other.arrays[j]
        difference, allowed = self.held(i, j)
        ratio, at = _worst(difference, allowed)
        size = max(one.values[RMS], other.values[RMS]) or 1.0
        off = float(difference[at]) / size
        part = PROJECTIONS if len(difference) == VALUES else slice(RMS, RMS + 1)
        means = [float((x[part] ** 2).mean() ** 0.5) / size for x in (difference, allowed)]
        if bool(one.bad) != bool(other.bad):
            ratio = off = math.inf
        verdict = EXPLAINED if ratio <= 1 else UNEXPLAINED
        return Compared(one, other, verdict, off, float(allowed[at]) / size, *means)

    def _alone(self, j: int, healed: set[int]) -> Compared:
        array = self.other.arrays[j]
        healthy = j in self.met or j in healed or array.kind == INPUT or _is_hidden(array, self.one)
        return Compared(None, array, PASSED if healthy else ALONE)

    def _with_partner(self, row: Compared) -> Compared:
        """A call that only one run has, beside the call of the other that reads the same values."""
        mine, theirs = (self.one, self.other) if row.one is not None else (self.other, self.one)
        twins = self.twins if row.one is not None else {j: i for i, j in self.twins.items()}
        at = next(i for i, a in enumerate(mine.arrays) if a is row.array)
        back = {*twins.values()}
        sources = {twins[s] for s in mine.arrays[at].reads if s in twins}
        computed = {s for s in sources if theirs.arrays[s].kind == RESULT}  # inputs have others
        readers = [
            k
            for s in sorted(computed or sources)
            for k in theirs.readers[s]
            if k not in back and theirs.arrays[k].direction == row.array.direction
        ]
        alike = [k for k in readers if _canonical(theirs.arrays[k]) == _canonical(row.array)]
        if not self.across:  # a call of another op, or of another call, is no counterpart
            other = {*(self.aligned if mine is self.other else self.aligned.values())}
            alike, readers = [k for k in alike if k not in other], []
        k = next((k for k in alike if theirs.arrays[k].size == row.array.size), None)
        if k is not None:
            pair = (at, k) if row.one is not None else (k, at)
            return self._pair(*pair)._replace(verdict=UNEXPLAINED)
        near = next((k for k in readers if theirs.arrays[k].size == row.array.size), None)
        near = next(iter(alike), None) if near is None else near
        return row if near is None else row._replace(other=theirs.arrays[near])


def _is_hidden(array: RecordedArray, other: _Side) -> bool:
    """True for a call that the other run may have made in compiled code."""
    return other.compiled and array.kind == RESULT and array.name != COMPILED


def _ends(shape: tuple[int, ...]) -> set[int]:
    """The products of the leading lengths: of a shape whose axes are parts of another's, some."""
    return {math.prod(shape[: at + 1]) for at in range(len(shape))}


def _made_of(side: _Side, bits: Mapping[int, int]) -> list[int]:
    """The inputs that each array is made of, as the bits of these."""
    made: list[int] = []
    for i, a in enumerate(side.arrays):
        made.append(functools.reduce(operator.or_, (made[r] for r in a.reads), bits.get(i, 0)))
    return made


def _healed(
    side: _Side, stays: set[int] | Any, met: Mapping[int, int], whole: set[str]
) -> set[int]:
    """The arrays that are passed over: what reads them has a counterpart with the same values.

    The counterpart is made of an input that the array is made of, too: the gradient of a loss reads
    the scores, for their shape, and is made of the targets alone; `met` has the inputs.
    The backward pass counts for what it alone reads. Two frameworks split the modules that both
    have into other calls, but have the same numbers where such a module, one of `whole`, hands them
    on.
    """
    good = dict(met)
    known = functools.reduce(operator.or_, met.values(), 0)
    made = _made_of(side, {i: known & bit for i, bit in side.bits.items()})
    for i in range(len(side.arrays) - 1, -1, -1):
        if i in stays or i in good:
            continue
        readers = side.readers[i]
        if not readers and i in side.looks:  # as the norm of all gradients
            good[i] = made[i]
        if made[i]:
            readers = [r for r in readers if r not in good or good[r] & made[i]]
        near = [r for r in readers if _size(side.arrays[r])[0] == _size(side.arrays[i])[0]]
        handed = side.modules[i] in whole and side.arrays[i].direction != BACKWARD
        if handed and any(side.modules[r] != side.modules[i] for r in near):
            continue
        told = [good[r] & made[i] for r in near or readers if r in good]
        if told:
            good[i] = functools.reduce(operator.or_, told)
    return {*good}


def _worst(difference: Any, allowed: Any) -> tuple[float, int]:
    """How many times larger a difference is than what is allowed, at most, and of which number."""
    import numpy as np

    ratios = np.divide(difference, allowed, out=np.full_like(difference, np.inf), where=allowed > 0)
    ratios = np.where(difference == 0, 0.0, ratios)
    at = int(ratios.argmax())
    return float(ratios[at]), at


def _of_two_elements(projections: Any, noise: float) -> bool:
    """True if two elements at most make the difference: projections have their sum, or difference.

    A projection has each element with a sign; of many elements, all sums differ.
    """
    import numpy as np

    sizes = np.sort(projections)
    return int((np.diff(sizes) > max(noise, 1e-3 * float(sizes[-1]))).sum()) <= 1


def _quantile(normal: float, probes: int) -> float:
    """Student's quantile where a normal distribution has the given one.

    Source:
        Wallace, "Bounds on normal approximations to Student's and the chi-square distributions",
        Ann. Math. Statist. 30 (1959).
    """
    if not probes:
        return normal
    scaled = normal * (8 * probes + 3) / (8 * probes + 1)
    return math.sqrt(probes * math.expm1(scaled**2 / probes))


# --- alignment ------------------------------------------------------------------------------------


def _inputs(one: _Side, other: _Side) -> dict[int, int]:
    """Inputs, gradients and updates by name and size."""

    def named(side: _Side) -> Iterator[tuple[tuple[Any, ...], int]]:
        counts: dict[tuple[Any, ...], int] = {}
        for i, (a, module) in enumerate(zip(side.arrays, side.modules, strict=True)):
            if a.kind != RESULT:
                key = a.kind, a.name.rpartition(".")[2], module, a.shape
                counts[key] = counts.get(key, 0) + 1
                yield (*key, counts[key]), i

    theirs = dict(named(other))
    return {i: theirs[key] for key, i in named(one) if key in theirs}


def _aligned(one: _Side, other: _Side, common: bool) -> dict[int, int]:
    """Calls by module, if both runs have these in common, direction, op and shape, in order."""

    def keys(side: _Side, shapes: bool) -> list[tuple[Any, ...]]:
        return [
            (
                side.modules[i] if common else "",
                side.arrays[i].direction,
                _canonical(side.arrays[i]),
                side.arrays[i].shape if shapes else (),
            )
            for i in side.results
        ]

    ours, theirs = keys(one, True), keys(other, True)
    pairs: dict[int, int] = {}
    for i, j, count in SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks():
        pairs |= {one.results[i + k]: other.results[j + k] for k in range(count)}
    return pairs


def _alike(one: RecordedArray, other: RecordedArray) -> bool:
    return one.kind == other.kind and (one.kind != RESULT or _canonical(one) == _canonical(other))


def _other_policy(one: RecordedArray | None, other: RecordedArray | None) -> bool:
    """True if two frameworks run one op in other dtypes: a product, a softmax or a norm."""
    if one is None or other is None or not _alike(one, other):
        return False
    op = vocabulary().ops.get(one.name)
    large = ("matmul", "convolution", "softmax", "normalisation")
    return op is not None and op.kind in large and one.run != other.run


def _canonical(array: RecordedArray) -> str:
    """The name of an op in both frameworks; all products of matrices have one, all convolutions."""
    op = vocabulary().ops.get(array.name)
    return op.kind if op is not None and op.kind in ("matmul", "convolution") else array.name


# --- words ----------------------------------------------------------------------------------------


def _called(a: RecordedArray) -> str:
    """An array in words: "layer_norm in blocks.3.ln1 (model.py:41)"."""
    of = {INPUT: "input ", GRADIENT: "the gradient of ", UPDATE: "the update of "}.get(a.kind, "")
    module = (
        f" in {a.module}" if a.module and a.kind in (RESULT, INPUT) and "operand" not in of else ""
    )
    back = {BACKWARD: ", backward", RECOMPUTE: ", recomputed"}.get(a.direction, "")
    back = back if a.kind == RESULT else ""
    return f"{of}{a.name}{module}{back}" + (f" ({a.source})" if a.source else "")


def _number(x: float) -> str:
    return "Inf or NaN" if math.isinf(x) else f"{x:.2g}" if x else "0"


def _notes(
    names: tuple[str, str],
    records: tuple[RunRecord, RunRecord],
    steps: tuple[RecordedStep, RecordedStep],
    rows: Sequence[Compared],
    first: Compared | None,
) -> list[str]:
    """Sentences on the parts that were not compared, and why."""
    notes = []
    for name, record, step in zip(names, records, steps, strict=True):
        for reason, count in step.left_out.items():
            notes.append(
                f"not compared: {text_table.plural(int(count), 'call')} of {name}, {reason}"
            )
        if record.header.get("modules"):
            patterns = ", ".join(map(str, record.header["modules"]))
            notes.append(
                f"not compared: calls of {name} outside of {patterns}, which it recorded alone"
            )
        if not record.header.get("probes"):
            notes.append(
                f"{name} was recorded without probes: what rounding explains is estimated from "
                "each call's own rounding, which can be off by a factor of ten either way"
            )
        if record.cut:
            notes.append(f"{name} ends in a step that is not whole, which was left out")
    passed = [row for row in rows if row.verdict == PASSED and row.array.kind == RESULT]
    if passed:
        hidden = "the other run is compiled there, or " * any(COMPILED in s.left_out for s in steps)
        notes.append(
            f"not compared: {text_table.plural(len(passed), 'call')} that only one run makes; "
            f"{hidden}a call that reads them has the same values in both"
        )
    # The state of an optimizer is read by its updates alone.
    calls = ((a, step.arrays) for step in steps for a in step.arrays if a.kind == RESULT)
    used = {id(arrays[r]) for a, arrays in calls for r in a.reads}
    lone = [row.array for row in rows if row.verdict == PASSED and row.array.kind == INPUT]
    inputs = [array.name for array in lone if id(array) in used]
    if inputs:
        some = ", ".join(inputs[:3])
        notes.append(
            f"not compared: {text_table.plural(len(inputs), 'input')} without a counterpart of the "
            f"same values in the other run ({some}{', ...' if len(inputs) > 3 else ''}), nor "
            "gradients and updates of these"
        )
    notes += [f"the optimizers differ: {text}" for text in _settings(*(s.settings for s in steps))]
    return notes


def _settings(
    one: Mapping[str, Mapping[str, Any]], other: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    for name in one:
        theirs = other.get(name)
        if theirs is None:
            continue
        for key, value in one[name].items():
            if key in theirs and theirs[key] != value:
                yield f"{name} has {key}={value!r} in one run and {theirs[key]!r} in the other"
