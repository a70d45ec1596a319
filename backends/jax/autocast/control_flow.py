"""Programs inside programs: how each control primitive is planned, and how it is put back.

The plan of a body says in which dtypes it takes its inputs and hands on its outputs; the primitive
is then bound again with the rewritten body and everything else as it was. Consistency:

    scan, while   a carry has one dtype for the whole loop: the widest of what goes in and what
                  comes round, so never narrower than its start
    cond, switch  an output has the widest dtype of all branches
    jit, remat, shard_map   outputs have the dtypes they come out in
"""

from collections.abc import Callable, Sequence

import jax

from polymp.backends.jax import compat
from polymp.backends.jax.autocast.evaluate import bind, closed, run
from polymp.backends.jax.autocast.frame import Frame, Inside, Plan, Planned, Step, ValueFacts, fits
from polymp.backends.jax.compat.programs import ClosedProgram, Equation
from polymp.backends.jax.jaxprs import fixed_point, inside, with_programs
from polymp.dtypes import widest
from polymp.rules.region import Region


class _Rebound(Inside):
    """A primitive that holds closed programs: it gets the rewritten ones."""

    def emit(self, step: Step, values: Sequence[object]) -> Sequence[object]:
        return bind(step, values, **with_programs(step.eqn, list(map(closed, self.plans))))


# jit and remat: a call, and one whose body is computed again


def plan_jit(frame: Frame, eqn: Equation, region: Region) -> Planned:
    """A jitted function."""
    program = eqn.params["jaxpr"]
    if not compat.only_arrays(program):
        return _as_written(frame, eqn)
    return _called(frame, eqn, program, region, _Rebound)


def plan_remat(frame: Frame, eqn: Equation, region: Region) -> Planned:
    """A function whose values are computed again for its derivative."""
    return _called(frame, eqn, compat.close(eqn.params["jaxpr"]), region, _Remat)


def _called(
    frame: Frame, eqn: Equation, program: ClosedProgram, region: Region, kind: type[Inside]
) -> Planned:
    plan = frame.planner.plan(program, map(frame.known, eqn.invars), region, keep=True)
    outs = list(plan.outs)
    frame.casts |= "float32" in plan.reads
    reads, writes = [None] * len(eqn.invars), [k.dtype for k in outs]
    return frame.step(eqn, reads, writes, inside=kind((plan,))), outs


class _Remat(Inside):
    def emit(self, step: Step, values: Sequence[object]) -> Sequence[object]:
        (plan,) = self.plans
        if plan.as_written:
            return bind(step, values)
        jaxpr, consts = compat.lifted(closed(plan))
        return bind(step, [*consts, *values], jaxpr=jaxpr)


# scan and while: loops


def plan_loop(frame: Frame, eqn: Equation, region: Region) -> Planned:
    """A scan or a while loop."""
    body, *tests = programs = inside(eqn)
    if not all(compat.only_arrays(program.closed) for program in programs):
        return _as_written(frame, eqn)
    known = list(map(frame.known, eqn.invars))
    fixed, start, over = body.split(known)
    rows = [k._replace(product=False) for k in over]

    def planned(carry: Sequence[str | None], results: Sequence[str | None] | None = None) -> Plan:
        given = [*fixed, *map(ValueFacts, carry), *rows]
        return frame.planner.plan(body.closed, given, region, results, keep=True)

    def turn(carry: list[str | None]) -> list[str | None]:
        return [k.dtype for k in planned(carry).outs]

    carry = fixed_point([k.dtype for k in start], turn, _join)
    plan = planned(carry, [*carry, *[None] * (len(eqn.outvars) - len(carry))])
    outs = [ValueFacts(k.dtype) for k in plan.outs]
    reads: list[str | None] = [None] * len(known)
    for at, dtype in zip(body.carried, carry, strict=True):
        reads[at], known[at] = dtype, ValueFacts(dtype)
    tested = (frame.planner.plan(t.closed, t.of(known), region, keep=True) for t in tests)
    plans = [plan, *tested]
    step = frame.step(eqn, reads, [k.dtype for k in outs], inside=_Rebound(tuple(plans)))
    return step, outs


def _join(have: str | None, out: str | None) -> str | None:
    return widest((have, out)) if have and out else have


# cond: branches


def plan_cond(frame: Frame, eqn: Equation, region: Region) -> Planned:
    """A choice between programs."""
    known = list(map(frame.known, eqn.invars))
    branches = [(branch.closed, branch.of(known), region) for branch in inside(eqn)]
    if not all(compat.only_arrays(branch) for branch, _, _ in branches):
        return _as_written(frame, eqn)
    free = [frame.planner.plan(*branch, keep=True) for branch in branches]
    dtypes = [_meet(outs) for outs in zip(*(plan.outs for plan in free), strict=True)]
    plans = tuple(frame.planner.plan(*branch, dtypes, keep=True) for branch in branches)
    outs = [ValueFacts(f) for f in dtypes]
    return frame.step(eqn, [None] * len(known), dtypes, inside=_Rebound(plans)), outs


def _meet(outs: Sequence[ValueFacts]) -> str | None:
    """The dtype of an output that comes from several branches; numbers take that of the others."""
    hard = [k for k in outs if not k.is_chosen] or outs
    dtypes = [k.dtype for k in hard if k.dtype]
    if not dtypes:
        return None
    dtype = widest(dtypes)
    return dtype if all(fits(n, dtype) for k in outs for n in k.numbers) else "float32"


# shard_map: one program on many devices


def plan_shard_map(frame: Frame, eqn: Equation, region: Region) -> Planned:
    """A program on many devices."""
    (program,) = inside(eqn)
    known = [frame.known(atom)._replace(numbers=()) for atom in eqn.invars]
    plan = frame.planner.plan(program.closed, known, region, keep=True)
    outs = [ValueFacts(k.dtype, product=k.product) for k in plan.outs]
    reads, writes = [None] * len(known), [k.dtype for k in outs]
    return frame.step(eqn, reads, writes, inside=_Mapped((plan,))), outs


class _Mapped(Inside):
    def emit(self, step: Step, values: Sequence[object]) -> Sequence[object]:
        (plan,) = self.plans
        params = step.params
        if plan.as_written:
            return bind(step, values)
        mapped: Callable[..., Sequence[object]] = jax.shard_map(
            lambda *args: tuple(run(plan, args)),
            mesh=params["mesh"],
            in_specs=params["in_specs"],
            out_specs=params["out_specs"],
            axis_names=params["newly_manual_axes"],
            check_vma=params["check_vma"],
        )
        return mapped(*values)


def _as_written(frame: Frame, eqn: Equation) -> Planned:
    """For a body that takes references or tokens, whose types no cast can follow."""
    frame.planner.warn(
        eqn.primitive.name,
        "polymp.jax.autocast leaves this {!r} as it is written: its body takes references or "
        "tokens, whose types no cast can follow.",
    )
    return frame.as_written(eqn)
