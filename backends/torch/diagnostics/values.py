"""Measurements of ops while a program runs, for `audit` and `locate`, and where inputs come from.

Every op is watched below autograd. Its result is measured on its device, in tensors that the
program never sees.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_map

from polymp.backends.torch.autocast import dtype_names
from polymp.backends.torch.compat import dispatcher, modes
from polymp.backends.torch.diagnostics.fault import (
    Event,
    Provenance,
    Reads,
    Update,
    first_fault,
)
from polymp.backends.torch.diagnostics.measure import (
    BinTable,
    Lost,
    RangeTable,
    Tally,
    measurable,
)
from polymp.backends.torch.diagnostics.op_call import (
    CallSite,
    OpCall,
    OpFacts,
    Own,
    Ran,
    facts_of,
    float_tensors,
    numbers_in,
)
from polymp.backends.torch.diagnostics.op_stream import Subscriber
from polymp.diagnostics.audit_records import Fault
from polymp.diagnostics.blame import DIVIDING, SATURATING, rounded
from polymp.diagnostics.call_record import BACKWARD


class Values(Subscriber):
    """Measures the ranges of results, and follows where inputs come from."""

    measures = True

    def __init__(self, model: nn.Module | None = None, given: Sequence[Any] | None = None) -> None:
        self.events: list[Event] = []  # the ops that ran, in order
        self.updates: list[Update] = []  # the steps of optimizers
        self.ranges: RangeTable = RangeTable()  # of their results
        self._reads: dict[Reads, Reads] = {}  # of events: many are alike, and one is kept of these
        self._provenance = Provenance(model, self.ranges, given)

    # To be overridden by those that measure more

    def inputs(self, ran: Ran) -> list[torch.Tensor]:
        """Return the inputs of an op that is about to run, for `noted`."""
        return ran.reads

    def compares(self, event: Event, results: list[torch.Tensor]) -> bool:
        """Return whether to compare an op in a low dtype with the same in float32."""
        raise NotImplementedError

    def noted(self, event: Event, results: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        """Measure more of an op that has run, of what the method `inputs` returned."""
        raise NotImplementedError

    # What runs

    def before(self, ran: Ran) -> None:
        if ran.facts.receives:
            return
        place = ran.op_call.place
        if ran.facts.writes and ran.op_call.direction == BACKWARD and not place.source:
            self._provenance.accumulated(ran.reads[0])
        self._read_by = tuple(map(self._provenance.origin, ran.reads)), self.inputs(ran)

    def after(self, ran: Ran, result: object, made: list[torch.Tensor]) -> None:
        facts, reads, op_call = ran.facts, ran.reads, ran.op_call
        if facts.receives:  # values that may not have arrived: measured once read
            for t in (*made, *ran.into):
                self._provenance.received(t)
            return
        origins, inputs = self._read_by
        results = [t for t in made if measurable(t)]
        beside: list[torch.Tensor] = []
        if op_call.direction != BACKWARD and not isinstance(result, list):
            # Those of other shapes are statistics, such as the mean beside a norm.
            beside = [t for t in results[1:] if t.shape == results[0].shape]
            del results[1:]
        run = dtype_names.NAMES[results[0].dtype] if results else ""
        floats = [*_floats(ran.args, ran.kwargs), *self._provenance.constants(reads)]
        single = bool(results) and results[0].numel() == 1
        if facts.kind == "makes" or not reads:
            origins = tuple([at for at in origins if at is not None and at >= 0])
            reads = inputs = []
            if single and not results[0].dim() and not facts.writes:  # whoever reads it is to blame
                self._provenance.constant(results[0], floats)
                return
        given = not all(map(math.isfinite, floats))
        event = Event(op_call, origins, run, self._seen(reads), ran.func, single, given)
        if not op_call.place.updating:
            event.numbers = tuple([x for x in floats if rounded(x, run) in facts.keeps])
        event.beside = self.ranges.add_each(beside)
        self._keep(event, results, inputs, lambda: _wide(ran, results))
        for t in made:
            self._provenance.made(t, len(self.events) - 1)
        for t in ran.into:
            if op_call.place.updating:
                self._provenance.forget(t)  # a parameter, after its step
            else:
                self._provenance.made(t, len(self.events) - 1)

    def cast(self, op_call: OpCall, source: torch.Tensor, result: torch.Tensor) -> None:
        origins, run = (self._provenance.origin(source),), dtype_names.NAMES[result.dtype]
        event = Event(op_call, origins, run, self._seen([source]), None, True)
        fits = measurable(source) and measurable(result)
        self._keep(event, [result] if fits else [], [source], lambda: source)
        self._provenance.made(result, len(self.events) - 1)

    def _keep(
        self,
        event: Event,
        results: list[torch.Tensor],
        inputs: list[torch.Tensor],
        wide: Callable[[], torch.Tensor | None],
    ) -> None:
        """Measure an op's results, also against `wide`, the first one in float32."""
        event.ranges = self.ranges.add_each(results)
        compared = event.func is None or not event.op_call.place.updating
        saturates = event.func is not None and event.op_call.op in SATURATING
        loses = event.run == "float16" or (event.run == "bfloat16" and saturates)
        if results and loses and compared and self.compares(event, results):
            in_float32 = wide()
            if in_float32 is not None:
                event.lost = Lost.of(in_float32, results[0], self.ranges)
        self.noted(event, results if event.reads else [], inputs)
        self.events.append(event)

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

    def unwatched(self, facts: OpFacts, given: object, result: object) -> None:
        for t in numbers_in(result):
            self._provenance.forget(t)

    def _seen(self, reads: Sequence[torch.Tensor]) -> Reads:
        """Return `Event.reads` of tensors."""
        seen = tuple([(t.dtype, t.shape) for t in reads])
        return self._reads.setdefault(seen, seen)

    # Updates

    def begin(self) -> None:
        with Own():
            self._provenance.look_at_parameters()

    def stepping(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        # The ops of an update are not the model's; those of a closure are. One update is looked at
        # as a whole, also if it is of other optimizers.
        if not closure and not self.stream.looks_away:
            self.stream.look_away()
            place, *_ = self.stream.where(sys._getframe(1))
            at = place, len(self.events), self.ranges, self._provenance
            self.updates.append(Update(optimizer, *at))

    def stepped(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        if not closure and self.updates:
            self.updates[-1].stepped(optimizer)
            self.stream.go_on()
        self._provenance.updated()

    def fault(self) -> Fault | None:
        """Return where the first value that is not finite came from; None if all are finite."""
        broken = ((it.at, fault) for it in self.updates if (fault := it.fault()) is not None)
        until, broke = next(broken, (None, None))
        found = first_fault(self.events[:until], self.ranges, self._provenance) or broke
        spoiled = (it.fault(spoiled=True) for it in self.updates)
        return found or next(filter(None, spoiled), None)


def _wide(ran: Ran, results: list[torch.Tensor]) -> torch.Tensor | None:
    """Return an op's first result in float32, on the same inputs.

    None for an op that writes into its arguments, draws random numbers or has no float32 form.
    """
    if ran.facts.writes or torch.Tag.nondeterministic_seeded in ran.func.tags:
        return None

    def wide(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.float() if leaf.dtype in _LOW else leaf
        return torch.float32 if isinstance(leaf, torch.dtype) and leaf in _LOW else leaf

    try:
        args, kwargs = tree_map(wide, (ran.args, ran.kwargs))
        made = next(filter(measurable, float_tensors(ran.func(*args, **kwargs))), None)
    except (RuntimeError, TypeError, ValueError):
        return None
    return made if made is not None and made.shape == results[0].shape else None


_LOW = (torch.float16, torch.bfloat16)


def _floats(args: modes.Args, kwargs: Mapping[str, Any]) -> list[float]:
    """Return the Python floats among an op's arguments."""
    return [x for x in (*args, *kwargs.values()) if isinstance(x, float)]


# `audit` counts the magnitudes of results and gradients.
#
# The host reads nothing before the run is over.
#
# At each call site, one of so many calls is compared with float32, the first among them.
_EVERY = 16
_ALWAYS = DIVIDING | SATURATING  # but of these ops each call


class AuditValues(Values):
    """Counts the magnitudes of results and of gradients."""

    def __init__(self, model: nn.Module | None, scaler: Any) -> None:
        super().__init__(model)
        self._model = model
        self._scaler = scaler
        self._visits: Counter[Any] = Counter()
        self._call: OpCall | None = None
        self._part = 0  # the call whose kernels run, and how many have
        self._tables: dict[torch.device, BinTable] = {}
        # Of results, by backward pass and call site; of gradients, by pass and parameter.
        self.sites: dict[tuple[Any, ...], Tally] = {}
        self._made_at: dict[int, int] = {}  # by number of an event, that of a site
        self.scales: list[Any] = [1.0]  # of each backward pass; the first for what is in none
        self.passes: dict[int, int] = {}  # by number of the backward pass, its place in `scales`

    def compares(self, event: Event, results: list[torch.Tensor]) -> bool:
        if event.func is None:
            return True
        op_call = event.op_call
        self._part = self._part + 1 if self._call is op_call else 0
        self._call = op_call
        kernel = event.func, self._part  # in a call of an op, one after the other
        site = *kernel, op_call.op, op_call.spelling, op_call.place, op_call.direction
        self._visits[site] += 1
        return self._visits[site] % _EVERY == 1 or op_call.op in _ALWAYS

    def noted(self, event: Event, results: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        self._pass()
        op_call, cast = event.op_call, event.func is None
        back, op, spelling = op_call.direction == BACKWARD, op_call.op, op_call.spelling
        if cast and back and event.run == "float16":  # where gradients vanish
            op, spelling = "to", "aten:_to_copy"
        elif op_call.place.updating or not results or cast:
            if cast and event.inputs and event.inputs[0] in self._made_at:
                self._made_at[len(self.events)] = self._made_at[event.inputs[0]]
            return
        elif event.func is not None and facts_of(event.func).copies_as not in ("", op_call.op):
            return  # on the way into a product
        key = (
            self._scales_at if back else 0, op, spelling, op_call.place, op_call.direction,
            op_call.region, op_call.row, event.run,
        )  # fmt: skip
        tally = self._tally(key, results[0])
        for t, number in zip(results, event.ranges, strict=True):
            tally.add(t, number)
        if event.lost is not None:
            tally.lost.append(event.lost)
        tally.numbers.update(event.numbers)
        if back:
            self._made_at[len(self.events)] = tally.number
            tally.reads.update(self._made_at[at] for at in event.inputs if at in self._made_at)

    def _tally(self, key: tuple[Any, ...], t: torch.Tensor) -> Tally:
        """Return the counts of a key, new ones for tensors like `t` if it has none."""
        if (tally := self.sites.get(key)) is None:
            if t.device not in self._tables:
                self._tables[t.device] = BinTable(t.device)
            tally = Tally(self._tables[t.device], self.ranges, len(self.sites))
            self.sites[key] = tally
        return tally

    # Backward passes and gradients

    _scales_at = 0

    def _pass(self) -> None:
        """Note the scale of a backward pass when its first op is seen."""
        task = dispatcher.backward_task()
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
        with Own(), torch.no_grad():
            of = "gradient", "", CallSite(name, "", False), BACKWARD, "", None, "float32"
            tally = self._tally((self._scales_at, *of), p.grad)
            tally.add(p.grad, self.ranges.add(p.grad))

    def begin(self) -> None:
        super().begin()
        for name, p in self._model.named_parameters() if self._model is not None else ():
            if p.requires_grad:
                hook = p.register_post_accumulate_grad_hook(
                    lambda p, name=name: self._gradient(name, p)
                )
                self.stream.callback(hook.remove)
