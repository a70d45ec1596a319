"""The plan of a program: in which format every value will be.

Planning follows formats alone: no array is made and JAX is not called. A `Plan` has one `Step` for
each equation; emission then follows it. How an equation becomes a step is `planner`'s part.
"""

import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from jax.extend.core import Literal

from polymp.backends.jax import compat
from polymp.backends.jax.autocast import regions
from polymp.backends.jax.autocast.values import Known
from polymp.rules.policy import Policy
from polymp.rules.region import Region

# Inside a function that a row speaks of, nothing else is asked.
AS_CALLED = Policy("the rule of the call", ())


class Cast(NamedTuple):
    """An operand that is read in another format than its own.

    Attributes:
        atom: the variable, or the literal.
        format: what to cast it to.
        shared: True if the cast may serve other steps too. Casts of parameters do not: each would
            hand its cotangent to the one copy, where they would be added up in the low format.
        value: the number, in that format, that every element is.
    """

    atom: Any
    format: str
    shared: bool = True
    value: Any = None


# A variable or literal, read as it is, or a cast of one.
Operand = Any


class Step(NamedTuple):
    """What becomes of one equation.

    Attributes:
        eqn: the equation.
        how: "bind" the primitive, "round" its operand and bind it, "contract", "cast" (the operand
            is the result), or the function that puts a control primitive back.
        operands: how each operand is read.
        params: what the primitive gets; the equation's own unless a format is among them.
        writes: the actual format of each result as it comes; None where it is not eligible.
        returns: format to cast each float result to afterwards; None to leave them.
        parts: the plans of the programs inside, or what else `how` needs.
        stack: the name stack, without our marks.
    """

    eqn: Any
    how: Any
    operands: Sequence[Operand]
    params: Any
    writes: tuple[str | None, ...]
    returns: tuple[str | None, ...] | None
    parts: Any
    stack: Any


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
        as_written: True if it is the traced program, cast for cast.
        made: what emission keeps for this plan, such as its rewritten jaxpr.
    """

    jaxpr: Any
    consts: Sequence[Any]
    known: tuple[Known, ...]
    region: Region
    steps: list[Step]
    results: tuple[Operand, ...]
    outs: tuple[Known, ...]
    as_written: bool
    made: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def drops(self) -> list[list[Any]]:
        """For each step, the variables that nobody reads after it."""
        results = self.jaxpr.jaxpr.outvars
        kept = {atom for atom in results if not isinstance(atom, Literal)}
        drops = []
        for step in reversed(self.steps):
            atoms = step.eqn.invars
            last = [a for a in atoms if not isinstance(a, Literal) and a not in kept]
            kept.update(last)
            drops.append(last)
        return drops[::-1]


_UNKNOWN = (
    "polymp.jax.autocast does not know the primitive {!r}: the program inside it runs in the "
    "formats it is written in."
)


# Calls of an autocast function whose plans are kept.
_CALLS = 8


class Kept:
    """Plans of the programs inside an autocast function, from its latest calls.

    JAX hands out the same jaxpr again for a jitted function, and finds what it compiled for one by
    the jaxpr: with the same plan comes the same rewritten one.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[Hashable, dict[Any, Plan]]] = deque(maxlen=_CALLS)

    def of(self, settings: Hashable) -> list[dict[Any, Plan]]:
        """The plans that were made under the same settings, by call, the latest first."""
        return [plans for have, plans in reversed(tuple(self._calls)) if have == settings]

    def add(self, settings: Hashable, plans: dict[Any, Plan]) -> None:
        """Keep the plans of a call; those of the oldest go."""
        self._calls.append((settings, plans))


class Planner:
    """Plans one traced program with everything inside it, each part once.

    Args:
        one: plans one jaxpr, given this planner and the arguments of `plan`.
        off: names of the passes that are switched off; see `passes`.
        colours: True if some region promotes weakly, so that results are told weak from strong.
        kept: plans of earlier calls; None for none.
        settings: all that a plan depends on besides the arguments of `plan`.
    """

    def __init__(
        self,
        one: Callable[..., Plan],
        off: Set[str] = frozenset(),
        colours: bool = False,
        kept: Kept | None = None,
        settings: Hashable = (),
    ) -> None:
        self.one = one
        self.off = off
        self.colours = colours
        self.kept = kept
        self.settings = settings, off, colours
        self.earlier = [] if kept is None else kept.of(self.settings)
        self.plans: dict[Any, Plan] = {}
        self.stacks: dict[int, tuple[Any, Any, Any, str]] = {}
        self.placed: dict[tuple[Region, str], Region] = {}
        self.unknown: set[str] = set()
        self.ways: dict[Any, Any] = {}

    def plan(
        self,
        jaxpr: Any,
        known: Iterable[Known],
        region: Region,
        results: Sequence[str | None] | None = None,
        gradients: bool = False,
    ) -> Plan:
        """The plan of a closed jaxpr.

        Args:
            jaxpr: closed.
            known: of its inputs.
            region: that holds where no mark says otherwise.
            results: formats that the outputs must have; None leaves those as they come.
            gradients: True if the outputs are gradients.
        """
        known = tuple(known)
        key = (id(jaxpr), known, region, None if results is None else tuple(results), gradients)
        if key not in self.plans:
            same = next((plans[key] for plans in self.earlier if key in plans), None)
            self.plans[key] = same or self.one(self, jaxpr, known, region, results, gradients)
        return self.plans[key]

    def plan_whole(self, jaxpr: Any, known: Iterable[Known], region: Region) -> Plan:
        """The plan of a closed jaxpr that nothing is around; the plans inside are kept."""
        plan = self.one(self, jaxpr, tuple(known), region, None, False)
        if self.kept is not None:
            self.kept.add(self.settings, self.plans)
        self.earlier = []
        return plan

    def place(self, stack: Any, outer: Region) -> tuple[Region, Any]:
        """The region of a name stack, and the stack without our marks."""
        kept = self.stacks.get(id(stack))
        if kept is None:
            marked = regions.innermost(stack)
            plain = stack if marked is None else compat.without_scopes(stack, regions.is_mark)
            scopes = (name for name in compat.scope_names(plain) if name != regions.SCALED)
            names = ".".join(scopes).replace("/", ".")
            kept = self.stacks[id(stack)] = stack, marked, plain, names
        _, marked, plain, names = kept
        if outer.policy is AS_CALLED:  # the op around it decides for all inside
            return outer, plain
        region = marked or outer
        if region.policy is None or not region.policy.scopes:
            return region, plain
        path = ".".join(filter(None, (outer.scope, names)))
        if (region, path) not in self.placed:
            self.placed[region, path] = replace(region, scope=path)
        return self.placed[region, path], plain

    def warn(self, name: str, message: str = _UNKNOWN) -> None:
        """Name a primitive whose inner program stays as written; once."""
        if name not in self.unknown:
            self.unknown.add(name)
            warnings.warn(message.format(name), stacklevel=2)
