"""Why a product cannot run in 8 bits: one function over plain data, for both frameworks.

The rules of GPUs hold on CPUs too, so that a run on a CPU takes the same way as one on a GPU. Only
the sizes below which 8 bits are slower depend on the device: on a CPU they always are, and a user
who asks for them there wants to try them.
"""

from typing import NamedTuple

from polymp.fp8.recipes import ROW, Recipe

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
    """A product `[m, k] @ [k, n]` that a policy wants in 8 bits.

    Attributes:
        op: its name in the vocabulary.
        m: rows of the activation: all its dimensions but the last, multiplied.
        k: what is summed over.
        n: columns of the weight.
        dtypes: of the two operands as they come in, by full name: "float32", "int64".
        device: "cpu", "cuda" or another type of device.
        region: the region's dtype.
        batch: how many products of this shape the op computes.
        sparse: True if an operand is sparse.
        capability: compute capability of an NVIDIA GPU, (9, 0); None if it is not known.
    """

    op: str
    m: int
    k: int
    n: int
    dtypes: tuple[str, ...]
    device: str
    region: str = REGION_DTYPE
    batch: int = 1
    sparse: bool = False
    capability: tuple[int, int] | None = None


def why_not(product: Product, recipe: Recipe) -> str:
    """Return why a product runs by the rule `lower` instead.

    Source:
        Multiples and formats: cuBLAS documentation, section "FP8 data types". Sizes: torchao 0.18,
        `torchao/float8/float8_linear_utils.py`, `_auto_filter_for_recipe`, measured there on H100
        GPUs.
    """
    return (
        _of_operands(product)
        or _of_device(product, recipe)
        or _of_shape(product)
        or _of_size(product, recipe)
    )


def _of_operands(product: Product) -> str:
    if product.region != REGION_DTYPE:
        return f"the region's dtype is {product.region}; {NOT_FLOAT16}"
    if product.sparse:
        return "an operand is sparse"
    for dtype in product.dtypes:
        if dtype not in QUANTISED_FROM:
            return f"an operand is {dtype}, which is not quantised to 8 bits"
    return ""


def _of_device(product: Product, recipe: Recipe) -> str:
    if product.device == "cpu":
        return ""
    if product.device != "cuda":
        return f"polymp has no 8-bit products on {product.device}"
    capability = product.capability
    if capability is not None and capability < FIRST_CAPABILITY:
        has = ".".join(map(str, capability))
        return f"the GPU has compute capability {has}; 8-bit products need 8.9 or newer"
    if capability in NO_ROWWISE and recipe.scaling == ROW:
        return "rowwise kernels fail on GPUs of compute capability 12.0; use recipe tensorwise"
    return ""


def _of_shape(product: Product) -> str:
    if product.batch != 1:
        return f"it is a batch of {product.batch} products, which no 8-bit kernel takes"
    for name, size in (("m", product.m), ("k", product.k), ("n", product.n)):
        if size == 0:
            return f"{name} = 0: there is nothing to multiply"
        if size % MULTIPLE:
            return f"{name} = {size} is not a multiple of {MULTIPLE}"
    return ""


def _of_size(product: Product, recipe: Recipe) -> str:
    if product.device == "cpu":
        return ""
    k, n = product.k, product.n
    if recipe.scaling == ROW:
        small = n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)
    else:
        small = n <= 1024 and k <= 4096
    return f"k = {k}, n = {n} is so small that 8 bits are slower than bfloat16" if small else ""
