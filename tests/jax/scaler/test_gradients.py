"""`GradScaler` for JAX multiplies a loss and divides gradients, and finds every Inf and NaN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymp.jax import GradScaler
from polymp.scaling.scale_rule import LARGEST, SMALLEST
from tests.conftest import need

FLOATS = ("float16", "bfloat16", "float32", "float8_e5m2", "complex64")
WIDE = {"float64": "float64", "complex64": "complex64", "complex128": "complex128"}


@pytest.mark.parametrize("dtype", FLOATS)
def test_scale_and_unscale_are_in_float32_or_wider(dtype):
    scaler = GradScaler(2.0**20)
    x = jnp.asarray([1.5, -0.25, 0.0], jnp.float32).astype(dtype)
    if dtype == "complex64":
        x = x * (1 - 2j)
    scaled = scaler.scale({"a": [x]})["a"][0]
    wide = "complex64" if dtype == "complex64" else "float32"
    assert scaled.dtype == wide  # 1.5 * 2**20 is too large for float16
    assert np.array_equal(scaled, np.asarray(x).astype(wide) * 2**20)
    back, finite = scaler.unscale({"a": [scaled]})
    assert np.array_equal(back["a"][0], np.asarray(x).astype(wide))
    assert back["a"][0].dtype == wide
    assert finite


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [*FLOATS, "float64", "complex128"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradients_of_every_dtype(wrap, dtype):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        x = jnp.asarray([12.0, -3.0, 0.0], jnp.float64).astype(dtype)
        if "complex" in dtype:
            x = jax.lax.complex(x.real, x.real[::-1])
        unscale = wrap(lambda scaler, grads: scaler.unscale(grads))
        (back,), finite = unscale(GradScaler(4.0), [x])
        assert back.dtype == WIDE.get(dtype, "float32")
        assert np.array_equal(back, np.asarray(x).astype(back.dtype) / 4)
        assert finite
        for bad in (np.inf, np.nan):
            _, finite = unscale(GradScaler(4.0), [x, x.at[1].set(bad)])
            assert not finite


def test_doubles_stay_doubles():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        scaler = GradScaler(3.0)
        x = jnp.asarray([0.1, 1e300])
        z = jax.lax.complex(x, x)
        kinds = [jnp.float32, *[jnp.int32] * 4]
        assert [s.dtype for s in jax.tree.leaves(scaler)] == kinds
        (back, complex_back), finite = scaler.unscale([x, z])
        assert (back.dtype, complex_back.dtype) == (jnp.float64, jnp.complex128)
        assert np.array_equal(back, np.asarray(x) * (1 / 3))
        assert np.array_equal(complex_back.imag, np.asarray(x) * (1 / 3))
        assert finite
        assert scaler.scale(x).dtype == jnp.float64
        after = jax.jit(scaler.update)(False)
        assert [s.dtype for s in jax.tree.leaves(after)] == kinds


@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (0,)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_low_loss_of_any_shape_does_not_overflow_at_the_first_scale(wrap, dtype, shape):
    loss = jnp.full(shape, 60000.0, dtype)
    scaled = wrap(lambda scaler, loss: scaler.scale(loss))(GradScaler(), loss)
    assert (scaled.dtype, scaled.shape) == (jnp.float32, shape)
    assert np.array_equal(scaled, np.asarray(loss).astype(np.float32) * 2.0**16)


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
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
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


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_largest_scale_loses_nothing(wrap):
    """Its inverse is the smallest normal number."""
    unscale = wrap(lambda scaler, grads: scaler.unscale(grads))
    true, finite = unscale(GradScaler(LARGEST), jnp.asarray([LARGEST, 2.0**100, -1.0]))
    assert true.tolist() == [1.0, 2.0**-26, -SMALLEST]
    assert finite


def test_what_is_not_a_float_passes():
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
    true, finite = scaler.unscale(tree)
    assert true is tree
    assert finite.dtype == jnp.bool_
    assert finite
    assert scaler.update(False) is scaler
    new, after, finite = jax.jit(lambda s, g: s.step(g, lambda g, w: w - g, jnp.zeros(1, g.dtype)))(
        scaler, tree["w"]
    )
    assert (new.tolist(), bool(finite), after.enabled) == ([-np.inf], True, False)
    assert (scaler.state_dict(), scaler.load_state_dict({})) == ({}, scaler)
