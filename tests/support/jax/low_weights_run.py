"""A run of training with low weights that can be spread over devices, saved, and killed.

    python -m tests.support.jax.low_weights_run meshes FOLDER     on eight devices; prints JSON
    python -m tests.support.jax.low_weights_run save FOLDER MODE  saves each step, and goes on

Products and sums are of powers of two, so that no fusion of XLA's changes a bit.
"""

from __future__ import annotations

import json
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from polymp.jax import low_weights
from polymp.weights import store

STEPS, CUT = 8, 3
START = {
    "w": jax.random.normal(jax.random.key(0), (16, 24)),
    "v": jax.random.normal(jax.random.key(1), (8,)),
}
WHERE = {"w": P("data", "model"), "v": P("data")}


def transformation(mode: str) -> Any:
    return low_weights(optax.sgd(2**-5, momentum=0.5), mode, seed=11)


def gradients(number: int) -> Any:
    key = jax.random.fold_in(jax.random.key(5), number)
    return jax.tree.map(lambda x: jax.random.normal(key, x.shape), START)


def start(mode: str, params: Any = None) -> Any:
    tx, params = transformation(mode), START if params is None else params
    return {"state": tx.init(params), "params": tx.weights(params)}


@cache
def step_of(mode: str) -> Any:
    tx = transformation(mode)

    @jax.jit
    def step(run: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, run["state"], run["params"])
        return {"state": state, "params": optax.apply_updates(run["params"], updates)}

    return step


def trained(mode: str, run: Any, steps: range, where: Any = None) -> Any:
    step = step_of(mode)
    for number in steps:
        grads = gradients(number)
        run = step(run, grads if where is None else jax.device_put(grads, where))
    return run


def seen(run: Any) -> list[str]:
    """Every bit of a run."""
    return [np.asarray(x).tobytes().hex() for x in jax.tree.leaves(run)]


def save(run: Any, path: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, run)


def restored(path: Path, like: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, like)


def meshes(folder: Path) -> dict[str, Any]:
    """Each mode alone, over eight devices, and saved on four of them and gone on on eight."""
    found = {}
    for mode in store.MODES:
        ways = {"alone": seen(trained(mode, start(mode), range(STEPS)))}
        for shape in ((8, 1), (2, 4), (4, 2)):
            mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
            where = {name: NamedSharding(mesh, spec) for name, spec in WHERE.items()}
            first = start(mode, jax.device_put(START, where))
            assert first["params"]["w"].sharding == where["w"]
            last = trained(mode, first, range(STEPS), where)
            ways["x".join(map(str, shape))] = seen(last)
            assert last["params"]["w"].sharding.is_equivalent_to(where["w"], 2)
        half = trained(mode, start(mode), range(CUT))
        save(half, folder / mode)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), first)
        like = jax.tree.map(
            lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at.sharding), like, last
        )
        back = restored(folder / mode, like)
        ways["resumed on eight"] = seen(trained(mode, back, range(CUT, STEPS), where))
        found[mode] = ways
    return found


def save_each_step(folder: Path, mode: str, slow: bool) -> None:
    """Train to the end, from the beginning or from the last step that is there."""
    run, step = start(mode), step_of(mode)
    done = sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
    if done:
        run = restored(folder / str(done[-1]), run)
    for number in range(done[-1] + 1 if done else 0, STEPS):
        run = step(run, gradients(number))
        save(run, folder / str(number))
        if slow and number >= CUT:
            (folder / "stopped").touch()
            time.sleep(600)  # until it is killed
    (folder / "end.json").write_text(json.dumps(seen(run)))


if __name__ == "__main__":
    what, where_to, *rest = sys.argv[1:]
    if what == "meshes":
        assert len(jax.devices()) == 8
        print(json.dumps(meshes(Path(where_to))))
    else:
        save_each_step(Path(where_to), rest[0], slow="slow" in rest)
