"""`InBitsOriginal`: a weight of a model in whose place one is put that is stored in 8 bits."""

from typing import Any

import torch
import torch.nn as nn

from polymp.backends.torch.autocast.fp8_weight import Forms, WeightInBits
from polymp.backends.torch.weights import compare_bits
from polymp.backends.torch.weights.originals import Original


class InBitsOriginal(Original):
    """A weight, and its places in a model. Unlike in 16 bits, another object takes these places.

    Args:
        model: the model.
        weight: its parameter or buffer.
        forms: of the weight.
    """

    def __init__(self, model: nn.Module, weight: torch.Tensor, forms: Forms) -> None:
        super().__init__([weight])
        self._places: list[tuple[dict[str, Any], str]] = [
            (table, name)
            for module in model.modules()
            for table in (module._parameters, module._buffers)
            for name, t in table.items()
            if t is weight
        ]
        made: torch.Tensor = WeightInBits(forms)
        if isinstance(weight, nn.Parameter):
            made = nn.Parameter(made, requires_grad=False)
        self._made = made

    def store(self, dtype: torch.dtype) -> None:
        """Put the weight in 8 bits in the places of the other."""
        self._put(self._made)

    def put_back(self) -> None:
        """Put the old weight in its places."""
        self._put(self.tensors[0])

    def announce(self) -> None:
        """Do nothing: the old weight was not written."""

    def give_back(self, low: torch.dtype) -> None:
        """Put the old weight in its places, with the values of the new one if it was written."""
        (weight,), made = self.tensors, self._made
        assert isinstance(made, WeightInBits)
        values = self.held[0]
        if any(not _same(form, how(values.to(made.device))) for how, form in made.forms.items()):
            values = made.values()
        weight.data = values.to(made.device)
        self._put(weight)

    def _put(self, t: torch.Tensor) -> None:
        for table, name in self._places:
            now = table.get(name)
            if now is self._made or now is self.tensors[0]:  # not one that was assigned
                table[name] = t


def _same(form: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(map(compare_bits.same_bits, form, other))
