"""A planned program, run under the caller's trace: the same equations, in their planned dtypes.

A plan and values in, values out. Run under a trace, this is what is traced; run eagerly, this
computes. Every equation keeps its name stack, its traceback and its context, so profiles, error
messages and meshes are those of the original.
"""

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core, source_info_util
from jax.extend.core import Literal

from polymp.backends.jax import compat
from polymp.backends.jax.autocast.contraction import contract
from polymp.backends.jax.autocast.fp8_contraction import (
    In8Bits,
    Shared,
    contract_in_8_bits,
    quantised_once,
)
from polymp.backends.jax.autocast.frame import Cast, Kind, Operand, Plan, Step, declared
from polymp.backends.jax.compat import Atom, ClosedProgram, OpenProgram
from polymp.backends.jax.jaxprs import last_reads
from polymp.fp8 import WEIGHT
from polymp.rules import decision_log


@contextmanager
def collector_paused() -> Iterator[None]:
    """Python's cycle collector, off while a program is planned or traced again."""
    # It would look through all of it again and again, which cost more than the plan.
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def run(plan: Plan, args: Sequence[object]) -> list[object]:
    """The outputs of a planned program, in the dtypes of `plan.outs`."""
    env: dict[Atom, Any] = {}
    made: dict[Atom, dict[object, Any]] = {}  # by value, its casts by dtype, and its 8-bit forms
    constvars, invars = compat.binders(plan.jaxpr)
    env.update(zip(constvars, plan.jaxpr.consts, strict=True))
    env.update(zip(invars, args, strict=True))
    shared = _shared(plan)

    def read(operand: Operand) -> object:
        if type(operand) is not Cast:
            return operand.val if type(operand) is Literal else env[operand]
        atom, dtype, once, value, _ = operand
        if value is not None:
            return lax.full_like(env[atom], value, value.dtype) if atom.aval.shape else value
        if not once:
            return cast(env[atom], dtype)
        casts = made.setdefault(atom, {})
        if dtype not in casts:
            casts[dtype] = cast(env[atom], dtype)
        return casts[dtype]

    outer, here = source_info_util.current_name_stack(), compat.JaxprEqnContext()
    # Eagerly, an array is freed after its last reader. A tracer holds none.
    traced = any(isinstance(x, jax.core.Tracer) for x in (*plan.jaxpr.consts, *args))
    reads = (step.eqn.invars for step in plan.steps)
    last = {} if traced else last_reads([*reads, plan.jaxpr.jaxpr.outvars])
    for at, step in enumerate(plan.steps):
        eqn = step.eqn
        source = source_info_util.user_context(
            eqn.source_info.traceback, name_stack=outer + step.stack
        )
        with source, nullcontext() if eqn.ctx is here else eqn.ctx.manager:
            values: list[Any] = [read(o) for o in step.operands]
            for place, form in shared[at]:
                forms = made.setdefault(form[0], {})
                if form not in forms:
                    forms[form] = quantised_once(values[place], *form[1:], differentiated=False)
                values[place] = Shared(values[place], forms[form])
            outs = _step(step, values)
        env.update(zip(eqn.outvars, outs, strict=True))
        for atom in eqn.invars if last else ():
            if type(atom) is not Literal and last[atom] == at:
                env.pop(atom, None)
                made.pop(atom, None)
    return list(map(read, plan.results))


def cast(x: object, dtype: str) -> object:
    """The array in a dtype; the array itself if it has that already."""
    target, aval = _DTYPES[dtype], jax.typeof(x)
    if aval.dtype == target:
        return x
    params = {"new_dtype": target, "weak_type": False, "sharding": None}
    mesh = compat.other_mesh(aval)
    with nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh):
        return lax.convert_element_type_p.bind(x, **params)


_DTYPES = {name: np.dtype(name) for name in ("float32", "bfloat16", "float16")}


def _step(step: Step, values: Sequence[Any]) -> Sequence[object]:
    outs: Sequence[object]
    match step.kind:
        case Kind.BIND:
            outs = compat.put(step.eqn.primitive, values, _params(step))
        case Kind.CAST:
            return values
        case Kind.PICK:
            outs = _picked(step, values)
        case Kind.CONTRACT:
            assert step.spec is not None
            if (how := step.in_8_bits) is None:
                outs = [contract(step.spec, *values)]
            else:
                lhs, rhs = values
                outs = [contract_in_8_bits(step.spec, lhs, rhs, how)]
        case Kind.INSIDE:
            assert step.inside is not None
            outs = step.inside.emit(step.inside.plans, step, values)
    if step.returns is None:
        return outs
    return [
        cast(out, dtype) if dtype else out for out, dtype in zip(outs, step.returns, strict=True)
    ]


def _picked(step: Step, values: Sequence[object]) -> Sequence[object]:
    """A gather of low numbers, whose gradients are added up in float32 and rounded once."""
    (low,) = step.writes
    assert low is not None, "it picks floats"

    @jax.custom_jvp
    def picked(*values: object) -> object:
        return bind(step, values)[0]

    @picked.defjvp
    def _(values: Sequence[object], tangents: Sequence[object]) -> tuple[object, object]:
        moved = [cast(tangents[0], "float32"), *values[1:]]
        return picked(*values), cast(bind(step, moved, fill_value=0)[0], low)

    return [picked(*values)]


def _params(step: Step) -> jax.core.ParamDict:
    """The parameters of the equation's own primitive."""
    update = step.params.get("update_jaxpr")  # of a scatter
    if update is not None and step.writes[0] != declared(step.eqn.outvars[0]):
        return {**step.params, "update_jaxpr": update_in(update, step.writes[0])}
    return step.params


def bind(step: Step, values: Sequence[object], **replaced: object) -> Sequence[object]:
    """Bind the equation's own primitive, with some parameters replaced."""
    return compat.put(step.eqn.primitive, values, {**_params(step), **replaced})


def closed(plan: Plan) -> ClosedProgram:
    """The rewritten program as a closed jaxpr; made once for a plan."""
    if plan.as_written and decision_log.current() is None:
        return plan.jaxpr
    if "closed" not in plan.cache:
        invars = compat.binders(plan.jaxpr)[1]
        avals = [
            var.aval.update(dtype=np.dtype(known.dtype), weak_type=False)
            if known.dtype and var.aval.dtype != known.dtype
            else var.aval
            for var, known in zip(invars, plan.known, strict=True)
        ]

        def evaluate(*args: object) -> list[object]:
            return run(plan, args)

        if decision_log.current() is not None:  # a report names the function of a program
            evaluate = compat.traced_as(evaluate, plan.jaxpr)
        with source_info_util.reset_name_stack():
            plan.cache["closed"] = jax.make_jaxpr(evaluate)(*avals)
    found: ClosedProgram = plan.cache["closed"]
    return found


@lru_cache(maxsize=256)
def update_in(jaxpr: core.Jaxpr, dtype: str) -> OpenProgram:
    """The scalar program of a scatter, in another dtype."""
    evaluate = core.jaxpr_as_fun(compat.close(jaxpr))
    scalars = [jax.ShapeDtypeStruct((), np.dtype(dtype)) for _ in jaxpr.invars]
    return compat.opened(jax.make_jaxpr(evaluate)(*scalars))[0]


# Operands in 8 bits that several products read, as those for queries, keys and values do, are
# quantised and saved once.

# An operand in the form in which it is saved: with the recipe, its role and the axes of its scales.
_Form = tuple[Atom, str, str, tuple[int, ...]]


def _forms(step: Step, how: In8Bits) -> Iterator[tuple[int, _Form]]:
    """The operands of a product that are saved in 8 bits, by their places."""
    for at, operand in enumerate(step.operands):
        part, other = how.both[at], how.both[1 - at]
        high = how.rules.weight_gradient_high and other.role == WEIGHT
        if part.given or high or type(operand) is Cast or type(operand) is Literal:
            continue
        axes = how.axes_when_saved(at, len(operand.aval.shape), step.eqn.params)
        yield at, (operand, how.recipe, part.role, axes)


def _shared(plan: Plan) -> list[list[tuple[int, _Form]]]:
    """For each step, its operands in 8 bits that other products of the program take, too."""
    if "shared" not in plan.cache:
        hows = ((step, step.in_8_bits) for step in plan.steps)
        forms = [[*_forms(step, how)] if how else [] for step, how in hows]
        counts = Counter(form for several in forms for _, form in several)
        plan.cache["shared"] = [[x for x in some if counts[x[1]] > 1] for some in forms]
    found: list[list[tuple[int, _Form]]] = plan.cache["shared"]
    return found
