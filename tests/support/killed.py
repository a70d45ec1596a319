"""A run of training that saves after every step and can be killed at any moment.

    python -m tests.support.killed torch FOLDER       train, or go on from what is in the folder
    python -m tests.support.killed torch FOLDER 30    the same, and stop while saving step 30

All scalers of the framework are trained side by side and saved in one file, with the state of each
scaler after every step.
"""

from __future__ import annotations

import io
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import kills

NAMES = {"torch": ("polymp, torch", "torch.amp"), "jax": ("polymp, JAX", "flax", "jmp")}
FILE, STOPPED = "run.ckpt", "stopped"


def start(framework: str) -> dict[str, Any]:
    return {name: kills.SUBJECTS[name].make() for name in NAMES[framework]}


def packed(framework: str, value: Any) -> bytes:
    """The bytes of a checkpoint, by torch.save or, for arrays of numpy's, by pickle."""
    if framework == "jax":
        return pickle.dumps(value)
    import torch

    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpacked(framework: str, content: bytes) -> Any:
    if framework == "jax":
        return pickle.loads(content)
    import torch

    return torch.load(io.BytesIO(content), weights_only=True)


def train(framework: str, folder: Path, written: Callable[[int], None] = lambda _: None) -> Any:
    """Train to the end, from the beginning or from where the folder's file ends."""
    path = folder / FILE
    runs = start(framework)
    states: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    first = 0
    if path.exists():
        first, states, saved = unpacked(framework, path.read_bytes())
        for name, run in runs.items():
            run.load(saved[name])
    for step in range(first, kills.STEPS):
        for name, run in runs.items():
            kind = kills.kind_of(step)
            run.step(kind, *kills.batch(step, kind))
            states[name].append(run.numbers())
        saved = {name: run.save() for name, run in runs.items()}
        content = packed(framework, (step + 1, states, saved))
        kills.save(path, content, lambda: written(step))  # noqa: B023
    return {name: (states[name], run.weights().tobytes()) for name, run in runs.items()}


def main(framework: str, folder: str, stop: str = "-1") -> None:
    def written(step: int) -> None:
        if step == int(stop):
            (Path(folder) / STOPPED).touch()
            time.sleep(600)  # until it is killed

    train(framework, Path(folder), written)


if __name__ == "__main__":
    main(*sys.argv[1:])
