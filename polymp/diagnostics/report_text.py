"""A report as text, as `print(report)` shows it, and as a page.

    CallList -> totals, then sections by direction, in each the modules, in each the calls

Plain characters in lines of a given width, so that it reads the same in a terminal, in a pipe and
in a log; equal layers are one; nothing but the standard library is needed.
"""

import re
from collections.abc import Hashable, Iterable, Sequence

from polymp import text_table
from polymp.diagnostics import tables
from polymp.diagnostics.call_record import BACKWARD, FORWARD, RECOMPUTE, Call, CallList, added
from polymp.diagnostics.page import Bar, Page
from polymp.diagnostics.tables import COST, PROGRAM
from polymp.rules.row import Row
from polymp.rules.scopes import depth

SECTIONS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    RECOMPUTE: "recompute: the forward again, for the backward",
}

_COLUMNS = (
    tables.Column("op", about="its name in the vocabulary, or the framework's own", breaks="parts"),
    tables.Column("times", True, "how often it ran; all counts are for all times together"),
    tables.Column("direction", on_page=True),
    tables.Column("source", breaks="never"),
    tables.Column("rule", about="the rule, and the op, scope and source of its row"),
    tables.Column(
        "dtypes", about="inputs before casts -> outputs (in the dtype it ran in, if another)"
    ),
    tables.Column("casts", True, "arrays that were cast for it, there and back"),
    tables.Column("bytes", True, "read and written by these casts"),
    tables.Column("saved", True, "casts that were not made, and why", "spaces"),
    tables.Column("FLOPs", True, "of products, convolutions and attention"),
    tables.Column(
        "kept", True, "bytes of float32 kept for the backward pass, parameters aside", on_page=True
    ),
)

_NAMED = 5  # widened calls that are named; of more, how many
_MODULES = 4  # in the figure of bytes by module


def report_table(
    report: CallList,
    limit: int | None = None,
    width: int | None = None,
    sort: str = PROGRAM,
    fold: bool = True,
) -> str:
    """Return a report as text."""
    modules, hidden, note = tables.arranged(report.calls, CALLS, sort, fold, limit)
    lines = [headline(report)]
    if len(report):
        lines += ["", *totals(report, width), *text_table.folded(note, width)]
    lines += ["", *tables.text(_table(report, modules), width)]
    if hidden:
        lines += ["", f"{text_table.plural(hidden, 'row')} with lower costs not listed"]
    return "\n".join(lines).rstrip()


def report_page(report: CallList, sort: str = COST, fold: bool = True) -> Page:
    """The page of a report; see `Report.to_html`, which raises the same."""
    tables.check_sort(sort, CALLS)
    modules, _, note = tables.arranged(report.calls, CALLS, fold=fold)
    by_bytes = ("bytes", False) if report.cast_bytes else None
    return Page(
        title=report.title or "report",
        about=headline(report).partition(": ")[2],
        figures=_figures(report, modules),
        notes=list(filter(None, [in_8_bits(report), widening(report), note])),
        table=_table(report, modules, sort),
        sorted=by_bytes if sort == COST else ("#", True),
        what="row" if note else "call site",
    )


def _table(
    report: CallList, modules: Iterable[tables.ModuleRows[Call]], sort: str = PROGRAM
) -> tables.Table:
    lines = [
        tables.Line(
            SECTIONS[one.section],
            one.label,
            _cells(call, report.policy),
            (call.direction, call.run or "no float", call.rule or "no region"),
            cost([call]) if sort == COST else (),
        )
        for one in modules
        for call in one.rows
    ]
    return tables.Table(_COLUMNS, ("direction", "ran in", "rule"), lines)


def _cells(call: Call, policy: str) -> tuple[tables.Cell, ...]:
    dtypes = f"{', '.join(call.inputs)} -> {', '.join(call.outputs)}, ran in {call.run or 'none'}"
    saved = ", ".join(f"{count:,} {reason}" for reason, count in call.saved)
    return (
        tables.Cell(call.op, about=call.spelling),
        tables.Cell(f"{call.times:,}", call.times),
        tables.Cell(call.direction),
        tables.Cell(call.source),
        tables.Cell(ruled(call, policy), about=str(call.row or "")),
        tables.Cell(text_table.dtypes(call.inputs, call.run, call.outputs), about=dtypes),
        tables.number(call.casts, f"{call.casts:,}"),
        tables.number(call.cast_bytes, text_table.size(call.cast_bytes)),
        tables.number(sum(count for _, count in call.saved), saved),
        tables.number(call.flops, text_table.amount(call.flops)),
        tables.number(call.kept, text_table.size(call.kept)),
    )


def cost(calls: Sequence[Call]) -> tuple[int, int]:
    """The sort key that puts the highest costs first: bytes of casts, then FLOPs."""
    return -sum(call.cast_bytes for call in calls), -sum(call.flops for call in calls)


def alike(call: Call) -> Hashable:
    """All in which the calls of equal layers agree.

    They differ in their modules and the casts made for them: those of a first layer may be spared
    in the others.
    """
    return call._replace(module="", casts=0, cast_bytes=0, saved=(), kept=0)


CALLS: tables.RowKind[Call] = tables.RowKind(
    SECTIONS, lambda call: (call.direction, call.module), alike, added, {COST: cost}
)


def headline(report: CallList) -> str:
    """The first line: name, number of call sites, policy and low dtype."""
    under = f"policy {report.policy} in {report.low}" if report.policy else report.low
    sites = text_table.plural(len(report), "call site")
    return ", ".join(filter(None, (f"{report.title or 'report'}: {sites}", under)))


def ruled(call: Call, policy: str = "") -> str:
    """Return the rule that a call ran by, with the op, scope and source of its row."""
    row = by(call.row, call.op, policy) if call.row else ""
    ran = "as lower" if call.rule == "fp8" else f"in {call.run}"
    fallback = f"run {ran}: {call.fallback}" if call.fallback else ""
    return ", ".join(filter(None, (call.rule, call.recipe, fallback, row)))


def by(row: Row, op: str, policy: str = "") -> str:
    """The selector of a row, if that is not the op, with its scope and its source."""
    shipped = re.fullmatch(r"policies/(.*)\.toml", row.source)
    source = shipped[1] if shipped else row.source
    of, scope = row.of if row.of != op else "", f"in {row.scope}" if row.scope else ""
    return ", ".join(filter(None, (of, scope, source if source != policy else "")))


def in_8_bits(report: CallList) -> str:
    """How many products ran in 8 bits, what they keep, and how many did not and why; or nothing."""
    ran = sum(call.times for call in report if call.recipe)
    parts = [f"{text_table.plural(ran, 'product')} in 8 bits"] if ran else []
    if report.kept_fp8:
        kept, wide = map(text_table.size, (report.kept_fp8, 2 * report.kept_fp8))
        parts.append(f"{kept} kept for the backward pass instead of {wide} in bfloat16")
    return "; ".join((*parts, *_fallbacks(report, "fp8", "as lower")))


def _fallbacks(report: CallList, rule: str, ran: str) -> list[str]:
    """How many products with a rule did not run by it, for each reason."""
    of_rule = {call.fallback for call in report if call.rule == rule}
    return [f"{n:,} {ran}: {why}" for why, n in report.fallbacks.items() if why in of_rule]


def totals(report: CallList, width: int | None = None) -> list[str]:
    """The report's sums, a line for each kind; long lines are broken."""
    flops, total = report.flops, sum(report.flops.values())
    parts = [
        f"{text_table.amount(count)} ({text_table.share(count / total)}) "
        f"in {text_table.short(dtype)}"
        for dtype, count in sorted(flops.items(), key=lambda item: -item[1])
    ]
    saved = [f"{count:,} {reason}" for reason, count in sorted(report.saved.items())]
    moved = f"{report.casts:,}, {text_table.size(report.cast_bytes)} read and written"
    pairs = [
        ("FLOPs", ", ".join(parts) or "none"),
        ("casts", moved if report.casts else "none"),
        ("saved", ", ".join(saved) or "none"),
        ("kept", f"{text_table.size(report.kept)} of float32 for the backward pass"),
        ("fp8", in_8_bits(report)),
        ("lower", "; ".join(_fallbacks(report, "lower", "not lowered"))),
        ("widened", widening(report).removeprefix("widened ")),
    ]
    rows = [(name, text) for name, text in pairs if text]
    return text_table.columns(("", ""), rows, width=width)[2:]


def widening(report: CallList) -> str:
    """The calls in which a float32 input widened a low one and no row asked for it, as a line."""
    calls = report.widened()
    modules, _, _ = tables.arranged(calls, CALLS)
    widened = [(call, one) for one in modules for call in one.rows]
    named = [
        ", ".join(filter(None, (f"{c.op} in {one.label}" if c.module else c.op, c.source)))
        for c, one in widened[:_NAMED]
    ]
    if more := len(calls) - sum(one.layers for _, one in widened[:_NAMED]):
        named.append(f"and {text_table.plural(more, 'more call')}")
    return f"widened to float32 by a float32 input: {'; '.join(named)}" if calls else ""


def _figures(
    report: CallList, modules: Iterable[tables.ModuleRows[Call]]
) -> list[tuple[str, list[Bar]]]:
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
            name = one.label
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


def chosen(
    report: CallList, modules: str | Iterable[str] | None, ops: str | Iterable[str] | None
) -> CallList:
    """Return the part of a report that is of some modules and some ops."""
    calls: Iterable[Call] = report.calls
    if modules is not None:
        patterns = [modules] if isinstance(modules, str) else list(modules)
        every = dict.fromkeys(call.module for call in report.calls)
        inside = {p: {m for m in every if _within(p, m)} for p in patterns}
        for pattern, matching in inside.items():
            if not matching:
                raise ValueError(
                    f"modules={pattern!r} matches no call; the report's modules are {_list(every)}."
                )
        kept = set[str]().union(*inside.values())
        calls = [call for call in calls if call.module in kept]
    if ops is not None:
        names = {ops} if isinstance(ops, str) else {*ops}
        for name in sorted(names):
            if not report.of(name):
                raise ValueError(
                    f"ops={name!r} is not in the report; its ops are "
                    f"{_list(dict.fromkeys(call.op for call in report.calls))}."
                )
        calls = [call for call in calls if names & {call.op, call.spelling}]
    return CallList(tuple(calls), report.title, report.low, report.policy)


def _within(pattern: str, module: str) -> bool:
    return depth(pattern, module) > 0 if pattern else not module


def _list(names: Iterable[str]) -> str:
    quoted = [repr(name) for name in names]
    more = f" and {len(quoted) - 12} more" if len(quoted) > 12 else ""
    return ", ".join(quoted[:12]) + more
