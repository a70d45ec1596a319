"""The transformation: a function is traced, planned, and run again in the planned dtypes.

A call traces the function at the dtypes it was written in, plans a dtype for every value, and
runs the program again in those dtypes under the caller's own trace. It does so at every call: what
Python reads from outside, a library's context among it, is read anew. Plans are kept for the
programs inside whose traces JAX keeps, those of jitted functions.
"""

import functools
import inspect
import reprlib
import warnings
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.extend.core as core

from polymp.backends.jax import compat
from polymp.backends.jax.arrays import is_array
from polymp.backends.jax.autocast import regions
from polymp.backends.jax.autocast.contraction import contraction_p
from polymp.backends.jax.autocast.evaluate import collector_paused, run
from polymp.backends.jax.autocast.fp8_contraction import fp8_contraction_p
from polymp.backends.jax.autocast.frame import Frame, Plan, Planner, Plans, given
from polymp.backends.jax.autocast.known_functions import FUNCTIONS, code_of
from polymp.backends.jax.autocast.planner import planned
from polymp.backends.jax.autocast.regions import NameStacks
from polymp.backends.jax.compat.programs import ClosedProgram, OpenProgram
from polymp.backends.jax.jaxprs import JITTED
from polymp.backends.jax.modules import nnx
from polymp.backends.jax.modules.scoped import called_paths, naming
from polymp.code_origin import outside
from polymp.errors import PolicyWarning
from polymp.rules import decision_log, scopes
from polymp.rules.policy import Region
from polymp.rules.vocabulary import vocabulary


class PlannedCall(NamedTuple):
    """A function as traced and planned for arguments of some types."""

    plan: Plan
    tree: jax.tree_util.PyTreeDef
    statics: Sequence[object]


class AutocastFunction(NamedTuple):
    """The parts of an autocast function; its attribute `polymp`."""

    # The function; another one, where a wrapper has taken over the attribute.
    call: Callable[..., object]
    fn: Callable[..., object]  # that it transforms
    region: Region  # that holds in it


def transformed(
    fn: Callable[..., object], region: Region, traced: "Callable[..., PlannedCall] | None" = None
) -> Callable[..., object]:
    """Make an autocast function."""
    if not callable(fn) or (isinstance(fn, type) and hasattr(fn, "dtype")):
        raise TypeError(
            f"autocast(fn) needs a function, got {reprlib.repr(fn)}. Write "
            "autocast(fn, dtype=...), and call the result: autocast(loss)(params, x)."
        )
    for kind in ("generator", "coroutine", "asyncgen"):
        if getattr(inspect, f"is{kind}function")(fn):
            raise TypeError(
                f"autocast(fn): {fn!r} is a {kind} function, whose body runs after the call that "
                "is traced. Wrap the functions that it calls."
            )
    code = code_of(fn) or code_of(type(fn).__call__) or type(fn)
    kept = _PLANS.setdefault(code, {})
    new = traced or trace
    by_path = region.policy is not None and bool(region.policy.scopes)
    once = is_jitted(fn) and traced is None and not by_path
    unchecked = [region] if by_path else []  # a warning of patterns that match nothing comes once

    @functools.wraps(fn)
    def call(*args: object, **kwargs: object) -> Any:
        if regions.AMBIENT.value is not None:  # the autocast around this one does the work
            with regions.entered(region):
                return fn(*args, **kwargs)
        function, given = nnx.owned(fn, args)
        named = by_path or decision_log.current() is not None
        with naming(regions.is_inside) if named else nullcontext():
            if nnx.among((given, kwargs)):
                out = nnx.call(through, function, given, kwargs, named)
            else:
                out = through(fn, args, kwargs)
        regions.note_call(region)
        return out

    def through(
        fn: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [leaf for leaf in leaves if is_array(leaf)]
        statics = tuple(ARRAY if is_array(leaf) else leaf for leaf in leaves)
        key = call_key(fn, statics, arrays) if once else None
        evaluate: Evaluate
        if key is None:
            traced = new(fn, region, tree, statics, arrays, kept)
            evaluate = partial(run, traced.plan)
        else:
            traced, evaluate = again(fn, tree, statics, *key)
        if unchecked:
            unchecked.clear()
            warn_of_unmatched(traced.plan.jaxpr, region, call)
        if traced.plan.as_written and not region.enabled:  # then what is written is what runs
            with regions.AMBIENT(region):
                return fn(*args, **kwargs)
        if any(isinstance(x, jax.core.Tracer) for x in arrays):
            with collector_paused():
                found = evaluate(arrays)
        else:
            found = evaluate(arrays)
        # A constant comes as numpy's; what fn would have returned is an array of jax's.
        outs = (x if isinstance(x, jax.Array) else jax.numpy.asarray(x) for x in found)
        leaves = [next(outs) if leaf is ARRAY else leaf for leaf in traced.statics]
        return jax.tree.unflatten(traced.tree, leaves)

    @lru_cache(maxsize=KEPT)
    def again(
        fn: Callable[..., object],
        tree: jax.tree_util.PyTreeDef,
        statics: Sequence[object],
        avals: Sequence[object],
        _: Hashable,
    ) -> tuple[PlannedCall, Evaluate]:
        """The plan of a call of a jitted function, and what runs it."""
        made = new(fn, region, tree, statics, avals, kept)
        return made, whole(made.plan)

    call.polymp = AutocastFunction(call, fn, region)  # type: ignore[attr-defined]
    return call


# By the code of a function that `autocast` takes, what is kept for it. Written where it is called,
# `autocast(f)` is another object each time.
_PLANS: weakref.WeakKeyDictionary[object, Plans] = weakref.WeakKeyDictionary()

_TRACED = (
    "polymp.jax.autocast traces {name}, as jax.jit does, so that its Python cannot branch on the "
    "values of arrays. Write jax.lax.cond or jax.numpy.where, or autocast the functions in the "
    "branches."
)

# cuDNN's kernels take low dtypes alone, and look while they are traced.
_CUDNN = (
    "polymp.jax.autocast traces a function in the dtypes as written, and casts afterwards; cuDNN's "
    "kernels ask for low ones before that. Cast around the call: autocast(functools.partial("
    "jax.nn.dot_product_attention, implementation='cudnn'), enabled=False)"
    "(*(x.astype('{low}') for x in (query, key, value)))."
)


def trace(
    fn: Callable[..., object],
    region: Region,
    tree: jax.tree_util.PyTreeDef,
    statics: Sequence[object],
    arrays: Sequence[object],
    kept: Plans,
) -> PlannedCall:
    """Trace and plan a function. The plan itself may hold its caller's arrays: it is not kept."""
    found: list[tuple[jax.tree_util.PyTreeDef, Sequence[object]]] = []

    def flat(*arrays: object) -> list[object]:
        left = iter(arrays)
        leaves = [next(left) if leaf is ARRAY else leaf for leaf in statics]
        args, kwargs = jax.tree.unflatten(tree, leaves)
        with regions.AMBIENT(region):
            out = fn(*args, **kwargs)
        leaves, out_tree = jax.tree.flatten(out)
        found.append((out_tree, [ARRAY if is_array(leaf) else leaf for leaf in leaves]))
        return [leaf for leaf in leaves if is_array(leaf)]

    FUNCTIONS.border(flat)
    compat.follow_buffers(regions.is_enabled)
    compat.check_nans(contraction_p, fp8_contraction_p)
    flat.__name__ = getattr(fn, "__name__", "function")
    with collector_paused():
        try:
            jaxpr = jax.make_jaxpr(flat)(*arrays)
        except jax.errors.ConcretizationTypeError as error:
            error.add_note(_TRACED.format(name=flat.__name__))
            raise
        except NotImplementedError as error:
            if region.enabled and "must be fp16/bf16" in str(error):
                error.add_note(_CUDNN.format(low=region.dtype))
            raise
        inputs = tuple(map(given, compat.binders(jaxpr)[1]))
        plan = planned(Frame(Planner(planned, kept), jaxpr, inputs, region))
    return PlannedCall(plan, *found[0])


# Calls of a jitted function under autocast are planned once for arguments of the same types, as
# jit runs its Python once. The plan is compiled as one program, unless the user's jit has options
# of its own, such as donated arguments: then the plan runs op by op, which binds that jit again.


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


def call_key(
    fn: object, statics: Sequence[object], arrays: Sequence[object]
) -> tuple[Sequence[object], Hashable] | None:
    """The types of a call's arrays, and all else that its plan depends on, to keep it under."""
    kinds = tuple(map(type, statics))
    if not is_jitted(fn) or decision_log.current() is not None or not _PLAIN.issuperset(kinds):
        return None
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return None
    settings = compat.trace_context(), len(vocabulary().registered)
    return tuple(map(jax.typeof, arrays)), (kinds, settings)


def whole(plan: Plan) -> Evaluate:
    """The function that runs a plan, compiled as one program if that is the same."""
    evaluate = partial(run, plan)
    if len(plan.steps) != 1 or not _is_plain(plan.steps[0].eqn):
        return evaluate
    (step,) = plan.steps
    given, returned = [*compat.binders(plan.jaxpr)[1]], [*step.eqn.outvars]
    passes = [*step.operands] == given and [*plan.results] == returned and not plan.jaxpr.consts
    if step.inside is None or not passes:
        return jax.jit(evaluate)
    # The call alone: what is compiled for its plan serves all calls that have the same one.
    compiled: Evaluate = step.inside.plans[0].cache.setdefault("whole", jax.jit(evaluate))
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


# `warn_of_unmatched` warns of rules by module path whose pattern matches nothing in a program.


def warn_of_unmatched(closed: ClosedProgram, region: Region, fn: object) -> None:
    """Warn of patterns that match no module path: of no op, and in no model that was named."""
    stacks = NameStacks()
    paths = {"", *called_paths()}
    policies = [region.policy]

    def walk(jaxpr: OpenProgram, outer: str) -> None:
        for eqn in jaxpr.eqns:
            stack = eqn.source_info.name_stack
            inside, _ = stacks.place(stack, region)
            policies.append(inside.policy)
            path = ".".join(filter(None, (outer, stacks.path(stack))))
            paths.add(path)
            for inner in core.jaxprs_in_params(eqn.params):
                walk(getattr(inner, "jaxpr", inner), path)

    walk(closed.jaxpr, "")
    for policy in filter(None, dict.fromkeys(policies)):
        said = [
            f"{pattern!r}: {scopes.hint(pattern, paths, _NONE)}"
            for pattern in policy.scopes
            if not any(scopes.depth(pattern, path) for path in paths)
        ]
        if said:
            warnings.warn(
                f"autocast(): policy {policy.name!r} has rules for paths that no module of "
                f"{getattr(fn, '__name__', repr(fn))} has. {' '.join(said)}",
                PolicyWarning,
                stacklevel=outside(),
            )


_NONE = (
    "it calls no module that has a name. Modules of linen and haiku have names, and so have models "
    "of nnx and equinox that are called in it; for all else there is jax.named_scope(name)."
)
