"""An HTML page with a table that can be sorted and filtered in a browser.

    Page (figures as bars, notes, a table) -> page.html, page.css and page.js filled in -> text

The rows are in the page as HTML, and the script only sorts and hides them, so that the page can be
read, searched and printed without it. On a narrow screen each row becomes a card, whose cells the
script labels with a rule of style for each column. Nothing is loaded from anywhere.
"""

from collections.abc import Sequence
from functools import cache
from html import escape
from importlib import resources
from os import PathLike
from pathlib import Path
from string import Template
from typing import NamedTuple

from polymp import plain_text
from polymp.diagnostics.report_text import SECTIONS


class Head(NamedTuple):
    """A column.

    Attributes:
        name: its heading.
        numeric: True if its cells are numbers, which sort the largest first.
        about: a sentence that explains it.
    """

    name: str
    numeric: bool = False
    about: str = ""


class Cell(NamedTuple):
    """A cell.

    Attributes:
        text: that it shows.
        value: to sort by, if that is not the text.
        about: a hint that the browser shows over it.
    """

    text: str
    value: int | None = None
    about: str = ""


class Line(NamedTuple):
    """A row, with what the selects filter by: a value for each of them."""

    cells: Sequence[Cell]
    kinds: Sequence[str]


class Bar(NamedTuple):
    """A bar in a figure: its label, its length and that length in words."""

    label: str
    length: float
    words: str


class Page(NamedTuple):
    """The contents of a page.

    Attributes:
        title: of the page.
        about: the line below.
        figures: heads and bars.
        notes: sentences.
        heads: of the table.
        sorted: the column that the lines are sorted by, and whether upwards; None if by none.
        selects: names of the selects.
        lines: of the table.
        what: name of a line, such as "call site".
    """

    title: str
    about: str
    figures: Sequence[tuple[str, Sequence[Bar]]]
    notes: Sequence[str]
    heads: Sequence[Head]
    sorted: tuple[str, bool] | None
    selects: Sequence[str]
    lines: Sequence[Line]
    what: str


def html(page: Page) -> str:
    """The page as one text; everything that comes from a program is escaped."""
    return Template(_file("page.html")).substitute(
        title=escape(page.title),
        style=_file("page.css"),
        about=escape(page.about),
        figures="".join(_figure(head, bars) for head, bars in page.figures),
        notes="".join(f'<p class="note">{escape(note)}</p>' for note in page.notes),
        selects="".join(_select(at, name, page) for at, name in enumerate(page.selects)),
        orders=_orders(page),
        what=escape(page.what),
        count=plain_text.plural(len(page.lines), escape(page.what)),
        heads="".join(_head(head, page.sorted) for head in page.heads),
        rows="".join(map(_row, page.lines)),
        script=_file("page.js"),
    )


@cache
def _file(name: str) -> str:
    return (resources.files("polymp.diagnostics") / name).read_text(encoding="utf-8")


def _figure(head: str, bars: Sequence[Bar]) -> str:
    longest = max((bar.length for bar in bars), default=0) or 1
    drawn = "".join(
        f'<div class="bar" data-dtype="{escape(bar.label)}"><span>{escape(bar.label)}</span>'
        f"<b>{escape(bar.words)}</b>{_length(bar.length / longest)}</div>\n"
        for bar in bars
    )
    return f"<figure><figcaption>{escape(head)}</figcaption>{drawn or '<p>none</p>'}</figure>\n"


def _length(share: float) -> str:
    return f'<i style="width:{max(100 * share, 0.5):.1f}%"></i>' if share else ""


def _select(at: int, name: str, page: Page) -> str:
    found = dict.fromkeys(line.kinds[at] for line in page.lines)
    known = [kind for kind in SECTIONS if kind in found]
    kinds = known if len(known) == len(found) else sorted(found)
    options = "".join(f'<option value="{escape(k)}">{escape(k)}</option>' for k in kinds)
    return (
        f'<label>{escape(name)}<select data-kind="{at}"><option value="">all</option>{options}'
        "</select></label>\n"
    )


def _orders(page: Page) -> str:
    """The columns as options: on a narrow screen the table has no heads to press."""
    now = page.sorted[0] if page.sorted else page.heads[0].name
    return "".join(
        f'<option value="{at}"{" selected" if head.name == now else ""}>{escape(head.name)}'
        "</option>"
        for at, head in enumerate(page.heads)
    )


def _head(head: Head, sorted: tuple[str, bool] | None) -> str:
    order = ""
    if sorted and sorted[0] == head.name:
        order = f' aria-sort="{"ascending" if sorted[1] else "descending"}"'
    about = f' title="{escape(head.about)}"' if head.about else ""
    kind = ' class="n"' if head.numeric else ""
    button = f'<button type="button"{about}>{escape(head.name)}</button>'
    return f'<th scope="col"{kind}{order}>{button}</th>'


def _row(line: Line) -> str:
    kinds = " ".join(f'data-k{at}="{escape(kind)}"' for at, kind in enumerate(line.kinds))
    return f"<tr {kinds}>{''.join(map(_cell, line.cells))}</tr>\n"


def _cell(cell: Cell) -> str:
    value = f' class="n" data-v="{cell.value}"' if cell.value is not None else ""
    about = f' title="{escape(cell.about)}"' if cell.about else ""
    return f"<td{value}{about}>{escape(cell.text)}</td>"


def written(page: str, path: "str | PathLike[str] | None") -> str:
    """The page, after writing it to a file if there is a path."""
    if path is not None:
        Path(path).write_text(page, encoding="utf-8")
    return page


def framed(page: str, title: str) -> str:
    """The page in a frame, which keeps its style and its script apart from a notebook's."""
    return (
        f'<iframe title="{escape(title)}" srcdoc="{escape(page)}" '
        'style="width:100%;height:640px;border:0"></iframe>'
    )
