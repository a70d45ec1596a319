"""Steps in float16 that lack a scaler, by `expect_scaler`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax

from polymp.backends.jax import compat
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
    lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x) * jnp.full(x.shape, 2, x.dtype),)
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


def in_while(step):
    def run(s, w, x):
        return lax.while_loop(lambda c: c[1] < 3, lambda c: (step(s, c[0], x), c[1] + 1), (w, 0))

    return run


WAYS = {
    "plain": lambda step: step,
    "jitted": jax.jit,
    "already run": already_run,
    "microbatches": microbatches,
    "cond": lambda step: lambda s, w, x: lax.cond(x[0, 0] > 0, lambda: step(s, w, x), lambda: w),
    "while": in_while,
    "vmap": lambda step: lambda s, w, x: jax.vmap(lambda row: step(s, w, row[None]))(x),
    "shard_map": mapped(True),
    "shard_map unchecked": mapped(False),
    "pmap": lambda step: (
        lambda s, w, x: jax.pmap(step, in_axes=(None, None, 0), axis_name="d")(s, w, x[None])
    ),
    "jit in jit": lambda step: jax.jit(lambda *args: jax.jit(step)(*args)),
    "remat": jax.checkpoint,
}
LOSSES = {
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


STEPS = {name: lambda scaled, way=way: way(graded(low, scaled)) for name, way in WAYS.items()}
STEPS |= {f"{n} in the loss": lambda scaled, fn=fn: graded(fn, scaled) for n, fn in LOSSES.items()}
STEPS |= {
    "autocast": lambda scaled: autocast(graded(loss, scaled), dtype=HALF),
    "float16": lambda scaled: (
        lambda s, w, x: graded(loss, scaled)(s, w.astype(HALF), x.astype(HALF))
    ),
}


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("name", STEPS)
def test_every_way_to_write_a_step(name, scaled):
    assert answer(STEPS[name](scaled), S, W, X) is scaled


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


def stopped(w, x):
    """No gradient goes through float16."""
    features = lax.stop_gradient(jnp.tanh(x.astype(HALF) @ w.astype(HALF)))
    return (features.astype(jnp.float32) @ w).mean()


def weighted(w, x, weight):
    return jax.grad(lambda w: low(w, x) * weight)(w)


def pulled(w, x, scale=lambda cotangent: cotangent):
    """By a cotangent of ones, which is the loss's own."""
    value, pull = jax.vjp(lambda w: low(w, x), w)
    return pull(scale(jnp.ones_like(value)))


OTHERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], bool]] = {
    "float32": (graded(loss, False), (S, W, X), True),
    "bfloat16": (graded(autocast(loss), False), (S, W, X), True),
    "casts to bfloat16": (
        graded(lambda w, x: loss(w, x.astype(jnp.bfloat16)), False), (S, W, X), True
    ),
    "value": (low, (W, X), True),
    "tangents": (lambda w, x: jax.jvp(lambda w: low(w, x), (w,), (w,)), (W, X), True),
    "stopped gradient": (graded(stopped, False), (S, W, X), True),
    "disabled scaler": (graded(low, True), (GradScaler(enabled=False), W, X), False),
    "scaler that is no argument": (lambda w, x: graded(low, True)(S, w, x), (W, X), True),
    "value_and_grad": (lambda s, w, x: s.value_and_grad(low)(w, x), (S, W, X), True),
    "one of two losses": (
        lambda s, w, x: graded(low, True)(s, w, x) + graded(low, False)(s, w, x), (S, W, X), True
    ),
    "factor of the step's own": (weighted, (W, X, jnp.float32(1024)), False),
    "constant factor": (lambda w, x: weighted(w, x, 1024.0), (W, X), False),
    "cotangent": (pulled, (W, X), False),
    "cotangent, jitted": (jax.jit(pulled), (W, X), False),
    "scaled cotangent": (lambda s, w, x: pulled(w, x, s.scale), (S, W, X), True),
    "scaled gradient": (lambda s, w, x: s.scale(pulled(w, x)[0]), (S, W, X), False),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_steps(name):
    step, args, fine = OTHERS[name]
    assert answer(step, *args) is fine


def test_shapes_stand_for_arrays_and_other_arguments_are_as_they_are():
    def step(w, x, *, kind):
        return graded(low, False)(None, w, x) if kind == "half" else w

    w, x = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (W, X))
    for fn in (step, jax.jit(step, static_argnames="kind")):
        assert not answer(fn, w, x, kind="half")
        assert expect_scaler(fn, w, x, kind="other")


def of_optax(w, x):
    return optax.l2_loss(x.astype(HALF) @ w.astype(HALF)).mean()


@pytest.mark.parametrize("cost", [cast, of_optax])
def test_the_message_names_the_users_line(cost):
    *_, (_, _, last) = cost.__code__.co_lines()
    with pytest.raises(UnscaledError) as caught:
        expect_scaler(graded(cost, False), S, W, X, action="raise")
    assert str(caught.value) == (
        f"gradients flow through float16 without a scaler, first at test_expect_scaler.py:{last}: "
        "those below 2**-24 become 0 there. Differentiate scaler.scale(loss) and step with "
        "scaler.step, where scaler is an enabled GradScaler; or compute in bfloat16, which needs "
        "none."
    )


def test_bad_arguments():
    with pytest.raises(TypeError, match="needs the function of a training step, got 3"):
        expect_scaler(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be 'warn' or 'raise', got 'ignore'"):
        expect_scaler(low, W, X, action="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "nothing", "scaled"), [("scope_names", [], True), ("in_backward", False, False)]
)
def test_these_tests_notice_marks_and_backward_passes_that_are_not_found(
    monkeypatch, name, nothing, scaled
):
    assert answer(graded(low, scaled), S, W, X) is scaled
    monkeypatch.setattr(compat, name, lambda stack: nothing)
    assert answer(graded(low, scaled), S, W, X) is not scaled
