"""A planned program, run under the caller's trace: the same equations, in their planned formats.

A plan and values in, values out. Run under a trace, this is what is traced; run eagerly, this
computes. Every equation keeps its name stack, its traceback and its context, so profiles, error
messages and meshes are those of the original.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core, source_info_util
from jax.extend.core import Literal, Var

from polymp.backends.jax import compat
from polymp.backends.jax.contraction import contract
from polymp.backends.jax.plan import Plan, Step


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


def run(plan: Plan, args: Sequence[Any]) -> list[Any]:
    """The outputs of a planned program, in the formats of `plan.outs`."""
    env: dict[Any, Any] = {}
    casts: dict[tuple[Any, str], Any] = {}
    constvars, invars = compat.binders(plan.jaxpr)
    env.update(zip(constvars, plan.consts, strict=True))
    env.update(zip(invars, args, strict=True))

    def read(operand: Any) -> Any:
        if type(operand) is Var:
            return env[operand]
        if type(operand) is Literal:
            return operand.val
        atom, format, shared, value = operand
        if value is not None:
            return lax.full_like(env[atom], value, value.dtype) if atom.aval.shape else value
        if not shared:
            return cast(env[atom], format)
        key = (atom, format)
        if key not in casts:
            casts[key] = cast(env[atom], format)
        return casts[key]

    outer = source_info_util.current_name_stack()
    here = compat.equation_context()
    # Eagerly, an array is freed after its last reader. A tracer holds none.
    traced = any(isinstance(x, jax.core.Tracer) for x in (*plan.consts, *args))
    drops = [()] * len(plan.steps) if traced else plan.drops
    for step, drop in zip(plan.steps, drops, strict=True):
        eqn = step.eqn
        stack = outer + step.stack if outer.stack else step.stack
        with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack):
            if eqn.ctx is here:
                outs = _step(step, [read(o) for o in step.operands])
            else:
                with eqn.ctx.manager:
                    outs = _step(step, [read(o) for o in step.operands])
        env.update(zip(eqn.outvars, outs, strict=True))
        for var in drop:
            env.pop(var, None)
            for format in _DTYPES if casts else ():
                casts.pop((var, format), None)
    return [read(o) for o in plan.results]


def cast(x: Any, format: str) -> Any:
    """The array in a format; the array itself if it has that already."""
    dtype = _DTYPES[format]
    if x.dtype == dtype:
        return x
    return lax.convert_element_type_p.bind(x, new_dtype=dtype, weak_type=False, sharding=None)


_DTYPES = {name: np.dtype(name) for name in ("float32", "bfloat16", "float16")}


def _step(step: Step, values: list[Any]) -> Sequence[Any]:
    eqn, how = step.eqn, step.how
    if how == "bind":
        outs = bind(step, values)
    elif how == "cast":
        return values
    elif how == "contract":
        (run_in,) = step.parts
        (out,) = step.writes
        assert out is not None, "a contraction has a float result"
        outs = [contract(eqn.primitive, *values, params=eqn.params, run=run_in, out=out)]
    else:
        outs = how(step, values)
    if step.returns is None:
        return outs
    return [
        cast(out, format) if format else out for out, format in zip(outs, step.returns, strict=True)
    ]


def bind(step: Step, values: Sequence[Any], **replaced: Any) -> Sequence[Any]:
    """Bind the equation's own primitive, with some parameters replaced."""
    eqn = step.eqn
    params = step.params
    if replaced:
        params = {**params, **replaced}
    elif params is not eqn.params and params.get("update_jaxpr", 0) is None:
        update = eqn.params["update_jaxpr"]
        params = {**params, "update_jaxpr": _update(update, step.writes[0])}
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(params))
    return out if eqn.primitive.multiple_results else [out]


def closed(plan: Plan) -> Any:
    """The rewritten program as a closed jaxpr; made once for a plan."""
    if plan.as_written:
        return plan.jaxpr
    if "closed" not in plan.made:
        invars = compat.binders(plan.jaxpr)[1]
        avals = [
            var.aval.update(dtype=np.dtype(known.format), weak_type=False)
            if known.format and var.aval.dtype != known.format
            else var.aval
            for var, known in zip(invars, plan.known, strict=True)
        ]
        with source_info_util.reset_name_stack():
            plan.made["closed"] = jax.make_jaxpr(lambda *args: run(plan, args))(*avals)
    return plan.made["closed"]


@lru_cache(maxsize=256)
def _update(jaxpr: Any, format: str) -> Any:
    """The scalar program of a scatter, in another format."""
    evaluate = core.jaxpr_as_fun(compat.close(jaxpr))
    scalars = [jax.ShapeDtypeStruct((), np.dtype(format)) for _ in jaxpr.invars]
    return compat.opened(jax.make_jaxpr(evaluate)(*scalars))[0]
