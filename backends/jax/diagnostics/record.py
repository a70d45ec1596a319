"""`record`: a record of a run, each step's arrays summed up in a file.

    recorded = polymp.jax.record("run.rec", train_step)
    params, opt_state = recorded(params, opt_state, x)     # what train_step returns, bit for bit

The function itself runs as it always does. Before it runs its traced program, one equation after
the other, each a small compiled program, and with it the probes: the same with every result moved
by its rounding, all at once under `jax.vmap`, where the call itself is the first. So equal layers
are compiled once, and the turns of a `scan` have rows as if they were written one after the other.
Nearly all of a first call is compiling: what moves a result and what sums it up is compiled for
each shape, not for each kind of equation, and on CPUs small arrays are summed up in numpy. Of each
array only the numbers leave the device that `polymp.diagnostics.run_record` defines.
"""

import contextlib
import functools
import itertools
import math
import os
import reprlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from polymp import progress
from polymp.backends.jax import compat
from polymp.backends.jax.arrays import is_array, is_float, is_typed
from polymp.backends.jax.autocast.known_functions import LAYOUT
from polymp.backends.jax.compat.programs import Equation
from polymp.backends.jax.diagnostics.call_site import Key, Scope, source
from polymp.backends.jax.diagnostics.instrument import MeasuredCall, Origin, quick_options
from polymp.backends.jax.diagnostics.perturb import (
    Evaluation,
    amount,
    device_of,
    rounded,
    rounds_operands,
    shifted,
    wider,
)
from polymp.backends.jax.diagnostics.traced_call import Wrapped, called, traced
from polymp.backends.jax.jaxprs import inside, interpreted
from polymp.diagnostics import rounding, run_record
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

    `fn` itself is called as it is, so its results are what they are without, every bit of them.
    Recorded is its traced program, which runs before `fn`, equation by equation: each array that
    goes in, the result of each op call, forward and backward, and each array that comes out. Arrays
    that come back as an argument went in are recorded as updates of it, and gradients by the
    argument that they are of. A `scan` has rows of each turn, branches of the one that is taken. An
    optimizer of optax is followed, without rows of its own; so are `while` loops and `shard_map`,
    whose results are recorded. Callbacks that return a result are called once more.

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

# Where an array comes from: places of rows, and ~n for input n; of what a scan stacks, a list with
# those of each turn.
_Sources: TypeAlias = Any

_NOWHERE: frozenset[int] = frozenset()


# Options of XLA.
_Options: TypeAlias = tuple[tuple[str, bool | int], ...]


class _Value(NamedTuple):
    """An array of the program that records."""

    x: Any
    runs: bool = False  # one axis more, the first: the call itself and its probes; else all alike
    sources: _Sources = _NOWHERE
    fixed: bool = False  # made of random bits and constants by what every machine rounds alike


class _Summary(NamedTuple):
    """A row, and its numbers on the device."""

    row: RecordedArray  # without them
    numbers: Any  # float64 [VALUES + 2]: values, zeros, bad
    changes: Any  # [probes, VALUES]; None if the array is the same in all probes
    own: Any  # float64 [], the root mean square of its movements


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
        self.kernels: dict[Hashable, Callable[..., Any]] = {}
        self.device = device_of(self.call.traced.arrays)
        sizes = (math.prod(v.aval.shape) for v in self.call.inputs if hasattr(v.aval, "shape"))
        numbers = sum(sizes)
        options = quick_options(self.call.traced.arrays) or {}
        if numbers >= _SMALL:
            options.pop("xla_backend_optimization_level", None)
        self.options: _Options = tuple(options.items())
        most = max(1, _TOGETHER // max(numbers, 1))
        at_once = max((n for n in range(1, probes + 1) if not probes % n and n <= most), default=1)
        seeds = np.arange(1, probes + 1, dtype=np.uint32).reshape(-1, at_once)
        self._seeds = np.pad(seeds, ((0, 0), (1, 0)))  # the first run, of seed 0, is not moved

    def run(self, arrays: Sequence[jax.Array]) -> list["_Walk"]:
        """Runs with numbers of all arrays; of some probes each."""
        with progress.line("record", unit="op") as line, _mesh_of(arrays):
            groups: list[Any] = list(self._seeds) or [None]
            walks = [_Walk(self, seeds, line) for seeds in groups]
            for walk in walks:
                walk.run(arrays)
        return walks

    def step(self, number: int, walks: Sequence["_Walk"]) -> RecordedStep:
        """A step, with the numbers of a run. Waits for the device."""
        found = [[tuple(s[1:]) for s in walk.summaries] for walk in walks]
        arrays = []
        for parts in zip(walks[0].summaries, *jax.device_get(found), strict=True):
            (row, *_), *runs = parts
            (*values, zeros, bad), own = runs[0][0].tolist(), float(runs[0][2])
            own = own / values[RMS] if values[RMS] else 0.0
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


# Numbers of a program's inputs, times probes, up to which these run at once; numbers, up to which
# its kernels are not optimised; numbers of an array in all runs, up to which a CPU sums it up in
# numpy, where nothing is compiled.
_TOGETHER = 2**28
_SMALL = 2**16
_IN_NUMPY = 2**18


def _mesh_of(arrays: Sequence[Any]) -> AbstractContextManager[object]:
    """A context with the mesh of some arrays, if they know how they are divided."""
    shardings = (getattr(x, "sharding", None) for x in arrays)
    meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
    known = [m for m in meshes if isinstance(m, Mesh) and AxisType.Explicit in m.axis_types]
    return jax.set_mesh(known[0]) if len(known) == 1 else contextlib.nullcontext()


class _Walk(Evaluation[_Value]):
    """A run of the program, beside it some probes; its rows as the calls run, and their numbers."""

    def __init__(self, program: _Program, seeds: Any, line: progress.Line) -> None:
        super().__init__()
        self._program, self._seeds, self._line = program, seeds, line
        self._call = program.call
        self._inputs: dict[int, int] = {}  # places of their rows
        self._written: dict[int, frozenset[int]] = {}  # by reference, what is in it
        self._loops = 0  # `while` loops around, whose calls have no rows
        self.summaries: list[_Summary] = []
        self.ends: frozenset[int] = _NOWHERE  # rows that the program returns, or what is made of
        self.left_out = Counter[str]()

    def run(self, arrays: Sequence[jax.Array]) -> None:
        """Go through the program."""
        closed = self._call.closed
        self._outside = [*arrays, *compat.opened(closed)[1]]
        counted = [_is_counted(v.aval) for v in self._call.inputs]
        ends = [
            _Value(x, False, frozenset([~n]) if counted[n] else _NOWHERE)
            for n, x in enumerate(self._outside)
        ]
        count = len(arrays)
        equation = functools.partial(self._equation, ())
        outs = interpreted(closed, ends[:count], equation, self.number, ends[count:])
        made = _NOWHERE.union(*(_all(out.sources) for out in outs))
        first = len(self.summaries)
        for at, out in enumerate(outs):
            if is_float(out.x):
                self._result(at, out)
        self.ends = made | {*range(first, len(self.summaries))}
        del self._outside

    def number(self, value: Any) -> _Value:
        return _Value(value)

    def leaf(
        self, parent: tuple[int, ...], at: int, eqn: Equation, values: list[_Value]
    ) -> Sequence[_Value]:
        name, place = eqn.primitive.name, (*parent, at)
        if name == "scan":
            return self._scan(place, eqn, values)
        if name == "cond":
            taken = int(_first(values[0]))  # in the probes, too: no rounding takes another
            return self.program(inside(eqn)[taken].closed, values[1:], (*place, taken))
        reads = _NOWHERE.union(*(_all(value.sources) for value in values))
        if any(compat.is_reference(v.aval) for v in (*eqn.invars, *eqn.outvars)):
            return self._referring(eqn, values, reads)
        rows, is_fixed = [n for n, v in enumerate(eqn.outvars) if is_float(v.aval)], False
        call: Call | None
        by: dict[int, Any] = {}
        narrow = rounds_operands(eqn, self._program.device)
        if name == "while":
            call = self._left_out("in a while loop", place, eqn)
            made = self._while(place, eqn, values)
        else:
            if name == "shard_map":
                call = self._left_out("in a shard_map", place, eqn)
            else:
                call, rows = self._ended((parent, id(eqn))), rows[:1]
            if eqn.effects and not eqn.outvars:
                return []  # what it does is done by the function itself
            self._line.step()
            kernel = self._kernel(eqn, rows if call else [], is_fixed := _is_fixed(eqn, values))
            xs, by = kernel([value.x for value in values], self._seeds)
            move = self.move()
            if self._seeds is not None:
                for n, far in by.items():
                    xs[n] = self._jitted(_moved)(xs[n], far, self._seeds, move + np.uint32(n))
            shapes = (v.aval.shape for v in eqn.outvars)
            made = [_Value(x, x.ndim > len(of)) for x, of in zip(xs, shapes, strict=True)]
            if call is not None and narrow:
                call = call._replace(run=narrow)
        sources = [reads] * len(made)
        if call is not None:
            for n in rows:
                own = by.get(n), rounding.of_operands(narrow)
                sources[n] = self._add(RESULT, call.op, made[n], reads, call, *own)
            if len(rows) == 1:
                sources = [sources[rows[0]]] * len(made)
        return [
            value._replace(sources=came, fixed=is_fixed)
            for value, came in zip(made, sources, strict=True)
        ]

    def _referring(
        self, eqn: Equation, values: list[_Value], reads: frozenset[int]
    ) -> Sequence[_Value]:
        """The results of an equation on a reference, which has the call's own array in all runs."""
        self.left_out["on references, which jax.new_ref makes"] += 1
        own = [_first(value) for value in values]
        outs = list(compat.put(eqn.primitive, own, eqn.params))
        pairs = zip((*eqn.invars, *eqn.outvars), (*own, *outs), strict=True)
        for place in (id(x) for v, x in pairs if compat.is_reference(v.aval)):
            reads |= self._written.get(place, _NOWHERE)
            self._written[place] = reads
        return [_Value(x, sources=reads) for x in outs]

    def _jitted(self, fn: Callable[..., Any], *static: str) -> Callable[..., Any]:
        return _jitted(fn, self._program.options, static)

    def _kernel(self, eqn: Equation, rows: Sequence[int], still: bool) -> Callable[..., Any]:
        """`_evaluated` for an equation; one for all alike."""
        program = self._program
        kernels, own = program.kernels, (id(eqn), *rows, still)
        if own not in kernels:
            narrow = rounds_operands(eqn, program.device)
            kind = _Kind(eqn, tuple(rows), still, narrow, program.options)
            try:
                kernels[own] = _compiled(kind)
            except TypeError:  # a parameter has no hash
                kernels[own] = _compiled.__wrapped__(kind)
        return kernels[own]

    # Control

    def _scan(
        self, place: tuple[int, ...], eqn: Equation, values: list[_Value]
    ) -> Sequence[_Value]:
        (body,) = inside(eqn)
        fixed, state, over = body.split(values)
        turns = range(body.times)
        stacks: list[list[_Value]] = [[_ABSENT] * body.times for _ in eqn.outvars[body.carries :]]
        for turn in reversed(turns) if eqn.params["reverse"] else turns:
            runs = tuple(value.runs for value in over)
            slices = self._jitted(_sliced, "runs")(
                [value.x for value in over], np.int32(turn), runs=runs
            )
            row = [
                v._replace(x=x, sources=v.sources[turn] if type(v.sources) is list else v.sources)
                for x, v in zip(slices, over, strict=True)
            ]
            outs = self.program(body.closed, [*fixed, *state, *row], (*place, 0))
            state = outs[: body.carries]
            for stack, out in zip(stacks, outs[body.carries :], strict=True):
                stack[turn] = out
        if not turns:
            none = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars[body.carries :]]
            return [*state, *map(_Value, none)]
        whole = []
        for stack in stacks:
            runs = tuple(value.runs for value in stack)
            x = self._jitted(_stacked, "runs")([value.x for value in stack], runs=runs)
            whole.append(_Value(x, any(runs), [value.sources for value in stack]))
        return [*state, *whole]

    def _while(self, place: tuple[int, ...], eqn: Equation, values: list[_Value]) -> list[_Value]:
        """A loop whose rounds have no rows; in the probes it has as many rounds."""
        body, condition = inside(eqn)
        fixed, state, _ = body.split(values)
        tested = condition.of(values)[: condition.fixed]
        self._loops += 1
        while bool(_first(self.program(condition.closed, [*tested, *state], (*place, 1))[0])):
            state = self.program(body.closed, [*fixed, *state], (*place, 0))
        self._loops -= 1
        return state

    # Rows

    def _ended(self, key: Key) -> Call | None:
        """The call that an equation ends with a result; None of any other equation."""
        at = self._call.numbers.get(key)
        group = None if at is None else self._call.events[at].group
        return None if group is None or at in self._call.late else self._call.calls[group]

    def _is_recorded(self, call: Call) -> bool:
        patterns = self._program.patterns
        return not self._loops and bool(run_record.selected([call.module], patterns))

    def _left_out(self, reason: str, place: tuple[int, ...], eqn: Equation) -> Call:
        """Count the calls inside an equation; it stands for them, as one."""
        sites = [s for s in self._call.sites.values() if s.parent[: len(place)] == place]
        count = len({self._call.of_event[s.key] for s in sites if s.key in self._call.of_event})
        if count and not self._loops:
            self.left_out[reason] += count
        levels = zip(*(s.scope.names for s in sites), strict=False)
        same = itertools.takewhile(lambda names: len({*names}) == 1, levels)
        module = Scope(tuple(names[0] for names in same)).module
        direction = sites[0].scope.direction if sites else FORWARD
        where = module, source(eqn.source_info.traceback), direction
        dtypes = tuple(v.aval.dtype.name for v in eqn.invars if is_float(v.aval))
        name = eqn.primitive.name
        return Call("jax", name, f"jax:{name}", *where, "", None, dtypes, "", ())

    def _result(self, at: int, out: _Value) -> None:
        """Add the row of a result of the program."""
        name = self._call.traced.results[at]
        kind, name = RESULT, name if name == "result" else f"result{name}"
        reads = _all(out.sources)
        if at in self._program.paired:
            kind, place = self._program.paired[at]
            name = self._program.names[place]
            if kind == UPDATE:
                reads |= frozenset([~place])
                out = out._replace(x=self._jitted(_difference)(out.x, self._outside[place]))
        self._add(kind, name, out, reads)

    def _add(
        self,
        kind: str,
        name: str,
        value: _Value,
        reads: frozenset[int] = _NOWHERE,
        call: Call | None = None,
        by: Any = None,
        far: float = 0.0,
    ) -> frozenset[int]:
        """Add a row, after those of the inputs that it is the first to read; where it came from."""
        if call is not None and not self._is_recorded(call):
            return reads
        for at in sorted(~at for at in reads if at < 0 and ~at not in self._inputs):
            self._inputs[at] = len(self.summaries)
            self._add(INPUT, self._program.names[at], _Value(_numbers(self._outside[at])))
        places = sorted({at if at >= 0 else self._inputs[~at] for at in reads})
        where: Any = ("", "", FORWARD, "", (), "")
        if call is not None:
            where = call.module, call.source, call.direction, call.rule, call.inputs, call.run
        if not is_float(value.x):
            value = _Value(_first(value))
        x, by, runs = _whole(value.x), _whole(by), value.runs
        of = x.dtype.name, tuple(x.shape[runs:]), 0, 0, 0.0
        row = RecordedArray(*(kind, name, *where, *of, tuple(places), ()))
        if self._program.device.platform == "cpu" and x.size <= _IN_NUMPY:
            x, by = np.asarray(x), None if by is None else np.asarray(by)
            with np.errstate(all="ignore"):
                found = _summary(x, by, far, runs, np)
        else:
            found = self._jitted(_summary, "runs", "xp")(x, by, far, runs=runs, xp=jnp)
        self.summaries.append(_Summary(row, *found))
        return frozenset([len(self.summaries) - 1])


def _first(value: _Value) -> Any:
    """The array of the call itself."""
    return value.x[0] if value.runs else value.x


_ABSENT = _Value(None)


def _is_fixed(eqn: Equation, values: Sequence[_Value]) -> bool:
    """True for random numbers before a function is applied: a mask is the same in all runs."""
    name = eqn.primitive.name
    if name.startswith(("random_", "threefry")):
        return True
    same = name in _SAME or not any(is_float(v.aval) for v in eqn.outvars)
    return same and all(value.fixed or not _all(value.sources) for value in values)


_SAME = LAYOUT | frozenset("add sub mul max min bitcast_convert_type convert_element_type".split())


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


def _all(sources: _Sources) -> frozenset[int]:
    if isinstance(sources, frozenset):
        return sources
    return _NOWHERE.union(*map(_all, sources))


class _Kind:
    """How an equation is evaluated; equal for all of one primitive and one kind of arguments."""

    def __init__(
        self,
        eqn: Equation,
        rows: tuple[int, ...],
        still: bool,
        narrow: str,
        options: _Options,
    ) -> None:
        self.how = eqn, rows, still, narrow
        self.options = options
        given = tuple(v.aval for v in eqn.invars), rows, still, narrow, options
        self._key = eqn.primitive, tuple(sorted(eqn.params.items(), key=itemgetter(0))), given

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kind) and self._key == other._key


# Nearly all of a first call is compiling: programs of one process share what is compiled.
@functools.lru_cache(2**11)
def _compiled(kind: _Kind) -> Callable[..., Any]:
    """`_evaluated` for equations of a kind."""
    evaluated = functools.partial(_evaluated, *kind.how)
    compiled: Callable[..., Any] = jax.jit(evaluated, compiler_options=dict(kind.options))
    return compiled


@functools.cache
def _jitted(
    fn: Callable[..., Any], options: _Options, static: tuple[str, ...]
) -> Callable[..., Any]:
    """A function of this file, compiled."""
    compiled: Callable[..., Any] = jax.jit(
        fn, static_argnames=static, compiler_options=dict(options)
    )
    return compiled


def _evaluated(
    eqn: Equation,
    rows: tuple[int, ...],
    still: bool,
    narrow: str,
    given: list[Any],
    seeds: Any,
) -> tuple[list[Any], dict[int, Any]]:
    """The results of an equation; of some how far its rounding moves them, if not `still`."""
    runs = [x.ndim > len(v.aval.shape) for x, v in zip(given, eqn.invars, strict=True)]
    own = [x[0] if several else x for x, several in zip(given, runs, strict=True)]

    def run(seed: Any, *given: Any) -> list[Any]:
        if narrow:
            moved = zip(given, rounded(given, narrow, seed), strict=True)
            given = tuple(jnp.where(seed > 0, other, x) for x, other in moved)
        return list(_put(eqn, given))

    if eqn.effects or seeds is None or not (narrow or any(runs)):
        outs = list(compat.put(eqn.primitive, own, eqn.params))
        firsts = outs
    else:
        outs = jax.vmap(run, (0, *(0 if several else None for several in runs)))(seeds, *given)
        firsts = [x[0] for x in outs]
    wanted: Sequence[int] = rows if seeds is None else range(len(outs))
    if still:
        wanted = ()
    moves = {n: amount(eqn, own, firsts[n], exact=seeds is not None) for n in wanted}
    return outs, {n: by for n, by in moves.items() if by is not None}


def _moved(x: Any, by: Any, seeds: Any, move: Any) -> Any:
    """An array, moved in all runs but the first."""

    def run(seed: Any, x: Any) -> Any:
        return jnp.where(seed > 0, shifted(x, by, seed, move), x)

    return jax.vmap(run, (0, 0 if x.ndim > by.ndim else None))(seeds, x)


def _put(eqn: Equation, given: Sequence[Any]) -> Sequence[Any]:
    """The results of an equation in a run; one run after the other if it has no batches."""

    def plain(*given: Any) -> tuple[Any, ...]:
        return tuple(compat.put(eqn.primitive, given, eqn.params))

    if eqn.primitive.name not in _ONE_BY_ONE:
        with contextlib.suppress(NotImplementedError):
            return plain(*given)
    results: Sequence[Any] = _sequential(plain)(*given)
    return results


_sequential: Any = jax.custom_batching.sequential_vmap  # without types


# Of whose batches XLA makes groups of channels, which are slow on CPUs.
_ONE_BY_ONE = frozenset({"conv_general_dilated"})


def _sliced(xs: list[Any], turn: Any, runs: tuple[bool, ...]) -> list[Any]:
    """The rows of arrays that a turn of a scan reads."""
    return [x[:, turn] if several else x[turn] for x, several in zip(xs, runs, strict=True)]


def _stacked(xs: list[Any], runs: tuple[bool, ...]) -> Any:
    """An array that a scan stacks."""
    if not any(runs):
        return jnp.stack(xs)
    shape = xs[runs.index(True)].shape
    return jnp.stack([jnp.broadcast_to(x, shape) for x in xs], 1)


def _difference(x: Any, old: Any) -> Any:
    """A new array as its difference from an old one."""
    return _wide(x) - _wide(old)


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


def _wide(x: Any) -> Any:
    return x.astype(wider(x.dtype))


def _summary(x: Any, by: Any, far: float, runs: bool, xp: Any) -> tuple[Any, Any, Any]:
    """The numbers of an array: float64 [VALUES + 2], their changes in the probes, and its own.

    With numpy as `xp`, or with jax.numpy.
    """
    if not x.size:
        return xp.zeros(VALUES + 2), None, 0.0
    rows = x.reshape(len(x) if runs else 1, -1)
    with jax.enable_x64(True):  # whatever JAX's own setting is
        if xp is np:
            values, *counts = run_record.summary(rows[0])
            numbers: Any = np.array([*values, *counts])
        else:
            numbers = _summed(rows[0])
        own = 0.0 if by is None else _size(by.reshape(-1) + far * xp.abs(rows[0]), xp)
        return numbers, _changes(rows, xp) if runs else None, own


def _summed(x: jax.Array) -> jax.Array:
    """The values of a row of numbers, how many are zero, and how many not finite; in float64."""
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


def _changes(rows: Any, xp: Any) -> Any:
    """How far the values of rows are from those of the first; float32 [probes, VALUES].

    Differences of the numbers themselves are summed up: differences of sums lose digits.
    """
    kept = xp.all(xp.isfinite(rows), 0)  # in float64: a mask may be the smallest of float32
    x = xp.where(kept, rows[0].astype(np.float64), 0)
    size = xp.abs(x)
    top = xp.max(size)
    least = np.finfo(x.dtype).tiny
    by = 1 / xp.where(top < least, 1, top)  # squares of large numbers are beyond the range
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


def _size(x: Any, xp: Any) -> Any:
    """The root mean square of an array's finite numbers, float64 []."""
    wide = xp.where(xp.isfinite(x), x, 0).astype(np.float64)
    return xp.sqrt(xp.mean(wide * wide))


def _is_zero(x: jax.Array) -> jax.Array:
    """Where an array is zero; by the bits, as XLA on CPUs takes a subnormal number for zero."""
    if not is_float(x) or x.dtype.itemsize not in (2, 4, 8):
        return x == 0
    bits = lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))
    return (bits << 1) == 0


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


class _Paired(NamedTuple):
    """An argument that a result is the update or the gradient of."""

    kind: str
    place: int  # among the inputs


def _paired(call: MeasuredCall, given: tuple[Any, ...]) -> dict[int, _Paired]:
    """By result, the argument it belongs to.

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
    found: dict[int, _Paired] = {}
    for at in results:
        if at in found:
            continue
        alike = [pairs for part in parts.values() if (pairs := _alike(call, results, at, part))]
        most = max(map(len, alike), default=0)
        alike = [pairs for pairs in alike if len(pairs) == most]
        taken = {to.place for to in found.values()}
        new = [
            pairs
            for pairs in alike
            if pairs[0][1] not in taken and any(to in _made_of(call, n)[1] for n, to in pairs)
        ]
        if new:
            found.update((n, _Paired(UPDATE, to)) for n, to in new[0])
        elif len(alike) == 1 and all(_made_of(call, n)[0] for n, _ in alike[0]):
            found.update((n, _Paired(GRADIENT, to)) for n, to in alike[0])
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
    origin: Origin = call.results[result]
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
