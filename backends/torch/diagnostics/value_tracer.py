"""A tracer that measures the results of ops while a program runs, and where inputs come from.

Every op is watched below autograd. Its result is measured on its device, in tensors that the
program never sees.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.nn as nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from polymp.backends.torch.autocast import dtype_names, torch_table
from polymp.backends.torch.compat import dispatcher, modes
from polymp.backends.torch.diagnostics.fault import Event, Reads, first_fault
from polymp.backends.torch.diagnostics.measure import (
    Lost,
    Range,
    RangeTable,
    in_float16,
    measurable,
    range_of,
)
from polymp.backends.torch.diagnostics.op_call import OpCall, Ran
from polymp.backends.torch.diagnostics.op_kinds import numbers_in
from polymp.backends.torch.diagnostics.op_tracer import OpTracer
from polymp.backends.torch.diagnostics.own_ops import Own
from polymp.backends.torch.diagnostics.provenance import Provenance
from polymp.backends.torch.scaler.closure_step import closure_of
from polymp.diagnostics.audit_records import Fault
from polymp.diagnostics.blame import rounded
from polymp.diagnostics.call_record import BACKWARD


class ValueTracer(OpTracer):
    """A tracer that measures the ranges of results, and follows where inputs come from.

    Args:
        model: its modules and parameters are called by their names in it; None to call modules by
            their paths in the outermost module that runs.

    Attributes:
        events: the ops that ran, in order.
        ranges: of their results.
        off: autocast's dispatch keys, for `Own`.
    """

    counts = False
    floats = staticmethod(numbers_in)

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__(model)
        self.events: list[Event] = []
        self.ranges: RangeTable = RangeTable()
        # Of events: many are alike, and one is kept of these.
        self._reads: dict[Reads, Reads] = {}
        self.off: torch._C.DispatchKeySet = dispatcher.autocast_keys(torch_table.DEVICES)
        self._provenance = Provenance(model, self.off)

    # To be overridden by tracers that measure more

    def inputs(self, ran: Ran) -> list[torch.Tensor]:
        """Return the inputs of an op that is about to run, for `noted`."""
        return ran.reads

    def compares(self, event: Event, results: list[torch.Tensor], ranges: Sequence[Range]) -> bool:
        """Return whether to compare an op in float16 with the same in float32."""
        raise NotImplementedError

    def noted(
        self,
        event: Event,
        results: list[torch.Tensor],
        ranges: Sequence[Range],
        inputs: list[torch.Tensor],
    ) -> Event:
        """Measure more of an op that has run; return the event with it.

        `inputs` are those that the method `inputs` returned.
        """
        raise NotImplementedError

    # What runs

    def before(self, ran: Ran) -> Any:
        if ran.facts.receives:
            return None
        place = ran.op_call.place
        if ran.facts.writes and ran.op_call.direction == BACKWARD and not place.source:
            self._provenance.accumulated(ran.reads[0])
        return self._read(ran.reads), self.inputs(ran)

    def after(self, ran: Ran, result: object, made: list[torch.Tensor], kept: Any) -> None:
        if kept is None:
            self._received_in(ran, made)
            return
        (origins, inputs), op_call = kept, ran.op_call
        results = [t for t in made if measurable(t)]
        beside: list[torch.Tensor] = []
        if op_call.direction != BACKWARD and not isinstance(result, list):
            # Those of other shapes are statistics, such as the mean beside a norm.
            beside = [t for t in results[1:] if t.shape == results[0].shape]
            del results[1:]
        run = dtype_names.NAMES[results[0].dtype] if results else ""
        floats = [*_floats(ran.args, ran.kwargs), *self._provenance.constants(ran.reads)]
        given = not all(map(math.isfinite, floats))
        facts, reads, single = ran.facts, ran.reads, bool(results) and results[0].numel() == 1
        if makes := facts.kind == "makes" or not reads:
            origins = tuple([at for at in origins if at is not None and at >= 0])
            reads = inputs = []
            if single and not results[0].dim() and not facts.writes:  # whoever reads it is to blame
                self._provenance.constant(results[0], floats)
                return
        with Own(self.off):
            ranges = [range_of(t) for t in (*results, *beside)]
            kept, others = self._kept(ranges[: len(results)]), self._kept(ranges[len(results) :])
            event = Event(
                op_call, origins, kept, run, None, (), given, self._seen(reads),
                func=ran.func, single=single, beside=others,
            )  # fmt: skip
            if not op_call.place.updating:
                lost = (x for x in floats if rounded(x, run) in facts.keeps)
                event = event._replace(numbers=tuple(lost))
            if run == "float16" and not op_call.place.updating:
                if self.compares(event, results, ranges):
                    both = in_float16(ran.func, ran.args, ran.kwargs, results)
                    event = event._replace(lost=both)
            self.events.append(self.noted(event, [] if makes else results, ranges, inputs))
        self._written(ran, made)

    def _received_in(self, ran: Ran, made: list[torch.Tensor]) -> None:
        """Note values that other ranks send and that may not have arrived: measured once read."""
        for t in (*made, *dispatcher.written(ran.func, ran.args, ran.kwargs)):
            self._provenance.received(t)

    def after_cast(self, op_call: OpCall, source: torch.Tensor, result: torch.Tensor) -> None:
        origins = self._read([source])
        run, reads = dtype_names.NAMES[result.dtype], self._seen([source])
        with Own(self.off):
            fits = measurable(source) and measurable(result)
            ranges = [range_of(result)] if fits else []
            kept = self._kept(ranges)
            event = Event(op_call, origins, kept, run, None, (), False, reads, (), True)
            if fits and run == "float16" and self.compares(event, [result], ranges):
                event = event._replace(lost=Lost.of(source, result))
            self.events.append(self.noted(event, [result] if fits else [], ranges, [source]))
        self._provenance.made(result, len(self.events) - 1)

    def viewed(
        self, func: torch._ops.OpOverload, args: Sequence[object], frame: FrameType | None
    ) -> None:
        """Give the gradient of a view to the op that made the viewed tensor."""
        node, of = self._origins.new_node(), args[0] if args else None
        if node is None or not isinstance(of, torch.Tensor):
            return
        made = self._provenance.maker(of)
        if made is not None:
            self._origins.made(node, self.events[made].op_call)

    def follows(self, func: modes.Op, args: modes.Args, kwargs: modes.Kwargs) -> bool:
        reads = numbers_in(*args, *kwargs.values())
        if func is torch.ops.aten.lift_fresh.default:  # of torch.tensor, also of arrays of data
            return any(not t.dim() for t in reads)
        return bool(_floats(args, kwargs) or self._provenance.constants(reads))

    def unwatched(self, result: object) -> None:
        for t in numbers_in(result):
            self._provenance.forget(t)

    def _kept(self, ranges: Sequence[Range]) -> tuple[int, ...]:
        return tuple([self.ranges.add(found) for found in ranges])

    def _seen(self, reads: Sequence[torch.Tensor]) -> Reads:
        """Return `Event.reads` of tensors."""
        seen = tuple([(t.dtype, t.shape) for t in reads])
        return self._reads.setdefault(seen, seen)

    def _read(self, reads: list[torch.Tensor]) -> tuple[int | None, ...]:
        return tuple([self._provenance.origin(t) for t in reads])

    def _written(self, ran: Ran, made: list[torch.Tensor]) -> None:
        """Note the last event as the origin of the tensors that its op made or wrote."""
        last = len(self.events) - 1
        for t in made:
            self._provenance.made(t, last)
        if ran.facts.writes:
            for t in dispatcher.written(ran.func, ran.args, ran.kwargs):
                if ran.op_call.place.updating:
                    self._provenance.forget(t)  # a parameter, after its step
                else:
                    self._provenance.made(t, last)

    # Updates

    def begin(self) -> None:
        super().begin()
        self._look_at_parameters()
        for hook in (
            register_optimizer_step_pre_hook(self._stepping),
            register_optimizer_step_post_hook(self._stepped),
        ):
            self.callback(hook.remove)

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
            self.updating(optimizer)

    def _stepped(self, *_: object) -> None:
        if self._stepper != threading.get_ident():
            return
        self._stepper = None
        if not self._closure:
            self.updated()
            self.go_on()
        self._look_at_parameters()
        self._provenance.updated()

    def updating(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before an optimizer's step."""

    def updated(self) -> None:
        """Called after it."""

    def _look_at_parameters(self) -> None:
        self.looks_away = True
        with Own(self.off):
            self._provenance.look_at_parameters()
        self.looks_away = False

    def fault(self) -> Fault | None:
        """Return where the first value that is not finite came from; None if all are finite."""
        return first_fault(self.events, self.ranges, self._provenance)


def _floats(args: modes.Args, kwargs: Mapping[str, Any]) -> list[float]:
    """Return the Python floats among an op's arguments."""
    return [x for x in (*args, *kwargs.values()) if isinstance(x, float)]
