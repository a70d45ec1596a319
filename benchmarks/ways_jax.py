"""The ways in which jax_speed.py runs a program: polymp, float32, by hand, and the other packages.

A program is `loss(params, *rest, compute=float32)`: plain JAX, whose author casts to `compute`
where somebody who writes bfloat16 by hand would. `under` gives it back as a package runs it, asked
as its own README asks it; `value_and_grad` does the same to its derivative. jmp and mpx cast
arguments and leave norms and losses to the user, so that they get the program cast by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from polymp.jax import autocast

FULL, HAND, OURS, FROZEN = "float32", "by hand", "autocast", "frozen"
FEW, FEW_FROZEN = "few_rows", "few_rows, frozen"  # autocast with that key in its policy
FLAX, JMP, MPX, JAXAMP = "flax dtype=", "jmp", "mpx", "jaxamp"
LOW = jnp.bfloat16
FEW_ROWS = 32  # as docs/fast.md recommends
PACKAGES = {
    FLAX: "flax",
    JMP: "jmp",
    MPX: "mixed-precision-for-JAX",
    JAXAMP: "jaxamp",
}
Fn = Callable[..., Any]


def under(way: str, fn: Fn) -> Fn:
    """A function of the same arguments, in one of the ways.

    Args:
        way: one of those above, but for flax, which has programs of its own, and mpx and frozen,
            which do not wrap a function.
        fn: takes `compute`.
    """
    if way == FULL:
        return fn
    if way == HAND:
        return partial(fn, compute=LOW)
    if way == OURS:
        return autocast(fn)
    if way == FEW:
        return autocast(fn, policy={"name": "few", "extends": "amp", "few_rows": FEW_ROWS})
    if way == JMP:
        import jmp

        policy = jmp.Policy(jnp.float32, LOW, jnp.float32)
        return lambda *args: policy.cast_to_output(fn(*policy.cast_to_compute(args), compute=LOW))
    if way == JAXAMP:
        from jaxamp import amp

        return amp(fn, compute_dtype=LOW)  # type: ignore[no-any-return]
    raise ValueError(f"{way!r} wraps no function")


def value_and_grad(way: str, loss: Fn) -> Fn:
    """`jax.value_and_grad` of the loss by its first argument, in one of the ways."""
    if way != MPX:
        return jax.value_and_grad(under(way, loss))
    import mpx

    mpx.set_half_precision_datatype(LOW)
    scaling = mpx.DynamicLossScaling(jnp.float32(1), jnp.float32(1))

    def graded(*args: Any) -> Any:
        cast = partial(loss, compute=LOW)
        value, _, _, grads = mpx.filter_value_and_grad(cast, scaling)(*args)
        return value, grads

    return graded


# --- the same models in flax, whose layers take the dtype as an argument -------------------------


def flax_mlp(features: int, layers: int) -> Any:
    """Dense layers with relu between them."""
    from flax import linen as nn

    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for i in range(layers):
                x = nn.Dense(features, dtype=LOW)(x)
                x = nn.relu(x) if i < layers - 1 else x
            return x

    return MLP()


def flax_transformer(size: Any) -> Any:
    """The transformer of tests/support/jax/transformer.py, its layers written with flax's own."""
    from flax import linen as nn

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            batch, length, width = x.shape
            qkv = nn.Dense(3 * width, use_bias=False, dtype=LOW)(nn.LayerNorm(dtype=LOW)(x))
            qkv = qkv.reshape(batch, length, 3, size.heads, width // size.heads)
            q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
            causal = nn.make_causal_mask(jnp.ones((batch, length)))
            mixed = nn.dot_product_attention(
                q, k, v, mask=causal, dtype=LOW, force_fp32_for_softmax=True
            )
            mixed = mixed.reshape(batch, length, width)
            x = x + nn.Dense(width, use_bias=False, dtype=LOW)(mixed)
            h = nn.Dense(size.hidden, dtype=LOW)(nn.LayerNorm(dtype=LOW)(x))
            return x + nn.Dense(width, dtype=LOW)(nn.gelu(h))

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, inputs: Any) -> Any:
            x = nn.Embed(size.vocabulary, size.width, dtype=LOW)(inputs)
            place = self.param(
                "position", nn.initializers.normal(0.02), (size.length, size.width), jnp.float32
            )
            x = x + place.astype(LOW)
            for _ in range(size.layers):
                x = Layer()(x)
            x = nn.LayerNorm(dtype=LOW)(x)
            return nn.Dense(size.vocabulary, use_bias=False, dtype=LOW)(x)

    return Transformer()


def flax_convnet(channels: int, blocks: int, classes: int) -> Any:
    """Residual blocks of two convolutions."""
    from flax import linen as nn

    class Convnet(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            def conv(x: Any) -> Any:
                return nn.Conv(channels, (3, 3), use_bias=False, dtype=LOW)(x)

            x = conv(x)
            for _ in range(blocks):
                h = conv(nn.relu(nn.LayerNorm(dtype=LOW)(x)))
                x = x + conv(nn.relu(nn.LayerNorm(dtype=LOW)(h)))
            return nn.Dense(classes, dtype=LOW)(x.mean((1, 2)))

    return Convnet()
