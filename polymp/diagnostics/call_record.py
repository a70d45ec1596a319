"""The op calls of a program: the records that reports are made of.

A `Call` is a place in the user's code where an op is called, with the row that decided, the dtypes
of its inputs and results, and the cost of its casts. The backends make calls; a `Report` adds them
up. Nothing here knows a framework, or how calls are shown.
"""

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from polymp.rules.row import Row

# In which part of a program a call ran; "recompute" is the forward again, for the backward.
FORWARD, BACKWARD, RECOMPUTE = "forward", "backward", "recompute"

# The parts in the order of tables, with their headings.
SECTIONS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    RECOMPUTE: "recompute: the forward again, for the backward",
}


class Call(NamedTuple):
    """One op call site, with the counts of all calls there."""

    backend: str  # "torch" or "jax"
    op: str  # its name in the vocabulary, or the framework's own name if it has none
    spelling: str  # the framework's own name, with a prefix: "aten:softmax.int", "jax:exp"
    module: str  # path of the module it was called in, names joined by dots; "" outside of all
    source: str  # file and line of the user's code that called it: "train.py:12"; "" if not known
    direction: str  # "forward", "backward" or "recompute"
    region: str  # the low dtype of the region, "" outside of enabled regions
    row: Row | None  # of the policy, that decided; None if the policy has no row for the op
    inputs: tuple[str, ...]  # dtypes of its float inputs before any cast
    run: str  # the dtype that it computed in; "" if it computed no float
    outputs: tuple[str, ...]  # dtypes of its float results
    casts: int = 0  # how many arrays were cast for it, there and back
    cast_bytes: int = 0  # bytes that these casts read and wrote
    # Casts that were not made, by reason: "cached" in torch, "hoisted" out of a loop in JAX.
    saved: tuple[tuple[str, int], ...] = ()
    # Of the matrix products, convolutions and attention in it; a multiply-add is two.
    flops: int = 0
    kept: int = 0  # bytes of float32 that it keeps for the backward pass, parameters aside
    times: int = 1  # how often it ran; all the counts above are for all times together
    recipe: str = ""  # of a product that ran in 8 bits; "" for others
    # Why a product with rule fp8 ran as under rule lower, or one with rule lower was not lowered;
    # "" for others.
    fallback: str = ""

    @property
    def rule(self) -> str:
        """The rule that it ran by; "no row" if the policy has none for it, "" without a region."""
        if self.row is not None:
            return str(self.row.rule)
        return "no row" if self.region else ""

    @property
    def site(self) -> tuple[Any, ...]:
        """The fields in which calls of one site are equal."""
        dtypes = self.inputs, self.run, self.outputs
        return (*self[:8], *dtypes, self.recipe, self.fallback)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data; the row as text."""
        data = self._asdict()
        data["row"] = str(self.row) if self.row is not None else None
        data["rule"] = self.rule
        data["saved"] = dict(self.saved)
        return data | {"inputs": list(self.inputs), "outputs": list(self.outputs)}


# Said in place of rows.
NOTHING_RAN = "no op on floats ran in this thread; polymp.torch sees torch's only, polymp.jax JAX's"


def merged(calls: Iterable[Call]) -> tuple[Call, ...]:
    """The calls, those of one site added up."""
    sites: dict[tuple[Any, ...], list[Call]] = {}
    for call in calls:
        sites.setdefault(call.site, []).append(call)
    return tuple(map(added, sites.values()))


def added(calls: Sequence[Call]) -> Call:
    """The first of some calls, with the counts of all of them."""
    counts = {name: sum(getattr(call, name) for call in calls) for name in _COUNTS}
    saved = sums(pair for call in calls for pair in call.saved)
    return calls[0]._replace(**counts, saved=tuple(saved.items()))


_COUNTS = ("casts", "cast_bytes", "flops", "kept", "times")


def sums(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The counts by name, without zeros."""
    total: Counter[str] = Counter()
    for name, count in pairs:
        if count:
            total[name] += count
    return dict(total)


# What tables show of calls, and by what they fold them.


def alike(call: Call) -> Hashable:
    """All in which the calls of equal layers agree."""
    # They differ in their modules and the casts made for them: those of a first layer may be spared
    # in the others.
    return call._replace(module="", casts=0, cast_bytes=0, saved=(), kept=0)


def ruled(call: Call, policy: str = "") -> str:
    """Return the rule that a call ran by, with the op, scope and source of its row."""
    row = by(call.row, call.op, policy) if call.row else ""
    ran = "as lower" if call.rule == "fp8" else f"in {call.run}"
    fallback = f"run {ran}: {call.fallback}" if call.fallback else ""
    return ", ".join(filter(None, (call.rule, call.recipe, fallback, row)))


def by(row: Row | None, op: str, policy: str = "") -> str:
    """The selector of a row, if that is not the op, with its scope and its source."""
    if row is None:
        return "no row"
    shipped = re.fullmatch(r"policies/(.*)\.toml", row.source)
    source = shipped[1] if shipped else row.source
    of, scope = row.of if row.of != op else "", f"in {row.scope}" if row.scope else ""
    return ", ".join(filter(None, (of, scope, source if source != policy else "")))
