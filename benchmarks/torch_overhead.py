"""The cost of polymp over torch.autocast and torch.amp.GradScaler: ratios of paired medians.

Two programs are measured in turn, many times, in one run; the ratio of the medians is what counts,
and the spread of the paired ratios stands beside it. `make bench` runs it.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from pairing import Row, machine, measure, missed, row, save, show, timed

import polymp.torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import job
from train_torch import Transformer, loss_on

Program = Callable[[], Any]


def paired(
    what: str, theirs: Program, ours: Program, rounds: int, inner: int, bar: float | None
) -> Row:
    """Measure two programs in turn, `inner` runs for each figure; in microseconds."""
    programs = {"theirs": timed(theirs, inner), "ours": timed(ours, inner)}
    times = {name: [ms * 1e3 for ms in t] for name, t in measure(programs, rounds, 1).items()}
    return row(what, times["theirs"], times["ours"], bar, "us")


# In-place ops cost more once polymp watches them, under torch.autocast in the same process too.
WRITES = """
import statistics, sys, time, torch
from {package} import autocast
x, y = torch.randn(8, 8, device="{device}"), torch.zeros(8, 8, device="{device}")
times = []
for _ in range(300):
    with autocast("{device}"):
        start = time.perf_counter()
        for _ in range(100):
            y.add_(x)
        times.append(time.perf_counter() - start)
print(statistics.median(times) * 1e6)
"""


# What any kernel in Python costs: torch.amp, with one that does nothing but pass the call on.
PASSES_ON = """
import torch
from polymp.backends.torch.compat import dispatcher
key, op = dispatcher.autocast_key("{device}"), torch.ops.aten.add_.Tensor
pass_on = dispatcher.passing_on(op, key)
def kernel(keys, *args, **kwargs):
    return pass_on(keys, args, kwargs)
library = torch.library.Library("aten", "IMPL")
dispatcher.put(library, "add_.Tensor", kernel, key)
"""

IMPORTS = """
import time
start = time.process_time()
import {package}
print((time.process_time() - start) * 1e6)
"""


def apart(what: str, theirs: str, ours: str, rounds: int) -> Row:
    """Measure two programs that print microseconds, each run in a process of its own."""
    times: list[tuple[str, list[float]]] = [(theirs, []), (ours, [])]
    for _ in range(rounds):
        for code, found in times:
            run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
            found.append(float(run.stdout))
    return row(what, times[0][1], times[1][1], unit="us")


def entering(make: Callable[[], AbstractContextManager[Any]]) -> Callable[[], None]:
    def program() -> None:
        with make():
            pass

    return program


def training(amp: Any, device: str, dtype: torch.dtype) -> Callable[[], None]:
    """A training step of the example's small model under `amp`'s autocast and GradScaler."""
    args = job.arguments(job.parser("train_torch.py", "", job.SMALL), [])
    torch.manual_seed(args.seed)
    model = Transformer(100, args.context, args.width, args.layers, args.heads).to(device)
    tokens = torch.randint(100, (args.batch, args.context + 1), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = amp.GradScaler(device, enabled=dtype is torch.float16)

    def step() -> None:
        optimizer.zero_grad()
        with amp.autocast(device, dtype=dtype):
            loss = loss_on(model, tokens)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def rows(device: str, rounds: int, small: bool = False) -> list[Row]:
    """All comparisons: `rounds` of ten training steps, more of what is short. Less if `small`."""
    torch.set_num_threads(1)
    ours, theirs = polymp.torch, torch.amp
    kept, theirs_kept = ours.autocast(device), theirs.autocast(device)
    x, w = torch.randn(8, 8, device=device), torch.randn(8, 8, device=device, requires_grad=True)
    many, times = (5, 5) if small else (7 * rounds, 500)

    def ops(context: AbstractContextManager[Any]) -> Callable[[], None]:
        def program() -> None:
            with context:
                for _ in range(100):
                    torch.mm(x, w)

        return program

    names = ("torch.amp", "polymp.torch")
    writes = [WRITES.format(package=package, device=device) for package in names]
    imports = [IMPORTS.format(package=package) for package in names]
    found = [
        paired("region: enter and leave", entering(lambda: theirs_kept), entering(lambda: kept),
               many, times, 1.5),
        paired("region: make, enter and leave", entering(lambda: theirs.autocast(device)),
               entering(lambda: ours.autocast(device)), many, times, 1.5),
        paired("100 small mm in a region", ops(theirs_kept), ops(kept), many // 2, 20, None),
        apart("100 small add_ in a region", *writes, max(1, rounds // 6)),
        apart("the same, torch.amp with a Python kernel that only passes on", writes[0],
              PASSES_ON.format(device=device) + writes[0], max(1, rounds // 12)),
        apart("import", *imports, max(1, rounds // 12)),
    ]  # fmt: skip
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        found.append(
            paired(
                f"training step of the example, {name}",
                training(theirs, device, dtype),
                training(ours, device, dtype),
                rounds,
                1 if small else 10,
                1.02,
            )
        )
    return found


TITLE = "polymp / torch.amp"


def main() -> int:
    """Run all comparisons, print the table, save it as JSON; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--rounds", type=int, default=100, help="paired rounds of 10 training steps"
    )
    parser.add_argument("--out", type=Path, help="JSON file; default: results/ by date and device")
    args = parser.parse_args()
    found = rows(args.device, args.rounds)
    show(f"{TITLE}, torch {torch.__version__}, {args.device}", found)
    record = {
        "machine": machine("torch", device=args.device),
        "threads": torch.get_num_threads(),
        "rounds": args.rounds,
        "tables": {TITLE: found},
    }
    save("torch-overhead", args.device, record, args.out)
    return int(bool(missed(found)))


if __name__ == "__main__":
    sys.exit(main())
