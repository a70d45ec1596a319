"""Random programs under autocast against the same programs with casts by hand.

What comes out has to have the dtypes of the program with casts. Values are the same bits in nearly
all cases; XLA may add up in another order, so what is asked of them is a bound. It comes from the
program with casts itself: run with every low value (forward) or every low cotangent (backward) off
by a random relative error of at most `UNITS` roundoffs, it scatters as far as the program's own
conditioning carries such errors. A backward step of a low op rounds about three times, each time
by at most one roundoff, and so does the other program's: the difference of the two has a standard
deviation of sqrt(6) / sqrt(3) roundoffs = 1.4 at each place, where the noise has 2 / sqrt(3) = 1.2.
Both spread through the same derivatives, so `SIGMAS` root mean squares of the scatter are more
than three standard deviations of the difference; float32's sums and float16's least numbers come
on top.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings

import polymp.jax
from polymp.backends.jax.autocast import contraction, evaluate
from tests.support.jax.corpus_runs import VALUES
from tests.support.jax.programs import (
    CONSTRUCTS,
    INDEX,
    LOOPS,
    NOISE,
    NUMBERS,
    REGIONS,
    ROWS,
    Block,
    Do,
    Env,
    Op,
    Program,
    arguments,
    by_hand,
    every,
    noise,
    plain,
    programs,
)
from tests.support.jax.scaler_tools import bits
from tests.support.sizes import LONG

SEEDS, UNITS, SIGMAS = 12, 2.0, 4.0
FLOOR = 2.0**-24 * 64  # float32's roundoff, times the terms that may be summed in another order
SCALE = 16.0  # of the cost, so that float16's cotangents stay off its subnormal numbers
LEAST = 2.0**-20  # what its subnormal numbers may cost nevertheless
LARGEST = 1e3

Function = Callable[[Env], list[Any]]


def rewritten(it: Program) -> Function:
    return polymp.jax.autocast(plain(it, polymp.jax), dtype=it.low)


def floats(env: Env) -> Env:
    return {name: x for name, x in env.items() if x.dtype == jnp.float32 and name != NOISE}


def cost(outs: list[Any]) -> Any:
    """A number that depends on every entry in its own measure."""
    total = 0.0
    for x in outs:
        weights = jnp.cos(jnp.arange(1, x.size + 1, dtype=jnp.float32)).reshape(x.shape)
        total += SCALE * jnp.sum(weights * x.astype(jnp.float32))
    return total


def gradient(fn: Function, env: Env) -> Env:
    return jax.grad(lambda chosen: cost(fn({**env, **chosen})))(floats(env))


def compiled(fn: Callable[..., Any], *args: Any) -> Any:
    return jax.jit(fn, compiler_options=VALUES)(*args)


def array(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def size(x: Any) -> float:
    return float(np.linalg.norm(array(x).ravel()))


def dtypes(outs: Any) -> list[str]:
    return [x.dtype.name for x in outs]


@dataclass
class Expected:
    """The program with casts: its results and gradients, and how far roundings carry there."""

    outs: list[Any]
    grads: Env
    noisy_outs: list[Any]  # a leading axis of seeds
    noisy_grads: Env
    found: Counter[str] = field(default_factory=Counter)

    def all(self) -> Any:
        return self.outs, self.grads, self.noisy_outs, self.noisy_grads

    def out_bound(self, at: int) -> float:
        return _bound(self.outs[at], self.noisy_outs[at])

    def grad_bound(self, name: str) -> float:
        largest = max(map(size, self.grads.values()))
        return _bound(self.grads[name], self.noisy_grads[name]) + LEAST + FLOOR * largest

    def near(self, outs: list[Any], what: str) -> None:
        """Dtypes equal, values within the bound."""
        assert dtypes(outs) == dtypes(self.outs), what
        for at, x in enumerate(outs):
            self.compare(x, self.outs[at], self.out_bound(at), f"{what}: results")

    def grads_near(self, grads: Env, what: str) -> None:
        for name, x in grads.items():
            assert x.dtype == jnp.float32, f"{what}: the gradient of {name} is {x.dtype}"
            self.compare(x, self.grads[name], self.grad_bound(name), f"{what}: gradients")

    def compare(self, x: Any, y: Any, bound: float, what: str) -> None:
        assert x.shape == y.shape
        same, error = np.array_equal(array(x), array(y)), size(array(x) - array(y))
        self.found[what] += 1
        self.found[f"{what.partition(':')[0]}: same bits"] += same
        assert error <= bound, f"{what}: off by {error:.3g}, bound {bound:.3g}"


def _bound(x: Any, noisy: Any) -> float:
    spread = (array(noisy) - array(x)).reshape(len(noisy), -1)
    return SIGMAS * float(np.sqrt((spread**2).sum(1).mean())) + FLOOR * size(x)


def expected(it: Program, env: Env) -> Expected:
    fn = by_hand(it)

    @partial(jax.jit, compiler_options=VALUES)
    def run(env: Env, how: Any) -> tuple[list[Any], Env]:
        def both(chosen: Env) -> Any:
            outs = fn({**env, **chosen, NOISE: how})
            return cost(outs), outs

        grads, outs = jax.grad(both, has_aux=True)(floats(env))
        return outs, grads

    outs = compiled(fn, env)
    _, grads = run(env, noise(0, 0.0, 0.0))
    seeds = range(1, SEEDS + 1)
    noisy_outs = [run(env, noise(seed, UNITS, 0.0))[0] for seed in seeds]
    noisy_grads = [run(env, noise(seed, 0.0, UNITS))[1] for seed in seeds]
    return Expected(outs, grads, _stacked(noisy_outs), _stacked(noisy_grads))


def _stacked(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *xs: np.stack([array(x) for x in xs]), *trees)


def sensible(want: Expected) -> bool:
    """False for a program whose numbers leave float16's range, or any."""
    return all(np.abs(array(x)).max() < LARGEST for x in jax.tree.leaves(want.all()))


# The checks. Each takes a program, its arguments and what is expected of it.


def check_results(it: Program, env: Env, want: Expected) -> None:
    """Compiled, eager and traced by vmap, inside and outside."""
    fn = rewritten(it)
    want.near(compiled(fn, env), "jit")
    want.near(fn(env), "eager")
    other = arguments(Program(it.block, it.low, it.seed + 1))
    assert dtypes(fn({**other, INDEX: env[INDEX]})) == dtypes(want.outs)

    rows = {name: jnp.stack([env[name], other[name]]) for name in ("r0", "r1", INDEX)}

    def mapped(fn: Function) -> Any:
        return jax.vmap(lambda rows: fn({**env, **rows}))

    def of(env: Env) -> Any:  # the region is inside: vmap of autocast
        return mapped(fn)(rows)

    def around(env: Env) -> Any:  # autocast of vmap
        whole = polymp.jax.autocast(mapped(plain(it, polymp.jax)), dtype=it.low)
        return whole(rows)

    for what, outs in compiled(
        lambda env: {"vmap of": of(env), "of vmap": around(env)}, env
    ).items():
        want.near([x[0] for x in outs], what)


def check_gradients(it: Program, env: Env, want: Expected) -> None:
    """Reverse mode against the casts; forward mode against reverse mode."""
    fn = rewritten(it)
    ruled = any(isinstance(s, Do) and s.kind.startswith("custom") for s in every(it.block))
    forward = "custom_vjp" not in it.counts()
    rng = np.random.default_rng(it.seed)
    # Exact in every dtype: a tangent is rounded where it goes in, a gradient is not.
    tangents = {n: jnp.float32(rng.integers(-4, 5, x.shape) / 4) for n, x in floats(env).items()}

    def both(env: Env) -> Any:
        def of_chosen(chosen: Env) -> Any:
            return cost(fn({**env, **chosen}))

        moved = jax.jvp(of_chosen, (floats(env),), (tangents,))[1] if forward else 0.0
        return gradient(fn, env), moved

    grads, moved = compiled(both, env)
    want.grads_near(grads, "grad")
    if not ruled:  # a rule's own ops return the dtypes that they run in
        for name in ("m0", "m1", "layers"):
            if _rounded_to(want.grads[name], it.low) is False:
                assert not _rounded_to(grads[name], it.low), f"the gradient of {name} was rounded"
    if forward:
        along = {n: array(t).ravel() for n, t in tangents.items()}
        parts = [along[n] @ array(g).ravel() for n, g in grads.items()]
        noisy = [array(g).reshape(SEEDS, -1) @ along[n] for n, g in want.noisy_grads.items()]
        hand = sum(along[n] @ array(g).ravel() for n, g in want.grads.items())
        scatter = float(np.sqrt(np.mean((sum(noisy) - hand) ** 2)))
        terms = sum(np.abs(along[n]) @ np.abs(array(g).ravel()) for n, g in grads.items())
        bound = 2 * SIGMAS * scatter + FLOOR * terms + LEAST  # two modes, rounded each in its way
        error = abs(float(moved) - sum(parts))
        want.found["forward mode"] += 1
        assert error <= bound, f"jvp and grad differ by {error:.3g}, bound {bound:.3g}"


def _rounded_to(x: Any, low: str) -> bool:
    return bool((x == x.astype(low).astype(x.dtype)).all())


CHECKS = {"results": check_results, "gradients": check_gradients}


def check(it: Program) -> Counter[str] | None:
    """All checks, and what they counted; None for a program that is not sensible."""
    env = arguments(it)
    want = expected(it, env)
    if not sensible(want):
        return None
    for one in CHECKS.values():
        one(it, env, want)
    return want.found


RUN = settings(suppress_health_check=list(HealthCheck))
FEW = settings(RUN, max_examples=3 if LONG else 1)


@pytest.mark.sized
def test_random_programs():
    """For each construct a few programs that have it, of a seed of its own."""
    seen: Counter[str] = Counter()
    found: Counter[str] = Counter()
    drawn: set[Block] = set()

    def run(it: Program) -> None:
        ran = check(it)
        assume(ran is not None)
        drawn.add(it.block)
        seen.update(set(it.counts()), programs=1)
        found.update(ran)

    for first in (*CONSTRUCTS, *REGIONS):
        if seen[first] >= 2 and not LONG:
            continue  # in `make test` two programs are enough
        seed(zlib.crc32(first.encode()))(FEW(given(programs(first))(run)))()
    enough = 1 if LONG else 1 / 5
    assert len(drawn) == seen["programs"] >= 30 * enough
    for kind in (*CONSTRUCTS, *REGIONS):
        assert seen[kind] >= (3 if LONG else 1), f"too few programs with {kind}"
    assert sum(seen[name] > 0 for name in ROWS) >= (0.8 if LONG else 0.4) * len(ROWS)
    few = 0 if LONG else 0.15  # so much more chance is in fewer of them
    assert found["jit: same bits"] >= (0.95 - few) * found["jit: results"]  # else the bound tests
    assert found["grad: same bits"] >= (0.9 - few) * found["grad: gradients"]
    assert found["forward mode"] >= 10 * enough


# What else JAX does with a function


def some_programs(count: int) -> list[Program]:
    """The first programs that Hypothesis draws, which are the same in every run."""
    kept: list[Program] = []

    @settings(RUN, max_examples=3 * count, phases=[Phase.generate])
    @given(programs())
    def keep(it: Program) -> None:
        wanted = {*CONSTRUCTS, *REGIONS} & {*it.counts()}
        if len(wanted) >= 3 and len(kept) < count:
            kept.append(it)

    keep()
    assert len(kept) == count
    return kept


SOME = range(4)


@pytest.fixture(scope="module")
def some() -> list[Program]:
    return some_programs(len(SOME))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("at", SOME)
def test_with_the_checks_of_jax_on(some, at):
    it = some[at]
    env = arguments(it)

    def outs_and_grads(env: Env) -> Any:
        fn = rewritten(it)
        return fn(env), gradient(fn, env)

    before = compiled(outs_and_grads, env)
    with jax.checking_leaks(), jax.enable_checks(True):
        after = compiled(outs_and_grads, env)
    assert bits(before) == bits(after)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("at", SOME)
def test_with_jit_off(some, at):
    """Then loops are unrolled as they are traced, and what they carry has no dtype of its own.

    So the dtypes are those of a program without loops, and the roundings are more.
    """
    it = some[at]
    env = arguments(it)
    want = expected(it, env)
    with jax.disable_jit():
        outs = rewritten(it)(env)
    if not {*LOOPS, "switch"} & {*it.counts()}:
        want.near(outs, "disable_jit")
        return

    def noisy(env: Env, seeds: Any) -> Any:
        return jax.vmap(lambda s: by_hand(it)({**env, NOISE: noise(s, UNITS, 0.0, UNITS)}))(seeds)

    scattered = compiled(noisy, env, jnp.arange(1.0, SEEDS + 1))
    for x, y, spread in zip(outs, want.outs, scattered, strict=True):
        assert size(array(x) - array(y)) <= _bound(y, spread)


# Programs of a few steps, and wrong rewriters, which have to be found in them


def _block(*steps: str | Do, results: str, params: str = "") -> Block:
    """A block; an op as a line, such as `c = add a b`."""
    ops = [step if isinstance(step, Do) else _op(*step.split()) for step in steps]
    return Block(tuple(params.split()), tuple(ops), tuple(results.split()))


def _op(target: str, _: str, name: str, *args: str) -> Op:
    if name in NUMBERS:
        return Op(target, name, args[:-1], float(args[-1]))
    return Op(target, name, args)


TURN = _block("d = dot b m", "e = tanh c", params="b c m", results="d e d")
LOOP = _block("a = lower r1", Do(("f", "g", "h"), "scan", ("r0", "a"), (TURN,)), results="f g")


def _narrow(have: Any, out: Any) -> Any:
    return out if out in ("bfloat16", "float16") else have


def _rounded_gradients(real: Callable[..., Any]) -> Callable[..., Any]:
    def mold(closed: Any, args: Any, spec: Any, *product: Any) -> Any:
        return real(closed, args, spec._replace(out=spec.run), *product).astype(spec.out)

    return mold


def _without_rule(rules: Any, plans: Any, step: Any, values: Any) -> Any:
    return evaluate.run(rules.plan, values)


def _narrowest(outs: Any) -> str:
    return next((k.dtype for k in outs if k.dtype != "float32"), "float32")


def _doing(kind: str, *blocks: Block) -> Block:
    return _block(Do(("z",), kind, (), blocks), results="z")


LAYER = _block("a = dot r0 m0", "b = bias a v0", results="b")
DECAY = _block("c = decay r0", results="c")
HALVED = _block("a = times r0 0.5", results="a")
# A sum that has no digits left in a low dtype.
LARGE = _block("a = dot r0 m0", "b = plus a 300", "c = log b", results="c")
NUMBER = _block("a = dot r0 m0", "b = times a 0.5", results="b")
# What is replaced, by what, the check that notices it, and the program.
WRONG: dict[str, tuple[str, Any, str, Block]] = {
    "a carry is cast down": ("control_flow._join", _narrow, "results", LOOP),
    "a branch is cast down": (
        "control_flow._meet", _narrowest, "results", _doing("switch", LAYER, DECAY)
    ),
    "a jvp rule is dropped": (
        "control_flow.Rules.emit", _without_rule, "gradients", _doing("custom_jvp", HALVED)
    ),
    "a vjp rule is dropped": (
        "control_flow.Rules.emit", _without_rule, "gradients", _doing("custom_vjp", HALVED)
    ),
    "a parameter's gradient is rounded": ("contraction.with_products",
        _rounded_gradients(contraction.with_products), "gradients", LAYER),
    "nothing is pulled up": ("planner._CastPuller.run", lambda self: None, "results", LARGE),
    "a bias promotes": ("op_handlers._is_bias", lambda hard: False, "results", LAYER),
    "a number promotes": ("op_handlers._soft", lambda *of: False, "results", NUMBER),
    "regions are not seen": (
        "regions.innermost", lambda stack: None, "results", _doing("off", LAYER)
    ),
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rewriter_is_found(name, monkeypatch):
    replaced, wrong, which, block = WRONG[name]
    it = Program(block, "bfloat16", 3)
    env = arguments(it)
    want = expected(it, env)
    CHECKS[which](it, env, want)
    monkeypatch.setattr(f"polymp.backends.jax.autocast.{replaced}", wrong)
    with pytest.raises(AssertionError):
        CHECKS[which](it, env, want)
