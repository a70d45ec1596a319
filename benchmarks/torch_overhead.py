"""What polymp costs over torch.autocast and torch.amp.GradScaler: ratios of paired medians.

Two programs are measured in turn, many times, in one run; the ratio of the medians is what counts,
and the spread of the paired ratios stands beside it. `make bench` runs it.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import polymp.torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import job
from train_torch import Transformer, loss_on

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One comparison: medians in microseconds, their ratio, and the bar it is held to."""

    what: str
    torch: float
    polymp: float
    ratio: float
    low: float
    high: float
    bar: float | None


def paired(
    what: str,
    theirs: Callable[[], Any],
    ours: Callable[[], Any],
    rounds: int,
    inner: int,
    bar: float | None,
) -> Row:
    """Measure two programs in turn, swapping who goes first."""
    for f in (theirs, ours):
        for _ in range(max(1, inner // 10)):
            f()
    times: dict[Callable[[], Any], list[float]] = {theirs: [], ours: []}
    for i in range(rounds):
        for f in (theirs, ours) if i % 2 else (ours, theirs):
            start = time.perf_counter()
            for _ in range(inner):
                f()
            times[f].append((time.perf_counter() - start) / inner * 1e6)
    ratios = sorted(o / t for o, t in zip(times[ours], times[theirs], strict=True))
    a, b = statistics.median(times[theirs]), statistics.median(times[ours])
    return Row(what, a, b, b / a, ratios[len(ratios) // 4], ratios[-len(ratios) // 4], bar)


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


def apart(what: str, program: str, device: str) -> Row:
    """Measure a program under torch.amp and under polymp, each in a process of its own."""
    times: dict[str, list[float]] = {"torch.amp": [], "polymp.torch": []}
    for _ in range(5):
        for package, found in times.items():
            code = program.format(package=package, device=device)
            run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
            found.append(float(run.stdout))
    theirs, ours = times.values()
    ratios = sorted(o / t for o, t in zip(ours, theirs, strict=True))
    a, b = statistics.median(theirs), statistics.median(ours)
    return Row(what, a, b, b / a, ratios[1], ratios[-2], None)


def entering(make: Callable[[], AbstractContextManager[Any]]) -> Callable[[], None]:
    def program() -> None:
        with make():
            pass

    return program


def training(amp: Any, device: str, dtype: torch.dtype) -> Callable[[], None]:
    """A training step of the example, at its own size, under `amp`'s autocast and GradScaler."""
    args = job.arguments(job.parser("train_torch.py", ""), [])
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


def main() -> int:
    """Run all comparisons, print the table, save it as JSON; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--rounds", type=int, default=100, help="paired rounds of 10 training steps"
    )
    parser.add_argument("--out", type=Path, help="JSON file; default: results/ by date and device")
    args = parser.parse_args()
    device, rounds = args.device, args.rounds
    torch.set_num_threads(1)
    ours, theirs = polymp.torch, torch.amp
    kept, theirs_kept = ours.autocast(device), theirs.autocast(device)
    x, w = torch.randn(8, 8, device=device), torch.randn(8, 8, device=device, requires_grad=True)

    def ops(context: AbstractContextManager[Any]) -> Callable[[], None]:
        def program() -> None:
            with context:
                for _ in range(100):
                    torch.mm(x, w)

        return program

    rows = [
        paired("region: enter and leave", entering(lambda: theirs_kept), entering(lambda: kept),
               200, 500, 1.5),
        paired("region: make, enter and leave", entering(lambda: theirs.autocast(device)),
               entering(lambda: ours.autocast(device)), 200, 500, 1.5),
        paired("100 small mm in a region", ops(theirs_kept), ops(kept), 100, 20, None),
        apart("100 small add_ in a region", WRITES, device),
    ]  # fmt: skip
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        rows.append(
            paired(
                f"training step of the example, {name}",
                training(theirs, device, dtype),
                training(ours, device, dtype),
                rounds,
                10,
                1.02,
            )
        )
    machine = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {platform.machine()}"
    _print(rows, machine)
    _save(rows, machine, device, args.out)
    return int(any(r.bar is not None and r.ratio > r.bar for r in rows))


def _print(rows: list[Row], machine: str) -> None:
    table = Table(title=f"polymp against torch.amp, torch {torch.__version__}, {machine}")
    for column in ("what", "torch, us", "polymp, us", "ratio", "middle half", "bar"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for r in rows:
        table.add_row(
            r.what, f"{r.torch:,.2f}", f"{r.polymp:,.2f}", f"{r.ratio:.3f}",
            f"{r.low:.3f} - {r.high:.3f}", "" if r.bar is None else f"{r.bar:.2f}",
        )  # fmt: skip
    Console(width=110).print(table)


def _save(rows: list[Row], machine: str, device: str, out: Path | None) -> None:
    now = datetime.now(UTC)
    path = out or RESULTS / f"{now:%Y-%m-%d}-torch-overhead-{device}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "date": f"{now:%Y-%m-%d}",
        "machine": machine,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "polymp": polymp.__version__,
        "rows": [asdict(r) for r in rows],
    }
    path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
