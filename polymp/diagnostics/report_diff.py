"""Two reports of one model compared: under two policies, or from the two frameworks.

calls of one, calls of the other -> pairs by (module, direction, op), in order -> differences
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from polymp import text_table
from polymp.diagnostics import tables
from polymp.diagnostics.alignment import aligned, matched
from polymp.diagnostics.call_record import SECTIONS, Call, CallList, added, alike, ruled
from polymp.errors import escaped

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

    def __init__(self, one: CallList, other: CallList) -> None:
        """Compare."""
        self.one: CallList = one
        self.other: CallList = other
        self.rows: tuple[Difference, ...] = tuple(_differences(one.calls, other.calls))

    @property
    def same(self) -> bool:
        """True if both have the same calls, and each the same dtypes: input, run and output."""
        return not any(
            row.one is None or row.other is None or {*_DTYPES} & {*row.changed} for row in self.rows
        )

    @property
    def names(self) -> tuple[str, str]:
        """Names of the two reports: frameworks, policies, dtypes or titles, whichever differ."""
        sides = [
            (next((call.backend for call in r), ""), r.policy, r.low, r.title)
            for r in (self.one, self.other)
        ]
        for left, right in zip(*sides, strict=True):
            if left != right and left and right:
                return left, right
        return "one", "other"

    def __iter__(self) -> Iterator[Difference]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        names = self.names
        dtypes = "the same dtypes" if self.same else "other dtypes"
        count = f"{text_table.plural(len(self), 'difference')}, {dtypes}"
        text = [f"{names[0]} and {names[1]}: {count if self else 'no difference'}"]
        lines = [
            tables.Line(
                SECTIONS[one.section],
                one.label,
                [tables.Cell(x) for x in (row.op, _side(row, row.one), _side(row, row.other))],
            )
            for one in tables.arranged(self.rows, _FOLDED)[0]
            for row in one.rows
        ]
        if lines:
            columns = [tables.Column(name) for name in ("op", *names)]
            text += ["", *tables.text(tables.Table(columns, (), lines))]
        return escaped("\n".join(text))

    def __repr__(self) -> str:
        return f"ReportDiff({self.one!r}, {self.other!r}, {len(self)} differences)"


def _side(row: Difference, call: Call | None) -> str:
    """One of the calls in words: the fields that differ, or all without a counterpart."""
    if call is None:
        return "not called"
    changed, alone = {*row.changed}, not row.changed
    parts = []
    if alone or changed & {*_DTYPES}:
        parts.append(text_table.dtypes(call.inputs, call.run, call.outputs))
    if alone or changed & {*_RULES}:
        parts.append(ruled(call) or "no region")
    if changed & {*_CASTS} or (alone and call.casts):
        casts = f"{text_table.plural(call.casts, 'cast')} of {text_table.size(call.cast_bytes)}"
        parts.append(casts if call.casts else "no cast")
    if "times" in changed or (alone and call.times > 1):
        parts.append(f"ran {text_table.plural(call.times, 'time')}")
    return "; ".join([*parts, *filter(None, [call.source])])


def _differences(ones: Sequence[Call], others: Sequence[Call]) -> Iterator[Difference]:
    """Yield the differences between the calls of two reports, by direction and module."""
    names = matched(*(dict.fromkeys(call.module for call in calls) for calls in (ones, others)))
    left, right = _grouped(ones, {}), _grouped(others, names)
    order = [*SECTIONS]
    for place in sorted({**left, **right}, key=lambda place: order.index(place[1])):
        for one, other in _pairs(left.get(place, []), right.get(place, [])):
            op = one.op if one else other.op if other else ""
            changed = _changed(one, other) if one and other else ()
            if changed or one is None or other is None:
                yield Difference(*place, op, one, other, changed)


def _grouped(calls: Iterable[Call], names: dict[str, str]) -> dict[tuple[str, str], list[Call]]:
    """The calls by module, renamed, and direction, in order."""
    groups: dict[tuple[str, str], list[Call]] = {}
    for call in calls:
        groups.setdefault((names.get(call.module, call.module), call.direction), []).append(call)
    return groups


def _pairs(left: list[Call], right: list[Call]) -> Iterator[tuple[Call | None, Call | None]]:
    """The calls side by side, by op and in order; None where there is none."""
    pairs = aligned([call.op for call in left], [call.op for call in right])
    todo = 0  # of the right
    for i, call in enumerate(left):
        j = pairs.get(i)
        if j is None:
            yield call, None
        else:
            yield from ((None, other) for other in right[todo:j])
            yield call, right[j]
            todo = j + 1
    yield from ((None, other) for other in right[todo:])


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
    ones = [row.one for row in rows if row.one]
    others = [row.other for row in rows if row.other]
    return rows[0]._replace(
        one=added(ones) if ones else None, other=added(others) if others else None
    )


_FOLDED: tables.RowKind[Difference] = tables.RowKind(
    SECTIONS, lambda row: (row.direction, row.module), _alike, _added
)
