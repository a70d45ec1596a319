"""A program's twin: the same equations, which return measurements of what they make.

    traced call -> MeasuredCall -> Twin;  twin.read(twin.packed(arrays)) -> measurements

The twin is another program than the one whose numbers are asked for, so that one stays as it is;
XLA may fuse the two differently, and last digits of what is measured may be others. The equation
that ends a call becomes an event, and so do casts and products that make float16: the largest
magnitude of its result, a sample of it, and, in float16, what float32 makes of the same operands.
What other equations read and make is followed, for the events around them, before a twin is traced.
Scans and branches hand out what was measured inside; a `while` loop and a shard_map are one event.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, reduce, wraps
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from polymp.backends.jax import compat
from polymp.backends.jax.arrays import is_float, largest_magnitude, not_finite
from polymp.backends.jax.autocast.contraction import Contraction
from polymp.backends.jax.autocast.evaluate import update_in
from polymp.backends.jax.autocast.known_functions import CONTRACTIONS, FREE, LAYOUT, OURS
from polymp.backends.jax.compat import Atom, ClosedProgram, Equation
from polymp.backends.jax.diagnostics.explain import (
    CLOSED,
    Key,
    Placed,
    Site,
    Traced,
    equations,
    is_update,
    with_sites,
)
from polymp.backends.jax.jaxprs import inside
from polymp.diagnostics.audit_records import operand_numbers
from polymp.diagnostics.call_record import BACKWARD, FORWARD, RECOMPUTE, Call
from polymp.diagnostics.magnitudes import BINS, SHIFT
from polymp.dtypes import FORMATS
from polymp.rules.row import LOW


class Origin(NamedTuple):
    """Where a value of the program comes from: events, inputs by their places, infinite numbers."""

    events: frozenset[int] = frozenset()
    outside: frozenset[int] = frozenset()
    given: bool = False
    captured: str = ""  # words for an array with NaN that a jitted function closes over


class Event(NamedTuple):
    """Facts about a measured equation before it runs."""

    site: Site  # the equation, where it stands
    came: Origin  # of all that it reads, in all rounds of a loop
    dtype: str  # of its results; "" if they are no floats
    group: int | None  # of the call that it ends; None of any other
    # of the program that a low dtype makes 0 or 1, by the place among its operands
    numbers: tuple[tuple[int, float], ...]
    reads: tuple[Origin, ...]  # where each of its operands comes from, in the first round

    @property
    def inputs(self) -> tuple[int, ...]:
        """Events whose results it reads, in the first round of a loop."""
        return tuple(sorted({at for origin in self.reads for at in origin.events}))

    @property
    def direction(self) -> str:
        return self.site.scope.direction

    @property
    def divisors(self) -> tuple[int, ...] | None:
        """Of a division, the events that made what it divides by."""
        name = self.site.eqn.primitive.name
        return tuple(sorted(self.reads[1].events)) if name == "div" else None


class MeasuredCall(Placed[Origin]):
    """A call as it was traced: its events, and where the values that they read come from.

    Where it is measured `once`, it is without samples. Of an optimizer, what the program returns
    is an event, and `once` what others read; with `updates`, all its calls, several times as many.
    """

    def __init__(self, traced: Traced, once: bool, updates: bool = False) -> None:
        self.closed, self.once = traced.closed, once
        self.traced = traced._replace(arrays=[])  # the caller's, which are not kept for it
        self.updates = updates
        self._twins: dict[Hashable, Twin] = {}
        self.sites = {s.key: s for s in equations(self.closed)}
        self.calls: list[Call] = []
        self.of_event: dict[Key, int] = {}  # by equation, the number of the call that it is part of
        self._ends: dict[Key, int] = {}  # by equation, that of the call that it ends
        # What an optimizer makes for the program's results or for others: measured, without rows.
        self.unlisted = set[Key]()
        self.residuals = set[Key]()  # beside a call's result: the backward pass alone reads them
        self.of_results = set[Key]()  # casts of what the call made that they are part of
        self.skipped = set[Key]()  # equations of its calls, of which no others are events
        self._of_updates = set[int]()  # equations of any kind, by id
        readers = _readers(self.closed, {}, self._of_updates)
        back = (s for s in self.sites.values() if s.scope.direction != FORWARD)
        self._back = {id(s.eqn) for s in back}
        for call, sites in with_sites(self.closed, traced.record, lambda v: is_measured(v.aval)):
            self._add_call(call, sites, readers)
        constvars, invars = compat.binders(self.closed)
        # The variables of its inputs, and after them those of its constants; then their names, as
        # the caller would write them, and words for the constants.
        self.inputs: Sequence[Atom] = [*invars, *constvars]
        self.names = [*traced.names, *(_captured(v.aval) for v in constvars)]
        self.events: list[Event] = []  # in order
        # Places of the inputs that the forward of a call reads, by its name and their long shapes.
        self.reads: dict[tuple[str, tuple[int, ...]], set[int]] = {}
        self.numbers: dict[Key, int | None] = {}  # by equation, that of its event; None without one
        self._referring: set[Key] = set()  # equations on references
        self._written = Origin()  # what references have been made of
        ends = [Origin(outside=frozenset([n])) for n in range(len(self.inputs))]
        own = ends[len(invars) :]
        self.results = self.program(self.closed, ends[: len(invars)], (), own)  # their origins

    def twin(self, ask: int | None = None, options: "CompilerOptions" = None) -> "Twin":
        """Its twin, compiled once for each event whose operands are asked for, and options."""
        key = ask, tuple((options or {}).items())
        if key not in self._twins:
            self._twins[key] = Twin(self, ask, options)
        return self._twins[key]

    def call_of(self, site: Site) -> Call | None:
        """The call that an equation is part of."""
        number = self.of_event.get(site.key)
        return None if number is None else self.calls[number]

    def not_finite(self, arrays: Sequence[jax.Array]) -> set[int]:
        """Places of results that are not finite where the program itself runs."""
        copies = [x.copy() for x in arrays]  # which it may donate
        held = [(x, x[...]) for x in compat.opened(self.closed)[1] if compat.is_reference(x)]
        found = {*not_finite(dict(enumerate(self.traced.own(*copies))))}
        for reference, before in held:
            reference[...] = before
        return found

    @cached_property
    def late(self) -> set[int]:
        """Events of the forward pass that only the backward pass may have a use for."""
        graded = any(event.direction == BACKWARD for event in self.events)
        return self.unused if graded else set()

    @cached_property
    def unused(self) -> set[int]:
        """Events of the forward pass that it has no use for."""
        events = self.events
        read = {at for event in events for at in event.inputs}  # a loop reads its own sum later
        unread = {*range(len(events))} - read
        todo = [at for came in (*self.results, self._written) for at in came.events]
        todo += [at for at in unread if _is_end(events[at].site.eqn)]
        back = {at for at, event in enumerate(events) if event.direction == BACKWARD}
        if back.issuperset(todo):
            todo += unread  # jax.grad has no use for the values either
        todo += [at for at, event in enumerate(events) if event.direction == RECOMPUTE]
        used = set[int]()
        while todo:
            if (at := todo.pop()) not in used:
                used.add(at)
                event = events[at]
                todo += event.came.events if event.direction != BACKWARD else ()
        return {at for at, event in enumerate(events) if event.direction == FORWARD} - used

    @cached_property
    def left_out(self) -> Counter[str]:
        """How many calls are not measured, by what they are in."""
        ends = ((s.closed, self._ends[s.key]) for s in self.sites.values() if s.key in self._ends)
        names = (name.replace("while", "while loop") for name, _ in set(ends) if name)
        found = Counter(f"in a {name}" for name in names)
        if self._referring:
            found["on references, which jax.new_ref makes"] = len(self._referring)
        return found

    def _add_call(
        self, call: Call, sites: Sequence[Site], readers: Mapping[Atom, set[int]]
    ) -> None:
        """Add a call, and find the equations that end it."""
        # Those whose results are read outside of it, or by nothing: its result, what the backward
        # pass reads beside that, or one for each gradient. A cast that it reads itself is of its
        # input.
        self.of_event.update((s.key, len(self.calls)) for s in sites)
        own, ends, residuals = {id(s.eqn) for s in sites}, [], set[Key]()
        made = {id(v) for s in sites if not _moves(s.eqn) for v in s.eqn.outvars}
        for s in sites:
            name = s.eqn.primitive.name
            if name not in CLOSED and any(is_measured(v.aval) for v in s.eqn.outvars):
                by = set[int]().union(*(readers.get(v, ()) for v in s.eqn.outvars))
                taken = name == "convert_element_type" and by & own
                if not by or (by - own and not taken):
                    ends.append(s)
                    if call.direction == FORWARD and by and by - own <= self._back:
                        residuals.add(s.key)
                last = s
                if name == "convert_element_type" and id(s.eqn.invars[0]) in made:
                    self.of_results.add(s.key)
        if len(residuals) < len(ends):
            self.residuals |= residuals
        tracebacks = (last.written, last.eqn.source_info.traceback) if ends else ()
        if not self.updates and any(map(is_update, tracebacks)):  # also in a branch of an optimizer
            self.skipped.update(s.key for s in sites)
            for s in ends:
                by = set[int]().union(*(readers.get(v, ()) for v in s.eqn.outvars))
                if 0 in by or (self.once and by - self._of_updates):
                    self.unlisted.add(s.key)
        else:
            self._ends.update((s.key, len(self.calls)) for s in ends)
        self.calls.append(call)

    def number(self, value: Any) -> Origin:
        floats = jnp.issubdtype(jnp.result_type(value), jnp.floating)
        array = np.ndim(value) or isinstance(value, jax.Array)
        there = jnp if array else np  # an array may be on many devices
        if array and floats and there.isnan(value).any():  # Inf may be that of a mask
            return Origin(captured=_captured(jax.typeof(value)))
        return Origin(given=bool(floats and not there.isfinite(value).all()))

    def join(self, one: Origin, other: Origin) -> Origin:
        return Origin(
            one.events | other.events,
            one.outside | other.outside,
            one.given or other.given,
            one.captured or other.captured,
        )

    def leaf(
        self, eqn: Equation, values: list[Origin], around: tuple[int, ...]
    ) -> Sequence[Origin]:
        key, through = (around, id(eqn)), reduce(self.join, values, Origin())
        site, events = self.sites[key], self.events
        if any(compat.is_reference(v.aval) for v in (*eqn.invars, *eqn.outvars)):
            self._referring.add(key)
            self._written = self.join(self._written, through)
            return [self._written] * len(eqn.outvars)
        if (call := site.scope.call) and site.scope.direction == FORWARD:
            for at in through.outside:
                shape = self.inputs[at].aval.shape
                for read in {long(shape), long(shape[site.times > 1 :])}:  # in a scan, a row of it
                    self.reads.setdefault((call, read), set()).add(at)
        if key not in self.numbers:
            self.numbers[key] = None
            made = [v.aval for v in eqn.outvars if is_measured(v.aval)]
            group = self._ends.get(key) if made else None
            some = any(is_measured(getattr(v, "val", v.aval)) for v in eqn.invars)
            name = eqn.primitive.name
            alone = name in _ALONE and eqn.outvars[0].aval.dtype == np.float16
            tells = name in CLOSED or (not made and name not in LAYOUT)
            counts = group is not None or key in self.unlisted
            if counts or (some and (alone or tells)):
                self.numbers[key] = len(events)
                dtype = made[0].dtype.name if made else ""
                numbers = self._constants(site)
                events.append(Event(site, through, dtype, group, numbers, tuple(values)))
        elif (number := self.numbers[key]) is not None:  # a loop's equation is met again
            events[number] = events[number]._replace(came=through)
        if (number := self.numbers[key]) is not None and (self.once or key not in self.unlisted):
            through = Origin(frozenset([number]))
        return [through] * len(eqn.outvars)

    def _constants(self, site: Site) -> tuple[tuple[int, float], ...]:
        """The constants among its operands that became 0 or 1, as the program has them."""
        record, name, eqn = self.traced.record, site.scope.call, site.eqn
        call = record.calls.get(name)
        if call is None or call.spelling.split(":")[1] != eqn.primitive.name:
            return ()
        forward = site.scope.direction == FORWARD  # a derivative may have another array there
        numbers = record.numbers[name]
        return tuple((at, x) for at, x in numbers if forward or hasattr(eqn.invars[at], "val"))


def long(shape: Sequence[int]) -> tuple[int, ...]:
    """Sizes without those of 1, which broadcasting adds."""
    return tuple(n for n in shape if n != 1)


def _captured(aval: Any) -> str:
    """Words for an array that a function closes over."""
    return f"a captured array ({aval.str_short()})"


def _moves(eqn: Equation) -> bool:
    """True if what an equation makes are the numbers that it reads."""
    return eqn.primitive.name in LAYOUT or eqn.primitive.name == "convert_element_type"


def _is_end(eqn: Equation) -> bool:
    """True for one number, as a loss and what chooses a branch are, and for effects."""
    return bool(eqn.effects) or all(v.aval.shape == () for v in eqn.outvars)


# Equations that are events wherever they make float16, though a call may go on after them.
_ALONE = CONTRACTIONS | OURS | {"convert_element_type"}


class Facts(NamedTuple):
    """Measurements of an event, as arrays; with one axis more inside of a `scan`."""

    # float32 [], the largest magnitude; NaN if a value is NaN, -1 if nothing ran; float64 of
    # float64.
    peak: Any = np.float32(-1)
    # float32 [3], of low results: the largest magnitude in float32, and in float16 the shares of
    # values that became Inf and zero; empty for others.
    lost: Any = np.empty(0, np.float32)
    # int32 [n], bins of the values; empty but of the end of a call
    sample: Any = np.empty(0, np.int32)
    # float32 [k, 6], what it was given, where that is asked for; else empty
    operands: Any = np.empty((0, 6), np.float32)


# What an equation, or a program, makes: results, and the facts of the events in it.
_Made = tuple[list[jax.Array], list[Facts]]


class Twin(Placed[jax.Array]):
    """The program of a call in which its events are measured; or the operands of one alone."""

    def __init__(self, call: MeasuredCall, ask: int | None, options: "CompilerOptions") -> None:
        self.call = call
        self.ask = ask  # that event; the operands are those of its call
        self._asked: set[Key] = set()  # the equations of that call
        if ask is not None:
            site = call.events[ask].site
            scope, of = site.scope, call.of_event.get(site.key)
            self._asked = {site.key, *(at for at, number in call.of_event.items() if number == of)}
            if scope.call:  # its constants, too, which may stand before the loop that it is in
                self._asked |= {at for at, s in call.sites.items() if s.scope[1:] == scope[1:]}
        # What that call made, by id, and the values that it was given for it.
        self._came: dict[int, tuple[jax.Array, dict[int, jax.Array]]] = {}
        # Of what it was given: dtype, shape, and its place among the inputs.
        self.given: list[tuple[str, tuple[int, ...], int | None]] = []
        self._outside: Sequence[jax.Array] = ()
        self._mesh: AbstractMesh | None = None  # whose axes the types of arrays name
        self._facts: list[Facts] = []  # of the events so far, of the program that is gone through
        self._shapes: list[tuple[int, ...]] = []  # of each part of the facts
        self.packed: Callable[..., jax.Array] = jax.jit(self._packed, compiler_options=options)

    def _packed(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """The results of `run` as one array, in float32 or wider."""
        # It has hundreds of results of a few numbers: to make an array of its own of each takes the
        # host longer than the device needs to compute it.
        leaves, self._structure = jax.tree.flatten(self.run(arrays))
        self._shapes = [tuple(x.shape) for x in leaves]
        dtype = jnp.result_type(np.float32, *(x.dtype for x in leaves if is_float(x)))
        if self._mesh is not None:
            leaves = jax.sharding.reshard(leaves, NamedSharding(self._mesh, PartitionSpec()))
        rows = [lax.convert_element_type(x, dtype).reshape(x.size) for x in leaves]
        return lax.concatenate(rows, 0) if rows else jnp.zeros(0)

    def read(self, packed: jax.Array) -> tuple[list[Facts], list[Any]]:
        """The results of `run`, of `packed`, as numpy arrays. Waits for the device."""
        ends = np.cumsum(list(map(math.prod, self._shapes)), dtype=int)
        rows = np.split(np.asarray(packed), ends)[:-1]  # what is left is empty
        leaves = [row.reshape(shape) for row, shape in zip(rows, self._shapes, strict=True)]
        made: tuple[list[Facts], list[Any]] = jax.tree.unflatten(self._structure, leaves)
        return made

    def run(self, arrays: Sequence[jax.Array]) -> tuple[list[Facts], list[jax.Array]]:
        """The facts of all events, in order, and the largest magnitudes of inputs and constants."""
        closed = self.call.closed
        given = [*arrays, *compat.opened(closed)[1]]
        self._outside = own_references(given)
        self._facts = []
        meshes = {jax.typeof(x).sharding.mesh for x in given if isinstance(x, jax.Array)}
        self._mesh = next(filter(_is_explicit, meshes), None)
        self.program(closed, arrays, (), self._outside[len(arrays) :])
        if self.ask is not None:
            return self._facts, []
        before = (x[...] if compat.is_reference(x) else x for x in given)
        return self._facts, [peak(x) if is_measured(x) else jnp.float32(0) for x in before]

    def _measured(
        self, closed: ClosedProgram, values: Sequence[jax.Array], place: tuple[int, ...]
    ) -> _Made:
        """A program inside, with the facts of the events in it, in order."""
        before, self._facts = self._facts, []
        outs = self.program(closed, values, place)
        facts, self._facts = self._facts, before
        return outs, facts

    def number(self, value: Any) -> jax.Array:
        made: jax.Array = value
        return made

    def equation(
        self, at: int, eqn: Equation, values: list[jax.Array], around: tuple[int, ...]
    ) -> Sequence[jax.Array]:
        control = {"scan": self._scan, "cond": self._cond}.get(eqn.primitive.name)
        with eqn.ctx.manager, self._with_mesh():
            if control is None:
                return super().equation(at, eqn, values, around)
            outs, facts = control(eqn, values, (*around, at))
        self._facts += facts
        return outs

    def leaf(
        self, eqn: Equation, values: list[jax.Array], around: tuple[int, ...]
    ) -> Sequence[jax.Array]:
        key, outs = (around, id(eqn)), list(compat.put(eqn.primitive, values, eqn.params))
        if key in self._asked:
            self._follow(eqn, values, outs)
        if (number := self.call.numbers.get(key)) is not None:
            with self._with_mesh(outs):
                self._facts.append(self._fact(number, eqn, values, outs))
        return outs

    def _fact(
        self, number: int, eqn: Equation, args: list[jax.Array], outs: Sequence[jax.Array]
    ) -> Facts:
        """The facts of an event."""
        if self.ask is not None:  # XLA drops all that does not lead to its operands
            return self._operands(outs) if number == self.ask else Facts()
        event, made = self.call.events[number], [x for x in outs if is_measured(x)]
        facts = Facts(peak(*made) if made else jnp.float32(-1))
        if event.dtype in LOW and eqn.primitive.name not in CLOSED:
            facts = facts._replace(lost=lost(eqn, args, outs, event.numbers))
        if event.group is not None and not self.call.once:  # takes as long to compile as the rest
            facts = facts._replace(sample=sample(made[0]))
        return facts

    def _operands(self, outs: Sequence[jax.Array]) -> Facts:
        """The facts of the event whose operands are measured."""
        places = {id(x): at for at, x in enumerate(self._outside)}
        values = list(self._came[id(outs[0])][1].values())
        self.given = [(x.dtype.name, tuple(x.shape), places.get(id(x))) for x in values]
        found = [_numbers_of(x) for x in values]
        return Facts(operands=jnp.stack(found)) if found else Facts()

    def _follow(self, eqn: Equation, args: list[jax.Array], outs: Sequence[jax.Array]) -> None:
        """Note of which values that its call was given an equation makes its results."""
        given: dict[int, jax.Array] = {}
        for v, x in zip(eqn.invars, args, strict=True):
            if is_measured(x) and hasattr(x, "shape") and not hasattr(v, "val"):
                _, before = self._came.get(id(x), (x, {id(x): x}))
                given |= before
        self._came.update((id(x), (x, given)) for x in outs)

    def _with_mesh(self, made: Sequence[jax.Array] = ()) -> AbstractContextManager[object]:
        """A context with the mesh of some arrays, or else of all: for constants among them."""
        # JAX takes some programs of such arrays without `jax.set_mesh` around them. In `auto_axes`
        # the types of arrays have the mesh in another form.
        if self._mesh is None:
            return nullcontext()
        meshes = [jax.typeof(x).sharding.mesh for x in made]
        meshes += [jax.sharding.get_abstract_mesh(), self._mesh]
        return jax.sharding.use_abstract_mesh(next(m for m in meshes if not m.empty))

    # Control

    def _scan(self, eqn: Equation, read: list[jax.Array], place: tuple[int, ...]) -> _Made:
        (body,) = inside(eqn)
        fixed, first, over = body.split(read)

        def turn(state: list[jax.Array], row: list[jax.Array]) -> tuple[list[jax.Array], _Made]:
            outs, facts = self._measured(body.closed, [*fixed, *state, *row], (*place, 0))
            return outs[: body.carries], (outs[body.carries :], facts)

        reverse = eqn.params["reverse"]
        last, (rows, facts) = lax.scan(turn, first, over, length=body.times, reverse=reverse)
        if reverse:  # rounds in the order in which they ran
            facts = jax.tree.map(lambda x: x[::-1], facts)
        return [*last, *rows], facts

    def _cond(self, eqn: Equation, read: list[jax.Array], place: tuple[int, ...]) -> _Made:
        branches = inside(eqn)
        values = branches[0].of(read)

        def measured(number: int) -> Any:
            closed, own = branches[number].closed, (*place, number)
            return jax.jit(lambda values: self._measured(closed, values, own))

        # Jitted, and so traced once: else a branch in a branch in a branch is traced eight times.
        runs = list(map(measured, range(len(branches))))
        shapes = [run.eval_shape(values)[1] for run in runs]

        def branch(number: int) -> Callable[..., _Made]:
            def run(*values: jax.Array) -> _Made:
                outs, facts = runs[number](values)
                parts = [list(map(absent, found)) for found in shapes]
                parts[number] = facts
                return outs, list(chain.from_iterable(parts))

            return run

        outs, facts = lax.switch(read[0], list(map(branch, range(len(branches)))), *values)
        return outs, facts


# Options of XLA.
CompilerOptions = dict[str, bool | int] | None


def quick_options(arrays: Sequence[jax.Array]) -> CompilerOptions:
    """Options of XLA with which a twin that runs once takes less time in all, on CPUs."""
    # A twin has several times the ops of its program, and nearly all of the first call is
    # compiling. With these its loops over elements are not optimised, and take two to three times
    # as long. Products are calls of kernels that are compiled already.
    devices = (device for x in arrays if isinstance(x, jax.Array) for device in x.devices())
    platforms = {device.platform for device in devices} or {jax.default_backend()}
    if platforms != {"cpu"}:
        return None
    options: dict[str, bool | int] = {"xla_backend_optimization_level": 0}
    if jax.__version_info__ < (0, 11):  # a newer XLA has no such option
        options["xla_cpu_use_fusion_emitters"] = False
    return options


def _readers(
    closed: ClosedProgram, found: dict[Atom, set[int]], updates: set[int]
) -> dict[Atom, set[int]]:
    """By variable, the equations that read it, 0 for results; notes those of an optimizer."""
    jaxpr, _ = compat.opened(closed)
    updates |= {id(eqn) for eqn in jaxpr.eqns if is_update(eqn.source_info.traceback)}
    reads = [(0, jaxpr.outvars), *((id(eqn), eqn.invars) for eqn in jaxpr.eqns)]
    for by, atoms in reads:
        for v in atoms:
            if not hasattr(v, "val"):
                found.setdefault(v, set()).add(by)
    for program in (program for eqn in jaxpr.eqns for program in inside(eqn)):
        _readers(program.closed, found, updates)
    return found


# Measurements of an equation's results, as arrays. What every event has is made by `jax.lax`: to
# trace a function of `jax.numpy` takes several times longer.

# Of a larger array, every n-th value is in the sample, about as many as these.
SAMPLE = 2048

# In a sample, the place of a value that was not there: of a branch that was not taken.
ABSENT = BINS


def is_measured(x: Any) -> bool:
    """True for a float or complex array with values."""
    name = getattr(getattr(x, "dtype", None), "name", "")
    inexact = name in FORMATS or name.startswith("complex")
    return inexact and math.prod(np.shape(x)) > 0 and not compat.is_reference(x)


def own_references(given: Sequence[Any]) -> list[Any]:
    """The values that a program is given, with copies of references, which it may write into."""
    return [jax.new_ref(x[...]) if compat.is_reference(x) else x for x in given]


def real(x: jax.Array) -> jax.Array:
    """A complex array's real and imaginary numbers, for |z| may be Inf; another array as it is."""
    if not jnp.iscomplexobj(x):
        return x
    return lax.concatenate([lax.expand_dims(part, (0,)) for part in (lax.real(x), lax.imag(x))], 0)


def _is_explicit(mesh: Any) -> bool:
    """True for a mesh whose axes the types of arrays name."""
    return AxisType.Explicit in mesh.axis_types


def _wherever(fn: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """A function of an array whose type may say how it is divided, with a result that is not."""

    @wraps(fn)
    def called(x: jax.Array) -> jax.Array:
        mesh = jax.typeof(x).sharding.mesh
        if not _is_explicit(mesh):
            return fn(x)
        with jax.sharding.use_abstract_mesh(mesh):
            made: jax.Array = jax.sharding.auto_axes(fn, out_sharding=PartitionSpec())(x)
        return made

    return called


def peak(*arrays: jax.Array) -> jax.Array:
    """The largest magnitude in some arrays, NaN if there is one; float32 [], or float64 []."""
    return reduce(jnp.maximum, map(_peak, arrays))


@_wherever
def _peak(x: jax.Array) -> jax.Array:
    """The largest magnitude in an array."""
    # Of a long one, that of each column first: XLA's loop for one number alone is not vectorized on
    # CPUs, and takes twice as long, three times as long for 16 bits.
    x = real(x)
    exact = _exact(x)
    x = x if x.dtype in _LOW else lax.convert_element_type(x, exact)
    if x.size % _COLUMNS == 0:
        columns = largest_magnitude(lax.reshape(x, (x.size // _COLUMNS, _COLUMNS)), (0,))
        x = lax.optimization_barrier(columns)  # else XLA makes one of the two
    return lax.convert_element_type(largest_magnitude(x, range(x.ndim)), exact)


_COLUMNS = 256


def _exact(x: jax.Array) -> Any:
    """A dtype that has the numbers of an array of real ones."""
    return np.float64 if x.dtype == np.float64 else np.float32


@_wherever
def _numbers_of(x: jax.Array) -> jax.Array:
    """The numbers of an operand."""
    made: jax.Array = operand_numbers(jnp, real(x).astype(_exact(x)))
    return made


@_wherever
def few(x: jax.Array) -> jax.Array:
    """A sample of an array's values, in one row."""
    x = real(x)
    flat = lax.reshape(x, (x.size,))
    step = -(-x.size // SAMPLE)
    return flat if step <= 1 else lax.slice(flat, (0,), (x.size,), (step,))


def sample(x: jax.Array) -> jax.Array:
    """The bins of a sample of an array's values; int32."""
    bits = lax.bitcast_convert_type(lax.convert_element_type(few(x), np.float32), np.int32)
    return lax.bitwise_and(lax.shift_right_logical(bits, np.int32(SHIFT)), np.int32(BINS - 1))


def lost(
    eqn: Equation,
    args: list[jax.Array],
    outs: Sequence[jax.Array],
    numbers: Sequence[tuple[int, float]],
) -> jax.Array:
    """The loss in a low dtype, by the same equation on the same operands in float32."""
    # Operands that are constants of the program are those that it has, before they were rounded.
    counts = outs[0].dtype == np.float16 or eqn.primitive.name in _SATURATE or numbers
    exact = dict(numbers)
    args = [
        lax.full(np.shape(x), exact[at], np.float32) if at in exact else x
        for at, x in enumerate(args)
    ]
    wide = in_float32(eqn, args) if counts else None
    if wide is None:
        return jnp.zeros(0, jnp.float32)
    if outs[0].dtype != np.float16:
        return jnp.stack([peak(wide), 0, 0])
    some, low = few(wide), few(outs[0]).astype(jnp.float32)
    burst = jnp.mean((jnp.isinf(low) & jnp.isfinite(some)).astype(jnp.float32))
    vanished = jnp.mean(((low == 0) & (some != 0)).astype(jnp.float32))
    return jnp.stack([peak(wide), burst, vanished])


def in_float32(eqn: Equation, args: list[jax.Array]) -> jax.Array | None:
    """The first result of an equation whose low dtypes are float32; None if it has no such form."""
    wide = [wider(x) for x in args]
    if eqn.primitive.name == "convert_element_type":
        x = jnp.asarray(wide[0])
        return x if is_measured(x) else lax.convert_element_type(x, np.float32)
    if eqn.primitive.name not in _WIDENS:
        return None
    params = {key: _wider_param(value) for key, value in eqn.params.items()}
    if params.get("update_jaxpr") is not None:
        params["update_jaxpr"] = update_in(params["update_jaxpr"], "float32")
    try:
        made: jax.Array = compat.put(eqn.primitive, wide, params)[0]
    except (TypeError, ValueError, NotImplementedError):
        return None
    return None if made.dtype in _LOW else made


# In bfloat16, where no range is lost, what of these becomes 1.
_SATURATE = {"logistic", "tanh", "erf", "convert_element_type"}

_WIDENS = FREE | {"polymp_contraction"}


def wider(x: jax.Array) -> jax.Array:
    """The array in float32 if it is in a low dtype."""
    low = getattr(x, "dtype", None) in _LOW
    return jnp.asarray(x).astype(jnp.float32) if low else x


def _wider_param(value: object) -> object:
    if isinstance(value, Contraction):
        return value._replace(run="float32", out="float32")
    return np.dtype(np.float32) if isinstance(value, np.dtype) and value in _LOW else value


_LOW = (np.dtype(np.float16), np.dtype(jnp.bfloat16))


def absent(shape: Facts) -> Facts:
    """The facts of an event that did not run."""
    # Constants of a program, where `jax.numpy` would add equations.
    pairs = zip(shape, _ABSENT, strict=True)
    return Facts(*(np.full(x.shape, value, x.dtype) for x, value in pairs))


_ABSENT = (-1, 0, ABSENT, 0)
