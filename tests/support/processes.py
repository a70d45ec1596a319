"""Python in a process of its own, for questions that other tests in a process would spoil."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from polymp.cli.doctor import Engine, Facts, Framework


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


TORCH, JAX = Framework("torch", "2.13.0+cpu", "", "cpu"), Framework("jax", "0.10.2", "", "cpu")
XEON = frozenset("avx2 avx512f avx512_bf16 avx512_fp16 amx_bf16".split())
FULL = Engine("cpu", 127, {"default": 0, "amp": 182, "lean": 211})
NONE: dict[str, str] = {}


def facts(*devices, frameworks=(TORCH, JAX), engines=(FULL,), nvidia=False, libraries=NONE):
    """Return the facts of a machine with these devices."""
    return Facts("Linux x86_64", "3.11.7", frameworks, devices, engines, nvidia, libraries)


def process(*argv, blocked=(), cwd=ROOT, **env):
    """The command in a process of its own, in which some modules cannot be imported."""
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
    code += f"from polymp.cli import main; sys.exit(main({argv!r}))"
    return python("-c", code, code=None, cwd=cwd, env={"COLUMNS": "80", **env})


def table(out: str) -> dict[str, list[str]]:
    """Cells of a table's lines by the first of them; none of the cells may have two spaces."""
    lines = [re.split(r" {2,}", line.strip()) for line in out.splitlines()]
    return {first: rest for first, *rest in lines if rest}


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
