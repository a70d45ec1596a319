"""The report that `explain` makes of a program.

    report = polymp.explain(model, x)
    print(report)                         # totals, then a table; equal layers are one
    report.to_html("report.html")
    report.diff(polymp.explain(model, x, policy="lean"))

It is a list of calls (`call_record`) with their sums, that is drawn here and can be compared with
another one. Text is plain characters, so that it reads the same in a terminal, in a pipe and in a
log; nothing but the standard library is needed.
"""

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import NamedTuple

from polymp import text_table
from polymp.diagnostics.alignment import blocks, matched
from polymp.diagnostics.call_record import (
    FORWARD,
    NOTHING_RAN,
    SECTIONS,
    Call,
    added,
    alike,
    merged,
    ruled,
    sums,
)
from polymp.diagnostics.page import Shown
from polymp.diagnostics.tables import Cell, Column, Table, TableKind, number
from polymp.errors import brief, escaped
from polymp.rules.vocabulary import vocabulary


class Report(Shown):
    """The op calls of a program, with rules, dtypes and casts; `print` shows them as a table.

    Iterating gives a `Call` for each call site, in the order in which the sites were first reached.

    Attributes:
        calls: the call sites.
        title: name of the function or model that was explained.
        low: the low dtype of the regions, "" if there was none.
        policy: name of the policy, "" if there was no region.
    """

    def __init__(
        self,
        calls: Iterable[Call] | Callable[[], Iterable[Call]] = (),
        title: str = "",
        low: str = "",
        policy: str = "",
    ) -> None:
        """Keep calls: one for each run of an op, or a function that makes them when needed."""
        self._calls = calls
        self.title: str = title
        self.low: str = low
        self.policy: str = policy

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """The call sites, each once; see `Call`."""
        return merged(self._calls() if callable(self._calls) else self._calls)

    @property
    def flops(self) -> dict[str, int]:
        """FLOPs of products, convolutions and attention, by the dtype that they ran in."""
        return sums((call.run, call.flops) for call in self.calls)

    @property
    def casts(self) -> int:
        """How many arrays were cast."""
        return sum(call.casts for call in self.calls)

    @property
    def cast_bytes(self) -> int:
        """Bytes that casts read and wrote."""
        return sum(call.cast_bytes for call in self.calls)

    @property
    def saved(self) -> dict[str, int]:
        """Casts that were not made, by reason."""
        return sums(pair for call in self.calls for pair in call.saved)

    @property
    def kept(self) -> int:
        """Bytes of float32 that are kept for the backward pass, parameters aside."""
        return sum(call.kept for call in self.calls)

    @property
    def fallbacks(self) -> dict[str, int]:
        """Products that did not run by their rule, fp8 or lower, by the reason."""
        return sums((call.fallback, call.times) for call in self.calls if call.fallback)

    def of(self, op: str) -> list[Call]:
        """Return the calls of an op.

        Args:
            op: its name in the vocabulary or the framework's own: "softmax", "aten:softmax.int".

        Returns:
            The calls; none if it did not run.

        Raises:
            ValueError: it did not run, and neither the vocabulary nor the framework has such an op.
        """
        calls = [call for call in self.calls if op in (call.op, call.spelling)]
        if not (calls or ":" in op or vocabulary().knows(op) or _has(op)):
            raise ValueError(f"of({op!r}): there is no such op.{vocabulary().hint(op)}")
        return calls

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def _fill(self, calls: Iterable[Call], low: str, policy: str) -> None:
        """Fill a report that was empty until its block ended."""
        self.calls, self.low, self.policy = merged(calls), low, policy

    def _table(self) -> Table:
        return CALLS.table(self.calls, _COLUMNS, partial(_cells, self.policy))

    def _lines(self) -> list[str]:
        """The title: name, number of call sites, policy and low dtype; then the sums."""
        under = f"policy {self.policy} in {self.low}" if self.policy else self.low
        sites = text_table.plural(len(self), "call site")
        title = ", ".join(filter(None, (f"{self.title or 'report'}: {sites}", under)))
        return [title, *(_totals(self) if len(self) else [NOTHING_RAN])]

    def diff(self, other: "Report") -> "ReportDiff":
        """Compare with another report: under another policy, or from the other framework.

            print(polymp.explain(model, x).diff(polymp.explain(model, x, policy="lean")))

        Module paths match if they are equal, or are so without the parts "layers" of flax's
        containers and a class name in front.

        Args:
            other: of the same model.

        Returns:
            The differences; false if there are none.

        Raises:
            TypeError: `other` is no report.
        """
        if not isinstance(other, Report):
            raise TypeError(
                f"diff(other) compares with another report, got {brief(other)}. Write "
                "report.diff(polymp.explain(model, x, policy=...))."
            )
        return ReportDiff(self, other)

    def __repr__(self) -> str:
        return f"Report({self.title!r}, {len(self)} calls, {self.casts} casts)"


def _has(op: str) -> bool:
    """True if a framework that is imported has an op of this name of its own."""
    torch, lax = sys.modules.get("torch"), sys.modules.get("jax.lax")
    return (torch is not None and hasattr(torch.ops.aten, op)) or hasattr(lax, f"{op}_p")


# What is drawn: sums, then a row for each call site.

_COLUMNS = (
    Column("op", about="its name in the vocabulary, or the framework's own"),
    Column("times", True, "how often it ran; all counts are for all times together", wide=True),
    Column("direction", on_page=True),
    Column("ran in", on_page=True),
    Column("source"),
    Column("rule", about="the rule, and the op, scope and source of its row"),
    Column("dtypes", about="inputs before casts -> outputs (in the dtype it ran in, if another)"),
    Column("casts", True, "arrays that were cast for it, there and back"),
    Column("bytes", True, "read and written by these casts", wide=True),
    Column("saved", about="casts that were not made, and why", on_page=True),
    Column("FLOPs", True, "of products, convolutions and attention", wide=True),
    Column(
        "kept", True, "bytes of float32 kept for the backward pass, parameters aside", on_page=True
    ),
)

_NAMED = 5  # widened calls that are named; of more, how many


def _cells(policy: str, call: Call) -> tuple[Cell | str, ...]:
    saved = ", ".join(f"{count:,} {reason}" for reason, count in call.saved)
    return (
        call.op,
        Cell(f"{call.times:,}", call.times),
        call.direction,
        text_table.short(call.run),
        call.source,
        ruled(call, policy),
        text_table.dtypes(call.inputs, call.run, call.outputs),
        number(call.casts, f"{call.casts:,}"),
        number(call.cast_bytes, text_table.size(call.cast_bytes)),
        saved,
        number(call.flops, text_table.amount(call.flops)),
        number(call.kept, text_table.size(call.kept)),
    )


CALLS: TableKind[Call] = TableKind(
    lambda call: (call.direction, call.module), alike, added, SECTIONS
)


def _totals(report: Report) -> list[str]:
    """The sums of a report."""
    flops, total = report.flops, sum(report.flops.values())
    parts = [
        f"{text_table.amount(count)} ({text_table.share(count / total)}) "
        f"in {text_table.short(dtype)}"
        for dtype, count in sorted(flops.items(), key=lambda item: -item[1])
    ]
    saved = [f"{count:,} {reason}" for reason, count in sorted(report.saved.items())]
    moved = f"{report.casts:,}, {text_table.size(report.cast_bytes)} read and written"
    fallbacks = [f"{count:,} because {why}" for why, count in report.fallbacks.items()]
    totals = {
        "FLOPs": ", ".join(parts) or "none",
        "casts": moved if report.casts else "none",
        "saved": ", ".join(saved) or "none",
        "kept": f"{text_table.size(report.kept)} of float32 for the backward pass",
        "fallbacks": "; ".join(fallbacks),
        "widened": widening(report),
    }
    return [f"{name}: {text}" for name, text in totals.items() if text]


def widening(report: Report) -> str:
    """The calls in which a float32 input widened a low one and no row asked for it; "" if none."""
    calls = [call for call in report if _is_widened(call)]
    widened = [(call, one) for one in CALLS.arranged(calls) for call in one.rows]
    named = [
        ", ".join(filter(None, (f"{c.op} in {one.label}" if c.module else c.op, c.source)))
        for c, one in widened[:_NAMED]
    ]
    if more := len(calls) - sum(one.layers for _, one in widened[:_NAMED]):
        named.append(f"and {text_table.plural(more, 'more call')}")
    return f"to float32 by a float32 input: {'; '.join(named)}" if calls else ""


def _is_widened(call: Call) -> bool:
    """True of a call without a row in which a float32 input widened a low one to float32."""
    # Calls with a low result as well are left out: their float32 is for the backward pass.
    return (
        call.region != ""
        and call.row is None
        and call.direction == FORWARD
        and {call.region, "float32"} <= {*call.inputs}
        and "float32" in call.outputs
        and call.region not in call.outputs
    )


# The difference of two reports:
#
#     calls of one, calls of the other -> pairs by (module, direction, op), in order -> differences

_DTYPES = ("inputs", "run", "outputs")
_RULES = ("rule", "recipe", "fallback")
_CASTS = ("casts", "cast_bytes")


class Difference(NamedTuple):
    """A call that only one report has, or that differs between them."""

    module: str  # its path, as the first report has it
    direction: str  # "forward", "backward" or "recompute"
    op: str  # its name
    one: Call | None  # the call of the first report; None if only the other has it
    other: Call | None  # the call of the other report; None if only the first has it
    # What differs: of "inputs", "run", "outputs", "rule", "recipe", "fallback", "casts",
    # "cast_bytes", "times"; () if only one has it.
    changed: tuple[str, ...]


class ReportDiff:
    """The differences between two reports; true if there are any. `print` shows them as a table.

    Two calls are compared if module, direction and op are equal, in the order in which they were
    reached. Between two frameworks, which give an op different operands, the dtypes of the inputs
    differ if one has a dtype that the other lacks.

    Attributes:
        one: the first report.
        other: the other report.
        rows: the differences, by module in the order of the first report.
    """

    def __init__(self, one: Report, other: Report) -> None:
        """Compare."""
        self.one: Report = one
        self.other: Report = other
        self.rows: tuple[Difference, ...] = tuple(_differences(one.calls, other.calls))

    @property
    def same(self) -> bool:
        """True if both have the same calls, and each the same dtypes: input, run and output."""
        return all(row.changed and {*_DTYPES}.isdisjoint(row.changed) for row in self.rows)

    @property
    def names(self) -> tuple[str, str]:
        """Names of the two reports: frameworks, policies, dtypes or titles, whichever differ."""
        sides = [
            (next((call.backend for call in r), ""), r.policy, r.low, r.title)
            for r in (self.one, self.other)
        ]
        pairs = zip(*sides, strict=True)
        return next((p for p in pairs if all(p) and p[0] != p[1]), ("one", "other"))

    def __iter__(self) -> Iterator[Difference]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        names = self.names
        dtypes = "the same dtypes" if self.same else "other dtypes"
        count = f"{text_table.plural(len(self), 'difference')}, {dtypes}"
        text = [f"{names[0]} and {names[1]}: {count if self else 'no difference'}"]
        if self:
            columns = [Column(name) for name in ("op", *names)]
            text += ["", *_DIFFERENCES.table(self.rows, columns, _sides).text()]
        return escaped("\n".join(text))

    def __repr__(self) -> str:
        return f"ReportDiff({self.one!r}, {self.other!r}, {len(self)} differences)"


def _sides(row: Difference) -> tuple[str, str, str]:
    return row.op, _side(row, row.one), _side(row, row.other)


def _side(row: Difference, call: Call | None) -> str:
    """One of the calls in words: the fields that differ, or all without a counterpart."""
    if call is None:
        return "not called"
    casts = f"{text_table.plural(call.casts, 'cast')} of {text_table.size(call.cast_bytes)}"
    words = {
        _DTYPES: text_table.dtypes(call.inputs, call.run, call.outputs),
        _RULES: ruled(call) or "no region",
        _CASTS: casts if call.casts else "no cast",
        ("times",): f"ran {text_table.plural(call.times, 'time')}",
    }
    if not row.changed:  # a call of one side alone
        shown = [x for x in words.values() if x not in ("no cast", "ran 1 time")]
    else:
        shown = [x for names, x in words.items() if {*names} & {*row.changed}]
    return "; ".join(filter(None, [*shown, call.source]))


def _differences(ones: Sequence[Call], others: Sequence[Call]) -> Iterator[Difference]:
    """Yield the differences between the calls of two reports, by direction and module."""
    names = matched(*(dict.fromkeys(call.module for call in calls) for calls in (ones, others)))
    places: dict[tuple[str, str], tuple[list[Call], list[Call]]] = {}
    for call in ones:
        places.setdefault((call.module, call.direction), ([], []))[0].append(call)
    for call in others:
        places.setdefault((names[call.module], call.direction), ([], []))[1].append(call)
    order = [*SECTIONS]
    for place in sorted(places, key=lambda place: order.index(place[1])):
        for one, other in _pairs(*places[place]):
            op = one.op if one else other.op if other else ""
            changed = _changed(one, other) if one and other else ()
            if changed or one is None or other is None:
                yield Difference(*place, op, one, other, changed)


def _pairs(left: list[Call], right: list[Call]) -> Iterator[tuple[Call | None, Call | None]]:
    """The calls side by side, by op and in order; None where there is none."""
    for tag, i, i_end, j, j_end in blocks([c.op for c in left], [c.op for c in right]):
        if tag == "equal":
            yield from zip(left[i:i_end], right[j:j_end], strict=True)
        else:
            yield from ((call, None) for call in left[i:i_end])
            yield from ((None, call) for call in right[j:j_end])


def _changed(one: Call, other: Call) -> tuple[str, ...]:
    across = one.backend != other.backend
    return tuple(
        name
        for name in (*_DTYPES, *_RULES, *_CASTS, "times")
        if getattr(one, name) != getattr(other, name)
        and not (across and name == "inputs" and {*one.inputs} == {*other.inputs})
    )


def _alike(row: Difference) -> Hashable:
    return row.op, row.changed, *(call and alike(call) for call in (row.one, row.other))


def _added(rows: Sequence[Difference]) -> Difference:
    ones, others = [r.one for r in rows if r.one], [r.other for r in rows if r.other]
    one, other = (added(calls) if calls else None for calls in (ones, others))
    return rows[0]._replace(one=one, other=other)


_DIFFERENCES: TableKind[Difference] = TableKind(
    lambda row: (row.direction, row.module), _alike, _added, SECTIONS
)
