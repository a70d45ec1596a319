"""Running the examples in tests: as users start them, or module by module."""

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests import STRICT
from tests.support import processes
from tests.support.processes import ROOT

EXAMPLES = ROOT / "examples"
TINY = "--steps 60 --width 16 --heads 2 --layers 1 --context 32 --batch 8 --lr 0.01".split()

SETTINGS = {"COLUMNS": "160", "PYTHONIOENCODING": "utf-8"}


def run(script: str, *argv: object, python: Sequence[str] = STRICT, **env: str) -> Any:
    """An example as a user starts it, in a process of its own."""
    return processes.python(*python, EXAMPLES / script, *argv, code=None, env=SETTINGS | env)


@contextmanager
def modules(*names: str) -> Iterator[argparse.Namespace]:
    """The examples' modules, imported as the scripts import them, and afresh."""

    def forget() -> None:
        for name in ("job", "report", "picture", *names):
            sys.modules.pop(name, None)

    forget()  # a benchmark may have imported some of them
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield argparse.Namespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(EXAMPLES))
        forget()


def rows(printed: str) -> list[list[str]]:
    """The cells of a table, its header first."""
    lines = [line for line in printed.splitlines() if line[:1] in "┃│"]
    return [[cell.strip() for cell in line[1:-1].split(line[0])] for line in lines]


def falls(one: dict[str, Any]) -> bool:
    """True if the held-out loss ends well below where it began."""
    return bool(one["held_out"][-1][1] < one["held_out"][0][1] - 1)
