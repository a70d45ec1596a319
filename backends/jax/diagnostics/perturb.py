"""A run of a function, and runs of it in which every op is moved by its rounding.

See `polymp.diagnostics.rounding`, which says by how much, and why. The traced program, derivatives
included, is evaluated equation by equation under one `jax.jit`, with a seed for the movements.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Generic, TypeVar

import jax
import jax.extend.core as core
import jax.numpy as jnp
import numpy as np
from jax import lax

from polymp.backends.jax import compat
from polymp.backends.jax.arrays import is_float
from polymp.backends.jax.autocast.api import PolicyLike, autocast
from polymp.backends.jax.autocast.fp8_operands import as_wide, operands_of
from polymp.backends.jax.autocast.known_functions import INDEPENDENT, LAYOUT, OURS, op_of, spelling
from polymp.backends.jax.compat.programs import ClosedProgram, Equation
from polymp.backends.jax.diagnostics.explain import flops, with_sites
from polymp.backends.jax.diagnostics.instrument import quick_options
from polymp.backends.jax.diagnostics.traced_call import traced
from polymp.backends.jax.jaxprs import inside, interpreted, scanned
from polymp.diagnostics import rounding
from polymp.diagnostics.rounding import EXACT, Run, movement
from polymp.diagnostics.run_record import RunRecord
from polymp.dtypes import FORMATS
from polymp.rules.vocabulary import vocabulary

_SUMS = frozenset("reduce_sum cumsum reduce_window_sum dot_general conv_general_dilated".split())
# Primitives whose results are among their operands, or these with another sign.
_CHOOSES = EXACT | LAYOUT | INDEPENDENT
_CHOOSES |= frozenset(
    """
    max min select_n reduce_max reduce_min gather scatter dynamic_update_slice concatenate neg
    abs sign argmax argmin top_k clamp iota is_finite select_and_gather_add cummax cummin
    reduce_window_max random_bits random_wrap random_unwrap threefry2x32 while cond scan pad
    split floor ceil round optimization_barrier polymp_fp8_quantise
    """.split()
)


T = TypeVar("T")

# By path, the arrays of a tree.
_Arrays = dict[str, jax.Array]


class Program:
    """A function at arguments, traced once."""

    backend = "jax"

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
        if dtype is None:  # regions inside need a function around them that is autocast
            transformed = autocast(fn, enabled=False)
        else:
            transformed = autocast(fn, dtype=dtype, policy=policy)
        self._paths: list[str] = []

        def program(arrays: _Arrays) -> tuple[list[jax.Array], list[jax.Array]]:
            def called(own: _Arrays) -> tuple[_Arrays, _Arrays]:
                whole = arrays | own  # by path; JAX sorts these as texts: "[10]" before "[2]"
                args, kwargs = rounding.rebuilt(tree, (whole[path] for path in self._given))
                results = rounding.results(transformed(*args, **kwargs), "jax")
                low = {path: x for path, x in results.items() if is_float(x)}
                return low, {path: x for path, x in results.items() if path not in low}

            own = {path: arrays[path] for path in self._graded}
            gradients: _Arrays = {}
            if own:
                low, pullback, others = jax.vjp(called, own, has_aux=True)
                seeds = {
                    p: jnp.asarray(cotangent(p, x.shape), x.dtype)  # type: ignore[misc]
                    for p, x in low.items()
                }
                (gradients,) = pullback(seeds)
            else:
                low, others = called(own)
            found = {**low, **others}
            self._paths = list(found)
            return list(found.values()), [gradients[p] for p in self._graded]

        self.closed, record, self._flat, *_ = traced(program, (self._given,), {})
        self._calls = tuple(call for call, _ in with_sites(self.closed, record))
        self._program = program
        self._options = quick_options(self._flat)  # a probe runs a few times: most is compiling
        self._plain = jax.jit(core.jaxpr_as_fun(self.closed))
        self._moved: Callable[..., list[jax.Array]] | None = None

    def ran(self) -> tuple[Run, Run]:
        """The results, and the calls; twice, as a torch program has two."""
        run = self._run(self._plain(*self._flat))._replace(calls=self._calls)
        return run, run

    def probes(self, count: int) -> list[Run]:
        """So many runs in which every op is moved."""
        if self._moved is None:
            device = device_of(self._flat)

            def moved(seed: jax.Array, *flat: jax.Array) -> list[jax.Array]:
                return _Moving(seed, device).program(self.closed, flat)

            self._moved = jax.jit(moved, compiler_options=self._options)
        runs = (self._moved(np.uint32(i + 1), *self._flat) for i in range(count))
        return list(map(self._run, runs))

    def record(self, record: Callable[..., Any], probes: int) -> RunRecord:
        """A record of it, in memory, by `record` of this backend, whose file imports this one."""
        recorder = record(None, jax.jit(self._program), probes=probes)
        recorder(self._given)
        made: RunRecord = recorder.record
        return made

    def _run(self, outs: Sequence[jax.Array]) -> Run:
        results = dict(zip(self._paths, outs, strict=False))
        gradients = dict(zip(self._graded, outs[len(self._paths) :], strict=True))
        return Run(
            {path: _array(x) for path, x in results.items()},
            {path: _array(x) for path, x in gradients.items()},
            {path: x.dtype.name for path, x in results.items()},
        )


class Evaluation(Generic[T]):
    """Evaluates programs, equation by equation; a value is an array, or has some."""

    def __init__(self) -> None:
        self.moves = 0  # how many arrays have been moved

    def number(self, value: Any) -> T:
        """The value of a number in a program."""
        raise NotImplementedError

    def leaf(self, parent: tuple[int, ...], at: int, eqn: Equation, values: list[T]) -> Sequence[T]:
        """The results of an equation that is a loop, or evaluated as a whole."""
        raise NotImplementedError

    def program(
        self, closed: ClosedProgram, args: Sequence[T], parent: tuple[int, ...] = ()
    ) -> list[T]:
        """The results of a closed jaxpr."""
        return interpreted(closed, args, partial(self._equation, parent), self.number)

    def _equation(
        self, parent: tuple[int, ...], at: int, eqn: Equation, values: list[T]
    ) -> Sequence[T]:
        if is_followed(eqn):
            return self.program(inside(eqn)[0].closed, values, (*parent, at, 0))
        return self.leaf(parent, at, eqn, values)

    def move(self) -> np.uint32:
        """A number of the next movement, for `shifted`."""
        self.moves += 1
        return np.uint32(self.moves * 0x9E3779B1 & 0xFFFFFFFF)


def is_followed(eqn: Equation) -> bool:
    """True for an equation that is a program: no loop, no branches, no part for one device."""
    return bool(inside(eqn)) and eqn.primitive.name not in ("scan", "while", "cond", "shard_map")


class _Moving(Evaluation[jax.Array]):
    """Moves every result by its rounding, on a device."""

    def __init__(self, seed: jax.Array | None, device: jax.Device) -> None:
        super().__init__()
        self._seed: Any = seed
        self._device = device

    def number(self, value: Any) -> Any:
        return value

    def leaf(
        self, parent: tuple[int, ...], at: int, eqn: Equation, values: list[jax.Array]
    ) -> Sequence[jax.Array]:
        if eqn.primitive.name == "scan":
            return self._scan(eqn, values)
        given = rounded(values, rounds_operands(eqn, self._device), self._seed)
        outs = list(compat.put(eqn.primitive, given, eqn.params))
        for n, x in enumerate(outs):
            by = amount(eqn, values, x)
            if by is not None:
                outs[n] = shifted(x, by, self._seed, self.move())
        return outs

    def _scan(self, eqn: Equation, values: list[jax.Array]) -> Sequence[jax.Array]:
        """A scan whose body is moved, in another way each time."""
        (body,) = inside(eqn)

        def turn(
            number: jax.Array, row: list[jax.Array]
        ) -> tuple[jax.Array, list[jax.Array], None]:
            inner = _Moving(self._seed * np.uint32(7919) + number, self._device)
            return number + np.uint32(1), inner.program(body.closed, row), None

        self.moves += 1
        outs, _ = scanned(eqn, turn, values, jnp.uint32(self.moves * 104729))
        return outs


def device_of(arrays: Sequence[object]) -> jax.Device:
    """The device that a program of some arrays runs on, one of several."""
    found = (d for x in arrays if isinstance(x, jax.Array) for d in x.devices())
    return next(found, None) or jax.devices()[0]


def rounds_operands(eqn: Equation, device: jax.Device) -> str:
    """The format to which a product rounds its float32 operands; "" if it keeps them.

    By default GPUs may take TF32, and TPUs bfloat16: see `jax.default_matmul_precision`.
    """
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


def rounded(values: Sequence[Any], to: str, seed: Any) -> list[Any]:
    """Operands, moved by their rounding to a format; equal numbers alike in every product."""
    if not to:
        return list(values)
    by = rounding.unit_roundoff(to)
    return [shifted(x, by * _magnitude(x), seed, np.uint32(0)) for x in values]


def amount(
    eqn: Equation, values: Sequence[jax.Array], x: jax.Array, *, exact: bool = True
) -> jax.Array | None:
    """How far the rounding of an equation moves each number of a result; None if it does not.

    Not `exact`, the terms of its sums count as if all were of one size.
    """
    name = eqn.primitive.name
    computes = name == "abs" and jnp.iscomplexobj(values[0])  # a root of a sum
    if not _is_number(x) or x.size == 0 or (name in _CHOOSES and not computes):
        return None
    if x.dtype.itemsize == 1:
        return None  # to 8 bits both frameworks round alike; the operands have been moved
    if name == "convert_element_type":
        (given,) = values
        if not is_float(given) or x.dtype.itemsize >= given.dtype.itemsize:
            return None
        return FORMATS[x.dtype.name].eps / 2 * _magnitude(x)
    of = eqn.params["of"].name if name in OURS else name
    work = flops(eqn)
    terms = 1.0
    if work:
        terms = work / (2 * x.size)
    elif of in ("reduce_sum", "scatter-add"):
        terms = max(prod(v.aval.shape) for v in eqn.invars) / x.size
    elif of == "cumsum":
        terms = x.shape[eqn.params["axis"]]
    elif of == "reduce_window_sum":
        terms = prod(eqn.params["window_dimensions"])
    op = op_of(spelling(eqn)) or of
    kind = vocabulary().kind_of(op)
    if of in ("reduce_sum", "cumsum", "reduce_window_sum", "scatter-add", "add_any"):
        op = "add"  # sums alone
    dtype = np.empty(0, x.dtype).real.dtype.name
    own, summed = movement(op, "matmul" if work else kind, dtype, terms)
    magnitude = _magnitude(x)
    by = own * magnitude
    if summed:
        added: Any = 0.0
        if of in _SUMS:
            exact |= eqn.params.get("how") is not None  # in 8 bits there are more operands
            exact &= not jnp.iscomplexobj(x)
            added = _added(eqn, values) if exact else terms * prod(map(_mean_square, values))
        by += summed * jnp.sqrt(magnitude**2 + added)
    return by


def shifted(x: jax.Array, by: jax.Array, seed: Any, move: Any) -> jax.Array:
    """Move numbers by a share, which is a hash of the number, the move and the seed.

    Equal numbers go the same way, as they round the same way, and so do neighbours, where a
    function is off by the same; opposite ones go opposite ways.
    """
    if jnp.iscomplexobj(x):
        parts = (shifted(part, by, seed, move) for part in (x.real, x.imag))
        return lax.complex(*parts)
    bits = lax.bitcast_convert_type(jnp.abs(x).astype(np.float32), np.uint32)
    bits = (bits & jnp.uint32(0xFFFFFF00)) + move
    for factor in (seed * np.uint32(0x9E3779B0) + np.uint32(0x7FEB352D), 0x846CA68B):
        bits = (bits ^ (bits >> 16)) * jnp.uint32(factor)
    share = (bits ^ (bits >> 16)).astype(by.dtype) * 2.0**-31 - 1.0
    moved = (x.astype(by.dtype) + jnp.where(x < 0, -share, share) * by).astype(x.dtype)
    return jnp.where(jnp.isfinite(x), moved, x)  # of a mask's Inf, Inf - Inf would be NaN


def _added(eqn: Equation, values: Sequence[jax.Array]) -> jax.Array:
    """The sum of the squares of the terms of a sum."""
    of, params = eqn.primitive, eqn.params
    if "how" in params and of.name in OURS:  # in 8 bits: the product that it stands for
        values = [as_wide(x) for x in operands_of(values, params["how"])]
        of, params = params["of"], {**dict(params["params"]), "preferred_element_type": None}
    # Shares of the largest: a square of a float16 number may be beyond its range.
    largest = [jnp.maximum(_magnitude(v).max(), np.finfo(np.float32).tiny) for v in values]
    shares = [_magnitude(v) / most for v, most in zip(values, largest, strict=True)]
    kinds = (np.float32 if v.dtype.itemsize == 1 else v.dtype for v in values)
    squares = [(x**2).astype(kind) for x, kind in zip(shares, kinds, strict=True)]
    made = _magnitude(compat.put(of, squares, params)[0])
    return made * prod(most**2 for most in largest)


def _mean_square(x: jax.Array) -> jax.Array:
    return jnp.mean(_magnitude(x) ** 2)


def _is_number(x: jax.Array) -> bool:
    return is_float(x) or jnp.iscomplexobj(x)


def _magnitude(x: jax.Array) -> jax.Array:
    return jnp.abs(x.astype(wider(x.dtype)))


def wider(dtype: Any) -> Any:
    """Return a dtype as precise as float32 at least; JAX promotes no 8-bit floats."""
    return np.float32 if dtype.itemsize == 1 else jnp.promote_types(dtype, np.float32)


def _array(x: jax.Array) -> "np.ndarray[Any, Any]":
    x = jnp.stack([x.real, x.imag], -1) if jnp.iscomplexobj(x) else x
    made = np.asarray(x)
    return made.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else made
