"""The Makefile: its benchmarks are all of them, and its tests lack no framework."""

from __future__ import annotations

import re
import tomllib

import pytest

from polymp.integrations import INTEGRATIONS
from tests.support.blocks import ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_make_bench_runs_every_benchmark_that_saves_a_record() -> None:
    saves = {
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        if re.search(r"^ +(\w+ = )?save\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert "torch_overhead" in saves
    (names,) = re.findall(r"^\tfor name in (.*); do", MAKEFILE, re.MULTILINE)
    assert saves - {*names.split()} == set()


@pytest.mark.parametrize("target", ["pytest", "test-long"])
def test_tests_of_a_framework_that_has_an_adapter_are_not_skipped(target: str) -> None:
    (adapted,) = re.findall(r"^ADAPTED +:= (.*)", MAKEFILE, re.MULTILINE)
    (names,) = re.findall(rf"^{target}:.*\n\tPOLYMP_REQUIRE=(\S+)", MAKEFILE, re.MULTILINE)
    adapters = {row.name for row in INTEGRATIONS if row.adapter and row.name in EXTRAS}
    assert {*names.replace("$(ADAPTED)", adapted).split(",")} == {"torch", "jax", *adapters}
