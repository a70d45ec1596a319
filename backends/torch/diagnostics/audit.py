"""`audit`: how large the numbers of a run are, op by op, and where the first bad one comes from.

    with polymp.torch.audit(model) as a:
        for x, y in batches: step(x, y)
    print(a); a.to_html("audit.html"); print(a.suggest())

`AuditValues` measures; its measurements become the records of an `Audit`.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn

from polymp.backends.torch.autocast import dtype_names
from polymp.backends.torch.compat import dispatcher, dynamo, modes
from polymp.backends.torch.diagnostics.op_call import CallSite, OpCall, Own, Ran
from polymp.backends.torch.diagnostics.op_stream import OpStream
from polymp.backends.torch.diagnostics.values import (
    ROWS,
    BinTable,
    Event,
    Lost,
    RangeTable,
    Values,
    measurable,
)
from polymp.diagnostics.audit import Audit
from polymp.diagnostics.audit_records import Measured, together
from polymp.diagnostics.blame import DIVIDING, SATURATING
from polymp.diagnostics.call_record import BACKWARD
from polymp.diagnostics.magnitudes import Magnitudes, followed
from polymp.errors import brief


def audit(
    model: nn.Module | None = None,
    scaler: object = None,
) -> "AuditBlock":
    """Measure the values of a few real steps: of every op's result, and of every gradient.

        with polymp.torch.audit(model, scaler) as a:
            for x, y in batches:
                train_step(x, y)
        print(a)                     # largest magnitudes, shares that a dtype would lose
        a.to_html("audit.html")      # the same rows, to sort and to filter
        policy = a.suggest().apply("amp")

    The steps compute the same bits as without. A step takes up to twice as long, more if its ops
    are tiny. The host reads nothing from the device before the block ends. Largest magnitudes,
    Inf and NaN are of all values; shares are of up to 2,048 values of each tensor, spread evenly.

    To tell values that float16 makes zero from zeros, a float16 op runs once more, in float32, on
    the same inputs, at one of sixteen calls at its site.

    Args:
        model: its modules and parameters are called by their names; without it modules are called
            by their paths in the outermost one that runs, and parameters have no gradients in the
            audit.
        scaler: the loss scaler in use, polymp's or torch.amp's: gradients are reported without its
            scale.

    Returns:
        A context manager; it yields the audit, which is filled when the block ends, with an error,
        too.

    Raises:
        TypeError: `model` is no module, or `scaler` no loss scaler.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"audit(model) needs a torch.nn.Module, got {brief(model)}. It is a context "
            "manager: write `with audit(model) as a:` around the step."
        )
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise TypeError(
            "audit(model, scaler) is a context manager around steps, and needs the loss scaler in "
            f"use, a GradScaler, got {brief(scaler)}."
        )
    return AuditBlock(model, scaler)


class AuditBlock(Audit):
    """An audit of its own block, filled when the block ends."""

    def __init__(self, model: nn.Module | None, scaler: object) -> None:
        super().__init__()
        self._entered = False
        self._seen = AuditValues(model, scaler)
        self._stream = OpStream(model, self._seen, counts=False)

    def __enter__(self) -> Audit:
        if self._entered:
            raise RuntimeError("This audit is of one block, and was entered before: make another.")
        self._entered = True
        self._stream.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._stream.__exit__(*error)
        finally:
            with Own():
                _fill(self, self._seen)
            del self._seen, self._stream


class Tally:
    """Measurements of the results at an op call site, or of a gradient, added up."""

    def __init__(self, table: BinTable, ranges: RangeTable, number: int) -> None:
        self.number = number  # of the op call site in one backward pass, or outside of them
        self.values: int = 0
        self.ranges: list[int] = []  # of the tensors, by number
        self.lost: list[Lost] = []  # of those that were compared with float32
        self.numbers: set[float] = set()  # in the program, that the dtype made zero
        self.reads: set[int] = set()  # of gradients, the sites whose results they were made of
        self._table, self._row = table, table.new_row()
        self._ranges = ranges

    def add(self, t: torch.Tensor, found: int) -> None:
        """Count a tensor's values."""
        self.ranges.append(found)
        self.values += t.numel()
        self._table.add(self._row, t)

    def magnitudes(self) -> Magnitudes:
        """Return what was counted. Waits for the device."""
        both = self._ranges.read(x.both for x in self.lost)
        burst, vanished = sum(both[::2]), sum(both[1::2])
        ends = map(abs, self._ranges.read(x.wide for x in self.lost))
        total = max(sum(x.looked_at for x in self.lost), 1)
        found = Magnitudes.measured(
            self.values,
            self._table.read(self._row),
            self._ranges.read(self.ranges),
            burst / total,
            vanished / total,
            max(filter(math.isfinite, ends), default=0.0) if burst else 0.0,
        )
        rest = self._ranges.read(n for n in self.ranges if n not in self._ranges.meant)
        return found if not all(map(math.isfinite, rest)) else found.unmasked()


_MODES = dispatcher.keyset("Python")  # the key of dispatch modes


# At each call site, one of so many calls is compared with float32, and in the first step as many: a
# line may call an op several times.
_EVERY = 17
_ALWAYS = DIVIDING | SATURATING  # but of these ops each call


class AuditValues(Values):
    """Counts the magnitudes of results and of gradients; reads nothing from the device."""

    gradients = True

    def __init__(self, model: nn.Module | None, scaler: Any) -> None:
        super().__init__(model, ())
        self._model = model
        self._scaler = scaler
        self._visits: Counter[Any] = Counter()
        self._call: OpCall | None = None
        self._part = 0  # the call whose kernels run, and how many have
        self._tables: dict[torch.device, BinTable] = {}  # that have rows left
        # Of results, by backward pass and call site; of gradients, by pass and parameter.
        self.sites: dict[tuple[Any, ...], Tally] = {}
        self._made_at: dict[int, int] = {}  # by number of an event, that of a site
        self.passes: int = 0  # backward passes so far
        self.scales: list[Any] = [1.0]  # of each of these; the first for what is in none

    def compares(self, event: Event) -> bool:
        if event.func is None:
            return True
        op_call = event.op_call
        self._part = self._part + 1 if self._call is op_call else 0
        self._call = op_call
        kernel = event.func, self._part  # in a call of an op, one after the other
        site = *kernel, op_call.op, op_call.spelling, op_call.place, op_call.direction
        self._visits[site] += 1
        visits, first = self._visits[site], self.passes <= (op_call.direction == BACKWARD)
        return op_call.op in _ALWAYS or visits % _EVERY == 1 or (first and visits <= _EVERY)

    def noted(self, ran: Ran, event: Event, results: list[torch.Tensor]) -> None:
        op_call, cast = event.op_call, event.func is None
        back, op, spelling = op_call.direction == BACKWARD, op_call.op, op_call.spelling
        if back and not ran.gradient:
            return  # such as the factor 2 * x in the backward of x**2
        if cast and back and event.run == "float16":  # where gradients vanish
            op, spelling = "to", "aten:_to_copy"
        elif op_call.place.updating or not results or cast:
            if cast and event.inputs and event.inputs[0] in self._made_at:
                self._made_at[len(self.events)] = self._made_at[event.inputs[0]]
            return
        elif ran.facts.copies_as not in ("", op_call.op) or op_call.place.sends:
            return  # on the way into a product, or into what FSDP2 sends
        key = (
            len(self.scales) - 1 if back else 0, op, spelling, op_call.place, op_call.direction,
            op_call.region, op_call.row, event.run,
        )  # fmt: skip
        tally = self._tally(key, results[0])
        for t, number in zip(results, event.ranges, strict=False):
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
            table = self._tables.get(t.device)
            if table is None or table.rows == ROWS:
                table = self._tables[t.device] = BinTable(t.device)
            tally = self.sites[key] = Tally(table, self.ranges, len(self.sites))
        return tally

    # Backward passes and gradients

    def knows(self, t: torch.Tensor) -> bool:
        made = self._provenance.maker(t)
        return self._provenance.has_read(t) if made is None else bool(self.events[made].reads)

    def backward_began(self) -> None:
        self.passes += 1
        scale = getattr(self._scaler, "_scale", None)
        if isinstance(scale, torch.Tensor):  # else all passes are as one
            self.scales.append(scale.detach().clone())

    def began_with(self, t: torch.Tensor) -> None:
        if t.dtype is torch.float16 and t.numel() == 1:  # it has to hold the loss scale
            self._gradient("the loss", t)

    def _gradient(self, name: str, grad: torch.Tensor | None) -> None:
        if grad is None or not measurable(grad):
            return
        with Own(), torch.no_grad(), dispatcher.ExcludeKeys(_MODES):
            run = dtype_names.NAMES[grad.dtype]
            of = "gradient", "", CallSite(name, "", False), BACKWARD, "", None, run
            tally = self._tally((len(self.scales) - 1, *of), grad)
            tally.add(grad, self.ranges.add(grad))

    def begin(self) -> None:
        super().begin()
        for name, p in self._model.named_parameters() if self._model is not None else ():
            if p.requires_grad:
                name = dynamo.plain_name(name)
                with modes.without_classes():  # those of lazy parameters refuse hooks
                    hook = p.register_post_accumulate_grad_hook(
                        lambda p, name=name: self._gradient(name, p.grad)
                    )
                self.stream.callback(hook.remove)


def _fill(audit: Audit, seen: AuditValues) -> None:
    """Read what was measured into an audit. Waits for the device."""
    scales = [float(s) for s in seen.scales]
    audit.scale = scales[-1]
    audit.fault = seen.fault()  # first: it tells the infinities of masks from others
    audit.steps = max(seen.passes, bool(seen.events))
    rows = _measured(seen.sites, scales)
    audit.results = [m for m in rows if m.spelling]
    audit.gradients = [m for m in rows if not m.spelling]


def _measured(sites: Mapping[tuple[Any, ...], Tally], scales: Sequence[float]) -> list[Measured]:
    found: dict[tuple[Any, ...], list[Measured]] = {}
    made = [site.magnitudes() for site in sites.values()]
    gone = followed((m, site.reads) for m, site in zip(made, sites.values(), strict=True))
    for (key, site), counts, share in zip(sites.items(), made, gone, strict=True):
        at, op, spelling, place, direction, region, row, run = key
        counts = counts._replace(gone=share)
        if scales[at]:  # torch.amp's may become 0
            counts = counts.scaled(1 / scales[at])
        measured = Measured(
            op, spelling, place.module, place.source, direction, region, row, run,
            counts, tuple(sorted(site.numbers)),
        )  # fmt: skip
        found.setdefault(key[1:], []).append(measured)
    return list(map(together, found.values()))
