"""The table of libraries: its ranges, its adapters, and what an adapter says of its library."""

import importlib.util
import tomllib
from importlib import metadata

import pytest

from polymp import integrations, versions
from polymp.errors import BackendMissingError, VersionWarning
from tests.conftest import need
from tests.support.blocks import ROOT


def test_the_table_of_libraries():
    """An extra pins what its adapter is tested with; an adapter is a module of polymp."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    names = [row.name for row in integrations.INTEGRATIONS]
    assert len(names) == len({*names})
    for row in integrations.INTEGRATIONS:
        assert row.framework in versions.SUPPORTED
        first, end = map(versions.parts, row.bounds.split(","))
        assert row.bounds.startswith(">=")
        assert first < end
        if row.name in extras:
            assert any(f"{row.name}{row.bounds}" == asked for asked in extras[row.name])
    assert importlib.util.find_spec(integrations.of("keras").adapter)
    assert [row.name for row, _ in integrations.installed()] == [
        row.name for row in integrations.INTEGRATIONS if _is_installed(row.name)
    ]


def _is_installed(name):
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def test_an_adapter_asks_for_its_library(monkeypatch):
    row = integrations.of("optax")._replace(name="nosuchlibrary", adapter="polymp.nosuch")
    monkeypatch.setattr(integrations, "INTEGRATIONS", (row,))
    with pytest.raises(BackendMissingError) as error:
        integrations.require("nosuchlibrary")
    assert str(error.value) == (
        "polymp.nosuch needs the nosuchlibrary package: pip install 'polymp[nosuchlibrary]'."
    )


def test_an_adapter_warns_of_a_version_that_is_not_tested(monkeypatch):
    need("jax")
    row = integrations.of("optax")._replace(bounds=">=9,<10", adapter="polymp.nosuch")
    monkeypatch.setattr(integrations, "INTEGRATIONS", (row,))
    version = metadata.version("optax")
    with pytest.warns(VersionWarning) as warned:
        assert integrations.require("optax").__name__ == "optax"
    assert str(warned[0].message) == (
        f"polymp.nosuch is tested with optax>=9,<10, and this is optax {version}. Install a tested "
        "version: pip install 'optax>=9,<10'."
    )
