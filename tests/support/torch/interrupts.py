"""Interrupts: a Ctrl-C at any line of polymp that a program reaches."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[3]
OURS = tuple(str(ROOT / folder) for folder in ("polymp", "backends"))


def interrupted(program: Callable[[], object], at: int) -> None:
    """Run a program and interrupt it at a line of polymp, counted from 1.

    Args:
        program: to run.
        at: how many lines it is to reach; it ends in peace if it has fewer.

    Raises:
        KeyboardInterrupt: with the file and the line, out of the program.
    """
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        name = frame.f_code.co_filename
        if not name.startswith(OURS):
            return None
        if event == "line" and not name.endswith("wrap_function.py"):  # a `with` of Python's own
            lines += 1
            if lines == at:
                sys.settrace(None)
                raise KeyboardInterrupt(f"{Path(name).name}:{frame.f_lineno}")
        return trace

    sys.settrace(trace)
    try:
        program()
    finally:
        sys.settrace(None)


def at_every_line(run: Callable[[int], object], step: int = 1) -> Iterator[str]:
    """Call `run` with 1, 2, ... until nothing is interrupted any more; yield the lines."""
    for at in itertools.count(1, step):
        try:
            run(at)
        except KeyboardInterrupt as error:
            yield str(error)
        else:
            return
