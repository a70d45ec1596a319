"""Updates of low buffers: float32 values follow the buffer that they are written into."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

from polymp.jax import autocast, lower

LOW = jnp.bfloat16
W, X = jnp.eye(8) / 3, jnp.linspace(-2, 2, 16).reshape(2, 8)


def written(cache: Any, x: Any) -> Any:
    return lax.dynamic_update_slice(cache, jnp.sin(x @ W), (1, 0))


@pytest.mark.parametrize("low", [jnp.bfloat16, jnp.float16])
def test_values_take_the_dtype_of_a_low_cache(low):
    cache = jnp.ones((4, 8), low)
    rows = autocast(lambda x: jnp.sin(x @ W), dtype=low)(X)
    for run in (autocast(written, dtype=low), jax.jit(autocast(written, dtype=low))):
        made = run(cache, X)
        assert made.dtype == low
        assert (made[1:3] == rows).all()
        assert (made[0] == 1).all()


def test_elsewhere_jax_refuses_as_before():
    cache = jnp.ones((4, 8), LOW)
    for run in (written, autocast(written, enabled=False)):
        with pytest.raises(TypeError, match="same dtype"):
            run(cache, X)
    autocast(written)(cache, X)
    with pytest.raises(TypeError, match="same dtype"):
        jax.jit(written)(cache, X)
    with pytest.raises(TypeError, match="same dtype"):  # numbers that are wider are no float32
        autocast(written)(jnp.ones((4, 8), jnp.int32), X)


def test_a_cache_in_a_loop_stays_low():
    def decode(cache: Any, x: Any) -> Any:
        def turn(cache: Any, at: Any) -> Any:
            return lax.dynamic_update_slice(cache, (x @ W)[:1] + at, (at, 0)), None

        return lax.scan(turn, cache, jnp.arange(3))[0]

    made = autocast(decode)(jnp.zeros((4, 8), LOW), X)
    assert made.dtype == LOW
    assert (made[2] != made[1]).any()


def test_gradients_of_what_is_written_are_those_of_a_cast():
    def loss(x: Any, cast: bool) -> Any:
        rows = jnp.sin(x)
        rows = rows.astype(LOW) if cast else rows
        return (
            lax.dynamic_update_slice(jnp.zeros((4, 8), LOW), rows, (1, 0)).astype("float32").sum()
        )

    found = jax.grad(autocast(lambda x: loss(x, False)))(X)
    assert found.dtype == jnp.float32
    assert (found == jax.grad(lambda x: loss(x, True))(X)).all()


# What is low in the plan alone, though float32 as written.
UPDATES: dict[str, Any] = {
    "slice": lambda b, y: lax.dynamic_update_slice(b, y, (0, 0)),
    "index": lambda b, y: b.at[0].set(y[0]),
    "indices": lambda b, y: b.at[jnp.array([1, 0])].set(y),
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_buffer_that_the_plan_makes_low_stays_low(name):
    def program(b: Any, y: Any) -> Any:
        return UPDATES[name](b, upper_rows(y))

    def upper_rows(y: Any) -> Any:
        return jnp.exp(y)  # float32 by its row

    b, y = jnp.ones((2, 8)), X
    low = autocast(lambda b, y: program(lower(b), y))(b, y)
    assert low.dtype == LOW
    assert (low == program(b, y).astype(LOW)).all()
    assert autocast(program)(b, y).dtype == jnp.float32


def test_flax_attention_takes_a_low_cache():
    attention = nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0))
    found = {}
    for dtype in ("float32", "bfloat16"):
        attention.init_cache((2, 4, 8), dtype=dtype)
        graph, params, cache = nnx.split(attention, nnx.Param, ...)

        @jax.jit
        @autocast
        def step(cache: Any, x: Any) -> Any:
            model = nnx.merge(graph, params, cache)  # noqa: B023
            return model(x), nnx.state(model, nnx.Not(nnx.Param))

        for at in range(3):
            out, cache = step(cache, jnp.sin(jnp.arange(16.0) + at).reshape(2, 1, 8))
        assert {str(x.dtype) for x in jax.tree.leaves(cache)} == {dtype, "int32"}
        found[dtype] = out.astype("float32")
    assert jnp.abs(found["float32"] - found["bfloat16"]).max() < 0.02
    assert jnp.abs(found["float32"]).max() > 0.1
