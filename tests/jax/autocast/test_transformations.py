"""Every transformation that JAX has, around an autocast function and inside one.

Each row is a program that runs without autocast too; with it, it comes as close as bfloat16 does.
What cannot work says so, in jax's own words.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap, sequential_vmap
from jax.custom_derivatives import SymbolicZero
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
    return lax.conv(jnp.tanh(x), w, (1, 1), "SAME")


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


# --- A symbolic zero stays one through the rewrite ------------------------------------------------
#
# A rule that asked for symbolic zeros is told the same ones as without autocast, forward and
# backward, and what refuses a tangent is handed none.

TOLD: list[tuple[bool, ...]] = []  # what the rules below were told


def zeros(values: Any) -> tuple[bool, ...]:
    return tuple(isinstance(value, SymbolicZero) for value in values)


@jax.custom_jvp
def forward_rule(x, y, n):
    return jnp.sin(x @ x) * y, x * 1.0, n + 1


def of_forward_rule(primals, tangents):
    TOLD.append(zeros(tangents))
    (x, y, _), (dx, *_) = primals, tangents
    outs = forward_rule(*primals)
    still = [SymbolicZero(jax.typeof(out).to_tangent_aval()) for out in outs]
    if not isinstance(dx, SymbolicZero):
        still[0] = jnp.cos(x @ x) * (dx @ x + x @ dx) * y
    return outs, tuple(still)


forward_rule.defjvp(of_forward_rule, symbolic_zeros=True)


@jax.custom_vjp
def reverse_rule(x, y, n):
    return x @ y, x * 2, n


def of_reverse_rule(x, y, n):
    TOLD.append((x.perturbed, y.perturbed, n.perturbed))
    return reverse_rule(x.value, y.value, n.value), (x.value, y.value)


def back(saved, cotangents):
    TOLD.append(zeros(cotangents))
    (x, y), (product, double, _) = saved, cotangents
    dx = dy = None
    if not isinstance(product, SymbolicZero):
        dx, dy = product @ y.T, x.T @ product
    if not isinstance(double, SymbolicZero):
        dx = 2 * double + (0 if dx is None else dx)
    return dx, dy, None


reverse_rule.defvjp(of_reverse_rule, back, symbolic_zeros=True)


@jax.custom_vjp
def refused(x):
    return x


def refuse(_, cotangent):
    assert isinstance(cotangent, SymbolicZero), "a cotangent came to what takes none"
    return (None,)


refused.defvjp(lambda x: (x.value, None), refuse, symbolic_zeros=True)


def loop(x):
    def body(_, carry):
        a, n, still = carry
        return a @ x * 0.3, n + 1, eqxi.nondifferentiable(lax.stop_gradient(still @ still))

    return lax.fori_loop(0, 3, body, (x, jnp.int32(0), X))[0].sum()


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "jvp, the argument that moves": lambda x: forward_rule(x, X, 3)[0].sum(),
    "jvp, a result that stands still": lambda x: forward_rule(x, X, 3)[1].sum() + x.sum(),
    "jvp, a result that is refused": lambda x: (
        eqxi.nondifferentiable(forward_rule(x, X, 3)[1]) @ x
    ).sum(),
    "jvp, the argument that stands still": lambda x: forward_rule(X, x, 3)[0].sum() + x.sum(),
    "vjp, the first result": lambda x: reverse_rule(x, X, 3)[0].sum(),
    "vjp, the second result": lambda x: reverse_rule(x, X, 3)[1].sum(),
    "vjp, the second argument": lambda x: reverse_rule(X, x, 3)[0].sum(),
    "vjp, no cotangent": lambda x: reverse_rule(X, x, 3)[1].sum() + x.sum(),
    "vjp, no cotangent for what refuses one": lambda x: (
        reverse_rule(X, refused(x), 3)[1].sum() + x.sum()
    ),
    "vjp, all": lambda x: sum(map(jnp.sum, reverse_rule(x, x, 3)[:2])),
    "jvp in jit": lambda x: jax.jit(lambda x: forward_rule(x, X, 3)[0])(x).sum(),
    "vjp in a scan": lambda x: lax.scan(
        lambda c, _: (reverse_rule(c, X, 3)[0] * 0.3, None), x, None, 2
    )[0].sum(),
    "vjp in a block to compute again": lambda x: jax.checkpoint(lambda x: reverse_rule(x, X, 3)[0])(
        x
    ).sum(),
    "a loop": loop,
    "stop_gradient": lambda x: (lax.stop_gradient(x @ x) @ x).sum(),
    "nondifferentiable": lambda x: (eqxi.nondifferentiable(lax.stop_gradient(x @ x)) @ x).sum(),
}
DERIVATIVES: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "grad": jax.grad,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
    "grad of grad": lambda f: jax.grad(lambda x: (jax.grad(f)(x) * X).sum()),
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x])),
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
}


def told(derivative: Callable[[Any], Any]) -> tuple[Any, set[tuple[bool, ...]]]:
    TOLD.clear()
    return derivative(X), set(TOLD)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("how", DERIVATIVES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_symbolic_zero_stays_one(program, how):
    fn, derivative = PROGRAMS[program], DERIVATIVES[how]
    if program.startswith("vjp") and how in ("jvp", "linearize"):
        for refuses in (fn, autocast(fn)):
            with pytest.raises(TypeError, match="forward-mode"):
                derivative(refuses)(X)
        return
    want, plain = told(derivative(fn))
    got, low = told(derivative(autocast(fn)))
    assert low == plain
    assert np.abs(got - want).max() <= 0.04 * np.abs(want).max() + 1e-6


def test_a_rule_that_is_refused_a_tangent_says_so_as_without_autocast():
    f = autocast(lambda x: (eqxi.nondifferentiable(x @ x) @ x).sum())
    with pytest.raises(RuntimeError, match="Unexpected tangent"):
        jax.grad(f)(X)
