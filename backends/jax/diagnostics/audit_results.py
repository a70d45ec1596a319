"""The audit of measured calls: what the measuring program handed out, as records of an `Audit`."""

import math
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from polymp.backends.jax.diagnostics.events import Event
from polymp.backends.jax.diagnostics.fp8_losses import measurements
from polymp.backends.jax.diagnostics.locate import derived, fault, largest, nodes_of
from polymp.backends.jax.diagnostics.measured_call import MeasuredCall, call_of, inputs, names
from polymp.backends.jax.diagnostics.measures import Facts
from polymp.backends.jax.diagnostics.written_weights import Sampled, lost
from polymp.diagnostics import parameter_names
from polymp.diagnostics.audit import Audit
from polymp.diagnostics.audit_records import Measured, together
from polymp.diagnostics.blame import blame, meant
from polymp.diagnostics.call_record import BACKWARD, FORWARD
from polymp.diagnostics.fp8_loss import Measurement, losses
from polymp.diagnostics.magnitudes import BINS, INF, Magnitudes, followed, lower_edge
from polymp.fp8.recipes import RECIPES


class Run(NamedTuple):
    """A run of the program that measures.

    Attributes:
        program: that ran.
        packed: what it handed out, on the device.
        scale: of the gradients: float32 [], or 1.0 without a scaler.
    """

    program: MeasuredCall
    packed: dict[str, jax.Array]
    scale: jax.Array | float


def read(runs: Sequence[Run], weights: Sequence[tuple[int, Sampled]], recipe: str = "") -> Audit:
    """Read what was measured, from the device."""
    audit = Audit()
    audit.steps, audit.fp8 = len(runs), recipe
    results: dict[Hashable, list[Measured]] = {}
    gradients: dict[str, list[Measured]] = {}
    measured: list[Sequence[Facts]] = []
    products: list[Measurement] = []
    for program, packed, scale in runs:
        facts, peaks = program.packed.read(packed)
        measured.append(facts)
        audit.scale = float(np.asarray(scale))
        if recipe:
            products += measurements(program.twin.events, facts, partial(call_of, program))
        forward = {call.module for call in program.calls if call.direction == FORWARD}
        handed = parameter_names.short(_handed(program), forward)
        nodes = nodes_of(program, facts, peaks)
        masks = meant(nodes)
        for m, number in _results(program, facts, audit.scale):
            if number in masks:
                m = m._replace(magnitudes=m.magnitudes.unmasked())
            results.setdefault(m[:8], []).append(m)
            for name in handed.get(number, ()):
                gradient = m._replace(op="gradient", spelling="", module=name, source="", row=None)
                gradients.setdefault(name, []).append(gradient)
        if audit.fault is None:
            found = blame(nodes)
            if found is not None:
                event = program.twin.events[found.node]
                audit.fault = fault(program, found, tuple(largest(program, event, peaks)), facts)
    audit.results = [together(many) for many in results.values()]
    audit.gradients = [together(many) for many in gradients.values()]
    audit.fp8_losses = losses(RECIPES[recipe], products) if recipe else ()
    samples = []
    for number, sample in weights:
        program = runs[number].program
        events = {name: event for event, many in _handed(program).items() for name in many}
        samples.append((sample, measured[number], events, program.traced.results))
    audit.lost_updates = lost(samples)
    return audit


def _results(
    program: MeasuredCall, facts: Sequence[Facts], scale: float
) -> Iterator[tuple[Measured, int]]:
    """The measured results of a program's calls, each with the number of its event."""
    late = derived(program)
    events, made = program.twin.events, list[Magnitudes | float]()
    for event, fact in zip(events, facts, strict=True):
        lost = float(fact.lost.reshape(-1, 3)[:, 2].mean()) if fact.lost.size else 0.0
        made.append(lost if event.group is None or not _ran(fact) else _magnitudes(event, fact))
    back = {at for at, event in enumerate(events) if event.site.scope.direction == BACKWARD}
    gone = followed((m, back & {*e.inputs}) for m, e in zip(made, events, strict=True))
    rows = zip(events, facts, made, gone, strict=True)
    for number, (event, fact, m, share) in enumerate(rows):
        if event.group is None or number in late or isinstance(m, float):
            continue
        call, magnitudes = program.calls[event.group], m._replace(gone=share)
        if call.direction == BACKWARD and scale not in (0.0, 1.0):
            magnitudes = magnitudes.scaled(1 / scale)
        yield Measured(
            call.op, call.spelling, call.module, call.source, call.direction, call.region,
            call.row, event.dtype, magnitudes, (), _error(fact.rounding), _error(fact.drift),
        ), number  # fmt: skip


def _error(pairs: jax.Array) -> float | None:
    """The largest relative error of the rounds; None if it was not measured."""
    off, whole = np.sqrt(np.asarray(pairs, np.float64).reshape(-1, 2).T)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(off > 0, off / whole, 0.0).max()) if pairs.size else None


def _ran(fact: Facts) -> bool:
    """False of a branch that was not taken, and of a loop without a round."""
    return bool(np.any((fact.peak >= 0) | np.isnan(fact.peak)))


def _magnitudes(event: Event, fact: Facts) -> Magnitudes:
    sample = fact.sample.reshape(-1)
    bins = np.bincount(sample, minlength=BINS + 1)[:BINS]
    peaks = fact.peak.reshape(-1)
    peaks = peaks[(peaks >= 0) | np.isnan(peaks)]  # of what ran
    largest = float(peaks[np.isfinite(peaks)].max(initial=0.0))
    if not np.isfinite(peaks).all():  # the peak of such an array says no more; its bins do
        largest = max([largest, *(lower_edge(int(b)) for b in np.flatnonzero(bins[:INF]))])
    lost = fact.lost.reshape(-1, 3) if fact.lost.size else np.zeros((1, 3))
    return Magnitudes(
        math.prod(event.site.eqn.outvars[0].aval.shape) * event.site.times,
        int(bins.sum()),
        tuple(bins.tolist()),
        largest,
        bool(np.isinf(peaks).any() or (np.isnan(peaks).any() and bins[INF] > 0)),
        bool(np.isnan(peaks).any()),
        float(lost[:, 1].mean()),
        float(lost[:, 2].mean()),
        wide=float(np.max(lost[:, 0], where=np.isfinite(lost[:, 0]) & (lost[:, 1] > 0), initial=0)),
    )


# Gradients


def _handed(program: MeasuredCall) -> dict[int, list[str]]:
    """The gradients that the backward pass hands to the rest of a program: names, by event."""
    twin = program.twin
    found: dict[int, list[str]] = {}
    for value, name in zip(twin.results, program.traced.results, strict=True):
        if len(value.events) == 1:
            (number,) = value.events
            if twin.events[number].site.scope.direction == BACKWARD:
                found.setdefault(number, []).append(name)
    by_call = _by_call(program)
    for number in sorted(twin.handed - found.keys()):
        event = twin.events[number]
        shape = tuple(event.site.eqn.outvars[0].aval.shape)
        named = by_call.get((event.site.scope.call, shape), [])
        if named:  # a norm's two parameters have one shape, and one name here
            found[number] = [_shared(named)]
    return found


def _shared(names: Sequence[str]) -> str:
    """The common beginning of names: "p['norm']" of its scale and its bias."""
    same = 0
    while all(name[: same + 1] == names[0][: same + 1] for name in names) and same < len(names[0]):
        same += 1
    return names[0][:same].rstrip("['.") if len(names) > 1 else names[0]


def _by_call(program: MeasuredCall) -> dict[tuple[str, tuple[int, ...]], list[str]]:
    """Names of the parameters that the forward of each call reads, by its name and their shapes."""
    twin = program.twin
    found: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    shapes, words = [tuple(v.aval.shape) for v in inputs(program)], names(program)
    for event in twin.events:
        if event.site.scope.direction == FORWARD and event.site.scope.call:
            for at in event.outside:
                named = found.setdefault((event.site.scope.call, shapes[at]), [])
                if words[at] not in named:
                    named.append(words[at])
    return found
