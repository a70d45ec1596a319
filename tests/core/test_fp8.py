"""The recipes as a table, and what no recipe can be."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from polymp import dtypes
from polymp.errors import PolicyError
from polymp.fp8 import RECIPES, Product, inverse, quantised, recipe_of, scale_of, why_not
from tests.support.fp8_numpy import VERBS

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"

# Formats of activation, weight and gradient; the axes of the scales of both operands of the three
# products, where the first operand is summed over axis 1 and the second over axis 0.
TABLE = {
    "tensorwise": ((E4M3, E4M3, E5M2), ((None, None), (None, None), (None, None)), False, False),
    "rowwise": ((E4M3, E4M3, E4M3), ((1, 0), (1, 0), (1, 0)), True, False),
    "rowwise_gw_hp": ((E4M3, E4M3, E4M3), ((1, 0), (1, None), (1, 0)), True, True),
}
PRODUCTS = (
    ("result", "activation", "weight"),
    ("input_gradient", "gradient", "weight"),
    ("weight_gradient", "activation", "gradient"),
)


def test_the_recipes():
    assert RECIPES.keys() == TABLE.keys()
    for name, recipe in RECIPES.items():
        formats, axes, power_of_two, high = TABLE[name]
        assert recipe.name == name
        assert tuple(map(recipe.format_of, ("activation", "weight", "gradient"))) == formats
        assert recipe.power_of_two is power_of_two
        assert recipe.weight_gradient_high is high
        for (product, first, second), expected in zip(PRODUCTS, axes, strict=True):
            found = recipe.scale_axis(product, first, 1), recipe.scale_axis(product, second, 0)
            assert found == expected, (name, product)


@pytest.mark.parametrize("name", ["tensor", "", None, ["rowwise"]])
def test_an_unknown_recipe(name):
    with pytest.raises(PolicyError) as error:
        recipe_of(name, "here")
    assert str(error.value) == (
        f"here: fp8 = {name!r} is not one of tensorwise, rowwise, rowwise_gw_hp."
    )


# --- Quantisation against its formulas in exact arithmetic, and Inf and NaN, which have to stay ---


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
        expected = nearest_float32(Fraction(dtypes.FORMATS[recipe.format_of(role)].max) / divisor)
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


@pytest.mark.parametrize("value", [1e9, -1e9, 449.0])
def test_what_is_too_large_is_clipped(value):
    low = quantised(VERBS, np.array([value], np.float32), np.float32(1), "float8_e4m3fn")
    assert low.astype(np.float32) == math.copysign(448.0, value)


# --- Why a product runs in the region's dtype instead: every reason by its whole text -------------


GOOD = Product("linear", 4096, 4096, 4096, ("bfloat16", "float32"), "cpu")
GPU = GOOD._replace(device="cuda", capability=(9, 0))
TABLE_FALLBACK = [
    ({"m": 4095}, "m = 4095 is not a multiple of 16"),
    ({"k": 100}, "k = 100 is not a multiple of 16"),
    ({"n": 8}, "n = 8 is not a multiple of 16"),
    ({"m": 0}, "m = 0: there is nothing to multiply"),
    ({"batch": 12}, "it is a batch of 12 products, which no 8-bit kernel takes"),
    ({"dtypes": ("float64", "float64")}, "an operand is float64, which is not quantised to 8 bits"),
    ({"dtypes": ("float32", "int64")}, "an operand is int64, which is not quantised to 8 bits"),
    ({"sparse": True}, "an operand is sparse"),
    ({"region": "float16"},
        "the region's dtype is float16; the results and gradients of 8-bit products are bfloat16, "
        "whose range no gradient leaves"),
    ({"device": "mps"}, "polymp has no 8-bit products on mps"),
]  # fmt: skip
SMALL = "k = {}, n = {} is so small that 8 bits are slower than bfloat16"


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("product", [GOOD, GPU, GPU._replace(capability=None)])
def test_a_product_that_can_run_in_8_bits(product, name):
    assert why_not(product, RECIPES[name]) == ""


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("change", "reason"), TABLE_FALLBACK)
def test_the_same_reason_on_every_device(change, reason, name):
    assert why_not(GOOD._replace(**change), RECIPES[name]) == reason
    if "device" not in change:
        assert why_not(GPU._replace(**change), RECIPES[name]) == reason


def test_gpus_that_are_too_old_and_too_new():
    assert why_not(GPU._replace(capability=(8, 6)), RECIPES["tensorwise"]) == (
        "the GPU has compute capability 8.6; 8-bit products need 8.9 or newer"
    )
    new = GPU._replace(capability=(12, 0))
    assert why_not(new, RECIPES["tensorwise"]) == ""
    assert why_not(new, RECIPES["rowwise"]) == (
        "rowwise kernels fail on GPUs of compute capability 12.0; use recipe tensorwise"
    )


@pytest.mark.parametrize(
    ("k", "n", "tensorwise", "rowwise"),
    [
        (4096, 4096, True, True),
        (4096, 1024, False, False),
        (8192, 1024, True, False),
        (1024, 2048, True, False),
        (1024, 8192, True, False),
        (2048, 4096, True, False),
        (2048, 8192, True, True),
        (4096, 4096 - 16, True, True),
    ],
)
def test_small_products_on_a_gpu_alone(k, n, tensorwise, rowwise):
    for name, runs in (
        ("tensorwise", tensorwise),
        ("rowwise", rowwise),
        ("rowwise_gw_hp", rowwise),
    ):
        reason = why_not(GPU._replace(k=k, n=n), RECIPES[name])
        assert reason == ("" if runs else SMALL.format(k, n))
        assert why_not(GOOD._replace(k=k, n=n), RECIPES[name]) == ""
