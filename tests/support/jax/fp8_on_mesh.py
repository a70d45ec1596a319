"""The program that `test_fp8_contraction` runs on eight devices: products in 8 bits, sharded.

Run as a module with eight CPU devices; prints one line of JSON: for a recipe, by way, how far the
loss and its gradients are from those that the way is defined by, in parts of the largest number.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from polymp.jax import autocast
from tests.support.jax.fp8_models import batch, layers, loss, policy

PARAMS = layers()
X = jnp.concatenate([batch() * scale for scale in (1, 3, 9, 27)])
COUNT = len(X)


def off(one: Any, other: Any) -> float:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    both = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in both)


def by_shards(both: Callable[..., Any]) -> Any:
    """The body of a shard_map: each device scales its own part of the batch."""
    each = [both(PARAMS, x[None]) for x in X]
    losses, grads = zip(*each, strict=True)
    of_params = jax.tree.map(lambda *leaves: sum(leaves) / COUNT, *[g[0] for g in grads])
    of_x = jnp.concatenate([g[1] for g in grads]) / COUNT
    return sum(one.astype(jnp.float32) for one in losses) / COUNT, (of_params, of_x)


def main(name: str) -> None:
    seen: dict[str, float] = {}
    fn = autocast(loss, policy=policy(name))
    both = jax.jit(jax.value_and_grad(fn, (0, 1)))
    whole, shards = both(PARAMS, X), by_shards(both)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((COUNT,), ("d",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
            x = jax.device_put(X, NamedSharding(mesh, P("d")))
            seen[f"mesh-{kind.name}"] = off(both(params, x), whole)
    mesh = jax.make_mesh((COUNT,), ("d",), axis_types=(AxisType.Auto,))
    for body, way in ((fn, "around"), (loss, "inside")):
        mapped = jax.shard_map(
            lambda params, x, body=body: jax.lax.pmean(body(params, x), "d"),
            mesh=mesh,
            in_specs=(P(), P("d")),
            out_specs=P(),
        )
        mapped = mapped if way == "around" else autocast(mapped, policy=policy(name))
        made = jax.jit(jax.value_and_grad(mapped, (0, 1)))(PARAMS, X)
        seen[f"shard_map-{way}"] = off(made, shards)
    seen["one scale or eight"] = off(whole, shards)
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
