"""Programs on eight devices of the CPU, each in a process of its own that begins with them."""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support import forks


def run(program: str, *arguments: object, flags: str = "", strict: bool = True) -> Any:
    """Run a module of tests, and return the JSON of the last line that it prints."""
    devices = "--xla_force_host_platform_device_count=8"
    env = {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {devices} {flags}"}
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder, "printed")
        given = (program, *map(str, arguments))
        (code,) = forks.run(
            forks.BOTH, [forks.Call(__name__, "_execute", given, str(printed), env, strict)]
        )
        assert code == 0, printed.read_text()[-4000:]
        return json.loads(printed.read_text().splitlines()[-1])


def _execute(program: str, *arguments: str) -> None:
    """Run a module as `python -m` does."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    sys.argv[1:] = arguments
    runpy.run_module(program, run_name="__main__")
