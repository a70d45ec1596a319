"""PyTorch's own tests of autocast and GradScaler, passed by polymp's classes as by torch's.

    python tests/support/torch/upstream.py SOURCE_DIR [--json OUT] [--only TEXT] [--slow]

In goes an unpacked PyTorch source tree, whose test files are run where they lie and copied nowhere.
Each file runs twice, in a process of its own: with torch's classes, and with polymp's put in their
place before the file is imported (`upstream_child.py`). Out come a table, the name of every test
that passes in one of the two runs only, and a closing summary.

Exit code 0: the same tests pass, and polymp's classes did the work. 1: they differ, or a run made
no object of the classes it is meant to test. 2: nothing to compare (no such directory or file).

Needs what PyTorch's tests need: expecttest, and psutil for test_cuda.py. A file of another release
than the installed torch may fail in places with torch's own classes; what counts is that both runs
agree. Names that newer releases of torch lack are filled in (`upstream_standins.py`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
STOCK = "torch.amp"


@dataclass(frozen=True)
class Selection:
    """A test file below SOURCE_DIR and which of its tests to run."""

    path: str
    keyword: str = ""  # as for pytest -k
    required: bool = False  # the source tree must have the file
    slow: bool = False  # minutes per run; only with --slow
    why: str = ""  # why it is shown, but has no say in the exit code
    count: bool = True  # count objects made; this changes constructors
    public: bool = False  # replace only the names that users write


TORCHSCRIPT = "torch.jit.script compiles the source of torch's own class, known to it by name"
DYNAMO = "dynamo has a graph node for torch's own class, known to it by identity"
BOUNDED = "polymp's scale stays where its inverse is a normal number, and 1e38 is not there"
LARGE = "grad_scale_will_not_overflow"
UNSCRIPTED = "trace_model or cat_promote or script_autocast_c or ignore"
SELECTIONS = (
    Selection("test/test_autocast.py", required=True),
    Selection("test/test_torch.py", f"(grad_scal or gradscaler) and not {LARGE}", required=True),
    # On a machine without a GPU every test is skipped, in both runs.
    Selection("test/test_cuda.py", f"(autocast or grad_scal) and not {LARGE}"),
    Selection("test/distributed/fsdp/test_fsdp_sharded_grad_scaler.py", "TestShardGradScaler"),
    Selection("test/functorch/test_vmap.py", "autocast"),
    # Checkpointing recomputes inside regions that it rebuilds from torch.amp.autocast.
    Selection("test/test_autograd.py", "autocast or checkpoint"),
    # Checkpointing once more, and a device that registers itself under a name of its own.
    Selection("test/test_utils.py", "Checkpoint or ExtensionUtils"),
    Selection("test/test_python_dispatch.py", "fallthrough"),
    Selection("test/test_transformers.py", "transformerencoder_fastpath"),
    Selection("test/nn/test_multihead_attention.py", "fast_path_mock"),
    Selection("test/test_jit_autocast.py", UNSCRIPTED),
    Selection("test/test_jit_llga_fuser.py", "bf16 or bfloat16", slow=True),
    # A region around every op of torch's OpInfo database, on real and on fake tensors.
    Selection("test/test_ops.py", "fake_autocast", slow=True),
    # polymp refuses what it begins with.
    Selection("test/test_torch.py", LARGE, why=BOUNDED),
    # What follows depends on which class it is, not on what it does.
    Selection(
        "test/test_jit_autocast.py",
        f"not ({UNSCRIPTED})",
        why=TORCHSCRIPT,
        count=False,
    ),
    Selection("test/dynamo/test_ctx_manager.py", "autocast", why=DYNAMO, count=False, public=True),
    Selection("test/dynamo/test_pre_dispatch.py", why=DYNAMO, count=False, public=True),
)


@dataclass
class Run:
    """The report of one child process."""

    tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    made: int = 0
    stock_made: int = 0
    replaced: list[str] = field(default_factory=list)
    standins: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    torch: str = ""
    refused: str = ""
    ended: bool = False
    seconds: float = 0.0

    @property
    def passing(self) -> set[str]:
        return {name for name, test in self.tests.items() if test["outcome"] == "passed"}

    def outcome(self, name: str) -> str:
        """How a test ended, with its reason."""
        test = self.tests.get(name, {"outcome": "not run", "why": ""})
        return f"{test['outcome']}: {test['why']}" if test["why"] else test["outcome"]


# A test reports more than once (its parts, its teardown); the worst report is its outcome.
WORST_LAST = ("crashed", "passed", "xfailed", "skipped", "xpassed", "failed", "error")


def read_record(lines: Sequence[str]) -> Run:
    """A child's JSON lines, put together."""
    run = Run()
    for line in lines:
        event = json.loads(line)
        if "test" in event:
            old = run.tests.get(event["test"], event)
            run.tests[event["test"]] = max(
                old, event, key=lambda test: WORST_LAST.index(test["outcome"])
            )
        elif "end" in event:
            run.ended = True
            run.made, run.stock_made = (sum(event[key].values()) for key in ("made", "stock_made"))
            run.left = event["left"]
        else:
            for key, value in event.items():
                setattr(run, key, value)
    return run


def run_child(source: Path, selection: Selection, classes: str, timeout: float) -> Run:
    """Runs one file once."""
    file = source / selection.path
    path = [str(source / "test"), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    env |= {"PYTHONDONTWRITEBYTECODE": "1"}  # the source tree stays as it is
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        record = Path(scratch, "record.jsonl")
        command = [sys.executable, "-P", "-m", "tests.support.torch.upstream_child", str(file)]
        command += ["--classes", classes, "--keyword", selection.keyword]
        command += ["--root", str(source), "--record", str(record)]
        command += ["--public"] if selection.public else []
        command += [] if selection.count else ["--no-count"]
        try:
            done = subprocess.run(
                command, cwd=scratch, env=env, timeout=timeout, capture_output=True, text=True
            )
            output = done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            output = f"stopped after {timeout:g} s"
        run = read_record(record.read_text().splitlines() if record.exists() else [])
    if not run.torch and not run.refused:  # it fell over before it could say anything
        run.refused = (output.strip().splitlines() or ["no output"])[-1]
    run.seconds = time.monotonic() - start
    return run


@dataclass
class Comparison:
    """One selection, run twice."""

    selection: Selection
    stock: Run
    ours: Run

    @property
    def differences(self) -> list[str]:
        """Tests that pass in one run only."""
        return sorted(self.stock.passing ^ self.ours.passing)

    @property
    def objections(self) -> list[str]:
        """Why the runs prove nothing, even if the same tests pass."""
        found = [f"refused: {run.refused}" for run in (self.stock, self.ours) if run.refused]
        if found:
            return found
        if self.stock.made and not self.ours.made:
            found.append("no object of the substituted classes was made")
        if self.ours.stock_made:
            found.append(f"objects of torch's classes were made: {self.ours.stock_made}")
        if self.ours.left and not self.selection.public:
            found.append(f"torch's classes are still at {', '.join(self.ours.left)}")
        if not self.ours.replaced:
            found.append("no name was replaced")
        for run, name in ((self.stock, "torch"), (self.ours, "polymp")):
            if not run.ended:
                found.append(f"the run with {name}'s classes did not reach its end")
        return found

    @property
    def same(self) -> bool:
        return not self.differences and not self.objections


def report(comparisons: Sequence[Comparison]) -> None:
    """Prints the table, the differences by name and reason, and what else is worth knowing."""
    width = max(len(_title(c.selection)) for c in comparisons)
    heads = ("collected", "torch", "polymp", "differ", "made: torch", "polymp", "seconds")
    print(f"{'file':{width}}  " + "  ".join(heads))
    for c in comparisons:
        figures = (len(c.stock.tests), len(c.stock.passing), len(c.ours.passing))
        figures += (len(c.differences), c.stock.made, c.ours.made)
        cells = [f"{n:{len(head)},}" for n, head in zip(figures, heads, strict=False)]
        cells.append(f"{c.stock.seconds:.0f} + {c.ours.seconds:.0f}")
        print(f"{_title(c.selection):{width}}  " + "  ".join(cells))
    for c in comparisons:
        for name in c.differences:
            print(f"\n{name}\n  torch:  {c.stock.outcome(name)}\n  polymp: {c.ours.outcome(name)}")
        for objection in c.objections:
            print(f"\n{_title(c.selection)}\n  {objection}")
    for c in comparisons:
        if c.stock.refused or c.ours.refused:
            continue
        other = {n for n in c.stock.tests.keys() - c.differences if _kind(c.stock, n) != "passed"}
        for name in sorted(other):
            if _kind(c.stock, name) != "skipped" or _kind(c.ours, name) != "skipped":
                print(f"\nin neither run: {name}\n  {c.stock.outcome(name)}")
                if _kind(c.ours, name) != _kind(c.stock, name):
                    print(f"  but with polymp: {c.ours.outcome(name)}")


def _kind(run: Run, name: str) -> str:
    return run.outcome(name).split(":")[0]


def _title(selection: Selection) -> str:
    """The file, its keyword, and a mark if it has no say."""
    title = selection.path.removeprefix("test/")
    title += f" [{selection.keyword}]" if selection.keyword else ""
    return f"({title})" if selection.why else title


def summary(comparisons: Sequence[Comparison]) -> tuple[str, int]:
    """The closing lines and the exit code."""
    counted = [c for c in comparisons if not c.selection.why]
    tests = sum(len(c.stock.tests) for c in counted)
    passed = [sum(len(run.passing) for run in runs) for runs in _runs(counted)]
    made = [sum(run.made for run in runs) for runs in _runs(counted)]
    differences = sum(len(c.differences) for c in counted)
    same = all(c.same for c in counted)
    ours = [c.ours for c in comparisons]
    lines = [
        f"torch {comparisons[0].stock.torch}. Runs: {len(counted)}, tests: {tests:,}. "
        f"Passing with torch's classes: {passed[0]:,}, with polymp's: {passed[1]:,}.",
        f"Names replaced in torch before import: {max(len(run.replaced) for run in ours)}. Objects "
        f"made: {made[0]:,} of torch's classes in the first runs, {made[1]:,} of polymp's in the "
        "second.",
        f"Stand-ins for names that this torch lacks: {len({n for r in ours for n in r.standins})}, "
        "the same in both runs.",
    ]
    for why in dict.fromkeys(c.selection.why for c in comparisons if c.selection.why):
        differ = sum(len(c.differences) for c in comparisons if c.selection.why == why)
        lines.append(f"In parentheses, without a say: tests that differ: {differ}; {why}.")
    if not passed[0]:
        lines.append("No test with a say passes with torch's classes: nothing was compared.")
        return "\n".join(lines), 2
    if same:
        lines.append("SAME: exactly the same tests pass.")
    elif differences:
        lines.append(f"DIFFERENT: tests that pass in one run only: {differences}, named above.")
    else:
        lines.append("NOT SHOWN: the same tests pass, but what is said above speaks against it.")
    return "\n".join(lines), 0 if same else 1


def _runs(comparisons: Sequence[Comparison]) -> tuple[list[Run], list[Run]]:
    return [c.stock for c in comparisons], [c.ours for c in comparisons]


def _lacks_expecttest(files: Iterable[Path]) -> bool:
    """True if a file builds on torch's test classes and these cannot be imported."""
    if importlib.util.find_spec("expecttest"):
        return False
    return any("torch.testing._internal" in file.read_text() for file in files)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Run PyTorch's autocast and GradScaler tests with torch's and polymp's classes."
    )
    parser.add_argument("source", type=Path, help="an unpacked PyTorch source tree")
    parser.add_argument("--json", type=Path, help="write every outcome to this file")
    parser.add_argument("--only", default="", help="only files whose path contains this text")
    parser.add_argument("--slow", action="store_true", help="also the files that take minutes")
    parser.add_argument("--substitute", default="polymp.torch", help="module with the classes")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for one run")
    args = parser.parse_args(arguments)
    source = args.source.resolve()
    chosen = [s for s in SELECTIONS if args.only in s.path and (args.slow or not s.slow)]
    absent = [s for s in chosen if not (source / s.path).is_file()]
    problem = ""
    if not source.is_dir():
        problem = f"{args.source} is not a directory"
    elif not chosen:
        problem = f"no test file is named like {args.only!r}" + ("" if args.slow else "; --slow?")
    elif required := [s.path for s in absent if s.required]:
        problem = f"{args.source} is no PyTorch source tree: it has no {required[0]}"
    elif len(absent) == len(chosen):
        problem = f"{args.source} has no {absent[0].path}"
    elif args.json and not args.json.parent.is_dir():
        problem = f"{args.json.parent} is not a directory"
    elif _lacks_expecttest(source / s.path for s in chosen if s not in absent):
        problem = "PyTorch's tests need expecttest: pip install expecttest psutil"
    if problem:
        print(f"upstream.py: {problem}", file=sys.stderr)
        return 2
    comparisons = []
    for selection in chosen:
        if selection in absent:
            print(f"not in this source tree: {selection.path}", file=sys.stderr)
            continue
        print(f"running {_title(selection)}", file=sys.stderr)
        stock, ours = (
            run_child(source, selection, classes, args.timeout)
            for classes in (STOCK, args.substitute)
        )
        comparisons.append(Comparison(selection, stock, ours))
    report(comparisons)
    closing, code = summary(comparisons)
    print("\n" + closing)
    if args.json:
        files = [asdict(c) | {"differences": c.differences} for c in comparisons]
        args.json.write_text(json.dumps({"files": files, "exit": code}, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
