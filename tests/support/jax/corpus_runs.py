"""Programs of the corpus run: results and gradients, compiled, and how they compare."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.jax.corpus import PROGRAMS, Program
from tests.support.jax.rounding_bound import Rounding, marked, rounded, scatter, scatter_of

SEEDS = 16
# Rounded runs stay within this many root mean squares of the scatter. A rounding's error is
# smaller than the scatter's (spread evenly over plus and minus the unit roundoff), so this is more
# than six standard deviations.
SIGMAS = 4
# float32's own roundoff, times the terms that a compiler may sum in another order.
FLOOR = 2.0**-24 * 64

# Compiling is nearly all the time that this takes. LLVM's passes are left out; where only values
# count, so is, as long as XLA has the choice, its newer way to make code of a fusion.
QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
VALUES = QUICK | ({"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {})

Transform = Callable[..., Callable[..., Any]]


class Ran(NamedTuple):
    out: list[jax.Array]
    grads: list[jax.Array]


class Problem(NamedTuple):
    """A program with its arguments split into what is differentiated and what is not."""

    program: Program
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    at: tuple[int, ...]  # which leaves are differentiated

    def graded(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """(leaves, scale) -> results and gradients of their weighted sum, times the scale."""
        leaves, tree = jax.tree.flatten(self.args)

        def cost(chosen: list[Any], scale: Any) -> Any:
            full = list(leaves)
            for i, leaf in zip(self.at, chosen, strict=True):
                full[i] = leaf
            out = jax.tree.leaves(fn(*jax.tree.unflatten(tree, full)))
            return scale * sum(map(_weighted, out)), out

        def run(chosen: list[Any], scale: Any) -> Ran:
            grads, out = jax.grad(cost, has_aux=True)(chosen, scale)
            return Ran(out, [g / scale.astype(g.dtype) for g in grads])

        return run

    def inputs(self) -> tuple[list[Any], Any]:
        leaves = jax.tree.leaves(self.args)
        return [leaves[i] for i in self.at], jnp.float32(1)


@cache
def problem(name: str) -> Problem:
    program = PROGRAMS[name]
    with jax.enable_x64(program.x64):
        fn, args = program.build()
    floats = ("float32", "float64")
    at = [i for i, leaf in enumerate(jax.tree.leaves(args)) if str(leaf.dtype) in floats]
    return Problem(program, fn, args, tuple(at))


def run(it: Problem, fn: Callable[..., Any], scale: float = 1.0) -> Ran:
    """Compile and run the function in place of the problem's own."""
    with jax.enable_x64(it.program.x64):
        leaves, _ = it.inputs()
        return jax.jit(it.graded(fn), compiler_options=VALUES)(leaves, jnp.float32(scale))


@cache
def reference(name: str) -> Ran:
    """The program in float32: the scattered one with no error, so that it is compiled once."""
    return _scatter(name, 1.0, (jnp.float32(0), jnp.float32(0), jnp.int32(1)))


def emulated(it: Problem, rounding: Rounding) -> Ran:
    """A region emulated in float32: rounded by hand wherever a region may round."""
    with jax.enable_x64(it.program.x64):
        graded = rounded(it.graded(marked(it.fn)), rounding)
        return jax.jit(graded, compiler_options=VALUES)(*it.inputs())


@cache
def _scattered(name: str) -> Callable[..., Any]:
    it = problem(name)

    def once(leaves: Any, scale: Any, *how: Any) -> Ran:
        return rounded(it.graded(marked(it.fn)), scatter(*how))(leaves, scale)

    return jax.jit(once, compiler_options=VALUES)


def _scatter(name: str, scale: float, how: tuple[jax.Array, ...]) -> Ran:
    it = problem(name)
    with jax.enable_x64(it.program.x64):
        return _scattered(name)(it.inputs()[0], jnp.float32(scale), *how)


@cache
def bounds(name: str, fmt: str) -> tuple[list[float], list[float]]:
    """How far each result and each gradient may be from float32's, in 2-norm."""
    want, scale = reference(name), PROGRAMS[name].scale if fmt == "float16" else 1.0
    squares = [np.zeros(len(want.out)), np.zeros(len(want.grads))]
    for seed in range(SEEDS):
        ran = _scatter(name, scale, scatter_of(fmt, seed))
        for total, got, ref in zip(squares, ran, want, strict=True):
            total += np.array([distance(a, b) ** 2 for a, b in zip(got, ref, strict=True)])
    sizes = [[distance(x, np.zeros(())) for x in part] for part in want]
    return tuple(  # type: ignore[return-value]
        [SIGMAS * float(np.sqrt(s / SEEDS)) + FLOOR * max(size) for s in total]
        for total, size in zip(squares, sizes, strict=True)
    )


def too_far(name: str, fmt: str, got: Ran) -> list[str]:
    """The results and gradients that are further from float32's than rounding explains."""
    found = []
    for kind, limits, some, want in zip(
        Ran._fields, bounds(name, fmt), got, reference(name), strict=True
    ):
        for i, (limit, a, b) in enumerate(zip(limits, some, want, strict=True)):
            error = distance(a, b)
            if not error <= limit:  # a NaN is too far
                found.append(f"{kind}[{i}] {b.shape}: off by {error:.3g}, bound {limit:.3g}")
    return found


def rounds(name: str, got: Ran) -> bool:
    """Whether something is further from float32's than the order of sums explains."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(reference(name)), strict=True)
    return any(distance(a, b) > FLOOR * distance(b, np.zeros(())) for a, b in pairs)


def distance(a: Any, b: Any) -> float:
    """The 2-norm of the difference; keys have none."""
    if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
        return 0.0
    a, b = (np.asarray(x).astype(np.complex128) for x in (a, b))
    return float(np.linalg.norm((a - b).ravel()))


def apart(one: Any, exact: Any) -> float:
    """The difference of two trees as one vector, relative to its length."""
    pairs = [*zip(jax.tree.leaves(one), jax.tree.leaves(exact), strict=True)]
    sizes = [distance(x, np.zeros(())) for _, x in pairs]
    return float(np.linalg.norm([distance(*pair) for pair in pairs]) / np.linalg.norm(sizes))


def _weighted(x: jax.Array) -> Any:
    """A number that depends on every entry in its own measure."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _weighted(x.real) + _weighted(x.imag)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return 0.0
    weights = jnp.cos(jnp.arange(1, x.size + 1, dtype=jnp.float32)).reshape(x.shape)
    return jnp.sum(x.astype(jnp.promote_types(x.dtype, jnp.float32)) * weights)
