"""`GradScaler.step` for JAX: a step that is taken is the plain one, and a skip is a skip."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from polymp.backends.jax.scaler import optimizer_step
from polymp.jax import GradScaler, autocast
from tests.jax.scaler.test_gradients import EAGER_OR_JIT, WAYS
from tests.support.jax.scaler_tools import bits, numbers

HARD = {  # arrays that arithmetic, and some copies, would change, and other kinds
    "w": jnp.asarray([1.0, -0.0, 1e-40, jnp.inf]),
    "nan": jax.lax.bitcast_convert_type(jnp.uint32(0x7FC12345), jnp.float32),
    "low": jnp.asarray([0.1], jnp.bfloat16),
    "n": jnp.int32(7),
    "yes": jnp.bool_(True),
    "key": jax.random.key(3),
    "complex": jnp.asarray([1 + 2j]),
}


def changed(grads, state):
    return {
        "w": state["w"] - grads["w"],
        "nan": state["nan"] * 2,
        "low": state["low"] * 2,
        "n": state["n"] + 1,
        "yes": ~state["yes"],
        "key": jax.random.split(state["key"])[0],
        "complex": state["complex"] / grads["w"].sum(),
    }


@pytest.mark.parametrize("way", [*WAYS, "donated", "selected"])
def test_a_skipped_step_leaves_every_bit(monkeypatch, way):
    """Also where steps are selected, as on GPUs: then those that are skipped compute with zeros."""
    if way == "selected":
        monkeypatch.setattr(optimizer_step, "SELECTING", ("cpu", *optimizer_step.SELECTING))

    def step(scaler, grads, state):
        return scaler.step(grads, changed, state)

    ways = WAYS | {"donated": lambda f: jax.jit(f, donate_argnums=(0, 2)), "selected": jax.jit}
    run, grads = ways[way](step), jnp.full(4, 8.0)
    number = {"n": 7} if way == "selected" else {}
    state = jax.tree.map(jnp.copy, HARD) | number
    taken, after, finite = run(GradScaler(8.0), {"w": grads}, state)
    assert (bool(finite), int(taken["n"])) == (True, 8)
    assert taken["w"][:3].tolist() == [0.0, -1.0, -1.0]
    assert after.state.scale == 8.0
    for bad in (np.inf, np.nan):
        state = jax.tree.map(jnp.copy, HARD) | number
        skipped, after, finite = run(GradScaler(8.0), {"w": jnp.full(4, 8.0).at[2].set(bad)}, state)
        assert not finite
        assert bits(skipped) == bits(HARD)
        assert numbers(after.state) == (4.0, 0, 1, 0, 1)


@EAGER_OR_JIT
def test_leaves_that_are_no_arrays_stay_and_update_may_change_what_it_gets(wrap):
    """A flag, too, on which Dropout branches: as an array it would be traced in the next step."""
    before, others = jnp.ones(2), {"act": jax.nn.relu, "name": "layer", "flag": False}
    state = {"w": before, "count": 3, "none": np.zeros(3, jax.dtypes.float0), **others}

    def update(grads, state):
        assert state["act"] is jax.nn.relu
        state["w"] = state["w"] - grads.pop("w")
        return state | {"count": state["count"] + 1}

    @wrap
    def run(scaler, g):
        grads = {"w": g, "act": None}
        new, _, _ = scaler.step(grads, update, state)
        assert grads["w"] is g
        assert all(new[name] is x for name, x in others.items())
        return new["w"], new["count"]

    for g, weights, count in ((4.0, [-1, -1], 4), (np.inf, [1, 1], 3), (np.nan, [1, 1], 3)):
        w, n = run(GradScaler(2.0), jnp.full(2, g))
        assert (w.tolist(), int(n)) == (weights, count)
    assert state["w"] is before


TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
WITH_OPTAX = (
    "With an optimizer tx of optax, write def update(grads, params, opt_state): updates, opt_state "
    "= tx.update(grads, opt_state, params); return optax.apply_updates(params, updates), opt_state "
    "and scaler.step(grads, update, params, opt_state)."
)


@pytest.mark.parametrize("given", ["transformation", "its update", "what that returns", "a tree"])
def test_what_is_no_update_of_the_state(given):
    params = {"w": jnp.ones(2)}
    state = TX.init(params)
    update = {
        "transformation": TX, "its update": TX.update,
        "what that returns": TX.update(params, state), "a tree": [jnp.ones((9, 9))] * 9,
    }[given]  # fmt: skip
    with pytest.raises(TypeError) as raised:
        GradScaler().step(params, update, params, state)
    said = str(raised.value)
    assert said.startswith(
        "step(grads, update, *state) needs for update a function of the true gradients and the "
        "state that returns the new state, got "
    )
    assert said.endswith(f". {WITH_OPTAX}")
    assert len(said) < 620, "what was given is shortened"


KEEP = (
    "update must keep the shapes and dtypes of the state, and what is no array; state[0]{} was {} "
    "and came back as {}."
)
TWO = (
    "step(grads, update, *state) got 2 states, so update must return a tuple of the 2 new ones, in "
    "the same order; it returned {}."
)
STATE = {"w": jnp.ones(2), "act": "relu"}


@pytest.mark.parametrize(
    ("update", "states", "message"),
    [
        (lambda g, w: {"w": w["w"], "v": w["w"]}, [STATE],
            "update must return the state in the structure that it came in, "
            "PyTreeDef(({'act': *, 'w': *},)); it returned PyTreeDef(({'v': *, 'w': *},)). "
            + WITH_OPTAX),
        (lambda g, w: w | {"w": w["w"].astype(jnp.float16)}, [STATE],
            KEEP.format("['w']", "float32[2]", "float16[2]")),
        (lambda g, w: w | {"w": w["w"][:1]}, [STATE],
            KEEP.format("['w']", "float32[2]", "float32[1]")),
        (lambda g, w: w | {"act": "gelu"}, [STATE], KEEP.format("['act']", "relu", "gelu")),
        (lambda g, *state: None, [STATE] * 2, TWO.format("NoneType")),
        (lambda g, *state: list(state), [STATE] * 2, TWO.format("list")),
        (lambda g, *state: (*state, g), [STATE] * 2, TWO.format("a tuple of 3")),
        (lambda g: None, [],
            "step(grads, update) got no state to update, and update returned NoneType. Write "
            "step(grads, update, params)."),
    ],
)  # fmt: skip
@EAGER_OR_JIT
def test_an_update_that_returns_another_state(wrap, update, states, message):
    run = wrap(lambda g: GradScaler().step(g, update, *states)[1])
    with pytest.raises(TypeError) as raised:
        run(jnp.ones(2))
    assert raised.value.args[0] == message


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_an_eager_skip_does_not_even_call_update(bad):
    called = []
    with jax.numpy_dtype_promotion("strict"):
        GradScaler().step(jnp.asarray(bad), lambda g, w: called.append(g) or w, 1.0)
        _, after, _ = GradScaler(8.0).step(jnp.asarray(1.0), lambda g, w: w, 1.0, loss=bad)
    assert called == []
    assert numbers(after.state) == (8.0, 1, 0, 0, 0)  # a step that torch.amp takes


def test_no_nan_comes_out_of_a_skip():
    """`jax_debug_nans` looks at every result that leaves a compiled program."""

    def step(scaler, grads, w, loss=None):
        return scaler.step(grads, lambda g, w: w - g, w, loss=loss)

    @jax.jit
    def train(scaler, x, w):
        grads, loss = jax.grad(lambda w: (scaler.scale(loss := (w * x).sum()), loss), has_aux=True)(
            w
        )
        return step(scaler, grads, w, loss)

    scaler, nan = GradScaler(), jnp.asarray([np.nan, np.inf])
    two = jax.tree.map(lambda x: jnp.stack([x, x]), (scaler, nan, jnp.ones(2)))
    with jax.debug_nans(True):
        for run in (train, jax.jit(step), step):
            new, _, finite = run(scaler, nan, jnp.ones(2))
            assert (new.tolist(), bool(finite)) == ([1.0, 1.0], False)
        new, _, finite = jax.jit(jax.vmap(step))(*two)
        assert (new.tolist(), finite.tolist()) == ([[1.0, 1.0]] * 2, [False] * 2)
        with pytest.raises(FloatingPointError):  # the setting works
            jax.jit(lambda g, w: w - g)(nan, jnp.ones(2))
    with jax.checking_leaks():
        assert not jax.jit(step)(scaler, nan, jnp.ones(2))[2]


@pytest.mark.parametrize("made", ["outside", "inside"])
@pytest.mark.parametrize("way", ["step", "unscale", "value_and_grad"])
def test_what_is_checked_is_what_is_used(way, made):
    """XLA puts factors together: x * 1e30 / scale is finite where x * 1e30 is not."""

    @jax.jit
    def run(given, w, x):
        scaler = GradScaler(2.0**20) if made == "inside" else given
        if way == "value_and_grad":
            loss = lambda w: (w * (x * 1e24)).sum()  # noqa: E731
            (_, grads), _, finite = scaler.value_and_grad(loss)(w)
            return w - grads, finite
        grads = x * 1e30
        if way == "step":
            new, _, finite = scaler.step(grads, lambda g, w: w - g, w)
            return new, finite
        grads, finite = scaler.unscale(grads)
        return w - grads, finite

    x = jnp.asarray([1e10, 1.0] * 150)
    for n in (2, 300):
        new, finite = run(GradScaler(2.0**20), jnp.zeros(n), x[:n])
        assert not finite
        assert np.any(new) == (way != "step")


@pytest.mark.parametrize("n", [2, 300])
def test_a_factor_of_the_gradient_is_not_put_to_that_of_the_scale(n):
    """1e20 / 2**-126 is Inf, and 1e-30 * 1e20 / 2**-126 is not."""
    step = jax.jit(lambda s, x: s.step(x * 1e20, lambda g, w: g, jnp.zeros(n)))
    with jax.numpy_dtype_promotion("strict"):
        new, after, finite = step(GradScaler(2.0**-126), jnp.full(n, 1e-30))
    assert finite
    assert np.allclose(new, 1e-10 * 2.0**126, rtol=1e-6)
    assert after.state.scale == 2.0**-126


# `GradScaler.step` with models of libraries: nnx modules whose forward pass changes them, equinox


X = jnp.linspace(-2.0, 2.0, 24).reshape(8, 3)
TX = optax.adam(1e-2)
# An overflow of float16 and not of the loss, a batch with NaN, one whose loss is Inf.
BATCHES = jnp.stack([X] * 7).at[2].mul(300.0).at[4, 1].set(jnp.nan).at[5].mul(1e30)
FINITE = [True, True, False, True, False, False, True]


def module(norm: bool) -> Any:
    rngs = nnx.Rngs(0)
    between = [nnx.BatchNorm(4, momentum=0.5, rngs=rngs)] if norm else []
    return nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), *between, nnx.Linear(4, 2, rngs=rngs))


@autocast(dtype=jnp.float16)
def model_loss(model: Any, x: Any) -> Any:
    return (model(x) ** 2).mean()


def nnx_step(scaler: GradScaler, model: Any, optimizer: Any, x: Any) -> Any:
    """As docs/scaling-jax.md has it."""
    graph, before = nnx.split((model, optimizer))
    before = jax.tree.map(jnp.copy, before)

    def scaled_loss(model: Any) -> Any:
        loss = model_loss(model, x)
        return scaler.scale(loss), loss

    grads, loss = nnx.grad(scaled_loss, has_aux=True)(model)
    after = nnx.state((model, optimizer))

    def update(grads: Any, before: Any) -> Any:
        model, optimizer = nnx.merge(graph, after, copy=True)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer))

    state, scaler, finite = scaler.step(grads, update, before, loss=loss)
    nnx.update((model, optimizer), state)
    return scaler, finite


@pytest.mark.one_in(2)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch statistics"])
@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_an_nnx_module_and_its_optimizer(wrap, norm):
    model = module(norm)
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    scaler, seen = GradScaler(2.0**13), []
    run = wrap(nnx_step)
    for x in BATCHES:
        before = bits(nnx.state((model, optimizer)))
        scaler, finite = run(scaler, model, optimizer, x)
        assert (bits(nnx.state((model, optimizer))) == before) != bool(finite)
        seen.append(bool(finite))
    assert seen[4:6] == [False, False]
    if not norm:  # a batch norm takes the large batch, too
        assert seen == FINITE
        # The scale is halved by the overflow and by both lost losses, as in torch.amp.
        assert numbers(scaler.state) == (2.0**10, 1, 0, 0, 3)
    assert optimizer.step[...] == sum(seen)


def test_an_equinox_model_with_its_activation_and_flags_inside():
    """`Dropout` branches on its flag: as an array it would be traced in the next step."""
    keys = jax.random.split(jax.random.key(0))
    mlp = eqx.nn.MLP(3, 1, 4, 1, key=keys[0])
    model = eqx.nn.Sequential([mlp, eqx.nn.Dropout(0.25)])

    def loss(model: Any, x: Any) -> Any:
        return (jax.vmap(lambda x: model(x, key=keys[1]))(x) ** 2).mean()

    def update(grads: Any, model: Any) -> Any:
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.5 * g, grads))

    @eqx.filter_jit
    def step(scaler: GradScaler, model: Any, x: Any) -> Any:
        grads = eqx.filter_grad(lambda m: scaler.scale(loss(m, x)))(model)
        return scaler.step(grads, update, model)

    stepped, scaler, finite = step(GradScaler(), model, X)
    assert finite
    expected = update(eqx.filter_grad(loss)(model, X), model)
    assert eqx.tree_equal(stepped, expected, rtol=1e-5, atol=1e-6)
    skipped, scaler, finite = step(scaler, stepped, X * jnp.inf)
    assert not finite
    assert eqx.tree_equal(skipped, stepped)
    assert scaler.state.scale == 2.0**15
    model, scaler, finite = step(scaler, skipped, X)
    assert finite
    assert model[0].activation is mlp.activation
    assert (model[1].p, model[1].inference) == (0.25, False)
    assert type(model[1].inference) is bool
