"""Runs with low weights that are spread over devices, saved and disturbed."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from polymp import weights
from polymp.jax import low_weights
from tests.support.jax import eight_devices

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
    return [np.asarray(x).tobytes().hex() for x in jax.tree.leaves(run)]


def meshes(folder: Path) -> dict[str, Any]:
    """Each mode alone, over eight devices, and saved on four of them and gone on on eight."""
    found = {}
    for mode in weights.MODES:
        ways = {"alone": seen(trained(mode, start(mode), range(STEPS)))}
        for shape in ((8, 1), (2, 4)):
            mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
            where = {name: NamedSharding(mesh, spec) for name, spec in WHERE.items()}
            first = start(mode, jax.device_put(START, where))
            assert first["params"]["w"].sharding == where["w"]
            last = trained(mode, first, range(STEPS), where)
            ways["x".join(map(str, shape))] = seen(last)
            assert last["params"]["w"].sharding.is_equivalent_to(where["w"], 2)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / mode, trained(mode, start(mode), range(CUT)))
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), last
        )
        with ocp.StandardCheckpointer() as checkpointer:
            back = checkpointer.restore(folder / mode, like)
        ways["resumed on eight"] = seen(trained(mode, back, range(CUT, STEPS), where))
        found[mode] = ways
    return found


MODES = tuple(weights.MODES)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("meshes")
    return eight_devices.run("tests.jax.weights.test_low_runs", folder, strict=False)


@pytest.mark.parametrize("mode", MODES)
def test_the_bits_do_not_depend_on_the_mesh(found, mode):
    """Nor on a checkpoint of one device that is read by eight."""
    ways = found[mode]
    assert ways.keys() == {"alone", "8x1", "2x4", "resumed on eight"}
    assert ways == dict.fromkeys(ways, ways["alone"])
    assert ways["alone"] == seen(trained(mode, start(mode), range(STEPS)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("factor", [0.0, -0.5, 2.0, 3.0])
def test_weights_that_were_written_by_hand_count(mode, factor):
    """Also as a mask, and also where a rest of another weight is beside them."""
    tx = low_weights(optax.sgd(2**-5), mode)
    params, grads = ({"w": jax.random.normal(jax.random.key(at), (64, 64))} for at in (0, 5))
    state, low = tx.init(params), tx.weights(params)
    updates, state = tx.update(grads, state, low)
    written = optax.apply_updates(low, updates)["w"].at[::2].multiply(factor)
    updates, state = tx.update(jax.tree.map(jnp.zeros_like, grads), state, {"w": written})
    assert np.array_equal(written, optax.apply_updates({"w": written}, updates)["w"])


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_with_inf_without_a_scaler_makes_what_it_makes_in_float32(mode):
    tx, params = low_weights(optax.sgd(2**-5), mode), {"w": jnp.ones(4)}
    grads = {"w": jnp.array([jnp.inf, -jnp.inf, jnp.nan, 1.0])}
    state, low = tx.init(params), tx.weights(params)
    updates, state = tx.update(grads, state, low)
    after = np.asarray(optax.apply_updates(low, updates)["w"].astype(jnp.float32))
    moved, _ = optax.sgd(2**-5).update(grads, optax.sgd(2**-5).init(params), params)
    want = np.asarray(optax.apply_updates(params, moved)["w"])
    assert np.array_equal(after[:3], want[:3], equal_nan=True)


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    print(json.dumps(meshes(Path(sys.argv[1]))))
