"""A program's twin: the same equations, and beside its results what they were, measured.

    closed jaxpr, groups of equations -> Twin;  jit(twin.run)(arrays) -> measurements

The twin is another program than the one whose numbers are asked for, so that one stays as it is;
XLA may fuse the two differently, and last digits of what is measured may be others. The equation
that ends a call becomes an event, and so do casts and products that make float16: the largest
magnitude of its result, a sample of it, and, in float16, what float32 makes of the same operands.
What other equations read and make is followed, for the events around them. Loops and branches hand
out what was measured inside.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polymp.backends.jax import compat
from polymp.backends.jax.autocast.evaluate import update_in
from polymp.backends.jax.autocast.op_facts import CONTRACTIONS, FREE, LAYOUT
from polymp.backends.jax.diagnostics.call_site import Scope, Scopes
from polymp.backends.jax.diagnostics.explain import Site, inside
from polymp.diagnostics.call import BACKWARD, FORWARD
from polymp.diagnostics.magnitudes import BINS, SHIFT
from polymp.dtypes import FORMATS

# Of a larger array, every n-th value is in the sample, about as many as these.
SAMPLE = 2048

# In a sample, the place of a value that was not there: a loop that did not run, another branch.
ABSENT = BINS


class Event(NamedTuple):
    """What is known of a measured equation before it runs.

    Attributes:
        site: the equation, where it stands.
        inputs: events whose results it reads.
        outside: inputs of the program that it reads, by their places.
        later: events of the same loop whose results it reads one round later.
        loops: around it, the outermost first: where each stands, and whether it is a `while`.
        format: of its results; "" if they are no floats.
        given: True if it reads an infinite number of the program.
        group: of the call that it ends; None of any other.
    """

    site: Site
    inputs: tuple[int, ...]
    outside: tuple[int, ...]
    later: tuple[int, ...]
    loops: tuple[tuple[tuple[int, ...], bool], ...]
    format: str
    given: bool
    group: int | None


class Facts(NamedTuple):
    """What was measured of an event, as arrays; with one axis more inside of a `scan`.

    Attributes:
        peak: float32 [], the largest magnitude; NaN if a value is NaN, -1 if nothing ran; float64
            of float64.
        lost: float32 [3], of float16 results: the largest magnitude in float32, and the shares of
            values that became Inf and zero; empty for others.
        sample: int32 [n], bins of the values; empty but of the end of a call.
        operands: float32 [k, 5], what it was given, where that is asked for; else empty.
        when: int32 [w], the round of each `while` around it in which its result was first not
            finite.
    """

    peak: Any
    lost: Any
    sample: Any
    operands: Any
    when: Any


class _Value(NamedTuple):
    """Where a value of the program comes from: events, inputs, and what loops carry around."""

    events: frozenset[int] = frozenset()
    outside: frozenset[int] = frozenset()
    given: bool = False
    carried: frozenset[tuple[tuple[int, ...], int]] = frozenset()

    @classmethod
    def of_all(cls, many: "Iterable[_Value]") -> "_Value":
        """Where what is made of several values comes from."""
        events, outside, given, carried = zip(*many, strict=True)
        none: frozenset[Any] = frozenset()
        return cls(none.union(*events), none.union(*outside), any(given), none.union(*carried))


_NOWHERE = _Value()


class Twin:
    """A program and what is measured in it; `run` is to be traced once, and fills the attributes.

    Args:
        closed: the program.
        groups: by equation, as (parent, id), the number of the call that it ends.
        sites: of its equations, by the same.
        ask: an event whose operands are measured, too.

    Attributes:
        events: in order.
        results: where the results of the program come from.
        handed: events of the backward pass whose results the rest of the program reads.
    """

    def __init__(
        self,
        closed: Any,
        groups: Mapping[tuple[Any, int], int],
        sites: Mapping[tuple[Any, int], Site],
        ask: int | None = None,
    ) -> None:
        self.closed = closed
        self.groups = groups
        self.sites = sites
        self.ask = ask
        self.events: list[Event] = []
        self.results: list[_Value] = []
        self.handed: set[int] = set()
        self._loops: list[tuple[tuple[int, ...], bool]] = []
        self._carried: dict[int, frozenset[tuple[tuple[int, ...], int]]] = {}  # read by an event

    def run(self, arrays: Sequence[Any]) -> tuple[list[Facts], list[Any]]:
        """The facts of all events, in order, and the largest magnitudes of inputs and constants."""
        self.events, self.handed, self._loops = [], set(), []
        jaxpr, consts = compat.opened(self.closed)
        constvars, invars = compat.binders(self.closed)
        given = (*invars, *constvars)
        known = {v: _Value(outside=frozenset([at])) for at, v in enumerate(given)}
        values = dict(zip(constvars, consts, strict=True)) | dict(zip(invars, arrays, strict=True))
        facts = self._eval(jaxpr, values, known, ())
        self.results = [self._of(v, known) for v in jaxpr.outvars]
        outside = (*arrays, *consts)
        return facts, [_peak(x) if is_measured(x) else jnp.float32(0) for x in outside]

    def _of(self, atom: Any, known: Mapping[Any, _Value]) -> _Value:
        if hasattr(atom, "val"):
            number = np.asarray(atom.val)
            return _Value(given=number.dtype.kind == "f" and not np.isfinite(number).all())
        return known.get(atom, _NOWHERE)

    def _eval(
        self, jaxpr: Any, values: dict[Any, Any], known: dict[Any, _Value], parent: tuple[int, ...]
    ) -> list[Facts]:
        """Evaluate equations; the facts of the events among them and inside of them, in order."""
        facts: list[Facts] = []

        def read(atom: Any) -> Any:
            return atom.val if hasattr(atom, "val") else values[atom]

        for at, eqn in enumerate(jaxpr.eqns):
            args = [read(v) for v in eqn.invars]
            origins = [self._of(v, known) for v in eqn.invars]
            place = (*parent, at)
            with eqn.ctx.manager:
                name = eqn.primitive.name
                if name in _WHOLE or not list(inside(eqn)):
                    outs, found, came = self._leaf(eqn, args, origins, parent)
                elif name == "scan":
                    outs, found, came = self._scan(eqn, args, origins, place)
                elif name == "while":
                    outs, found, came = self._while(eqn, args, origins, place)
                elif name == "cond":
                    outs, found, came = self._cond(eqn, args, origins, place)
                else:
                    ((program, _, _),) = inside(eqn)
                    closed = compat.close(program)
                    outs, found, came = self._inner(closed, args, origins, (*place, 0))
            facts += found
            for v, out, origin in zip(eqn.outvars, outs, came, strict=True):
                values[v], known[v] = out, origin
        values["results"] = [read(v) for v in jaxpr.outvars]
        known["results"] = [self._of(v, known) for v in jaxpr.outvars]  # type: ignore[assignment]
        return facts

    def _inner(
        self, closed: Any, args: Sequence[Any], origins: Sequence[_Value], place: tuple[int, ...]
    ) -> tuple[list[Any], list[Facts], list[_Value]]:
        """A program inside another."""
        jaxpr, consts = compat.opened(closed)
        constvars, invars = compat.binders(closed)
        values = dict(zip((*constvars, *invars), (*consts, *args), strict=True))
        known = dict.fromkeys(constvars, _NOWHERE) | dict(zip(invars, origins, strict=True))
        facts = self._eval(jaxpr, values, known, place)
        return values["results"], facts, known["results"]  # type: ignore[return-value]

    def _leaf(
        self, eqn: Any, args: list[Any], origins: list[_Value], parent: tuple[int, ...]
    ) -> tuple[Sequence[Any], list[Facts], list[_Value]]:
        outs = compat.put(eqn.primitive, args, eqn.params)
        through = _Value.of_all([_NOWHERE, *origins])
        key = parent, id(eqn)
        site = self.sites.get(key)
        apart = site is None and eqn.primitive.name == "shard_map"  # what is inside is not measured
        if apart:
            written = eqn.source_info.traceback
            site = Site(eqn, Scopes().inside(Scope(), eqn.source_info.name_stack), 1, frozenset(),
                        parent, written)  # fmt: skip
        made = [x for x in outs if is_measured(x)]
        group = self.groups.get(key) if made else None
        alone = eqn.primitive.name in _ALONE and outs[0].dtype == np.float16
        if site is not None and site.scope.direction == FORWARD:
            events = self.events
            back = (n for n in through.events if events[n].site.scope.direction == BACKWARD)
            self.handed.update(back)
        reads = any(is_measured(x) for x in args)
        tells = reads and not made and not _is_layout(eqn)
        if site is None or not reads or not (group is not None or alone or tells or apart):
            return outs, [], [through] * len(outs)
        number = len(self.events)
        event = Event(
            site, tuple(sorted(through.events)), tuple(sorted(through.outside)), (),
            tuple(self._loops), made[0].dtype.name if made else "", through.given, group,
        )  # fmt: skip
        self.events.append(event)
        self._carried[number] = through.carried
        nothing = jnp.zeros(0, jnp.float32)
        fact = Facts(
            _peak(*made) if made else jnp.float32(-1),
            self._lost(eqn, args, outs) if event.format == "float16" else nothing,
            _sample(made[0]) if group is not None else nothing.astype(jnp.int32),
            _operands(eqn, args) if number == self.ask else jnp.zeros((0, 5)),
            jnp.zeros(0, jnp.int32),
        )  # fmt: skip
        came = _Value(frozenset([number]))
        return outs, [fact], [came] * len(outs)

    def _lost(self, eqn: Any, args: list[Any], outs: Sequence[Any]) -> Any:
        """What float16 lost, by the same equation on the same operands in float32."""
        wide = _in_float32(eqn, args)
        if wide is None:
            return jnp.zeros(0, jnp.float32)
        some, few = _few(wide), _few(outs[0]).astype(jnp.float32)
        burst = jnp.mean((jnp.isinf(few) & jnp.isfinite(some)).astype(jnp.float32))
        vanished = jnp.mean(((few == 0) & (some != 0)).astype(jnp.float32))
        return jnp.stack([_peak(wide), burst, vanished])

    # Control

    def _scan(
        self, eqn: Any, args: list[Any], origins: list[_Value], place: tuple[int, ...]
    ) -> tuple[Sequence[Any], list[Facts], list[_Value]]:
        params = eqn.params
        consts, carries = compat.scan_sizes(params)
        came: list[_Value] = []
        first = len(self.events)
        inner = _carrying(origins, place, consts, consts + carries)

        def body(carry: Any, xs: Any) -> Any:
            del self.events[first:]  # jax may trace it again
            given = [*args[:consts], *carry, *xs]
            with self._loop(place, False):
                outs, facts, found = self._inner(params["jaxpr"], given, inner, (*place, 0))
            came[:] = found
            return tuple(outs[:carries]), (tuple(outs[carries:]), facts)

        start, xs = tuple(args[consts : consts + carries]), tuple(args[consts + carries :])
        carry, (ys, facts) = lax.scan(
            body, start, xs, length=params["length"], reverse=params["reverse"]
        )
        if params["reverse"]:  # rounds in the order in which they ran
            facts = jax.tree.map(lambda x: x[::-1], facts)
        self._again(first, place, came[:carries])
        return [*carry, *ys], facts, came

    def _again(self, first: int, place: tuple[int, ...], after: Sequence[_Value]) -> None:
        """Note which events of a loop read what others of it left in the round before."""
        for number, now in enumerate(after):
            for at in range(first, len(self.events)):
                if (place, number) in self._carried[at]:
                    event = self.events[at]
                    later = tuple(sorted({*event.later, *now.events}))
                    self.events[at] = event._replace(later=later)

    @contextmanager
    def _loop(self, place: tuple[int, ...], counts: bool) -> Iterator[None]:
        self._loops.append((place, counts))
        try:
            yield
        finally:
            self._loops.pop()

    def _while(
        self, eqn: Any, args: list[Any], origins: list[_Value], place: tuple[int, ...]
    ) -> tuple[Sequence[Any], list[Facts], list[_Value]]:
        params = eqn.params
        of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
        tested, fixed = args[:of_test], args[of_test : of_test + of_body]
        start = tuple(args[of_test + of_body :])
        came: list[_Value] = []
        first = len(self.events)
        inner = _carrying(origins, place, of_test + of_body, len(origins))[of_test:]

        def round_(state: Any) -> tuple[tuple[Any, ...], list[Facts]]:
            del self.events[first:]  # jax may trace it again
            with self._loop(place, True):
                outs, facts, found = self._inner(
                    params["body_jaxpr"], [*fixed, *state], inner, (*place, 0)
                )
            facts = [fact._replace(when=_outer(fact.when)) for fact in facts]
            came[:] = found
            return tuple(outs), facts

        shapes = jax.eval_shape(round_, start)[1]

        def body(state: Any) -> Any:
            state, before, number = state
            state, facts = round_(state)
            after = [_after(*both, number) for both in zip(before, facts, strict=True)]
            return state, after, number + 1

        def test(state: Any) -> Any:
            kept = len(self.events)
            (going,), _, _ = self._inner(
                params["cond_jaxpr"], [*tested, *state[0]],
                [*origins[:of_test], *origins[of_test + of_body :]], (*place, 1),
            )  # fmt: skip
            del self.events[kept:]
            return going

        nothing = list(map(_absent, shapes))
        outs, facts, _ = lax.while_loop(test, body, (start, nothing, jnp.int32(0)))
        self._again(first, place, came)
        return outs, facts, came

    def _cond(
        self, eqn: Any, args: list[Any], origins: list[_Value], place: tuple[int, ...]
    ) -> tuple[Sequence[Any], list[Facts], list[_Value]]:
        which, *given = args
        branches = eqn.params["branches"]
        first = len(self.events)
        shapes: list[list[Facts]] = []
        spans: list[list[Event]] = []
        came: list[list[_Value]] = []
        for number, branch in enumerate(branches):  # which events each has
            start = len(self.events)

            def shape(
                given: Any, branch: Any = branch, number: int = number, came: Any = came
            ) -> Any:
                _, facts, found = self._inner(branch, given, origins[1:], (*place, number))
                came.append(found)
                return facts

            shapes.append(jax.eval_shape(shape, given))
            spans.append(self.events[start:])

        def branch_of(number: int) -> Callable[..., Any]:
            def run(*given: Any) -> Any:
                self.events[first:] = chain.from_iterable(spans[:number])
                outs, facts, _ = self._inner(branches[number], given, origins[1:], (*place, number))
                parts = [list(map(_absent, found)) for found in shapes]
                parts[number] = facts
                return tuple(outs), list(chain.from_iterable(parts))

            return run

        outs, facts = lax.switch(which, [branch_of(n) for n in range(len(branches))], *given)
        self.events[first:] = chain.from_iterable(spans)
        return outs, facts, [_Value.of_all(values) for values in zip(*came, strict=True)]


def _carrying(
    origins: Sequence[_Value], place: tuple[int, ...], start: int, stop: int
) -> list[_Value]:
    """Where the operands of a loop's body come from; those from start to stop are carried."""
    found = list(origins)
    for number, at in enumerate(range(start, stop)):
        carried = origins[at].carried | {(place, number)}
        found[at] = origins[at]._replace(carried=carried)
    return found


# Equations that are events wherever they make float16, though a call may go on after them.
_ALONE = CONTRACTIONS | {"convert_element_type", "polymp_contraction"}

# Equations with a program in them that are run as one.
_WHOLE = frozenset({"shard_map", "polymp_contraction"})


def _is_layout(eqn: Any) -> bool:
    return eqn.primitive.name in LAYOUT


def is_measured(x: Any) -> bool:
    """True for a float array with values."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and dtype.name in FORMATS and math.prod(np.shape(x)) > 0


def _peak(*arrays: Any) -> Any:
    """The largest magnitude in some arrays, NaN if there is one; float32 [], or float64 []."""
    peaks = [jnp.max(jnp.abs(x)) for x in arrays]
    peaks = [x if x.dtype == np.float64 else x.astype(jnp.float32) for x in peaks]
    return functools.reduce(jnp.maximum, peaks)


def _few(x: Any) -> Any:
    """A sample of an array's values, in one row."""
    flat = jnp.ravel(x)
    return flat if flat.size <= SAMPLE else flat[:: -(-flat.size // SAMPLE)]


def _sample(x: Any) -> Any:
    """The bins of a sample of an array's values; int32."""
    bits = lax.bitcast_convert_type(_few(x).astype(jnp.float32), jnp.int32)
    return lax.shift_right_logical(bits, np.int32(SHIFT)) & (BINS - 1)


def _operands(eqn: Any, args: list[Any]) -> Any:
    """What was given to an equation, numbers of the program aside; float32 [k, 5]."""
    read = [x for v, x in zip(eqn.invars, args, strict=True) if not hasattr(v, "val")]
    return jnp.stack([_operand(x) for x in read if is_measured(x)])


def _operand(x: Any) -> Any:
    """Smallest, largest finite magnitude, shares of zeros, Inf and NaN; float32 [5]."""
    size = jnp.abs(jnp.ravel(x).astype(jnp.float32))
    finite = jnp.isfinite(size)
    some = jnp.where(finite & (size > 0), size, jnp.inf)
    most = jnp.where(finite, size, 0)
    shares = [
        jnp.mean(s.astype(jnp.float32)) for s in (size == 0, jnp.isinf(size), jnp.isnan(size))
    ]
    return jnp.stack([jnp.min(some), jnp.max(most), *shares])


def _in_float32(eqn: Any, args: list[Any]) -> Any:
    """The first result of an equation whose float16 is float32; None if it has no such form."""
    wide = [_wider(x) for x in args]
    if eqn.primitive.name == "convert_element_type":
        return wide[0] if is_measured(wide[0]) else None
    if eqn.primitive.name not in _WIDENS:
        return None
    params = {key: _wider_param(value) for key, value in eqn.params.items()}
    if params.get("update_jaxpr") is not None:
        params["update_jaxpr"] = update_in(params["update_jaxpr"], "float32")
    return compat.put(eqn.primitive, wide, params)[0]


_WIDENS = FREE | {"polymp_contraction"}


def _wider(x: Any) -> Any:
    half = getattr(x, "dtype", None) == np.float16
    return jnp.asarray(x).astype(jnp.float32) if half else x


def _wider_param(value: Any) -> Any:
    if isinstance(value, str):
        return "float32" if value == "float16" else value
    if isinstance(value, np.dtype) and value == np.float16:
        return np.dtype(np.float32)
    return value


def _outer(when: Any) -> Any:
    """The rounds of the loops around an event, with the first round of one more."""
    return jnp.concatenate([jnp.zeros((*when.shape[:-1], 1), jnp.int32), when], -1)


def _after(before: Facts, now: Facts, number: Any) -> Facts:
    """The facts of all rounds of a loop so far; the sample is that of the last.

    What was lost is that of the rounds up to the first whose result is not finite; the operands
    are those of that round, or of the last.
    """
    good = jnp.isfinite(before.peak)[..., None]
    return Facts(
        jnp.maximum(before.peak, now.peak),
        jnp.where(good, jnp.maximum(before.lost, now.lost), before.lost),
        now.sample,
        jnp.where(good[..., None], now.operands, before.operands),
        jnp.where(good, now.when.at[..., 0].set(number), before.when),
    )


def _absent(shape: Facts) -> Facts:
    """The facts of an event that did not run."""
    return Facts(
        jnp.full(shape.peak.shape, -1, shape.peak.dtype),
        jnp.zeros(shape.lost.shape),
        jnp.full(shape.sample.shape, ABSENT, jnp.int32),
        jnp.zeros(shape.operands.shape),
        jnp.zeros(shape.when.shape, jnp.int32),
    )
