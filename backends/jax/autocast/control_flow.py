"""Programs inside programs: how each control primitive is planned, and how it is put back.

The plan of a body says in which formats it takes its inputs and hands on its outputs; the primitive
is then bound again with the rewritten body and everything else as it was. Consistency:

    scan, while   a carry has one format for the whole loop: the widest of what goes in and what
                  comes round, so never narrower than its start
    cond, switch  an output has the widest format of all branches
    jit, remat, shard_map   outputs have the formats they come out in
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from polymp.backends.jax import compat
from polymp.backends.jax.autocast import (
    contraction_rules,
    custom_derivatives,
    function_calls,
    passes,
    regions,
)
from polymp.backends.jax.autocast.evaluate import bind, closed, run
from polymp.backends.jax.autocast.known_functions import FUNCTIONS
from polymp.backends.jax.autocast.plan import Kept, Plan, Planner, Step
from polymp.backends.jax.autocast.planner import Handler, Planned, Program
from polymp.backends.jax.autocast.sections import SECTION
from polymp.backends.jax.autocast.values import Known, Origin, fits
from polymp.dtypes import widest
from polymp.rules import decisions
from polymp.rules.region import Region
from polymp.rules.vocabulary import vocabulary


def _knowns(program: Program, atoms: Iterable[Any]) -> list[Known]:
    return [program.known(atom) for atom in atoms]


# jit: a call


def _plan_jit(program: Program, eqn: Any, region: Region) -> Planned:
    inner = eqn.params["jaxpr"]
    known = _knowns(program, eqn.invars)
    if not compat.only_arrays(inner):
        return _as_written(program, eqn)
    plan = program.planner.plan(inner, known, region)
    writes = [k.format for k in plan.outs]
    return program.step(eqn, [None] * len(known), writes, _rebound, parts=(plan,)), list(plan.outs)


def _rebound(step: Step, values: Sequence[Any]) -> Sequence[Any]:
    (plan,) = step.parts
    return bind(step, values, jaxpr=closed(plan))


# remat: a call whose body is computed again


def _plan_remat(program: Program, eqn: Any, region: Region) -> Planned:
    inner = compat.close(eqn.params["jaxpr"])
    known = _knowns(program, eqn.invars)
    plan = program.planner.plan(inner, known, region)
    writes = [k.format for k in plan.outs]
    return program.step(eqn, [None] * len(known), writes, _remat, parts=(plan,)), list(plan.outs)


def _remat(step: Step, values: Sequence[Any]) -> Sequence[Any]:
    (plan,) = step.parts
    if plan.as_written:
        return bind(step, values)
    jaxpr, consts = compat.lifted(closed(plan))
    return bind(step, [*consts, *values], jaxpr=jaxpr)


# scan and while: loops


def _plan_scan(program: Program, eqn: Any, region: Region) -> Planned:
    inner = eqn.params["jaxpr"]
    known = _knowns(program, eqn.invars)
    if not compat.only_arrays(inner):
        return _as_written(program, eqn)
    num_consts, num_carry = compat.scan_sizes(eqn.params)
    first = num_consts + num_carry
    consts, init, xs = known[:num_consts], known[num_consts:first], known[first:]
    slices = [k._replace(product=False) for k in xs]
    carry = [k.format for k in init]

    def body(results: Sequence[str | None] | None) -> Plan:
        state = [Known(f) for f in carry]
        return program.planner.plan(inner, [*consts, *state, *slices], region, results)

    while (wider := _join(carry, body(None).outs[:num_carry])) != carry:
        carry = wider
    num_ys = len(eqn.outvars) - num_carry
    plan = body([*carry, *[None] * num_ys])
    reads = [*[None] * num_consts, *carry, *[None] * len(xs)]
    outs = [Known(k.format) for k in plan.outs]
    return program.step(eqn, reads, [k.format for k in outs], _rebound, parts=(plan,)), outs


def _join(carry: Sequence[str | None], outs: Iterable[Known]) -> list[str | None]:
    return [
        widest((have, out.format)) if have and out.format else have
        for have, out in zip(carry, outs, strict=True)
    ]


def _plan_while(program: Program, eqn: Any, region: Region) -> Planned:
    params = eqn.params
    known = _knowns(program, eqn.invars)
    inner, test = params["body_jaxpr"], params["cond_jaxpr"]
    if not compat.only_arrays(inner) or not compat.only_arrays(test):
        return _as_written(program, eqn)
    of_test = params["cond_nconsts"]
    first = of_test + params["body_nconsts"]
    test_consts, consts, init = known[:of_test], known[of_test:first], known[first:]
    carry = [k.format for k in init]

    def body(results: Sequence[str | None] | None) -> Plan:
        state = [Known(f) for f in carry]
        return program.planner.plan(inner, [*consts, *state], region, results)

    while (wider := _join(carry, body(None).outs)) != carry:
        carry = wider
    outs = [Known(f) for f in carry]
    plans = body(carry), program.planner.plan(test, [*test_consts, *outs], region)
    reads = [*[None] * first, *carry]
    return program.step(eqn, reads, carry, _while, parts=plans), outs


def _while(step: Step, values: Sequence[Any]) -> Sequence[Any]:
    body, test = step.parts
    return bind(step, values, body_jaxpr=closed(body), cond_jaxpr=closed(test))


# cond: branches


def _plan_cond(program: Program, eqn: Any, region: Region) -> Planned:
    branches = eqn.params["branches"]
    known = _knowns(program, eqn.invars[1:])
    if not all(map(compat.only_arrays, branches)):
        return _as_written(program, eqn)
    planner = program.planner
    free = [planner.plan(branch, known, region) for branch in branches]
    formats = [_meet(outs) for outs in zip(*(plan.outs for plan in free), strict=True)]
    plans = tuple(planner.plan(branch, known, region, formats) for branch in branches)
    outs = [Known(f) for f in formats]
    return program.step(eqn, [None] * len(eqn.invars), formats, _cond, parts=plans), outs


def _meet(outs: Sequence[Known]) -> str | None:
    """The format of an output that comes from several branches; numbers take that of the others."""
    hard = [k for k in outs if k.origin not in (Origin.LITERAL, Origin.MASK)] or outs
    formats = [k.format for k in hard if k.format]
    if not formats:
        return None
    format = widest(formats)
    numbers = [k.number for k in outs if k.number is not None]
    return format if all(fits(number, format) for number in numbers) else "float32"


def _cond(step: Step, values: Sequence[Any]) -> Sequence[Any]:
    return bind(step, values, branches=tuple(map(closed, step.parts)))


# shard_map: one program on many devices


def _plan_shard_map(program: Program, eqn: Any, region: Region) -> Planned:
    inner = compat.close(eqn.params["jaxpr"])
    known = [k._replace(number=None) for k in _knowns(program, eqn.invars)]
    plan = program.planner.plan(inner, known, region)
    outs = [Known(k.format, product=k.product) for k in plan.outs]
    writes = [k.format for k in outs]
    return program.step(eqn, [None] * len(known), writes, _shard_map, parts=(plan,)), outs


def _shard_map(step: Step, values: Sequence[Any]) -> Sequence[Any]:
    (plan,) = step.parts
    params = step.params
    if plan.as_written:
        return bind(step, values)
    mapped: Any = jax.shard_map(
        lambda *args: tuple(run(plan, args)),
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=params["out_specs"],
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )
    outs: Sequence[Any] = mapped(*values)
    return outs


def _as_written(program: Program, eqn: Any) -> Planned:
    """For a body that takes references or tokens, whose types no cast can follow."""
    program.planner.warn(
        eqn.primitive.name,
        "polymp.jax.autocast leaves this {!r} as it is written: its body takes references or "
        "tokens, whose types no cast can follow.",
    )
    return program.as_written(eqn)


CONTROL: dict[str, Handler] = {
    "jit": _plan_jit,
    "pjit": _plan_jit,
    "checkpoint": _plan_remat,
    "remat": _plan_remat,
    "remat2": _plan_remat,
    "scan": _plan_scan,
    "while": _plan_while,
    "cond": _plan_cond,
    "shard_map": _plan_shard_map,
    "custom_jvp_call": custom_derivatives.plan_jvp,
    "custom_vjp_call": custom_derivatives.plan_vjp,
    SECTION: function_calls.plan_section,
}


def planner(region: Region, kept: Kept | None = None) -> Planner:
    """A planner that knows every control primitive above, for a program in a region.

    Args:
        region: that holds in the program.
        kept: plans of earlier calls. A record wants every decision made anew, and leaves them out.
    """
    FUNCTIONS.refresh()
    contraction_rules.register_rules()
    colours = region.promotion == "weak" or regions.any_weak()
    if decisions.current() is not None:
        kept = None
    # What else plans depend on: jax's configuration, and the ops that are known by now.
    settings = compat.trace_context(), len(vocabulary().registered), len(FUNCTIONS.ops)
    return Planner(
        lambda *args: Program(args[0], CONTROL, *args[1:]).plan(),
        passes.off(),
        colours,
        kept,
        settings,
    )
