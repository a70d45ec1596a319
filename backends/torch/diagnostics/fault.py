"""The op at which the first value of a run that is not finite was made, and its cause.

Ops are followed one by one; the step of an optimizer is one for itself: an `Update`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from polymp.backends.torch.autocast import dtype_names
from polymp.backends.torch.compat import distributed, modes, optimizers
from polymp.backends.torch.diagnostics.measure import (
    Lost,
    RangeTable,
    measurable,
    real,
)
from polymp.backends.torch.diagnostics.op_call import CallSite, OpCall, Own, call_of, tensors
from polymp.backends.torch.snapshot import Snapshot
from polymp.backends.torch.weights.low_weights import LowOptimizer
from polymp.diagnostics.audit_records import Fault, Operand
from polymp.diagnostics.blame import (
    CONSTANT,
    DIVIDING,
    NO_EPS,
    UPDATE,
    Node,
    blame,
    larger_eps,
    meant,
    of_optimizer,
    rounded,
)
from polymp.diagnostics.call_record import BACKWARD, FORWARD
from polymp.dtypes import FORMATS

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
    given: bool = False  # True if a number among its arguments is not finite
    ranges: range = range(0)  # of its results, by their numbers in a `RangeTable`
    # Of what it makes beside its first result, such as the maxima of aminmax.
    beside: range = range(0)
    lost: Lost | None = None  # the values that float16 made Inf or zero; None if that is not known
    numbers: tuple[float, ...] = ()  # numbers in the program that its dtype made zero
    operands: tuple[torch.Tensor, ...] = ()  # measurements of `reads`, if they were made

    @property
    def inputs(self) -> tuple[int, ...]:
        """The events that made the tensors that it read."""
        return tuple(at for at in self.origins if at is not None and at >= 0)


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
        # By storage, the event that wrote it last.
        self._maker: dict[int, int] = {}
        self._kept = modes.KeptKeys()
        # By storage and view, a tensor that no event made.
        self._outside: dict[int, dict[tuple[Any, ...], int]] = {}
        self._given: list[tuple[torch.Tensor, int]] = []  # with their ranges
        self._called: dict[int, str] = {}  # of some storages, a word on what they have
        self._constants: dict[int, float] = {}  # those of single numbers that the program has
        # By storage of a parameter, the range of its largest magnitude, after the last update.
        self._parameters: dict[int, int] = {}

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
                found = self._parameters[key] if key in self._parameters else self._ranges.add(t)
                self._given.append((t.detach(), found))  # kept, and so its key
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

    def look_at_parameters(self) -> None:
        """Measure the largest magnitude of each parameter, all at once."""
        own = () if self._model is None else self._model.parameters()
        trained = [p.detach() for p in own if measurable(p)]
        keys = map(modes.storage_key, trained)
        self._parameters = dict(zip(keys, self._ranges.add_all(trained), strict=True))

    def updated(self) -> None:
        """Note that the values of parameters have changed, and measure these."""
        self._outside.clear()
        self.look_at_parameters()

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
            yield from self._model.named_parameters()
            yield from self._model.named_buffers()

    def names_of(self, params: Sequence[torch.Tensor]) -> list[str]:
        """Return the names of parameters, without a wait."""
        named = {id(p): name for name, p in self._named()}
        return [named.get(id(p), f"parameter {at}") for at, p in enumerate(params)]


def first_fault(events: list[Event], ranges: RangeTable, provenance: Provenance) -> Fault | None:
    """Return the fault of a run: where the first value that is not finite came from."""
    bad = [_bad(ranges.read((*event.ranges, *event.beside))) for event in events]
    if not any(bad):
        return None
    spoiled = provenance.spoiled()
    counts = iter(Lost.read([e.lost for e in events if e.lost is not None]))
    used = {i for event in events if event.op_call.direction != BACKWARD for i in event.inputs}
    nodes = []
    for at, (event, was) in enumerate(zip(events, bad, strict=True)):
        finite, vanished = event.run == "float16" and event.op_call.op not in DIVIDING, 0.0
        ends, below = ranges.read(event.ranges), False
        if event.lost is not None:
            low, high = ranges.read([event.lost.wide])
            finite, below = math.isfinite(low) and math.isfinite(high), high < 1
            vanished = next(counts)[1] / event.lost.looked_at
        elif event.func is None and event.inputs:  # of another op's result, which was measured
            below = max(ranges.read(events[event.inputs[0]].ranges), default=1.0) < 1
        near = ((x, rounded(x, event.run)) for x in event.numbers)
        nodes.append(
            Node(
                event.inputs,
                was,
                event.run,
                finite and bool(was),
                vanished,
                tuple(x for x, end in near if end is not None and min(ends) <= end <= max(ends)),
                next((spoiled[by] for by in event.origins if by in spoiled), ""),
                event.given or not event.reads,
                bool(event.ranges),
                cast=event.func is None,
                op=event.op_call.op,
                ones=below and max(ends) == 1 and not event.numbers,
                single=event.single,
                # A loss, which the backward of its own op may read.
                returned=event.single and event.op_call.direction == FORWARD and at not in used,
            )
        )
    found = blame(nodes)
    if found is None or found.why != CONSTANT:
        ranges.meant = {number for at in meant(nodes) for number in events[at].ranges}
    if found is None:
        return None
    event, first = events[found.node], events[found.first].op_call
    return Fault.of(
        call_of(event.op_call),
        (found.kind, found.why),
        event.run,
        _operands_of(event, events, ranges, provenance),
        bad[found.first],
        None if first is event.op_call else call_of(first),
    )


def _operands_of(
    event: Event, events: list[Event], ranges: RangeTable, provenance: Provenance
) -> Iterator[Operand]:
    """Yield an op's inputs; where they were not measured, with their largest magnitudes alone."""
    for at, (origin, (dtype, shape)) in enumerate(zip(event.origins, event.reads, strict=False)):
        name, ends = "", [0.0]
        if origin is not None and origin < 0:
            t, ends = provenance.given(origin)
            name = provenance.name(t)
        elif origin is not None and events[origin].ranges:
            ends = ranges.read(events[origin].ranges)
        kind = dtype_names.NAMES[dtype]
        if event.operands:
            yield Operand.measured(kind, shape, event.operands[at].tolist(), name)
        else:
            yield Operand.of_ends(kind, shape, ends, name)


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
        self._place, self._ranges = place, ranges
        self._kind = type(optimizer)
        params = with_gradients(optimizer)
        self._params = dict(zip(provenance.names_of(params), params, strict=True))
        self._dtypes: dict[str, torch.dtype] = {}
        grads = {f"{name}.grad": p.grad for name, p in self._params.items() if p.grad is not None}
        self._read = self._measured(self._state(optimizer) | grads)
        self._wrote: Ranges = {}
        self._lost = lost_eps(optimizer)
        self._tried = self._try(optimizer) if self._lost else None

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Measure what the step has written."""
        self._wrote = self._measured(self._state(optimizer))

    def _try(self, optimizer: torch.optim.Optimizer) -> Ranges | None:
        """Take the step with a larger eps, and undo it; None if it cannot be taken."""
        params = [*self._params.values()]
        before = Snapshot(params, grads=params, optimizers=[optimizer], random_numbers=True)
        try:
            for group in optimizer.param_groups:
                if lost := {p.dtype for p in group["params"]} & self._lost.keys():
                    group["eps"] = max(larger_eps(dtype_names.NAMES[dtype]) for dtype in lost)
            optimizers.step_without_hooks(type(optimizer))(optimizer)
            return self._measured(self._state(optimizer))
        except Exception:  # of a user's optimizer, which the step itself will raise
            return None
        finally:
            before.put_back()

    def _state(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Return the parameters and their moments, by name."""
        found = dict(self._params)
        for name, p in self._params.items():
            found |= moments(optimizer, name, p)
        return found

    def _measured(self, named: Mapping[str, torch.Tensor]) -> Ranges:
        local = {name: distributed.local(t) for name, t in named.items()}
        found = {name: t for name, t in local.items() if measurable(t)}
        self._dtypes |= {name: t.dtype for name, t in found.items()}
        return dict(zip(found, self._ranges.add_all(found.values()), strict=True))

    def _bad(self, ranges: Ranges) -> list[str]:
        return [name for name, at in ranges.items() if _bad(self._ranges.read([at]))]

    def fault(self, spoiled: bool = False) -> Fault | None:
        """Return a fault if it made what is not finite, or if `spoiled`, if it was given that."""
        given, made = self._bad(self._read), self._bad(self._wrote)
        if spoiled and given:
            why = f"{given[0]} is not finite before the update"
            return self._fault("input", given[0], self._read, why)
        if given or not made:
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
        remedy, largest = "", max((operand.largest for operand in inputs), default=0.0)
        if kind != "input":
            tried = self._tried is not None
            remedy = of_optimizer("torch", kind, run, largest, lost, tried)
        return Fault(
            f"{self._kind.__name__}.step", f"{self._kind.__module__}.{self._kind.__name__}.step",
            self._place.module, self._place.source, UPDATE, kind, run, None, inputs,
            _bad(self._ranges.read([ranges[name]])), why, remedy=remedy,
        )  # fmt: skip


def with_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer that have a gradient."""
    groups = optimizer.param_groups
    return [p for group in groups for p in group["params"] if p.grad is not None]


def moments(
    optimizer: torch.optim.Optimizer, name: str, p: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the tensors of more than one number in an optimizer's state of a parameter."""
    state: Any = optimizer.state.get(p, {})
    tensors = [(key, t) for key, t in dict(state).items() if isinstance(t, torch.Tensor)]
    return {
        f"{key} of {name}": t
        for key, t in tensors
        if (t.is_floating_point() or t.is_complex()) and t.numel() > 1
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
