"""Two reports of one model compared: under two policies, or from the two frameworks.

Module paths that differ only by the way a container names its parts count as equal. Nothing here
knows a framework.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import combinations
from os import PathLike
from typing import Any, NamedTuple

from polymp import text_table
from polymp.diagnostics import page, tables
from polymp.diagnostics.call_record import SECTIONS, Call, CallList, added, alike, cost, ruled
from polymp.diagnostics.page import Page
from polymp.diagnostics.tables import COST
from polymp.errors import escaped


class Difference(NamedTuple):
    """A call that only one report has, or that differs between them."""

    module: str  # its path, as the first report has it
    direction: str  # "forward", "backward" or "recompute"
    op: str  # its name
    one: Call | None  # the call of the first report; None if only the other has it
    other: Call | None  # the call of the other report; None if only the first has it
    # What differs: of "inputs", "run", "outputs", "rule", "recipe", "fallback", "casts",
    # "cast_bytes", "times"; () if only one has it.
    changed: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        sides = {"one": self.one, "other": self.other}
        return self._asdict() | {
            "changed": list(self.changed),
            **{name: call and call.to_dict() for name, call in sides.items()},
        }


class ReportDiff:
    """The differences between two reports; true if there are any. `print` shows them as a table.

    Two calls are compared if module, direction and op are equal, in the order in which they were
    reached. Between two frameworks, which give an op different operands, the dtypes of the inputs
    differ if one has a dtype that the other lacks.

    Attributes:
        one: the first report.
        other: the other report.
        rows: the differences, by module in the order of the first report.
    """

    def __init__(
        self, one: CallList, other: CallList, modules: Callable[[str], str] | None = None
    ) -> None:
        """Compare."""
        self.one: CallList = one
        self.other: CallList = other
        theirs = dict.fromkeys(call.module for call in other.calls)
        if modules is None:
            self._names = matched(dict.fromkeys(call.module for call in one.calls), theirs)
        else:
            self._names = {module: modules(module) for module in theirs}
        self.rows: tuple[Difference, ...] = tuple(differences(one.calls, other.calls, self._names))

    @property
    def same(self) -> bool:
        """True if both have the same calls, and each the same dtypes: input, run and output."""
        return not any(
            row.one is None or row.other is None or {*DTYPES} & {*row.changed} for row in self.rows
        )

    @property
    def names(self) -> tuple[str, str]:
        """Names of the two reports: frameworks, policies, dtypes or titles, whichever differ."""
        sides = [
            (next((call.backend for call in r), ""), r.policy, r.low, r.title)
            for r in (self.one, self.other)
        ]
        for left, right in zip(*sides, strict=True):
            if left != right and left and right:
                return left, right
        return "one", "other"

    def totals(self) -> dict[str, tuple[int, int]]:
        """Return the sums of both: "FLOPs in float32", "casts", "bytes cast", ..."""
        pairs = zip(_sums(self.one), _sums(self.other), strict=True)
        return {
            name: (one.get(name, 0), other.get(name, 0))
            for one, other in pairs
            for name in sorted({*one, *other})
        }

    def _in_words(self) -> list[tuple[str, str, str]]:
        """The totals in words."""
        return [(w, _words(w, one), _words(w, other)) for w, (one, other) in self.totals().items()]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "names": list(self.names),
            "same": self.same,
            "totals": {name: list(pair) for name, pair in self.totals().items()},
            "rows": [row.to_dict() for row in self.rows],
        }

    def to_html(self, path: str | PathLike[str] | None = None, *, fold: bool = True) -> str:
        """Return an HTML page, as `Report.to_html` does.

        Args:
            path: file to write it to as well, in UTF-8.
            fold: False to show equal layers one by one.

        Returns:
            The page as text.
        """
        modules, _, note = tables.arranged(self.rows, DIFFERENCES, fold=fold)
        sums = "; ".join(f"{what}: {one} and {other}" for what, one, other in self._in_words())
        made = Page(
            title=" and ".join(self.names),
            about=self._headline(),
            notes=list(filter(None, (sums, note))),
            table=self._table(modules),
            sorted=("#", True),
            what="row" if note else "difference",
        )
        return page.html(made, path)

    def _table(self, modules: Iterable[tables.ModuleRows[Difference]]) -> tables.Table:
        columns = (
            tables.Column("op", breaks="parts"),
            tables.Column("direction", on_page=True),
            tables.Column("what", on_page=True),
            *map(tables.Column, self.names),
        )
        lines = []
        for one in modules:
            for row in one.rows:
                kind, sides = self._kind(row), [_cell(c, row.changed) for c in (row.one, row.other)]
                cells = tuple(map(tables.Cell, (row.op, row.direction, kind, *sides)))
                place = SECTIONS[one.section], one.label
                lines.append(tables.Line(*place, cells, (row.direction, kind)))
        return tables.Table(columns, ("direction", "what"), lines)

    def _kind(self, row: Difference) -> str:
        if row.one is None:
            return f"only in {self.names[1]}"
        if row.other is None:
            return f"only in {self.names[0]}"
        kinds = {**dict.fromkeys(DTYPES, "dtypes"), **dict.fromkeys(RULES, "rule")}
        kinds["cast_bytes"] = "casts"
        return ", ".join(dict.fromkeys(kinds.get(name, name) for name in row.changed))

    def _headline(self) -> str:
        if not self.rows:
            return "no difference"
        dtypes = "the same dtypes" if self.same else "other dtypes"
        return f"{text_table.plural(len(self.rows), 'difference')}, {dtypes}"

    def __iter__(self) -> Iterator[Difference]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __str__(self) -> str:
        return self.table()

    def table(self, width: int | None = None, *, sort: str = "program", fold: bool = True) -> str:
        """Return the totals side by side, then the differences, as `print` shows them.

        Args:
            width: of a line, in characters; by default the terminal's, and 100 without one.
            sort: "program", or "cost" to put those first whose casts or FLOPs differ the most.
            fold: False to show equal layers one by one.

        Returns:
            The text.

        Raises:
            ValueError: `sort` is neither "program" nor "cost".
        """
        modules, _, note = tables.arranged(self.rows, DIFFERENCES, sort, fold)
        names = self.names
        lines = [f"{names[0]} and {names[1]}: {self._headline()}"]
        if sums := self._in_words():
            lines += ["", *text_table.columns(("totals", *names), sums, names, width)]
        if note:
            lines += ["", *text_table.folded(note, width)]
        if self.rows:
            lines += ["", *tables.text(self._table(modules), width)]
        return escaped("\n".join(lines))

    def _repr_html_(self) -> str:
        return page.framed(self.to_html(), f"{self.names[0]} and {self.names[1]}")

    def __repr__(self) -> str:
        return f"ReportDiff({self.one!r}, {self.other!r}, {len(self)} differences)"


def _cell(call: Call | None, changed: tuple[str, ...]) -> str:
    """The fields that differ, of one side of a difference."""
    if call is None:
        return "not called"
    alone = not changed
    parts = []
    if alone or {*DTYPES} & {*changed}:
        parts.append(text_table.dtypes(call.inputs, call.run, call.outputs))
    if alone or {*RULES} & {*changed}:
        parts.append(ruled(call) or "no region")
    if {"casts", "cast_bytes"} & {*changed} or (alone and call.casts):
        casts = f"{text_table.plural(call.casts, 'cast')} of {text_table.size(call.cast_bytes)}"
        parts.append(casts if call.casts else "no cast")
    if "times" in changed or (alone and call.times > 1):
        parts.append(f"ran {text_table.plural(call.times, 'time')}")
    return "; ".join([*parts, *filter(None, [call.source])])


def _sums(report: CallList) -> list[dict[str, int]]:
    """The sums of a report, in the order in which they are shown."""
    return [
        {"call sites": len(report)},
        {f"FLOPs in {dtype}": n for dtype, n in report.flops.items()},
        {"casts": report.casts},
        {"bytes cast": report.cast_bytes},
        {f"saved: {reason}": n for reason, n in report.saved.items()},
        {"bytes of float32 kept": report.kept},
        {"bytes of 8 bits kept": report.kept_fp8} if report.kept_fp8 else {},
    ]


def _words(what: str, count: int) -> str:
    if "bytes" in what:
        return text_table.size(count)
    return text_table.amount(count) if what.startswith("FLOPs") else f"{count:,}"


# The calls of two reports side by side, and in what they differ.
#
# calls of one, calls of the other -> pairs by (module, direction, op), in order -> differences


DTYPES = ("inputs", "run", "outputs")
RULES = ("rule", "recipe", "fallback")
_COMPARED = (*DTYPES, *RULES, "casts", "cast_bytes", "times")


def differences(
    ones: Iterable[Call], others: Iterable[Call], names: Mapping[str, str]
) -> Iterator[Difference]:
    """Yield the differences between the calls of two reports, by direction and module."""
    left, right = _grouped(ones, {}), _grouped(others, names)
    order = {direction: at for at, direction in enumerate(SECTIONS)}
    for place in sorted({**left, **right}, key=lambda place: order[place[1]]):
        for one, other in _pairs(left.get(place, []), right.get(place, [])):
            op = one.op if one else other.op if other else ""
            changed = _changed(one, other) if one and other else ()
            if changed or one is None or other is None:
                yield Difference(*place, op, one, other, changed)


def _alike(row: Difference) -> Hashable:
    sides = (call and alike(call) for call in (row.one, row.other))
    return row.op, row.changed, *sides


def _added(rows: Sequence[Difference]) -> Difference:
    one, other = (
        [c for c in calls if c] for calls in ((r.one for r in rows), (r.other for r in rows))
    )
    return rows[0]._replace(one=added(one) if one else None, other=added(other) if other else None)


def difference_cost(rows: Sequence[Difference]) -> tuple[int, int]:
    """The sort key that puts first what costs the most more, or the most less."""
    sides = [[cost([call] if call else []) for call in (row.one, row.other)] for row in rows]
    moved, flops = (-sum(abs(one[at] - other[at]) for one, other in sides) for at in (0, 1))
    return moved, flops


DIFFERENCES: tables.RowKind[Difference] = tables.RowKind(
    SECTIONS,
    lambda row: (row.direction, row.module),
    _alike,
    _added,
    {COST: difference_cost},
)


def _grouped(calls: Iterable[Call], names: Mapping[str, str]) -> dict[tuple[str, str], list[Call]]:
    """The calls by module, renamed, and direction, in order."""
    groups: dict[tuple[str, str], list[Call]] = {}
    for call in calls:
        place = names.get(call.module, call.module), call.direction
        groups.setdefault(place, []).append(call)
    return groups


def _pairs(left: list[Call], right: list[Call]) -> Iterator[tuple[Call | None, Call | None]]:
    """The calls side by side, by op and in order; None where there is none."""
    ops = [call.op for call in left], [call.op for call in right]
    for what, i, to_i, j, to_j in SequenceMatcher(None, *ops, autojunk=False).get_opcodes():
        if what == "equal":
            yield from zip(left[i:to_i], right[j:to_j], strict=True)
        else:
            yield from ((call, None) for call in left[i:to_i])
            yield from ((None, call) for call in right[j:to_j])


def _changed(one: Call, other: Call) -> tuple[str, ...]:
    def value(call: Call, name: str) -> Any:
        inputs = name == "inputs" and one.backend != other.backend
        return {*call.inputs} if inputs else getattr(call, name)

    return tuple(name for name in _COMPARED if value(one, name) != value(other, name))


# The modules of one model matched with those of another whose containers name them differently.


_LAYERS = 4  # parts "layers" of one path that are left out in every combination


def matched(ours: Iterable[str], theirs: Iterable[str]) -> dict[str, str]:
    """From the other's module paths to ours; a path that has no counterpart stays.

    Equal paths belong together. Of the others, those do that become equal when parts "layers" or a
    class name in front are left out on either side, the fewest parts first; never if two of ours
    would do.

        blocks.0.attn, Net.blocks.layers.0.attn -> blocks.0.attn
        blocks.0.attn, Net.blocks_0.attn -> blocks.0.attn
    """
    theirs = list(theirs)
    free = {*ours} - {*theirs}
    reduced: dict[str, list[str]] = {}
    for path in sorted(free):
        for form in _forms(path):
            reduced.setdefault(form, []).append(path)
    names, taken = dict[str, str](), set[str]()
    for path in theirs:
        found = [reduced.get(form, []) for form in _forms(path)] if path not in {*ours} else []
        unique = [paths[0] for paths in found if len(paths) == 1 and paths[0] not in taken]
        names[path] = unique[0] if unique else path
        taken.add(names[path])
    return names


def _forms(path: str) -> list[str]:
    """The path, and what is left without parts "layers" and a class name in front.

    Modules of a list are "blocks_0" in flax linen: they are "blocks.0" here. Equinox adds the class
    of each of its layers, "up.eqx.nn.Linear": it is left out.
    """
    parts = re.sub(r"_(\d+)(?=\.|$)", r".\1", re.sub(r"\.eqx\.nn\.\w+", "", path)).split(".")
    layers = [at for at, part in enumerate(parts) if part == "layers"][:_LAYERS]
    starts = [0, 1] if parts[0][:1].isupper() else [0]
    forms = {
        ".".join(part for at, part in enumerate(parts) if at >= start and at not in left_out): None
        for count in range(len(layers) + 1)
        for left_out in combinations(layers, count)
        for start in starts
    }
    return list(dict.fromkeys((path, *sorted(forms, key=lambda form: -form.count(".")))))
