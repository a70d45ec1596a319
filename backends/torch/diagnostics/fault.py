"""The op at which the first value of a run that is not finite was made, and its cause."""

import math
from typing import NamedTuple

import torch

from polymp.backends.torch.autocast import dtype_names
from polymp.backends.torch.diagnostics.measure import Lost, RangeTable, real
from polymp.backends.torch.diagnostics.op_call import OpCall
from polymp.backends.torch.diagnostics.provenance import Provenance
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
