"""Autocast as users meet it: a transformation of functions, and a region inside them.

    step = autocast(loss)                      # a function: bfloat16 where the policy says low
    with autocast(enabled=False): ...          # inside such a function: as written

A call traces the function at the dtypes it was written in, plans a format for every value, and
runs the program again in those formats under the caller's own trace. It does so at every call: what
Python reads from outside, a library's context among it, is read anew. Plans are kept for the
programs inside whose traces JAX keeps, those of jitted functions.
"""

import functools
import gc
import inspect
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, overload

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from polymp.backends.jax import compat
from polymp.backends.jax.autocast import regions
from polymp.backends.jax.autocast.control_flow import planner
from polymp.backends.jax.autocast.escapes import escaped
from polymp.backends.jax.autocast.evaluate import collector_paused, run
from polymp.backends.jax.autocast.known_functions import FUNCTIONS
from polymp.backends.jax.autocast.plan import Kept, Plan
from polymp.backends.jax.autocast.planner import LOWER, UPPER, given
from polymp.backends.jax.autocast.validate import check
from polymp.backends.jax.autocast.values import LOW
from polymp.backends.jax.modules import nnx
from polymp.backends.jax.modules.scoped import naming, warn_of_unmatched
from polymp.errors import EscapedValueError
from polymp.rules import decisions, policy_files
from polymp.rules.policy import Policy
from polymp.rules.region import Region

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
PolicyLike = Any

# What a float32 array may do to a low one: widen it always, or only if something made it float32.
PROMOTIONS = ("strong", "weak")


@overload
def autocast(
    fn: F,
    *,
    dtype: Any = ...,
    policy: PolicyLike = ...,
    enabled: bool = ...,
    promotion: str = ...,
) -> F: ...


@overload
def autocast(
    fn: None = None,
    *,
    dtype: Any = ...,
    policy: PolicyLike = ...,
    enabled: bool = ...,
    promotion: str = ...,
) -> "Autocast": ...


def autocast(
    fn: Any = None,
    *others: Any,
    dtype: Any = "bfloat16",
    policy: PolicyLike = None,
    enabled: bool = True,
    promotion: str = "strong",
) -> Any:
    """Run a function's ops in the formats that suit them, or mark a region inside such a function.

        autocast(fn)               the transformed function; also as a decorator
        @autocast(dtype=...)       the same, with arguments
        with autocast(...):        a region in code that an autocast function calls

    Wrap the loss, not the optimizer's step: `jax.grad(autocast(loss))` gives gradients in the
    parameters' own dtype. Results come in the formats in which they were computed, as torch's do.

    Args:
        fn: any function of arrays and other values; arrays are found in any pytree, and what is
            not an array is passed as it is. None for a region or a decorator.
        others: none; what torch's spelling would put here is answered with a sentence.
        dtype: the low format, bfloat16 or float16.
        policy: the table that decides: a policy, the name of one, a dict or a path; None for "amp".
        enabled: False runs the ops in the formats they are written in.
        promotion: what a float32 array does to a low one that it meets in an op without a rule.
            "strong": both go to float32, as in torch. "weak": only if something made it float32,
            which is an op that the policy runs in float32, `upper`, an `astype`, a loop, or code
            that runs as written; parameters and what is made of them follow the low one. That
            saves memory, and costs digits where float32 was there for a sum: an accumulator that
            starts as zeros and takes low terms becomes low. Start it with `upper(zeros)` to keep
            it. From TensorFlow's auto_mixed_precision grappler pass.

    Returns:
        A function with `fn`'s signature, or an object that is a decorator and a context manager.

    Raises:
        TypeError: `fn` is no function, `dtype` no dtype or `enabled` no bool, or an argument after
            `fn` came without its name.
        ValueError: `dtype` is not a low format, or `promotion` neither "strong" nor "weak".
        PolicyError: `policy` names none, is wrong, or has a row that jax cannot follow.
    """
    if others:
        raise TypeError(
            f"autocast takes one function and nothing else without a name, and no device; got "
            f"{', '.join(map(repr, (fn, *others)))}. Write autocast(fn, dtype=...)."
        )
    region = _region(dtype, policy, enabled, promotion)
    return Autocast(region) if fn is None else transformed(fn, region)


class Autocast:
    """A region with its arguments: a decorator, or a context manager for traced code.

    Attributes:
        region: what holds inside.
    """

    def __init__(self, region: Region) -> None:
        self.region = region

    def __call__(self, fn: F) -> F:
        """The transformed function."""
        result: F = transformed(fn, self.region)  # type: ignore[assignment]
        return result

    def __enter__(self) -> "Autocast":
        if regions.AMBIENT.value is None:
            raise RuntimeError(
                "`with autocast(...)` marks a region for the autocast function around it, and "
                "there is none here. Wrap the function that is called from outside: "
                "polymp.jax.autocast(fn), or autocast(fn, enabled=False) if the rest of it is to "
                "run as written."
            )
        regions.enter(self.region)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        regions.leave()

    def __repr__(self) -> str:
        region = self.region
        name = region.policy.name if region.policy else None
        return (
            f"polymp.jax.autocast(dtype={region.format}, policy={name!r}, "
            f"enabled={region.enabled}, promotion={region.promotion!r})"
        )


def upper(x: T) -> T:
    """Mark values whose consumers are to see float32; elsewhere the same values.

    For a cast that the program cannot show: `x.astype(float32)` of what is float32 as written
    leaves nothing in a trace.

    Args:
        x: a pytree; its float arrays are marked, and get no narrower than float32.
    """
    marked: T = jax.tree.map(functools.partial(_marked, name=UPPER), x)
    return marked


def lower(x: T) -> T:
    """Mark values that are to take the region's format; outside of regions the same values.

    For a loop's first state, say, which otherwise keeps the loop in float32.

    Args:
        x: a pytree; its float arrays are marked.
    """
    marked: T = jax.tree.map(functools.partial(_marked, name=LOWER), x)
    return marked


def call_in(fn: F, dtype: Any) -> F:
    """A function that runs as written on arguments that are cast to `dtype`.

    For code that looks at dtypes while it is traced, such as a kernel that wants float16: under
    autocast Python sees the dtypes as written. The casts are real ones, in a region or not.

    Args:
        fn: any function.
        dtype: what float32, bfloat16 and float16 arrays among its arguments become.

    Returns:
        A function with `fn`'s signature; it returns what `fn` returns.

    Raises:
        TypeError: `fn` is not callable or `dtype` is not a float dtype.
    """
    if not callable(fn):
        raise TypeError(f"call_in(fn, dtype) needs a function, got {fn!r}")
    to = _float_dtype(dtype)

    def cast(leaf: Any) -> Any:
        if not is_array(leaf) or jax.dtypes.canonicalize_dtype(leaf.dtype).name not in _CAST:
            return leaf
        return jax.numpy.asarray(leaf).astype(to)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(cast, (args, kwargs))
        with regions.as_written():
            return fn(*args, **kwargs)

    return call  # type: ignore[return-value]


_CAST = frozenset({"float32", "bfloat16", "float16"})


def _marked(leaf: Any, name: str) -> Any:
    if is_array(leaf) and jax.numpy.issubdtype(leaf.dtype, np.floating):
        return checkpoint_name(jax.numpy.asarray(leaf), name)
    return leaf


def _region(dtype: Any, policy: PolicyLike, enabled: bool, promotion: str) -> Region:
    format = _float_dtype(dtype).name
    if not isinstance(enabled, (bool, np.bool_)):
        raise TypeError(f"autocast(enabled=...) is True or False, got {enabled!r}")
    if enabled and format not in LOW:
        raise ValueError(
            f"autocast(dtype={format}): the low format of a region is bfloat16 or float16. "
            "For a region in which ops run as written, use enabled=False."
        )
    if not (isinstance(promotion, str) and promotion in PROMOTIONS):
        raise ValueError(
            f"autocast(promotion={promotion!r}): promotion is one of {', '.join(PROMOTIONS)}."
        )
    table: Policy = policy_files.load("amp" if policy is None else policy)
    check(table)
    return Region("jax", "any", bool(enabled), format, True, table, promotion=promotion)


def _float_dtype(dtype: Any) -> Any:
    try:
        found = None if dtype is None else jax.numpy.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jax.numpy.issubdtype(found, jax.numpy.floating):
        raise TypeError(
            "dtype must be a float dtype of jax or numpy, such as jax.numpy.bfloat16, got "
            f"{dtype!r}"
        )
    return found


# The transformation


class Traced(NamedTuple):
    """A function as traced and planned for arguments of some types."""

    plan: Plan
    tree: Any
    statics: list[Any]


class Made(NamedTuple):
    """What an autocast function is made of; the function's attribute `polymp`.

    Attributes:
        call: the function; another one, where a wrapper has taken over the attribute.
        fn: that it transforms.
        region: that holds in it.
    """

    call: Callable[..., Any]
    fn: Callable[..., Any]
    region: Region


def transformed(
    fn: Callable[..., Any], region: Region, traced: "Callable[..., Traced] | None" = None
) -> Callable[..., Any]:
    """An autocast function.

    Args:
        fn: to transform.
        region: that holds in it.
        traced: traces and plans in place of `trace`, with its arguments.
    """
    if not callable(fn) or (isinstance(fn, type) and hasattr(fn, "dtype")):
        raise TypeError(
            f"autocast(fn) needs a function, got {fn!r}. Give the other arguments by name: "
            "autocast(fn, dtype=...)."
        )
    for kind in ("generator", "coroutine", "asyncgen"):
        if getattr(inspect, f"is{kind}function")(fn):
            raise TypeError(
                f"autocast(fn): {fn!r} is a {kind} function, whose body runs after the call that "
                "is traced. Wrap the functions that it calls."
            )
    kept = Kept()
    new = traced or trace
    by_path = region.policy is not None and bool(region.policy.scopes)
    unchecked = [region] if by_path else []  # whether its patterns match is said once

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if regions.AMBIENT.value is not None:  # the autocast around this one does the work
            with regions.entered(region):
                return fn(*args, **kwargs)
        function, given = nnx.owned(fn, args)
        named = by_path or decisions.current() is not None
        with naming() if named else nullcontext():
            if nnx.among((given, kwargs)):
                out = nnx.call(through, function, given, kwargs, named)
            else:
                out = through(fn, args, kwargs)
        regions.note_call(region)
        return out

    def through(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [leaf for leaf in leaves if is_array(leaf)]
        statics = tuple(ARRAY if is_array(leaf) else leaf for leaf in leaves)
        traced = new(fn, region, tree, statics, arrays, kept)
        if unchecked:
            unchecked.clear()
            warn_of_unmatched(traced.plan.jaxpr, region, call)
        if traced.plan.as_written and not region.enabled:  # then what is written is what runs
            with regions.AMBIENT(region):
                return fn(*args, **kwargs)
        if any(isinstance(x, jax.core.Tracer) for x in arrays):
            with collector_paused():
                found = run(traced.plan, arrays)
        else:
            found = run(traced.plan, arrays)
        # A constant comes as numpy's; what fn would have returned is an array of jax's.
        outs = map(jax.numpy.asarray, found)
        leaves = [next(outs) if leaf is ARRAY else leaf for leaf in traced.statics]
        return jax.tree.unflatten(traced.tree, leaves)

    call.polymp = Made(call, fn, region)  # type: ignore[attr-defined]
    return call


class _Array:
    """Stands for an array among the leaves of a pytree."""

    def __repr__(self) -> str:
        return "array"


ARRAY = _Array()


def is_array(leaf: Any) -> bool:
    """True for what is traced; everything else is passed as it is."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype == np.bool_ or bool(jax.numpy.issubdtype(leaf.dtype, np.number))
    return isinstance(leaf, jax.Array)


_ESCAPED = (
    "autocast(fn): {fn!r} stored values outside of itself that end with its trace: {shown}. Return "
    "them instead. Where a library stores them, such as parameters that haiku or flax linen make "
    "in init, or samples of numpyro, wrap the whole of what returns them, as in autocast(net.init) "
    "and autocast(net.apply), or only functions inside that store nothing."
)


# cuDNN's kernels take low formats alone, and look while they are traced.
_CUDNN = (
    "polymp.jax.autocast traces a function in the dtypes as written, and casts afterwards; cuDNN's "
    "kernels ask for low ones before that. Cast around the call: call_in(functools.partial("
    "jax.nn.dot_product_attention, implementation='cudnn'), jax.numpy.{low})(query, key, value)."
)


def trace(
    fn: Callable[..., Any],
    region: Region,
    tree: Any,
    statics: Any,
    arrays: list[Any],
    kept: Kept | None = None,
) -> Traced:
    """Trace and plan a function.

    Args:
        fn: of arrays.
        region: that holds in it.
        tree: of its positional and keyword arguments.
        statics: its leaves, with `ARRAY` for each array.
        arrays: or what has their types.
        kept: plans of earlier calls, to which those of this one are added.

    Raises:
        EscapedValueError: the function stored values of its trace elsewhere.
    """
    found: list[Any] = []
    running: list[weakref.ref[Any]] = []

    def flat(*arrays: Any) -> list[Any]:
        running.append(weakref.ref(compat.traces()[0]))
        left = iter(arrays)
        leaves = [next(left) if leaf is ARRAY else leaf for leaf in statics]
        args, kwargs = jax.tree.unflatten(tree, leaves)
        with regions.AMBIENT(region):
            out = fn(*args, **kwargs)
        leaves, out_tree = jax.tree.flatten(out)
        found.extend((out_tree, [ARRAY if is_array(leaf) else leaf for leaf in leaves]))
        return [leaf for leaf in leaves if is_array(leaf)]

    FUNCTIONS.border(flat)
    flat.__name__ = getattr(fn, "__name__", "function")
    with collector_paused():
        gc.collect(0)  # what is young from here on, the trace has made
        try:
            jaxpr = jax.make_jaxpr(flat)(*arrays)
        except (NotImplementedError, ValueError) as error:
            if region.enabled and compat.asks_for_low(error):
                error.add_note(_CUDNN.format(low=region.format))
            raise
        if found_outside := escaped(running[0]):
            shown, more = ", ".join(found_outside[:3]), len(found_outside) - 3
            shown += f" and {more} more" if more > 0 else ""
            raise EscapedValueError(_ESCAPED.format(fn=fn, shown=shown))
        invars = compat.binders(jaxpr)[1]
        plan = planner(region, kept).plan_whole(jaxpr, map(given, invars), region)
    out_tree, statics_out = found
    return Traced(plan, out_tree, statics_out)
