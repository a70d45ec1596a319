"""`Original`: tensors of a model that are stored in another dtype, and can be given back."""

from collections.abc import Sequence

import torch
import torch.nn as nn

from polymp.backends.torch.autocast.fp8_product import WeightInBits
from polymp.backends.torch.compat import modes
from polymp.backends.torch.weights import freeze_usage
from polymp.rules.row import LOW


def names(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name; a tensor with several names under each."""
    every = (model.named_parameters, model.named_buffers)
    return {name: t for named in every for name, t in named(remove_duplicate=False)}


def memory(model: nn.Module) -> int:
    """Return the bytes of the memory of parameters and buffers, each piece once."""
    tensors: list[torch.Tensor] = []
    for t in names(model).values():
        tensors += t.parts() if isinstance(t, WeightInBits) else [t]
    pieces = {modes.storage_key(t): t for t in tensors if modes.storage_key(t)}
    return sum(t.untyped_storage().nbytes() for t in pieces.values())


class Original:
    """Tensors on one storage, and their values before they were stored in another dtype."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.held: list[torch.Tensor] = [t.detach() for t in tensors]

    def store(self, dtype: torch.dtype) -> None:
        """Store the values of the tensors in a dtype; they share memory as before.

        They stay the same objects, as in `module.to`.
        """
        made = _together(self.held, dtype)
        for t, low in zip(self.tensors, made, strict=True):
            t.data = low

    def put_back(self) -> None:
        """Give the tensors their old values back, in the old memory."""
        for t, held in zip(self.tensors, self.held, strict=True):
            t.data = held

    def announce(self) -> None:
        """Raise the versions of the tensors, so that autograd refuses graphs made before."""
        for t in self.tensors:
            torch.autograd.graph.increment_version(t)

    def give_back(self, low: torch.dtype) -> None:
        """Store float32 in the tensors: the old values, or those written since, cast."""
        pairs = list(zip(self.tensors, self.held, strict=True))
        if all(_is_rounded(t, held, low) for t, held in pairs):
            for t, held in pairs:
                t.data = held.to(t.device)
        else:
            wide = _together([t.detach() for t in self.tensors], torch.float32)
            for t, made in zip(self.tensors, wide, strict=True):
                t.data = made
        self.announce()


def _is_rounded(t: torch.Tensor, held: torch.Tensor, low: torch.dtype) -> bool:
    """Return whether `t` holds `held` rounded to the low dtype, on any device and in any dtype.

    A model that is only converted was not written: `half().float()` rounds to another low dtype.
    """
    stored = held.to(low).to(t.device)
    ways = (stored, *(stored.to(getattr(torch, dtype)) for dtype in LOW))
    return any(freeze_usage.same(t.detach(), way.to(t.dtype)) for way in ways)


def _together(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Cast tensors, so that those which share memory now share memory then."""
    made: dict[int, torch.Tensor] = {}
    for key in {modes.storage_key(t) for t in tensors}:
        sharing = [t for t in tensors if modes.storage_key(t) == key]
        first = min(t.storage_offset() for t in sharing)
        last = max(t.storage_offset() + _extent(t) for t in sharing)
        flat = sharing[0].as_strided((last - first,), (1,), first).to(dtype, copy=True)
        for t in sharing:
            made[id(t)] = flat.as_strided(t.size(), t.stride(), t.storage_offset() - first)
    return [made[id(t)] for t in tensors]


def _extent(t: torch.Tensor) -> int:
    """Return how many elements of its memory a tensor spans."""
    return 1 + sum((n - 1) * step for n, step in zip(t.size(), t.stride(), strict=True))
