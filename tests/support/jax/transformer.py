"""A small transformer in plain JAX: one source for float32, hand-written bfloat16 and autocast.

In: a `Size`, parameters as a pytree of float32 arrays, tokens. Out: the loss. `compute` is the
dtype that somebody who casts by hand would choose, the way jmp's users do: parameters and
activations in `compute`, and norms, softmax and loss in float32. With `compute=float32` every cast
below is of a float32 value to float32, which leaves nothing in the trace: that program, untouched,
is what autocast gets. Nothing here knows of polymp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

MASKED = -2.3819763e38


class Sizes(NamedTuple):
    """Of Gemma."""

    layers: int
    width: int
    heads: int
    shared: int  # heads of keys and values
    head: int
    hidden: int
    words: int


class Norm(nnx.Module):
    def __init__(self, width: int) -> None:
        self.scale = nnx.Param(jnp.zeros(width))

    def __call__(self, x: Array) -> Array:
        variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(variance + 1e-6) * (1 + self.scale[...])


def weight(rngs: nnx.Rngs, *shape: int) -> nnx.Param[Array]:
    return nnx.Param(jax.random.normal(rngs.params(), shape) * shape[-2] ** -0.5)


def rotated(x: Array, positions: Array) -> Array:
    """Rotary embedding of [batch, time, heads, head] at positions [batch, time]."""
    share = 2 * jnp.arange(x.shape[-1] // 2) / x.shape[-1]
    angle = positions[..., None, None] / 10_000**share
    (a, b), sin, cos = jnp.split(x, 2, axis=-1), jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, it: Sizes, rngs: nnx.Rngs) -> None:
        self.query = weight(rngs, it.heads, it.width, it.head)
        self.pair = weight(rngs, 2, it.shared, it.width, it.head)
        self.out = weight(rngs, it.heads, it.head, it.width)
        self.groups = it.heads // it.shared

    def __call__(self, x: Array, positions: Array, mask: Array) -> Array:
        query = jnp.einsum("btd,ndh->btnh", x, self.query[...])
        key, value = jnp.einsum("bsd,ckdh->cbskh", x, self.pair[...])
        query = rotated(query, positions) * query.shape[-1] ** -0.5
        key = rotated(key, positions)
        b, t, _, h = query.shape
        query = query.reshape(b, t, -1, self.groups, h)
        scores = jnp.einsum("btkgh,bskh->btkgs", query, key)
        scores = 50 * jnp.tanh(scores / 50)
        shares = jax.nn.softmax(jnp.where(mask[:, :, None, None], scores, MASKED), axis=-1)
        mixed = jnp.einsum("btkgs,bskh->btkgh", shares.astype(key.dtype), value)
        return jnp.einsum("btnh,nhd->btd", mixed.reshape(b, t, -1, h), self.out[...])


class Feed(nnx.Module):
    def __init__(self, it: Sizes, rngs: nnx.Rngs) -> None:
        self.gate, self.up = weight(rngs, it.width, it.hidden), weight(rngs, it.width, it.hidden)
        self.down = weight(rngs, it.hidden, it.width)

    def __call__(self, x: Array) -> Array:
        return (jax.nn.gelu(x @ self.gate[...]) * (x @ self.up[...])) @ self.down[...]


class GemmaBlock(nnx.Module):
    def __init__(self, it: Sizes, rngs: nnx.Rngs) -> None:
        self.before, self.after = Norm(it.width), Norm(it.width)
        self.feed_before, self.feed_after = Norm(it.width), Norm(it.width)
        self.attention, self.feed = Attention(it, rngs), Feed(it, rngs)

    def __call__(self, x: Array, positions: Array, mask: Array) -> Array:
        x = x + self.after(self.attention(self.before(x), positions, mask))
        return x + self.feed_after(self.feed(self.feed_before(x)))


class Gemma(nnx.Module):
    """Tokens [batch, time] to scores [batch, time, words]."""

    def __init__(self, it: Sizes, rngs: nnx.Rngs) -> None:
        self.table = nnx.Param(jax.random.normal(rngs.params(), (it.words, it.width)) * 0.1)
        self.blocks = nnx.List(GemmaBlock(it, rngs) for _ in range(it.layers))
        self.norm = Norm(it.width)

    def __call__(self, tokens: Array) -> Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        mask = positions[:, :, None] >= jnp.arange(tokens.shape[1])
        x = self.table[tokens]
        x = x * jnp.sqrt(x.shape[-1]).astype(x.dtype)
        for block in self.blocks:
            x = block(x, positions, mask)
        scores = jnp.dot(self.norm(x), self.table[...].T)
        return 30 * jnp.tanh(scores / 30)


Params = dict[str, Any]
Loss = Callable[[Params, Array], Array]


@dataclass(frozen=True)
class Size:
    """How large the model and its batch are."""

    layers: int = 4
    width: int = 512
    heads: int = 8
    hidden: int = 2048
    vocabulary: int = 4096
    batch: int = 4
    length: int = 256


SMALL = Size(layers=2, width=64, heads=4, hidden=128, vocabulary=96, batch=2, length=32)


def parameters(size: Size, seed: int = 0, *, scanned: bool = False) -> Params:
    """Random float32 parameters: a list of layers, or one stack of them to scan over."""
    random = np.random.default_rng(seed)
    width, hidden = size.width, size.hidden

    def normal(rows: int, columns: int, scale: float) -> Array:
        return jnp.asarray(random.standard_normal((rows, columns), np.float32) * np.float32(scale))

    def weight(rows: int, columns: int) -> Array:
        return normal(rows, columns, rows**-0.5)

    def norm() -> Params:
        return {"gain": jnp.ones(width), "bias": jnp.zeros(width)}

    def one_layer() -> Params:
        return {
            "norm_1": norm(),
            "qkv": weight(width, 3 * width),
            "out": weight(width, width),
            "norm_2": norm(),
            "up": weight(width, hidden),
            "up_bias": jnp.zeros(hidden),
            "down": weight(hidden, width),
            "down_bias": jnp.zeros(width),
        }

    layers: Any = [one_layer() for _ in range(size.layers)]
    return {
        "embedding": normal(size.vocabulary, width, 0.02),
        "position": normal(size.length, width, 0.02),
        "layers": jax.tree.map(lambda *p: jnp.stack(p), *layers) if scanned else layers,
        "norm": norm(),
        "head": weight(width, size.vocabulary),
    }


def tokens(size: Size, seed: int = 0) -> Array:
    """A batch of random tokens, one longer than the context: inputs and targets in one array."""
    random = np.random.default_rng(seed + 1000)
    shape = size.batch, size.length + 1
    return jnp.asarray(random.integers(0, size.vocabulary, shape, np.int32))


def layer_norm(p: Params, x: Array, compute: DTypeLike) -> Array:
    x = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    y = (x - x.mean(-1, keepdims=True)) * scale
    y = y * p["gain"].astype(jnp.float32) + p["bias"].astype(jnp.float32)
    return y.astype(compute)


def attention(p: Params, x: Array, heads: int, compute: DTypeLike) -> Array:
    batch, length, width = x.shape
    qkv = (x @ p["qkv"]).reshape(batch, length, 3, heads, width // heads)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    scores = jnp.where(causal, scores.astype(jnp.float32), -1e9)
    weights = jax.nn.softmax(scores, axis=-1).astype(compute)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return mixed.reshape(batch, length, width) @ p["out"]


def layer(p: Params, x: Array, heads: int, compute: DTypeLike) -> Array:
    x = x + attention(p, layer_norm(p["norm_1"], x, compute), heads, compute)
    h = layer_norm(p["norm_2"], x, compute)
    h = jax.nn.gelu(h @ p["up"] + p["up_bias"])
    return x + h @ p["down"] + p["down_bias"]


def cross_entropy(logits: Array, targets: Array) -> Array:
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(log_p, targets[..., None], axis=-1).mean()


def loss(
    params: Params,
    batch: Array,
    *,
    heads: int,
    compute: DTypeLike = jnp.float32,
    remat: bool = True,
) -> Array:
    """The mean loss of the next token.

    A list of layers runs one by one; a stack of them in `lax.scan`.
    """
    params = jax.tree.map(lambda p: p.astype(compute), params)
    inputs, targets = batch[:, :-1], batch[:, 1:]
    x = params["embedding"][inputs] + params["position"]
    run = partial(layer, heads=heads, compute=compute)
    if isinstance(params["layers"], list):
        for p in params["layers"]:
            x = run(p, x)
    else:

        def body(x: Array, p: Params) -> tuple[Array, None]:
            return run(p, x), None

        x, _ = jax.lax.scan(jax.checkpoint(body) if remat else body, x, params["layers"])
    return cross_entropy(layer_norm(params["norm"], x, compute) @ params["head"], targets)


def train_step(loss: Loss, rate: float = 0.1) -> Callable[[Params, Array], tuple[Params, Array]]:
    """One step of gradient descent, not jitted: (params, batch) -> (params, loss)."""

    def step(params: Params, batch: Array) -> tuple[Params, Array]:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), value

    return step
