"""How `GradScaler` for JAX goes on: its rule beside torch's, its bounds, and what it counts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polymp.backends.jax.scaler.grad_scaler import GradScaler
from polymp.scaling import scale_rule
from polymp.scaling.scale_rule import LARGEST, SMALLEST, ScaleRule, ScaleState, as_float32
from tests.conftest import need
from tests.support.jax.scaler_tools import numbers, values

Update = Callable[..., GradScaler]


def torch_history(rule: ScaleRule, scale: float, history: Any) -> list[tuple[float, int]]:
    """Torch's own kernel, and the bounds put around it."""
    import torch

    state = torch.tensor(scale), torch.tensor(0, dtype=torch.int32)
    seen = []
    for finite in history:
        torch._amp_update_scale_(*state, torch.tensor(0.0 if finite else 1.0), *rule[:3])
        state[0].clamp_(rule.min_scale, rule.max_scale)
        seen.append((state[0].item(), int(state[1])))
    return seen


def jax_histories(
    rule: ScaleRule, scales: Any, histories: Any, update: Update = GradScaler.update
) -> list[list[tuple[float, int]]]:
    """A batch of scalers, each along its own history."""

    def one(scaler: GradScaler, finite: Any) -> Any:
        after = update(scaler, finite)
        return after, after.state

    start = GradScaler(
        rule.max_scale, *rule[:3], min_scale=rule.min_scale, max_scale=rule.max_scale
    )
    batch = jax.tree.map(lambda x: jnp.broadcast_to(x, len(scales)), start)
    first = batch.state._replace(scale=jnp.asarray(scales))
    batch = jax.tree.unflatten(jax.tree.structure(start), first)
    run = jax.jit(jax.vmap(lambda scaler, history: jax.lax.scan(one, scaler, history)[1]))
    states = run(batch, jnp.asarray(histories))
    return [
        list(zip(*row, strict=True))
        for row in zip(states.scale.tolist(), states.tracker.tolist(), strict=True)
    ]


@given(
    seed=st.integers(0, 2**32 - 1),
    skips=st.sampled_from([0.0, 0.02, 0.2, 0.5, 0.9]),
    growth=st.sampled_from([2.0, 4.0, 1.5, 1.1, 1.001, 3.3]),
    backoff=st.sampled_from([0.5, 0.75, 0.9, 0.999, 1e-3]),
    interval=st.sampled_from([1, 3]),
    bounds=st.sampled_from([(SMALLEST, LARGEST), (1.0, 2.0**24), (0.3, 44.4), (5.0, 5.0)]),
)
@settings(max_examples=12)
def test_histories_are_torchs_bit_for_bit(seed, skips, growth, backoff, interval, bounds):
    need("torch")
    least, most = map(as_float32, bounds)
    rule = ScaleRule(growth, backoff, interval, least, most)
    rng = np.random.default_rng(seed)
    histories = rng.random((24, 64)) >= skips
    scales = np.exp(rng.uniform(np.log(least), np.log(most), 24)).clip(least, most)
    scales = scales.astype(np.float32)
    ours = jax_histories(rule, scales, histories)
    for scale, history, mine in zip(scales, histories, ours, strict=True):
        assert mine == torch_history(rule, float(scale), history)


def test_the_comparison_notices_a_product_in_float32():
    need("torch")
    rule, history = ScaleRule(1.1, 0.9, 1), [True] * 64

    def rounded(scaler, finite):
        state = scale_rule.step(rule, scaler.state, finite, jnp.where)
        return jax.tree.unflatten(jax.tree.structure(scaler), state)

    expected = torch_history(rule, 3.0, history)
    assert jax_histories(rule, [3.0], [history]) == [expected]
    assert jax_histories(rule, [3.0], [history], rounded) != [expected]


@given(history=st.lists(st.booleans(), max_size=12))
@settings(max_examples=30)
def test_eager_updates_are_those_of_torchs_scaler(history):
    need("torch")
    import torch

    arguments = {"init_scale": 2.0**16, "growth_interval": 2}
    theirs = torch.amp.GradScaler("cpu", **arguments)
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    ours = GradScaler(**arguments)
    for finite in history:
        theirs.scale(torch.ones(()))
        weight.grad = torch.full((2,), 1.0 if finite else float("inf"))
        theirs.step(optimizer)
        theirs.update()
        ours = ours.update(finite)
        there = theirs.state_dict()
        assert {key: ours.state_dict()[key] for key in there} == there


# --- hysteresis, losses that are not finite, counters ---------------------------------------------

GOOD, OVERFLOW, LOST, BOTH_LOST = (True, True), (False, True), (True, False), (False, False)


def every_way(scaler: GradScaler, events: list[tuple[bool, bool]]) -> list[list[ScaleState]]:
    """The states along a history: one update at a time, each compiled, and all in one scan."""
    eager, compiled = scaler, scaler
    compile_ = jax.jit(lambda s, finite, loss: s.update(finite, loss_finite=loss), donate_argnums=0)
    compiled = jax.tree.map(jnp.array, compiled)
    one_by_one, by_jit = [], []
    for finite, loss in events:
        eager = eager.update(finite, loss_finite=loss)
        compiled = compile_(compiled, finite, loss)
        one_by_one.append(numbers(eager.state))
        by_jit.append(numbers(compiled.state))

    def body(scaler: GradScaler, found: Any) -> Any:
        after = scaler.update(found[0], loss_finite=found[1])
        return after, after.state

    _, states = jax.lax.scan(body, scaler, jnp.asarray(events))
    scanned = [numbers(ScaleState(*row)) for row in zip(*states, strict=True)]
    return [one_by_one, by_jit, scanned]


@pytest.mark.parametrize(
    ("arguments", "events", "scales"),
    [
        ({}, [OVERFLOW] * 3, [4, 2, 1]),
        ({"hysteresis": 2}, [OVERFLOW] * 5, [8, 8, 4, 2, 1]),
        ({"hysteresis": 1}, [OVERFLOW, GOOD, OVERFLOW, OVERFLOW], [8, 8, 8, 4]),
        # A loss that is lost neither counts for the hysteresis nor ends the row.
        ({"hysteresis": 1}, [OVERFLOW, LOST, BOTH_LOST, OVERFLOW], [8, 8, 8, 4]),
        ({"min_scale": 3.0}, [OVERFLOW] * 3, [4, 3, 3]),
        ({"growth_interval": 1, "max_scale": 24.0}, [GOOD] * 3, [16, 24, 24]),
        ({"growth_interval": 2}, [GOOD, LOST, GOOD, GOOD], [8, 8, 16, 16]),
        ({"growth_interval": 2}, [GOOD, OVERFLOW, GOOD, GOOD], [8, 4, 4, 8]),
        ({}, [LOST] * 40, [8] * 40),
        ({"growth_interval": 1, "growth_factor": 1e300}, [GOOD] * 2, [LARGEST, LARGEST]),
        ({"growth_interval": 1, "growth_factor": 1e30}, [GOOD] * 2, [8e30, LARGEST]),
        ({"backoff_factor": 1e-300}, [OVERFLOW] * 2, [SMALLEST, SMALLEST]),
    ],
)
def test_the_scale_along_a_history(arguments, events, scales):
    ways = every_way(GradScaler(8.0, **arguments), events)
    expected = [as_float32(float(scale)) for scale in scales]
    assert [[state.scale for state in states] for states in ways] == [expected] * 3


@pytest.mark.parametrize("hysteresis", [0, 1])
def test_what_is_counted(hysteresis):
    events = [GOOD, OVERFLOW, LOST, BOTH_LOST, GOOD, LOST, OVERFLOW, GOOD, GOOD]
    rows = [
        # tracker, skips in a row, spoiled among them, all skips
        (1, 0, 0, 0),
        (0, 1, 0, 1),
        (0, 2, 1, 2),
        (0, 3, 2, 3),
        (1, 0, 0, 3),
        (1, 1, 1, 4),
        (0, 2, 1, 5),
        (1, 0, 0, 5),
        (2, 0, 0, 5),
    ]
    for states in every_way(GradScaler(8.0, hysteresis=hysteresis), events):
        assert [state[1:] for state in states] == rows


def test_a_count_past_a_lowered_interval_grows():
    scaler = GradScaler(4.0, growth_interval=9)
    for _ in range(5):
        scaler = scaler.update(True)
    lowered = scaler.load_state_dict(scaler.state_dict() | {"growth_interval": 2})
    assert values(lowered.update(True)) == (8.0, 0)


@pytest.mark.parametrize("finite", [True, False])
def test_scale_and_inverse_are_normal_at_both_ends(finite):
    """XLA on CPU flushes subnormal numbers to 0: neither may be one."""

    @jax.jit
    def run(scaler):
        def body(scaler, _):
            after = scaler.update(finite)
            return after, (after.state.scale, after.scale(jnp.float32(1)), 1 / after.state.scale)

        return jax.lax.scan(body, scaler, None, length=600)

    after, seen = run(GradScaler(growth_interval=1))
    assert values(after)[0] == (LARGEST if finite else SMALLEST)
    tiny = np.finfo(np.float32).tiny
    for numbers_ in map(np.asarray, seen):
        assert np.isfinite(numbers_).all()
        assert (numbers_ >= tiny).all()
    (back,), fine = jax.jit(lambda s: s.unscale([s.scale(jnp.float32(3))]))(after)
    assert (float(back), bool(fine)) == (3.0, True)


def test_a_subnormal_is_flushed_there():
    """What the test above would see if the bounds were wider by one."""
    lost = jax.jit(lambda x: 1 / x)(jnp.float32(2.0**127))
    kept = jax.jit(lambda x: 1 / x)(jnp.float32(LARGEST))
    assert kept == np.float32(2.0**-126)
    assert lost == 0 or jax.default_backend() != "cpu"


@pytest.mark.parametrize(
    ("finite", "shown"),
    [(1.0, "float32[]"), (1, "int32[]"), (np.ones(2, bool), "bool[2]")],
    ids=["float", "int", "two"],
)
@pytest.mark.parametrize("name", ["finite", "loss_finite"])
def test_update_wants_one_bool(name, finite, shown):
    found = {"finite": True, "loss_finite": True} | {name: finite}
    with pytest.raises(TypeError) as raised:
        GradScaler().update(**found)
    assert raised.value.args[0] == f"{name} must be one bool, got {shown}."


@pytest.mark.parametrize(
    ("loss", "finite"),
    [
        (1.0, True),
        (np.float16(7), True),
        (jnp.asarray([1.0, np.nan]), False),
        ({"a": jnp.float16(np.inf), "n": 3}, False),
        (jnp.asarray(1 + 1j * np.nan), False),
        (jnp.float32(3e38), True),
    ],
)
def test_a_loss_is_looked_at_as_it_is(loss, finite):
    seen = GradScaler(2.0**-100).loss_finite(loss)
    assert (seen.dtype, seen.shape, bool(seen)) == (jnp.bool_, (), finite)


@pytest.mark.parametrize(("value", "shown"), [({"a": 1}, "{'a': 1}"), (None, "None")])
def test_update_says_what_it_was_given(value, shown):
    with pytest.raises(TypeError, match=re.escape(f"finite must be one bool, got {shown}.")):
        GradScaler().update(value)


def test_a_state_is_taken_outside_of_traced_code():
    with pytest.raises(TypeError, match="return the scaler from the function"):
        jax.jit(lambda scaler: scaler.state_dict()["scale"])(GradScaler())


@pytest.mark.parametrize("loss", ["a", 3, len])
def test_a_loss_that_is_none_is_refused(loss):
    with pytest.raises(TypeError, match=r"^loss must be the loss as it was before scaling, got "):
        GradScaler().step(jnp.ones(2), lambda grads, w: w, jnp.ones(2), loss=loss)
