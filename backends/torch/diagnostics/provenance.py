"""`Provenance`: the origins of the tensors that ops read.

For a tensor that an op made, that op; for others, range and name: a parameter, an argument, a value
that other ranks sent.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn

from polymp.backends.torch.autocast import dtype_names
from polymp.backends.torch.compat import storage
from polymp.backends.torch.diagnostics.measure import (
    Range,
    comparable,
    measurable,
    numbers,
    range_of,
)
from polymp.backends.torch.diagnostics.own_ops import Own


class Provenance:
    """The origins of tensors, by the memory that they are on.

    Args:
        model: its parameters and buffers are called by their names; None for no names.
        off: autocast's dispatch keys, for `Own`.
    """

    def __init__(self, model: nn.Module | None, off: torch._C.DispatchKeySet) -> None:
        self._model = model
        self._off = off
        # By storage, the event that wrote it last.
        self._maker: dict[int, int] = {}
        self._kept = storage.KeptKeys()
        # By storage and view, a tensor that no event made.
        self._outside: dict[int, dict[tuple[Any, ...], int]] = {}
        self._given: list[tuple[torch.Tensor, Range | None, int]] = []
        self._received: set[int] = set()  # storages that other ranks filled
        self._gradients: set[int] = set()  # those that a backward pass adds gradients to
        self._constants: dict[int, float] = {}  # those of single numbers that the program has
        self._parameters = {storage.storage_key(p): at for at, p in enumerate(self._trained())}
        self._norms: list[list[torch.Tensor]] = []  # largest magnitudes after each update
        self._updates = -1

    def origin(self, t: torch.Tensor) -> int | None:
        """Return the origin of a tensor; see `fault.Event.origins`."""
        key = storage.storage_key(t)
        made = self._maker.get(key)
        if made is not None or not key or key in self._constants:
            return made
        views = self._outside.setdefault(key, {})
        view = () if key in self._parameters else (t.storage_offset(), t.shape, t.stride())
        if view not in views:
            if not measurable(t):
                return None
            views[view] = -1 - len(self._given)
            with Own(self._off):
                found = None if key in self._parameters else range_of(t)
                self._given.append((t.detach(), found, self._updates))  # kept, and so its key
        return views[view]

    def maker(self, t: torch.Tensor) -> int | None:
        """Return the event that made a tensor; None if none did."""
        return self._maker.get(storage.storage_key(t))

    def made(self, t: torch.Tensor, event: int) -> None:
        """Note that an event made a tensor, or wrote into it."""
        key = storage.storage_key(t)
        if key and key not in self._maker:
            self._kept.keep(t)
        self._constants.pop(key, None)
        if key:
            self._maker[key] = event

    def forget(self, t: torch.Tensor) -> None:
        """Note that the values in a tensor's memory were not made by a known event."""
        key = storage.storage_key(t)
        self._maker.pop(key, None)
        self._outside.pop(key, None)

    def received(self, t: torch.Tensor) -> None:
        """Note that other ranks send a value, which may not have arrived: measured once read."""
        self.forget(t)
        self._received.add(storage.storage_key(t))

    def accumulated(self, t: torch.Tensor) -> None:
        """Note that a backward pass adds to a tensor: it is the `.grad` of a leaf."""
        self._gradients.add(storage.storage_key(t))

    def constant(self, t: torch.Tensor, floats: list[float]) -> None:
        """Note a single number that the program has as a constant."""
        self.forget(t)
        if not floats and t.device.type == "cpu":
            floats = [float(f"{t.real.item():.7g}")]  # as it was written
        if floats:
            self._kept.keep(t)
            self._constants[storage.storage_key(t)] = floats[0]

    def constants(self, reads: list[torch.Tensor]) -> list[float]:
        """Return the constants among the tensors that an op reads."""
        keys = map(storage.storage_key, reads) if self._constants else ()
        return [self._constants[key] for key in keys if key in self._constants]

    def look_at_parameters(self) -> None:
        """Measure the largest magnitude of each parameter, all at once."""
        own = list(map(comparable, self._trained()))
        self._norms.append(list(torch._foreach_norm(own, math.inf)) if own else [])
        self._updates += 1

    def updated(self) -> None:
        """Note that the values of parameters have changed."""
        self._outside.clear()

    def _trained(self) -> list[torch.Tensor]:
        own = () if self._model is None else self._model.parameters()
        return [p.detach() for p in own if measurable(p)]

    def given_ranges(self) -> dict[int, tuple[torch.Tensor, float, float]]:
        """Return the tensors that no op made, with their ranges, by their places."""
        ends: list[torch.Tensor] = []
        for t, found, update in self._given:
            if found is None:  # a parameter
                largest = self._norms[update][self._parameters[storage.storage_key(t)]]
                found = Range(largest, largest)
            ends += found
        values = iter(numbers(ends))
        return {at: (t, next(values), next(values)) for at, (t, *_) in enumerate(self._given)}

    def name(self, t: torch.Tensor) -> str:
        """Return the name of a parameter or buffer, or a description of another tensor."""
        key, shape = storage.storage_key(t), "x".join(map(str, t.shape)) or "scalar"
        for name, own in self._named():
            if storage.storage_key(own) == key:
                return name
            if own.is_leaf and own.grad is not None and storage.storage_key(own.grad) == key:
                return f"{name}.grad"
        found = "the .grad of a leaf" if key in self._gradients else "an argument"
        found = "what other ranks sent" if key in self._received else found
        return f"{found} ({dtype_names.NAMES[t.dtype]} {shape})"

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._model is not None:
            yield from self._model.named_parameters()
            yield from self._model.named_buffers()
