"""A tracer that measures the values of ops and gradients while a program runs.

Every op is watched below autograd. Its result is measured on its device, in tensors that the
program never sees; the host reads nothing before the run is over.
"""

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from polymp.backends.torch.autocast import dtype_names, op_facts, torch_table
from polymp.backends.torch.compat import autograd, dispatcher, distributed, modes
from polymp.backends.torch.diagnostics.fault import NOTHING, Event, first_fault, operand
from polymp.backends.torch.diagnostics.measure import Bins, Lost, in_float16, measurable, range_of
from polymp.backends.torch.diagnostics.op_call import OpCall, Ran
from polymp.backends.torch.diagnostics.op_kinds import float_tensors
from polymp.backends.torch.diagnostics.op_tracer import OpTracer
from polymp.backends.torch.diagnostics.own_ops import Own
from polymp.backends.torch.diagnostics.provenance import Provenance
from polymp.backends.torch.scaler.closure_step import closure_of
from polymp.backends.torch.weights.update_watch import Sample
from polymp.diagnostics.audit_records import Fault
from polymp.diagnostics.call_record import BACKWARD
from polymp.dtypes import FORMATS

# At each call site, one of so many calls is compared with float32, the first among them.
_EVERY = 16

# Below half of it, a number is zero in float16.
_TINY = FORMATS["float16"].smallest_subnormal / 2


class Site(NamedTuple):
    """The results of an op call site in one backward pass, or outside of them.

    Attributes:
        bins: counts of their magnitudes.
        numbers: numbers in the program that the dtype made zero.
    """

    bins: Bins
    numbers: set[float]


class ValueTracer(OpTracer):
    """A tracer that measures the results of ops.

    Args:
        model: its modules and parameters are called by their names in it; None to call modules by
            their paths in the outermost module that runs.
        scaler: the loss scaler in use.
        operands: True to measure the inputs of ops, too.

    Attributes:
        events: the ops that ran, in order.
        sites: by call site and backward pass, the magnitudes of results.
        gradients: by parameter and backward pass, the magnitudes of gradients.
        scales: of each backward pass; the first is 1, for what runs outside of them.
        passes: by number of the backward pass, its place in `scales`.
        samples: of each step that updated low weights, a sample, and how many updates were lost.
        off: autocast's dispatch keys, for `Own`.
    """

    counts = False
    title = "audit"

    def __init__(
        self, model: nn.Module | None = None, scaler: Any = None, operands: bool = False
    ) -> None:
        super().__init__(model)
        self._model = model
        self._scaler = scaler
        self._operands = operands
        if operands:
            self.title = "locate"
        self.events: list[Event] = []
        self._provenance = Provenance(model)
        self._visits: Counter[Any] = Counter()
        self.sites: dict[tuple[Any, ...], Site] = {}
        self.gradients: dict[tuple[str, int], Bins] = {}
        self.scales: list[Any] = [1.0]  # of each backward pass
        self.passes: dict[int, int] = {}
        self._called: dict[torch.Tensor, str] = {}
        if model is not None:
            self._called = {p: name for name, p in model.named_parameters()}
        self.samples: list[tuple[Sample, torch.Tensor | None]] = []
        self.off: torch._C.DispatchKeySet = dispatcher.autocast_keys(torch_table.DEVICES)

    # What runs

    def before(self, ran: Ran) -> Any:
        self._pass()
        if distributed.receives(ran.func):
            return None
        with Own(self.off):
            origins = self._read(ran.reads)
            operands = self._measured(ran.reads) if self._operands else ()
        return origins, operands

    def after(self, ran: Ran, result: object, made: list[torch.Tensor], kept: Any) -> None:
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
        with Own(self.off):
            ranges = tuple(map(range_of, results))
            if run == "float16" and not op_call.place.updating:
                if self._operands or self._again(op_call) % _EVERY == 0:
                    lost = in_float16(func, ran.args, ran.kwargs, results)
                if func.overloadpacket.__name__ in op_facts.ADDING:
                    numbers = tuple(x for x in _floats(ran) if 0 < abs(x) < _TINY)
            given = any(not math.isfinite(x) for x in _floats(ran))
            reads = tuple((t.dtype, t.shape) for t in ran.reads)
            event = Event(op_call, origins, ranges, run, lost, numbers, given, reads, operands)
            self._note(event, results)
        self._written(ran, made)

    def _received_in(self, ran: Ran, made: list[torch.Tensor]) -> None:
        """Note values that other ranks send and that may not have arrived: measured once read."""
        for t in (*made, *dispatcher.written(ran.func, ran.args, ran.kwargs)):
            self._provenance.received(t)

    def _again(self, op_call: OpCall) -> int:
        """Count a call of an op at its site; return how many there were before."""
        site = op_call.op, op_call.spelling, op_call.place, op_call.direction
        self._visits[site] += 1
        return self._visits[site] - 1

    def after_cast(self, op_call: OpCall, source: torch.Tensor, result: torch.Tensor) -> None:
        self._pass()
        with Own(self.off):
            origins = self._read([source])
            fits = measurable(source) and measurable(result)
            ranges = (range_of(result),) if fits else ()
            run = dtype_names.NAMES[result.dtype]
            lost = Lost.of(source, result) if fits and run == "float16" else None
            operands = self._measured([source]) if self._operands else ()
        reads = ((source.dtype, source.shape),)
        event = Event(op_call, origins, ranges, run, lost, (), False, reads, operands, True)
        self.events.append(event)
        self._provenance.made(result, len(self.events) - 1)

    def viewed(
        self, func: torch._ops.OpOverload, args: Sequence[object], frame: FrameType | None
    ) -> None:
        """Give the gradient of a view to the op that made the viewed tensor."""
        node, of = self._origins.new_node(), args[0] if args else None
        made = self._provenance.maker(of) if isinstance(of, torch.Tensor) else None
        if node is not None and made is not None:
            self._origins.made(node, self.events[made].op_call)

    def unwatched(self, result: object) -> None:
        for t in float_tensors(result):
            self._provenance.forget(t)

    def _read(self, reads: list[torch.Tensor]) -> tuple[int | None, ...]:
        return tuple(map(self._provenance.origin, reads))

    def _note(self, event: Event, results: list[torch.Tensor]) -> None:
        self.events.append(event)
        op_call = event.op_call
        if op_call.place.updating or not results:
            return
        at = self._scales_at if op_call.direction == BACKWARD else 0
        key = (
            at, op_call.op, op_call.spelling, op_call.place, op_call.direction, op_call.region,
            op_call.row, event.run,
        )  # fmt: skip
        found = self.sites.get(key)
        if found is None:
            found = self.sites[key] = Site(Bins(results[0].device), set())
        for t, range in zip(results, event.ranges, strict=True):
            found.bins.add(t, range)
        if event.lost is not None:
            found.bins.lost.append(event.lost)
        found.numbers.update(event.numbers)

    def _written(self, ran: Ran, made: list[torch.Tensor]) -> None:
        """Note the last event as the origin of the tensors that its op made or wrote."""
        last = len(self.events) - 1
        for t in made:
            self._provenance.made(t, last)
        if dispatcher.writes(ran.func):
            for t in dispatcher.written(ran.func, ran.args, ran.kwargs):
                if ran.op_call.place.updating:
                    self._provenance.forget(t)  # a parameter, after its step
                else:
                    self._provenance.made(t, last)

    def _measured(self, reads: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(operand(t) if measurable(t) else NOTHING for t in reads)

    # Backward passes and gradients

    _scales_at = 0

    def _pass(self) -> None:
        """Note the scale of a backward pass when its first op is seen."""
        task = autograd.backward_task()
        if task is None:
            return
        if task not in self.passes:
            scale = getattr(self._scaler, "_scale", None)
            if isinstance(scale, torch.Tensor):  # else all passes are as one
                self.scales.append(scale.detach().clone())
            self.passes[task] = len(self.scales) - 1
        self._scales_at = self.passes[task]

    def _gradient(self, name: str, p: torch.Tensor) -> None:
        if p.grad is None or not measurable(p.grad):
            return
        self.pause()
        try:
            with Own(self.off), torch.no_grad():
                key = name, self._scales_at
                if key not in self.gradients:
                    self.gradients[key] = Bins(p.grad.device)
                self.gradients[key].add(p.grad, range_of(p.grad))
        finally:
            self.go_on()

    def __enter__(self) -> "ValueTracer":
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

    def _stepping(
        self, optimizer: torch.optim.Optimizer, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        if not modes.sees(self._mode):  # it is another thread's optimizer
            return
        self._stepper = threading.get_ident()
        self._closure = closure_of(args[1:], kwargs) is not None
        if not self._closure:  # the ops of an update are not the model's; those of a closure are
            self.pause()
            with Own(self.off), torch.no_grad():
                self._sample = Sample(optimizer, called=self._called)

    def _stepped(self, *_: object) -> None:
        if self._stepper != threading.get_ident():
            return
        self._stepper = None
        if not self._closure:
            with Own(self.off), torch.no_grad():
                self.samples.append((self._sample, self._sample.counts()))
            self.go_on()
        self._look_at_parameters()
        self._provenance.updated()

    def _look_at_parameters(self) -> None:
        self.looks_away = True
        with Own(self.off):
            self._provenance.look_at_parameters()
        self.looks_away = False

    def fault(self) -> Fault | None:
        """Return where the first value that is not finite came from; None if all are finite."""
        return first_fault(self.events, self._provenance)


def _floats(ran: Ran) -> list[float]:
    """Return the Python floats among an op's arguments."""
    values = (*ran.args, *ran.kwargs.values())
    return [x for x in values if isinstance(x, float)]
