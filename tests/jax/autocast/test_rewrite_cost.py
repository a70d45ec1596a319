"""The cost of a rewrite, in calls of Python functions for each equation instead of time.

`benchmarks/jax_overhead.py` holds plan and emission to at most the time of a trace. That a machine
is busy shows there; here, that a program of twice the equations takes more than twice the work, or
that an equation takes twice the work that it took.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from polymp.backends.jax import compat
from polymp.backends.jax.autocast import evaluate
from polymp.backends.jax.autocast.frame import Plan, given
from polymp.backends.jax.autocast.planner import planner
from polymp.jax import autocast
from polymp.rules.region import Region

X = jnp.linspace(-1, 1, 32).reshape(8, 4)
REGION: Region = autocast(enabled=True).region

# Calls of Python functions for an equation of the programs below, and a third more.
PLAN, EMISSION = 20, 14


class Calls(NamedTuple):
    """Calls of Python functions while a program is planned, and while it is put into a trace."""

    equations: int
    plan: int
    emission: int


def chain(blocks: int) -> Callable[[jax.Array], jax.Array]:
    """Eleven equations a block: a contraction, float32 ops, native ones, a number."""

    def f(x: jax.Array) -> jax.Array:
        w, b = x[:4] * 0.5, x[4] * 0.1
        bias = jax.lax.broadcast_in_dim(b, (8, 4), (1,))
        for _ in range(blocks):
            h = jax.lax.dot(x, w) + bias
            g = jax.lax.exp(-jax.lax.abs(h))
            s = jax.lax.reduce_sum(g, (1,))
            x = jax.lax.tanh(h) * jax.lax.broadcast_in_dim(s, (8, 4), (0,)) + x * 2
        return x

    return f


def calls_of(blocks: int) -> Calls:
    """Count the calls in the rewrite of a chain, by part, without those of jax's trace."""
    traced = jax.make_jaxpr(chain(blocks))(X)
    known = list(map(given, compat.binders(traced)[1]))
    plans: list[Plan] = []
    jax.make_jaxpr(lambda x: evaluate.run(planned(traced, known), [x]))(
        X
    )  # jax's caches are full now
    plan = counted(lambda: plans.append(planned(traced, known)))
    seen: list[int] = []

    def emission(x: Any) -> Any:
        outs: list[Any] = []
        seen.append(counted(lambda: outs.extend(evaluate.run(plans[0], [x]))))
        return outs

    jax.make_jaxpr(emission)(X)
    return Calls(len(traced.eqns), plan, seen[0])


def planned(traced: Any, known: Any) -> Plan:
    return planner(REGION).plan(traced, known, REGION)


def counted(work: Callable[[], Any]) -> int:
    """How many Python functions are called meanwhile; comprehensions count on older Pythons."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, arg: Any) -> None:
        found[event] += frame.f_code.co_name[0] != "<"

    before = sys.getprofile()
    gc.disable()  # it calls what was registered with it, when it likes
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return found["call"]


@pytest.fixture(scope="module")
def sizes() -> tuple[Calls, Calls]:
    return calls_of(40), calls_of(80)


def test_the_work_for_an_equation(sizes):
    _, many = sizes
    print(
        f"\n{many.plan / many.equations:.1f} to plan, {many.emission / many.equations:.1f} to emit"
    )
    assert many.plan <= PLAN * many.equations
    assert many.emission <= EMISSION * many.equations


@pytest.mark.parametrize("part", ["plan", "emission"])
def test_the_work_grows_with_the_equations(sizes, part):
    few, many = sizes
    assert 1.9 * few.equations < many.equations <= 2 * few.equations
    of_few, of_many = getattr(few, part), getattr(many, part)
    # The same for each further equation as for those before, but for what there is once.
    assert of_many - of_few <= of_few * 1.01
    assert of_many > of_few * 1.5


def test_a_bound_program_takes_more(monkeypatch, sizes):
    """Without recording, the bar on emission is missed: it can be."""
    monkeypatch.setattr(compat, "recorder", lambda values: None)
    bound = calls_of(40)
    assert bound.emission > 1.5 * EMISSION * bound.equations
    assert bound.plan == sizes[0].plan


def test_what_grows_faster_is_seen():
    """A quadratic piece of work, a call for each pair of blocks, breaks the bar on growth."""

    def pairs(blocks: int) -> None:
        for _ in range(blocks * blocks):
            chain(1)

    few, many = (counted(lambda n=n: pairs(n)) for n in (40, 80))
    assert many - few > few * 1.01
