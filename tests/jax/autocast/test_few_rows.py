"""A policy with `few_rows`: which products stay in float32, and what else changes: nothing."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import polymp
from polymp.jax import autocast, explain, freeze
from tests.support.jax import transformer, walker
from tests.support.jax.scaler_tools import bits

MOST = 4
FEW = polymp.policy({"name": "few", "extends": "amp", "few_rows": MOST})
ROWS = (1, MOST, MOST + 1, 9)


def net(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ params["up"] + params["bias"]) @ params["down"].T


def inputs(rows: int) -> tuple[dict[str, jax.Array], jax.Array]:
    sizes = {"up": (8, 32), "bias": (32,), "down": (16, 32)}
    keys = jax.random.split(jax.random.key(rows), len(sizes) + 1)
    pairs = zip(keys, sizes.items(), strict=False)
    params = {name: jax.random.normal(key, size) for key, (name, size) in pairs}
    return params, jax.random.normal(keys[-1], (rows, 8))


def products(fn: Any, *args: Any) -> list[str]:
    return walker.products(jax.make_jaxpr(fn)(*args))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rows", ROWS)
def test_products_of_few_rows_by_parameters_are_float32(rows):
    args = inputs(rows)
    fn = autocast(net, policy=FEW)
    assert products(autocast(net), *args) == ["bfloat16"] * 2
    assert products(fn, *args) == ["float32" if rows <= MOST else "bfloat16"] * 2
    assert fn(*args).dtype == jnp.bfloat16
    grads = jax.grad(lambda *args: fn(*args).astype(jnp.float32).sum())(*args)
    assert {g.dtype.name for g in jax.tree.leaves(grads)} == {"float32"}


@pytest.mark.parametrize("rows", ROWS)
def test_results_are_those_of_float32_operands_rounded_once(rows):
    """A fault, an operand that is rounded as well, is seen."""
    args = inputs(rows)
    few = autocast(lambda params, x: x @ params["up"], policy=FEW)(*args)
    params, x = args
    exact = x @ params["up"]
    rounded = jnp.matmul(*(a.astype(jnp.bfloat16).astype(jnp.float32) for a in (x, params["up"])))
    same = [bool((few == y.astype(jnp.bfloat16)).all()) for y in (exact, rounded)]
    assert same == ([True, False] if rows <= MOST else [False, True])


def test_other_products_run_by_their_rows():
    def attention(q, k, w):
        q, k = q * 2, k * 2  # computed, and no parameters
        return (q @ k.T) @ (w * 2)

    q = jnp.ones((2, 8))
    assert products(autocast(attention, policy=FEW), q, q, jnp.ones((2, 8))) == ["bfloat16"] * 2
    low = jnp.ones((8, 4), jnp.bfloat16)  # stored low: nothing is cast
    assert products(autocast(jnp.matmul, policy=FEW), q * 1, low) == ["float32"]  # q is given
    step = autocast(lambda q, w: (q * 2) @ w, policy=FEW)
    assert products(step, q, low) == ["bfloat16"]
    full = FEW.override(fp32=["class:matmul"])
    assert products(autocast(net, policy=full), *inputs(9)) == ["float32"] * 2


def test_a_result_dtype_that_the_program_asks_for_is_kept():
    def asked(w, x):
        return jax.lax.dot(x, w, preferred_element_type=jnp.float32)

    w, x = jnp.ones((8, 4), jnp.float32), jnp.ones((1, 8))
    assert autocast(asked, policy=FEW)(w, x).dtype == autocast(asked)(w, x).dtype
    assert autocast(asked, policy=FEW, dtype="float16")(w, x).dtype == jnp.float16


@pytest.mark.parametrize("rows", ROWS)
def test_frozen_parameters_give_the_same_bits(rows):
    params, x = inputs(rows)
    fn = autocast(net, policy=FEW)
    serve, served = freeze(fn, params, x)
    assert bits(jax.jit(serve)(served, x)) == bits(jax.jit(fn)(params, x))
    assert served["up"].dtype == (jnp.float32 if rows <= MOST else jnp.bfloat16)


def test_a_whole_model_has_the_dtypes_that_it_has_without():
    size = transformer.SMALL
    args = transformer.parameters(size), transformer.tokens(size)
    many = polymp.policy({"name": "many", "extends": "amp", "few_rows": 10**6})

    def loss(params, batch):
        return transformer.loss(params, batch, heads=size.heads)

    types = [
        jax.eval_shape(jax.value_and_grad(autocast(loss, policy=policy)), *args)
        for policy in ("amp", many)
    ]
    assert types[0] == types[1]
    without = polymp.policy({"name": "amp", "extends": "amp", "few_rows": 0})
    texts = [str(jax.make_jaxpr(autocast(loss, policy=p))(*args)) for p in ("amp", without, many)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


@pytest.mark.parametrize(("rows", "said"), [(1, "1 row"), (4, "4 rows")])
def test_explain_says_why(rows, said):
    report = explain(autocast(net, policy=FEW), *inputs(rows))
    why = f"casting the float32 parameter takes longer than {said} (few_rows = 4)"
    assert report.fallbacks == {why: 2}
    assert f"fallbacks: 2 because {why}" in str(report)
    assert "fallbacks" not in str(explain(autocast(net, policy=FEW), *inputs(5)))
