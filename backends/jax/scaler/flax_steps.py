"""Whole training steps for Flax: `linen_train_step` and `nnx_train_step`.

A scaler, what is trained and a loss in; the loss, the next scaler and what was found out. Flax is
imported when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from polymp.backends.jax.scaler import optimizer_step
from polymp.backends.jax.scaler.grad_scaler import GradScaler, stepped
from polymp.backends.jax.scaler.tree_math import is_carried, shown_dtype
from polymp.backends.jax.scaler.value_and_grad import with_scale

if TYPE_CHECKING:
    from flax import nnx
    from flax.training.train_state import TrainState


def linen_train_step(
    scaler: GradScaler,
    state: TrainState,
    loss_fn: Callable[..., object],
    *args: object,
    has_aux: bool = False,
    replace: Callable[[Any], Mapping[str, object]] | None = None,
    axis_names: optimizer_step.Axes = None,
) -> tuple[Any, TrainState, GradScaler, jax.Array]:
    """Scale, differentiate, unscale and check, and step or skip, with a Flax `TrainState`.

        @jax.jit
        def train_step(scaler, state, batch):
            def loss_fn(params, batch):
                return mean_square(state.apply_fn({"params": params}, batch["x"]), batch["y"])

            loss, state, scaler, finite = linen_train_step(scaler, state, loss_fn, batch)
            return scaler, state, loss

    A skipped step changes no bit of the state, its `step` included. Batch statistics come out of
    the loss function as `aux`, and `replace` says where they belong; they, too, are only kept
    where the step is taken, so that a batch with NaN in it cannot spoil them:

        loss_fn = ...  # returns loss, new["batch_stats"]
        (loss, _), state, scaler, finite = linen_train_step(
            scaler, state, loss_fn, batch, has_aux=True,
            replace=lambda stats: {"batch_stats": stats},
        )

    Args:
        scaler: as the last step returned it.
        state: a `flax.training.train_state.TrainState`, or of a class made from it.
        loss_fn: called as `loss_fn(state.params, *args)`; returns the loss, one float, not scaled,
            or (loss, aux).
        args: for `loss_fn`.
        has_aux: whether `loss_fn` returns a pair.
        replace: called with `aux`; returns the fields of the state that a step which is taken
            replaces, by name.
        axis_names: see `GradScaler.unscale`. Where every device has its own gradients, the loss
            must be averaged over devices in `loss_fn`.

    Returns:
        The loss or (loss, aux), in its own dtype; the new state; the next scaler; and bool [],
        False if the step was skipped.

    Raises:
        TypeError: `scaler`, `state` or `loss_fn` is something else; the loss is not one float;
            `replace` is given without `has_aux`; or the step changes a dtype or the structure.
    """
    from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
    from flax.training.train_state import TrainState

    _check(scaler, "linen_train_step")
    if not isinstance(state, TrainState):
        raise TypeError(f"linen_train_step needs a flax TrainState, got {type(state)}.")
    if replace is not None and not has_aux:
        raise TypeError("linen_train_step hands aux to replace: pass has_aux=True with it.")
    scaled_loss = with_scale(scaler.scale, loss_fn, has_aux, "linen_train_step")
    grads, (loss, aux) = jax.grad(scaled_loss, has_aux=True)(state.params, *args)
    # The "gradients" of float8's own scales are their next values, and no scale is in them.
    as_is = {}
    if isinstance(grads, Mapping) and OVERWRITE_WITH_GRADIENT in grads:
        as_is = {OVERWRITE_WITH_GRADIENT: grads[OVERWRITE_WITH_GRADIENT]}
        grads = {name: grads[name] for name in grads if name not in as_is}

    def update(grads: Mapping[str, object], state: TrainState) -> TrainState:
        grads = {**grads, **as_is} if as_is else grads
        fields = replace(aux) if replace else {}
        new: TrainState = state.apply_gradients(grads=grads, **fields)  # type: ignore[no-untyped-call]
        return new

    state, scaler, finite = stepped(
        scaler,
        optimizer_step.step,
        grads,
        update,
        (state,),
        loss=loss,
        as_is=as_is,
        axis_names=axis_names,
    )
    return (loss, aux) if has_aux else loss, state, scaler, finite


def nnx_train_step(
    scaler: GradScaler,
    model: nnx.Module,
    optimizer: nnx.Optimizer[Any],
    loss_fn: Callable[..., object],
    *args: object,
    has_aux: bool = False,
    axis_names: optimizer_step.Axes = None,
) -> tuple[Any, GradScaler, jax.Array]:
    """Scale, differentiate, unscale and check, and step or skip, with a Flax nnx model.

        @nnx.jit
        def train_step(scaler, model, optimizer, batch):
            return nnx_train_step(scaler, model, optimizer, loss_fn, batch)

        loss, scaler, finite = train_step(scaler, model, optimizer, batch)

    Model and optimizer are changed in place. A skipped step leaves every bit of both as it was
    before the forward pass, batch statistics too: a batch with NaN in it cannot spoil them. There
    are two exceptions. Random streams go on, as torch's generators do: noise that made a loss NaN
    is not drawn again. Variables that the forward pass made, or whose shape it changed, such as
    those of `sow`, hold what it put there.

    Args:
        scaler: as the last step returned it.
        model: an `nnx.Module`.
        optimizer: an `nnx.Optimizer`; its `wrt` says what is differentiated by.
        loss_fn: called as `loss_fn(model, *args)`; returns the loss, one float, not scaled, or
            (loss, aux).
        args: for `loss_fn`. Modules among them are left as it leaves them.
        has_aux: whether `loss_fn` returns a pair.
        axis_names: see `GradScaler.unscale`. Where every device has its own gradients, the loss
            must be averaged over devices in `loss_fn`.

    Returns:
        The loss or (loss, aux), in its own dtype; the next scaler; and bool [], False if the step
        was skipped.

    Raises:
        TypeError: `scaler`, `model`, `optimizer` or `loss_fn` is something else; the loss is not
            one float; or the step changes a dtype or the structure.
    """
    from flax import nnx

    _check(scaler, "nnx_train_step")
    if not isinstance(model, nnx.Module):
        raise TypeError(f"nnx_train_step needs an nnx.Module, got {type(model)}.")
    if not isinstance(optimizer, nnx.Optimizer) or hasattr(optimizer, "model"):
        raise TypeError(
            "nnx_train_step needs an nnx.Optimizer(model, tx, wrt=nnx.Param), got "
            f"{type(optimizer)}."
        )
    scaled_loss = with_scale(scaler.scale, loss_fn, has_aux, "nnx_train_step")
    before = _values(model, optimizer)
    differentiate = nnx.grad(scaled_loss, argnums=nnx.DiffState(0, optimizer.wrt), has_aux=True)
    grads, (loss, aux) = differentiate(model, *args)
    graph, after = nnx.split((model, optimizer))

    def as_before(path: Hashable, x: Any) -> object:
        old = before.get(path)
        if isinstance(x, nnx.RngState) or _dtypes(old) != _dtypes(x.get_value()):
            return x
        return x.replace(old)

    start = nnx.map_state(as_before, after)

    def update(grads: object, _: object) -> object:
        # Variables of this trace, with the values that the forward pass left.
        model, optimizer = nnx.merge(graph, jax.tree.map(lambda x: x, after))
        optimizer.update(model, grads)
        return nnx.state((model, optimizer))

    state, scaler, finite = scaler.step(grads, update, start, loss=loss, axis_names=axis_names)
    nnx.update((model, optimizer), state)
    return (loss, aux) if has_aux else loss, scaler, finite


def _values(*nodes: object) -> dict[Hashable, object]:
    """The values of all variables now, by path."""
    from flax import nnx

    return {path: x.get_value() for path, x in nnx.to_flat_state(nnx.state(nodes))}


def _dtypes(value: object) -> tuple[jax.tree_util.PyTreeDef, list[object]]:
    leaves, structure = jax.tree.flatten(value)
    return structure, [shown_dtype(x) if is_carried(x) else x for x in leaves]


def _check(scaler: object, name: str) -> None:
    if not isinstance(scaler, GradScaler):
        raise TypeError(f"{name} needs a polymp.jax.GradScaler first, got {scaler!r}.")
