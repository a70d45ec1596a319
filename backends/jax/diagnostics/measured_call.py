"""A call with a twin that measures it: the traced program, its calls, and what is compiled."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

from polymp.backends.jax import compat
from polymp.backends.jax.compat.programs import Atom, ClosedProgram
from polymp.backends.jax.diagnostics.call_site import is_update, source
from polymp.backends.jax.diagnostics.instrument import Twin
from polymp.backends.jax.diagnostics.measures import Facts, difference, is_measured
from polymp.backends.jax.diagnostics.packed import Packed
from polymp.backends.jax.diagnostics.program_calls import with_sites
from polymp.backends.jax.diagnostics.sites import Site, equations
from polymp.backends.jax.diagnostics.traced_call import Traced, traced
from polymp.backends.jax.jaxprs import inside
from polymp.diagnostics.call_record import Call
from polymp.rules.policy import Policy


class MeasuredCall(NamedTuple):
    """A call as it was traced, with its twin.

    Attributes:
        traced: the program.
        calls: its calls; by their numbers.
        of_event: the number of the call that an equation is part of, by (parent, id).
        twin: what is run, once it was traced.
        packed: the twin, compiled; its results are those of `Twin.run`.
    """

    traced: Traced
    calls: list[Call]
    of_event: dict[tuple[tuple[int, ...], int], int]
    twin: Twin
    packed: Packed


def measured(
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    once: bool = False,
    tried: Policy | None = None,
    rounding: bool = False,
) -> MeasuredCall:
    """A call, traced, with a twin that is not run yet."""
    found = traced(fn, args, kwargs, tried)
    calls: list[Call] = []
    of_event: dict[tuple[tuple[int, ...], int], int] = {}
    ends: dict[tuple[tuple[int, ...], int], int] = {}
    readers = _readers(found.closed, {})
    for call, sites in with_sites(found.closed, found.record):
        of_event.update(((s.parent, id(s.eqn)), len(calls)) for s in sites)
        floats = [s for s in sites if any(is_measured(v.aval) for v in s.eqn.outvars)]
        if floats and not _updates(floats[-1]):
            last = _leaving(floats, sites, readers)
            ends.update(((s.parent, id(s.eqn)), len(calls)) for s in last)
        calls.append(call)
    places = {(s.parent, id(s.eqn)): s for s in equations(found.closed)}
    twin = Twin(found.closed, ends, places, samples=not once, rounding=rounding)
    wide = Twin(found.closed, ends, places, wide=True)

    def compared(arrays: Sequence[jax.Array]) -> tuple[list[Facts], list[jax.Array]]:
        facts, peaks = twin.run(arrays)
        pairs = zip(facts, wide.run(arrays)[0], strict=True)
        return [
            one._replace(drift=difference(one.drift, other.drift)) if one.drift.size else one
            for one, other in pairs
        ], peaks

    options = quick_options(found.arrays) if once else None
    if rounding:  # else XLA leaves out roundings that the program has
        options = {"xla_allow_excess_precision": False}
    packed = Packed(compared if rounding else twin.run, options)
    return MeasuredCall(found, calls, of_event, twin, packed)


def quick_options(arrays: Sequence[jax.Array]) -> dict[str, bool | int] | None:
    """Options of XLA with which a twin that runs once takes less time in all, on CPUs.

    A twin has several times the ops of its program, and nearly all of the first call is compiling.
    With these its loops over elements are not optimised, and take two to three times as long.
    Products are calls of kernels that are compiled already. The options are of XLA on CPUs alone.
    """
    devices = (device for x in arrays if isinstance(x, jax.Array) for device in x.devices())
    platforms = {device.platform for device in devices} or {jax.default_backend()}
    if platforms != {"cpu"}:
        return None
    options: dict[str, bool | int] = {"xla_backend_optimization_level": 0}
    if jax.__version_info__ < (0, 11):  # a newer XLA has no such option
        options["xla_cpu_use_fusion_emitters"] = False
    return options


def _updates(site: Site) -> bool:
    """True for what an optimizer or a loss scaler does, also in a branch of theirs."""
    return is_update(site.written) or is_update(site.eqn.source_info.traceback)


def _leaving(
    floats: Sequence[Site], sites: Sequence[Site], readers: Mapping[Atom, set[int]]
) -> list[Site]:
    """The equations of a call whose results are read outside of it, or by nothing.

    Its result, what the backward pass reads beside that, or one for each gradient; a cast that the
    call reads itself is of its input.
    """
    own = {id(s.eqn) for s in sites}
    left = []
    for s in floats:
        by = set[int]().union(*(readers.get(v, ()) for v in s.eqn.outvars))
        taken = s.eqn.primitive.name == "convert_element_type" and by & own
        if not by or (by - own and not taken):
            left.append(s)
    return left


def _readers(closed: ClosedProgram, found: dict[Atom, set[int]]) -> dict[Atom, set[int]]:
    """By variable, the equations that read it in a program and those inside; 0 for its results."""
    jaxpr, _ = compat.opened(closed)
    reads = [(0, jaxpr.outvars), *((id(eqn), eqn.invars) for eqn in jaxpr.eqns)]
    for by, atoms in reads:
        for v in atoms:
            if not hasattr(v, "val"):
                found.setdefault(v, set()).add(by)
    for program in (program for eqn in jaxpr.eqns for program in inside(eqn)):
        _readers(program.closed, found)
    return found


def call_of(program: MeasuredCall, site: Site) -> Call | None:
    """The call that an equation is part of."""
    number = program.of_event.get((site.parent, id(site.eqn)))
    if number is not None:
        return program.calls[number]
    if site.eqn.primitive.name != "shard_map":
        return None
    direction, at = site.scope.direction, source(site.written)
    return Call(
        "jax", "shard_map", "jax:shard_map", site.scope.module, at, direction, "", None, (), "", ()
    )


def inputs(program: MeasuredCall) -> Sequence[Atom]:
    """The variables of a program's inputs, and after them those of its constants."""
    constvars, invars = compat.binders(program.traced.closed)
    return *invars, *constvars


def names(program: MeasuredCall) -> list[str]:
    """Names of the inputs, as the caller would write them, and words for the constants."""
    constvars, _ = compat.binders(program.traced.closed)
    captured = [f"a captured array ({v.aval.str_short()})" for v in constvars]
    return [*program.traced.names, *captured]
