"""The recipes: with which formats and scales the three products of a layer run in 8 bits.

    result           activation [m, k] @ weight [k, n]
    input_gradient   gradient [m, n] @ weight.T [n, k]
    weight_gradient  activation.T [k, m] @ gradient [m, n]

A scale is computed from the numbers that are quantised with it, at every use, so there is no state.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from polymp import dtypes
from polymp.errors import PolicyError

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"

# What an operand is, whichever of the three products it is in.
ACTIVATION, WEIGHT, GRADIENT = "activation", "weight", "gradient"

# The three products of a layer.
RESULT, INPUT_GRADIENT, WEIGHT_GRADIENT = "result", "input_gradient", "weight_gradient"

# One scale for an array, or one for each of its rows along the axis that is summed over.
TENSOR, ROW = "tensor", "row"

# What a scale is computed along: an axis, several, or None for the whole array.
Axis = int | tuple[int, ...] | None


@dataclass(frozen=True)
class Recipe:
    """The formats and scales of a layer's three products.

    Attributes:
        name: as a policy's head has it.
        scaling: "tensor" for one scale for each operand; "row" for one for each row of the first
            operand and each column of the second, with all results and gradients
            rounded to bfloat16, which is what kernels for such scales return.
        activation: the 8-bit format of activations.
        weight: of weights.
        gradient: of the gradients of results.
        power_of_two: True if scales are rounded down to a power of two.
        weight_gradient_high: True if the product for the weight's gradient runs in bfloat16.
        whole_weight_in_backward: True if the weight has one scale in the product for the input's
            gradient, also where the other operands have one for each row.

    Source:
        torchao 0.18, `torchao/float8/config.py`, `Float8LinearConfig.from_recipe_name`.
    """

    name: str
    scaling: str
    activation: str = E4M3
    weight: str = E4M3
    gradient: str = E4M3
    power_of_two: bool = False
    weight_gradient_high: bool = False
    whole_weight_in_backward: bool = False

    def __post_init__(self) -> None:
        if self.scaling not in (TENSOR, ROW):
            raise PolicyError(
                f"recipe {self.name!r}: scaling {self.scaling!r} is not one of tensor, row."
            )
        for role in (ACTIVATION, WEIGHT, GRADIENT):
            if self.format_of(role) not in (E4M3, E5M2):
                raise PolicyError(
                    f"recipe {self.name!r}: the format of the {role} is {self.format_of(role)!r}, "
                    f"which is not one of {E4M3}, {E5M2}."
                )
        for first, second in ((ACTIVATION, WEIGHT), (GRADIENT, WEIGHT), (GRADIENT, ACTIVATION)):
            if self.format_of(first) == self.format_of(second) == E5M2:
                raise PolicyError(
                    f"recipe {self.name!r}: {first} and {second} both have {E5M2}, and no GPU "
                    f"multiplies two such arrays. Give one of them {E4M3}."
                )

    def format_of(self, role: str) -> str:
        """Return the 8-bit format of a role: "activation", "weight" or "gradient"."""
        return {ACTIVATION: self.activation, WEIGHT: self.weight, GRADIENT: self.gradient}[role]

    def scale_axis(self, product: str, role: str, summed: Axis) -> Axis:
        """Return the axis along which a scale of an operand is computed."""
        whole = product == INPUT_GRADIENT and role == WEIGHT and self.whole_weight_in_backward
        return None if self.scaling == TENSOR or whole else summed

    def largest(self, role: str) -> float:
        """Return the largest finite value of the format of a role."""
        return dtypes.get(self.format_of(role)).max


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        recipe.name: recipe
        for recipe in (
            Recipe("tensorwise", TENSOR, gradient=E5M2),
            Recipe("rowwise", ROW, power_of_two=True),
            Recipe(
                "rowwise_gw_hp",
                ROW,
                power_of_two=True,
                weight_gradient_high=True,
                whole_weight_in_backward=True,
            ),
        )
    }
)


def recipe_of(name: str, where: str) -> Recipe:
    """Return a recipe by name."""
    found = RECIPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise PolicyError(f"{where}: fp8 = {name!r} is not one of {', '.join(RECIPES)}.")
    return found
