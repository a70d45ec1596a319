"""The programs that jax_speed.py runs, each in any of the ways of ways_jax.py.

    mlp          Linears of one width, a train step
    train        the transformer of tests/support/jax/transformer.py, a train step; also with its
                 layers in a scan with remat; with parameters sharded over all devices; and its loss
                 alone
    accumulate   the same transformer, gradients of eight microbatches added up by a scan, a step
    decode       a transformer of 50 M parameters: token by token, batch 1, with a cache
    convnet      residual blocks of convolutions, a train step
    lora         the first transformer, frozen, with trainable adapters on the weights of its layers
    scaler       Linears with 25 M parameters in float32, a full train step with Adam: with
                 polymp's scaler, with flax's, and without

A step is plain gradient descent but for the scaler's. Every program is `step(state, *rest)`, which
returns the next state and a value; the state is donated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import ways_jax as ways
from jax import Array, lax
from ways_jax import FEW, FEW_FROZEN, FLAX, FROZEN, FULL, HAND, OURS

from polymp.jax import GradScaler, autocast, freeze

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.jax import transformer
from tests.support.jax.transformer import Params, cross_entropy, layer_norm

RATE = 1e-3
LINEARS = ("qkv", "out", "up", "down")


@dataclass(frozen=True)
class Size:
    """Sizes of the programs; one for all ways."""

    features: int = 1024  # of a Linear of the MLP
    linears: int = 4
    batch: int = 256
    lm: transformer.Size = field(default_factory=transformer.Size)
    microbatches: int = 8  # of one sequence each
    serve: transformer.Size = field(
        default_factory=lambda: transformer.Size(
            layers=6, width=768, heads=12, hidden=3072, vocabulary=6144, batch=1, length=128
        )
    )
    decoded: int = 8  # tokens for one figure
    rank: int = 8  # of an adapter
    channels: int = 64
    blocks: int = 4
    images: int = 16  # of 32 x 32 x 3
    scaled_features: int = 2240  # five Linears of that width are 25 M parameters
    scaled_linears: int = 5
    scaled_batches: tuple[int, int] = (64, 256)


SMALL = Size(
    16, 2, 4, transformer.SMALL, 2, transformer.SMALL, 2, 2, 8, 1, 2, 16, 2, scaled_batches=(2, 4)
)
_WIDE = transformer.Size(
    layers=4, width=1024, heads=16, hidden=4096, vocabulary=32768, batch=8, length=512
)
LARGE = Size(
    features=4096, batch=4096, lm=_WIDE, serve=replace(_WIDE, layers=6, batch=1), decoded=32,
    rank=16, channels=128, images=256,
)  # fmt: skip


class Made(NamedTuple):
    """A program, not yet compiled, and its arguments.

    `kept` is a loss, its parameters and the rest of its arguments, for what it leaves in memory to
    the backward pass; None where that is not asked.
    """

    step: Callable[..., tuple[Any, Any]]
    state: Any
    rest: tuple[Any, ...] = ()
    kept: tuple[Any, ...] | None = None


def descent(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - RATE * g.astype(p.dtype), params, grads)


def trained(way: str, loss: Any, params: Any, *rest: Any) -> Made:
    """A train step of `loss(params, *rest, compute)`; where flax has its own, of that."""
    graded = ways.value_and_grad(FULL if way == FLAX else way, loss)

    def step(params: Any, *rest: Any) -> tuple[Any, Any]:
        value, grads = graded(params, *rest)
        return descent(params, grads), value

    wraps = way != ways.MPX
    kept = (loss if way == FLAX else ways.under(way, loss), params, *rest) if wraps else None
    return Made(step, params, rest, kept)


def random(seed: int, *shape: int) -> Array:
    return jax.random.normal(jax.random.key(seed), shape)


# --- mlp -----------------------------------------------------------------------------------------


def linears(features: int, count: int) -> list[Params]:
    return [
        {"weight": random(i, features, features) * features**-0.5, "bias": jnp.zeros(features)}
        for i in range(count)
    ]


def mlp_loss(params: list[Params], x: Array, y: Array, *, compute: Any = jnp.float32) -> Array:
    x = x.astype(compute)
    for i, p in enumerate(params):
        x = x @ p["weight"].astype(compute) + p["bias"].astype(compute)
        x = jax.nn.relu(x) if i < len(params) - 1 else x
    return ((x.astype(jnp.float32) - y) ** 2).mean()


def mlp(way: str, size: Size) -> Made:
    x, y = (random(seed, size.batch, size.features) for seed in (100, 101))
    if way == FLAX:
        model = ways.flax_mlp(size.features, size.linears)

        def loss(params: Any, x: Array, y: Array) -> Array:
            return ((model.apply(params, x).astype(jnp.float32) - y) ** 2).mean()

        return trained(way, loss, model.init(jax.random.key(0), x), x, y)
    return trained(way, mlp_loss, linears(size.features, size.linears), x, y)


# --- the language model --------------------------------------------------------------------------


def train(way: str, size: Size, scanned: bool = False) -> Made:
    batch = transformer.tokens(size.lm)
    if way == FLAX:
        model = ways.flax_transformer(size.lm)

        def loss(params: Any, batch: Array) -> Array:
            return cross_entropy(model.apply(params, batch[:, :-1]), batch[:, 1:])

        return trained(way, loss, model.init(jax.random.key(0), batch[:, :-1]), batch)
    plain = partial(transformer.loss, heads=size.lm.heads)
    return trained(way, plain, transformer.parameters(size.lm, scanned=scanned), batch)


def sharded(way: str, size: Size) -> Made:
    """The train step with every matrix cut by columns over all devices, and the batch by rows."""
    made = train(way, size)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("devices",), axis_types=auto)

    def cut(x: Array) -> Array:
        whole = x.ndim < 2 or x.shape[-1] % mesh.size
        spec = jax.P() if whole else jax.P(*[None] * (x.ndim - 1), "devices")
        return jax.device_put(x, jax.NamedSharding(mesh, spec))

    batch = jax.device_put(made.rest[0], jax.NamedSharding(mesh, jax.P("devices")))
    return Made(made.step, jax.tree.map(cut, made.state), (batch,))


def forward(way: str, size: Size) -> Made:
    loss = ways.under(way, partial(transformer.loss, heads=size.lm.heads))
    rest = transformer.parameters(size.lm), transformer.tokens(size.lm)
    return Made(lambda state, *rest: (state, loss(*rest)), (), rest)


def accumulate(way: str, size: Size) -> Made:
    plain = partial(transformer.loss, heads=size.lm.heads)
    graded = ways.value_and_grad(way, plain)
    sequences = [transformer.tokens(size.lm, seed)[:1] for seed in range(size.microbatches)]

    def step(params: Any, batches: Array) -> tuple[Any, Any]:
        def turn(sums: Any, batch: Array) -> tuple[Any, Any]:
            value, grads = graded(params, batch)
            return jax.tree.map(lambda a, g: a + g.astype(a.dtype), sums, grads), value

        sums, values = lax.scan(turn, jax.tree.map(jnp.zeros_like, params), batches)
        return descent(params, jax.tree.map(lambda g: g / len(batches), sums)), values.mean()

    return Made(step, transformer.parameters(size.lm), (jnp.stack(sequences),))


# --- a transformer with adapters, or with a cache ------------------------------------------------


def block(
    p: Params,
    x: Array,
    heads: int,
    compute: Any,
    seen: Array,
    *,
    adapters: Params | None = None,
    cache: tuple[Array, Array] | None = None,
    at: Any = 0,
) -> tuple[Array, Any]:
    """A layer as in tests/support/jax/transformer.py.

    Args:
        p: of one layer.
        x: [batch, length, width].
        heads: of attention.
        compute: see `transformer.loss`.
        seen: bool [length, keys]; which keys a token looks at.
        adapters: of low rank, for each of the weights.
        cache: keys and values, [batch, keys, heads, width / heads] each.
        at: the place in the cache for those of `x`.

    Returns:
        The layer's result, and the cache with the new keys and values.
    """

    def linear(name: str, x: Array) -> Array:
        y = x @ p[name].astype(compute)
        if adapters is None:
            return y
        a, b = (adapters[name][k].astype(compute) for k in ("a", "b"))
        return y + (x @ a) @ b

    batch, length, width = x.shape
    qkv = linear("qkv", layer_norm(p["norm_1"], x, compute))
    qkv = qkv.reshape(batch, length, 3, heads, width // heads)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    if cache is not None:
        cache = k, v = tuple(  # type: ignore[assignment]
            lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), at, 1)
            for old, new in zip(cache, (k, v), strict=True)
        )
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5
    scores = jnp.where(seen, scores.astype(jnp.float32), -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(compute), v)
    x = x + linear("out", mixed.reshape(batch, length, width))
    h = linear("up", layer_norm(p["norm_2"], x, compute)) + p["up_bias"].astype(compute)
    return x + linear("down", jax.nn.gelu(h)) + p["down_bias"].astype(compute), cache


def lora_loss(
    base: Params, adapters: Any, batch: Array, *, heads: int, compute: Any = jnp.float32
) -> Array:
    inputs, targets = batch[:, :-1], batch[:, 1:]
    x = base["embedding"].astype(compute)[inputs] + base["position"].astype(compute)
    causal = jnp.tril(jnp.ones((inputs.shape[1],) * 2, bool))
    for p, a in zip(base["layers"], adapters, strict=True):
        x, _ = block(p, x, heads, compute, causal, adapters=a)
    logits = layer_norm(base["norm"], x, compute) @ base["head"].astype(compute)
    return cross_entropy(logits, targets)


def lora(way: str, size: Size) -> Made:
    base, batch = transformer.parameters(size.lm), transformer.tokens(size.lm)[:1]

    def adapter(seed: int, weight: Array) -> Params:
        rows, columns = weight.shape
        a = random(seed, rows, size.rank) * rows**-0.5
        return {"a": a, "b": 0.01 * random(seed + 1, size.rank, columns)}

    adapters = [
        {name: adapter(10 * i, p[name]) for i, name in enumerate(LINEARS)} for p in base["layers"]
    ]
    plain = partial(lora_loss, heads=size.lm.heads)
    if way == FROZEN:
        loss, base = freeze(autocast(plain), base, adapters, batch)
    elif way == HAND:
        loss, base = ways.under(way, plain), jax.tree.map(lambda p: p.astype(ways.LOW), base)
    else:
        loss = ways.under(way, plain)
    graded = jax.value_and_grad(loss, argnums=1)

    def step(adapters: Any, base: Params, batch: Array) -> tuple[Any, Any]:
        value, grads = graded(base, adapters, batch)
        return descent(adapters, grads), value

    return Made(step, adapters, (base, batch))


def next_logits(
    params: Params, cache: Any, token: Array, at: Any, *, heads: int, compute: Any = jnp.float32
) -> tuple[Array, Any]:
    """The logits of the token after `token`, int [batch], which stands at place `at`."""
    x = params["embedding"].astype(compute)[token] + params["position"].astype(compute)[at]
    x = x[:, None]
    seen = (jnp.arange(cache[0][0].shape[1]) <= at)[None]
    new = []
    for p, old in zip(params["layers"], cache, strict=True):
        x, kept = block(p, x, heads, compute, seen, cache=old, at=at)
        new.append(kept)
    logits = layer_norm(params["norm"], x[:, 0], compute) @ params["head"].astype(compute)
    return logits, new


def decode(way: str, size: Size, rows: int = 1) -> Made:
    of = replace(size.serve, batch=rows)
    params = transformer.parameters(of)
    # Half of the cache is full: decoding starts in its middle, and comes round to its beginning.
    places = (of.batch, of.length, of.heads, of.width // of.heads)
    store = jnp.float32 if way == FULL else ways.LOW
    cache = [(jnp.zeros(places, store), jnp.zeros(places, store)) for _ in range(of.layers)]
    token, at = jnp.zeros(of.batch, jnp.int32), jnp.int32(of.length // 2)
    plain = partial(next_logits, heads=of.heads)
    if way in (FROZEN, FEW_FROZEN):
        frozen = ways.under(OURS if way == FROZEN else FEW, plain)
        fn, params = freeze(frozen, params, cache, token, at)
    elif way == HAND:
        fn, params = ways.under(way, plain), jax.tree.map(lambda p: p.astype(ways.LOW), params)
    else:
        fn = ways.under(way, plain)

    def step(state: Any, params: Params) -> tuple[Any, Any]:
        cache, token, at = state
        logits, cache = fn(params, cache, token, at)
        token = logits.argmax(-1).astype(jnp.int32)
        return (cache, token, (at + 1) % of.length), token

    return Made(step, (cache, token, at), (params,))


# --- convnet -------------------------------------------------------------------------------------

CLASSES = 10


def convnet_loss(params: Params, x: Array, labels: Array, *, compute: Any = jnp.float32) -> Array:
    def conv(w: Array, x: Array) -> Array:
        return lax.conv_general_dilated(
            x, w.astype(compute), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    x = conv(params["first"], x.astype(compute))
    for p in params["blocks"]:
        h = conv(p["conv_1"], jax.nn.relu(layer_norm(p["norm_1"], x, compute)))
        x = x + conv(p["conv_2"], jax.nn.relu(layer_norm(p["norm_2"], h, compute)))
    logits = x.mean((1, 2)) @ params["head"].astype(compute)
    return cross_entropy(logits, labels)


def convnet(way: str, size: Size) -> Made:
    x = random(200, size.images, 32, 32, 3)
    labels = jnp.arange(size.images) % CLASSES
    if way == FLAX:
        model = ways.flax_convnet(size.channels, size.blocks, CLASSES)

        def loss(params: Any, x: Array, labels: Array) -> Array:
            return cross_entropy(model.apply(params, x), labels)

        return trained(way, loss, model.init(jax.random.key(0), x), x, labels)

    def weight(seed: int, inputs: int) -> Array:
        return random(seed, 3, 3, inputs, size.channels) * (9 * inputs) ** -0.5

    def norm() -> Params:
        return {"gain": jnp.ones(size.channels), "bias": jnp.zeros(size.channels)}

    params = {
        "first": weight(0, 3),
        "blocks": [
            {f"conv_{n}": weight(2 * i + n, size.channels) for n in (1, 2)}
            | {f"norm_{n}": norm() for n in (1, 2)}
            for i in range(size.blocks)
        ],
        "head": random(99, size.channels, CLASSES) * size.channels**-0.5,
    }
    return trained(way, convnet_loss, params, x, labels)


# --- the scaler ----------------------------------------------------------------------------------

PLAIN, SCALED, DYNAMIC = "without a scaler", "GradScaler", "flax DynamicScale"
SKIPPING = "a step that can be skipped, without a scaler"  # the least that a scaler costs
ADAM = optax.adam(RATE)


def scaler(way: str, size: Size, batch: int) -> Made:
    params = linears(size.scaled_features, size.scaled_linears)
    data = tuple(random(seed, batch, size.scaled_features) for seed in (100, 101))

    def update(grads: Any, params: Any, opt: Any) -> Any:
        updates, opt = ADAM.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt

    def without(state: Any, *data: Array) -> tuple[Any, Any]:
        params, opt, scaler = state
        loss, grads = jax.value_and_grad(mlp_loss)(params, *data)
        return (*update(grads, params, opt), scaler), loss

    def with_ours(state: Any, *data: Array) -> tuple[Any, Any]:
        params, opt, scaler = state

        def scaled_loss(params: Any) -> Any:
            loss = mlp_loss(params, *data)
            return scaler.scale(loss), loss

        grads, loss = jax.grad(scaled_loss, has_aux=True)(params)
        (params, opt), scaler, _ = scaler.step(grads, update, params, opt, loss=loss)
        return (params, opt, scaler), loss

    def with_flax(state: Any, *data: Array) -> tuple[Any, Any]:
        # As flax's own examples have it: the new state or the old one, leaf by leaf.
        params, opt, scaler = state
        scaler, finite, loss, grads = scaler.value_and_grad(mlp_loss)(params, *data)
        new = update(grads, params, opt)
        params, opt = jax.tree.map(partial(jnp.where, finite), new, (params, opt))
        return (params, opt, scaler), loss

    def skipping(state: Any, *data: Array) -> tuple[Any, Any]:
        params, opt, scaler = state
        loss, grads = jax.value_and_grad(mlp_loss)(params, *data)
        new = lax.cond(
            jnp.isfinite(loss), lambda: update(grads, params, opt), lambda: (params, opt)
        )
        return (*new, scaler), loss

    if way in (PLAIN, SKIPPING):
        step, state = without if way == PLAIN else skipping, ()
    elif way == SCALED:
        step, state = with_ours, GradScaler()  # type: ignore[assignment]
    else:
        from flax.training.dynamic_scale import DynamicScale

        step, state = (
            with_flax,
            DynamicScale(  # type: ignore[assignment]
                fin_steps=jnp.int32(0),  # type: ignore[arg-type]
                scale=jnp.float32(65536),  # type: ignore[arg-type]
            ),
        )
    return Made(step, (params, ADAM.init(params), state), data)
