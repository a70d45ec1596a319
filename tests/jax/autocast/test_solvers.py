"""Iterations to a tolerance: float32 by default, low where a policy says so, differentiated.

Solvers of jax, optimistix, lineax, diffrax and jaxopt. Under a policy that gives them up to their
parts the user's functions inside run low, which is where derivatives through custom rules, loops
and what must not be differentiated are at stake.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffrax as dfx
import jax
import jax.numpy as jnp
import jax.scipy.optimize
import jax.scipy.sparse.linalg as krylov
import jaxopt
import lineax as lx
import numpy as np
import optimistix as optx
import pytest
from jax import lax
from jax.experimental.ode import odeint

import polymp
from polymp.jax import autocast

W = jnp.array([[0.5, -0.2], [0.1, -0.4]])
Y = jnp.ones(2)
PARTS = polymp.policy("amp").override(parts=["class:iteration"])


def ode(**options: Any) -> Any:
    term = dfx.ODETerm(lambda t, y, w: jnp.tanh(w @ y))
    options = {"solver": dfx.Heun(), "t0": 0.0, "t1": 1.0, "dt0": 0.25, "y0": Y} | options
    return lambda w: dfx.diffeqsolve(term, args=w, **options).ys.sum()


def sde(w):
    brownian = dfx.VirtualBrownianTree(0.0, 1.0, tol=1e-2, shape=(2,), key=jax.random.key(0))
    noise = dfx.ControlTerm(lambda t, y, _: lx.DiagonalLinearOperator(0.1 * y), brownian)
    terms = dfx.MultiTerm(dfx.ODETerm(lambda t, y, _: w @ y), noise)
    return dfx.diffeqsolve(terms, dfx.Euler(), 0.0, 1.0, 0.25, Y).ys.sum()


def still(y, w):
    return y - jnp.tanh(w @ y + 1)


def spd(w):
    return lambda v: w @ (w.T @ v) + 2 * v


def linear(solver: Any) -> Any:
    return lambda w: lx.linear_solve(lx.MatrixLinearOperator(w + 2 * jnp.eye(2)), Y, solver).value


def by_cg(w):
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    operator = lx.FunctionLinearOperator(spd(w), shape, lx.positive_semidefinite_tag)
    return lx.linear_solve(operator, Y, lx.CG(1e-5, 1e-5)).value


def by_hand(f, start):
    def far(carry):
        return (jnp.abs(f(carry[0])).max() > 1e-6) & (carry[1] < 100)

    return lax.while_loop(far, lambda c: (c[0] - 0.5 * f(c[0]), c[1] + 1), (start, 0))[0]


def tangent(g, y):
    return jnp.linalg.solve(jax.jacobian(g)(y), y)


SOLVERS: dict[str, Callable[[Any], Any]] = {
    "lax.custom_root": lambda w: lax.custom_root(lambda y: still(y, w), Y, by_hand, tangent),
    "scipy cg": lambda w: krylov.cg(spd(w), Y, tol=1e-5)[0],
    "scipy minimize": lambda w: (
        jax.scipy.optimize.minimize(
            lambda y: jnp.sum((y - w @ Y) ** 2), Y, method="BFGS", tol=1e-5
        ).x
    ),
    "odeint": lambda w: odeint(lambda y, t: jnp.tanh(w @ y), Y, jnp.array([0.0, 1.0])),
    "optimistix root": lambda w: optx.root_find(still, optx.Newton(1e-5, 1e-5), Y, w).value,
    "optimistix fixed point": lambda w: (
        optx.fixed_point(
            lambda y, w: jnp.tanh(w @ y + 1), optx.FixedPointIteration(1e-5, 1e-5), Y, w
        ).value
    ),
    "lineax LU": linear(lx.LU()),
    "lineax CG": by_cg,
    "diffrax SDE": sde,
    "diffrax ODE": ode(),
    "diffrax ODE, direct": ode(adjoint=dfx.DirectAdjoint()),
    "diffrax ODE, backwards": ode(adjoint=dfx.BacksolveAdjoint()),
    "diffrax ODE, forwards": ode(adjoint=dfx.ForwardMode()),
    "diffrax ODE, adaptive": ode(stepsize_controller=dfx.PIDController(1e-3, 1e-3)),
    "diffrax ODE, implicit": ode(
        solver=dfx.Kvaerno3(), stepsize_controller=dfx.PIDController(1e-3, 1e-3)
    ),
}


def cost(y, w):
    return jnp.sum((w @ y - Y) ** 2) + jnp.sum(y**2) / 10


def by_jaxopt(solver):
    return lambda w: solver.run(Y, w).params


SOLVERS |= {
    "jaxopt gradient descent": by_jaxopt(jaxopt.GradientDescent(cost, tol=1e-5)),
    "jaxopt unrolled": by_jaxopt(
        jaxopt.GradientDescent(
            cost, maxiter=9, stepsize=0.2, acceleration=False, implicit_diff=False, unroll=True
        )
    ),
    "jaxopt BFGS": by_jaxopt(jaxopt.BFGS(cost, tol=1e-5, linesearch="backtracking")),
}

# Differentiated in the other way only, by what they are made of; and such solvers of each library.
NO_GRADIENT = {"scipy minimize", "diffrax ODE, forwards"}
NO_TANGENT = ("odeint", "diffrax ODE", "jaxopt BFGS")


def close(got, want, rtol):
    assert got.dtype == want.dtype
    assert np.abs(got - want).max() <= rtol * np.abs(want).max()


@pytest.mark.one_in(10)
@pytest.mark.parametrize("name", SOLVERS)
def test_what_is_iterated_runs_in_float32(name):
    solve = SOLVERS[name]
    close(jax.jit(autocast(solve))(W), jax.jit(solve)(W), 1e-5)


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    ("name", "policy"),
    [(name, PARTS) for name in sorted(SOLVERS.keys() - NO_GRADIENT, reverse=True)]
    + [(name, "amp") for name in ("optimistix root", "diffrax SDE")],
)
def test_the_gradient_of_a_solver(name, policy):
    def gradient(fn):
        return jax.jit(jax.grad(lambda w: fn(w).sum()))(W)

    solve = SOLVERS[name]
    got = gradient(autocast(solve, policy=policy))
    close(got, gradient(solve), 1e-4 if policy == "amp" else 0.05)


# One of each library, and what has no gradient.
TANGENT = ("lax.custom_root", "scipy cg", "optimistix root", "lineax LU", "diffrax ODE, direct")


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", [*TANGENT, "jaxopt unrolled", *sorted(NO_GRADIENT)])
def test_the_tangent_of_a_solver(name):
    def derivative(fn):
        return jax.jit(lambda w: jax.jvp(fn, (w,), (W.T,))[1])(W)

    solve = SOLVERS[name]
    close(derivative(autocast(solve, policy=PARTS)), derivative(solve), 0.05)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NO_TANGENT)
def test_what_has_no_tangent_has_none_here(name):
    for solve in (SOLVERS[name], autocast(SOLVERS[name])):
        with pytest.raises(TypeError, match="forward-mode autodiff"):
            jax.jvp(solve, (W,), (W,))


def test_a_tolerance_below_the_resolution_is_met():
    """A sum of squares that bfloat16 rounds to steps, none of which is the root."""

    def root(w):
        def f(y, w):
            return w @ (y * y) - jnp.array([0.3001, 0.2003])

        solver = optx.Newton(rtol=1e-6, atol=1e-6)
        return optx.root_find(f, solver, jnp.ones(2), w, max_steps=40, throw=False)

    w = jnp.array([[0.7, 0.2], [0.1, 0.9]])
    plain, low = (jax.jit(fn)(w) for fn in (root, autocast(root)))
    assert plain.result == low.result == optx.RESULTS.successful
    assert low.stats["num_steps"] == plain.stats["num_steps"] < 40
    asked = jax.jit(autocast(root, policy=PARTS))(w)
    assert asked.result != optx.RESULTS.successful  # it has the rule that was asked for


@pytest.mark.parametrize("name", ["optimistix root", "jaxopt BFGS"])
def test_explain_says_why(name):
    report = polymp.jax.explain(autocast(SOLVERS[name]), W)
    assert "class:iteration" in str(report)


def test_one_step_of_a_solver_runs_low():
    """The caller iterates, and may do so for a number of steps, as in training."""
    solver = jaxopt.GradientDescent(cost, stepsize=0.1, acceleration=False)

    def step(w):
        return solver.update(Y, solver.init_state(Y, w), w).params

    plain, low = step(W), autocast(step)(W)
    assert 0 < np.abs(low - plain).max() < 0.01


# Loops of the user's that end at a tolerance, from a matrix: how many turns they take.
FEW = 200


def _turn(w, x):
    return 0.9 * jnp.tanh(w @ x) + 0.3


def iterated(more, kept, start):
    """How often a loop turns: as long as `more` of its number and of what is `kept` beside it."""

    def turns(w):
        def turn(state):
            x = _turn(w, state[0])
            return x, kept(x, *state[:2]), state[2] + 1

        def test(state):
            return more(*state[:2]) & (state[2] < FEW)

        return lax.while_loop(test, turn, (Y8, start, 0))[2]

    return turns


Y8 = jnp.linspace(0, 1, 8)
COMPARES = iterated(lambda x, old: jnp.abs(x - old).max() > 1e-4, lambda x, old, _: old, Y8 + 1)
TO_A_TOLERANCE = {
    "compares": COMPARES,
    "flag": iterated(
        lambda _, done: ~done, lambda x, old, _: jnp.linalg.norm(x - old) < 1e-4, False
    ),
    "error": iterated(
        jax.jit(lambda _, kept: kept[0] > kept[1]),
        jax.jit(lambda x, old, kept: (jnp.abs(x - old).sum(), kept[1])),
        (jnp.inf, 1e-4),
    ),
    "count": iterated(
        lambda _, count: count > 0, lambda x, old, _: jnp.sum(jnp.abs(x - old) > 1e-4), 8
    ),
    "status": iterated(
        lambda _, status: status == 0,
        lambda x, old, _: lax.cond(jnp.abs(x - old).max() < 1e-4, lambda: 1, lambda: 0),
        0,
    ),
    "batched": lambda w: jax.vmap(lambda by: COMPARES(by * w))(jnp.array([1.0, 0.5])).sum(),
}


def _is_low(fn: Any, *args: Any) -> bool:
    return "polymp_contraction" in str(jax.make_jaxpr(fn)(*args))


@pytest.mark.parametrize("loop", TO_A_TOLERANCE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_loop_of_the_users_ends_where_it_does_in_float32(loop, dtype):
    loop = TO_A_TOLERANCE[loop]
    low, plain = jax.jit(autocast(loop, dtype=dtype)), jax.jit(loop)
    for seed in range(3):
        w = jax.random.normal(jax.random.key(seed), (8, 8)) * 0.3
        assert int(low(w)) == int(plain(w)) < FEW
    assert _is_low(autocast(loop, policy=PARTS), w)
    row = {"extends": "amp", "name": "mine", "rules": {"while_loop": "parts"}}
    assert _is_low(autocast(loop, policy=row), w)


COUNTED = {
    "fori_loop": lambda w: lax.fori_loop(0, 5, lambda _, x: _turn(w, x), Y8),
    "a bound that is traced": lambda w: lax.fori_loop(0, w.size // 8, lambda _, x: w @ x, Y8),
    "while_loop": lambda w: lax.while_loop(
        lambda s: s[1] < 5, lambda s: (_turn(w, s[0]), s[1] + 1), (Y8, 0)
    )[0],
    "decoding": iterated(lambda _, done: ~done, lambda x, _, done: done | (x.argmax() == 9), False),
    "a counter as a float": lambda w: lax.while_loop(
        lambda s: s[1].astype(float) < 5.0, lambda s: (w @ s[0], s[1] + 1), (Y8, 0)
    )[0],
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_loop_that_counts_stays_low(name):
    assert _is_low(autocast(COUNTED[name]), jnp.eye(8))


def test_explain_says_why_of_a_loop():
    calls = polymp.explain(autocast(COMPARES), jnp.eye(8)).calls
    (call,) = (call for call in calls if call.flops)
    assert (call.op, call.run, call.row.of) == ("while_loop", "float32", "class:iteration")
