"""A report as a page: its sums as figures, and a row for each call site."""

from collections.abc import Iterable

from polymp import text_table
from polymp.diagnostics.call_record import Call, CallList, by_module
from polymp.diagnostics.equal_layers import ModuleRows, label
from polymp.diagnostics.page import Bar, Cell, Head, Line, Page
from polymp.diagnostics.report_text import (
    COST,
    check_sort,
    cost,
    folding,
    headline,
    in_8_bits,
    ruled,
    widening,
)

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


def page(report: CallList, sort: str = COST, fold: bool = True) -> Page:
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
