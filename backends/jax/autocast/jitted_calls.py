"""Calls of a jitted function under autocast: planned once for arguments of the same types.

jit runs a function's Python once for arguments of the same types, so that nothing is missed if the
whole plan is kept. What is kept is compiled as one program, unless the user's jit has options of
its own, such as donated arguments: then the plan runs op by op, which binds that jit again.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import jax

from polymp.backends.jax import compat
from polymp.backends.jax.autocast.evaluate import run
from polymp.backends.jax.autocast.plan import Plan
from polymp.backends.jax.jaxprs import JITTED
from polymp.rules import decision_log
from polymp.rules.vocabulary import vocabulary


class _Array:
    """Stands for an array among the leaves of a pytree."""

    def __repr__(self) -> str:
        return "array"


ARRAY = _Array()

_FUNCTION = type(jax.jit(lambda: None))

# Types of leaves of which equal ones are the same.
_PLAIN = frozenset({_Array, bool, int, str, type(None)})

# Computes the outputs of a plan from its inputs.
Evaluate = Callable[[Sequence[object]], Sequence[object]]

# Plans of a jitted function that are kept.
KEPT = 64


def is_jitted(fn: object) -> TypeGuard[Callable[..., object]]:
    """True for what `jax.jit` returns."""
    return isinstance(fn, _FUNCTION)


class Key(NamedTuple):
    """All that the plan of a jitted function depends on, besides the leaves of its arguments.

    Attributes:
        avals: types of the arrays.
        kinds: types of the leaves.
        settings: of JAX and of polymp.
    """

    avals: tuple[object, ...]
    kinds: tuple[type, ...]
    settings: Hashable


def key(fn: object, statics: Sequence[object], arrays: Sequence[object]) -> Key | None:
    """Make the key that the plan of a call is kept under."""
    kinds = tuple(map(type, statics))
    if not is_jitted(fn) or decision_log.current() is not None or not _PLAIN.issuperset(kinds):
        return None
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return None
    settings = compat.trace_context(), len(vocabulary().registered)
    return Key(tuple(map(jax.typeof, arrays)), kinds, settings)


def whole(plan: Plan) -> Evaluate:
    """The function that runs a plan, compiled as one program if that is the same."""
    evaluate = partial(run, plan)
    if len(plan.steps) != 1 or not _is_plain(plan.steps[0].eqn):
        return evaluate
    (step,) = plan.steps
    given, returned = [*compat.binders(plan.jaxpr)[1]], [*step.eqn.outvars]
    passes = [*step.operands] == given and [*plan.results] == returned and not plan.consts
    if step.inside is None or not passes:
        return jax.jit(evaluate)
    # The call alone: what is compiled for its plan serves all calls that have the same one.
    compiled: Evaluate = step.inside.plans[0].made.setdefault("whole", jax.jit(evaluate))
    return compiled


def _is_plain(eqn: Any) -> bool:
    """True for a call of a jitted function without options."""
    params = eqn.params
    placed = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    laid_out = (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
    return (
        eqn.primitive.name in JITTED
        and not any(params["donated_invars"])
        and not params.get("compiler_options_kvs")
        and not any(isinstance(x, jax.sharding.Sharding) for x in placed)
        and all(layout is None for layout in laid_out)
    )
