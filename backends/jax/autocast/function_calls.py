"""Calls of functions that a policy knows, and primitives that users registered.

`ruled` says which section an equation belongs to, `plan_section` by which row a section runs.
Inside it nothing else is asked: what is computed there has one format.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from polymp.backends.jax import compat
from polymp.backends.jax.autocast import op_facts
from polymp.backends.jax.autocast.evaluate import cast, run
from polymp.backends.jax.autocast.known_functions import FUNCTIONS, op_of
from polymp.backends.jax.autocast.plan import AS_CALLED, Step
from polymp.backends.jax.autocast.sections import Ruled, Section
from polymp.backends.jax.autocast.values import ELIGIBLE, LOW, Known, declared, fixed
from polymp.rules.policy import Decision
from polymp.rules.region import Region
from polymp.rules.row import Rule
from polymp.rules.vocabulary import vocabulary

if TYPE_CHECKING:
    from polymp.backends.jax.autocast.planner import Planned, Program


def is_registered(name: str) -> bool:
    """True for a primitive that a user registered."""
    op = vocabulary().ops.get(op_of(name))
    return op is not None and bool(op.rule)


def plan_registered(program: "Program", eqn: Any, region: Region) -> "Planned":
    """A user's primitive: its own shape rule says what comes out of cast operands."""
    known = [program.known(atom)._replace(number=None) for atom in eqn.invars]
    hard = tuple(k.format for k in known if k.format)
    if not hard or any(map(fixed, eqn.invars)):
        return program.as_written(eqn)
    name = eqn.primitive.name
    decision = program.decision(op_of(name), hard, region, name)
    if decision.rule is Rule.PARTS:
        return program.as_written(eqn)
    reads = [(decision.run or k.format) if k.format else None for k in known]
    writes = compat.formats_out(eqn, reads)
    returns = None
    if decision.out is not None:
        returns = tuple(decision.out if f in ELIGIBLE else None for f in writes)
    outs = [Known(f if f in ELIGIBLE else None) for f in returns or writes]
    return program.step(eqn, reads, writes, returns=returns), outs


def ruled(program: "Program", eqn: Any) -> Ruled | None:
    """The section that an equation belongs to: the outermost function that a row speaks of."""
    if program.region.policy is AS_CALLED:
        return None
    region = None
    for found in FUNCTIONS.of(eqn):
        if region is None:
            region, _ = program.planner.place(eqn.source_info.name_stack, program.region)
        if not region.enabled:
            return None
        kind, rule = vocabulary().ops[found.op].kind, _rule(found.op, region)
        if rule is Rule.LOWER and kind in op_facts.WITH_PRODUCTS:
            continue
        if rule is not Rule.PARTS or kind in op_facts.AS_WRITTEN:
            return Ruled(found.op, found.call, region, found.inside)
    return None


def _rule(op: str, region: Region) -> Rule:
    assert region.policy is not None, "polymp.jax fills in the policy of every region"
    row = region.policy.at(region.scope).winner(op, region.format)
    if row is None:
        return Rule.PARTS
    if row.of in ("all", "default") and row.rule in (Rule.LOWER, Rule.WIDEST):
        if vocabulary().ops[op].kind in op_facts.AS_WRITTEN:  # they mean the ops that can
            return Rule.PARTS
    return row.rule


def plan_section(program: "Program", section: Section, _: Region) -> "Planned":
    """Plan a call of a known function by the row of its op."""
    known = [program.known(atom)._replace(number=None) for atom in section.invars]
    region = section.region
    program.stack = compat.no_scopes()  # those inside have their own
    floats = [k.format for k in known if k.format]
    hard, like = floats, None
    if vocabulary().ops[section.op].kind in op_facts.WITH_PARAMETERS:
        pairs = zip(known, section.invars, strict=True)
        main = [(k, v.aval.shape) for k, v in pairs if k.format and not k.is_parameter]
        hard = [k.format for k, _ in main if k.format] or floats
        like = {shape for _, shape in main}
    decision = Decision(Rule.PARTS)
    if _rule(section.op, region) is not Rule.PARTS:
        decision = program.decision(section.op, tuple(hard), region, "")
    if decision.rule is Rule.LOWER and section.op in op_facts.PICKS:
        decision = Decision(decision.rule, None, decision.run)
    elif decision.rule is Rule.LOWER:
        decision = decision._replace(out=decision.run)
    run = decision.run
    own = vocabulary().ops[section.op].rule  # a user's function, whose casts are its own
    inside = replace(
        region,
        policy=AS_CALLED,
        enabled=decision.rule is not Rule.PARTS,
        format="float32" if run == "float32" and not own else region.format,
    )
    if decision.rule is Rule.PARTS:  # jax has no low form of it
        reads = [declared(atom) for atom in section.invars]
    else:
        reads = [(run or k.format) if k.format else None for k in known]
    met = [k._replace(format=f, weak=False) for k, f in zip(known, reads, strict=True)]
    plan = program.planner.plan(section, met, inside)
    writes = tuple(k.format for k in plan.outs)
    outs = [k._replace(number=None, weak=False) for k in plan.outs]
    returns = None
    if decision.out is not None and writes != (decision.out,) * len(writes):
        # Of a normalisation that is the result, not the statistics that it keeps; and not what
        # the caller asked for in float32, by a dtype argument.
        low = not any(declared(atom) == "float32" for atom in section.invars)
        returns = tuple(
            decision.out
            if f
            and (like is None or v.aval.shape in like)
            and not (low and declared(v) == "float32")
            else None
            for f, v in zip(writes, section.outvars, strict=True)
        )
        outs = [k._replace(format=f) if f else k for k, f in zip(outs, returns, strict=True)]
    parts = plan, tuple(reads), returns
    keep = decision.rule is Rule.FP32_KEEP
    if keep and decision.out in LOW and not any(eqn.effects for eqn in section.eqns):
        finals = tuple(k.format for k in outs)
        return program.step(section, [None] * len(reads), finals, _again, parts=parts), outs
    return program.step(section, reads, writes, _inlined, None, returns, parts), outs


def _inlined(step: Step, values: Sequence[Any]) -> Sequence[Any]:
    """A section runs where it is."""
    plan, _, _ = step.parts
    return run(plan, values)


def _again(step: Step, values: Sequence[Any]) -> Sequence[Any]:
    """A section that returns a low format: its operands are saved as they came, nothing wider.

    For backward it is computed again, as a fused kernel would.
    """
    plan, reads, returns = step.parts

    def section(*values: Any) -> Sequence[Any]:
        outs = run(plan, [cast(v, f) if f else v for v, f in zip(values, reads, strict=True)])
        finals = returns or [None] * len(outs)
        return [cast(out, f) if f else out for out, f in zip(outs, finals, strict=True)]

    outs: Sequence[Any] = jax.checkpoint(section)(*values)
    return outs
