"""An HTML page with a table that can be sorted and filtered in a browser.

    Page (figures as bars, notes, a table) -> page.html and page_parts.html filled in -> text

All markup is in these two files, style and script in page.css and page.js; a text is escaped when
it is filled in, unless it is made of such parts. The rows are in the page as HTML, and the script
only sorts and hides them, so that the page can be read, searched and printed without it. On a
narrow screen each row becomes a card, whose cells the script labels with a rule of style for each
column. Nothing is loaded from anywhere.
"""

import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from html import escape
from importlib import resources
from os import PathLike
from pathlib import Path
from string import Template
from typing import NamedTuple

from polymp import text_table
from polymp.diagnostics.audit_records import AuditRecord, Measured
from polymp.diagnostics.audit_text import HEADS, RIGHT, cells, head, legend, listed
from polymp.diagnostics.call_record import Call, CallList, ModuleRows, by_module, label
from polymp.diagnostics.magnitudes import NARROW
from polymp.diagnostics.report_text import (
    COST,
    PROGRAM,
    SECTIONS,
    check_sort,
    cost,
    folding,
    headline,
    in_8_bits,
    ruled,
    widening,
)


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
        breaks: where a line of it may end: "never", "parts" of a path, after each of them, or
            "spaces". "" for "never" in a cell with a value, and "spaces" in others.
    """

    text: str
    value: float | None = None
    about: str = ""
    breaks: str = ""


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


class _Markup(str):
    """Text that is made of parts; any other text is escaped when it is filled in."""

    __slots__ = ()


def html(page: Page) -> str:
    """The page as one text; everything that comes from a program is escaped."""
    text = _filled(
        Template(_file("page.html")),
        title=page.title,
        style=_Markup(_file("page.css")),
        about=page.about,
        figures=_joined(_figure(head, bars) for head, bars in page.figures),
        notes=_joined(_part("note", text=note) for note in page.notes),
        selects=_joined(_select(at, name, page) for at, name in enumerate(page.selects)),
        orders=_orders(page),
        what=page.what,
        count=text_table.plural(len(page.lines), page.what),
        heads=_joined(_head(head, page.sorted) for head in page.heads),
        rows=_joined(map(_row, page.lines)),
        script=_Markup(_file("page.js")),
    )
    return str(text)


@cache
def _file(name: str) -> str:
    return (resources.files("polymp.diagnostics") / name).read_text(encoding="utf-8")


@cache
def _parts() -> dict[str, Template]:
    """The templates of page_parts.html, by their identifiers."""
    found = re.findall(r'<template id="([\w-]+)">(.*?)</template>', _file("page_parts.html"), re.S)
    return {name: Template(text) for name, text in found}


def _part(name: str, /, **values: object) -> _Markup:
    return _filled(_parts()[name], **values)


def _filled(template: Template, /, **values: object) -> _Markup:
    return _Markup(template.substitute({name: _escaped(value) for name, value in values.items()}))


def _escaped(value: object) -> str:
    return value if isinstance(value, _Markup) else escape(str(value))


def _joined(parts: Iterable[_Markup]) -> _Markup:
    return _Markup("".join(parts))


def _attributes(values: Mapping[str, object]) -> _Markup:
    """The attributes that have a value."""
    given = ((name, value) for name, value in values.items() if value not in ("", None))
    return _Markup(" ".join(f'{name}="{escape(str(value))}"' for name, value in given))


def _figure(head: str, bars: Sequence[Bar]) -> _Markup:
    longest = max((bar.length for bar in bars), default=0) or 1
    drawn = _joined(_bar(bar, bar.length / longest) for bar in bars)
    return _part("figure", head=head, bars=drawn or _part("no-bars"))


def _bar(bar: Bar, share: float) -> _Markup:
    length = _part("length", percent=f"{max(100 * share, 0.5):.1f}") if share else ""
    return _part("bar", label=bar.label, words=bar.words, length=length)


def _select(at: int, name: str, page: Page) -> _Markup:
    found = dict.fromkeys(line.kinds[at] for line in page.lines)
    known = [kind for kind in SECTIONS if kind in found]
    kinds = known if len(known) == len(found) else sorted(found)
    return _part("select", name=name, at=at, options=_joined(_option(k, k) for k in kinds))


def _option(value: object, text: str, selected: bool = False) -> _Markup:
    chosen = _attributes({"selected": "selected" if selected else ""})
    return _part("option", value=value, text=text, attributes=chosen)


def _orders(page: Page) -> _Markup:
    """The columns as options: on a narrow screen the table has no heads to press."""
    now = page.sorted[0] if page.sorted else page.heads[0].name
    return _joined(_option(at, head.name, head.name == now) for at, head in enumerate(page.heads))


def _head(head: Head, sorted: tuple[str, bool] | None) -> _Markup:
    order = ""
    if sorted and sorted[0] == head.name:
        order = "ascending" if sorted[1] else "descending"
    button = _part("button", text=head.name, attributes=_attributes({"title": head.about}))
    given = _attributes({"class": "n" if head.numeric else "", "aria-sort": order})
    return _part("head", button=button, attributes=given)


def _row(line: Line) -> _Markup:
    kinds = _attributes({f"data-k{at}": kind for at, kind in enumerate(line.kinds)})
    return _part("row", attributes=kinds, cells=_joined(map(_cell, line.cells)))


@lru_cache(maxsize=4096)  # most cells of a long table are like others
def _cell(cell: Cell) -> _Markup:
    number: dict[str, object] = {"class": cell.breaks}
    if cell.value is not None:
        number = {"class": f"n {cell.breaks}".rstrip(), "data-v": cell.value}
    given = _attributes({**number, "title": cell.about})
    return _part("cell", text=cell.text, attributes=given)


def written(page: str, path: "str | PathLike[str] | None") -> str:
    """The page, after writing it to a file if there is a path."""
    if path is not None:
        with replacing(path) as beside:
            beside.write_text(page, encoding="utf-8")
    return page


@contextmanager
def replacing(path: "str | PathLike[str]") -> Iterator[Path]:
    """A path beside `path`, of the same suffix, for a file that replaces it once it is whole."""
    whole = Path(path).resolve()  # a link keeps pointing to its file
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


# A report as a page: its sums as figures, and a row for each call site.


_HEADS = (
    Head("#", True, "the order in which modules, and calls in them, were first reached"),
    Head("module"),
    Head("op", about="its name in the vocabulary, or the framework's own"),
    Head("times", True, "how often it ran; all counts are for all times together"),
    Head("direction"),
    Head("source"),
    Head("rule", about="the rule, and the op, scope and source of its row"),
    Head("dtypes", about="inputs before casts -> outputs (in the dtype it ran in, if another)"),
    Head("casts", True, "arrays that were cast for it, there and back"),
    Head("bytes", True, "read and written by these casts"),
    Head("saved", True, "casts that were not made, and why"),
    Head("FLOPs", True, "of products, convolutions and attention"),
    Head("kept", True, "bytes of float32 kept for the backward pass, parameters aside"),
)

_MODULES = 4  # in the figure of bytes by module


def report_page(report: CallList, sort: str = COST, fold: bool = True) -> Page:
    """The page of a report, sorted as in `Report.table`; equal layers are one if `fold`."""
    check_sort(sort)
    modules = by_module(report.calls, fold)
    calls = [(call, one) for one in modules for call in one.rows]
    lines = [(cost(c), _line(c, label(one, ""), at)) for at, (c, one) in enumerate(calls)]
    if sort == COST:
        lines.sort(key=lambda pair: pair[0])
    by_bytes = ("bytes", False) if report.cast_bytes else None
    note = folding(modules)
    return Page(
        title=report.title or "report",
        about=headline(report).partition(": ")[2],
        figures=_figures(report, modules),
        notes=list(filter(None, [in_8_bits(report), widening(report), note])),
        heads=_HEADS,
        sorted=by_bytes if sort == COST else ("#", True),
        selects=("direction", "ran in", "rule"),
        lines=[line for _, line in lines],
        what="row" if note else "call site",
    )


def _figures(report: CallList, modules: Iterable[ModuleRows[Call]]) -> list[tuple[str, list[Bar]]]:
    flops, total = report.flops, sum(report.flops.values())
    by_dtype = [
        Bar(dtype, n, f"{text_table.amount(n)}, {text_table.share(n / total)}")
        for dtype, n in sorted(flops.items(), key=lambda item: -item[1])
    ]
    counts = [Bar("done", report.casts, f"{report.casts:,}")] if report.casts else []
    counts += [Bar(f"saved: {why}", n, f"{n:,}") for why, n in sorted(report.saved.items())]
    moved, kept = dict[str, int](), dict[str, int]()
    for one in modules:
        for call in one.rows:
            name = label(one, "top level")
            moved[name] = moved.get(name, 0) + call.cast_bytes
            kept[name] = kept.get(name, 0) + call.kept
    return [
        ("FLOPs by dtype", by_dtype),
        ("Casts", counts),
        (f"Bytes cast: {text_table.size(report.cast_bytes)}", _widest(moved)),
        (f"float32 kept: {text_table.size(report.kept)}", _widest(kept)),
    ]


def _widest(by_module: dict[str, int]) -> list[Bar]:
    """A bar for each of the modules with most bytes; the others as a number."""
    ranked = sorted(((m, n) for m, n in by_module.items() if n), key=lambda item: -item[1])
    bars = [Bar(m, n, text_table.size(n)) for m, n in ranked[:_MODULES]]
    if others := ranked[_MODULES:]:
        rest = sum(n for _, n in others)
        bars.append(Bar(text_table.plural(len(others), "other module"), 0, text_table.size(rest)))
    return bars


def _line(call: Call, module: str, at: int) -> Line:
    saved = ", ".join(f"{count:,} {reason}" for reason, count in call.saved)
    words = text_table.dtypes(call.inputs, call.run, call.outputs)
    full = f"{', '.join(call.inputs)} -> {', '.join(call.outputs)}, ran in {call.run or 'none'}"
    cells = (
        Cell(str(at + 1), at),
        Cell(module, breaks="parts"),
        Cell(call.op, about=call.spelling, breaks="parts"),
        Cell(f"{call.times:,}", call.times),
        Cell(call.direction),
        Cell(call.source, breaks="never"),
        Cell(ruled(call), about=str(call.row or "")),
        Cell(words.replace("->", "\u2192"), about=full),  # a browser breaks lines after dashes
        _number(call.casts, f"{call.casts:,}"),
        _number(call.cast_bytes, text_table.size(call.cast_bytes)),
        _number(sum(count for _, count in call.saved), saved, "spaces"),
        _number(call.flops, text_table.amount(call.flops)),
        _number(call.kept, text_table.size(call.kept)),
    )
    return Line(cells, (call.direction, call.run or "no float", call.rule or "no region"))


def _number(value: int, words: str, breaks: str = "") -> Cell:
    return Cell(words if value else "", value, breaks=breaks)


# An audit as a page: what is said of the run, and a row for every op and parameter.


def audit_page(audit: AuditRecord, sort: str = PROGRAM, fold: bool = True) -> Page:
    """The page of an audit; see `Audit.to_html`, which raises the same."""
    rows, notes = listed(audit, sort, fold)
    first, *said = filter(None, head(audit))
    table = [cells(row.measured, row.name) for row in rows]
    used = [i for i in range(len(HEADS)) if any(texts[i] for texts in table)]
    lines = []
    for at, (row, texts) in enumerate(zip(rows, table, strict=True)):
        values = dict(zip(RIGHT, _values(row.measured), strict=True))
        start = Cell(str(at + 1), at), Cell(row.module, breaks="parts")
        shown = [Cell(texts[i], values.get(HEADS[i])) for i in used]
        lines.append(Line((*start, *shown), (row.section, row.measured.run)))
    return Page(
        title=first,
        about="",
        figures=(),
        notes=[*said, *legend(audit), *notes],
        heads=(Head("#", True), Head("module"), *(Head(HEADS[i], HEADS[i] in RIGHT) for i in used)),
        sorted=("#", True) if sort == PROGRAM else None,
        selects=("section", "dtype"),
        lines=lines,
        what="row",
    )


def _values(measured: Measured) -> tuple[float, ...]:
    """Numbers that the columns are sorted by."""
    m, (low, *others) = measured.magnitudes, NARROW
    effect = abs(measured.loss_effect or 0.0)
    errors = measured.rounding or 0.0, measured.drift or 0.0, effect
    return m.largest, *m.shares(low), *errors, *(sum(m.shares(name)) for name in others)
