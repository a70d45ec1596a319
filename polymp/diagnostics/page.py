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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from errno import ENOENT
from functools import cache, lru_cache
from html import escape
from importlib import resources
from os import PathLike
from pathlib import Path
from string import Template

from polymp import text_table
from polymp.diagnostics.tables import Cell, Column, Line, Table

# The columns in front of those of every table.
_START = (
    Column("#", True, "the place in the printed table"),
    Column("module", breaks="parts"),
)


class _Markup(str):
    """Text that is made of parts; any other text is escaped when it is filled in."""

    __slots__ = ()


def html(
    path: str | PathLike[str] | None,
    *,
    title: str,
    about: str = "",
    notes: Sequence[str],
    table: Table,
    what: str,
    largest: Sequence[str] = (),
    curve: Sequence[tuple[str, float, float]] = (),
) -> str:
    """A page as one text, also in a file; everything that comes from a program is escaped.

    `about` is the line below the title, `what` the name of a line of the table. `largest` are
    columns whose largest numbers come first; without any, lines are as in the printed table. Above
    the table a curve is drawn: labels in order, a difference, and what rounding explains of it.
    """
    columns = (*_START, *table.columns)
    places = [at for name in largest for at, c in enumerate(table.columns) if c.name == name]
    lines = [*enumerate(table.lines, 1)]
    lines.sort(key=lambda line: [-(line[1].cells[at].value or 0) for at in places])
    text = _filled(
        Template(_file("page.html")),
        title=title,
        style=_Markup(_file("page.css")),
        about=about,
        notes=_joined(_part("note", text=note) for note in notes),
        curve=_curve(curve) if curve else "",
        selects=_joined(_select(at, table) for at in range(len(table.selects))),
        what=what,
        count=text_table.plural(len(lines), what),
        heads=_joined(_head(column, [*largest, "#"][0]) for column in columns),
        rows=_joined(_row(at, line, columns) for at, line in lines),
        script=_Markup(_file("page.js")),
    )
    if path is not None:
        with replacing(path) as beside:
            beside.write_text(text, encoding="utf-8")
    return str(text)


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


def _attributes(values: Mapping[str, object]) -> _Markup:
    """The attributes that have a value."""
    present = ((name, value) for name, value in values.items() if value not in ("", None))
    return _Markup(" ".join(f'{name}="{escape(str(value))}"' for name, value in present))


_TICKS = 6  # on the axis of a curve, at most


def _curve(points: Sequence[tuple[str, float, float]]) -> _Markup:
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
    ticks = range(low, high + 1, math.ceil((high - low) / _TICKS))
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


def _select(at: int, table: Table) -> _Markup:
    """The values of the lines: those of the first select in order, of others by the alphabet."""
    values = list(dict.fromkeys(line.selected[at] for line in table.lines))
    options = _joined(_part("option", text=value) for value in (sorted(values) if at else values))
    return _part("select", name=table.selects[at], at=at, options=options)


def _head(column: Column, first: str) -> _Markup:
    order = "ascending" if first == "#" else "descending"
    button = _part("button", text=column.name, attributes=_attributes({"title": column.about}))
    given = {"class": "n" * column.numeric, "aria-sort": order * (column.name == first)}
    return _part("head", button=button, attributes=_attributes(given))


def _row(at: int, line: Line, columns: Sequence[Column]) -> _Markup:
    kinds = _attributes({f"data-k{at}": kind for at, kind in enumerate(line.selected)})
    cells = Cell(str(at), at), Cell(line.module), *line.cells
    drawn = (_cell(cell, column.breaks) for cell, column in zip(cells, columns, strict=True))
    return _part("row", attributes=kinds, cells=_joined(drawn))


@lru_cache(maxsize=4096)  # most cells of a long table are like others
def _cell(cell: Cell, breaks: str) -> _Markup:
    kind: dict[str, object] = {"class": breaks}
    if cell.value is not None:
        kind = {"class": f"n {breaks}".rstrip(), "data-v": cell.value}
    text = cell.text.replace(" -> ", " \u2192 ")  # a browser breaks lines after dashes
    return _part("cell", text=text, attributes=_attributes({**kind, "title": cell.about}))


@contextmanager
def replacing(path: str | PathLike[str]) -> Iterator[Path]:
    """A path beside `path`, of the same suffix, for a file that replaces it once it is whole."""
    whole = Path(path).resolve()  # a link keeps pointing to its file
    if not whole.parent.is_dir():
        folder = str(Path(path).parent)
        raise FileNotFoundError(ENOENT, f"there is no folder {folder!r}", str(path))
    beside = whole.with_name(
        f".{whole.stem[:64]}-{os.getpid()}-{threading.get_ident()}{whole.suffix}"
    )
    try:
        yield beside
        beside.replace(whole)
    finally:
        beside.unlink(missing_ok=True)


def framed(page: str, title: str) -> str:
    """The page in a frame, which keeps its style and its script apart from a notebook's."""
    return str(_part("frame", title=title, page=page))
