"""An HTML page with a table that can be sorted and filtered in a browser.

    notes, a curve, a table -> page.html and page_parts.html filled in -> text

All markup is in these two files, style and script in page.css and page.js; a text is escaped when
it is filled in, unless it is made of such parts. The rows are in the page as HTML, and the script
only sorts and hides them, so that the page can be read, searched and printed without it. Nothing is
loaded from anywhere.
"""

import math
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from errno import ENOENT
from functools import cache
from html import escape
from importlib import resources
from os import PathLike
from pathlib import Path
from string import Template

from polymp import text_table
from polymp.diagnostics.tables import Cell, Column, Table
from polymp.errors import escaped

# Labels in order, with a difference and what rounding explains of it.
Curve = Sequence[tuple[str, float, float]]


class Shown:
    """A result that is printed as lines and a table, and drawn as a page of the same.

    Rows are grouped by direction and module, in the order in which modules and ops were first
    reached. "layers.*.attn x24" are 24 modules whose rows are alike: counts are those of all of
    them, and the largest magnitude is.
    """

    def _lines(self) -> list[str]:
        """The lines above the table; the first is the title."""
        raise NotImplementedError

    def _table(self) -> Table:
        raise NotImplementedError

    def _curve(self) -> Curve:
        """The curve above the table of a page, if there is one."""
        return ()

    def __str__(self) -> str:
        (title, *notes), table = self._lines(), self._table()
        above = (title, "", *notes, *[""] * bool(table.lines))
        lines = [line for note in above for line in text_table.folded(note)]
        return escaped("\n".join([*lines, *table.text()]))

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """Return an HTML page: the same lines, and a table to sort by any column and to filter.

        The page loads nothing, so it can be mailed or kept with a run.

        Args:
            path: file to write it to as well, in UTF-8.

        Returns:
            The page as text.
        """
        title, *notes = self._lines()
        page = _page(title, notes, self._table(), self._curve())
        if path is not None:
            with replacing(path) as beside:
                beside.write_text(page, encoding="utf-8")
        return page

    def _repr_html_(self) -> str:
        return str(_part("frame", title=self._lines()[0], page=self.to_html()))


class _Markup(str):
    """Text that is made of parts; any other text is escaped when it is filled in."""

    __slots__ = ()


def _page(title: str, notes: Sequence[str], table: Table, curve: Curve = ()) -> str:
    """A page without columns that are empty; everything that comes from a program is escaped."""
    columns = [Column("#", True, "the order of these rows"), Column("module"), *table.columns]
    rows = [
        [Cell(c) if isinstance(c, str) else c for c in (Cell(str(at), at), x.module, *x.cells)]
        for at, x in enumerate(table.lines, 1)
    ]
    used = [at for at in range(len(columns)) if any(row[at].text for row in rows)]
    page = _filled(
        Template(_file("page.html")),
        title=title,
        style=_Markup(_file("page.css")),
        notes=_joined(_part("note", text=note) for note in notes),
        curve=_curve(curve) if curve else "",
        count=text_table.plural(len(rows), "row"),
        heads=_joined(
            _part("head", kind="n" * c.numeric, about=c.about, text=c.name)
            for c in (columns[at] for at in used)
        ),
        rows=_joined(
            _part("row", cells=_joined(_cell(row[at], columns[at]) for at in used)) for row in rows
        ),
        script=_Markup(_file("page.js")),
    )
    return str(page)


@cache
def _file(name: str) -> str:
    return (resources.files("polymp.diagnostics") / name).read_text(encoding="utf-8")


@cache
def _parts() -> dict[str, Template]:
    """The templates of page_parts.html, by their identifiers."""
    parts = re.findall(r'<template id="([\w-]+)">(.*?)</template>', _file("page_parts.html"), re.S)
    return {name: Template(text) for name, text in parts}


def _part(name: str, /, **values: object) -> _Markup:
    return _filled(_parts()[name], **values)


def _filled(template: Template, /, **values: object) -> _Markup:
    texts = {n: v if isinstance(v, _Markup) else escape(str(v)) for n, v in values.items()}
    return _Markup(template.substitute(texts))


def _joined(parts: Iterable[_Markup]) -> _Markup:
    return _Markup("".join(parts))


def _curve(points: Curve) -> _Markup:
    """A curve over its points in order, on a logarithmic scale, in percent of its box."""
    # Zero is drawn at the bottom, Inf and NaN at the top.
    sizes = [math.log10(v) for _, *both in points for v in both if 0 < v < math.inf]
    low, high = math.floor(min(sizes, default=-7.0)), math.ceil(max(sizes, default=0.0))
    high = max(high, low + 1)

    def depth(value: float) -> float:
        if not 0 < value < math.inf:
            return 100.0 if value == 0 else 0.0
        return round(100 * (high - math.log10(value)) / (high - low), 2)

    across = [round(100 * (at + 0.5) / len(points), 2) for at in range(len(points))]
    allowed = [depth(limit) for *_, limit in points]
    depths = [100, allowed[0], *allowed, allowed[-1], 100]
    edge = zip([0, 0, *across, 100, 100], depths, strict=True)
    off = [depth(difference) for _, difference, _ in points]
    ticks = range(low, high + 1, math.ceil((high - low) / 6))
    return _part(
        "curve",
        first=points[0][0],
        last=points[-1][0] if len(points) > 1 else "",
        ticks=_joined(_part("tick", at=depth(10.0**t), text=f"1e{t}") for t in ticks),
        grid=_joined(_part("grid", at=depth(10.0**t)) for t in ticks),
        band=" ".join(f"{x},{y}" for x, y in edge),
        line=" ".join(f"{x},{y}" for x, y in zip(across, off, strict=True)),
        points=_joined(
            _part("point", x=x, y=y, kind="" if v <= limit else "alarm", label=label,
                  difference=f"{v:.2g}", allowed=f"{limit:.2g}")
            for x, y, (label, v, limit) in zip(across, off, points, strict=True)
        ),
    )  # fmt: skip


def _cell(cell: Cell, column: Column) -> _Markup:
    if column.numeric:
        return _part("number", value=cell.value, text=cell.text)
    text = cell.text.replace(" -> ", " \u2192 ")  # a browser breaks lines after dashes
    return _part("cell", text=text)


@contextmanager
def replacing(path: str | PathLike[str]) -> Iterator[Path]:
    """A path beside `path`, of the same suffix, for a file that replaces it once it is whole."""
    whole = Path(path).resolve()  # a link keeps pointing to its file
    if not whole.parent.is_dir():
        folder = str(Path(path).parent)
        raise FileNotFoundError(ENOENT, f"there is no folder {folder!r}", str(path))
    if whole.exists() and not whole.is_file():  # as /dev/stdout
        yield whole
        return
    beside = whole.with_name(
        f".{whole.stem[:64]}-{os.getpid()}-{threading.get_ident()}{whole.suffix}"
    )
    try:
        yield beside
        beside.replace(whole)
    finally:
        beside.unlink(missing_ok=True)
