"""One child process of `upstream.py`: a test file of PyTorch, run once, with classes of choice.

In go a test file, a pytest keyword expression and the name of a module that has torch.amp's names;
"torch.amp" itself stands for the stock classes. Before the test file is imported, every name in
`NAMES` is replaced inside torch. Out comes a file of JSON lines: what was replaced, the outcome of
each test as soon as it is known (a crash loses only the test that crashed), and how many objects
of either library were made. Comparing two such files is `upstream.py`'s job.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import pkgutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import pytest
import torch
import torch.cpu.amp
import torch.cuda.amp

from tests.support.torch import upstream_standins

STOCK = "torch.amp"

# Where torch keeps a name, and the name's place below the module that is substituted. OptState is
# not among them: polymp's scaler uses torch's enum, whose members callers compare with.
NAMES = {
    "torch.autocast": "autocast",
    "torch.GradScaler": "GradScaler",
    "torch.amp.autocast": "autocast",
    "torch.amp.GradScaler": "GradScaler",
    "torch.amp.custom_fwd": "custom_fwd",
    "torch.amp.custom_bwd": "custom_bwd",
    "torch.amp.is_autocast_available": "is_autocast_available",
    "torch.amp.autocast_mode.autocast": "autocast",
    "torch.amp.autocast_mode.custom_fwd": "custom_fwd",
    "torch.amp.autocast_mode.custom_bwd": "custom_bwd",
    "torch.amp.autocast_mode.is_autocast_available": "is_autocast_available",
    "torch.amp.grad_scaler.GradScaler": "GradScaler",
    "torch.amp.grad_scaler._refresh_per_optimizer_state": "_refresh_per_optimizer_state",
    "torch.cuda.amp.autocast": "cuda.autocast",
    "torch.cuda.amp.GradScaler": "cuda.GradScaler",
    "torch.cuda.amp.custom_fwd": "cuda.custom_fwd",
    "torch.cuda.amp.custom_bwd": "cuda.custom_bwd",
    "torch.cuda.amp.autocast_mode.autocast": "cuda.autocast",
    "torch.cuda.amp.autocast_mode.custom_fwd": "cuda.custom_fwd",
    "torch.cuda.amp.autocast_mode.custom_bwd": "cuda.custom_bwd",
    "torch.cuda.amp.grad_scaler.GradScaler": "cuda.GradScaler",
    "torch.cpu.amp.autocast": "cpu.autocast",
    "torch.cpu.amp.GradScaler": "cpu.GradScaler",
    "torch.cpu.amp.autocast_mode.autocast": "cpu.autocast",
    "torch.cpu.amp.grad_scaler.GradScaler": "cpu.GradScaler",
}
PUBLIC = ("torch", "torch.amp")  # the modules whose names users write


class SubstitutionError(Exception):
    """The substitute lacks a name, or what it has is still torch's own."""


def lookup(path: str) -> Any:
    """The object at a dotted path below an importable module; AttributeError if there is none."""
    try:
        return pkgutil.resolve_name(path)
    except ModuleNotFoundError as error:
        raise AttributeError(str(error)) from error


def find_substitute(module: str, name: str) -> Any:
    """`module.name`; what torch keeps beside its GradScaler may stand beside the module's, too."""
    try:
        return lookup(f"{module}.{name}")
    except AttributeError:
        if "." in name:
            raise
        return getattr(sys.modules[lookup(f"{module}.GradScaler").__module__], name)


def substitute(module: str, names: dict[str, str], stock: dict[str, Any]) -> list[str]:
    """Replaces every one of `names` by `module`'s, and looks again whether it was.

    Raises:
        SubstitutionError: a name is missing, its replacement is one of `stock`, or did not stay.
    """
    for place, name in names.items():
        try:
            ours = find_substitute(module, name)
        except AttributeError as error:
            raise SubstitutionError(f"{module} has no {name!r} to put at {place}") from error
        if any(ours is theirs for theirs in stock.values()):
            raise SubstitutionError(f"{module}.{name} is torch's own: nothing would be compared")
        owner, _, attribute = place.rpartition(".")
        setattr(importlib.import_module(owner), attribute, ours)
    for place, name in names.items():
        if lookup(place) is not find_substitute(module, name):
            raise SubstitutionError(f"{place} did not keep its replacement")
    return list(names)


def classes(module: str) -> list[type]:
    """The classes among `module`'s names, without those that inherit from another of them."""
    names = [name for name in NAMES.values() if name.endswith(("autocast", "GradScaler"))]
    found = [find_substitute(module, name) for name in names]
    kinds = {each for each in found if isinstance(each, type)}
    return [cls for cls in kinds if kinds.isdisjoint(cls.__mro__[1:])]


def count_objects(cls: type, counts: Counter[str]) -> None:
    """Makes `cls` count the objects made of it and of its subclasses."""
    inner: Callable[..., None] = cls.__init__  # type: ignore[misc]

    @functools.wraps(inner)
    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            counts[f"{cls.__module__}.{cls.__qualname__}"] += 1
        inner(self, *args, **kwargs)

    cls.__init__ = counted  # type: ignore[misc]


class Recorder:
    """A pytest plugin that writes outcomes down, one JSON line an event."""

    def __init__(self, out: TextIO, counts: Counter[str]) -> None:
        self.out = out
        self.counts = counts
        self.before = 0

    def write(self, **event: Any) -> None:
        self.out.write(json.dumps(event) + "\n")
        self.out.flush()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(test=report.nodeid, outcome="error", why=reason(report.longreprtext))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        # Written first: a test without a later line took the process down with it.
        self.before = self.counts.total()
        self.write(test=nodeid, outcome="crashed", why="the process ended in this test")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Setup, call and teardown report apart; setup and teardown count only if they go wrong.
        if report.passed and report.when != "call":
            return
        outcome: str = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xfailed" if report.skipped else "xpassed"
        elif report.failed and report.when != "call":
            outcome = "error"
        why = reason(report.longreprtext) if report.failed else ""
        if report.skipped and isinstance(report.longrepr, tuple):
            why = str(report.longrepr[2])
        made = self.counts.total() - self.before
        self.write(test=report.nodeid, outcome=outcome, why=why, made=made)


def reason(text: str) -> str:
    """The first error line of a traceback as pytest prints it ("E   ..."), else its last line."""
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    marked = [line[1:] for line in lines if line.startswith("E ")]
    return (marked or lines[-1:])[0].strip()[:400]


def leftovers(stock: dict[str, Any]) -> list[str]:
    """Names in loaded modules that still hold a class of torch's, for the report."""
    held = {id(value) for value in stock.values() if isinstance(value, type)}
    modules = [(n, m) for n, m in sys.modules.items() if isinstance(m, ModuleType)]
    return sorted(f"{n}.{k}" for n, m in modules for k, v in vars(m).items() if id(v) in held)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--classes", default=STOCK)
    parser.add_argument("--keyword", default="")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--no-count", action="store_true")
    parser.add_argument("--public", action="store_true")
    args = parser.parse_args()
    stock = {place: lookup(place) for place in NAMES}
    names = NAMES
    if args.public:
        importlib.import_module("torch._dynamo")  # it finds torch's classes in the other places
        names = {place: name for place, name in NAMES.items() if place.rpartition(".")[0] in PUBLIC}
    mine = args.classes == STOCK
    stock_made: Counter[str] = Counter()
    made: Counter[str] = stock_made if mine else Counter()
    with args.record.open("w") as out, tempfile.TemporaryDirectory() as empty:
        recorder = Recorder(out, made)
        if not args.no_count:
            count_objects(torch.amp.autocast_mode.autocast, stock_made)
            count_objects(torch.amp.grad_scaler.GradScaler, stock_made)
        replaced = []
        if not mine:
            try:
                replaced = substitute(args.classes, names, stock)
            except SubstitutionError as error:
                recorder.write(refused=str(error))
                return 1
            if not args.no_count:
                for cls in classes(args.classes):
                    count_objects(cls, made)
        added = upstream_standins.add_missing(args.file.read_text())
        recorder.write(torch=torch.__version__, replaced=replaced, standins=added)
        ini = Path(empty, "pytest.ini")
        ini.write_text("[pytest]\n")  # or pytest would take one that it finds above the test file
        options = ["-q", "-c", str(ini), f"--rootdir={args.root}", "--noconftest"]
        options += ["-p", "no:cacheprovider", "-k", args.keyword, str(args.file)]
        code = pytest.main(options, plugins=[recorder])
        left = [] if mine else leftovers(stock)
        recorder.write(end=int(code), made=made, stock_made=stock_made, left=left)
    return 0


if __name__ == "__main__":
    sys.exit(main())
