"""Programs on eight devices of the CPU, each in a process of its own that begins with them."""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import forks


def run(program: str, *arguments: object, flags: str = "", strict: bool = True) -> Any:
    """Run a module of tests, and return the JSON of the last line that it prints."""
    devices = "--xla_force_host_platform_device_count=8"
    env = {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {devices} {flags}"}
    return at_once(program, arguments, env=env, strict=strict)[0]


def at_once(
    program: str, *each: Sequence[object], env: Mapping[str, str] = {}, strict: bool = True
) -> Any:
    """Run a module at the same time with each of some arguments, and return what `run` does."""
    with tempfile.TemporaryDirectory() as folder:
        printed = [Path(folder, str(number)) for number in range(len(each))]
        calls = [
            forks.Call(__name__, "_execute", (program, *map(str, given)), str(path), env, strict)
            for given, path in zip(each, printed, strict=True)
        ]
        codes = forks.run(forks.BOTH, calls)
        texts = [path.read_text() for path in printed]
    assert codes == [0] * len(each), "\n".join(text[-4000:] for text in texts)
    return [json.loads(text.splitlines()[-1]) for text in texts]


def _execute(program: str, *arguments: str) -> None:
    """Run a module as `python -m` does."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    sys.argv[1:] = arguments
    runpy.run_module(program, run_name="__main__")
