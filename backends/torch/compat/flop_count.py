"""FLOPs of an op, by torch's formulas where these are correct."""

from collections.abc import Sequence
from typing import Any

import torch


def flops(op: torch._ops.OpOverload, args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of a product, convolution or attention kernel; 0 for any other op.

    By torch.utils.flop_counter's formulas, which are documented; its table of them,
    `flop_registry`, is not. It counts too many in convolutions with groups, lacks the attention
    kernel of CPUs, and before torch 2.13 raises where queries share keys. Since torch 2.2.
    """
    from torch.utils import flop_counter

    if op is torch.ops.aten.convolution.default:
        return _convolution(args[6], args[0], args[1], result)
    if op is torch.ops.aten.convolution_backward.default:
        made, given, weight = args[:3]  # one convolution for each gradient of these two
        wanted = int(args[10][0]) + int(args[10][1])
        return wanted * _convolution(args[7], given, weight, made)
    name = op.overloadpacket.__name__
    if name.startswith("_scaled_dot_product_"):
        if name.endswith("_backward"):
            return _attention(args[1:4], (3, 2))
        return _attention(args[:3], (1, 1))
    formula = flop_counter.flop_registry.get(op.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _attention(inputs: Sequence[torch.Tensor], products: tuple[int, int]) -> int:
    """Count two FLOPs for each product of a number of a query, or of a value, with a key.

    Forward computes the scores and the result; backward the scores again, and then the gradients
    of scores, values, queries and keys.
    """
    query, key, value = inputs
    width = products[0] * query.shape[3] + products[1] * value.shape[3]
    return 2 * query.shape[:3].numel() * key.shape[2] * width


def _convolution(
    transposed: bool, given: torch.Tensor, weight: torch.Tensor, made: torch.Tensor
) -> int:
    """Count two FLOPs for each product of a weight with a number of the input or the result."""
    return 2 * (given if transposed else made).numel() * (weight.numel() // len(weight))
