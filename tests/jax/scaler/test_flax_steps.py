"""`linen_train_step` and `nnx_train_step`: the steps by hand, and skips that leave every bit."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from polymp.jax import GradScaler, autocast, linen_train_step, nnx_train_step
from tests.support.jax.scaler_tools import bits, numbers

X = jnp.linspace(-2.0, 2.0, 24).reshape(8, 3)
TX = optax.adam(1e-2)
# An overflow of float16 and not of the loss, a batch with NaN, one whose loss is Inf.
BATCHES = jnp.stack([X] * 7).at[2].mul(300.0).at[4, 1].set(jnp.nan).at[5].mul(1e30)
FINITE = [True, True, False, True, False, False, True]
SCALER = GradScaler(2.0**13)
# The scale is halved by the overflow and by both lost losses, as in torch.amp.
COUNTS = (2.0**10, 1, 0, 0, 3)


class Net(nn.Module):
    norm: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(4)(x)
        if self.norm:
            x = nn.BatchNorm(use_running_average=False, momentum=0.5)(x)
        return nn.Dense(2)(x)


class BatchState(TrainState):
    batch_stats: Any


def linen(norm: bool) -> TrainState:
    net = Net(norm)
    variables = dict(net.init(jax.random.key(0), X))
    made = {"apply_fn": net.apply, "params": variables["params"], "tx": TX}
    if norm:
        return BatchState.create(**made, batch_stats=variables["batch_stats"])
    return TrainState.create(**made)


def linen_loss(params: Any, state: Any, x: Any) -> Any:
    return (state.apply_fn({"params": params}, x) ** 2).mean()


def stats_loss(params: Any, state: Any, x: Any) -> Any:
    variables = {"params": params, "batch_stats": state.batch_stats}
    y, new = state.apply_fn(variables, x, mutable=["batch_stats"])
    return (y**2).mean(), new["batch_stats"]


low = autocast(linen_loss, dtype=jnp.float16)
low_stats = autocast(stats_loss, dtype=jnp.float16)


def by_hand(scaler: GradScaler, state: Any, x: Any, norm: bool) -> Any:
    def scaled_loss(params: Any) -> Any:
        out = low_stats(params, state, x) if norm else low(params, state, x)
        loss, stats = out if norm else (out, None)
        return scaler.scale(loss), (loss, stats)

    def update(grads: Any, state: Any) -> Any:
        updates, opt_state = TX.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        more = {"batch_stats": stats} if norm else {}
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state, **more)

    grads, (loss, stats) = jax.grad(scaled_loss, has_aux=True)(state.params)
    state, scaler, finite = scaler.step(grads, update, state, loss=loss)
    return loss, state, scaler, finite


def with_helper(scaler: GradScaler, state: Any, x: Any, norm: bool) -> Any:
    if not norm:
        return linen_train_step(scaler, state, low, state, x)
    (loss, _), *rest = linen_train_step(
        scaler, state, low_stats, state, x, has_aux=True, replace=lambda s: {"batch_stats": s}
    )
    return loss, *rest


def each(step: Any, norm: bool) -> Any:
    run = jax.jit(lambda s, state, x: step(s, state, x, norm), donate_argnums=(0, 1))
    scaler, state = jax.tree.map(jnp.array, (SCALER, linen(norm)))
    seen = []
    for x in BATCHES:
        loss, state, scaler, finite = run(scaler, state, x)
        seen.append((loss, finite))
    return (scaler, state), tuple(map(jnp.stack, zip(*seen, strict=True)))


def scanned(step: Any, norm: bool) -> Any:
    def body(carry: Any, x: Any) -> Any:
        loss, state, scaler, finite = step(*carry, x, norm)
        return (scaler, state), (loss, finite)

    start = jax.tree.map(jnp.array, (SCALER, linen(norm)))
    return jax.jit(lambda start: jax.lax.scan(body, start, BATCHES))(start)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch statistics"])
@pytest.mark.parametrize("run", [each, scanned])
def test_linen_is_a_loop_by_hand_bit_for_bit(run, norm):
    ours, theirs = run(with_helper, norm), run(by_hand, norm)
    assert bits(ours) == bits(theirs)
    (scaler, state), (_, finite) = ours
    if not norm:  # a batch norm takes the large batch, too
        assert finite.tolist() == FINITE
        assert numbers(scaler.state) == COUNTS
    assert int(state.step) == int(finite.sum())
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


def test_a_linen_step_that_is_skipped_leaves_every_bit():
    state = linen(True)
    run = jax.jit(lambda s, state, x: with_helper(s, state, x, True))
    _, state, scaler, finite = run(GradScaler(), state, X)
    assert finite
    before, stats = bits(state), bits(state.batch_stats)
    loss, after, scaler, finite = run(scaler, state, X.at[0, 0].set(jnp.nan))
    assert (bool(finite), bool(jnp.isnan(loss))) == (False, True)
    assert bits(after) == before
    assert numbers(scaler.state) == (2.0**15, 0, 1, 1, 1)
    # Had the caller put the statistics of that batch into the state, they were lost.
    assert np.isnan(stats_loss(state.params, state, X * jnp.nan)[1]["BatchNorm_0"]["mean"]).all()
    _, after, _, finite = run(scaler, after, X)
    assert finite
    assert bits(after.batch_stats) != stats


def test_linen_returns_the_loss_and_aux_as_they_are():
    state = linen(False)

    def fun(params: Any) -> Any:
        return params["Dense_1"]["bias"][0].astype(jnp.float16) + 2.5, "!"

    (loss, aux), after, _, finite = linen_train_step(GradScaler(4.0), state, fun, has_aux=True)
    assert (loss.dtype, aux, bool(finite), after.step) == (jnp.float16, "!", True, 1)
    loss, *_ = linen_train_step(GradScaler(), state, lambda params: jnp.float32(3))
    assert (loss.dtype, float(loss)) == (jnp.float32, 3.0)


def test_float8_scales_are_not_divided():
    """Their gradients are their next values: the loss scale is not in them."""
    from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as NEXT

    params = {"params": {"w": jnp.ones(2)}, NEXT: {"amax": jnp.zeros(3)}}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))

    @jax.custom_vjp
    def noted(amax: Any, w: Any) -> Any:
        return w

    noted.defvjp(lambda amax, w: (w, w), lambda w, g: (jnp.full(3, jnp.max(w)), g))

    def loss_fn(params: Any, x: Any) -> Any:
        return (noted(params[NEXT]["amax"], params["params"]["w"] * x)).sum()

    run = jax.jit(lambda s, state, x: linen_train_step(s, state, loss_fn, x))
    _, after, _, finite = run(GradScaler(8.0), state, 3.0)
    assert finite
    assert after.params[NEXT]["amax"].tolist() == [3.0] * 3
    assert after.params["params"]["w"].tolist() == [-2.0, -2.0]
    _, skipped, _, finite = run(GradScaler(8.0), after, jnp.inf)
    assert not finite
    assert bits(skipped.params) == bits(after.params)


# --- nnx -----------------------------------------------------------------------------------------


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, norm: bool = True, rate: float = 0.5) -> None:
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.last = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.first(x)
        x = x if self.norm is None else self.norm(x)
        return self.last(self.dropout(x))


def nnx_loss(model: Any, x: Any) -> Any:
    return (model(x) ** 2).mean()


def made(**options: Any) -> tuple[Model, Any]:
    model = Model(nnx.Rngs(0), **options)
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


def of(kind: Any, *nodes: Any) -> Any:
    return bits(nnx.state(nodes, kind))


def nnx_by_hand(scaler: GradScaler, model: Any, optimizer: Any, x: Any, loss_fn: Any) -> Any:
    graph, before = nnx.split((model, optimizer))
    before = jax.tree.map(lambda x: x, before)

    def scaled_loss(model: Any) -> Any:
        loss = loss_fn(model, x)
        return scaler.scale(loss), loss

    grads, loss = nnx.grad(scaled_loss, has_aux=True)(model)
    after = nnx.state((model, optimizer))

    def update(grads: Any, _: Any) -> Any:
        model, optimizer = nnx.merge(graph, jax.tree.map(lambda x: x, after))
        optimizer.update(model, grads)
        return nnx.state((model, optimizer))

    random = jax.tree.map(lambda x: x, nnx.state((model, optimizer), nnx.RngState))  # a copy
    state, scaler, finite = scaler.step(grads, update, before, loss=loss)
    nnx.update((model, optimizer), state)
    nnx.update((model, optimizer), random)
    return loss, scaler, finite


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch statistics"])
def test_nnx_is_a_loop_by_hand_bit_for_bit(norm):
    ours, theirs = made(norm=norm, rate=0.25), made(norm=norm, rate=0.25)
    loss = autocast(nnx_loss, dtype=jnp.float16)
    step = nnx.jit(lambda s, m, o, x: nnx_train_step(s, m, o, loss, x))
    hand = nnx.jit(lambda s, m, o, x: nnx_by_hand(s, m, o, x, loss))
    scaler = expected = SCALER
    seen = []
    for x in BATCHES:
        value, scaler, finite = step(scaler, *ours, x)
        other, expected, found = hand(expected, *theirs, x)
        assert bits((value, scaler, finite)) == bits((other, expected, found))
        assert bits(nnx.state(ours)) == bits(nnx.state(theirs))
        seen.append(bool(finite))
    if not norm:
        assert seen == FINITE
        assert numbers(scaler.state) == COUNTS
    assert ours[1].step[...] == sum(seen)
    assert ours[0].dropout.rngs.count[...] == len(BATCHES)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bad", ["loss", "gradient"])
@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_an_nnx_step_that_is_skipped(wrap, bad):
    """Not one bit changes, batch statistics included, but for the random streams: they go on."""
    model, optimizer = made()
    largest = GradScaler(2.0**126)
    step = wrap(lambda s, m, o, x: nnx_train_step(s, m, o, nnx_loss, x))
    _, scaler, finite = step(GradScaler(), model, optimizer, X)
    assert finite
    others = nnx.All(nnx.Not(nnx.RngState))
    before, stats = of(others, model, optimizer), of(nnx.BatchStat, model)
    drawn = int(model.dropout.rngs.count[...])
    x = X.at[0, 0].set(jnp.nan) if bad == "loss" else X * 1e3
    scaler = scaler if bad == "loss" else largest
    loss, after, finite = step(scaler, model, optimizer, x)
    assert (bool(finite), bool(jnp.isfinite(loss))) == (False, bad != "loss")
    assert of(others, model, optimizer) == before
    assert int(model.dropout.rngs.count[...]) == drawn + 1
    assert float(after.state.scale) == float(scaler.state.scale) / 2
    _, _, finite = step(GradScaler(), model, optimizer, X)
    assert finite
    assert of(nnx.BatchStat, model) != stats


def test_a_batch_with_nan_would_poison_the_statistics():
    """The statistics that the test above would see if they were kept after a skipped step."""
    model, _ = made()
    nnx_loss(model, X.at[0, 0].set(jnp.nan))
    assert jnp.isnan(model.norm.mean[...]).all()


def test_what_the_forward_pass_makes_stays():
    class Noting(Model):
        def __call__(self, x: Any) -> Any:
            self.seen = nnx.Intermediate(x[0])
            return super().__call__(x)

    model = Noting(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    step = nnx.jit(lambda s, m, o, x: nnx_train_step(s, m, o, nnx_loss, x))
    _, scaler, finite = step(GradScaler(), model, optimizer, X)
    assert (bool(finite), model.seen[...].tolist()) == (True, X[0].tolist())
    *_, finite = step(scaler, model, optimizer, X * jnp.inf)
    assert not finite
    assert jnp.isfinite(model.first.kernel[...]).all()


def test_only_what_the_optimizer_is_for_is_trained():
    model = Model(nnx.Rngs(0))
    last = lambda path, _: "last" in path  # noqa: E731
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.All(nnx.Param, last))
    before, moving = bits(nnx.state(model.first)), bits(nnx.state(model.last))
    (_, aux), _, finite = nnx_train_step(
        GradScaler(), model, optimizer, lambda m, x: (nnx_loss(m, x), "!"), X, has_aux=True
    )
    assert (bool(finite), aux) == (True, "!")
    assert bits(nnx.state(model.first)) == before
    assert bits(nnx.state(model.last)) != moving


@pytest.mark.parametrize("way", ["linen", "nnx"])
def test_disabled_every_step_is_taken(way):
    scaler = GradScaler(enabled=False)
    bad = X * jnp.nan
    if way == "linen":
        _, state, after, finite = linen_train_step(
            scaler, linen(False), linen_loss, linen(False), bad
        )
        assert jnp.isnan(state.params["Dense_0"]["kernel"]).all()
    else:
        model, optimizer = made()
        _, after, finite = nnx_train_step(scaler, model, optimizer, nnx_loss, bad)
        assert jnp.isnan(model.first.kernel[...]).all()
    assert (bool(finite), after.enabled) == (True, False)


NET, (MODEL, OPTIMIZER) = linen(False), made()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: linen_train_step(2.0, NET, linen_loss),
            "linen_train_step needs a polymp.jax.GradScaler first, got 2.0.",
        ),
        (
            lambda: linen_train_step(SCALER, {"w": 1.0}, linen_loss),
            "linen_train_step needs a flax TrainState, got <class 'dict'>.",
        ),
        (
            lambda: linen_train_step(SCALER, NET, linen_loss, replace=dict),
            "linen_train_step hands aux to replace: pass has_aux=True with it.",
        ),
        (
            lambda: linen_train_step(SCALER, NET, lambda params: X),
            "the function given to linen_train_step must return a loss that is one float, got "
            "float32[8, 3]. Reduce it to one, by .mean() for instance. Or pass has_aux=True, if it "
            "returns (loss, aux).",
        ),
        (
            lambda: nnx_train_step(None, MODEL, OPTIMIZER, nnx_loss, X),
            "nnx_train_step needs a polymp.jax.GradScaler first, got None.",
        ),
        (
            lambda: nnx_train_step(SCALER, 1, OPTIMIZER, nnx_loss, X),
            "nnx_train_step needs an nnx.Module, got <class 'int'>.",
        ),
        (
            lambda: nnx_train_step(SCALER, MODEL, TX, nnx_loss, X),
            f"nnx_train_step needs an nnx.Optimizer(model, tx, wrt=nnx.Param), got {type(TX)}.",
        ),
        (
            lambda: nnx_train_step(SCALER, MODEL, OPTIMIZER, 5, X),
            "nnx_train_step needs the function that computes the loss, got 5.",
        ),
    ],
)
def test_what_is_refused(call, message):
    before = bits(nnx.state((MODEL, OPTIMIZER)))
    with pytest.raises(TypeError) as raised:
        call()
    assert raised.value.args[0] == message
    assert bits(nnx.state((MODEL, OPTIMIZER))) == before
