"""Counts gathers of sharded weights and their bytes on eight devices, for `test_sharding`.

Run as a module with eight CPU devices and a folder for XLA to write to; prints one line of JSON:
for each program, in float32, in bfloat16 by hand and under autocast, the all-gathers as the
partitioner made them (later, XLA's CPU has float32 ones alone), and the bytes of what is saved for
backward. Autocast also with one of its means switched off.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from polymp.backends.jax import compat
from polymp.jax import autocast, lower
from tests.support.jax import hlo

WIDTH, LAYERS, ROWS = 16, 3, 256
KEYS = jax.random.split(jax.random.key(0), LAYERS)
WEIGHTS = [jax.random.normal(key, (WIDTH, WIDTH)) / 4 for key in KEYS]
X = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))

Low = Callable[[Any], Any]  # how a weight is cast: by hand, or not at all


def in_a_row(product: Callable[[Any, Any, Low], Any]) -> Any:
    def network(weights: Any, x: Any, low: Low) -> Any:
        for w in weights:
            x = jnp.tanh(product(x, w, low))
        return x

    return network


def computed_again(weights: Any, x: Any, low: Low) -> Any:
    for w in weights:
        x = jax.checkpoint(lambda x, w: jnp.tanh(x @ low(w)))(x, w)
    return x


def scanned(weights: Any, x: Any, low: Low) -> Any:
    return lax.scan(lambda x, w: (jnp.tanh(x @ low(w)), None), x, weights)[0]


def scanned_again(weights: Any, x: Any, low: Low) -> Any:
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ low(w)), None))
    return lax.scan(layer, x, weights)[0]


def jitted(x: Any, w: Any, low: Low) -> Any:
    return jax.jit(lambda x, w: x @ low(w), inline=True)(x, w)


def scanned_jitted(weights: Any, x: Any, low: Low) -> Any:
    layer = jax.jit(lambda x, w: (jnp.tanh(x @ low(w)), None), inline=True)
    return lax.scan(jax.checkpoint(lambda x, w: layer(x, w)), x, weights)[0]


def mapped(network: Any) -> Any:
    def on_devices(weights: Any, x: Any, low: Low) -> Any:
        whole = jax.tree.map(lambda w: P(None, "d") if w.ndim == 3 else P("d"), weights)
        return jax.shard_map(
            lambda weights, x: network(weights, x, low),
            mesh=MESHES["Auto"],
            in_specs=(whole, P("d")),
            out_specs=P("d"),
        )(weights, x)

    return on_devices


def gathered(w: Any) -> Any:
    return lax.all_gather(w, "d", tiled=True)


MESHES = {
    kind.name: jax.make_mesh((8,), ("d",), axis_types=(kind,))
    for kind in (AxisType.Auto, AxisType.Explicit)
}
PLAIN = in_a_row(lambda x, w, low: x @ low(w))
PROGRAMS = {
    "plain": PLAIN,
    "weight on the left": in_a_row(lambda x, w, low: jax.vmap(lambda x: low(w) @ x)(x)),
    "few rows": lambda weights, x, low: PLAIN(weights, x.reshape(64, 4, WIDTH).sum(1), low),
    "remat": computed_again,
    "scan": scanned,
    "scan and remat": scanned_again,
    "jitted": in_a_row(jitted),
    "jitted, one in the other": lambda weights, x, low: jax.jit(
        lambda weights, x: in_a_row(jitted)(weights, x, low), inline=True
    )(weights, x),
    "jitted, scan and remat": scanned_jitted,
    "jitted with autocast inside": PLAIN,
    "jitted, explicit": in_a_row(jitted),
    "explicit": PLAIN,
    "explicit, resharded": in_a_row(lambda x, w, low: x @ jax.sharding.reshard(lower(low(w)), P())),
    "shard_map": mapped(in_a_row(lambda x, w, low: x @ gathered(lower(low(w))))),
    "shard_map, not marked": mapped(in_a_row(lambda x, w, low: x @ gathered(low(w)))),
}


def losses(network: Any, name: str) -> dict[str, Any]:
    def loss(weights: Any, x: Any) -> Any:
        return (network(weights, x, lambda w: w) ** 2).mean()

    def by_hand(weights: Any, x: Any) -> Any:
        out = network(weights, x.astype(jnp.bfloat16), lambda w: w.astype(jnp.bfloat16))
        return (out.astype(jnp.float32) ** 2).mean()

    found = {"float32": loss, "by hand": by_hand, "autocast": autocast(loss)}
    inlined = partial(jax.jit, inline=True)
    return jax.tree.map(inlined, found) if name == "jitted with autocast inside" else found


def looked_at(fn: Any, name: str, args: Any, folder: Path) -> tuple[dict[str, Any], Any]:
    """Count what is gathered and saved for a gradient; the gradient comes as one array."""

    def program(*args: Any) -> Any:
        return jax.grad(fn)(*args)

    program.__name__ = "".join(c if c.isalnum() else "_" for c in name)
    shardings = jax.tree.map(lambda w: w.sharding, args[0])
    compiled = jax.jit(program, out_shardings=shardings).lower(*args).compile()
    pattern = f"*.jit_{program.__name__}.*after_spmd-partitioning*.txt"
    (text,) = (path.read_text() for path in folder.glob(pattern))
    ops = [op for body in hlo.read(text).values() for op in body.values()]
    found = [op for op in ops if op.opcode.startswith("all-gather")]
    seen = {
        "gathers": sorted(op.dtype for op in found),
        "bytes": sum(int(np.prod(op.shape)) * np.dtype(op.dtype).itemsize for op in found),
        "saved": hlo.residual_bytes(fn, *args),
    }
    return seen, np.concatenate([np.ravel(g) for g in jax.tree.leaves(compiled(*args))])


@contextmanager
def without_merging() -> Iterator[None]:
    with mock.patch.object(compat, "merge_repeated"):
        jax.clear_caches()
        yield
    jax.clear_caches()


def main(folder: Path, *names: str) -> None:
    """Look at the programs of these names, or at all."""
    found: dict[str, Any] = {}
    for name in names or PROGRAMS:
        network = PROGRAMS[name]
        mesh = MESHES["Explicit" if "explicit" in name else "Auto"]
        weights: Any = jnp.stack(WEIGHTS) if "scan" in name else WEIGHTS
        spec = P(None, "d", None) if "scan" in name else P("d", None)
        with jax.set_mesh(mesh):
            weights = jax.device_put(weights, NamedSharding(mesh, spec))
            args = weights, jax.device_put(X, NamedSharding(mesh, P("d", None)))
            seen, grads = {}, {}
            for how, loss in losses(network, name).items():
                seen[how], grads[how] = looked_at(loss, f"{name} {how}", args, folder)
            with MEANS[name]():
                loss = losses(network, name)["autocast"]
                seen["off"], grads["off"] = looked_at(loss, f"{name} off", args, folder)
        right, ours = grads["float32"], grads["autocast"]
        seen["error"] = float(np.abs(ours - right).max() / np.abs(right).max())
        seen["same"] = bool((ours == grads["off"]).all())
        seen["unrounded"] = bool((ours.astype(jnp.bfloat16) != ours).mean() > 0.5)
        found[name] = seen
    print(json.dumps(found))


def means(name: str) -> Any:
    """Switches off what makes a difference to a program."""
    if "shard_map" in name or "resharded" in name:  # the program gathers by itself
        return nullcontext
    return without_merging


MEANS = {name: means(name) for name in PROGRAMS}

if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
