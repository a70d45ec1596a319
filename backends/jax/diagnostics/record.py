"""`record`: a record of a run, each step's arrays summed up in a file.

    recorded = polymp.jax.record("run.rec", train_step)
    params, opt_state = recorded(params, opt_state, x)     # what train_step returns, bit for bit

The function itself runs as it always does. Before it runs its traced program, with the probes, as
`perturb` does. On CPUs arrays are summed up in numpy; elsewhere what sums one up is compiled for
each shape. Of each array only the numbers leave the device that `polymp.diagnostics.run_record`
defines.
"""

import contextlib
import math
import os
import re
import reprlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from polymp.backends.jax import compat
from polymp.backends.jax.arrays import is_float, is_typed
from polymp.backends.jax.compat import Equation
from polymp.backends.jax.diagnostics.explain import CLOSED, Key, Wrapped, called, traced
from polymp.backends.jax.diagnostics.instrument import MeasuredCall, own_references
from polymp.backends.jax.diagnostics.perturb import (
    NOWHERE,
    Evaluation,
    Kernels,
    Value,
    jitted,
    of_terms,
    rounds_operands,
    shares,
    wide,
)
from polymp.backends.jax.jaxprs import inside
from polymp.diagnostics import run_record
from polymp.diagnostics.call_record import BACKWARD, FORWARD, Call
from polymp.diagnostics.run_record import (
    GRADIENT,
    INPUT,
    MASKED,
    MOST,
    RESULT,
    RMS,
    UPDATE,
    VALUES,
    Options,
    RecordedArray,
    RecordedStep,
    RecordWriter,
    RunRecord,
)


class Recorded(Wrapped):
    """A function whose calls are recorded; see `record`.

    Attributes:
        fn: the function.

    Args:
        fn: the function.
        options: of `record`.
    """

    def __init__(self, fn: Callable[..., object], options: Options) -> None:
        super().__init__(fn, "record(path, jax.jit(step))")
        self._options = options
        self._model = getattr(fn, "__name__", None) or type(fn).__name__
        self._writer = RecordWriter(options, self._described)
        self._programs: dict[Hashable, _Program] = {}

    def _described(self) -> dict[str, Any]:
        """The fields of the header."""
        return {
            "framework": "jax",
            "versions": {"jax": jax.__version__},
            "model": self._model,
            "device": jax.devices()[0].device_kind,
            "threads": os.cpu_count(),
            "rank": jax.process_index(),
            "ranks": jax.process_count(),
        }

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Make a call, and record it if its turn has come.

        Args:
            args: of the call.
            kwargs: likewise.

        Returns:
            What `fn` returns.

        Raises:
            TypeError: an argument is traced: a record is of values.
            RecordError: a pattern matches no module of the first call.
        """
        key = self._key(args, kwargs)
        if (number := self._writer.begin()) is None:
            return self.fn(*args, **kwargs)
        if key not in self._programs:
            program = _Program(self.fn, args, kwargs)
            if not self._programs:  # another call may leave modules out
                paths = {site.scope.module for site in program.sites.values()}
                run_record.check_matched(self._options.modules, paths, self._model)
            self._programs[key] = program
        program = self._programs[key]
        arrays = self._arrays(args, kwargs)
        with _mesh_of(arrays):
            walk = _Walk(program, self._options)
            walk.run(arrays)
        result = self.fn(*args, **kwargs)
        self._writer.write(walk.step(number))
        return result

    @property
    def record(self) -> RunRecord:
        """The record of all calls so far."""
        return self._writer.record

    def __repr__(self) -> str:
        return f"record({self.fn!r}), {self._writer.written} calls recorded"


def record(
    path: str | os.PathLike[str] | None,
    fn: Callable[..., object] | None = None,
    *,
    probes: int = 8,
    modules: Sequence[str] = (),
    every: int = 1,
    steps: int | None = None,
) -> Recorded:
    """Wrap a function so that its calls are recorded in a file, to be compared with another run.

        recorded = polymp.jax.record("run.rec", train_step)   # jitted or not
        for x in batches:
            params, opt_state = recorded(params, opt_state, x)
        polymp.compare("before.rec", "run.rec")

    `fn` itself is called as it is: its results are the same, every bit of them. Recorded is its
    traced program, which runs before `fn`, equation by equation: each array that goes in, the
    result of each op call, forward and backward, and each array that comes out, an argument that
    comes back as an update of it. A `scan` has rows of each turn, and one of what it stacks, if
    another call reads that. An optimizer of optax has none; `while` loops and `shard_map` have
    their results. Callbacks with a result are called once more.

    On CPUs a recorded call takes five to ten times as long as `fn` without probes, and 30 to 40
    times with eight, if its arrays are large: each equation is a program of its own. With small
    arrays, and on a GPU, it is a hundred times and more. See `every`. Each probe takes the memory
    of a run again.

    Args:
        path: of the file; if several processes run, each writes its own: "run.rank3.rec" of
            "run.rec". None to keep the steps in memory.
        fn: a function of arrays, pytrees and flax modules; the outermost one, which jax.jit or
            jax.grad may be inside of, and not around.
        probes: how many runs with moved results measure how far rounding moves each array; at least
            2, or 0 to measure none, which takes a fraction of the time.
        modules: patterns of module paths, such as "blocks.*.attn", of which one matches the calls
            that are recorded; calls elsewhere are followed alone. () for all calls.
        every: record the calls with the numbers 0, every, 2 every, ...
        steps: stop after so many recorded calls; None for no end.

    Returns:
        The function, with the record as its attribute `record`.

    Raises:
        TypeError: `fn` is not callable, or an option is of the wrong type.
        ValueError: an option is out of its range.
        PolicyError: a pattern can match no path.
        RecordError: there is no folder for the file.
    """
    if not callable(fn):
        raise TypeError(
            f"record(path, fn) needs a function, got {reprlib.repr(fn)}. Write wrapped = "
            "record(path, jax.jit(step)), and call wrapped in place of the step."
        )
    return Recorded(fn, run_record.checked(path, probes, modules, every, steps))


# A call as it is recorded.


class _Summary(NamedTuple):
    """A row, and its numbers on the device."""

    row: RecordedArray  # without them
    # float64 [VALUES + 2]: values, zeros, bad; of one that numpy sums up, its place.
    numbers: Any
    changes: Any  # `run_record.changes`, float32; None if all runs are alike
    own: tuple[float, float, Any]  # without probes: see `shares`, the last as a number


class _Program(MeasuredCall):
    """The program of calls of one key."""

    def __init__(
        self, fn: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        super().__init__(call := traced(fn, args, kwargs), once=False)
        self.paired = _paired(self, called(fn, args, kwargs)[1:])
        constants = range(len(self.inputs) - len(self.traced.names))
        self.names = [*self.traced.names, *(f"constant {n + 1}" for n in constants)]
        self.kernels = Kernels([*call.arrays, *compat.opened(self.closed)[1]])


_EXACT = 0.0, 0.0, 0.0  # of what is moved by no rounding

# Numbers of an array in all runs, up to which numpy tells how far they are moved, for which nothing
# is compiled.
_IN_NUMPY = 2**18


def _mesh_of(arrays: Sequence[Any]) -> AbstractContextManager[object]:
    """A context with the mesh of some arrays, if they know how they are divided."""
    shardings = (getattr(x, "sharding", None) for x in arrays)
    meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
    known = [m for m in meshes if isinstance(m, Mesh) and AxisType.Explicit in m.axis_types]
    return jax.set_mesh(known[0]) if len(known) == 1 else contextlib.nullcontext()


class _Walk(Evaluation):
    """A run of the program, beside it some probes; its rows as the calls run, and their numbers."""

    def __init__(self, program: _Program, options: Options) -> None:
        super().__init__(program.kernels, options.probes)
        self._call, self._patterns = program, options.modules
        self._inputs: dict[int, int] = {}  # places of their rows
        self._written: frozenset[int] = NOWHERE  # what references have been made of
        # By identity, the sources of what a scan has stacked, and those that others read.
        self._stacks: dict[int, tuple[list[Any], frozenset[int]]] = {}
        self.summaries: list[_Summary] = []
        self.in_numpy = run_record.Summaries()
        self.ends: frozenset[int] = NOWHERE  # rows that the program returns, or what is made of

    def run(self, arrays: Sequence[jax.Array]) -> None:
        """Go through the program."""
        closed = self._call.closed
        self._outside = [*arrays, *own_references(compat.opened(closed)[1])]
        counted = [_is_counted(v.aval) for v in self._call.inputs]
        ends = [
            Value(x, sources=frozenset([~n]) if counted[n] else NOWHERE)
            for n, x in enumerate(self._outside)
        ]
        count = len(arrays)
        outs = self.program(closed, ends[:count], (), ends[count:])
        made = NOWHERE.union(*(_all(out.sources) for out in outs))
        first = len(self.summaries)
        for at, out in enumerate(outs):
            if is_float(out.x):
                self._result(at, out)
        self.ends = made | {*range(first, len(self.summaries))}
        del self._outside

    def step(self, number: int) -> RecordedStep:
        """The step of the run. Waits for the device."""
        in_numpy, arrays = self.in_numpy.read(), []
        found = jax.device_get([tuple(s[1:]) for s in self.summaries])
        for (row, *_), (numbers, changes, (own, off, terms)) in zip(
            self.summaries, found, strict=True
        ):
            if isinstance(numbers, int):
                values, zeros, bad = in_numpy[numbers]
            else:
                *values, zeros, bad = numbers.tolist()
            size, times = values[RMS], 1.0
            if size and terms < math.inf:
                times = min(max(float(terms) / size, 1.0), MOST)
            own = max(own, off * times) if size else 0.0
            spread: tuple[float, ...] = ()
            if self.seeds is not None:
                spread = (0.0,) * VALUES
                if changes is not None:
                    spread = run_record.spread(changes, values, row.size)
            arrays.append(
                row._replace(
                    zeros=int(zeros),
                    bad=int(bad),
                    own=own,
                    values=tuple(values),
                    spread=spread,
                    terms=times,
                )
            )
        return RecordedStep(number, _read(arrays, self.ends), {}, dict(self._call.left_out))

    def equation(
        self, at: int, eqn: Equation, values: list[Value], around: tuple[int, ...]
    ) -> Sequence[Value]:
        name = eqn.primitive.name
        if inside(eqn) and name not in CLOSED:
            return super().equation(at, eqn, values, around)
        reads = NOWHERE.union(*map(self._sources, values))
        made = super().equation(at, eqn, values, around)
        if any(compat.is_reference(v.aval) for v in (*eqn.invars, *eqn.outvars)):
            self._written |= reads
            return [value._replace(sources=self._written) for value in made]
        rows = [n for n, v in enumerate(eqn.outvars) if is_float(v.aval)]
        narrow = rounds_operands(eqn, self.kernels.device)
        if name in CLOSED:
            site = self._call.sites[around, id(eqn)]
            call = None if site.closed else self._call.call_of(site)
        else:
            call, rows = self._ended((around, id(eqn))), rows[:1]
        sources = [reads] * len(made)
        if call is not None:
            call = call._replace(run=narrow or call.run)
            for n in rows:
                own, off, by = _EXACT
                if name != "while":
                    own, off, by = shares(eqn, eqn.outvars[n].aval, narrow)
                off, by = (off, by) if self.seeds is None else (0.0, 0.0)
                terms = jitted(of_terms)([v.x for v in values], by) if by else 0.0
                sources[n] = self._add(RESULT, call.op, made[n], reads, call, (own, off, terms))
            if len(rows) == 1:
                sources = [sources[rows[0]]] * len(made)
        return [v._replace(sources=came) for v, came in zip(made, sources, strict=True)]

    # Rows

    def _sources(self, value: Value) -> frozenset[int]:
        """Where a value comes from; what a scan of the forward pass stacks gets a row for it."""
        turns = value.sources
        if not isinstance(turns, list):
            return _all(turns)
        last = max(_all(turns), default=-1)
        if last < 0 or self.summaries[last].row.direction == BACKWARD or not is_float(value.x):
            return _all(turns)
        if id(turns) not in self._stacks:
            made = self.summaries[last].row._replace(rule="")
            self._stacks[id(turns)] = turns, self._add(RESULT, "stack", value, _all(turns), made)
        return self._stacks[id(turns)][1]

    def _ended(self, key: Key) -> Call | None:
        """The call that an equation ends with a result; None of any other equation."""
        at = self._call.numbers.get(key)
        group = None if at is None else self._call.events[at].group
        return None if group is None or at in self._call.late else self._call.calls[group]

    def _result(self, at: int, out: Value) -> None:
        """Add the row of a result of the program."""
        name = self._call.traced.results[at]
        kind, name = RESULT, name if name == "result" else f"result{name}"
        reads = _all(out.sources)
        if at in self._call.paired:
            kind, place = self._call.paired[at]
            name = self._call.names[place]
            if kind == UPDATE:
                reads |= frozenset([~place])
                out = out._replace(x=jitted(_difference)(out.x, self._outside[place]))
        self._add(kind, name, out, reads)

    def _add(
        self,
        kind: str,
        name: str,
        value: Value,
        reads: frozenset[int] = NOWHERE,
        call: Call | RecordedArray | None = None,
        own: tuple[float, float, Any] = _EXACT,
    ) -> frozenset[int]:
        """Add a row, after those of the inputs that it is the first to read; where it came from."""
        paths = [] if call is None else [call.module]
        if paths and not run_record.selected(paths, self._patterns):
            return reads
        for at in sorted(~at for at in reads if at < 0 and ~at not in self._inputs):
            self._inputs[at] = len(self.summaries)
            self._add(INPUT, self._call.names[at], Value(_numbers(self._outside[at])))
        places = sorted({at if at >= 0 else self._inputs[~at] for at in reads})
        where: Any = ("", "", FORWARD, "", (), "")
        if call is not None:
            where = call.module, call.source, call.direction, call.rule, call.inputs, call.run
        if not is_float(value.x):
            value = Value(value.first)
        x, runs = _whole(value.x), value.runs
        of = x.dtype.name, tuple(x.shape[runs:]), 0, 0, 0.0
        row = RecordedArray(*(kind, name, *where, *of, tuple(places), ()))
        shape = len(x) if runs else 1, math.prod(x.shape[runs:])
        on_cpu, moved = self.kernels.device.platform == "cpu", None
        forward = kind in (INPUT, RESULT) and row.direction != BACKWARD
        with jax.enable_x64(True), np.errstate(all="ignore"):  # whatever JAX's own setting is
            if forward and is_float(x) and x.size and x.dtype.itemsize > 1:
                if not on_cpu or np.asarray(x).reshape(shape)[0].min() <= MASKED:
                    x = jitted(_with_masks, "shape")(x, shape=shape)
            rows: Any = np.asarray(x).reshape(shape) if on_cpu or not x.size else None
            if rows is not None:
                numbers: Any = self.in_numpy.add(rows[0])
            else:
                numbers = jitted(_sums, "shape")(x, shape=shape)
            if runs and x.size and (rows is None or x.size > _IN_NUMPY):
                moved = jitted(_changes, "shape")(x, shape=shape)
            elif runs and x.size:
                rows = wide(rows)
                moved = _changed(rows[0], rows[1:], np)
        self.summaries.append(_Summary(row, numbers, moved, own))
        return frozenset([len(self.summaries) - 1])


def _whole(x: Any) -> Any:
    """An array on each device of its mesh: its blocks are others than those of the devices."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return x
    return jax.device_put(x, NamedSharding(sharding.mesh, PartitionSpec()))


def _read(arrays: Sequence[RecordedArray], ends: frozenset[int]) -> tuple[RecordedArray, ...]:
    """The arrays that the results are made of; derivatives leave some that XLA drops as well."""
    read = {*ends}
    for at in reversed(range(len(arrays))):
        if at in read:
            read.update(arrays[at].reads)
    places = {at: place for place, at in enumerate(sorted(read & {*range(len(arrays))}))}
    return tuple(
        arrays[at]._replace(reads=tuple(places[r] for r in arrays[at].reads)) for at in places
    )


def _all(sources: Any) -> frozenset[int]:
    if isinstance(sources, frozenset):
        return sources
    return NOWHERE.union(*map(_all, sources))


def _difference(x: Any, old: Any) -> Any:
    """A new array as its difference from an old one."""
    return wide(x) - wide(old)


# The numbers of an array, as `run_record.Summaries` has them, on any device.


def _is_counted(x: Any) -> bool:
    """True for arrays that have numbers here: of floats, integers, bools, and random keys."""
    dtype = None if compat.is_reference(x) else getattr(x, "dtype", None)
    kinds = (np.floating, np.integer, np.bool_, jax.dtypes.prng_key)
    return dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in kinds)


def _numbers(x: Any) -> jax.Array:
    """An array, or the numbers of a random key."""
    x = jnp.asarray(x)
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _with_masks(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """An array whose first row has `run_record.masks_as_inf`."""
    rows = x.reshape(shape)
    return rows.at[0].set(run_record.masks_as_inf(rows[0], jnp)).reshape(x.shape)


def _sums(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """`run_record.sums_of` the first row, in float64."""
    row = x.reshape(shape)[0].astype(np.float64)
    with jax.default_matmul_precision("highest"):
        found: jax.Array = run_record.sums_of(row, run_record.looks_of(shape[1]), jnp)
    return found


def _changes(x: jax.Array, shape: tuple[int, int]) -> Any:
    """How far the values of the other rows are from those of the first."""
    rows = x.reshape(shape)

    def change(at: jax.Array) -> Any:
        return _changed(wide(rows[0]), wide(rows[at])[None], jnp)[0]

    with jax.default_matmul_precision("highest"):
        # One after the other: less memory is touched.
        return lax.map(change, jnp.arange(1, len(rows)))


def _changed(x: Any, rows: Any, xp: Any) -> Any:
    """`run_record.changes` of a row in others, in numpy or in JAX."""
    x, by = (xp.where(xp.isfinite(each), each, 0) for each in (x, rows - x))
    places = run_record.places(x.shape[-1])
    return run_record.changes(x, by, places, xp).astype(np.float32)


# Which results are arguments, changed, or gradients of them.


def _paired(call: MeasuredCall, given: tuple[Any, ...]) -> dict[int, tuple[str, int]]:
    """By result, the kind of its row, and the place among the inputs of the argument that it is of.

    A result of the path, dtype and shape of an array in an argument is its update if it is made of
    that without an op that changes the shape, and some such result of the argument of a gradient,
    too, or all of the argument comes back from such a step, as batch statistics do; its gradient if
    it comes out of the backward pass, and no other argument is like it. A new weight is made of its
    moments, too: these are the arguments of what is made of them alone.
    """
    leaves = [(p, x) for p, x in jax.tree_util.tree_leaves_with_path(given) if is_typed(x)]
    argument = {place: path[:2] for place, (path, _) in enumerate(leaves)}
    by_path: dict[str, list[int]] = {}
    for place, (path, x) in enumerate(leaves):
        if is_float(x):
            by_path.setdefault(jax.tree_util.keystr(path[2:]), []).append(place)
    alike: dict[int, list[list[int]]] = {}  # those of the longest path first
    variables = compat.opened(call.closed)[0].outvars
    for at, name in enumerate(call.traced.results):
        ends = (name[match.start() :] for match in re.finditer(r"\[|\.|$", name))
        aval = str(variables[at].aval)  # its dtype and shape
        like = ([p for p in by_path.get(e, ()) if str(call.inputs[p].aval) == aval] for e in ends)
        alike[at] = [*filter(None, like)]
    made = {at: _made_of(call, at) for at in alike if alike[at]}
    own = {at: [p for p in chain(*alike[at]) if p in made[at][1]] for at in made}
    trained = {argument[p] for at, (graded, _) in made.items() if graded for p in own[at]}
    if trained:
        back = {*chain(*own.values())}
        # The path of an array that is an argument of its own tells nothing.
        stays = {argument[p] for end in by_path for p in by_path[end] if not end or p not in back}
        trained |= {argument[p] for p in back} - stays
    found: dict[int, tuple[str, int]] = {}
    updated = set[int]()
    for at in sorted(made, key=lambda at: (len(own[at]), len(made[at][1]))):
        new = [p for p in own[at] if p not in updated and argument[p] in trained]
        if new:
            found[at] = UPDATE, new[0]
            updated.add(new[0])
        elif made[at][0] and len(alike[at][0]) == 1:
            found[at] = GRADIENT, alike[at][0][0]
    return found


def _made_of(call: MeasuredCall, result: int) -> tuple[bool, set[int]]:
    """Whether a gradient is in a result, and which inputs are, as far as shapes stay the same."""
    shape = compat.opened(call.closed)[0].outvars[result].aval.shape
    origin = call.results[result]
    outside, graded = set(origin.outside), False
    todo, seen = list(origin.events), set[int]()
    while todo:
        if (at := todo.pop()) in seen:
            continue
        seen.add(at)
        event = call.events[at]
        graded |= event.direction == BACKWARD
        if event.direction == FORWARD and event.site.eqn.outvars[0].aval.shape == shape:
            outside.update(event.came.outside)
            todo.extend(event.inputs)
    return graded, outside
