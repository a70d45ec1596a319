"""Parameters stored in the dtypes that a program reads them in, for serving.

    serve, served = freeze(autocast(apply), params, tokens)
    logits = jax.jit(serve)(served, tokens)       # the bits of autocast(apply)(params, tokens)

A float32 parameter that the planned program reads with casts to one low dtype, and in no other
way, is stored in that dtype: half the memory, and no cast at each call. Which those are is read
from the plan for some arguments, and checked again for every new trace.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import jax
import numpy as np

from polymp.backends.jax.arrays import is_typed
from polymp.backends.jax.autocast import regions
from polymp.backends.jax.autocast.frame import PlanCache
from polymp.backends.jax.autocast.jitted_calls import ARRAY
from polymp.backends.jax.autocast.transform import Made, PlannedCall, trace, transformed
from polymp.backends.jax.autocast.values import LOW
from polymp.backends.jax.modules import nnx
from polymp.backends.jax.weights.frozen_params import FrozenParams, Signature, dtype_of
from polymp.backends.jax.weights.lower_inputs import Wide, store
from polymp.errors import PolicyError
from polymp.rules.region import Region

T = TypeVar("T")


def freeze(
    fn: Callable[..., object], params: T, *args: object, **kwargs: object
) -> tuple["Frozen", T]:
    """Store the parameters of an autocast function for serving, in the dtypes that it reads.

        float32, every read a cast to one low dtype    stored in that dtype
        float32, read in float32 as well, or returned   as it is
        anything else                                   as it is

    Reads are those of the planned program, also in the bodies of jit, scan, while, cond, remat,
    shard_map and functions with derivative rules, through transposes, reshapes, slices, gathers
    and other moves. The function sees float32 dtypes while it is traced, as before, so its results
    are those of `fn` on the float32 parameters: the same bits, the same dtypes.

    Gradients with respect to other arguments are those of `fn`, too. A gradient with respect to a
    stored parameter comes in the dtype that it is stored in: to train it, use `fn`.

    Args:
        fn: what `autocast(...)` returned; or what `freeze` returned, to serve other arguments as
            well: stored is then what both allow. Its first argument are the parameters.
        params: a pytree of arrays, flax nnx modules among them or not; or of
            `jax.ShapeDtypeStruct`, for an answer without arrays. It is left as it is. Arrays over
            several devices keep their sharding.
        args: the other arguments, or their shapes, as they will be; nothing is run.
        kwargs: the same, by name.

    Returns:
        A function of the stored parameters and the other arguments, with a record of what is
        stored; and those parameters, in the structure of `params`.

    Raises:
        TypeError: `fn` is no autocast function, or holds its parameters itself.
        RuntimeError: called inside an autocast function.
    """
    if regions.AMBIENT.value is not None:
        raise RuntimeError(
            "freeze(fn, params, ...) was called inside an autocast function. Call it outside, "
            "before serving."
        )
    before = fn if isinstance(fn, Frozen) else None
    made = before.made if before else _made(fn)
    apart = nnx.apart(params)
    leaves, tree = jax.tree.flatten(apart.parts)
    typed = [i for i, leaf in enumerate(leaves) if is_typed(leaf)]
    for i in typed if before else ():
        low = before.stored.get(apart.paths[i]) if before else None
        if low and dtype_of(leaves[i]) == low:
            raise TypeError(
                f"freeze(serve, params, ...): {apart.paths[i]} is {low}, as it was stored "
                "before. Pass the float32 parameters, from which both are made."
            )
    function, given = made.fn, ((params, *args), kwargs)
    if nnx.among(given):
        policy = made.region.policy
        named = policy is not None and bool(policy.scopes)
        function, parts, _ = nnx.pure_of(made.fn, *given, named)
        given = (parts, {})
    flat, given_tree = jax.tree.flatten(given)
    call = Signature(function, given_tree, tuple(ARRAY if is_typed(x) else x for x in flat))
    arrays = [leaf for leaf in flat if is_typed(leaf)]
    places = dict(zip(typed, call.first(apart), strict=True))

    why = {i: _reason(leaves[i]) for i in typed}
    if before:
        why = {i: text or before.kept.get(apart.paths[i]) for i, text in why.items()}
    traced = trace(function, made.region, given_tree, call.statics, arrays)
    candidates = [places[i] for i, text in why.items() if text is None]
    found, wide = _decided(call, traced, candidates, made.region)

    lows = {i: found[places[i]] for i in typed if places[i] in found}
    made_of: dict[tuple[int, str], object] = {}  # tied parameters stay one array
    served = list(leaves)
    for i, low in lows.items():
        key = id(leaves[i]), low
        served[i] = made_of[key] = made_of.get(key) if key in made_of else _cast(leaves[i], low)
    stored = {apart.paths[i]: low for i, low in lows.items()}
    kept = {apart.paths[i]: why[i] or wide[places[i]].why for i in typed if i not in lows}
    dtypes = {i: dtype_of(served[i]) for i in typed}
    expected = FrozenParams(tree, apart, dtypes, lows)
    size = [sum(map(_bytes, {id(xs[i]): xs[i] for i in typed}.values())) for xs in (leaves, served)]
    return Frozen(made, stored, kept, size, expected), apart.together(
        jax.tree.unflatten(tree, served)
    )


class Frozen:
    """A function for serving: of parameters as they are stored, and other arguments.

    Attributes:
        stored: by the path of a parameter, the dtype that it is stored in.
        kept: by the path of each other array among the parameters, why it is as it was.
        bytes_before: of the parameters as they came.
        bytes_after: of the parameters as they are stored.
        made: the autocast function.

    Args:
        made: the autocast function.
        stored: see above.
        kept: see above.
        size: bytes before and after.
        expected: the parameters as they are stored.
    """

    def __init__(
        self,
        made: Made,
        stored: Mapping[str, str],
        kept: Mapping[str, str],
        size: Sequence[int],
        expected: FrozenParams,
    ) -> None:
        functools.update_wrapper(self, made.call)
        self.made = made
        self.stored = stored
        self.kept = kept
        self.bytes_before: int
        self.bytes_after: int
        self.bytes_before, self.bytes_after = size
        self._expected = expected
        self._call = transformed(made.fn, made.region, self._traced)

    def __call__(self, served: object, /, *args: object, **kwargs: object) -> Any:
        """Call the autocast function with the stored parameters.

        Args:
            served: the parameters that `freeze` returned, or others of their structure and dtypes.
            args: the other arguments.
            kwargs: the same, by name.

        Returns:
            What the autocast function returns for the float32 parameters, bit for bit.

        Raises:
            TypeError: `served` has another structure or other dtypes.
            PolicyError: with these arguments, the program reads a parameter in float32 that is
                stored in a low dtype.
            RuntimeError: called inside an autocast function.
        """
        if regions.AMBIENT.value is not None:
            raise RuntimeError(
                f"{self!r} was called inside an autocast function, but its dtypes are settled. "
                "Call it outside, or freeze the autocast function around it instead."
            )
        self._expected.check(served)
        return self._call(served, *args, **kwargs)

    def __repr__(self) -> str:
        name = getattr(self.made.fn, "__name__", repr(self.made.fn))
        dtypes = ", ".join(sorted(set(self.stored.values()))) or "a low dtype"
        return (
            f"<frozen {name}: {len(self.stored)} of {len(self.stored) + len(self.kept)} arrays in "
            f"{dtypes}, {self.bytes_before:,} bytes before, {self.bytes_after:,} after>"
        )

    def _traced(
        self,
        fn: Callable[..., object],
        region: Region,
        tree: jax.tree_util.PyTreeDef,
        statics: tuple[object, ...],
        arrays: Sequence[object],
        kept: PlanCache,
    ) -> PlannedCall:
        """The function traced as if its parameters were float32, and planned for what they are."""
        call = Signature(fn, tree, statics)
        low = self._expected.low(call)
        wide = np.dtype("float32")
        avals = [jax.typeof(x).update(dtype=wide) if i in low else x for i, x in enumerate(arrays)]
        traced = trace(fn, region, tree, statics, avals, kept)
        dtypes = [low[i][1] if i in low else None for i in range(len(arrays))]
        made = store(traced.plan, dtypes, call.passed_on(traced))
        for i, read in made.wide.items():
            path, dtype = low[i]
            raise PolicyError(
                f"{path} is stored in {dtype}, but with these arguments {read.why}. Freeze with "
                "these arguments as well: polymp.jax.freeze(serve, params, ...), where serve is "
                "this function and params are the float32 parameters, keeps it in float32."
            )
        return traced._replace(plan=made.plan)


# What is stored


def _made(fn: object) -> Made:
    made = getattr(fn, "polymp", None)
    if not isinstance(made, Made) or made.call is not fn:
        raise TypeError(
            "freeze(fn, params, ...) needs a function that polymp.jax.autocast returned, got "
            f"{_short(fn)}. Write freeze(autocast(fn), params, ...), and put jax.jit and other "
            "transformations around what freeze returns."
        )
    if nnx.owned(made.fn, ())[1]:
        raise TypeError(
            "freeze(fn, params, ...) needs the parameters as first argument, but "
            f"{_short(made.fn)} holds them itself. Write "
            "freeze(autocast(lambda model, *args: model(*args)), model, ...)."
        )
    return made


def _decided(
    call: Signature, traced: PlannedCall, candidates: Iterable[int], region: Region
) -> tuple[dict[int, str], dict[int, Wide]]:
    """By place, the dtype in which an array can be stored, or why it cannot."""
    free = call.passed_on(traced)
    left: set[int] = set(candidates)
    found: dict[int, str] = {}
    wide: dict[int, Wide] = {}
    for dtype in (region.dtype, *sorted(LOW - {region.dtype})):
        tried, why = set(left), {}
        while tried:
            dtypes = [dtype if i in tried else None for i in range(len(traced.plan.known))]
            made = store(traced.plan, dtypes, free)
            unread = tried - made.read if not made.wide else set()
            why.update(made.wide)
            why.update(dict.fromkeys(unread, Wide(None, "nothing reads it")))
            tried -= made.wide.keys() | unread
            if not made.wide and not unread:
                break
        found.update(dict.fromkeys(tried, dtype))
        left -= tried
        wide = {**why, **wide}
        if not any(wide[i].dtype in LOW for i in left):
            break
    return found, wide


def _short(x: object) -> str:
    """A name of an object for a message: never all of its arrays."""
    name = getattr(x, "__qualname__", None)
    return name if isinstance(name, str) else f"an object of {type(x).__name__}"


def _reason(leaf: jax.Array) -> str | None:
    """Why an array cannot be stored low, whatever reads it."""
    if leaf.dtype != np.float32:
        return f"it is {leaf.dtype.name}, not float32"
    if getattr(leaf, "weak_type", False):
        return "it is a number without a dtype of its own"
    return None


def _bytes(x: jax.Array) -> int:
    return prod(map(int, x.shape)) * int(x.dtype.itemsize)


def _cast(x: jax.Array, dtype: str) -> object:
    """The array, or what stands for one, in a dtype, on the same devices."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, np.dtype(dtype), sharding=x.sharding)
    cast = functools.partial(jax.lax.convert_element_type, new_dtype=np.dtype(dtype))
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array) or not x.committed:
        return cast(x)
    return jax.jit(cast, out_shardings=x.sharding)(x)
