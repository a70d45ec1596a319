"""Random policies and random programs in JAX: what ran is what `Policy.decide` says.

The programs, and how a run is judged, are `tests.support.random_policies`. Here they run as they
are, under jit, and as one jitted function under several policies.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polymp
from polymp import Policy
from polymp.dtypes import FORMATS
from polymp.errors import ForbiddenOpError, PolicyError
from polymp.jax import autocast
from polymp.rules.row import LOW, Rule
from tests.support import random_policies as given
from tests.support.decisions import recording
from tests.support.frameworks import in_jax as fw
from tests.support.random_policies import MINE, NAMES, SIZE, WRONG, Call, Framework, Module
from tests.support.sizes import size

POLICIES = size(100, 250)  # traced under jit: dtypes, and what is recorded
VALUED = size(15, 60)  # of these, run op by op: numbers
JITTED = size(4, 12)  # and compiled
PAIRS = size(4, 10)  # of policies, under each of which one function runs in turn

pytestmark = pytest.mark.sized


@jax.jit  # two calls of a plain function from one line, here that of the interpreter, look alike
def mine(x: jax.Array, y: jax.Array) -> jax.Array:
    return x * y + x


OPS: dict[str, Callable[..., Any]] = {
    "exp": jnp.exp,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "relu": jax.nn.relu,
    "neg": jnp.negative,
    "sin": jnp.sin,
    "softmax": jax.nn.softmax,
    "cumsum": lambda x: jax.lax.cumsum(x, 1),  # jnp.cumsum is jitted: its ops are recorded once
    "add": jnp.add,
    "mul": jnp.multiply,
    "maximum": jnp.maximum,
    "atan2": jnp.arctan2,
    "linear": lambda x, w: x @ w,
    MINE: mine,
}


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with given.vocabulary_put_back():
        polymp.register_op(MINE, "fp32", jax=mine)
        yield


def near(one: Any, other: Any, ulps: float, dtype: str = "") -> bool:
    """Equal up to some units in the last place of the largest number, in its dtype or another."""
    a, b = fw.numbers(one), fw.numbers(other)
    limit = ulps * FORMATS[dtype or fw.dtype(one)].eps * max(1.0, np.nanmax(np.abs(b), initial=0.0))
    finite = np.isfinite(a) & np.isfinite(b)
    return bool(
        np.abs(a - b)[finite].max(initial=0) <= limit and finite.sum() == np.isfinite(b).sum()
    )


def same(one: Any, other: Any, op: str) -> bool:
    """Bit for bit; what adds up may do so in another order, or round in between."""
    if op in ("linear", "softmax"):
        return near(one, other, 4)
    return bool(np.array_equal(fw.numbers(one), fw.numbers(other), equal_nan=True))


EAGER = Framework(OPS, fw.dtype, fw.cast, False, same)
# In a fusion, XLA may skip the rounding of a value that is returned rounded.
FUSED = EAGER._replace(same=lambda one, other, op: near(one, other, 4, "bfloat16"))


def arguments(seed: int) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal((SIZE, SIZE)), "float32") for _ in range(2)]


def function(seed: int) -> Callable[[list[Any]], list[Any]]:
    """A program as a function of the first values; its modules are name scopes."""

    def run(module: Module, values: list[Any]) -> list[Any]:
        for item in module.body:
            if isinstance(item, Call):
                values = [*values, OPS[item.op](*[values[at] for at in item.args])]
            else:
                with jax.named_scope(item.name):
                    values = run(item, values)
        return values

    program = given.program(seed)
    return lambda values: run(program, values)


def ran(seed: int, policy: Policy, low: str, values: Any, wrap: Any = lambda call: call) -> Any:
    try:
        return wrap(autocast(function(seed), dtype=low, policy=policy))(values)
    except (PolicyError, ForbiddenOpError) as error:
        return error


def mistakes(*run: Any, verbs: Framework = EAGER, decide: Any = given.decide) -> list[str]:
    start = (lambda seed: ["float32"] * 2) if verbs is NAMES else arguments
    return given.mistakes(*run, verbs, start, decide)


def traced(call: Any) -> Any:
    return lambda values: [s.dtype.name for s in jax.jit(call).eval_shape(values)]


@pytest.fixture(scope="module")
def jitted() -> list[tuple[int, Policy, str, Any, list[Any]]]:
    """For each policy: the policy, the dtype, the dtypes of all values, and what was recorded."""
    found = []
    with recording() as report:
        for seed in range(POLICIES):
            policy, low, start = given.policy(seed), LOW[seed % 2], len(report)
            dtypes = ran(seed, policy, low, arguments(0), traced)
            its = [(e.op, e.decision) for e in report.entries[start:]]
            ruled = [(op, decision) for op, decision in its if decision.rule is not Rule.PARTS]
            found.append((seed, policy, low, dtypes, ruled))
    return found


def test_what_runs_under_jit_is_what_the_policies_decide(jitted: Any) -> None:
    wrong = [text for seed, policy, low, found, _ in jitted
             for text in mistakes(seed, policy, low, found, verbs=NAMES)]  # fmt: skip
    kinds = Counter(type(found).__name__ for *_, found, _ in jitted)
    assert wrong == []
    assert kinds["list"] > POLICIES / 2
    assert kinds["ForbiddenOpError"]
    assert kinds["PolicyError"]


def test_what_was_recorded_is_what_the_policies_decide(jitted: Any) -> None:
    wrong = []
    for seed, policy, low, found, recorded in jitted:
        if isinstance(found, list):
            judged = given.judged(given.program(seed), policy, low, found, NAMES)
            if judged.decisions != recorded:
                wrong.append((seed, recorded, judged.decisions))
    assert wrong == []


@pytest.mark.parametrize("jitted", [False, True])
def test_the_numbers_are_those_of_casts_by_hand(jitted: bool) -> None:
    for seed in range(JITTED if jitted else VALUED):
        policy, low = given.policy(seed), LOW[seed % 2]
        found = ran(seed, policy, low, arguments(seed), *[jax.jit] * jitted)
        assert mistakes(seed, policy, low, found, verbs=FUSED if jitted else EAGER) == []


@pytest.mark.parametrize("name", WRONG)
def test_a_decision_made_otherwise_is_noticed(jitted: Any, name: str) -> None:
    noticed = 0
    for seed, policy, low, found, _ in jitted[:200]:
        if isinstance(found, list):
            noticed += bool(mistakes(seed, policy, low, found, verbs=NAMES, decide=WRONG[name]))
    print(f"\n{noticed} of 200")
    assert noticed > 5


@pytest.mark.parametrize("jitted_inside", [False, True])
def test_a_program_traced_under_one_policy_is_not_used_under_another(jitted_inside: bool) -> None:
    """One function, jitted outside or inside of the region, under A, B and A again, and B, A, B."""
    rng, pairs, differ = random.Random(0), 0, 0
    while pairs < PAIRS:
        seed = rng.randrange(10_000)
        low, values = LOW[seed % 2], arguments(0)
        policies = [given.policy(seed), given.policy(seed + 10_000)]
        alone = [ran(seed, p, low, values, traced) for p in policies]
        if any(isinstance(found, Exception) for found in alone):
            continue
        pairs += 1
        differ += bool(mistakes(seed, policies[1], low, alone[0], verbs=NAMES))
        for order in ([0, 1, 0], [1, 0, 1]):
            traces = []
            run = function(seed)

            def counted(values: Any, run: Any = run, traces: Any = traces) -> Any:
                traces.append(1)
                return run(values)

            inside = jax.jit(counted) if jitted_inside else counted
            ruled = [autocast(inside, dtype=low, policy=p) for p in policies]
            calls = ruled if jitted_inside else [jax.jit(call) for call in ruled]
            for at in order:
                shapes = jax.eval_shape(calls[at], values)
                assert [s.dtype.name for s in shapes] == alone[at], (seed, order, at)
            assert len(traces) == 2, (seed, order)
    assert differ > PAIRS / 2
