"""`record`: a record of a run, each step's arrays summed up in a file.

    recorded = polymp.jax.record("run.rec", train_step)
    params, opt_state = recorded(params, opt_state, x)     # what train_step returns, bit for bit

The function itself runs as it always does. Before it runs its traced program, with the probes, as
`perturb` does. What sums an array up is compiled for each shape, and on CPUs small arrays are
summed up in numpy. Of each array only the numbers leave the device that
`polymp.diagnostics.run_record` defines.
"""

import contextlib
import math
import os
import reprlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from polymp.backends.jax import compat
from polymp.backends.jax.arrays import is_array, is_float, is_typed
from polymp.backends.jax.compat import Equation
from polymp.backends.jax.diagnostics.explain import module_of
from polymp.backends.jax.diagnostics.instrument import MeasuredCall
from polymp.backends.jax.diagnostics.perturb import (
    NOWHERE,
    Evaluation,
    Kernels,
    Value,
    rounds_operands,
    wide,
)
from polymp.backends.jax.diagnostics.traced_call import CLOSED, Key, Wrapped, called, source, traced
from polymp.backends.jax.jaxprs import inside
from polymp.diagnostics import run_record
from polymp.diagnostics.call_record import BACKWARD, FORWARD, Call
from polymp.diagnostics.run_record import (
    BLOCK,
    GRADIENT,
    INPUT,
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

    _form = "record(path, jax.jit(step))"

    def __init__(self, fn: Callable[..., object], options: Options) -> None:
        super().__init__(fn)
        self._options = options
        self._name = getattr(fn, "__name__", None) or type(fn).__name__
        self._writer = RecordWriter(options, self._described)
        self._programs: dict[Hashable, _Program] = {}

    def _described(self) -> dict[str, Any]:
        """The fields of the header."""
        return {
            "framework": "jax",
            "versions": {"jax": jax.__version__},
            "model": self._name,
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
            options = self._options
            program = _Program(self.fn, args, kwargs, options.probes, options.modules)
            if not self._programs:  # another call may leave modules out
                paths = {site.scope.module for site in program.call.sites.values()}
                run_record.check_matched(options.modules, paths, self._name)
            self._programs[key] = program
        program = self._programs[key]
        arrays = [x for x in jax.tree.leaves(called(self.fn, args, kwargs)[1:]) if is_array(x)]
        walks = program.run(arrays)
        result = self.fn(*args, **kwargs)
        self._writer.write(program.step(number, walks))
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
    comes back as an update of it. A `scan` has rows of each turn. An optimizer of optax has none;
    `while` loops and `shard_map` have their results. Callbacks with a result are called once more.

    On CPUs a recorded call takes five to ten times as long as `fn` without probes, and 30 to 40
    times with eight, if its arrays are large: each equation is a program of its own. With small
    arrays, and on a GPU, it is a hundred times and more. See `every`.

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
    changes: Any  # of these values, float32 [probes, VALUES]; None if all runs are alike
    own: Any  # without probes, the root mean square of the call's own movements


class _Program:
    """The program that records a call: traced once, and run one equation after the other.

    Equations of one kind, of equal layers for instance, are compiled once.
    """

    def __init__(
        self,
        fn: Callable[..., object],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        probes: int,
        patterns: Sequence[str],
    ) -> None:
        self.call = MeasuredCall(traced(fn, args, kwargs), once=False)
        self.paired = _paired(self.call, called(fn, args, kwargs)[1:])
        self.patterns = patterns
        constants = range(len(self.call.inputs) - len(self.call.traced.names))
        self.names = [*self.call.traced.names, *(f"constant {n + 1}" for n in constants)]
        self.kernels = Kernels([*self.call.traced.arrays, *compat.opened(self.call.closed)[1]])
        self._seeds = self.kernels.seeds(probes)

    def run(self, arrays: Sequence[jax.Array]) -> list["_Walk"]:
        """Runs with numbers of all arrays; of some probes each."""
        with _mesh_of(arrays):
            groups: list[Any] = list(self._seeds) or [None]
            walks = [_Walk(self, seeds) for seeds in groups]
            for walk in walks:
                walk.run(arrays)
        return walks

    def step(self, number: int, walks: Sequence["_Walk"]) -> RecordedStep:
        """A step, with the numbers of a run. Waits for the device."""
        found = [[tuple(s[1:]) for s in walk.summaries] for walk in walks]
        in_numpy = walks[0].in_numpy.read()
        arrays = []
        for (row, *_), *runs in zip(walks[0].summaries, *jax.device_get(found), strict=True):
            numbers, _, own = runs[0]
            if isinstance(numbers, int):
                values, zeros, bad = in_numpy[numbers]
            else:
                *values, zeros, bad = numbers.tolist()
            own = float(own) / values[RMS] if values[RMS] else 0.0
            spread: tuple[float, ...] = ()
            if self._seeds.size:
                changes = [x for _, x, _ in runs if x is not None]
                squares = [np.mean(np.square(x, dtype=np.float64), 0) for x in changes]
                spread = tuple(np.sqrt(np.mean(squares or [np.zeros(VALUES)], 0)).tolist())
            arrays.append(
                row._replace(
                    zeros=int(zeros), bad=int(bad), own=own, values=tuple(values), spread=spread
                )
            )
        return RecordedStep(number, _read(arrays, walks[0].ends), {}, dict(walks[0].left_out))


# Numbers of an array in all runs, up to which a CPU sums it up in numpy, where nothing is compiled.
_IN_NUMPY = 2**18


def _mesh_of(arrays: Sequence[Any]) -> AbstractContextManager[object]:
    """A context with the mesh of some arrays, if they know how they are divided."""
    shardings = (getattr(x, "sharding", None) for x in arrays)
    meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
    known = [m for m in meshes if isinstance(m, Mesh) and AxisType.Explicit in m.axis_types]
    return jax.set_mesh(known[0]) if len(known) == 1 else contextlib.nullcontext()


class _Walk(Evaluation):
    """A run of the program, beside it some probes; its rows as the calls run, and their numbers."""

    def __init__(self, program: _Program, seeds: Any) -> None:
        super().__init__(program.kernels, seeds)
        self._program = program
        self._call = program.call
        self._inputs: dict[int, int] = {}  # places of their rows
        self._written: dict[int, frozenset[int]] = {}  # by reference, what is in it
        self._loops = 0  # `while` loops around, whose calls have no rows
        self.summaries: list[_Summary] = []
        self.in_numpy = run_record.Summaries()
        self.ends: frozenset[int] = NOWHERE  # rows that the program returns, or what is made of
        self.left_out = Counter[str]()

    def run(self, arrays: Sequence[jax.Array]) -> None:
        """Go through the program."""
        closed = self._call.closed
        self._outside = [*arrays, *compat.opened(closed)[1]]
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

    def equation(
        self, at: int, eqn: Equation, values: list[Value], around: tuple[int, ...]
    ) -> Sequence[Value]:
        name = eqn.primitive.name
        if inside(eqn) and name not in CLOSED:
            return super().equation(at, eqn, values, around)
        reads = NOWHERE.union(*(_all(value.sources) for value in values))
        if any(compat.is_reference(v.aval) for v in (*eqn.invars, *eqn.outvars)):
            made = super().equation(at, eqn, values, around)
            return self._referring(eqn, values, made, reads)
        rows = [n for n, v in enumerate(eqn.outvars) if is_float(v.aval)]
        narrow = rounds_operands(eqn, self.kernels.device)
        sizes: dict[int, Any] = {}
        if name in CLOSED:
            call: Call | None = self._left_out(
                name.replace("while", "while loop"), (*around, at), eqn
            )
        else:
            call, rows = self._ended((around, id(eqn))), rows[:1]
        if eqn.effects and not eqn.outvars:
            return []
        if name == "while":
            self._loops += 1
            made = super().equation(at, eqn, values, around)
            self._loops -= 1
        else:
            made, sizes = self.computed(eqn, values, own=call is not None)
            if call is not None and narrow:
                call = call._replace(run=narrow)
        sources = [reads] * len(made)
        if call is not None:
            for n in rows:
                sources[n] = self._add(RESULT, call.op, made[n], reads, call, sizes.get(n, 0.0))
            if len(rows) == 1:
                sources = [sources[rows[0]]] * len(made)
        return [v._replace(sources=came) for v, came in zip(made, sources, strict=True)]

    def _referring(
        self, eqn: Equation, given: list[Value], made: Sequence[Value], reads: frozenset[int]
    ) -> Sequence[Value]:
        """The results of an equation on a reference, with what was written to it before."""
        self.left_out["on references, which jax.new_ref makes"] += 1
        pairs = zip((*eqn.invars, *eqn.outvars), (*given, *made), strict=True)
        for place in (id(value.x) for v, value in pairs if compat.is_reference(v.aval)):
            reads |= self._written.get(place, NOWHERE)
            self._written[place] = reads
        return [value._replace(sources=reads) for value in made]

    # Rows

    def _ended(self, key: Key) -> Call | None:
        """The call that an equation ends with a result; None of any other equation."""
        at = self._call.numbers.get(key)
        group = None if at is None else self._call.events[at].group
        return None if group is None or at in self._call.late else self._call.calls[group]

    def _is_recorded(self, call: Call) -> bool:
        patterns = self._program.patterns
        return not self._loops and bool(run_record.selected([call.module], patterns))

    def _left_out(self, what: str, place: tuple[int, ...], eqn: Equation) -> Call:
        """Count the calls inside an equation; it stands for them, as one."""
        sites = [s for s in self._call.sites.values() if s.parent[: len(place)] == place]
        count = len({self._call.of_event[s.key] for s in sites if s.key in self._call.of_event})
        if count and not self._loops:
            self.left_out[f"in a {what}"] += count
        direction = sites[0].scope.direction if sites else FORWARD
        where = module_of(sites), source(eqn.source_info.traceback), direction
        dtypes = tuple(v.aval.dtype.name for v in eqn.invars if is_float(v.aval))
        name = eqn.primitive.name
        return Call("jax", name, f"jax:{name}", *where, "", None, dtypes, "", ())

    def _result(self, at: int, out: Value) -> None:
        """Add the row of a result of the program."""
        name = self._call.traced.results[at]
        kind, name = RESULT, name if name == "result" else f"result{name}"
        reads = _all(out.sources)
        if at in self._program.paired:
            kind, place = self._program.paired[at]
            name = self._program.names[place]
            if kind == UPDATE:
                reads |= frozenset([~place])
                out = out._replace(x=self.kernels.jitted(_difference)(out.x, self._outside[place]))
        self._add(kind, name, out, reads)

    def _add(
        self,
        kind: str,
        name: str,
        value: Value,
        reads: frozenset[int] = NOWHERE,
        call: Call | None = None,
        own: Any = 0.0,
    ) -> frozenset[int]:
        """Add a row, after those of the inputs that it is the first to read; where it came from."""
        if call is not None and not self._is_recorded(call):
            return reads
        for at in sorted(~at for at in reads if at < 0 and ~at not in self._inputs):
            self._inputs[at] = len(self.summaries)
            self._add(INPUT, self._program.names[at], Value(_numbers(self._outside[at])))
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
        if not x.size or (self.kernels.device.platform == "cpu" and x.size <= _IN_NUMPY):
            rows = np.asarray(x).reshape(shape)
            with np.errstate(all="ignore"):
                found = self.in_numpy.add(rows[0]), _changes(rows, np)
        else:
            with jax.enable_x64(True):  # whatever JAX's own setting is
                found = self.kernels.jitted(_summed, "shape")(x, shape=shape)
        self.summaries.append(_Summary(row, *found, own))
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


# The numbers of an array; those of `polymp.diagnostics.run_record.summary`, on any device.


def _is_counted(x: Any) -> bool:
    """True for arrays that have numbers here: of floats, integers, bools, and random keys."""
    dtype = getattr(x, "dtype", None)
    kinds = (np.floating, np.integer, np.bool_, jax.dtypes.prng_key)
    return dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in kinds)


def _numbers(x: Any) -> jax.Array:
    """An array, or the numbers of a random key."""
    x = jnp.asarray(x)
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _summed(x: jax.Array, shape: tuple[int, int]) -> tuple[jax.Array, jax.Array | None]:
    """The values of the first row, how many are zero and not finite, in float64; `_changes`."""
    rows = x.reshape(shape)
    return _of_row(rows[0]), _changes(rows, jnp)


def _of_row(x: jax.Array) -> jax.Array:
    wide = x.astype(np.float64)
    finite = jnp.isfinite(wide)
    wide = jnp.where(finite, wide, 0.0)
    sizes = jnp.abs(wide)
    top = jnp.max(sizes)
    scale = jnp.where(top > 0, top, 1.0) if x.dtype == np.float64 else 1.0
    wide = wide / scale  # squares of numbers in other dtypes are in its range
    rms = jnp.sqrt(jnp.mean(wide * wide))
    ends = jnp.stack([top / scale, rms, jnp.mean(wide), jnp.mean(sizes) / scale])
    values = jnp.concatenate([ends, _projected(wide, jnp), _few(wide)]) * scale
    counts = jnp.stack([jnp.sum(_is_zero(x)), jnp.sum(~finite)])
    return jnp.concatenate([values, counts.astype(np.float64)])


def _is_zero(x: jax.Array) -> jax.Array:
    """Where an array is zero; by the bits, as XLA on CPUs takes a subnormal number for zero."""
    if not is_float(x) or x.dtype.itemsize not in (2, 4, 8):
        return x == 0
    bits = lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))
    return (bits << 1) == 0


def _changes(rows: Any, xp: Any) -> Any:
    """How far the values of rows are from those of the first; None for one row.

    Differences of the numbers themselves are summed up: differences of sums lose digits, all of
    them where a mask is the smallest float32.
    """
    if len(rows) == 1 or not rows.size:
        return None
    kept = xp.all(xp.isfinite(rows), 0)
    x = xp.where(kept, rows[0].astype(np.float64), 0)
    size = xp.abs(x)
    top = xp.max(size)
    by = 1 / xp.where(top < np.finfo(x.dtype).tiny, 1, top)  # squares may be beyond the range
    one = x * by
    square = xp.mean(one * one)

    def change(rows: Any) -> Any:
        other = xp.where(kept, rows.astype(np.float64), 0)
        off = (other - x) * by
        more = xp.mean(off * (one + other * by), -1)
        rms = xp.sqrt(square) + xp.sqrt(xp.maximum(square + more, 0))
        sizes = xp.abs(other)
        ends = [
            (xp.max(sizes, -1) - top) * by,
            more / xp.where(rms > 0, rms, 1),
            xp.mean(off, -1),
            xp.mean((sizes - size) * by, -1),
        ]
        numbers = xp.concatenate([xp.stack(ends, -1), _projected(off, xp), _few(off)], -1)
        return (numbers / by).astype(np.float32)

    if xp is np:
        return change(rows[1:])
    # One after the other: less memory is touched.
    return lax.map(lambda at: change(rows[at]), jnp.arange(1, len(rows)))


def _projected(x: Any, xp: Any) -> Any:
    """The projections of rows of numbers."""
    size = x.shape[-1]
    blocks = -(-size // BLOCK)
    outer, inner = (signs.astype(x.dtype) for signs in run_record.signs(blocks))
    if blocks > 1:
        x = xp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, blocks * BLOCK - size)])
    rows = x.reshape(*x.shape[:-1], blocks, -1)
    how = {} if xp is np else {"precision": "highest"}
    sums = xp.matmul(rows, inner[: rows.shape[-1]], **how)
    return xp.sum(sums * outer, -2) / math.sqrt(size)


def _few(x: Any) -> Any:
    """The elements of rows of numbers that are kept."""
    return x[..., np.array(run_record.places(x.shape[-1]))]


# Which results are arguments, changed, or gradients of them.


def _paired(call: MeasuredCall, given: tuple[Any, ...]) -> dict[int, tuple[str, int]]:
    """By result, the kind of its row, and the place among the inputs of the argument that it is of.

    Results of an argument's structure, dtypes and shapes are its update if they are made of it and
    of a gradient, without an op that changes the shape; its gradient if they come out of the
    backward pass, and no other argument is like it.
    """
    parts: dict[tuple[Any, ...], list[tuple[str, int]]] = {}
    leaves = jax.tree_util.tree_leaves_with_path(given)
    for place, (path, x) in enumerate((path, x) for path, x in leaves if is_typed(x)):
        if is_float(x):
            parts.setdefault(path[:2], []).append((jax.tree_util.keystr(path[2:]), place))
    variables = compat.opened(call.closed)[0].outvars
    results = [n for n, v in enumerate(variables) if is_float(v.aval)]
    found: dict[int, tuple[str, int]] = {}
    for at in results:
        if at in found:
            continue
        alike = [pairs for part in parts.values() if (pairs := _alike(call, results, at, part))]
        most = max(map(len, alike), default=0)
        alike = [pairs for pairs in alike if len(pairs) == most]
        taken = {place for _, place in found.values()}
        new = [
            pairs
            for pairs in alike
            if pairs[0][1] not in taken and any(to in _made_of(call, n)[1] for n, to in pairs)
        ]
        if new:
            found.update((n, (UPDATE, to)) for n, to in new[0])
        elif len(alike) == 1 and all(_made_of(call, n)[0] for n, _ in alike[0]):
            found.update((n, (GRADIENT, to)) for n, to in alike[0])
    return found


def _alike(
    call: MeasuredCall, results: Sequence[int], first: int, part: Sequence[tuple[str, int]]
) -> list[tuple[int, int]]:
    """The results, from one on, of the structure of an argument, with its inputs; [] if none are.

    Their names are one beginning with the argument's paths after it.
    """
    start = results.index(first)
    some = results[start : start + len(part)]
    names = ["" if (name := call.traced.results[n]) == "result" else name for n in some]
    prefix = names[0].removesuffix(part[0][0])
    variables = compat.opened(call.closed)[0].outvars
    pairs = list(zip(some, (place for _, place in part), strict=False))
    same = (str(variables[n].aval) == str(call.inputs[place].aval) for n, place in pairs)
    fits = names == [prefix + path for path, _ in part] and all(same)
    return pairs if fits else []


def _made_of(call: MeasuredCall, result: int) -> tuple[bool, set[int]]:
    """Of a result: whether a gradient is in it; and which inputs are, too, if so.

    As far as forward ops do not change the shape.
    """
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
            outside.update(event.outside)
            todo.extend(event.inputs)
    return graded, outside if graded else set()
