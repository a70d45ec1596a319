"""The machine: its GPU, driver and clocks, and the report of `polymp doctor`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from pairing import machine

from gpu_steps.worker import Here

ASKED = {
    "name": "GPU",
    "memory.total": "memory",
    "driver_version": "driver",
    "clocks.max.sm": "highest clock of the multiprocessors",
    "clocks.max.mem": "highest clock of the memory",
    "clocks.sm": "clock now",
    "power.limit": "power limit",
    "mig.mode.current": "partitioned (MIG)",
}
PACKAGES = (
    "torch",
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "triton",
    "flax",
    "optax",
    "transformer-engine",
)


def look(here: Here) -> dict[str, Any]:
    """The machine as facts. Changes no setting of the GPU."""
    rows = list(_gpus()) if here.device == "cuda" else []
    command = [sys.executable, "-m", "polymp", "doctor", "--json"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    if said.returncode not in (0, 1):  # 1: something is wrong, and stands in what it says
        raise RuntimeError(f"polymp doctor: {said.stderr.strip()[-300:]}")
    doctor = json.loads(said.stdout)
    devices = [
        {"framework": f["name"], "device": device}
        for f in doctor["frameworks"]
        for device in f["devices"]
    ]
    return {
        "machine": machine(*PACKAGES, device=here.device),
        "doctor": doctor,
        "lists": {"The machine": rows, "What polymp doctor sees": devices},
        "missing": dict(enumerate(doctor["problems"])),
    }


def _gpus() -> Any:
    command = ["nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for line in said.strip().splitlines():
        for name, value in zip(ASKED.values(), line.split(", "), strict=True):
            yield {"what": name, "is": value}
