"""On eight devices, however a run is spread over them, it is the run on one, bit for bit."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest

from tests.support.jax import eight_devices, planted_run
from tests.support.sizes import LONG

pytestmark = pytest.mark.sized

HELPERS = ("summed", "by_value_and_grad")
JITTED = ("jit-8x1", "jit-1x8", "jit-4x2")
ONE_PER_DEVICE = tuple(
    f"{way}-{helper}"
    for at, way in enumerate(("shard_map-True", "shard_map-False", "pmap"))
    for helper in (HELPERS if LONG else HELPERS[at % 2 :][:1])
)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return eight_devices.run("tests.support.jax.planted_run", "meshes_of_eight", *ONE_PER_DEVICE)


@pytest.mark.parametrize("way", [*JITTED, *ONE_PER_DEVICE])
def test_the_run_is_that_of_one_device(found, way):
    assert found[way]["history"] == found["alone"]["history"]
    assert found[way]["params"] == found["alone"]["params"]
    assert way not in ONE_PER_DEVICE or found[way]["same"], "the devices end with other parameters"


def test_the_run_has_what_it_is_for(found):
    """Each plant is skipped, a NaN loss is counted apart, and the parameters move."""
    history = found["alone"]["history"]
    assert len(history) == planted_run.STEPS
    assert [at for at, row in enumerate(history) if not row[-1]] == list(planted_run.PLANTS)
    scales = [row[0] for row in history]
    assert (scales[1], scales[2], scales[3], scales[7], scales[8]) == (512, 256, 128, 128, 64)
    assert [row[3] for row in history].index(1) == 8
    for values in map(np.array, found["alone"]["params"].values()):
        assert len(np.unique(values)) > 4
        assert np.all((-1 < values) & (values < 2))


def test_this_oracle_notices_devices_that_differ():
    with pytest.raises(AssertionError, match="devices differ"):
        planted_run.one(planted_run.jnp.array([1.0, 1.0, 2.0]))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("checkpoint")
    run = "tests.support.jax.planted_run", "resumed_on_more", folder
    return eight_devices.run(*run, strict=False)


@pytest.mark.parametrize("devices", ["2", "4", "8"])
def test_a_run_saved_on_two_devices_goes_on_on_more(resumed, devices):
    whole, before = resumed["alone"]["history"], resumed["before"]
    assert before == whole[: len(before)]
    assert before[-1][:4] == [128.0, 1.0, 0.0, 0.0], "saved in the middle of a streak"
    assert resumed[devices]["history"] == whole[len(before) :]
    assert resumed[devices]["params"] == resumed["alone"]["params"]


# --- Two processes that share every array: both see the run of one device, bit for bit ------------


@pytest.fixture(scope="module")
def found_processes() -> list[dict[str, Any]]:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    given = [("over_processes", rank, address) for rank in range(2)]
    return eight_devices.at_once("tests.support.jax.planted_run", *given)


@pytest.fixture(scope="module")
def alone() -> planted_run.Run:
    return planted_run.alone()


@pytest.mark.parametrize("mesh", ["data", "model"])
@pytest.mark.parametrize("rank", [0, 1])
def test_both_see_the_run_of_one_device(found_processes, alone, rank, mesh):
    """Each has a part of the parameters, and counts the shards of both in its report."""
    assert found_processes[rank].keys() == {"data", "model"}
    mine = found_processes[rank][mesh]
    assert mine["history"] == alone.history
    assert mine["report"] == ["b (1 Inf, 0 NaN of 128)"]
    for name, shards in mine["params"].items():
        ((starts, values),) = shards
        rows, columns = (start or 0 for start in starts)
        values = np.asarray(values)
        part = np.asarray(alone.params[name])[rows:, columns:]
        assert np.array_equal(part[: values.shape[0], : values.shape[1]], values)


def test_the_two_hold_different_shards_of_what_is_split_over_them(found_processes):
    mine, theirs = (
        [starts for starts, _ in ranks["model"]["params"]["a"]] for ranks in found_processes
    )
    assert [*mine, *theirs] == [[None, 0], [None, 4]]


# --- Steps in which one device of eight finds an Inf ----------------------------------------------


@pytest.fixture(scope="module")
def on_mesh() -> dict[str, Any]:
    return eight_devices.run("tests.support.jax.scaler_meshes")


ALL_SKIP: dict[str, Any] = {
    "partly-manual-sick": {"w": [1.0] * 8, "scale": [4.0] * 4, "finite": [False] * 4}
}
for way in ("step", "value_and_grad"):  # a sharded parameter, and a whole one
    ALL_SKIP[f"fully-sharded-by_{way}-sick"] = [[1.0] * 8, 0.0, 4.0]
    ALL_SKIP[f"fully-sharded-by_{way}-healthy"] = [[0.0] * 8, -1.0, 16.0]


@pytest.mark.parametrize("way", ALL_SKIP)
def test_an_inf_on_one_device_makes_all_skip(on_mesh, way):
    assert on_mesh[way] == ALL_SKIP[way]


@pytest.mark.parametrize("check", [True, False])
def test_devices_that_do_not_ask_each_other_drift_apart(on_mesh, check):
    """The result that the test above would see if the axes were not found."""
    seen = on_mesh[f"alone-{check}-sick"]
    assert seen["scale"] == [16.0] * 3 + [4.0] + [16.0] * 4
    assert seen["w"] == [0.0] * 3 + [1.0] + [0.0] * 4


def test_a_step_on_a_mesh_whose_shardings_are_types(on_mesh):
    healthy, sick = on_mesh["explicit-healthy"], on_mesh["explicit-sick"]
    assert healthy["finite"]
    assert all(healthy["updates"])
    assert (sick["updates"], sick["finite"]) == ([0.0] * 8, False)
    assert healthy["spec"] == sick["spec"]
    assert "data" in sick["spec"]
