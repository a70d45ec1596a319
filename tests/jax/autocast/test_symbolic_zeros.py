"""Derivatives of what does not move: a symbolic zero stays one through the rewrite.

A rule that asked for symbolic zeros is told the same ones as without autocast, forward and
backward, and what refuses a tangent is handed none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero

from polymp.jax import autocast

X = jnp.linspace(0.5, 1, 16).reshape(4, 4)
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
