"""The frame of a program while it is planned: what is known so far, and what a handler may ask.

A handler takes a frame, an equation and its region, and returns the step that the equation becomes
and what is known of its results. `planner` has the table of handlers.
"""

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.extend.core as core

from polymp.backends.jax import compat
from polymp.backends.jax.autocast.fp8_operands import In8Bits
from polymp.backends.jax.autocast.pass_switches import Pass
from polymp.backends.jax.autocast.plan import Cast, Inside, Kind, Operand, Plan, Step
from polymp.backends.jax.autocast.regions import AS_CALLED, NameStacks
from polymp.backends.jax.autocast.values import (
    LOW,
    Known,
    Origin,
    declared,
    fits,
    in_dtype,
    literal,
    number_of,
)
from polymp.backends.jax.compat.programs import (
    Atom,
    ClosedProgram,
    Equation,
    NameStack,
    OpenProgram,
)
from polymp.errors import ForbiddenOpError
from polymp.rules import decision_log
from polymp.rules.answers import Decision
from polymp.rules.policy import Policy
from polymp.rules.region import Region
from polymp.rules.row import Rule

_UNKNOWN = (
    "polymp.jax.autocast does not know the primitive {!r}: the program inside it runs in the "
    "dtypes it is written in."
)


# Plans that are kept, for all autocast calls of one function together.
_KEPT = 512


class PlanCache:
    """Plans of the programs inside an autocast function, the latest ones.

    JAX hands out the same jaxpr again for a jitted function, and finds what it compiled for one by
    the jaxpr: with the same plan comes the same rewritten one. So too for the body of a loop.
    """

    def __init__(self) -> None:
        self._plans: dict[Hashable, Plan] = {}

    def find(self, key: Hashable) -> Plan | None:
        """The plan that is kept under a key, which is the latest one from now on."""
        plan = self._plans.pop(key, None)
        return None if plan is None else self.add(key, plan)

    def add(self, key: Hashable, plan: Plan) -> Plan:
        """Keep a plan; the oldest one goes."""
        self._plans[key] = plan
        if len(self._plans) > _KEPT:
            self._plans.pop(next(iter(self._plans)), None)
        return plan


class Planner:
    """Plans one traced program with everything inside it, each part once.

    Args:
        one: plans the program of a frame.
        off: names of the passes that are switched off; see `passes`.
        kept: plans of earlier calls; None for none.
        settings: all that a plan depends on besides the arguments of `plan`.
    """

    def __init__(
        self,
        one: "Callable[[Frame], Plan]",
        off: Set[str],
        kept: PlanCache | None,
        settings: Hashable,
    ) -> None:
        self.one = one
        self.off = off
        self.kept = kept
        self.settings: Hashable = (settings, off)
        self.plans: dict[Hashable, Plan] = {}
        self.stacks: NameStacks = NameStacks()
        self.unknown: set[str] = set()
        self.op_plans: dict[Hashable, Any] = {}

    def plan(
        self,
        jaxpr: ClosedProgram,
        known: Iterable[Known],
        region: Region,
        results: Sequence[str | None] | None = None,
        gradients: bool = False,
        keep: bool = False,
    ) -> Plan:
        """The plan of a closed jaxpr; see `Frame`. Kept if JAX may hand out that jaxpr again."""
        known = tuple(known)
        key = (id(jaxpr), known, region, None if results is None else tuple(results), gradients)
        if key in self.plans:
            return self.plans[key]
        kept = self.kept if keep else None
        plan = None if kept is None else kept.find((self.settings, key))
        if plan is None:
            plan = self.one(Frame(self, jaxpr, known, region, results, gradients))
            if kept is not None:
                kept.add((self.settings, key), plan)
        self.plans[key] = plan
        return plan

    def plan_whole(self, jaxpr: ClosedProgram, known: Iterable[Known], region: Region) -> Plan:
        """The plan of the outermost program, which may hold its caller's arrays: it is not kept."""
        return self.one(Frame(self, jaxpr, tuple(known), region, None, False))

    def warn(self, name: str, message: str = _UNKNOWN) -> None:
        """Name a primitive whose inner program stays as written; once."""
        if name not in self.unknown:
            self.unknown.add(name)
            warnings.warn(message.format(name), stacklevel=2)


class Frame:
    """One jaxpr under one set of known inputs, while its equations become steps.

    Args:
        planner: of the whole program, for what is inside this one.
        jaxpr: closed.
        known: of its inputs.
        region: that holds where no mark says otherwise.
        results: dtypes that the outputs must have; None leaves those as they come.
        gradients: True if the outputs are gradients: a contraction that makes one of a float32
            value then does not round it.

    Attributes:
        env: what is known of each variable so far.
        steps: of the equations so far.
        stack: the name stack of the equation at hand, without our marks.
        casts: whether there may be any.
        reads: in which dtype all steps read a variable; of several, none. See `passes`.
    """

    def __init__(
        self,
        planner: Planner,
        jaxpr: ClosedProgram,
        known: tuple[Known, ...],
        region: Region,
        results: Sequence[str | None] | None,
        gradients: bool,
    ) -> None:
        self.planner = planner
        self.closed = jaxpr
        self.jaxpr: OpenProgram
        self.consts: Sequence[Any]
        self.jaxpr, self.consts = compat.opened(jaxpr)
        self.inputs = known
        self.region = region
        self.wanted = results
        self.gradients = gradients
        constvars, invars = compat.binders(jaxpr)
        self.env: dict[Atom, Known] = {}
        self.env.update(zip(constvars, map(_constant, constvars, self.consts), strict=True))
        self.env.update(zip(invars, known, strict=True))
        self.steps: list[Step] = []
        self.stack: NameStack = compat.no_scopes()
        self.casts: bool = results is not None
        self.reads: Mapping[Atom, str | None] = {}
        self.shares: bool = Pass.SHARING not in planner.off

    def known(self, atom: Atom) -> Known:
        """The dtype of an operand, where it comes from, and its number if it is one."""
        if isinstance(atom, core.Literal):
            return literal(declared(atom), number_of(atom.val))
        return self.env[atom]

    def read(self, atom: Atom, dtype: str | None) -> Operand:
        """Read an operand in a dtype; None takes its actual one."""
        if dtype is None:
            return atom
        if isinstance(atom, core.Literal):
            have = declared(atom)
            if have is None or have == dtype:
                return atom
            return Cast(atom, dtype, value=in_dtype(atom.val, dtype))
        known = self.env[atom]
        if known.dtype is None or known.dtype == dtype:
            return atom
        if known.number is not None and dtype in LOW:
            if not atom.aval.shape or not fits(known.number, dtype):
                return Cast(atom, dtype, value=in_dtype(known.number, dtype))
        self.casts = True
        given = known.origin in (Origin.GIVEN, Origin.LITERAL)
        return Cast(atom, dtype, shared=self.shares and not given)

    def step(
        self,
        eqn: Equation,
        reads: Iterable[str | None],
        writes: Sequence[str | None],
        kind: Kind = Kind.BIND,
        params: jax.core.ParamDict | None = None,
        returns: tuple[str | None, ...] | None = None,
        low: str | None = None,
        inside: Inside | None = None,
    ) -> Step:
        """The step of an equation, with the dtype in which it reads each operand; see `Step`."""
        operands = list(map(self.read, eqn.invars, reads))
        if operands == eqn.invars:
            operands = eqn.invars  # one list less for each equation that reads as written
        kind = kind if inside is None else Kind.INSIDE
        params = params or eqn.params
        return Step(eqn, kind, operands, params, tuple(writes), returns, self.stack, low, inside)

    def as_written(self, eqn: Equation) -> "Planned":
        """The step of an equation that runs in the dtypes that it is written in."""
        writes = [declared(v) for v in eqn.outvars]
        return self.step(eqn, map(declared, eqn.invars), writes), [Known(f) for f in writes]

    def decision(
        self,
        op: str,
        dtypes: tuple[str, ...],
        region: Region,
        spelled: str,
        in_8_bits: "Callable[[], In8Bits | str] | None" = None,
    ) -> Decision:
        """Ask a region's policy for its decision about an op."""
        policy = region.policy
        assert policy is not None, "polymp.jax fills in the policy of every region"
        decision = policy.decide(op, dtypes, region, f"jax:{spelled}")
        if policy is not AS_CALLED and (found := decision_log.current()) is not None:
            row = policy.at(region.scope).winner(op, region.dtype, f"jax:{spelled}")
            if row is not None and region.enabled:
                spelled = spelled and f"jax:{spelled}"
                at = "jax", op, spelled, region.dtype, region.scope
                entry = decision_log.Entry(*at, row, dtypes, decision, policy.name)
                if decision.rule is Rule.FP8 and in_8_bits is not None:
                    how = in_8_bits()
                    if isinstance(how, str):
                        entry = entry._replace(fallback=how)
                    else:
                        entry = entry._replace(recipe=how.recipe)
                found.note(entry)
        if decision.rule is Rule.FORBID:
            raise ForbiddenOpError(_forbidden(policy, op or spelled, dtypes, region))
        return decision


Planned = tuple[Step, list[Known]]
Handler = Callable[[Frame, Any, Region], Planned]  # of an equation, or of a section


def given(var: Atom) -> Known:
    """Describe an argument or constant; a scalar of Python's is a number."""
    weak = not var.aval.shape and getattr(var.aval, "weak_type", False)
    return Known(declared(var), Origin.LITERAL if weak else Origin.GIVEN)


def _constant(var: Atom, value: object) -> Known:
    """Describe a constant; a scalar that is there already is a number."""
    if var.aval.shape or declared(var) is None or isinstance(value, jax.core.Tracer):
        return given(var)
    return literal(declared(var), number_of(value))


def _forbidden(policy: Policy, op: str, dtypes: Sequence[str], region: Region) -> str:
    row = policy.at(region.scope).winner(op, region.dtype)
    instead = row.instead if row else ""
    return (
        f"policy {policy.name!r} forbids {op!r}, called here with ({', '.join(dtypes)}). "
        f"Use {instead or 'another op'}, or give it another rule in the policy."
    )
