"""`lean` in JAX: a transformer block saves no float32 activation for backward, and makes none.

The block is the example's. What `jax.vjp` saves is read from a trace, without parameters; what XLA
makes, from the program that it compiles.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from polymp.jax import autocast, lower
from tests.support.examples import modules
from tests.support.jax import forms, hlo, transformer
from tests.support.jax.corpus import corpus
from tests.support.jax.corpus_runs import apart, problem

LOW = jnp.bfloat16, jnp.float16
BATCH, LENGTH, WIDTH, HEADS = 12, 32, 48, 3  # the example's


@pytest.fixture(scope="module")
def block() -> Iterator[Any]:
    with modules("job", "train_jax") as parts:
        yield parts.train_jax.Block(WIDTH, HEADS, nnx.Rngs(0))


def residuals(forward: Any, *args: Any) -> list[Any]:
    """Return the types of what `jax.vjp` saves of a function, without its arguments."""
    trace = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(forward, *args)[1]))(*args)
    return [v.aval for v in dict.fromkeys(trace.jaxpr.outvars) if v not in trace.jaxpr.invars]


def size_of(saved: list[Any]) -> int:
    return sum(one.size * one.dtype.itemsize for one in saved)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("low", LOW)
def test_a_block_saves_no_float32_activation(block, low):
    """Under amp it does, so this can fail."""
    graph, state = nnx.split(block)

    def forward(state: Any, x: Any) -> Any:
        return nnx.merge(graph, state)(lower(x))

    args = state, jnp.ones((BATCH, LENGTH, WIDTH))
    lean, amp = (
        residuals(autocast(forward, dtype=low, policy=policy), *args) for policy in ("lean", "amp")
    )
    # Means and sums of rows are smaller than an activation.
    wide = [
        sum(one.dtype == "float32" and one.size >= BATCH * LENGTH * WIDTH for one in saved)
        for saved in (lean, amp)
    ]
    assert wide[0] == 0
    assert wide[1] >= 2
    assert size_of(lean) <= 0.8 * size_of(amp)


# A decoder as Gemma's, transformers with layer norms and with norms that are written out.
GIVEN = ("nnx_decode", "nnx_transformer_lm", "rotary_attention")
MODELS = [p.name for p in corpus() if p.name in GIVEN]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", [*MODELS, "float32 residuals"])
def test_language_models_save_less_than_under_amp(name, low):
    """The residual stream of the last one is float32: a table is read by rows."""
    if name in MODELS:
        loss, args = problem(name).fn, problem(name).args
    else:
        loss = partial(transformer.loss, heads=transformer.SMALL.heads)
        args = transformer.parameters(transformer.SMALL), jnp.ones((4, 33), jnp.int32)
    sizes = [
        size_of(residuals(autocast(loss, dtype=low, policy=policy), *args))
        for policy in ("lean", "amp")
    ]
    share = sizes[0] / sizes[1]
    assert share <= 0.92


@pytest.mark.parametrize("low", LOW)
def test_an_activation_saves_its_input_alone(low):
    """Without a row for gelu, it saves what its formula is made of."""

    def sizes(policy: str) -> list[tuple[str, int]]:
        @autocast(dtype=low, policy=policy)
        def feed(x: Any) -> Any:
            return jax.nn.gelu(lower(x)) * 2

        found = residuals(feed, jnp.ones((64, 64)))
        return [(one.dtype.name, one.size) for one in found if one.size > 1]

    assert sizes("lean") == sizes("amp") == [(jnp.dtype(low).name, 64 * 64)]
    assert len(sizes("torch-cuda")) >= 4


def test_a_norm_of_float32_saves_its_input_alone():
    norm = nnx.LayerNorm(64, rngs=nnx.Rngs(0))

    def activations(policy: str) -> int:
        found = residuals(autocast(norm, policy=policy), jnp.ones((64, 64)))
        return sum(one.size == 64 * 64 for one in found)

    assert activations("lean") == 0  # the input is the argument
    assert activations("amp") >= 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("low", LOW)
def test_gradients_of_a_block_are_near_those_under_amp(block, low):
    """Values that are not saved are computed again, and have to be the same numbers."""
    graph, state = nnx.split(block)
    x = jax.random.normal(jax.random.key(0), (2, LENGTH, WIDTH))

    def gradient(policy: str | None) -> Any:
        def loss(state: Any) -> Any:
            return jnp.mean(jnp.square(nnx.merge(graph, state)(x)))

        run = loss if policy is None else autocast(loss, dtype=low, policy=policy)
        return jax.jit(jax.grad(run))(state)

    exact, lean, amp = map(gradient, (None, "lean", "amp"))
    assert apart(lean, exact) <= 2 * apart(amp, exact) + 1e-4


# --- Norms between two layers, compiled by XLA ----------------------------------------------------

SHAPE = (4, 16, 64)  # of the activation [batch, length, width]
# Processors that do not multiply bfloat16 widen the operands of each product.
multiplied_low = forms.lowered_as("row_by_row")
NORMS: dict[str, Callable[..., Any]] = {
    "layer_norm": nnx.LayerNorm,
    "rms_norm": nnx.RMSNorm,
    "group_norm": lambda width, **kwargs: nnx.GroupNorm(width, num_groups=4, **kwargs),
}


class Layers(nnx.Module):
    def __init__(self, norm: Callable[..., Any], dtype: Any = None) -> None:
        width, given = SHAPE[-1], {"dtype": dtype, "rngs": nnx.Rngs(0)}
        self.first, self.norm = nnx.Linear(width, width, **given), norm(width, **given)
        self.last = nnx.Linear(width, width, **given)

    def __call__(self, x: Any) -> Any:
        return self.last(self.norm(self.first(x)))


def activations(text: str, dtype: str) -> int:
    """How many arrays of the activation's size a program holds between its kernels."""
    entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)
    assert entry is not None
    return sum(
        op.dtype == dtype and prod(op.shape) == prod(SHAPE) and op.opcode != "bitcast"
        for op in hlo.read(text)[entry[1]].values()
    )


def compiled_norm_hlo(norm: str, low: Any, how: str) -> str:
    graph, state = nnx.split(Layers(NORMS[norm], low if how == "by hand" else None))

    def forward(state: Any, x: Any) -> Any:
        return nnx.merge(graph, state)(x)

    if how != "by hand":
        forward = autocast(forward, dtype=low, policy=how)
    return hlo.as_for_users(forward, state, jnp.ones(SHAPE, low)).as_text()


@multiplied_low
@pytest.mark.one_in(2)
@pytest.mark.parametrize("low", LOW, ids=lambda low: jnp.dtype(low).name)
@pytest.mark.parametrize("norm", NORMS)
def test_lean_makes_no_float32_activation_that_casts_by_hand_do_not(norm: str, low: Any) -> None:
    found = {how: activations(compiled_norm_hlo(norm, low, how), "float32")
             for how in ("by hand", "lean", "amp")}  # fmt: skip
    assert found["lean"] <= found["by hand"]
    assert found["amp"] >= found["lean"]


@multiplied_low
def test_the_reader_sees_a_norm_that_is_cast_after() -> None:
    """A float32 result of the norm is an array that lean has not."""
    x = jnp.ones(SHAPE, jnp.bfloat16)
    norm = nnx.LayerNorm(SHAPE[-1], rngs=nnx.Rngs(0))
    texts = [hlo.as_for_users(autocast(norm, policy=p), x).as_text() for p in ("lean", "amp")]
    wide = [activations(text, "float32") for text in texts]
    assert wide[1] == wide[0] + 1
