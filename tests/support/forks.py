"""Calls of functions in processes of their own, forked from one that has imported what they need.

Importing torch takes longer than most of what is asked there. The process that is forked has
imported these modules and run nothing of them; each call is made in a new fork of it, so that what
a call leaves in its process, such as polymp's kernels, meets no other.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
# What a program imports that computes with torch; dynamo comes with the first step of an optimizer.
TORCH = ("torch", "torch._dynamo")
# And one that computes with polymp in both frameworks.
BOTH = (
    *(*TORCH, "jax", "optax", "flax.nnx", "pytest"),
    *("polymp.torch", "polymp.jax", "polymp.testing"),
)


class Call(NamedTuple):
    """A call to be made in a process of its own."""

    module: str  # dotted name of the module of the function
    function: str  # its name
    args: Sequence[Any]  # what it is given: strings and numbers
    printed: str  # the file that gets what the process prints and the traceback of an error
    env: Mapping[str, str] = {}  # what the process finds in its environment besides this one's
    strict: bool = True  # True if warnings are errors, as in the tests


def run(imported: Sequence[str], calls: Sequence[Call], limit: float = 600) -> list[int]:
    """Make calls at the same time; return the exit codes of their processes."""
    pipe = _server(*imported)
    print(json.dumps([limit, calls]), file=pipe.stdin, flush=True)
    line = pipe.stdout.readline() if pipe.stdout else ""
    assert line, f"the process that is forked has ended: {pipe.wait()}"
    codes: list[int] = json.loads(line)
    return codes


def program(text: str, *arguments: object, folder: Path = ROOT, strict: bool = False) -> str:
    """Run a program, given as text, where torch alone is imported; return what it printed."""
    with tempfile.TemporaryDirectory() as made:
        out, errors = Path(made, "out"), Path(made, "errors")
        given = (text, str(folder), str(out), *map(str, arguments))
        (code,) = run(TORCH, [Call(__name__, "execute", given, str(errors), strict=strict)])
        assert code == 0, f"exit code {code}\n{errors.read_text()[-3000:]}"
        return out.read_text()


def execute(text: str, folder: str, out: str, *arguments: str) -> None:
    """Run a program as `python -c` does; what it prints goes to the file `out`."""
    os.chdir(folder)
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = ModuleType("__main__")
    with Path(out).open("w") as file, contextlib.redirect_stdout(file):
        exec(compile(text, "<string>", "exec"), vars(main))


@cache
def _server(*imported: str) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "tests.support.forks", *imported]
    server = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)

    def close() -> None:
        server.communicate()

    atexit.register(close)
    return server


def _forked(call: Call) -> int:
    """Start the process that makes a call; return its number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of jax: nothing of it has run here yet
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        with Path(call.printed).open("wb", buffering=0) as printed:
            for stream in (1, 2):
                os.dup2(printed.fileno(), stream)
        os.environ.update(call.env)
        if call.strict:
            warnings.simplefilter("error")
            warnings.filterwarnings("default", "polymp is tested with", UserWarning)
        getattr(importlib.import_module(call.module), call.function)(*call.args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _ended(children: Sequence[int], limit: float) -> list[int]:
    """Return the exit codes of processes; those that run for too long are killed."""
    codes: dict[int, int] = {}
    end = time.monotonic() + limit
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    codes[child] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > end:
                    os.kill(child, 9)
        time.sleep(0.002)
    return [codes[child] for child in children]


def main(*imported: str) -> None:
    """Make the calls that are asked for."""
    for name in imported:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.freeze()  # no call looks for garbage among what was imported, nor as often as usual
    gc.set_threshold(20_000, 20, 20)
    for line in sys.stdin:
        limit, calls = json.loads(line)
        children = [_forked(Call(*call)) for call in calls]
        print(json.dumps(_ended(children, limit)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
