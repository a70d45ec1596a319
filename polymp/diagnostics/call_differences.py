"""The calls of two reports side by side, and in what they differ.

calls of one, calls of the other -> pairs by (module, direction, op), in order -> differences
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from polymp.diagnostics.call_record import Call, added, alike
from polymp.diagnostics.equal_layers import ModuleRows, folded
from polymp.diagnostics.report_text import SECTIONS, cost

DTYPES = ("inputs", "run", "outputs")
RULES = ("rule", "recipe", "fallback")
_COMPARED = (*DTYPES, *RULES, "casts", "cast_bytes", "times")


class Difference(NamedTuple):
    """A call that only one report has, or that differs between them.

    Attributes:
        module: its path, as the first report has it.
        direction: "forward", "backward" or "recompute".
        op: its name.
        one: the call of the first report; None if only the other has it.
        other: the call of the other report; None if only the first has it.
        changed: what differs: of "inputs", "run", "outputs", "rule", "recipe", "fallback",
            "casts", "cast_bytes", "times"; () if only one has it.
    """

    module: str
    direction: str
    op: str
    one: Call | None
    other: Call | None
    changed: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        sides = {"one": self.one, "other": self.other}
        return self._asdict() | {
            "changed": list(self.changed),
            **{name: call and call.to_dict() for name, call in sides.items()},
        }


def differences(
    ones: Iterable[Call], others: Iterable[Call], names: Mapping[str, str]
) -> Iterator[Difference]:
    """Yield the differences between the calls of two reports, by direction and module."""
    left, right = _grouped(ones, {}), _grouped(others, names)
    order = {direction: at for at, direction in enumerate(SECTIONS)}
    for place in sorted({**left, **right}, key=lambda place: order[place[1]]):
        for one, other in _pairs(left.get(place, []), right.get(place, [])):
            op = one.op if one else other.op if other else ""
            changed = _changed(one, other) if one and other else ()
            if changed or one is None or other is None:
                yield Difference(*place, op, one, other, changed)


def by_module(rows: Iterable[Difference], fold: bool = True) -> list[ModuleRows[Difference]]:
    """Return differences by direction and module, those of equal layers as one."""
    return folded(rows, lambda row: (row.direction, row.module), _alike, _added, fold)


def _alike(row: Difference) -> Hashable:
    sides = (call and alike(call) for call in (row.one, row.other))
    return row.op, row.changed, *sides


def _added(rows: Sequence[Difference]) -> Difference:
    one, other = (
        [c for c in calls if c] for calls in ((r.one for r in rows), (r.other for r in rows))
    )
    return rows[0]._replace(one=added(one) if one else None, other=added(other) if other else None)


def difference_cost(row: Difference) -> tuple[int, int]:
    """The sort key that puts first what costs the most more, or the most less."""
    sides = [cost(call) if call else (0, 0) for call in (row.one, row.other)]
    moved, flops = (-abs(one - other) for one, other in zip(*sides, strict=True))
    return moved, flops


def _grouped(calls: Iterable[Call], names: Mapping[str, str]) -> dict[tuple[str, str], list[Call]]:
    """The calls by module, renamed, and direction, in order."""
    groups: dict[tuple[str, str], list[Call]] = {}
    for call in calls:
        place = names.get(call.module, call.module), call.direction
        groups.setdefault(place, []).append(call)
    return groups


def _pairs(left: list[Call], right: list[Call]) -> Iterator[tuple[Call | None, Call | None]]:
    """The calls side by side, by op and in order; None where there is none."""
    ops = [call.op for call in left], [call.op for call in right]
    if ops[0] == ops[1]:
        yield from zip(left, right, strict=True)
        return
    for what, i, to_i, j, to_j in SequenceMatcher(None, *ops, autojunk=False).get_opcodes():
        if what == "equal":
            yield from zip(left[i:to_i], right[j:to_j], strict=True)
        else:
            yield from ((call, None) for call in left[i:to_i])
            yield from ((None, call) for call in right[j:to_j])


def _changed(one: Call, other: Call) -> tuple[str, ...]:
    def value(call: Call, name: str) -> Any:
        inputs = name == "inputs" and one.backend != other.backend
        return {*call.inputs} if inputs else getattr(call, name)

    return tuple(name for name in _COMPARED if value(one, name) != value(other, name))
