"""A scaler says once that a bfloat16 region needs none, and to no other."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import pytest

from polymp.errors import ScalerWarning
from polymp.jax import GradScaler, autocast
from polymp.scaling.gradient_report import NO_EFFECT
from tests.support.processes import in_thread

W, X = jnp.ones((3, 3)), jnp.ones((2, 3))


def loss(w, x):
    return (x @ w).mean()


half = autocast(loss, dtype=jnp.float16)
brain = autocast(loss, dtype=jnp.bfloat16)


def warned(fn):
    """Run in a thread of its own, where nothing has been said or called yet; the warnings."""

    def run():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fn()
        return [w for w in caught if w.category is ScalerWarning]

    seen = in_thread(run)
    assert all(str(w.message) == NO_EFFECT for w in seen)
    return seen


def step(cost, scaler=None, jit=True, **options):
    scaler = scaler or GradScaler(**options)

    def run(scaler, w, x):
        return jax.grad(lambda w: scaler.scale(cost(w, x)))(w)

    return lambda: (jax.jit(run) if jit else run)(scaler, W, X)


@pytest.mark.parametrize("jit", [True, False])
def test_bfloat16_is_warned_of_and_float16_is_not(jit):
    assert len(warned(step(brain, jit=jit))) == 1
    assert warned(step(half, jit=jit)) == []
    assert warned(step(loss, jit=jit)) == []


def test_the_warning_points_at_the_line_that_scales():
    (warning,) = warned(step(brain))
    assert warning.filename == __file__
    assert warning.lineno == step.__code__.co_firstlineno + 4


def test_once_for_scalers_of_one_rule():
    def run():
        for scale in (8.0, 16.0):
            step(brain, init_scale=scale, jit=False)()
        step(brain, growth_interval=3)()

    assert len(warned(run)) == 2


def test_inside_of_the_region():
    def run(cost):
        return lambda: jax.grad(autocast(lambda w: GradScaler().scale(cost(w, X))))(W)

    assert len(warned(run(loss))) == 1
    assert len(warned(run(half))) == 1, "the region around decides"
    off = autocast(lambda w: GradScaler().scale(loss(w, X)), enabled=False)
    assert warned(lambda: jax.grad(off)(W)) == []


def test_the_latest_call_decides():
    def both(first, second):
        def cost(w, x):
            return first(w, x) + second(w, x)

        return step(cost)

    assert warned(both(brain, half)) == []
    assert len(warned(both(half, brain))) == 1


@pytest.mark.parametrize("jit", [True, False])
def test_an_evaluation_in_bfloat16_says_nothing_of_a_step_in_float16(jit):
    cached = jax.jit(half)

    def run():
        step(cached, jit=jit)()
        brain(W, X)
        jax.jit(brain)(W, X)
        jax.grad(brain)(W, X)
        step(cached, jit=jit)()  # traced again, but for what is cached
        step(half, jit=jit)()

    assert warned(run) == []


@pytest.mark.parametrize(
    "around",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: lambda w, x: jax.vmap(lambda row: f(w, row[None]))(x).mean(),
        lambda f: lambda w, x: jax.lax.scan(lambda c, row: (c + f(w, row[None]), None), 0.0, x)[0],
    ],
    ids=["jit", "remat", "vmap", "scan"],
)
def test_a_region_deep_in_the_loss_is_found(around):
    assert len(warned(step(around(autocast(loss, dtype=jnp.bfloat16))))) == 1
    assert warned(step(around(autocast(loss, dtype=jnp.float16)))) == []


def test_vjp_with_a_scaled_cotangent():
    def run(scaler, w, x):
        value, vjp = jax.vjp(lambda w: brain(w, x).astype(jnp.float32), w)
        return vjp(scaler.scale(jnp.ones_like(value)))

    assert len(warned(lambda: jax.jit(run)(GradScaler(), W, X))) == 1


def test_a_disabled_scaler_is_silent_as_the_message_says():
    assert warned(step(brain, enabled=False)) == []
    assert warned(step(brain, dtype=jnp.bfloat16)) == []
    assert warned(step(half, dtype=jnp.float16)) == []


def test_values_that_are_not_traced_have_no_gradient():
    assert warned(lambda: GradScaler().scale(brain(W, X))) == []


def test_calls_in_another_thread_say_nothing_here():
    def run():
        assert len(warned(step(brain))) == 1
        step(loss)()

    assert warned(run) == []


def test_value_and_grad_warns_too():
    assert len(warned(lambda: GradScaler().value_and_grad(brain)(W, X))) == 1
    assert warned(lambda: GradScaler().value_and_grad(half)(W, X)) == []


def test_the_mark_changes_no_number():
    scaler = GradScaler(3.0)
    assert scaler.scale(jnp.float32(0.1)) == jnp.float32(0.1) * jnp.float32(3)
