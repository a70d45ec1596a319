"""The scaling rule on arrays, bit for bit torch's, and the factor that a state stands for.

A rule and a state in, the next state out. The rule is `polymp.scaling.scale_rule.step`; what is
added here is how float32 arrays multiply by a factor that float32 cannot hold.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polymp.backends.jax.autocast import regions
from polymp.backends.jax.scaler import tree_math
from polymp.scaling import scale_rule
from polymp.scaling.scale_rule import ScaleRule, ScaleState


class _Factor:
    """A factor that float32 cannot hold: multiplies in float64, as torch does, and rounds once."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __rmul__(self, scale: jax.Array) -> jax.Array:
        with jax.enable_x64(True):
            return (scale.astype(jnp.float64) * self.value).astype(jnp.float32)


def _exact(factor: float) -> Any:
    with np.errstate(over="ignore", under="ignore"):
        held = float(np.float32(factor))
    return factor if factor == held else _Factor(factor)


def on_device(state: ScaleState) -> ScaleState:
    """A state of numbers as one of arrays."""
    scale, *counts = state
    return ScaleState(jnp.asarray(scale, jnp.float32), *(jnp.asarray(n, jnp.int32) for n in counts))


def factor(state: ScaleState) -> jax.Array:
    """The factor of losses and divisor of gradients: the scale, float32 [].

    A first scale beyond the bounds counts as the nearer one: XLA on CPU takes it, or its inverse,
    for 0.

    Args:
        state: of one scaler.

    Returns:
        Float32 [].

    Raises:
        TypeError: the state is that of several scalers.
    """
    scale = state.scale
    if scale.shape != ():
        raise TypeError(
            f"this GradScaler is a batch of shape {scale.shape}; call its methods in jax.vmap."
        )
    return jnp.clip(scale, scale_rule.SMALLEST, scale_rule.LARGEST)


def update(
    rule: ScaleRule,
    state: ScaleState,
    finite: jax.typing.ArrayLike,
    loss_finite: jax.typing.ArrayLike,
) -> ScaleState:
    """The state after a step; see `GradScaler.update`."""
    factor(state)
    found = _one_bool("finite", finite), _one_bool("loss_finite", loss_finite)
    after: ScaleState = _advanced(rule, state, *found)
    return after


def _one_bool(name: str, value: jax.typing.ArrayLike) -> jax.Array:
    """The value as an array."""
    try:
        array = jnp.asarray(value)
        good = array.dtype == jnp.bool_ and array.shape == ()
        shown = tree_math.shown_dtype(array)
    except (TypeError, ValueError):
        good, shown = False, repr(value)
    if not good:
        raise TypeError(f"{name} must be one bool, got {shown}.")
    return array


@regions.as_written()
@partial(jax.jit, static_argnums=0, inline=True)
def _advanced(
    rule: ScaleRule, state: ScaleState, finite: jax.Array, loss_finite: jax.Array
) -> ScaleState:
    """`scale_rule.step` with jax arrays."""
    rule = rule._replace(growth=_exact(rule.growth), backoff=_exact(rule.backoff))
    return scale_rule.step(rule, state, finite, jnp.where, loss_finite=loss_finite)
