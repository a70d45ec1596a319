"""Steps in float16 that lack a scaler, by `expect_scaler`, and steps in bfloat16 that have one."""

from __future__ import annotations

import contextlib
import re
import warnings
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
from polymp.scaling import NOT_NEEDED
from tests.support.processes import in_thread

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


@pytest.mark.parametrize(
    ("name", "nothing", "scaled"), [("scope_names", [], True), ("in_backward", False, False)]
)
def test_these_tests_notice_marks_and_backward_passes_that_are_not_found(
    monkeypatch, name, nothing, scaled
):
    assert answer(graded(low, scaled), S, W, X) is scaled
    monkeypatch.setattr(compat, name, lambda stack: nothing)
    assert answer(graded(low, scaled), S, W, X) is not scaled


# --- a scaler says once that a bfloat16 region needs none, and to no other -----------------------

brain = autocast(loss, dtype=jnp.bfloat16)


def warned(fn):
    """Run in a thread of its own, where nothing has been said or called yet; the warnings."""

    def run():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fn()
        return [w for w in caught if w.category is ScalerWarning]

    seen = in_thread(run)
    assert all(str(w.message) == NOT_NEEDED for w in seen)
    return seen


def step(cost, jit=True, **options):
    def run(scaler, w, x):
        return jax.grad(lambda w: scaler.scale(cost(w, x)))(w)

    return lambda: (jax.jit(run) if jit else run)(GradScaler(**options), W, X)


def test_the_warning_points_at_the_line_that_scales():
    (warning,) = warned(step(brain))
    assert warning.filename == __file__
    assert warning.lineno == step.__code__.co_firstlineno + 2


def several_scalers():
    """Two of one rule, and another."""
    for options in ({"init_scale": 8.0}, {"init_scale": 16.0}, {"growth_interval": 3}):
        step(brain, jit=False, **options)()


def inside(cost, **options):
    return lambda: jax.grad(autocast(lambda w: GradScaler().scale(cost(w, X)), **options))(W)


def one_and_then(first, second):
    """The latest call decides."""
    return step(lambda w, x: first(w, x) + second(w, x))


def evaluation(jit):
    """In bfloat16, between steps in float16."""
    cached = jax.jit(low)

    def run():
        step(cached, jit=jit)()
        brain(W, X)
        jax.jit(brain)(W, X)
        jax.grad(brain)(W, X)
        step(cached, jit=jit)()  # traced again, but for what is cached
        step(low, jit=jit)()

    return run


def scaled_cotangent(scaler, w, x):
    value, vjp = jax.vjp(lambda w: brain(w, x).astype(jnp.float32), w)
    return vjp(scaler.scale(jnp.ones_like(value)))


def in_another_thread():
    assert len(warned(step(brain))) == 1
    step(loss)()


AROUND = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "vmap": lambda f: lambda w, x: jax.vmap(lambda row: f(w, row[None]))(x).mean(),
    "scan": lambda f: lambda w, x: lax.scan(lambda c, row: (c + f(w, row[None]), None), 0.0, x)[0],
}
CALLS = {
    "bfloat16": (step(brain), 1),
    "bfloat16, eager": (step(brain, jit=False), 1),
    "float16": (step(low), 0),
    "float16, eager": (step(low, jit=False), 0),
    "float32": (step(loss), 0),
    "float32, eager": (step(loss, jit=False), 0),
    **{f"bfloat16 in {name}": (step(around(brain)), 1) for name, around in AROUND.items()},
    **{f"float16 in {name}": (step(around(low)), 0) for name, around in AROUND.items()},
    "once for a rule": (several_scalers, 2),
    "inside of the region": (inside(loss), 1),
    "the region around decides": (inside(low), 1),
    "a region that is off": (inside(loss, enabled=False), 0),
    "float16 is called last": (one_and_then(brain, low), 0),
    "bfloat16 is called last": (one_and_then(low, brain), 1),
    "an evaluation": (evaluation(True), 0),
    "an evaluation, eager": (evaluation(False), 0),
    "a scaled cotangent": (lambda: jax.jit(scaled_cotangent)(S, W, X), 1),
    "disabled, as the message says": (step(brain, enabled=False), 0),
    "by its dtype, as the message says": (step(brain, dtype=jnp.bfloat16), 0),
    "for float16": (step(low, dtype=HALF), 0),
    "not traced": (lambda: GradScaler().scale(brain(W, X)), 0),
    "in another thread": (in_another_thread, 0),
    "value_and_grad in bfloat16": (lambda: GradScaler().value_and_grad(brain)(W, X), 1),
    "value_and_grad in float16": (lambda: GradScaler().value_and_grad(low)(W, X), 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_how_often_a_scaler_warns(name):
    call, times = CALLS[name]
    assert len(warned(call)) == times
