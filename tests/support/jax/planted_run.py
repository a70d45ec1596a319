"""A training run into which Inf and NaN are planted, for every way to spread it over devices.

Every number in it is a whole multiple of a power of two that float16 gradients and float32 sums
hold exactly, so the run on one device is what each of the others has to give, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polymp.jax import GradScaler

ROWS, STEPS, RATE = 32, 12, 2.0**-6
SHAPES = {"a": (16, 8), "b": (8, 16)}
# By step: an Inf in one value of one parameter's gradient, or a NaN in one row of the batch.
PLANTS = {2: ("a", (3, 7)), 3: ("a", (12, 0)), 6: ("b", (7, 1)), 8: ("row", 13)}


class Run(NamedTuple):
    """The results of a run.

    Attributes:
        history: after each step: scale, tracker, skips, spoiled, skipped, and whether it was taken.
        params: at the end, as lists.
    """

    history: list[list[float]]
    params: dict[str, Any]


def first_scaler() -> GradScaler:
    return GradScaler(2.0**8, growth_interval=2)


def first_params() -> dict[str, Any]:
    return {name: np.full(shape, 0.5, np.float32) for name, shape in SHAPES.items()}


def batch(step: int) -> Any:
    """Rows of -1, 0 and 1; float32 [ROWS, 16]."""
    x = np.random.default_rng(step).integers(-1, 2, (ROWS, 16)).astype(np.float32)
    kind, at = PLANTS.get(step, (None, None))
    if kind == "row":
        x[at, 5] = np.nan
    return x


def probe(step: int) -> dict[str, Any]:
    """Return the arrays that are added to the gradients: 0, and Inf where it is planted."""
    planted = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    kind, at = PLANTS.get(step, (None, None))
    if kind in planted:
        planted[kind][at] = np.inf
    return planted


def cost(params: Any, x: Any) -> Any:
    """The loss of some rows, as their part of the mean over all; computed in float16."""
    x = x.astype(jnp.float16)
    a, b = (x[:, : p.shape[0]] @ p.astype(jnp.float16) for p in (params["a"], params["b"]))
    return (a.astype(jnp.float32).sum() + b.astype(jnp.float32).sum()) / ROWS


def update(grads: Any, params: Any) -> Any:
    return jax.tree.map(lambda g, p: p - RATE * g, grads, params)


def step(
    scaler: GradScaler,
    params: Any,
    x: Any,
    probe: Any,
    total: Callable[[Any], Any] = lambda grads: grads,
) -> tuple[GradScaler, Any, Any]:
    """One step; `total` sums gradients over devices, and the probe is added after it."""

    def scaled(params: Any) -> tuple[Any, Any]:
        loss = cost(params, x)
        return scaler.scale(loss), loss

    grads, loss = jax.grad(scaled, has_aux=True)(params)
    grads = jax.tree.map(jnp.add, total(grads), probe)
    params, scaler, finite = scaler.step(grads, update, params, loss=loss)
    return scaler, params, finite


def row(scaler: Any, finite: Any) -> list[float]:
    """A line of the history, from arrays of any number of devices that all say the same."""
    return [float(one(x)) for x in (*scaler.state, finite)]


def one(x: Any) -> Any:
    """The value that every device of this process holds."""
    shards = [np.asarray(shard.data) for shard in x.addressable_shards]
    assert len({shard.tobytes() for shard in shards}) == 1, f"devices differ: {shards}"
    assert len(set(shards[0].ravel().tolist())) == 1, f"devices differ: {shards[0]}"
    return shards[0].ravel()[0]


def run(
    advance: Callable[..., Any], scaler: Any, params: Any, place: Callable[[Any, str], Any]
) -> tuple[list[list[float]], Any]:
    """The history of all steps, and the parameters.

    Args:
        advance: `step`, in some way.
        scaler: where it has to be.
        params: where they have to be.
        place: puts a batch ("x") or a probe ("probe") where it has to be.
    """
    history = []
    for at in range(STEPS):
        scaler, params, finite = advance(
            scaler, params, place(batch(at), "x"), place(probe(at), "probe")
        )
        history.append(row(scaler, finite))
    return history, params


def alone() -> Run:
    """The run on one device."""
    history, params = run(jax.jit(step), first_scaler(), first_params(), lambda x, _: x)
    return Run(history, {name: np.asarray(p).tolist() for name, p in params.items()})
