"""Autocast as users meet it: a transformation of functions, and a region inside them.

    step = autocast(loss)                      # a function: bfloat16 where the policy says low
    with autocast(enabled=False): ...          # inside such a function: as written

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
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple, TypeVar, cast, overload

import jax
import jax.extend.core as core
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from polymp.backends.jax import compat
from polymp.backends.jax.arrays import Rest, apart, float_dtype, is_array, is_float
from polymp.backends.jax.autocast import known_functions, regions
from polymp.backends.jax.autocast.contraction import contraction_p
from polymp.backends.jax.autocast.evaluate import collector_paused, run
from polymp.backends.jax.autocast.fp8_contraction import fp8_contraction_p
from polymp.backends.jax.autocast.frame import LOW_DTYPES, Frame, Plan, Planner, Plans, given
from polymp.backends.jax.autocast.known_functions import FUNCTIONS, LOWER, UPPER, code_of
from polymp.backends.jax.autocast.planner import planned
from polymp.backends.jax.autocast.regions import NameStacks, module_path
from polymp.backends.jax.compat import ClosedProgram, OpenProgram
from polymp.backends.jax.jaxprs import JITTED
from polymp.backends.jax.modules import nnx
from polymp.backends.jax.modules.scoped import called_paths, naming
from polymp.code_origin import outside
from polymp.errors import PolicyError, PolicyWarning
from polymp.rules import decision_log, policy_files, scopes
from polymp.rules.policy import Policy, Region
from polymp.rules.row import LOW, Row, Rule
from polymp.rules.vocabulary import Op, nearest, vocabulary

F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")
PolicyLike = policy_files.Source | None


@overload
def autocast(
    fn: F,
    *,
    dtype: jax.typing.DTypeLike = ...,
    policy: PolicyLike = ...,
    enabled: bool = ...,
) -> F: ...


@overload
def autocast(
    fn: None = None,
    *,
    dtype: jax.typing.DTypeLike = ...,
    policy: PolicyLike = ...,
    enabled: bool = ...,
) -> "Autocast": ...


def autocast(
    fn: Callable[..., object] | None = None,
    *others: object,
    dtype: jax.typing.DTypeLike = "bfloat16",
    policy: PolicyLike = None,
    enabled: bool = True,
) -> "Callable[..., object] | Autocast":
    """Run a function's ops in the dtypes that suit them, or mark a region inside such a function.

        autocast(fn)               the transformed function; also as a decorator
        @autocast(dtype=...)       the same, with arguments
        with autocast(...):        a region in code that an autocast function calls

    Wrap the loss, not the optimizer's step: `jax.grad(autocast(loss))` gives gradients in the
    parameters' own dtype. Results come in the dtypes in which they were computed, as torch's do.

    Args:
        fn: any function of arrays and other values; arrays are found in any pytree, and what is
            not an array is passed as it is. None for a region or a decorator.
        others: none; torch's `autocast(device, dtype)` raises an error that says how to write it.
        dtype: the low dtype, bfloat16 or float16.
        policy: the table that decides: a policy, the name of one, a dict or a path; None for "amp".
        enabled: False runs the ops in the dtypes they are written in.

    Returns:
        A function with `fn`'s signature, or an object that is a decorator and a context manager.

    Raises:
        TypeError: `fn` is no function, `dtype` no dtype or `enabled` no bool, or an argument after
            `fn` came without its name.
        ValueError: `dtype` is not a low dtype.
        PolicyError: `policy` names none, is wrong, or has a row that jax cannot follow.
    """
    if others:
        raise TypeError(
            f"autocast takes one function and nothing else without a name, and no device; got "
            f"{', '.join(map(repr, (fn, *others)))}. Write autocast(fn, dtype=...)."
        )
    region = _region(dtype, policy, enabled)
    return Autocast(region) if fn is None else transformed(fn, region)


class Autocast:
    """A region with its arguments: a decorator, or a context manager for traced code."""

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

    def __exit__(self, *_: object) -> None:
        regions.leave()

    def __repr__(self) -> str:
        region = self.region
        name = region.policy.name if region.policy else None
        return (
            f"polymp.jax.autocast(dtype={region.dtype}, policy={name!r}, enabled={region.enabled})"
        )


def upper(x: T) -> T:
    """Mark values whose consumers are to see float32; elsewhere the same values.

    For a cast that the program cannot show: `x.astype(float32)` of what is float32 as written
    leaves nothing in a trace.

    Args:
        x: a pytree; its float arrays are marked, and get no narrower than float32.

    Returns:
        The same values, in the same structure.
    """
    marked: T = jax.tree.map(functools.partial(_marked, name=UPPER), x)
    return marked


def lower(x: T) -> T:
    """Mark values that are to take the region's dtype; outside of regions the same values.

    For a loop's first state, say, which otherwise keeps the loop in float32.

    Args:
        x: a pytree; its float arrays are marked.

    Returns:
        The same values, in the same structure.
    """
    marked: T = jax.tree.map(functools.partial(_marked, name=LOWER), x)
    return marked


def _marked(leaf: object, name: str) -> object:
    if is_array(leaf) and is_float(leaf):
        return checkpoint_name(jax.numpy.asarray(leaf), name)
    return leaf


def _region(dtype: jax.typing.DTypeLike, policy: PolicyLike, enabled: bool) -> Region:
    try:
        name = float_dtype(dtype).name
    except TypeError:
        raise TypeError(
            f"autocast(dtype={reprlib.repr(dtype)}): this is not a float dtype. Write "
            "dtype='bfloat16' or dtype='float16'."
        ) from None
    if not isinstance(enabled, (bool, np.bool_)):
        raise TypeError(f"autocast(enabled=...) is True or False, got {reprlib.repr(enabled)}")
    if enabled and name not in LOW_DTYPES:
        raise ValueError(
            f"autocast(dtype={name}): the low dtype of a region is bfloat16 or float16. "
            "For a region in which ops run as written, use enabled=False."
        )
    table: Policy = policy_files.load("amp" if policy is None else policy)
    check(table)
    return Region("jax", "any", bool(enabled), name, True, table)


# The transformation: a function is traced, planned, and run again in the planned dtypes.


class PlannedCall(NamedTuple):
    """A function as traced and planned for arguments of some types."""

    plan: Plan
    rest: Rest[Any]  # what it returns, without the arrays


class AutocastFunction(NamedTuple):
    """The parts of an autocast function; its attribute `polymp`."""

    # The function; another one, where a wrapper has taken over the attribute.
    call: Callable[..., object]
    fn: Callable[..., object]  # that it transforms
    region: Region  # that holds in it


def transformed(
    fn: Callable[..., object], region: Region, traced: Callable[..., PlannedCall] | None = None
) -> Callable[..., object]:
    """Make an autocast function; with a function in the place of `trace`."""
    if not callable(fn) or (isinstance(fn, type) and hasattr(fn, "dtype")):
        raise TypeError(
            f"autocast(fn) needs a function, got {reprlib.repr(fn)}. Write "
            "autocast(fn, dtype=...), and call the result: autocast(loss)(params, x)."
        )
    if region.enabled and _is_of_torch(module := getattr(fn, "__self__", fn), "Module"):
        kind = type(module).__name__
        raise TypeError(
            f"polymp.jax.autocast(fn) needs a function of JAX arrays, got the torch module {kind}, "
            f"which would run as written. {_IN_TORCH}"
        )
    for kind in ("generator", "coroutine", "asyncgen"):
        if getattr(inspect, f"is{kind}function")(fn):
            raise TypeError(
                f"autocast(fn): {fn!r} is a {kind} function, whose body runs after the call that "
                "is traced. Wrap the functions that it calls."
            )
    plans = _PlannedFunction(fn, region, traced)

    @functools.wraps(fn)
    def call(*args: object, **kwargs: object) -> Any:
        if regions.AMBIENT.value is not None:  # the autocast around this one does the work
            with regions.entered(region):
                return fn(*args, **kwargs)
        function, given = nnx.owned(fn, args)
        named = plans.by_path or decision_log.current() is not None
        with naming(regions.is_inside) if named else nullcontext():
            if nnx.among((given, kwargs)):
                return nnx.call(plans.run, function, given, kwargs, named)
            return plans.run(fn, args, kwargs)

    call.polymp = AutocastFunction(call, fn, region)  # type: ignore[attr-defined]
    return call


def _is_of_torch(x: object, name: str) -> bool:
    """True for an object of this class of torch, or of one that extends it."""
    classes = ((str(cls.__module__).split(".")[0], cls.__name__) for cls in type(x).__mro__)
    return ("torch", name) in classes


_IN_TORCH = "Around calls of PyTorch write `with polymp.torch.autocast('cuda', dtype=...):`."

# By the code of a function that `autocast` takes, what is kept for it. Written where it is called,
# `autocast(f)` is another object each time.
_PLANS: weakref.WeakKeyDictionary[object, Plans] = weakref.WeakKeyDictionary()

# Computes the outputs of a plan from its inputs.
Evaluate = Callable[[Sequence[object]], Sequence[object]]


class _PlannedFunction:
    """The plans of a function in a region, which runs by them."""

    def __init__(
        self, fn: Callable[..., object], region: Region, traced: Callable[..., PlannedCall] | None
    ) -> None:
        self.fn, self.region, self.trace = fn, region, traced or trace
        code = code_of(fn) or code_of(type(fn).__call__) or type(fn)
        self.kept = _PLANS.setdefault(code, {})
        self.by_path: bool = region.policy is not None and bool(region.policy.scopes)
        # A warning of patterns that match nothing comes once.
        self.unchecked: bool = self.by_path
        self.keeps_calls: bool = traced is None and not self.by_path
        self.again: Callable[..., tuple[PlannedCall, Evaluate]] = lru_cache(KEPT)(self._again)

    def run(
        self, fn: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> Any:
        """The results of the function, or of one of arrays that stands for it."""
        region = self.region
        arrays, rest = _traced_leaves(fn, args, kwargs)
        key = call_key(fn, rest, arrays) if self.keeps_calls else None
        evaluate: Evaluate
        if key is None:
            traced = self.trace(fn, region, arrays, rest, self.kept)
            evaluate = partial(run, traced.plan)
        else:
            traced, evaluate = self.again(fn, rest, *key)
        if self.unchecked:
            self.unchecked = False
            warn_of_unmatched(traced.plan.jaxpr, region, self.fn)
        if traced.plan.as_written and not region.enabled:  # then what is written is what runs
            with regions.AMBIENT(region):
                return fn(*args, **kwargs)
        tracing = any(isinstance(x, jax.core.Tracer) for x in arrays)
        with collector_paused() if tracing else nullcontext():
            outs = evaluate(arrays)
        # A constant comes as numpy's; what fn would have returned is an array of jax's.
        return traced.rest(x if isinstance(x, jax.Array) else jax.numpy.asarray(x) for x in outs)

    def _again(
        self, fn: Callable[..., object], rest: Rest[Any], avals: Sequence[object], _: Hashable
    ) -> tuple[PlannedCall, Evaluate]:
        """The plan of a call of a jitted function, and what runs it."""
        traced = self.trace(fn, self.region, avals, rest, self.kept)
        return traced, whole(traced.plan)


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
    arrays: Sequence[object],
    rest: Rest[Any],
    kept: Plans,
) -> PlannedCall:
    """Trace and plan a function. The plan itself may hold its caller's arrays: it is not kept."""
    outs: list[Rest[Any]] = []

    def flat(*arrays: object) -> list[object]:
        args, kwargs = rest(arrays)
        with regions.AMBIENT(region):
            out = fn(*args, **kwargs)
        taken, left = apart(out, is_array)
        outs.append(left)
        return taken

    FUNCTIONS.border(flat)
    stand_for(fn, flat)
    compat.check_nans(contraction_p, fp8_contraction_p)
    name = flat.__name__ = getattr(fn, "__name__", "function")
    with collector_paused():
        try:
            jaxpr = jax.make_jaxpr(flat)(*arrays)
        except jax.errors.ConcretizationTypeError as error:
            error.add_note(_TRACED.format(name=name))
            raise
        except NotImplementedError as error:
            if region.enabled and "must be fp16/bf16" in str(error):
                error.add_note(_CUDNN.format(low=region.dtype))
            raise
        own = set(map(id, rest.leaves))  # what is handed on
        made = [x for x in outs[0].leaves if id(x) not in own]
        if region.enabled and any(_is_of_torch(x, "Tensor") for x in made):
            raise TypeError(
                f"polymp.jax.autocast(fn): {name} returned a torch tensor. JAX does not trace the "
                f"ops of PyTorch, so they ran as written. {_IN_TORCH}"
            )
        inputs = tuple(map(given, compat.binders(jaxpr)[1]))
        plan = planned(Frame(Planner(planned, kept), jaxpr, inputs, region))
    return PlannedCall(plan, outs[0])


def stand_for(fn: object, flat: Any) -> None:
    """Let the errors of JAX name a function where it traces one of arrays alone that calls it."""
    flat.__signature__ = _OF_ARRAYS
    if hasattr(inspect.unwrap(cast(Any, fn)), "__code__"):  # JAX prints others, such as modules
        flat.__wrapped__ = fn


_OF_ARRAYS = inspect.signature(lambda *arrays: None)


# Calls of a jitted function under autocast are planned once for arguments of the same types, as
# jit runs its Python once. The plan is compiled as one program, unless the user's jit has options
# of its own, such as donated arguments: then the plan runs op by op, which binds that jit again.

JITTED_FUNCTION = type(jax.jit(lambda: None))

# Types of numbers that a jitted function traces, as it does arrays.
_NUMBERS = frozenset({bool, int, float, complex})

# Plans of a jitted function that are kept.
KEPT = 64


def _traced_leaves(
    fn: object, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[list[Any], Rest[Any]]:
    """The leaves of a call that are traced, apart from the rest, which is passed as it is."""
    if not isinstance(fn, JITTED_FUNCTION):
        return apart((args, kwargs), is_array)
    static = compat.static_leaves(fn, args, kwargs)
    return apart(
        (args, kwargs), lambda x: not next(static) and (type(x) in _NUMBERS or is_array(x))
    )


def call_key(
    fn: object, rest: Rest[Any], arrays: Sequence[object]
) -> tuple[Sequence[object], Hashable] | None:
    """The types of a call's arrays, and all else that its plan depends on, to keep it under."""
    if not isinstance(fn, JITTED_FUNCTION) or decision_log.current() is not None:
        return None
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return None
    try:  # what is left is static: jit has the same program for what is equal, of one type
        hash(rest.leaves)
    except TypeError:
        return None  # and jit says what it takes
    settings = compat.trace_context(), len(vocabulary().registered)
    return tuple(map(jax.typeof, arrays)), (tuple(map(type, rest.leaves)), settings)


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
            path = module_path(outer, stacks.path(stack))
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
                f"{getattr(fn, '__name__', type(fn).__name__)} has. {' '.join(said)}",
                PolicyWarning,
                stacklevel=outside(),
            )


_NONE = (
    "it calls no module that has a name. Modules of linen and haiku have names, and so have models "
    "of nnx and equinox that are called in it. To an nnx model that comes in another way, "
    "polymp.jax.scoped(model) gives names; for all else there is jax.named_scope(name)."
)


# Checks of a policy for jax: rows that jax cannot follow are found before anything is traced.


def check(policy: Policy) -> None:
    """Refuse a policy with a row that jax cannot follow."""
    for why in refusals(policy).values():
        raise PolicyError(why)


@cache
def refusals(policy: Policy) -> Mapping[Row, str]:
    """The rows that jax cannot follow, each with the reason."""
    # A row for an op that jax does not have may stay if all that the op becomes in a trace has the
    # same rule, or if a shipped policy has it too: the vocabulary says why it is not met.
    words, shipped = vocabulary(), policy_files.shipped_rows()
    refused: dict[Row, str] = {}
    for row in policy.rows:
        prefix, _, name = row.of.partition(":")
        why = ""
        if prefix == "jax":
            why = _no_primitive(name)
        elif replace(row, dtype="", scope="") not in shipped:
            is_class = prefix == "class"
            known = words.ops.get(row.of)
            ops = words.members(name) if is_class else (known,) if known else ()
            if ops and not any(_can(op, row.rule) for op in ops):
                why = "" if not is_class and _by_traces(policy, ops[0], row) else _why(row, ops)
        if why:
            refused[row] = f"policy {policy.name!r}: {why}"
    return refused


def _can(op: Op, rule: Rule) -> bool:
    """True if jax has the op, in a form that the rule can be applied to."""
    if not op.jax and not op.functions:
        return False
    if rule not in (Rule.LOWER, Rule.FP8, Rule.WIDEST) or op.rule:
        return True
    return op.kind not in vocabulary().traits["wide"]


def _by_traces(policy: Policy, op: Op, row: Row) -> bool:
    """True if all that the op becomes in a trace has the row's rule."""
    inside = policy.at(row.scope)
    for low in (row.dtype,) if row.dtype else LOW:
        winners = [inside.winner(part, low) for part in op.traces]
        if not winners or any(w is None or w.rule is not row.rule for w in winners):
            return False
    return True


def _why(row: Row, ops: Sequence[Op]) -> str:
    op = next((op for op in ops if op.jax or op.functions), ops[0])
    if op.jax or op.functions:
        return (
            f"jax cannot run {row.of!r} by rule {row.rule}: it has no low form of it. Leave the "
            "row out, or say fp32."
        )
    if op.rule:
        return f"op {row.of!r} is registered for torch alone. Register it for jax, too."
    if not op.traces:
        return f"jax has no {row.of!r}. {op.note}"
    return (
        f"jax runs {row.of!r} as {', '.join(op.traces)}, by the rules for those: give {row.rule} "
        f"to them. {op.note}"
    )


def _no_primitive(name: str) -> str:
    known = known_functions.FREE - known_functions.INDEPENDENT
    base = name.partition(":")[0]
    if base in known or vocabulary().of_jax(base) in vocabulary().registered:
        return ""
    return f"jax has no primitive {name!r} whose dtype a policy may choose.{nearest(base, known)}"
