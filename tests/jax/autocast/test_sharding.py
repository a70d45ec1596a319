"""Autocast on a mesh of eight devices: every way to shard gives the gradients of one device."""

import pytest

from tests.support.jax import eight_devices

SHARD_MAPS = [f"shard_map-{check}" for check in (True, False)]
MESHES = [f"mesh-{kind}" for kind in ("Auto", "Explicit")]
WAYS = [
    *[f"{name}-{way}" for name in SHARD_MAPS for way in ("inside", "outside", "looped")],
    *[f"{name}{way}" for name in MESHES for way in ("", "-eager", "-remat", "-donated")],
    *[f"{name}-axes-{way}" for name in MESHES for way in ("inside", "eager", "outside")],
    "shard_map-eager",
    "shard_map-partly",
    "pmap",
]


@pytest.fixture(scope="module")
def on_mesh():
    return eight_devices.run("autocast_on_mesh")


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_low_products_away_from_those_of_one_device(on_mesh, way):
    seen = on_mesh[way]
    # Two or six products in a row, each operand rounded by at most 2**-9; headroom of 4.
    assert 0 < seen["error"] < 4 * 6 * 2**-8
    assert seen["dtypes"] == ["float32"]
    assert seen["products"] == ["bfloat16"]


def test_every_way_that_ran_is_looked_at(on_mesh):
    assert on_mesh.keys() == {*WAYS, "reduced"}


def test_what_devices_computed_is_added_up_in_float32_and_rounded_once(on_mesh):
    seen = on_mesh["reduced"]
    assert seen["dtypes"] == ["f32"]
    assert seen["dtype"] == "bfloat16"
    assert seen["error"] <= 1.01 * 2**-8


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_gradients_are_sharded_as_their_parameters(on_mesh, kind):
    shardings = {"w": "(None, 'model')", "b": "('model',)", "v": "('model', None)"}
    for name, spec in on_mesh[f"mesh-{kind}"]["shardings"].items():
        found = (
            spec.removeprefix("PartitionSpec").removeprefix("P").replace("('model')", "('model',)")
        )
        assert found in (shardings[name], shardings[name].replace("('model', None)", "('model',)"))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_donated_parameters_are_used_up(on_mesh, kind):
    assert on_mesh[f"mesh-{kind}-donated"]["deleted"]
