"""Which arguments of a call are not finite, and their names as the caller would write them."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polymp.backends.jax.arrays import is_float


@jax.jit
def _finite(arrays: Sequence[jax.Array]) -> jax.Array:
    """Whether each array is finite: bool [2, n], whether it has no NaN, and no Inf."""
    return jnp.stack([jnp.array([~jnp.isnan(x).any(), ~jnp.isinf(x).any()]) for x in arrays], 1)


def not_finite(leaves: Mapping[int, Any]) -> dict[int, str]:
    """Return the places of floats that have Inf or NaN: "Inf" or "NaN". Waits for the device."""
    by_devices: dict[frozenset[jax.Device], list[int]] = {}
    for at, leaf in leaves.items():
        if is_float(leaf) and np.size(leaf):
            devices = leaf.sharding.device_set if isinstance(leaf, jax.Array) else ()
            by_devices.setdefault(frozenset(devices), []).append(at)
    found = {}
    for places in by_devices.values():
        no_nan, no_inf = np.asarray(_finite([leaves[at] for at in places]))
        for at, numbers, bounded in zip(places, no_nan, no_inf, strict=True):
            if not (numbers and bounded):
                found[at] = "NaN" if not numbers else "Inf"
    return dict(sorted(found.items()))


def name_of(tree: jax.tree_util.PyTreeDef, at: int) -> str:
    """Return the name of an argument, as the caller would write it."""
    numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
    (args, kwargs) = numbered
    for kind in (args, kwargs):
        for path, leaf in jax.tree_util.tree_leaves_with_path(kind):
            if leaf == at:
                return f"argument {jax.tree_util.keystr(path)}"
    return "an argument"
