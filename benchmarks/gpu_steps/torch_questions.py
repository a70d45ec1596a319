"""Questions of weights and kernels that only a GPU answers, for the torch backend.

Each step is one table of facts. What makes sense on a CPU runs there at a tiny size.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from typing import Any

import torch
from pairing import ROOT
from torch import nn

import polymp
import polymp.torch
from gpu_steps.torch_scaler import Fact, told
from gpu_steps.worker import Here
from tests.support.torch.kernels import drift as table_drift

WRITES = """
import statistics, time, torch
{imports}
device, size = "{device}", {size}
model = {model}
model = model.to(device, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
times = dict()
for batch in {batches}:
    x = torch.randn(batch, 3, size, size, device=device)
    x = x.contiguous(memory_format=torch.channels_last)
    for train in (False, True):
        model.train(train)
        found = []
        for turn in range({rounds}):
            torch.cuda.synchronize() if device == "cuda" else None
            start = time.perf_counter()
            with torch.set_grad_enabled(train), autocast(device, torch.bfloat16):
                y = model(x)
            if train:
                y.float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.cuda.synchronize() if device == "cuda" else None
            found.append(time.perf_counter() - start)
        what = "a step" if train else "inference"
        times[f"batch {{batch}}, {{what}}"] = statistics.median(found[2:])
import json; print(json.dumps(times))
"""
IMPORTS = {
    "torch.autocast, polymp not imported": "from torch import autocast",
    "torch.autocast, after a region of polymp": (
        "import polymp.torch\nwith polymp.torch.autocast('{device}', torch.bfloat16): pass\n"
        "from torch import autocast"
    ),
    "polymp": "from polymp.torch import autocast",
}


def writes(here: Here) -> dict[str, Any]:
    """A convolutional network whose batch norms write in place, each way in its own process."""
    try:
        import torchvision  # noqa: F401

        model, name = "__import__('torchvision').models.resnet50()", "ResNet-50"
    except Exception:  # a build for another torch fails in its own way
        model = (
            "torch.nn.Sequential(*(m for i in range(16) for m in (torch.nn.Conv2d(3 if i == 0 else"
            " 64, 64, 3, padding=1), torch.nn.BatchNorm2d(64), torch.nn.ReLU(inplace=True))))"
        )
        name = "16 convolutions with batch norm"
    size, batches, rounds = (16, (1,), 3) if here.small else (224, (1, 8), 20)
    if here.small:
        name = "A convolution with batch norm"
        model = "torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))"
    rows = []
    ways = dict([("polymp", IMPORTS["polymp"])]) if here.small else IMPORTS
    for title, imports in ways.items():
        program = WRITES.format(
            imports=imports.format(device=here.device), device=here.device, size=size, model=model,
            batches=batches, rounds=rounds,
        )  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{title}: {done.stderr.strip()[-300:]}")
        times = json.loads(done.stdout)
        rows.append({"way": title} | {f"{k}, ms": round(v * 1e3, 3) for k, v in times.items()})
    return told(here, {f"{name} in bfloat16, medians": rows})


def recurrent(here: Here) -> dict[str, Any]:
    """cuDNN's LSTM and GRU: the same bits, one kernel family, and no scattered weights."""
    rows = []
    policies = {
        "default": None,
        "amp": "amp",
        "lstm and gru in float32": polymp.policy("amp").override(fp32=["lstm", "gru"]),
    }
    low = torch.float16 if here.device == "cuda" else torch.bfloat16  # CPUs have no float16 LSTM
    for kind in (nn.LSTM, nn.GRU):
        torch.manual_seed(0)
        layer = kind(128, 128, 2).to(here.device)
        x = torch.randn(32, 8, 128, device=here.device)
        with torch.autocast(here.device, low):
            wanted = layer(x)[0]
        for name, policy in policies.items():
            row: Fact = {"layer": kind.__name__, "policy": name}
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                try:
                    with polymp.torch.autocast(here.device, low, policy=policy):
                        got = layer(x)[0]
                    row["dtype"] = str(got.dtype).removeprefix("torch.")
                    row["same bits as torch.autocast"] = bool(torch.equal(got, wanted))
                except Exception as error:
                    row["dtype"] = f"{type(error).__name__}: {str(error)[:120]}"
            row["warnings"] = "; ".join(sorted({str(w.message)[:80] for w in said})) or "none"
            rows.append(row)
    new, gone = table_drift(here.device)
    drift = [
        {"ops": "torch has and polymp's table lacks", "are": ", ".join(new) or "none"},
        {"ops": "polymp's table has and torch lacks", "are": ", ".join(gone) or "none"},
    ]
    title = "PyTorch: recurrent layers in a region"
    return told(here, {title: rows, "The table of this torch": drift})


SANITIZED = """
import torch, polymp.torch
from polymp.torch import GradScaler, autocast
layers = torch.nn.Linear(32, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 8)
model = torch.nn.Sequential(*layers).to("DEVICE")
optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), GradScaler("DEVICE")
for turn in range(4):
    with autocast("DEVICE", torch.float16):
        loss = model(torch.randn(4, 32, device="DEVICE")).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
torch.cuda.synchronize() if "DEVICE" == "cuda" else None
"""


def sanitizer(here: Here) -> dict[str, Any]:
    """A short training under compute-sanitizer: reads and writes out of bounds."""
    tool = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if tool is None:
        raise FileNotFoundError("compute-sanitizer is not on the PATH")
    done = subprocess.run(
        [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c",
         SANITIZED.replace("DEVICE", here.device)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line.strip("= ") for line in done.stdout.splitlines() if line.startswith("=========")]
    row = {"tool": "memcheck", "exit code": done.returncode, "said": lines[-1] if lines else ""}
    return told(here, {"Four training steps under compute-sanitizer": [row]})
