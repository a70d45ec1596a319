"""A report as a page of its own, to sort and to filter in a browser.

    CallList -> parts (figures as bars, notes, a table) -> HTML

The rows are in the page as HTML, and the script only sorts and hides them, so that the page can be
read, searched and printed without it. Nothing is loaded from anywhere. `report_diff` fills the same
page with what differs.
"""

from collections.abc import Sequence
from html import escape
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from polymp.diagnostics import plain_text
from polymp.diagnostics.call import Call, CallList
from polymp.diagnostics.html_style import SCRIPT, STYLE
from polymp.diagnostics.report_text import SECTIONS, cost, headline, ruled, widening


class Head(NamedTuple):
    """A column.

    Attributes:
        name: what stands above it.
        numeric: True if its cells are numbers, which sort the largest first.
        about: a sentence that explains it.
    """

    name: str
    numeric: bool = False
    about: str = ""


class Cell(NamedTuple):
    """A cell.

    Attributes:
        text: what it shows.
        value: what it sorts by, if that is not the text.
        about: what is told of it besides.
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
    """What a page shows.

    Attributes:
        title: of the page.
        about: the line below.
        figures: heads and bars.
        notes: sentences.
        heads: of the table.
        sorted: the column that the lines are sorted by, and whether upwards; None if by none.
        selects: names of the selects.
        lines: of the table.
        what: one line is.
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


_HEADS = (
    Head("#", True, "the order in which the call sites were first reached"),
    Head("module"),
    Head("op", about="its name in the vocabulary, or the framework's own"),
    Head("times", True, "how often it ran; all counts are for all times together"),
    Head("direction"),
    Head("source"),
    Head("rule", about="the rule, and of its row what it speaks of and where it stands"),
    Head("formats", about="inputs as they came -> outputs (in the format it ran in, if another)"),
    Head("casts", True, "arrays that were cast for it, there and back"),
    Head("bytes", True, "read and written by these casts"),
    Head("saved", True, "casts that were spared, and why"),
    Head("FLOPs", True, "of products, convolutions and attention"),
    Head("kept", True, "bytes of float32 kept for the backward pass, parameters aside"),
)
_MODULES = 4  # in the figure of bytes by module


def of_report(report: CallList) -> str:
    """The page of a report."""
    order = {id(call): at for at, call in enumerate(report.calls)}
    ranked = sorted(report.calls, key=cost)
    return html(
        Page(
            title=report.title or "report",
            about=headline(report).partition(": ")[2],
            figures=_figures(report),
            notes=list(filter(None, [widening(report)])),
            heads=_HEADS,
            sorted=("bytes", False) if report.cast_bytes else None,
            selects=("direction", "ran in", "rule"),
            lines=[_line(call, order[id(call)]) for call in ranked],
            what="call site",
        )
    )


def _figures(report: CallList) -> list[tuple[str, list[Bar]]]:
    flops, total = report.flops, sum(report.flops.values())
    by_format = [
        Bar(format, n, f"{plain_text.amount(n)}, {plain_text.share(n / total)}")
        for format, n in sorted(flops.items(), key=lambda item: -item[1])
    ]
    counts = [Bar("done", report.casts, f"{report.casts:,}")] if report.casts else []
    counts += [Bar(f"saved: {why}", n, f"{n:,}") for why, n in sorted(report.saved.items())]
    moved, kept = dict[str, int](), dict[str, int]()
    for call in report.calls:
        moved[call.module] = moved.get(call.module, 0) + call.cast_bytes
        kept[call.module] = kept.get(call.module, 0) + call.kept
    return [
        ("FLOPs by format", by_format),
        ("Casts", counts),
        (f"Bytes cast: {plain_text.size(report.cast_bytes)}", _widest(moved)),
        (f"float32 kept: {plain_text.size(report.kept)}", _widest(kept)),
    ]


def _widest(by_module: dict[str, int]) -> list[Bar]:
    """A bar for each of the modules with most bytes; the others as a number."""
    ranked = sorted(((m, n) for m, n in by_module.items() if n), key=lambda item: -item[1])
    bars = [Bar(m or "top level", n, plain_text.size(n)) for m, n in ranked[:_MODULES]]
    if others := ranked[_MODULES:]:
        rest = sum(n for _, n in others)
        bars.append(Bar(plain_text.plural(len(others), "other module"), 0, plain_text.size(rest)))
    return bars


def _line(call: Call, at: int) -> Line:
    saved = ", ".join(f"{count:,} {reason}" for reason, count in call.saved)
    words = plain_text.formats(call.inputs, call.run, call.outputs)
    full = f"{', '.join(call.inputs)} -> {', '.join(call.outputs)}, ran in {call.run or 'none'}"
    cells = (
        Cell(str(at + 1), at),
        Cell(call.module),
        Cell(call.op, about=call.spelling),
        Cell(f"{call.times:,}", call.times),
        Cell(call.direction),
        Cell(call.source),
        Cell(ruled(call), about=str(call.row or "")),
        Cell(words, about=full),
        _number(call.casts, f"{call.casts:,}"),
        _number(call.cast_bytes, plain_text.size(call.cast_bytes)),
        _number(sum(count for _, count in call.saved), saved),
        _number(call.flops, plain_text.amount(call.flops)),
        _number(call.kept, plain_text.size(call.kept)),
    )
    return Line(cells, (call.direction, call.run or "no float", call.rule or "no region"))


def _number(value: int, words: str) -> Cell:
    return Cell(words if value else "", value)


def html(page: Page) -> str:
    """The page as one text; everything that comes from a program is escaped."""
    title = escape(page.title)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<header><h1>{title}</h1><p>{escape(page.about)}</p></header>
<section class="figures" aria-label="totals">
{"".join(_figure(head, bars) for head, bars in page.figures)}</section>
{"".join(f'<p class="note">{escape(note)}</p>' for note in page.notes)}
<form class="filters" role="search">
<label class="find">filter<input type="search" id="find" autocomplete="off" spellcheck="false"
 placeholder="words to look for in a row"></label>
{"".join(_select(at, name, page) for at, name in enumerate(page.selects))}
<label class="order">sort by<select id="order">{_orders(page)}</select></label>
<output id="count" aria-live="polite" data-what="{escape(page.what)}">{
        plain_text.plural(len(page.lines), escape(page.what))
    }</output>
</form>
<div class="scroll" tabindex="0" role="region" aria-label="{escape(page.what)}s">
<table>
<thead><tr>{"".join(_head(head, page.sorted) for head in page.heads)}</tr></thead>
<tbody>
{"".join(map(_row, page.lines))}</tbody>
</table>
</div>
<button type="button" id="more" hidden>show more</button>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _figure(head: str, bars: Sequence[Bar]) -> str:
    longest = max((bar.length for bar in bars), default=0) or 1
    drawn = "".join(
        f'<div class="bar" data-format="{escape(bar.label)}"><span>{escape(bar.label)}</span>'
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
