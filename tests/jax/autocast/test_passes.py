"""The passes of the JAX backend: each pays, and none costs digits.

    bias_fold   for residual memory: a parameter added to a product's result takes its dtype
    sharing     for casts: a computed value is cast once for all who read it low
    pull_up     for roundings: what float32 ops alone read is computed in float32

On small programs made for each, on a transformer, and on the corpus, where no count of a pass may
be worse with it than without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polymp.backends.jax.autocast import op_handlers
from polymp.backends.jax.autocast.frame import Cast, Frame
from polymp.backends.jax.autocast.planner import _CastPuller
from polymp.jax import autocast
from tests.support.jax import hlo, transformer
from tests.support.jax.corpus import corpus
from tests.support.jax.corpus_runs import problem
from tests.support.jax.walker import equations
from tests.support.sizes import LONG, size

FLOATS = ("float32", "bfloat16", "float16")
LOW = ("bfloat16", "float16")
CALLS = ("jit", "checkpoint", "custom_jvp_call", "custom_vjp_call", "scan")
MOVES = set(
    "broadcast_in_dim concatenate convert_element_type copy dynamic_slice gather pad reshape rev "
    "select_n slice squeeze stack transpose".split()
)


def casts(jaxpr: Any) -> int:
    """The casts from one float dtype to another."""
    found = [s for s in equations(jaxpr) if s.op == "convert_element_type"]
    pairs = [(*s.operands, *s.results) for s in found]
    return sum(old != new and old in FLOATS and new in FLOATS for old, new in pairs)


def roundings(jaxpr: Any) -> int:
    """The low results that are computed, and not only moved."""
    found = [s for s in equations(jaxpr) if s.op not in {*MOVES, *CALLS}]
    return sum(f in LOW for s in found for f in s.results)


def forward(fn: Any, *args: Any) -> Any:
    return jax.make_jaxpr(fn)(*args).jaxpr


def backward(fn: Any, *args: Any) -> Any:
    def total(*args: Any) -> Any:
        return sum(x.astype("float32").sum() for x in jax.tree.leaves(fn(*args)))

    return jax.make_jaxpr(jax.grad(total, argnums=tuple(range(len(args)))))(*args).jaxpr


def memory(fn: Any, *args: Any) -> int:
    return hlo.residual_bytes(lambda args: fn(*args), args)


def casts_alone(self: Frame, atom: Any, dtype: str | None, read: Any = Frame.read) -> Any:
    operand = read(self, atom, dtype)
    return operand._replace(shared=False) if type(operand) is Cast else operand


# What each pass is without, by its name.
OFF: dict[str, list[tuple[Any, str, Any]]] = {
    "bias_fold": [(op_handlers, "_is_bias", lambda hard: False)],
    "sharing": [(Frame, "read", casts_alone)],
    "pull_up": [
        (_CastPuller, "widens", lambda self, step: False),
        (_CastPuller, "through", lambda self, step, inside: step),
    ],
}


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Plan what is traced meanwhile without some passes."""
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            for where, attribute, off in OFF[name]:
                patch.setattr(where, attribute, off)
        jax.clear_caches()
        yield
    jax.clear_caches()


# Small programs

W, V, X = jnp.ones((8, 8)) / 8, jnp.ones((8,)), jnp.linspace(-1, 1, 32).reshape(4, 8)


def biases(w: Any, v: Any, x: Any) -> Any:
    for _ in range(2):
        x = jnp.tanh(x @ w + v)
    return x


def three_readers(w: Any, v: Any, x: Any) -> Any:
    h = jnp.exp(x)
    return h @ w + h @ (2 * w) + h @ (3 * w)


def squares(w: Any, v: Any, x: Any) -> Any:
    y = x @ w
    return (y * y * y).sum()


# A pass, its program, how it is traced, and the counts with the pass and without it.
PAYS = [
    ("bias_fold", biases, memory, lambda w, o: w <= 0.7 * o),
    ("sharing", three_readers, lambda *a: casts(forward(*a)), lambda w, o: w == o - 2),
    ("sharing", three_readers, memory, lambda w, o: w < o),
    ("pull_up", squares, lambda *a: roundings(forward(*a)), lambda w, o: (w, o) == (1, 3)),
]


@pytest.mark.parametrize(
    ("name", "fn", "count", "paid"),
    PAYS,
    ids=[f"{p}-{fn.__name__}-{i}" for i, (p, fn, *_) in enumerate(PAYS)],
)
def test_a_pass_pays(name, fn, count, paid):
    made = autocast(fn)
    with_it = count(made, W, V, X)
    with without(name):
        without_it = count(made, W, V, X)
    assert paid(with_it, without_it), (with_it, without_it)
    assert count(made, W, V, X) == with_it


# Jitted functions of jax.numpy and jax.nn that compute element by element, and one of the user's.
HELPERS: dict[str, Callable[[Any], Any]] = {
    "clip": lambda p: jnp.clip(p, 1e-7, 1 - 1e-7),
    "where": lambda p: jnp.where(p > 0.5, p, 0.5),
    "nan_to_num": jnp.nan_to_num,
    "remainder": lambda p: p % 2,
    "leaky_relu": jax.nn.leaky_relu,
    "silu": jax.nn.silu,
    "two": lambda p: jnp.clip(jnp.where(p > 0.5, p, 0.5), 1e-7, 1 - 1e-7),
    "nested": jax.jit(lambda p: 2 * jnp.clip(p, 1e-7, 1 - 1e-7)),
}


@pytest.mark.parametrize("name", HELPERS)
def test_jitted_helpers_are_looked_through(name):
    """Its operand is made in float32, as if the helper's equations stood in its place."""

    def loss(w: Any, x: Any) -> Any:
        return jnp.log(HELPERS[name](jax.nn.sigmoid(x @ w)))

    found = equations(jax.make_jaxpr(autocast(loss))(jnp.ones((4, 2)), jnp.ones((3, 4))))
    assert next(s.results for s in found if s.op == "logistic") == ("float32",)


CLIPPED: dict[str, Callable[[Any, float], Any]] = {
    "log1p": lambda p, eps: jnp.log1p(-jnp.clip(jax.nn.sigmoid(p), eps, 1 - eps)),
    "log": lambda p, eps: jnp.log(1 - jnp.clip(jax.nn.sigmoid(p), eps, 1 - eps)),
    "minimum": lambda p, eps: jnp.log(1 - jnp.minimum(jax.nn.sigmoid(p), 1 - eps)),
    "where": lambda p, eps: jnp.log1p(-jnp.where(p > 5, 1 - eps, jax.nn.sigmoid(p))),
    "acos": lambda p, eps: jnp.arccos(jnp.clip(p / 8, eps - 1, 1 - eps)),
    "atanh": lambda p, eps: jnp.arctanh(jnp.clip(p / 8, eps - 1, 1 - eps)),
    "an argument": jax.jit(lambda p, eps: jnp.arccos(jnp.clip(p / 8, -(1 - eps), 1 - eps))),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", CLIPPED)
def test_a_bound_next_to_1_stays_below_1(name, low):
    def loss(w: Any, x: Any) -> Any:
        return CLIPPED[name](x @ w, 1e-6).sum()

    w, x = jnp.ones((4, 1)), jnp.array([[2.0, 2, 2, 2], [-2, -2, -2, -2], [0.1, 0.2, 0.3, 0.1]])
    value, grad = jax.value_and_grad(autocast(loss, dtype=low))(w, x)
    exact, true = jax.value_and_grad(loss)(w, x)
    np.testing.assert_allclose(value, exact, rtol=0.02)
    np.testing.assert_allclose(grad, true, rtol=0.02, atol=1e-3)


def test_pull_up_keeps_what_a_low_square_would_lose():
    """The squares overflow in float16 and their sum is infinite, unless they are float32."""
    made, x = autocast(squares, dtype=jnp.float16), X * 200
    assert jnp.isfinite(made(W, V, x))
    with without("pull_up"):
        assert not jnp.isfinite(made(W, V, x))


# A transformer

SIZE = transformer.SMALL
LOSSES = {
    "by hand": partial(transformer.loss, heads=SIZE.heads, compute=jnp.bfloat16),
    "autocast": autocast(partial(transformer.loss, heads=SIZE.heads)),
}


def test_the_transformer_has_fewer_casts_than_by_hand():
    params, batch = transformer.parameters(SIZE), transformer.tokens(SIZE)
    for of in (lambda loss: loss, transformer.train_step):
        found = {name: casts(forward(of(loss), params, batch)) for name, loss in LOSSES.items()}
        assert found["autocast"] <= 0.65 * found["by hand"]


# The corpus


def casts_of_gradient(it: Any) -> int:
    with jax.enable_x64(it.program.x64):
        return casts(jax.make_jaxpr(it.graded(autocast(it.fn)))(*it.inputs()).jaxpr)


def roundings_forward(it: Any) -> int:
    with jax.enable_x64(it.program.x64):
        return roundings(forward(autocast(it.fn), *it.args))


FOR = {"sharing": casts_of_gradient, "pull_up": roundings_forward}


@pytest.mark.sized
def test_no_program_of_the_corpus_is_worse_with_a_pass():
    better = dict.fromkeys(FOR, 0)
    plain = [entry.name for entry in corpus() if entry.needs == "jax"]  # for time
    for program in plain[:: size(8, 1)]:
        it = problem(program)
        ours = {count: count(it) for count in FOR.values()}
        for name, count in FOR.items():
            with without(name):
                less = count(it)
            assert ours[count] <= less, f"{program}, with and without {name}"
            better[name] += ours[count] < less
    assert all(count >= 5 for count in better.values()) if LONG else any(better.values())
