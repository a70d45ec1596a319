"""`GradScaler.step` with flax: a `TrainState`, and nnx modules whose forward pass changes them."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from polymp.jax import GradScaler, autocast
from tests.support.jax.scaler_tools import bits, numbers

X = jnp.linspace(-2.0, 2.0, 24).reshape(8, 3)
TX = optax.adam(1e-2)
# An overflow of float16 and not of the loss, a batch with NaN, one whose loss is Inf.
BATCHES = jnp.stack([X] * 7).at[2].mul(300.0).at[4, 1].set(jnp.nan).at[5].mul(1e30)
FINITE = [True, True, False, True, False, False, True]


class BatchState(TrainState):
    batch_stats: Any


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.BatchNorm(use_running_average=False, momentum=0.5)(x)
        return nn.Dense(2)(nn.Dense(4)(x))


def linen_step(scaler: GradScaler, state: Any, x: Any) -> Any:
    """As docs/scaling-jax.md has it."""

    @autocast(dtype=jnp.float16)
    def loss_fn(params: Any) -> Any:
        variables = {"params": params, "batch_stats": state.batch_stats}
        y, new = state.apply_fn(variables, x, mutable=["batch_stats"])
        return (y**2).mean(), new["batch_stats"]

    def scaled_loss(params: Any) -> Any:
        loss, stats = loss_fn(params)
        return scaler.scale(loss), (loss, stats)

    def update(grads: Any, state: Any) -> Any:
        return state.apply_gradients(grads=grads, batch_stats=stats)

    grads, (loss, stats) = jax.grad(scaled_loss, has_aux=True)(state.params)
    return scaler.step(grads, update, state, loss=loss)


def test_a_train_state_with_batch_statistics():
    net = Net()
    variables = dict(net.init(jax.random.key(0), X))
    state = BatchState.create(apply_fn=net.apply, tx=TX, **variables)
    scaler, seen = GradScaler(2.0**13), []
    run = jax.jit(linen_step)
    for x in BATCHES:
        before = bits(state)
        state, scaler, finite = run(scaler, state, x)
        assert (bits(state) == before) != bool(finite)
        seen.append(bool(finite))
    assert seen[4:6] == [False, False]
    assert int(state.step) == sum(seen)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


class Model(nnx.Module):
    def __init__(self, norm: bool) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs) if norm else None
        self.last = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.first(x)
        return self.last(x if self.norm is None else self.norm(x))


@autocast(dtype=jnp.float16)
def model_loss(model: Any, x: Any) -> Any:
    return (model(x) ** 2).mean()


def nnx_step(scaler: GradScaler, model: Any, optimizer: Any, x: Any) -> Any:
    """As docs/scaling-jax.md has it."""
    graph, before = nnx.split((model, optimizer))
    before = jax.tree.map(jnp.copy, before)

    def scaled_loss(model: Any) -> Any:
        loss = model_loss(model, x)
        return scaler.scale(loss), loss

    grads, loss = nnx.grad(scaled_loss, has_aux=True)(model)
    after = nnx.state((model, optimizer))

    def update(grads: Any, before: Any) -> Any:
        model, optimizer = nnx.merge(graph, after, copy=True)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer))

    state, scaler, finite = scaler.step(grads, update, before, loss=loss)
    nnx.update((model, optimizer), state)
    return scaler, finite


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch statistics"])
@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_an_nnx_module_and_its_optimizer(wrap, norm):
    model = Model(norm)
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    scaler, seen = GradScaler(2.0**13), []
    run = wrap(nnx_step)
    for x in BATCHES:
        before = bits(nnx.state((model, optimizer)))
        scaler, finite = run(scaler, model, optimizer, x)
        assert (bits(nnx.state((model, optimizer))) == before) != bool(finite)
        seen.append(bool(finite))
    assert seen[4:6] == [False, False]
    if not norm:  # a batch norm takes the large batch, too
        assert seen == FINITE
        # The scale is halved by the overflow and by both lost losses, as in torch.amp.
        assert numbers(scaler.state) == (2.0**10, 1, 0, 0, 3)
    assert optimizer.step[...] == sum(seen)
