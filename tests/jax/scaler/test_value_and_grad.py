"""`GradScaler.value_and_grad`: what `jax.value_and_grad` gives, scaled on the way and checked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polymp.jax import GradScaler, autocast
from tests.support.jax.scaler_tools import bits, numbers

W = jnp.asarray([1.5, -2.0, 0.25])
X = jnp.asarray([2.0, 0.5, -4.0])


def loss_fn(w: Any, x: Any = X) -> Any:
    return ((w * x) ** 2).sum()


def with_aux(w: Any, x: Any = X) -> Any:
    return loss_fn(w, x), {"seen": w * x, "n": 3}


WAYS = {
    "eager": lambda run: run,
    "jit": jax.jit,
    "scan": lambda run: (
        lambda s, *a: jax.tree.map(
            lambda x: x[0], jax.lax.scan(lambda c, _: (c, run(s, *a)), 0, None, length=1)[1]
        )
    ),
    "vmap": lambda run: (
        lambda *a: jax.tree.map(
            lambda x: x[0], jax.vmap(run)(*jax.tree.map(lambda x: jnp.asarray(x)[None], a))
        )
    ),
}


@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_value_and_gradients_are_those_of_jax(way, has_aux):
    """The scale is a power of two and nothing here is subnormal: so bit for bit."""
    fun = with_aux if has_aux else loss_fn

    def run(scaler: GradScaler, w: Any, x: Any) -> Any:
        return scaler.value_and_grad(fun, has_aux=has_aux)(w, x)

    run, plain = (
        WAYS[way](run),
        WAYS[way](lambda s, w, x: jax.value_and_grad(fun, 0, has_aux)(w, x)),
    )
    (value, grads), after, finite = run(GradScaler(growth_interval=1), W, X)
    expected, true = plain(GradScaler(), W, X)
    assert bits((value, grads)) == bits((expected, true))
    assert finite
    assert numbers(after.state) == (2.0**17, 0, 0, 0, 0)


def hand_written(scaler: GradScaler, w: Any, x: Any) -> Any:
    """The same from the scaler's own verbs."""

    def scaled_loss(w: Any) -> Any:
        loss = loss_fn(w, x)
        return scaler.scale(loss), loss

    grads, loss = jax.grad(scaled_loss, has_aux=True)(w)
    true, finite = scaler.unscale(grads)
    loss_finite = scaler.loss_finite(loss)
    return (loss, true), scaler.update(finite, loss_finite=loss_finite), finite


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("x", "scale", "counts"),
    [
        ([1.0, 1.0, 1.0], 24.0, (0, 0, 0, 0)),  # factors that are not powers of two
        ([1e18, 1.0, 1.0], 6.0, (0, 1, 0, 1)),  # the gradient overflows scaled, the loss does not
        ([np.nan, 1.0, 1.0], 6.0, (0, 1, 1, 1)),
        ([1e30, 1.0, 1.0], 6.0, (0, 1, 1, 1)),  # the loss is Inf
    ],
)
def test_it_is_a_loop_by_hand_bit_for_bit(way, x, scale, counts):
    rule = {"growth_interval": 1}
    start = GradScaler(12.0, **rule)
    if x[0] == 1e18:
        start = GradScaler(2.0**10, **rule)
        scale = 2.0**9
    run = WAYS[way](lambda s, w, x: s.value_and_grad(loss_fn)(w, x))
    by_hand = WAYS[way](hand_written)
    seen, expected = (f(start, W, jnp.asarray(x)) for f in (run, by_hand))
    assert bits(seen) == bits(expected)
    assert bool(seen[2]) is (counts[-1] == 0)
    assert numbers(seen[1].state) == (scale, *counts)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_loss_keeps_its_dtype_and_gradients_are_float32_or_wider(dtype):
    with jax.enable_x64(True):
        w = jnp.asarray([1.0, 2.0], dtype)
        run = jax.jit(lambda s, w: s.value_and_grad(lambda w: (w * w).sum())(w))
        (loss, grads), _, finite = run(GradScaler(2.0**10), w)
        assert (loss.dtype, float(loss)) == (dtype, 5.0)
        assert grads.dtype == ("float64" if dtype == "float64" else "float32")
        assert (grads.tolist(), bool(finite)) == ([2.0, 4.0], True)


def test_complex_parameters():
    z = jnp.asarray([1 + 2j, -3j])
    (loss, grads), _, finite = GradScaler().value_and_grad(lambda z: (z * z.conj()).real.sum())(z)
    assert (float(loss), bool(finite)) == (14.0, True)
    assert np.array_equal(grads, jax.grad(lambda z: (z * z.conj()).real.sum())(z))


def test_argnums_keywords_and_integers():
    def fun(a: Any, b: Any, *, c: Any) -> Any:
        return a["w"] * b * c, c

    args, rest = ({"w": 2.0}, 3.0), {"c": 5.0}
    for argnums in (0, 1, (0, 1), (1, 0)):
        ours, _, _ = GradScaler().value_and_grad(fun, argnums, True)(*args, **rest)
        theirs = jax.value_and_grad(fun, argnums, True)(*args, **rest)
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        assert jax.tree.map(float, ours) == jax.tree.map(float, theirs)
    whole = GradScaler().value_and_grad(lambda n, w: n * w, (0, 1), allow_int=True)
    (_, (none, grad)), _, finite = whole(3, 2.0)
    assert (none.dtype, float(grad), bool(finite)) == (jax.dtypes.float0, 3.0, True)


def test_disabled_it_is_jaxs_own():
    scaler = GradScaler(enabled=False)
    w = W.astype(jnp.float16).at[0].set(jnp.inf)
    (loss, grads), after, finite = jax.jit(lambda s, w: s.value_and_grad(loss_fn)(w))(scaler, w)
    expected = jax.jit(jax.value_and_grad(loss_fn))(w)
    assert bits((loss, grads)) == bits(expected)
    assert (after.enabled, bool(finite)) == (False, True)


def test_an_autocast_loss_backs_off_until_its_gradients_fit():
    low = autocast(lambda w, x: ((x @ w) ** 2).mean() * 2.0**-10, dtype=jnp.float16)
    x, w = jnp.eye(4) * 3, jnp.asarray([[1.0], [2.0], [-1.0], [0.5]])
    plain = jax.grad(lambda w: ((x @ w) ** 2).mean() * 2.0**-10)(w)
    step = jax.jit(lambda s, w: s.value_and_grad(low)(w, x))
    scaler, skipped = GradScaler(2.0**40), 0
    for _ in range(40):
        (loss, grads), scaler, finite = step(scaler, w)
        assert jnp.isfinite(loss)
        skipped += not bool(finite)
    assert 10 < skipped < 40
    assert skipped == int(scaler.state.skipped)
    assert np.allclose(grads, plain, rtol=2e-3)


SCALAR = "Reduce it to one, by .mean() for instance."
HINT = f"{SCALAR} Or pass has_aux=True, if it returns (loss, aux)."
NEEDS = "the function given to value_and_grad must return a loss that is one float, got "


@pytest.mark.parametrize(
    ("fun", "has_aux", "message"),
    [
        (lambda w: w, False, f"{NEEDS}float32[3]. {HINT}"),
        (lambda w: 3, False, f"{NEEDS}int32[]. {HINT}"),
        (lambda w: True, False, f"{NEEDS}bool[]. {HINT}"),
        (lambda w: w[0] + 0j, False, f"{NEEDS}complex64[]. {HINT}"),
        (lambda w: None, False, f"{NEEDS}<class 'NoneType'>. {HINT}"),
        (lambda w: (w.sum(), 1), False, f"{NEEDS}<class 'tuple'>. {HINT}"),
        (lambda w: (w, 1), True, f"{NEEDS}float32[3]. {SCALAR}"),
        (
            lambda w: w.sum(),
            True,
            "with has_aux=True, the function given to value_and_grad must return (loss, aux), got "
            "float32[].",
        ),
    ],
)
@pytest.mark.parametrize("enabled", [True, False])
def test_a_function_that_returns_no_loss(fun, has_aux, message, enabled):
    run = GradScaler(enabled=enabled).value_and_grad(fun, has_aux=has_aux)
    for call in (run, jax.jit(run)):
        with pytest.raises(TypeError) as raised:
            call(W)
        assert raised.value.args[0] == message


def test_what_is_no_function_is_refused_at_once():
    with pytest.raises(TypeError) as raised:
        GradScaler().value_and_grad(3.0)  # type: ignore[arg-type]
    expected = "value_and_grad needs the function that computes the loss, got 3.0."
    assert raised.value.args[0] == expected
    with pytest.raises(TypeError, match=r"^argnums must be an int or several of them, got 'w'\.$"):
        GradScaler().value_and_grad(loss_fn, "w")  # type: ignore[arg-type]
