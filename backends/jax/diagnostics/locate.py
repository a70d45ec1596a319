"""`locate`: where the first value of a call that is not finite came from.

A twin of the call's program runs, and `blame` follows what is not finite at its end back to the op
that made it.
"""

import math
import reprlib
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.extend.core import Literal

from polymp.backends.jax.arrays import is_float
from polymp.backends.jax.diagnostics.instrument import (
    Event,
    Facts,
    MeasuredCall,
    Twin,
    is_measured,
    measured,
    quick_options,
)
from polymp.backends.jax.diagnostics.traced_call import CLOSED, function_of, optimizer_of
from polymp.diagnostics.audit_records import Fault, Operand
from polymp.diagnostics.blame import (
    DIVIDING,
    NO_EPS,
    UPDATE,
    Blame,
    Node,
    blame,
    of_optimizer,
    rounded,
    tell_nothing_found,
)
from polymp.diagnostics.call_record import BACKWARD
from polymp.dtypes import FORMATS
from polymp.rules.row import LOW


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

    `fn` is not called, and nothing is changed; arguments that it would donate are left alone.

    Args:
        fn: as in `audit`.
        args: of the call.
        kwargs: of the call.

    Returns:
        The fault; None if no op made an Inf or NaN, which is also written to standard error.

    Raises:
        TypeError: `fn` is not callable, or an argument is traced.
    """
    if not callable(fn):
        raise TypeError(
            f"locate(fn, *args) needs a function, got {reprlib.repr(fn)}. Give the function and "
            "its arguments, not what it returned."
        )
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
        raise TypeError("locate was called by code that is traced, where there are no values.")
    program = measured(fn, args, kwargs, once=True)
    fault = located(program)
    if fault is None:
        tell_nothing_found("the call ran no op of JAX" * (not program.calls))
    return fault


def located(program: MeasuredCall) -> Fault | None:
    """Run a program that was made to be measured once, and return its fault."""
    facts, peaks = program.twin.read(program.twin.packed(program.traced.arrays))
    found = blame(nodes_of(program, facts, peaks))
    if found is None:
        return None
    # XLA drops all of the twin but what leads to these operands.
    twin = Twin(program, once=True, ask=found.node)
    look = jax.jit(
        lambda arrays: twin.run(arrays)[0][found.node].operands,
        compiler_options=quick_options(program.traced.arrays),
    )
    operands = np.asarray(look(program.traced.arrays))
    bad, round_ = _bad(facts[found.node])
    if bad:  # in a loop, those of that round
        operands = operands[round_]
    rounds = operands.reshape(math.prod(operands.shape[:-2]), *operands.shape[-2:])
    inputs = []
    for at, (dtype, shape, place) in enumerate(twin.given):
        ends = float(rounds[:, at, 0].min()), float(rounds[:, at, 1].max())
        name = "" if place is None else program.names[place]
        numbers = *ends, *rounds[:, at, 2:].mean(0).tolist()
        inputs.append(Operand.measured(dtype, shape, numbers, name))
    return fault(program, found, inputs, facts)


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
        numbers = {x for _, x in event.numbers if rounded(x, event.dtype) is not None}
        nodes.append(
            Node(
                (*event.inputs, *event.later),
                bad,
                event.dtype,
                burst,
                vanished,
                tuple(sorted(numbers)) if ones or vanished > 0 else (),
                next((spoiled[at] for at in event.outside if at in spoiled), ""),
                event.given,
                bool(event.dtype),
                name == "is_finite",
                name == "convert_element_type",
                event.site.scans,
                first,
                op,
                at in program.late,
                ones,
                # A loss is returned; the largest of a mask, which is one number, too, is not.
                single=at in returned and event.site.eqn.outvars[0].aval.shape == (),
                call=program.of_event.get(event.site.key),
                returned=at in returned,
                ended=op == "minimum" and bool(np.any(fact.peak == top)),
            )
        )
    return nodes


def fault(
    program: MeasuredCall,
    found: Blame,
    operands: Sequence[Operand],
    facts: Sequence[Facts],
) -> Fault:
    """The fault that was found."""
    event, first = program.events[found.node], program.events[found.first]
    call, other = program.call_of(event.site), program.call_of(first.site)
    assert call is not None, "what computes with floats is part of a call"
    kind, why = found.kind, found.why
    if kind == "operation" and event.site.eqn.primitive.name == "gather":
        kind, why = "index", _outside(event)
    remedy = ""
    if kind == "operation" and event.site.eqn.primitive.name in CLOSED:
        kind, why = "inside", "its inputs are finite, and ops inside of it were not looked at"
        remedy = _INSIDE[event.site.eqn.primitive.name]
    if kind == "saturation" and not event.inputs and not event.outside:
        kind, why = "number", f"a constant, which keeps a value from 1, is 1 in {event.dtype}"
    if found.node in program.late:
        call = call._replace(direction=BACKWARD)
    row = call.row
    eqn = event.site.eqn
    by = optimizer_of(eqn.source_info.traceback), optimizer_of(event.site.written)
    if any(by) and kind in ("overflow", "operation"):
        given = (float(facts[at].peak.max()) for at in event.inputs)
        largest = max(filter(math.isfinite, given), default=0.0)
        lost = ""
        if optimizer := _without_eps(program, event):
            zero = "is 0" if event.dtype not in LOW else f"is zero in {event.dtype}"
            kind, why = "number", f"{NO_EPS} in {event.dtype}"
            lost = f"{optimizer}'s eps {zero}"
        call = call._replace(direction=UPDATE)
        remedy = of_optimizer("jax", kind, event.dtype, largest, lost)
    became, _ = _bad(facts[found.first])
    beside = other if found.first != found.node else None
    cause = kind, why
    made = Fault.of(call._replace(row=row), cause, event.dtype, operands, became, beside)
    return made._replace(remedy=remedy)


_INSIDE = {
    "shard_map": "Locate in the function that it maps, with a device's part of its arguments.",
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


def largest(program: MeasuredCall, event: Event, peaks: Sequence[jax.Array]) -> Iterator[Operand]:
    """The operands of an equation, with the largest magnitudes of those that have names."""
    places = {v: at for at, v in enumerate(program.inputs)}
    for v in event.site.eqn.invars:
        if not hasattr(v, "val") and is_measured(v.aval):
            at = places.get(v)
            name, peak = ("", 0.0) if at is None else (program.names[at], float(peaks[at]))
            yield Operand.of_ends(v.aval.dtype.name, v.aval.shape, [peak], name)
