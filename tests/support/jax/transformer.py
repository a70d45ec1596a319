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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

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
    """The mean loss of the next token; a list of layers runs one by one, a stack in `lax.scan`."""
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


def train_step(loss: Loss) -> Callable[[Params, Array], tuple[Params, Array]]:
    """One step of gradient descent, not jitted: (params, batch) -> (params, loss)."""

    def step(params: Params, batch: Array) -> tuple[Params, Array]:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step
