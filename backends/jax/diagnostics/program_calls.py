"""The calls of a traced program: the equations that became of each, read as one row of a report.

traced program and its record -> equations, each with the name of its call -> calls
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from polymp.backends.jax.arrays import count_of
from polymp.backends.jax.autocast.fp8_operands import In8Bits
from polymp.backends.jax.autocast.fp8_quantise import IN_8_BITS
from polymp.backends.jax.autocast.known_functions import spelling
from polymp.backends.jax.autocast.op_facts import LAYOUT, OURS
from polymp.backends.jax.compat.programs import Atom, ClosedProgram, Equation
from polymp.backends.jax.diagnostics.call_site import Scope, source
from polymp.backends.jax.diagnostics.flops import flops
from polymp.backends.jax.diagnostics.kept_for_backward import bytes_of, float_dtype, kept_bytes
from polymp.backends.jax.diagnostics.sites import Site, equations
from polymp.backends.jax.diagnostics.traced_call import Followed, Record, op_named
from polymp.diagnostics.call_record import Call
from polymp.dtypes import widest


def with_sites(closed: ClosedProgram, record: Record) -> Iterator[tuple[Call, list[Site]]]:
    """The calls of a program, in its order, each with its equations."""
    groups: list[list[Site]] = []
    known: dict[tuple[str, str], list[list[Site]]] = {}
    for site in equations(closed):
        if site.scope.call not in record.calls:
            if _counts(site.eqn):
                groups.append([site])
            continue
        alike = known.setdefault((site.scope.call, site.scope.direction), [])
        group = next((sites for sites in alike if _together(sites[0].parent, site.parent)), None)
        if group is None:
            group = []
            alike.append(group)
            groups.append(group)
        group.append(site)
    kept = kept_bytes(closed), kept_bytes(closed, IN_8_BITS)
    seen: set[str] = set()
    for sites in groups:
        name, direction = sites[0].scope.call, sites[0].scope.direction
        followed = record.calls.get(name)
        counts = any(_counts(site.eqn) for site in sites)
        if followed is None or counts or followed.saved or followed.fallback:
            saved = () if name in seen or followed is None else tuple(followed.saved.items())
            seen.add(name)
            yield _call(sites, followed, direction, saved, kept), sites


def _together(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """True if one place is inside of the other, or the same: a function's casts are outside it."""
    return all(a == b for a, b in zip(one, other, strict=False))


def _call(
    sites: Sequence[Site],
    followed: Followed | None,
    direction: str,
    saved: tuple[tuple[str, int], ...],
    kept: Sequence[dict[tuple[tuple[int, ...], Atom], int]],
) -> Call:
    first = sites[0]
    made = {id(v) for site in sites for v in site.eqn.outvars}
    outside = min((site.parent for site in sites), key=len)
    given = [str(site.eqn.outvars[0].aval) for site in sites
             if site.parent == outside and _is_cast(site.eqn)]  # fmt: skip
    casts = cast_bytes = work = 0
    hoisted = 0
    inputs: dict[Atom, str] = {}
    run: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    spelled = ""
    for site in sites:
        eqn = site.eqn
        for v in _operands(eqn):
            if not hasattr(v, "val") and id(v) not in made and (f := float_dtype(v)):
                if v not in inputs and len(site.parent) > len(outside) and str(v.aval) in given:
                    given.remove(str(v.aval))  # a cast's result, by its name in the function
                    made.add(id(v))
                else:
                    inputs.setdefault(v, f)
        if eqn.primitive.name == "polymp_fp8_quantise":
            casts += site.times
            cast_bytes += site.times * (bytes_of(eqn.invars[0]) + bytes_of(eqn.outvars[0]))
            continue
        outputs = _dtypes(eqn.outvars) or outputs
        if _is_cast(eqn):
            times = 1 if eqn.invars[0] in site.fixed else site.times
            hoisted += site.times - times
            casts += times
            cast_bytes += times * (bytes_of(eqn.invars[0]) + bytes_of(eqn.outvars[0]))
            continue
        for v, dtype in _cast_inside(eqn):
            times = 1 if v in site.fixed else site.times
            hoisted += site.times - times
            casts += times
            size = np.dtype(dtype).itemsize
            cast_bytes += times * (bytes_of(v) + count_of(v.aval.shape) * size)
        own = flops(eqn)
        if _counts(eqn) and (not run or (own and not work)):
            run = _run(eqn)
            spelled = spelling(eqn)
        work += own * site.times
    if hoisted:
        saved = (*saved, ("hoisted", hoisted))
    if not spelled:
        spelled = spelling(first.eqn)
    op = followed.op if followed else op_named(spelled)
    entry = followed.entry if followed else None
    kept_here, kept_fp8 = (
        sum(one.get((site.parent, v), 0) for site in sites for v in site.eqn.outvars)
        for one in kept
    )
    return Call(
        "jax",
        op,
        followed.spelling if followed else f"jax:{spelled}",
        _module(sites),
        source(first.written),
        direction,
        followed.low if followed else "",
        entry.row if entry else None,
        tuple(inputs.values()),
        widest(run) if run else "",
        outputs,
        casts,
        cast_bytes,
        saved,
        work,
        kept_here,
        first.times,
        followed.recipe if followed else "",
        followed.fallback if followed else "",
        kept_fp8,
    )


def _operands(eqn: Equation) -> Sequence[Atom]:
    """The operands of an equation; of a product in 8 bits, the two that are multiplied."""
    if eqn.primitive.name not in OURS or "how" not in eqn.params:
        return eqn.invars
    return eqn.invars[:2]


def _cast_inside(eqn: Equation) -> Iterator[tuple[Atom, str]]:
    """The operands that a contraction casts, each with the dtype that it casts to."""
    if eqn.primitive.name not in OURS:
        return
    for v, dtype, ready in zip(eqn.invars, *_taken(eqn), strict=False):
        if not ready and float_dtype(v) != dtype:
            yield v, dtype


def _taken(eqn: Equation) -> tuple[Sequence[str], Sequence[bool]]:
    """The dtypes in which a contraction takes its operands, and which come in them as well."""
    how = _how(eqn)
    if how is None:
        return [eqn.params["run"]] * 2, [False] * 2
    return [how.rules.format_of(part.role) for part in how.both], [part.shared for part in how.both]


def _how(eqn: Equation) -> In8Bits | None:
    """How a contraction runs in 8 bits; None if it does not."""
    how: In8Bits | None = eqn.params.get("how")
    return None if how is None or how.trial else how


def _module(sites: Sequence[Site]) -> str:
    """The innermost module that all of a call is in; casts for a function stand outside of it."""
    named = [s.scope for s in sites if not _is_cast(s.eqn)] or [s.scope for s in sites]
    levels = zip(*(scope.names for scope in named), strict=False)
    same = itertools.takewhile(lambda names: len({*names}) == 1, levels)
    return Scope(tuple(names[0] for names in same)).module


def _dtypes(variables: Sequence[Atom]) -> tuple[str, ...]:
    return tuple(filter(None, map(float_dtype, variables)))


def _run(eqn: Equation) -> tuple[str, ...]:
    if eqn.primitive.name in OURS:
        how = _how(eqn)
        return (eqn.params["run"] if how is None else how.format,)
    return _dtypes([v for v in eqn.invars if not hasattr(v, "val")]) or _dtypes(eqn.outvars)


def _is_cast(eqn: Equation) -> bool:
    """True for a cast from one float dtype to another."""
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = float_dtype(eqn.invars[0]), float_dtype(eqn.outvars[0])
    return bool(old and new and old != new) and not hasattr(eqn.invars[0], "val")


# What only arranges numbers, or says something of a value, is no call of its own.
_SILENT = LAYOUT | {"name", "stop_gradient", "pvary", "optimization_barrier", "iota", "copy"}


def _counts(eqn: Equation) -> bool:
    """True for an equation that computes with floats, or casts them."""
    if _is_cast(eqn):
        return True
    name = eqn.primitive.name
    if name in _SILENT or name in ("convert_element_type", "polymp_fp8_quantise"):
        return False
    return any(float_dtype(v) for v in eqn.invars if not hasattr(v, "val"))
