"""The ops of torch whose products run in 8 bits, and why a call of one may not.

linear(x, weight, bias)   mm(a, b)   matmul(a, b)   addmm(c, a, b)
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from polymp.backends.torch.autocast import dtype_names
from polymp.backends.torch.autocast.fp8_product import WeightInBits, product, sum_of
from polymp.backends.torch.compat import modes
from polymp.fp8 import recipes
from polymp.fp8.recipes import Recipe
from polymp.rules.region import Region
from polymp.rules.vocabulary import vocabulary


class Parts(NamedTuple):
    """The parts of a call: `added * beta + x @ weight.T * alpha`."""

    x: torch.Tensor  # [..., k]
    weight: torch.Tensor  # [n, k]
    added: torch.Tensor | None = None  # a bias
    beta: float = 1
    alpha: float = 1


# By overload: the names of its arguments, by which they may be given, and the parts of a call.
OPS: Mapping[str, tuple[tuple[str, ...], Callable[..., Parts]]] = {
    "linear": (("input", "weight", "bias"), Parts),
    "mm": (("self", "mat2"), lambda a, b: Parts(a, b.t())),
    "matmul": (("self", "other"), lambda a, b: Parts(a, b.t())),
    "addmm": (
        ("self", "mat1", "mat2"),
        lambda c, a, b, beta=1, alpha=1: Parts(a, b.t(), c, beta, alpha),
    ),
}


def why_not(
    name: str, region: Region, recipe: Recipe, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """Return why a call runs by rule `lower` instead."""
    op = vocabulary().of_aten(name) or name
    if name not in OPS:
        return f"{op} has no 8-bit product; linear, matmul, mm and addmm have one"
    given, _ = _given(name, args, kwargs)
    a, b = (given[0], given[1]) if name != "addmm" else (given[1], given[2])
    if modes.has_tangents():
        return "forward-mode derivatives are computed"
    if modes.is_transformed():
        return "it runs inside a transform of torch.func"
    for operand in given:
        if operand is None:  # no bias
            continue
        if not isinstance(operand, torch.Tensor):
            return "an operand is a Python number"
        if hasattr(type(operand), "__tensor_flatten__") and not isinstance(operand, WeightInBits):
            kind = type(operand).__name__
            return f"an operand is a {kind}, whose numbers are in other tensors"
    m, k = (a.shape[:-1].numel(), a.shape[-1]) if a.dim() else (1, 1)
    batch = 1 if b.dim() <= 2 else b.shape[:-2].numel()
    n = 1 if b.dim() < 2 else b.shape[-2 if name == "linear" else -1]
    asked = recipes.Product(
        op,
        m // batch if batch > 1 else m,
        k,
        n,
        (dtype_names.NAMES[a.dtype], dtype_names.NAMES[b.dtype]),
        a.device.type,
        region.dtype,
        batch,
        a.layout is not torch.strided or b.layout is not torch.strided,
        _capability(a.device),
    )
    return recipes.why_not(asked, recipe)


def _capability(device: torch.device) -> tuple[int, int] | None:
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return None
    return _capability_of(device.index)


@cache
def _capability_of(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def parts_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Parts:
    """Return the parts of a call for which `why_not` has no reason."""
    given, others = _given(name, args, kwargs)
    return OPS[name][1](*given, **others)


def run(name: str, recipe: Recipe, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a call in 8 bits for which `why_not` has no reason; its result is bfloat16."""
    parts = parts_of(name, args, kwargs)
    made = product(parts.x, parts.weight, recipe)
    if parts.alpha != 1:
        made = made * parts.alpha
    if parts.added is None or parts.beta == 0:
        return made
    return sum_of(made, parts.added, parts.beta)


def _given(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments by place, and those that are given by name alone."""
    names, _ = OPS[name]
    given = [*args, *(kwargs[key] for key in names[len(args) :] if key in kwargs)]
    return given, {key: value for key, value in kwargs.items() if key not in names}
