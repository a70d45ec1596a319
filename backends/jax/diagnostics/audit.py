"""`audit`: how large the numbers of a call are; `locate`: which op made the first bad one.

    audited = polymp.jax.audit(train_step)
    params, opt_state = audited(params, opt_state, x)      # what train_step returns, bit for bit
    print(audited.audit)

The function itself runs as it always does. Beside it runs a twin of its traced program, which hands
out nothing but measurements; they are read when somebody asks. `locate` runs twins, and the program
itself where rounding may make the two differ. In the measurements `blame` follows what is not
finite at the end back to the op that made it.
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
from jax.extend.core import Literal

from polymp.backends.jax import compat
from polymp.backends.jax.arrays import is_float
from polymp.backends.jax.autocast import regions
from polymp.backends.jax.compat import ClosedProgram
from polymp.backends.jax.diagnostics.explain import (
    CLOSED,
    Wrapped,
    function_of,
    optimizer_of,
    traced,
)
from polymp.backends.jax.diagnostics.instrument import (
    Event,
    Facts,
    MeasuredCall,
    Origin,
    is_measured,
    long,
    quick_options,
)
from polymp.backends.jax.scaler.grad_scaler import GradScaler
from polymp.diagnostics.audit import Audit
from polymp.diagnostics.audit_records import Fault, Measured, Operand, together
from polymp.diagnostics.blame import (
    CAST,
    DIVIDING,
    UPDATE,
    Blame,
    Node,
    blame,
    meant,
    rounded,
    tell_nothing_found,
)
from polymp.diagnostics.call_record import BACKWARD, FORWARD
from polymp.diagnostics.magnitudes import BINS, Magnitudes, followed
from polymp.diagnostics.remedy import NO_EPS, Change, of_optimizer, remedy_of, tried
from polymp.dtypes import FORMATS
from polymp.rules.row import LOW


class Audited(Wrapped):
    """A function that is measured whenever it is called; see `audit`.

    Attributes:
        fn: the function.

    Args:
        fn: the function.
    """

    def __init__(self, fn: Callable[..., object]) -> None:
        super().__init__(fn, "audit(jax.jit(step))")
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
            TypeError: an argument is traced: an audit is of values; or `fn` reads those of arrays.
        """
        key, arrays = self._key(args, kwargs), self._arrays(args, kwargs)
        if key not in self._programs:
            self._programs[key] = MeasuredCall(traced(self.fn, args, kwargs), once=False)
        program = self._programs[key]
        facts = program.twin().packed(arrays)
        broke = None
        if program.unlisted:
            facts = jax.device_get(facts)  # to look at now, and for the audit
            pairs = zip(program.events, program.twin().read(facts)[0], strict=True)
            peaks = (fact.peak for event, fact in pairs if event.site.key in program.unlisted)
            finite = all(np.isfinite(peak).all() for peak in peaks)
            if not (finite or any(r.fault for r in self._measured)):
                call = traced(self.fn, args, kwargs)
                broke, _ = located(MeasuredCall(call, once=True, updates=True), arrays)
        scalers = _scalers((args, kwargs)) if _scales(program) else []
        scale = scalers[0].state.scale if scalers else 1.0
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


def locate(fn: Callable[..., object], *args: object, **kwargs: object) -> Fault | None:
    """Find the op that made the first value of a call that is not finite.

        if not jnp.isfinite(loss):
            print(polymp.jax.locate(train_step, params, opt_state, batch))

    Runs a twin of the call's program, and follows what is not finite at its end (a result, or a
    gradient that a scaler finds and skips) back to the op that made it: because its dtype's
    range was too small, because a value before it became zero in its dtype, because an argument
    was not finite, or because the operation itself has no finite result there. The fault names the
    row of the policy that decided, and what the op was given. Infinities that a program means and
    takes up again or returns, such as those of a mask, are no fault.

    The Python of `fn` runs as where jit traces it. If the twin has no fault, or an operation's, the
    program itself runs, too, on copies of its arrays, for rounding may make the two differ. Nothing
    is changed, and arguments that it would donate are left alone; its callbacks run.

    If the call has a region and breaks, twins with ops in float32 run, to find which of them make
    it finite. If it breaks with all ops in float32, too, the fault of that twin is returned.

    Args:
        fn: as in `audit`.
        args: of the call.
        kwargs: of the call.

    Returns:
        The fault; None if no op made an Inf or NaN, which is also written to standard error.

    Raises:
        TypeError: `fn` is not callable or reads values of arrays, or an argument is traced.
    """
    if not callable(fn):
        raise TypeError(
            f"locate(fn, *args) needs a function, got {reprlib.repr(fn)}. Give the function and "
            "its arguments, not what it returned."
        )
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
        raise TypeError("locate was called by code that is traced, where there are no values.")
    with jax.debug_nans(False), jax.debug_infs(False):  # which raise where one is made
        call = traced(fn, args, kwargs)
        program = MeasuredCall(call, once=True)
        fault, why = located(program, call.arrays)
        if fault is None:
            tell_nothing_found(why if program.calls else _NO_FLOATS)
            return None
        known = [program]  # whose twins are compiled

        def repeat(change: Change | None = None, scale: float = 1.0) -> Fault | None:
            given = (args, kwargs) if scale == 1.0 else _scaled_by(scale, (args, kwargs))
            call = traced(fn, given[0], given[1], change)
            same = (it for it in known if _is_same(it.closed, call.closed))
            if (again := next(same, None)) is None:
                known.append(again := MeasuredCall(call, once=True))
            return located(again, call.arrays, inputs=False)[0]

        ops = [call.op for call in program.calls if call.region]
        try:
            return tried(fault, ops, repeat, _scales(program) and bool(_scalers((args, kwargs))))
        except Exception:  # the function is made for its own dtypes
            return fault._replace(remedy=remedy_of(fault))


_NO_FLOATS = "JAX ran no op on floats in this call and thread: there was nothing to look at"
_ROUNDED = (
    "a result of the call is not finite, and in the copy that is measured it is: they round "
    "differently. Look for a difference of nearly equal numbers, a divisor or a logarithm near 0"
)


def _is_same(one: ClosedProgram, other: ClosedProgram) -> bool:
    """True for programs with the same equations, of the same constants."""
    (program, own), (another, its) = compat.opened(one), compat.opened(other)
    if len(own) != len(its) or str(program) != str(another):
        return False
    pairs = zip(own, its, strict=True)
    return all(a is b or np.array_equal(a, b, equal_nan=True) for a, b in pairs)


def _scales(program: MeasuredCall) -> bool:
    """True if a `GradScaler` scales a loss: one that is an argument may be forgotten."""
    stacks = {site.eqn.source_info.name_stack for site in program.sites.values()}
    return any(regions.SCALED in compat.scope_names(stack) for stack in stacks)


def _scalers(tree: object) -> list[GradScaler]:
    """The enabled scalers among the arguments."""
    leaves = jax.tree.leaves(tree, is_leaf=_is_scaler)
    return [leaf for leaf in leaves if _is_scaler(leaf) and leaf.enabled]


def _is_scaler(leaf: object) -> bool:
    return isinstance(leaf, GradScaler)


def _scaled_by(factor: float, tree: Any) -> Any:
    """The arguments, with the scales of scalers among them multiplied."""

    def one(leaf: Any) -> Any:
        if not _is_scaler(leaf):
            return leaf
        return leaf._with(leaf.state._replace(scale=leaf.state.scale * factor))

    return jax.tree.map(one, tree, is_leaf=_is_scaler)


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
        facts, peaks = program.twin().read(packed)
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
            operands = _operands(program, program.events[found.node], facts, peaks)
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
        _, lost = _of_what_ran(fact)
        share = float(lost[:, 2].mean()) if lost.size else 0.0
        magnitudes = None if event.group is None else _magnitudes(event, fact)
        made.append(magnitudes or share)
    back = {at for at, event in enumerate(events) if event.direction == BACKWARD}
    gone = followed((m, back & {*e.inputs}) for m, e in zip(made, events, strict=True))
    for number, (event, m, share) in enumerate(zip(events, made, gone, strict=True)):
        hidden = number in program.late or event.site.key in program.residuals
        if event.group is None or hidden or isinstance(m, float):
            continue
        call, magnitudes = program.calls[event.group], m._replace(gone=share)
        if call.direction == BACKWARD and scale not in (0.0, 1.0):
            magnitudes = magnitudes.scaled(1 / scale)
        yield Measured(
            call.op, call.spelling, call.module, call.source, call.direction, call.region,
            call.row, event.dtype, magnitudes, _numbers_lost(event),
        ), number  # fmt: skip


def _magnitudes(event: Event, fact: Facts) -> Magnitudes | None:
    """Those of an event; None of a branch that was not taken, and of a loop without a round."""
    peaks, lost = _of_what_ran(fact)
    if not peaks.size:
        return None
    bins = np.bincount(fact.sample.reshape(-1).astype(int), minlength=BINS + 1)[:BINS]
    times = max(event.site.times * peaks.size // fact.peak.size, 1)
    return Magnitudes.measured(
        math.prod(event.site.eqn.outvars[0].aval.shape) * times,
        tuple(bins.tolist()),
        peaks.tolist(),
        float(lost[:, 1].mean()),
        float(lost[:, 2].mean()),
        float(np.max(lost[:, 0], where=np.isfinite(lost[:, 0]) & (lost[:, 1] > 0), initial=0)),
    )


def _numbers_lost(event: Event) -> tuple[float, ...]:
    """The numbers of the program that the dtype of an event makes 0 or 1, as they were written."""
    found = {x for _, x in event.numbers if rounded(x, event.dtype) is not None}
    return tuple(sorted(float(f"{x:.7g}") for x in found))


def _of_what_ran(fact: Facts) -> tuple[Any, Any]:
    """Peaks and losses without those of branches that were not taken: [rounds], [rounds, 3]."""
    peaks = fact.peak.reshape(-1)
    ran = (peaks >= 0) | np.isnan(peaks)
    lost = fact.lost.reshape(-1, 3) if fact.lost.size else np.zeros((peaks.size, 3))
    return peaks[ran], lost[ran]


# Gradients


def _handed(program: MeasuredCall) -> dict[int, list[str]]:
    """The gradients that the backward pass hands to the rest of a program: names, by event."""
    found: dict[int, list[str]] = {}
    events = program.events
    back = {at for at, event in enumerate(events) if event.direction == BACKWARD}
    for value, name in zip(program.results, program.traced.results, strict=True):
        if len(value.events) == 1 and value.events <= back:
            (number,) = value.events
            found.setdefault(number, []).append(name)
    read = {at for event in events if event.direction == FORWARD for at in event.inputs}
    for number in sorted(read & back - found.keys()):
        site = events[number].site
        reads = program.reads.get((site.scope.call, long(site.eqn.outvars[0].aval.shape)), ())
        # A norm's two parameters have one shape, and one name here.
        name = os.path.commonprefix([program.names[at] for at in reads])  # noqa: RUF071
        if name := name.rstrip("['."):
            found[number] = [name]
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
    """A name as those of modules: "layers.0.up.kernel" of "[0][1]['layers'][0]['up']['kernel']"."""
    # Without the argument, the places in tuples, and the collection of linen that it stands in.
    parts = re.findall(r"[^\[\]'\"./~]+", text)
    start = 1 if text[:1] not in "[." and len(parts) > 1 else 0
    while start < len(parts) and (parts[start].isdigit() or parts[start] == "params"):
        start += 1
    return ".".join(parts[start:]) or text


# The fault of a run.


def located(
    program: MeasuredCall, arrays: Sequence[jax.Array], quick: bool = True, inputs: bool = True
) -> tuple[Fault | None, str]:
    """Run a program that is measured once, and return its fault, or why there is none."""
    # A twin that is compiled `quick` may round otherwise than the program; then one that is not
    # runs. Without `inputs` those of the op are not measured.
    options = quick_options(arrays) if quick else None
    twin = program.twin(None, options)
    facts, peaks = twin.read(twin.packed(arrays))
    found = blame(nodes_of(program, facts, peaks))
    if found is None or (quick and found.kind == "operation"):
        differs = _differs(program, arrays, facts, peaks, found is not None)
        if quick and differs:
            return located(program, arrays, False, inputs)
        if found is None:
            return None, _ROUNDED * differs
    keys = {program.events[at].site.key for at in (found.node, found.first)}
    if keys & program.skipped:  # an optimizer broke it: look at all of its calls
        whole = MeasuredCall(program.traced, once=True, updates=True)
        return located(whole, arrays, quick, inputs)
    if not inputs:
        return fault(program, found, (), facts), ""
    twin = program.twin(found.node, options)
    operands = twin.read(twin.packed(arrays))[0][found.node].operands
    bad, round_ = _bad(facts[found.node])
    if bad:  # in a loop, those of that round
        operands = operands[round_]
    rounds = operands.reshape(math.prod(operands.shape[:-2]), *operands.shape[-2:])
    given = []
    for at, (dtype, shape, place) in enumerate(twin.given):
        ends = float(rounds[:, at, 0].min()), float(rounds[:, at, 1].max())
        name = "" if place is None else program.names[place]
        numbers = *ends, *rounds[:, at, 2:].mean(0).tolist()
        given.append(Operand.measured(dtype, shape, numbers, name))
    return fault(program, found, given, facts), ""


def _differs(
    program: MeasuredCall,
    arrays: Sequence[jax.Array],
    facts: Sequence[Facts],
    peaks: Sequence[jax.Array],
    broke: bool,
) -> bool:
    """True if the program has results that are not finite and are in its twin, or the reverse."""
    events = {at for at, fact in enumerate(facts) if _bad(fact)[0]}
    spoiled = {at for at, peak in enumerate(peaks) if not np.isfinite(peak)}
    bad = {
        at
        for at, came in enumerate(program.results)
        if came.given or came.captured or came.events & events or came.outside & spoiled
    }
    own = program.not_finite(arrays)
    return bool(own - bad or (broke and bad and not own))


def _bad(fact: Facts) -> tuple[str, tuple[int, ...]]:
    """Say "Inf" or "NaN" of a result, and the first round of each scan around it; "" of neither."""
    peaks = np.asarray(fact.peak)
    rounds = np.argwhere(~np.isfinite(peaks))
    if not len(rounds):
        return "", ()
    first = tuple(rounds[0].tolist())
    return "NaN" if np.isnan(peaks[first]) else "Inf", first


def nodes_of(
    program: MeasuredCall, facts: Sequence[Facts], peaks: Sequence[jax.Array]
) -> list[Node]:
    """The events of a run with their facts, for `blame`."""
    spoiled = {at: program.names[at] for at, peak in enumerate(peaks) if not np.isfinite(peak)}
    returned = {at for origin in program.results for at in origin.events}
    nodes = []
    for at, (event, fact) in enumerate(zip(program.events, facts, strict=True)):
        bad, first = _bad(fact)
        call = program.call_of(event.site)
        name, op = event.site.eqn.primitive.name, "" if call is None else call.op
        burst = bool(bad) and event.dtype == "float16" and name not in CLOSED and op not in DIVIDING
        vanished, ones = 0.0, False
        top = FORMATS[event.dtype].max if event.dtype in FORMATS else math.inf
        if fact.lost.size:
            burst = bool(bad) and bool(np.isfinite(fact.lost[first][0]))
            vanished = float(fact.lost[..., 2].max())
            ones = bool(((np.asarray(fact.peak) == 1) & (fact.lost[..., 0] < 1)).any())
        numbers, outside = _numbers_lost(event), sorted(event.came.outside)
        nodes.append(
            Node(
                inputs=tuple(sorted(event.came.events)),
                bad=bad,
                run=event.dtype,
                burst=burst,
                tried=bool(fact.lost.size) or event.dtype != "float16",
                vanished=vanished,
                numbers=numbers if ones or vanished > 0 else (),
                spoiled=next((spoiled[at] for at in outside if at in spoiled), event.came.captured),
                given=event.came.given,
                value=bool(event.dtype),
                asks=name == "is_finite",
                cast=name == "convert_element_type",
                of_result=event.site.key in program.of_results,
                loops=event.site.scans,
                first=first,
                op=op,
                late=at in program.unused,
                ones=ones,
                # A loss is returned; the largest of a mask, which is one number, too, is not.
                single=at in returned and event.site.eqn.outvars[0].aval.shape == (),
                call=program.of_event.get(event.site.key),
                returned=at in returned,
                ended=op == "minimum" and bool(np.any(fact.peak == top)),
                divisors=event.divisors,
            )
        )
    return nodes


def fault(
    program: MeasuredCall,
    found: Blame,
    operands: Sequence[Operand],
    facts: Sequence[Facts],
) -> Fault:
    """Put what `blame` found in words: the op, its inputs, and for an optimizer's what helps."""
    event, first = program.events[found.node], program.events[found.first]
    call, other = program.call_of(event.site), program.call_of(first.site)
    assert call is not None, "what computes with floats is part of a call"
    kind, why = found.kind, found.why
    if kind == "operation" and event.site.eqn.primitive.name == "gather":
        kind, why = "index", _outside(event)
    if kind == "overflow" and any(x.largest > FORMATS[event.dtype].max for x in operands):
        why = CAST.format(event.dtype)
    remedy = ""
    if kind == "operation" and event.site.eqn.primitive.name in CLOSED:
        kind, why = "inside", "its inputs are finite, and ops inside of it were not looked at"
        remedy = _INSIDE[event.site.eqn.primitive.name]
    if kind == "saturation" and not event.inputs and not event.came.outside:
        kind, why = "number", f"a constant, which keeps a value from 1, is 1 in {event.dtype}"
    if found.node in program.late:
        call = call._replace(direction=BACKWARD)
    became, _ = _bad(facts[found.first])
    eqn = event.site.eqn
    by = optimizer_of(eqn.source_info.traceback), optimizer_of(event.site.written)
    if any(by) and kind in ("overflow", "underflow", "operation"):
        lost = ""
        if optimizer := _without_eps(program, first):
            if event is not first and other is not None:  # of what vanished before it
                call, operands, found = other, (), found._replace(node=found.first)
            zero = "is 0" if event.dtype not in LOW else f"is zero in {event.dtype}"
            kind, why = "number", f"{NO_EPS} in {event.dtype}"
            lost = f"{optimizer}'s eps {zero}"
        call = call._replace(direction=UPDATE)
        if kind != "operation" or became == "Inf":  # no smaller step makes a root of -1 a number
            remedy = of_optimizer("jax", kind, event.dtype, lost)
    beside = other if found.first != found.node else None
    made = Fault.of(call, (kind, why), event.dtype, operands, became, beside)
    return made._replace(remedy=remedy)


_INSIDE = {
    "shard_map": "Locate in the function that it maps, with a device's part of its arguments; if "
    "it has collectives, in jax.vmap(function, axis_name=...).",
    "while": "Locate in the function that is a round of it, with what the loop carries.",
}


def _without_eps(program: MeasuredCall, event: Event) -> str:
    """The function of optax that divides by zero with an eps of zero: in the program it adds 0."""
    name = optimizer_of(event.site.eqn.source_info.traceback)
    if not name or event.site.eqn.primitive.name not in ("div", "rsqrt", "pow"):
        return ""
    added = [
        float(x.val)
        for eqn in (site.eqn for site in program.sites.values())
        if eqn.primitive.name == "add" and optimizer_of(eqn.source_info.traceback) == name
        for x in eqn.invars
        if isinstance(x, Literal) and is_float(x.aval)
    ]
    return name if added and not any(added) else ""


def _outside(event: Event) -> str:
    """Say of which array an index of a gather is outside."""
    eqn = event.site.eqn
    axes, shape = eqn.params["dimension_numbers"].start_index_map, eqn.invars[0].aval.shape
    allowed = f"shape {list(shape)}"
    if len(axes) == 1:
        allowed = f"0..{shape[axes[0]] - eqn.params['slice_sizes'][axes[0]]}"
    by = function_of(eqn.source_info.traceback) or "gather"
    return f"an index is outside {allowed}: {by} filled with NaN"


def _operands(
    program: MeasuredCall, event: Event, facts: Sequence[Facts], peaks: Sequence[jax.Array]
) -> Iterator[Operand]:
    """The inputs of a call that an equation is part of, with largest magnitudes that are known."""
    call = program.of_event.get(event.site.key)
    for v, came in zip(event.site.eqn.invars, event.reads, strict=True):
        if hasattr(v, "val") or not is_measured(v.aval):
            continue
        dtype, shape, name, ends = v.aval.dtype.name, v.aval.shape, "", [0.0]
        came = _uncast(program, call, came)
        match [*came.events], [*came.outside]:
            case [at], []:
                made = program.events[at]
                if made.site.eqn.outvars[0].aval.shape == shape:
                    dtype = made.dtype
                    if np.ndim(facts[at].peak) == 0:
                        ends = _of_what_ran(facts[at])[0].tolist()
            case [], [at]:
                if program.inputs[at].aval.shape == shape:
                    dtype = program.inputs[at].aval.dtype.name
                    name, ends = program.names[at], [float(peaks[at])]
        yield Operand.of_ends(dtype, shape, ends, name)


def _uncast(program: MeasuredCall, call: int | None, came: Origin) -> Origin:
    """Where a value that a call reads comes from, before casts that are part of the call."""
    if len(came.events) == 1 and not came.outside and call is not None:
        (event,) = (program.events[at] for at in came.events)
        own = program.of_event.get(event.site.key) == call
        if own and event.site.eqn.primitive.name == "convert_element_type":
            return _uncast(program, call, event.reads[0])
    return came
