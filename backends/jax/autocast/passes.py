"""Passes over a planned frame, so that fewer casts are left, and why the numbers stay.

    pull_up     what float32 ops alone read is computed in float32
    pull_down   a layout that low ops alone read is made of low numbers

They are one walk from the last step to the first, and none where the plan holds no cast.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TypeGuard

import jax
import jax.extend.core as core

from polymp.backends.jax import compat
from polymp.backends.jax.arrays import is_inexact
from polymp.backends.jax.autocast import op_facts
from polymp.backends.jax.autocast.frame import Frame
from polymp.backends.jax.autocast.pass_switches import Pass
from polymp.backends.jax.autocast.plan import Cast, Inside, Kind, Operand, Step
from polymp.backends.jax.autocast.values import LOW, Known, Origin, declared, fits
from polymp.backends.jax.compat.programs import Atom, Equation
from polymp.backends.jax.jaxprs import JITTED

# What is computed in float32 at no more cost: single results, made element by element or chosen.
WIDENED = op_facts.ELEMENTWISE | {
    "broadcast_in_dim", "concatenate", "copy", "pad", "reduce_max", "reduce_min",
    "reshape", "squeeze", "stop_gradient", "transpose",
}  # fmt: skip

# What a cast to a low dtype moves through, from the result to the operands, bit for bit.
#
# Forward. Each element of the result is one element of one operand, and which one it is depends on
# shapes, integers and bools alone. Rounding maps each element by itself, infinities, NaNs and -0.0
# too, so it may come before the choice as well as after it. An operand that is low already was
# cast up, which is exact, and stays what it is.
#
# Backward. The transpose of each, but one, moves, drops or fills up with zeros the elements of the
# cotangent, which is low, and adds none of them up; the cast back up is exact, and may again come
# before or after. The one is `broadcast_in_dim` to more elements, whose transpose is a sum: in the
# low dtype it would be rounded. It is moved through where its operand has no gradient, because
# nothing but integers, bools, numbers and constants of the program went into it; so is the padding
# of `pad`.
#
# Where the operand is cast for another reader as well the two casts become one, and their
# cotangents meet in the low dtype: `sharing`, of a value and its layouts. Of parameters, neither
# is shared.
#
# Not here, though rounding keeps order:
#   max, min, clamp, abs     their derivatives compare numbers, and rounding makes ties and zeros
#   neg                      exact; but it computes, and XLA on CPU casts it up and down again
#   reduce_max, cummax, sort, argmax   the same, and the larger side would be cast
#   gather, slice, split, dynamic_slice   the larger side would be cast: a table for a few rows
#   pvary, pcast, psum, all_gather     transposes that are sums over devices
#   optimization_barrier, name, sharding_constraint, reshard, copy   what the program asks for is
#       that this very value be there
NARROWED = frozenset(
    """
    broadcast_in_dim concatenate pad reshape rev select_n squeeze stack transpose
    """.split()
)

_MIXED = "mixed"


def improve(frame: Frame) -> None:
    """Pull casts up and down, where that leaves fewer or smaller ones.

    What is read in one other dtype than its own, and in no other, is computed in that dtype:

        low, read in float32     `pull_up`: no rounding in between
        float32, read low        `pull_down`: where fewer casts are left, or a smaller one

    That is where no operand needs a new cast: it is low, or a number, or cast for another reader
    already, or will be, as one of its layouts is. Or where one operand needs one, and another is
    low and need not be cast up, or the result spreads it over more elements.
    """
    up, down = (p not in frame.planner.off for p in (Pass.PULL_UP, Pass.PULL_DOWN))
    if frame.casts and (up or down):
        walk = _Walk(frame, up, down)
        walk.run()
        frame.reads = walk.dtypes


class _Walk:
    """One walk over the steps of a program, from the last to the first.

    Attributes:
        dtypes: in which dtype the steps seen so far read a variable; `_MIXED` for several.
        cast: variables and dtypes that those steps share a cast to.
        moved: the values that have another dtype than they were planned in.

    Args:
        frame: of the program.
        up: whether to pull casts up.
        down: whether to pull casts down.
    """

    def __init__(self, frame: Frame, up: bool, down: bool) -> None:
        self.frame = frame
        self.up, self.down = up, down
        self.dtypes: dict[Atom, str | None] = {}
        self.cast: set[tuple[Atom, str]] = set()
        self.moved: set[Atom] = set()
        self._makers: dict[Atom, Equation] | None = None
        self._sources: dict[Atom, Atom] = {}  # what a variable is a layout of
        # By a source and a dtype, the layouts of it that are cast.
        self._layouts: dict[tuple[Atom, str], set[Atom]] | None = None
        constvars, _ = compat.binders(frame.closed)
        self._inert = {  # of float variables; a constant that is there has no gradient
            var: not isinstance(value, jax.core.Tracer)
            for var, value in zip(constvars, frame.consts, strict=True)
        }

    def run(self) -> None:
        frame, steps = self.frame, self.frame.steps
        env, dtypes = frame.env, self.dtypes
        self.results()
        for at in range(len(steps) - 1, -1, -1):
            step = steps[at]
            outvars = step.eqn.outvars
            if step.eqn.primitive.name in JITTED and step.inside is not None and self.up:
                step = steps[at] = self.through(step, step.inside)
            elif len(outvars) == 1:
                (var,) = outvars
                want, have = dtypes.get(var), (step.returns or step.writes)[0]
                if want is not None and want != have and have is not None:
                    if want == "float32":
                        if self.up and have in LOW and self.widens(step):
                            step = steps[at] = self.recast(step, want)
                    elif want in LOW and self.down and self.narrows(step, want):
                        step = steps[at] = self.recast(step, want)
            follows = _compares(step)
            for operand in step.operands:
                if type(operand) is not Cast:
                    if type(operand) is not core.Literal:
                        have = env[operand].dtype
                        if not (follows and have in LOW):
                            self.reads(operand, have)
                elif operand.value is None:
                    self.reads(operand.atom, operand.dtype)
                    if operand.shared:
                        self.cast.add((operand.atom, operand.dtype))
        if self.moved:  # what was read with a cast may now come in that dtype already
            frame.steps = list(map(self.settled, steps))

    def results(self) -> None:
        """The dtypes in which the program's outputs are read."""
        frame = self.frame
        atoms = frame.jaxpr.outvars
        for atom, want in zip(atoms, frame.wanted or [None] * len(atoms), strict=True):
            if type(atom) is core.Literal:
                continue
            have = frame.env[atom].dtype
            self.reads(atom, want if want and have else have)

    def reads(self, var: Atom, dtype: str | None) -> None:
        dtypes = self.dtypes
        if dtypes.setdefault(var, dtype) != dtype:
            dtypes[var] = _MIXED

    def recast(self, step: Step, dtype: str) -> Step:
        """The step with its result, and what it reads of floats, in a dtype."""
        frame, eqn = self.frame, step.eqn
        (var,) = eqn.outvars
        frame.env[var] = frame.env[var]._replace(dtype=dtype, product=False)
        self.moved.add(var)
        if step.kind is Kind.CONTRACT:
            return step._replace(writes=(dtype,), returns=None)
        reads = [dtype if frame.known(atom).dtype else None for atom in eqn.invars]
        frame.stack = step.stack
        return frame.step(eqn, reads, (dtype,), params=step.params)

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
            eqn, [k.dtype for k in known], results, inside=replace(inside, plans=(plan,))
        )

    def widens(self, step: Step) -> bool:
        if declared(step.eqn.outvars[0]) != "float32":
            return False
        if step.kind is Kind.CONTRACT:
            return self.frame.gradients
        return step.kind is Kind.BIND and step.eqn.primitive.name in WIDENED

    def narrows(self, step: Step, low: str) -> bool:
        eqn, frame = step.eqn, self.frame
        name = eqn.primitive.name
        if step.kind is not Kind.BIND or name not in NARROWED or step.writes[0] != "float32":
            return False
        (var,) = eqn.outvars
        if declared(var) != "float32" or step.returns is not None or not self.pays(step, low):
            return False
        if not frame.planner.stacks.place(eqn.source_info.name_stack, frame.region)[0].enabled:
            return False  # it runs as written
        # A parameter's casts are not shared, so neither are those of its layouts.
        computed = frame.env[var].origin is Origin.COMPUTED
        if not (computed or self.inert(var)):
            return False
        if name == "pad":
            return self.inert(eqn.invars[1])
        grows = name == "broadcast_in_dim" and _size(var) != _size(eqn.invars[0])
        return not grows or self.inert(eqn.invars[0])

    def pays(self, step: Step, low: str) -> bool:
        """True if what moves leaves fewer casts than there are, or smaller ones."""
        needed, ups = set(), 0
        for atom in step.eqn.invars:
            known = self.frame.known(atom)
            if known.dtype in (None, low):
                ups += known.dtype == low
                continue
            if known.dtype != "float32":
                return False  # the other low dtype
            if known.number is not None and not fits(known.number, low):
                return False  # it would be clamped, and not rounded
            number = known.number is not None and not atom.aval.shape
            if type(atom) is not core.Literal and not number and (atom, low) not in self.cast:
                needed.add(atom)
        if len(needed) != 1:
            return not needed
        (atom,), (var,) = needed, step.eqn.outvars
        if _size(atom) > _size(var):
            return False
        if ups or (step.eqn.primitive.name == "broadcast_in_dim" and _size(atom) < _size(var)):
            return True
        return self.meets(var, low)

    def meets(self, var: Atom, low: str) -> bool:
        """True if what a variable is a layout of is cast in some other layout too."""
        if self._layouts is None:
            self._sources, self._layouts = {}, {}
            for step in self.frame.steps:
                if _only_moves(step):
                    (atom,), (out,) = step.eqn.invars, step.eqn.outvars
                    self._sources[out] = self._sources.get(atom, atom)
                for o in step.operands:
                    if type(o) is Cast and o.value is None and o.shared and o.dtype in LOW:
                        source = self._sources.get(o.atom, o.atom)
                        self._layouts.setdefault((source, o.dtype), set()).add(o.atom)
        source = self._sources.get(var, var)
        return len(self._layouts.get((source, low), ())) > 1

    def inert(self, atom: Atom) -> bool:
        """True for what has no gradient: integers, bools, numbers and constants made it."""
        found = self._inert
        todo = [atom]
        while todo:
            one = todo[-1]
            if not self._is_open(one):
                todo.pop()
                continue
            maker = self._maker(one)
            missing = [] if maker is None else [a for a in maker.invars if self._is_open(a)]
            if missing:
                todo.extend(missing)
                continue
            found[one] = maker is not None and all(map(self._known_inert, maker.invars))
            todo.pop()
        return self._known_inert(atom)

    def _is_open(self, atom: Atom) -> bool:
        return type(atom) is not core.Literal and atom not in self._inert and is_inexact(atom.aval)

    def _known_inert(self, atom: Atom) -> bool:
        return type(atom) is core.Literal or not is_inexact(atom.aval) or self._inert[atom]

    def _maker(self, var: Atom) -> Equation | None:
        """The equation that makes a variable; None for an input or a constant."""
        if self._makers is None:
            self._makers = {v: step.eqn for step in self.frame.steps for v in step.eqn.outvars}
        return self._makers.get(var)

    def settled(self, step: Step) -> Step:
        if _compares(step) and any(map(self._has_moved, step.operands)):
            self.frame.stack = step.stack
            reads = ["float32" if declared(atom) else None for atom in step.eqn.invars]
            step = self.frame.step(step.eqn, reads, step.writes, params=step.params)
        if not any(map(self._is_idle, step.operands)):
            return step
        operands = [o.atom if self._is_idle(o) else o for o in step.operands]
        return step._replace(operands=operands)

    def _has_moved(self, operand: Operand) -> bool:
        return type(operand) not in (Cast, core.Literal) and operand in self.moved

    def _is_idle(self, operand: Operand) -> TypeGuard[Cast]:
        """True for a cast of what has that dtype already."""
        if type(operand) is not Cast or type(operand.atom) is core.Literal:
            return False
        return self.frame.env[operand.atom].dtype == operand.dtype


def _widened(
    atoms: Sequence[Atom], known: Sequence[Known], reads: Sequence[str | None]
) -> tuple[Known, ...]:
    """The same facts, with float32 for what is low and read in float32 alone."""
    return tuple(
        k._replace(dtype=read, product=False)
        if read == "float32" == declared(atom) and k.dtype in LOW
        else k
        for atom, k, read in zip(atoms, known, reads, strict=True)
    )


def _compares(step: Step) -> bool:
    """True for a step that makes bools of floats, for which each dtype is as good."""
    bools = step.writes == (None,) and step.kind is Kind.BIND
    return bools and step.eqn.primitive.name in op_facts.ELEMENTWISE


def _only_moves(step: Step) -> bool:
    """True for a step that puts the elements of one float32 value in another order or shape."""
    eqn = step.eqn
    if step.kind is not Kind.BIND or eqn.primitive.name not in NARROWED or len(eqn.invars) != 1:
        return False
    (atom,), (var,) = eqn.invars, eqn.outvars
    return (
        type(atom) is not core.Literal and _size(atom) == _size(var) and declared(var) is not None
    )


def _size(atom: Atom) -> int:
    return prod(atom.aval.shape)
