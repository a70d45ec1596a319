"""A report as text, as `print(report)` shows it.

    CallList -> totals, then sections by direction, in each the modules, in each the calls

Plain characters in lines of a given width, so that it reads the same in a terminal, in a pipe and
in a log; equal layers are one; nothing but the standard library is needed.
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import TypeVar

from polymp import text_table
from polymp.diagnostics.call_record import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    Call,
    CallList,
    ModuleRows,
    by_module,
    label,
)
from polymp.rules.row import Row
from polymp.rules.scopes import depth

SECTIONS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    RECOMPUTE: "recompute: the forward again, for the backward",
}
OUTSIDE = "(top level)"
PROGRAM, COST = SORTS = ("program", "cost")
_HEADS = ("op", "times", "source", "rule", "dtypes", "casts", "bytes", "saved", "FLOPs")
_RIGHT = ("times", "casts", "bytes", "FLOPs")
R = TypeVar("R")
_NAMED = 5  # widened calls that are named; of more, how many


def report_table(
    report: CallList,
    limit: int | None = None,
    width: int | None = None,
    sort: str = PROGRAM,
    fold: bool = True,
) -> str:
    """Return a report as text."""
    check_limit(limit)
    check_sort(sort)
    modules = by_module(report.calls, fold)
    calls = sorted((call for one in modules for call in one.rows), key=cost)
    listed, rows = {id(call) for call in calls[:limit]}, list[str | tuple[str, ...]]()
    for direction, name in SECTIONS.items():
        section = [one for one in modules if one.section == direction]
        if shown := list(_section(section, listed, report.policy, sort)):
            rows += ["", text_table.heading(name, width), *shown]
    lines = [headline(report)]
    if len(report):
        lines += ["", *totals(report, width)]
        lines += text_table.folded(folding(modules), width)
    lines += ["", *text_table.columns(_HEADS, rows, _RIGHT, width)]
    if hidden := len(calls) - len(listed):
        lines += ["", f"{text_table.plural(hidden, 'row')} with lower costs not listed"]
    return "\n".join(lines).rstrip()


def check_limit(limit: int | None) -> None:
    """Refuse a number of rows that is none."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit!r} lists no call: write 1 or more, or None for all.")


def check_sort(sort: str, orders: Sequence[str] = SORTS) -> None:
    """Refuse an order that there is not."""
    if sort not in orders:
        *others, last = (f'"{order}"' for order in orders)
        known = f"{', '.join(others)} or {last}"
        raise ValueError(f"sort={sort!r} is no order of these rows: write {known}.")


def folding(modules: Iterable[ModuleRows[R]]) -> str:
    """A line that says that equal layers are shown as one; "" if there are none."""
    listed = list(modules)
    rows = sum(len(one.rows) for one in listed)
    sites = sum(len(one.rows) * one.layers for one in listed)
    if rows == sites:
        return ""
    return (
        f"equal layers are one, with the counts of all of them: {sites:,} rows in {rows:,}; "
        "fold=False lists each"
    )


def headline(report: CallList) -> str:
    """The first line: name, number of call sites, policy and low dtype."""
    under = f"policy {report.policy} in {report.low}" if report.policy else report.low
    sites = text_table.plural(len(report), "call site")
    return ", ".join(filter(None, (f"{report.title or 'report'}: {sites}", under)))


def cost(call: Call) -> tuple[int, int]:
    """The sort key that puts the highest costs first."""
    return -call.cast_bytes, -call.flops


def _section(
    modules: Sequence[ModuleRows[Call]], listed: Container[int], policy: str, sort: str
) -> Iterator[str | tuple[str, ...]]:
    """The calls of a direction, by module."""
    for one in ranked(modules, cost) if sort == COST else modules:
        if calls := [call for call in one.rows if id(call) in listed]:
            yield label(one, OUTSIDE)
            yield from (_cells(call, policy) for call in calls)


def ranked(
    modules: Iterable[ModuleRows[R]], cost: Callable[[R], tuple[int, int]]
) -> list[ModuleRows[R]]:
    """Modules with the highest costs first, and in each the rows with the highest costs first."""

    def whole(one: ModuleRows[R]) -> tuple[int, ...]:
        return tuple(map(sum, zip(*map(cost, one.rows), strict=True)))

    inside = (one._replace(rows=tuple(sorted(one.rows, key=cost))) for one in modules)
    return sorted(inside, key=whole)


def _cells(call: Call, policy: str) -> tuple[str, ...]:
    return (
        f"  {call.op}",
        f"{call.times:,}",
        call.source,
        ruled(call, policy),
        text_table.dtypes(call.inputs, call.run, call.outputs),
        f"{call.casts:,}" if call.casts else "",
        text_table.size(call.cast_bytes) if call.cast_bytes else "",
        ", ".join(f"{count:,} {reason}" for reason, count in call.saved),
        text_table.amount(call.flops) if call.flops else "",
    )


def ruled(call: Call, known: str = "") -> str:
    """Return the rule that a call ran by, with the op, scope and source of its row."""
    row = by(call.row, call.op, known) if call.row else ""
    ran = "as lower" if call.rule == "fp8" else f"in {call.run}"
    fallback = f"run {ran}: {call.fallback}" if call.fallback else ""
    return ", ".join(filter(None, (call.rule, call.recipe, fallback, row)))


def by(row: Row, op: str, known: str = "") -> str:
    """The selector of a row, if that is not the op, with its scope and its source."""
    shipped = re.fullmatch(r"policies/(.*)\.toml", row.source)
    source = shipped[1] if shipped else row.source
    of, scope = row.of if row.of != op else "", f"in {row.scope}" if row.scope else ""
    return ", ".join(filter(None, (of, scope, source if source != known else "")))


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
    found = [(call, one) for one in by_module(calls) for call in one.rows]
    named = [
        ", ".join(filter(None, (f"{c.op} in {label(one, '')}" if c.module else c.op, c.source)))
        for c, one in found[:_NAMED]
    ]
    if more := len(calls) - sum(one.layers for _, one in found[:_NAMED]):
        named.append(f"and {text_table.plural(more, 'more call')}")
    return f"widened to float32 by a float32 input: {'; '.join(named)}" if calls else ""


def chosen(
    report: CallList, modules: str | Iterable[str] | None, ops: str | Iterable[str] | None
) -> CallList:
    """Return the part of a report that is of some modules and some ops."""
    calls: Iterable[Call] = report.calls
    if modules is not None:
        patterns = [modules] if isinstance(modules, str) else list(modules)
        known = dict.fromkeys(call.module for call in report.calls)
        inside = {p: {m for m in known if _within(p, m)} for p in patterns}
        for pattern, found in inside.items():
            if not found:
                raise ValueError(
                    f"modules={pattern!r} matches no call; the report's modules are {_list(known)}."
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
