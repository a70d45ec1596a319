"""An autocast function around a jitted one is planned once for arguments of the same types."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polymp
from polymp.backends.jax.autocast import api
from polymp.jax import autocast, explain
from tests.support.jax.scaler_tools import bits


@pytest.fixture
def traces(monkeypatch):
    """The functions that were traced by autocast."""
    found = []
    trace = api.trace

    def counted(fn, *args, **kwargs):
        found.append(fn)
        return trace(fn, *args, **kwargs)

    monkeypatch.setattr(api, "trace", counted)
    return found


def product(w, x):
    return {"y": jnp.tanh(x @ w), "n": x.sum()}


W, X = jnp.linspace(-1, 1, 12).reshape(4, 3), jnp.linspace(0, 2, 8).reshape(2, 4)


def test_the_same_types_are_planned_once_and_others_anew(traces):
    fn = autocast(jax.jit(product))
    for i in range(3):
        assert bits(fn(W, X + i)) == bits(jax.jit(autocast(product))(W, X + i))
    assert len([f for f in traces if f is not product]) == 1
    fn(W, X[:1])
    fn(W.astype(jnp.bfloat16), X)
    fn(w=W, x=X)
    assert len([f for f in traces if f is not product]) == 4


def test_settings_are_part_of_the_key(traces):
    fn = autocast(jax.jit(product))
    fn(W, X)
    with jax.default_matmul_precision("highest"):
        fn(W, X)
    with jax.disable_jit():
        assert bits(fn(W, X)) == bits(autocast(product)(W, X))
    assert len([f for f in traces if f is not product]) == 3
    assert len(explain(fn, W, X).calls) == 3  # after a call that is kept


@pytest.mark.parametrize("numbers", [(0.0, -0.0), (1, True), (1, 1.0), (2, 3)])
def test_equal_numbers_that_differ_are_told_apart(numbers):
    plain = jax.jit(lambda x, n: jnp.copysign(x, n) * n + jnp.asarray(n).dtype.itemsize)
    fn = autocast(plain)
    for n in numbers * 2:
        assert bits(fn(X, n)) == bits(plain(X, n)), n


def graded(x, step, rate=0.5, *, train):
    return (x @ x.T) * (rate * step) if train else x


@pytest.mark.parametrize(
    ("options", "plans"),
    [
        ({"static_argnames": "train"}, 2),
        ({"static_argnames": ("train", "rate")}, 3),
        ({"static_argnums": (-1,), "static_argnames": "train"}, 3),
    ],
)
def test_numbers_are_traced_as_jit_traces_them(traces, options, plans):
    plain = jax.jit(graded, **options)
    fn = autocast(plain)
    calls = [(X, 1, 0.25, True), (X, 2, 0.25, True), (X, 7, 2.5, True), (X, 3, 2.5, False)]
    for x, step, rate, train in calls * 2:
        want = jax.jit(autocast(partial(graded, train=train)))(x, step, rate)
        assert bits(fn(x, step, rate, train=train)) == bits(want)
    assert len([f for f in traces if f is plain]) == plans
    gradient = jax.grad(lambda x: fn(x, 2, 0.25, train=True).sum().astype(jnp.float32))(X)
    assert gradient.shape == X.shape


def test_static_arguments_of_any_class_are_planned_once(traces):
    plain = jax.jit(lambda x, widths: x @ jnp.ones((x.shape[1], *widths)), static_argnums=1)
    fn = autocast(plain)
    for widths in [(2,), (3,), (2,)]:
        assert fn(X, widths).shape == (2, *widths)
    one, other = frozenset({2}), frozenset({3})
    for widths in (one, other, one):
        assert fn(X, widths).shape == (2, *widths)
    assert len([f for f in traces if f is plain]) == 4
    with pytest.raises(ValueError, match="Non-hashable static arguments"):
        fn(X, {2})


def test_donated_arguments_are_given_away():
    fn = autocast(jax.jit(lambda w, x, n: (w + n, x @ w), donate_argnums=0))
    for n in range(3):
        w = W + 0
        assert bits(fn(w, X, n)[0]) == bits(W + n)
        assert w.is_deleted()
        assert not X.is_deleted()


def test_under_a_transformation_nothing_is_kept():
    fn = autocast(jax.jit(product))
    fn(W, X)
    grad = jax.grad(lambda w: fn(w, X)["y"].astype(jnp.float32).sum())(W)
    assert grad.dtype == jnp.float32
    assert jax.vmap(fn, (None, 0))(W, X[None])["y"].shape == (1, 2, 3)
    assert api.call_key(fn, (), ()) is None  # that is no jitted function


def test_policies_and_marks_inside_hold():
    @jax.jit
    def some(w, x):
        with autocast(enabled=False):
            y = x @ w
        return y, x @ w

    for fn in (autocast(some), autocast(some, policy=polymp.policy("matmul"))):
        for _ in range(2):
            assert [y.dtype.name for y in fn(W, X)] == ["float32", "bfloat16"]
    off = autocast(some, enabled=False)
    for _ in range(2):
        assert [y.dtype.name for y in off(W, X)] == ["float32", "float32"]


def test_arrays_of_numpy_and_weak_numbers():
    fn, plain = autocast(jax.jit(product)), jax.jit(autocast(product))
    for args in ((np.ones((4, 3)), np.ones((2, 4), np.float32)), (W, X), (W, np.ones((2, 4)))):
        for _ in range(2):
            assert bits(fn(*args)) == bits(plain(*args))
    scaled = autocast(jax.jit(lambda x, n: (x @ x.T) * n))
    for n in (jnp.float32(2), jnp.asarray(2.0), 2.0, jnp.ones((2, 2))):
        want = jax.jit(autocast(lambda x, n: (x @ x.T) * n))(X, n)
        for _ in range(2):
            assert bits(scaled(X, n)) == bits(want)


COMPILED: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def compilations():
    """Lists what is compiled in `COMPILED`."""

    def note(event, _, fun_name="", **__):
        if event == "/jax/core/compile/backend_compile_duration":
            COMPILED.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(note)


def turn(x, _):
    return jax.nn.relu(x), None


SMALLER = jax.checkpoint(lambda x: jnp.sin(jax.nn.relu(x)))
# Functions with jitted helpers inside, or custom derivatives, or both.
HELPERS = {
    **{name: getattr(jax.nn, name) for name in "relu silu elu glu".split()},
    "clip": lambda x: jnp.clip(x, 0, 1),
    "jit": jax.jit(lambda x: x * jax.nn.relu(x)),
    "remat": SMALLER,
    "scan": lambda x: jax.lax.scan(turn, x, None, length=2)[0],
    "cond": lambda x: jax.lax.cond(x[0, 0] > 0, jax.nn.relu, jax.nn.silu, x),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", HELPERS)
def test_nothing_is_compiled_after_the_second_call(name):
    def loss(w, x):
        return HELPERS[name](x @ w).sum()

    w, fn, jitted = jnp.ones((4, 4)), autocast(loss), jax.jit(loss)
    ways = {
        "gradients": lambda: jax.grad(fn)(w, X),
        "written inline": lambda: autocast(loss)(w, X),
        "gradients, written inline": lambda: jax.grad(autocast(lambda w: loss(w, X)))(w),
        "inside": lambda: autocast(jax.grad(loss))(w, X),
        "jitted": lambda: autocast(jitted)(w, X),
        "jitted inline": lambda: autocast(jax.jit(loss))(w, X),
    }
    start = len(COMPILED)
    for way, call in ways.items():
        call(), call()
        before = len(COMPILED)
        call(), call()
        found = COMPILED[before:]
        if (name in ("scan", "cond") and "gradients" in way) or way == "inside":
            before = len(COMPILED)  # jax compiles these at every call
            jax.grad(loss)(w, X), jax.grad(loss)(w, X)
            assert len(found) <= len(COMPILED) - before, (way, found)
        else:
            assert not found, way
    assert len(COMPILED) > start, "nothing was counted"


def test_plans_of_a_function_are_told_apart_by_its_region_and_values():
    def scaled(by):
        return autocast(lambda x: jax.nn.relu(by * x @ W))

    for by in (1, 2, 4):
        assert bits(scaled(by)(X)) == bits(by * scaled(1)(X))
    wide = {"rules": {"all": "fp32"}}
    for dtype in ("bfloat16", "float16"):
        for policy, out in ((wide, "float32"), ("amp", dtype)):
            region = autocast(lambda x: jax.nn.relu(x @ W), dtype=dtype, policy=policy)
            assert region(X).dtype == out
