"""Casts of parameters are not merged: gradients are as exact however often a weight is used.

One low copy of a weight that is used 64 times, or in 256 turns of a loop, would hand on cotangents
that were added up in the low dtype. Both are planted here, and noticed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from polymp.backends.jax.autocast.frame import Cast, Frame, Known
from polymp.jax import autocast
from tests.support.jax.corpus_runs import QUICK


def error_of_uses(count: int) -> float:
    """How far the gradient is of a weight that is used many times, each time on its own rows."""
    keys = jax.random.split(jax.random.key(1))
    w = jax.random.normal(keys[0], (16, 16)) / 4
    xs = jax.random.normal(keys[1], (count, 8, 16))

    def fn(w: Any) -> Any:
        return sum(((x @ w) ** 2).sum() for x in xs)

    rows = np.asarray(xs, np.float64).reshape(-1, 16)
    return distance(jax.grad(autocast(fn))(w), 2 * rows.T @ rows @ np.asarray(w, np.float64))


def distance(one: Any, other: Any) -> float:
    """Relative, in 2-norm."""
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def error_of_rnn(length: int, before: Any = lambda w: w) -> float:
    """The same of a weight in a loop, which `before` may change before the loop."""
    keys = jax.random.split(jax.random.key(3))
    w = jax.random.normal(keys[0], (24, 24)) * 0.9 / 24**0.5
    xs = jax.random.normal(keys[1], (length, 4, 24))

    def fn(w: Any) -> Any:
        def turn(h: Any, x: Any) -> Any:
            h = jnp.tanh(h @ w + x)
            return h, h

        return (lax.scan(turn, jnp.zeros_like(xs[0]), xs)[1] ** 2).mean()

    quick = partial(jax.jit, compiler_options=QUICK)
    ours = quick(jax.grad(autocast(lambda w: fn(before(w)))))(w)
    return distance(ours, quick(jax.grad(fn))(w))


def merge_all_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One low copy of a parameter for all that read it."""
    real = Frame.read

    def read(self: Any, atom: Any, dtype: str | None) -> Any:
        operand = real(self, atom, dtype)
        return operand._replace(shared=True) if type(operand) is Cast else operand

    monkeypatch.setattr(Frame, "read", read)
    monkeypatch.setattr(Known, "is_parameter", False)


def test_the_gradient_of_a_weight_used_often_is_as_exact(monkeypatch):
    few, often = map(error_of_uses, (4, 64))
    assert 1e-4 < few
    assert often < 1.3 * few
    merge_all_casts(monkeypatch)
    assert error_of_uses(64) > 2 * often, "merged casts are not noticed"


def test_the_gradient_of_a_weight_in_a_loop_is_as_exact():
    """Short and long; a copy cast by hand before the loop is what must not come of it."""
    short, long = map(error_of_rnn, (16, 256))
    assert 1e-4 < short
    assert long < 1.3 * short
    assert error_of_rnn(256, lambda w: w.astype("bfloat16")) > 2 * long
