"""A step with its scaler on a GPU, beside torch.amp's: kernels, host time, memory and waits."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from pairing import machine, measure

import polymp.torch
from gpu_steps.worker import Here

Fact = dict[str, Any]
AMPS: dict[str, Any] = {"torch.amp": torch.amp, "polymp": polymp.torch}


def told(here: Here, lists: dict[str, list[Fact]]) -> dict[str, Any]:
    """A step's result."""
    return {"machine": machine("torch", device=here.device), "lists": lists}


def launches(here: Here, counts: tuple[int, ...] = (4, 300)) -> dict[str, Any]:
    """Kernels that each method of a scaler starts with a fused optimizer, by number of tensors."""
    rows = []
    for count in counts:
        for name, amp in AMPS.items():
            step = Steps(amp, here.device, count, 16, torch.optim.AdamW, {"fused": True})
            for _ in range(8):
                step()
            found = [step.kernels() for _ in range(4)]
            rows += [
                {"scaler": name, "tensors": count, "method": method,
                 "kernels, four steps in a row": ", ".join(str(f[method]) for f in found)}
                for method in found[0]
            ]  # fmt: skip
    return told(here, {"Kernels of a step with a fused AdamW and its scaler": rows})


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD, foreach": (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
    "AdamW, foreach": (torch.optim.AdamW, {"foreach": True}),
    "SGD, fused": (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
}


class Steps:
    """Steps of one scaler and one optimizer, on gradients that are there already.

    Args:
        amp: torch.amp or polymp.torch.
        device: "cuda" or "cpu".
        count: how many parameters.
        size: numbers of each.
        kind: the optimizer's class.
        options: of it.
    """

    def __init__(
        self, amp: Any, device: str, count: int, size: int, kind: Any, options: dict[str, Any]
    ) -> None:
        torch.manual_seed(0)
        self.params = [torch.randn(size, device=device).requires_grad_() for _ in range(count)]
        self.grads = [torch.randn(size, device=device) for _ in range(count)]
        self.optimizer = kind(self.params, lr=1e-3, **options)
        self.scaler = amp.GradScaler(device)
        self.loss = torch.ones((), device=device)
        self.device = device

    def fill(self) -> None:
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad.clone()

    def __call__(self) -> None:
        self.fill()
        self.finish()

    def finish(self) -> None:
        self.scaler.scale(self.loss)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def host(self) -> float:
        """Seconds that the host takes for one step, from an idle device on."""
        self.fill()
        synchronize(self.device)
        start = time.perf_counter()
        self.finish()
        return time.perf_counter() - start

    def kernels(self) -> dict[str, int]:
        self.fill()
        return {
            "scale": kernels(lambda: self.scaler.scale(self.loss)),
            "step": kernels(lambda: self.scaler.step(self.optimizer)),
            "update": kernels(self.scaler.update),
        }


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def kernels(program: Callable[[], Any]) -> int:
    """How many kernels a program starts, and copies and fills that it asks for."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        program()
        torch.cuda.synchronize()
    found = [e for e in profile.events() if e.device_type.name == "CUDA"]
    return sum(not e.is_user_annotation for e in found)


def waits(program: Callable[[], Any]) -> str:
    """Name the call with which a program waits for the GPU; "no" if there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        program()
    except RuntimeError as error:
        return str(error).partition("\n")[0][:80]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "no"


def peak(program: Callable[[], Any]) -> float:
    """Megabytes that a program allocates at its highest, beyond what was there before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    program()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def scaler_steps(here: Here) -> dict[str, Any]:
    """Host time, kernels, memory and waits of a step by optimizer; 60 steps without a wait."""
    count, size, rounds = (3, 8, 2) if here.small else (300, 100_000, 30)
    rows = []
    for title, (kind, options) in OPTIMIZERS.items():
        made = {n: Steps(amp, here.device, count, size, kind, options) for n, amp in AMPS.items()}
        times = measure({name: step.host for name, step in made.items()}, rounds)
        for name, step in made.items():
            row: Fact = {"optimizer": title, "scaler": name}
            row["host, us"] = round(statistics.median(times[name]) * 1e3, 1)
            if here.device == "cuda":
                row["kernels"] = kernels(step)
                row["peak memory, MB"] = round(peak(step), 2)
                row["waits in 60 steps"] = waits(lambda step=step: [step() for _ in range(60)])
            rows.append(row)
    title = f"A step of {count} parameters of {size:,} numbers, by optimizer and scaler"
    return told(here, {title: rows})


GRAPHED = """
import torch, polymp.torch
from polymp.torch import GradScaler, autocast
layers = torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)
model = torch.nn.Sequential(*layers).to("DEVICE")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
scaler = GradScaler("DEVICE", on_stuck="raise", stuck_after=50)
x = torch.randn(16, 64, device="DEVICE")

@torch.compile(mode="reduce-overhead")
def forward(x, spoil):
    with autocast("DEVICE", torch.float16):
        loss = model(x).float().square().mean()
    return scaler.scale(loss) * spoil

@torch.compile(mode="reduce-overhead")
def update():
    scaler.step(optimizer)
    scaler.update()

raised = 0
for turn in range(80):
    spoil = torch.tensor(float("inf") if turn >= 10 else 1.0, device="DEVICE")
    torch.compiler.cudagraph_mark_step_begin()
    forward(x, spoil).backward()
    try:
        update()
    except Exception as error:
        raised = turn
        print("RAISED", turn, type(error).__name__, str(error)[:200].replace(chr(10), " "))
        break
    optimizer.zero_grad()
print("SCALE", scaler.get_scale(), "SKIPPED", scaler.skipped_steps)
"""


def graphs_skipped(here: Here) -> dict[str, Any]:
    """Whether reduce-overhead captures a step with its scaler, and on_stuck hears of its skips."""
    done = subprocess.run(
        [sys.executable, "-c", GRAPHED.replace("DEVICE", here.device)],
        env=os.environ | {"TORCH_LOGS": "cudagraphs"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if "cudagraph" in line.lower()]
    skipped = [line.partition("] ")[2] or line for line in said if "skipping" in line.lower()]
    rows = [
        {"what": "exit code", "is": done.returncode},
        {"what": "graphs that were skipped", "is": len(skipped)},
        *({"what": "skipped because", "is": why[:160]} for why in sorted(set(skipped))),
        *(
            {"what": "70 steps of Inf, stuck_after=50", "is": line}
            for line in done.stdout.splitlines()
        ),
        *(
            {"what": "raised", "is": line[:160]}
            for line in done.stderr.splitlines()
            if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)
        ),
    ]
    return told(here, {"A step with its scaler under reduce-overhead": rows})
