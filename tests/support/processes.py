"""Python in a process of its own, for questions that other tests in a process would spoil."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def in_threads(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run functions at the same time, each in a new thread, and return their results."""
    with ThreadPoolExecutor(len(functions)) as pool:
        started = [pool.submit(function) for function in functions]
    return [each.result() for each in started]


def in_thread(function: Callable[[], Any]) -> Any:
    """Run a function in a new thread, and return its result."""
    return in_threads([function])[0]


ROOT = Path(__file__).parents[2]


def python(
    *arguments: object,
    code: int | None = 0,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    **more: Any,
) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS`, here or in another folder, when it has ended."""
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
