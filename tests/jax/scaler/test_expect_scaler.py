"""`expect_scaler`: told apart, in every way to write a step, are scaled gradients and unscaled."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax

from polymp.backends.jax.scaler import expect_scaler as expecting
from polymp.errors import ScalerWarning, UnscaledError
from polymp.jax import GradScaler, autocast, expect_scaler

W, X, S = jnp.ones((4, 4)), jnp.ones((8, 4)), GradScaler()
HALF = jnp.float16


def loss(w, x):
    return (jnp.tanh(x @ w) ** 2).mean()


low = autocast(loss, dtype=HALF)


def cast(w, x):
    """The same with casts in the program, and a loss in float16."""
    return (jnp.tanh(x.astype(HALF) @ w.astype(HALF)) ** 2).mean()


def looped(w, x):
    @jax.checkpoint
    def body(carry, _):
        return jnp.tanh(carry @ w.astype(HALF)), None

    carry, _ = lax.scan(body, x.astype(HALF), None, length=3)
    return carry.astype(jnp.float32).mean()


@jax.custom_vjp
def ruled(x):
    return jnp.sin(x)


# What the rule makes of residuals and constants is float16 and scaled by nobody: no gradient.
ruled.defvjp(
    lambda x: (jnp.sin(x), x),
    lambda x, ct: (ct * jnp.cos(x) * jnp.full(x.shape, 2, x.dtype),),
)

MESH = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
P = jax.P


def mapped(check: bool) -> Callable[..., Any]:
    specs = {"in_specs": (P(), P(), P("d")), "out_specs": P(), "check_vma": check}
    return lambda step: jax.jit(jax.shard_map(step, mesh=MESH, **specs))


def already_run(step):
    jitted = jax.jit(step)
    jitted(S, W, X)
    return jitted


def microbatches(step):
    def scanned(s, w, x):
        return lax.scan(lambda acc, row: (acc + step(s, w, row[None]), None), W * 0, x)[0]

    return scanned


def in_cond(step):
    return lambda s, w, x: lax.cond(x[0, 0] > 0, lambda: step(s, w, x), lambda: w)


def in_while(step):
    def run(s, w, x):
        return lax.while_loop(lambda c: c[1] < 3, lambda c: (step(s, c[0], x), c[1] + 1), (w, 0))

    return run


def over_rows(step):
    return lambda s, w, x: jax.vmap(lambda row: step(s, w, row[None]))(x)


WAYS = {
    "plain": lambda step: step,
    "jitted": jax.jit,
    "already run": already_run,
    "microbatches": microbatches,
    "cond": in_cond,
    "while": in_while,
    "vmap": over_rows,
    "shard_map": mapped(True),
    "shard_map unchecked": mapped(False),
    "pmap": lambda step: (
        lambda s, w, x: jax.pmap(step, in_axes=(None, None, 0), axis_name="d")(s, w, x[None])
    ),
    "jit in jit": lambda step: jax.jit(lambda *args: jax.jit(step)(*args)),
    "remat": jax.checkpoint,
}
LOSSES = {
    "autocast": low,
    "casts": cast,
    "jitted": jax.jit(low),
    "loop": looped,
    "rule": lambda w, x: ruled(w.astype(HALF)).astype(jnp.float32).sum(),
    "rematerialised": jax.checkpoint(cast),
}


def graded(cost, scaled):
    return lambda s, w, x: jax.grad(lambda w: s.scale(cost(w, x)) if scaled else cost(w, x))(w)


def answer(step, *args, **kwargs):
    """Return the answer of `expect_scaler`, and check that it warns if the answer is no."""
    found = None
    with contextlib.suppress(UnscaledError):
        found = expect_scaler(step, *args, action="raise", **kwargs)
    if found is None:
        with pytest.warns(ScalerWarning, match="gradients flow through float16"):
            return expect_scaler(step, *args, **kwargs)
    return found


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_write_a_step(way, scaled):
    assert answer(WAYS[way](graded(low, scaled)), S, W, X) is scaled


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_every_way_to_write_a_loss(name, scaled):
    assert answer(graded(LOSSES[name], scaled), S, W, X) is scaled


@pytest.mark.parametrize("scaled", [True, False])
def test_an_autocast_step(scaled):
    assert answer(autocast(graded(loss, scaled), dtype=HALF), S, W, X) is scaled


@pytest.mark.parametrize("scaled", [True, False])
def test_parameters_in_float16(scaled):
    assert answer(graded(loss, scaled), S, W.astype(HALF), X.astype(HALF)) is scaled


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("jit", [nnx.jit, lambda step: step], ids=["jit", "plain"])
def test_nnx(jit, scaled):
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    cost = autocast(lambda model, x: (model(x) ** 2).mean(), dtype=HALF)

    @jit
    def step(model, optimizer, s, x):
        grads = nnx.grad(lambda m: s.scale(cost(m, x)) if scaled else cost(m, x))(model)
        optimizer.update(model, grads)

    before = model.kernel.get_value()
    assert answer(step, model, optimizer, S, X) is scaled
    assert model.kernel.get_value() is before, "the step ran"


@pytest.mark.parametrize(
    "cost",
    [loss, autocast(loss), lambda w, x: loss(w, x.astype(jnp.bfloat16))],
    ids=["float32", "bfloat16", "casts to bfloat16"],
)
def test_other_dtypes_need_no_scaler(cost):
    assert expect_scaler(graded(cost, False), S, W, X)


@pytest.mark.parametrize(
    "fn", [low, lambda w, x: jax.jvp(lambda w: low(w, x), (w,), (w,))], ids=["value", "tangents"]
)
def test_what_takes_no_gradient_is_fine(fn):
    assert expect_scaler(fn, W, X)


def test_a_gradient_that_does_not_pass_through_float16_is_fine():
    def cost(w, x):
        features = lax.stop_gradient(jnp.tanh(x.astype(HALF) @ w.astype(HALF)))
        return (features.astype(jnp.float32) @ w).mean()

    assert expect_scaler(graded(cost, False), S, W, X)


def test_a_disabled_scaler_scales_nothing():
    assert not answer(graded(low, True), GradScaler(enabled=False), W, X)
    assert expect_scaler(graded(low, True), GradScaler(), W, X)


def test_a_scaler_that_is_no_argument():
    assert expect_scaler(lambda w, x: graded(low, True)(S, w, x), W, X)


def test_value_and_grad():
    assert expect_scaler(lambda s, w, x: s.value_and_grad(low)(w, x), S, W, X)


def test_one_of_two_losses_is_not_scaled():
    def step(s, w, x):
        return graded(low, True)(s, w, x) + graded(low, False)(s, w, x)

    assert not answer(step, S, W, X)


def test_a_factor_of_the_step_s_own_is_no_scale():
    def step(w, x, weight):
        return jax.grad(lambda w: low(w, x) * weight)(w)

    assert not answer(step, W, X, jnp.float32(1024))
    assert not answer(lambda w, x: step(w, x, 1024.0), W, X)


def test_a_cotangent_of_ones_is_the_loss_s_own():
    def step(w, x):
        value, pull = jax.vjp(lambda w: low(w, x), w)
        return pull(jnp.ones_like(value))

    assert not answer(step, W, X)
    assert not answer(jax.jit(step), W, X)


def test_shapes_stand_for_arrays_and_other_arguments_are_as_they_are():
    def step(w, x, *, kind):
        return graded(low, False)(None, w, x) if kind == "half" else w

    w, x = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (W, X))
    for fn in (step, jax.jit(step, static_argnames="kind")):
        assert not answer(fn, w, x, kind="half")
        assert expect_scaler(fn, w, x, kind="other")


def test_nothing_runs():
    ran = []

    def step(w, x):
        jax.debug.callback(lambda: ran.append(1))
        return w

    assert expect_scaler(step, W, X)
    jax.effects_barrier()
    assert ran == []


def test_the_message_names_the_line():
    here = r"at \S+test_expect_scaler\.py:\d+:\d+ \(cast\)"
    with pytest.raises(UnscaledError) as caught:
        expect_scaler(graded(cast, False), S, W, X, action="raise")
    said = re.sub(here, "HERE", str(caught.value))
    assert re.fullmatch(
        r"gradients flow through float16 without a scaler, first in \w+ HERE: those below 2\*\*-24 "
        r"become 0 there\. Differentiate scaler\.scale\(loss\) and step with scaler\.step, where "
        r"scaler is an enabled GradScaler; or compute in bfloat16, which needs none\.",
        said,
    )


def test_bad_arguments():
    with pytest.raises(TypeError, match="needs the function of a training step, got 3"):
        expect_scaler(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be 'warn' or 'raise', got 'ignore'"):
        expect_scaler(low, W, X, action="ignore")  # type: ignore[arg-type]


def test_these_tests_notice_a_mark_that_is_not_found(monkeypatch):
    assert expect_scaler(graded(low, True), S, W, X)
    monkeypatch.setattr(expecting.compat, "scope_names", lambda stack: [])
    assert not answer(graded(low, True), S, W, X)


def test_these_tests_notice_a_backward_pass_that_is_not_found(monkeypatch):
    monkeypatch.setattr(expecting.compat, "in_backward", lambda stack: False)
    assert expect_scaler(graded(low, False), S, W, X)
