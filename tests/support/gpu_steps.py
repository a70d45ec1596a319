"""Steps for tests of benchmarks/gpu.py, which runs them in processes of their own.

    python -m tests.support.gpu_steps FOLDER ...  gpu.py with `STEPS`, and the rest as its arguments

A step leaves a file FOLDER/<name>.began. One that is to hold waits for FOLDER/<name>.go.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("one", "two", "three", "four")


def row(name: str, ratio: float) -> dict[str, Any]:
    return {"what": f"{name}: ours / base", "base": 2.0, "ours": 2 * ratio, "ratio": ratio,
            "low": ratio, "high": ratio, "bar": None, "unit": "ms"}  # fmt: skip


def measure(here: Any, folder: str, name: str, holds: bool = False) -> dict[str, Any]:
    """A table of one row, of no real machine."""
    (Path(folder) / f"{name}.began").write_text(str(os.getpid()))
    while holds and not (Path(folder) / f"{name}.go").exists():
        time.sleep(0.01)
    machine = {"kind": "a machine", "architecture": "x86_64", "cores": 1, "load": 0.0,
               "python": "3.11", "versions": {}}  # fmt: skip
    return {"machine": machine, "tables": {"Steps": [row(name, 1 + len(name))]}}


def fail(here: Any) -> dict[str, Any]:
    raise ValueError("no such thing")


def die(here: Any) -> dict[str, Any]:
    os._exit(7)


def main() -> int:
    import gpu
    from gpu_steps.plan import Step

    folder, *rest = sys.argv[1:]
    gpu.STEPS = tuple(
        Step(name, f"part-{at % 2}", "tests.support.gpu_steps:measure", 60, "all",
             args={"folder": folder, "name": name, "holds": True})
        for at, name in enumerate(NAMES)
    )  # fmt: skip
    return int(gpu.main(["--device", "cpu", "--out", folder, *rest]))


if __name__ == "__main__":
    sys.exit(main())
