"""The versions that adapters are tested with, and what an adapter says of its library."""

import tomllib
from importlib import metadata

import pytest

from polymp import integrations, versions
from polymp.errors import BackendMissingError, VersionWarning
from tests.conftest import need
from tests.support.blocks import ROOT


@pytest.mark.parametrize("name", integrations.TESTED)
def test_an_extra_pins_what_its_adapter_is_tested_with(name):
    bounds = integrations.TESTED[name]
    first, end = map(versions.parts, bounds.split(","))
    assert bounds.startswith(">=")
    assert first < end
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"{name}{bounds}" in project["optional-dependencies"][name]
    assert (ROOT / "polymp" / f"{name}.py").is_file()


def test_an_adapter_asks_for_its_library():
    with pytest.raises(BackendMissingError) as error:
        integrations.require("nosuchlibrary")
    assert str(error.value) == (
        "polymp.nosuchlibrary needs the nosuchlibrary package: pip install 'polymp[nosuchlibrary]'."
    )


def test_an_adapter_warns_of_a_version_that_is_not_tested(monkeypatch):
    need("jax")
    monkeypatch.setitem(integrations.TESTED, "optax", ">=9,<10")
    version = metadata.version("optax")
    with pytest.warns(VersionWarning) as warned:
        assert integrations.require("optax").__name__ == "optax"
    assert str(warned[0].message) == (
        f"polymp.optax is tested with optax>=9,<10, and this is optax {version}. Install a tested "
        "version: pip install 'optax>=9,<10'."
    )
