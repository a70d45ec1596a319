"""The plan of a program: in which dtype every value will be.

A `Plan` has one `Step` for each equation of a traced program; emission then follows it. How an
equation becomes a step is `planner`'s part. No array is made here.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple, Self, final

import jax
import numpy as np
from jax.extend.core import Literal

from polymp.backends.jax.autocast.fp8_operands import In8Bits
from polymp.backends.jax.autocast.values import Known
from polymp.backends.jax.compat.programs import Atom, ClosedProgram, Equation, NameStack
from polymp.rules.region import Region


@final
class Cast(NamedTuple):
    """An operand that is read in another dtype than its own.

    Attributes:
        atom: the variable, or the literal.
        dtype: what to cast it to.
        shared: True if the cast may serve other steps too. Casts of parameters do not: each would
            hand its cotangent to the one copy, where they would be added up in the low dtype.
        value: the number, in that dtype, that every element is.
    """

    atom: Atom
    dtype: str
    shared: bool = True
    value: "np.number[Any] | None" = None


# A variable or literal, read as it is, or a cast of one.
Operand = Atom | Cast


class Kind(StrEnum):
    """How an equation runs.

    BIND      its primitive, on operands in the dtypes of the plan
    CAST      not at all: its operand, read in the planned dtype, is its result
    PICK      as BIND, and what it picks more than once has its gradients added up in float32
    ROUND     as BIND, with an operand that is rounded first; see `sharded_weights`
    CONTRACT  as a contraction, which takes low operands; see `contraction`, `fp8_contraction`
    INSIDE    its primitive is put back around the plans of the programs inside it
    """

    BIND = "bind"
    CAST = "cast"
    PICK = "pick"
    ROUND = "round"
    CONTRACT = "contract"
    INSIDE = "inside"


class Step(NamedTuple):
    """One equation as it is to run.

    Attributes:
        eqn: the equation.
        kind: how it runs.
        operands: how each operand is read.
        params: what the primitive gets; the equation's own unless a dtype is among them.
        writes: the actual dtype of each result as it comes; None where it is not eligible.
        returns: dtype to cast each float result to afterwards; None to leave them.
        stack: the name stack, without our marks.
        low: of ROUND and CONTRACT, the dtype of the operands.
        inside: of INSIDE, the programs inside.
        in_8_bits: of CONTRACT, how it runs in 8 bits; None if it does not.
        fallback: why a product that the policy wants in 8 bits runs by rule `lower`, or one with
            rule `lower` is not lowered; "" for none.
    """

    eqn: Equation
    kind: Kind
    operands: Sequence[Operand]
    params: jax.core.ParamDict
    writes: tuple[str | None, ...]
    returns: tuple[str | None, ...] | None
    stack: NameStack
    low: str | None = None
    inside: "Inside | None" = None
    in_8_bits: In8Bits | None = None
    fallback: str = ""


# Makes a plan one for inputs that come in low dtypes; see `lower_inputs`. In: the plan, by input
# the low dtype or None, the outputs that may come low, and the name of the function. Out: the
# plan, and by output the low dtype or None.
Change = Callable[
    ["Plan", Sequence[str | None], Iterable[int], str], tuple["Plan", Sequence[str | None]]
]


@dataclass(eq=False)
class Inside:
    """The programs inside an equation, as they are planned, and how it is put back around them.

    Attributes:
        plans: of the programs, in the order of `jaxprs.inside`.
    """

    plans: "tuple[Plan, ...]"

    def emit(self, step: Step, values: Sequence[object]) -> Sequence[object]:
        """The results of the step for the values of its operands."""
        raise NotImplementedError

    def passed_on(self) -> Sequence[int]:
        """The outputs of the programs that are the step's results as they come."""
        return range(len(self.plans[0].outs))

    def rounds(self) -> Mapping[int, str]:
        """The outputs of the programs that the step casts, each with the dtype."""
        return {}

    def stored(self, plans: "tuple[Plan, ...]", lows: Sequence[str | None], change: Change) -> Self:
        """The same where some operands come low."""
        return replace(self, plans=plans)


@dataclass(eq=False)
class Plan:
    """A planned program.

    Attributes:
        jaxpr: the program as traced.
        consts: the values of its constants.
        known: of its inputs.
        region: that holds where no mark says otherwise.
        steps: in the order of the equations.
        results: how each output is read.
        outs: what is known of the outputs.
        reads: the dtype in which each input is read, if that is one; as far as passes looked.
        as_written: True if it is the traced program, cast for cast.
        made: what emission keeps for this plan, such as its rewritten jaxpr.
    """

    jaxpr: ClosedProgram
    consts: Sequence[object]
    known: tuple[Known, ...]
    region: Region
    steps: list[Step]
    results: tuple[Operand, ...]
    outs: tuple[Known, ...]
    reads: tuple[str | None, ...]
    as_written: bool
    made: dict[Hashable, Any] = field(default_factory=dict)

    @cached_property
    def drops(self) -> list[list[Atom]]:
        """For each step, the variables that no later one reads."""
        results = self.jaxpr.jaxpr.outvars
        kept = {atom for atom in results if not isinstance(atom, Literal)}
        drops = []
        for step in reversed(self.steps):
            atoms = step.eqn.invars
            last = [a for a in atoms if not isinstance(a, Literal) and a not in kept]
            kept.update(last)
            drops.append(last)
        return drops[::-1]
