"""`GradScaler.update` for JAX: the ends of the scale, and what it takes and refuses."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polymp.backends.jax.scaler.grad_scaler import GradScaler
from polymp.scaling.scale_rule import LARGEST, SMALLEST
from tests.support.jax.scaler_tools import values


@pytest.mark.parametrize("finite", [True, False])
def test_scale_and_inverse_are_normal_at_both_ends(finite):
    """XLA on CPU flushes subnormal numbers to 0: neither may be one."""

    @jax.jit
    def run(scaler):
        def body(scaler, _):
            after = scaler.update(finite)
            return after, (after.state.scale, after.scale(jnp.float32(1)), 1 / after.state.scale)

        return jax.lax.scan(body, scaler, None, length=600)

    after, seen = run(GradScaler(growth_interval=1))
    assert values(after)[0] == (LARGEST if finite else SMALLEST)
    tiny = np.finfo(np.float32).tiny
    for numbers_ in map(np.asarray, seen):
        assert np.isfinite(numbers_).all()
        assert (numbers_ >= tiny).all()
    (back,), fine = jax.jit(lambda s: s.unscale([s.scale(jnp.float32(3))]))(after)
    assert (float(back), bool(fine)) == (3.0, True)


def test_a_subnormal_is_flushed_there():
    """The inverse that the test above would see if the bounds were wider by one power of two."""
    lost = jax.jit(lambda x: 1 / x)(jnp.float32(2.0**127))
    kept = jax.jit(lambda x: 1 / x)(jnp.float32(LARGEST))
    assert kept == np.float32(2.0**-126)
    assert lost == 0 or jax.default_backend() != "cpu"


@pytest.mark.parametrize(
    ("finite", "shown"),
    [(1.0, "float32[]"), (1, "int32[]"), (np.ones(2, bool), "bool[2]")],
    ids=["float", "int", "two"],
)
@pytest.mark.parametrize("name", ["finite", "loss_finite"])
def test_update_wants_one_bool(name, finite, shown):
    found = {"finite": True, "loss_finite": True} | {name: finite}
    with pytest.raises(TypeError) as raised:
        GradScaler().update(**found)
    assert raised.value.args[0] == f"{name} must be one bool, got {shown}."


@pytest.mark.parametrize(
    ("loss", "finite"),
    [
        (1.0, True),
        (np.float16(7), True),
        (jnp.asarray([1.0, np.nan]), False),
        ({"a": jnp.float16(np.inf), "n": 3}, False),
        (jnp.asarray(1 + 1j * np.nan), False),
        (jnp.float32(3e38), True),
    ],
)
def test_a_loss_is_looked_at_as_it_is(loss, finite):
    seen = GradScaler(2.0**-100).loss_finite(loss)
    assert (seen.dtype, seen.shape, bool(seen)) == (jnp.bool_, (), finite)


@pytest.mark.parametrize(("value", "shown"), [({"a": 1}, "{'a': 1}"), (None, "None")])
def test_update_says_what_it_was_given(value, shown):
    with pytest.raises(TypeError, match=re.escape(f"finite must be one bool, got {shown}.")):
        GradScaler().update(value)


def test_a_state_is_taken_outside_of_traced_code():
    with pytest.raises(TypeError, match="return the scaler from the function"):
        jax.jit(lambda scaler: scaler.state_dict()["scale"])(GradScaler())


@pytest.mark.parametrize("loss", ["a", 3, len])
def test_a_loss_that_is_none_is_refused(loss):
    with pytest.raises(TypeError, match=r"^loss must be the loss as it was before scaling, got "):
        GradScaler().step(jnp.ones(2), lambda grads, w: w, jnp.ones(2), loss=loss)
