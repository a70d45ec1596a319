"""The tests that need a GPU, run by pytest, and what became of them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from pairing import ROOT, machine

from gpu_steps.worker import Here

MARK = re.compile(r"\bmark\.gpu\b")
OUTCOMES = ("passed", "failed", "skipped")


def files(framework: str) -> list[str]:
    """Test files with a test for GPUs; those outside of both folders go with the name they have."""
    other = {"torch": "jax", "jax": "torch"}[framework]
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        inside = path.relative_to(ROOT / "tests").parts[0]
        jax = inside == "jax" or "_jax" in path.stem
        if MARK.search(path.read_text()) and inside != other and jax == (framework == "jax"):
            found.append(str(path.relative_to(ROOT)))
    return found


def run(here: Here, framework: str) -> dict[str, Any]:
    """Run the tests of a framework that are marked `gpu`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider",
                   f"--junitxml={report}", *_together(), *files(framework)]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        print(done.stdout[-20000:], done.stderr[-5000:])
        if not report.exists():
            raise RuntimeError(
                f"pytest ended with exit code {done.returncode}: {done.stderr[-300:]}"
            )
        rows = [_row(case) for case in ET.parse(report).iter("testcase")]
    counts = {name: sum(row["outcome"] == name for row in rows) for name in OUTCOMES}
    bad = [row for row in rows if row["outcome"] == "failed"]
    reasons = sorted({row["why"] for row in rows if row["outcome"] == "skipped"})
    return {
        "machine": machine(framework, "pytest", device=here.device),
        "lists": {
            "Tests that need a GPU": [{"framework": framework, **counts}],
            "Tests that failed": bad,
        },
        "notes": [f"Skipped, {framework}: {why}" for why in reasons],
    }


def _together() -> list[str]:
    """The arguments with which test files run at the same time, where pytest can do it."""
    there = importlib.util.find_spec("xdist") is not None
    some = ["-n", str(min(4, os.cpu_count() or 1)), "--dist", "loadfile"]
    # Of the plugins that may be there, pytest-benchmark warns beside xdist; warnings are errors.
    return [*some, "-p", "no:benchmark"] if there else []


def _row(case: ET.Element) -> dict[str, str]:
    name = f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}"
    for tag, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            why = (found.get("message") or "").strip().partition("\n")[0][:200]
            return {"test": name, "outcome": outcome, "why": why}
    return {"test": name, "outcome": "passed", "why": ""}
