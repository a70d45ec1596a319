"""The transformation: a function is traced, planned, and run again in the planned dtypes.

A call traces the function at the dtypes it was written in, plans a dtype for every value, and
runs the program again in those dtypes under the caller's own trace. It does so at every call: what
Python reads from outside, a library's context among it, is read anew. Plans are kept for the
programs inside whose traces JAX keeps, those of jitted functions; see also `jitted_calls`.
"""

import functools
import gc
import inspect
import reprlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax

from polymp.backends.jax import compat
from polymp.backends.jax.arrays import is_array
from polymp.backends.jax.autocast import jitted_calls, regions
from polymp.backends.jax.autocast.escapes import escaped
from polymp.backends.jax.autocast.evaluate import collector_paused, run
from polymp.backends.jax.autocast.frame import PlanCache, given
from polymp.backends.jax.autocast.jitted_calls import ARRAY
from polymp.backends.jax.autocast.known_functions import FUNCTIONS, code_of
from polymp.backends.jax.autocast.plan import Plan
from polymp.backends.jax.autocast.planner import planner
from polymp.backends.jax.autocast.unmatched import warn_of_unmatched
from polymp.backends.jax.modules import nnx
from polymp.backends.jax.modules.scoped import naming
from polymp.errors import EscapedValueError
from polymp.rules import decision_log
from polymp.rules.region import Region


class PlannedCall(NamedTuple):
    """A function as traced and planned for arguments of some types."""

    plan: Plan
    tree: jax.tree_util.PyTreeDef
    statics: Sequence[object]


class Made(NamedTuple):
    """The parts of an autocast function; its attribute `polymp`.

    Attributes:
        call: the function; another one, where a wrapper has taken over the attribute.
        fn: that it transforms.
        region: that holds in it.
    """

    call: Callable[..., object]
    fn: Callable[..., object]
    region: Region


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
    kept = _kept_for(fn)
    new = traced or trace
    by_path = region.policy is not None and bool(region.policy.scopes)
    once = jitted_calls.is_jitted(fn) and traced is None and not by_path
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
        key = jitted_calls.key(fn, statics, arrays) if once else None
        evaluate: jitted_calls.Evaluate
        if key is None:
            traced = new(fn, region, tree, statics, arrays, kept)
            evaluate = partial(run, traced.plan)
        else:
            traced, evaluate = again(fn, tree, statics, key)
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

    @lru_cache(maxsize=jitted_calls.KEPT)
    def again(
        fn: Callable[..., object],
        tree: jax.tree_util.PyTreeDef,
        statics: Sequence[object],
        key: jitted_calls.Key,
    ) -> tuple[PlannedCall, jitted_calls.Evaluate]:
        """The plan of a call of a jitted function, and what runs it."""
        made = new(fn, region, tree, statics, key.avals, kept)
        return made, jitted_calls.whole(made.plan)

    call.polymp = Made(call, fn, region)  # type: ignore[attr-defined]
    return call


# By the code of a function that `autocast` takes, what is kept for it. Written where it is called,
# `autocast(f)` is another object each time.
_PLANS: weakref.WeakKeyDictionary[object, PlanCache] = weakref.WeakKeyDictionary()


def _kept_for(fn: Callable[..., object]) -> PlanCache:
    code = code_of(fn) or code_of(type(fn).__call__) or type(fn)
    return _PLANS.setdefault(code, PlanCache())


_ESCAPED = (
    "autocast(fn): {fn!r} stored values outside of itself that end with its trace: {shown}. Return "
    "them instead. Where a library stores them, such as parameters that haiku or flax linen make "
    "in init, or samples of numpyro, wrap the whole of what returns them, as in autocast(net.init) "
    "and autocast(net.apply), or only functions inside that store nothing."
)


# cuDNN's kernels take low dtypes alone, and look while they are traced.
_CUDNN = (
    "polymp.jax.autocast traces a function in the dtypes as written, and casts afterwards; cuDNN's "
    "kernels ask for low ones before that. Cast around the call: call_in(functools.partial("
    "jax.nn.dot_product_attention, implementation='cudnn'), jax.numpy.{low})(query, key, value)."
)


def trace(
    fn: Callable[..., object],
    region: Region,
    tree: jax.tree_util.PyTreeDef,
    statics: Sequence[object],
    arrays: Sequence[object],
    kept: PlanCache | None = None,
) -> PlannedCall:
    """Trace and plan a function."""
    found: list[tuple[jax.tree_util.PyTreeDef, Sequence[object]]] = []
    running: list[weakref.ref[jax.core.Trace]] = []

    def flat(*arrays: object) -> list[object]:
        running.append(weakref.ref(compat.traces()[0]))
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
    flat.__name__ = getattr(fn, "__name__", "function")
    with collector_paused():
        gc.collect(0)  # what is young from here on, the trace has made
        try:
            jaxpr = jax.make_jaxpr(flat)(*arrays)
        except (NotImplementedError, ValueError) as error:
            if region.enabled and compat.asks_for_low(error):
                error.add_note(_CUDNN.format(low=region.dtype))
            raise
        if found_outside := escaped(running[0]):
            shown, more = ", ".join(found_outside[:3]), len(found_outside) - 3
            shown += f" and {more} more" if more > 0 else ""
            raise EscapedValueError(_ESCAPED.format(fn=fn, shown=shown))
        invars = compat.binders(jaxpr)[1]
        plan = planner(region, kept).plan_whole(jaxpr, map(given, invars), region)
    return PlannedCall(plan, *found[0])
