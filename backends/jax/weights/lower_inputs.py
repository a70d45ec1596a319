"""A plan whose inputs come in a low dtype already: casts fall away, nothing else changes.

    planned     w float32 -> reshape -> cast to bfloat16 -> product
    stored      w bfloat16 -> reshape -> product

Every step stays the one that was planned. A low value goes where its float32 original went, as long
as numbers are only moved, until it is read with a cast to its own dtype, which is then nothing to
do. That the numbers are the same needs no comparison of two plans: rounding commutes with moving.
Anything else reads the value in float32, and is reported with the row that makes it do so.

Plans in, plans out; no array is made here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jax.extend.core import Literal

from polymp.backends.jax import compat
from polymp.backends.jax.autocast import op_facts
from polymp.backends.jax.autocast.function_calls import SECTION, Section
from polymp.backends.jax.autocast.known_functions import op_of, spelling
from polymp.backends.jax.autocast.plan import Cast, Inside, Kind, Operand, Plan, Step
from polymp.backends.jax.autocast.regions import NameStacks
from polymp.backends.jax.autocast.values import Known, declared
from polymp.backends.jax.compat.programs import Atom, Equation
from polymp.backends.jax.jaxprs import Inner, inside
from polymp.errors import PolicyError
from polymp.rules.answers import Why
from polymp.rules.row import Rule


class Low(NamedTuple):
    """A value that is low where the plan has float32.

    Attributes:
        dtype: its own.
        inputs: numbers of the program's inputs that it is made of.
    """

    dtype: str
    inputs: frozenset[int]


class Wide(NamedTuple):
    """Why an input cannot come in a low dtype.

    Attributes:
        dtype: in which it is read; None for no read.
        why: who reads it, as a clause.
    """

    dtype: str | None
    why: str


class Stored(NamedTuple):
    """A plan with low inputs.

    Attributes:
        plan: sound if nothing is read wide.
        outs: the outputs that are low.
        wide: by input, the first read that is not in its low dtype.
        read: inputs that are read in it.
    """

    plan: Plan
    outs: tuple[Low | None, ...]
    wide: dict[int, Wide]
    read: frozenset[int]


def store(plan: Plan, dtypes: Sequence[str | None], free: Iterable[int] = ()) -> Stored:
    """A planned program, with everything inside it, for inputs in these dtypes."""
    key = store, tuple(dtypes), frozenset(free)
    if key not in plan.made:
        plan.made[key] = _LowInputs(plan, key[1], key[2]).stored()
    stored: Stored = plan.made[key]
    return stored


# These move numbers and change none of them, in any dtype.
_MOVES = op_facts.LAYOUT | {"concatenate", "gather", "split", "stack", "unstack"}
# These too, each operand to the result in its place.
_EACH = frozenset(
    """
    all_gather all_gather_invariant all_to_all device_put optimization_barrier pbroadcast pcast
    ppermute pvary
    """.split()
)

Held = list[Low | None]


class _LowInputs:
    """One plan, as its steps take low values."""

    def __init__(self, plan: Plan, dtypes: tuple[str | None, ...], free: frozenset[int]) -> None:
        self.plan = plan
        self.dtypes = dtypes
        self.free = free
        self.env: dict[Atom, Low] = {}
        self.wide: dict[int, Wide] = {}
        self.read: set[int] = set()

    def stored(self) -> Stored:
        plan, invars = self.plan, compat.binders(self.plan.jaxpr)[1]
        for i, (var, dtype) in enumerate(zip(invars, self.dtypes, strict=True)):
            if dtype is not None:
                self.env[var] = Low(dtype, frozenset({i}))
        steps = [self.step(step) for step in plan.steps]
        lows = []
        for i, operand in enumerate(plan.results):
            low = self.held(operand)
            if low is not None and i not in self.free:
                self.refuse(low, Wide("float32", "it is handed on in float32, as a result"))
                low = None
            lows.append(low)
        known, outs = _lowered(plan.known, self.dtypes), _lowered(plan.outs, _dtypes(lows))
        made = replace(plan, known=known, steps=steps, outs=outs, as_written=False, made={})
        return Stored(made, tuple(lows), self.wide, frozenset(self.read))

    def held(self, operand: Operand) -> Low | None:
        """The low value that an operand hands on; one that is cast to its own dtype is read."""
        if type(operand) is Literal:
            return None
        if type(operand) is not Cast:
            return self.env.get(operand)
        low = None if type(operand.atom) is Literal else self.env.get(operand.atom)
        if low is not None and low.dtype == operand.dtype:
            self.read |= low.inputs
        elif low is not None:
            self.refuse(low, Wide(operand.dtype, f"it is read in {operand.dtype}"))
        return None

    def refuse(self, low: Low | None, wide: Wide) -> None:
        for i in low.inputs if low else ():
            self.wide.setdefault(i, wide)

    def step(self, step: Step) -> Step:
        before = set(self.wide)
        lows = [self.held(operand) for operand in step.operands]
        self.tell(step, before)  # a cast may have refused some, of which the step can say more
        if not any(lows):
            return step
        made, outs = self.through(step, lows)
        for var, low in zip(step.eqn.outvars, outs, strict=True):
            if low is not None:
                self.env[var] = low
        return made

    def through(self, step: Step, lows: Held) -> tuple[Step, Held]:
        """The step for low operands, and which of its results are low."""
        eqn, name = step.eqn, step.eqn.primitive.name
        none: Held = [None] * len(eqn.outvars)
        low_product = step.kind is Kind.CONTRACT and step.in_8_bits is None
        if low_product:
            for at, low in enumerate(lows):
                if low is not None and at < 2 and step.low == low.dtype:
                    self.read |= low.inputs
                    lows[at] = None
        elif step.kind is Kind.CAST:
            return self.moved(step, lows)
        elif step.kind is Kind.BIND and name == "convert_element_type":
            (low,) = lows
            if low is not None and eqn.params["new_dtype"] == low.dtype:  # as written by the user
                self.read |= low.inputs
                return step, none
        elif step.kind in (Kind.BIND, Kind.ROUND) and step.returns is None:
            if name in _EACH:
                return self.moved(step, lows)
            if name in _MOVES and (low := _joined(eqn, lows)) and _fills_alike(eqn, low.dtype):
                return self.moved(step, [low] * len(eqn.outvars))
        elif step.inside is not None:
            return self.inside(step, step.inside, lows)
        dtype = step.low if low_product else "float32"
        for low in lows:
            if low is not None and not low.inputs <= self.wide.keys():  # the first read is reported
                self.refuse(low, Wide(dtype, self.reader(step, dtype)))
        return step, none

    def moved(self, step: Step, outs: Held) -> tuple[Step, Held]:
        writes = tuple(low.dtype if low else f for low, f in zip(outs, step.writes, strict=True))
        return step._replace(writes=writes), outs

    def inside(self, step: Step, whole: Inside, lows: Held) -> tuple[Step, Held]:
        """The same of a step with programs inside; what a loop carries stays wide."""
        eqn, name = step.eqn, step.eqn.primitive.name
        programs = inside(eqn)
        if isinstance(eqn, Section):
            programs = [Inner(eqn, range(len(lows)))]
        for at in dict.fromkeys(at for program in programs for at in program.carried):
            where = compat.where_written(eqn)
            self.refuse(lows[at], Wide("float32", f"a {name} carries it in float32 ({where})"))
            lows[at] = None
        before = set(self.wide)
        free = self.free_outputs(step, whole, programs, lows)
        made = [
            self.enter(plan, program.of(lows), free if program.gives else ())
            for program, plan in zip(programs, whole.plans, strict=True)
        ]
        if name == SECTION:  # inside, nothing is asked: the op decides
            self.tell(step, before)
        results = (m.outs for m, program in zip(made, programs, strict=True) if program.gives)
        moved, outs = self.moved(step, [_of_all(several) for several in zip(*results, strict=True)])
        outs = [self.rounded(low, whole.rounds().get(i)) for i, low in enumerate(outs)]
        plans = tuple(m.plan for m in made)
        return moved._replace(inside=whole.stored(plans, _dtypes(lows), self.of_rule)), outs

    def rounded(self, low: Low | None, dtype: str | None) -> Low | None:
        """A result of a program inside, once the step has cast it: what is low is read then."""
        if low is None or dtype is None:
            return low
        if dtype == low.dtype:
            self.read |= low.inputs
        else:
            self.refuse(low, Wide(dtype, f"it is returned in {dtype}"))
        return None

    def free_outputs(
        self, step: Step, whole: Inside, programs: Sequence[Inner], lows: Held
    ) -> list[int]:
        """The outputs of the programs inside that may come low: all branches agree in those."""
        passed = {*whole.passed_on(), *whole.rounds()}
        free = [i for i in sorted(passed) if i >= programs[0].carries]
        if step.eqn.primitive.name == "cond":
            pairs = zip(programs, whole.plans, strict=True)
            made = [store(plan, _dtypes(branch.of(lows)), free).outs for branch, plan in pairs]
            alike = [len({*_dtypes(several)}) == 1 for several in zip(*made, strict=True)]
            free = [i for i in free if alike[i]]
        return free

    def enter(self, plan: Plan, lows: Held, free: Iterable[int]) -> Stored:
        """The plan of a body whose inputs these are; what it reads, this program reads."""
        made = store(plan, _dtypes(lows), free)
        for i, wide in made.wide.items():
            self.refuse(lows[i], wide)
        for i in made.read:
            self.read |= _inputs(lows[i])
        outs = tuple(low and _of_all([lows[i] for i in low.inputs]) for low in made.outs)
        return made._replace(outs=outs)

    def of_rule(
        self, plan: Plan, dtypes: Sequence[str | None], free: Iterable[int], name: str
    ) -> tuple[Plan, list[str | None]]:
        """The plan of a derivative rule, which is asked for when something is differentiated."""
        made = store(plan, dtypes, free)
        for at, wide in made.wide.items():
            raise PolicyError(
                f"The derivative rule of {name!r} cannot take a parameter that is stored in "
                f"{dtypes[at]}: {wide.why}. Freeze the function that computes the gradient, "
                "polymp.jax.freeze(autocast(gradient), params, ...), which keeps it in float32."
            )
        return made.plan, _dtypes(made.outs)

    def tell(self, step: Step, before: set[int]) -> None:
        """Say of what was refused since that this step reads it."""
        for i in self.wide.keys() - before:
            dtype = self.wide[i].dtype
            self.wide[i] = Wide(dtype, self.reader(step, dtype))

    def reader(self, step: Step, dtype: str | None) -> str:
        """Who reads, in which dtype, by which row, and where it is written; as a clause."""
        eqn, name = step.eqn, step.eqn.primitive.name
        region, _ = NameStacks().place(eqn.source_info.name_stack, self.plan.region)
        if isinstance(eqn, Section):
            op, region, spelled = eqn.op, eqn.region, ""
            name = op
        else:
            spelled = spelling(eqn)
            op, spelled = op_of(spelled), f"jax:{spelled}"
        where = compat.where_written(eqn)
        policy = region.policy
        if not region.enabled:
            row = "autocast is off there"
        elif name == "convert_element_type":
            return f"a cast to {eqn.params['new_dtype'].name} reads it ({where})"
        elif policy is None or eqn.primitive.name not in op_facts.FREE | {SECTION}:
            row = "it runs as written"
        else:
            winner = policy.at(region.scope).winner(op, region.dtype, spelled)
            row = str(Why(op or name, region.dtype, region.scope, winner, policy.name))
            if step.fallback and step.kind is Kind.BIND:
                row = f"{row}, but {step.fallback}"
            elif winner is not None and winner.rule is Rule.LOWER and dtype == "float32":
                row = "it runs as written, as its own arguments ask"
        return f"{name!r} reads it in {dtype}: {row} ({where})"


def _fills_alike(eqn: Equation, dtype: str) -> bool:
    """True unless a number fills up what is missing that the dtype would round."""
    fill = eqn.params.get("fill_value")
    if fill is None:
        return True
    number = np.float32(fill)
    return bool(np.isnan(number) or number.astype(np.dtype(dtype)).astype(np.float32) == number)


def _joined(eqn: Equation, lows: Held) -> Low | None:
    """The value that an equation moves, if all its float operands are low in one dtype."""
    floats = [low for low, atom in zip(lows, eqn.invars, strict=True) if declared(atom)]
    return _of_all(floats) if len(set(_dtypes(floats))) == 1 else None


def _of_all(several: Sequence[Low | None]) -> Low | None:
    """A value that is made of several, which are low in one dtype, or none of which is low."""
    low = several[0]
    return low and Low(low.dtype, frozenset().union(*map(_inputs, several)))


def _inputs(low: Low | None) -> frozenset[int]:
    return low.inputs if low else frozenset()


def _lowered(known: Sequence[Known], dtypes: Sequence[str | None]) -> tuple[Known, ...]:
    pairs = zip(known, dtypes, strict=True)
    return tuple(k._replace(dtype=f) if f else k for k, f in pairs)


def _dtypes(lows: Sequence[Low | None]) -> list[str | None]:
    return [low and low.dtype for low in lows]
