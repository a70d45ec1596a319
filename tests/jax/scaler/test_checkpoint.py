"""A scaler out of a checkpoint is the scaler that went in, and the run goes on from there."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from polymp.jax import GradScaler
from tests.support.jax import eight_devices

HISTORY = ("good", "good", "overflow", "good", "spoiled", "overflow", "overflow")


def used() -> GradScaler:
    """A scaler every number of which is another than a new one's."""
    scaler = GradScaler(3.0, 1.5, 0.3, 2, min_scale=2.0**-20, max_scale=2.0**20, hysteresis=1)
    for found in HISTORY:
        scaler = scaler.update(found == "good", loss_finite=found != "spoiled")
    return scaler


def new() -> GradScaler:
    """One of the same rule, as a program has it that starts again."""
    return GradScaler(9.0, 1.5, 0.3, 2, min_scale=2.0**-20, max_scale=2.0**20, hysteresis=1)


def bits(scaler: GradScaler) -> Any:
    arrays = [(np.asarray(x).tobytes(), np.asarray(x).dtype.name) for x in scaler.state]
    return arrays, scaler.rule, scaler.enabled


def goes_on(scaler: GradScaler) -> list[Any]:
    step, seen = jax.jit(lambda s, finite: s.update(finite)), []
    for finite in (True, True, False, False, False, True, True):
        scaler = step(scaler, finite)
        seen.append(bits(scaler))
    return seen


def by_standard_orbax(scaler: Any, folder: Path) -> Any:
    state = {"scaler": scaler, "step": jnp.int32(7)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
    target = {"scaler": new(), "step": jnp.int32(0)}
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / "state", target)["scaler"]


def by_pytree_orbax(scaler: Any, folder: Path) -> Any:
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", {"scaler": scaler})
        return checkpointer.restore(folder / "state", item={"scaler": new()})["scaler"]


def by_state_dict_in_orbax(scaler: Any, folder: Path) -> Any:
    """Save and restore the scaler's state dict, which has its rule, too, as Python numbers."""
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
        checkpointer.save(folder / "state", scaler.state_dict())
        return GradScaler().load_state_dict(checkpointer.restore(folder / "state"))


def by_flax_bytes(scaler: Any, folder: Path) -> Any:
    data = flax.serialization.to_bytes({"scaler": scaler.state_dict()})
    saved = flax.serialization.msgpack_restore(data)["scaler"]
    return GradScaler().load_state_dict(saved)


def by_leaves(scaler: Any, folder: Path) -> Any:
    np.savez(folder / "leaves", *jax.tree.leaves(scaler))
    with np.load(folder / "leaves.npz") as saved:
        leaves = [saved[name] for name in saved.files]
    return jax.tree.unflatten(jax.tree.structure(new()), leaves)


WAYS = {
    "pickle": lambda scaler, _: pickle.loads(pickle.dumps(scaler)),
    "copy": lambda scaler, _: copy.copy(scaler),
    "deepcopy": lambda scaler, _: copy.deepcopy(scaler),
    "json": lambda scaler, _: GradScaler().load_state_dict(
        json.loads(json.dumps(scaler.state_dict()))
    ),
    "orbax": by_standard_orbax,
    "orbax, pytree": by_pytree_orbax,
    "orbax, json": by_state_dict_in_orbax,
    "flax": by_flax_bytes,
    "leaves": by_leaves,
}


@pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring")
@pytest.mark.parametrize("way", WAYS)
def test_what_comes_back_is_what_went_in_and_goes_on(way, tmp_path):
    scaler = used()
    back = WAYS[way](scaler, tmp_path)
    assert isinstance(back, GradScaler)
    assert bits(back) == bits(scaler) != bits(new())
    assert goes_on(back) == goes_on(scaler) != goes_on(new())


@pytest.mark.parametrize("way", ["pickle", "copy", "deepcopy"])
def test_a_disabled_scaler_stays_disabled(way, tmp_path):
    back = WAYS[way](GradScaler(enabled=False), tmp_path)
    assert back.enabled is False
    assert back.scale(3.0) == 3.0


def test_a_copy_of_one_that_is_donated_lives_on():
    scaler = used()
    kept, wanted = copy.deepcopy(scaler), bits(scaler)
    after = jax.jit(lambda s: s.update(True), donate_argnums=0)(scaler)
    assert scaler.state.scale.is_deleted()
    assert not after.state.scale.is_deleted()
    assert bits(kept) == wanted


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> dict[str, Any]:
    return eight_devices.run(
        "tests.support.jax.planted_run",
        "resumed_on_more",
        tmp_path_factory.mktemp("checkpoint"),
        strict=False,
    )


@pytest.mark.parametrize("devices", ["2", "4", "8"])
def test_a_run_saved_on_two_devices_goes_on_on_more(resumed, devices):
    whole, before = resumed["alone"]["history"], resumed["before"]
    assert before == whole[: len(before)]
    assert before[-1][:4] == [128.0, 1.0, 0.0, 0.0], "saved in the middle of a streak"
    assert resumed[devices]["history"] == whole[len(before) :]
    assert resumed[devices]["params"] == resumed["alone"]["params"]


def test_flax_saves_train_states_with_a_scaler_in_them():
    scaler = GradScaler(8.0, growth_interval=2).update(jnp.asarray(True))
    state = {"scaler": scaler, "w": jnp.ones(3)}
    data = flax.serialization.to_bytes(state)
    target = {"scaler": GradScaler(growth_interval=2), "w": jnp.zeros(3)}
    back = flax.serialization.from_bytes(target, data)
    assert back["scaler"].state_dict() == scaler.state_dict()
    following = [s.update(jnp.asarray(True)).state_dict() for s in (scaler, back["scaler"])]
    assert following[0] == following[1]
    assert following[0]["scale"] == 16.0
