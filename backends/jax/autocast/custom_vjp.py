"""`jax.custom_vjp`: a function that brings a rule for its gradients, in two halves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from polymp.backends.jax import compat
from polymp.backends.jax.autocast.custom_derivatives import (
    Half,
    Rules,
    filled,
    moving_of,
    named,
    once,
    planned,
    where,
)
from polymp.backends.jax.autocast.evaluate import cast, run
from polymp.backends.jax.autocast.frame import Frame, Planned
from polymp.backends.jax.autocast.plan import Plan
from polymp.backends.jax.autocast.values import Known
from polymp.backends.jax.compat.programs import Equation
from polymp.rules.region import Region


def plan_vjp(frame: Frame, eqn: Equation, region: Region) -> Planned:
    """Plan a `jax.custom_vjp` function."""
    return planned(frame, eqn, region, _Reverse)


class _Reverse(Rules):
    """The rule of a `jax.custom_vjp` function.

    Its leading constants are closed over, here as there: they are not differentiated. A rule that
    asked for symbolic zeros is told which arguments are differentiated and which results have a
    cotangent, and gets a plan for each such choice.
    """

    def __init__(self, frame: Frame, eqn: Equation, plan: Plan) -> None:
        super().__init__(frame, eqn, plan)
        self.num_consts = eqn.params.get("num_consts", 0)

    def call(self, values: Sequence[object]) -> Sequence[object]:
        consts, args = values[: self.num_consts], values[self.num_consts :]
        made = self.made
        function = made.get("function") or self.function(consts)
        if not consts:
            made["function"] = function
        outs: Sequence[object] = function(*args)
        return outs

    def function(self, consts: Sequence[object]) -> Callable[..., Sequence[object]]:
        count = len(self.plan.outs)
        floats = tuple(self.floats[self.num_consts :])

        def primal(*args: object) -> tuple[object, ...]:
            return self.primal(*consts, *args)

        def forward(*args: Any) -> tuple[tuple[object, ...], _Residuals]:
            moving = floats
            if self.symbolic_zeros:
                moving = tuple(a.perturbed and f for a, f in zip(args, floats, strict=True))
                args = tuple(a.value for a in args)
            flat = run(self.forward(moving).plan, [*consts, *args])
            return tuple(flat[:count]), _Residuals(moving, flat[count:])

        def backward(saved: _Residuals, cotangents: Sequence[object]) -> tuple[object, ...]:
            coming = moving_of(cotangents, self.float_outs)
            half = self.backward(saved.moving, coming)
            grads = iter(run(half.plan, [*saved.values, *where(cotangents, coming)]))
            moves = iter(half.moves)
            # The gradient of a parameter that is stored low leaves low.
            dtypes = [k.dtype for k in self.plan.known[self.num_consts :]]
            return tuple(
                (cast(next(grads), f) if f else next(grads)) if moving and next(moves) else None
                for moving, f in zip(saved.moving, dtypes, strict=True)
            )

        function = jax.custom_vjp(named(primal, self.name, self.plan.jaxpr))
        function.defvjp(forward, backward, symbolic_zeros=self.symbolic_zeros)
        return function

    @once
    def forward(self, moving: tuple[bool, ...]) -> Half:
        """The forward half, when these arguments are differentiated."""
        count = len(self.plan.outs)
        if self.planned_as is not None:
            before, change = self.planned_as
            half: Half = before.forward(moving)
            saved = range(count, len(half.plan.outs))
            plan, outs = change(half.plan, self.lows, saved, self.name)
            return half._replace(plan=plan, stored=outs[count:])
        skip = self.num_consts
        trees: list[jax.tree_util.PyTreeDef] = []

        def forward(*args: jax.Array) -> tuple[Sequence[jax.Array], list[jax.Array]]:
            consts, args = args[:skip], args[skip:]

            def of_moving(*values: jax.Array) -> Sequence[jax.Array]:
                left = iter(values)
                pairs = zip(args, moving, strict=True)
                return self.original(*consts, *(next(left) if moves else a for a, moves in pairs))

            outs, pull = jax.vjp(of_moving, *where(args, moving))
            residuals, tree = jax.tree.flatten(pull)
            trees.append(tree)
            return outs, residuals

        jaxpr = self.trace(forward, *(var.aval for var in self.eqn.invars))
        dtypes = [k.dtype for k in self.plan.outs]
        saved_count = len(compat.opened(jaxpr)[0].outvars) - count
        wanted = [*dtypes, *[None] * saved_count]
        plan = self.planner.plan(jaxpr, self.plan.known, self.plan.region, wanted)
        return Half(plan, tree=trees[0])

    @once
    def backward(self, moving: tuple[bool, ...], coming: tuple[bool, ...]) -> Half:
        """The backward half, when these arguments are differentiated and these cotangents come."""
        first = self.forward(moving)
        if self.planned_as is not None:
            before, change = self.planned_as
            half: Half = before.backward(moving, coming)
            dtypes = [*first.stored, *[None] * sum(coming)]
            return half._replace(plan=change(half.plan, dtypes, (), self.name)[0])
        count = len(self.plan.outs)
        saved = [var.aval for var in compat.opened(first.plan.jaxpr)[0].outvars[count:]]
        avals = where([var.aval for var in self.eqn.invars[self.num_consts :]], moving)
        results = [var.aval for var in self.eqn.outvars]
        moves: list[bool] = []

        def backward(
            residuals: list[jax.Array], cotangents: list[jax.Array]
        ) -> list[jax.Array | None]:
            pull = jax.tree.unflatten(first.tree, residuals)
            grads = compat.pulled(pull, avals, results, filled(cotangents, coming))
            moves.extend(grad is not None for grad in grads)
            return where(grads, moves)

        jaxpr = self.trace(backward, saved, where(results, coming))
        known = [k._replace(numbers=()) for k in first.plan.outs[count:]]
        known += [Known(k.dtype) for k in where(self.plan.outs, coming)]
        wanted = [k.dtype for k in where(self.plan.known[self.num_consts :], moving)]
        plan = self.planner.plan(
            jaxpr, known, self.plan.region, where(wanted, moves), gradients=True
        )
        return Half(plan, tuple(moves))


@jax.tree_util.register_dataclass
@dataclass
class _Residuals:
    """The residuals that the forward half saves, and the arguments that they are for."""

    moving: tuple[bool, ...] = field(metadata={"static": True})
    values: Sequence[object]
