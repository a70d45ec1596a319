"""The cost of a policy in the ops in which it differs from torch's own table.

Calls of 1, 8 and 32 ops are measured in a region under torch's table, in one under a policy that
gives them a rule which casts nothing, and again under torch's table once the policy's kernels are
there. Eager programs run in processes of their own, in turn, for kernels stay. What counts is the
difference, by call: the fastest tenth of the rounds of a process, which other programs on the
machine disturb least, and of the processes the median. Beside them stands the least that a kernel
in Python adds, one that passes the call on. Compiled programs are measured in turn in one process,
and the ratio of their medians counts. Last comes the memory that a policy takes for the life of the
process. `make bench` runs it.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pairing import Row, machine, measure, missed, row, save, show

from polymp.backends.torch.compat import dispatcher
from polymp.torch import autocast

PASSES_ON = "a Python kernel that passes on"
_library = torch.library.Library("aten", "IMPL")  # its kernels go when it does
COUNTS = (1, 8, 32)

# One tensor in, one out; torch's table for CPUs has none of them.
UNLISTED = (
    "abs neg relu sigmoid tanh sin cos sqrt square floor ceil round trunc sign exp log log2 log10 "
    "log1p expm1 exp2 erf erfc rsqrt reciprocal sinh cosh atan asinh frac sinc lgamma"
).split()
BAR_US = 1.5  # what a policy may add to a call
MEMORY_MB = 0.02  # of a policy that no other is equal to


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
    bar: float | None = BAR_US


# What a child process runs: prints a call's time under `policy` and, after it, torch's table.
CHILD = """
import statistics, sys, time, torch
sys.path.insert(0, {here!r})
from policy_costs import calls, pass_on, rules
from polymp.torch import autocast

torch.set_num_threads(1)
program, policy = calls({what!r}, {ops}, {device!r}), {policy}
if policy == {passes_on!r}:
    pass_on({device!r})
    policy = None
found = []
for table in [policy, None]:
    region, times = autocast({device!r}, policy=table), []
    for _ in range({rounds}):
        with region:
            start = time.perf_counter()
            made = program()
            times.append((time.perf_counter() - start) / made * 1e6)
            if {device!r} == "cuda":
                torch.cuda.synchronize()
    found.append(statistics.quantiles(times, n=10)[0])
print(*found)
"""


# Prints the megabytes that each of many policies, which differ in a row, has taken at the end.
MEMORY = """
import gc, torch
from polymp.torch import autocast

def resident():
    gc.collect()
    with open("/proc/self/statm") as status:
        return int(status.read().split()[1]) * 4096 / 1e6

def use(name):
    policy = {{"extends": "torch-cpu", "name": name, "rules": {{"tanh": "keep"}}}}
    with autocast("cpu", policy=policy):
        torch.tanh(x)

x = torch.ones(2)
for n in range(50):
    use(f"first {{n}}")
before = resident()
for n in range({count}):
    use(f"then {{n}}")
print((resident() - before) / {count})
"""


def pass_on(device: str) -> None:
    """Put a kernel in Python on `abs` in regions, which does nothing but pass the call on."""
    key, op = dispatcher.autocast_key(device), torch.ops.aten.abs.default
    passed = dispatcher.passing_on(op, key)

    def kernel(keys: torch._C.DispatchKeySet, *args: object, **kwargs: object) -> Any:
        return passed(keys, args, kwargs)

    dispatcher.put(_library, {"abs": kernel}, key)


def functions(what: str, ops: int) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """The ops of a comparison, as functions of one tensor."""
    if what == "mm = fp32":
        return [lambda x: torch.mm(x, x)]
    return [getattr(torch, name) for name in UNLISTED[:ops]]


def rules(what: str, ops: int, device: str = "cpu") -> dict[str, Any]:
    """torch's table, but for the ops: a rule that casts none of the inputs, which are float32."""
    names, rule = UNLISTED[:ops], what
    if what == "mm = fp32":
        names, rule = ["mm"], "fp32"
    return {"extends": f"torch-{device}", "rules": dict.fromkeys(names, rule)}


def calls(what: str, ops: int, device: str = "cpu") -> Callable[[], int]:
    """A program of 96 calls, spread evenly over the ops; returns how many."""
    x, chosen = torch.full((8, 8), 0.5, device=device), functions(what, ops)
    times = range(96 // len(chosen))

    def program() -> int:
        for _ in times:
            for function in chosen:
                function(x)
        return 96

    return program


def eager(what: str, ops: int, rounds: int, pairs: int, device: str = "cpu") -> Eager:
    """Measure under torch's table and under the policy, in processes that take turns.

    On a GPU, this is the time of the host, which is ahead of the device.
    """
    policy = repr(PASSES_ON) if what == PASSES_ON else f"rules({what!r}, {ops}, {device!r})"
    found: dict[str, list[list[float]]] = {"None": [], policy: []}
    for _ in range(pairs):
        for policy, times in found.items():
            code = CHILD.format(
                here=str(Path(__file__).parent), what=what, ops=ops, policy=policy, rounds=rounds,
                passes_on=PASSES_ON, device=device,
            )  # fmt: skip
            run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
            times.append([float(number) for number in run.stdout.split()])
    theirs, ours = ([times[0] for times in found[policy]] for policy in found)
    after = statistics.median(times[1] for times in list(found.values())[1])
    added = sorted(o - t for o, t in zip(ours, theirs, strict=True))
    a, b = statistics.median(theirs), statistics.median(ours)
    bar = None if what == PASSES_ON else BAR_US
    return Eager(what, ops, a, b, after, b - a, after - a, added[0], added[-1], bar)


def rounded(each: Eager) -> dict[str, Any]:
    """Return the fields of a comparison, as the page shows them."""
    return {k: round(v, 2) if isinstance(v, float) else v for k, v in asdict(each).items()}


def memory(count: int = 1000, processes: int = 3) -> Row:
    """Measure what a policy takes that no other is equal to, beside what it may take."""
    code, found = MEMORY.format(count=count), []
    for _ in range(processes):
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        found.append(float(run.stdout))
    what = f"memory of a policy / {MEMORY_MB} MB"
    return row(what, [MEMORY_MB] * processes, found, 1.0, "MB")


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
    cases = [("keep", n) for n in COUNTS] + [("fp32", 1), ("mm = fp32", 1), (PASSES_ON, 1)]
    eagers = [eager(what, ops, args.rounds, args.pairs) for what, ops in cases]
    compileds = [compiled("keep", ops, 1000) for ops in COUNTS]
    show(f"one call in a region, us; torch {torch.__version__}, CPU, one thread", eagers)
    show("a compiled chain (inductor)", compileds)
    kept = [memory()]
    show("memory for the life of the process", kept)
    record = {
        "machine": machine("torch"),
        "threads": torch.get_num_threads(),
        "compiler": "inductor",
        "lists": {"a call under a policy, in microseconds": [rounded(each) for each in eagers]},
        "tables": {"a policy in a compiled program": compileds, "memory of policies": kept},
    }
    save("policies", "cpu", record, args.out)
    unmet = any(r.bar is not None and r.added > r.bar for r in eagers)
    return int(unmet or bool(missed(kept)))


if __name__ == "__main__":
    sys.exit(main())
