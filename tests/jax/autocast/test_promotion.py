"""Operands of different dtypes in an op without a row, and low buffers that are written into.

A float32 array widens a low one; a number, a bias and a mask do not. What is written into a low
buffer takes its dtype.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from polymp.jax import autocast, lower, upper

LOW = jnp.bfloat16
W, X, ACC = jnp.ones((8, 8)) / 8, jnp.ones((4, 8)), jnp.full((4, 8), 0.125)


def dtypes_of(fn: Any, *args: Any, **how: Any) -> set[str]:
    return {x.dtype.name for x in jax.tree.leaves(jax.eval_shape(autocast(fn, **how), *args))}


def loop(w: Any, x: Any) -> Any:
    def turn(total: Any, _: Any) -> tuple[Any, None]:
        return total + x @ w, None

    return lax.scan(turn, jnp.zeros_like(x), None, length=3)[0]


def swapped(start: Any, body: Any) -> Any:
    """A loop with two carries: the dtype of the second one reaches the first a round later."""
    return lax.fori_loop(0, 3, lambda _, s: (s[1], body(s[0])), start)


def conv(x: Any, w: Any) -> Any:
    return lax.conv(x[None, None], w[None, None], (1, 1), "SAME")[0, 0]


def off(x: Any) -> Any:
    with autocast(enabled=False):
        return x * 2


def tanh(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w).sum()


# Programs, by the dtype of their results.
WIDE: dict[str, Any] = {
    "an argument": lambda w, x, a: a * (x @ w),
    "an accumulator": lambda w, x, a: jnp.zeros((4, 8)) + x @ w + x @ w,
    "what arguments make": lambda w, x, a: jnp.tanh(a - x) * (x @ w),
    "no low operand": lambda w, x, a: a * x,
    "a rule": lambda w, x, a: jnp.exp(a) * (x @ w),
    "downstream of a rule": lambda w, x, a: (1 + jnp.exp(a)).T.T * (x @ w),
    "a function's rule": lambda w, x, a: jax.nn.softmax(a) * (x @ w),
    "a mark": lambda w, x, a: upper(a) * (x @ w),
    "a cast": lambda w, x, a: a.astype(LOW).astype("float32") * (x @ w),
    "a loop's state": lambda w, x, a: loop(w, x),
    "a jitted function": lambda w, x, a: jax.jit(jnp.tanh)(a) * (x @ w),
    "a rule in it": lambda w, x, a: jax.jit(jnp.exp)(a) * (x @ w),
    "a custom function": lambda w, x, a: jax.nn.relu(a) * (x @ w),
    "a marked product": lambda w, x, a: (upper(x @ w) * 2, lower(a) * upper(x @ w)),
    "off": lambda w, x, a: off(x @ w),
    "concatenated": lambda w, x, a: jnp.concatenate([x @ w, jnp.exp(x)]),
    "chosen": lambda w, x, a: jnp.where(x > 0, x @ w, jnp.exp(x)),
    "clipped": lambda w, x, a: jnp.clip(x @ w, jnp.exp(x), 3.0),
    "written into zeros": lambda w, x, a: jnp.zeros((4, 8)).at[0].set((x @ w)[0]),
    "a sum that was asked for": lambda w, x, a: jnp.dot(
        x.astype(LOW), w.astype(LOW), preferred_element_type="float32"
    ),
    "carries that swap": lambda w, x, a: swapped((lower(a), x), lambda x: x),
    "branches": lambda w, x, a: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: jnp.exp(x)),
}
LOWERED: dict[str, Any] = {
    "a bias": lambda w, x, a: x @ w + a,
    "a product that is cast up": lambda w, x, a: (x @ w).astype("float32") * 2,
    "numbers": lambda w, x, a: (x @ w * 0.5, x @ w + np.float32(3), jnp.maximum(x @ w, 0.1)),
    "a chosen number": lambda w, x, a: jnp.where(x > 0, x @ w, 0.0),
    "two products": lambda w, x, a: x @ w + x @ w,
    "other biases": lambda w, x, a: ((x @ w).reshape(8, 4) + a[0, :4], x @ w + x @ w + a[0]),
    "a bias of a convolution": lambda w, x, a: conv(x, w) + a[0],
    "low carries that swap": lambda w, x, a: swapped((lower(a), lower(x)), lambda x: x @ w),
    "low branches": lambda w, x, a: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: 2 * (x @ w)),
    "a number of a branch": lambda w, x, a: lax.switch(0, [lambda: (x @ w)[0, 0], lambda: 1.0]),
    "a gradient": lambda w, x, a: jax.grad(tanh, 1)(x, w),
    "a gradient of a region": lambda w, x, a: jax.grad(autocast(tanh), 1)(x, w),
}


@pytest.mark.parametrize("name", [*WIDE, *LOWERED])
def test_who_widens(name):
    fn, dtype = (WIDE[name], "float32") if name in WIDE else (LOWERED[name], "bfloat16")
    assert dtypes_of(fn, W, X, ACC) == {dtype}


INTS, BOOLS = jnp.array([[0], [1], [1], [0]]), jnp.array([[False], [True], [True], [False]])
# Programs with masks. Where no array of floats went into a mask, only numbers that float16 cannot
# hold, or neither dtype can, widen anything.
MASKS: dict[str, Any] = {
    "integers": lambda y, i, b: y * i,
    "integers, cast": lambda y, i, b: y * i.astype("float32"),
    "small integers": lambda y, i, b: y + i.astype("int8"),
    "positions": lambda y, i, b: y + jnp.arange(8),
    "one minus integers": lambda y, i, b: y * (1.0 - i),
    "a sum of integers": lambda y, i, b: y / i.sum(),
    "bools": lambda y, i, b: y * b,
    "one minus bools": lambda y, i, b: y * (1.0 - b.astype("float32")),
    "half of bools": lambda y, i, b: y + 0.5 * b,
    "chosen numbers": lambda y, i, b: y * jnp.where(b, 1.0, 0.0),
    "numbers chosen by integers": lambda y, i, b: (
        y * jnp.where(i > 0, jnp.float32(1), jnp.float32(0))
    ),
    "chosen arrays": lambda y, i, b: y * jnp.where(b, jnp.ones((4, 8)), jnp.zeros((4, 8))),
    "infinity": lambda y, i, b: y + jnp.where(b, 0.0, -jnp.inf),
    "a mark": lambda y, i, b: y * upper(i),
}
WIDER_THAN_FLOAT16: dict[str, Any] = {
    "a penalty by integers": lambda y, i, b: y + (1 - i) * -1e9,
    "a penalty": lambda y, i, b: y + jnp.where(b, 0.0, -1e9),
}
WIDER: dict[str, Any] = {
    "half of integers": lambda y, i, b: y + 0.5 * i,
    "float32's lowest": lambda y, i, b: y + jnp.where(b, 0.0, jnp.finfo("float32").min),
    "a rule": lambda y, i, b: y * jnp.exp(jnp.where(b, 1.0, 0.0)),
    "a mark on floats": lambda y, i, b: y * upper(i.astype("float32")),
    "chosen floats": lambda y, i, b: y * jnp.where(b, 1.0, jnp.sin(ACC)),
}


@pytest.mark.parametrize("low", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", [*MASKS, *WIDER_THAN_FLOAT16, *WIDER])
def test_what_no_floats_went_into_does_not_widen(name, low):
    fn = (MASKS | WIDER_THAN_FLOAT16 | WIDER)[name]
    wide = name in WIDER or (name in WIDER_THAN_FLOAT16 and low == "float16")
    found = dtypes_of(lambda w, x, i, b: fn(x @ w, i, b), W, X, INTS, BOOLS, dtype=low)
    assert found == {"float32" if wide else low}


THIRD, ROWS = jnp.eye(8) / 3, jnp.linspace(-2, 2, 16).reshape(2, 8)


@pytest.mark.parametrize("low", [jnp.bfloat16, jnp.float16])
def test_values_are_written_into_a_low_cache_in_its_dtype(low):
    def written(cache: Any, x: Any) -> Any:
        return lax.dynamic_update_slice(cache, jnp.sin(x @ THIRD).astype(cache.dtype), (1, 0))

    cache = jnp.ones((4, 8), low)
    rows = autocast(lambda x: jnp.sin(x @ THIRD), dtype=low)(ROWS)
    for run in (autocast(written, dtype=low), jax.jit(autocast(written, dtype=low))):
        made = run(cache, ROWS)
        assert made.dtype == low
        assert (made[1:3] == rows).all()
        assert (made[0] == 1).all()


# What is low in the plan alone, though float32 as written.
UPDATES: dict[str, Any] = {
    "slice": lambda b, y: lax.dynamic_update_slice(b, y, (0, 0)),
    "index": lambda b, y: b.at[0].set(y[0]),
    "indices": lambda b, y: b.at[jnp.array([1, 0])].set(y),
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_buffer_that_the_plan_makes_low_stays_low(name):
    def program(b: Any, y: Any) -> Any:
        return UPDATES[name](b, jnp.exp(y))  # float32 by its row

    b, y = jnp.ones((2, 8)), ROWS
    low = autocast(lambda b, y: program(lower(b), y))(b, y)
    assert low.dtype == LOW
    assert (low == program(b, y).astype(LOW)).all()
    assert autocast(program)(b, y).dtype == jnp.float32
