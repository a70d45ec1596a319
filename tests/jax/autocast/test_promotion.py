"""Operands of different dtypes in an op without a row: a float32 array widens a low one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from polymp.jax import autocast, lower, upper

LOW = jnp.bfloat16
W, X, ACC = jnp.ones((8, 8)) / 8, jnp.ones((4, 8)), jnp.full((4, 8), 0.125)


def dtype_of(fn: Any, *args: Any, **how: Any) -> str:
    return jax.eval_shape(autocast(fn, **how), *args).dtype.name


def loop(w: Any, x: Any) -> Any:
    def turn(total: Any, _: Any) -> tuple[Any, None]:
        return total + x @ w, None

    return jax.lax.scan(turn, jnp.zeros_like(x), None, length=3)[0]


# A program, and the dtype of its result.
PROGRAMS: dict[str, tuple[Any, str]] = {
    "an argument": (lambda w, x, a: a * (x @ w), "float32"),
    "an accumulator": (lambda w, x, a: jnp.zeros((4, 8)) + x @ w + x @ w, "float32"),
    "what arguments make": (lambda w, x, a: jnp.tanh(a - x) * (x @ w), "float32"),
    "a bias": (lambda w, x, a: x @ w + a, "bfloat16"),
    "no low operand": (lambda w, x, a: a * x, "float32"),
    "a rule": (lambda w, x, a: jnp.exp(a) * (x @ w), "float32"),
    "downstream of a rule": (lambda w, x, a: (1 + jnp.exp(a)).T.T * (x @ w), "float32"),
    "a function's rule": (lambda w, x, a: jax.nn.softmax(a) * (x @ w), "float32"),
    "a mark": (lambda w, x, a: upper(a) * (x @ w), "float32"),
    "a cast": (lambda w, x, a: a.astype(LOW).astype("float32") * (x @ w), "float32"),
    "a loop's state": (lambda w, x, a: loop(w, x), "float32"),
    "a jitted function": (lambda w, x, a: jax.jit(jnp.tanh)(a) * (x @ w), "float32"),
    "a rule in it": (lambda w, x, a: jax.jit(jnp.exp)(a) * (x @ w), "float32"),
    "a custom function": (lambda w, x, a: jax.nn.relu(a) * (x @ w), "float32"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_who_widens(name):
    fn, dtype = PROGRAMS[name]
    assert dtype_of(fn, W, X, ACC) == dtype


INTS, BOOLS = jnp.array([[0], [1], [1], [0]]), jnp.array([[False], [True], [True], [False]])
# A program with masks, and the dtypes of its result in a bfloat16 and in a float16 region. Where
# no array of floats went into a mask, only numbers that a dtype cannot hold widen anything.
MASKS: dict[str, tuple[Any, str, str]] = {
    "integers": (lambda y, i, b: y * i, "bfloat16", "float16"),
    "integers, cast": (lambda y, i, b: y * i.astype("float32"), "bfloat16", "float16"),
    "small integers": (lambda y, i, b: y + i.astype("int8"), "bfloat16", "float16"),
    "positions": (lambda y, i, b: y + jnp.arange(8), "bfloat16", "float16"),
    "one minus integers": (lambda y, i, b: y * (1.0 - i), "bfloat16", "float16"),
    "a sum of integers": (lambda y, i, b: y / i.sum(), "bfloat16", "float16"),
    "a penalty by integers": (lambda y, i, b: y + (1 - i) * -1e9, "bfloat16", "float32"),
    "half of integers": (lambda y, i, b: y + 0.5 * i, "float32", "float32"),
    "bools": (lambda y, i, b: y * b, "bfloat16", "float16"),
    "one minus bools": (lambda y, i, b: y * (1.0 - b.astype("float32")), "bfloat16", "float16"),
    "half of bools": (lambda y, i, b: y + 0.5 * b, "bfloat16", "float16"),
    "chosen numbers": (lambda y, i, b: y * jnp.where(b, 1.0, 0.0), "bfloat16", "float16"),
    "numbers chosen by integers": (
        lambda y, i, b: y * jnp.where(i > 0, jnp.float32(1), jnp.float32(0)),
        "bfloat16",
        "float16",
    ),
    "chosen arrays": (
        lambda y, i, b: y * jnp.where(b, jnp.ones((4, 8)), jnp.zeros((4, 8))),
        "bfloat16",
        "float16",
    ),
    "a penalty": (lambda y, i, b: y + jnp.where(b, 0.0, -1e9), "bfloat16", "float32"),
    "infinity": (lambda y, i, b: y + jnp.where(b, 0.0, -jnp.inf), "bfloat16", "float16"),
    "float32's lowest": (
        lambda y, i, b: y + jnp.where(b, 0.0, jnp.finfo("float32").min),
        "float32",
        "float32",
    ),
    "a rule": (lambda y, i, b: y * jnp.exp(jnp.where(b, 1.0, 0.0)), "float32", "float32"),
    "a mark": (lambda y, i, b: y * upper(i), "bfloat16", "float16"),
    "a mark on floats": (lambda y, i, b: y * upper(i.astype("float32")), "float32", "float32"),
    "chosen floats": (lambda y, i, b: y * jnp.where(b, 1.0, jnp.sin(ACC)), "float32", "float32"),
}


@pytest.mark.parametrize("name", MASKS)
def test_what_no_floats_went_into_does_not_widen(name):
    fn, *dtypes = MASKS[name]

    def program(w: Any, x: Any, i: Any, b: Any) -> Any:
        return fn(x @ w, i, b)

    found = [dtype_of(program, W, X, INTS, BOOLS, dtype=low) for low in (jnp.bfloat16, jnp.float16)]
    assert found == dtypes


@pytest.mark.parametrize("name", ["integers", "one minus integers", "bools", "chosen numbers"])
def test_masks_mask(name):
    def program(w: Any, x: Any) -> Any:
        return MASKS[name][0](x @ w, INTS, BOOLS)

    x = jnp.arange(32.0).reshape(4, 8)
    assert (autocast(program)(jnp.eye(8), x) == program(jnp.eye(8), x)).all()


def test_an_accumulator_loses_no_digits():
    """bfloat16 has no 257."""
    halves, ones = jnp.full((1, 2), 0.5), jnp.ones((2, 1))

    def total(x: Any) -> Any:
        start = jnp.zeros((1, 1))
        for _ in range(300):
            start = start + x @ ones
        return start

    assert float(autocast(total)(halves)[0, 0]) == 300


def test_low_stays_low():
    assert dtype_of(lambda w, x, a: lower(a) * upper(x @ w), W, X, ACC) == "float32"
