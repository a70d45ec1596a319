"""Two reports of one model compared: under two policies, or from the two frameworks.

`call_differences` finds the differences; here they become a table, data and a page. Nothing here
knows a framework. Module paths that differ only by the way a container names its parts count as
equal.
"""

from collections.abc import Callable, Iterator
from os import PathLike
from typing import Any

from polymp import text_table
from polymp.diagnostics import module_paths, page
from polymp.diagnostics.call_differences import (
    DTYPES,
    RULES,
    Difference,
    by_module,
    difference_cost,
    differences,
)
from polymp.diagnostics.call_record import Call, CallList
from polymp.diagnostics.equal_layers import label
from polymp.diagnostics.page import Bar, Cell, Head, Line, Page
from polymp.diagnostics.report_text import (
    COST,
    OUTSIDE,
    SECTIONS,
    check_sort,
    folding,
    ranked,
    ruled,
)
from polymp.errors import escaped


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
            self._names = module_paths.matched(
                dict.fromkeys(call.module for call in one.calls), theirs
            )
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
        sums = [_sums(self.one), _sums(self.other)]
        names = sorted({**sums[0], **sums[1]}, key=lambda name: (_kind_of_sum(name), name))
        return {name: (sums[0].get(name, 0), sums[1].get(name, 0)) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "names": list(self.names),
            "same": self.same,
            "totals": {name: list(pair) for name, pair in self.totals().items()},
            "rows": [row.to_dict() for row in self.rows],
        }

    def to_html(
        self,
        path: str | PathLike[str] | None = None,
        *,
        sort: str = "program",
        fold: bool = True,
    ) -> str:
        """Return an HTML page, as `Report.to_html` does.

        Args:
            path: file to write it to as well, in UTF-8.
            sort: as in `table`, but of all rows together.
            fold: False to show equal layers one by one.

        Returns:
            The page as text.

        Raises:
            ValueError: `sort` is neither "program" nor "cost".
        """
        return page.written(page.html(self._page(sort, fold)), path)

    def _page(self, sort: str, fold: bool) -> Page:
        check_sort(sort)
        names, modules = self.names, by_module(self.rows, fold)
        figures = [
            (what, [Bar(side, n, _words(what, n)) for side, n in zip(names, pair, strict=True)])
            for what, pair in self.totals().items()
        ]
        heads = (Head("#", True), *map(Head, ("module", "op", "direction", "what", *names)))
        every = ((label(one, ""), row) for one in modules for row in one.rows)
        listed = list(enumerate(every, 1))
        if sort == COST:
            listed.sort(key=lambda pair: difference_cost(pair[1][1]))
        lines = [
            Line(
                (
                    Cell(str(at), at),
                    *map(Cell, (module, row.op, row.direction, kind, *_sides(row))),
                ),
                (row.direction, kind),
            )
            for at, (module, row) in listed
            for kind in [self._kind(row)]
        ]
        note = folding(modules)
        return Page(
            f"{names[0]} and {names[1]}", self._headline(), figures, (note,) if note else (), heads,
            None if sort == COST else ("#", True), ("direction", "what"), lines,
            "row" if note else "difference",
        )  # fmt: skip

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
        check_sort(sort)
        names, modules = self.names, by_module(self.rows, fold)
        rows = list[str | tuple[str, ...]]()
        for direction, name in SECTIONS.items():
            section = [one for one in modules if one.section == direction]
            rows += ["", text_table.heading(name, width)] if section else []
            for one in ranked(section, difference_cost) if sort == COST else section:
                rows += [label(one, OUTSIDE), *((f"  {r.op}", *_sides(r)) for r in one.rows)]
        lines = [f"{names[0]} and {names[1]}: {self._headline()}"]
        sums = [
            (what, *(_words(what, count) for count in pair)) for what, pair in self.totals().items()
        ]
        if sums:
            lines += ["", *text_table.columns(("totals", *names), sums, names, width)]
        if note := folding(modules):
            lines += ["", *text_table.folded(note, width)]
        if rows:
            lines += ["", *text_table.columns(("op", *names), rows, width=width)]
        return escaped("\n".join(lines))

    def _repr_html_(self) -> str:
        return page.framed(self.to_html(), f"{self.names[0]} and {self.names[1]}")

    def __repr__(self) -> str:
        return f"ReportDiff({self.one!r}, {self.other!r}, {len(self)} differences)"


def _sides(row: Difference) -> tuple[str, str]:
    """The cells of a difference: for each report, the fields that differ."""
    one, other = (_cell(call, row.changed) for call in (row.one, row.other))
    return one, other


def _cell(call: Call | None, changed: tuple[str, ...]) -> str:
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


_KINDS = (
    "call sites", "FLOPs", "casts", "bytes cast", "saved", "bytes of float32 kept",
    "bytes of 8 bits kept",
)  # fmt: skip


def _sums(report: CallList) -> dict[str, int]:
    flops, saved = report.flops.items(), report.saved.items()
    kept = report.kept, report.kept_fp8 or None
    sums = (len(report), None, report.casts, report.cast_bytes, None, *kept)
    return {
        **{kind: n for kind, n in zip(_KINDS, sums, strict=True) if n is not None},
        **{f"FLOPs in {dtype}": n for dtype, n in flops},
        **{f"saved: {reason}": n for reason, n in saved},
    }


def _kind_of_sum(name: str) -> int:
    return next(at for at, kind in enumerate(_KINDS) if name.startswith(kind))


def _words(what: str, count: int) -> str:
    if "bytes" in what:
        return text_table.size(count)
    return text_table.amount(count) if what.startswith("FLOPs") else f"{count:,}"
