"""Programs of the corpus in plain JAX: layers, losses and attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.support.jax.corpus import F32, LOW, Draw, Made, cross_entropy, program

# Layers and losses.


@program(LOW, tags="mlp jit")
def mlp_logits(draw: Draw) -> Made:
    p = {"w1": draw.weight(6, 16), "b1": draw.normal(16), "w2": draw.weight(16, 5)}

    @jax.jit
    def hidden(p: Any, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ p["w1"] + p["b1"])

    return lambda p, x: hidden(p, x) @ p["w2"], (p, draw.normal(4, 6))


@program(F32, tags="mlp loss log_softmax tanh")
def mlp_cross_entropy(draw: Draw) -> Made:
    p = [(draw.weight(6, 12), draw.normal(12)), (draw.weight(12, 5), draw.normal(5))]

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for w, b in p[:-1]:
            x = jnp.tanh(x @ w + b)
        w, b = p[-1]
        return cross_entropy(x @ w + b, y)

    return loss, (p, draw.normal(4, 6), draw.integers(5, 4))


@program(F32, tags="loss mean matvec")
def linear_regression(draw: Draw) -> Made:
    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((x @ p["w"] + p["b"] - y) ** 2)

    return loss, ({"w": draw.normal(7), "b": draw.normal()}, draw.normal(9, 7), draw.normal(9))


@program(LOW, tags="conv1d causal dilated")
def conv_1d_causal(draw: Draw) -> Made:
    def apply(w1: jax.Array, w2: jax.Array, x: jax.Array) -> jax.Array:
        for w, dilation in ((w1, 1), (w2, 2)):
            x = lax.conv_general_dilated(
                x, w, (1,), [(2 * dilation, 0)], rhs_dilation=(dilation,),
                dimension_numbers=("NWC", "WIO", "NWC"),
            )  # fmt: skip
            x = jax.nn.silu(x)
        return x

    return apply, (draw.weight(3, 4, 6), draw.weight(3, 6, 6), draw.normal(2, 8, 4))


@program(F32, tags="conv2d pooling loss")
def conv_2d_classifier(draw: Draw) -> Made:
    p = {"k": draw.weight(3, 3, 2, 4), "b": draw.normal(4), "w": draw.weight(36, 3)}

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        x = lax.conv_general_dilated(x, p["k"], (1, 1), "SAME",
                                     dimension_numbers=("NHWC", "HWIO", "NHWC"))  # fmt: skip
        x = jax.nn.relu(x + p["b"])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return cross_entropy(x.reshape(len(x), -1) @ p["w"], y)

    return loss, (p, draw.normal(2, 6, 6, 2), draw.integers(3, 2))


@program(LOW, tags="conv_transpose")
def conv_transposed_upsampling(draw: Draw) -> Made:
    def apply(k: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(lax.conv_transpose(x, k, (2, 2), "SAME"))

    return apply, (draw.weight(3, 3, 3, 2), draw.normal(2, 4, 4, 3))


@program(LOW, tags="conv grouped depthwise")
def conv_grouped(draw: Draw) -> Made:
    def apply(depthwise: jax.Array, pointwise: jax.Array, x: jax.Array) -> jax.Array:
        x = lax.conv_general_dilated(x, depthwise, (2, 2), "SAME", feature_group_count=4,
                                     dimension_numbers=("NHWC", "HWIO", "NHWC"))  # fmt: skip
        return jnp.einsum("nhwc,cd->nhwd", jax.nn.relu6(x), pointwise)

    return apply, (draw.normal(3, 3, 1, 4, scale=0.3), draw.weight(4, 5), draw.normal(1, 6, 6, 4))


@program(LOW, tags="normalisation groupnorm layernorm rmsnorm rsqrt")
def three_normalisations(draw: Draw) -> Made:
    p = {"w": draw.weight(8, 8), "v": draw.weight(8, 8), "u": draw.weight(8, 3),
         "g": draw.normal(3, 8) + 1}  # fmt: skip

    def standard(x: jax.Array, axis: Any) -> jax.Array:
        mean = x.mean(axis, keepdims=True)
        return (x - mean) * lax.rsqrt(x.var(axis, keepdims=True) + 1e-6)

    def apply(p: Any, x: jax.Array) -> jax.Array:
        x = standard(x @ p["w"], -1) * p["g"][0]  # layer
        x = x @ p["v"]
        x = standard(x.reshape(4, 2, 4), -1).reshape(4, 8) * p["g"][1]  # group
        x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * p["g"][2]  # rms
        return x @ p["u"]

    return apply, (p, draw.normal(4, 8))


@program(F32, tags="embedding ints bools tied mask")
def tied_embeddings(draw: Draw) -> Made:
    def loss(p: Any, tokens: jax.Array, keep: jax.Array) -> jax.Array:
        x = jax.nn.gelu(p["table"][tokens] @ p["w"])
        log_p = jax.nn.log_softmax(x[:-1] @ p["table"].T)
        nll = -jnp.take_along_axis(log_p, tokens[1:, None], 1)[:, 0]
        return jnp.where(keep[1:], nll, 0.0).sum() / keep[1:].sum()

    p = {"table": draw.normal(9, 8, scale=0.4), "w": draw.weight(8, 8)}
    return loss, (p, draw.integers(9, 7), jnp.array([1, 1, 0, 1, 1, 1, 0], bool))


@program(LOW, tags="lora stop_gradient")
def lora(draw: Draw) -> Made:
    def apply(p: Any, frozen: jax.Array, x: jax.Array) -> jax.Array:
        return x @ lax.stop_gradient(frozen) + (x @ p["a"]) @ p["b"] * 2.0

    p = {"a": draw.weight(8, 2), "b": draw.weight(2, 6)}
    return apply, (p, draw.weight(8, 6), draw.normal(5, 8))


@program(F32, tags="moe top_k one_hot dispatch")
def mixture_of_experts(draw: Draw) -> Made:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(x @ p["router"])
        weight, chosen = lax.top_k(gates, 2)
        dispatch = jax.nn.one_hot(chosen, 3)  # [tokens, 2, experts]
        inputs = jnp.einsum("tke,td->etd", dispatch, x)
        hidden = jax.nn.relu(jnp.einsum("etd,edf->etf", inputs, p["up"]))
        outputs = jnp.einsum("etf,efd->etd", hidden, p["down"])
        mixed = jnp.einsum("etd,tke,tk->td", outputs, dispatch, weight)
        return jnp.sum(mixed**2) + jnp.sum(gates.mean(0) ** 2)

    p = {"router": draw.normal(6, 3), "up": draw.weight(3, 6, 8), "down": draw.weight(3, 8, 6)}
    return loss, (p, draw.normal(5, 6))


@program(LOW, tags="ragged_dot moe")
def ragged_experts(draw: Draw) -> Made:
    def apply(w: jax.Array, x: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.nn.relu(lax.ragged_dot(x, w, sizes))

    return apply, (draw.weight(3, 4, 5), draw.normal(8, 4), jnp.array([3, 1, 4], jnp.int32))


# Attention.


@program(LOW, tags="attention einsum mask softmax")
def causal_attention(draw: Draw) -> Made:
    def apply(p: Any, x: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("td,dhk->htk", x, w) for w in (p["q"], p["k"], p["v"]))
        scores = jnp.einsum("htk,hsk->hts", q, k) / np.sqrt(4)
        scores = jnp.where(jnp.tri(6, dtype=bool), scores, -1e9)
        return jnp.einsum("hts,hsk,hkd->td", jax.nn.softmax(scores), v, p["o"])

    p = {name: draw.normal(8, 2, 4, scale=0.35) for name in "qkv"}
    return apply, (p | {"o": draw.normal(2, 4, 8, scale=0.35)}, draw.normal(6, 8))


@program(LOW, tags="attention rotary rmsnorm gated")
def rotary_attention(draw: Draw) -> Made:
    def rotate(x: jax.Array) -> jax.Array:  # [heads, time, width]
        half = x.shape[-1] // 2
        angle = jnp.arange(x.shape[1])[:, None] * 10.0 ** -jnp.arange(half, dtype=jnp.float32)
        a, b = x[..., :half], x[..., half:]
        turned = (a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle))
        return jnp.concatenate(turned, -1)

    def apply(p: Any, x: jax.Array) -> jax.Array:
        h = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
        q, k, v = (jnp.einsum("td,dhk->htk", h, p[n]) for n in "qkv")
        w = jax.nn.softmax(jnp.einsum("htk,hsk->hts", rotate(q), rotate(k)) * 0.5)
        x = jnp.einsum("hts,hsk->thk", w, v).reshape(x.shape)
        return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]

    p = {name: draw.normal(8, 2, 4, scale=0.35) for name in "qkv"}
    p |= {"gate": draw.weight(8, 12), "up": draw.weight(8, 12), "down": draw.weight(12, 8)}
    return apply, (p, draw.normal(5, 8))


@program(LOW, tags="attention jax.nn.dot_product_attention grouped")
def library_attention(draw: Draw) -> Made:
    def apply(p: Any, x: jax.Array) -> jax.Array:
        q = (x @ p["q"]).reshape(2, 5, 4, 4)
        k, v = ((x @ p[n]).reshape(2, 5, 2, 4) for n in "kv")  # two heads for four queries
        return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(2, 5, 16) @ p["o"]

    p = {"q": draw.weight(8, 16), "k": draw.weight(8, 8), "v": draw.weight(8, 8),
         "o": draw.weight(16, 8)}  # fmt: skip
    return apply, (p, draw.normal(2, 5, 8))


@program(LOW, tags="linear_attention cumsum")
def linear_attention(draw: Draw) -> Made:
    def apply(p: Any, x: jax.Array) -> jax.Array:
        q, k, v = jax.nn.elu(x @ p["q"]) + 1, jax.nn.elu(x @ p["k"]) + 1, x @ p["v"]
        state = jnp.cumsum(jnp.einsum("tk,tv->tkv", k, v), axis=0)
        norm = jnp.einsum("tk,tk->t", q, jnp.cumsum(k, axis=0))
        return jnp.einsum("tk,tkv->tv", q, state) / norm[:, None]

    p = {name: draw.weight(6, 4) for name in "qkv"}
    return apply, (p, draw.normal(5, 6))
