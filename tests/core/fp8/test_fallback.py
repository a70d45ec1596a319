"""Why a product runs in the region's dtype instead: every reason by its whole text."""

import pytest

from polymp.fp8.recipes import RECIPES, Product, why_not

GOOD = Product("linear", 4096, 4096, 4096, ("bfloat16", "float32"), "cpu")
GPU = GOOD._replace(device="cuda", capability=(9, 0))
TABLE = [
    ({"m": 4095}, "m = 4095 is not a multiple of 16"),
    ({"k": 100}, "k = 100 is not a multiple of 16"),
    ({"n": 8}, "n = 8 is not a multiple of 16"),
    ({"m": 0}, "m = 0: there is nothing to multiply"),
    ({"batch": 12}, "it is a batch of 12 products, which no 8-bit kernel takes"),
    (
        {"dtypes": ("float64", "float64")},
        "an operand is float64, which is not quantised to 8 bits",
    ),
    ({"dtypes": ("float32", "int64")}, "an operand is int64, which is not quantised to 8 bits"),
    ({"sparse": True}, "an operand is sparse"),
    (
        {"region": "float16"},
        "the region's dtype is float16; the results and gradients of 8-bit products are bfloat16, "
        "whose range no gradient leaves",
    ),
    ({"device": "mps"}, "polymp has no 8-bit products on mps"),
]
SMALL = "k = {}, n = {} is so small that 8 bits are slower than bfloat16"


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("product", [GOOD, GPU, GPU._replace(capability=None)])
def test_a_product_that_can_run_in_8_bits(product, name):
    assert why_not(product, RECIPES[name]) == ""


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("change", "reason"), TABLE)
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
