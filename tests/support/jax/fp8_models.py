"""Models whose products run in 8 bits, and products in 8 bits by numpy."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import polymp
from polymp.fp8 import quantise
from polymp.fp8.recipes import RECIPES, Recipe
from polymp.jax import lower
from tests.support import fp8_numpy

NAMES = tuple(RECIPES)
Params = dict[str, jax.Array]


def policy(recipe: str) -> polymp.Policy:
    return polymp.policy("fp8").override(recipe=recipe)


def layers(width: int = 64, depth: int = 3) -> Params:
    keys = jax.random.split(jax.random.key(0), depth)
    return {f"w{i}": jax.random.normal(key, (width, width)) / 8 for i, key in enumerate(keys)}


def batch(width: int = 64) -> jax.Array:
    return jax.random.normal(jax.random.key(7), (2, 32, width))


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
        scale = quantise.scale_of(fp8_numpy.VERBS, x, recipe, role, axis)
        low = quantise.quantised(fp8_numpy.VERBS, x, scale, recipe.format_of(role))
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
