"""The loss of a product in 8 bits, against its definition row by row in float64."""

import math

import ml_dtypes
import numpy as np
import pytest

from polymp.fp8 import loss
from polymp.fp8.recipes import RECIPES, RESULT
from tests.support.fp8_numpy import DTYPES, VERBS


def measured(recipe, one, other):
    """The five numbers of `one @ other.T`."""
    name = RECIPES[recipe]
    operands = [
        loss.Operand(x, role, name.scale_axis(RESULT, role, 1), (1,))
        for x, role in zip((one, other), loss.ROLES[RESULT], strict=True)
    ]
    numbers = loss.product_loss(VERBS, name, operands, lambda a, b: a @ b.T)
    return [float(number) for number in numbers]


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def rounded(row, amax, power_of_two):
    scale = np.float32(448 / amax)
    if power_of_two:
        scale = np.float32(2.0 ** math.floor(math.log2(scale)))
    low = (row * scale).astype(ml_dtypes.float8_e4m3fn)
    return low.astype(np.float64) / np.float64(scale)


def by_hand(x, rowwise):
    """An array as 8 bits have it, the share that becomes zero, and the error of its rows."""
    amax = np.abs(x).max()
    back = np.array([rounded(r, np.abs(r).max() if rowwise else amax, rowwise) for r in x])
    zero = np.mean((back == 0) & (x != 0))
    errors = [np.linalg.norm(b - r) / np.linalg.norm(r) for b, r in zip(back, x, strict=True)]
    return back, zero, np.mean(errors)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_numbers_are_those_of_the_definition(recipe):
    x, w = (
        normal(16, 64) * np.exp(np.linspace(-9, 0, 16)).astype(np.float32)[:, None],
        normal(8, 64),
    )
    low_x, *of_x = by_hand(x, recipe == "rowwise")
    low_w, *of_w = by_hand(w, recipe == "rowwise")
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    result = np.linalg.norm(low_x @ low_w.T - exact) / np.linalg.norm(exact)
    found = measured(recipe, x, w)
    print(recipe, found)
    assert found == pytest.approx([*of_x, *of_w, result], rel=1e-4)
    assert (found[0] > 0) == (recipe == "tensorwise")


def test_a_large_row_hides_nothing():
    x, w = normal(32, 64), normal(16, 64)
    x[3] *= 1e6
    zero, error, *_ = measured("tensorwise", x, w)
    assert zero > 0.9
    assert error > 0.9
    zero, error, *_ = measured("rowwise", x, w)
    assert zero < 0.01
    assert error < 1.3 * loss.rounding_error("float8_e4m3fn")


def test_zeros_lose_nothing_and_an_inf_is_no_loss():
    x, w = normal(16, 32), normal(16, 32)
    assert measured("tensorwise", np.zeros_like(x), w)[:2] == [0.0, 0.0]
    x[2, 3] = np.inf
    with np.errstate(invalid="ignore"):
        found = measured("rowwise", x, w)
    assert np.isnan(found).tolist() == [False, True, False, False, True]


def test_tiny_and_large_numbers_have_the_same_error():
    x, w = normal(16, 32), normal(16, 32)
    found = [measured("rowwise", (x * s).astype(np.float32), w) for s in (2.0**-30, 1, 2.0**100)]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[2][:4] == pytest.approx(found[1][:4], rel=1e-5)


@pytest.mark.parametrize("format", DTYPES)
def test_the_error_of_rounding_alone(format):
    values = np.random.default_rng(0).uniform(1, 2, 100_000)
    off = values.astype(DTYPES[format]).astype(np.float64) - values
    assert np.linalg.norm(off) / np.linalg.norm(values) == pytest.approx(
        loss.rounding_error(format), rel=0.01
    )


def test_the_error_of_a_product_by_rounding_alone():
    found = {p: loss.product_rounding_error(RECIPES["tensorwise"], p) for p in loss.ROLES}
    assert [round(100 * error, 1) for error in found.values()] == [3.3, 5.3, 5.3]
