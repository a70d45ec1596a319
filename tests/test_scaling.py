"""The scaling rule on Python numbers, torch tensors and jax arrays: one rule, three kinds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymp.dtypes import FORMATS
from polymp.scaling import ScaleRule, ScaleState, from_state_dict, step, to_state_dict
from tests.conftest import need

TWO = ScaleRule(interval=3)


@pytest.mark.parametrize(
    ("state", "finite", "after"),
    [
        (ScaleState(8.0, 0), True, ScaleState(8.0, 1)),
        (ScaleState(8.0, 2), True, ScaleState(16.0, 0)),
        (ScaleState(8.0, 2), False, ScaleState(4.0, 0)),
        (ScaleState(8.0, 7), True, ScaleState(16.0, 0)),
        (ScaleState(2.0**127, 2), True, ScaleState(2.0**127, 0)),
        (ScaleState(2.0**-149, 0), False, ScaleState(0.0, 0)),
    ],
)
def test_table(state, finite, after):
    assert step(TWO, state, finite) == after


@given(
    history=st.lists(st.booleans(), max_size=40),
    exponent=st.integers(-149, 127),
    interval=st.integers(1, 5),
    growth=st.sampled_from([2.0, 4.0, 1.5, 1.25]),
    backoff=st.sampled_from([0.5, 0.25, 0.75]),
)
@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_arrays_follow_the_rule_bit_for_bit(kind, history, exponent, interval, growth, backoff):
    need(kind)
    rule = ScaleRule(growth, backoff, interval)
    if kind == "torch":
        import torch

        where, floats, ints, lowest = torch.where, torch.float32, torch.int32, -149
        make = torch.tensor
    else:
        import jax.numpy as jnp

        where, floats, ints, lowest = jnp.where, jnp.float32, jnp.int32, -126  # XLA flushes
        make = jnp.asarray
    plain = ScaleState(2.0 ** max(exponent, lowest), 0)
    array = ScaleState(make(plain.scale, dtype=floats), make(0, dtype=ints))
    for finite in history:
        plain, array = step(rule, plain, finite), step(rule, array, make(finite), where)
        if plain.scale < 2.0**lowest:
            break
        assert (float(array.scale), int(array.tracker)) == tuple(plain)
        assert (array.scale.dtype, array.tracker.dtype) == (floats, ints)


def test_products_are_rounded_as_float32_stores_them():
    after = step(ScaleRule(growth=1.1, interval=1), ScaleState(3.0, 0), True)
    assert after.scale != 3.0 * 1.1
    assert after.scale == pytest.approx(3.3, rel=FORMATS["float32"].eps)


def test_growth_stops_before_infinity():
    state = ScaleState(1.0, 0)
    for _ in range(1000):
        state = step(ScaleRule(interval=1), state, True)
        assert math.isfinite(state.scale)
    assert state.scale == 2.0**127


def test_state_dict_round_trip():
    rule, state = ScaleRule(3.0, 0.25, 7), ScaleState(12.0, 4)
    assert from_state_dict(to_state_dict(rule, state)) == (rule, state)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scale": None}, KeyError, "a scaler's state needs the entry 'scale'; it has"),
        ({"scale": "big"}, TypeError, "a scaler's scale must be a number, got 'big'"),
        (
            {"_growth_tracker": 1.5},
            TypeError,
            "a scaler's _growth_tracker must be a whole number, got 1.5",
        ),
    ],
)
def test_a_bad_state_dict(change, error, message):
    saved = to_state_dict(ScaleRule(), ScaleState()) | change
    saved = {k: v for k, v in saved.items() if v is not None}
    with pytest.raises(error) as raised:
        from_state_dict(saved)
    assert raised.value.args[0].startswith(message)
