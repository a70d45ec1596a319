"""`Original`: tensors of a model that are stored in another dtype, and can be given back."""

from collections.abc import Sequence

import torch
from torch import nn

from polymp.backends.torch.compat import storage
from polymp.backends.torch.weights import compare_bits
from polymp.rules.row import LOW


def names(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name; one with several names under each."""
    every = (model.named_parameters, model.named_buffers)
    return {name: t for named in every for name, t in named(remove_duplicate=False)}


def memory(model: nn.Module) -> int:
    """Bytes of the memory that parameters and buffers are on, each piece once."""
    pieces = {storage.storage_key(t): t for t in names(model).values() if storage.storage_key(t)}
    return sum(t.untyped_storage().nbytes() for t in pieces.values())


class Original:
    """Tensors on one storage, and what they held before they were stored in another dtype."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.held = [t.detach() for t in tensors]

    def store(self, dtype: torch.dtype) -> None:
        """Have the tensors hold their values in a dtype, sharing memory as they do.

        They stay the same objects, as in `module.to`.
        """
        made = _together(self.held, dtype)
        for t, low in zip(self.tensors, made, strict=True):
            t.data = low

    def put_back(self) -> None:
        """Have the tensors hold what they held, in the same memory."""
        for t, held in zip(self.tensors, self.held, strict=True):
            t.data = held

    def announce(self) -> None:
        """Let autograd know that the tensors changed: graphs made before do not fit them now."""
        for t in self.tensors:
            torch.autograd.graph.increment_version(t)

    def give_back(self, low: torch.dtype) -> None:
        """Have the tensors hold float32: what they held, or what was written since, widened."""
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
    """True if `t` is `held` in the low dtype, wherever it is and whatever dtype it is in now.

    A model that is converted is not written: `half().float()` goes through another low dtype.
    """
    stored = held.to(low).to(t.device)
    ways = (stored, *(stored.to(getattr(torch, dtype)) for dtype in LOW))
    return any(compare_bits.same(t.detach(), way.to(t.dtype)) for way in ways)


def _together(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The tensors in another dtype, on one piece of memory for each that they are on now."""
    made: dict[int, torch.Tensor] = {}
    for key in {storage.storage_key(t) for t in tensors}:
        sharing = [t for t in tensors if storage.storage_key(t) == key]
        first = min(t.storage_offset() for t in sharing)
        last = max(t.storage_offset() + _extent(t) for t in sharing)
        flat = sharing[0].as_strided((last - first,), (1,), first).to(dtype, copy=True)
        for t in sharing:
            made[id(t)] = flat.as_strided(t.size(), t.stride(), t.storage_offset() - first)
    return [made[id(t)] for t in tensors]


def _extent(t: torch.Tensor) -> int:
    """How many elements of its memory a tensor reaches over."""
    return 1 + sum((n - 1) * step for n, step in zip(t.size(), t.stride(), strict=True))
