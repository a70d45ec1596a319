"""A program's twin: the same equations, and beside its results what they were, measured.

    closed jaxpr, groups of equations -> Twin;  jit(twin.run)(arrays) -> measurements

The twin is another program than the one whose numbers are asked for, so that one stays as it is;
XLA may fuse the two differently, and last digits of what is measured may be others. The equation
that ends a call becomes an event, and so do casts and products that make float16: the largest
magnitude of its result, a sample of it, and, in float16, what float32 makes of the same operands.
What other equations read and make is followed, for the events around them. Loops and branches hand
out what was measured inside.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import ad

from polymp.backends.jax import compat
from polymp.backends.jax.autocast.fp8_operands import VERBS, In8Bits, product_of
from polymp.backends.jax.autocast.known_functions import CONTRACTIONS, LAYOUT, OPAQUE, OURS
from polymp.backends.jax.compat.programs import Atom, ClosedProgram, Equation
from polymp.backends.jax.diagnostics import measures
from polymp.backends.jax.diagnostics.call_site import (
    Scope,
    Scopes,
    Site,
    equations,
    is_update,
    source,
)
from polymp.backends.jax.diagnostics.explain import with_sites
from polymp.backends.jax.diagnostics.measures import Facts, difference, is_measured
from polymp.backends.jax.diagnostics.traced_call import Record, Traced, traced
from polymp.backends.jax.jaxprs import Inner, inside, interpreted, scanned
from polymp.diagnostics.call_record import BACKWARD, FORWARD, Call
from polymp.diagnostics.fp8_loss import Measurement
from polymp.fp8 import loss
from polymp.rules.policy import Policy
from polymp.rules.row import LOW


class Origin(NamedTuple):
    """Where a value of the program comes from: events, inputs, and what loops carry around."""

    events: frozenset[int] = frozenset()
    outside: frozenset[int] = frozenset()
    given: bool = False
    carried: frozenset[tuple[tuple[int, ...], int]] = frozenset()

    @classmethod
    def of_all(cls, many: "Iterable[Origin]") -> "Origin":
        """Where what is made of several values comes from."""
        events, outside, given, carried = zip(*many, strict=True)
        return cls(
            frozenset().union(*events),
            frozenset().union(*outside),
            any(given),
            frozenset().union(*carried),
        )


class Tracked(NamedTuple):
    """A value of the twin, and where it comes from."""

    value: jax.Array
    origin: Origin


# What an equation, or a program, makes: results, and the facts of the events in it.
_Made = tuple[Sequence[Tracked], list[Facts]]


# What a measured `while` carries: its own state, the facts of the rounds so far, and their number.
_Carried = tuple[list[jax.Array], list[Facts], jax.Array]


# What was not measured.
_NOTHING: Any = np.empty(0, np.float32)
_NO_BINS: Any = np.empty(0, np.int32)
_NO_OPERANDS: Any = np.empty((0, 6), np.float32)
_UNMEASURED: Any = (np.float32(-1), _NOTHING, _NO_BINS, _NO_OPERANDS, _NO_BINS, *[_NOTHING] * 3)


# Of an equation: what it is inside of, as `Site.parent`, and its id.
Key = tuple[tuple[int, ...], int]


class Twin:
    """A program and what is measured in it; `run` is traced once, and fills the attributes."""

    def __init__(
        self,
        closed: ClosedProgram,
        groups: Mapping[tuple[tuple[int, ...], int], int],
        sites: Mapping[tuple[tuple[int, ...], int], Site],
        ask: int | None = None,
        asked: Collection[tuple[tuple[int, ...], int]] = (),
        samples: bool = True,
        rounding: bool = False,
        wide: bool = False,
        record: Record | None = None,
    ) -> None:
        self.closed = closed
        self._record = record
        self.samples = samples and not wide
        self.rounding = rounding
        self.wide = wide
        self.groups = groups
        self.sites = sites
        self.ask, self.asked = ask, asked
        self.given: list[tuple[str, tuple[int, ...], int | None]] = []
        self.events: list[Event] = []
        self.results: list[Origin] = []
        self.handed: set[int] = set()
        self._loops: list[tuple[tuple[int, ...], bool]] = []
        # What the call that is asked for made, and of which values that it was given; by id.
        self._came: dict[int, tuple[jax.Array, list[Tracked]]] = {}
        self._outside: Sequence[jax.Array] = ()
        self._carried: dict[int, frozenset[tuple[tuple[int, ...], int]]] = {}  # read by an event

    def run(self, arrays: Sequence[jax.Array]) -> tuple[list[Facts], list[jax.Array]]:
        """The facts of all events, in order, and the largest magnitudes of inputs and constants."""
        self.events, self.handed, self._loops = [], set(), []
        self._came = {}
        outside = [*arrays, *compat.opened(self.closed)[1]]
        if self.wide:
            outside = list(map(measures.wider, outside))
        self._outside = tuple(outside)
        given = [Tracked(x, Origin(outside=frozenset([at]))) for at, x in enumerate(outside)]
        count = len(arrays)
        results, facts = self._program(self.closed, given[:count], (), given[count:])
        self.results = origins_of(results)
        peaks = [measures.peak(x) if is_measured(x) else jnp.float32(0) for x in outside]
        return facts, peaks

    def _program(
        self,
        closed: ClosedProgram,
        given: Sequence[Tracked],
        place: tuple[int, ...],
        consts: Sequence[Tracked] | None = None,
    ) -> _Made:
        """A program, with the facts of the events in it, in order."""
        facts: list[Facts] = []
        if consts is None:
            consts = [Tracked(x, NOWHERE) for x in compat.opened(closed)[1]]

        def equation(at: int, eqn: Equation, read: list[Tracked]) -> Sequence[Tracked]:
            with eqn.ctx.manager:
                outs, found = self._equation(eqn, read, place, at)
            facts.extend(found)
            return outs

        made = interpreted(closed, given, equation, of_number, consts)
        if self.wide:  # numbers and constants among the results
            made = [Tracked(measures.wider(x.value), x.origin) for x in made]
        return made, facts

    def _equation(
        self, eqn: Equation, read: list[Tracked], parent: tuple[int, ...], at: int
    ) -> _Made:
        programs = [] if eqn.primitive.name in _WHOLE else inside(eqn)
        place = (*parent, at)
        if not programs:
            return self._leaf(eqn, read, parent)
        match eqn.primitive.name:
            case "scan":
                return self._scan(eqn, programs[0], read, place)
            case "while":
                return self._while(programs, read, place)
            case "cond":
                return self._cond(programs, read, place)
        return self._program(programs[0].closed, read, (*place, 0))

    def _leaf(self, eqn: Equation, read: list[Tracked], parent: tuple[int, ...]) -> _Made:
        args, key = values_of(read), (parent, id(eqn))
        outs = self._results(eqn, args, key)
        through = Origin.of_all([NOWHERE, *origins_of(read)])
        given = self._of_call(eqn, read) if key in self.asked else []
        self._came.update((id(x), (x, given)) for x in outs if key in self.asked)
        site = self.sites.get(key)
        apart = site is None and eqn.primitive.name == "shard_map"  # what is inside is not measured
        if apart:
            written = eqn.source_info.traceback
            site = Site(eqn, Scopes().inside(Scope(), eqn.source_info.name_stack), 1, frozenset(),
                        parent, written)  # fmt: skip
        made = [x for x in outs if is_measured(x)]
        group = self.groups.get(key) if made else None
        alone = eqn.primitive.name in _ALONE and eqn.outvars[0].aval.dtype == np.float16
        if site is not None and site.scope.direction == FORWARD:
            events = self.events
            back = (n for n in through.events if events[n].site.scope.direction == BACKWARD)
            self.handed.update(back)
        some = any(is_measured(x) for x in args)
        tried = is_tried(eqn)
        tells = some and not made and not _is_layout(eqn)
        counts = group is not None or (some and (alone or tells or apart or tried))
        if site is None or not counts:
            return [Tracked(x, through) for x in outs], []
        number = len(self.events)
        if number == self.ask:
            places = {id(x): at for at, x in enumerate(self._outside)}
            given = [x for x in given if not self._own(x.origin, site)]
            self.given = [
                (x.value.dtype.name, tuple(x.value.shape), places.get(id(x.value))) for x in given
            ]
        event = Event(
            site, tuple(sorted(through.events)), tuple(sorted(through.outside)), (),
            tuple(self._loops), made[0].dtype.name if made else "", through.given, group,
            () if self._record is None else _numbers(site, self._record),
        )  # fmt: skip
        self.events.append(event)
        self._carried[number] = through.carried
        came = Origin(frozenset([number]))
        fact = self._fact(eqn, args, outs, made, given)
        return [Tracked(x, came) for x in outs], [fact]

    def _results(self, eqn: Equation, args: list[jax.Array], key: Key) -> list[jax.Array]:
        if self.wide:
            return measures.results_in_float32(eqn, args)
        return list(compat.put(eqn.primitive, args, eqn.params))

    def _fact(
        self,
        eqn: Equation,
        args: list[jax.Array],
        outs: Sequence[jax.Array],
        made: Sequence[jax.Array],
        given: Sequence[Tracked],
    ) -> Facts:
        """The facts of the latest event."""
        number, group = len(self.events) - 1, self.events[-1].group
        ends = made and group is not None
        return Facts(
            measures.peak(*made) if made else jnp.float32(-1),
            measures.lost(eqn, args, outs, self.events[-1].numbers)
            if self.events[-1].dtype in LOW
            else _NOTHING,
            measures.sample(made[0]) if group is not None and self.samples else _NO_BINS,
            measures.operands(values_of(given)) if number == self.ask and given else _NO_OPERANDS,
            _NO_BINS,
            loss_of(eqn, args) if is_tried(eqn) and not self.wide else _NOTHING,
            measures.rounding(eqn, args, outs) if ends and self.rounding else _NOTHING,
            measures.values(made[0]) if ends and (self.rounding or self.wide) else _NOTHING,
        )  # fmt: skip

    def _of_call(self, eqn: Equation, read: Sequence[Tracked]) -> list[Tracked]:
        """The values that its call was given, of which an equation makes its results."""
        counts = eqn.primitive.name == "gather"  # then the indices, too
        pairs = zip(eqn.invars, read, strict=True)
        arrays = [x for v, x in pairs if hasattr(x.value, "shape") and not hasattr(v, "val")]
        some = [x for x in arrays if is_measured(x.value) or counts]
        came = [y for x in some for y in self._came.get(id(x.value), (x.value, [x]))[1]]
        return list({id(x.value): x for x in came}.values())

    def _own(self, origin: Origin, site: Site) -> bool:
        """True for what a call has made for itself, such as a constant before the loop it is in."""
        scopes = (self.events[at].site.scope for at in origin.events)
        calls = {(scope.call, scope.direction) for scope in scopes}
        own = site.scope.call, site.scope.direction
        return bool(site.scope.call) and calls == {own} and not origin.outside

    # Control

    def _scan(
        self, eqn: Equation, body: Inner, read: list[Tracked], place: tuple[int, ...]
    ) -> _Made:
        came: list[Origin] = []
        first, origins = len(self.events), _carrying(body, read, place)

        def turn(_: None, values: list[jax.Array]) -> tuple[None, list[jax.Array], list[Facts]]:
            del self.events[first:]  # jax may trace it again
            with self._loop(place, False):
                outs, facts = self._program(body.closed, tracked(values, origins), (*place, 0))
            came[:] = origins_of(outs)
            return None, values_of(outs), facts

        outs, facts = scanned(eqn, turn, values_of(read), None)
        if eqn.params["reverse"]:  # rounds in the order in which they ran
            facts = jax.tree.map(lambda x: x[::-1], facts)
        return tracked(outs, self._again(first, place, came, body.carries)), facts

    def _again(
        self, first: int, place: tuple[int, ...], came: Sequence[Origin], carries: int
    ) -> list[Origin]:
        """Note what events, and results, of a loop have of what others left in the round before."""
        left = {(place, number): came[number] for number in range(carries)}

        def whole(now: Origin) -> Origin:
            return Origin.of_all([now, *map(left.__getitem__, now.carried & left.keys())])

        # A round may hand on what the one before it left elsewhere.
        while (more := {at: whole(now) for at, now in left.items()}) != left:
            left = more
        for at in range(first, len(self.events)):
            event, now = self.events[at], whole(Origin(carried=self._carried[at]))
            later = tuple(sorted({*event.later, *now.events}))
            self.events[at] = event._replace(later=later)
        return list(map(whole, came))

    @contextmanager
    def _loop(self, place: tuple[int, ...], counts: bool) -> Iterator[None]:
        self._loops.append((place, counts))
        try:
            yield
        finally:
            self._loops.pop()

    def _while(
        self, programs: Sequence[Inner], read: list[Tracked], place: tuple[int, ...]
    ) -> _Made:
        body, condition = programs
        tested = condition.of(read)[: condition.fixed]
        fixed, start, _ = body.split(values_of(read))
        came: list[Origin] = []
        first, origins = len(self.events), _carrying(body, read, place)

        def round_(state: Sequence[jax.Array]) -> tuple[list[jax.Array], list[Facts]]:
            del self.events[first:]  # jax may trace it again
            given = tracked([*fixed, *state], origins)
            with self._loop(place, True):
                outs, facts = self._program(body.closed, given, (*place, 0))
            came[:] = origins_of(outs)
            facts = [fact._replace(when=measures.outer(fact.when)) for fact in facts]
            return values_of(outs), facts

        shapes = jax.eval_shape(round_, start)[1]

        def body_of(carried: _Carried) -> _Carried:
            state, before, number = carried
            state, facts = round_(state)
            after = [measures.after(*both, number) for both in zip(before, facts, strict=True)]
            return state, after, number + 1

        def test(state: _Carried) -> jax.Array:
            kept = len(self.events)
            now = tracked(state[0], origins_of(body.split(read)[1]))
            (going,), _ = self._program(condition.closed, [*tested, *now], (*place, 1))
            del self.events[kept:]
            return going.value

        nothing = list(map(measures.absent, shapes))
        outs, facts, _ = lax.while_loop(test, body_of, (start, nothing, jnp.int32(0)))
        return tracked(outs, self._again(first, place, came, body.carries)), facts

    def _cond(
        self, branches: Sequence[Inner], read: list[Tracked], place: tuple[int, ...]
    ) -> _Made:
        given = branches[0].of(read)
        values, origins = values_of(given), origins_of(given)
        came: list[list[Origin]] = []

        def made(number: int) -> tuple[ClosedProgram, list[Facts]]:
            """A branch that is measured, and the shapes of the facts of its events."""

            def run(*values: jax.Array) -> tuple[list[jax.Array], list[Facts]]:
                given = tracked(values, origins)
                outs, facts = self._program(branches[number].closed, given, (*place, number))
                came.append(origins_of(outs))
                return values_of(outs), facts

            program, (_, shapes) = jax.make_jaxpr(run, return_shape=True)(*values)
            return program, shapes

        # Traced once: else a branch in a branch in a branch is traced eight times.
        programs, shapes = zip(*map(made, range(len(branches))), strict=True)

        def branch_of(number: int) -> Callable[..., object]:
            def run(*values: jax.Array) -> tuple[list[jax.Array], list[Facts]]:
                made = jaxpr_as_fun(programs[number])(*values)
                count = len(came[number])
                parts = [list(map(measures.absent, found)) for found in shapes]
                parts[number] = jax.tree.unflatten(jax.tree.structure(shapes[number]), made[count:])
                return made[:count], list(chain.from_iterable(parts))

            return run

        which = read[0].value
        outs, facts = lax.switch(which, list(map(branch_of, range(len(branches)))), *values)
        return tracked(outs, map(Origin.of_all, zip(*came, strict=True))), facts


def _carrying(body: Inner, read: Sequence[Tracked], place: tuple[int, ...]) -> list[Origin]:
    """Where the inputs of a loop's body come from; some of them are carried around."""
    found = origins_of(body.of(read))
    for number, at in enumerate(range(body.fixed, body.fixed + body.carries)):
        found[at] = found[at]._replace(carried=found[at].carried | {(place, number)})
    return found


# Equations that are events wherever they make float16, though a call may go on after them.
_ALONE = CONTRACTIONS | OURS | {"convert_element_type"}


# Equations with a program in them that are run as one.
_WHOLE = OURS | {"shard_map"}


def _is_layout(eqn: Equation) -> bool:
    return eqn.primitive.name in LAYOUT


# Effects on the loss: the gradient of the loss by a share of each call's rounding errors.


class MovedTwin(Twin):
    """A twin whose low results are moved by shares of their errors; it hands out lone numbers."""

    def __init__(
        self,
        closed: ClosedProgram,
        groups: Mapping[Key, int],
        sites: Mapping[Key, Site],
        calls: Mapping[Key, int],
    ) -> None:
        super().__init__(closed, groups, sites)
        self._calls = calls
        self._scopes = Scopes()
        self.moved: dict[int, int] = {}
        self.led_to: set[int] = set()

    def effects(self, arrays: Sequence[jax.Array], count: int) -> jax.Array:
        """By call, what its rounding changes the loss by, as a fraction of it, to first order.

        Of several losses it is the mean. NaN where it is not known; float32 [calls].
        """

        def change(shares: jax.Array) -> jax.Array:
            self._shares = shares
            facts, _ = self.run(arrays)
            made = [self._loss(at, facts) for at in self._losses()]
            losses = jnp.concatenate([jnp.zeros(1), *made])
            size = lax.stop_gradient(jnp.abs(losses))
            counts = (size > 0) & jnp.isfinite(size)
            parts = jnp.where(counts, losses / jnp.where(counts, size, 1), 0)
            return _AMPLIFIED * jnp.sum(parts) / jnp.maximum(jnp.sum(counts), 1)

        try:
            found = jax.grad(change)(jnp.zeros(count)) / _AMPLIFIED
        except NotImplementedError:  # an op that cannot be differentiated
            return jnp.full(count, jnp.nan)
        last = max(self._losses(), default=-1)
        known = [self.moved.get(at, last) < last for at in range(count)]
        return jnp.where(np.array(known, bool), found, jnp.nan)

    def _losses(self) -> list[int]:
        """The events that make losses: before each backward pass, the last that a move leads to."""
        back = np.cumsum([event.site.scope.direction == BACKWARD for event in self.events])
        last = {back[at]: at for at in sorted(self.led_to) if back[at] < back[-1]}
        return list(last.values())

    def _loss(self, at: int, facts: Sequence[Facts]) -> jax.Array:
        """The numbers that an event made; of a loop with no backward pass in it, the last one."""
        made, loops = jnp.ravel(facts[at].drift), self.events[at].loops
        back = (event for event in self.events if event.site.scope.direction == BACKWARD)
        return made if any(event.loops == loops for event in back) else made[-1:]

    def _equation(
        self, eqn: Equation, read: list[Tracked], parent: tuple[int, ...], at: int
    ) -> _Made:
        scope = self._scopes.inside(Scope(), eqn.source_info.name_stack)
        name, has_rule = eqn.primitive.name, eqn.primitive in ad.primitive_jvps or inside(eqn)
        if name == "while" or name in OPAQUE or scope.direction != FORWARD or not has_rule:
            read = [x._replace(value=lax.stop_gradient(x.value)) for x in read]
        return super()._equation(eqn, read, parent, at)

    def _results(self, eqn: Equation, args: list[jax.Array], key: Key) -> list[jax.Array]:
        outs = super()._results(eqn, args, key)
        in_while = any(counts for _, counts in self._loops)
        of = None if in_while or key not in self.sites else self._calls.get(key)
        if of is None or self.sites[key].scope.direction != FORWARD:
            return outs
        wide = measures.exact(eqn, args, outs)
        if wide is None:
            return outs
        self.moved.setdefault(of, len(self.events))
        off = outs[0].astype(jnp.float32) - wide
        off = lax.stop_gradient(jnp.where(jnp.isfinite(off), off, 0))
        return [outs[0] + (self._shares[of] * off).astype(outs[0].dtype), *outs[1:]]

    def _fact(
        self,
        eqn: Equation,
        args: list[jax.Array],
        outs: Sequence[jax.Array],
        made: Sequence[jax.Array],
        given: Sequence[Tracked],
    ) -> Facts:
        number, ends = len(self.events) - 1, self.events[-1].group is not None

        @jax.custom_jvp
        def value(x: jax.Array) -> jax.Array:
            return measures.values(x)

        def rule(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
            (x,), (tangent,) = primals, tangents
            if isinstance(tangent, jax.custom_derivatives.SymbolicZero):
                return value(x), compat.symbolic_zero(value(x))
            self.led_to.add(number)
            return jax.jvp(measures.values, (x,), (tangent,))

        value.defjvp(rule, symbolic_zeros=True)
        lone = ends and self.events[-1].site.scope.direction == FORWARD and made[0].size == 1
        rest = Facts(*_UNMEASURED)
        return rest._replace(drift=value(made[0])) if lone else rest


# So that gradients in float16 do not vanish.
_AMPLIFIED = 1024.0


# `Packed`: a compiled function whose results leave the device as one array for each dtype.
#
# A program that measures has hundreds of results of a few numbers each. To make an array of its
# own of each takes the host longer than the device needs to compute it.


class Packed:
    """A function of arrays, compiled; `run` returns its results packed, `read` takes them apart."""

    def __init__(
        self, fn: Callable[..., object], options: Mapping[str, bool | int] | None = None
    ) -> None:
        self._fn = fn
        self._kinds: list[tuple[str, tuple[int, ...]]] = []  # dtype and shape of each result
        self.run: Callable[..., dict[str, jax.Array]] = jax.jit(
            self._packed, compiler_options=None if options is None else dict(options)
        )

    def _packed(self, arrays: Sequence[jax.Array]) -> dict[str, jax.Array]:
        leaves, self._structure = jax.tree.flatten(self._fn(arrays))
        self._kinds = [(x.dtype.name, tuple(x.shape)) for x in leaves]
        rows: dict[str, list[jax.Array]] = {}
        for x in leaves:
            if x.size:
                rows.setdefault(x.dtype.name, []).append(lax.reshape(x, (x.size,)))
        return {dtype: lax.concatenate(many, 0) for dtype, many in rows.items()}

    def read(self, packed: Mapping[str, jax.Array]) -> Any:
        """Return the results of a call of `run` as numpy arrays. Waits for the device."""
        rows: dict[str, np.ndarray[Any, Any]] = jax.device_get(dict(packed))
        done: dict[str, int] = {}
        leaves = []
        for dtype, shape in self._kinds:
            start = done.setdefault(dtype, 0)
            done[dtype] += math.prod(shape)
            row = rows.get(dtype, np.empty(0, dtype))  # none if there are no values of it
            leaves.append(row[start : done[dtype]].reshape(shape))
        return jax.tree.unflatten(self._structure, leaves)


class MeasuredCall(NamedTuple):
    """A call as it was traced, with its twin."""

    traced: Traced
    calls: list[Call]  # its calls; by their numbers
    # the number of the call that an equation is part of, by (parent, id).
    of_event: dict[tuple[tuple[int, ...], int], int]
    twin: Twin  # what is run, once it was traced
    # the twin, compiled; its results are those of `Twin.run`, and of `MovedTwin.effects` where
    # rounding errors are measured.
    packed: Packed


# A call with a twin that measures it: the traced program, its calls, and what is compiled.


def inputs(program: MeasuredCall) -> Sequence[Atom]:
    """The variables of a program's inputs, and after them those of its constants."""
    constvars, invars = compat.binders(program.traced.closed)
    return *invars, *constvars


# Measured equations, and where the values that they read come from.


class Event(NamedTuple):
    """Facts about a measured equation before it runs."""

    site: Site  # the equation, where it stands
    inputs: tuple[int, ...]  # events whose results it reads
    outside: tuple[int, ...]  # inputs of the program that it reads, by their places
    later: tuple[int, ...]  # events of the same loop whose results it reads one round later
    # around it, the outermost first: where each stands, and whether it is a `while`.
    loops: tuple[tuple[tuple[int, ...], bool], ...]
    dtype: str  # of its results; "" if they are no floats
    given: bool  # True if it reads an infinite number of the program
    group: int | None  # of the call that it ends; None of any other
    # of the program that a low dtype makes 0 or 1, by the place among its operands
    numbers: tuple[tuple[int, float], ...]


def _numbers(site: Site, record: Record) -> tuple[tuple[int, float], ...]:
    """The constants among an equation's operands that became 0 or 1, as the program has them."""
    call, eqn = record.calls.get(site.scope.call), site.eqn
    if call is None or call.spelling.split(":")[1] != eqn.primitive.name:
        return ()
    forward = site.scope.direction == FORWARD  # a derivative may have another array there
    return tuple((at, x) for at, x in call.numbers if forward or hasattr(eqn.invars[at], "val"))


NOWHERE = Origin()


def tracked(values: Iterable[jax.Array], origins: Iterable[Origin]) -> list[Tracked]:
    """Values with where they come from."""
    return list(map(Tracked, values, origins))


def values_of(many: Iterable[Tracked]) -> list[jax.Array]:
    """The values alone."""
    return [x.value for x in many]


def origins_of(many: Iterable[Tracked]) -> list[Origin]:
    """Where they come from alone."""
    return [x.origin for x in many]


def of_number(x: jax.Array) -> Tracked:
    """A number of the program."""
    number = np.asarray(x)
    floats = jnp.issubdtype(number.dtype, jnp.floating)  # numpy does not know that bfloat16 is one
    infinite = floats and not np.isfinite(number).all()
    return Tracked(x, Origin(given=infinite))


# The losses of products, were they in 8 bits, measured in the twin of a program in bfloat16.
#
# A policy that is tried leaves on each product what its operands would be in 8 bits: their
# roles, and the axes of their scales. The products of the backward pass have them by the
# derivative rules of the contraction in 8 bits.


def is_tried(eqn: Equation) -> bool:
    """True for a product that runs low, and that a policy which is tried would run in 8 bits."""
    how: In8Bits | None = eqn.params.get("how")
    return eqn.primitive.name == "polymp_fp8_contraction" and how is not None and how.trial


def loss_of(eqn: Equation, args: Sequence[jax.Array]) -> jax.Array:
    """Measure what a product would lose in 8 bits."""
    how, params = eqn.params["how"], dict(eqn.params["params"])
    summed = params["dimension_numbers"][0]
    operands = [
        loss.Operand(x, part.role, how.axes(at, x.ndim, summed[at]), tuple(summed[at]))
        for at, (x, part) in enumerate(zip(args, how.both, strict=True))
    ]
    product = partial(
        lax.dot_general,
        dimension_numbers=params["dimension_numbers"],
        precision=lax.Precision.HIGHEST,
        preferred_element_type=np.dtype("float32"),
        out_sharding=params["out_sharding"],
    )
    return jnp.stack(loss.product_loss(VERBS, how.rules, operands, product))


def measurements(
    events: Sequence[Event], facts: Sequence[Facts], call_of: Callable[[Site], Call | None]
) -> Iterator[Measurement]:
    """Read what the products of a program would lose."""
    for event, fact in zip(events, facts, strict=True):
        call = call_of(event.site) if is_tried(event.site.eqn) else None
        if call is None or not np.any((fact.peak >= 0) | np.isnan(fact.peak)):  # not taken
            continue
        how: In8Bits = event.site.eqn.params["how"]
        roles = how.lhs.role, how.rhs.role
        for numbers in fact.fp8.reshape(-1, 5).tolist():
            site = call.op, call.module, call.source
            yield Measurement(site, product_of(roles), roles, numbers)


def measured(
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    once: bool = False,
    tried: Policy | None = None,
    rounding: bool = False,
) -> MeasuredCall:
    """A call, traced, with a twin that is not run yet."""
    found = traced(fn, args, kwargs, tried)
    calls: list[Call] = []
    of_event: dict[tuple[tuple[int, ...], int], int] = {}
    ends: dict[tuple[tuple[int, ...], int], int] = {}
    readers = _readers(found.closed, {})
    for call, sites in with_sites(found.closed, found.record, lambda v: is_measured(v.aval)):
        of_event.update(((s.parent, id(s.eqn)), len(calls)) for s in sites)
        floats = [s for s in sites if any(is_measured(v.aval) for v in s.eqn.outvars)]
        if floats and (once or not _updates(floats[-1])):
            last = _leaving(floats, sites, readers)
            ends.update(((s.parent, id(s.eqn)), len(calls)) for s in last)
        calls.append(call)
    places = {(s.parent, id(s.eqn)): s for s in equations(found.closed)}
    twin = Twin(
        found.closed, ends, places, samples=not once, rounding=rounding, record=found.record
    )
    wide = Twin(found.closed, ends, places, wide=True)

    moved = MovedTwin(found.closed, ends, places, of_event)

    def compared(arrays: Sequence[jax.Array]) -> tuple[list[Facts], list[jax.Array], jax.Array]:
        facts, peaks = twin.run(arrays)
        pairs = zip(facts, wide.run(arrays)[0], strict=True)
        facts = [
            one._replace(drift=difference(one.drift, other.drift)) if one.drift.size else one
            for one, other in pairs
        ]
        backward = any(event.site.scope.direction == BACKWARD for event in twin.events)
        return facts, peaks, moved.effects(arrays, len(calls)) if backward else jnp.zeros(0)

    options = quick_options(found.arrays) if once else None
    if rounding:  # else XLA leaves out roundings that the program has
        options = {"xla_allow_excess_precision": False}
    packed = Packed(compared if rounding else twin.run, options)
    return MeasuredCall(found, calls, of_event, twin, packed)


def quick_options(arrays: Sequence[jax.Array]) -> dict[str, bool | int] | None:
    """Options of XLA with which a twin that runs once takes less time in all, on CPUs.

    A twin has several times the ops of its program, and nearly all of the first call is compiling.
    With these its loops over elements are not optimised, and take two to three times as long.
    Products are calls of kernels that are compiled already. The options are of XLA on CPUs alone.
    """
    devices = (device for x in arrays if isinstance(x, jax.Array) for device in x.devices())
    platforms = {device.platform for device in devices} or {jax.default_backend()}
    if platforms != {"cpu"}:
        return None
    options: dict[str, bool | int] = {"xla_backend_optimization_level": 0}
    if jax.__version_info__ < (0, 11):  # a newer XLA has no such option
        options["xla_cpu_use_fusion_emitters"] = False
    return options


def _updates(site: Site) -> bool:
    """True for what an optimizer or a loss scaler does, also in a branch of theirs."""
    return is_update(site.written) or is_update(site.eqn.source_info.traceback)


def _leaving(
    floats: Sequence[Site], sites: Sequence[Site], readers: Mapping[Atom, set[int]]
) -> list[Site]:
    """The equations of a call whose results are read outside of it, or by nothing.

    Its result, what the backward pass reads beside that, or one for each gradient; a cast that the
    call reads itself is of its input.
    """
    own = {id(s.eqn) for s in sites}
    left = []
    for s in floats:
        by = set[int]().union(*(readers.get(v, ()) for v in s.eqn.outvars))
        taken = s.eqn.primitive.name == "convert_element_type" and by & own
        if not by or (by - own and not taken):
            left.append(s)
    return left


def _readers(closed: ClosedProgram, found: dict[Atom, set[int]]) -> dict[Atom, set[int]]:
    """By variable, the equations that read it in a program and those inside; 0 for its results."""
    jaxpr, _ = compat.opened(closed)
    reads = [(0, jaxpr.outvars), *((id(eqn), eqn.invars) for eqn in jaxpr.eqns)]
    for by, atoms in reads:
        for v in atoms:
            if not hasattr(v, "val"):
                found.setdefault(v, set()).add(by)
    for program in (program for eqn in jaxpr.eqns for program in inside(eqn)):
        _readers(program.closed, found)
    return found


def call_of(program: MeasuredCall, site: Site) -> Call | None:
    """The call that an equation is part of."""
    number = program.of_event.get((site.parent, id(site.eqn)))
    if number is not None:
        return program.calls[number]
    if site.eqn.primitive.name != "shard_map":
        return None
    direction, at = site.scope.direction, source(site.written)
    return Call(
        "jax", "shard_map", "jax:shard_map", site.scope.module, at, direction, "", None, (), "", ()
    )


def names(program: MeasuredCall) -> list[str]:
    """Names of the inputs, as the caller would write them, and words for the constants."""
    constvars, _ = compat.binders(program.traced.closed)
    captured = [f"a captured array ({v.aval.str_short()})" for v in constvars]
    return [*program.traced.names, *captured]
