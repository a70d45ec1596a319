"""Six trainings in JAX: parameters or a flax nnx model, a batch, a loss and an optimizer.

`Training.step` is what a user writes: autocast round the loss, a scaler, an update.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

import polymp
from polymp.jax import GradScaler, autocast

Loss = Callable[..., Array]


class Training:
    """A model and all that trains it; one of its steps is `step(state, *batch)`."""

    def __init__(
        self,
        model: Any,
        batch: tuple[np.ndarray, ...],
        loss: Loss,
        rate: float = 1e-2,
        *,
        policy: str | polymp.Policy = "amp",
    ) -> None:
        self.model, self.batch, self.loss, self.policy = model, batch, loss, policy
        self.optimizer = optax.flatten(optax.adam(rate))
        self.scaler, self.dtype = GradScaler(init_scale=2.0**10), "float16"
        self.use(polymp.policy(policy))

    def use(self, policy: polymp.Policy) -> None:
        self.table = policy

    def scale_by(self, scale: float) -> None:
        self.scaler = GradScaler(init_scale=scale)

    def compute_in(self, dtype: str) -> None:
        self.dtype = dtype
        self.scaler = GradScaler(enabled=dtype == "float16")

    @property
    def state(self) -> Any:
        """Return the arrays that a step changes, as they are at the start."""
        shapes = jax.eval_shape(self.optimizer.init, self.model)
        moments = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)
        return self.model, moments, self.scaler

    def step(self, state: Any, *batch: Any) -> tuple[Any, Array]:
        low = autocast(self.loss, dtype=self.dtype, policy=self.table)
        return _step(low, self.optimizer, state, *batch)

    def train(self, steps: int = 30) -> list[float]:
        state, losses = self.state, []
        for _ in range(steps):
            state, loss = _jitted(
                self.loss, self.dtype, self.table, self.optimizer, state, *self.batch
            )
            losses.append(float(loss))
        return losses


def _step(low: Loss, optimizer: Any, state: Any, *batch: Any) -> tuple[Any, Array]:
    model, moments, scaler = state
    (loss, grads), scaler, finite = scaler.value_and_grad(low)(model, *batch)
    updates, new = optimizer.update(grads, moments, model)
    new = optax.apply_updates(model, updates), new
    kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (model, moments))
    return (*kept, scaler), loss


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _jitted(
    loss: Loss, dtype: str, policy: polymp.Policy, optimizer: Any, state: Any, *batch: Any
) -> tuple[Any, Array]:
    """As `step`; compiled once for trainings that differ in their data alone."""
    return _step(autocast(loss, dtype=dtype, policy=policy), optimizer, state, *batch)


class Random:
    """Random numbers, made by numpy, which compiles nothing for them; and layers of such."""

    def __init__(self) -> None:
        self.numbers, self.rngs = np.random.default_rng(0), nnx.Rngs(0)

    def normal(self, *shape: int) -> np.ndarray:
        return self.numbers.standard_normal(shape, np.float32)

    def linear(self, into: int, out: int) -> nnx.Linear:
        def weight(_: Any, shape: tuple[int, ...], *__: Any) -> Array:
            return jnp.asarray(self.normal(*shape) * into**-0.5)

        return nnx.Linear(into, out, rngs=self.rngs, kernel_init=weight)


def squared(model: Any, x: Array, y: Array) -> Array:
    return jnp.mean((model(x)[:, 0] - y) ** 2)


class Regression(nnx.Module):
    """Two layers with a layer norm between them."""

    def __init__(self, random: Random) -> None:
        self.body, self.norm = random.linear(6, 32), nnx.LayerNorm(32, rngs=random.rngs)
        self.head = random.linear(32, 1)

    def __call__(self, x: Array) -> Array:
        return self.head(jax.nn.silu(self.norm(self.body(x))))


def regression(random: Random) -> Training:
    """The product of two inputs."""
    x = random.normal(64, 6)
    return Training(Regression(random), (x, x[:, 0] * x[:, 1]), squared)


def pooled(weights: dict[str, Array], x: Array, mask: Array, y: Array) -> Array:
    """The loss of a sequence model that takes the mean of what the mask leaves."""
    h = jnp.tanh(x @ weights["into"])
    with jax.named_scope("pool"):
        there = mask.sum(1, keepdims=True)
        mean = jnp.einsum("bn,bnd->bd", mask, h)
        mean = jnp.where(there > 0, mean / there, 0.0)
    return jnp.mean(((mean @ weights["out"])[:, 0] - y) ** 2)


def pooling(random: Random) -> Training:
    """The mean of one of the inputs over a sequence."""
    x, lengths = random.normal(32, 8, 4), np.arange(32) % 8 + 1
    mask = (np.arange(8) < lengths[:, None]).astype(np.float32)
    y = ((x[..., 0] * mask).sum(1) / lengths).astype(np.float32)
    weights = {"into": random.normal(4, 16) * 0.5, "out": random.normal(16, 1) * 0.25}
    return Training(weights, (x, mask, y), pooled)


class Unit(nnx.Module):
    """Each row divided by its root mean square, which is a product of the row with itself."""

    def __call__(self, x: Array) -> Array:
        squares = jnp.einsum("bd,bd->b", x, x)
        return x / jnp.sqrt(squares / x.shape[1])[:, None]


class Wide(nnx.Module):
    """A wide layer whose rows are normalised."""

    def __init__(self, random: Random) -> None:
        self.body, self.unit = random.linear(8, 1024), Unit()
        self.head = random.linear(1024, 1)

    def __call__(self, x: Array) -> Array:
        return self.head(jax.nn.relu(self.unit(self.body(x))))


def unit(random: Random) -> Training:
    """The direction of one of the inputs."""
    x = random.normal(32, 8)
    return Training(Wide(random), (x, x[:, 0] / np.linalg.norm(x, axis=1)), squared, 2e-3)


class Penalty(NamedTuple):
    """The squared error, and a penalty on how large all of a hidden layer is."""

    weight: float = 1e-4
    units: float = 1.0

    def __call__(self, layers: dict[str, Array], x: Array, y: Array) -> Array:
        h = jax.nn.relu(x @ layers["up"])
        with jax.named_scope("penalty"):
            size = jnp.sum(jnp.abs(h) * self.units) * (self.weight / self.units)
        return jnp.mean(((h @ layers["down"])[:, 0] - y) ** 2) + size


LEAN_SUMS = polymp.policy("lean").override(name="lean-sums", fp32_keep=["sum"])


def sparse(random: Random) -> Training:
    """The magnitude of an input; its policy rounds a sum to the dtype that its terms came in."""
    x = random.normal(64, 4)
    layers = {"up": random.normal(4, 64) * 0.5, "down": random.normal(64, 1) * 0.1}
    return Training(layers, (x, np.abs(x[:, 0])), Penalty(), policy=LEAN_SUMS)


class Classes(nnx.Module):
    """How probable each class is."""

    def __init__(self, random: Random) -> None:
        self.body, self.head = random.linear(4, 32), random.linear(32, 5)
        self.sharpness = 1.0

    def __call__(self, x: Array) -> Array:
        return jax.nn.softmax(self.head(jax.nn.relu(self.body(x))) * self.sharpness)


def likelihood(model: Classes, x: Array, labels: Array) -> Array:
    """The logarithm of how probable the right class was, written out."""
    p = jnp.take_along_axis(model(x), labels[:, None], 1)
    return -jnp.mean(jnp.log(p))


def classes(random: Random) -> Training:
    """Which of five numbers is the largest; `lean` rounds what a softmax returns."""
    x = random.normal(64, 4)
    labels = np.argmax(np.pad(x, ((0, 0), (0, 1))), axis=1)
    return Training(Classes(random), (x, labels), likelihood, 5e-3, policy="lean")


class Neighbours(nnx.Module):
    """The mean of what the neighbours of a node send: a sum by their table, divided."""

    def __init__(self, random: Random) -> None:
        self.send, self.units = random.linear(4, 32), 1.0

    def __call__(self, table: Array, x: Array) -> Array:
        sent = jax.nn.relu(self.send(x)) * self.units
        return table @ sent / table.sum(1, keepdims=True).astype(sent.dtype) / self.units


class Graph(nnx.Module):
    def __init__(self, random: Random) -> None:
        self.neighbours, self.head = Neighbours(random), random.linear(32, 1)

    def __call__(self, table: Array, x: Array) -> Array:
        return self.head(self.neighbours(table, x))


def graph(random: Random) -> Training:
    """The mean magnitude of the neighbours."""
    x = random.normal(96, 4)
    table = (random.normal(96, 96) < np.linspace(0, 2, 96)[:, None]).astype(np.float32)
    y = (table @ np.abs(x[:, 0])) / table.sum(1)

    def loss(model: Graph, table: Array, x: Array, y: Array) -> Array:
        return jnp.mean((model(table, x)[:, 0] - y) ** 2)

    return Training(Graph(random), (table, x, y), loss)


MADE = {f.__name__: f for f in (regression, pooling, unit, sparse, classes, graph)}


def made(name: str) -> Training:
    return MADE[name](Random())
