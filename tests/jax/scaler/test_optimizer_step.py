"""`GradScaler.step` for JAX: a step that is taken is the plain one, and a skip is a skip."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from polymp.jax import GradScaler, autocast
from tests.support.jax.scaler_tools import bits, numbers, values


def descend(grads, weights, count):
    return jax.tree.map(lambda w, g: w - 0.5 * g, weights, grads), count + 1


HARD = {  # numbers that arithmetic, and some copies, would change
    "nan": jax.lax.bitcast_convert_type(jnp.uint32(0x7FC12345), jnp.float32),
    "zero": jnp.float32(-0.0),
    "tiny": jnp.asarray([1e-40, -1e-42]),
    "inf": jnp.asarray([jnp.inf, -1.5]),
}


@pytest.mark.parametrize("way", ["eager", "jit", "donated", "vmap", "scan"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_skipped_step_leaves_every_bit(way, bad):
    def run(scaler, grads, weights, state):
        return scaler.step(
            grads,
            lambda g, w, s: (descend(g, w, 0)[0], jax.tree.map(lambda x: x, s)),
            weights,
            state,
        )

    weights = jax.tree.map(jnp.array, HARD)
    state = {"n": jnp.int32(7), "yes": jnp.bool_(True), "low": jnp.asarray([0.1], jnp.bfloat16)}
    grads = jax.tree.map(jnp.ones_like, weights)
    grads["tiny"] = grads["tiny"].at[1].set(bad)
    before = bits((weights, state))
    scaler = GradScaler(8.0)
    arguments = (scaler, grads, weights, state)
    if way == "jit":
        run = jax.jit(run)
    elif way == "donated":
        run = jax.jit(run, donate_argnums=(0, 2, 3))
        arguments = jax.tree.map(jnp.array, arguments)
    elif way == "vmap":
        one, run = run, jax.jit(jax.vmap(run))
        arguments = jax.tree.map(lambda x: x[None], arguments)
        before = bits(jax.tree.map(lambda x: x[None], (weights, state)))
    elif way == "scan":
        one = run

        @jax.jit
        def run(scaler, grads, weights, state):
            def body(carry, _):
                new, scaler, finite = one(carry[0], grads, *carry[1])
                return (scaler, new), finite

            (scaler, new), finite = jax.lax.scan(body, (scaler, (weights, state)), None, length=1)
            return new, scaler, finite[0]

    new, after, finite = run(*arguments)
    assert not finite.any()
    assert bits(new) == before
    assert after.state.scale.tolist() == ([4.0] if way == "vmap" else 4.0)
    assert after.state.skipped.tolist() == ([1] if way == "vmap" else 1)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradients_are_divided_by_the_scale_that_they_were_multiplied_with(wrap):
    """With interval 1 every good step grows the scale: it must be too late for this step."""
    weights = jnp.asarray([1.0, 2.0])

    @wrap
    def train(scaler, weights, count):
        grads = jax.grad(lambda w: scaler.scale((3.0 * w).sum()))(weights)
        (weights, count), scaler, finite = scaler.step(grads, descend, weights, count)
        return weights, count, scaler, finite

    scaler = GradScaler(4.0, growth_interval=1)
    seen = []
    count = jnp.int32(0)
    for _ in range(3):
        weights, count, scaler, finite = train(scaler, weights, count)
        seen.append((weights.tolist(), int(count), values(scaler), bool(finite)))
    assert seen == [
        ([-0.5, 0.5], 1, (8.0, 0), True),
        ([-2.0, -1.0], 2, (16.0, 0), True),
        ([-3.5, -2.5], 3, (32.0, 0), True),
    ]


def test_one_state_comes_back_as_itself_and_several_as_a_tuple():
    scaler = GradScaler(2.0)
    grads = scaler.scale([jnp.ones(2)])
    new, _, _ = scaler.step(grads, lambda g, w: [w[0] - g[0]], [jnp.zeros(2)])
    assert isinstance(new, list)
    assert new[0].tolist() == [-1.0, -1.0]
    new, _, _ = scaler.step(grads, lambda g, w, n: (w, n + 1), [jnp.zeros(2)], jnp.int32(3))
    assert isinstance(new, tuple)
    assert int(new[1]) == 4


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_leaves_that_are_no_arrays_stay(wrap):
    state = {"w": jnp.ones(2), "act": jax.nn.relu, "name": "layer", "count": 3}

    def update(grads, state):
        assert state["act"] is jax.nn.relu
        return state | {"w": state["w"] - grads["w"], "count": state["count"] + 1}

    @wrap
    def run(scaler, g):
        new, scaler, _ = scaler.step({"w": g, "act": None}, update, state)
        assert new["act"] is jax.nn.relu
        assert new["name"] == "layer"
        return new["w"], new["count"], scaler

    scaler = GradScaler(2.0)
    assert [x.tolist() for x in map(jnp.asarray, run(scaler, jnp.full(2, 4.0))[:2])] == [
        [-1, -1],
        4,
    ]
    assert [x.tolist() for x in map(jnp.asarray, run(scaler, jnp.full(2, np.inf))[:2])] == [
        [1, 1],
        3,
    ]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_what_update_changes_in_place_is_its_own(wrap):
    state = {"w": jnp.ones(2), "none": np.zeros(3, jax.dtypes.float0)}

    def update(grads, state):
        state["w"] = state["w"] - grads.pop("w")
        return state

    def run(scaler, g):
        grads = {"w": g}
        new, _, _ = scaler.step(grads, update, state)
        assert grads["w"] is g
        return new["w"]

    before = state["w"]
    assert wrap(run)(GradScaler(2.0), jnp.full(2, 4.0)).tolist() == [-1, -1]
    assert wrap(run)(GradScaler(2.0), jnp.full(2, np.nan)).tolist() == [1, 1]
    assert state["w"] is before


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (
            lambda g, w: {"w": w["w"], "v": w["w"]},
            "update must return the state in the structure that it came in, "
            "PyTreeDef(({'act': *, 'w': *},)); it returned PyTreeDef(({'v': *, 'w': *},)).",
        ),
        (
            lambda g, w: w | {"w": w["w"].astype(jnp.float16)},
            "update must keep the shapes and dtypes of the state, and what is no array; "
            "state[0]['w'] was float32[2] and came back as float16[2].",
        ),
        (
            lambda g, w: w | {"w": w["w"][:1]},
            "update must keep the shapes and dtypes of the state, and what is no array; "
            "state[0]['w'] was float32[2] and came back as float32[1].",
        ),
        (
            lambda g, w: w | {"act": "gelu"},
            "update must keep the shapes and dtypes of the state, and what is no array; "
            "state[0]['act'] was relu and came back as gelu.",
        ),
    ],
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_an_update_that_changes_what_the_state_is(wrap, update, message):
    run = wrap(lambda g, w: GradScaler().step(g, update, {"w": w, "act": "relu"})[1])
    with pytest.raises(TypeError) as raised:
        run(jnp.ones(2), jnp.ones(2))
    assert raised.value.args[0] == message


TWO = (
    "step(grads, update, *state) got 2 states, so update must return a tuple of the 2 new ones, in "
    "the same order; it returned {}."
)


@pytest.mark.parametrize(
    ("update", "states", "message"),
    [
        (lambda g, *state: None, 2, TWO.format("NoneType")),
        (lambda g, *state: list(state), 2, TWO.format("list")),
        (lambda g, *state: (*state, g), 2, TWO.format("a tuple of 3")),
        (
            lambda g: g,
            0,
            "step(grads, update) got no state to update, and update returned ArrayImpl. Write "
            "step(grads, update, params).",
        ),
    ],
)
def test_an_update_that_returns_another_number_of_states(update, states, message):
    with pytest.raises(TypeError) as raised:
        GradScaler().step(jnp.ones(2), update, *[jnp.ones(2)] * states)
    assert raised.value.args[0] == message


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("loss", "grad", "scale", "counts"),
    [
        (1.0, 1.0, 8.0, (1, 0, 0, 0)),
        (1.0, np.inf, 4.0, (0, 1, 0, 1)),
        (np.nan, np.nan, 4.0, (0, 1, 1, 1)),
        (np.inf, 1.0, 8.0, (1, 0, 0, 0)),  # a step that torch.amp takes
        (None, np.nan, 4.0, (0, 1, 0, 1)),  # nobody looked
    ],
)
def test_the_gradients_decide_and_a_lost_loss_is_counted(wrap, loss, grad, scale, counts):
    @wrap
    def run(scaler, grads, weights):
        return scaler.step(grads, lambda g, w: w - g, weights, loss=loss)

    weights = jnp.asarray([1.0, -0.0])
    new, after, finite = run(GradScaler(8.0), jnp.asarray([8.0, grad]), weights)
    assert numbers(after.state) == (scale, *counts)
    assert bool(finite) is (counts[-1] == 0)
    if not finite:
        assert bits(new) == bits(weights)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_an_eager_skip_does_not_even_call_update(bad):
    called = []
    GradScaler().step(jnp.asarray(bad), lambda g, w: called.append(g) or w, 1.0)
    GradScaler().step(jnp.asarray(1.0), lambda g, w: w, 1.0, loss=bad)
    assert called == []


def test_no_nan_comes_out_of_a_skip():
    """`jax_debug_nans` looks at every result that leaves a compiled program."""
    scaler = GradScaler()

    @jax.jit
    def train(scaler, w, x):
        def scaled_loss(w):
            loss = (w * x).sum()
            return scaler.scale(loss), loss

        grads, loss = jax.grad(scaled_loss, has_aux=True)(w)
        new, scaler, finite = scaler.step(grads, lambda g, w: w - g, w, loss=loss)
        return new, scaler, finite

    step = jax.jit(lambda s, g, w: s.step(g, lambda g, w: w - g, w))
    batch = jax.tree.map(lambda x: jnp.stack([x, x]), scaler)
    steps = jax.jit(jax.vmap(lambda s, g, w: s.step(g, lambda g, w: w - g, w)))
    nan = jnp.asarray([np.nan, np.inf])
    two_nans = jnp.stack([nan, nan])
    with jax.debug_nans(True):
        for new, _, finite in (
            train(scaler, jnp.ones(2), nan),
            step(scaler, nan, jnp.ones(2)),
            scaler.step(nan, lambda g, w: w - g, jnp.ones(2)),
        ):
            assert (new.tolist(), bool(finite)) == ([1.0, 1.0], False)
        new, _, finite = steps(batch, two_nans, jnp.ones((2, 2)))
        assert (new.tolist(), finite.tolist()) == ([[1.0, 1.0]] * 2, [False] * 2)
        with pytest.raises(FloatingPointError):  # the setting works
            jax.jit(lambda g, w: w - g)(nan, jnp.ones(2))
    with jax.checking_leaks():
        assert not step(scaler, nan, jnp.ones(2))[2]


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
    new, after, finite = step(GradScaler(2.0**-126), jnp.full(n, 1e-30))
    assert finite
    assert np.allclose(new, 1e-10 * 2.0**126, rtol=1e-6)
    assert after.state.scale == 2.0**-126


# `GradScaler.step` with flax: a `TrainState`, and nnx modules whose forward pass changes them


X = jnp.linspace(-2.0, 2.0, 24).reshape(8, 3)
TX = optax.adam(1e-2)
# An overflow of float16 and not of the loss, a batch with NaN, one whose loss is Inf.
BATCHES = jnp.stack([X] * 7).at[2].mul(300.0).at[4, 1].set(jnp.nan).at[5].mul(1e30)
FINITE = [True, True, False, True, False, False, True]


class Model(nnx.Module):
    def __init__(self, norm: bool) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs) if norm else None
        self.last = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.first(x)
        return self.last(x if self.norm is None else self.norm(x))


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


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch statistics"])
@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_an_nnx_module_and_its_optimizer(wrap, norm):
    model = Model(norm)
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
