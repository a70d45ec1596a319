"""The op that a value that is not finite came from, and the cause.

    nodes of one run, each with the nodes of its inputs -> the node to blame, and why

A run is a graph: every op that ran is a node, with the nodes that made its inputs. Infinities that
a program means, such as those of a mask, disappear in a later op; those that reach an end of the
graph count. Nothing here knows a framework.
"""

import math
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from polymp.dtypes import FORMATS

# How many nodes back a cause is searched for, such as the zero that was divided by.
_STEPS = 12

# Ops whose Inf, of finite inputs, may be a division by zero.
DIVIDING = frozenset("div reciprocal log log1p log2 log10 logit rsqrt pow".split())

# Ops whose results come so near to 1 that a low dtype rounds them to it.
SATURATING = frozenset("sigmoid tanh erf".split())

# Ops that give the same for Inf as for a very large number: masks and clamps lead to them.
_TAKES_UP = frozenset(
    "softmax log_softmax logsumexp exp sigmoid tanh clamp clamp_min clamp_max maximum minimum max "
    "min amax amin where masked_fill index_put nan_to_num relu".split()
)

# Of these, ops that give another result for Inf if their bound is larger than the number it was.
_BOUNDS = frozenset("clamp clamp_min clamp_max maximum minimum".split())

# Ops that take up an Inf as that of a mask, also where it was made by an overflow.
_MASKED = frozenset("softmax log_softmax logsumexp exp max amax".split())

# Ops whose results may be exactly what an exact 1 made.
OF_ONE = frozenset("sub rsub neg add minimum maximum clamp where to".split())

# Sentences on a cause.
CONSTANT = "a constant of the program is not finite here"
CAST = "an input of it is beyond {}'s largest number when it is cast"
UNTRIED_WIDE = "in float32 it was not tried"
ASKS = "the program itself asks for {}: change that"

# The direction of what an optimizer does, beside those of calls.
UPDATE = "update"

# An op that lost more than this share of its values is the cause of a later Inf or NaN.
_MOST = 0.5


def rounded(number: float, dtype: str) -> float | None:
    """Return the 0, 1 or -1 that a low dtype makes of a constant near it; else None."""
    form, near = FORMATS.get(dtype), math.copysign(abs(number) > 0.5, number)
    if form is None or form.bits > 16 or number == near or not abs(number) < 1.5:
        return None
    half = form.smallest_subnormal / 2 if near == 0 else form.eps / (4 if abs(number) < 1 else 2)
    return near if abs(number - near) <= half else None


def lost_constants(numbers: Iterable[float], dtype: str) -> str:
    """Say what a low dtype makes of constants: "1e-12 is zero in float16"."""
    ends = (("zero", 0.0), ("1", 1.0), ("-1", -1.0))
    told = [(w, [f"{x:.9g}" for x in numbers if rounded(x, dtype) == end]) for w, end in ends]
    return "; ".join(f"{', '.join(some)} is {word} in {dtype}" for word, some in told if some)


class Node(NamedTuple):
    """One op that ran."""

    inputs: tuple[int, ...]  # places, in the run, of the nodes that made its inputs, all before it
    bad: str  # "Inf", "NaN" or "", of its result
    run: str  # the dtype of its result
    # Its result is Inf in float16 and, if that was tried, finite in float32, of the same inputs.
    burst: bool = False
    tried: bool = True  # False of an op in float16 that was not tried in float32, as one in place
    vanished: float = 0.0  # share of its results that are zero in float16 and not in float32
    numbers: tuple[float, ...] = ()  # constants that are zero or 1 in its dtype and are not else
    spoiled: str = ""  # name of an input that no op made and that is not finite
    given: bool = False  # one of its constants is not finite: a mask's -inf
    value: bool = True  # False if its result is no float: a test, a comparison
    asks: bool = False  # it tests whether its inputs are finite, as a loss scaler does
    cast: bool = False
    loops: tuple[Hashable, ...] = ()  # keys of the loops around it, the outermost first
    first: tuple[int, ...] = ()  # the round of each in which its result was first not finite
    op: str = ""  # its name in the vocabulary
    late: bool = False  # only the backward pass reads its result, if anything does
    dropped: bool = False  # its result is gone at the end
    ones: bool = False  # its largest result is 1 in its dtype, and below in float32
    single: bool = False  # its result is one number, as a loss is
    call: Hashable = None  # of the op that it is part of; nodes of one call share their inputs
    returned: bool = False  # the program returns its result
    ended: bool = False  # it is a minimum with a bound that its dtype ends before
    # Of a division, the places of the nodes that made what it divides by.
    divisors: tuple[int, ...] | None = None
    of_result: bool = False  # a cast of what its own call made
    regular: bool = False  # none of its results is 0, 1 or -1, which break an op


class Blame(NamedTuple):
    """The node to blame."""

    node: int  # its place in the run
    first: int  # the place of the node whose result was the first that is not finite
    kind: str  # as in `audit_records.Fault`
    why: str


def blame(nodes: Sequence[Node]) -> Blame | None:
    """Find the node at which a run's numbers broke."""
    # Infinities that the program has as constants are no fault, until an op makes NaN of them or
    # they are the loss.
    nodes = _with_calls(nodes)
    reaches, hidden = _bad_ones(nodes)
    order = sorted(range(len(nodes)), key=lambda at: nodes[at].late)
    for at in order:
        node = nodes[at]
        if (reaches[at] or hidden[at]) and not any(_spoils(nodes, i, at) for i in node.inputs):
            if node.spoiled or not node.given:
                return _of(nodes, at)
    for at in order:
        node = nodes[at]
        if not reaches[at] or not (node.bad == "NaN" or node.single):
            continue
        spoilt = [i for i in node.inputs if _spoils(nodes, i, at)]
        source = at  # where NaN, or an infinite loss, came from
        while worse := [i for i in spoilt if nodes[i].bad == node.bad]:
            source = worse[0]
            spoilt = [i for i in nodes[source].inputs if _spoils(nodes, i, source)]
        why = CONSTANT
        if node.bad == "NaN" and spoilt:
            why = "its result is NaN, from infinities that the program has as constants"
        return Blame(source, source, "operation", why)
    return None


def _with_calls(nodes: Sequence[Node]) -> list[Node]:
    """The nodes, with what their calls read that is not finite: a part may have taken it up."""
    # torch.isfinite is made of ops; its absolute values, which only a comparison reads, are a test.
    whole: list[Node] = []
    readers = _readers(nodes)
    nodes = [
        node._replace(bad="", value=False)
        if node.op == "abs" and read and not any(nodes[r].value for r in read)
        else node
        for node, read in zip(nodes, readers, strict=True)
    ]
    for at, node in enumerate(nodes):
        own = [whole[i] for i in node.inputs if i < at and nodes[i].call == node.call is not None]
        more = {i for part in own for i in part.inputs if nodes[i].bad} - {*node.inputs}
        spoiled = next(filter(None, [node.spoiled, *(part.spoiled for part in own)]), "")
        whole.append(node._replace(inputs=(*node.inputs, *sorted(more)), spoiled=spoiled))
    return whole


def meant(nodes: Sequence[Node]) -> set[int]:
    """Return the nodes whose infinities are a mask's: no end has them, or tests of constants do."""
    # Those of an overflow are not, whatever op takes them up, unless it takes them for a mask's.
    (reaches, hidden), constants = _bad_ones(nodes), set[int]()
    readers = _readers(nodes)
    untested, overflown = _reaching(nodes, readers, tests=False), _overflown(nodes, readers)
    for at, node in enumerate(nodes):
        spoilt = {i for i in node.inputs if _spoils(nodes, i, at)}
        if (node.given or spoilt) and spoilt <= constants and not (node.spoiled or node.burst):
            constants.add(at)
    ends = [(untested if at in constants else reaches)[at] for at in range(len(nodes))]
    bad = (at for at, node in enumerate(nodes) if node.bad == "Inf")
    return {at for at in bad if not (ends[at] or hidden[at] or at in overflown)}


def _overflown(nodes: Sequence[Node], readers: Sequence[Sequence[int]]) -> set[int]:
    """The nodes with an Inf of an overflow that other ops than those of masks take up."""
    masked = _taken_up(nodes, readers, lambda _, reader: reader.op in _MASKED)
    found = set[int]()
    for at, node in enumerate(nodes):
        spoilt = {i for i in node.inputs if _spoils(nodes, i, at)}
        made = node.burst and not (spoilt or node.given or node.spoiled or masked[at])
        if node.bad and (made or spoilt & found):
            found.add(at)
    return found


def _bad_ones(nodes: Sequence[Node]) -> tuple[list[bool], list[bool]]:
    """For each node, whether its Inf or NaN reaches an end, and whether a number hides its Inf."""
    # An Inf that a dtype made is a fault also where a later op turns it into a number: x / Inf is
    # 0. A softmax or a clamp, though, gives the same for Inf and for the number it was; but not a
    # clamp in a wider dtype, whose bound may be above that number. Between the two, as where a mask
    # is added, it may be an Inf still.
    readers = _readers(nodes)
    taken = _taken_up(nodes, readers, _takes_up)
    hidden = [node.burst and not (node.cast or taken[at]) for at, node in enumerate(nodes)]
    return _reaching(nodes, readers), hidden


def _taken_up(
    nodes: Sequence[Node],
    readers: Sequence[Sequence[int]],
    takes: Callable[[Node, Node], bool],
) -> list[bool]:
    """For each node, True if all ops that read its values, or make Inf of them, take them up."""
    taken = [True] * len(nodes)
    for at in range(len(nodes) - 1, -1, -1):
        of_values = (r for r in readers[at] if nodes[r].value)
        taken[at] = all(taken[r] if nodes[r].bad else takes(nodes[at], nodes[r]) for r in of_values)
    return taken


def _takes_up(node: Node, reader: Node) -> bool:
    """True if an op gives the same for an Inf that a node made and for the number it was."""
    wider = reader.op in _BOUNDS and reader.run != node.run
    return reader.op in _TAKES_UP and not (wider or reader.ended)


def _spoils(nodes: Sequence[Node], of: int, at: int) -> bool:
    """True if a node read a value that was not finite, in a loop also from an earlier round."""
    pairs = enumerate(zip(nodes[of].loops, nodes[at].loops, strict=False))
    around_both = min(len(nodes[of].loops), len(nodes[at].loops))
    shared = next((depth for depth, (a, b) in pairs if a != b), around_both)
    rounds, now = nodes[of].first[:shared], nodes[at].first[:shared]
    return bool(nodes[of].bad) and (rounds < now or (rounds == now and of < at))


def _readers(nodes: Sequence[Node]) -> list[list[int]]:
    """For each node, those after it that read its result."""
    readers: list[list[int]] = [[] for _ in nodes]
    for at, node in enumerate(nodes):
        for i in node.inputs:
            if i < at:
                readers[i].append(at)
    return readers


def _reaching(
    nodes: Sequence[Node], readers: Sequence[Sequence[int]], tests: bool = True
) -> list[bool]:
    """For each node, True if its values are not finite and stay so up to an end."""
    # An end is a value that the program returns, or that is tested for being finite; or one that no
    # op reads and that is not `dropped`, or that `tests` alone read; neither of them `late`.
    reaches = [False] * len(nodes)
    for at in range(len(nodes) - 1, -1, -1):
        if nodes[at].bad:
            of_values = [r for r in readers[at] if nodes[r].value]
            asked = any(nodes[r].asks for r in readers[at])
            unread = not (of_values if tests else readers[at])
            dropped = nodes[at].dropped and not readers[at]
            ends = asked or nodes[at].returned or (unread and not (nodes[at].late or dropped))
            reaches[at] = ends or any(reaches[r] for r in of_values)
    return reaches


def _of(nodes: Sequence[Node], at: int) -> Blame:
    node = nodes[at]
    if node.spoiled:
        return Blame(at, at, "input", f"{node.spoiled} is not finite before any op runs")
    if node.burst:
        top = FORMATS[node.run].max if node.run in FORMATS else math.inf
        reads = node.cast and not node.of_result
        wider = "in float32 it is finite" if node.tried else UNTRIED_WIDE
        why = f"its result is beyond {node.run}'s largest number, {top:g}; {wider}"
        return Blame(at, at, "overflow", CAST.format(node.run) if reads else why)
    if (cause := _saturated(nodes, at)) is not None:
        found = nodes[cause]
        why = f"its largest result is 1 in {found.run}, and below 1 in float32"
        if _reads_cast(found):
            why = f"the largest value of an input of it becomes 1 when it is cast to {found.run}"
        return Blame(cause, at, "saturation", why)
    if (cause := _cause(nodes, at)) is not None:
        found = nodes[cause]
        if found.numbers:
            why = f"the constant {lost_constants(found.numbers, found.run)}"
            why = why.replace(" is zero", ", which keeps a value from zero, is zero")
            return Blame(cause, at, "number", why)
        lost = f"{found.vanished:.0%} of"
        why = f"{lost} its results are zero in {found.run} and are not in float32"
        if _reads_cast(found):
            why = f"{lost} an input of it becomes zero when it is cast to {found.run}"
        return Blame(cause, at, "underflow", why)
    wider = " or wider" if node.tried and node.run != "bfloat16" else f"; {UNTRIED_WIDE}"
    why = f"its inputs are finite and its result is not, in {node.run or 'its dtype'}{wider}"
    return Blame(at, at, "operation", why)


def _reads_cast(node: Node) -> bool:
    """True of a cast of what an op reads; one that the program makes is an op itself."""
    return node.cast and node.op != "to" and not node.of_result


def _saturated(nodes: Sequence[Node], at: int) -> int | None:
    """The node whose dtype made ones, of which others made what the node `at` cannot take."""
    # The nearest; but 1 - p also has ones, where p is near 0, beside the zeros that p's ones make.
    front, seen = {i for i in nodes[at].inputs if i < at}, set[int]()
    differences: list[int] = []
    while front:
        ones = sorted(i for i in front if nodes[i].ones)
        if firm := [i for i in ones if nodes[i].op not in ("sub", "rsub", "add")]:
            return firm[0]
        differences += ones
        seen |= front
        through = (f for f in front if nodes[f].cast or nodes[f].op in OF_ONE)
        front = {i for f in through for i in nodes[f].inputs if i < f} - seen
    return differences[0] if differences else None


def _cause(nodes: Sequence[Node], at: int) -> int | None:
    """The node before `at` whose dtype lost something, from which `at` may have its 0 or 1."""
    # The nearest that lost most of its values or a number; else the one that lost the most.
    divisors = nodes[at].divisors
    seen, front = {at}, [i for i in (nodes[at].inputs if divisors is None else divisors) if i < at]
    found: list[int] = []
    for _ in range(_STEPS):
        for i in sorted(front, reverse=True):
            if nodes[i].numbers or nodes[i].vanished > _MOST:
                return i
            if nodes[i].vanished > 0:
                found.append(i)
        seen.update(front)
        before = {i for of in front if not nodes[of].regular for i in nodes[of].inputs if i < of}
        front = sorted(before - seen)
    return max(found, key=lambda i: nodes[i].vanished, default=None)


def tell_nothing_found(why: str = "") -> None:
    """Say on standard error why `locate` returns None, which has no words of its own."""
    with suppress(OSError, ValueError):  # it may be closed
        print(f"locate: {why or _HEALTHY}", file=sys.stderr)


_HEALTHY = "no op made an Inf or NaN of finite numbers"
