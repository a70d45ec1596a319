"""`polymp.jax.scaled`: an optax optimizer with the scaler in its state, beside a loop by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from polymp.jax import GradScaler, ScaledState, autocast, scaled
from tests.support import processes
from tests.support.jax.hlo import AS_FOR_USERS
from tests.support.jax.scaler_tools import bits, numbers

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 12).reshape(4, 3), "b": jnp.asarray([0.5, -0.0, 2.0])}
BATCH = jnp.linspace(-2.0, 2.0, 20).reshape(5, 4)


def mean_square(params: Any, x: Any) -> Any:
    return ((x @ params["w"] + params["b"]) ** 2).mean()


low = autocast(mean_square, dtype=jnp.float16)

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(1e-2),
    "chain": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "schedule": optax.sgd(optax.linear_schedule(0.5, 0.0, 10), momentum=0.9),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "masked": optax.masked(optax.adam(1e-2), {"w": True, "b": False}),
    "parts": optax.multi_transform(
        {"a": optax.adam(1e-2), "s": optax.set_to_zero()}, {"w": "a", "b": "s"}
    ),
    "steps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "scale": optax.scale(-0.1),
    "sizes": optax.contrib.schedule_free_adamw(1e-2),
}


def by_scaled(optimizer: Any, loss_fn: Any) -> Any:
    def step(params: Any, state: Any, x: Any) -> Any:
        def scaled_loss(params: Any) -> Any:
            loss = loss_fn(params, x)
            return state.scaler.scale(loss), loss

        grads, loss = jax.grad(scaled_loss, has_aux=True)(params)
        updates, state = optimizer.update(grads, state, params, loss=loss)
        return optax.apply_updates(params, updates), state, state.finite

    return step


def by_hand(optimizer: Any, loss_fn: Any) -> Any:
    def step(params: Any, state: Any, x: Any) -> Any:
        scaler, inner = state

        def scaled_loss(params: Any) -> Any:
            loss = loss_fn(params, x)
            return scaler.scale(loss), loss

        grads, loss = jax.grad(scaled_loss, has_aux=True)(params)
        _, finite = scaler.unscale(grads)
        loss_finite = scaler.loss_finite(loss)
        updates, inner = jax.lax.cond(
            finite,
            # Divided here: XLA contracts products and sums, and rounds by what it has fused.
            lambda: optimizer.update(scaler.unscale(grads)[0], inner, params),
            lambda: (jax.tree.map(lambda g: jnp.full_like(g, -0.0), grads), inner),
        )
        scaler = scaler.update(finite, loss_finite=loss_finite)
        return optax.apply_updates(params, updates), (scaler, inner), finite

    return step


# What is planted: a gradient that overflows float16, a batch with NaN, one whose loss is Inf.
BATCHES = jnp.stack([BATCH] * 8).at[2].mul(200.0).at[4, 1].set(jnp.nan).at[6].mul(1e30)


def run_each(step: Any, params: Any, state: Any) -> Any:
    seen = []
    jitted = jax.jit(step, donate_argnums=(0, 1))
    params, state = jax.tree.map(jnp.array, (params, state))
    for x in BATCHES:
        params, state, finite = jitted(params, state, x)
        seen.append(finite)
    return params, state, jnp.stack(seen)


def run_scan(step: Any, params: Any, state: Any) -> Any:
    def body(carry: Any, x: Any) -> Any:
        *carry, finite = step(*carry, x)
        return tuple(carry), finite

    (params, state), seen = jax.jit(lambda *c: jax.lax.scan(body, c, BATCHES))(params, state)
    return params, state, seen


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "run"),
    [*((name, run_scan) for name in OPTIMIZERS), ("adam", run_each), ("steps", run_each)],
)
def test_it_is_a_loop_by_hand_bit_for_bit(name, run):
    optimizer = OPTIMIZERS[name]
    scaler = GradScaler(2.0**12, growth_interval=2)
    ours = scaled(optimizer, scaler)
    params, state, finite = run(by_scaled(ours, low), PARAMS, ours.init(PARAMS))
    expected, (last, inner), expected_finite = run(
        by_hand(optimizer, low), PARAMS, (scaler, optimizer.init(PARAMS))
    )
    assert bits((params, state.inner, state.scaler)) == bits((expected, inner, last))
    assert jax.tree.structure(state.inner) == jax.tree.structure(inner)
    assert finite.tolist() == expected_finite.tolist()
    assert finite.tolist() == [True, True, False, True, False, True, False, True]
    assert int(state.scaler.state.skipped) == 3
    assert jnp.isfinite(params["w"]).all()


def scaled_grads(state: Any, value: float) -> Any:
    return jax.tree.map(lambda p: state.scaler.scale(jnp.full_like(p, value)), PARAMS)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "wrap"),
    [*((name, jax.jit) for name in OPTIMIZERS), ("adam", lambda f: f), ("parts", lambda f: f)],
)
def test_a_skipped_step(name, wrap):
    """The inner state keeps its bits, and so does what the updates are added to, -0.0 too."""
    ours = scaled(OPTIMIZERS[name], GradScaler(8.0))
    update = wrap(lambda g, s, p, loss: ours.update(g, s, p, loss=loss))
    state = ours.init(PARAMS)
    updates, state = update(scaled_grads(state, 1.0), state, PARAMS, 1.0)
    assert state.finite
    for value, loss, after in (
        (np.inf, 1.0, (4.0, 0, 1, 0, 1)),
        (np.nan, np.nan, (4.0, 0, 1, 1, 1)),
    ):
        nothing, skipped = update(scaled_grads(state, value), state, PARAMS, loss)
        assert not skipped.finite
        assert bits(skipped.inner) == bits(state.inner)
        assert jax.tree.structure(skipped) == jax.tree.structure(state)
        assert jax.tree.map(jnp.shape, nothing) == jax.tree.map(jnp.shape, updates)
        assert [x.dtype for x in jax.tree.leaves(nothing)] == [jnp.float32] * 2
        assert not any(np.any(x) for x in jax.tree.leaves(nothing))
        assert bits(optax.apply_updates(PARAMS, nothing)) == bits(PARAMS)
        assert numbers(skipped.scaler.state) == after


def test_without_a_loss_the_scale_is_to_blame():
    ours = scaled(optax.sgd(0.1), GradScaler(8.0))
    state = ours.init(PARAMS)
    _, state = ours.update(scaled_grads(state, np.nan), state, PARAMS)
    assert numbers(state.scaler.state) == (4.0, 0, 1, 0, 1)


def test_other_dtypes_than_float32():
    """Complex ones, none, and float16: its moments are float32, as its gradients are."""
    params = {"z": jnp.asarray([1 + 2j]), "h": jnp.ones(2, jnp.float16), "none": None}
    ours = scaled(optax.adam(0.5), GradScaler(4.0))
    state = ours.init(params)
    assert state.inner[0].mu["h"].dtype == jnp.float32
    for value in (1.0, np.inf):
        grads = {
            "z": jnp.asarray([value + 1j]),
            "h": jnp.full(2, value, jnp.float16),
            "none": None,
        }
        updates, after = jax.jit(ours.update)(grads, state, params)
        assert {k: str(updates[k].dtype) for k in "zh"} == {"z": "complex64", "h": "float32"}
        new = optax.apply_updates(params, updates)
        assert new["h"].dtype == jnp.float16
        assert (bits(new) == bits(params)) is (value == np.inf)
        assert bool(after.finite) is (value == 1.0)


def test_disabled_it_is_the_optimizer():
    plain, ours = optax.adam(0.1), scaled(optax.adam(0.1), GradScaler(enabled=False))
    params = {"h": jnp.ones(2, jnp.bfloat16)}
    grads = {"h": jnp.asarray([np.inf, 1.0], jnp.bfloat16)}
    updates, state = ours.update(grads, ours.init(params), params, loss=jnp.nan)
    expected, inner = plain.update(grads, plain.init(params), params)
    assert bits((updates, state.inner)) == bits((expected, inner))
    assert state.finite


def test_every_run_starts_from_the_scaler_that_was_given():
    scaler = GradScaler(4.0)
    ours = scaled(optax.sgd(0.1), scaler)
    step = jax.jit(by_scaled(ours, mean_square), donate_argnums=1)
    for _ in range(2):
        state = ours.init(PARAMS)
        step(PARAMS, state, BATCH)
        assert state.scaler.state.scale.is_deleted()
    assert scaler.state.scale == 4.0
    assert scaled(optax.sgd(0.1)).init(PARAMS).scaler.state.scale == 2.0**16


def test_inside_of_a_chain_and_found_there():
    """Outermost is what the docs say; inside, what follows sees updates of nothing."""
    ours = optax.chain(scaled(optax.sgd(1.0), GradScaler(2.0)), optax.scale(0.5))
    state = ours.init(PARAMS)
    scaler = optax.tree.get(state, "scaler")
    assert isinstance(scaler, GradScaler)
    updates, state = ours.update(scaler.scale(PARAMS), state, PARAMS, loss=jnp.float32(1))
    assert bits(updates) == bits(jax.tree.map(lambda p: p * -0.5, PARAMS))
    assert optax.tree.get(state, "finite")


def test_microbatches_leave_out_a_bad_one():
    """MultiSteps inside: the microbatch that overflowed does not count."""
    ours = scaled(optax.MultiSteps(optax.sgd(1.0), 2), GradScaler(4.0))
    params, state = jnp.zeros(2), None
    state = ours.init(params)
    for value in (1.0, np.inf, 3.0):
        grads = state.scaler.scale(jnp.full(2, value))
        updates, state = ours.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert params.tolist() == [-2.0, -2.0]
    assert numbers(state.scaler.state) == (2.0, 1, 0, 0, 1)


def test_what_else_update_is_given_goes_inside():
    seen = []

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        seen.append(extra)
        return updates, state

    inside = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    ours = scaled(inside)
    ours.update(PARAMS, ours.init(PARAMS), PARAMS, loss=1.0, value=2.0)
    assert seen == [{"value": 2.0}]
    plain = scaled(optax.sgd(1.0))  # takes none
    assert plain.update(PARAMS, plain.init(PARAMS), PARAMS, value=2.0)[1].finite


def test_a_batch_of_optimizers():
    ours = scaled(optax.adam(0.1), GradScaler(4.0))
    params = jnp.ones((3, 2))
    state = jax.vmap(ours.init)(params)
    grads = jnp.ones((3, 2)).at[1, 0].set(jnp.inf)
    updates, state = jax.jit(jax.vmap(ours.update))(grads, state, params)
    assert state.finite.tolist() == [True, False, True]
    assert state.scaler.state.scale.tolist() == [4.0, 2.0, 4.0]
    assert np.any(np.asarray(updates), axis=1).tolist() == [True, False, True]


def widening(updates: Any, state: Any, params: Any = None) -> Any:
    return updates, state.astype(jnp.bfloat16)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: scaled(3), "scaled needs an optax optimizer, got 3."),
        (
            lambda: scaled(optax.sgd(1.0), 2.0**16),
            "scaled needs a polymp.jax.GradScaler, got 65536.0.",
        ),
        (
            lambda: scaled(optax.sgd(1.0)).update(PARAMS, optax.EmptyState(), PARAMS),
            f"a scaled optimizer needs the state that its init returned, got {optax.EmptyState}.",
        ),
        (
            lambda: (s := scaled(optax.GradientTransformation(lambda p: p["b"], widening))).update(
                PARAMS, s.init(PARAMS)
            ),
            "the optimizer must keep the shapes and dtypes of the state, and what is no array; "
            "state[0] was float32[3] and came back as bfloat16[3].",
        ),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(TypeError) as raised:
        make()
    assert raised.value.args[0] == message


def test_its_state_is_a_tuple_with_names():
    state = scaled(optax.sgd(0.1)).init(PARAMS)
    assert isinstance(state, ScaledState)
    assert ScaledState._fields == ("scaler", "inner", "finite")


def test_neither_optax_nor_flax_is_imported_before_it_is_used():
    code = (
        "import sys, polymp.jax as p; p.GradScaler().value_and_grad(lambda w: w)(1.0); "
        "print(sorted({'optax', 'flax'} & set(sys.modules)))"
    )
    assert processes.run(code) == "[]\n"


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what XLA on CPU makes of it")
def test_the_optimizer_and_the_zeros_are_in_the_branches():
    ours = scaled(optax.adam(1e-3))
    params = jnp.ones((311, 257))
    state = ours.init(params)
    grads = jnp.ones_like(params)
    program = (
        jax.jit(ours.update, donate_argnums=(0, 1))
        .lower(grads, state, params)
        .compile(AS_FOR_USERS)
    )
    text = program.as_text()
    main = text[text.index("ENTRY ") :]
    assert text.count(" conditional(") == 2  # one of them of the check
    assert "f32[311,257]{1,0} select(" not in text
    assert "f32[311,257]{1,0} broadcast(" not in main
    assert "f32[311,257]{1,0} fusion(" not in main
    assert "f32[311,257]{1,0} broadcast(" in text  # the zeros, where they belong
    assert program.memory_analysis().temp_size_in_bytes < 1.3 * params.nbytes


def test_a_scaler_around_a_scaled_optimizer_is_refused():
    optimizer = scaled(optax.sgd(1.0))
    params = jnp.ones(2)
    state = optimizer.init(params)
    with pytest.raises(TypeError, match=r"^step was given the state of an optimizer .* twice"):
        GradScaler().step(params, lambda grads, state: state, {"inner": state})
    with pytest.raises(TypeError, match=r"^scaled was given the state of an optimizer"):
        scaled(optax.chain(optax.clip(1.0), optimizer)).init(params)
