"""The tracer of `audit`: it counts the magnitudes of results and gradients.

The host reads nothing before the run is over.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from polymp.backends.torch.compat import autograd
from polymp.backends.torch.diagnostics.fault import Event
from polymp.backends.torch.diagnostics.measure import Bins, BinTable, Range, measurable, range_of
from polymp.backends.torch.diagnostics.op_call import OpCall, Ran
from polymp.backends.torch.diagnostics.op_kinds import facts_of, float_tensors
from polymp.backends.torch.diagnostics.own_ops import Own
from polymp.backends.torch.diagnostics.rounding_errors import RoundingErrors
from polymp.backends.torch.diagnostics.value_tracer import ValueTracer
from polymp.backends.torch.weights.update_watch import Sample
from polymp.diagnostics.blame import DIVIDING
from polymp.diagnostics.call_record import BACKWARD, FORWARD
from polymp.rules.row import LOW, Rule
from polymp.rules.vocabulary import vocabulary

# At each call site, one of so many calls is compared with float32, the first among them.
_EVERY = 16


class Site(NamedTuple):
    """The results of an op call site in one backward pass, or outside of them.

    Attributes:
        bins: counts of their magnitudes.
        numbers: numbers in the program that the dtype made zero.
        number: of the site.
        reads: of gradients, the numbers of the sites whose results they were made of.
        sums_nothing: for each of its kernels, whether it is of a product that only multiplies.
    """

    bins: Bins
    numbers: set[float]
    number: int
    reads: set[int]
    sums_nothing: set[bool | None]


class MagnitudeTracer(ValueTracer):
    """A tracer that counts the magnitudes of results and of gradients.

    Args:
        model: its modules and parameters are called by their names in it; None to call modules by
            their paths in the outermost module that runs.
        scaler: the loss scaler in use.

    Attributes:
        sites: by call site and backward pass, the magnitudes of results.
        gradients: by parameter and backward pass, the magnitudes of gradients.
        scales: of each backward pass; the first is 1, for what runs outside of them.
        rounding: measures rounding errors, too, unless it is None.
        passes: by number of the backward pass, its place in `scales`.
        samples: of each step that updated low weights, a sample, and how many updates were lost.
    """

    title = "audit"

    def __init__(self, model: nn.Module | None = None, scaler: Any = None) -> None:
        super().__init__(model)
        self._model = model
        self._scaler = scaler
        self._visits: Counter[Any] = Counter()
        self._call: OpCall | None = None
        self._part = 0  # the call whose kernels run, and how many have
        self._tables: dict[torch.device, BinTable] = {}
        self.rounding: RoundingErrors | None = None
        self._bins_at: Bins | None = None  # of the site of the last event
        self.sites: dict[tuple[Any, ...], Site] = {}
        self._made_at: dict[int, int] = {}  # by number of an event, that of a site
        self.gradients: dict[tuple[str, int], Bins] = {}
        self.scales: list[Any] = [1.0]  # of each backward pass
        self.passes: dict[int, int] = {}
        self._called: dict[torch.Tensor, str] = {}
        if model is not None:
            self._called = {p: name for name, p in model.named_parameters()}
        self.samples: list[tuple[Sample, torch.Tensor | None]] = []

    def compares(self, event: Event, results: list[torch.Tensor], ranges: Sequence[Range]) -> bool:
        if event.cast:
            return True
        op_call = event.op_call
        self._part = self._part + 1 if self._call is op_call else 0
        self._call = op_call
        kernel = event.func, self._part  # in a call of an op, one after the other
        site = *kernel, op_call.op, op_call.spelling, op_call.place, op_call.direction
        self._visits[site] += 1
        return self._visits[site] % _EVERY == 1 or op_call.op in DIVIDING

    def before(self, ran: Ran) -> Any:
        self._pass()
        if self.rounding is not None:
            with Own(self.off), torch.no_grad():
                self.rounding.before(ran)
        return super().before(ran)

    def after(self, ran: Ran, result: object, made: list[torch.Tensor], kept: Any) -> None:
        self._bins_at = None
        super().after(ran, result, made, kept)
        if self.rounding is not None:
            with Own(self.off), torch.no_grad():
                self.rounding.after(ran, made, self._bins_at)

    def after_cast(self, op_call: OpCall, source: torch.Tensor, result: torch.Tensor) -> None:
        self._pass()
        super().after_cast(op_call, source, result)
        if self.rounding is not None:
            with Own(self.off), torch.no_grad():
                self.rounding.cast(source, result)

    def unwatched(self, result: object) -> None:
        super().unwatched(result)
        if self.rounding is not None:
            with Own(self.off), torch.no_grad():
                for t in filter(measurable, float_tensors(result)):
                    self.rounding.filled(t)

    def noted(
        self,
        event: Event,
        results: list[torch.Tensor],
        ranges: Sequence[Range],
        inputs: list[torch.Tensor],
    ) -> Event:
        op_call = event.op_call
        back, op, spelling = op_call.direction == BACKWARD, op_call.op, op_call.spelling
        if event.cast and back and event.run == "float16":  # where gradients vanish
            op, spelling = "to", "aten:_to_copy"
        elif op_call.place.updating or not results or event.cast:
            if event.cast and event.inputs and event.inputs[0] in self._made_at:
                self._made_at[len(self.events)] = self._made_at[event.inputs[0]]
            return event
        if not event.cast and facts_of(event.func).copies_as not in ("", op_call.op):
            return event  # on the way into a product
        key = (
            self._scales_at if back else 0, op, spelling, op_call.place, op_call.direction,
            op_call.region, op_call.row, event.run,
        )  # fmt: skip
        found = self.sites.get(key)
        if found is None:
            found = self.sites[key] = Site(
                self._bins(results[0]), set(), len(self.sites), set(), set()
            )
        self._bins_at = found.bins
        for t, number in zip(results, event.ranges, strict=True):
            found.bins.add(t, number)
        if event.lost is not None:
            found.bins.lost.append(event.lost)
        found.numbers.update(event.numbers)
        found.sums_nothing.add(_sums_nothing(event, inputs))
        if back:
            self._made_at[len(self.events)] = found.number
            found.reads.update(self._made_at[at] for at in event.inputs if at in self._made_at)
        return event

    def _bins(self, t: torch.Tensor) -> Bins:
        """Return empty counts for tensors like `t`."""
        table = self._tables.get(t.device)
        if table is None:
            table = self._tables[t.device] = BinTable(t.device)
        return Bins(table, self.ranges)

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
                    self.gradients[key] = self._bins(p.grad)
                self.gradients[key].add(p.grad, self.ranges.add(range_of(p.grad)))
                if self.rounding is not None:
                    self.rounding.gradient(p.grad, self.gradients[key])
        finally:
            self.go_on()

    def begin(self) -> None:
        super().begin()
        for name, p in self._model.named_parameters() if self._model is not None else ():
            if p.requires_grad:
                hook = p.register_post_accumulate_grad_hook(
                    lambda p, name=name: self._gradient(name, p)
                )
                self.callback(hook.remove)

    # Updates

    def updating(self, optimizer: torch.optim.Optimizer) -> None:
        with Own(self.off), torch.no_grad():
            self._sample = Sample(optimizer, called=self._called)

    def updated(self) -> None:
        with Own(self.off), torch.no_grad():
            self.samples.append((self._sample, self._sample.counts()))
        if self.rounding is not None:
            self.rounding.clear()


# Kernels of products, and which of their tensors is summed over its last dimension.
_SUMMED = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "linear": 0, "addmm": 1, "addmv": 1, "baddbmm": 1}


def _sums_nothing(event: Event, inputs: Sequence[torch.Tensor]) -> bool | None:
    """True of a product that a row lowered, though it only multiplies; None of other kernels."""
    op_call = event.op_call
    lowered = op_call.row is not None and op_call.row.rule is Rule.LOWER and event.run in LOW
    if event.func is None or not lowered or op_call.direction != FORWARD:
        return None
    name = event.func.overloadpacket.__name__
    if name in _SUMMED:
        return inputs[_SUMMED[name]].size(-1) == 1
    op = vocabulary().ops.get(op_call.op)
    product = op is not None and op.kind == "matmul"
    return True if product and name in ("mul", "addr") else None
