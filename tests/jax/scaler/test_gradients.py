"""`GradScaler` for JAX multiplies a loss and divides gradients, and finds every Inf and NaN.

`GradScaler.value_and_grad` does so with what `jax.value_and_grad` gives.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymp.jax import GradScaler
from polymp.scaling import SMALLEST
from tests.conftest import need
from tests.support.jax.scaler_tools import KINDS, bits, kinds, numbers

FLOATS = ("float16", "bfloat16", "float32", "float8_e5m2", "complex64")
WIDE = {"float64": "float64", "complex64": "complex64", "complex128": "complex128"}


EAGER_OR_JIT = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])


@EAGER_OR_JIT
@pytest.mark.parametrize("factor", [2.0**20, 3.0])  # beyond float16, and whose inverse is rounded
@pytest.mark.parametrize("dtype", [*FLOATS, "float64", "complex128"])
def test_scale_and_unscale_are_in_float32_or_wider(wrap, dtype, factor):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        x = jnp.asarray([12.0, -0.1, 0.0], jnp.float64).astype(dtype)
        if "complex" in dtype:
            x = jax.lax.complex(x.real, x.real[::-1])
        scaler = GradScaler(factor)
        scale = wrap(lambda scaler, tree: scaler.scale(tree))
        unscale = wrap(lambda scaler, grads: scaler.unscale(grads))
        scaled, (back, finite) = scale(scaler, {"a": [x]}), unscale(scaler, {"a": [x]})
        assert finite
        for (found,), wanted in ((scaled["a"], factor), (back["a"], 1 / factor)):
            assert found.dtype == WIDE.get(dtype, "float32")
            assert np.array_equal(found, np.asarray(x).astype(found.dtype) * wanted)
        for bad in (np.inf, np.nan):
            assert not unscale(scaler, {"a": [x, x.at[1].set(bad)]})[1]
        assert kinds(scaler) == kinds(jax.jit(scaler.update)(False)) == KINDS


@given(
    exponent=st.integers(-30, 125),
    mantissa=st.integers(0, 2**23 - 1),
    grads=st.lists(st.floats(-1e6, 1e6, width=32, allow_subnormal=False), min_size=8, max_size=8),
)
def test_quotients_are_torchs_bit_for_bit(exponent, mantissa, grads):
    need("torch")
    import torch

    scale = (1 + mantissa / 2**23) * 2.0**exponent
    weight = torch.zeros(8, requires_grad=True)
    weight.grad = torch.tensor(grads)
    theirs = torch.amp.GradScaler("cpu", init_scale=scale)
    theirs.scale(torch.ones(()))
    theirs.unscale_(torch.optim.SGD([weight]))
    expected = weight.grad.numpy()
    expected = np.where(np.abs(expected) < np.finfo(np.float32).tiny, 0, expected)  # flushed
    assert np.array_equal(UNSCALE(GradScaler(scale), jnp.asarray(grads))[0], expected)


UNSCALE = jax.jit(lambda scaler, grads: scaler.unscale(grads))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("size", [1, 100, 4096, 10_001])
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_inf_or_nan_anywhere_is_found(dtype, size):
    unscale = jax.jit(lambda s, g: s.unscale(g)[1])
    scaler, fine = GradScaler(), {"b": jnp.ones(3), "empty": jnp.ones((0, 2))}
    clean = np.linspace(-1, 1, size).astype(jnp.dtype(dtype))
    assert unscale(scaler, fine | {"a": jnp.asarray(clean)})
    for bad in (np.inf, -np.inf, np.nan) + (
        (1j * np.nan, complex(0, np.inf)) if dtype == "complex64" else ()
    ):
        for position in {0, size // 3, size - 1}:
            grad = clean.copy()
            grad[position] = bad
            assert not unscale(scaler, fine | {"a": jnp.asarray(grad)}), (bad, position)


def test_gradients_whose_sum_overflows_are_finite():
    grads = jnp.full(100, np.finfo(np.float32).max)
    assert jnp.isinf(grads.sum())  # the sum alone would skip the step
    assert GradScaler().unscale(grads)[1]
    assert not GradScaler().unscale(grads.at[50].set(np.nan))[1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@EAGER_OR_JIT
def test_what_is_finite_scaled_and_not_unscaled_is_found(wrap, dtype):
    """A scale below 1 makes gradients larger: the quotients are what is looked at."""
    unscale = wrap(lambda scaler, grads: scaler.unscale(grads))
    step = wrap(lambda s, g, w: s.step(g, lambda g, w: w - g, w))
    small = GradScaler(SMALLEST)
    edge = jnp.asarray([1.0, 4.0], dtype)  # times 2**126: 2**126, and 2**128
    true, finite = unscale(small, edge)
    assert true.tolist() == [2.0**126, np.inf]
    assert not finite
    true, finite = unscale(small, edge[:1])
    assert (true.tolist(), bool(finite)) == ([2.0**126], True)
    new, after, finite = step(small, edge, jnp.ones(2))
    assert (new.tolist(), bool(finite), int(after.state.skipped)) == ([1.0, 1.0], False, 1)


@pytest.mark.parametrize("given", [3, True, np.int32(3), jnp.arange(3), "loss", abs], ids=str)
def test_a_loss_that_is_no_float_is_refused(given):
    with pytest.raises(TypeError, match=r"^scale takes the loss, .* returns a float\.$") as raised:
        GradScaler().scale(given)
    assert f", got {given!r}. Write jax.grad(" in str(raised.value)


def test_what_is_no_float_in_a_pytree_passes():
    integers = jnp.arange(3)
    nothing = jax.grad(lambda n: 1.0, allow_int=True)(3)
    key = jax.random.key(0)
    tree = {"n": integers, "float0": nothing, "none": None, "key": key, "b": True, "text": "w"}
    scaler = GradScaler()
    assert nothing.dtype == jax.dtypes.float0
    for out in (scaler.scale(tree), scaler.unscale(tree)[0]):
        assert jax.tree.structure(out) == jax.tree.structure(tree)
        assert all(out[name] is tree[name] for name in tree)
    assert scaler.unscale(tree)[1]
    assert scaler.unscale({})[1]
    assert scaler.scale(2.0) == 2.0**17
    assert scaler.scale(np.float16(2.0)).dtype == jnp.float32


def test_disabled_passes_everything_through():
    scaler = GradScaler(enabled=False)
    tree = {"w": jnp.asarray([jnp.inf], jnp.float16)}
    assert scaler.scale(tree) is tree
    assert scaler.update(False) is scaler
    true, finite = scaler.unscale(tree)
    assert true is tree
    assert (finite.dtype, bool(finite)) == (jnp.bool_, True)
    new, after, finite = jax.jit(lambda s, g: s.step(g, lambda g, w: w - g, jnp.zeros(1, g.dtype)))(
        scaler, tree["w"]
    )
    assert (new.tolist(), bool(finite), after.enabled) == ([-np.inf], True, False)
    assert scaler.load_state_dict({}) is scaler


# --- `GradScaler.value_and_grad` ------------------------------------------------------------------

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

    run = WAYS[way](lambda s, w, x: s.value_and_grad(fun, has_aux=has_aux)(w, x))
    plain = WAYS[way](lambda s, w, x: jax.value_and_grad(fun, 0, has_aux)(w, x))
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
    return (loss, true), scaler.update(finite, loss_finite=jnp.isfinite(loss)), finite


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("x", "scale", "counts"),
    [
        ([1.0, 1.0, 1.0], 24.0, (0, 0, 0, 0)),  # factors that are not powers of two
        ([1e18, 1.0, 1.0], 2.0**9, (0, 1, 0, 1)),  # the scaled gradient overflows alone
        ([np.nan, 1.0, 1.0], 6.0, (0, 1, 1, 1)),
        ([1e30, 1.0, 1.0], 6.0, (0, 1, 1, 1)),  # the loss is Inf
    ],
)
def test_it_is_a_loop_by_hand_bit_for_bit(way, x, scale, counts):
    start = GradScaler(2 * scale if counts[-1] else scale / 2, growth_interval=1)
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


@pytest.mark.parametrize(
    ("fun", "has_aux"),
    [
        (lambda w: w, False),
        (lambda w: 3, False),
        (lambda w: w[0] + 0j, False),
        (lambda w: (w.sum(), 1), False),
        (lambda w: (w, 1), True),
        (lambda w: w.sum(), True),
        (lambda w: w[:2], True),
        (lambda w: (w.sum(), 1, 2), True),
    ],
)
@pytest.mark.parametrize("enabled", [True, False])
def test_a_function_that_returns_no_loss_raises_as_with_jax(fun, has_aux, enabled):
    run = GradScaler(enabled=enabled).value_and_grad(fun, has_aux=has_aux)
    for call in (run, jax.jit(run)):
        with pytest.raises(TypeError):
            call(W)
