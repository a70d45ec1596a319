"""`StuckWatch`: tells once of each long row of skips, and never waits for the device."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymp.backends.jax import compat
from polymp.backends.jax.scaler import gradient_stats, stuck_watch
from polymp.errors import ScalerWarning, StuckError
from polymp.jax import GradScaler, StuckWatch
from polymp.scaling.gradient_report import GradientReport

SICK = {"w": jnp.array([1.0, jnp.inf, jnp.nan]), "b": jnp.ones(2)}
WELL = {"w": jnp.ones(3), "b": jnp.ones(2)}


class Late:
    """An array on its way: it arrives when it is told to, and must not be read before."""

    def __init__(self, array):
        self.array, self.here = array, False

    def is_ready(self):
        return self.here

    def copy_to_host_async(self):
        self.sent = True

    def __array__(self, *args, **kwargs):
        assert self.here, "the host waited for the device"
        assert self.sent
        return np.asarray(self.array)


@pytest.fixture
def late(monkeypatch):
    """Every copy of a state arrives late; the list of them."""
    copies = []
    packed = stuck_watch._packed

    def later(state):
        copies.append(Late(packed(state)))
        return copies[-1]

    monkeypatch.setattr(stuck_watch, "_packed", later)
    return copies


def skips(*good, on_stuck="raise", stuck_after=3, scaler=None):
    """Reports of a watch over a history; each copy has arrived by the next call."""
    seen = []
    watch = StuckWatch(seen.append, stuck_after)
    scaler = scaler or GradScaler()
    for finite in good:
        scaler = scaler.update(finite)
        watch.watch(scaler)
    assert watch.finish() == watch.state == to_numbers(scaler)
    return seen


def to_numbers(scaler):
    return type(scaler.state)(*(x.item() for x in scaler.state))


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 4))
def test_once_for_each_row_of_skips(history, stuck_after):
    rows, row = [], 0
    for step, good in enumerate(history):
        row = 0 if good else row + 1
        if row == stuck_after:
            rows.append((row, history[: step + 1].count(False)))
    seen = skips(*history, stuck_after=stuck_after)
    assert [(r.state.skips, r.state.skipped) for r in seen] == rows


def test_nothing_is_read_before_it_has_arrived(late):
    seen = []
    watch = StuckWatch(seen.append, 2)
    scaler = GradScaler()
    for _ in range(5):
        scaler = scaler.update(False)
        watch.watch(scaler)
    assert (len(late), watch.state, seen) == (5, None, [])
    late[1].here = True  # the second, but not the first: states are looked at in order
    watch.watch(scaler)
    assert (watch.state, seen) == (None, [])
    late[0].here = True
    watch.watch(scaler)
    assert watch.state.skips == 2
    assert [r.state.skips for r in seen] == [2]
    for copy in late:
        copy.here = True
    watch.finish()
    assert watch.state.skips == 5
    assert len(seen) == 1


def test_this_test_notices_a_host_that_waits(late, monkeypatch):
    monkeypatch.setattr(compat, "is_ready", lambda x: True)
    watch = StuckWatch()
    watch.watch(GradScaler())
    with pytest.raises(AssertionError, match="the host waited"):
        watch.watch(GradScaler())


def test_healthy_steps_count_no_gradients(monkeypatch):
    counted = []
    monkeypatch.setattr(
        stuck_watch, "counted", lambda *args: counted.append(1) or gradient_stats.counted(*args)
    )
    watch = StuckWatch(stuck_after=5)
    watch.watch(GradScaler(), WELL)
    jax.block_until_ready(watch._on_their_way[-1].copy)
    jax.block_until_ready(watch._on_their_way[-1].counts.table)
    before = len(counted)
    for _ in range(20):
        watch.watch(GradScaler(), WELL)
        jax.block_until_ready(watch._on_their_way[-1].copy)
    assert (before, len(counted)) == (1, 1), "only while nothing was known of the state"


def test_gradients_are_those_of_the_step_that_was_stuck():
    seen = []
    watch = StuckWatch(seen.append, 3)
    scaler = GradScaler()
    for at in range(8):
        grads = SICK if at == 4 else {"w": jnp.full(3, jnp.inf), "b": jnp.ones(2)}
        scaler = scaler.update(at < 2)
        watch.watch(scaler, grads)
    watch.finish()
    (report,) = seen
    assert isinstance(report, GradientReport)
    assert report.state.skips == 3
    assert [str(g) for g in report.bad] == ["w (1 Inf, 1 NaN of 3)"]
    assert report.why_stuck.startswith(
        "3 steps in a row were skipped; the loss scale is 8192. Inf or NaN in 1 of 2 gradients: "
        "w (1 Inf, 1 NaN of 3)."
    )


def test_names_can_be_given():
    seen = []
    watch = StuckWatch(seen.append, 1)
    watch.watch(GradScaler().update(False), SICK, {"w": "kernel", "b": "bias"})
    watch.finish()
    assert [g.name for g in seen[0].gradients] == ["bias", "kernel"]


def test_warn():
    watch = StuckWatch(stuck_after=2)
    scaler = GradScaler().update(False).update(False)
    watch.watch(scaler)
    jax.block_until_ready(watch._on_their_way[-1].copy)
    with pytest.warns(ScalerWarning, match=r"^2 steps in a row were skipped") as caught:
        watch.watch(scaler)
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.watch(scaler)
        watch.finish()


def test_raise_loses_no_state():
    watch = StuckWatch("raise", 1)
    scaler = GradScaler().update(False)
    watch.watch(scaler)
    jax.block_until_ready(watch._on_their_way[-1].copy)
    with pytest.raises(StuckError, match=r"^1 steps in a row were skipped"):
        watch.watch(scaler.update(True))
    assert watch.finish().skips == 0
    watch.watch(scaler)
    with pytest.raises(StuckError):
        watch.finish()


def test_spoiled_losses_are_told_from_overflows():
    seen = []
    watch = StuckWatch(seen.append, 2)
    scaler = GradScaler()
    for _ in range(2):
        scaler = scaler.update(False, loss_finite=False)
        watch.watch(scaler)
    watch.finish()
    assert "the loss itself was not finite" in seen[0].why_stuck
    assert seen[0].state.scale == 2.0**14


def test_a_donated_scaler():
    step = jax.jit(lambda s: s.update(False), donate_argnums=0)
    seen = []
    watch, scaler = StuckWatch(seen.append, 4), jax.device_put(GradScaler())
    for _ in range(6):
        before, scaler = scaler, step(scaler)
        watch.watch(scaler)
        assert before.state.scale.is_deleted()
    assert watch.finish() == to_numbers(scaler)
    assert [r.state.skips for r in seen] == [4]


def test_a_scaler_out_of_a_train_state():
    optimizer = optax.sgd(0.1)

    @jax.jit
    def step(state, x):
        def update(grads, params, opt):
            updates, opt = optimizer.update(grads, opt, params)
            return optax.apply_updates(params, updates), opt

        scaler = state["scaler"]
        grads = jax.grad(lambda w: scaler.scale((w * x).sum()))(state["params"])
        (params, opt), scaler, _ = scaler.step(grads, update, state["params"], state["opt"])
        return {"params": params, "opt": opt, "scaler": scaler}, {"w": grads}

    w = jnp.ones(2)
    state = {"params": w, "opt": optimizer.init(w), "scaler": GradScaler()}
    seen = []
    watch = StuckWatch(seen.append, 2)
    for x in (1.0, jnp.inf, jnp.inf, 1.0):
        state, grads = step(state, x)
        watch.watch(state["scaler"], grads)
    assert watch.finish().skipped == 2
    assert [str(g) for g in seen[0].bad] == ["w (2 Inf, 0 NaN of 2)"]


def test_a_restored_scaler_of_numpy_arrays():
    scaler = jax.tree.map(np.asarray, GradScaler().update(False))
    assert StuckWatch().watch(scaler) is None
    assert len(skips(False, False, stuck_after=3, scaler=scaler)) == 1


def test_every_bit_of_the_scale_arrives():
    for scale in (2.0**-126, 2.0**126, 1.1, 3e-38, 65504.0):
        scaler = GradScaler(scale)
        watch = StuckWatch()
        watch.watch(scaler)
        assert watch.finish() == to_numbers(scaler)


def test_a_disabled_scaler_is_not_looked_at(late):
    watch = StuckWatch()
    watch.watch(GradScaler(enabled=False))
    assert (late, watch.finish()) == ([], None)


def test_what_cannot_be_watched():
    watch = StuckWatch()
    batch = jax.vmap(lambda _: GradScaler())(jnp.arange(3))
    with pytest.raises(TypeError, match=r"batch of shape \(3,\), and watch takes one scaler"):
        watch.watch(batch)
    watch.watch(jax.tree.map(lambda x: x[1], batch))  # as the message says
    with pytest.raises(TypeError, match="call it after the jitted step"):
        jax.jit(lambda s: watch.watch(s))(GradScaler())
    with pytest.raises(TypeError, match=r"takes the scaler that a step returned, got \(1, 2\)"):
        watch.watch((1, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_stuck must be 'warn', 'raise' or a function"):
        StuckWatch("ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stuck_after must be a whole number from 1 up, got 0"):
        StuckWatch(stuck_after=0)
