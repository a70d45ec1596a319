"""On eight devices, however a run is spread over them, it is the run on one, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.jax import eight_devices, planted_run
from tests.support.sizes import LONG

pytestmark = pytest.mark.sized

HELPERS = ("summed", "by_value_and_grad", "by_optimizer")
JITTED = ("jit-8x1", "jit-1x8", "jit-4x2")
ONE_PER_DEVICE = tuple(
    f"{way}-{helper}" for way in ("shard_map-True", "shard_map-False", "pmap") for helper in HELPERS
)[:: 1 if LONG else 4]  # in `make test` each way once, and each helper


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return eight_devices.run("scaler_over_meshes", *ONE_PER_DEVICE)


@pytest.mark.parametrize("way", [*JITTED, *ONE_PER_DEVICE, "by types"])
def test_the_run_is_that_of_one_device(found, way):
    assert found[way]["history"] == found["alone"]["history"]
    assert found[way]["params"] == found["alone"]["params"]


def test_every_way_that_ran_is_looked_at(found):
    assert found.keys() == {"alone", *JITTED, *ONE_PER_DEVICE, "by types"}


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
