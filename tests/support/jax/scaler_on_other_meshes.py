"""The program of `test_checkpoint` on eight devices: save on two, resume on four and eight.

Run as a module with eight CPU devices and a folder; prints one line of JSON: by devices, what the
run left.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.jax import planted_run

CUT = 8  # steps before the checkpoint: the scale is not the first one, and a streak has begun


def shardings(devices: int) -> tuple[Any, Any]:
    """Where the train state and a batch have to be on the first devices."""
    mesh = jax.make_mesh(
        (devices // 2, 2),
        ("data", "model"),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[:devices],
    )
    everywhere = NamedSharding(mesh, P())
    state = {
        "scaler": jax.tree.map(lambda _: everywhere, planted_run.first_scaler()),
        "params": {
            "a": NamedSharding(mesh, P(None, "model")),
            "b": NamedSharding(mesh, P("model", None)),
        },
    }
    return state, NamedSharding(mesh, P("data"))


def advance(state: Any, steps: range, where: Any, rows: Any) -> tuple[Any, list[list[float]]]:
    step = jax.jit(planted_run.step)
    history = []
    for at in steps:
        x = jax.device_put(planted_run.batch(at), rows)
        probe = jax.device_put(planted_run.probe(at), where["params"])
        scaler, params, finite = step(state["scaler"], state["params"], x, probe)
        state = {"scaler": scaler, "params": params}
        history.append(planted_run.row(scaler, finite))
    return state, history


def main(folder: Path) -> None:
    assert len(jax.devices()) == 8
    where, rows = shardings(2)
    start = {"scaler": planted_run.first_scaler(), "params": planted_run.first_params()}
    state, before = advance(jax.device_put(start, where), range(CUT), where, rows)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
    found: dict[str, Any] = {"alone": planted_run.alone()._asdict(), "before": before}
    for devices in (2, 4, 8):
        where, rows = shardings(devices)
        target = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, where
        )
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(folder / "state", target)
        assert len(restored["scaler"].state.scale.sharding.device_set) == devices
        after, history = advance(restored, range(CUT, planted_run.STEPS), where, rows)
        found[str(devices)] = {
            "history": history,
            "params": {name: np.asarray(p).tolist() for name, p in after["params"].items()},
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
