"""Runs programs under torch.autocast: `python -m tests.support.torch.run_programs`.

In, pickled on stdin: the name of a library and a program, again and again. Out, pickled on stdout:
what `programs.run` saw. It is a process of its own and never imports polymp, whose hooks and
kernels would clear torch's cache for it.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from tests import STRICT
from tests.support.processes import in_thread
from tests.support.torch import programs
from tests.support.torch.programs import Program, Spec


class Correct:
    """torch.autocast used with all the care that it needs.

    - A fresh object at every entry.
    - The cache is cleared after each write to a weight, and where it would go on being used under
      another low dtype.
    - polymp keeps no casts for a second thread while a first one has a region with kept casts open.
      Such a thread's regions have the cache off here, and a nesting level is added around them, for
      torch clears every thread's casts when the nesting gets back to 0.
    """

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None  # of the casts that torch keeps
        self.holder: int | None = None  # the thread that they belong to
        self.local = threading.local()

    @contextmanager
    def region(self, spec: Spec) -> Iterator[None]:
        me = threading.get_ident()
        cache = torch.is_autocast_cache_enabled() if spec.cache is None else spec.cache
        if cache and self.holder is None:
            self.holder = me
        self.local.depth = getattr(self.local, "depth", 0) + 1
        try:
            with self.autocast(spec, cache and self.holder == me):
                self.entered_or_left()
                yield
        finally:
            self.local.depth -= 1
            if self.local.depth == 0 and self.holder == me:
                self.holder = None
            self.entered_or_left()

    def autocast(self, spec: Spec, cache: bool) -> Any:
        dtype = None if spec.dtype is None else getattr(torch, spec.dtype)
        return torch.autocast("cpu", dtype, spec.enabled, cache)

    def entered_or_left(self) -> None:
        if torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled():
            dtype = torch.get_autocast_dtype("cpu")
            if dtype is not self.dtype:
                torch.clear_autocast_cache()
                self.dtype = dtype

    def function(self, spec: Spec, function: Callable[..., Any]) -> Callable[..., Any]:
        def decorated(*args: Any) -> Any:
            with self.region(spec):
                return function(*args)

        return decorated

    def generator(
        self, spec: Spec, generator: Callable[[], Iterator[None]]
    ) -> Callable[[], Iterator[None]]:
        def decorated() -> Iterator[None]:
            steps = generator()
            while True:
                with self.region(spec):
                    try:
                        value = next(steps)
                    except StopIteration:
                        return
                yield value

        return decorated

    def thread(self, body: Callable[[], None]) -> None:
        def beside_a_holder() -> None:
            torch.autocast_increment_nesting()
            body()
            torch.autocast_decrement_nesting()

        in_thread(body if self.holder is None else beside_a_holder)

    def wrote(self) -> None:
        torch.clear_autocast_cache()


class OneObject(Correct):
    """Used wrongly: one object for all entries that have the same arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[Any, Any] = {}

    def autocast(self, spec: Spec, cache: bool) -> Any:
        if (spec, cache) not in self.objects:
            self.objects[spec, cache] = super().autocast(spec, cache)
        return self.objects[spec, cache]


# Other ways to use it wrongly: casts are kept of weights that have changed, or of another dtype; a
# second thread clears the first one's; torch's decorator runs a generator without a region.
WRONG: dict[str, dict[str, Callable[..., Any]]] = {
    "StaleWeights": {"wrote": lambda self: None},
    "StaleDtype": {"entered_or_left": lambda self: None},
    "Threads": {"thread": lambda self, body: in_thread(body)},
    "NoGeneratorRegion": {"generator": lambda self, spec, generator: generator},
}
LIBRARIES = {"Correct": Correct, "OneObject": OneObject} | {
    name: type(name, (Correct,), own) for name, own in WRONG.items()
}


class Child:
    """The process that runs programs under torch.autocast, seen from outside."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *STRICT, "-m", __name__],
            cwd=Path(__file__).parents[3],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, program: Program, library: str = "Correct") -> Callable[[], list[Any]]:
        """Have a program run there; a function that waits for what was seen of it."""
        pickle.dump((library, program), self.process.stdin)
        self.process.stdin.flush()

        def answer() -> list[Any]:
            return cast("list[Any]", pickle.load(self.process.stdout))

        return answer

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()
        self.process.wait()


def _clean() -> None:
    """Outside of all regions, whatever the last program left behind."""
    for _ in range(programs.nesting()):
        torch.autocast_decrement_nesting()
    torch.set_autocast_enabled("cpu", False)
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    torch.set_autocast_cache_enabled(True)
    torch.clear_autocast_cache()


def main() -> None:
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    torch.set_num_threads(1)
    programs.count_up()
    while True:
        try:
            library, program = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            seen = programs.run(program, LIBRARIES[library]())
            assert not any(name.startswith("polymp") for name in sys.modules)
        except Exception as error:
            seen = [("failed", repr(error))]
        pickle.dump(seen, answers)
        answers.flush()
        _clean()


if __name__ == "__main__":
    main()
