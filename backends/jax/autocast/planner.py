"""The planner: a table that has a handler for each primitive, and the walk that asks it.

Planning follows dtypes alone: no array is made and JAX is not called. A primitive that is not in
the table runs as it is written, which is always right, and so does everything but the programs
inside, where a region is disabled.
"""

from collections.abc import Mapping

from polymp.backends.jax import compat, jaxprs
from polymp.backends.jax.autocast import (
    contraction_rules,
    control_flow,
    custom_jvp,
    custom_vjp,
    function_calls,
    op_facts,
    op_handlers,
    pass_switches,
    passes,
    sharded_weights,
)
from polymp.backends.jax.autocast.frame import Frame, Handler, PlanCache, Planner
from polymp.backends.jax.autocast.known_functions import FUNCTIONS
from polymp.backends.jax.autocast.plan import Cast, Kind, Plan, Step
from polymp.backends.jax.autocast.regions import AS_CALLED
from polymp.backends.jax.autocast.values import declared
from polymp.rules import decision_log
from polymp.rules.region import Region
from polymp.rules.vocabulary import vocabulary

# By the name of a primitive, what plans an equation of it.
TABLE: Mapping[str, Handler] = {
    **dict.fromkeys(op_facts.FREE, op_handlers.free),
    **dict.fromkeys(op_facts.CONTRACTIONS, op_handlers.contraction),
    **dict.fromkeys(op_facts.INDEPENDENT, op_handlers.independent),
    "convert_element_type": op_handlers.convert,
    "name": op_handlers.name,
    **dict.fromkeys(jaxprs.JITTED, control_flow.plan_jit),
    **dict.fromkeys(jaxprs.REMATTED, control_flow.plan_remat),
    "scan": control_flow.plan_loop,
    "while": control_flow.plan_loop,
    "cond": control_flow.plan_cond,
    "shard_map": control_flow.plan_shard_map,
    "custom_jvp_call": custom_jvp.plan_jvp,
    "custom_vjp_call": custom_vjp.plan_vjp,
    function_calls.SECTION: function_calls.plan_section,
}

# These hold programs, which are planned in disabled regions too: a mark inside may enable one.
_HOLD_PROGRAMS = jaxprs.HOLDERS | {function_calls.SECTION}


def planner(region: Region, kept: PlanCache | None = None) -> Planner:
    """The planner of a program in a region."""
    FUNCTIONS.refresh()
    contraction_rules.register_rules()
    if decision_log.current() is not None:
        kept = None
    # What else plans depend on: jax's configuration, and the ops that are known by now.
    settings = compat.trace_context(), len(vocabulary().registered), len(FUNCTIONS.ops)
    return Planner(_planned, pass_switches.off(), kept, settings)


def _planned(frame: Frame) -> Plan:
    """The plan of a frame's program."""
    env, steps, region, stack = frame.env, frame.steps, frame.region, None
    place = frame.planner.stacks.place
    record = decision_log.current() if region.policy is not AS_CALLED else None
    for eqn in function_calls.sections(frame):
        if eqn.source_info.name_stack is not stack:  # most are that of the one before
            stack = eqn.source_info.name_stack
            here, plain = place(stack, region)
        frame.stack = plain
        name = eqn.primitive.name
        if not here.enabled and name not in _HOLD_PROGRAMS:
            step, outs = frame.as_written(eqn)
        elif name in TABLE:
            step, outs = TABLE[name](frame, eqn, here)
        elif function_calls.is_registered(name):
            step, outs = function_calls.plan_registered(frame, eqn, here)
        else:
            step, outs = op_handlers.unknown(frame, eqn, here)
        if record is not None and name not in jaxprs.HOLDERS:
            step = _followed(step, record, here)
        steps.append(step)
        for var, known in zip(eqn.outvars, outs, strict=True):
            env[var] = known
    passes.improve(frame)
    sharded_weights.round_before(frame)
    return _finished(frame)


def _finished(frame: Frame) -> Plan:
    """The plan, once every equation has a step."""
    atoms = frame.jaxpr.outvars
    wanted = frame.wanted or [None] * len(atoms)
    reads = tuple(map(frame.read, atoms, wanted))
    outs = []
    for atom, want, read in zip(atoms, wanted, reads, strict=True):
        known = frame.known(atom)
        cast = type(read) is Cast
        dtype = want if want and known.dtype else known.dtype
        outs.append(known._replace(dtype=dtype, product=known.product and not cast))
    dtypes = [k.dtype for k in (*frame.inputs, *outs)]
    as_written = (
        dtypes == [*map(declared, compat.binders(frame.closed)[1]), *map(declared, atoms)]
        and all(map(_is_as_written, frame.steps))
        and not any(type(read) is Cast for read in reads)
    )
    return Plan(
        frame.closed,
        frame.consts,
        frame.inputs,
        frame.region,
        frame.steps,
        reads,
        tuple(outs),
        tuple(map(frame.reads.get, compat.binders(frame.closed)[1])),
        as_written,
    )


def _followed(step: Step, record: decision_log.Recorder, region: Region) -> Step:
    """The step, with a name on all that it becomes, if calls are followed."""
    under = region.policy.name if region.enabled and region.policy is not None else ""
    name = record.follow(step, region.dtype if region.enabled else "", under)
    return step if name is None else step._replace(stack=compat.with_scope(step.stack, name))


def _is_as_written(step: Step) -> bool:
    if any(type(o) is Cast for o in step.operands) or step.returns:
        return False
    if step.inside is not None:
        return all(plan.as_written for plan in step.inside.plans)
    if step.kind is Kind.BIND:
        written = all(f == declared(v) for f, v in zip(step.writes, step.eqn.outvars, strict=True))
        return written and (
            step.params is step.eqn.params or step.params.get("update_jaxpr", 0) is None
        )
    return step.kind is Kind.CAST
