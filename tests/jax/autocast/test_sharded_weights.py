"""Sharded weights are gathered as often as by hand, in as few bytes, and nothing more is saved."""

import pytest

from tests.support.jax import eight_devices
from tests.support.sizes import LONG

pytestmark = pytest.mark.sized
EVERY = slice(None, None, 1 if LONG else 3)  # one in three programs of each kind in `make test`

# Where the program gathers its weights itself.
OWN = (
    "explicit, resharded",
    "explicit, resharded, jitted",
    "shard_map",
    "shard_map and scan",
    "shard_map, turned",
    "shard_map, jitted",
)[EVERY]
# Where the partitioner does.
JITTED = (
    "jitted",
    "jitted, one in the other",
    "jitted, scan and remat",
    "jitted with autocast inside",
    "jitted, explicit",
)[EVERY]
IN_A_ROW = (*("plain", "weight on the left", "few rows", "remat", "explicit")[EVERY], *JITTED)
ITS = (*IN_A_ROW, *("scan", "scan and remat")[EVERY])
MIXED = ("shard_map, read in float32 too", "shard_map, read in float32 too, jitted")[EVERY]


@pytest.fixture(scope="module")
def on_mesh(tmp_path_factory):
    folder = tmp_path_factory.mktemp("xla")
    dump = f"--xla_dump_to={folder} --xla_dump_hlo_pass_re=spmd-partitioning"
    asked = () if LONG else (*ITS, *OWN, *MIXED)
    return eight_devices.run("tests.support.jax.gathers_on_mesh", folder, *asked, flags=dump)


@pytest.mark.parametrize("name", [*ITS, *OWN])
def test_weights_are_gathered_as_by_hand(on_mesh, name):
    seen = on_mesh[name]
    ours, by_hand, full = seen["autocast"], seen["by hand"], seen["float32"]
    assert ours["gathers"] == ["bfloat16"] * len(full["gathers"])
    assert ours["bytes"] == full["bytes"] / 2
    if name == "jitted, explicit":  # where jax 0.11 gathers some of what is cast by hand twice
        assert ours["bytes"] <= by_hand["bytes"]
    else:
        assert ours["bytes"] == by_hand["bytes"]
        assert ours["gathers"] == by_hand["gathers"]


@pytest.mark.parametrize("name", [*ITS, *OWN])
def test_nothing_more_is_saved_and_gradients_stay_as_they_are(on_mesh, name):
    seen = on_mesh[name]
    assert seen["autocast"]["saved"] == seen["off"]["saved"]
    assert seen["same"], "the gradients have other bits than without it"
    assert seen["unrounded"], "these gradients were rounded"
    assert 0 < seen["error"] < 4 * 3 * 2**-8


@pytest.mark.parametrize("name", MIXED)
def test_a_weight_that_is_read_in_float32_too_is_gathered_in_float32(on_mesh, name):
    seen = on_mesh[name]
    assert seen["autocast"]["gathers"] == seen["float32"]["gathers"] == ["float32"] * 3


def test_casts_that_are_not_one_are_gathered_twice(on_mesh):
    for name in IN_A_ROW:
        assert len(on_mesh[name]["off"]["gathers"]) > len(on_mesh[name]["autocast"]["gathers"])


def test_weights_that_are_not_rounded_first_are_gathered_in_float32(on_mesh):
    for name in OWN:
        assert set(on_mesh[name]["off"]["gathers"]) == {"float32"}
