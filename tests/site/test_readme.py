"""README.md, as the repository and a package index show it."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.support.blocks import ROOT
from tests.support.links import FILES, URLS, dead_links, is_absolute, links

README = ROOT / "README.md"
BEGIN, END = "<!-- cost:", "<!-- end of cost -->"
FIGURE = re.compile(r"\d\s*(?:%|x\b|[mun]?s\b|times\b|[KMG]i?B\b|seconds\b|microseconds\b)")


def test_it_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) < 200


def test_every_link_is_absolute_and_leads_to_a_file_of_the_repository() -> None:
    """A package index shows README at an address of its own, where no file stands beside it."""
    found = [link for _, link in links(README)]
    assert len(found) > 30
    assert [link for link in found if not link.startswith(FILES)] == []
    assert dead_links(README) == []


def test_the_addresses_of_the_project_lead_to_its_repository() -> None:
    assert {"Repository", "Documentation", "Changelog", "Issues"} <= {*URLS}
    for name, address in URLS.items():
        assert is_absolute(address)
        assert address.startswith(URLS["Repository"])
        if address.startswith(FILES):
            assert (ROOT / address.removeprefix(FILES)).is_file(), name


def test_figures_stand_in_the_table_of_the_records_alone() -> None:
    """Its rows are made by benchmarks/speed_page.py, so none can differ from docs/speed.md."""
    text = README.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    cost, end, after = rest.partition(END)
    assert begin
    assert end
    assert FIGURE.findall(before + after) == []
    assert len(FIGURE.findall(cost)) > 8
    rows = [line for line in cost.splitlines() if line.startswith("|")]
    assert 4 <= len(rows) - 2 <= 8


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_the_versions_are_those_that_can_be_installed(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = (r for r in project["optional-dependencies"][name] if r.startswith(name))
    first, end = re.fullmatch(r"\w+>=([\d.]+),<([\d.]+)", requirement).groups()  # type: ignore[union-attr]
    major, minor = end.split(".")
    called = {"torch": "PyTorch", "jax": "jax"}[name]
    assert f"{called} {first} to {major}.{int(minor) - 1}" in README.read_text(encoding="utf-8")
