"""`compare`: two records of what should be one computation, and the first call that rounding
cannot explain.

    read both -> align the calls -> hold each pair to what rounding explains -> the first that fails

Within one framework, calls are aligned by module path, direction, op and shape. A call that only
one side has, as where a compiled program or another library fuses ops, is looked for by its values:
it may be any array of that size on the other side, and where there is none it is passed over if
what reads it has one. Between two frameworks all calls are matched so, by the numbers that do not
depend on the order of the elements; a matrix and its transpose have the same. The others count if
they are so near that the order is the same.

`record_pairs` has what a number may be off by.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from polymp import text_table
from polymp.diagnostics import record_pairs, run_record
from polymp.diagnostics.alignment import matched
from polymp.diagnostics.call_record import BACKWARD, RECOMPUTE
from polymp.diagnostics.page import Curve, Shown
from polymp.diagnostics.record_pairs import (
    ALONE,
    PASSED,
    UNEXPLAINED,
    UNJUDGED,
    Compared,
    Side,
)
from polymp.diagnostics.run_record import (
    AMAX,
    COMPILED,
    ELEMENTS,
    FAILS,
    GRADIENT,
    INPUT,
    MEAN_MAGNITUDE,
    RESULT,
    RMS,
    UPDATE,
    RecordedArray,
    RecordedStep,
    RunRecord,
)
from polymp.diagnostics.spreads import unknown
from polymp.diagnostics.tables import OUTSIDE, Cell, Column, Line, Table, number
from polymp.errors import RecordError, escaped


@dataclass(eq=False, repr=False)
class Comparison(Shown):
    """The comparison of two records; true if there is a difference that rounding cannot explain.

    `print` shows: whether it is the same program, or where the two part; the first call that
    rounding cannot explain; how the difference grows from module to module; and what was not
    compared, and why.

    Attributes:
        names: of the two records.
        step: the number of the step that is shown: the first that differs, or else the last.
        rank: its rank; 0 without ranks.
        calls: how many each run makes in the step.
        rows: all arrays of the step, in program order.
        parted: the first call that only one run has, or that runs in another dtype; None if there
            is none.
        first: the first array that rounding cannot explain; None if it explains all.
        headers: of the two records; see `RunRecord`.
        notes: what was not compared, and why, a sentence each.
        reads: a sentence on what the first call reads that the other run has not; "" of none.
        settings: the first setting in which the optimizers differ; "" if they do not.
        until: the first step that both records have and that was not compared; None without one.
    """

    names: tuple[str, str]
    step: int
    rank: int
    calls: tuple[int, int]
    rows: Sequence[Compared]
    first: Compared | None
    headers: tuple[Mapping[str, Any], Mapping[str, Any]]
    notes: list[str]
    reads: str = ""
    settings: str = ""
    until: int | None = None

    @property
    def explained(self) -> bool:
        """True if rounding explains all differences, and the optimizers have the same settings."""
        return self.first is None and not self.settings

    @functools.cached_property
    def parted(self) -> Compared | None:
        """The first call that only one run has, or that runs in another dtype; None of none."""
        # Two frameworks split calls in their own ways, and have small ones in other dtypes.
        other = record_pairs.in_another_dtype if self._across else lambda row: bool(row.parts)
        return next((r for r in self.rows if r.array.kind == RESULT and other(r)), None)

    @property
    def _across(self) -> bool:
        return len({header.get("framework") for header in self.headers}) > 1

    def growth(self) -> list[Compared]:
        """Return the last pair of each module, with `mean_difference` and `mean_allowed`."""
        ends: dict[tuple[str, str], Compared] = {}
        for row in self.rows:
            both = row.one is not None and row.other is not None and row.verdict != UNJUDGED
            if row.array.kind == RESULT and both:
                place = row.array.direction, row.array.module
                ends.pop(place, None)
                ends[place] = row
        return [*ends.values()]

    def __str__(self) -> str:
        lines = text_table.folded(f"{self._about()}\n{self._program()}\n\n{self._verdict()}")
        if self.first is not None:
            lines += ["", *beside(self.names, self.first)]
        if grown := self.growth():
            heads = ("module", "direction", "difference", "rounding explains")
            lines += ["", "the difference from module to module, of the root mean square:", ""]
            step = math.ceil(len(grown) / 24)  # equal layers would hide the growth
            at = sorted({*range(0, len(grown), step), len(grown) - 1})
            rows = []
            for row in (grown[i] for i in at):
                place = row.array.module or OUTSIDE, row.array.direction
                rows.append((*place, _number(row.mean_difference), _number(row.mean_allowed)))
            lines += text_table.columns(heads, rows, heads[2:])
        for note in self.notes:
            lines += ["", *text_table.folded(note)]
        return escaped("\n".join(lines))

    def _lines(self) -> list[str]:
        title = " and ".join(self.names)
        return [title, self._about(), self._program(), self._verdict(), *self.notes]

    def _table(self) -> Table:
        lines = [Line("", row.array.module or OUTSIDE, _cells(row)) for row in self.rows]
        return Table(_COLUMNS, lines)

    def _curve(self) -> Curve:
        return [
            (f"{row.array.module or OUTSIDE}, {row.array.direction}", row.mean_difference,
             row.mean_allowed)
            for row in self.growth()
        ]  # fmt: skip

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
        ours = text_table.plural(self.calls[0], "call")
        if self._across:
            both = sum(row.one is not None and row.other is not None for row in calls)
            return f"two frameworks: {ours} of {self.names[0]}, {both:,} matched by their values"
        if self.parted is None:
            part = any(note.startswith("not compared") for note in self.notes)
            return f"the same program{', as far as it was compared' * part}: {ours}"
        differ = sum(bool(row.parts) for row in calls)
        return (
            f"the programs part at {_called(self.parted.array)}: {self.parted.parts} "
            f"({self.calls[0]:,} and {self.calls[1]:,} calls; calls that differ: {differ:,})"
        )

    def _verdict(self) -> str:
        row = self.first
        if row is None:
            differ = f"THE OPTIMIZERS DIFFER: {self.settings}. " if self.settings else ""
            rest = self._rest()
            return differ + (rest[0].upper() + rest[1:] if differ else rest)
        what = _called(row.array)
        if row.verdict == ALONE:
            here, there = self.names if row.one is row.array else self.names[::-1]
            both = row.one is not None and row.other is not None
            other = ". Beside it stands the first call there that reads the same" if both else ""
            verb = "runs" if row.array.kind == RESULT else "is"
            return (
                f"ROUNDING DOES NOT EXPLAIN: {what} {verb} in {here}, and nothing in {there} has "
                f"its values{other}{self.reads and f'. {self.reads}'}"
            )
        by = f"off by {_number(row.difference)} of its root mean square"
        if math.isinf(row.difference) and row.one is not None and row.other is not None:
            here, there = self.names
            counts = f"{row.one.bad:,} of its numbers in {here} and {row.other.bad:,} in {there}"
            by = f"{counts} are Inf, NaN or a mask's"
        elif row.array.kind != INPUT:
            by += f"; rounding explains {_number(row.allowed)}"
        if row.array.kind == INPUT:
            return f"THE RUNS BEGIN WITH OTHER NUMBERS: {what}: {by}"
        return f"ROUNDING DOES NOT EXPLAIN {what}: {by}. {self._before(row)}"

    def _rest(self) -> str:
        """In words what rounding explains, where that is all which can be judged."""
        pairs = [r for r in self.rows if r.one is not None and r.other is not None]
        worst = max(pairs, key=lambda pair: pair.share, default=None)
        lost = [r for r in self.rows if r.verdict == UNJUDGED]
        said = f"rounding explains all{' that can be judged' if lost else ''}"
        if self.until is not None:
            said += f" of step {self.step}, and steps from {self.until} on were not compared"
        if worst is None or not worst.difference or worst.verdict == UNJUDGED:
            said += f": no number{' of it' if lost else ''} differs"
        else:
            said += (
                ". The largest difference, beside what rounding explains, is at "
                f"{_called(worst.array)}: {_number(worst.difference)} of its root mean square; "
                f"rounding explains {_number(worst.allowed)}"
            )
        if lost:
            far = max(lost, key=lambda r: r.difference)
            said += f". NOT JUDGED: {text_table.plural(len(lost), 'array')}"
            if far.difference:
                said += (
                    f", of which {_called(far.array)} differs by {_number(far.difference)} of its "
                    "root mean square"
                )
        return said

    def _before(self, row: Compared) -> str:
        if row.array.name == COMPILED:
            begins = self.reads or "All that this code reads agrees: it begins in it"
            return (
                f"{begins}. Compile smaller parts, such as each block, `block.compile()`, to see "
                "the result of each"
            )
        if row.array.kind != RESULT and any(r.array.name == COMPILED for r in self.rows):
            return "The backward pass before it ran in compiled code, where it may begin"
        if power := _times_two(row):
            larger, times = self.names[power > 0], 2 ** abs(power)
            return (
                f"In {larger} it is {times:,} times as large, as where a loss is scaled: compare "
                "runs of one loss scale"
            )
        if row.array.kind == UPDATE and self.settings:
            return f"The optimizers differ: {self.settings}"
        return self.reads or "All floats that it reads agree, as far as they were compared"

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data; docs/compare.md has the schema."""
        return {
            "names": list(self.names),
            "step": self.step,
            "rank": self.rank,
            "calls": list(self.calls),
            "explained": self.explained,
            "parted": self.parted and self.parted.to_dict(),
            "first": self.first and self.first.to_dict(),
            "settings": self.settings,
            "until": self.until,
            "rows": [row.to_dict() for row in self.rows],
            "notes": self.notes,
        }

    def __bool__(self) -> bool:
        return not self.explained

    def __repr__(self) -> str:
        same = "the optimizers differ" if self.settings else "rounding explains all"
        first = same if self.first is None else _called(self.first.array)
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
            step, or no array but zeros, ones and single numbers.
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
    if sides[0][0].name == sides[1][0].name:
        folders = [Path() if isinstance(x, RunRecord) else Path(x).parent for x in (one, other)]
        same = folders[0] == folders[1]
        for side, folder, place in zip(sides, folders, ("one", "other"), strict=True):
            side[:] = [r._replace(name=place if same else str(folder / r.name)) for r in side]
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
            have = (f"{r.name!r} has {_numbers(r.steps) or 'none'}" for r in (ours, theirs))
            raise RecordError(f"the records share no step: {', '.join(have)}.")
        # By how much rounding may have moved the arrays that the steps before have left.
        moved: dict[str, float] = {}
        held: dict[str, str] = {}  # the names of these arrays in the other run
        for step in shared:
            now = _compared(ours, theirs, step, numbered[step.number], modules, moved, held)
            if now is None:
                assert found is not None
                found.until = step.number
                found.notes.append(
                    f"not compared: steps from {step.number} on. They begin with the weights that "
                    "the step before has left, which differ by what rounding explains of updates. "
                    "To compare such a step, copy the weights and the optimizer's state of one run "
                    "into the other before it"
                )
                break
            found = now
            if not found.explained:
                return found
            for row in found.rows:
                if row.array.kind == UPDATE:  # which a jitted step may round in another way
                    known = not row.difference and row.verdict != UNJUDGED
                    most = row.allowed * row.array.values[RMS] if known else math.inf
                    moved[row.array.name] = max(most, moved.get(row.array.name, 0.0))
                    if row.one is not None and row.other is not None:
                        held[row.one.name] = row.other.name
    assert found is not None
    return found


def _records(given: "str | PathLike[str] | RunRecord") -> list[RunRecord]:
    """The records of a run, one for each rank."""
    if isinstance(given, RunRecord):
        return [given]
    if not isinstance(given, (str, PathLike)):
        raise TypeError(
            f"compare() compares records and paths of records, got {type(given).__name__}. Write "
            "the path of the file, or recorder.record."
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


def _numbers(steps: Sequence[RecordedStep]) -> str:
    if len(steps) > 8:
        return f"{steps[0].number} to {steps[-1].number}"
    return ", ".join(str(step.number) for step in steps)


# --- one step -------------------------------------------------------------------------------------


def _compared(
    ours: RunRecord,
    theirs: RunRecord,
    one: RecordedStep,
    other: RecordedStep,
    modules: Mapping[str, str] | None,
    moved: Mapping[str, float],
    held: Mapping[str, str],
) -> Comparison | None:
    """A step; None if it begins with nothing but arrays that were `moved` apart before it."""
    left = Side(one, int(ours.header.get("probes", 0)), {})
    right = Side(other, int(theirs.header.get("probes", 0)), _renamed(one, other, modules))
    if not left.results or not right.results:
        empty = ours if not left.results else theirs
        raise RecordError(f"step {one.number} of {empty.name!r} has no calls to compare.")
    across = ours.header.get("framework") != theirs.header.get("framework")
    pairs = record_pairs.Pairs(left, right, across, held)
    rows, first = pairs.rows()
    if not pairs.share() and (first is None or first.one is None or first.other is None):
        sides = (ours.name, left), (theirs.name, right)
        zero = [repr(name) for name, side in sides if not side.rms[side.results].any()]
        raise RecordError(
            f"{ours.name!r} and {theirs.name!r} share nothing: no array of one has a counterpart "
            "in the other by name, op or values. Are they records of the same model?"
            + "".join(f" All results of {name} are zero." for name in zero)
        )
    apart = [r for r in rows if r.array.kind == INPUT and r.verdict == UNEXPLAINED] if moved else []
    if apart:
        inputs = (r for r in apart if r.array.direction != BACKWARD)
        off = ((r.difference * r.array.values[RMS], r) for r in inputs)
        first = next((r for by, r in off if by > moved.get(r.array.name, -1.0)), None)
        if first is None:
            return None
    names = ours.name, theirs.name
    notes = [*_notes((ours, theirs), (one, other), rows)]
    rank, headers = int(ours.header.get("rank", 0)), (ours.header, theirs.header)
    calls = len(left.results), len(right.results)
    reads = "" if first is None else _reads(pairs, first, names)
    settings = next((s for key, s in _settings(one, other) if key not in _NO_NUMBERS), "")
    of = names, one.number, rank, calls, rows, first
    return Comparison(*of, headers, notes, reads, settings)


def _renamed(
    one: RecordedStep, other: RecordedStep, modules: Mapping[str, str] | None
) -> dict[str, str]:
    """From the other's module paths to ours."""
    mine, theirs = (dict.fromkeys(a.module for a in step.arrays) for step in (one, other))
    if modules is None:
        return matched(mine, theirs)
    for start in modules:
        if not any(_begins(path, start) for path in theirs):
            some = ", ".join([path for path in theirs if path][:4])
            have = f"Its paths are {some}, ..." if some else "It has no module paths."
            raise RecordError(
                f"compare(modules=): no module path of the other record begins with {start!r}. "
                f"{have}"
            )
    names = {}
    for path in theirs:
        longest = max((p for p in modules if _begins(path, p)), key=len, default=None)
        rest = path[len(longest or "") :].lstrip(".")
        ours = path if longest is None else modules[longest]
        names[path] = path if longest is None else ".".join(filter(None, (ours, rest)))
    return names


def _begins(path: str, start: str) -> bool:
    return not start or path == start or path.startswith(f"{start}.")


# --- words ----------------------------------------------------------------------------------------


def _called(a: RecordedArray) -> str:
    """An array in words: "layer_norm in blocks.3.ln1 (model.py:41)"."""
    of = {INPUT: "input ", GRADIENT: "the gradient of ", UPDATE: "the update of "}.get(a.kind, "")
    module = f" in {a.module}" if a.module and a.kind in (RESULT, INPUT) else ""
    back = {BACKWARD: ", backward", RECOMPUTE: ", recomputed"}.get(a.direction, "")
    back = back if a.kind == RESULT else ""
    return f"{of}{a.name}{module}{back}" + (f" ({a.source})" if a.source else "")


def _reads(pairs: record_pairs.Pairs, row: Compared, names: tuple[str, str]) -> str:
    """A sentence on what a call reads that is not the same in both runs; "" if all is."""
    for called, ends in ((False, "the other run has not"), (True, "it does not read in the other")):
        parts = []
        for arrays, run in zip(pairs.apart(row, called), names, strict=True):
            if some := ", ".join(map(_called, arrays[:3])):
                parts.append(f"{some}{', ...' * (len(arrays) > 3)} in {run}")
        if parts:
            return f"It reads {' and '.join(parts)}, which {ends}"
    if row.verdict != ALONE and not pairs.in_order(row):
        return "All that it reads has the same values, but perhaps in another order"
    return ""


# Settings of optimizers that are other ways to the same numbers.
_NO_NUMBERS = frozenset({"foreach", "fused", "capturable", "differentiable"})


def _settings(one: RecordedStep, other: RecordedStep) -> Iterator[tuple[str, str]]:
    """Settings of the same optimizers that differ, each with a clause on it."""
    groups = [*other.settings.values()]
    for name, settings in one.settings.items():
        if settings in groups:  # which may come in another order
            continue
        for key, value in settings.items():
            there = other.settings.get(name, {}).get(key, value)
            numbers = isinstance(value, (int, float)) and isinstance(there, (int, float))
            if there != value and not (numbers and math.isclose(value, there, rel_tol=1e-6)):
                yield key, f"{name} has {key}={value!r} in one run and {there!r} in the other"


def _times_two(row: Compared) -> int:
    """The power of two by which a gradient is larger in the other run; 0 if it is by none.

    A clipped one is smaller by any factor, which rounding tells from a power of two.
    """
    numbers = [a.values for a in (row.one, row.other) if a is not None]
    sizes = [[x[at] for at in (AMAX, RMS, MEAN_MAGNITUDE)] for x in numbers]
    if row.array.direction != BACKWARD or row.array.kind == UPDATE or not all(map(all, sizes)):
        return 0
    powers = [math.log2(y) - math.log2(x) for x, y in zip(*sizes, strict=True)]
    power, limit = round(powers[0]), min(max(4 * row.mean_allowed, 1e-6), 0.05)
    return power if max(abs(p - power) for p in powers) < limit else 0


def beside(names: tuple[str, str], row: Compared) -> list[str]:
    """The lines of a table with the arrays of both runs."""

    def cells(a: RecordedArray | None) -> dict[str, str]:
        if a is None:
            return {"op": "no such call"}
        result, some = a.kind == RESULT, a.values[ELEMENTS][: min(a.size, 3)]
        return {
            "op": a.name,
            "module": a.module or OUTSIDE,
            "source": a.source,
            "dtypes": text_table.dtypes(a.inputs, a.run, (a.dtype,)) if result else a.dtype,
            "rule": a.rule,
            "shape": " x ".join(map(str, a.shape)) or "a number",
            "rms, largest": f"{a.values[RMS]:.7g}, {a.values[AMAX]:.7g}" if a.bad < a.size else "",
            "Inf, NaN, masked": f"{a.bad:,}" if a.bad else "",
            "some elements": "" if a.bad else ", ".join(f"{v:.6g}" for v in some),
        }

    return text_table.side_by_side(names, (cells(row.one), cells(row.other)))


def _number(x: float) -> str:
    return "Inf or NaN" if math.isinf(x) else f"{x:.2g}" if x else "0"


def _cells(row: Compared) -> Sequence[Cell | str]:
    dtypes = (text_table.short(a.run or a.dtype) for a in (row.one, row.other) if a)
    return (
        row.array.name,
        row.array.direction,
        row.verdict,
        number(row.difference, _number(row.difference)),
        number(row.allowed, _number(row.allowed)),
        ", ".join(dict.fromkeys(dtypes)),
        row.array.source,
    )


_COLUMNS = (
    Column("array"),
    Column("direction"),
    Column("verdict"),
    Column("difference", True, "of the root mean square"),
    Column("rounding explains", True, "of the root mean square"),
    Column("dtypes"),
    Column("source"),
)


_PARTS = {
    "": "the forward pass",
    BACKWARD: "the backward pass",
    GRADIENT: "gradients of parameters",
    UPDATE: "updates",
}


def _notes(
    records: tuple[RunRecord, RunRecord],
    steps: tuple[RecordedStep, RecordedStep],
    rows: Sequence[Compared],
) -> Iterator[str]:
    """Sentences on the parts that were not compared, and why."""
    lost = sum(row.verdict == UNJUDGED for row in rows)
    for record, theirs in (records, records[::-1]):
        shared = {step.number for step in theirs.steps}
        if more := [step for step in record.steps if step.number not in shared]:
            yield (
                f"not compared: {text_table.plural(len(more), 'step')} of {record.name} that "
                f"{theirs.name} has not: {_numbers(more)}"
            )
    for record, step in zip(records, steps, strict=True):
        name = record.name
        for reason, count in step.left_out.items():
            if reason == FAILS:
                continue  # said below
            yield f"not compared: {text_table.plural(int(count), 'call')} of {name}, {reason}"
        if patterns := ", ".join(map(str, record.header.get("modules", ()))):
            yield f"not compared: calls of {name} outside of {patterns}, which it recorded alone"
        if not record.header.get("probes"):
            if unjudged := ", ".join(dict.fromkeys(a.name for a in step.arrays if unknown(a))):
                yield (
                    f"not judged: {unjudged} of {name}, and what is made of it: only probes tell "
                    "how far rounding moves it"
                )
            yield (
                f"{name} was recorded without probes: what rounding explains is estimated from "
                "each call's own rounding and what it reads, often ten times too much or more"
            )
        if record.cut:
            yield f"{name} ends in a step that is not whole, which was left out"
    compiled = [COMPILED in step.left_out for step in steps]
    if all(compiled):
        yield (
            "both runs are compiled: how far rounding moves what compiled code makes is not known, "
            "so what differs is not judged; compare each with a record of the eager model"
        )
    elif lost and any(math.inf in a.spread for step in steps for a in step.arrays):
        yield (
            f"not judged: {text_table.plural(lost, 'array')} made of what an op makes that is not "
            "in probes, as what other ranks send, or fails there, as one does whose shape depends "
            "on a choice: no one knows how far rounding moves them"
        )
    elif lost:
        yield (
            f"not judged: {text_table.plural(lost, 'array')} that only one run has. Rounding "
            "explains so much of what is made of them that other values would agree as well"
            + ("" if all(r.header.get("probes") for r in records) else ": record with probes")
        )
    passed = [row.array for row in rows if row.verdict == PASSED]
    graded = any(a.kind == GRADIENT for a in passed)  # else results of the other run are gradients
    parts = [dict.fromkeys(map(record_pairs.part, step.arrays)) for step in steps]
    for record, own, rest in zip(records, parts, parts[::-1], strict=True):
        lacking = [p for p in own if p not in rest and (graded or p != GRADIENT)]
        if lacking:
            called = ", ".join(_PARTS[p] for p in lacking)
            yield f"not compared: {called} of {record.name}, for the other run has none"
        passed = [a for a in passed if record_pairs.part(a) not in lacking]
    if lone := [array for array in passed if array.kind == RESULT]:
        yield (
            f"not compared: {text_table.plural(len(lone), 'call')} that only one run makes; what "
            "is made of them is compared"
        )
    # The state of an optimizer is read by its updates alone.
    calls = [(step, a) for step in steps for a in step.arrays if a.kind == RESULT]
    used = {id(step.arrays[r]) for step, a in calls for r in a.reads}
    if inputs := [a.name for a in passed if a.kind == INPUT and id(a) in used]:
        some = ", ".join(inputs[:3]) + (", ..." if len(inputs) > 3 else "")
        ends = {array.name for array in passed if array.kind in (GRADIENT, UPDATE)}
        also = "" if ends.isdisjoint(inputs) else ", nor gradients and updates of these"
        yield (
            f"not compared: {text_table.plural(len(inputs), 'input')} without a counterpart of the "
            f"same values in the other run ({some}){also}"
        )
    ends = {a.name for a in passed if a.kind == GRADIENT}
    if ends := ends.difference(inputs):
        some = ", ".join(sorted(ends)[:3]) + (", ..." if len(ends) > 3 else "")
        yield (
            f"not compared: {text_table.plural(len(ends), 'gradient')} of arrays of which the "
            f"other run has none ({some})"
        )
    one, other = (step.settings for step in steps)
    if one and other and one.keys() != other.keys():
        here, there = ", ".join(one), ", ".join(other)
        yield f"the optimizers differ: {here} in one run and {there} in the other"
    for _, said in _settings(*steps):
        yield f"the optimizers differ: {said}"
