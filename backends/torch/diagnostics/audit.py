"""`audit`: how large the numbers of a run are, op by op, and where the first bad one comes from.

    with polymp.torch.audit(model) as a:
        for x, y in batches: step(x, y)
    print(a); a.plot("audit.png"); print(a.suggest())

Every op is watched below autograd. What it made is measured on its device, with tensors that the
run never sees; nothing is read before the block ends.
"""

import math
import reprlib
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from polymp.backends.torch.autocast import dtype_names, torch_table
from polymp.backends.torch.compat import autograd, dispatcher, distributed, modes, storage
from polymp.backends.torch.diagnostics.measure import (
    Bins,
    Lost,
    Range,
    comparable,
    measurable,
    numbers,
    range_of,
)
from polymp.backends.torch.diagnostics.op_call import OpCall
from polymp.backends.torch.diagnostics.op_kinds import float_tensors
from polymp.backends.torch.diagnostics.op_tracer import OpTracer, Own, Ran
from polymp.backends.torch.scaler.closure_step import closure_of
from polymp.diagnostics.audit import Audit
from polymp.diagnostics.audit_records import Fault, Measured, Operand
from polymp.diagnostics.blame import DIVIDING, Blame, Node, blame
from polymp.diagnostics.call import BACKWARD
from polymp.diagnostics.magnitudes import Magnitudes, joined
from polymp.dtypes import FORMATS

# Ops whose number keeps something from being zero: what the format makes zero is then missing.
_ADDING = frozenset({"add", "add_", "sub", "sub_", "rsub", "clamp", "clamp_min", "maximum"})

# Of the calls at one site, every n-th is compared with float32; the first is one of them.
_EVERY = 16

# Below half of it, a number is zero in float16.
_TINY = FORMATS["float16"].smallest_subnormal / 2


class _Event(NamedTuple):
    """An op that ran, as `blame` will see it.

    Attributes:
        op_call: the call that it is part of.
        origins: of each float tensor that it read: the event that made it; -1 - n for the n-th of
            those that no event made; None for one that cannot be measured.
        ranges: of its results.
        run: format of its results.
        lost: what float16 did; None where that is not known.
        numbers: that its format made zero.
        given: True if a number it was given is not finite.
        reads: dtype and shape of the float tensors that it was given.
        operands: what was in them, where that is measured.
        cast: True for a cast.
    """

    op_call: OpCall
    origins: tuple[int | None, ...]
    ranges: tuple[Range, ...]
    run: str
    lost: Lost | None = None
    numbers: tuple[float, ...] = ()
    given: bool = False
    reads: tuple[tuple[torch.dtype, torch.Size], ...] = ()
    operands: tuple[torch.Tensor, ...] = ()
    cast: bool = False

    @property
    def inputs(self) -> tuple[int, ...]:
        """The events that made what it read."""
        return tuple(at for at in self.origins if at is not None and at >= 0)


class _Site(NamedTuple):
    """What an op call site made in one backward pass, or outside of them.

    Attributes:
        bins: of its results.
        numbers: of the program that its format made zero.
    """

    bins: Bins
    numbers: set[float]


class Measures(OpTracer):
    """A tracer that measures what it sees.

    Args:
        model: whose modules and parameters are named; None for those of the outermost module.
        scaler: that scaled the losses.
        operands: True to measure what ops are given, too.
    """

    counts = False

    def __init__(
        self, model: nn.Module | None = None, scaler: Any = None, operands: bool = False
    ) -> None:
        super().__init__(model)
        self._model = model
        self._scaler = scaler
        self._operands = operands
        self._events: list[_Event] = []
        # By storage, the event that wrote it last, and what keeps the key from being used again.
        self._maker: dict[int, tuple[int, Any]] = {}
        # By storage and view, a tensor that no event made.
        self._outside: dict[int, dict[tuple[Any, ...], int]] = {}
        self._given: list[tuple[torch.Tensor, Range | None, int]] = []
        self._received: set[int] = set()  # storages that other ranks filled
        self._parameters = {storage.storage_key(p): at for at, p in enumerate(self._trained())}
        self._norms: list[list[torch.Tensor]] = []  # largest magnitudes after each update
        self._updates = -1
        self._visits: Counter[Any] = Counter()
        self._sites: dict[tuple[Any, ...], _Site] = {}
        self._gradients: dict[tuple[str, int], Bins] = {}
        self._scales: list[Any] = [1.0]  # of each backward pass
        self._passes: dict[int, int] = {}
        self._off = dispatcher.autocast_keys(torch_table.DEVICES)

    # What runs

    def before(self, ran: Ran) -> Any:
        self._pass()
        if distributed.talks(ran.func):
            return None
        with Own(self._off):
            origins = self._read(ran.reads)
            operands = self._measured(ran.reads) if self._operands else ()
        return origins, operands

    def after(self, ran: Ran, result: Any, made: list[torch.Tensor], kept: Any) -> None:
        if kept is None:
            self._received_in(ran, made)
            return
        origins, operands = kept
        op_call, func = ran.op_call, ran.func
        results = [t for t in made if measurable(t)]
        if op_call.direction != BACKWARD:
            del results[1:]  # statistics, such as the mean beside a norm
        run = dtype_names.NAMES[results[0].dtype] if results else ""
        lost = None
        numbers: tuple[float, ...] = ()
        with Own(self._off):
            ranges = tuple(map(range_of, results))
            if run == "float16" and not op_call.place.updating:
                if self._operands or self._again(op_call) % _EVERY == 0:
                    lost = _against_float32(ran, results)
                if func.overloadpacket.__name__ in _ADDING:
                    numbers = tuple(x for x in _floats(ran) if 0 < abs(x) < _TINY)
            given = any(not math.isfinite(x) for x in _floats(ran))
            reads = tuple((t.dtype, t.shape) for t in ran.reads)
            event = _Event(op_call, origins, ranges, run, lost, numbers, given, reads, operands)
            self._note(event, results)
        self._written(ran, made)

    def _received_in(self, ran: Ran, made: list[torch.Tensor]) -> None:
        """Note a value that other ranks send and that may be on its way: it counts once read."""
        for t in (*made, *dispatcher.written(ran.func, ran.args, ran.kwargs)):
            self._forget(t)
            self._received.add(storage.storage_key(t))

    def _again(self, op_call: OpCall) -> int:
        """How often an op was called at its site before."""
        site = op_call.op, op_call.spelling, op_call.place, op_call.direction
        self._visits[site] += 1
        return self._visits[site] - 1

    def after_cast(self, op_call: OpCall, source: torch.Tensor, result: torch.Tensor) -> None:
        self._pass()
        with Own(self._off):
            origins = self._read([source])
            fits = measurable(source) and measurable(result)
            ranges = (range_of(result),) if fits else ()
            run = dtype_names.NAMES[result.dtype]
            lost = Lost.of(source, result) if fits and run == "float16" else None
            operands = self._measured([source]) if self._operands else ()
        reads = ((source.dtype, source.shape),)
        event = _Event(op_call, origins, ranges, run, lost, (), False, reads, operands, True)
        self._events.append(event)
        self._made(result)

    def viewed(self, func: Any, args: Any, frame: Any) -> None:
        """A view's gradient is one of what it is a view of; where it was called is not asked."""
        number = autograd.latest_node()
        if number >= self._first_node and number not in self._of_node and args:
            of = args[0]
            made = self._maker.get(storage.storage_key(of)) if torch.is_tensor(of) else None
            if made is not None:
                self._of_node[number] = self._events[made[0]].op_call

    def unwatched(self, result: Any) -> None:
        for t in float_tensors(result):
            self._forget(t)

    def _forget(self, t: torch.Tensor) -> None:
        key = storage.storage_key(t)
        self._maker.pop(key, None)
        self._outside.pop(key, None)

    def _read(self, reads: list[torch.Tensor]) -> tuple[int | None, ...]:
        """Where these tensors come from; see `_Event.origins`."""
        return tuple(map(self._origin, reads))

    def _origin(self, t: torch.Tensor) -> int | None:
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

    def _made(self, t: torch.Tensor) -> None:
        """The last event made a tensor, or wrote into it."""
        key = storage.storage_key(t)
        if key:
            known = self._maker.get(key)
            kept = storage.storage_reference(t) if known is None else known[1]
            self._maker[key] = len(self._events) - 1, kept

    def _note(self, event: _Event, results: list[torch.Tensor]) -> None:
        self._events.append(event)
        op_call = event.op_call
        if op_call.place.updating or not results:
            return
        at = self._scales_at if op_call.direction == BACKWARD else 0
        key = (
            at, op_call.op, op_call.spelling, op_call.place, op_call.direction, op_call.region,
            op_call.row, event.run,
        )  # fmt: skip
        found = self._sites.get(key)
        if found is None:
            found = self._sites[key] = _Site(Bins(results[0].device), set())
        for t, range in zip(results, event.ranges, strict=True):
            found.bins.add(t, range)
        if event.lost is not None:
            found.bins.lost.append(event.lost)
        found.numbers.update(event.numbers)

    def _written(self, ran: Ran, made: list[torch.Tensor]) -> None:
        """From now on, what an op made or wrote is its own."""
        for t in made:
            self._made(t)
        if dispatcher.writes(ran.func):
            for t in dispatcher.written(ran.func, ran.args, ran.kwargs):
                if ran.op_call.place.updating:
                    self._forget(t)  # a parameter, after its step
                else:
                    self._made(t)

    def _measured(self, reads: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(_operand(t) if measurable(t) else _NOTHING for t in reads)

    # Backward passes and gradients

    _scales_at = 0

    def _pass(self) -> None:
        """Note the scale of a backward pass when its first op is seen."""
        task = autograd.backward_task()
        if task is None:
            return
        if task not in self._passes:
            scale = getattr(self._scaler, "_scale", None)
            if isinstance(scale, torch.Tensor):  # else all passes are as one
                self._scales.append(scale.detach().clone())
            self._passes[task] = len(self._scales) - 1
        self._scales_at = self._passes[task]

    def _gradient(self, name: str, p: torch.Tensor) -> None:
        if p.grad is None or not measurable(p.grad):
            return
        self.pause()
        try:
            with Own(self._off), torch.no_grad():
                key = name, self._scales_at
                if key not in self._gradients:
                    self._gradients[key] = Bins(p.grad.device)
                self._gradients[key].add(p.grad, range_of(p.grad))
        finally:
            self.go_on()

    def __enter__(self) -> "Measures":
        super().__enter__()
        for name, p in self._model.named_parameters() if self._model is not None else ():
            if p.requires_grad:
                hook = p.register_post_accumulate_grad_hook(
                    lambda p, name=name: self._gradient(name, p)
                )
                self._stack.callback(hook.remove)
        self._look_at_parameters()
        for hook in (
            register_optimizer_step_pre_hook(self._stepping),
            register_optimizer_step_post_hook(self._stepped),
        ):
            self._stack.callback(hook.remove)
        return self

    _stepper: int | None = None  # the thread in which an optimizer steps

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not modes.sees(self._mode):  # it is another thread's optimizer
            return
        self._stepper = threading.get_ident()
        self._closure = closure_of(args[1:], kwargs) is not None
        if not self._closure:  # an update is no op of the model; what a closure runs is
            self.pause()

    def _stepped(self, *_: Any) -> None:
        if self._stepper != threading.get_ident():
            return
        self._stepper = None
        if not self._closure:
            self.go_on()
        self._look_at_parameters()
        self._outside.clear()  # parameters have other values now

    def _trained(self) -> list[torch.Tensor]:
        own = () if self._model is None else self._model.parameters()
        return [p.detach() for p in own if measurable(p)]

    def _look_at_parameters(self) -> None:
        """Take the largest magnitude of each parameter, all at once."""
        self.looks_away = True
        trained = self._trained()
        with Own(self._off):
            own = list(map(comparable, trained))
            self._norms.append(list(torch._foreach_norm(own, math.inf)) if own else [])
        self._updates += 1
        self.looks_away = False

    # What came of it

    def finish(self, audit: Audit) -> None:
        """Fill an audit. Waits for the device."""
        with Own(self._off):
            self._fill(audit)

    def _fill(self, audit: Audit) -> None:
        scales = [float(s) for s in self._scales]
        audit.scale = scales[-1]
        audit.steps = max(len(self._passes), bool(self._events))
        audit.results = self._results(scales)
        audit.gradients = _gradients(self._gradients, scales)
        audit.fault = self.fault()

    def _results(self, scales: list[float]) -> list[Measured]:
        found: dict[tuple[Any, ...], list[Measured]] = {}
        for key, site in self._sites.items():
            at, op, spelling, place, direction, region, row, run = key
            magnitudes = _without(scales[at], site.bins.magnitudes())
            measured = Measured(
                op, spelling, place.module, place.source, direction, region, row, run,
                magnitudes, tuple(sorted(site.numbers)),
            )  # fmt: skip
            found.setdefault(key[1:], []).append(measured)
        return [
            many[0]._replace(
                magnitudes=joined(m.magnitudes for m in many),
                numbers=tuple(sorted({x for m in many for x in m.numbers})),
            )
            for many in found.values()
        ]

    def fault(self) -> Fault | None:
        """Where the first value that is not finite came from."""
        events = self._events
        ends = [x for event in events for pair in event.ranges for x in pair]
        if not ends:
            return None
        values = iter(numbers(ends))
        bad = [_bad([next(values) for _ in range(2 * len(e.ranges))]) for e in events]
        if not any(bad):
            return None
        given = self._given_ranges()
        spoiled = {
            -1 - at: self._name(t) for at, (t, low, high) in given.items() if _bad([low, high])
        }
        losses = Lost.read([e.lost for e in events if e.lost is not None])
        nodes = []
        for event, was in zip(events, bad, strict=True):
            finite, vanished = event.run == "float16" and event.op_call.op not in DIVIDING, 0.0
            if event.lost is not None:
                finite, vanished = next(losses)
            which = next((spoiled[at] for at in event.origins if at in spoiled), "")
            nodes.append(
                Node(
                    event.inputs,
                    was,
                    event.run,
                    finite and bool(was),
                    vanished,
                    True,
                    event.numbers,
                    which,
                    event.given,
                    bool(event.ranges),
                    cast=event.cast,
                    op=event.op_call.op,
                )
            )
        found = blame(nodes)
        return None if found is None else self._fault(found, bad)

    def _given_ranges(self) -> dict[int, tuple[torch.Tensor, float, float]]:
        """The tensors that no op made, with their ranges, by their places."""
        ends: list[torch.Tensor] = []
        for t, found, update in self._given:
            if found is None:  # a parameter
                largest = self._norms[update][self._parameters[storage.storage_key(t)]]
                found = Range(largest, largest)
            ends += found
        values = iter(numbers(ends))
        return {at: (t, next(values), next(values)) for at, (t, *_) in enumerate(self._given)}

    def _name(self, t: torch.Tensor) -> str:
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

    def _fault(self, found: Blame, bad: list[str]) -> Fault:
        event, first = self._events[found.node], self._events[found.first]
        op_call, why = event.op_call, found.why
        if event.cast and found.kind == "overflow":
            why = f"an input of it is beyond {event.run}'s largest number when it is cast"
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
            self._operands_of(event),
            became,
            why,
            op_call.region,
        )

    def _operands_of(self, event: _Event) -> tuple[Operand, ...]:
        """What an op was given; where it was not measured, the largest magnitudes alone."""
        given = self._given_ranges()
        found = []
        for at, (origin, (dtype, shape)) in enumerate(zip(event.origins, event.reads, strict=True)):
            name, ends = "", [0.0]
            if origin is not None and origin < 0:
                t, *ends = given[-1 - origin]
                name = self._name(t)
            elif origin is not None and self._events[origin].ranges:
                ends = numbers([x for pair in self._events[origin].ranges for x in pair])
            if event.operands:
                found.append(_operand_of(dtype, shape, event.operands[at], name))
                continue
            largest = max(map(abs, filter(math.isfinite, ends)), default=0.0)
            inf, nan = (float(any(map(is_so, ends))) for is_so in (math.isinf, math.isnan))
            format = dtype_names.NAMES[dtype]
            found.append(Operand(format, tuple(shape), 0.0, largest, 0.0, inf, nan, name))
        return tuple(found)


def _without(scale: float, magnitudes: Magnitudes) -> Magnitudes:
    """Magnitudes divided by a loss scale; as they are if it is 0, as torch.amp's may become."""
    return magnitudes.scaled(1 / scale) if scale else magnitudes


def _gradients(found: dict[tuple[str, int], Bins], scales: list[float]) -> list[Measured]:
    by_name: dict[str, list[Any]] = {}
    for (name, at), bins in found.items():
        by_name.setdefault(name, []).append(_without(scales[at], bins.magnitudes()))
    return [
        Measured("gradient", "", name, "", BACKWARD, "", None, "float32", joined(many))
        for name, many in by_name.items()
    ]


def _bad(ends: list[float]) -> str:
    if any(map(math.isnan, ends)):
        return "NaN"
    return "Inf" if any(map(math.isinf, ends)) else ""


def _floats(ran: Ran) -> list[float]:
    """The float numbers that an op was given."""
    values = (*ran.args, *ran.kwargs.values())
    return [x for x in values if isinstance(x, float)]


def _against_float32(ran: Ran, results: list[torch.Tensor]) -> Lost | None:
    """What float16 lost in an op, by the same op on the same inputs in float32.

    None of an op that writes into its arguments, draws random numbers or has no float32 form.
    """
    func = ran.func
    if dispatcher.writes(func) or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    args, kwargs = _widened(ran.args), _widened(ran.kwargs)
    try:
        wide = [t for t in float_tensors(func(*args, **kwargs)) if measurable(t)]
    except (RuntimeError, TypeError, ValueError):
        return None
    if not wide or wide[0].shape != results[0].shape:
        return None
    return Lost.of(wide[0], results[0])


def _widened(tree: Any) -> Any:
    """An op's arguments with float32 for float16."""
    if isinstance(tree, torch.Tensor):
        return tree.to(torch.float32) if tree.dtype is torch.float16 else tree
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(_widened, tree))
    if isinstance(tree, dict):
        return {key: _widened(value) for key, value in tree.items()}
    return torch.float32 if tree is torch.float16 else tree


def _operand(t: torch.Tensor) -> torch.Tensor:
    """Smallest, largest finite magnitude, shares of zeros, Inf and NaN; float32 [5]."""
    size = t.detach().to(torch.float32).abs()
    finite = size.isfinite()
    some = torch.where(finite & (size > 0), size, torch.full_like(size, math.inf))
    most = torch.where(finite, size, torch.zeros_like(size))
    shares = [(size == 0), size.isinf(), size.isnan()]
    return torch.stack([some.amin(), most.amax(), *(s.to(torch.float32).mean() for s in shares)])


_NOTHING = torch.tensor([math.inf, 0.0, 0.0, 0.0, 0.0])


def _operand_of(dtype: torch.dtype, shape: torch.Size, found: torch.Tensor, name: str) -> Operand:
    smallest, largest, zeros, inf, nan = found.tolist()
    smallest = smallest if math.isfinite(smallest) else 0.0
    format = dtype_names.NAMES[dtype]
    return Operand(format, tuple(shape), smallest, largest, zeros, inf, nan, name)


@contextmanager
def audit(model: nn.Module | None = None, scaler: Any = None) -> Iterator[Audit]:
    """Measure the numbers of a few real steps: of every op's result, and of every gradient.

        with polymp.torch.audit(model, scaler) as a:
            for x, y in batches:
                train_step(x, y)
        print(a)                     # largest magnitudes, shares that a format would lose
        a.plot("audit.png")          # a row for each layer, against the ranges of the formats
        policy = a.suggest().apply("amp")

    What the steps compute is what they compute without: every bit of it. A step takes
    about three times as long, more where its ops are tiny. Nothing is read from the device before
    the block ends. Largest magnitudes, Inf and NaN are of all values; shares are of up to 4,096
    values of each tensor, spread evenly.

    For float16, what the format loses is told from what was zero anyway: a float16 op runs once
    more, in float32, on the same inputs, at the first of every sixteen calls at its site.

    Args:
        model: whose modules and parameters are called by their names; without it modules are called
            by their paths in the outermost one that runs, and gradients are those of ops alone.
        scaler: the loss scaler in use, polymp's or torch.amp's: gradients are reported as they are
            without its scale.

    Yields:
        The audit, which is filled when the block ends, also by an error.

    Raises:
        TypeError: `model` is no module.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"audit(model) needs a torch.nn.Module, got {reprlib.repr(model)}.")
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise TypeError(
            f"audit(model, scaler) needs the loss scaler in use, a GradScaler, got {scaler!r}."
        )
    found = Audit()
    measures = Measures(model, scaler)
    try:
        with measures:
            yield found
    finally:
        measures.finish(found)
