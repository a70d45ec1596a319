"""Functions with derivative rules of their own: rewritten, and given rewritten rules.

The rule is never read off the equation. The equation is wrapped as a function again, `jax.jvp` or
`jax.vjp` of it is traced at the declared formats, and that program is planned like any other. A
rule is planned when a derivative is first asked for, in the region of the call.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any

import jax
import numpy as np

from polymp.backends.jax import compat, regions
from polymp.backends.jax.emit import bind, cast, run
from polymp.backends.jax.functions import FUNCTIONS
from polymp.backends.jax.plan import Plan, Step
from polymp.backends.jax.program import Planned, Program
from polymp.backends.jax.values import Known
from polymp.region import Region


def plan_jvp(program: Program, eqn: Any, region: Region) -> Planned:
    """Plan a `jax.custom_jvp` function."""
    return _plan(program, eqn, region, _Forward)


def plan_vjp(program: Program, eqn: Any, region: Region) -> Planned:
    """Plan a `jax.custom_vjp` function."""
    return _plan(program, eqn, region, _Reverse)


def _plan(program: Program, eqn: Any, region: Region, rules: "type[_Rules]") -> Planned:
    known = [program.known(atom)._replace(number=None) for atom in eqn.invars]
    plan = program.planner.plan(eqn.params["call_jaxpr"], known, region)
    outs = [Known(k.format, product=k.product, weak=k.weak) for k in plan.outs]
    writes = [k.format for k in outs]
    parts = plan, rules(program, eqn, plan)
    return program.step(eqn, [None] * len(known), writes, _emit, parts=parts), outs


def _emit(step: Step, values: Sequence[Any]) -> Sequence[Any]:
    plan, rules = step.parts
    if plan.as_written and not plan.region.enabled:
        return bind(step, values)
    outs: Sequence[Any] = rules.call(values)
    return outs


# Makes a plan one for inputs that come in low formats; see `storing`. In: the plan, by input the
# low format or None, the outputs that may come low, and the name of the function. Out: the plan,
# and by output the low format or None.
Change = Callable[
    [Plan, Sequence[str | None], Iterable[int], str], tuple[Plan, Sequence[str | None]]
]


class _Rules:
    """The derivative rules of one equation, in the formats of its plan.

    Args:
        program: that the equation is part of.
        eqn: the equation.
        plan: of the program that the equation calls.
    """

    def __init__(self, program: Program, eqn: Any, plan: Plan) -> None:
        self.planner = program.planner
        self.eqn = eqn
        self.plan = plan
        self.floats = [_is_float(var) for var in eqn.invars]
        self.float_outs = [_is_float(var) for var in eqn.outvars]
        self.name = compat.function_name(plan.jaxpr)
        # Not the plan's: two functions may share a body and differ in their rules.
        self.made: dict[Any, Any] = {}
        self.planned_as: tuple[Any, Change] | None = None

    def stored(self, plan: Plan, change: "Change") -> "_Rules":
        """These rules where some inputs come low: planned as ever, then changed.

        Args:
            plan: of the program that the equation calls, for those inputs.
            change: what makes a plan of a rule one for low inputs.
        """
        rules = copy(self)
        rules.plan, rules.made, rules.planned_as = plan, {}, (self, change)
        return rules

    def original(self, *args: Any) -> Any:
        """The equation as a function, at its declared formats."""
        primitive = self.eqn.primitive
        return primitive.bind(*args, **primitive.get_bind_params(self.eqn.params))

    def lows(self) -> list[str | None]:
        """By input, the low format that it is stored in."""
        assert self.planned_as is not None
        pairs = zip(self.plan.known, self.planned_as[0].plan.known, strict=True)
        return [now.format if now.format != planned.format else None for now, planned in pairs]

    def trace(self, function: Callable[..., Any], *args: Any) -> Any:
        """The closed jaxpr of a rule, traced where the call was."""
        with regions.AMBIENT(self.plan.region):
            return jax.make_jaxpr(function)(*args)

    def primal(self, *args: Any) -> tuple[Any, ...]:
        return tuple(run(self.plan, args))

    def call(self, values: Sequence[Any]) -> Sequence[Any]:
        raise NotImplementedError


class _Forward(_Rules):
    """The rule of a `jax.custom_jvp` function."""

    def call(self, values: Sequence[Any]) -> Sequence[Any]:
        made = self.made
        if "function" not in made:  # one object, so that JAX's caches know it again
            primal = _named(self.primal, self.name, self.plan.jaxpr)
            made["function"] = function = jax.custom_jvp(primal)
            function.defjvp(self.rule)
        outs: Sequence[Any] = made["function"](*values)
        return outs

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        plan = self.planned()
        moving = _where(tangents, self.floats)
        # The tangent of a parameter that is stored low comes low.
        formats = [k.format for k in plan.known[len(primals) :]]
        moving = [cast(t, f) if f else t for t, f in zip(moving, formats, strict=True)]
        flat = run(plan, [*primals, *moving])
        count = len(self.plan.outs)
        return tuple(flat[:count]), tuple(_refill(flat[count:], self.float_outs, self.eqn.outvars))

    def planned(self) -> Plan:
        made = self.made
        if "jvp" not in made and self.planned_as is not None:
            before, change = self.planned_as
            formats = [*self.lows(), *[None] * sum(self.floats)]
            made["jvp"], _ = change(before.planned(), formats, (), self.name)
        if "jvp" not in made:
            avals = [var.aval for var in self.eqn.invars]

            def pair(primals: list[Any], moving: list[Any]) -> Any:
                tangents = _refill(moving, self.floats, self.eqn.invars)
                outs, tangents_out = jax.jvp(self.original, tuple(primals), tuple(tangents))
                return outs, _where(tangents_out, self.float_outs)

            jaxpr = self.trace(pair, avals, _where(avals, self.floats))
            known = list(self.plan.known)
            # A parameter's tangent counts as one, so that its cotangent is not rounded either.
            moving = [k._replace(product=False) for k in _where(known, self.floats)]
            outs = [k.format for k in self.plan.outs]
            results = [*outs, *_where(outs, self.float_outs)]
            made["jvp"] = self.planner.plan(jaxpr, [*known, *moving], self.plan.region, results)
        plan: Plan = made["jvp"]
        return plan


class _Reverse(_Rules):
    """The rule of a `jax.custom_vjp` function.

    Its leading constants are closed over, here as there: they are not differentiated. A rule that
    asked for symbolic zeros is told which arguments are differentiated, and gets a plan for each
    such choice.
    """

    def __init__(self, program: Program, eqn: Any, plan: Plan) -> None:
        super().__init__(program, eqn, plan)
        self.num_consts = eqn.params.get("num_consts", 0)
        self.symbolic_zeros = eqn.params.get("symbolic_zeros", False)

    def call(self, values: Sequence[Any]) -> Sequence[Any]:
        consts, args = values[: self.num_consts], values[self.num_consts :]
        made = self.made
        function = made.get("function") or self.function(consts)
        if not consts:
            made["function"] = function
        outs: Sequence[Any] = function(*args)
        return outs

    def function(self, consts: Sequence[Any]) -> Any:
        count = len(self.plan.outs)
        floats = tuple(self.floats[self.num_consts :])

        def primal(*args: Any) -> tuple[Any, ...]:
            return self.primal(*consts, *args)

        def forward(*args: Any) -> tuple[Any, Any]:
            moving = floats
            if self.symbolic_zeros:
                moving = tuple(a.perturbed and f for a, f in zip(args, floats, strict=True))
                args = tuple(a.value for a in args)
            flat = run(self.planned(moving)[0], [*consts, *args])
            return tuple(flat[:count]), _Residuals(moving, flat[count:])

        def backward(saved: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
            cotangents = [_instantiated(ct) for ct in _where(cotangents, self.float_outs)]
            plan = self.planned(saved.moving)[1]
            made = run(plan, [*saved.values, *cotangents])
            # The gradient of a parameter that is stored low leaves low.
            wanted = _where([k.format for k in self.plan.known[self.num_consts :]], saved.moving)
            grads = iter(cast(g, f) if f else g for g, f in zip(made, wanted, strict=True))
            return tuple(next(grads) if moves else None for moves in saved.moving)

        function = jax.custom_vjp(_named(primal, self.name, self.plan.jaxpr))
        function.defvjp(forward, backward, symbolic_zeros=self.symbolic_zeros)
        return function

    def planned(self, moving: tuple[bool, ...]) -> tuple[Plan, Plan]:
        """The forward and the backward half, when these arguments are differentiated."""
        made = self.made
        if ("vjp", moving) not in made:
            made["vjp", moving] = self.both(moving)
        plans: tuple[Plan, Plan] = made["vjp", moving]
        return plans

    def both(self, moving: tuple[bool, ...]) -> tuple[Plan, Plan]:
        if self.planned_as is not None:
            return self.both_stored(moving)
        known, region, planner = list(self.plan.known), self.plan.region, self.planner
        skip = self.num_consts
        trees: list[Any] = []

        def forward(*args: Any) -> Any:
            consts, args = args[:skip], args[skip:]

            def of_moving(*values: Any) -> Any:
                left = iter(values)
                pairs = zip(args, moving, strict=True)
                return self.original(*consts, *(next(left) if moves else a for a, moves in pairs))

            outs, pull = jax.vjp(of_moving, *_where(args, moving))
            residuals, tree = jax.tree.flatten(pull)
            trees.append(tree)
            return outs, residuals

        jaxpr = self.trace(forward, *(var.aval for var in self.eqn.invars))
        count = len(self.plan.outs)
        outs = [k.format for k in self.plan.outs]
        saved = [var.aval for var in compat.opened(jaxpr)[0].outvars[count:]]
        first = planner.plan(jaxpr, known, region, [*outs, *[None] * len(saved)])

        def backward(residuals: list[Any], cotangents: list[Any]) -> Any:
            every = _refill(cotangents, self.float_outs, self.eqn.outvars)
            return jax.tree.unflatten(trees[0], residuals)(every)

        jaxpr = self.trace(
            backward, saved, _where([v.aval for v in self.eqn.outvars], self.float_outs)
        )
        before = [k._replace(number=None) for k in first.outs[count:]]
        cotangents = [Known(f) for f in _where(outs, self.float_outs)]
        wanted = [k.format for k in _where(known[skip:], moving)]
        return first, planner.plan(jaxpr, [*before, *cotangents], region, wanted, gradients=True)

    def both_stored(self, moving: tuple[bool, ...]) -> tuple[Plan, Plan]:
        assert self.planned_as is not None
        before, change = self.planned_as
        first, second = before.planned(moving)
        count = len(self.plan.outs)
        saved = range(count, len(first.outs))
        first, outs = change(first, self.lows(), saved, self.name)
        cotangents = len(second.known) - len(saved)
        second, _ = change(second, [*outs[count:], *[None] * cotangents], (), self.name)
        return first, second


FUNCTIONS.border(_Rules.trace)


@jax.tree_util.register_pytree_node_class
class _Residuals:
    """What the forward half hands to the backward half: arrays, and which arguments it is for."""

    def __init__(self, moving: tuple[bool, ...], values: Sequence[Any]) -> None:
        self.moving, self.values = moving, values

    def tree_flatten(self) -> tuple[Sequence[Any], tuple[bool, ...]]:
        return self.values, self.moving

    @classmethod
    def tree_unflatten(cls, moving: tuple[bool, ...], values: Sequence[Any]) -> "_Residuals":
        return cls(moving, values)


def _instantiated(cotangent: Any) -> Any:
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return jax.numpy.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


def _is_float(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, np.inexact)


def _where(values: Sequence[Any], keep: Sequence[bool]) -> list[Any]:
    return [value for value, kept in zip(values, keep, strict=True) if kept]


def _refill(moving: Sequence[Any], floats: Sequence[bool], variables: Sequence[Any]) -> list[Any]:
    """Tangents of all variables from those of the float ones."""
    left = iter(moving)
    return [
        next(left) if is_float else np.zeros(var.aval.shape, jax.dtypes.float0)
        for var, is_float in zip(variables, floats, strict=True)
    ]


def _named(function: Callable[..., Any], name: str, of: Any) -> Any:
    """The function under a name, and traced as one that was written where a jaxpr's was."""

    def call(*args: Any) -> Any:
        return function(*args)

    call.__name__ = call.__qualname__ = name
    return compat.traced_as(call, of)
