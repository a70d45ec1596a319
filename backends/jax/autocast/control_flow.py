"""Programs inside programs: how each control primitive is planned, and how it is put back.

The plan of a body says in which dtypes it takes its inputs and hands on its outputs; the primitive
is then bound again with the rewritten body and everything else as it was. Consistency:

    scan, while   a carry has one dtype for the whole loop: the widest of what goes in and what
                  comes round, so never narrower than its start
    cond, switch  an output has the widest dtype of all branches
    jit, remat, shard_map   outputs have the dtypes they come out in
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import compress
from typing import Any, NamedTuple, TypeVar

import jax

from polymp.backends.jax import compat
from polymp.backends.jax.arrays import is_inexact
from polymp.backends.jax.autocast import regions
from polymp.backends.jax.autocast.evaluate import bind, closed, run
from polymp.backends.jax.autocast.frame import (
    Emit,
    Frame,
    Inside,
    Plan,
    Planned,
    Planner,
    Step,
    ValueFacts,
    fits,
)
from polymp.backends.jax.autocast.known_functions import FUNCTIONS
from polymp.backends.jax.compat import ClosedProgram, Equation
from polymp.backends.jax.jaxprs import fixed_point, inside, with_programs
from polymp.dtypes import widest
from polymp.rules.policy import Region


def rebound(plans: Sequence[Plan], step: Step, values: Sequence[object]) -> Sequence[object]:
    """The results of a primitive that holds closed programs: it gets the rewritten ones."""
    return bind(step, values, **with_programs(step.eqn, list(map(closed, plans))))


# jit and remat: a call, and one whose body is computed again


def plan_call(frame: Frame, eqn: Equation, region: Region, emit: Emit = rebound) -> Planned:
    """A jitted function, or one whose values are computed again for its derivative."""
    (program,) = inside(eqn)
    plan = frame.planner.plan(program.closed, map(frame.known, eqn.invars), region, keep=True)
    outs = list(plan.outs)
    frame.casts |= "float32" in plan.reads
    reads, writes = [None] * len(eqn.invars), [k.dtype for k in outs]
    return frame.step(eqn, reads, writes, inside=Inside((plan,), emit)), outs


def remat(plans: Sequence[Plan], step: Step, values: Sequence[object]) -> Sequence[object]:
    """The results of a function that is computed again, with constants as operands."""
    (plan,) = plans
    if plan.as_written:
        return bind(step, values)
    jaxpr, consts = compat.lifted(closed(plan))
    return bind(step, [*consts, *values], jaxpr=jaxpr)


# scan and while: loops


def plan_loop(frame: Frame, eqn: Equation, region: Region) -> Planned:
    """A scan or a while loop."""
    body, *tests = inside(eqn)
    known = list(map(frame.known, eqn.invars))
    fixed, start, over = body.split(known)
    rows = [k._replace(product=False) for k in over]

    def planned(carry: Sequence[str | None], results: Sequence[str | None] | None = None) -> Plan:
        given = [*fixed, *map(ValueFacts, carry), *rows]
        return frame.planner.plan(body.closed, given, region, results, keep=True)

    def turn(carry: list[str | None]) -> list[str | None]:
        return [k.dtype for k in planned(carry).outs]

    carry = fixed_point([k.dtype for k in start], turn, _join)
    plan = planned(carry, [*carry, *[None] * (len(eqn.outvars) - len(carry))])
    outs = [ValueFacts(k.dtype) for k in plan.outs]
    reads: list[str | None] = [None] * len(known)
    for at, dtype in zip(body.carried, carry, strict=True):
        reads[at], known[at] = dtype, ValueFacts(dtype)
    tested = (frame.planner.plan(t.closed, t.of(known), region, keep=True) for t in tests)
    whole = Inside((plan, *tested), rebound)
    return frame.step(eqn, reads, [k.dtype for k in outs], inside=whole), outs


def _join(have: str | None, out: str | None) -> str | None:
    return widest((have, out)) if have and out else have


# cond: branches


def plan_cond(frame: Frame, eqn: Equation, region: Region) -> Planned:
    """A choice between programs."""
    known = list(map(frame.known, eqn.invars))
    branches = [(branch.closed, branch.of(known), region) for branch in inside(eqn)]
    free = [frame.planner.plan(*branch, keep=True) for branch in branches]
    dtypes = [_meet(outs) for outs in zip(*(plan.outs for plan in free), strict=True)]
    plans = tuple(frame.planner.plan(*branch, dtypes, keep=True) for branch in branches)
    outs = [ValueFacts(f) for f in dtypes]
    return frame.step(eqn, [None] * len(known), dtypes, inside=Inside(plans, rebound)), outs


def _meet(outs: Sequence[ValueFacts]) -> str | None:
    """The dtype of an output that comes from several branches; numbers take that of the others."""
    hard = [k for k in outs if not k.is_chosen] or outs
    dtypes = [k.dtype for k in hard if k.dtype]
    if not dtypes:
        return None
    dtype = widest(dtypes)
    return dtype if all(fits(n, dtype) for k in outs for n in k.numbers) else "float32"


# shard_map: one program on many devices


def plan_apart(
    frame: Frame, eqn: Equation, region: Region, rules: "type[Rules] | None" = None
) -> Planned:
    """A program on many devices, or with derivative rules of its own: planned apart."""
    # Of numbers around it nothing is known in it.
    (program,) = inside(eqn)
    known = [frame.known(atom)._replace(numbers=()) for atom in eqn.invars]
    plan = frame.planner.plan(program.closed, known, region, keep=rules is None)
    outs = [ValueFacts(k.dtype, product=k.product) for k in plan.outs]
    reads, writes = [None] * len(known), [k.dtype for k in outs]
    emit = _mapped if rules is None else rules(frame.planner, eqn, plan).emit
    return frame.step(eqn, reads, writes, inside=Inside((plan,), emit)), outs


def _mapped(plans: Sequence[Plan], step: Step, values: Sequence[object]) -> Sequence[object]:
    (plan,), params = plans, step.params
    if plan.as_written:
        return bind(step, values)
    mapped: Callable[..., Sequence[object]] = jax.shard_map(
        lambda *args: tuple(run(plan, args)),
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=params["out_specs"],
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )
    return mapped(*values)


# Functions with derivative rules of their own: rewritten, and given rewritten rules.
#
# The rule is never read off the equation. The equation is wrapped as a function again, `jax.jvp` or
# `jax.vjp` of it is traced at the declared dtypes, and that program is planned like any other. A
# rule is planned when a derivative is first asked for, in the region of the call. Forward and
# reverse rules have a part each.

T = TypeVar("T")


class Half(NamedTuple):
    """A planned rule, or half of one, for one choice of what is differentiated."""

    plan: Plan  # of what is computed
    # Which float results have a tangent, or which differentiated arguments a gradient; the others
    # have symbolic zeros.
    moves: Sequence[bool] = ()
    # Of the forward half, the structure of what is saved.
    tree: jax.tree_util.PyTreeDef | None = None


class Rules:
    """The derivative rules of one equation, in the dtypes of the plan of what it calls."""

    skip = 0  # how many of the first operands are constants, which are closed over

    def __init__(self, planner: Planner, eqn: Equation, plan: Plan) -> None:
        self.planner, self.eqn, self.plan = planner, eqn, plan
        self.floats: list[bool] = [is_inexact(var.aval) for var in eqn.invars]
        self.float_outs: list[bool] = [is_inexact(var.aval) for var in eqn.outvars]
        self.symbolic_zeros: bool = eqn.params.get("symbolic_zeros", False)
        # One object, so that JAX's caches know it again.
        self.whole = None if self.skip else self.function(())

    def emit(self, _: Sequence[Plan], step: Step, values: Sequence[object]) -> Sequence[object]:
        if self.plan.as_written and not self.plan.region.enabled:
            return bind(step, values)
        consts, args = values[: self.skip], values[self.skip :]
        outs: Sequence[object] = (self.whole or self.function(consts))(*args)
        return outs

    def function(self, consts: Sequence[object]) -> Callable[..., Sequence[object]]:
        """The call as a function with these rules, of all but its constants."""
        raise NotImplementedError

    def original(self, *args: jax.Array) -> Sequence[jax.Array]:
        """The equation as a function, at its declared dtypes."""
        return compat.put(self.eqn.primitive, args, self.eqn.params)

    def trace(self, function: Callable[..., object], *args: object) -> ClosedProgram:
        """The closed jaxpr of a rule, traced where the call was."""
        with regions.AMBIENT(self.plan.region):
            return jax.make_jaxpr(function)(*args)

    def primal(self, *consts: object) -> Callable[..., tuple[object, ...]]:
        """The call as a function of all but its first arguments."""
        called: Callable[..., tuple[object, ...]] = compat.traced_as(
            lambda *args: tuple(run(self.plan, [*consts, *args])), self.plan.jaxpr
        )
        return called


FUNCTIONS.border(Rules.trace)


def moving_of(tangents: Sequence[object], floats: Sequence[bool]) -> tuple[bool, ...]:
    """Which tangents, or cotangents, of floats are no symbolic zeros."""
    zero = jax.custom_derivatives.SymbolicZero
    return tuple(
        is_float and not isinstance(tangent, zero)
        for tangent, is_float in zip(tangents, floats, strict=True)
    )


def filled(values: Iterable[T], places: Sequence[bool]) -> list[T | None]:
    """The values in their places, and None in the others."""
    left = iter(values)
    return [next(left) if place else None for place in places]


class Forward(Rules):
    """The rule of a `jax.custom_jvp` function, for its tangents.

    One that asked for symbolic zeros is told which arguments move, and gets a plan for each such
    choice.
    """

    def __init__(self, planner: Planner, eqn: Equation, plan: Plan) -> None:
        super().__init__(planner, eqn, plan)
        self.half: Callable[..., Half] = cache(self.planned)

    def function(self, consts: Sequence[object]) -> Callable[..., Sequence[object]]:
        function = jax.custom_jvp(self.primal(*consts))
        function.defjvp(self.rule, symbolic_zeros=self.symbolic_zeros)
        return function

    def rule(
        self, primals: Sequence[object], tangents: Sequence[object]
    ) -> tuple[tuple[object, ...], tuple[object, ...]]:
        moving = moving_of(tangents, self.floats)
        half, count = self.half(moving), len(self.plan.outs)
        flat = run(half.plan, [*primals, *compress(tangents, moving)])
        left, moves = iter(flat[count:]), iter(half.moves)
        # A rule that did not ask for symbolic zeros may not return one: `jax.linearize` refuses it.
        zero = partial(jax.custom_derivatives.zero_from_primal, symbolic_zeros=self.symbolic_zeros)
        tangents = [
            next(left) if is_float and next(moves) else zero(out)
            for out, is_float in zip(flat[:count], self.float_outs, strict=True)
        ]
        return tuple(flat[:count]), tuple(tangents)

    def planned(self, moving: tuple[bool, ...]) -> Half:
        """The rule, when these arguments move."""
        avals = [var.aval for var in self.eqn.invars]
        moves: list[bool] = []

        def pair(
            primals: list[jax.Array], given: list[jax.Array]
        ) -> tuple[Sequence[jax.Array], list[jax.Array | None]]:
            outs, tangents = compat.jvp(self.original, primals, filled(given, moving))
            tangents = [*compress(tangents, self.float_outs)]
            moves.extend(tangent is not None for tangent in tangents)
            return outs, [*compress(tangents, moves)]

        jaxpr = self.trace(pair, avals, [*compress(avals, moving)])
        # A parameter's tangent counts as one, so that its cotangent is not rounded either.
        tangents = [k._replace(product=False) for k in compress(self.plan.known, moving)]
        outs = [k.dtype for k in self.plan.outs]
        results = [*outs, *compress(compress(outs, self.float_outs), moves)]
        known = [*self.plan.known, *tangents]
        return Half(self.planner.plan(jaxpr, known, self.plan.region, results), moves)


class Reverse(Rules):
    """The rule of a `jax.custom_vjp` function, for its gradients, in two halves.

    Its leading constants are closed over, here as there: they are not differentiated. A rule that
    asked for symbolic zeros is told which arguments are differentiated and which results have a
    cotangent, and gets a plan for each such choice.
    """

    def __init__(self, planner: Planner, eqn: Equation, plan: Plan) -> None:
        self.skip = eqn.params.get("num_consts", 0)
        super().__init__(planner, eqn, plan)
        self.forward: Callable[..., Half] = cache(self.planned_forward)
        self.backward: Callable[..., Half] = cache(self.planned_backward)

    def function(self, consts: Sequence[object]) -> Callable[..., Sequence[object]]:
        count = len(self.plan.outs)
        floats = tuple(self.floats[self.skip :])

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
            grads = iter(run(half.plan, [*saved.values, *compress(cotangents, coming)]))
            moves = iter(half.moves)
            return tuple(next(grads) if moving and next(moves) else None for moving in saved.moving)

        function = jax.custom_vjp(self.primal(*consts))
        function.defvjp(forward, backward, symbolic_zeros=self.symbolic_zeros)
        return function

    def planned_forward(self, moving: tuple[bool, ...]) -> Half:
        """The forward half, when these arguments are differentiated."""
        trees: list[jax.tree_util.PyTreeDef] = []

        def forward(*args: jax.Array) -> tuple[Sequence[jax.Array], list[jax.Array]]:
            consts, args = args[: self.skip], args[self.skip :]

            def of_moving(*values: jax.Array) -> Sequence[jax.Array]:
                left = iter(values)
                pairs = zip(args, moving, strict=True)
                return self.original(*consts, *(next(left) if moves else a for a, moves in pairs))

            outs, pull = jax.vjp(of_moving, *compress(args, moving))
            residuals, tree = jax.tree.flatten(pull)
            trees.append(tree)
            return outs, residuals

        jaxpr = self.trace(forward, *(var.aval for var in self.eqn.invars))
        dtypes = [k.dtype for k in self.plan.outs]
        results = [*dtypes, *[None] * (len(jaxpr.jaxpr.outvars) - len(dtypes))]
        plan = self.planner.plan(jaxpr, self.plan.known, self.plan.region, results)
        return Half(plan, tree=trees[0])

    def planned_backward(self, moving: tuple[bool, ...], coming: tuple[bool, ...]) -> Half:
        """The backward half, when these arguments are differentiated and these cotangents come."""
        first = self.forward(moving)
        count = len(self.plan.outs)
        saved = [var.aval for var in first.plan.jaxpr.jaxpr.outvars[count:]]
        avals = [*compress((var.aval for var in self.eqn.invars[self.skip :]), moving)]
        results = [var.aval for var in self.eqn.outvars]
        moves: list[bool] = []

        def backward(
            residuals: list[jax.Array], cotangents: list[jax.Array]
        ) -> list[jax.Array | None]:
            pull = jax.tree.unflatten(first.tree, residuals)
            grads = compat.pulled(pull, avals, results, filled(cotangents, coming))
            moves.extend(grad is not None for grad in grads)
            return [*compress(grads, moves)]

        jaxpr = self.trace(backward, saved, [*compress(results, coming)])
        known = [k._replace(numbers=()) for k in first.plan.outs[count:]]
        known += [ValueFacts(k.dtype) for k in compress(self.plan.outs, coming)]
        of_moving = compress(self.plan.known[self.skip :], moving)
        dtypes = [k.dtype for k in compress(of_moving, moves)]
        plan = self.planner.plan(jaxpr, known, self.plan.region, dtypes, gradients=True)
        return Half(plan, moves)


@jax.tree_util.register_dataclass
@dataclass
class _Residuals:
    """The residuals that the forward half saves, and the arguments that they are for."""

    moving: tuple[bool, ...] = field(metadata={"static": True})
    values: Sequence[object]
