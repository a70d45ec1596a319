"""Tables that are read by rows and by products: stored once, low, where no bit changes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from polymp.jax import autocast, freeze, lower
from tests.support.jax import language_models

P = {
    "table": jax.random.normal(jax.random.key(0), (16, 8)),
    "w": jax.random.normal(jax.random.key(1), (8, 8)),
}
IDS = jnp.array([3, 0, 15])
LOW = jnp.dtype("bfloat16")

# Programs in which rows go on low, and those in which they do not.
LOWERED: dict[str, Any] = {
    "a product of rows": lambda p, i: (p["table"][i] @ p["w"]) @ p["table"].T,
    "taken": lambda p, i: (jnp.take(p["table"], i, axis=0) @ p["w"]) @ p["table"].T,
    "filled up": lambda p, i: (
        (p["table"].at[i + 2].get(mode="fill", fill_value=0.5) @ p["w"]) @ p["table"].T
    ),
    "marked": lambda p, i: (lower(p["table"][i]) * 3 @ p["w"]) @ p["table"].T,
}
KEPT: dict[str, Any] = {
    "scaled": lambda p, i: (p["table"][i] * 3 @ p["w"]) @ p["table"].T,
    "filled up with what is rounded": lambda p, i: (
        (p["table"].at[i + 2].get(mode="fill", fill_value=0.3) @ p["w"]) @ p["table"].T
    ),
    "returned": lambda p, i: (p["table"][i], p["w"] @ p["table"].T),
}


@pytest.mark.parametrize("name", LOWERED)
def test_it_is_stored_low_and_no_bit_changes(name):
    fn = autocast(LOWERED[name])
    serve, served = freeze(fn, P, IDS)
    assert served["table"].dtype == LOW
    assert (jax.jit(serve)(served, IDS) == jax.jit(fn)(P, IDS)).all()


@pytest.mark.parametrize("name", KEPT)
def test_it_stays_where_a_bit_would_change(name):
    serve, served = freeze(autocast(KEPT[name]), P, IDS)
    assert served["table"].dtype == jnp.float32
    assert "['table']" in serve.kept


@pytest.mark.parametrize("scale", [1, 3])
def test_an_embedding_layer_under_lean(scale):
    layer = nnx.Embed(16, 8, rngs=nnx.Rngs(0))
    fn = autocast(lambda m, i: m.attend(m(i) * scale), policy="lean")
    serve, served = freeze(fn, layer, IDS)
    assert serve.stored == {"['embedding']": "bfloat16"}
    assert (jax.jit(serve)(served, IDS) == jax.jit(fn)(layer, IDS)).all()
    kept = freeze(autocast(lambda m, i: m.attend(m(i) * 3)), layer, IDS)[0].kept
    assert list(kept) == ["['embedding']"]  # under amp the rows go on in float32


def test_a_gemma_with_a_low_cache():
    it = language_models.Sizes(layers=1)
    model = language_models.Gemma(it, nnx.Rngs(0), low_rows=True)
    graph, state = nnx.split(model)

    @autocast
    def step(state: Any, token: Any, at: Any, caches: Any) -> Any:
        return nnx.merge(graph, state)(token, at, caches)

    cache, tokens = language_models.caches(it, 2, LOW), jnp.array([[1], [2]])
    serve, served = freeze(step, state, tokens, jnp.int32(0), cache)
    assert served["table"].get_value().dtype == LOW
    runs = jax.jit(serve), jax.jit(step)
    states, caches = (served, state), [cache, cache]
    for at in range(2):
        found = [
            run(state, tokens + at, jnp.int32(at), cache)
            for run, state, cache in zip(runs, states, caches, strict=True)
        ]
        (ours, cache), (theirs, other) = found
        caches = [cache, other]
        assert (ours == theirs).all()
    assert {x.dtype for x in jax.tree.leaves(caches)} == {LOW}
