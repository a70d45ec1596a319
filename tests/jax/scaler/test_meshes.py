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


@pytest.mark.parametrize("way", [*JITTED, *ONE_PER_DEVICE, "by types"])
def test_the_run_is_that_of_one_device(found, way):
    assert found[way]["history"] == found["alone"]["history"]
    assert found[way]["params"] == found["alone"]["params"]


def test_the_run_has_what_it_is_for(found):
    """Each plant is skipped, a NaN loss is counted apart, and the parameters move."""
    history = found["alone"]["history"]
    assert len(history) == planted_run.STEPS
    assert [at for at, row in enumerate(history) if not row[-1]] == list(planted_run.PLANTS)
    scales = [row[0] for row in history]
    assert (scales[1], scales[2], scales[3], scales[7], scales[8]) == (512, 256, 128, 128, 64)
    assert [row[3] for row in history].index(1) == 8
    for values in found["alone"]["params"].values():
        flat = {x for row in values for x in row}
        assert len(flat) > 4
        assert all(-1 < x < 2 for x in flat)


@pytest.mark.parametrize("way", ONE_PER_DEVICE)
def test_every_device_ends_with_the_same_parameters(found, way):
    assert found[way]["same"]


def test_this_oracle_notices_devices_that_differ():
    with pytest.raises(AssertionError, match="devices differ"):
        planted_run.one(planted_run.jnp.array([1.0, 1.0, 2.0]))


# --- Two processes that share every array: both see the run of one device, bit for bit ------------


MESHES = ("data", "model")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def found_processes() -> list[dict[str, Any]]:
    """Return the output of each process."""
    address = f"localhost:{free_port()}"
    given = [("over_processes", rank, address) for rank in range(2)]
    return eight_devices.at_once("tests.support.jax.planted_run", *given)


@pytest.fixture(scope="module")
def alone() -> planted_run.Run:
    return planted_run.alone()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("rank", [0, 1])
def test_both_see_the_history_of_one_device(found_processes, alone, rank, mesh):
    assert found_processes[rank].keys() == set(MESHES)
    assert found_processes[rank][mesh]["history"] == alone.history


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("rank", [0, 1])
def test_every_shard_is_a_part_of_the_parameters_of_one_device(found_processes, alone, rank, mesh):
    for name, shards in found_processes[rank][mesh]["params"].items():
        whole = np.asarray(alone.params[name])
        assert len(shards) == 1
        for starts, values in shards:
            rows, columns = (start or 0 for start in starts)
            values = np.asarray(values)
            part = whole[rows:, columns:][: values.shape[0], : values.shape[1]]
            assert np.array_equal(part, values)


def test_the_two_hold_different_shards_of_what_is_split_over_them(found_processes):
    mine, theirs = (
        [starts for starts, _ in ranks["model"]["params"]["a"]] for ranks in found_processes
    )
    assert [*mine, *theirs] == [[None, 0], [None, 4]]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_report_counts_the_shards_of_both(found_processes, rank, mesh):
    assert found_processes[rank][mesh]["report"] == ["b (1 Inf, 0 NaN of 128)"]
