"""The report that `explain` makes of a program.

    report = polymp.explain(model, x)
    print(report)                         # totals, then a table; equal layers are one
    report.to_html("report.html")
    report.diff(polymp.explain(model, x, policy="lean"))

It is a list of calls (`call_record`) that is drawn here and can be compared with another one
(`report_diff`). Text is plain characters in lines of a given width, so that it reads the same in a
terminal, in a pipe and in a log; nothing but the standard library is needed.
"""

from collections.abc import Iterable
from os import PathLike

from polymp import text_table
from polymp.diagnostics import page, tables
from polymp.diagnostics.call_record import (
    NOTHING_RAN,
    SECTIONS,
    Call,
    CallList,
    added,
    alike,
    cost,
    ruled,
)
from polymp.diagnostics.report_diff import ReportDiff
from polymp.diagnostics.tables import COST, Cell, Column
from polymp.errors import escaped


class Report(CallList):
    """The op calls of a program, with rules, dtypes and casts; `print` shows them as a table.

    Iterating gives a `Call` for each call site, in the order in which the sites were first reached.

    Attributes:
        calls: the call sites.
        title: name of the function or model that was explained.
        low: the low dtype of the regions, "" if there was none.
        policy: name of the policy, "" if there was no region.
    """

    def fill(self, calls: Iterable[Call], low: str, policy: str) -> None:
        """Fill a report that was empty until its block ended.

        Args:
            calls: that ran in the block.
            low: the low dtype of the regions.
            policy: name of the policy.
        """
        self._calls = calls
        self.low = low
        self.policy = policy
        self.__dict__.pop("calls", None)

    def table(self, width: int | None = None, *, sort: str = "program", fold: bool = True) -> str:
        """Return the report as the text that `print(report)` shows.

        Calls are grouped by direction and module. "fp32 x2 -> bf16 (in fp32)" is an op with two
        float32 inputs and a bfloat16 result that ran in float32. "layers.*.attn x24" are 24 modules
        whose calls are alike; their counts are added up.

        Args:
            width: of a line, in characters; by default the terminal's, and 100 without one.
            sort: "program" for the order in which modules and calls were first reached; "cost" to
                put those first whose casts move the most bytes, and of these, or where nothing is
                cast, those with the most FLOPs.
            fold: False to show equal layers one by one.

        Returns:
            The text.

        Raises:
            ValueError: `sort` is neither "program" nor "cost".
        """
        rows, note = tables.arranged(self.calls, CALLS, sort, fold)
        lines = [_headline(self)]
        if len(self):
            totals = text_table.columns(("", ""), _totals(self), width=width)[2:]
            lines += ["", *totals, *text_table.folded(note, width)]
        else:
            lines += ["", NOTHING_RAN]
        lines += ["", *tables.text(_table(self, rows), width)]
        return escaped("\n".join(lines).rstrip())

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """Return an HTML page: totals, and a table to sort by any column and to filter.

        The page loads nothing, so it can be mailed or kept with a run. It begins with the rows
        whose casts move the most bytes.

        Args:
            path: file to write it to as well, in UTF-8.

        Returns:
            The page as text.
        """
        modules, note = tables.arranged(self.calls, CALLS)
        made = page.Page(
            title=self.title or "report",
            about=_headline(self).partition(": ")[2],
            notes=[*map(": ".join, _totals(self)), *filter(None, [note])],
            table=_table(self, modules),
            sorted=("bytes", False) if self.cast_bytes else None,
            what="row" if note else "call site",
        )
        return page.html(made, path)

    def diff(self, other: "Report") -> ReportDiff:
        """Compare with another report: under another policy, or from the other framework.

            print(polymp.explain(model, x).diff(polymp.explain(model, x, policy="lean")))

        Calls are compared by module, direction and op, in order. Module paths match if they are
        equal, or are so without the parts "layers" of flax's containers and a class name in front.

        Args:
            other: of the same model.

        Returns:
            The differences; false if there are none.
        """
        return ReportDiff(self, other)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return page.framed(self.to_html(), self.title or "report")

    def __repr__(self) -> str:
        return f"Report({self.title!r}, {len(self)} calls, {self.casts} casts)"


# What is drawn: sums, then a row for each call site.

_COLUMNS = (
    Column("op", about="its name in the vocabulary, or the framework's own", breaks="parts"),
    Column("times", True, "how often it ran; all counts are for all times together"),
    Column("direction", on_page=True),
    Column("source", breaks="never"),
    Column("rule", about="the rule, and the op, scope and source of its row"),
    Column("dtypes", about="inputs before casts -> outputs (in the dtype it ran in, if another)"),
    Column("casts", True, "arrays that were cast for it, there and back"),
    Column("bytes", True, "read and written by these casts"),
    Column("saved", True, "casts that were not made, and why", "spaces"),
    Column("FLOPs", True, "of products, convolutions and attention"),
    Column(
        "kept", True, "bytes of float32 kept for the backward pass, parameters aside", on_page=True
    ),
)

_NAMED = 5  # widened calls that are named; of more, how many


def _table(report: CallList, modules: Iterable[tables.ModuleRows[Call]]) -> tables.Table:
    lines = [
        tables.Line(
            SECTIONS[one.section],
            one.label,
            _cells(call, report.policy),
            (call.direction, call.run or "no float", call.rule or "no region"),
            cost([call]),
        )
        for one in modules
        for call in one.rows
    ]
    return tables.Table(_COLUMNS, ("direction", "ran in", "rule"), lines)


def _cells(call: Call, policy: str) -> tuple[tables.Cell, ...]:
    dtypes = f"{', '.join(call.inputs)} -> {', '.join(call.outputs)}, ran in {call.run or 'none'}"
    saved = ", ".join(f"{count:,} {reason}" for reason, count in call.saved)
    return (
        Cell(call.op, about=call.spelling),
        Cell(f"{call.times:,}", call.times),
        Cell(call.direction),
        Cell(call.source),
        Cell(ruled(call, policy), about=str(call.row or "")),
        Cell(text_table.dtypes(call.inputs, call.run, call.outputs), about=dtypes),
        tables.number(call.casts, f"{call.casts:,}"),
        tables.number(call.cast_bytes, text_table.size(call.cast_bytes)),
        tables.number(sum(count for _, count in call.saved), saved),
        tables.number(call.flops, text_table.amount(call.flops)),
        tables.number(call.kept, text_table.size(call.kept)),
    )


CALLS: tables.RowKind[Call] = tables.RowKind(
    SECTIONS, lambda call: (call.direction, call.module), alike, added, {COST: cost}
)


def _headline(report: CallList) -> str:
    """The first line: name, number of call sites, policy and low dtype."""
    under = f"policy {report.policy} in {report.low}" if report.policy else report.low
    sites = text_table.plural(len(report), "call site")
    return ", ".join(filter(None, (f"{report.title or 'report'}: {sites}", under)))


def _in_8_bits(report: CallList) -> str:
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


def _totals(report: CallList) -> list[tuple[str, str]]:
    """The names and texts of the report's sums."""
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
        ("fp8", _in_8_bits(report)),
        ("lower", "; ".join(_fallbacks(report, "lower", "not lowered"))),
        ("widened", widening(report).removeprefix("widened ")),
    ]
    return [(name, text) for name, text in pairs if text]


def widening(report: CallList) -> str:
    """The calls in which a float32 input widened a low one and no row asked for it, as a line."""
    calls = report.widened()
    modules, _ = tables.arranged(calls, CALLS)
    widened = [(call, one) for one in modules for call in one.rows]
    named = [
        ", ".join(filter(None, (f"{c.op} in {one.label}" if c.module else c.op, c.source)))
        for c, one in widened[:_NAMED]
    ]
    if more := len(calls) - sum(one.layers for _, one in widened[:_NAMED]):
        named.append(f"and {text_table.plural(more, 'more call')}")
    return f"widened to float32 by a float32 input: {'; '.join(named)}" if calls else ""
