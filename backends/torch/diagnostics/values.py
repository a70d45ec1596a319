"""The ops of a run with the ranges of their results, for `audit` and `locate`, and what broke it.

Every op is watched below autograd. Its result is measured on its device, in tensors that the
program never sees. Ops are followed one by one; the step of an optimizer is one for itself: an
`Update`.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn as nn

from polymp.backends.torch.autocast import dtype_names
from polymp.backends.torch.compat import (
    dispatcher,
    distributed,
    dynamo,
    modes,
    optimizers,
    tree_map,
)
from polymp.backends.torch.diagnostics.op_call import (
    CallSite,
    OpCall,
    Own,
    Ran,
    call_of,
    float_tensors,
    numbers_in,
    tensors,
)
from polymp.backends.torch.diagnostics.op_stream import Subscriber
from polymp.backends.torch.scaler import unscale
from polymp.backends.torch.snapshot import Snapshot
from polymp.backends.torch.weights.low_weights import LowOptimizer
from polymp.diagnostics.audit_records import Fault, Operand
from polymp.diagnostics.blame import (
    CONSTANT,
    DIVIDING,
    SATURATING,
    UPDATE,
    Node,
    blame,
    meant,
    rounded,
)
from polymp.diagnostics.call_record import BACKWARD, FORWARD
from polymp.diagnostics.magnitudes import BINS, SHIFT
from polymp.diagnostics.remedy import NO_EPS, OUTSIDE, larger_eps, of_optimizer
from polymp.dtypes import FORMATS

# About so many values of a larger tensor are counted in bins, evenly spaced.
SAMPLE = 2048


def measurable(t: Any) -> bool:
    """Return whether an object is a float tensor that has values in memory."""
    return (
        isinstance(t, torch.Tensor)
        and t.dtype in _MEASURED
        and t.layout is torch.strided
        and not t.is_nested
        and t.numel() > 0
        and not t.is_meta
        and modes.is_plain(t)
    )


def is_part(t: torch.Tensor) -> bool:
    """Return whether a strided tensor is a part of its memory."""
    return t.numel() * t.itemsize < t.untyped_storage().nbytes()


_MEASURED = frozenset(t for t, name in dtype_names.NAMES.items() if name in FORMATS or t.is_complex)


def real(t: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor's numbers as real ones; another tensor as it is."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def comparable(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor, cast to float32 if torch cannot compare values of its dtype."""
    return real(t) if t.element_size() > 1 else t.to(torch.float32)


class RangeTable:
    """Pairs of numbers that are measured, such as the ends of the values of a tensor."""

    def __init__(self) -> None:
        # Two numbers for each, which is called by a number: that is no object of its own for
        # Python's garbage collector, as a range is, and there are tens of thousands of them.
        self._pairs: list[float] = []
        # By device and dtype, pairs on a GPU, which are read all at once, and their numbers.
        self._waiting = defaultdict[Any, tuple[list[int], list[torch.Tensor]]](lambda: ([], []))
        self.meant: Collection[int] = ()  # whose infinities are a mask's, once that is known

    def add(self, t: torch.Tensor) -> int:
        """Measure the smallest and the largest value, NaN if there is one; return their number."""
        return self.keep(*torch.aminmax(comparable(t)))

    def add_each(self, tensors: Sequence[torch.Tensor]) -> range:
        """Measure tensors; return their numbers, no object for the garbage collector either."""
        for t in tensors:
            self.add(t)
        size = len(self._pairs) // 2
        return range(size - len(tensors), size)

    def keep(self, low: torch.Tensor, high: torch.Tensor) -> int:
        """Keep two numbers of a device; return the number that they are called by."""
        number = len(self._pairs) // 2
        if low.is_cpu:
            self._pairs += (low.item(), high.item())
        else:
            numbers, pairs = self._waiting[low.device, low.dtype]
            numbers.append(number)
            pairs += (low, high)
            self._pairs += (0.0, 0.0)
        return number

    def read(self, numbers: Iterable[int]) -> list[float]:
        """Return pairs, one after the other. Waits for the device."""
        for waiting, pairs in filter(any, self._waiting.values()):
            read = torch.stack(pairs).tolist()  # one transfer
            for at, low, high in zip(waiting, read[::2], read[1::2], strict=True):
                self._pairs[2 * at : 2 * at + 2] = low, high
            waiting.clear()
            pairs.clear()
        return [x for at in numbers for x in self._pairs[2 * at : 2 * at + 2]]


def extremes(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return ends of the values of each tensor; on a GPU its largest magnitude, of all at once."""
    own = list(map(comparable, tensors))
    if all(t.is_cpu for t in own):  # where torch 2.13 takes 25 times as long for these norms
        return [torch.aminmax(t) for t in own]
    return [(x, x) for x in torch._foreach_norm(own, math.inf)]


class Lost(NamedTuple):
    """The values of a tensor that are finite or not zero in float32, and Inf or zero here."""

    wide: int  # the ends of the values in float32, by number
    both: int  # how many of the compared values became Inf, and how many zero, by number
    looked_at: int  # how many values were compared

    @classmethod
    def of(cls, wide: torch.Tensor, low: torch.Tensor, ranges: RangeTable) -> "Lost":
        """Compare a tensor in float32 with the same in a low dtype."""
        some, few = sample(wide), sample(low)
        burst = (few.isinf() & some.isfinite()).sum()
        vanished = ((few == 0) & (some != 0)).sum()
        return cls(ranges.add(wide), ranges.keep(burst, vanished), few.numel())


def sample(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values in one row; of a large tensor about `SAMPLE`, evenly spaced."""
    t = real(t)
    size = t.numel()
    every = max(-(-size // SAMPLE), 1)
    if t.is_contiguous():  # then one op is enough, at half the time
        return t.as_strided((-(-size // every),), (every,))
    return t.reshape(-1)[::every]


def bins_of(values: torch.Tensor) -> torch.Tensor:
    """Return the bins of float32 values, int32, in the memory of the values."""
    return values.view(torch.int32).bitwise_right_shift_(SHIFT).bitwise_and_(BINS - 1)  # no sign


class BinTable:
    """Counts of magnitudes by their bins, in a row for each that asks for one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.rows: int = 0  # that are used, of `ROWS`
        with torch.inference_mode(False):
            self._counts = torch.zeros(ROWS, BINS, dtype=torch.int32, device=device)
            # Samples that are counted together: an op on one takes longer to call than to compute.
            self._waiting = torch.empty(_TOGETHER, device=device, dtype=torch.float32)
        self._sizes: list[int] = []  # of the samples that wait, one after the other
        self._firsts: list[int] = []  # for each of these, where its row begins in the table
        self._end = 0  # of the last

    def new_row(self) -> int:
        """Return the number of a row that is not used yet."""
        self.rows += 1
        return self.rows - 1

    def add(self, row: int, t: torch.Tensor) -> None:
        """Count the magnitudes in a sample of a measurable tensor."""
        values = sample(t)
        size = values.numel()
        if self._end + size > _TOGETHER:
            self._count()
        start, self._end = self._end, self._end + size
        self._waiting[start : self._end] = values
        self._sizes.append(size)
        self._firsts.append(row * BINS)

    def _count(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            firsts = np.repeat(np.array(self._firsts, np.int32), self._sizes)
            places = bins_of(self._waiting[: self._end])
            places += torch.from_numpy(firsts).to(self._device, non_blocking=True)
            self._counts.view(-1).index_add_(0, places, torch.ones_like(places))  # bincount waits
        self._sizes, self._firsts, self._end = [], [], 0

    def read(self, row: int) -> tuple[int, ...]:
        """Return the counts in a row. Waits for the device."""
        if self._end:
            self._count()
        return tuple(self._counts[row].tolist())


ROWS = 256  # of a table: a larger one would have to be copied as it grows
_TOGETHER = 64 * SAMPLE  # values that are counted together


# Dtype and shape of the float tensors that an op reads.
Reads = tuple[tuple[torch.dtype, torch.Size], ...]


@dataclass(eq=False, slots=True)
class Event:
    """An op that ran, with all that `blame` needs to know of it."""

    op_call: OpCall  # the call that it is part of
    # Of each float tensor that it read: the event that made it; -1 - n for the n-th of those that
    # no event made; None for one that cannot be measured.
    origins: tuple[int | None, ...]
    run: str  # the dtype of its results
    reads: Reads  # dtype and shape of the float tensors among its arguments
    func: torch._ops.OpOverload | None  # the kernel; None of a cast
    single: bool  # True if its result is one number
    shape: torch.Size | None  # of its first result
    given: bool = False  # True if a number among its arguments is not finite
    ranges: range = range(0)  # of its results, by their numbers in a `RangeTable`
    lost: Lost | None = None  # the values that float16 made Inf or zero; None if that is not known
    numbers: tuple[float, ...] = ()  # numbers in the program that its dtype made zero
    operands: tuple[torch.Tensor, ...] = ()  # measurements of `reads`, if they were made

    @property
    def inputs(self) -> tuple[int, ...]:
        """The events that made the tensors that it read."""
        return tuple([at for at in self.origins if at is not None and at >= 0])

    @property
    def divisors(self) -> tuple[int, ...] | None:
        """Of a division, the event that made what it divides by, if one did."""
        if self.func is None or self.func.overloadpacket not in _DIVISIONS:
            return None
        return tuple(at for at in self.origins[1:] if at is not None and at >= 0)


_DIVISIONS = (torch.ops.aten.div, torch.ops.aten.div_)


# `Provenance`: the origins of the tensors that ops read.
#
# For a tensor that an op made, that op; for others, range and name: a parameter, an argument, a
# value that other ranks sent.


class Provenance:
    """The origins of tensors, by the memory that they are on."""

    def __init__(
        self, model: nn.Module | None, ranges: RangeTable, given: Sequence[Any] | None
    ) -> None:
        self._model = model  # its parameters and buffers are called by their names
        # Storages of the step's arguments; None if these are not known.
        self._arguments = None if given is None else {*map(modes.storage_key, tensors(*given))}
        self._ranges = ranges
        # By storage, the events that wrote there, one after the other.
        self._makers: dict[int, list[int]] = {}
        self._kept = modes.KeptKeys()
        # By storage and view, a tensor that no event made.
        self._outside: dict[int, dict[tuple[Any, ...], int]] = {}
        self._given: list[tuple[torch.Tensor, int]] = []  # with their ranges
        self._called: dict[int, str] = {}  # of some storages, a word on what they have
        self._ends = set[int]()  # events that wrote what others had, which may be gone at the end
        self._constants: dict[int, float] = {}  # those of single numbers that the program has

    def origin(self, t: torch.Tensor) -> int | None:
        """Return the origin of a tensor; see `Event.origins`."""
        key = modes.storage_key(t)
        made = self._makers.get(key)
        if made is not None or not key or key in self._constants:
            return made[-1] if made else None
        views = self._outside.setdefault(key, {})
        if t.is_nested:
            return None
        view = t.storage_offset(), *sorted(zip(t.shape, t.stride(), strict=True))  # or transposed
        if view not in views:
            if not measurable(t):
                return None
            views[view] = -1 - len(self._given)
            with Own():
                self._given.append((t.detach(), self._ranges.add(t)))  # kept, and so its key
        return views[view]

    def maker(self, t: torch.Tensor) -> int | None:
        """Return the event that made a tensor; None if none did."""
        made = self._makers.get(modes.storage_key(t))
        return made[-1] if made else None

    def alive(self) -> set[int]:
        """Return the events that wrote into memory that is still there, or what others had."""
        there = (made for key, made in self._makers.items() if not self._kept.is_freed(key))
        return self._ends.union(*there)

    def handed(self, t: torch.Tensor) -> None:
        """Note that an optimizer or another rank has a tensor."""
        self._ends.update(self._makers.get(modes.storage_key(t), ()))

    def has_read(self, t: torch.Tensor) -> bool:
        """Return whether an op has read a tensor that none made."""
        return modes.storage_key(t) in self._outside

    def made(self, t: torch.Tensor, event: int) -> None:
        """Note that an event made a tensor, or wrote into it."""
        key = modes.storage_key(t)
        if key and key not in self._makers:
            self._kept.keep(t)
        self._constants.pop(key, None)
        if key:
            self._makers.setdefault(key, []).append(event)

    def forget(self, t: torch.Tensor) -> None:
        """Note that the values in a tensor's memory were not made by a known event."""
        key = modes.storage_key(t)
        self._makers.pop(key, None)
        self._outside.pop(key, None)

    def received(self, t: torch.Tensor) -> None:
        """Note that other ranks send a value, which may not have arrived: measured once read."""
        self.forget(t)
        self._called[modes.storage_key(t)] = "what other ranks sent"

    def accumulated(self, t: torch.Tensor) -> None:
        """Note that a backward pass adds to a tensor: it is the `.grad` of a leaf."""
        self._called.setdefault(modes.storage_key(t), "the .grad of a leaf")

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

    def updated(self) -> None:
        """Note that all tensors that no event made may have other values."""
        self._outside.clear()

    def given(self, origin: int) -> tuple[torch.Tensor, list[float]]:
        """Return a tensor that no op made, with the ends of its values."""
        t, found = self._given[-1 - origin]
        return t, self._ranges.read([found])

    def spoiled(self) -> dict[int, str]:
        """Return the names of the tensors that no op made and that are not finite, by origin."""
        bad = {-1 - at: t for at, (t, n) in enumerate(self._given) if _bad(self._ranges.read([n]))}
        return {origin: self.name(t) for origin, t in bad.items()}

    def name(self, t: torch.Tensor) -> str:
        """Return the name of a parameter or buffer, or a description of another tensor."""
        key, shape = modes.storage_key(t), "x".join(map(str, t.shape)) or "scalar"
        for name, own in self._named():
            if modes.storage_key(own) == key:
                return name
            if own.is_leaf and own.grad is not None and modes.storage_key(own.grad) == key:
                return f"{name}.grad"
        argument = self._arguments is None or key in self._arguments
        other = "an argument" if argument else "a tensor that no op computed"
        return f"{self._called.get(key, other)} ({dtype_names.NAMES[t.dtype]} {shape})"

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._model is not None:
            for name, t in (*self._model.named_parameters(), *self._model.named_buffers()):
                yield dynamo.plain_name(name), t

    def names_of(self, params: Sequence[torch.Tensor]) -> list[str]:
        """Return the names of parameters, without a wait."""
        named = {id(p): name for name, p in self._named()}
        return [named.get(id(p), f"parameter {at}") for at, p in enumerate(params)]


class Values(Subscriber):
    """Measures the ranges of results, and follows where inputs come from."""

    measures = True

    def __init__(self, model: nn.Module | None, given: Sequence[Any] | None) -> None:
        self.events: list[Event] = []  # the ops that ran, in order
        self.updates: list[Update] = []  # the steps of optimizers
        self.ranges: RangeTable = RangeTable()  # of their results
        self._reads: dict[Reads, Reads] = {}  # of events: many are alike, and one is kept of these
        self._provenance = Provenance(model, self.ranges, given)

    # To be overridden

    def compares(self, event: Event) -> bool:
        """Return whether to compare an op in a low dtype with the same in float32."""
        return True

    def noted(self, ran: Ran, event: Event, results: list[torch.Tensor]) -> None:
        """Measure more of an op that has run."""
        raise NotImplementedError

    # What runs

    def before(self, ran: Ran) -> None:
        if ran.facts.receives:
            for t in ran.reads:
                self._provenance.handed(t)
            return
        place = ran.op_call.place
        if ran.facts.writes and ran.op_call.direction == BACKWARD and not place.source:
            self._provenance.accumulated(ran.reads[0])
        over = ran.unread  # of torch.empty, whose numbers are of no one
        origins = []
        for t in ran.reads:
            if id(t) not in over:
                origins.append(self._provenance.origin(t))
            else:  # the rest of its memory keeps its numbers
                rest = measurable(t) and is_part(t)
                origins.append(self._provenance.maker(t) if rest else None)
        self._origins = tuple(origins)

    def after(self, ran: Ran, result: object, made: list[torch.Tensor]) -> None:
        facts, reads, op_call = ran.facts, ran.reads, ran.op_call
        if facts.receives:  # values that may not have arrived: measured once read
            for t in (*made, *ran.into):
                self._provenance.received(t)
            return
        if ran.into and not any(t.numel() for t in ran.into):
            return  # it writes nothing
        origins = self._origins
        results = [t for t in made or ran.into if measurable(t)]  # `_foreach_mul_` returns nothing
        several = op_call.direction == BACKWARD or facts.lists or isinstance(result, list)
        if not several:  # those of other shapes are statistics, such as the mean beside a norm
            results = [t for t in results if t.shape == results[0].shape]
        run = dtype_names.NAMES[results[0].dtype] if results else ""
        floats = [*_floats(ran.args, ran.kwargs), *self._provenance.constants(reads)]
        single = bool(results) and results[0].numel() == 1
        single = single and not (facts.writes and is_part(results[0]))
        if facts.kind == "makes" or not reads:
            origins = tuple([at for at in origins if at is not None and at >= 0])
            reads = []
            if single and not results[0].dim() and not facts.writes:  # whoever reads it is to blame
                self._provenance.constant(results[0], floats)
                return
        given = not all(map(math.isfinite, floats))
        func = None if ran.casts else ran.func
        shape = results[0].shape if results else None
        event = Event(op_call, origins, run, self._seen(reads), func, single, shape, given)
        if floats and not op_call.place.updating:
            event.numbers = tuple([x for x in floats if rounded(x, run) in facts.keeps])
        event.ranges = self.ranges.add_each(self._still_bad(ran.into) or results)
        saturates = not ran.casts and op_call.op in SATURATING
        loses = run == "float16" or (run == "bfloat16" and saturates)
        compared = ran.casts or not op_call.place.updating
        if results and loses and compared and self.compares(event):
            if (wide := _wide(ran, results)) is not None:
                event.lost = Lost.of(wide, results[0], self.ranges)
        self.noted(ran, event, (results if several else results[:1]) if reads else [])
        self.events.append(event)
        for t in made:
            self._provenance.made(t, len(self.events) - 1)
        for t in ran.into:
            if op_call.place.updating and self._provenance.maker(t) is None:
                self._provenance.forget(t)  # a parameter, after its step, and no gradient of it
            else:
                self._provenance.made(t, len(self.events) - 1)

    def _still_bad(self, into: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return all values of memory that an op has written a part of, if some were not finite."""
        whole = []
        for t in into:
            made = self._provenance.maker(t)
            if made is None or not measurable(t) or not t.is_cpu:  # the host would wait for a GPU
                continue
            memory, bad = t.untyped_storage(), self.ranges.read(self.events[made].ranges)
            if is_part(t) and _bad(bad):
                whole.append(torch.empty(0, dtype=t.dtype).set_(memory))
        return whole

    def viewed(self, args: Sequence[Any]) -> OpCall | None:
        """Give the gradient of a view to the op that made the viewed tensor."""
        of = args[0] if args else None
        if not isinstance(of, torch.Tensor):
            return None
        made = self._provenance.maker(of)
        return None if made is None else self.events[made].op_call

    def follows(self, func: modes.Op, args: modes.Args, kwargs: modes.Kwargs) -> bool:
        reads = numbers_in(*args, *kwargs.values())
        if func is torch.ops.aten.lift_fresh.default:  # of torch.tensor, also of arrays of data
            return any(not t.dim() for t in reads)
        return bool(_floats(args, kwargs) or self._provenance.constants(reads))

    def unwatched(
        self, func: modes.Op, args: modes.Args, kwargs: modes.Kwargs, result: object
    ) -> None:
        for t in numbers_in(result):
            self._provenance.forget(t)

    def _seen(self, reads: Sequence[torch.Tensor]) -> Reads:
        """Return `Event.reads` of tensors."""
        seen = tuple([(t.dtype, _NO_SHAPE if t.is_nested else t.shape) for t in reads])
        return self._reads.setdefault(seen, seen)

    # Updates

    def stepping(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        # The ops of an update are not the model's; those of a closure are. One update is looked at
        # as a whole, also if it is of other optimizers.
        if not closure and not self.stream.looks_away:
            self.stream.look_away()
            place, *_ = self.stream.where(sys._getframe(1))
            at = place, len(self.events), self.ranges, self._provenance
            self.updates.append(Update(optimizer, *at))
            for grad in unscale.gradients(optimizer):
                self._provenance.handed(grad)

    def stepped(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        if not closure and self.updates:
            self.updates[-1].stepped()
            self.stream.go_on()
        self._provenance.updated()  # the values of parameters have changed

    def fault(self) -> Fault | None:
        """Return where the first value that is not finite came from; None if all are finite."""
        # Of the first update that was given or wrote such a value: ops after it may have read that.
        faults = ((it.at, fault) for it in self.updates if (fault := it.fault()) is not None)
        until, broke = next(faults, (None, None))
        return self._first_fault(self.events[:until]) or broke

    def _first_fault(self, events: Sequence[Event]) -> Fault | None:
        """Return the fault of a run: where the first value that is not finite came from."""
        bad = [_bad(self.ranges.read(event.ranges)) for event in events]
        if not any(bad):
            return None
        spoiled = self._provenance.spoiled()
        used = {i for event in events if event.op_call.direction != BACKWARD for i in event.inputs}
        there = self._provenance.alive()
        nodes = []
        for at, (event, was) in enumerate(zip(events, bad, strict=True)):
            finite, vanished = event.run == "float16" and event.op_call.op not in DIVIDING, 0.0
            ends, below = self.ranges.read(event.ranges), False
            if event.func is not None and dispatcher.writes(event.func):
                if was == "NaN" or any(bad[i] for i in event.inputs):
                    finite = False  # of an op in place, such as sqrt_, or beside a mask's Inf
            if event.lost is not None:
                low, high = self.ranges.read([event.lost.wide])
                finite, below = math.isfinite(low) and math.isfinite(high), high < 1
                vanished = self.ranges.read([event.lost.both])[1] / event.lost.looked_at
            elif event.func is None and event.inputs:  # of another op's result, which was measured
                below = max(self.ranges.read(events[event.inputs[0]].ranges), default=1.0) < 1
            near = ((x, rounded(x, event.run)) for x in event.numbers)
            nodes.append(
                Node(
                    inputs=event.inputs,
                    bad=was,
                    run=event.run,
                    burst=finite and bool(was),
                    tried=event.lost is not None or event.run != "float16",
                    vanished=vanished,
                    numbers=tuple(
                        x for x, end in near if end is not None and min(ends) <= end <= max(ends)
                    ),
                    spoiled=next((spoiled[by] for by in event.origins if by in spoiled), "")
                    or self._overwritten(event, bad),
                    given=event.given or not event.reads,
                    value=bool(event.ranges),
                    cast=event.func is None,
                    op=event.op_call.op,
                    ones=below and max(ends) == 1 and not event.numbers,
                    single=event.single,
                    dropped=at not in there,
                    # A loss, which the backward of its own op may read.
                    returned=event.single and event.op_call.direction == FORWARD and at not in used,
                    divisors=event.divisors,
                    regular=bool(ends) and not any(min(ends) <= x <= max(ends) for x in (-1, 0, 1)),
                )
            )
        found = blame(nodes)
        if found is None and not any(event.op_call.direction == BACKWARD for event in events):
            # A forward pass alone may end in a value that nobody keeps.
            nodes = [node._replace(dropped=False) for node in nodes]
            found = blame(nodes)
        if found is None or found.why != CONSTANT:
            self.ranges.meant = {number for at in meant(nodes) for number in events[at].ranges}
        if found is None:
            return None
        event, first = events[found.node], events[found.first].op_call
        return Fault.of(
            call_of(event.op_call),
            (found.kind, found.why),
            event.run,
            self._operands_of(event),
            bad[found.first],
            None if first is event.op_call else call_of(first),
        )

    def _overwritten(self, event: Event, bad: Sequence[str]) -> str:
        """Name an input that an op left finite and that has become Inf or NaN since."""
        for at, (_, shape), found in zip(event.origins, event.reads, event.operands, strict=False):
            if at is None or at < 0 or bad[at] or not found[3:5].any():  # shares of Inf and NaN
                continue
            func = self.events[at].func
            if shape == self.events[at].shape and not (func and dispatcher.writes(func)):
                return f"{OUTSIDE} the result of {self.events[at].op_call.op}"
        return ""

    def _operands_of(self, event: Event) -> Iterator[Operand]:
        """Yield an op's inputs; where they were not measured, with largest magnitudes alone."""
        for at, (origin, (dtype, shape)) in enumerate(
            zip(event.origins, event.reads, strict=False)
        ):
            name, ends = "", [0.0]
            if origin is not None and origin < 0:
                t, ends = self._provenance.given(origin)
                name = self._provenance.name(t)
            elif origin is not None and self.events[origin].shape == shape:  # and no part of it
                ends = self.ranges.read(self.events[origin].ranges)
            kind = dtype_names.NAMES[dtype]
            if event.operands:
                yield Operand.measured(kind, shape, event.operands[at].tolist(), name)
            else:
                yield Operand.of_ends(kind, shape, ends, name)


def _wide(ran: Ran, results: list[torch.Tensor]) -> torch.Tensor | None:
    """Return an op's first result in float32, on the same inputs; of a cast, its input."""
    # None for an op that writes into what it reads, draws random numbers or has no float32 form.
    if ran.casts:
        return ran.reads[0]
    if ran.facts.draws or not dispatcher.repeatable(ran.func):
        return None

    def wide(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            copy = any(leaf is t for t in ran.into)  # running statistics, which stay as they are
            return leaf.to(torch.float32, copy=copy) if copy or leaf.dtype in _LOW else leaf
        return torch.float32 if isinstance(leaf, torch.dtype) and leaf in _LOW else leaf

    try:
        args, kwargs = tree_map(wide, (ran.args, ran.kwargs))
        made = next(filter(measurable, float_tensors(ran.func(*args, **kwargs))), None)
    except (RuntimeError, TypeError, ValueError):
        return None
    return made if made is not None and made.shape == results[0].shape else None


_LOW = (torch.float16, torch.bfloat16)
_NO_SHAPE = torch.Size()  # of a nested tensor, which has one for each of its parts


def _floats(args: modes.Args, kwargs: Mapping[str, Any]) -> list[float]:
    """Return the Python floats among an op's arguments."""
    return [x for x in (*args, *kwargs.values()) if isinstance(x, float)]


def _bad(ends: list[float]) -> str:
    if any(map(math.isnan, ends)):
        return "NaN"
    return "Inf" if any(map(math.isinf, ends)) else ""


# The step of an optimizer, which reads gradients and weights, and writes weights and its state.


# By name, "0.weight", "0.weight.grad" or "exp_avg of 0.weight", a number in the `RangeTable`.
Ranges = Mapping[str, int]


class Update:
    """A step of an optimizer that is about to run, measured; nothing waits for the device."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        place: CallSite,
        at: int,
        ranges: RangeTable,
        provenance: Provenance,
    ) -> None:
        self.at = at  # how many events there were before
        self._place, self._ranges, self._provenance = place, ranges, provenance
        self._optimizer, self._own = optimizer, with_gradients(optimizer)
        self._dtypes: dict[str, torch.dtype] = {}
        self._read: Ranges = {}  # of what it was given, and
        self._wrote: Ranges = {}  # of what it wrote, where that was not seen to be finite
        if not self._finite():
            self._read = self._measured(self._state() | self._grads())
        self._lost = lost_eps(optimizer)
        self._tried = self._try() if self._lost else None

    def stepped(self) -> None:
        """Measure what the step has written."""
        if not self._finite():
            self._wrote = self._measured(self._state())
            self._read = self._read or self._measured(self._grads())

    def _finite(self) -> bool:
        """Return whether all is finite, at a glance; False where the host would wait for that."""
        own: list[Any] = []
        for p in self._own:
            own += (p, p.grad, *moments(self._optimizer, "", p).values())
        if not all(measurable(t) and t.is_cpu and t.itemsize > 1 for t in own):
            return False
        # A norm may overflow where no number does, which a closer look tells.
        return not own or bool(torch.stack(torch._foreach_norm(own)).isfinite().all())

    @cached_property
    def _params(self) -> dict[str, torch.Tensor]:
        return dict(zip(self._provenance.names_of(self._own), self._own, strict=True))

    def _grads(self) -> dict[str, torch.Tensor]:
        return {f"{name}.grad": p.grad for name, p in self._params.items() if p.grad is not None}

    def _try(self) -> Ranges | None:
        """Take the step with a larger eps, and undo it; None if it cannot be taken."""
        optimizer = self._optimizer
        before = Snapshot(self._own, grads=self._own, optimizers=[optimizer], random_numbers=True)
        try:
            for group in optimizer.param_groups:
                if lost := {p.dtype for p in group["params"]} & self._lost.keys():
                    group["eps"] = max(larger_eps(dtype_names.NAMES[dtype]) for dtype in lost)
            optimizers.step_without_hooks(type(optimizer))(optimizer)
            return self._measured(self._state())
        except Exception:  # of a user's optimizer, which the step itself will raise
            return None
        finally:
            before.put_back()

    def _state(self) -> dict[str, torch.Tensor]:
        """Return the parameters and their moments, by name."""
        found = dict(self._params)
        for name, p in self._params.items():
            found |= moments(self._optimizer, name, p)
        return found

    def _measured(self, named: Mapping[str, torch.Tensor]) -> Ranges:
        local = {name: distributed.local(t) for name, t in named.items()}
        found = {name: t for name, t in local.items() if measurable(t)}
        self._dtypes |= {name: t.dtype for name, t in found.items()}
        numbers = [self._ranges.keep(*ends) for ends in extremes(found.values())]
        return dict(zip(found, numbers, strict=True))

    def _bad(self, ranges: Ranges) -> list[str]:
        return [name for name, at in ranges.items() if _bad(self._ranges.read([at]))]

    def fault(self) -> Fault | None:
        """Return a fault if it was given or made what is not finite."""
        given, made = self._bad(self._read), self._bad(self._wrote)
        if given:
            why = f"{given[0]} is not finite before the update"
            return self._fault("input", given[0], self._read, why)
        if not made:
            return None
        name, dtype = made[0], self._dtypes[made[0]]
        run, lost = dtype_names.NAMES[dtype], self._lost.get(dtype, "")
        kind, why = "operation", f"its inputs are finite and {name} is not, in {run} or wider"
        if lost and (self._tried is None or not self._bad(self._tried)):
            kind, why = "number", f"{NO_EPS} in {run}"
        elif run == "float16" and _bad(self._ranges.read([self._wrote[name]])) == "Inf":
            kind = "overflow"
            why = f"{name} is beyond float16's largest number, {FORMATS[run].max:g}"
        return self._fault(kind, name, self._wrote, why, lost)

    def _fault(self, kind: str, name: str, ranges: Ranges, why: str, lost: str = "") -> Fault:
        run, of = dtype_names.NAMES[self._dtypes[name]], name.removesuffix(".grad")
        of = of.rpartition(" of ")[2]
        inputs = tuple[Operand, ...]()
        if (grad := f"{of}.grad") in self._read:
            kind_of, ends = self._dtypes[grad], self._ranges.read([self._read[grad]])
            shape = distributed.local(self._params[of]).shape
            inputs = (Operand.of_ends(dtype_names.NAMES[kind_of], shape, ends, grad),)
        remedy, its = "", type(self._optimizer)
        if kind != "input":
            remedy = of_optimizer("torch", kind, run, lost, self._tried is not None)
        return Fault(
            f"{its.__name__}.step", f"{its.__module__}.{its.__name__}.step",
            self._place.module, self._place.source, UPDATE, kind, run, None, inputs,
            _bad(self._ranges.read([ranges[name]])), why, remedy=remedy,
        )  # fmt: skip


def with_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer that have a gradient."""
    return [p for p in optimizers.parameters(optimizer) if p.grad is not None]


def moments(
    optimizer: torch.optim.Optimizer, name: str, p: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the tensors of more than one number in an optimizer's state of a parameter."""
    state: Any = optimizer.state.get(p, {})
    return {
        f"{key} of {name}": t
        for key, t in state.items()
        if isinstance(t, torch.Tensor)
        and t.numel() > 1
        and (t.is_floating_point() or t.is_complex())
    }


def lost_eps(optimizer: torch.optim.Optimizer) -> dict[torch.dtype, str]:
    """Return the dtypes of weights in which the optimizer's eps is zero, with a clause on it."""
    found: dict[torch.dtype, str] = {}
    # Low weights step in float32.
    low = set(optimizer.low) if isinstance(optimizer, LowOptimizer) else set[torch.Tensor]()
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if not isinstance(eps, (int, float)):
            continue
        runs = {(p.dtype, torch.float32 if p in low else p.dtype) for p in group["params"]}
        for dtype, run in runs:
            form = FORMATS.get(dtype_names.NAMES[run])
            if abs(eps) <= (0 if form is None else form.smallest_subnormal / 2):
                whose = f"{type(optimizer).__name__}'s eps"
                found[dtype] = f"{whose}={eps:g} is zero in {run}" if eps else f"{whose} is 0"
    return found
