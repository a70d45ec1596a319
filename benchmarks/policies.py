"""The cost of a policy in the ops in which it differs from torch's own table.

Calls of 1, 8 and 32 ops are measured in a region under torch's table, in one under a policy that
gives them a rule which casts nothing, and again under torch's table once the policy's kernels are
there. Eager programs run in processes of their own, in turn, for kernels stay. What counts is the
difference, by call: the fastest tenth of the rounds of a process, which other programs on the
machine disturb least, and of the processes the median. Compiled ones are measured in turn in one
process, and the ratio of their medians counts. `make bench` runs it.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pairing import Row, machine, measure, row, save, show

from polymp.torch import autocast

COUNTS = (1, 8, 32)

# One tensor in, one out; torch's table for CPUs has none of them.
UNLISTED = (
    "abs neg relu sigmoid tanh sin cos sqrt square floor ceil round trunc sign exp log log2 log10 "
    "log1p expm1 exp2 erf erfc rsqrt reciprocal sinh cosh atan asinh frac sinc lgamma"
).split()
BAR_US = 6.0


@dataclass(frozen=True)
class Eager:
    """One call in microseconds, and what the policy adds to it, with the spread of the pairs."""

    what: str
    ops: int
    torch: float
    policy: float
    torch_after: float
    added: float
    added_after: float
    low: float
    high: float
    bar: float = BAR_US


# What a child process runs: prints a call's time under `policy` and, after it, torch's table.
CHILD = """
import statistics, sys, time, torch
sys.path.insert(0, {here!r})
from policies import calls, rules
from polymp.torch import autocast

torch.set_num_threads(1)
program, policy = calls({what!r}, {ops}), {policy}
found = []
for table in [policy, None]:
    region, times = autocast("cpu", policy=table), []
    for _ in range({rounds}):
        with region:
            start = time.perf_counter()
            made = program()
            times.append((time.perf_counter() - start) / made * 1e6)
    found.append(statistics.quantiles(times, n=10)[0])
print(*found)
"""


def functions(what: str, ops: int) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """The ops of a comparison, as functions of one tensor."""
    if what == "mm = fp32":
        return [lambda x: torch.mm(x, x)]
    return [getattr(torch, name) for name in UNLISTED[:ops]]


def rules(what: str, ops: int) -> dict[str, Any]:
    """torch's table, but for the ops: a rule that casts none of the inputs, which are float32."""
    names, rule = UNLISTED[:ops], what
    if what == "mm = fp32":
        names, rule = ["mm"], "fp32"
    return {"extends": "torch-cpu", "rules": dict.fromkeys(names, rule)}


def calls(what: str, ops: int) -> Callable[[], int]:
    """A program of 96 calls, spread evenly over the ops; returns how many."""
    x, chosen = torch.full((8, 8), 0.5), functions(what, ops)
    times = range(96 // len(chosen))

    def program() -> int:
        for _ in times:
            for function in chosen:
                function(x)
        return 96

    return program


def eager(what: str, ops: int, rounds: int, pairs: int) -> Eager:
    """Measure under torch's table and under the policy, in processes that take turns."""
    found: dict[str, list[list[float]]] = {"None": [], f"rules({what!r}, {ops})": []}
    for _ in range(pairs):
        for policy, times in found.items():
            code = CHILD.format(
                here=str(Path(__file__).parent), what=what, ops=ops, policy=policy, rounds=rounds
            )
            run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
            times.append([float(number) for number in run.stdout.split()])
    theirs, ours = ([times[0] for times in found[policy]] for policy in found)
    after = statistics.median(times[1] for times in list(found.values())[1])
    added = sorted(o - t for o, t in zip(ours, theirs, strict=True))
    a, b = statistics.median(theirs), statistics.median(ours)
    return Eager(what, ops, a, b, after, b - a, after - a, added[0], added[-1])


def compiled(what: str, ops: int, rounds: int) -> Row:
    """Measure a compiled chain of the ops under both, in turn, in this process."""
    chosen = functions(what, ops)
    x = torch.full((64, 64), 0.5)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for function in chosen:
            x = function(x).clamp(0.25, 0.75)
        return x

    def under(policy: Any) -> Callable[[], float]:
        region, run = autocast("cpu", policy=policy), torch.compile(chain, fullgraph=True)

        def once() -> float:
            with region:
                start = time.perf_counter()
                run(x)
                return time.perf_counter() - start

        return once

    programs = {"torch": under(None), "policy": under(rules(what, ops))}
    times = {name: [ms * 1e3 for ms in t] for name, t in measure(programs, rounds, 20).items()}
    called = f"a compiled chain of {ops} ops, rule {what}: policy / torch's table"
    return row(called, times["torch"], times["policy"], unit="us")


def main() -> int:
    """Run all comparisons, print the tables, save them as JSON; 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000, help="times 96 calls, in a process")
    parser.add_argument("--pairs", type=int, default=5, help="processes under each table")
    parser.add_argument("--out", type=Path, help="JSON file; default: results/ by date")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = [("keep", n) for n in COUNTS] + [("fp32", 1), ("mm = fp32", 1)]
    eagers = [eager(what, ops, args.rounds, args.pairs) for what, ops in cases]
    compileds = [compiled("keep", ops, 1000) for ops in COUNTS]
    show(f"one call in a region, us; torch {torch.__version__}, CPU, one thread", eagers)
    show("a compiled chain (inductor)", compileds)
    record = {
        "machine": machine("torch"),
        "threads": torch.get_num_threads(),
        "compiler": "inductor",
        "eager": eagers,
        "tables": {"a policy in a compiled program": compileds},
    }
    save("policies", "cpu", record, args.out)
    return int(any(r.added > r.bar for r in eagers))


if __name__ == "__main__":
    sys.exit(main())
