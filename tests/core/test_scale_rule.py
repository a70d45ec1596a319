"""The scaling rule on Python numbers; of every other kind, see test_scaler_histories.py."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymp import scaling
from polymp.dtypes import FORMATS
from polymp.scaling import (
    LARGEST,
    SMALLEST,
    ScaleRule,
    ScaleState,
    checked,
    checked_scale,
    from_state_dict,
    step,
    to_state_dict,
)
from tests.support.scaler_arguments import SAVED, TORCHS

THREE = ScaleRule(interval=3)
PATIENT = ScaleRule(interval=3, hysteresis=2)
NARROW = ScaleRule(interval=1, min_scale=1.0, max_scale=24.0)

# What one step found: everything finite, a gradient that is not, a loss that is not.
GOOD, OVERFLOW, LOST = (True, True), (False, True), (False, False)
# A loss that is not finite whose gradients are: a good step, as in torch.amp.
LOST_ALONE = (True, False)


@pytest.mark.parametrize(
    ("rule", "state", "found", "after"),
    [
        (THREE, ScaleState(8.0, 0), GOOD, ScaleState(8.0, 1)),
        (THREE, ScaleState(8.0, 2), GOOD, ScaleState(16.0, 0)),
        (THREE, ScaleState(8.0, 2), OVERFLOW, ScaleState(4.0, 0, 1, 0, 1)),
        (THREE, ScaleState(8.0, 2), LOST, ScaleState(4.0, 0, 1, 1, 1)),
        (THREE, ScaleState(8.0, 1), LOST_ALONE, ScaleState(8.0, 2)),
        # A count past a lowered interval grows the scale.
        (THREE, ScaleState(8.0, 7), GOOD, ScaleState(16.0, 0)),
        # A good step ends a row of skips; all of them stay counted.
        (THREE, ScaleState(8.0, 1, 4, 2, 9), GOOD, ScaleState(8.0, 2, 0, 0, 9)),
        (THREE, ScaleState(8.0, 0, 4, 2, 9), OVERFLOW, ScaleState(4.0, 0, 5, 2, 10)),
        (THREE, ScaleState(8.0, 0, 4, 2, 9), LOST, ScaleState(4.0, 0, 5, 3, 10)),
        # The bounds, by default and by choice.
        (THREE, ScaleState(LARGEST, 2), GOOD, ScaleState(LARGEST, 0)),
        (THREE, ScaleState(SMALLEST, 0), OVERFLOW, ScaleState(SMALLEST, 0, 1, 0, 1)),
        (NARROW, ScaleState(8.0, 0), GOOD, ScaleState(16.0, 0)),
        (NARROW, ScaleState(16.0, 0), GOOD, ScaleState(24.0, 0)),
        (NARROW, ScaleState(24.0, 0), GOOD, ScaleState(24.0, 0)),
        (NARROW, ScaleState(1.5, 0), OVERFLOW, ScaleState(1.0, 0, 1, 0, 1)),
        (NARROW, ScaleState(1.0, 0), OVERFLOW, ScaleState(1.0, 0, 1, 0, 1)),
        # Two skips in a row are put up with; they end a good streak all the same.
        (PATIENT, ScaleState(8.0, 2), OVERFLOW, ScaleState(8.0, 0, 1, 0, 1)),
        (PATIENT, ScaleState(8.0, 0, 1, 0, 1), OVERFLOW, ScaleState(8.0, 0, 2, 0, 2)),
        (PATIENT, ScaleState(8.0, 0, 2, 0, 2), OVERFLOW, ScaleState(4.0, 0, 3, 0, 3)),
        (PATIENT, ScaleState(8.0, 0, 3, 0, 3), OVERFLOW, ScaleState(4.0, 0, 4, 0, 4)),
        (PATIENT, ScaleState(8.0, 0, 2, 1, 2), OVERFLOW, ScaleState(4.0, 0, 3, 1, 3)),
        (PATIENT, ScaleState(8.0, 0, 1, 0, 1), LOST, ScaleState(8.0, 0, 2, 1, 2)),
        (PATIENT, ScaleState(8.0, 0, 3, 0, 3), LOST, ScaleState(4.0, 0, 4, 1, 4)),
        (PATIENT, ScaleState(8.0, 0, 3, 0, 3), GOOD, ScaleState(8.0, 1, 0, 0, 3)),
    ],
)
def test_table(rule: ScaleRule, state: ScaleState, found: Any, after: ScaleState) -> None:
    finite, loss_finite = found
    assert step(rule, state, finite, loss_finite=loss_finite) == after


def test_without_a_word_on_the_loss_it_counts_as_finite() -> None:
    state = ScaleState(8.0, 2)
    for finite in (True, False):
        assert step(THREE, state, finite) == step(THREE, state, finite, loss_finite=True)


findings = st.lists(st.sampled_from([GOOD, GOOD, OVERFLOW, LOST, LOST_ALONE]), max_size=40)
rules = st.builds(
    ScaleRule,
    growth=st.sampled_from([2.0, 4.0, 1.5, 1.25]),
    backoff=st.sampled_from([0.5, 0.25, 0.75]),
    interval=st.integers(1, 5),
    min_scale=st.sampled_from([SMALLEST, 2.0**-10, 1.0]),
    max_scale=st.sampled_from([LARGEST, 2.0**10, 3.0]),
    hysteresis=st.integers(0, 3),
)


@given(rule=rules, exponent=st.integers(-126, 126), found=findings)
def test_scale_and_inverse_stay_normal_float32_numbers(
    rule: ScaleRule, exponent: int, found: list[Any]
) -> None:
    normal = FORMATS["float32"].smallest_normal
    state = ScaleState(min(max(2.0**exponent, rule.min_scale), rule.max_scale))
    for at, (finite, loss_finite) in enumerate(found, 1):
        state = step(rule, state, finite, loss_finite=loss_finite)
        assert rule.min_scale <= state.scale <= rule.max_scale
        assert normal <= scaling.as_float32(1 / state.scale) <= FORMATS["float32"].max
        bad = [not finite for finite, _ in found[:at]]
        assert state.skipped == sum(bad)
        assert state.skips == (bad[::-1].index(False) if False in bad else at)
        lost = [not loss for _, loss in found[at - state.skips : at]]
        assert state.spoiled == sum(lost)


def test_products_are_rounded_as_float32_stores_them() -> None:
    after = step(ScaleRule(growth=1.1, interval=1), ScaleState(3.0, 0), True)
    assert after.scale != 3.0 * 1.1
    assert abs(Fraction(after.scale) - Fraction(3.0 * 1.1)) <= Fraction(2**-23)


def test_what_is_checked_comes_back_as_floats_and_ints() -> None:
    given = ScaleRule(2, Fraction(1, 2), 5.0, 1, 0.1 + 1, 3.0)
    after = checked(given)
    assert after == ScaleRule(2.0, 0.5, 5, 1.0, scaling.as_float32(1.1), 3)
    assert [type(x) for x in after] == [float, float, int, float, float, int]
    assert checked(ScaleRule(interval=10**12)).interval == 2**31 - 1
    assert checked(ScaleRule()) == ScaleRule()


@pytest.mark.parametrize(
    ("value", "shown"), [("2", "'2'"), (10**400, "1000")], ids=["text", "beyond float64"]
)
def test_what_is_no_number_is_named(value: Any, shown: str) -> None:
    with pytest.raises(TypeError, match=f"^first must be a number, got {shown}"):
        checked_scale("first", value, NARROW)


@pytest.mark.parametrize("value", [1e38, 3.4e38, 2.0**127, 2.0**-149, 1e-40, 8, 2.0**126])
def test_a_first_scale_may_lie_beyond_the_widest_bounds(value: float) -> None:
    """The rule brings it between them from where it changes."""
    assert checked_scale("first", value, ScaleRule(), first=True) == value
    first = ScaleState(scaling.as_float32(float(value)))
    assert step(ScaleRule(interval=2), first, True).scale == first.scale
    assert step(ScaleRule(interval=1), first, True).scale <= LARGEST
    assert step(ScaleRule(), first, False).scale >= SMALLEST
    assert step(ScaleRule(backoff=0.1), first, False).scale <= LARGEST


RULE, STATE = ScaleRule(3.0, 0.25, 7, 1.0, 64.0, 2), ScaleState(12.0, 4, 5, 3, 9)


def test_a_state_comes_back_as_it_was() -> None:
    assert to_state_dict(RULE, STATE) == SAVED
    assert list(to_state_dict(RULE, STATE)) == list(SAVED)
    assert from_state_dict(SAVED) == (RULE, STATE)


@given(
    rule=rules,
    exponent=st.integers(-126, 126),
    counts=st.lists(st.integers(0, 2**31 - 1), min_size=4, max_size=4),
)
def test_every_state_comes_back_as_it_was(rule: ScaleRule, exponent: int, counts: Any) -> None:
    state = ScaleState(min(max(2.0**exponent, rule.min_scale), rule.max_scale), *counts)
    assert from_state_dict(to_state_dict(rule, state)) == (rule, state)


def test_what_torch_saved_keeps_the_bounds_that_there_are() -> None:
    narrow = ScaleRule(min_scale=1.0, max_scale=8.0, hysteresis=1)
    assert from_state_dict(TORCHS) == (ScaleRule(3.0, 0.25, 7), ScaleState(12.0, 4))
    bounded = ScaleRule(3.0, 0.25, 7, 1.0, 8.0, 1), ScaleState(8.0, 4)
    assert from_state_dict(TORCHS, narrow) == bounded
    assert from_state_dict(SAVED, narrow) == (RULE, STATE)


@pytest.mark.parametrize(
    ("scale", "after"),
    [(2.0**127, LARGEST), (1e300, LARGEST), (2.0**-140, SMALLEST), (1e-300, SMALLEST), (8, 8.0)],
)
def test_a_positive_scale_is_brought_between_the_bounds(scale: float, after: float) -> None:
    _, state = from_state_dict(TORCHS | {"scale": scale})
    assert state.scale == after
    assert type(state.scale) is float


@pytest.mark.parametrize("bound", [0.1, 0.7, 1e-3])
def test_a_scale_may_be_its_own_bound(bound: float) -> None:
    """float32 has no 0.1: the bound is rounded up, and the scale with it."""
    low, high = (checked(rule) for rule in (ScaleRule(min_scale=bound), ScaleRule(max_scale=bound)))
    for rule in (low, high):
        assert checked_scale("init_scale", bound, rule) == bound
    for rule, beyond in ((low, bound * 0.999), (high, bound * 1.001)):
        with pytest.raises(ValueError, match="from min_scale to max_scale"):
            checked_scale("init_scale", beyond, rule)
