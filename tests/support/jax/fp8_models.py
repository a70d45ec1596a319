"""Models whose products run in 8 bits, and products in 8 bits by numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import polymp
from polymp import fp8
from polymp.fp8 import RECIPES, Recipe
from polymp.jax import GradScaler, autocast, lower
from tests.support import fp8_numpy
from tests.support.jax.scaler_tools import by_optax

NAMES = tuple(RECIPES)
Params = dict[str, jax.Array]


def policy(recipe: str) -> polymp.Policy:
    return polymp.policy("fp8").override(recipe=recipe)


def layers() -> Params:
    keys = jax.random.split(jax.random.key(0), 3)
    return {f"w{i}": jax.random.normal(key, (64, 64)) / 8 for i, key in enumerate(keys)}


def batch() -> jax.Array:
    return jax.random.normal(jax.random.key(7), (2, 32, 64))


def loss(params: Params, x: jax.Array, layer: Callable[..., jax.Array] | None = None) -> jax.Array:
    """The mean square of what a few layers return."""
    layer = layer or (lambda h, w: jnp.tanh(h @ w))
    h, (*names, last) = lower(x), sorted(params)
    for name in names:
        h = layer(h, params[name])
    return jnp.mean((h @ params[last]) ** 2)


def product(
    a: np.ndarray, b: np.ndarray, recipe: Recipe, name: str, roles: Sequence[str]
) -> np.ndarray:
    """`a @ b` in 8 bits, by numpy: [m, k] @ [k, n], exact but for the operands' rounding."""
    quantised = []
    for x, role, summed in ((a, roles[0], 1), (b, roles[1], 0)):
        axis = recipe.scale_axis(name, role, summed)
        scale = fp8.scale_of(fp8_numpy.VERBS, x, recipe, role, axis)
        low = fp8.quantised(fp8_numpy.VERBS, x, scale, recipe.format_of(role))
        quantised.append(low.astype(np.float64) / scale.astype(np.float64))
    result: np.ndarray = quantised[0] @ quantised[1]
    return result


class Llama(nnx.Module):
    """A block of a Llama: norms, attention, and a small network with a gate."""

    def __init__(self, width: int, wide: int, heads: int) -> None:
        def linear(rows: int, columns: int) -> nnx.Linear:
            return nnx.Linear(rows, columns, use_bias=False, rngs=rngs)

        rngs = nnx.Rngs(0)
        self.heads = heads
        self.norm1, self.norm2 = (nnx.RMSNorm(width, rngs=rngs) for _ in range(2))
        self.q, self.k, self.v, self.out = (linear(width, width) for _ in range(4))
        self.gate, self.up, self.down = (
            linear(width, wide), linear(width, wide), linear(wide, width)
        )  # fmt: skip

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        h = self.norm1(x)
        shape = batch, length, self.heads, width // self.heads
        q, k, v = (linear(h).reshape(shape) for linear in (self.q, self.k, self.v))

        @jax.checkpoint  # as a fused kernel, it keeps no probabilities
        def attend(*qkv: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(*qkv, is_causal=True)

        x = x + self.out(attend(q, k, v).reshape(x.shape))
        h = self.norm2(x)
        return x + self.down(jax.nn.silu(self.gate(h)) * self.up(h))


PARTS = ("model", "optimizer", "scaler")
OPTIMIZER = optax.adamw(0.01)


@partial(jax.jit, static_argnums=0)
def _step(policy: Any, params: Any, state: Any, scaler: Any, x: Any) -> Any:
    fn = autocast(loss, policy=policy)

    def scaled(params: Any) -> Any:
        found = fn(params, x)
        return scaler.scale(found), found

    grads, found = jax.grad(scaled, has_aux=True)(params)
    (params, state), scaler, _ = scaler.step(grads, by_optax(OPTIMIZER), params, state)
    return found, params, state, scaler


class Run:
    """Parameters with an optimizer's state and a scaler, whose scale doubles every two steps."""

    def __init__(self, policy: Any, seed: int = 0) -> None:
        self.model = jax.tree.map(lambda w: w * (1 + seed), layers())
        self.optimizer = OPTIMIZER.init(self.model)
        self.scaler = GradScaler(init_scale=8.0, growth_interval=2)
        self.policy = policy

    def step(self, number: int) -> Any:
        """Train on the batch of that number; the bits of the loss and of all that is left."""
        x = jax.random.normal(jax.random.key(number), (2, 32, 64))
        state = self.model, self.optimizer, self.scaler
        found, self.model, self.optimizer, self.scaler = _step(self.policy, *state, x)
        return float(found), self.bits()

    def bits(self) -> Any:
        """The bits of weights and of the optimizer's state, and the numbers of the scaler."""
        arrays = jax.tree.leaves((self.model, self.optimizer))
        return [np.asarray(x).tobytes() for x in arrays], self.scaler.state_dict()

    def save(self, path: Path) -> None:
        saved = {part: getattr(self, part) for part in PARTS}
        saved["scaler"] = self.scaler.state_dict()
        path.write_bytes(flax.serialization.to_bytes(saved))

    def load(self, path: Path, without: str = "") -> None:
        """Go on from a file; one of `PARTS` may be left as it is."""
        own = {part: getattr(self, part) for part in PARTS}
        own["scaler"] = self.scaler.state_dict()
        for part, state in flax.serialization.from_bytes(own, path.read_bytes()).items():
            if part != without:
                state = self.scaler.load_state_dict(state) if part == "scaler" else state
                setattr(self, part, state)
