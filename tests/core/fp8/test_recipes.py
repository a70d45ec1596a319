"""The recipes as a table, and what no recipe can be."""

import pickle

import pytest

from polymp.errors import PolicyError
from polymp.fp8.recipes import RECIPES, Recipe, recipe_of

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


def test_a_recipe_is_hashable_and_survives_pickle():
    assert {pickle.loads(pickle.dumps(recipe)) for recipe in RECIPES.values()} == {
        *RECIPES.values()
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"scaling": "column"},
            "recipe 'own': scaling 'column' is not one of tensor, row.",
        ),
        (
            {"weight": "float16"},
            "recipe 'own': the format of the weight is 'float16', which is not one of "
            "float8_e4m3fn, float8_e5m2.",
        ),
        (
            {"weight": E5M2, "gradient": E5M2},
            "recipe 'own': gradient and weight both have float8_e5m2, and no GPU multiplies two "
            "such arrays. Give one of them float8_e4m3fn.",
        ),
    ],
)
def test_a_recipe_that_cannot_be(arguments, message):
    with pytest.raises(PolicyError) as error:
        Recipe(**{"name": "own", "scaling": "tensor"} | arguments)
    assert str(error.value) == message


@pytest.mark.parametrize("name", ["tensor", "", None, ["rowwise"]])
def test_an_unknown_recipe(name):
    with pytest.raises(PolicyError) as error:
        recipe_of(name, "here")
    assert str(error.value) == (
        f"here: fp8 = {name!r} is not one of tensorwise, rowwise, rowwise_gw_hp."
    )
