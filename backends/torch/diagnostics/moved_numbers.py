"""The results of ops moved by a share of their rounding, for the probes of `perturb`.

`polymp.diagnostics.rounding` explains by how much, and why.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeGuard

import torch

from polymp.backends.torch.autocast import dtype_names, op_facts
from polymp.backends.torch.compat import flop_count
from polymp.backends.torch.diagnostics.op_kinds import name_of
from polymp.diagnostics.rounding import movement
from polymp.rules.vocabulary import vocabulary


class Chance:
    """Moves numbers by a share of their rounding.

    A share is a hash of the number, the op and the seed. So equal numbers in one result go the same
    way, as they round the same way, and opposite numbers go opposite ways.

    Args:
        seed: of the shares.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._moves = 0

    def op(
        self,
        func: torch._ops.OpOverload,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        reads: Sequence[torch.Tensor],
        result: object,
        made: Sequence[torch.Tensor],
    ) -> None:
        """Move the float tensors in the result of an op."""
        for t in made:
            self._move(t, _movement(func, args, kwargs, reads, result, t))

    def cast(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """Move the result of a cast."""
        if result.element_size() < source.element_size():
            self._move(result, torch.finfo(result.dtype).eps / 2 * result.double().abs())

    def _move(self, t: torch.Tensor, by: torch.Tensor) -> None:
        self._moves += 1
        # Both frameworks round to 8 bits alike; where their operands differ, these have been moved.
        if t.numel() and t.itemsize > 1:
            # An Inf, such as that of a mask, is not moved: Inf - Inf would be NaN.
            exact = t.double()
            t.copy_(torch.where(t.isfinite(), exact + self._shares(exact) * by, exact))

    def _shares(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return an even share in [-1, 1) for each number: murmur3's finalizer of its bits."""
        key = (self._seed << 40) + self._moves * 0x9E3779B97F
        bits = numbers.abs().view(torch.int64) + key
        for factor in (-0x00AE502812AA7333, -0x3B314601E57A13AD):
            bits = (bits ^ (bits >> 33)) * factor
        share = ((bits >> 32) & 0xFFFFFFFF).double() * 2.0**-31 - 1.0
        return torch.where(numbers < 0, -share, share)


def _is_float(t: object) -> TypeGuard[torch.Tensor]:
    return isinstance(t, torch.Tensor) and t.is_floating_point() and t.layout is torch.strided


@cache
def _op(func: torch._ops.OpOverload) -> tuple[str, str]:
    """Return an op's name in the vocabulary, or torch's own, and its class there."""
    words, name = vocabulary(), func.overloadpacket.__name__
    op = name_of(func.name().removeprefix("aten::"), name)
    return op, words.ops[op].kind if op in words.ops else ""


def _movement(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, object],
    reads: Sequence[torch.Tensor],
    result: object,
    t: torch.Tensor,
) -> torch.Tensor:
    """Return how far one result of an op may be from the exact one, number by number."""
    (of, kind), name = _op(func), func.overloadpacket.__name__
    flops = flop_count.flops(func, args, kwargs, result)
    terms = 1.0
    if flops:
        terms = flops / (2 * max(t.numel(), 1))
    elif name == "cumsum":
        terms = t.shape[args[1]] if t.ndim else 1
    elif name in op_facts.SUMS or kind in vocabulary().traits["sums"]:
        terms = max(x.numel() for x in reads) / max(t.numel(), 1)
    own, summed = movement(of, "matmul" if flops else kind, dtype_names.NAMES[t.dtype], terms)
    magnitude = t.double().abs()
    if name in op_facts.SUMS:
        return own * magnitude + summed * (magnitude**2 + _added(func, args, kwargs)).sqrt()
    if kind in vocabulary().traits["sums"] and magnitude.numel():
        # Each number is made of the others: some are differences, smaller than what was subtracted.
        magnitude = magnitude.maximum(magnitude.max() if terms > 1 else magnitude.mean())
    return (own + summed) * magnitude


def _added(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, object]
) -> torch.Tensor:
    """Return the sum of the squares of the terms of a sum."""
    squares: Any = [x.double() ** 2 if _is_float(x) else x for x in args]
    kwargs = {k: torch.float64 if v in dtype_names.NAMES else v for k, v in kwargs.items()}
    found: torch.Tensor = func(*squares, **kwargs).double().abs()
    if func.overloadpacket is torch.ops.aten.mean:
        found = found * (found.numel() / max(squares[0].numel(), 1))  # of terms that are divided
    return found
