"""Every transformation that JAX has, around an autocast function and inside one.

Each row is a program that runs without autocast too; with it, it comes as close as bfloat16 does.
What cannot work says so, in jax's own words.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_batching import custom_vmap, sequential_vmap
from jax.experimental import checkify, jet, roofline, sparse
from jax.experimental.ode import odeint

from polymp.jax import autocast

X = jnp.linspace(0.5, 1, 16).reshape(4, 4)
W = X.T * 0.3
PLACES = np.argwhere(np.asarray(X) > 0.7)  # `fromdense` compiles forty programs
SPARSE = sparse.BCOO(
    (jnp.asarray(np.asarray(X)[tuple(PLACES.T)]), jnp.asarray(PLACES)), shape=(4, 4)
)
Wrap = Callable[[Any], Any]


def net(x, w=W):
    return jnp.tanh(x @ w) @ w


def images(x, w=W):
    x, w = x.reshape(1, 1, 4, 4), w.reshape(1, 1, 4, 4)
    return jax.lax.conv(jnp.tanh(x), w, (1, 1), "SAME")


def sparse_net(s):
    return (s @ W) @ W


@custom_vmap
def batched(x, w):
    return x @ w


@batched.def_vmap
def of_batches(size, in_batched, x, w):
    return jnp.einsum("bij,jk->bik", x, w), True


@sequential_vmap
def one_by_one(x):
    return x @ W


def checked(x):
    checkify.check(x.sum() > 100, "too small: {}", x.sum())
    return net(x)


def taylor(fn, order=3):
    return jet.jet(fn, (X,), ([X, *[jnp.ones_like(X)] * (order - 1)],))


def raised(fn, **options):
    error, _ = checkify.checkify(fn, **options)(X)
    return error.get()


class Row(NamedTuple):
    """A program; `low` is False where all of it runs as written."""

    run: Callable[[Wrap], Any]
    low: bool = True


ROWS = {
    "jet": Row(lambda wrap: taylor(wrap(net))),
    "jet of a convolution": Row(lambda wrap: taylor(wrap(images))),
    "jet of two operands that move": Row(lambda wrap: taylor(wrap(lambda x: x @ (x @ W)))),
    "autocast of jet": Row(lambda wrap: wrap(lambda: taylor(net))()),
    "autocast of sparsify": Row(lambda wrap: wrap(sparse.sparsify(sparse_net))(SPARSE)),
    "sparse arguments": Row(lambda wrap: wrap(sparse_net)(SPARSE)),
    "checkify": Row(lambda wrap: checkify.checkify(wrap(net))(X)[1]),
    "checkify, all checks": Row(
        lambda wrap: checkify.checkify(wrap(net), errors=checkify.all_checks)(X)[1]
    ),
    "autocast of checkify": Row(lambda wrap: wrap(lambda x: checkify.checkify(checked)(x)[1])(X)),
    "custom_vmap": Row(lambda wrap: wrap(lambda x: batched(jnp.tanh(x), W))(X), low=False),
    "vmap of custom_vmap": Row(
        lambda wrap: jax.vmap(wrap(lambda x: batched(x, W) @ W))(jnp.stack([X, 2 * X]))
    ),
    "autocast of vmap of custom_vmap": Row(
        lambda wrap: wrap(jax.vmap(lambda x: batched(x, W)))(jnp.stack([X, 2 * X]))
    ),
    "sequential_vmap": Row(
        lambda wrap: jax.vmap(wrap(lambda x: one_by_one(x @ W)))(jnp.stack([X, 2 * X]))
    ),
    "linear_transpose": Row(
        lambda wrap: jax.linear_transpose(
            lambda x: wrap(lambda x: x @ W)(x).astype(jnp.float32), X
        )(X)[0]
    ),
    "jacfwd": Row(lambda wrap: jax.jacfwd(wrap(net))(X)),
    "jacrev": Row(lambda wrap: jax.jacrev(wrap(net))(X)),
    "hessian": Row(lambda wrap: jax.hessian(lambda x: wrap(net)(x).sum().astype(jnp.float32))(X)),
    "export": Row(lambda wrap: jax.export.export(jax.jit(wrap(net)))(X).call(X)),
    "pmap": Row(lambda wrap: jax.pmap(wrap(net))(X[None])),
    "closure_convert": Row(lambda wrap: jax.closure_convert(wrap(net), X)[0](X)),
    "named_call": Row(lambda wrap: jax.named_call(wrap(net))(X)),
    "odeint": Row(
        lambda wrap: jax.grad(
            wrap(lambda w: odeint(lambda y, t, w: y @ w, X, jnp.array([0.0, 1]), w).sum())
        )(W),
        low=False,
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ROWS)
def test_a_transformation_of_jax(name):
    row = ROWS[name]
    want, got = (jax.jit(partial(row.run, wrap))() for wrap in (lambda fn: fn, autocast))
    pairs = list(zip(*map(jax.tree.leaves, (got, want)), strict=True))
    for a, b in pairs:
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert a.shape == b.shape
        assert np.abs(a - b).max() <= 0.03 * np.abs(b).max()
    same = all(np.array_equal(np.float32(a), np.float32(b)) for a, b in pairs)
    assert same != row.low


def test_sparsify_goes_inside():
    """Outside it meets polymp's own primitive, and says so in jax's words."""
    with pytest.raises(NotImplementedError, match="sparse rule for polymp_contraction"):
        sparse.sparsify(autocast(sparse_net))(SPARSE)


def test_what_is_checked_is_found_in_a_region():
    assert "too small" in raised(autocast(checked))
    assert "too small" in raised(lambda x: autocast(checked)(x))
    endless = jnp.full((4, 4), jnp.inf).at[0].set(-jnp.inf)
    for wrap in (lambda fn: fn, autocast):
        found = raised(wrap(lambda x: x @ endless), errors=checkify.nan_checks)
        assert "nan generated by primitive" in found


def test_roofline_counts_a_contraction_as_the_product_it_stands_for():
    spec = jax.ShapeDtypeStruct(X.shape, X.dtype)
    _, plain = roofline.roofline(net)(spec)
    _, low = roofline.roofline(autocast(net))(spec)
    assert low.flops == plain.flops > 0
    assert 0 < low.hbm_bytes < plain.hbm_bytes


def test_tensorflow():
    pytest.importorskip("tensorflow")
    from jax.experimental import jax2tf

    want, got = (np.float32(jax2tf.convert(fn)(X)) for fn in (net, autocast(net)))
    assert np.abs(got - want).max() <= 0.03 * np.abs(want).max()
