"""Calls of functions that a policy knows, each taken as one op, and primitives of users.

A policy has a row for softmax; a trace shows a maximum, a difference, an exponential, a sum and a
quotient. Neighbours that were traced in the same call of a function that the policy rules become
one `FunctionCall`, which has the shape of an equation outside and of a closed jaxpr inside. Its row
says how it runs. Inside it nothing else is asked: what is computed there has one dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import jax
import jax.extend.core as core
from jax.extend.core import Literal
from jax.extend.source_info_util import new_name_stack

from polymp.backends.jax import compat
from polymp.backends.jax.autocast.evaluate import cast, run
from polymp.backends.jax.autocast.frame import (
    ELIGIBLE,
    Frame,
    Inside,
    Plan,
    Planned,
    Step,
    ValueFacts,
    decide,
    declared,
    fixed,
    winner,
)
from polymp.backends.jax.autocast.known_functions import FUNCTIONS, Found, op_of
from polymp.backends.jax.autocast.regions import AS_CALLED
from polymp.backends.jax.compat import Atom, Equation, JaxprEqnContext, SourceInfo
from polymp.rules.policy import Decision, Region
from polymp.rules.row import Rule
from polymp.rules.vocabulary import vocabulary


def is_registered(name: str) -> bool:
    """True for a primitive that a user registered."""
    op = vocabulary().ops.get(op_of(name))
    return op is not None and bool(op.rule)


def plan_registered(frame: Frame, eqn: Equation, region: Region) -> Planned:
    """A user's primitive: its own shape rule says what comes out of cast operands."""
    known = [frame.known(atom)._replace(numbers=()) for atom in eqn.invars]
    hard = tuple(k.dtype for k in known if k.dtype)
    if not hard or any(map(fixed, eqn.invars)):
        return frame.as_written(eqn)
    name = eqn.primitive.name
    decision = decide(eqn, op_of(name), hard, region, name)
    if decision.rule is Rule.PARTS:
        return frame.as_written(eqn)
    reads = [(decision.run or k.dtype) if k.dtype else None for k in known]
    writes = compat.dtypes_out(eqn, reads)
    returns = None
    if decision.out is not None:
        returns = tuple(decision.out if f in ELIGIBLE else None for f in writes)
    outs = [ValueFacts(f if f in ELIGIBLE else None) for f in returns or writes]
    return frame.step(eqn, reads, writes, returns=returns), outs


# A call of a known function that an equation was traced in, and the region that it is in.
_Call = tuple[Found, Region]

FUNCTION_CALL = "polymp_section"


@dataclass(eq=False)
class FunctionCall:
    """Equations of one op, as one equation and as the program inside it."""

    op: str
    region: Region
    eqns: Sequence[Equation]
    invars: Sequence[Atom]  # variables that they read from outside
    outvars: Sequence[Atom]  # those of theirs that are read outside
    debug_info: core.DebugInfo = field(init=False)  # of a function of its own: there is none

    # By its name a plan tells these from equations.
    primitive = core.Primitive(FUNCTION_CALL)
    constvars = consts = ()
    params: jax.core.ParamDict = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.source_info: SourceInfo = self.eqns[0].source_info
        self.ctx: JaxprEqnContext = self.eqns[0].ctx
        self.effects: core.Effects = frozenset().union(*(eqn.effects for eqn in self.eqns))

    @property
    def jaxpr(self) -> "FunctionCall":
        return self


def grouped(frame: Frame) -> Sequence[Equation]:
    """The equations of a frame's program, those of one call as a `FunctionCall`."""
    jaxpr = frame.jaxpr
    calls = [_call_of(frame, eqn) for eqn in jaxpr.eqns]
    if not any(calls):
        return list(jaxpr.eqns)
    groups: list[tuple[_Call | None, list[Equation]]] = []
    for eqn, call in zip(jaxpr.eqns, calls, strict=True):
        first = groups[-1][0] if groups else None
        if call is not None and first is not None and _goes_on(call, first):
            groups[-1][1].append(eqn)
        else:
            groups.append((call, [eqn]))
    made: list[Equation] = []
    read = {*variables(jaxpr.outvars)}  # by equations further down: the walk goes backwards
    for call, group in reversed(groups):
        written = {v for eqn in group for v in eqn.outvars}
        taken = dict.fromkeys(v for eqn in group for v in variables(eqn.invars))
        outvars = [v for eqn in group for v in eqn.outvars if v in read]
        if call is None or not outvars:
            made.extend(group[::-1])
        else:
            found, region = call
            invars = [v for v in taken if v not in written]
            made.append(FunctionCall(found.op, region, group, invars, outvars))
        read.update(taken)
    return made[::-1]


def variables(atoms: Sequence[Atom]) -> list[Atom]:
    """Those of a program's atoms that are no numbers."""
    return [atom for atom in atoms if type(atom) is not Literal]


def _goes_on(call: _Call, first: _Call) -> bool:
    """True for an equation of the same call as the first equation of a function call."""
    # A call in a loop has the same place each time; a new one begins where its first equation comes
    # again.
    (one, region), (other, around) = call, first
    same = (one.op, one.call, region) == (other.op, other.call, around)
    return same and (one.inside is None or one.inside != other.inside)


def _call_of(frame: Frame, eqn: Equation) -> _Call | None:
    """The function call that an equation belongs to, of the outermost function with a row."""
    if frame.region.policy is AS_CALLED:
        return None
    words, region = vocabulary(), None
    for found in FUNCTIONS.of(eqn):
        if region is None:
            region, _ = frame.planner.stacks.place(eqn.source_info.name_stack, frame.region)
        if not region.enabled:
            return None
        kind, rule = words.ops[found.op].kind, _rule(found.op, region)
        if rule in (Rule.LOWER, Rule.FP8) and kind in words.traits["products"]:
            continue
        if rule is not Rule.PARTS or kind in words.traits["wide"]:
            return found, region
    return None


def _rule(op: str, region: Region) -> Rule:
    row = winner(op, region)
    return Rule.PARTS if row is None else row.rule


def plan_function_call(frame: Frame, eqn: FunctionCall, _: Region) -> Planned:
    """Plan a call of a known function by the row of its op."""
    known = [frame.known(atom)._replace(numbers=()) for atom in eqn.invars]
    region = eqn.region
    frame.stack = new_name_stack()  # those inside have their own
    floats = [k.dtype for k in known if k.dtype]
    hard, like = floats, None
    if vocabulary().ops[eqn.op].kind in vocabulary().traits["parameters"]:
        pairs = zip(known, eqn.invars, strict=True)
        main = [(k, v.aval.shape) for k, v in pairs if k.dtype and not k.is_parameter]
        hard = [k.dtype for k, _ in main if k.dtype] or floats
        like = {shape for _, shape in main}
    decision = Decision(Rule.PARTS)
    if _rule(eqn.op, region) is not Rule.PARTS:
        decision = decide(eqn, eqn.op, tuple(hard), region)
    if decision.rule is Rule.LOWER and vocabulary().op(eqn.op).picks:
        decision = Decision(decision.rule, None, decision.run)
    elif decision.rule is Rule.LOWER:
        decision = decision._replace(out=decision.run)
    run = decision.run
    own = vocabulary().ops[eqn.op].rule  # a user's function, whose casts are its own
    own_region = _within(
        region,
        decision.rule is not Rule.PARTS,
        "float32" if run == "float32" and not own else region.dtype,
    )
    if decision.rule is Rule.PARTS:  # jax has no low form of it
        reads = [declared(atom) for atom in eqn.invars]
    else:
        reads = [(run or k.dtype) if k.dtype else None for k in known]
    met = [k._replace(dtype=f) for k, f in zip(known, reads, strict=True)]
    plan = frame.planner.plan(eqn, met, own_region)
    writes = tuple(k.dtype for k in plan.outs)
    outs = [k._replace(numbers=()) for k in plan.outs]
    returns = None
    if decision.out is not None and writes != (decision.out,) * len(writes):
        # Of a normalisation that is the result, not the statistics that it keeps; and not what
        # the caller asked for in float32, by a dtype argument.
        low = not any(declared(atom) == "float32" for atom in eqn.invars)
        returns = tuple(
            decision.out
            if f
            and (like is None or v.aval.shape in like)
            and not (low and declared(v) == "float32")
            else None
            for f, v in zip(writes, eqn.outvars, strict=True)
        )
        outs = [k._replace(dtype=f) if f else k for k, f in zip(outs, returns, strict=True)]
    again = decision.rule is Rule.FP32_KEEP and not eqn.effects
    if again:
        reads = [None] * len(reads)
    inside = Inside((plan,), _computed_again if again else _inlined)
    return frame.step(eqn, reads, writes, returns=returns, inside=inside), outs


@lru_cache(256)
def _within(region: Region, enabled: bool, dtype: str) -> Region:
    """The region inside a call: one object, by which plans of equal ops are found again."""
    return replace(region, policy=AS_CALLED, enabled=enabled, dtype=dtype)


def _inlined(plans: Sequence[Plan], _: Step, values: Sequence[object]) -> Sequence[object]:
    """The results of a function call that runs where it is."""
    return run(plans[0], values)


def _computed_again(
    plans: Sequence[Plan], step: Step, values: Sequence[object]
) -> Sequence[object]:
    """Those of one that returns the dtype of its operands: it saves them as they came alone."""
    # For backward it is computed again, as a fused kernel would.
    (plan,) = plans

    def section(*values: object) -> Sequence[object]:
        pairs = zip(values, plan.known, strict=True)
        outs = run(plan, [cast(v, k.dtype) if k.dtype else v for v, k in pairs])
        finals = step.returns or [None] * len(outs)
        return [cast(out, f) if f else out for out, f in zip(outs, finals, strict=True)]

    outs: Sequence[object] = jax.checkpoint(section)(*values)
    return outs
