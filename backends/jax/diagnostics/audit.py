"""`audit`: how large the numbers of a call are.

    audited = polymp.jax.audit(train_step)
    params, opt_state = audited(params, opt_state, x)      # what train_step returns, bit for bit
    print(audited.audit)

The function itself runs as it always does. Beside it runs a twin of its traced program, which hands
out nothing but measurements; they are read when somebody asks.
"""

import math
import os
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from polymp.backends.jax import compat
from polymp.backends.jax.arrays import is_array
from polymp.backends.jax.autocast import regions
from polymp.backends.jax.diagnostics.instrument import Event, Facts, MeasuredCall, measured
from polymp.backends.jax.diagnostics.locate import fault, largest, located, nodes_of
from polymp.backends.jax.diagnostics.traced_call import Wrapped, called
from polymp.backends.jax.scaler.grad_scaler import GradScaler
from polymp.diagnostics.audit import Audit
from polymp.diagnostics.audit_records import Fault, Measured, together
from polymp.diagnostics.blame import blame, meant
from polymp.diagnostics.call_record import BACKWARD, FORWARD
from polymp.diagnostics.magnitudes import BINS, Magnitudes, followed


class Audited(Wrapped):
    """A function that is measured whenever it is called; see `audit`.

    Attributes:
        fn: the function.

    Args:
        fn: the function.
    """

    _form = "audit(jax.jit(step))"

    def __init__(self, fn: Callable[..., object]) -> None:
        super().__init__(fn)
        self._programs: dict[Hashable, MeasuredCall] = {}
        self._measured: list[Run] = []
        self._read: tuple[int, Audit] | None = None

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Measure a call, then make it.

        Args:
            args: of the call.
            kwargs: likewise.

        Returns:
            What `fn` returns.

        Raises:
            TypeError: an argument is traced: an audit is of values.
        """
        key = self._key(args, kwargs)
        arrays = [x for x in jax.tree.leaves(called(self.fn, args, kwargs)[1:]) if is_array(x)]
        if key in self._programs:
            program = self._programs[key]
            facts = program.twin.packed(arrays)
        else:
            program = measured(self.fn, args, kwargs)
            facts = program.twin.packed(arrays)
            self._programs[key] = program
        broke = None
        if program.unlisted:
            facts = jax.device_get(facts)  # to look at now, and for the audit
            pairs = zip(program.events, program.twin.read(facts)[0], strict=True)
            peaks = (fact.peak for event, fact in pairs if event.site.key in program.unlisted)
            finite = all(np.isfinite(peak).all() for peak in peaks)
            if not (finite or any(r.fault for r in self._measured)):
                broke = located(measured(self.fn, args, kwargs, once=True))
        scale = _scale_of((args, kwargs)) if _scales(program) else 1.0
        self._measured.append(Run(program, facts, scale, broke))
        return self.fn(*args, **kwargs)

    @property
    def audit(self) -> Audit:
        """The audit of all calls so far. Waits for the device."""
        if self._read is None or self._read[0] != len(self._measured):
            self._read = len(self._measured), read(self._measured)
        return self._read[1]

    def __repr__(self) -> str:
        return f"audit({self.fn!r}), {len(self._measured)} calls measured"


def audit(fn: Callable[..., object], *args: object) -> Audited:
    """Wrap a function so that its numbers are measured at every call.

        audited = polymp.jax.audit(train_step)          # jitted or not; with its jax.grad inside
        for x in batches:
            params, opt_state = audited(params, opt_state, x)
        print(audited.audit)
        policy = audited.audit.suggest().apply("amp")

    `fn` itself is called as it is: its results are the same, every bit of them. Measured is a twin
    of its traced program, which is compiled once for each set of types and runs before `fn`: every
    op's result and every gradient, but not inside of `while` loops and `shard_map`: the audit says
    how many calls are in there. Largest magnitudes, Inf and NaN are of all values, shares of up to
    2,048 of each array, spread evenly.

    Gradients are what the program's backward pass hands to the rest of it. A `GradScaler` among the
    arguments says by which scale to divide them, if it scales the loss.

    Args:
        fn: a function of arrays, pytrees and flax modules; the outermost one, which jax.jit or
            jax.grad may be inside of, and not around.
        args: none; the function that is returned takes them.

    Returns:
        The function, with the audit as its attribute `audit`.

    Raises:
        TypeError: `fn` is not callable.
    """
    if not callable(fn):
        raise TypeError(f"audit(fn) needs a function, got {reprlib.repr(fn)}.")
    if args:
        raise TypeError(
            "audit(fn) takes no arguments of fn. Write audited = audit(fn), audited(x)."
        )
    return Audited(fn)


def _scales(program: MeasuredCall) -> bool:
    """True if a `GradScaler` scales a loss: one that is an argument may be forgotten."""
    stacks = {site.eqn.source_info.name_stack for site in program.sites.values()}
    return any(regions.SCALED in compat.scope_names(stack) for stack in stacks)


def _scale_of(tree: object) -> jax.Array | float:
    """The scale of the first scaler among the arguments; 1 if there is none."""
    for leaf in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, GradScaler)):
        if isinstance(leaf, GradScaler) and leaf.enabled:
            scale: jax.Array = leaf.state.scale
            return scale
    return 1.0


# The audit of measured calls: what the measuring program handed out, as records of an `Audit`.


class Run(NamedTuple):
    """A run of the program that measures."""

    program: MeasuredCall  # that ran
    packed: jax.Array  # what it handed out, on the device unless an optimizer was in it
    scale: jax.Array | float  # of the gradients: float32 [], or 1.0 without a scaler
    fault: Fault | None  # of a call whose optimizer left what is not finite


def read(runs: Sequence[Run]) -> Audit:
    """Read what was measured, from the device."""
    audit = Audit()
    audit.steps = len(runs)
    results: dict[Hashable, list[Measured]] = {}
    gradients: dict[str, list[Measured]] = {}
    left_out = Counter[str]()
    for program, packed, scale, broke in runs:
        left_out |= program.left_out
        facts, peaks = program.twin.read(packed)
        audit.scale = float(np.asarray(scale))
        handed = short_names(_handed(program))
        nodes = nodes_of(program, facts, peaks)
        masks = meant(nodes)
        for m, number in _results(program, facts, audit.scale):
            if number in masks:
                m = m._replace(magnitudes=m.magnitudes.unmasked())
            results.setdefault(m[:8], []).append(m)
            for name in handed.get(number, ()):
                gradient = m._replace(op="gradient", spelling="", module=name, source="", row=None)
                gradients.setdefault(name, []).append(gradient)
        audit.fault = audit.fault or broke
        if audit.fault is None and (found := blame(nodes)) is not None:
            operands = largest(program, program.events[found.node], peaks)
            audit.fault = fault(program, found, tuple(operands), facts)
    audit.left_out = dict(left_out)
    audit.results = [together(many) for many in results.values()]
    audit.gradients = [together(many) for many in gradients.values()]
    return audit


def _results(
    program: MeasuredCall,
    facts: Sequence[Facts],
    scale: float,
) -> Iterator[tuple[Measured, int]]:
    """The measured results of a program's calls, each with the number of its event."""
    events, made = program.events, list[Magnitudes | float]()
    for event, fact in zip(events, facts, strict=True):
        lost = float(fact.lost.reshape(-1, 3)[:, 2].mean()) if fact.lost.size else 0.0
        ends = event.group is not None
        made.append((_magnitudes(event, fact) if ends else None) or lost)
    back = {at for at, event in enumerate(events) if event.direction == BACKWARD}
    gone = followed((m, back & {*e.inputs}) for m, e in zip(made, events, strict=True))
    rows = zip(events, made, gone, strict=True)
    for number, (event, m, share) in enumerate(rows):
        if event.group is None or number in program.late or isinstance(m, float):
            continue
        call, magnitudes = program.calls[event.group], m._replace(gone=share)
        if call.direction == BACKWARD and scale not in (0.0, 1.0):
            magnitudes = magnitudes.scaled(1 / scale)
        yield Measured(
            call.op, call.spelling, call.module, call.source, call.direction, call.region,
            call.row, event.dtype, magnitudes,
        ), number  # fmt: skip


def _magnitudes(event: Event, fact: Facts) -> Magnitudes | None:
    """Those of an event; None of a branch that was not taken, and of a loop without a round."""
    peaks = fact.peak.reshape(-1)
    peaks = peaks[(peaks >= 0) | np.isnan(peaks)]  # of what ran
    if not peaks.size:
        return None
    bins = np.bincount(fact.sample.reshape(-1).astype(int), minlength=BINS + 1)[:BINS]
    lost = fact.lost.reshape(-1, 3) if fact.lost.size else np.zeros((1, 3))
    return Magnitudes.measured(
        math.prod(event.site.eqn.outvars[0].aval.shape) * event.site.times,
        tuple(bins.tolist()),
        peaks.tolist(),
        float(lost[:, 1].mean()),
        float(lost[:, 2].mean()),
        float(np.max(lost[:, 0], where=np.isfinite(lost[:, 0]) & (lost[:, 1] > 0), initial=0)),
    )


# Gradients


def _handed(program: MeasuredCall) -> dict[int, list[str]]:
    """The gradients that the backward pass hands to the rest of a program: names, by event."""
    found: dict[int, list[str]] = {}
    for value, name in zip(program.results, program.traced.results, strict=True):
        if len(value.events) == 1:
            (number,) = value.events
            if program.events[number].direction == BACKWARD:
                found.setdefault(number, []).append(name)
    by_call = _by_call(program)
    for number in sorted(program.handed - found.keys()):
        site = program.events[number].site
        named = by_call.get((site.scope.call, tuple(site.eqn.outvars[0].aval.shape)), [])
        if named[1:]:  # a norm's two parameters have one shape, and one name here
            named = [os.path.commonprefix(named).rstrip("['.")]  # noqa: RUF071
        if named:
            found[number] = named
    return found


def _by_call(program: MeasuredCall) -> dict[tuple[str, tuple[int, ...]], list[str]]:
    """Names of the parameters that the forward of each call reads, by its name and their shapes."""
    found: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    shapes, words = [tuple(v.aval.shape) for v in program.inputs], program.names
    for event in program.events:
        if event.direction == FORWARD and event.site.scope.call:
            for at in event.outside:
                named = found.setdefault((event.site.scope.call, shapes[at]), [])
                if words[at] not in named:
                    named.append(words[at])
    return found


def short_names(found: Mapping[int, Sequence[str]]) -> dict[int, list[str]]:
    """Short names for expressions; an expression itself where two values would have one name."""
    short = {}
    for value, texts in found.items():
        texts = [text.removesuffix(".value") for text in texts]  # of flax's variables
        names = {_path(text): text for text in texts}
        moments = {name for name in names for other in names if name.endswith(f".{other}")}
        short[value] = {name: text for name, text in names.items() if name not in moments}
    having = Counter(name for names in short.values() for name in names)
    return {
        value: [name if having[name] == 1 else text for name, text in names.items()]
        for value, names in short.items()
    }


def _path(text: str) -> str:
    """A name as those of modules: "layers.0.up.kernel" of "[0][1]['layers'][0]['up']['kernel']".

    Without the argument, the places in tuples, and the collection of linen that it stands in.
    """
    parts = re.findall(r"[^\[\]'\"./~]+", text)
    start = 1 if text[:1] not in "[." and len(parts) > 1 else 0
    while start < len(parts) and (parts[start].isdigit() or parts[start] == "params"):
        start += 1
    return ".".join(parts[start:]) or text
