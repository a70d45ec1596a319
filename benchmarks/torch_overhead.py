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

REGION_BAR, WRITE_BAR, CONVNET_BAR = 1.15, 1.3, 1.03


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


# Inference of a convnet, one picture: its activation is in place, or its sum. `channels` and `side`
# are 64 and 32 as in a ResNet of small pictures, or 8 and 8: there the ops take no time, but calls.
CONVNET = """
import statistics, time, torch
from torch import nn
from {package} import autocast
torch.set_num_threads(1)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d({channels}, {channels}, 3, padding=1)
        self.norm = nn.BatchNorm2d({channels})
        self.relu = nn.ReLU(inplace={relu})
    def forward(self, x):
        y = self.relu(self.norm(self.conv(x)))
        if {add}:
            y += x
        return y
net = nn.Sequential(*(Block() for _ in range(16))).to("{device}").eval()
x, times = torch.randn(1, {channels}, {side}, {side}, device="{device}"), []
for _ in range({times}):
    start = time.perf_counter()
    with torch.no_grad(), autocast("{device}"):
        net(x).sum().item()
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
dispatcher.put(library, {{"add_.Tensor": kernel}}, key)
"""

# Of polymp.torch beyond torch. The garbage collector goes once through all that torch has made, in
# whatever is imported or made after it: that is left out.
IMPORT = """
import gc, time, torch
gc.disable()
start = time.process_time()
import polymp.torch
print((time.process_time() - start) * 1e3)
"""
IMPORT_MS = 40.0


class Bare:
    """A region of nothing but torch's state: read, written, and put back."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.before: list[Any] = []

    def __enter__(self) -> None:
        device = self.device
        self.before.append(
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device),
             torch.is_autocast_cache_enabled())
        )  # fmt: skip
        torch.autocast_increment_nesting()
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, torch.bfloat16)
        torch.set_autocast_cache_enabled(True)

    def __exit__(self, *_: object) -> None:
        enabled, dtype, cache = self.before.pop()
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(self.device, enabled)
        torch.set_autocast_dtype(self.device, dtype)
        torch.set_autocast_cache_enabled(cache)


def printed(code: str) -> float:
    """Run a program in a process of its own; return the figure that it prints."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    return float(run.stdout)


def apart(what: str, theirs: str, ours: str, rounds: int, bar: float | None = None) -> Row:
    """Measure two programs that print microseconds, in turn."""
    base, found = zip(*((printed(theirs), printed(ours)) for _ in range(rounds)), strict=True)
    return row(what, base, found, bar, "us")


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
    kept, theirs_kept, bare = ours.autocast(device), theirs.autocast(device), Bare(device)
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

    def convnet(channels: int, side: int, what: str) -> Row:
        times = (16 if small else 300) * 8 // channels
        sides = [
            CONVNET.format(package=package, device=device, times=times, channels=channels,
                           side=side, relu=what == "relu_", add=what == "+=")
            for package in names
        ]  # fmt: skip
        title = f"convnet, {channels} x {side} x {side}, one picture, {what} in each block"
        return apart(title, *sides, max(1, rounds // 6), CONVNET_BAR)

    imports = [printed(IMPORT) for _ in range(max(1, rounds // 12))]
    found = [
        paired("region: enter and leave", entering(lambda: theirs_kept), entering(lambda: kept),
               many, times, REGION_BAR),
        paired("region: make, enter and leave", entering(lambda: theirs.autocast(device)),
               entering(lambda: ours.autocast(device)), many, times, REGION_BAR),
        paired("region: torch's state alone, enter and leave", entering(lambda: theirs_kept),
               entering(lambda: bare), many, times, None),
        paired("100 small mm in a region", ops(theirs_kept), ops(kept), many // 2, 20, None),
        apart("100 small add_ in a region", *writes, max(1, rounds // 6), WRITE_BAR),
        apart("the same, torch.amp with a Python kernel that only passes on", writes[0],
              PASSES_ON.format(device=device) + writes[0], max(1, rounds // 12)),
        *(convnet(*size, what) for size in ((64, 32), (8, 8)) for what in ("relu_", "+=")),
        row("import of polymp.torch after torch / 40 ms", [IMPORT_MS] * len(imports), imports, 1.0),
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
