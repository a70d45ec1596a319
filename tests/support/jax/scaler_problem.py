"""A problem that float16 cannot learn without a scaler, and how far with one it may end up.

Least squares with a loss so small that every cotangent rounds to 0 in float16. Everything else is
exact in float16, so that what the dtype costs can be bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from polymp.backends.jax.scaler.grad_scaler import GradScaler
from polymp.dtypes import FORMATS

SMALL = 2.0**-24  # times 2 r / 32 with |r| <= 8: at most 2**-25, half of float16's least number
STEPS = 150
optimizer = optax.sgd(0.25 / SMALL)  # the distance to the solution halves in every step


def problem() -> tuple[Any, Any, Any]:
    """Rows of +1 and -1 with orthogonal columns, targets on a grid of 1/16, and weights 0."""
    x = np.ones((1, 1))
    for _ in range(5):
        x = np.block([[x, x], [x, -x]])
    x = x[:, 1:9]
    rng = np.random.default_rng(0)
    t = x @ rng.integers(-8, 9, 8) / 16 + rng.integers(-8, 9, 32) / 16
    return tuple(jnp.asarray(a, jnp.float32) for a in (x, t, np.zeros(8)))


def cast_loss(w: Any, x: Any, t: Any, dtype: Any) -> Any:
    residual = x.astype(dtype) @ w.astype(dtype) - t.astype(dtype)
    return SMALL * (residual.astype(jnp.float32) ** 2).mean()


def plain_loss(w: Any, x: Any, t: Any) -> Any:
    """The same without a cast, for `autocast` to insert; there the difference is float32."""
    return SMALL * ((x @ w - t) ** 2).mean()


def train_step(
    w: Any,
    state: Any,
    scaler: GradScaler,
    x: Any,
    t: Any,
    dtype: Any = jnp.float16,
    loss: Callable[..., Any] | None = None,
) -> tuple[Any, Any, GradScaler, Any]:
    """One step; a `loss` of one's own takes the place of the one with casts to `dtype`."""
    cost = loss or partial(cast_loss, dtype=dtype)

    def update(grads: Any, w: Any, state: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    grads = jax.grad(lambda w: scaler.scale(cost(w, x, t)))(w)
    (w, state), scaler, finite = scaler.step(grads, update, w, state)
    return w, state, scaler, finite


def mean_square(w: Any) -> float:
    x, t, _ = (np.asarray(a, np.float64) for a in problem())
    return float(((x @ np.asarray(w, np.float64) - t) ** 2).mean())


def least() -> float:
    """The mean square that no weights are below."""
    x, t, _ = (np.asarray(a, np.float64) for a in problem())
    return mean_square(x.T @ t / 32)


def excess(w: Any) -> float:
    return mean_square(w) - least()


def bound() -> float:
    """The excess that float16 may cost.

    Row by row, what drives the weights is the residual r plus the roundings on its way: of the
    weights, |x| |w|; of the product, |x w|; of the difference and of its cotangent, |r| each; each
    at most u times that, u = 2**-11. A step halves the distance to the solution and adds half of
    the roundings' projection onto the columns of x, so in the end the predictions are off by the
    roundings at most, and the mean square by their square. A tenth on top is for the roundings of
    second order, for float32, and for weights that are not yet those of the end.
    """
    x, t, _ = (np.asarray(a, np.float64) for a in problem())
    w = x.T @ t / 32
    u = FORMATS["float16"].eps / 2
    rounding = u * (np.abs(x) @ np.abs(w) + np.abs(x @ w) + 2 * np.abs(x @ w - t))
    return float((1.1 * rounding.max()) ** 2)
