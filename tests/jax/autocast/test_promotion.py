"""`promotion="weak"`: only what something made float32 widens what it meets."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from polymp.jax import autocast, lower, upper
from tests.support.jax import hlo, transformer

LOW = jnp.bfloat16
W, X, ACC = jnp.ones((8, 8)) / 8, jnp.ones((4, 8)), jnp.full((4, 8), 0.125)


def dtype_of(fn: Any, *args: Any, **how: Any) -> str:
    return jax.eval_shape(autocast(fn, **how), *args).dtype.name


def loop(w: Any, x: Any) -> Any:
    def turn(total: Any, _: Any) -> tuple[Any, None]:
        return total + x @ w, None

    return jax.lax.scan(turn, jnp.zeros_like(x), None, length=3)[0]


# A program, and the dtype of its result where float32 is strong and where it is weak.
PROGRAMS: dict[str, tuple[Any, str, str]] = {
    "an argument": (lambda w, x, a: a * (x @ w), "float32", "bfloat16"),
    "an accumulator": (lambda w, x, a: jnp.zeros((4, 8)) + x @ w + x @ w, "float32", "bfloat16"),
    "what arguments make": (lambda w, x, a: jnp.tanh(a - x) * (x @ w), "float32", "bfloat16"),
    "a bias": (lambda w, x, a: x @ w + a, "bfloat16", "bfloat16"),
    "no low operand": (lambda w, x, a: a * x, "float32", "float32"),
    "a rule": (lambda w, x, a: jnp.exp(a) * (x @ w), "float32", "float32"),
    "downstream of a rule": (lambda w, x, a: (1 + jnp.exp(a)).T.T * (x @ w), "float32", "float32"),
    "a function's rule": (lambda w, x, a: jax.nn.softmax(a) * (x @ w), "float32", "float32"),
    "a mark": (lambda w, x, a: upper(a) * (x @ w), "float32", "float32"),
    "a cast": (lambda w, x, a: a.astype(LOW).astype("float32") * (x @ w), "float32", "float32"),
    "a loop's state": (lambda w, x, a: loop(w, x), "float32", "float32"),
    "a jitted function": (lambda w, x, a: jax.jit(jnp.tanh)(a) * (x @ w), "float32", "bfloat16"),
    "a rule in it": (lambda w, x, a: jax.jit(jnp.exp)(a) * (x @ w), "float32", "float32"),
    "a custom function": (lambda w, x, a: jax.nn.relu(a) * (x @ w), "float32", "bfloat16"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_who_widens(name):
    fn, strong, weak = PROGRAMS[name]
    assert dtype_of(fn, W, X, ACC) == strong
    assert dtype_of(fn, W, X, ACC, promotion="strong") == strong
    assert dtype_of(fn, W, X, ACC, promotion="weak") == weak


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


def test_the_numbers_are_those_of_the_low_program():
    fn = PROGRAMS["an argument"][0]
    low = (X.astype(LOW) @ W.astype(LOW)) * ACC.astype(LOW)
    assert bool((autocast(fn, promotion="weak")(W, X, ACC) == low).all())


def test_digits_that_an_accumulator_loses():
    """The trade, and the way out of it: bfloat16 has no 257."""
    halves, ones = jnp.full((1, 2), 0.5), jnp.ones((2, 1))

    def total(start: Any, x: Any) -> Any:
        for _ in range(300):
            start = start + x @ ones
        return start

    def run(start: Any, **how: Any) -> float:
        return float(autocast(lambda x: total(start(), x), **how)(halves)[0, 0])

    zeros = partial(jnp.zeros, (1, 1))
    assert run(zeros) == 300
    assert run(zeros, promotion="weak") == 256
    assert run(lambda: upper(zeros()), promotion="weak") == 300


def product(w: Any, x: Any, a: Any) -> Any:
    return a * (x @ w)


@pytest.mark.parametrize("jitted", [False, True])
def test_the_innermost_region_decides(jitted):
    part = jax.jit(product) if jitted else product

    def inside(w: Any, x: Any, a: Any, how: str) -> Any:
        with autocast(promotion=how):
            low = part(w, x, a)
        return low, part(w, x, a)

    for outer, inner in (("strong", "weak"), ("weak", "strong")):
        dtypes = {"strong": "float32", "weak": "bfloat16"}
        made = jax.eval_shape(autocast(partial(inside, how=inner), promotion=outer), W, X, ACC)
        assert [m.dtype.name for m in made] == [dtypes[inner], dtypes[outer]]


def test_what_left_a_weak_region_widens_in_a_strong_one():
    def fn(w: Any, x: Any, a: Any) -> Any:
        with autocast(promotion="weak"):
            a = jnp.tanh(a)
        return a * (x @ w)

    assert dtype_of(fn, W, X, ACC) == "float32"


def test_code_that_is_off_runs_as_written():
    def fn(w: Any, x: Any, a: Any) -> Any:
        with autocast(enabled=False, promotion="weak"):
            return product(w, x, a)

    assert dtype_of(fn, W, X, ACC, promotion="weak") == "float32"


def test_a_trace_of_one_is_not_used_for_the_other():
    jitted = jax.jit(product)
    calls = [autocast(jitted, promotion=how) for how in ("strong", "weak", "strong", "weak")]
    dtypes = [call(W, X, ACC).dtype.name for call in calls]
    assert dtypes == ["float32", "bfloat16"] * 2


def test_a_float16_number_that_underflows_is_kept():
    def fn(w: Any, x: Any, a: Any) -> Any:
        return (x @ w) * 1e-12 + a

    assert dtype_of(fn, W, X, ACC, dtype=jnp.float16, promotion="weak") == "float32"


def scaled_blocks(params: Any, x: Any) -> Any:
    """Residual blocks whose branches have gains, which are parameters."""
    for up, down, gain in params:
        x = x + gain * (jax.nn.gelu(x @ up) @ down)
    return (x**2).mean()


def test_it_saves_memory_and_gradients_stay_near():
    keys = iter(jax.random.split(jax.random.key(0), 7))
    params = [
        (jax.random.normal(next(keys), (32, 64)) / 6, jax.random.normal(next(keys), (64, 32)) / 8,
         jnp.linspace(0.1, 1, 32))
        for _ in range(3)
    ]  # fmt: skip
    x = jax.random.normal(next(keys), (64, 32))
    runs = [scaled_blocks, *(autocast(scaled_blocks, promotion=p) for p in ("strong", "weak"))]
    _, strong, weak = (hlo.residual_bytes(run, params, x) for run in runs)
    assert 0.9 * strong < weak < strong
    exact, *others = (
        jnp.concatenate([g.ravel() for g in jax.tree.leaves(jax.jit(jax.grad(run))(params, x))])
        for run in runs
    )
    strong, weak = (float(jnp.linalg.norm(g - exact) / jnp.linalg.norm(exact)) for g in others)
    assert 1e-4 < strong < 0.02
    assert weak < 2 * strong


def test_it_costs_the_transformer_nothing():
    size = transformer.SMALL
    params, batch = transformer.parameters(size), transformer.tokens(size)
    loss = partial(transformer.loss, heads=size.heads)
    runs = (autocast(loss, promotion=how) for how in ("strong", "weak"))
    strong, weak = (hlo.residual_bytes(run, params, batch) for run in runs)
    assert weak <= strong


@pytest.mark.parametrize("wrong", ["Weak", "", None, True, 1, ["weak"]])
def test_another_word_is_refused(wrong):
    text = f"autocast(promotion={wrong!r}): write promotion='strong' or promotion='weak'."
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        autocast(promotion=wrong)


def test_it_is_seen():
    assert repr(autocast(promotion="weak")) == (
        "polymp.jax.autocast(dtype=bfloat16, policy='amp', enabled=True, promotion='weak')"
    )
    assert autocast().region.promotion == "strong"
    assert autocast().region != autocast(promotion="weak").region


def test_low_stays_low():
    assert dtype_of(lambda w, x, a: lower(a) * upper(x @ w), W, X, ACC, promotion="weak") == (
        "float32"
    )
