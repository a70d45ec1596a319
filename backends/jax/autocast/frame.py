"""The frame of a program while it is planned: what is known so far, and what a handler may ask.

A handler takes a frame, an equation and its region, and returns the step that the equation becomes
and what is known of its results. `planner` has the table of handlers.
"""

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from functools import cache
from typing import Any, ClassVar, NamedTuple, SupportsFloat, final

import jax
import jax.extend.core as core
import numpy as np
from jax.extend.source_info_util import new_name_stack

from polymp.backends.jax import compat
from polymp.backends.jax.autocast.contraction import Contraction
from polymp.backends.jax.autocast.fp8_contraction import In8Bits
from polymp.backends.jax.autocast.known_functions import FUNCTIONS
from polymp.backends.jax.autocast.regions import AS_CALLED, NameStacks
from polymp.backends.jax.compat import (
    Atom,
    ClosedProgram,
    Equation,
    NameStack,
    OpenProgram,
)
from polymp.backends.jax.jaxprs import where_written
from polymp.code_origin import outside
from polymp.dtypes import FORMATS
from polymp.errors import ForbiddenOpError
from polymp.rules import decision_log
from polymp.rules.policy import Decision, Region
from polymp.rules.row import Row, Rule
from polymp.rules.vocabulary import vocabulary


@final
class Cast(NamedTuple):
    """An operand that is read in another dtype than its own."""

    atom: Atom  # the variable, or the literal
    dtype: str  # what to cast it to
    # True if the cast may serve other steps too. Casts of parameters do not: each would hand its
    # cotangent to the one copy, where they would be added up in the low dtype.
    shared: bool = True
    value: "np.number[Any] | None" = None  # the number, in that dtype, that every element is
    number: float | None = None  # the same as the program has it


# A variable or literal, read as it is, or a cast of one.
Operand = Atom | Cast


class Kind(StrEnum):
    """How an equation runs.

    BIND      its primitive, on operands in the dtypes of the plan
    CAST      not at all: its operand, read in the planned dtype, is its result
    PICK      as BIND, and what it picks more than once has its gradients added up in float32
    CONTRACT  as a contraction, which takes low operands; see `contraction`, `fp8_contraction`
    INSIDE    its primitive is put back around the plans of the programs inside it
    """

    BIND = "bind"
    CAST = "cast"
    PICK = "pick"
    CONTRACT = "contract"
    INSIDE = "inside"


class Step(NamedTuple):
    """One equation as it is to run."""

    eqn: Equation
    kind: Kind
    operands: Sequence[Operand]  # how each operand is read
    # What the primitive gets; the equation's own unless a dtype is among them.
    params: jax.core.ParamDict
    # The actual dtype of each result as it comes; None where it is not eligible.
    writes: tuple[str | None, ...]
    # Dtype to cast each float result to afterwards; None to leave them.
    returns: tuple[str | None, ...] | None
    stack: NameStack  # the name stack, without our marks
    spec: Contraction | None = None  # of CONTRACT
    inside: "Inside | None" = None  # of INSIDE, the programs inside
    in_8_bits: In8Bits | None = None  # of CONTRACT, how it runs in 8 bits; None if it does not
    # Why a product that the policy wants in 8 bits runs by rule `lower`, or one with rule `lower`
    # is not lowered; "" for none.
    fallback: str = ""


class Origin(Enum):
    """Where a value comes from, as far as the plan cares.

    COMPUTED  from anything else
    GIVEN     an argument or constant, or a layout of one: a parameter, as a rule
    LITERAL   a number in the program
    MASK      a choice among numbers in the program: bools, converted, are zeros and ones
    INTEGER   an array of integers, converted, and sums and products of those with whole numbers
    """

    COMPUTED = 0
    GIVEN = 1
    LITERAL = 2
    MASK = 3
    INTEGER = 4

    # Each is one object; Enum's own hashes the name, in Python.
    __hash__: ClassVar[Callable[[Any], int]] = object.__hash__


class ValueFacts(NamedTuple):
    """Facts about a value before it exists."""

    dtype: str | None  # its actual dtype; None for what autocast leaves alone
    origin: Origin = Origin.COMPUTED  # where it comes from
    product: bool = False  # True for the low result of a contraction, to which a bias may be added
    # The few that its elements are, where those are known: one of a literal, zero and one of bools.
    # Of integers, which may be any, these stand for a mask's.
    numbers: tuple[float, ...] = ()

    @property
    def number(self) -> float | None:
        """The literal's number, as long as every element is that number."""
        return self.numbers[0] if self.origin is Origin.LITERAL and self.numbers else None

    @property
    def is_chosen(self) -> bool:
        """True for what no float array went into: numbers in the program, bools and integers."""
        return self.origin in _CHOSEN

    @property
    def is_parameter(self) -> bool:
        """True for what is given in float32: a parameter, as a rule."""
        return self.dtype == "float32" and self.origin is Origin.GIVEN


@dataclass(eq=False)
class Plan:
    """A planned program."""

    jaxpr: ClosedProgram  # the program as traced
    known: tuple[ValueFacts, ...]  # of its inputs
    region: Region  # that holds where no mark says otherwise
    steps: list[Step]  # in the order of the equations
    results: tuple[Operand, ...]  # how each output is read
    outs: tuple[ValueFacts, ...]  # what is known of the outputs
    # The dtype in which each input is read, if that is one; as far as passes looked.
    reads: tuple[str | None, ...]
    as_written: bool  # True if it is the traced program, cast for cast
    # What emission keeps for this plan, such as its rewritten jaxpr.
    cache: dict[Hashable, Any] = field(default_factory=dict)


# Makes the results of a step with programs inside, from their plans and the values of its operands.
Emit = Callable[[Sequence[Plan], Step, Sequence[object]], Sequence[object]]


class Inside(NamedTuple):
    """The programs inside an equation, as they are planned, and how it is put back around them."""

    plans: Sequence[Plan]  # of the programs, in the order of `jaxprs.inside`
    emit: Emit


# Plans of the programs inside an autocast function, the latest ones last. JAX hands out the same
# jaxpr again for a jitted function, and finds what it compiled for one by the jaxpr: with the same
# plan comes the same rewritten one. So too for the body of a loop.
Plans = dict[Hashable, Plan]

# Plans that are kept, for all autocast calls of one function together.
_KEPT = 512

_UNKNOWN = (
    "polymp.jax.autocast does not know the primitive {!r}: the program inside it runs in the "
    "dtypes it is written in."
)


class Planner:
    """Plans the programs inside one traced program, each once; keeps plans, and finds kept ones."""

    def __init__(self, planned: "Callable[[Frame], Plan]", kept: Plans) -> None:
        FUNCTIONS.refresh()
        self.planned = planned  # the walk; see `planner`
        self.kept: Plans = {} if decision_log.current() is not None else kept
        # What else plans depend on: jax's configuration, and the ops that are known by now.
        known = len(vocabulary().registered), len(FUNCTIONS.ops)
        self.settings: Hashable = (compat.trace_context(), *known)
        self.plans: Plans = {}
        self.stacks: NameStacks = NameStacks()
        self.unknown: set[str] = set()
        self.op_plans: dict[Hashable, Any] = {}

    def plan(
        self,
        jaxpr: ClosedProgram,
        known: Iterable[ValueFacts],
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
        plan = self.kept.pop((self.settings, key), None) if keep else None
        if plan is None:
            plan = self.planned(Frame(self, jaxpr, known, region, results, gradients))
        if keep:
            self.kept[self.settings, key] = plan
            if len(self.kept) > _KEPT:
                self.kept.pop(next(iter(self.kept)), None)
        self.plans[key] = plan
        return plan

    def warn(self, name: str, message: str = _UNKNOWN) -> None:
        """Name a primitive whose inner program stays as written; once."""
        if name not in self.unknown:
            self.unknown.add(name)
            warnings.warn(message.format(name), stacklevel=outside())


@dataclass(eq=False)
class Frame:
    """One closed jaxpr under one set of known inputs, while its equations become steps."""

    planner: Planner
    closed: ClosedProgram
    inputs: tuple[ValueFacts, ...]  # what is known of them
    region: Region  # where no mark says otherwise
    # Dtypes that the outputs must have; None leaves those as they come.
    results: Sequence[str | None] | None = None
    # The outputs are gradients: a contraction that makes one of a float32 value then does not round
    # it.
    gradients: bool = False
    steps: list[Step] = field(default_factory=list)
    # Of the equation at hand, without our marks.
    stack: NameStack = field(default_factory=new_name_stack)
    # In which dtype all steps read a variable; of several, none. See `planner`.
    reads: Mapping[Atom, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.jaxpr: OpenProgram = self.closed.jaxpr
        self.casts: bool = self.results is not None  # whether there may be any
        constvars, invars = compat.binders(self.closed)
        consts = map(_constant, constvars, self.closed.consts)
        self.env: dict[Atom, ValueFacts] = dict(zip(constvars, consts, strict=True))
        self.env.update(zip(invars, self.inputs, strict=True))

    def known(self, atom: Atom) -> ValueFacts:
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
            return Cast(atom, dtype, value=in_dtype(atom.val, dtype), number=number_of(atom.val))
        known = self.env[atom]
        if known.dtype is None or known.dtype == dtype:
            return atom
        if known.number is not None and dtype in LOW_DTYPES:
            if not atom.aval.shape or not fits(known.number, dtype):
                value = in_dtype(known.number, dtype)
                return Cast(atom, dtype, value=value, number=known.number)
        self.casts = True
        given = known.origin in (Origin.GIVEN, Origin.LITERAL)
        return Cast(atom, dtype, shared=not given)

    def step(
        self,
        eqn: Equation,
        reads: Iterable[str | None],
        writes: Sequence[str | None],
        kind: Kind = Kind.BIND,
        params: jax.core.ParamDict | None = None,
        returns: tuple[str | None, ...] | None = None,
        spec: Contraction | None = None,
        inside: Inside | None = None,
    ) -> Step:
        """The step of an equation, with the dtype in which it reads each operand; see `Step`."""
        operands = list(map(self.read, eqn.invars, reads))
        if operands == eqn.invars:
            operands = eqn.invars  # one list less for each equation that reads as written
        kind = kind if inside is None else Kind.INSIDE
        params = params or eqn.params
        return Step(eqn, kind, operands, params, tuple(writes), returns, self.stack, spec, inside)

    def repeated(self, eqn: Equation, region: Region, like: Hashable, plan: "Handler") -> "Planned":
        """The step of an equation; planned once for those that agree in types and in `like`."""
        env, plans = self.env, self.planner.op_plans
        known = [self.known(v) if type(v) is core.Literal else env[v] for v in eqn.invars]
        avals = [v.aval for v in eqn.invars] + [v.aval for v in eqn.outvars]
        # The plans keep regions and types alive, so that no other object gets their ids.
        signature = (like, id(region), *known, *map(id, avals))
        earlier = plans.get(signature)
        # A report needs a decision for each; in 8 bits, more than this decides.
        if earlier is None or decision_log.current() is not None:
            step, outs = plan(self, eqn, region)
            if step.in_8_bits is None and not step.fallback:
                plans[signature] = step, outs, avals, region
            return step, outs
        (old, kind, operands, params, writes, returns, _, *others), outs, *_ = earlier
        if operands is old.invars:
            operands = eqn.invars
        else:
            pairs = zip(eqn.invars, operands, strict=True)
            operands = [self.read(v, o.dtype) if type(o) is Cast else v for v, o in pairs]
        params = eqn.params if params is old.params else params
        return Step(eqn, kind, operands, params, writes, returns, self.stack, *others), outs

    def as_written(self, eqn: Equation) -> "Planned":
        """The step of an equation that runs in the dtypes that it is written in."""
        writes = [declared(v) for v in eqn.outvars]
        return self.step(eqn, map(declared, eqn.invars), writes), [ValueFacts(f) for f in writes]


Planned = tuple[Step, list[ValueFacts]]
Handler = Callable[[Frame, Any, Region], Planned]  # of an equation, or of a `FunctionCall`


def given(var: Atom) -> ValueFacts:
    """Describe an argument or constant; a scalar of Python's is a number."""
    weak = not var.aval.shape and getattr(var.aval, "weak_type", False)
    return ValueFacts(declared(var), Origin.LITERAL if weak else Origin.GIVEN)


def _constant(var: Atom, value: object) -> ValueFacts:
    """Describe a constant; a scalar that is there already is a number."""
    if var.aval.shape or declared(var) is None or isinstance(value, jax.core.Tracer):
        return given(var)
    return literal(declared(var), number_of(value))


def winner(op: str, region: Region, spelled: str = "") -> Row | None:
    """The row of a region's policy that decides about an op."""
    assert region.policy is not None, "polymp.jax fills in the policy of every region"
    return region.policy.at(region.scope).winner(op, region.dtype, spelled)


def decide(
    eqn: Equation, op: str, dtypes: tuple[str, ...], region: Region, spelled: str = ""
) -> Decision:
    """Ask a region's policy for its decision about an op, and tell who records it."""
    row, policy = winner(op, region, f"jax:{spelled}"), region.policy
    assert policy is not None, "polymp.jax fills in the policy of every region"
    decision = policy.decide(op, dtypes, region, f"jax:{spelled}")
    record = None if policy is AS_CALLED or row is None else decision_log.current()
    if record is not None and region.enabled:
        own = spelled and f"jax:{spelled}"
        at = "jax", op, own, region.dtype, region.scope
        record.note(decision_log.Entry(*at, row, dtypes, decision, policy.name))
    if decision.rule is Rule.FORBID:
        instead = row.instead if row else ""
        error = ForbiddenOpError(
            f"policy {policy.name!r} forbids {op or spelled!r}, called here with "
            f"({', '.join(dtypes)}). Use {instead or 'another op'}, or give it another rule in the "
            "policy."
        )
        error.add_note(f"It was traced at {where_written(eqn)}.")
        raise error
    return decision


# A value has two dtypes: the *declared* one, that of the traced program, and the *actual* one,
# that the plan gives it.
#
# What autocast may touch. float64 and anything else keeps its declared dtype.
ELIGIBLE = frozenset({"float32", "bfloat16", "float16"})
LOW_DTYPES = frozenset({"bfloat16", "float16"})
_CHOSEN = frozenset({Origin.LITERAL, Origin.MASK, Origin.INTEGER})


@cache
def name_of(dtype: object) -> str | None:
    """The name of a dtype, if autocast may touch it."""
    name = getattr(dtype, "name", None)
    return name if name in ELIGIBLE else None


def declared(atom: Atom) -> str | None:
    """The declared dtype of a variable or literal, if autocast may touch it."""
    return name_of(getattr(atom.aval, "dtype", None))


def fixed(atom: Atom) -> bool:
    """True for an operand whose dtype autocast never changes: float64, complex, float8."""
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, np.inexact) and not name_of(dtype)


def fits(number: float, dtype: str) -> bool:
    """True if a literal stays in the dtype's normal range, and next to 1 does not become 1."""
    size = abs(float(number))
    target = FORMATS[dtype]
    if size != 1 == abs(in_dtype(number, dtype)):
        return False
    return size == 0 or not np.isfinite(size) or target.smallest_normal <= size <= target.max


def number_of(value: Any) -> float | None:
    """The number of a scalar literal; None if it is no real number, or one that equals another."""
    try:
        number = float(value)
    except TypeError:
        return None
    return None if number == 0 and np.signbit(number) else number  # 0.0 == -0.0


@cache
def literal(dtype: str | None, number: float | None) -> ValueFacts:
    """The facts about a number in the program."""
    return ValueFacts(dtype, Origin.LITERAL, numbers=() if number is None else (number,))


def in_dtype(value: SupportsFloat, dtype: str) -> "np.number[Any]":
    """A literal in a dtype; a finite one stays finite."""
    number = float(value)
    largest = FORMATS[dtype].max
    if np.isfinite(number):
        number = min(max(number, -largest), largest)
    scalar: np.number[Any] = np.asarray(number, np.dtype(dtype)).flat[0]
    return scalar
