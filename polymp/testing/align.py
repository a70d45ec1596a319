"""The calls of two runs aligned, and the first that differs in its dtypes or its values.

    calls of one, calls of the other -> by name, in order -> the first pair in other dtypes
    values of one, values of the other -> the first step whose values the other does not have

The two frameworks split an op in different ways: a linear layer's bias is an addition of its own in
JAX, gelu is one call in torch. So a call that only one of them has is no difference; a call that
both have at the same place, in other dtypes, is one. Nothing here knows a framework.
"""

import math
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from functools import cache
from itertools import chain, permutations
from typing import Any, NamedTuple

from polymp import text_table
from polymp.diagnostics.call_record import FORWARD, Call
from polymp.diagnostics.rounding import Run, factor, spread
from polymp.dtypes import FORMATS
from polymp.rules.row import Rule
from polymp.rules.vocabulary import vocabulary

# The frameworks' names of a cast that the program itself makes.
_CASTS = {"to": "cast", "_to_copy": "cast", "convert_element_type": "cast"}

_ONE_CASTS = "in other dtypes: only one side casts to a low dtype here"


class Parted(NamedTuple):
    """Two calls that differ; None for a side that has no such call.

    Attributes:
        one: of the first run.
        other: of the other run.
        why: the difference in words.
    """

    one: Call | None
    other: Call | None
    why: str

    @property
    def op(self) -> str:
        """The name of the op."""
        call = self.one or self.other
        return "" if call is None else call.op


def name_of(call: Call) -> str:
    """The name of a call in both frameworks; all matrix products have one, as in JAX."""
    op = vocabulary().ops.get(call.op)
    if op is not None and op.kind == "matmul":
        return "matmul"
    return _CASTS.get(call.op, call.op)


def seen(call: Call) -> tuple[str, ...]:
    """Its name, its dtypes, and the recipe of a product in 8 bits."""
    if name_of(call) == "cast":
        return "cast", *call.inputs, *call.outputs
    if call.row is not None and call.row.rule is Rule.FP32_KEEP:
        return name_of(call), str(call.row.rule)  # torch's kernel does so inside
    return name_of(call), call.run, call.recipe


def compared(calls: Iterable[Call]) -> list[Call]:
    """The forward calls that compute with floats, and the casts that the program itself makes."""
    return [
        call
        for call in calls
        if call.direction == FORWARD and (call.run or name_of(call) == "cast") and not _silent(call)
    ]


def _silent(call: Call) -> bool:
    op = vocabulary().ops.get(call.op)
    return op is not None and op.kind in vocabulary().moving


def first_parted(one: Iterable[Call], other: Iterable[Call]) -> Parted | None:
    """The first calls of two runs that are one op in other dtypes; None if there are none.

    Calls are aligned by name, run dtype and recipe; under the rule fp32_keep, by name and rule.
    Calls of one name that are left over between aligned ones on both sides ran in other dtypes, or
    by other recipes, if either side has a row for them. An op without a row, with nothing else left
    over there, may be wider in JAX, which leaves out a rounding where only float32 reads the
    result. A cast to a low dtype that only one program makes is a difference, too.
    """
    left, right = compared(one), compared(other)
    ours, theirs = [seen(c) for c in left], [seen(c) for c in right]
    matcher = SequenceMatcher(None, ours, theirs, autojunk=False)
    for what, i, to_i, j, to_j in matcher.get_opcodes():
        if what != "equal":
            found = _in_gap(left[i:to_i], right[j:to_j])
            if found is not None:
                return found
    return None


def _in_gap(left: Sequence[Call], right: Sequence[Call]) -> Parted | None:
    names = [name_of(c) for c in left], [name_of(c) for c in right]
    for call in left:
        name = name_of(call)
        if name == "cast" and "cast" not in names[1]:
            if _narrows(call):
                return Parted(call, None, _ONE_CASTS)
        elif name in names[1]:
            other = right[names[1].index(name)]
            ruled = call.row is not None or other.row is not None
            if ruled or (names[0] == names[1] and not _spared(call, other)):
                return Parted(call, other, _how(call, other))
    for call in right:
        if name_of(call) == "cast" and "cast" not in names[0] and _narrows(call):
            return Parted(None, call, _ONE_CASTS)
    return None


def _how(call: Call, other: Call) -> str:
    """The difference of two calls of one op in words."""
    recipes = call.recipe and other.recipe and call.recipe != other.recipe
    return "by other recipes" if recipes else "in other dtypes"


def _spared(call: Call, other: Call) -> bool:
    """True if a call in JAX runs in torch's dtype or a wider one."""
    low, wide = (call, other) if call.backend == "torch" else (other, call)
    known = {low.run, wide.run} <= {*FORMATS}
    return low.backend != wide.backend and known and FORMATS[wide.run].holds(FORMATS[low.run])


def _narrows(call: Call) -> bool:
    dtypes = [*call.inputs, *call.outputs]
    if len(dtypes) != 2 or not {*dtypes} <= {*FORMATS}:
        return False
    return FORMATS[dtypes[1]].bits < FORMATS[dtypes[0]].bits


def strictly_parted(one: Iterable[Call], other: Iterable[Call]) -> Parted | None:
    """The first difference at all: a call that only one side has is one.

    For two runs in one framework.
    """
    left, right = compared(one), compared(other)
    ours, theirs = [seen(c) for c in left], [seen(c) for c in right]
    matcher = SequenceMatcher(None, ours, theirs, autojunk=False)
    for what, i, to_i, j, to_j in matcher.get_opcodes():
        if what == "equal":
            continue
        here, there = (left[i] if i < to_i else None), (right[j] if j < to_j else None)
        if here is not None and there is not None and name_of(here) == name_of(there):
            return Parted(here, there, _how(here, there))
        return Parted(here, there, "not the same ops")
    return None


def partner(at: int, kept: Run, moved: Sequence[Run], theirs: Run) -> Call | None:
    """The JAX call at the place of a torch step: one that reads the same values.

    Of several, those of the same op, in the order of torch's; or else the first, as where torch has
    one call for a gelu and JAX has many. A loop's values are not known: there it is the call that
    the names say.
    """
    steps, call = kept.steps, kept.steps[at].call

    @cache
    def twins(source: int) -> frozenset[int]:
        if not steps[source].values:
            return frozenset()
        value, limit = _with_limit(source, kept, moved)
        places = enumerate(theirs.steps)
        same = (
            i
            for i, s in places
            if any(x.size == value.size and _near(value, x, limit) for x in s.values)
        )
        return frozenset(same)

    @cache
    def sources(reader: int) -> frozenset[int]:
        return frozenset().union(*(twins(r) or sources(r) for r in steps[reader].reads))

    def alike(one: Call, other: Call) -> bool:
        return one.direction == other.direction and name_of(one) == name_of(other)

    mine = sources(at)
    readers = [
        step.call
        for i, step in enumerate(theirs.steps)
        if step.call.direction == call.direction
        and i not in mine
        and (step.reads & mine if mine else step.values and not step.reads)
        and not _silent(step.call)
    ]
    same = [c for c in readers if alike(c, call)]
    if same:
        rank = sum(alike(steps[i].call, call) and sources(i) == mine for i in range(at))
        return same[min(rank, len(same) - 1)]
    return readers[0] if readers else _by_names(call, kept, theirs)


def _by_names(call: Call, kept: Run, theirs: Run) -> Call | None:
    left, right = ([s.call for s in run.steps] for run in (kept, theirs))
    ours, others = ([(c.direction, name_of(c)) for c in side] for side in (left, right))
    at = next(i for i, c in enumerate(left) if c is call)
    matcher = SequenceMatcher(None, ours, others, autojunk=False)
    for i, j, count in matcher.get_matching_blocks():
        if i <= at < i + count:
            return right[j + at - i]
    return None


def side_by_side(
    parted: Parted,
    names: tuple[str, str],
    calls: tuple[Sequence[Call], Sequence[Call]] | None = None,
) -> str:
    """Two calls as a table: op, module, dtypes, rule and source of each."""

    def cells(call: Call | None) -> tuple[str, ...]:
        if call is None:
            return ("no such call", "", "", "", "")
        dtypes = text_table.dtypes(call.inputs, call.run, call.outputs)
        row = str(call.row) if call.row is not None else call.rule or "no region"
        rule = ", ".join(filter(None, (row, call.recipe, call.fallback)))
        return call.op, call.module or "(top level)", dtypes, rule, call.source

    heads = ("op", "module", "dtypes", "row or rule", "source")
    both = cells(parted.one), cells(parted.other)
    rows = [(head, *pair) for head, *pair in zip(heads, *both, strict=True)]
    return "\n".join(text_table.columns(("", *names), rows))


def first_off(kept: Run, moved: Sequence[Run], theirs: Run) -> int | None:
    """Find the first step of a torch run whose values no step of the JAX run has.

    Axes may have another order, because the frameworks lay arrays out in different ways. A forward
    step is passed over if a later step that reads it has the same values in JAX: JAX may split an
    op into others.
    """
    pool: dict[int, list[Any]] = {}
    for x in chain.from_iterable(step.values for step in theirs.steps):
        pool.setdefault(x.size, []).append(x)
    for x in (*theirs.results.values(), *theirs.gradients.values()):
        pool.setdefault(x.size, []).append(x)
    steps = kept.steps
    met: list[bool | None] = []
    for at, step in enumerate(steps):
        if not step.values:
            met.append(None)  # its values are not known
            continue
        value, limit = _with_limit(at, kept, moved)
        met.append(any(_near(value, x, limit) for x in pool.get(value.size, ())))
    healed = [bool(found) for found in met]
    for at in reversed(range(len(steps))):
        if healed[at]:
            for source in steps[at].reads:
                healed[source] |= steps[at].call.direction == steps[source].call.direction
    return next((at for at, fine in enumerate(healed) if not fine and met[at] is False), None)


def _with_limit(at: int, kept: Run, moved: Sequence[Run]) -> tuple[Any, float]:
    """The value of a step, and how far from it the same value in JAX may be."""
    value = kept.steps[at].values[0]
    around = spread(value, [run.steps[at].values[0] for run in moved])
    return value, math.sqrt(2) * factor(value.size) * float(around.max(initial=0.0))


def _near(one: Any, other: Any, limit: float) -> bool:
    """True if an array is the other one, its axes in some order, within a limit."""
    import numpy as np

    orders = permutations(range(other.ndim)) if other.ndim <= 4 else [tuple(range(other.ndim))]
    flat = one.reshape(-1)
    with np.errstate(invalid="ignore"):
        for order in orders:
            x = other.transpose(order).reshape(-1)
            same = (flat == x) | (np.isnan(flat) & np.isnan(x)) | (np.abs(flat - x) <= limit)
            if bool(np.all(same)):
                return True
    return False
