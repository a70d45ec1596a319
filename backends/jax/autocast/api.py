"""Autocast as users meet it: a transformation of functions, and a region inside them.

    step = autocast(loss)                      # a function: bfloat16 where the policy says low
    with autocast(enabled=False): ...          # inside such a function: as written

`transform` has the transformation itself.
"""

import functools
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TypeVar, overload

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from polymp.backends.jax.arrays import float_dtype, is_array, is_float
from polymp.backends.jax.autocast import known_functions, regions
from polymp.backends.jax.autocast.frame import LOW_DTYPES
from polymp.backends.jax.autocast.op_handlers import LOWER, UPPER
from polymp.backends.jax.autocast.transform import transformed
from polymp.errors import PolicyError
from polymp.rules import policy_files
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


# Checks of a policy for jax: rows that jax cannot follow are found before anything is traced.


def check(policy: Policy) -> None:
    """Refuse a policy with a row that jax cannot follow."""
    for why in refusals(policy).values():
        raise PolicyError(why)


@cache
def refusals(policy: Policy) -> Mapping[Row, str]:
    """The rows that jax cannot follow, each with the reason.

    A row for an op that jax does not have may stay if all that the op becomes in a trace has the
    same rule, or if a shipped policy has it too: the vocabulary says why it is not met.
    """
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
    op = ops[0]
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
