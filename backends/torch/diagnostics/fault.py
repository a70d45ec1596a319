"""The op at which the first value of a run that is not finite was made, and its cause."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from polymp.backends.torch.autocast import dtype_names
from polymp.backends.torch.compat import modes
from polymp.backends.torch.diagnostics.measure import (
    Lost,
    Range,
    RangeTable,
    comparable,
    measurable,
    numbers,
    range_of,
    real,
)
from polymp.backends.torch.diagnostics.op_call import OpCall, Own
from polymp.diagnostics.audit_records import Fault, Operand
from polymp.diagnostics.blame import CONSTANT, DIVIDING, Blame, Node, blame, meant, rounded

# Dtype and shape of the float tensors that an op reads.
Reads = tuple[tuple[torch.dtype, torch.Size], ...]


class Event(NamedTuple):
    """An op that ran, with all that `blame` needs to know of it.

    Attributes:
        op_call: the call that it is part of.
        origins: of each float tensor that it read: the event that made it; -1 - n for the n-th of
            those that no event made; None for one that cannot be measured.
        ranges: the ranges of its results, by their numbers in a `RangeTable`.
        run: the dtype of its results.
        lost: the values that float16 made Inf or zero; None if that is not known.
        numbers: numbers in the program that its dtype made zero.
        given: True if a number among its arguments is not finite.
        reads: dtype and shape of the float tensors among its arguments.
        operands: measurements of these, if they were made.
        cast: True for a cast.
        func: the kernel; None of a cast.
        single: True if its result is one number.
        beside: ranges of what it makes beside its first result, such as the maxima of aminmax.
    """

    op_call: OpCall
    origins: tuple[int | None, ...]
    ranges: tuple[int, ...]
    run: str
    lost: Lost | None = None
    numbers: tuple[float, ...] = ()
    given: bool = False
    reads: Reads = ()
    operands: tuple[torch.Tensor, ...] = ()
    cast: bool = False
    func: torch._ops.OpOverload | None = None
    single: bool = False
    beside: tuple[int, ...] = ()

    @property
    def inputs(self) -> tuple[int, ...]:
        """The events that made the tensors that it read."""
        return tuple(at for at in self.origins if at is not None and at >= 0)


# `Provenance`: the origins of the tensors that ops read.
#
# For a tensor that an op made, that op; for others, range and name: a parameter, an argument, a
# value that other ranks sent.


class Provenance:
    """The origins of tensors, by the memory that they are on.

    Args:
        model: its parameters and buffers are called by their names; None for no names.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        # By storage, the event that wrote it last.
        self._maker: dict[int, int] = {}
        self._kept = modes.KeptKeys()
        # By storage and view, a tensor that no event made.
        self._outside: dict[int, dict[tuple[Any, ...], int]] = {}
        self._given: list[tuple[torch.Tensor, Range | None, int]] = []
        self._received: set[int] = set()  # storages that other ranks filled
        self._gradients: set[int] = set()  # those that a backward pass adds gradients to
        self._constants: dict[int, float] = {}  # those of single numbers that the program has
        self._parameters = {modes.storage_key(p): at for at, p in enumerate(self._trained())}
        self._norms: list[list[torch.Tensor]] = []  # largest magnitudes after each update
        self._updates = -1

    def origin(self, t: torch.Tensor) -> int | None:
        """Return the origin of a tensor; see `fault.Event.origins`."""
        key = modes.storage_key(t)
        made = self._maker.get(key)
        if made is not None or not key or key in self._constants:
            return made
        views = self._outside.setdefault(key, {})
        view = () if key in self._parameters else (t.storage_offset(), t.shape, t.stride())
        if view not in views:
            if not measurable(t):
                return None
            views[view] = -1 - len(self._given)
            with Own():
                found = None if key in self._parameters else range_of(t)
                self._given.append((t.detach(), found, self._updates))  # kept, and so its key
        return views[view]

    def maker(self, t: torch.Tensor) -> int | None:
        """Return the event that made a tensor; None if none did."""
        return self._maker.get(modes.storage_key(t))

    def made(self, t: torch.Tensor, event: int) -> None:
        """Note that an event made a tensor, or wrote into it."""
        key = modes.storage_key(t)
        if key and key not in self._maker:
            self._kept.keep(t)
        self._constants.pop(key, None)
        if key:
            self._maker[key] = event

    def forget(self, t: torch.Tensor) -> None:
        """Note that the values in a tensor's memory were not made by a known event."""
        key = modes.storage_key(t)
        self._maker.pop(key, None)
        self._outside.pop(key, None)

    def received(self, t: torch.Tensor) -> None:
        """Note that other ranks send a value, which may not have arrived: measured once read."""
        self.forget(t)
        self._received.add(modes.storage_key(t))

    def accumulated(self, t: torch.Tensor) -> None:
        """Note that a backward pass adds to a tensor: it is the `.grad` of a leaf."""
        self._gradients.add(modes.storage_key(t))

    def constant(self, t: torch.Tensor, floats: list[float]) -> None:
        """Note a single number that the program has as a constant."""
        self.forget(t)
        if not floats and t.device.type == "cpu":
            floats = [float(f"{t.real.item():.7g}")]  # as it was written
        if floats:
            self._kept.keep(t)
            self._constants[modes.storage_key(t)] = floats[0]

    def constants(self, reads: list[torch.Tensor]) -> list[float]:
        """Return the constants among the tensors that an op reads."""
        keys = map(modes.storage_key, reads) if self._constants else ()
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
                largest = self._norms[update][self._parameters[modes.storage_key(t)]]
                found = Range(largest, largest)
            ends += found
        values = iter(numbers(ends))
        return {at: (t, next(values), next(values)) for at, (t, *_) in enumerate(self._given)}

    def name(self, t: torch.Tensor) -> str:
        """Return the name of a parameter or buffer, or a description of another tensor."""
        key, shape = modes.storage_key(t), "x".join(map(str, t.shape)) or "scalar"
        for name, own in self._named():
            if modes.storage_key(own) == key:
                return name
            if own.is_leaf and own.grad is not None and modes.storage_key(own.grad) == key:
                return f"{name}.grad"
        found = "the .grad of a leaf" if key in self._gradients else "an argument"
        found = "what other ranks sent" if key in self._received else found
        return f"{found} ({dtype_names.NAMES[t.dtype]} {shape})"

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._model is not None:
            yield from self._model.named_parameters()
            yield from self._model.named_buffers()


def first_fault(events: list[Event], ranges: RangeTable, provenance: Provenance) -> Fault | None:
    """Return the fault of a run: where the first value that is not finite came from."""
    bad = [_bad(ranges.read((*event.ranges, *event.beside))) for event in events]
    if not any(bad):
        return None
    given = provenance.given_ranges()
    spoiled = {
        -1 - at: provenance.name(t) for at, (t, low, high) in given.items() if _bad([low, high])
    }
    losses = Lost.read([e.lost for e in events if e.lost is not None])
    nodes = []
    for event, was in zip(events, bad, strict=True):
        finite, vanished = event.run == "float16" and event.op_call.op not in DIVIDING, 0.0
        ends, below = ranges.read(event.ranges), False
        if event.lost is not None:
            finite, vanished, below = next(losses)
        which = next((spoiled[at] for at in event.origins if at in spoiled), "")
        nodes.append(
            Node(
                event.inputs,
                was,
                event.run,
                finite and bool(was),
                vanished,
                True,
                _in_range(event, ends),
                which,
                event.given or not event.reads,
                bool(event.ranges),
                cast=event.cast,
                op=event.op_call.op,
                ones=below and max(ends) == 1 and not event.numbers,
                single=event.single,
            )
        )
    found = blame(nodes)
    if found is None or found.why != CONSTANT:
        ranges.meant = {number for at in meant(nodes) for number in events[at].ranges}
    return None if found is None else _fault(events, ranges, provenance, found, bad)


def _fault(
    events: list[Event], ranges: RangeTable, provenance: Provenance, found: Blame, bad: list[str]
) -> Fault:
    event, first = events[found.node], events[found.first]
    op_call = event.op_call
    became = bad[found.first]
    if first.op_call is not op_call:
        at = f" in {first.op_call.place.module}" if first.op_call.place.module else ""
        became = f"{became}, of {first.op_call.op}{at} {first.op_call.place.source}".rstrip()
    return Fault(
        op_call.op,
        op_call.spelling,
        op_call.place.module,
        op_call.place.source,
        op_call.direction,
        found.kind,
        event.run,
        op_call.row,
        _operands_of(event, events, ranges, provenance),
        became,
        found.why,
        op_call.region,
    )


def _operands_of(
    event: Event, events: list[Event], ranges: RangeTable, provenance: Provenance
) -> tuple[Operand, ...]:
    """Return an op's inputs; where they were not measured, with their largest magnitudes alone."""
    given = provenance.given_ranges()
    found = []
    for at, (origin, (dtype, shape)) in enumerate(zip(event.origins, event.reads, strict=False)):
        name, ends = "", [0.0]
        if origin is not None and origin < 0:
            t, *ends = given[-1 - origin]
            name = provenance.name(t)
        elif origin is not None and events[origin].ranges:
            ends = ranges.read(events[origin].ranges)
        if event.operands:
            found.append(_operand_of(dtype, shape, event.operands[at], name))
            continue
        largest = max(map(abs, filter(math.isfinite, ends)), default=0.0)
        inf, nan = (float(any(map(is_so, ends))) for is_so in (math.isinf, math.isnan))
        kind = dtype_names.NAMES[dtype]
        found.append(Operand(kind, tuple(shape), 0.0, largest, 0.0, inf, nan, name))
    return tuple(found)


def _in_range(event: Event, ends: list[float]) -> tuple[float, ...]:
    """Return the constants that its dtype has lost and that may be in its result."""
    near = ((x, rounded(x, event.run)) for x in event.numbers)
    return tuple(x for x, end in near if end is not None and min(ends) <= end <= max(ends))


def _bad(ends: list[float]) -> str:
    if any(map(math.isnan, ends)):
        return "NaN"
    return "Inf" if any(map(math.isinf, ends)) else ""


def operand(t: torch.Tensor) -> torch.Tensor:
    """Measure smallest, largest magnitude, shares of zeros, Inf, NaN, negatives; float32 [6]."""
    values = real(t.detach()).to(torch.float32)
    size = values.abs()
    finite = size.isfinite()
    some = torch.where(finite & (size > 0), size, torch.full_like(size, math.inf))
    most = torch.where(finite, size, torch.zeros_like(size))
    shares = [(size == 0), size.isinf(), size.isnan(), values < 0]
    return torch.stack([some.amin(), most.amax(), *(s.to(torch.float32).mean() for s in shares)])


NOTHING = torch.tensor([math.inf, 0.0, 0.0, 0.0, 0.0, 0.0])  # of a tensor that is not measured


def _operand_of(dtype: torch.dtype, shape: torch.Size, found: torch.Tensor, name: str) -> Operand:
    smallest, largest, zeros, inf, nan, negative = found.tolist()
    smallest = smallest if math.isfinite(smallest) else 0.0
    kind = dtype_names.NAMES[dtype]
    return Operand(kind, tuple(shape), smallest, largest, zeros, inf, nan, name, negative)
