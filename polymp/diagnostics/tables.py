"""Tables: rows by section and module, equal layers as one, printed or on a page.

    rows -> TableKind.table -> Table -> text, or page.html

A report, a difference of two and an audit are tables of such kinds. Nothing here knows what a row
holds.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Generic, NamedTuple, TypeVar

from polymp import text_table

# The module of rows that are outside of all.
OUTSIDE = "(top level)"

R = TypeVar("R")


class Cell(NamedTuple):
    """A cell with a number: its text, and the value to sort by."""

    text: str
    value: float = 0.0


def number(value: float, words: str) -> Cell:
    """A cell with a number in words; an empty one for 0."""
    return Cell(words if value else "", value)


class Column(NamedTuple):
    """A column of a table."""

    name: str
    numeric: bool = False  # its cells are numbers, which sort the largest first
    about: str = ""  # a sentence that explains it on a page
    on_page: bool = False  # on pages alone


class Line(NamedTuple):
    """A row of a table as it is shown."""

    section: str  # heading
    module: str  # with the number of equal ones: "layers.*.attn x24"
    cells: Sequence[Cell | str]  # one for each column


class Table(NamedTuple):
    """Columns and lines."""

    columns: Sequence[Column]
    lines: Sequence[Line]

    def text(self) -> list[str]:
        """The lines of a printed table; sections and modules are lines in it."""
        shown = [at for at, column in enumerate(self.columns) if not column.on_page]
        rows, above = list[str | Sequence[str]](), ("", "")
        for line in self.lines:
            if line.section != above[0]:
                rows += ["", f"-- {line.section} ".ljust(text_table.terminal_width(), "-")]
            if line[:2] != above:
                rows.append(line.module)
            above = line.section, line.module
            cells = (line.cells[at] for at in shown)
            first, *others = (cell if isinstance(cell, str) else cell.text for cell in cells)
            rows.append((f"  {first}", *others))
        columns = [self.columns[at] for at in shown]
        right = [column.name for column in columns if column.numeric]
        return text_table.columns([column.name for column in columns], rows, right)


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
    """How rows of one kind are placed, added up and shown."""

    place: Callable[[R], tuple[str, str]]  # the key of its section, and its module
    alike: Callable[[R], Hashable]  # in what the rows of equal layers agree
    added: Callable[[Sequence[R]], R]  # one row in place of several, with the counts of all
    sections: Mapping[str, str]  # headings, in order, by their keys

    def table(
        self,
        rows: Iterable[R],
        columns: Sequence[Column],
        cells: Callable[[R], Sequence[Cell | str]],
    ) -> Table:
        """The rows as they are shown."""
        lines = [
            Line(self.sections[one.section], one.label, cells(row))
            for one in self.arranged(rows)
            for row in one.rows
        ]
        return Table(columns, lines)

    def arranged(self, rows: Iterable[R]) -> list[ModuleRows[R]]:
        """Rows by section and module, equal layers as one, in the order of the program."""
        grouped: dict[tuple[str, str], list[R]] = {}
        for row in rows:
            grouped.setdefault(self.place(row), []).append(row)
        modules = [ModuleRows(*at, 1, tuple(many)) for at, many in grouped.items()]
        depth = max((module.count(".") + 1 for _, module in grouped), default=0)
        for at in range(depth):
            modules = _folded(modules, self, at)
        order = [*self.sections]
        return sorted(modules, key=lambda one: order.index(one.section))


# Equal layers folded into one: 24 blocks of a model become `layers.*`, with the sums of all.
#
# Two modules are equal if their paths differ in one number alone, and if they have equal rows in
# the same order. Only neighbours are folded, so that an odd layer stays where it is:
#
#   layers.0.attn ... layers.23.attn        layers.*.attn x24
#   the same, with another layers.7.attn    layers.0-6.attn x7, layers.7.attn, layers.8-23.attn x16

_NUMBERED = re.compile(r"(|.*_)(\d+)")  # flax's linen writes layers_0


def _folded(modules: list[ModuleRows[R]], kind: TableKind[R], at: int) -> list[ModuleRows[R]]:
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
                parts[at] = parts[at].rstrip("0123456789")
                parts[at] += "*" if len(run) == len(group) else _ranges(run)
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
