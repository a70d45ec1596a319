"""Python in a process of its own, for questions that other tests in a process would spoil."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def python(
    *arguments: object,
    code: int | None = 0,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    **more: Any,
) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS`, here or in another folder, when it has ended.

    Args:
        arguments: of the interpreter; `run` is for a program as text.
        code: the exit code that it has to end with; None for any.
        cwd: the folder it runs in.
        env: what it finds in its environment besides this one's.
        more: of `subprocess.run`.
    """
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        **more,
    )
    assert code in (None, done.returncode), f"exit code {done.returncode}\n{done.stderr[-3000:]}"
    return done


def run(program: str, *arguments: object, **how: Any) -> str:
    """Run a program, given as text, and return its output; with the arguments of `python`."""
    return python("-c", program, *arguments, **how).stdout
