"""The pages and files for contributors name what is there, and all of it."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import polymp
from polymp import versions
from polymp.versions import TESTED
from tests.conftest import need
from tests.support.blocks import ROOT, table

CONTRIBUTING, ARCHITECTURE = ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md"
VERSIONS = ROOT / "docs" / "versions.md"
GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = {*re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE), "test-oldest", "test-newest"}
PYTHONS = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]


def loaded(path: Path) -> Any:
    need("yaml")
    return importlib.import_module("yaml").safe_load(path.read_text(encoding="utf-8"))


CORE = {"fp8", "scaling", "weights"}  # modules, not folders
DOORS = {"jax", "keras", "lightning", "accelerate", "transformers"}  # likewise


def rooms() -> set[str]:
    """The folders and doors of the package, by their names."""
    tops = {path.parent.name for path in (ROOT / "polymp").glob("*/__init__.py")}
    backends = {f"backends.{path.parent.name}" for path in ROOT.glob("backends/*/__init__.py")}
    return (tops - {"backends"}) | backends | {"policies", *CORE, *DOORS}


def named(row: list[str]) -> set[str]:
    """The rooms that a row of a map links to."""
    found = re.findall(r"\[`?([\w/.]+)`?\]\(", row[0])
    return {f.removeprefix("polymp/").removesuffix(".py").replace("/", ".") for f in found}


@pytest.mark.parametrize("path", [CONTRIBUTING, ARCHITECTURE], ids=lambda path: path.name)
def test_the_map_has_every_room(path: Path) -> None:
    rows = table(path, "The folders")
    listed = [room for row in rows for room in named(row)]
    assert len(listed) == len({*listed})
    assert rooms() <= {*listed}
    (backends,) = (row for row in rows if "backends.torch" in named(row))
    for name in ("torch", "jax"):
        inner = {p.parent.name for p in (ROOT / "backends" / name).glob("*/__init__.py")}
        assert {*re.findall(r"`(\w+)`", " ".join(backends))} == inner


def test_the_commands_are_targets_of_the_makefile() -> None:
    for path in (CONTRIBUTING, VERSIONS, *GITHUB.rglob("*.md")):
        commands = set(re.findall(r"`make ([\w-]+)", path.read_text(encoding="utf-8")))
        assert commands <= TARGETS, path
    listed = re.findall(r"^\| ((?:`make [\w-]+`(?:, )?)+) \|", CONTRIBUTING.read_text(), re.M)
    wanted = TARGETS - {"demo", "clean", "test-oldest", "test-newest"}
    assert set(re.findall(r"make ([\w-]+)", " ".join(listed))) == wanted


def test_the_workflow_runs_the_targets_over_the_versions() -> None:
    workflow = loaded(GITHUB / "workflows" / "ci.yml")
    (job,) = workflow["jobs"].values()
    runs = {(entry["target"], entry["python"]) for entry in job["strategy"]["matrix"]["include"]}
    assert {target for target, _ in runs} <= TARGETS
    assert {("test", python) for python in PYTHONS} <= runs
    assert {"test-long", "test-oldest", "test-newest", "dist"} <= {target for target, _ in runs}
    assert dict(runs)["test-newest"] >= "3.12", "the newest jax needs it"
    (command,) = (step["run"] for step in job["steps"] if "run" in step)
    assert command.startswith("make ${{ matrix.target }} ")


def test_the_versions_are_said_as_they_are() -> None:
    text = VERSIONS.read_text(encoding="utf-8")
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    assert f"| Python | {PYTHONS[0]} to {PYTHONS[-1]} |" in text
    assert loaded(ROOT / "CITATION.cff")["version"] == PROJECT["version"] == polymp.__version__
    for name, called in (("torch", "PyTorch"), ("jax", "jax")):
        first, end = versions.SUPPORTED[name].split(",")
        major, minor = versions.parts(end)
        supported = f"{first.removeprefix('>=')} to {major}.{minor - 1}"
        assert f"| {called} | {supported} |" in text
        assert f"{called} {supported}" in (ROOT / "README.md").read_text(encoding="utf-8")
        (asked,) = (r for r in PROJECT["optional-dependencies"][name] if r.startswith(name))
        assert asked.partition(";")[0].strip() == f"{name}{versions.SUPPORTED[name]}"


@pytest.mark.parametrize("target", ["pytest", "test-long"])
def test_tests_of_a_framework_that_has_an_adapter_are_not_skipped(target: str) -> None:
    (adapted,) = re.findall(r"^ADAPTED +:= (.*)", MAKEFILE, re.MULTILINE)
    (names,) = re.findall(rf"^{target}:.*\n\tPOLYMP_REQUIRE=(\S+)", MAKEFILE, re.MULTILINE)
    assert {*names.replace("$(ADAPTED)", adapted).split(",")} == {"torch", "jax", *TESTED}
