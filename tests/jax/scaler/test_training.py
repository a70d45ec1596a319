"""`GradScaler` at work: in an autocast function, with models of libraries, on eight devices."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from polymp.jax import GradScaler, autocast
from tests.support.jax import eight_devices


@pytest.mark.parametrize("given", ["closed over", "argument"])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_float16_loss_scaled_inside_an_autocast_function(given, jit):
    x = jnp.asarray([1.5, -2.0, 0.25, 4.0], jnp.float32)
    w = jnp.asarray([3.0, 1.0, 8.0, -0.5], jnp.float32)
    scaler = GradScaler()  # 2**16 is Inf in float16, and so is any loss above 1 times it

    def losses(scaler: GradScaler, w: Any) -> tuple[Any, Any]:
        loss = x @ w
        return scaler.scale(loss), loss

    low = autocast(losses, dtype=jnp.float16)
    if given == "closed over":
        low = autocast(lambda _, w: losses(scaler, w), dtype=jnp.float16)
    run = jax.jit(low) if jit else low
    scaled, loss = run(scaler, w)
    assert (loss.dtype, float(loss)) == (jnp.float16, 2.5)
    assert (scaled.dtype, float(scaled)) == (jnp.float32, 2.5 * 2.0**16)
    grads = jax.grad(lambda w: low(scaler, w)[0])(w)
    assert grads.dtype == jnp.float32
    # The cotangent of a float16 loss is float16, and the scale has no place in it.
    (true, finite) = scaler.unscale(grads)
    assert not finite
    smaller = GradScaler(2.0**15)
    grads = jax.grad(lambda w: autocast(losses, dtype=jnp.float16)(smaller, w)[0])(w)
    true, finite = smaller.unscale(grads)
    assert finite
    assert np.array_equal(true, x)


# --- the libraries' own models and optimizers ---------------------------------------------------

SGD = optax.sgd(0.5, momentum=0.9)
X = jnp.linspace(-1, 1, 8).reshape(4, 2)


def test_an_equinox_model_with_its_activation_inside():
    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    state = SGD.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(scaler, model, state, x):
        def update(grads, model, state):
            updates, state = SGD.update(grads, state)
            return eqx.apply_updates(model, updates), state

        grads = eqx.filter_grad(lambda m: scaler.scale((jax.vmap(m)(x) ** 2).mean()))(model)
        return scaler.step(grads, update, model, state)

    loss = eqx.filter_grad(lambda m: (jax.vmap(m)(X) ** 2).mean())
    expected = model.layers[0].weight - 0.5 * loss(model).layers[0].weight
    (stepped, state), scaler, finite = step(GradScaler(), model, state, X)
    assert finite
    assert stepped.activation is model.activation
    assert jnp.allclose(stepped.layers[0].weight, expected, rtol=1e-5, atol=1e-6)
    (skipped, _), scaler, finite = step(scaler, stepped, state, X * jnp.inf)
    assert not finite
    assert eqx.tree_equal(skipped, stepped)
    assert scaler.state.scale == 2.0**15


def test_flags_and_rates_of_an_equinox_model_stay_python_numbers():
    """`Dropout` branches on its flag: as an array it would be traced in the next step."""
    keys = jax.random.split(jax.random.key(0))
    model = eqx.nn.Sequential([eqx.nn.Linear(2, 1, key=keys[0]), eqx.nn.Dropout(0.25)])
    state = SGD.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(scaler, model, state, count, x):
        def loss(model):
            return scaler.scale((jax.vmap(lambda x: model(x, key=keys[1]))(x) ** 2).mean())

        def update(grads, model, state, count):
            updates, state = SGD.update(grads, state)
            return eqx.apply_updates(model, updates), state, count + 1

        return scaler.step(eqx.filter_grad(loss)(model), update, model, state, count)

    scaler, count = GradScaler(), 0
    for x in (X, X * jnp.inf, X):
        (model, state, count), scaler, _ = step(scaler, model, state, count, x)
    assert (model[1].p, model[1].inference) == (0.25, False)
    assert type(model[1].inference) is bool
    assert count == 2


# --- eight devices -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_mesh() -> dict[str, Any]:
    return eight_devices.run("tests.support.jax.scaler_meshes")


SKIPPED = {"w": [1.0] * 8, "scale": [4.0] * 8, "finite": [False] * 8}
STEPPED = {"w": [0.0] * 8, "scale": [16.0] * 8, "finite": [True] * 8}


@pytest.mark.parametrize("name", ["found", "named"])
@pytest.mark.parametrize("check", [True, False])
def test_an_inf_on_one_device_of_a_shard_map_makes_all_skip(on_mesh, check, name):
    assert on_mesh[f"shard_map-{check}-{name}-sick"] == SKIPPED
    assert on_mesh[f"shard_map-{check}-{name}-healthy"] == STEPPED


def test_devices_that_do_not_ask_each_other_drift_apart(on_mesh):
    """The result that the tests beside this one would see if the axes were not found."""
    for check in (True, False):
        seen = on_mesh[f"shard_map-{check}-none-sick"]
        assert seen["scale"] == [16.0] * 3 + [4.0] + [16.0] * 4
        assert seen["w"] == [0.0] * 3 + [1.0] + [0.0] * 4


def test_a_step_on_a_mesh_whose_shardings_are_types(on_mesh):
    healthy, sick = on_mesh["explicit-healthy"], on_mesh["explicit-sick"]
    assert healthy["finite"]
    assert all(healthy["updates"])
    assert (sick["updates"], sick["finite"]) == ([0.0] * 8, False)
    assert healthy["spec"] == sick["spec"]
    assert "data" in sick["spec"]


def test_manual_over_one_axis_of_two(on_mesh):
    assert on_mesh["partly-manual-sick"] == {
        "w": [1.0] * 8,
        "scale": [4.0] * 4,
        "finite": [False] * 4,
    }


@pytest.mark.parametrize("way", ["step", "value_and_grad", "train_state"])
def test_a_sharded_parameter_beside_a_whole_one(on_mesh, way):
    assert on_mesh[f"fully-sharded-by_{way}-sick"] == [[1.0] * 8, 0.0, 4.0]
    assert on_mesh[f"fully-sharded-by_{way}-healthy"] == [[0.0] * 8, -1.0, 16.0]
