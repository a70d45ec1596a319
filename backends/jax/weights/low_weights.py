"""`low_weights`: any optax optimizer for parameters that are kept in 16 bits.

    tx = low_weights(optax.adamw(1e-3), mode="split")
    opt_state = tx.init(params)         # of float32 parameters
    params = tx.weights(params)         # from here on bfloat16

The optimizer inside sees float32 parameters and gradients, and steps on them. What it makes of them
is rounded by the rule of `polymp.weights`, and comes out as the update that brings the low weights
there. Optax is imported when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from polymp.backends.jax.arrays import is_float, is_typed
from polymp.backends.jax.autocast import regions
from polymp.backends.jax.modules.pin import leaf_path
from polymp.backends.jax.weights.kept_paths import KeptPaths
from polymp.backends.jax.weights.low_leaf import LowLeaf
from polymp.weights import modes
from polymp.weights.summary import summary

if TYPE_CHECKING:
    import optax  # type: ignore[import-untyped]

P = TypeVar("P")


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
    dtype: jax.typing.DTypeLike = "bfloat16",
    keep: Iterable[str] = (),
    *,
    seed: int = 0,
) -> Any:
    """Keep the weights of an optax optimizer in 16 bits without losing its updates.

        tx = low_weights(optax.adamw(1e-3), mode="split")
        opt_state = tx.init(params)
        params = tx.weights(params)

        @jax.jit
        def train_step(params, opt_state, batch):
            grads = jax.grad(autocast(loss_fn))(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        mode          beside each bfloat16 weight           bytes a parameter, with Adam
        "master"      a float32 copy                        16
        "split"       the other 16 bits, int16              14
        "stochastic"  nothing; rounds up or down at random  12

    The optimizer takes its step in float32, with gradients cast to float32. In "master" and "split"
    its weights are those of a float32 run, given the same gradients.

    Put the whole optimizer inside: `low_weights(optax.chain(clip, adam))`. Where it is a part of
    something else, such as `optax.multi_transform`, nothing may change its
    updates afterwards.

    Args:
        optimizer: any optax optimizer.
        mode: see above.
        dtype: of the weights: "bfloat16", or "float16" in mode "master".
        keep: paths of parameters that stay as they are: "params.norm.scale", or patterns as those
            of `pin`. `needs_float32` finds those that the program reads in float32.
        seed: of the random bits of mode "stochastic". They depend on the seed, the number of steps
            taken, and the place of the weight in the tree, and on nothing else.

    Returns:
        An `optax.GradientTransformationExtraArgs` with one function more, `weights(params)`: the
        parameters with each float32 array in the low dtype that is not kept. `init(params)` takes
        the float32 parameters; from low ones, it starts with nothing beside them. `update(grads,
        state, params, **extra)` takes the low parameters, and returns updates in float32 for
        `optax.apply_updates`. `print` shows what `keep` has, and why.

    Raises:
        TypeError: the optimizer is something else, `keep` is one string, or the seed is no whole
            number. In `update`: the state is another optimizer's, or the parameters are missing or
            not low.
        ValueError: there is no such mode, or it does not take the dtype. In `update`: the state is
            of another mode or other kept paths.
        PolicyError: a path in `keep` is none; in `weights`: it matches no parameter.
    """
    import optax

    found = modes.mode(mode)
    leaf = LowLeaf(found, modes.low_dtype(found, dtype), seed)
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    if not (callable(getattr(optimizer, "init", None)) and hasattr(optimizer, "update")):
        raise TypeError(f"low_weights needs an optax optimizer, got {optimizer!r}.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"low_weights(): seed must be a whole number, got {seed!r}.")
    made = _LowWeights(optax.with_extra_args_support(optimizer), leaf, KeptPaths(keep))
    return _transformation()(made)


@cache
def _transformation() -> Callable[..., Any]:
    """The class of what `low_weights` returns; made when optax is there.

    Optax takes transformations apart as pairs, so the third function is an attribute.
    """
    import optax

    class LowWeights(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
        """An optax optimizer for low weights, with `weights`, which makes them."""

        weights: Callable[[Any], Any]
        summary: str

        def __new__(cls, functions: _LowWeights) -> Any:
            made = super().__new__(cls, functions.init, functions.update)
            made.weights = functions.weights
            leaf, kept = functions.leaf, functions.kept.reasons
            made.summary = summary(leaf.mode.name, leaf.dtype, kept)
            return made

        def __repr__(self) -> str:
            return self.summary

    return LowWeights


@dataclass(frozen=True)
class _LowWeights:
    """The functions of the transformation.

    Attributes:
        inside: the optimizer, which takes extra arguments.
        leaf: the rule for one array.
        kept: which arrays it is not for.
    """

    inside: optax.GradientTransformationExtraArgs
    leaf: LowLeaf
    kept: KeptPaths

    def is_low(self, path: tuple[object, ...], x: object) -> bool:
        """True for an array that is low, or is to become low."""
        dtypes = "float32", self.leaf.dtype
        return is_typed(x) and x.dtype.name in dtypes and leaf_path(path) not in self.kept

    def each_low(self, function: Callable[[Any], Any], params: object, other: object = None) -> Any:
        """The parameters with a function of each low one; the others, or `other` for them."""

        def made(path: tuple[object, ...], x: object) -> object:
            if self.is_low(path, x):
                return function(x)
            return x if other is None else other

        return jax.tree_util.tree_map_with_path(made, params)

    @regions.as_written()
    def weights(self, params: P) -> P:
        """The parameters as they are kept."""
        self.kept.check(params)
        made: P = self.each_low(lambda x: self.leaf.first(x)[0], params)
        return made

    @regions.as_written()
    def init(self, params: object) -> LowWeightsState:
        """The first state, of float32 parameters or low ones."""
        import optax

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

        self.check(state, params)
        paths, tree = _flat(params)
        low = [i for i, (path, x) in enumerate(paths) if self.is_low(path, x)]
        before, wide = [x for _, x in paths], tree.flatten_up_to(grads)
        beside = tree.flatten_up_to(state.beside) if self.leaf.mode.beside else [None] * len(before)
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

    def check(self, state: object, params: object) -> None:
        """Refuse a state or parameters that are not those of this optimizer."""
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
        mode, dtype = self.leaf.mode, self.leaf.dtype
        paths, tree = _flat(params)
        beside: list[Any] = [None] * len(paths)
        if (state.beside is None) == bool(mode.beside):
            has = "nothing" if mode.beside else "something"
            raise ValueError(
                f"this state has {has} beside the weights, and mode {mode.name!r} keeps "
                f"{mode.note}. Start with tx.init(params), or make the optimizer with the mode "
                "that the state was saved with."
            )
        if mode.beside:
            beside = tree.flatten_up_to(state.beside)
        for (path, x), rest in zip(paths, beside, strict=True):
            name = leaf_path(path)
            if self.is_low(path, x) and x.dtype.name != dtype:
                raise TypeError(
                    f"low_weights: parameter {name!r} is {x.dtype}, and this optimizer keeps it in "
                    f"{dtype}. Train with params = tx.weights(params), or leave it as it is with "
                    f"keep=[{name!r}]."
                )
            has = rest.dtype.name if is_typed(rest) else ""
            wants = mode.beside if self.is_low(path, x) else ""
            if has != wants:
                raise ValueError(
                    f"low_weights: beside parameter {name!r} the state has {has or 'nothing'}, and "
                    f"mode {mode.name!r} has {wants or 'nothing'} there. Give the mode, dtype and "
                    "keep that the state was made with."
                )


def _flat(params: object) -> tuple[list[tuple[Any, Any]], Any]:
    """The leaves with their paths, and the structure."""
    return jax.tree_util.tree_flatten_with_path(params)
