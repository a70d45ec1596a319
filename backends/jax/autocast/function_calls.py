"""Calls of functions that a policy knows, each taken as one op, and primitives of users.

A policy has a row for softmax; a trace shows a maximum, a difference, an exponential, a sum and a
quotient. Neighbours that were traced in the same call of a function that the policy rules become
one `FunctionCall`, which has the shape of an equation outside and of a closed jaxpr inside. Its row
says how it runs. Inside it nothing else is asked: what is computed there has one dtype.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import jax
import jax.extend.core as core
from jax.extend.core import Literal

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
    declared,
    fixed,
)
from polymp.backends.jax.autocast.known_functions import FUNCTIONS, op_of
from polymp.backends.jax.autocast.regions import AS_CALLED
from polymp.backends.jax.compat.programs import Atom, Equation, JaxprEqnContext, SourceInfo
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
    decision = frame.decision(op_of(name), hard, region, name)
    if decision.rule is Rule.PARTS:
        return frame.as_written(eqn)
    reads = [(decision.run or k.dtype) if k.dtype else None for k in known]
    writes = compat.dtypes_out(eqn, reads)
    returns = None
    if decision.out is not None:
        returns = tuple(decision.out if f in ELIGIBLE else None for f in writes)
    outs = [ValueFacts(f if f in ELIGIBLE else None) for f in returns or writes]
    return frame.step(eqn, reads, writes, returns=returns), outs


class _Ruled(NamedTuple):
    """The mark by which equations are one function call."""

    op: str  # of the vocabulary
    call: object  # what tells a call of the function in one place from those in others
    region: Region  # that the call is in
    inside: object  # where in the function the equation was traced; None if that tells nothing

    def goes_on(self, first: "_Ruled") -> bool:
        """True if this is of the same call as the first equation of a function call.

        A call in a loop has the same place each time; a new one begins where its first equation
        comes again.
        """
        return self[:3] == first[:3] and (self.inside is None or self.inside != first.inside)


FUNCTION_CALL = "polymp_section"


class FunctionCall:
    """Equations of one op, as one equation and as the program inside it."""

    # By its name a plan tells these from equations.
    primitive: core.Primitive = core.Primitive(FUNCTION_CALL)
    constvars: Sequence[Atom] = ()
    consts: Sequence[object] = ()
    debug_info: core.DebugInfo  # there is none: it was traced from no function of its own

    def __init__(
        self,
        ruled: _Ruled,
        eqns: Sequence[Equation],
        invars: Sequence[Atom],
        outvars: Sequence[Atom],
    ) -> None:
        self.op: str = ruled.op
        self.region: Region = ruled.region
        self.eqns = eqns
        self.invars = invars  # variables that they read from outside
        self.outvars = outvars  # those of theirs that are read outside
        self.params: jax.core.ParamDict = {}
        self.source_info: SourceInfo = eqns[0].source_info
        self.ctx: JaxprEqnContext = eqns[0].ctx
        self.effects: core.Effects = frozenset().union(*(eqn.effects for eqn in eqns))

    @property
    def jaxpr(self) -> "FunctionCall":
        return self


def grouped(frame: Frame) -> Sequence[Equation]:
    """The equations of a frame's program, those of one call as a `FunctionCall`."""
    jaxpr = frame.jaxpr
    eqns = jaxpr.eqns
    keys = [_ruled(frame, eqn) for eqn in eqns]
    if not any(keys):
        return list(eqns)
    groups: list[tuple[_Ruled | None, list[Equation]]] = []
    for eqn, key in zip(eqns, keys, strict=True):
        first = groups[-1][0] if groups else None
        if key is not None and first is not None and key.goes_on(first):
            groups[-1][1].append(eqn)
        else:
            groups.append((key, [eqn]))
    made: list[Equation] = []
    read = {id(v) for v in jaxpr.outvars}  # by equations further down: the walk goes backwards
    for key, group in reversed(groups):
        written = [v for eqn in group for v in eqn.outvars]
        outvars = [v for v in written if id(v) in read]
        own = {id(v) for v in written}
        invars = {
            id(v): v
            for eqn in group
            for v in eqn.invars
            if type(v) is not Literal and id(v) not in own
        }
        made.extend(
            group[::-1]
            if key is None or not outvars
            else [FunctionCall(key, group, list(invars.values()), outvars)]
        )
        read.update(id(v) for eqn in group for v in eqn.invars)
    return made[::-1]


def _ruled(frame: Frame, eqn: Equation) -> _Ruled | None:
    """The function call that an equation belongs to: the outermost function with a row."""
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
            return _Ruled(found.op, found.call, region, found.inside)
    return None


def _rule(op: str, region: Region) -> Rule:
    assert region.policy is not None, "polymp.jax fills in the policy of every region"
    row = region.policy.at(region.scope).winner(op, region.dtype)
    return Rule.PARTS if row is None else row.rule


def plan_function_call(frame: Frame, eqn: FunctionCall, _: Region) -> Planned:
    """Plan a call of a known function by the row of its op."""
    known = [frame.known(atom)._replace(numbers=()) for atom in eqn.invars]
    region = eqn.region
    frame.stack = compat.no_scopes()  # those inside have their own
    floats = [k.dtype for k in known if k.dtype]
    hard, like = floats, None
    if vocabulary().ops[eqn.op].kind in vocabulary().traits["parameters"]:
        pairs = zip(known, eqn.invars, strict=True)
        main = [(k, v.aval.shape) for k, v in pairs if k.dtype and not k.is_parameter]
        hard = [k.dtype for k, _ in main if k.dtype] or floats
        like = {shape for _, shape in main}
    decision = Decision(Rule.PARTS)
    if _rule(eqn.op, region) is not Rule.PARTS:
        decision = frame.decision(eqn.op, tuple(hard), region, "")
    if decision.rule is Rule.LOWER and vocabulary().op(eqn.op).picks:
        decision = Decision(decision.rule, None, decision.run)
    elif decision.rule is Rule.LOWER:
        decision = decision._replace(out=decision.run)
    run = decision.run
    own = vocabulary().ops[eqn.op].rule  # a user's function, whose casts are its own
    inside = replace(
        region,
        policy=AS_CALLED,
        enabled=decision.rule is not Rule.PARTS,
        dtype="float32" if run == "float32" and not own else region.dtype,
    )
    if decision.rule is Rule.PARTS:  # jax has no low form of it
        reads = [declared(atom) for atom in eqn.invars]
    else:
        reads = [(run or k.dtype) if k.dtype else None for k in known]
    met = [k._replace(dtype=f) for k, f in zip(known, reads, strict=True)]
    plan = frame.planner.plan(eqn, met, inside)
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
    if decision.rule is Rule.FP32_KEEP and not eqn.effects:
        finals = tuple(k.dtype for k in outs)
        kept = _Again((plan,), tuple(reads), returns)
        return frame.step(eqn, [None] * len(reads), finals, inside=kept), outs
    inlined = _Inlined((plan,), tuple(reads), returns)
    return frame.step(eqn, reads, writes, returns=returns, inside=inlined), outs


@dataclass(eq=False)
class _Inlined(Inside):
    """A function call that runs where it is."""

    reads: tuple[str | None, ...]  # by operand, the dtype that the plan takes it in
    # Dtype to cast each result to afterwards; None to leave them.
    returns: tuple[str | None, ...] | None

    def emit(self, step: Step, values: Sequence[object]) -> Sequence[object]:
        return run(self.plans[0], values)

    def passed_on(self) -> Sequence[int]:
        outs = range(len(self.plans[0].outs))
        return [i for i in outs if self.returns is None or self.returns[i] is None]

    def rounds(self) -> Mapping[int, str]:
        return {i: dtype for i, dtype in enumerate(self.returns or ()) if dtype is not None}

    def lowered(self, plans: tuple[Plan, ...], lows: Sequence[str | None]) -> Self:
        reads = tuple(low or f for low, f in zip(lows, self.reads, strict=True))
        return replace(self, plans=plans, reads=reads)


class _Again(_Inlined):
    """A function call that returns the dtype of its operands: it saves them as they came alone.

    For backward it is computed again, as a fused kernel would.
    """

    def emit(self, step: Step, values: Sequence[object]) -> Sequence[object]:
        def section(*values: object) -> Sequence[object]:
            pairs = zip(values, self.reads, strict=True)
            outs = run(self.plans[0], [cast(v, f) if f else v for v, f in pairs])
            finals = self.returns or [None] * len(outs)
            return [cast(out, f) if f else out for out, f in zip(outs, finals, strict=True)]

        outs: Sequence[object] = jax.checkpoint(section)(*values)
        return outs
