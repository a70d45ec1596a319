"""`scaled`: a loss scaler around an optax optimizer.

The scaler is part of the optimizer's state, so a training loop that carries that state carries the
scaler, too: through jit, scan, checkpoints and train states. Optax is imported when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from polymp.backends.jax.arrays import apart, is_float
from polymp.backends.jax.scaler import optimizer_step, tree_math
from polymp.backends.jax.scaler.grad_scaler import GradScaler, stepped
from polymp.backends.jax.scaler.optimizer_step import ScaledState

if TYPE_CHECKING:
    import optax  # type: ignore[import-untyped]

T = TypeVar("T")


def scaled(
    optimizer: optax.GradientTransformation,
    scaler: GradScaler | None = None,
    *,
    axis_names: optimizer_step.Axes = None,
) -> optax.GradientTransformationExtraArgs:
    """An optax optimizer that takes the gradients of a scaled loss.

        optimizer = scaled(optax.adam(1e-3))
        opt_state = optimizer.init(params)

        @jax.jit
        def train_step(params, opt_state, batch):
            def scaled_loss(params):
                loss = loss_fn(params, batch)
                return opt_state.scaler.scale(loss), loss

            grads, loss = jax.grad(scaled_loss, has_aux=True)(params)
            updates, opt_state = optimizer.update(grads, opt_state, params, loss=loss)
            return optax.apply_updates(params, updates), opt_state, loss

    Wrap the whole optimizer, so that all of it skips: `scaled(optax.chain(clip, adam))`, and
    `scaled(optax.MultiSteps(...))`, which leaves out single microbatches. Its state then has the
    scaler as `opt_state.scaler`; in a state of states, `optax.tree.get(state, "scaler")` finds it.

    A skipped step changes no bit of the inner state and returns updates of -0.0, which leave every
    number that they are added to as it is. A step that is taken gives the optimizer true gradients
    in float32 or wider. For parameters narrower than that it keeps its moments in float32 as well.

    Args:
        optimizer: any optax optimizer.
        scaler: where every run starts from; None for `GradScaler()`. Disabled, nothing is scaled,
            checked, widened or skipped.
        axis_names: see `GradScaler.unscale`.

    Returns:
        `init(params)`, which returns a `ScaledState`, and `update(grads, state, params=None, *,
        loss=None, **extra)`. There `grads` are multiplied by the scale of `state.scaler`; `loss`
        is the loss before it was scaled, see `GradScaler.step`. What else there is goes to the
        optimizer.

    Raises:
        TypeError: the optimizer or the scaler is something else; the optimizer changes the dtypes
            or the structure of its own state, or is itself `scaled`; the state is another
            optimizer's.
    """
    import optax

    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    if not (callable(getattr(optimizer, "init", None)) and hasattr(optimizer, "update")):
        raise TypeError(f"scaled needs an optax optimizer, got {optimizer!r}.")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaled needs a polymp.jax.GradScaler, got {scaler!r}.")
    inside = optax.with_extra_args_support(optimizer)

    def init(params: object) -> ScaledState:
        # A copy: the state may be donated, and the next run starts from the same scaler.
        first = GradScaler() if scaler is None else jax.tree.map(jnp.array, scaler)
        params = jax.tree.map(_widened, params) if first.enabled else params
        inner = inside.init(params)
        optimizer_step.refuse_scaled(inner, "scaled")
        return ScaledState(first, inner, jnp.asarray(True))

    def update(
        grads: object,
        state: object,
        params: object = None,
        *,
        loss: object = None,
        **extra: object,
    ) -> tuple[object, ScaledState]:
        if not isinstance(state, ScaledState):
            raise TypeError(
                f"a scaled optimizer needs the state that its init returned, got {type(state)}."
            )

        def take(grads: object) -> tuple[object, list[jax.Array]]:
            updates, inner = inside.update(grads, state.inner, params, **extra)
            optimizer_step.check_replaces((state.inner,), (inner,), "the optimizer")
            return updates, apart(inner, tree_math.is_carried)[0]

        def skip() -> tuple[object, list[jax.Array]]:
            updates, _ = jax.eval_shape(lambda: take(tree_math.divided(grads, scale)))
            return _nothing(updates, grads), kept

        scale = state.scaler.state.scale
        kept, together = apart(state.inner, tree_math.is_carried)
        (updates, inner), after, finite = stepped(
            state.scaler, optimizer_step.choose, grads, take, skip, loss=loss, axis_names=axis_names
        )
        return updates, ScaledState(after, together(inner), finite)

    return optax.GradientTransformationExtraArgs(init, update)


def _widened(x: jax.Array) -> jax.Array:
    """A parameter as wide as the gradients that the optimizer will see."""
    return x.astype(jnp.float32) if is_float(x) and x.dtype.itemsize < 4 else x


def _nothing(updates: T, grads: object) -> T:
    """Updates that change no parameter: x + -0.0 is x, and 0.0 would turn -0.0 into 0.0."""
    dtypes, structure = jax.tree.flatten(updates)
    # Where they can, they follow the gradients: on a mesh these know where they are.
    given: jax.tree_util.PyTreeDef = jax.tree.structure(grads)
    alike = jax.tree.leaves(grads) if given == structure else dtypes
    filled = [
        jnp.full_like(like if jnp.shape(like) == x.shape else x, _zero(x.dtype), x.dtype)
        if jnp.issubdtype(x.dtype, jnp.number)
        else np.zeros(x.shape, x.dtype)  # float0
        for like, x in zip(alike, dtypes, strict=True)
    ]
    nothing: T = jax.tree.unflatten(structure, filled)
    return nothing


def _zero(dtype: jax.typing.DTypeLike) -> complex:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return complex(-0.0, -0.0)
    return -0.0 if jnp.issubdtype(dtype, jnp.floating) else 0
