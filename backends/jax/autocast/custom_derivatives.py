"""Functions with derivative rules of their own: rewritten, and given rewritten rules.

The rule is never read off the equation. The equation is wrapped as a function again, `jax.jvp` or
`jax.vjp` of it is traced at the declared dtypes, and that program is planned like any other. A
rule is planned when a derivative is first asked for, in the region of the call. `custom_jvp` and
`custom_vjp` have the two kinds.
"""

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from functools import wraps
from typing import Any, NamedTuple, Self, TypeVar

import jax

from polymp.backends.jax import compat
from polymp.backends.jax.arrays import is_inexact
from polymp.backends.jax.autocast import regions
from polymp.backends.jax.autocast.evaluate import bind, run
from polymp.backends.jax.autocast.frame import Frame, Planned, Planner
from polymp.backends.jax.autocast.known_functions import FUNCTIONS
from polymp.backends.jax.autocast.plan import Change, Inside, Plan, Step
from polymp.backends.jax.autocast.values import Known
from polymp.backends.jax.compat.programs import ClosedProgram, Equation
from polymp.rules.region import Region

T = TypeVar("T")


def planned(frame: Frame, eqn: Equation, region: Region, rules: "type[Rules]") -> Planned:
    """Plan a call of such a function, with the rules of its kind."""
    known = [frame.known(atom)._replace(numbers=()) for atom in eqn.invars]
    plan = frame.planner.plan(eqn.params["call_jaxpr"], known, region)
    outs = [Known(k.dtype, product=k.product) for k in plan.outs]
    reads, writes = [None] * len(known), [k.dtype for k in outs]
    return frame.step(eqn, reads, writes, inside=rules(frame, eqn, plan)), outs


class Rules(Inside):
    """The derivative rules of one equation, in the dtypes of its plan.

    Args:
        frame: of the program that the equation is part of.
        eqn: the equation.
        plan: of the program that the equation calls.
    """

    def __init__(self, frame: Frame, eqn: Equation, plan: Plan) -> None:
        super().__init__((plan,))
        self.planner: Planner = frame.planner
        self.eqn = eqn
        self.floats: list[bool] = [is_inexact(var.aval) for var in eqn.invars]
        self.float_outs: list[bool] = [is_inexact(var.aval) for var in eqn.outvars]
        self.symbolic_zeros: bool = eqn.params.get("symbolic_zeros", False)
        self.name: str = compat.function_name(plan.jaxpr)
        # Not the plan's: two functions may share a body and differ in their rules.
        self.made: dict[Hashable, Any] = {}
        self.planned_as: tuple[Self, Change] | None = None
        self.lows: list[str | None] = []  # by input, the low dtype that it is stored in

    @property
    def plan(self) -> Plan:
        return self.plans[0]

    def emit(self, step: Step, values: Sequence[object]) -> Sequence[object]:
        if self.plan.as_written and not self.plan.region.enabled:
            return bind(step, values)
        return self.call(values)

    def passed_on(self) -> Sequence[int]:
        return ()  # the rule hands on what the function does, in the same dtypes

    def stored(self, plans: tuple[Plan, ...], lows: Sequence[str | None], change: Change) -> Self:
        """These rules where some inputs come low: planned as ever, then changed."""
        rules = copy(self)
        rules.plans, rules.lows, rules.made = plans, list(lows), {}
        rules.planned_as = self, change
        return rules

    def original(self, *args: jax.Array) -> Sequence[jax.Array]:
        """The equation as a function, at its declared dtypes."""
        primitive = self.eqn.primitive
        outs: Sequence[jax.Array] = primitive.bind(
            *args, **primitive.get_bind_params(self.eqn.params)
        )
        return outs

    def trace(self, function: Callable[..., object], *args: object) -> ClosedProgram:
        """The closed jaxpr of a rule, traced where the call was."""
        with regions.AMBIENT(self.plan.region):
            return jax.make_jaxpr(function)(*args)

    def primal(self, *args: object) -> tuple[object, ...]:
        return tuple(run(self.plan, args))

    def call(self, values: Sequence[object]) -> Sequence[object]:
        raise NotImplementedError


class Half(NamedTuple):
    """A planned rule, or half of one.

    Attributes:
        plan: of what is computed.
        moves: which float results have a tangent, or which differentiated arguments a gradient;
            the others have symbolic zeros.
        tree: of the forward half, the structure of what is saved.
        stored: of the forward half, the dtypes in which its results come where inputs come low.
    """

    plan: Plan
    moves: tuple[bool, ...] = ()
    tree: jax.tree_util.PyTreeDef | None = None
    stored: Sequence[str | None] = ()


def once(method: Callable[..., Half]) -> Callable[..., Half]:
    """A method that plans for each choice of arguments once; kept where its rules keep things."""

    @wraps(method)
    def call(self: Rules, *choice: tuple[bool, ...]) -> Half:
        if choice not in self.made:
            self.made[choice] = method(self, *choice)
        half: Half = self.made[choice]
        return half

    return call


FUNCTIONS.border(Rules.trace)


def moving_of(tangents: Sequence[object], floats: Sequence[bool]) -> tuple[bool, ...]:
    """Which tangents, or cotangents, of floats are no symbolic zeros."""
    zero = jax.custom_derivatives.SymbolicZero
    return tuple(
        is_float and not isinstance(tangent, zero)
        for tangent, is_float in zip(tangents, floats, strict=True)
    )


def where(values: Sequence[T], keep: Sequence[bool]) -> list[T]:
    """The values at the places that are kept."""
    return [value for value, kept in zip(values, keep, strict=True) if kept]


def filled(values: Sequence[T], places: Sequence[bool]) -> list[T | None]:
    """The values in their places, and None in the others."""
    left = iter(values)
    return [next(left) if place else None for place in places]


def named(function: Callable[..., T], name: str, of: ClosedProgram) -> Callable[..., T]:
    """The function under a name, and traced as one that was written where a jaxpr's was."""

    def call(*args: object) -> T:
        return function(*args)

    call.__name__ = call.__qualname__ = name
    return compat.traced_as(call, of)
