"""The plan of a program: a table that has a handler for each primitive, and the walk that asks it.

Planning follows dtypes alone: no array is made and JAX is not called. A primitive that is not in
the table runs as it is written, which is always right, and so does everything but the programs
inside, where a region is disabled.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeGuard

import jax.extend.core as core

from polymp.backends.jax import compat, jaxprs
from polymp.backends.jax.autocast import (
    control_flow,
    function_calls,
    known_functions,
    op_handlers,
)
from polymp.backends.jax.autocast.frame import (
    LOW_DTYPES,
    Cast,
    Frame,
    Handler,
    Inside,
    Kind,
    Operand,
    Plan,
    Step,
    ValueFacts,
    declared,
)
from polymp.backends.jax.autocast.regions import AS_CALLED
from polymp.backends.jax.compat import Atom
from polymp.backends.jax.jaxprs import JITTED
from polymp.rules import decision_log
from polymp.rules.policy import Region

# By the name of a primitive, what plans an equation of it.
TABLE: Mapping[str, Handler] = {
    **dict.fromkeys(known_functions.FREE, op_handlers.free),
    **dict.fromkeys(known_functions.CONTRACTIONS, op_handlers.contraction),
    **dict.fromkeys(known_functions.INDEPENDENT, op_handlers.independent),
    "convert_element_type": op_handlers.convert,
    "name": op_handlers.name,
    **dict.fromkeys(jaxprs.JITTED, control_flow.plan_call),
    **dict.fromkeys(jaxprs.REMATTED, partial(control_flow.plan_call, emit=control_flow.remat)),
    "scan": control_flow.plan_loop,
    "while": control_flow.plan_loop,
    "cond": control_flow.plan_cond,
    "shard_map": control_flow.plan_apart,
    "custom_jvp_call": partial(control_flow.plan_apart, rules=control_flow.Forward),
    "custom_vjp_call": partial(control_flow.plan_apart, rules=control_flow.Reverse),
    function_calls.FUNCTION_CALL: function_calls.plan_function_call,
}

# These hold programs, which are planned in disabled regions too: a mark inside may enable one.
_HOLD_PROGRAMS = jaxprs.HOLDERS | {function_calls.FUNCTION_CALL}


_OTHER_TYPES = (
    "polymp.jax.autocast leaves this {!r} as it is written: its body takes references or tokens, "
    "whose types no cast can follow."
)


def planned(frame: Frame) -> Plan:
    """The plan of a frame's program."""
    env, steps, region, stack = frame.env, frame.steps, frame.region, None
    place = frame.planner.stacks.place
    record = decision_log.current() if region.policy is not AS_CALLED else None
    for eqn in function_calls.grouped(frame):
        if eqn.source_info.name_stack is not stack:  # most are that of the one before
            stack = eqn.source_info.name_stack
            here, plain = place(stack, region)
        frame.stack = plain
        name = eqn.primitive.name
        if not here.enabled and name not in _HOLD_PROGRAMS:
            step, outs = frame.as_written(eqn)
        elif name in jaxprs.HOLDERS and not all(
            compat.only_arrays(one.closed) for one in jaxprs.inside(eqn)
        ):
            frame.planner.warn(name, _OTHER_TYPES)
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
        env.update(zip(eqn.outvars, outs, strict=True))
    if frame.casts:
        _CastPuller(frame).run()
    return _finished(frame)


def _finished(frame: Frame) -> Plan:
    """The plan, once every equation has a step."""
    atoms = frame.jaxpr.outvars
    results = frame.results or [None] * len(atoms)
    reads = tuple(map(frame.read, atoms, results))
    outs = []
    for atom, result, read in zip(atoms, results, reads, strict=True):
        known = frame.known(atom)
        cast = type(read) is Cast
        dtype = result if result and known.dtype else known.dtype
        outs.append(known._replace(dtype=dtype, product=known.product and not cast))
    dtypes = [k.dtype for k in (*frame.inputs, *outs)]
    as_written = (
        dtypes == [*map(declared, compat.binders(frame.closed)[1]), *map(declared, atoms)]
        and all(map(_is_as_written, frame.steps))
        and not any(type(read) is Cast for read in reads)
    )
    return Plan(
        frame.closed,
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
        return written and step.params is step.eqn.params
    return step.kind is Kind.CAST


# These are computed in float32 at no more cost: single results, made element by element or chosen.
WIDENED = known_functions.ELEMENTWISE | {
    "broadcast_in_dim", "concatenate", "copy", "pad", "reduce_max", "reduce_min",
    "reshape", "squeeze", "stop_gradient", "transpose",
}  # fmt: skip

_MIXED = "mixed"


class _CastPuller:
    """Pulls casts up, last step first: low values read in float32 alone are computed in it."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        # In which dtype the steps seen so far read a variable; `_MIXED` for several.
        self.dtypes: dict[Atom, str | None] = {}
        self.moved: set[Atom] = set()  # values that have another dtype than they were planned in

    def run(self) -> None:
        frame, steps, env = self.frame, self.frame.steps, self.frame.env
        atoms = frame.jaxpr.outvars
        for atom, want in zip(atoms, frame.results or [None] * len(atoms), strict=True):
            if type(atom) is not core.Literal:
                have = env[atom].dtype
                self.reads(atom, want if want and have else have)
        for at in range(len(steps) - 1, -1, -1):
            step = steps[at]
            if step.eqn.primitive.name in JITTED and step.inside is not None:
                step = steps[at] = self.through(step, step.inside)
            elif self.widens(step):
                step = steps[at] = self.widened(step)
            follows = _compares(step)
            for operand in step.operands:
                if type(operand) is Cast:
                    if operand.value is None:
                        self.reads(operand.atom, operand.dtype)
                elif type(operand) is not core.Literal:
                    have = env[operand].dtype
                    if not (follows and have in LOW_DTYPES):
                        self.reads(operand, have)
        if self.moved:  # what was read with a cast may now come in that dtype already
            frame.steps = list(map(self.settled, steps))
        frame.reads = self.dtypes

    def reads(self, var: Atom, dtype: str | None) -> None:
        if self.dtypes.setdefault(var, dtype) != dtype:
            self.dtypes[var] = _MIXED

    def widens(self, step: Step) -> bool:
        if len(step.eqn.outvars) != 1:
            return False
        (var,), have = step.eqn.outvars, (step.returns or step.writes)[0]
        if have not in LOW_DTYPES or not self.dtypes.get(var) == declared(var) == "float32":
            return False
        if step.kind is Kind.CONTRACT:
            return self.frame.gradients
        return step.kind is Kind.BIND and step.eqn.primitive.name in WIDENED

    def widened(self, step: Step) -> Step:
        """The step with its result, and what it reads of floats, in float32."""
        frame, eqn = self.frame, step.eqn
        (var,) = eqn.outvars
        frame.env[var] = frame.env[var]._replace(dtype="float32", product=False)
        self.moved.add(var)
        if step.spec is not None:
            spec = step.spec._replace(out="float32")
            return step._replace(writes=("float32",), returns=None, spec=spec)
        reads = ["float32" if frame.known(atom).dtype else None for atom in eqn.invars]
        frame.stack = step.stack
        return frame.step(eqn, reads, ("float32",), params=step.params)

    def through(self, step: Step, inside: Inside) -> Step:
        """A call of a jitted function, planned as if its equations stood here."""
        frame, eqn, (plan,) = self.frame, step.eqn, inside.plans
        outs = _widened(eqn.outvars, plan.outs, [self.dtypes.get(var) for var in eqn.outvars])
        known, results = plan.known, [k.dtype for k in outs]
        while True:
            if results != [k.dtype for k in plan.outs] or known != plan.known:
                plan = frame.planner.plan(plan.jaxpr, known, plan.region, results, keep=True)
            known = _widened(eqn.invars, plan.known, plan.reads)
            if known == plan.known:
                break
        if plan is inside.plans[0]:
            return step
        self.moved.update(eqn.outvars)
        frame.env.update(zip(eqn.outvars, plan.outs, strict=True))
        frame.stack = step.stack
        return frame.step(
            eqn, [k.dtype for k in known], results, inside=inside._replace(plans=(plan,))
        )

    def settled(self, step: Step) -> Step:
        read = (o for o in step.operands if type(o) not in (Cast, core.Literal))
        if _compares(step) and any(o in self.moved for o in read):
            self.frame.stack = step.stack
            reads = ["float32" if declared(atom) else None for atom in step.eqn.invars]
            step = self.frame.step(step.eqn, reads, step.writes, params=step.params)
        if not any(map(self._is_idle, step.operands)):
            return step
        operands = [o.atom if self._is_idle(o) else o for o in step.operands]
        return step._replace(operands=operands)

    def _is_idle(self, operand: Operand) -> TypeGuard[Cast]:
        """True for a cast of what has that dtype already."""
        if type(operand) is not Cast or type(operand.atom) is core.Literal:
            return False
        return self.frame.env[operand.atom].dtype == operand.dtype


def _widened(
    atoms: Sequence[Atom], known: Sequence[ValueFacts], reads: Sequence[str | None]
) -> tuple[ValueFacts, ...]:
    """The same facts, with float32 for what is low and read in float32 alone."""
    return tuple(
        k._replace(dtype=read, product=False)
        if read == "float32" == declared(atom) and k.dtype in LOW_DTYPES
        else k
        for atom, k, read in zip(atoms, known, reads, strict=True)
    )


def _compares(step: Step) -> bool:
    """True for a step that makes bools of floats, for which each dtype is as good."""
    bools = step.writes == (None,) and step.kind is Kind.BIND
    return bools and step.eqn.primitive.name in known_functions.ELEMENTWISE
