"""Inf on one device of two, under polymp's scaler, flax's and jmp's.

Run as a module with two CPU devices; prints one line of JSON: for each way to share the work and
each scaler, the scale on each device, and whether the parameters there are finite.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
from flax.training.dynamic_scale import DynamicScale
from jax import lax
from jax.sharding import PartitionSpec as P

from polymp.jax import GradScaler
from tests.support import kills

SICK, STEP, STEPS = 1, 3, 6  # the device and the step that get an Inf gradient


def loss_fn(w: Any, x: Any, y: Any, sick: Any) -> Any:
    loss = jnp.mean((x @ w - y) ** 2)
    return loss + jnp.sqrt(jnp.where(sick, loss - lax.stop_gradient(loss), 1.0)) - 1


def descended(w: Any, grads: Any) -> Any:
    return w - 0.05 * grads


def with_polymp(data: bool, scaler: Any, w: Any, *batch: Any) -> Any:
    grads = jax.grad(lambda w: scaler.scale(loss_fn(w, *batch)))(w)
    grads = lax.pmean(grads, "x") if data else grads
    w, scaler, _ = scaler.step(grads, lambda grads, w: descended(w, grads), w)
    return scaler, w, scaler.state.scale


def with_flax(data: bool, scaler: Any, w: Any, *batch: Any) -> Any:
    differentiated = scaler.value_and_grad(loss_fn, axis_name="x" if data else None)
    scaler, finite, _, grads = differentiated(w, *batch)
    return scaler, jnp.where(finite, descended(w, grads), w), scaler.scale


def with_jmp(data: bool, scaler: Any, w: Any, *batch: Any) -> Any:
    grads = jax.grad(lambda w: scaler.scale(loss_fn(w, *batch)))(w)
    grads = scaler.unscale(lax.pmean(grads, "x") if data else grads)
    finite = jmp.all_finite(grads)
    scaler = scaler.adjust(finite)
    return scaler, jmp.select_tree(finite, descended(w, grads), w), scaler.loss_scale


SCALERS: dict[str, tuple[Callable[..., Any], Any]] = {
    "polymp, JAX": (with_polymp, GradScaler),
    "flax": (with_flax, lambda: DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(2**16))),
    "jmp": (with_jmp, lambda: jmp.DynamicLossScale(jnp.float32(2.0**16))),
}


def run(way: str, one: Callable[..., Any], scaler: Any) -> list[tuple[float, bool]]:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    # Scaler and parameters have a row for each device, for they may come to differ.
    def on_device(scaler: Any, w: Any, *batch: Any) -> Any:
        first = partial(jax.tree.map, lambda a: a[0])
        after = one(way == kills.DATA, *first((scaler, w, *batch)))
        return jax.tree.map(lambda a: a[None], after)

    step = jax.jit(
        jax.shard_map(on_device, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    )
    scaler = jax.tree.map(lambda a: jnp.stack([jnp.asarray(a)] * 2), scaler)
    w = jnp.zeros((2, 4))
    for at in range(STEPS):
        batches = [kills.batch(2 * at + device, kills.GOOD) for device in range(2)]
        x, y = (np.stack(part) for part in zip(*batches, strict=True))
        sick = np.array([(device, at) == (SICK, STEP) for device in range(2)])
        scaler, w, scale = step(scaler, w, x, y, sick)
    return [(float(s), bool(jnp.isfinite(row).all())) for s, row in zip(scale, w, strict=True)]


if __name__ == "__main__":
    found = {
        way: {name: run(way, one, make()) for name, (one, make) in SCALERS.items()}
        for way in kills.WAYS
    }
    print(json.dumps(found))
