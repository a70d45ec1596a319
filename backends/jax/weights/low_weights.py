"""`low_weights`: any optax optimizer for parameters that are kept in 16 bits.

    tx = low_weights(optax.adamw(1e-3), mode="split")
    opt_state = tx.init(params)         # of float32 parameters
    params = tx.weights(params)         # from here on bfloat16

The optimizer inside sees float32 parameters and gradients, and steps on them. What it makes of them
is rounded by the rule of `polymp.weights`, and comes out as the update that brings the low weights
there. Optax is imported when it is called.
"""

from __future__ import annotations

import math
import reprlib
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polymp import weights
from polymp.backends.jax.arrays import is_float, is_typed, leaf_path
from polymp.backends.jax.autocast import regions
from polymp.backends.jax.autocast.api import transformed
from polymp.backends.jax.modules import nnx
from polymp.backends.jax.weights.freeze import Frozen, autocast_function, freeze
from polymp.rules import scopes
from polymp.weights import Mode, Verbs, key, random16, summary

if typing.TYPE_CHECKING:
    import optax  # type: ignore[import-untyped]

P = TypeVar("P")
Keep = str | tuple[Any, ...]


class LowWeightsState(NamedTuple):
    """The state of an optimizer in `polymp.jax.low_weights`.

    Attributes:
        step: int32 [], how many were taken.
        beside: what stands beside each low weight, in the structure of the parameters, with
            `optax.MaskedNode()` beside the others; None in mode "stochastic".
        inner: the state of the optimizer inside, of float32 parameters.
    """

    step: jax.Array
    beside: Any
    inner: Any


def low_weights(
    optimizer: optax.GradientTransformation,
    mode: str = "split",
    keep: Keep | Iterable[Keep] = (),
    *,
    seed: int = 0,
) -> Any:
    """Keep the weights of an optax optimizer in 16 bits without losing its updates.

        loss_fn = autocast(loss_fn)
        tx = low_weights(optax.adamw(1e-3), mode="split", keep=(loss_fn, params, batch))
        opt_state = tx.init(params)
        params = tx.weights(params)

        @jax.jit
        def train_step(params, opt_state, batch):
            grads = jax.grad(loss_fn)(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        mode          beside each bfloat16 weight           bytes a parameter, with Adam
        "master"      a float32 copy                        16
        "split"       the other 16 bits, int16              14
        "stochastic"  nothing; rounds up or down at random  12

    The optimizer takes its step in float32, with gradients cast to float32. In "master" and "split"
    its weights are those of a float32 run, given the same gradients. Put the whole optimizer
    inside, `low_weights(optax.chain(clip, adam))`: nothing may change its updates afterwards.

    Args:
        optimizer: any optax optimizer.
        mode: see above.
        keep: what stays as it is. An autocast function with its arguments, `(loss_fn, params,
            batch)`, for the parameters that it reads in float32, or not at all: it is traced, and
            arrays may be `jax.ShapeDtypeStruct`. Or a list of paths, "params.norm.scale", or
            patterns like the scopes of a policy, with such tuples among them.
        seed: of the random bits of mode "stochastic", which depend on it, the number of steps
            taken, and the place of the weight in the tree, and on nothing else.

    Returns:
        An `optax.GradientTransformationExtraArgs` with `weights(params)`, the parameters with each
        float32 array in bfloat16 that is not kept; and `kept`: what `keep` has by path, and
        why. `print` shows it. `init` takes the float32 parameters; from low ones, it starts with
        nothing beside them. `update` takes the low parameters, and returns updates in float32 for
        `optax.apply_updates`.

    Raises:
        TypeError: the optimizer is something else, `keep` is one string or a function without its
            arguments, the function in it is no autocast function or holds its parameters itself,
            or the seed is no whole number. In `update`: the state is another optimizer's, or the
            parameters are missing or not low.
        ValueError: there is no such mode. In `update`: the state is of another mode or other kept
            paths.
        PolicyError: a path in `keep` is none; in `init` and `weights`: it matches no parameter.
        RuntimeError: `keep` has a function, and this is called inside an autocast function.
    """
    import optax

    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    if not (callable(getattr(optimizer, "init", None)) and hasattr(optimizer, "update")):
        raise TypeError(
            f"low_weights needs an optax optimizer, got {reprlib.repr(optimizer)}. Write "
            "low_weights(optax.adamw(1e-3))."
        )
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"low_weights(): seed must be a whole number, got {seed!r}.")
    leaf = LowLeaf(weights.mode(mode), seed)
    inside = optax.with_extra_args_support(optimizer)
    functions = _LowWeights(inside, leaf, _kept(keep))
    made = _transformation()(functions.init, functions.update)
    made.weights, made.kept, made.mode = functions.weights, functions.kept, mode
    return made


@cache
def _transformation() -> Callable[..., Any]:
    """The class of what `low_weights` returns; made when optax is there."""
    import optax

    class LowWeights(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
        """An optax optimizer for low weights, with `weights`, which makes them."""

        # Optax takes transformations apart as pairs, so the third function is an attribute.
        weights: Callable[[Any], Any]
        kept: Mapping[str, str]
        mode: str

        def __repr__(self) -> str:
            return summary(self.mode, self.kept)

    return LowWeights


@dataclass(frozen=True)
class LowLeaf:
    """The rule for one array."""

    mode: Mode
    seed: int  # of the random bits

    def wide(self, x: jax.Array) -> jax.Array:
        """Return float32 or low weights as float32."""
        x = jnp.asarray(x)
        return x if x.dtype == jnp.float32 else VERBS.wide(x)

    def first(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return float32 or low weights as they are kept before any step, and what is beside."""
        return weights.store(VERBS, self.mode, self.wide(x))

    def loaded(self, low: jax.Array, beside: jax.Array | None) -> jax.Array:
        """Return the float32 weights that the optimizer steps on."""
        beside = weights.beside_written(VERBS, self.mode, low, beside)
        return weights.load(VERBS, self.mode, low, beside)  # type: ignore[no-any-return]

    def stepped(
        self, low: jax.Array, full: jax.Array, step: jax.Array, number: int
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return the update that brings low weights to new values, and what is then beside them."""
        random = None
        if self.mode.beside:
            full = self.settled(low, full)
        else:
            random = random16(key(self.seed, step, number), flat_index(low.shape))
        if self.mode.name == "split":
            full = _computed_once(full)
        new, beside = weights.store(VERBS, self.mode, full, random)
        return self.between(low, new), beside

    def settled(self, low: jax.Array, full: jax.Array) -> jax.Array:
        """Return new values such that an update leads to the low weights that they give."""
        new = weights.store(VERBS, self.mode, full)[0]
        summed = VERBS.narrow(self.wide(low) + self.between(low, new))
        to, small = VERBS.bits16(new), _is_small(self.wide(new))
        reached = (to == VERBS.bits16(summed)) | (to == VERBS.bits16(low))
        kept = reached & (~small | ((to & _MAGNITUDE) == 0))
        return jnp.where(kept, full, jnp.where(small, 0.0, self.wide(summed)))

    def between(self, low: jax.Array, new: jax.Array) -> jax.Array:
        """Return the update from low weights to others, float32; never a subnormal one but -p."""
        # Nothing here depends on whether the device flushes subnormal numbers to zero: XLA may do
        # so in one program and not in another.
        before, after = self.wide(low), self.wide(new)
        moved = after - before
        moved = jnp.where(_is_small(moved), -0.0, moved)
        to_zero = VERBS.float32(VERBS.bits(before) ^ np.int32(-(2**31)))
        moved = jnp.where(_is_small(after), to_zero, moved)
        return jnp.where(VERBS.bits16(new) == VERBS.bits16(low), -0.0, moved)


_ASKED = "is in keep="  # why a path stays that the user wrote


def _kept(keep: Any) -> dict[str, str]:
    """The patterns of paths that `keep` of `low_weights` has, each with a reason."""
    if isinstance(keep, str):
        raise TypeError(f"low_weights(): keep={keep!r} is not a list. Write keep=[{keep!r}].")
    if isinstance(keep, Mapping) and not all(isinstance(why, str) for why in keep.values()):
        raise TypeError(
            f"low_weights(): keep={reprlib.repr(keep)} is a tree of arrays. Write paths of it, or "
            "keep=(autocast(loss_fn), params, batch) for what a function reads in float32."
        )
    reasons: dict[str, str] = {}
    one = callable(keep) or (isinstance(keep, tuple) and keep and callable(keep[0]))
    for each in [keep] if one else keep:
        fn, *args = each if isinstance(each, tuple) and each else [each]
        if args:
            reasons.update(_read_in_float32(fn, *args))
        elif callable(fn):
            raise TypeError(
                f"low_weights(): keep has the function {fn!r:.80} without its arguments. Write "
                "keep=(autocast(loss_fn), params, batch)."
            )
        else:
            reasons[each] = keep[each] if isinstance(keep, Mapping) else _ASKED
    for pattern in reasons:
        scopes.check(pattern, "low_weights(): keep")
    return reasons


def _read_in_float32(fn: Any, params: object, *args: object) -> dict[str, str]:
    """By path, the parameters that an autocast function reads in float32 or not at all, and why."""
    if not isinstance(fn, Frozen):
        autocast = autocast_function(fn, "low_weights(optimizer, keep=({}, params, ...))", "")
        if nnx.among(params):
            function, params = nnx.of_state(autocast.fn, params)
            fn = transformed(function, autocast.region)
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_typed(x) else x  # noqa: E731
    kept = freeze(fn, jax.tree.map(shape, params), *args)[0].kept
    leaves = jax.tree_util.tree_leaves_with_path(params)
    wide = [path for path, x in leaves if is_typed(x) and x.dtype == np.float32]
    named = ((leaf_path(path), jax.tree_util.keystr(path)) for path in wide)
    return {dotted: kept[path] for dotted, path in named if path in kept}


def _is_end(one: str, other: str) -> bool:
    """True if one of two paths is the end of the other, as of a parameter in a tree and a part."""
    longer, shorter = sorted((f".{one}", f".{other}"), key=len, reverse=True)
    return longer.endswith(shorter)


@dataclass(eq=False)
class _LowWeights:
    """The functions of the transformation."""

    inside: optax.GradientTransformationExtraArgs  # the optimizer, which takes extra arguments
    leaf: LowLeaf  # the rule for one array
    kept: Mapping[str, str]  # by pattern of a path, why the rule is not for an array

    def is_low(self, path: tuple[object, ...], x: object) -> bool:
        """True for an array that is low, or is to become low."""
        if not is_typed(x) or x.dtype.name not in ("float32", "bfloat16"):
            return False
        return not any(scopes.depth(pattern, leaf_path(path)) for pattern in self.kept)

    def each_low(self, function: Callable[[Any], Any], params: object, other: object = None) -> Any:
        """The parameters with a function of each low one; the others, or `other` for them."""

        def made(path: tuple[object, ...], x: object) -> object:
            if self.is_low(path, x):
                return function(x)
            return x if other is None else other

        return jax.tree_util.tree_map_with_path(made, params)

    def check(self, params: object) -> None:
        """Refuse paths of the user's that match nothing, and parameters of another tree."""
        leaves = jax.tree_util.tree_leaves_with_path(params)
        paths = [leaf_path(path) for path, leaf in leaves if is_typed(leaf) and is_float(leaf)]
        hint = partial(scopes.hint, paths=paths, none="the tree has no float arrays.")
        for pattern, why in self.kept.items():
            # What a function reads may be no parameter, as statistics are.
            if why == _ASKED or (pattern not in paths and any(_is_end(pattern, p) for p in paths)):
                scopes.matching(pattern, paths, "low_weights(): keep", "float parameter", hint)

    @regions.as_written()
    def weights(self, params: P) -> P:
        """The parameters as they are kept."""
        self.check(params)
        made: P = self.each_low(lambda x: self.leaf.first(x)[0], params)
        return made

    @regions.as_written()
    def init(self, params: object) -> LowWeightsState:
        """The first state, of float32 parameters or low ones."""
        import optax

        self.check(params)
        beside: Any = None
        if self.leaf.mode.beside:
            # A copy: parameters and state may both be donated.
            first = lambda x: jnp.array(self.leaf.first(x)[1])  # noqa: E731
            beside = self.each_low(first, params, optax.MaskedNode())
        inner = self.inside.init(self.each_low(self.leaf.wide, params))
        return LowWeightsState(jnp.int32(0), beside, inner)

    @regions.as_written()
    def update(
        self, grads: object, state: LowWeightsState, params: object = None, **extra: object
    ) -> tuple[Any, LowWeightsState]:
        """The updates of the optimizer inside, for low parameters, and the next state."""
        import optax

        before, beside, low, tree = self.checked(state, params)
        wide = tree.flatten_up_to(grads)
        full = list(before)
        for i in low:
            full[i] = self.leaf.loaded(before[i], beside[i])
            wide[i] = wide[i].astype(jnp.float32) if is_float(wide[i]) else wide[i]
        whole = tree.unflatten(full)
        made, inner = self.inside.update(tree.unflatten(wide), state.inner, whole, **extra)
        new = tree.flatten_up_to(optax.apply_updates(whole, made))
        updates = tree.flatten_up_to(made)
        for i in low:
            updates[i], beside[i] = self.leaf.stepped(before[i], new[i], state.step, i)
        kept = tree.unflatten(beside) if self.leaf.mode.beside else None
        after = LowWeightsState(optax.safe_increment(state.step), kept, inner)
        return tree.unflatten(updates), after

    def checked(self, state: object, params: object) -> tuple[list[Any], list[Any], list[int], Any]:
        """The parameters, what is beside them, which of them are low, and their structure."""
        if not isinstance(state, LowWeightsState):
            raise TypeError(
                "an optimizer of low_weights needs the state that its init returned, got "
                f"{type(state)}."
            )
        if params is None:
            raise TypeError(
                "an optimizer of low_weights needs the parameters as well: "
                "tx.update(grads, opt_state, params)."
            )
        mode = self.leaf.mode
        flat: tuple[list[Any], Any] = jax.tree_util.tree_flatten_with_path(params)
        paths, tree = flat
        beside: list[Any] = [None] * len(paths)
        if state.beside is not None:
            beside = tree.flatten_up_to(state.beside)
        low = []
        for i, (path, x) in enumerate(paths):
            name, is_low = leaf_path(path), self.is_low(path, x)
            low += [i] * is_low
            if is_low and x.dtype.name != "bfloat16":
                raise TypeError(
                    f"low_weights: parameter {name!r} is {x.dtype}, and this optimizer keeps it in "
                    "bfloat16. Train with params = tx.weights(params), or leave it as it is with "
                    f"keep=[{name!r}]."
                )
            has = beside[i].dtype.name if is_typed(beside[i]) else ""
            wants = mode.beside if is_low else ""
            if has != wants:
                raise ValueError(
                    f"low_weights: beside parameter {name!r} the state has {has or 'nothing'}, and "
                    f"mode {mode.name!r} has {wants or 'nothing'} there. Give the mode and "
                    "keep that the state was made with."
                )
        return [x for _, x in paths], beside, low, tree


# `LowLeaf` computes element by element. Its rule is `polymp.weights`, given JAX's verbs.
#
# The update has to be a number that is added: `optax.apply_updates` rounds float32(p) + u, of
# the old low weight p, to the low dtype. With u = float32(q) - float32(p), in float32, the
# result is the new low weight q
#
#   if p and q have the same bits: u is -0.0 there
#   if q is 0: u is -p
#   if |q| is at least 2**-16 of the largest power of two in |p|: p and q are then multiples of the
#       last place of u, so that u is exact; or u is so large that its rounding is far below q's
#   if q is smaller, and a multiple of that last place: so is a q that comes of p plus an update in
#       float32, unless p was rounded up to a power of two
#
# It is not if a weight shrinks by more in one step, goes from 0.0 to -0.0, moves by less than
# 2**-126, which some devices take for zero, moves by more than float32 holds, or was Inf. Then
# `settled` finds what the sum will be, and that becomes the new value: what stands beside a
# weight always belongs to the weight that is there.


VERBS: Verbs = Verbs(
    bits=partial(lax.bitcast_convert_type, new_dtype=jnp.int32),
    float32=partial(lax.bitcast_convert_type, new_dtype=jnp.float32),
    bits16=partial(lax.bitcast_convert_type, new_dtype=jnp.int16),
    bfloat16=partial(lax.bitcast_convert_type, new_dtype=jnp.bfloat16),
    to_int32=partial(lax.convert_element_type, new_dtype=jnp.int32),
    to_int16=partial(lax.convert_element_type, new_dtype=jnp.int16),
    wide=lambda x: VERBS.float32(VERBS.bits16(x).astype(jnp.int32) << 16),
    narrow=partial(lax.convert_element_type, new_dtype=jnp.bfloat16),
    where=jnp.where,
)

_MAGNITUDE = 0x7FFF


def _is_small(x: jax.Array) -> jax.Array:
    """True for zero and subnormal float32 numbers."""
    small: jax.Array = (VERBS.bits(x) & 0x7F800000) == 0
    return small


def _computed_once(x: jax.Array) -> jax.Array:
    """The same numbers, which XLA on CPU then computes once, and not for each that reads them."""
    # There it gives every result a loop of its own, and repeats in each what they share, the whole
    # step of the optimizer, unless that ends in what counts as expensive, as a division does. Both
    # loops would also need copies of the old weights and of what was beside them. The divisor is 1,
    # or 2 for NaN, so that XLA cannot leave it out before it has decided.
    divided = lambda x: x / jnp.where(x == x, jnp.float32(1), jnp.float32(2))  # noqa: E731
    once: jax.Array = lax.platform_dependent(x, cpu=divided, default=lambda x: x)
    return once


def flat_index(shape: Sequence[int]) -> jax.Array:
    """Return the place of each element in the whole array, flat; int32, modulo 2**32."""
    # One count for each axis, so that an array over several devices needs no exchange.
    index = jnp.zeros(shape, jnp.int32)
    for axis in range(len(shape)):
        stride = (math.prod(shape[axis + 1 :]) + 2**31) % 2**32 - 2**31
        index += lax.broadcasted_iota(jnp.int32, shape, axis) * stride
    return index
