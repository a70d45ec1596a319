"""Tables: rows by section and module, equal layers as one, in an order, printed or on a page.

    rows -> TableKind.table -> Table -> text, or page.html

A report, a difference of two, an audit and a comparison of records are tables of such kinds.
Nothing here knows what a row holds.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Generic, NamedTuple, TypeVar

from polymp import text_table

# The module of rows that are outside of all.
OUTSIDE = "(top level)"

# The orders that rows have.
PROGRAM, COST = "program", "cost"

R = TypeVar("R")


class Cell(NamedTuple):
    """A cell: its text, the value to sort by if that is not the text, and a hint on a page."""

    text: str
    value: float | None = None
    about: str = ""


def number(value: float, words: str) -> Cell:
    """A cell with a number in words; an empty one for 0."""
    return Cell(words if value else "", value)


class Column(NamedTuple):
    """A column of a table."""

    name: str
    numeric: bool = False  # its cells are numbers, which sort the largest first
    about: str = ""  # a sentence that explains it on a page
    # Where a line of its cells may end on a page: "never", after "parts" of a path, or at "spaces";
    # "" for "never" in cells with a value, and "spaces" in others.
    breaks: str = ""
    on_page: bool = False  # on pages alone


class Line(NamedTuple):
    """A row of a table as it is shown."""

    section: str  # heading
    module: str  # with the number of equal ones: "layers.*.attn x24"
    cells: Sequence[Cell]  # one for each column
    selected: Sequence[str]  # its value in each select of a page


class Table(NamedTuple):
    """Columns, the selects of a page, which filter the lines, and the lines."""

    columns: Sequence[Column]
    selects: Sequence[str]
    lines: Sequence[Line]
    note: str = ""  # says that equal layers are one

    def without_empty(self) -> "Table":
        """The table without the columns in which no line has a text."""
        used = [at for at in range(len(self.columns)) if any(x.cells[at].text for x in self.lines)]
        lines = [line._replace(cells=[line.cells[at] for at in used]) for line in self.lines]
        return self._replace(columns=[self.columns[at] for at in used], lines=lines)

    def text_parts(
        self, width: int | None = None
    ) -> tuple[list[str], list[str | tuple[str, ...]], list[str]]:
        """Heads and rows of a printed table, and the heads of numbers; sections are lines in it."""
        shown = [at for at, column in enumerate(self.columns) if not column.on_page]
        rows, above = list[str | tuple[str, ...]](), ("", "")
        for line in self.lines:
            if line.section != above[0]:
                rows += ["", text_table.heading(line.section, width)]
            if line[:2] != above:
                rows.append(line.module)
            above = line.section, line.module
            first, *others = (line.cells[at].text for at in shown)
            rows.append((f"  {first}", *others))
        columns = [self.columns[at] for at in shown]
        right = [column.name for column in columns if column.numeric and column.breaks != "spaces"]
        return [column.name for column in columns], rows, right

    def text(self, width: int | None = None) -> list[str]:
        """The lines of a printed table."""
        return text_table.columns(*self.text_parts(width), width)


class ModuleRows(NamedTuple, Generic[R]):
    """The rows of a module, or those of equal modules, added up."""

    section: str
    module: str  # its path; of several, with `*` or a range of numbers: "layers.0-6.attn"
    layers: int  # how many modules these are
    rows: tuple[R, ...]

    @property
    def label(self) -> str:
        """The module in a table: "layers.*.attn x24"."""
        return (self.module or OUTSIDE) + (f" x{self.layers}" if self.layers > 1 else "")


class TableKind(NamedTuple, Generic[R]):
    """How rows of one kind are placed, shown, added up and ordered."""

    place: Callable[[R], tuple[str, str]]  # the key of its section, and its module
    columns: Sequence[Column] = ()
    cells: Callable[[R], Sequence[Cell | str]] = lambda row: ()
    selects: Sequence[str] = ()  # names of the values by which a page filters rows
    selected: Callable[[R], Sequence[str]] = lambda row: ()
    sections: Mapping[str, str] = {"": ""}  # headings, in order, by their keys
    alike: Callable[[R], Hashable] = id  # in what the rows of equal layers agree
    # One row in place of several, with the counts of all.
    added: Callable[[Sequence[R]], R] = lambda rows: rows[0]
    # By name, the sort key of rows that stand together.
    orders: Mapping[str, Callable[[Sequence[R]], tuple[float, ...]]] = {}

    def table(self, rows: Iterable[R], sort: str = PROGRAM, fold: bool = True) -> Table:
        """The rows as they are shown."""
        modules = self.arranged(rows, sort, fold)
        count = sum(len(one.rows) for one in modules)
        sites = sum(len(one.rows) * one.layers for one in modules)
        note = (
            f"equal layers are one, with the counts of all of them: {sites:,} rows in {count:,}; "
            "fold=False lists each"
        )
        lines = [self._line(row, one.section, one.label) for one in modules for row in one.rows]
        return Table(self.columns, self.selects, lines, "" if count == sites else note)

    def plain(self, rows: Iterable[R]) -> Table:
        """The rows as they come, each with its module."""
        lines = [self._line(row, self.place(row)[0], self.place(row)[1] or OUTSIDE) for row in rows]
        return Table(self.columns, self.selects, lines)

    def _line(self, row: R, section: str, module: str) -> Line:
        cells = [Cell(cell) if isinstance(cell, str) else cell for cell in self.cells(row)]
        return Line(self.sections[section], module, cells, self.selected(row))

    def arranged(
        self, rows: Iterable[R], sort: str = PROGRAM, fold: bool = True
    ) -> list[ModuleRows[R]]:
        """Rows by section and module, equal layers as one."""
        # In another order than that of the program, modules are sorted in their section, and rows
        # in their module.
        orders = (PROGRAM, *self.orders)
        if sort not in orders:
            *others, last = (f'"{order}"' for order in orders)
            raise ValueError(
                f"sort={sort!r} is no order of these rows: write {', '.join(others)} or {last}."
            )
        sections = {section: at for at, section in enumerate(self.sections)}
        modules = sorted(folded(rows, self, fold), key=lambda one: sections[one.section])
        if sort != PROGRAM:
            key = self.orders[sort]
            modules = [
                one._replace(rows=tuple(sorted(one.rows, key=lambda row: key([row]))))
                for one in modules
            ]
            modules.sort(key=lambda one: (sections[one.section], key(one.rows)))
        return modules


# Equal layers folded into one: 24 blocks of a model become `layers.*`, with the sums of all.
#
# Two modules are equal if their paths differ in one number alone, and if they have equal rows in
# the same order. Only neighbours are folded, so that an odd layer stays where it is:
#
#   layers.0.attn ... layers.23.attn        layers.*.attn x24
#   the same, with another layers.7.attn    layers.0-6.attn x7, layers.7.attn, layers.8-23.attn x16

_NUMBERED = re.compile(r"(|.*_)(\d+)")  # flax's linen writes layers_0
_FOLDED = re.compile(r"(?<![^._])(\d[\d,-]*|\*)(?=\.|$)")  # a number in a path, or what it became


def folded(rows: Iterable[R], kind: TableKind[R], fold: bool = True) -> list[ModuleRows[R]]:
    """Rows by section and module, equal modules as one."""
    grouped: dict[tuple[str, str], list[R]] = {}
    for row in rows:
        grouped.setdefault(kind.place(row), []).append(row)
    modules = [ModuleRows(*at, 1, tuple(many)) for at, many in grouped.items()]
    numbers: dict[str, set[int]] = {}  # of all layers, by the path up to them
    for _, module in grouped:
        parts = module.split(".")
        for at, part in enumerate(parts):
            if number := _NUMBERED.fullmatch(part):
                numbers.setdefault(_masked(parts[: at + 1]), set()).add(int(number[2]))
    depth = max((module.count(".") + 1 for _, module in grouped), default=0)
    for at in range(depth if fold else 0):
        modules = _folded_at(at, modules, kind, numbers)
    return modules


def _masked(parts: Sequence[str]) -> str:
    """A path with a star for each number or range."""
    return _FOLDED.sub("*", ".".join(parts))


def _folded_at(
    at: int, modules: list[ModuleRows[R]], kind: TableKind[R], numbers: Mapping[str, set[int]]
) -> list[ModuleRows[R]]:
    """Fold the modules whose paths differ in the number at one place."""
    groups: dict[tuple[object, ...], dict[int, int]] = {}  # places in `modules`, by number
    for index, one in enumerate(modules):
        parts = one.module.split(".")
        if number := _NUMBERED.fullmatch(parts[at]) if at < len(parts) else None:
            key = one.section, one.layers, *parts[:at], None, number[1], *parts[at + 1 :]
            groups.setdefault(key, {})[int(number[2])] = index
    kept = dict(enumerate(modules))
    for group in groups.values():
        rows = {n: [*map(kind.alike, modules[group[n]].rows)] for n in sorted(group)}
        for _, alike in groupby(rows, key=rows.__getitem__):
            run = list(alike)
            if len(run) > 1:
                members = [kept.pop(group[n]) for n in run]
                parts = members[0].module.split(".")
                all_layers = numbers[_masked(parts[: at + 1])] == {*run}
                parts[at] = parts[at].rstrip("0123456789") + ("*" if all_layers else _ranges(run))
                added = map(kind.added, zip(*(m.rows for m in members), strict=True))
                layers = sum(member.layers for member in members)
                one = ModuleRows(members[0].section, ".".join(parts), layers, tuple(added))
                kept[min(group[n] for n in run)] = one
    return [kept[index] for index in sorted(kept)]


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in short: "0-4,6"."""
    places = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in places]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
