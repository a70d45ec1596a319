"""`lean` in JAX: a transformer block of flax's saves no float32 activation for backward.

The block is the example's. What `jax.vjp` saves is read from a trace, without parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from polymp.jax import autocast, lower
from tests.support.examples import modules
from tests.support.jax import transformer

BATCH, LENGTH, WIDTH, HEADS = 12, 32, 48, 3  # the example's


class Saved(NamedTuple):
    """A value that is saved for backward and is no argument."""

    dtype: str
    size: int
    bytes: int


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with modules("job", "train_jax") as parts:
        yield parts.train_jax


@pytest.fixture(scope="module")
def block(example: Any) -> Any:
    return example.Block(WIDTH, HEADS, nnx.Rngs(0))


def residuals(forward: Any, *args: Any) -> list[Saved]:
    """Return the values that `jax.vjp` saves of a function, without its arguments."""
    trace = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(forward, *args)[1]))(*args)
    arguments = set(map(id, trace.jaxpr.invars))
    found = {id(v): v.aval for v in trace.jaxpr.outvars if id(v) not in arguments}
    return [Saved(a.dtype.name, a.size, a.size * a.dtype.itemsize) for a in found.values()]


def saved(block: Any, policy: str, low: Any) -> list[Saved]:
    """Return the values that the block saves if its input has a low dtype."""
    graph, state = nnx.split(block)

    @autocast(dtype=low, policy=policy)
    def forward(state: Any, x: Any) -> Any:
        return nnx.merge(graph, state)(lower(x))

    return residuals(forward, state, jnp.ones((BATCH, LENGTH, WIDTH)))


def in_float32(found: list[Saved]) -> list[Saved]:
    """Activations among it that are float32; means and sums of rows are smaller."""
    return [one for one in found if one.dtype == "float32" and one.size >= BATCH * LENGTH * WIDTH]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("low", [jnp.bfloat16, jnp.float16])
def test_a_block_saves_no_float32_activation(block, low):
    """Under amp it does, so this can fail."""
    lean, amp = saved(block, "lean", low), saved(block, "amp", low)
    assert in_float32(lean) == []
    assert len(in_float32(amp)) >= 2
    assert sum(one.bytes for one in lean) <= 0.8 * sum(one.bytes for one in amp)


SIZES = transformer.Sizes(2, 64, 4, 2, 16, 256, 256, 32)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("low", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("kind", [transformer.Gemma, transformer.LM1B])
def test_language_models_save_less_than_under_amp(kind, low):
    """Their residual streams are float32: a table is read by rows, and a norm is written out."""
    graph, state, rest = nnx.split(kind(SIZES, nnx.Rngs(0)), nnx.Param, ...)
    tokens = jnp.ones((4, SIZES.length + 1), jnp.int32)

    def size(policy: str) -> int:
        @autocast(dtype=low, policy=policy)
        def loss(state: Any) -> Any:
            return transformer.language_loss(nnx.merge(graph, state, rest), tokens)

        return sum(one.bytes for one in residuals(loss, state))

    share = size("lean") / size("amp")
    print(f"{kind.__name__} {low.__name__}: lean saves {share:.3f} of amp's bytes")
    assert share <= 0.95


@pytest.mark.parametrize("low", [jnp.bfloat16, jnp.float16])
def test_an_activation_saves_its_input_alone(low):
    """Without a row for gelu, it saves what its formula is made of."""

    def sizes(policy: str) -> list[tuple[str, int]]:
        @autocast(dtype=low, policy=policy)
        def feed(x: Any) -> Any:
            return jax.nn.gelu(lower(x)) * 2

        found = residuals(feed, jnp.ones((64, 64)))
        return [(one.dtype, one.size) for one in found if one.size > 1]

    assert sizes("lean") == sizes("amp") == [(jnp.dtype(low).name, 64 * 64)]
    assert len(sizes("torch-cuda")) >= 4


def test_a_norm_of_float32_saves_its_input_alone():
    norm = nnx.LayerNorm(64, rngs=nnx.Rngs(0))

    def activations(policy: str) -> int:
        found = residuals(autocast(norm, policy=policy), jnp.ones((64, 64)))
        return sum(one.size == 64 * 64 for one in found)

    assert activations("lean") == 0  # the input is the argument
    assert activations("amp") >= 1


@pytest.mark.parametrize("low", [jnp.bfloat16, jnp.float16])
def test_queries_keys_and_values_have_one_dtype(low):
    """Kernels such as flash-attention's refuse anything else."""
    rngs = nnx.Rngs(0)
    project = [nnx.Linear(8, 8, rngs=rngs) for _ in range(3)]
    norm_q, norm_k = nnx.LayerNorm(8, rngs=rngs), nnx.RMSNorm(8, rngs=rngs)

    def heads(x: Any) -> Any:
        q, k, v = (layer(x) for layer in project)
        return norm_q(q), norm_k(k), v

    def dtypes(policy: str) -> list[Any]:
        return [one.dtype for one in autocast(heads, dtype=low, policy=policy)(jnp.ones((4, 8)))]

    assert dtypes("lean") == [low, low, low]
    assert dtypes("amp") == [jnp.float32, jnp.float32, low]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("low", [jnp.float16, jnp.bfloat16])
def test_gradients_of_a_block_are_near_those_under_amp(block, low):
    """Values that are not saved are computed again, and have to be the same numbers."""
    graph, state = nnx.split(block)
    x = jax.random.normal(jax.random.key(0), (2, LENGTH, WIDTH))

    def gradient(policy: str | None) -> Any:
        def loss(state: Any) -> Any:
            return jnp.mean(jnp.square(nnx.merge(graph, state)(x)))

        run = loss if policy is None else autocast(loss, dtype=low, policy=policy)
        leaves = jax.tree.leaves(jax.jit(jax.grad(run))(state))
        return jnp.concatenate([leaf.ravel() for leaf in leaves])

    exact, lean, amp = map(gradient, (None, "lean", "amp"))
    error = [float(jnp.linalg.norm(one - exact) / jnp.linalg.norm(exact)) for one in (lean, amp)]
    assert error[0] <= 2 * error[1] + 1e-4
