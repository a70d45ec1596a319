"""Steps of a scaler on eight devices, of which one finds an Inf: all kinds of meshes."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from polymp.backends.jax.scaler import tree_math
from polymp.jax import GradScaler
from tests.support.jax.scaler_tools import by_optax

SICK = 3  # the device whose gradient is made infinite


def one_step(scaler: GradScaler, w: Any, g: Any) -> Any:
    """The new weights, the next scale as a row for each device, and the finding likewise."""
    w, scaler, finite = scaler.step(g, lambda g, w: w - g, w)
    return w, scaler.state.scale[None], finite[None]


def mapped(axes: dict[str, int], **how: Any) -> dict[str, Any]:
    mesh = jax.make_mesh(axes.values(), axes, axis_types=(AxisType.Auto,) * len(axes))
    how |= {"mesh": mesh, "in_specs": (P(), P("data"), P("data")), "out_specs": P("data")}
    start = GradScaler(8.0, growth_interval=1), jnp.ones(8), jnp.full(8, 8.0).at[SICK].set(jnp.inf)
    w, scale, finite = jax.jit(jax.shard_map(one_step, **how))(*start)
    return {"w": w.tolist(), "scale": scale.tolist(), "finite": finite.tolist()}


def manual() -> dict[str, Any]:
    """Over one axis of two, of which the other is XLA's; and of devices that ask no other."""
    found = {"partly-manual-sick": mapped({"data": 4, "m": 2}, axis_names={"data"})}
    with patch.object(tree_math, "_differing_axes", lambda finite: ()):
        for check in (True, False):
            found[f"alone-{check}-sick"] = mapped({"data": 8}, check_vma=check)
    return found


def explicit() -> dict[str, Any]:
    """A step where shardings are types: both branches have to agree on them."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        w = jax.device_put(jnp.ones(8), NamedSharding(mesh, P("data")))
        adam = optax.adam(0.5)
        state = adam.init(w)

        found = {}
        for kind, value in (("healthy", 1.0), ("sick", jnp.inf)):
            grads = w.at[SICK].set(value, out_sharding=NamedSharding(mesh, P("data")))
            (after, _), _, finite = jax.jit(
                lambda g, w, state: GradScaler(8.0).step(g, by_optax(adam), w, state)
            )(grads, w, state)
            found[f"explicit-{kind}"] = {
                "updates": (after - w).tolist(),
                "spec": str(after.sharding.spec),
                "finite": bool(finite),
            }
    return found


def fully_sharded() -> dict[str, Any]:
    """One parameter in pieces over the devices beside one that is whole on each, as in FSDP."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params, specs = {"w": jnp.ones(8), "b": jnp.float32(0)}, {"w": P("data"), "b": P()}

    def loss_fn(p: Any, x: Any) -> Any:
        w = jax.lax.all_gather(p["w"], "data", tiled=True)
        return jax.lax.pmean((x @ w + p["b"]).sum(), "data")

    def minus(p: Any, g: Any) -> Any:
        return jax.tree.map(lambda p, g: p - g, p, g)

    def by_step(scaler: GradScaler, p: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: scaler.scale(loss_fn(p, x)))(p)
        return scaler.step(grads, lambda g, p: minus(p, g), p)

    def by_value_and_grad(scaler: GradScaler, p: Any, x: Any) -> Any:
        (_, grads), scaler, finite = scaler.value_and_grad(loss_fn)(p, x)
        return jax.tree.map(lambda new, p: jnp.where(finite, new, p), minus(p, grads), p), scaler, 0

    found = {}
    for way in (by_step, by_value_and_grad):
        run = jax.shard_map(
            lambda *args, way=way: way(*args)[:2],
            mesh=mesh,
            in_specs=(P(), specs, P("data")),
            out_specs=(specs, P()),
        )
        for kind, value in (("sick", jnp.inf), ("healthy", 1.0)):
            x = jnp.ones((8, 8)).at[SICK, SICK].set(value)
            p, scaler = jax.jit(run)(GradScaler(8.0, growth_interval=1), params, x)
            each = p["w"].tolist(), float(p["b"]), float(scaler.state.scale)
            found[f"fully-sharded-{way.__name__}-{kind}"] = each
    return found


def main() -> None:
    assert len(jax.devices()) == 8
    print(json.dumps(manual() | explicit() | fully_sharded()))


if __name__ == "__main__":
    main()
