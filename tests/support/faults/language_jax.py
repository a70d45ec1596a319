"""The small language model of `language_torch`, in flax nnx."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from polymp.jax import GradScaler, autocast

WIDTH, HEADS, TOKENS = 16, 2, 11


def linear(into: int, out: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(into, out, use_bias=False, rngs=rngs)


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q, self.k, self.v = (linear(WIDTH, WIDTH, rngs) for _ in range(3))

    def __call__(self, x: Array) -> Array:
        q, k, v = (
            jnp.swapaxes(layer(x).reshape(*x.shape[:2], HEADS, -1), 1, 2)
            for layer in (self.q, self.k, self.v)
        )
        scores = (q @ jnp.swapaxes(k, 2, 3)) * (WIDTH // HEADS) ** -0.5
        return jnp.swapaxes(jax.nn.softmax(scores) @ v, 1, 2).reshape(x.shape)


class Feed(nnx.Module):
    def __init__(self, gated: bool, rngs: nnx.Rngs) -> None:
        self.gate = linear(WIDTH, 2 * WIDTH, rngs) if gated else None
        self.up, self.down = linear(WIDTH, 2 * WIDTH, rngs), linear(2 * WIDTH, WIDTH, rngs)

    def __call__(self, x: Array) -> Array:
        up = jax.nn.gelu(self.up(x)) if self.gate is None else nnx.silu(self.gate(x)) * self.up(x)
        return self.down(up)


class Block(nnx.Module):
    def __init__(self, llama: bool, rngs: nnx.Rngs) -> None:
        norm = nnx.RMSNorm if llama else nnx.LayerNorm
        self.norm1, self.norm2 = norm(WIDTH, rngs=rngs), norm(WIDTH, rngs=rngs)
        self.attention, self.feed = Attention(rngs), Feed(llama, rngs)

    def __call__(self, x: Array) -> Array:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Language(nnx.Module):
    def __init__(self, llama: bool) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(
            TOKENS, WIDTH, embedding_init=jax.nn.initializers.normal(1.0), rngs=rngs
        )
        self.blocks = nnx.List(Block(llama, rngs) for _ in range(2))
        self.head = linear(WIDTH, TOKENS, rngs)

    def __call__(self, tokens: Array, sizes: Array) -> Array:
        x = self.embed(tokens) * sizes[..., None]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@cache
def train_step(dtype: str, scaled: bool) -> Any:
    """The compiled step."""

    @autocast(dtype=dtype, policy="amp")
    def loss_fn(model: Language, tokens: Array, sizes: Array, gap: Array) -> Array:
        scores = model(tokens[:, :-1], sizes[:, :-1])
        loss = optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()
        return loss + jnp.log(gap)

    @nnx.jit
    def step(
        model: Language, optimizer: Any, scaler: GradScaler,
        tokens: Array, sizes: Array, gap: Array, rate: Array,
    ) -> tuple[GradScaler, Array]:  # fmt: skip
        def update(grads: Any, model: Language, optimizer: Any) -> Any:
            optimizer.update(model, jax.tree.map(lambda g: g, grads))
            return model, optimizer

        def scaled_loss(model: Language) -> Any:
            loss = loss_fn(model, tokens, sizes, gap)
            return (scaler.scale(loss) if scaled else loss), loss

        (_, loss), grads = nnx.value_and_grad(scaled_loss, has_aux=True)(model)
        optimizer.opt_state.hyperparams["learning_rate"][...] = rate
        if scaled:
            _, scaler, _ = scaler.step(grads, update, model, optimizer)
        else:
            update(grads, model, optimizer)
        return scaler, loss

    return step


class Broken:
    """A training of it, and its step: as in torch."""

    def __init__(self, llama: bool, dtype: str, scaled: bool) -> None:
        self.model = Language(llama)
        tx = optax.inject_hyperparams(optax.adam)(1e-2)
        self.optimizer = nnx.Optimizer(self.model, tx, wrt=nnx.Param)
        self.scaler = GradScaler()
        self.step = train_step(dtype, scaled)

    def run(self, step: Any, batch: dict[str, Any]) -> None:
        """Do a step with numpy arrays, and wait for what it found."""
        rate = jnp.float32(batch["rate"])
        given = {k: v for k, v in batch.items() if k != "rate"}
        self.scaler, _ = step(self.model, self.optimizer, self.scaler, **given, rate=rate)
        step.check()

    def multiply(self, path: str, factor: float) -> None:
        layer: Any = self.model
        for part in path.split("."):
            layer = layer[int(part)] if part.isdigit() else getattr(layer, part)
        layer.kernel[...] *= factor
