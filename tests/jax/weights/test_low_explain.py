"""`explain` of a function of low weights: in which dtype each op gets them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import polymp
from polymp.jax import autocast, low_weights

PARAMS = {
    "gain": jnp.ones(8), "up": jnp.ones((8, 16)), "bias": jnp.ones(16), "down": jnp.ones((16, 2)),
}  # fmt: skip
X = jnp.ones((4, 8))


@autocast
def loss(params: Any, x: Any) -> Any:
    h = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True)) * params["gain"]
    h = jnp.maximum(h @ params["up"] + params["bias"], 0.0)
    return jnp.sum(h @ params["down"])


def low_params() -> Any:
    tx = low_weights(optax.sgd(0.1), keep=(loss, PARAMS, X))
    return tx.weights(PARAMS)


def rows(params: Any, fn: Any = loss) -> dict[str, Any]:
    """The first call of each op."""
    return {call.op: call for call in reversed(list(polymp.explain(fn, params, X)))}


def test_low_and_kept_weights_have_their_dtypes_in_the_rows() -> None:
    before, after = rows(PARAMS), rows(low_params())
    assert before["mul"].inputs == after["mul"].inputs == ("float32", "float32")  # the gain
    assert before["linear"].inputs == ("float32", "float32")
    assert after["linear"].inputs == ("float32", "bfloat16")
    assert after["linear"].run == after["linear"].outputs[0] == "bfloat16"


def test_a_low_bias_is_float32_where_jax_adds_it() -> None:
    """jax.numpy casts it to the dtype of the sum as it is traced, which is float32."""
    before, after = rows(PARAMS), rows(low_params())
    assert (after["to"].inputs, after["to"].outputs) == (("bfloat16",), ("float32",))
    assert [at["add"].outputs for at in (before, after)] == [("bfloat16",), ("float32",)]


def test_float32_views_have_the_rows_of_float32_weights() -> None:
    def views(params: Any, x: Any) -> Any:
        return loss(jax.tree.map(lambda p: p.astype(jnp.float32), params), x)

    before, after = rows(PARAMS), rows(low_params(), views)
    assert "to" in after  # the views
    assert {op: (c.inputs, c.outputs) for op, c in after.items() if op != "to"} == {
        op: (c.inputs, c.outputs) for op, c in before.items() if op != "to"
    }
