"""Gradients of a scaled loss: the function that scales it, and `value_and_grad` of that.

A function of parameters in, one that also scales and checks out. The loss itself comes back beside
the scaled one, in its own dtype: the scaled loss divided by the scale may differ in its last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from polymp.backends.jax.scaler import tree_math
from polymp.backends.jax.scaler.optimizer_step import Axes, look
from polymp.backends.jax.scaler.scale_update import factor, update
from polymp.backends.jax.scaler.tree_math import shown_dtype
from polymp.scaling.scale_rule import ScaleRule, ScaleState

S = TypeVar("S")


def _with_scale(
    scale: Callable[[jax.Array], jax.Array], fun: Callable[..., object], has_aux: bool
) -> Callable[..., tuple[jax.Array, tuple[jax.Array, Any]]]:
    """Wrap a loss function so that it returns the scaled loss to differentiate."""
    if not callable(fun):
        raise TypeError(f"value_and_grad needs the function that computes the loss, got {fun!r}.")

    def scaled_fun(*args: object, **kwargs: object) -> tuple[jax.Array, tuple[jax.Array, object]]:
        out: Any
        aux: object
        out, aux = fun(*args, **kwargs), None
        if has_aux:
            if not isinstance(out, tuple) or len(out) != 2:
                raise TypeError(
                    "with has_aux=True, the function given to value_and_grad must return (loss, "
                    f"aux), got {_shown(out)}."
                )
            out, aux = out
        if _shown(out) not in _LOSSES:
            hint = " Or pass has_aux=True, if it returns (loss, aux)." if not has_aux else ""
            raise TypeError(
                f"the function given to value_and_grad must return a loss that is one float, got "
                f"{_shown(out)}. Reduce it to one, by .mean() for instance.{hint}"
            )
        loss = jnp.asarray(out)
        return scale(loss), (loss, aux)

    return scaled_fun


_LOSSES = ("float16[]", "bfloat16[]", "float32[]", "float64[]")


def _shown(x: object) -> str:
    return shown_dtype(x) if tree_math.is_carried(x) else f"{type(x)}"


def value_and_grad(
    rule: ScaleRule | None,
    state: ScaleState,
    scale: Callable[[jax.Array], jax.Array],
    fun: Callable[..., object],
    argnums: int | Sequence[int],
    has_aux: bool,
    after: Callable[[ScaleState], S],
    *,
    axis_names: Axes,
    **options: Any,
) -> Callable[..., tuple[tuple[Any, Any], S, jax.Array]]:
    """`GradScaler.value_and_grad` for a rule and a state."""
    given = argnums if isinstance(argnums, (tuple, list)) else (argnums,)
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in given):
        raise TypeError(f"argnums must be an int or several of them, got {argnums!r}.")
    scaled_loss = _with_scale(scale, fun, has_aux)
    differentiated = jax.value_and_grad(scaled_loss, argnums, has_aux=True, **options)

    def call(*args: object, **kwargs: object) -> tuple[tuple[Any, Any], S, jax.Array]:
        (_, (loss, aux)), grads = differentiated(*args, **kwargs)
        value = (loss, aux) if has_aux else loss
        if rule is None:
            return (value, grads), after(state), jnp.asarray(True)
        grads = tree_math.settled(grads)
        finite, loss_finite = look(state, grads, loss, axis_names)
        new = update(rule, state, finite, loss_finite)
        return (value, tree_math.divided(grads, factor(state))), after(new), finite

    return call
