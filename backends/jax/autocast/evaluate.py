"""A planned program, run under the caller's trace: the same equations, in their planned dtypes.

A plan and values in, values out. Run under a trace, this is what is traced; run eagerly, this
computes. Every equation keeps its name stack, its traceback and its context, so profiles, error
messages and meshes are those of the original.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core, source_info_util
from jax.extend.core import Literal

from polymp.backends.jax import compat
from polymp.backends.jax.autocast import fp8_contraction
from polymp.backends.jax.autocast.contraction import contraction_p, contraction_params
from polymp.backends.jax.autocast.fp8_sharing import SharedOperands
from polymp.backends.jax.autocast.plan import Cast, Kind, Operand, Plan, Step
from polymp.backends.jax.autocast.sharded_weights import rounded_first
from polymp.backends.jax.compat.programs import Atom, ClosedProgram, Equation, OpenProgram
from polymp.rules import decision_log


@contextmanager
def collector_paused() -> Iterator[None]:
    """Python's cycle collector, off while a program is planned or traced again.

    Nothing in either dies before it ends, and the collector would look through all of it again and
    again: large programs paid more for that than for their plan.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def run(plan: Plan, args: Sequence[object]) -> list[object]:
    """The outputs of a planned program, in the dtypes of `plan.outs`.

    Where a trace records what runs, equations are put into it as they are. Anywhere else, and for
    primitives that do something of their own when they are bound, they are bound.
    """
    env: dict[Atom, object] = {}
    casts: dict[tuple[Atom, str], object] = {}
    constvars, invars = compat.binders(plan.jaxpr)
    env.update(zip(constvars, plan.consts, strict=True))
    env.update(zip(invars, args, strict=True))
    given = (*plan.consts, *args)
    recorder = compat.recorder(given)
    bind, put = compat.put, compat.put
    whole: Callable[[object], Any] = _itself
    simple = {Kind.BIND, Kind.CAST}  # what takes values that are recorded, and no more
    if recorder is not None:
        bind, put, whole = recorder.bind, recorder.put, recorder.tracer
        if recorder.meshless:
            simple.add(Kind.CONTRACT)

    def read(operand: Operand, put: Put) -> object:
        if type(operand) is not Cast:
            return operand.val if type(operand) is Literal else env[operand]
        atom, dtype, shared, value = operand
        if value is not None:
            return lax.full_like(whole(env[atom]), value, value.dtype) if atom.aval.shape else value
        if not shared:
            return cast(env[atom], dtype, put)
        key = (atom, dtype)
        if key not in casts:
            casts[key] = cast(env[atom], dtype, put)
        elif record is not None:
            record.spared(step, "shared")
        return casts[key]

    shared_in_8_bits = SharedOperands(plan)

    def results(step: Step, values: list[object], put: Put) -> Sequence[object]:
        return _step(step, values, put, shared_in_8_bits)

    record = decision_log.current()
    outer = source_info_util.current_name_stack()
    here = compat.equation_context()
    # Eagerly, an array is freed after its last reader. A tracer holds none.
    traced = any(isinstance(x, jax.core.Tracer) for x in given)
    drops = [()] * len(plan.steps) if traced else plan.drops
    with compat.EquationSource() as source:
        for step, drop in zip(plan.steps, drops, strict=True):
            eqn = step.eqn
            source.at(eqn.source_info, outer + step.stack if outer.stack else step.stack)
            if eqn.ctx is not here:
                with eqn.ctx.manager:
                    outs = results(step, [whole(read(o, bind)) for o in step.operands], compat.put)
            elif step.kind in simple:
                outs = results(step, [read(o, put) for o in step.operands], put)
            else:
                outs = results(step, [whole(read(o, put)) for o in step.operands], compat.put)
            if record is not None and step.kind is Kind.CAST and _changes(eqn):
                record.spared(step, "cancelled")
            for var, out in zip(eqn.outvars, outs, strict=True):
                env[var] = out
            for var in drop:
                env.pop(var, None)
                shared_in_8_bits.drop(var)
                for dtype in _DTYPES if casts else ():
                    casts.pop((var, dtype), None)
    return [whole(read(o, put)) for o in plan.results]


def _changes(eqn: Equation) -> bool:
    """True for a cast in the program, from one dtype to another."""
    return bool(eqn.invars) and eqn.invars[0].aval.dtype != eqn.outvars[0].aval.dtype


def _itself(x: object) -> object:
    return x


# How an equation comes about: from a primitive, values and parameters to results.
Put = Callable[[core.Primitive, Sequence[object], jax.core.ParamDict], Sequence[object]]


def cast(x: object, dtype: str, put: Put = compat.put) -> object:
    """The array in a dtype; the array itself if it has that already."""
    wanted, aval = _DTYPES[dtype], compat.aval_of(x)
    if aval.dtype == wanted:
        return x
    params = {"new_dtype": wanted, "weak_type": False, "sharding": None}
    if (mesh := compat.other_mesh(aval)) is None:
        return put(lax.convert_element_type_p, (x,), params)[0]
    with jax.sharding.use_abstract_mesh(mesh):
        return put(lax.convert_element_type_p, (x,), params)[0]


_DTYPES = {name: np.dtype(name) for name in ("float32", "bfloat16", "float16")}


def _step(step: Step, values: list[object], put: Put, shared: SharedOperands) -> Sequence[object]:
    eqn, kind = step.eqn, step.kind
    if kind is Kind.BIND:
        outs = put(eqn.primitive, values, _params(step))
    elif kind is Kind.CAST:
        return values
    elif kind is Kind.PICK:
        outs = _picked(step, values)
    elif kind is Kind.ROUND:
        outs = rounded_first(step, values, bind, cast)
    elif kind is Kind.CONTRACT:
        (out,) = step.writes
        assert step.low is not None
        assert out is not None, "a contraction has a float result"
        how = step.in_8_bits
        if how is not None:
            values, how = shared.operands(step, values, put)
        if put is compat.put:  # there may be axes over which they vary
            values = list(compat.varying_alike(*values))
        if how is not None:
            params = fp8_contraction.contraction_params(eqn.params, how, step.low, out)
            outs = put(fp8_contraction.fp8_contraction_p, values, params)
        else:
            params = contraction_params(eqn.primitive, eqn.params, step.low, out)
            outs = put(contraction_p, values, params)
    else:
        assert step.inside is not None
        outs = step.inside.emit(step, values)
    if step.returns is None:
        return outs
    return [
        cast(out, dtype, put) if dtype else out
        for out, dtype in zip(outs, step.returns, strict=True)
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
    params = step.params
    if params is not step.eqn.params and params.get("update_jaxpr", 0) is None:
        update = step.eqn.params["update_jaxpr"]
        return {**params, "update_jaxpr": update_in(update, step.writes[0])}
    return params


def bind(step: Step, values: Sequence[object], **replaced: object) -> Sequence[object]:
    """Bind the equation's own primitive, with some parameters replaced."""
    return compat.put(step.eqn.primitive, values, {**_params(step), **replaced})


def closed(plan: Plan) -> ClosedProgram:
    """The rewritten program as a closed jaxpr; made once for a plan."""
    if plan.as_written and decision_log.current() is None:
        return plan.jaxpr
    if "closed" not in plan.made:
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
            plan.made["closed"] = jax.make_jaxpr(evaluate)(*avals)
    found: ClosedProgram = plan.made["closed"]
    return found


@lru_cache(maxsize=256)
def update_in(jaxpr: core.Jaxpr, dtype: str) -> OpenProgram:
    """The scalar program of a scatter, in another dtype."""
    evaluate = core.jaxpr_as_fun(compat.close(jaxpr))
    scalars = [jax.ShapeDtypeStruct((), np.dtype(dtype)) for _ in jaxpr.invars]
    return compat.opened(jax.make_jaxpr(evaluate)(*scalars))[0]
