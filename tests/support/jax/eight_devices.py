"""Programs on eight devices of the CPU, each in a process of its own that begins with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import STRICT

ROOT = Path(__file__).parents[3]


def run(program: str, *arguments: object, flags: str = "", python: Sequence[str] = STRICT) -> Any:
    """Run a module of tests, and return the JSON of the last line that it prints."""
    devices = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, *python, "-m", program, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ
        | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {devices} {flags}", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
