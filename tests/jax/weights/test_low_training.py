"""Training with low weights: beside float32 weights under autocast, with flax and equinox.

Where every low weight is only read low, `master` is that run bit for bit: the loss is
differentiated by float32 views of the low weights, as float32 weights get float32 gradients. XLA
may round a product and a sum once or twice, by what it has fused; these programs are compiled as
users compile them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from polymp import weights
from polymp.jax import GradScaler, autocast, low_weights
from tests.support.jax import transformer
from tests.support.jax.hlo import AS_FOR_USERS
from tests.support.jax.scaler_tools import bits
from tests.support.sizes import size

MODES = tuple(weights.MODES)
STEPS = size(30, 300)
USERS = {"xla_backend_optimization_level": 3, **AS_FOR_USERS}

SMALL = replace(transformer.SMALL, layers=1)


Model = tuple[Any, Callable[..., Any], Callable[[Any], Any]]  # parameters, loss, batch of a key


def weights(seed: int, **shapes: tuple[int, ...]) -> dict[str, Any]:
    """Normal numbers, divided by the root of how many inputs each has."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: jax.random.normal(key, shape) / np.sqrt(np.prod(shape[:-1]))
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def perceptron() -> Model:
    params = weights(0, up=(16, 64), down=(64, 4))

    def loss(params: Any, x: Any) -> Any:
        out = jax.nn.relu(x @ params["up"]) @ params["down"]
        return jnp.mean((out - jnp.sin(x[:, :4])) ** 2)

    return params, loss, lambda key: jax.random.normal(key, (32, 16))


def language_model() -> Model:
    """Its embeddings, norms and some biases are read in float32, and are kept."""
    params = transformer.parameters(SMALL)

    def loss(params: Any, tokens: Any) -> Any:
        return transformer.loss(params, tokens, heads=SMALL.heads)

    def batch(key: Any) -> Any:
        shape = (SMALL.batch, SMALL.length + 1)
        return jax.random.randint(key, shape, 0, SMALL.vocabulary)

    return params, loss, batch


def float32(params: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)


def trained(
    tx: Any, params: Any, state: Any, loss: Any, batch: Any, steps: int, view: Any = float32
) -> Any:
    """Losses of all steps, and what they leave; differentiated by a view of the parameters."""

    @jax.jit
    def step(params: Any, state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(view(params), x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    keys = jax.random.split(jax.random.key(7), steps)
    step = step.lower(params, state, batch(keys[0])).compile(USERS)
    losses = []
    for key in keys:
        params, state, value = step(params, state, batch(key))
        losses.append(value)
    return jnp.stack(losses), params, state


@pytest.mark.sized
@pytest.mark.parametrize(
    "model", [perceptron, pytest.param(language_model, marks=pytest.mark.long)]
)
def test_master_is_float32_under_autocast_bit_for_bit(model):
    params, loss, batch = model()
    low_loss = autocast(loss)
    keep = low_loss, params, batch(jax.random.key(0))
    tx = low_weights(optax.adamw(1e-3), "master", keep=keep)
    optimizer = optax.adamw(1e-3)
    want, full, inner = trained(optimizer, params, optimizer.init(params), low_loss, batch, STEPS)
    losses, low, state = trained(tx, tx.weights(params), tx.init(params), low_loss, batch, STEPS)
    assert "bfloat16" in {x.dtype.name for x in jax.tree.leaves(low)}
    assert bits(losses) == bits(want)
    assert bits(state.inner) == bits(inner)
    masked = jax.tree.map(lambda p, w: w.astype(p.dtype), low, full)
    assert bits(low) == bits(masked)
    assert float(losses[-1]) < float(losses[0])


def test_the_plain_loop_is_not_float32_bit_for_bit():
    """As docs/low-weights.md say: it is differentiated by the low weights themselves."""
    params, loss, batch = perceptron()
    tx, low_loss = low_weights(optax.adamw(1e-3), "master"), autocast(loss)
    run = tx, tx.weights(params), tx.init(params), low_loss, batch, 10
    plain, want = trained(*run, view=lambda params: params)[0], trained(*run)[0]
    assert bits(plain[:1]) == bits(want[:1])
    assert bits(plain) != bits(want)
    assert np.allclose(plain, want, rtol=0.01)


X = jax.random.normal(jax.random.key(3), (16, 8))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(4)(nn.LayerNorm()(nn.relu(nn.Dense(32)(x))))


def nnx_model() -> Any:
    rngs = nnx.Rngs(0)
    first, last = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 4, rngs=rngs)
    return nnx.Sequential(first, nnx.relu, nnx.LayerNorm(32, rngs=rngs), last)


def error(y: Any, x: Any) -> Any:
    return jnp.mean((y - x[:, :4]) ** 2)


linen_loss = autocast(lambda params, x: error(Linen().apply(params, x), x))
module_loss = autocast(lambda model, x: error(model(x), x))
equinox_loss = autocast(lambda model, x: error(jax.vmap(model)(x), x))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", MODES)
def test_a_train_state_of_flax(mode):
    params = Linen().init(jax.random.key(0), X)
    tx = low_weights(optax.adamw(1e-2), mode, keep=(linen_loss, params, X))
    state = TrainState.create(apply_fn=Linen().apply, params=params, tx=tx)
    state = state.replace(params=tx.weights(state.params))

    @jax.jit
    def step(state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(linen_loss)(state.params, x)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for _ in range(20):
        state, loss = step(state, X)
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
    dtypes = jax.tree.map(lambda x: x.dtype.name, state.params)["params"]
    assert dtypes["Dense_0"]["kernel"] == dtypes["Dense_1"]["kernel"] == "bfloat16"
    assert dtypes["LayerNorm_0"] == {"bias": "float32", "scale": "float32"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_of_flax_nnx(mode):
    model = nnx_model()
    tx = low_weights(optax.adamw(1e-2), mode, keep=(module_loss, model, X))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    nnx.update(model, tx.weights(nnx.state(model, nnx.Param)))

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(module_loss)(model, x)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, X)) for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]
    assert model.layers[0].kernel[...].dtype == jnp.bfloat16
    assert model.layers[2].scale[...].dtype == jnp.float32
    assert int(optimizer.opt_state.step[...]) == 20


def test_a_scaler_step_of_flax_nnx_that_skips_leaves_every_bit():
    model = nnx_model()
    tx = low_weights(optax.adamw(1e-2), "stochastic")
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    nnx.update(model, tx.weights(nnx.state(model, nnx.Param)))
    scaler, seen = GradScaler(2.0**10), []
    loss = autocast(module_loss.__wrapped__, dtype=jnp.float16)

    @nnx.jit
    def step(scaler: Any, model: Any, optimizer: Any, x: Any) -> Any:
        def update(grads: Any, model: Any, optimizer: Any) -> Any:
            optimizer.update(model, grads)
            return model, optimizer

        grads = nnx.grad(lambda model: scaler.scale(loss(model, x)))(model)
        return scaler.step(grads, update, model, optimizer)[1:]

    for x in (X, X * jnp.nan, X):
        scaler, finite = step(scaler, model, optimizer, x)
        seen.append((bool(finite), bits(nnx.state((model, optimizer.opt_state)))))
    assert [finite for finite, _ in seen] == [True, False, True]
    assert seen[0][1] == seen[1][1] != seen[2][1]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", MODES)
def test_a_module_of_equinox(mode):
    """Optax's `apply_updates` rounds to the dtype of the weights; equinox's own does not."""
    model = eqx.nn.MLP(8, 4, 32, 1, key=jax.random.key(0))
    tx = low_weights(optax.adamw(1e-2), mode)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    model = tx.weights(model)

    @eqx.filter_jit
    def step(model: Any, state: Any, x: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(equinox_loss)(model, x)
        params, static = eqx.partition(model, eqx.is_inexact_array)
        updates, state = tx.update(grads, state, params)
        return eqx.combine(optax.apply_updates(params, updates), static), state, loss

    losses = []
    for _ in range(20):
        model, state, loss = step(model, state, X)
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
    assert model.layers[0].weight.dtype == jnp.bfloat16
