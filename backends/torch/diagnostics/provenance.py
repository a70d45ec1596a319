"""`Provenance`: where the tensors that ops read came from.

Of a tensor that an op made, which one; of another, its range and its name: a parameter, an
argument, what other ranks sent.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from polymp.backends.torch.autocast import dtype_names
from polymp.backends.torch.compat import storage
from polymp.backends.torch.diagnostics.measure import (
    Range,
    comparable,
    measurable,
    numbers,
    range_of,
)


class Provenance:
    """Goes by the memory that tensors are on.

    Args:
        model: whose parameters and buffers have names; None for none.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        # By storage, the event that wrote it last, and what keeps the key from being used again.
        self._maker: dict[int, tuple[int, Any]] = {}
        # By storage and view, a tensor that no event made.
        self._outside: dict[int, dict[tuple[Any, ...], int]] = {}
        self._given: list[tuple[torch.Tensor, Range | None, int]] = []
        self._received: set[int] = set()  # storages that other ranks filled
        self._parameters = {storage.storage_key(p): at for at, p in enumerate(self._trained())}
        self._norms: list[list[torch.Tensor]] = []  # largest magnitudes after each update
        self._updates = -1

    def origin(self, t: torch.Tensor) -> int | None:
        """See `fault.Event.origins`."""
        key = storage.storage_key(t)
        if not key:
            return None
        if key in self._maker:
            return self._maker[key][0]
        views = self._outside.setdefault(key, {})
        view = () if key in self._parameters else (t.storage_offset(), t.shape, t.stride())
        if view not in views:
            if not measurable(t):
                return None
            views[view] = -1 - len(self._given)
            found = None if key in self._parameters else range_of(t)
            self._given.append((t.detach(), found, self._updates))  # kept, and so its key
        return views[view]

    def maker(self, t: torch.Tensor) -> int | None:
        """The event that made a tensor; None if none did."""
        made = self._maker.get(storage.storage_key(t))
        return None if made is None else made[0]

    def made(self, t: torch.Tensor, event: int) -> None:
        """An event made a tensor, or wrote into it."""
        key = storage.storage_key(t)
        if key:
            known = self._maker.get(key)
            kept = storage.storage_reference(t) if known is None else known[1]
            self._maker[key] = event, kept

    def forget(self, t: torch.Tensor) -> None:
        """What is on the tensor's memory comes from elsewhere now."""
        key = storage.storage_key(t)
        self._maker.pop(key, None)
        self._outside.pop(key, None)

    def received(self, t: torch.Tensor) -> None:
        """Other ranks send a value that may be on its way: it counts once it is read."""
        self.forget(t)
        self._received.add(storage.storage_key(t))

    def look_at_parameters(self) -> None:
        """Take the largest magnitude of each parameter, all at once."""
        own = list(map(comparable, self._trained()))
        self._norms.append(list(torch._foreach_norm(own, math.inf)) if own else [])
        self._updates += 1

    def updated(self) -> None:
        """Parameters have other values from now on."""
        self._outside.clear()

    def _trained(self) -> list[torch.Tensor]:
        own = () if self._model is None else self._model.parameters()
        return [p.detach() for p in own if measurable(p)]

    def given_ranges(self) -> dict[int, tuple[torch.Tensor, float, float]]:
        """The tensors that no op made, with their ranges, by their places."""
        ends: list[torch.Tensor] = []
        for t, found, update in self._given:
            if found is None:  # a parameter
                largest = self._norms[update][self._parameters[storage.storage_key(t)]]
                found = Range(largest, largest)
            ends += found
        values = iter(numbers(ends))
        return {at: (t, next(values), next(values)) for at, (t, *_) in enumerate(self._given)}

    def name(self, t: torch.Tensor) -> str:
        """A parameter's or buffer's name, or words for what no op made."""
        for name, own in self._named():
            if storage.storage_key(own) == storage.storage_key(t):
                return name
        shape = "x".join(map(str, t.shape)) or "scalar"
        if storage.storage_key(t) in self._received:
            return f"what other ranks sent ({dtype_names.NAMES[t.dtype]} {shape})"
        return f"an argument ({dtype_names.NAMES[t.dtype]} {shape})"

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._model is not None:
            yield from self._model.named_parameters()
            yield from self._model.named_buffers()
