"""`jax.custom_jvp`: a function that brings a rule for its tangents."""

from collections.abc import Sequence

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
from polymp.backends.jax.compat.programs import Equation
from polymp.rules.region import Region


def plan_jvp(frame: Frame, eqn: Equation, region: Region) -> Planned:
    """Plan a `jax.custom_jvp` function."""
    return planned(frame, eqn, region, _Forward)


class _Forward(Rules):
    """The rule of a `jax.custom_jvp` function.

    One that asked for symbolic zeros is told which arguments move, and gets a plan for each such
    choice.
    """

    def call(self, values: Sequence[object]) -> Sequence[object]:
        made = self.made
        if "function" not in made:  # one object, so that JAX's caches know it again
            primal = named(self.primal, self.name, self.plan.jaxpr)
            made["function"] = function = jax.custom_jvp(primal)
            function.defjvp(self.rule, symbolic_zeros=self.symbolic_zeros)
        outs: Sequence[object] = made["function"](*values)
        return outs

    def rule(
        self, primals: Sequence[object], tangents: Sequence[object]
    ) -> tuple[tuple[object, ...], tuple[object, ...]]:
        moving = moving_of(tangents, self.floats)
        half = self.planned(moving)
        given = where(tangents, moving)
        # The tangent of a parameter that is stored low comes low.
        dtypes = [k.dtype for k in half.plan.known[len(primals) :]]
        given = [cast(t, f) if f else t for t, f in zip(given, dtypes, strict=True)]
        flat = run(half.plan, [*primals, *given])
        count = len(self.plan.outs)
        left, moves = iter(flat[count:]), iter(half.moves)
        tangents = [
            next(left) if is_float and next(moves) else compat.symbolic_zero(out)
            for out, is_float in zip(flat[:count], self.float_outs, strict=True)
        ]
        return tuple(flat[:count]), tuple(tangents)

    @once
    def planned(self, moving: tuple[bool, ...]) -> Half:
        """The rule, when these arguments move."""
        if self.planned_as is not None:
            before, change = self.planned_as
            half: Half = before.planned(moving)
            plan, _ = change(half.plan, [*self.lows, *[None] * sum(moving)], (), self.name)
            return half._replace(plan=plan)
        avals = [var.aval for var in self.eqn.invars]
        moves: list[bool] = []

        def pair(
            primals: list[jax.Array], given: list[jax.Array]
        ) -> tuple[Sequence[jax.Array], list[jax.Array | None]]:
            outs, tangents = compat.jvp(self.original, primals, filled(given, moving))
            tangents = where(tangents, self.float_outs)
            moves.extend(tangent is not None for tangent in tangents)
            return outs, where(tangents, moves)

        jaxpr = self.trace(pair, avals, where(avals, moving))
        known = list(self.plan.known)
        # A parameter's tangent counts as one, so that its cotangent is not rounded either.
        given = [k._replace(product=False) for k in where(known, moving)]
        outs = [k.dtype for k in self.plan.outs]
        results = [*outs, *where(where(outs, self.float_outs), moves)]
        plan = self.planner.plan(jaxpr, [*known, *given], self.plan.region, results)
        return Half(plan, tuple(moves))
