"""The decoder of `tests.support.decoder` in flax nnx and in flax linen, and a step of its training.

Both are written out, as two ports would be: nnx modules compute with flax's layers, linen's modules
with functions of jax.numpy.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from jax import Array

import polymp.jax
from tests.support import decoder
from tests.support.decoder import EPS, OTHER_EPS, RATE, Config

DROPPED = 0.1


def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def _dropped(x: Array) -> Array:
    kept = jax.random.bernoulli(jax.random.key(1), 1 - DROPPED, x.shape)
    return jnp.where(kept, x / (1 - DROPPED), 0)


def _attention(q: Array, k: Array, v: Array, config: Config, fault: str) -> Array:
    """Of [batch, time, width] each."""

    def split(y: Array) -> Array:
        return y.reshape(*y.shape[:-1], config.heads, -1).swapaxes(-2, -3)

    q = _rotated(split(q), *decoder.rotation(config, 1 if fault == "rope" else 0))
    k = _rotated(split(k), *decoder.rotation(config))
    scores = q @ k.swapaxes(-1, -2)
    if fault != "scale":
        scores = scores * q.shape[-1] ** -0.5
    scores = jnp.where(decoder.seen(config, fault), scores, config.mask)
    mixed = jax.nn.softmax(scores, -1).astype(q.dtype) @ split(v)
    return mixed.swapaxes(-2, -3).reshape(*mixed.shape[:-3], -1, config.width)


def _region(config: Config, fault: str, x: Array, layer: Any) -> Array:
    """A layer that may have the wrong dtype."""
    if fault != "dtype":
        return layer(x)
    if not config.low:
        return layer(x.astype(jnp.bfloat16)).astype(x.dtype)
    with polymp.jax.autocast(enabled=False):
        return layer(x.astype(jnp.float32))


def _block(block: Any, x: Array) -> Array:
    """A block of either library, of [batch, time, width]."""
    mixed = block.attention(block.before(x))
    x = x + mixed
    if block.fault == "residual":
        x = x + mixed
    if block.fault == "dropout":
        x = _dropped(x)
    return x + block.feed(block.after(x))


class NnxAttention(nnx.Module):
    def __init__(self, config: Config, fault: str, dtype: Any, rngs: nnx.Rngs) -> None:
        self.config, self.fault, width = config, fault, config.width
        self.query, self.key, self.value, self.out = (
            nnx.Linear(width, width, dtype=dtype, rngs=rngs) for _ in range(4)
        )

    def __call__(self, x: Array) -> Array:
        q, k, v = self.query(x), self.key(x), self.value(x)
        return self.out(_attention(q, k, v, self.config, self.fault))


class NnxFeed(nnx.Module):
    def __init__(self, config: Config, fault: str, dtype: Any, rngs: nnx.Rngs) -> None:
        shape = config.width, config.hidden
        self.up = nnx.Linear(*shape, use_bias=fault != "bias", dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(*shape[::-1], dtype=dtype, rngs=rngs)
        self.approximate = fault == "gelu"

    def __call__(self, x: Array) -> Array:
        return self.down(jax.nn.gelu(self.up(x), approximate=self.approximate))


class NnxBlock(nnx.Module):
    def __init__(self, config: Config, fault: str, rngs: nnx.Rngs) -> None:
        self.config, self.fault = config, fault
        dtype = jnp.bfloat16 if fault == "dtype" and not config.low else None
        eps = OTHER_EPS if fault == "eps" else EPS
        self.before = nnx.LayerNorm(config.width, epsilon=eps, dtype=dtype, rngs=rngs)
        self.after = nnx.LayerNorm(config.width, epsilon=EPS, dtype=dtype, rngs=rngs)
        self.attention = NnxAttention(config, fault, dtype, rngs)
        self.feed = NnxFeed(config, fault, dtype, rngs)

    def __call__(self, x: Array) -> Array:
        return _region(self.config, self.fault, x, partial(_block, self))


class NnxDecoder(nnx.Module):
    """Tokens [batch, time] to scores [batch, time, words]."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(config.words, config.width, rngs=rngs)
        self.blocks = nnx.List(
            NnxBlock(config, config.fault_of(at), rngs) for at in range(config.layers)
        )
        self.norm = nnx.RMSNorm(config.width, epsilon=EPS, rngs=rngs)
        self.head = nnx.Linear(config.width, config.words, rngs=rngs)

    def __call__(self, tokens: Array) -> Array:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Dense(linen.Module):
    """A layer whose weight is as torch's: [out, in]."""

    out: int
    bias: bool = True

    @linen.compact
    def __call__(self, x: Array) -> Array:
        weight = self.param("weight", linen.initializers.zeros, (self.out, x.shape[-1]))
        y = jnp.einsum("...i,oi->...o", x, jnp.asarray(weight, x.dtype))
        if self.bias:
            y = y + jnp.asarray(self.param("bias", linen.initializers.zeros, (self.out,)), x.dtype)
        return y


class Norm(linen.Module):
    """A layer norm, or an RMS norm, by the book."""

    eps: float
    centred: bool = True

    @linen.compact
    def __call__(self, x: Array) -> Array:
        shape, y = (x.shape[-1],), x.astype(jnp.float32)
        if self.centred:
            y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
        y = y * self.param("weight", linen.initializers.ones, shape)
        if self.centred:
            y = y + self.param("bias", linen.initializers.zeros, shape)
        return y.astype(x.dtype)


class LinenAttention(linen.Module):
    config: Config
    fault: str

    @linen.compact
    def __call__(self, x: Array) -> Array:
        q, k, v = (Dense(x.shape[-1], name=name)(x) for name in ("query", "key", "value"))
        return Dense(x.shape[-1], name="out")(_attention(q, k, v, self.config, self.fault))


class LinenFeed(linen.Module):
    config: Config
    fault: str

    @linen.compact
    def __call__(self, x: Array) -> Array:
        up = Dense(self.config.hidden, self.fault != "bias", name="up")(x)
        return Dense(x.shape[-1], name="down")(jax.nn.gelu(up, approximate=self.fault == "gelu"))


class LinenBlock(linen.Module):
    config: Config
    fault: str

    def setup(self) -> None:
        self.before = Norm(OTHER_EPS if self.fault == "eps" else EPS)
        self.after = Norm(EPS)
        self.attention = LinenAttention(self.config, self.fault)
        self.feed = LinenFeed(self.config, self.fault)

    def __call__(self, x: Array) -> Array:
        return _region(self.config, self.fault, x, partial(_block, self))


class LinenDecoder(linen.Module):
    """Tokens [batch, time] to scores [batch, time, words]."""

    config: Config

    def setup(self) -> None:
        config = self.config
        self.table = linen.Embed(config.words, config.width)
        self.blocks = [LinenBlock(config, config.fault_of(at)) for at in range(config.layers)]
        self.norm = Norm(EPS, centred=False)
        self.head = Dense(config.words)

    def __call__(self, tokens: Array) -> Array:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class State(NamedTuple):
    params: Any
    optimizer: Any


class Training:
    """A decoder, its batch, and Adam; `step(state, tokens)` returns a state and the loss."""

    def __init__(
        self, config: Config, seed: int = 0, dtype: Any = None, linen: bool = False
    ) -> None:
        self.config = config
        made = decoder.weights(config, seed)
        if dtype is not None:
            made = {path: x.astype(dtype) for path, x in made.items()}
        self.tokens = jnp.asarray(decoder.tokens(config, seed), jnp.int32)
        if linen:
            params: Any = _nested(made)
            self._apply: Any = lambda p, x: LinenDecoder(config).apply({"params": p}, x)
        else:
            model = nnx.eval_shape(lambda: NnxDecoder(config, nnx.Rngs(0)))
            graph, params = nnx.split(polymp.jax.scoped(model))
            _fill(params, made)
            self._apply = lambda p, x: nnx.merge(graph, p)(x)
        loss = self._loss
        if config.low:
            policy = config.policy("LinenDecoder.blocks_" if linen else "blocks.")
            loss = polymp.jax.autocast(loss, dtype=config.low, policy=policy)
        self._gradients = jax.value_and_grad(loss)
        self._adam = optax.adam(RATE, eps=config.adam_eps)
        self.state = State(params, self._adam.init(params))
        self.step: Any = jax.jit(self._step)

    def _loss(self, params: Any, tokens: Array) -> Array:
        scores = self._apply(params, tokens[:, :-1])
        loss = optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:])
        return loss.mean()

    def _step(self, state: State, tokens: Array) -> tuple[State, Array]:
        loss, gradients = self._gradients(state.params, tokens)
        updates, optimizer = self._adam.update(gradients, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), optimizer), loss


def _nested(made: dict[str, Any]) -> dict[str, Any]:
    """Parameters as flax linen has them."""
    tree: dict[str, Any] = {}
    for path, x in made.items():
        *modules, name = path.replace("blocks.", "blocks_").split(".")
        inner = tree
        for module in modules:
            inner = inner.setdefault(module, {})
        inner["embedding" if modules == ["table"] else name] = jnp.asarray(x)
    return tree


def _fill(params: Any, made: dict[str, Any]) -> None:
    """Give the parameters of an nnx model their numbers."""
    for path, variable in nnx.to_flat_state(params):
        *modules, name = map(str, path)
        x = made[".".join([*modules, "bias" if name == "bias" else "weight"])]
        variable.set_value(jnp.asarray(x.T if name == "kernel" else x))
