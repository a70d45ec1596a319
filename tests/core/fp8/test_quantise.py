"""Quantisation against its formulas in exact arithmetic, and Inf and NaN, which have to stay."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from polymp import dtypes
from polymp.fp8.quantise import inverse, quantised, scale_of
from polymp.fp8.recipes import RECIPES
from tests.support.fp8_numpy import VERBS

ROLES = ("activation", "weight", "gradient")
CASES = [(name, role) for name in RECIPES for role in ROLES]


def nearest_float32(number: Fraction) -> float:
    """The float32 nearest to a positive number, by exact comparisons."""
    near = np.float32(float(number))
    around = [np.nextafter(near, np.float32(0)), near, np.nextafter(near, np.float32(np.inf))]
    return float(min(around, key=lambda one: abs(Fraction(float(one)) - number)))


@pytest.mark.parametrize(("name", "role"), CASES)
def test_a_scale_is_the_formula_in_exact_arithmetic(name, role):
    recipe = RECIPES[name]
    random = np.random.default_rng(0)
    for amax in (*np.exp(random.uniform(-60, 60, 300)).astype(np.float32), 0.0, 1e-12, 448.0):
        array = np.array([[0.0, -amax], [amax / 2, 0.0]], np.float32)
        scale = scale_of(VERBS, array, recipe, role, None)
        divisor = max(Fraction(float(np.float32(amax))), Fraction(1e-12))
        expected = nearest_float32(Fraction(recipe.largest(role)) / divisor)
        if recipe.power_of_two:
            expected = 2.0 ** (math.frexp(expected)[1] - 1)
        assert scale.dtype == np.float32
        assert scale.shape == ()
        assert float(scale) == expected, amax


def test_rows_have_scales_of_their_own():
    array = np.array([[1.0, -2.0], [0.25, 0.125]], np.float32)
    of_rows = scale_of(VERBS, array, RECIPES["rowwise"], "activation", 1)
    assert of_rows.tolist() == [[128.0], [1024.0]]  # 448 / 2 = 224, 448 / 0.25 = 1792
    of_columns = scale_of(VERBS, array, RECIPES["rowwise"], "activation", 0)
    assert of_columns.tolist() == [[256.0, 128.0]]


@pytest.mark.parametrize(("name", "role"), CASES)
def test_what_is_quantised_and_multiplied_back_is_near(name, role):
    recipe = RECIPES[name]
    format = dtypes.get(recipe.format_of(role))
    array = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    scale = scale_of(VERBS, array, recipe, role, recipe.scale_axis("result", role, 1))
    low = quantised(VERBS, array, scale, format.name)
    back = low.astype(np.float32) * inverse(scale)
    off = np.abs(back - array)
    assert low.dtype.name == format.name
    least = format.smallest_subnormal * inverse(scale) / 2
    assert (off <= np.maximum(np.abs(array) * format.eps / 2 * (1 + 1e-6), least)).all()
    assert np.abs(low.astype(np.float32)).max() <= format.max


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(("name", "role"), CASES)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_inf_and_nan_never_become_finite(bad, name, role, dtype):
    recipe = RECIPES[name]
    array = np.ones((4, 8), dtype)
    array[2, 5] = bad
    axis = recipe.scale_axis("result", role, 1)
    scale = scale_of(VERBS, array, recipe, role, axis)
    low = quantised(VERBS, array, scale, recipe.format_of(role)).astype(np.float32)
    assert np.isnan(low[2]).all()
    others = np.isnan(np.delete(low, 2, 0))
    assert others.all() if axis is None else not others.any()
    assert np.isnan(inverse(scale)).any()


@pytest.mark.filterwarnings("ignore:invalid value")
def test_without_the_poison_an_inf_would_leave_finite_numbers():
    """The check above can fail: a scale of 0 makes 0 of everything that is finite."""
    low = quantised(VERBS, np.array([np.inf, 1.0], np.float32), np.float32(0), "float8_e4m3fn")
    assert np.isfinite(low.astype(np.float32)).any()


@pytest.mark.parametrize("value", [1e9, -1e9, 449.0])
def test_what_is_too_large_is_clipped(value):
    low = quantised(VERBS, np.array([value], np.float32), np.float32(1), "float8_e4m3fn")
    assert low.astype(np.float32) == math.copysign(448.0, value)
