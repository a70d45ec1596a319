"""The models of `tests.support.ports` in flax linen and equinox, and a step of their training."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen
from jax import Array

import polymp.jax
from tests.support import ports
from tests.support.ports import (
    CHANNELS,
    CLASSES,
    HEADS,
    HIDDEN,
    LENGTH,
    RATE,
    WIDTH,
    WORDS,
    Bert,
    Block,
    Config,
    ResNet,
)

Weights = dict[str, Any]  # in float32, by the paths that they have in torch


class Layer(linen.Module):
    eps: float
    tanh: bool

    @linen.compact
    def __call__(self, x: Array, seen: Array) -> Array:
        attention = linen.MultiHeadDotProductAttention(HEADS, name="attention")
        mixed = attention(x, mask=seen[:, None, None, :])
        x = linen.LayerNorm(self.eps, name="attention_norm")(x + mixed)
        up = linen.gelu(linen.Dense(HIDDEN, name="up")(x), approximate=self.tanh)
        return linen.LayerNorm(self.eps, name="norm")(x + linen.Dense(WIDTH, name="down")(up))


class BertModel(linen.Module):
    config: Bert

    def setup(self) -> None:
        self.words, self.kinds = linen.Embed(WORDS, WIDTH), linen.Embed(2, WIDTH)
        self.positions, self.norm = linen.Embed(LENGTH + 1, WIDTH), linen.LayerNorm(1e-12)
        self.layers = [Layer(1e-12, False), Layer(self.config.eps, self.config.tanh)]
        self.pooler, self.head = linen.Dense(WIDTH), linen.Dense(CLASSES)

    def __call__(self, tokens: Array, seen: Array) -> Array:
        places = jnp.arange(LENGTH) + self.config.start
        x = self.words(tokens) + self.kinds(jnp.zeros_like(tokens)) + self.positions(places)
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, seen)
        scores: Array = self.head(jnp.tanh(self.pooler(x[:, self.config.pooled])))
        return scores


class BatchNorm(linen.Module):
    """As torch's, whose running variance is that of a sample; or as flax's own."""

    eps: float = 1e-5
    momentum: float = 0.1
    sample: bool = True

    @linen.compact
    def __call__(self, x: Array) -> Array:
        count = x.size // x.shape[-1]
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        kept_var = var * count / (count - 1) if self.sample else var
        for name, new in (("mean", mean), ("var", kept_var)):
            kept = self.variable("batch_stats", name, jnp.zeros, x.shape[-1:])
            kept.value = (1 - self.momentum) * kept.value + self.momentum * new
        scale = self.param("scale", linen.initializers.ones, x.shape[-1:])
        bias = self.param("bias", linen.initializers.zeros, x.shape[-1:])
        return (x - mean) * jax.lax.rsqrt(var + self.eps) * scale + bias


def _conv(out: int, size: int = 3, stride: int = 1, same: bool = False, **how: Any) -> linen.Conv:
    padding: Any = "SAME" if same else size // 2
    return linen.Conv(out, (size, size), stride, padding, **how)


class Residual(linen.Module):
    config: ResNet
    out: int
    strides: tuple[int, int]

    @linen.compact
    def __call__(self, x: Array) -> Array:
        config, (first, second) = self.config, self.strides
        same = config.padding == "same" and first == 2
        y = _conv(self.out, 3, first, same, use_bias=False, name="conv1")(x)
        y = BatchNorm(config.eps, config.momentum, config.sample, name="norm1")(y)
        y = linen.relu(y)
        y = _conv(self.out, 3, second, use_bias=False, name="conv2")(y)
        y = BatchNorm(name="norm2")(y)
        if x.shape[-1] != self.out:
            x = _conv(self.out, 1, max(self.strides), use_bias=False, name="shortcut")(x)
        return linen.relu(y + x)


class ResNetModel(linen.Module):
    config: ResNet

    def setup(self) -> None:
        self.stem, self.norm, self.head = _conv(CHANNELS), BatchNorm(), linen.Dense(CLASSES)
        self.blocks = [
            Residual(ResNet(), CHANNELS, (1, 1)),
            Residual(self.config, 2 * CHANNELS, self.config.strides),
        ]

    def __call__(self, x: Array) -> Array:
        """Of images [batch, height, width, channels]."""
        x = linen.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        x = linen.avg_pool(x, (2, 2), (2, 2))
        x = x.transpose(0, 3, 1, 2) if self.config.flat == "NCHW" else x
        scores: Array = self.head(x.reshape(len(x), -1))
        return scores


LINEN: dict[str, Any] = {"bert": BertModel, "resnet": ResNetModel}
_LEAVES = {"weight": "scale", "running_mean": "mean", "running_var": "var", "bias": "bias"}


def _variables(weights: Weights) -> dict[str, Any]:
    """Weights as flax linen has them."""
    tree: dict[str, Any] = {}
    for path, x in weights.items():
        *modules, name = path.replace("layers.", "layers_").replace("blocks.", "blocks_").split(".")
        if name == "num_batches_tracked":
            continue
        leaf, given = _LEAVES[name], x
        if name == "weight" and x.ndim == 4:
            leaf, given = "kernel", x.transpose(2, 3, 1, 0)
        elif name == "weight" and x.ndim == 2:
            embeds = modules[-1] in ("words", "kinds", "positions")
            leaf, given = ("embedding", x) if embeds else ("kernel", x.T)
        if modules[-1] in ("query", "key", "value", "out"):
            heads = (HEADS, WIDTH // HEADS)
            modules.insert(-1, "attention")
            if modules[-1] != "out":
                given = given.reshape(*given.shape[:-1], *heads)
            elif leaf == "kernel":
                given = given.reshape(*heads, WIDTH)
        inner = tree.setdefault("batch_stats" if "running" in name else "params", {})
        for module in modules:
            inner = inner.setdefault(module, {})
        inner[leaf] = jnp.asarray(given)
    return tree


class BlockModel(eqx.Module):
    before: eqx.nn.LayerNorm
    after: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    head: eqx.nn.Linear
    config: Block = eqx.field(static=True)

    def __init__(self, config: Block) -> None:
        key = jax.random.key(0)
        self.before, self.after = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=key)
        self.up = eqx.nn.Linear(WIDTH, HIDDEN, config.bias, key=key)
        self.down = eqx.nn.Linear(HIDDEN, WIDTH, key=key)
        self.head = eqx.nn.Linear(WIDTH, CLASSES, key=key)
        self.config = config

    def __call__(self, x: Array) -> Array:
        """Of one text [length, width]."""
        y = jax.vmap(self.before)(x)
        query = y if self.config.scaled else y * (WIDTH / HEADS) ** 0.5
        x = x + self.attention(query, y, y)
        activation = getattr(jax.nn, self.config.activation)
        x = x + jax.vmap(lambda t: self.down(activation(self.up(self.after(t)))))(x)
        return self.head(x.mean(0))


def _module(config: Block, weights: Weights) -> BlockModel:
    """A model with torch's weights, of which three are one."""
    weights = dict(weights)
    packed = np.split(weights.pop("attention.in_proj_weight"), 3)
    named = zip(("query_proj", "key_proj", "value_proj"), packed, strict=True)
    weights |= {f"attention.{name}.weight": x for name, x in named}
    weights["attention.output_proj.weight"] = weights.pop("attention.out_proj.weight")

    def filled(path: Any, leaf: Any) -> Any:
        return jnp.asarray(weights[jax.tree_util.keystr(path).strip(".")])

    model = BlockModel(config)
    arrays, rest = eqx.partition(model, eqx.is_array)
    return eqx.combine(jax.tree_util.tree_map_with_path(filled, arrays), rest)


class State(NamedTuple):
    params: Any
    stats: Any
    optimizer: Any


class Training:
    """A model, its batch, and SGD; `step(state, batch)` returns a state."""

    def __init__(self, config: Config, weights: Weights, seed: int = 0) -> None:
        *inputs, classes = ports.batch(config, seed)
        if isinstance(config, ResNet):
            inputs = [x.transpose(0, 2, 3, 1) for x in inputs]
        self.batch = [jnp.asarray(x) for x in (*inputs, classes)]
        stats: Any = {}
        if isinstance(config, Block):
            whole = _module(config, weights)
            whole = polymp.jax.scoped(whole) if config.scoped else whole
            params, rest = eqx.partition(whole, eqx.is_array)
            self._apply: Any = lambda p, _, x: (jax.vmap(eqx.combine(p, rest))(x), {})
        else:
            model, variables = LINEN[config.name](config), _variables(weights)
            params, stats = variables["params"], variables.get("batch_stats", {})
            self._apply = lambda p, s, *x: model.apply(
                {"params": p, "batch_stats": s}, *x, mutable=["batch_stats"]
            )
        self._sgd = optax.sgd(RATE, 0.9)
        self.state = State(params, stats, self._sgd.init(params))
        self.step: Any = jax.jit(self._step)

    def _loss(self, params: Any, stats: Any, batch: Any) -> tuple[Array, Any]:
        *inputs, classes = batch
        scores, kept = self._apply(params, stats, *inputs)
        loss = optax.softmax_cross_entropy_with_integer_labels(scores, classes).mean()
        return loss, kept.get("batch_stats", {})

    def _step(self, state: State, batch: Any) -> State:
        differentiated = jax.grad(self._loss, has_aux=True)
        gradients, stats = differentiated(state.params, state.stats, batch)
        updates, optimizer = self._sgd.update(gradients, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), stats, optimizer)
