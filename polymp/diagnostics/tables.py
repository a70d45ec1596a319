"""Tables: rows by section and module, equal layers as one, in an order, printed or on a page.

    rows and their RowKind -> arranged -> modules with their rows -> Table -> text_rows
                                                                          -> page.html

A report, a difference of two and an audit arrange their rows here, and make a `Table` of them: one
that `print` shows in the columns of `text_table`, and `page` as HTML.
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


class RowKind(NamedTuple, Generic[R]):
    """How rows of one kind are placed, added up and ordered."""

    sections: Mapping[str, str]  # headings, in order, by their keys
    place: Callable[[R], tuple[str, str]]  # the key of its section, and its module
    alike: Callable[[R], Hashable]  # in what the rows of equal layers agree
    added: Callable[[Sequence[R]], R]  # one row in place of several, with the counts of all
    # By name, the sort key of rows that stand together.
    orders: Mapping[str, Callable[[Sequence[R]], tuple[float, ...]]] = {}


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


class Column(NamedTuple):
    """A column of a table."""

    name: str
    numeric: bool = False  # its cells are numbers, which sort the largest first
    about: str = ""  # a sentence that explains it on a page
    # Where a line of its cells may end on a page: "never", after "parts" of a path, or at "spaces";
    # "" for "never" in cells with a value, and "spaces" in others.
    breaks: str = ""
    on_page: bool = False  # on pages alone


class Cell(NamedTuple):
    """A cell: its text, the value to sort by if that is not the text, and a hint on a page."""

    text: str
    value: float | None = None
    about: str = ""


def number(value: float, words: str) -> Cell:
    """A cell with a number in words; an empty one for 0."""
    return Cell(words if value else "", value)


class Line(NamedTuple):
    """A row of a table."""

    section: str  # heading, "" in a table without sections
    module: str  # label
    cells: Sequence[Cell]  # one for each column
    kinds: Sequence[str] = ()  # one for each select of a page
    rank: tuple[float, ...] = ()  # the sort key among all rows of a page; () for their order here


class Table(NamedTuple):
    """Columns, the selects of a page, which filter by the `kinds` of lines, and the lines."""

    columns: Sequence[Column]
    selects: Sequence[str]
    lines: Sequence[Line]

    def without_empty(self) -> "Table":
        """The table without the columns in which no line has a text."""
        used = [at for at in range(len(self.columns)) if any(x.cells[at].text for x in self.lines)]
        lines = [line._replace(cells=[line.cells[at] for at in used]) for line in self.lines]
        return self._replace(columns=[self.columns[at] for at in used], lines=lines)


def arranged(
    rows: Iterable[R], kind: RowKind[R], sort: str = PROGRAM, fold: bool = True
) -> tuple[list[ModuleRows[R]], str]:
    """Return rows by section and module, equal layers as one, and a note that says so."""
    # In another order than that of the program, modules are sorted in their section, and rows in
    # their module.
    orders = (PROGRAM, *kind.orders)
    if sort not in orders:
        *others, last = (f'"{order}"' for order in orders)
        raise ValueError(
            f"sort={sort!r} is no order of these rows: write {', '.join(others)} or {last}."
        )
    sections = {section: at for at, section in enumerate(kind.sections)}
    modules = sorted(folded(rows, kind, fold), key=lambda one: sections[one.section])
    if sort != PROGRAM:
        key = kind.orders[sort]
        modules = [
            one._replace(rows=tuple(sorted(one.rows, key=lambda row: key([row]))))
            for one in modules
        ]
        modules.sort(key=lambda one: (sections[one.section], key(one.rows)))
    count = sum(len(one.rows) for one in modules)
    sites = sum(len(one.rows) * one.layers for one in modules)
    note = (
        f"equal layers are one, with the counts of all of them: {sites:,} rows in {count:,}; "
        "fold=False lists each"
    )
    return modules, "" if count == sites else note


TextRow = str | tuple[str, ...]


def text_parts(
    table: Table, width: int | None = None
) -> tuple[list[str], list[TextRow], list[str]]:
    """Heads and rows of a printed table, and the heads of numbers; sections are lines in it."""
    shown = [at for at, column in enumerate(table.columns) if not column.on_page]
    rows, above = list[TextRow](), ("", "")
    for line in table.lines:
        if line.section != above[0]:
            rows += ["", text_table.heading(line.section, width)]
        if line[:2] != above:
            rows.append(line.module)
        above = line.section, line.module
        first, *others = (line.cells[at].text for at in shown)
        rows.append((f"  {first}", *others))
    columns = [table.columns[at] for at in shown]
    right = [column.name for column in columns if column.numeric and column.breaks != "spaces"]
    return [column.name for column in columns], rows, right


def text(table: Table, width: int | None = None) -> list[str]:
    """The lines of a printed table."""
    return text_table.columns(*text_parts(table, width), width)


# Equal layers folded into one: 24 blocks of a model become `layers.*`, with the sums of all.
#
#     rows, each of a module -> modules with their rows -> equal neighbours added up
#
# Two modules are equal if their paths differ in one number alone, and if they have equal rows in
# the same order. Only neighbours are folded, so that an odd layer stays where it is:
#
#   layers.0.attn ... layers.23.attn        layers.*.attn x24
#   the same, with another layers.7.attn    layers.0-6.attn x7, layers.7.attn, layers.8-23.attn x16


# Every layer of a model, in a path, as in the patterns of policies.
_ALL = "*"
_NUMBERED = re.compile(r"(|.*_)(\d+)")  # flax's linen writes layers_0
_FOLDED = re.compile(r"(|.*_)(?:\d[\d,-]*|\*)")  # a number, or what it became


def folded(rows: Iterable[R], kind: RowKind[R], fold: bool = True) -> list[ModuleRows[R]]:
    """Return rows by section and module, equal modules as one."""
    grouped: dict[tuple[str, str], list[R]] = {}
    for row in rows:
        grouped.setdefault(kind.place(row), []).append(row)
    modules = [ModuleRows(*at, 1, tuple(many)) for at, many in grouped.items()]
    if not fold:
        return modules
    numbers = _numbers(module for _, module in grouped)
    for at in range(max((m.module.count(".") + 1 for m in modules), default=0)):
        modules = _folded_at(at, modules, kind, numbers)
    return modules


def _numbers(modules: Iterable[str]) -> dict[tuple[str, ...], set[int]]:
    """The numbers of all layers, by the path up to them."""
    numbers: dict[tuple[str, ...], set[int]] = {}
    for module in modules:
        parts = module.split(".")
        for at, part in enumerate(parts):
            if number := _NUMBERED.fullmatch(part):
                numbers.setdefault(_masked(parts[: at + 1]), set()).add(int(number[2]))
    return numbers


def _masked(parts: Sequence[str]) -> tuple[str, ...]:
    """The parts of a path; numbers and ranges as `*`."""
    matches = ((part, _FOLDED.fullmatch(part)) for part in parts)
    return tuple(f"{match[1]}{_ALL}" if match else part for part, match in matches)


def _folded_at(
    at: int,
    modules: list[ModuleRows[R]],
    kind: RowKind[R],
    numbers: dict[tuple[str, ...], set[int]],
) -> list[ModuleRows[R]]:
    """Fold the modules whose paths differ in the number at one place."""
    groups: dict[tuple[object, ...], dict[int, int]] = {}  # places in `modules`, by number
    for index, one in enumerate(modules):
        parts = one.module.split(".")
        if number := _NUMBERED.fullmatch(parts[at]) if at < len(parts) else None:
            key = one.section, one.layers, *parts[:at], None, number[1], *parts[at + 1 :]
            groups.setdefault(key, {})[int(number[2])] = index
    kept: dict[int, ModuleRows[R]] = dict(enumerate(modules))
    for group in groups.values():
        rows = {n: tuple(map(kind.alike, modules[group[n]].rows)) for n in sorted(group)}
        for _, alike in groupby(rows, key=rows.__getitem__):
            run = list(alike)
            if len(run) > 1:
                members = [modules[group[n]] for n in run]
                for n in run:
                    del kept[group[n]]
                kept[min(group[n] for n in run)] = _added_row(members, at, run, kind.added, numbers)
    return [kept[index] for index in sorted(kept)]


def _added_row(
    members: Sequence[ModuleRows[R]],
    at: int,
    run: Sequence[int],
    added: Callable[[Sequence[R]], R],
    numbers: dict[tuple[str, ...], set[int]],
) -> ModuleRows[R]:
    parts = members[0].module.split(".")
    everywhere = numbers[_masked(parts[: at + 1])] == {*run}
    name = parts[at].rstrip("0123456789")
    parts[at] = name + (_ALL if everywhere else _ranges(run))
    rows = tuple(added(many) for many in zip(*(m.rows for m in members), strict=True))
    layers = sum(member.layers for member in members)
    return ModuleRows(members[0].section, ".".join(parts), layers, rows)


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in short: "0-4,6"."""
    places = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in places]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
