"""Products in 8 bits: the recipes, where 8 bits are not possible, and how an operand is quantised.

    result           activation [m, k] @ weight [k, n]
    input_gradient   gradient [m, n] @ weight.T [n, k]
    weight_gradient  activation.T [k, m] @ gradient [m, n]

A scale is computed from the numbers that are quantised with it, at every use, so there is no state.
Pure functions of arrays, given a record of the framework's verbs; nothing here knows a framework.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

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

    Source:
        torchao 0.18, `torchao/float8/config.py`, `Float8LinearConfig.from_recipe_name`.
    """

    name: str  # as a policy's head has it
    # "tensor" for one scale for each operand; "row" for one for each row of the first operand and
    # each column of the second, with all results and gradients rounded to bfloat16, which is what
    # kernels for such scales return.
    scaling: str
    gradient: str = E4M3  # the 8-bit format of the gradients of results
    power_of_two: bool = False  # True if scales are rounded down to a power of two
    # True if the product for the weight's gradient runs in bfloat16.
    weight_gradient_high: bool = False
    # True if the weight has one scale in the product for the input's gradient, also where the other
    # operands have one for each row.
    whole_weight_in_backward: bool = False

    def format_of(self, role: str) -> str:
        """Return the 8-bit format of a role: "activation", "weight" or "gradient"."""
        return self.gradient if role == GRADIENT else E4M3

    def scale_axis(self, product: str, role: str, summed: Axis) -> Axis:
        """Return the axis along which a scale of an operand is computed."""
        whole = product == INPUT_GRADIENT and role == WEIGHT and self.whole_weight_in_backward
        return None if self.scaling == TENSOR or whole else summed


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


# Why a product cannot run in 8 bits: one function over plain data, for both frameworks.
#
# The rules of GPUs hold on CPUs too, so that a run on a CPU takes the same way as one on a GPU.
# Only the sizes below which 8 bits are slower depend on the device: on a CPU they always are,
# and a user who asks for them there wants to try them.
#
# Dtypes that an operand is quantised from.
QUANTISED_FROM = ("float16", "bfloat16", "float32")
# The dtype of regions whose products run in 8 bits.
REGION_DTYPE = "bfloat16"
# Why no other dtype: used in the errors of regions as well.
NOT_FLOAT16 = (
    "the results and gradients of 8-bit products are bfloat16, whose range no gradient leaves"
)
# Every dimension is a multiple of this, as cuBLASLt and CUTLASS ask for.
MULTIPLE = 16
# Compute capability of the first NVIDIA GPUs with units for 8-bit floats.
FIRST_CAPABILITY = (8, 9)
# Rowwise kernels fail on these (pytorch #192707).
NO_ROWWISE = ((12, 0),)


class Product(NamedTuple):
    """A product `[m, k] @ [k, n]` that a policy wants in 8 bits."""

    op: str  # its name in the vocabulary
    m: int  # rows of the activation: all its dimensions but the last, multiplied
    k: int  # what is summed over
    n: int  # columns of the weight
    dtypes: tuple[str, ...]  # of the two operands as they come in, by full name: "float32", "int64"
    device: str  # "cpu", "cuda" or another type of device
    region: str = REGION_DTYPE  # the region's dtype
    batch: int = 1  # how many products of this shape the op computes
    sparse: bool = False  # True if an operand is sparse
    # Compute capability of an NVIDIA GPU, (9, 0); None if it is not known.
    capability: tuple[int, int] | None = None


def why_not(product: Product, recipe: Recipe) -> str:
    """Return why a product runs by the rule `lower` instead."""
    # Source of multiples and formats: cuBLAS documentation, section "FP8 data types". Of sizes:
    # torchao 0.18, `torchao/float8/float8_linear_utils.py`, `_auto_filter_for_recipe`, measured
    # there on H100 GPUs.
    if product.region != REGION_DTYPE:
        return f"the region's dtype is {product.region}; {NOT_FLOAT16}"
    if product.sparse:
        return "an operand is sparse"
    for dtype in product.dtypes:
        if dtype not in QUANTISED_FROM:
            return f"an operand is {dtype}, which is not quantised to 8 bits"
    on_cpu, rowwise, capability = product.device == "cpu", recipe.scaling == ROW, product.capability
    if not on_cpu and product.device != "cuda":
        return f"polymp has no 8-bit products on {product.device}"
    if not on_cpu and capability is not None and capability < FIRST_CAPABILITY:
        has = ".".join(map(str, capability))
        return f"the GPU has compute capability {has}; 8-bit products need 8.9 or newer"
    if not on_cpu and capability in NO_ROWWISE and rowwise:
        return "rowwise kernels fail on GPUs of compute capability 12.0; use recipe tensorwise"
    if product.batch != 1:
        return f"it is a batch of {product.batch} products, which no 8-bit kernel takes"
    k, n = product.k, product.n
    for name, size in (("m", product.m), ("k", k), ("n", n)):
        if size == 0:
            return f"{name} = 0: there is nothing to multiply"
        if size % MULTIPLE:
            return f"{name} = {size} is not a multiple of {MULTIPLE}"
    small = n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)
    if not rowwise:
        small = n <= 1024 and k <= 4096
    if small and not on_cpu:
        return f"k = {k}, n = {n} is so small that 8 bits are slower than bfloat16"
    return ""


# Quantisation: the scale of an array, and the array in 8 bits.
#
#     scale     = float32(largest of the format / max(amax, 1e-12))     amax: the largest magnitude
#     quantised = to 8 bits(clip(float32(array) * scale))
#     array     = about float32(quantised) * (1 / scale)
#
# An operand is quantised from the dtype that it comes in, float32, bfloat16 or float16, with no
# rounding in between. So both frameworks get the same operands; their sums have other orders.
#
# An amax that is Inf or NaN makes the scale NaN, and with it all that is quantised by it. Casts to
# 8 bits would hide it: torch's make 448 of Inf, and a scale of 0 makes 0 of the finite numbers
# beside it. As it is, an Inf or NaN reaches the result, the gradients and the check of a scaler.

# An amax below this counts as this, so that an array of zeros has a finite scale.
SMALLEST_AMAX = 1e-12


Verb = Callable[[Any], Any]


class Verbs(NamedTuple):
    """A framework's functions of arrays.

    Besides these, quantisation uses `*`, `/` and `<=` of float32 arrays, and never divides a number
    by an array except 1.
    """

    # (float array, axis, axes or None) to the largest magnitude, float32: [] for None, else with
    # length 1 at the axes. NaN if there is a NaN.
    amax: Callable[[Any, Axis], Any]
    float32: Verb  # a float array to float32
    # (bool, array or number, array or number) to one of the two, element by element; the result is
    # float32, also of two numbers.
    where: Callable[[Any, Any, Any], Any]
    # (float32, lowest, highest) to the numbers between the two; NaN stays NaN.
    clip: Callable[[Any, float, float], Any]
    # (float32, name of an 8-bit format) to that dtype, to nearest, ties to even.
    cast: Callable[[Any, str], Any]
    isfinite: Verb  # a float32 array to bool
    # Positive float32 to the largest power of two that is not larger, by its bits.
    power_of_two: Verb


def scale_of(verbs: Verbs, array: Any, recipe: Recipe, role: str, axis: Axis) -> Any:
    """Return the scale that an operand is multiplied by before it is cast to 8 bits."""
    # Source: torchao 0.18, `torchao/float8/float8_utils.py`, `amax_to_scale`, which divides in
    # float64: the same number, except below `SMALLEST_AMAX`, where it is a constant here.
    largest = dtypes.FORMATS[recipe.format_of(role)].max
    amax = verbs.amax(array, axis)
    tiny = amax <= SMALLEST_AMAX
    # Both are arrays: torch divides a number by an array as number * (1 / array), in two roundings.
    dividend = verbs.where(tiny, largest / SMALLEST_AMAX, largest)
    scale = dividend / verbs.where(tiny, 1.0, amax)
    if recipe.power_of_two:
        scale = verbs.power_of_two(scale)
    return verbs.where(verbs.isfinite(amax), scale, float("nan"))


def quantised(verbs: Verbs, array: Any, scale: Any, format: str) -> Any:
    """Return an array in 8 bits: multiplied by a scale in float32, clipped, and cast."""
    largest = dtypes.FORMATS[format].max
    return verbs.cast(verbs.clip(verbs.float32(array) * scale, -largest, largest), format)


def inverse(scale: Any) -> Any:
    """Return what a product of quantised operands is multiplied by for one of them; float32."""
    return 1.0 / scale
