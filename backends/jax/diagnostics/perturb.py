"""Runs of a program in which every op is moved by its rounding, beside one that is not.

See `polymp.diagnostics.rounding`, which says by how much, and why. The program is run one equation
after the other, each a small compiled program; the runs are one axis of its arrays, by `jax.vmap`.
So equal layers are compiled once, and loops and branches are those of Python. Nearly all of a first
run is compiling: what moves a result is compiled for each shape, not for each kind of equation.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.extend.core as core
import jax.numpy as jnp
import numpy as np
from jax import lax

from polymp.backends.jax import compat
from polymp.backends.jax.arrays import is_float, is_inexact
from polymp.backends.jax.autocast.api import PolicyLike, autocast
from polymp.backends.jax.autocast.fp8_contraction import as_wide, operands_of
from polymp.backends.jax.autocast.known_functions import INDEPENDENT, LAYOUT, OURS, op_of, spelling
from polymp.backends.jax.compat import Equation
from polymp.backends.jax.diagnostics.explain import Placed, flops, traced, with_sites
from polymp.backends.jax.diagnostics.instrument import quick_options
from polymp.backends.jax.jaxprs import inside
from polymp.backends.jax.modules import nnx
from polymp.diagnostics import rounding
from polymp.diagnostics.rounding import FARTHER, Run, movement
from polymp.diagnostics.run_record import RunRecord
from polymp.rules.vocabulary import vocabulary

_SUMS = frozenset("reduce_sum cumsum reduce_window_sum dot_general conv_general_dilated".split())
# Besides ops that compute nothing, primitives whose results are among their operands or constants.
_CHOOSES = INDEPENDENT.union(
    "iota select_and_gather_add polymp_fp8_quantise scatter-max scatter-min".split()
)

# By path, the arrays of a tree.
_Arrays = dict[str, jax.Array]


class Program:
    """A function at arguments, traced once."""

    def __init__(
        self,
        fn: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        dtype: str | None,
        policy: PolicyLike,
        cotangent: Callable[[str, tuple[int, ...]], jax.typing.ArrayLike] | None,
    ) -> None:
        tree = tuple(args), dict(kwargs)
        self._given = {path: jnp.asarray(x) for path, x in rounding.arrays(tree).items()}
        floats = [p for p, x in self._given.items() if is_float(x)]
        self._graded = floats if cotangent is not None else []
        fn, model = nnx.owned(fn, ())
        if dtype is None:  # regions inside need a function around them that is autocast
            transformed = autocast(fn, enabled=False)
        else:
            transformed = autocast(fn, dtype=dtype, policy=policy)
        self._paths: list[str] = []

        def program(arrays: _Arrays) -> tuple[list[jax.Array], list[jax.Array]]:
            def called(own: _Arrays) -> tuple[_Arrays, _Arrays]:
                whole = arrays | own  # by path; JAX sorts these as texts: "[10]" before "[2]"
                args, kwargs = rounding.rebuilt(tree, (whole[path] for path in self._given))
                out = transformed(*nnx.copied(model), *args, **kwargs)
                found = rounding.results(out, "jax")
                results = {path: jnp.asarray(x) for path, x in found.items()}
                low = {path: x for path, x in results.items() if is_inexact(x)}
                return low, {path: x for path, x in results.items() if path not in low}

            own = {path: arrays[path] for path in self._graded}
            low, pullback, others = jax.vjp(called, own, has_aux=True)
            found = {**low, **others}
            self._paths = list(found)
            if cotangent is None or not own:
                return list(found.values()), []
            seeds = {p: jnp.asarray(cotangent(p, x.shape), x.dtype) for p, x in low.items()}
            (gradients,) = pullback(seeds)
            return list(found.values()), [gradients[p] for p in self._graded]

        self.closed, record, self._flat, *_ = traced(program, (self._given,), {})
        self._calls = tuple(call for call, _ in with_sites(self.closed, record))
        self._program = program
        self._kernels = Kernels(self._flat)
        self._plain = jax.jit(core.jaxpr_as_fun(self.closed))

    def ran(self) -> tuple[Run, Run]:
        """The results, and the calls; twice, as a torch program has two."""
        run = self._run(self._plain(*self._flat))._replace(calls=self._calls)
        return run, run

    def probes(self, count: int) -> list[Run]:
        """So many runs in which every op is moved."""
        given = [Value(x) for x in self._flat]
        outs = Evaluation(self._kernels, count).program(self.closed, given, ())
        xs = [(np.asarray(out.x), out.runs) for out in outs]
        runs = range(1, count + 1)
        return [self._run([x[i] if several else x for x, several in xs]) for i in runs]

    def record(self, record: Callable[..., Any], probes: int) -> RunRecord:
        """A record of it, in memory, by `record` of this backend, whose file imports this one."""
        recorder = record(None, jax.jit(self._program), probes=probes)
        recorder(self._given)
        made: RunRecord = recorder.record
        return made

    def _run(self, outs: Sequence[Any]) -> Run:
        results = dict(zip(self._paths, outs, strict=False))
        gradients = dict(zip(self._graded, outs[len(self._paths) :], strict=True))
        return Run(
            {path: _array(x) for path, x in results.items()},
            {path: _array(x) for path, x in gradients.items()},
            {path: x.dtype.name for path, x in results.items()},
        )


# A program, one equation after the other.

NOWHERE: frozenset[int] = frozenset()


class Value(NamedTuple):
    """An array of a program that runs."""

    x: Any
    runs: bool = False  # one axis more, the first: a run for each seed; else all are alike
    fixed: bool = False  # made of random bits and constants by what every machine rounds alike
    # For `record`, where it comes from: places of rows, and ~n for input n; of what a scan stacks,
    # a list with those of each turn.
    sources: Any = NOWHERE

    @property
    def first(self) -> Any:
        """The array of the first run."""
        return self.x[0] if self.runs else self.x


class Evaluation(Placed[Value]):
    """Runs programs, and beside each so many probes."""

    def __init__(self, kernels: "Kernels", probes: int) -> None:
        self.kernels = kernels
        # Of the runs; the first, 0, moves nothing. None if there is one run.
        self.seeds: Any = np.arange(probes + 1, dtype=np.uint32) if probes else None
        self._moves = 0  # how many arrays have been moved

    def number(self, value: Any) -> Value:
        """The value of a number in a program."""
        return Value(value, fixed=True)

    def equation(
        self, at: int, eqn: Equation, values: list[Value], around: tuple[int, ...]
    ) -> Sequence[Value]:
        """The results of an equation."""
        place = *around, at
        match eqn.primitive.name:
            case "scan":
                return self._scan(place, eqn, values)
            case "while":
                return self._while(place, eqn, values)
            case "cond":
                taken = int(values[0].first)  # in all runs: no rounding takes another
                return self.program(inside(eqn)[taken].closed, values[1:], (*place, taken))
        return super().equation(at, eqn, values, around)

    def leaf(self, eqn: Equation, values: list[Value], around: tuple[int, ...]) -> Sequence[Value]:
        if any(compat.is_reference(v.aval) for v in (*eqn.invars, *eqn.outvars)):
            outs = compat.put(eqn.primitive, [value.first for value in values], eqn.params)
            return list(map(Value, outs))  # the array of the first run, in all of them
        if eqn.effects and not eqn.outvars:
            return []  # what it does is done by the function itself
        return self.computed(eqn, values)

    def computed(self, eqn: Equation, values: list[Value]) -> list[Value]:
        """The results of an equation, moved."""
        is_fixed = _is_fixed(eqn, values)
        kernel = self.kernels.of(eqn, is_fixed or self.seeds is None)
        xs, by = kernel([value.x for value in values], self.seeds)
        self._moves += 1
        move = self._moves * 0x9E3779B1
        for n, far in by.items():
            number = np.uint32(move + n & 0xFFFFFFFF)
            own = xs[n].ndim > far.ndim  # memory for each run, which need not be kept
            moved = jitted(_moved, donated=(0,) if own else ())
            xs[n] = moved(xs[n], far, self.seeds, number)
        pairs = zip(xs, eqn.outvars, strict=True)
        return [Value(x, x.ndim > len(v.aval.shape), is_fixed) for x, v in pairs]

    def _scan(self, place: tuple[int, ...], eqn: Equation, values: list[Value]) -> Sequence[Value]:
        (body,) = inside(eqn)
        fixed, state, over = body.split(values)
        turns = range(body.times)
        stacks: list[list[Value]] = [[_ABSENT] * body.times for _ in eqn.outvars[body.carries :]]
        sliced = jitted(_sliced, "runs")
        for turn in reversed(turns) if eqn.params["reverse"] else turns:
            slices = sliced([v.x for v in over], np.int32(turn), runs=tuple(v.runs for v in over))
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
            return [*state, *map(Value, none)]
        whole = []
        for stack in stacks:
            runs = tuple(value.runs for value in stack)
            x = jitted(_stacked, "runs")([value.x for value in stack], runs=runs)
            whole.append(Value(x, any(runs), sources=[value.sources for value in stack]))
        return [*state, *whole]

    def _while(self, place: tuple[int, ...], eqn: Equation, values: list[Value]) -> Sequence[Value]:
        """A loop that has as many rounds in all runs."""
        body, condition = inside(eqn)
        fixed, state, _ = body.split(values)
        tested = condition.of(values)[: condition.fixed]
        while self.program(condition.closed, [*tested, *state], (*place, 1))[0].first:
            state = self.program(body.closed, [*fixed, *state], (*place, 0))
        return state


_ABSENT = Value(None)


def _is_fixed(eqn: Equation, values: Sequence[Value]) -> bool:
    """True for random numbers before a function is applied: a mask is the same in all runs."""
    name = eqn.primitive.name
    if name.startswith(("random_", "threefry")):
        return True
    same = name in _SAME or not any(is_inexact(v.aval) for v in eqn.outvars)
    return same and all(value.fixed for value in values)


_SAME = LAYOUT | frozenset("add sub mul max min bitcast_convert_type convert_element_type".split())


def _moved(x: Any, by: Any, seeds: Any, move: Any) -> Any:
    """An array, moved in all runs but the first."""
    axes = 0 if x.ndim > by.ndim else None, None, 0, None
    return jax.vmap(shifted, axes)(x, by, seeds, move)


def _sliced(xs: list[Any], turn: Any, runs: tuple[bool, ...]) -> list[Any]:
    """The rows of arrays that a turn of a scan reads."""
    return [x[:, turn] if several else x[turn] for x, several in zip(xs, runs, strict=True)]


def _stacked(xs: list[Any], runs: tuple[bool, ...]) -> Any:
    """An array that a scan stacks."""
    if not any(runs):
        return jnp.stack(xs)
    shape = xs[runs.index(True)].shape
    return jnp.stack([jnp.broadcast_to(x, shape) for x in xs], 1)


# What is compiled for it.

# Options of XLA.
_Options = tuple[tuple[str, bool | int], ...]

# Numbers of a program's inputs, up to which its kernels are not optimised.
_SMALL = 2**16


class Kernels:
    """The compiled equations of a program; those of one kind, as of equal layers, are one."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        devices = [d for x in arrays if isinstance(x, jax.Array) for d in x.devices()]
        self.device = (devices or jax.devices())[0]  # one of several
        options = quick_options(arrays) or {}
        if sum(x.size for x in arrays if hasattr(x, "size")) >= _SMALL:
            options.pop("xla_backend_optimization_level", None)
        self._options: _Options = tuple(options.items())
        self._known: dict[tuple[int, bool], Callable[..., Any]] = {}

    def of(self, eqn: Equation, still: bool) -> Callable[..., Any]:
        """`_evaluated` for an equation, compiled."""
        own = id(eqn), still
        if own not in self._known:
            narrow = rounds_operands(eqn, self.device)
            fn = functools.partial(_evaluated, eqn, still, narrow)
            made: Callable[..., Any] = jax.jit(fn, compiler_options=dict(self._options))
            params = tuple(sorted(eqn.params.items(), key=itemgetter(0)))
            avals = tuple(v.aval for v in eqn.invars)
            with contextlib.suppress(TypeError):  # a parameter has no hash
                kind = eqn.primitive, params, avals, still, narrow, self._options
                made = _KERNELS.setdefault(kind, made)
            self._known[own] = made
        return self._known[own]


# Programs of one process share what is compiled; equations of one primitive, one set of parameters
# and one kind of arguments are one.
_KERNELS: dict[Hashable, Callable[..., Any]] = {}


@functools.cache
def jitted(
    fn: Callable[..., Any], *static: str, donated: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """A function of arrays, compiled; it may write into those that are `donated`."""
    # It is of few shapes, and of all arrays: XLA's loops are worth their time.
    compiled: Callable[..., Any] = jax.jit(fn, static_argnames=static, donate_argnums=donated)
    return compiled


def _evaluated(
    eqn: Equation, still: bool, narrow: str, given: list[Any], seeds: Any
) -> tuple[list[Any], dict[int, Any]]:
    """The results of an equation; if not `still`, how far its rounding moves some of them."""
    runs = [x.ndim > len(v.aval.shape) for x, v in zip(given, eqn.invars, strict=True)]
    own = [x[0] if several else x for x, several in zip(given, runs, strict=True)]

    steps = eqn.primitive.name in rounding.STEPS
    chosen = [steps or not is_inexact(v.aval) for v in eqn.outvars]

    def run(seed: Any, *given: Any) -> list[Any]:
        if narrow:  # operands are moved by their rounding; equal numbers alike in every product

            def rounded(x: jax.Array) -> jax.Array:
                by = rounding.unit_roundoff(narrow) * _magnitude(x)
                by = jnp.where(rounding.whole(x, by, ()), 0.0, by)
                return shifted(x, by, seed, np.uint32(0))

            given = tuple(rounded(x) if x.dtype == np.float32 else x for x in given)
        made = list(_put(eqn, given))
        if any(chosen) and any(map(is_float, given)):
            farther = list(_put(eqn, [_farther(x, o) for x, o in zip(given, own, strict=True)]))
            made = [f if c else x for x, f, c in zip(made, farther, chosen, strict=True)]
        return made

    if eqn.effects or seeds is None or not (narrow or any(runs)):
        outs = list(compat.put(eqn.primitive, own, eqn.params))
        firsts = outs
    else:
        outs = jax.vmap(run, (0, *(0 if several else None for several in runs)))(seeds, *given)
        firsts = [x[0] for x in outs]
    moves = {} if still else {n: amount(eqn, own, x) for n, x in enumerate(firsts)}
    return outs, {n: far for n, far in moves.items() if far is not None}


def _farther(x: Any, own: Any) -> Any:
    """Floats that are moved farther from a run's own: see `FARTHER`."""
    if not is_float(x) or x.dtype.itemsize == 1:
        return x
    moved = (wide(own) + FARTHER * (wide(x) - wide(own))).astype(x.dtype)
    return jnp.where(jnp.isfinite(x), moved, x)


def _put(eqn: Equation, given: Sequence[Any]) -> Sequence[Any]:
    """The results of an equation in a run; one run after the other if it has no batches."""

    def plain(*given: Any) -> tuple[Any, ...]:
        return tuple(compat.put(eqn.primitive, given, eqn.params))

    # Of batches of convolutions XLA makes groups of channels, which are slow on CPUs.
    if eqn.primitive.name != "conv_general_dilated":
        with contextlib.suppress(NotImplementedError):
            return plain(*given)
    sequential: Any = jax.custom_batching.sequential_vmap  # without types
    results: Sequence[Any] = sequential(plain)(*given)
    return results


# By how much the rounding of an equation moves its results.


def rounds_operands(eqn: Equation, device: jax.Device) -> str:
    """The format to which a product rounds its float32 operands; "" if it keeps them."""
    # In a region its own casts do. By default GPUs may take TF32, and TPUs bfloat16: see
    # `jax.default_matmul_precision`.
    if eqn.primitive.name in OURS and "how" not in eqn.params:
        wide = any(v.aval.dtype == np.float32 for v in eqn.invars)
        return str(eqn.params["spec"].run) if wide else ""
    if eqn.primitive.name not in ("dot_general", "conv_general_dilated"):
        return ""
    if any(v.aval.dtype != np.float32 for v in (*eqn.invars, *eqn.outvars)):
        return ""
    precision = eqn.params["precision"]
    if isinstance(precision, (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        name = getattr(precision, "name", "")
        return {"TF32_TF32_F32": "tf32", "BF16_BF16_F32": "bfloat16"}.get(name, "")
    of_both = {*precision} if isinstance(precision, tuple) else {precision}
    if device.platform == "gpu":
        has_it = float(getattr(device, "compute_capability", 0)) >= 8
        return "tf32" if has_it and of_both != {lax.Precision.HIGHEST} else ""
    default = bool(of_both & {None, lax.Precision.DEFAULT})
    return "bfloat16" if device.platform == "tpu" and default else ""


def _parts(eqn: Equation, out: Any) -> tuple[float, float, float]:
    """Those of `movement` of a result, and of how many terms it is the sum; 0 if it is exact."""
    name, exact = eqn.primitive.name, (0.0, 0.0, 0.0)
    given: Any = eqn.invars[0].aval if eqn.invars else None
    if not is_inexact(out) or out.size == 0 or name in _CHOOSES:
        return exact
    if out.dtype.itemsize == 1:
        return exact  # to 8 bits both frameworks round alike; the operands have been moved
    if name == "convert_element_type":
        narrows = is_float(given) and out.dtype.itemsize < given.dtype.itemsize
        return (rounding.unit_roundoff(out.dtype.name), 0.0, 1.0) if narrows else exact
    of, work, terms = _primitive(eqn), flops(eqn), 1.0
    if work:
        terms = work / (2 * out.size)
    elif of in ("reduce_sum", "scatter-add"):
        terms = max(prod(v.aval.shape) for v in eqn.invars) / out.size
    elif of == "cumsum":
        terms = out.shape[eqn.params["axis"]]
    elif of == "reduce_window_sum":
        terms = prod(eqn.params["window_dimensions"])
    op = op_of(spelling(eqn)) or of
    kind = vocabulary().op(op).kind
    root = name == "abs" and is_inexact(given) and not is_float(given)  # of a sum
    if rounding.exact(op) and not root:
        return exact
    if of in ("reduce_sum", "cumsum", "reduce_window_sum", "scatter-add", "add_any"):
        op = "add"  # sums alone
    dtype = np.empty(0, out.dtype).real.dtype.name
    return *movement(op, "matmul" if work else kind, dtype, terms), terms


def _primitive(eqn: Equation) -> str:
    """The name of its primitive, or of the one that it stands for."""
    name: str = eqn.params["spec"].of.name if eqn.primitive.name in OURS else eqn.primitive.name
    return name


def amount(eqn: Equation, values: Sequence[jax.Array], x: jax.Array) -> jax.Array | None:
    """How far the rounding of an equation moves each number of a result; None if it does not."""
    own, summed, terms = _parts(eqn, x)
    if not (own or summed):
        return None
    magnitude = _magnitude(x)
    by = own * magnitude
    if summed:
        added: Any = 0.0
        if _primitive(eqn) in _SUMS:
            if jnp.iscomplexobj(x):  # as if all terms were of one size
                added = terms * prod(jnp.mean(_magnitude(v) ** 2) for v in values)
            else:
                added = _added(eqn, values)
        by += summed * jnp.sqrt(magnitude**2 + added)
    if rounding.is_arithmetic(op_of(spelling(eqn)) or _primitive(eqn)) and is_float(x):
        read = [wide(v) for v in values if is_float(v)]
        by = jnp.where(rounding.whole(wide(x), by, read), 0.0, by)
    return by


def shares(eqn: Equation, out: Any, narrow: str) -> tuple[float, float, float]:
    """About how far the rounding of an equation moves a result, as a share of its size."""
    # What becomes of operands that are rounded to the format `narrow` is in it. And how far it
    # moves a sum beside that, as a share of the size of its terms, which may cancel, and that as a
    # share of the size of one: see `of_terms`.
    own, summed, terms = _parts(eqn, out)
    own += summed + rounding.of_operands(narrow)
    scaled = eqn.params.get("how") is not None  # in 8 bits
    if not terms or scaled or _primitive(eqn) not in _SUMS:
        return own, 0.0, 0.0
    # Of a low result the operands are rounded, too, most often by a cast.
    return own, max(summed, rounding.unit_roundoff(out.dtype.name)), terms**0.5


def of_terms(values: Sequence[jax.Array], by: float) -> jax.Array:
    """So much of the root mean square of a sum's terms: products of numbers of these arrays."""
    return by * jnp.sqrt(prod(jnp.mean(_magnitude(v) ** 2) for v in values))


def shifted(x: jax.Array, by: jax.Array, seed: Any, move: Any) -> jax.Array:
    """Move numbers by a share, a hash of number, move and seed, unless the seed is 0."""
    # Equal numbers go the same way, as they round the same way, and so do neighbours, where a
    # function is off by the same; opposite ones go opposite ways.
    if jnp.iscomplexobj(x):
        parts = (shifted(part, by, seed, move) for part in (x.real, x.imag))
        return lax.complex(*parts)
    bits = lax.bitcast_convert_type(jnp.abs(x).astype(np.float32), np.uint32)
    bits = (bits & jnp.uint32(0xFFFFFF00)) + move
    for factor in (seed * np.uint32(0x9E3779B0) + np.uint32(0x7FEB352D), 0x846CA68B):
        bits = (bits ^ (bits >> 16)) * jnp.uint32(factor)
    share = (bits ^ (bits >> 16)).astype(by.dtype) * 2.0**-31 - 1.0
    moved = (x.astype(by.dtype) + jnp.where(x < 0, -share, share) * by).astype(x.dtype)
    # Of a mask's Inf, Inf - Inf would be NaN.
    return jnp.where(jnp.isfinite(x) & (seed > 0), moved, x)


def _added(eqn: Equation, values: Sequence[jax.Array]) -> jax.Array:
    """The sum of the squares of the terms of a sum."""
    of, params = eqn.primitive, eqn.params
    if "how" in params and of.name in OURS:  # in 8 bits: the product that it stands for
        values = [as_wide(x) for x in operands_of(values, params["how"])]
        spec = params["spec"]
        of, params = spec.of, {**spec.params, "preferred_element_type": None}
    # Shares of the largest: a square of a float16 number may be beyond its range.
    largest = [jnp.maximum(_magnitude(v).max(), np.finfo(np.float32).tiny) for v in values]
    shares = [_magnitude(v) / most for v, most in zip(values, largest, strict=True)]
    kinds = (np.float32 if v.dtype.itemsize == 1 else v.dtype for v in values)
    squares = [(x**2).astype(kind) for x, kind in zip(shares, kinds, strict=True)]
    made = _magnitude(compat.put(of, squares, params)[0])
    return made * prod(most**2 for most in largest)


def _magnitude(x: jax.Array) -> jax.Array:
    return jnp.abs(wide(x))


def wide(x: Any) -> Any:
    """An array in float32 at least; JAX promotes no 8-bit floats."""
    return x.astype(np.float32 if x.dtype.itemsize == 1 else jnp.promote_types(x.dtype, np.float32))


def _array(x: jax.Array) -> "np.ndarray[Any, Any]":
    x = jnp.stack([x.real, x.imag], -1) if jnp.iscomplexobj(x) else x
    return np.array(x, np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else None)
