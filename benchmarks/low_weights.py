"""The cost of a step on low weights, and the final loss of the example with them.

    cost    AdamW on 25 million parameters in 12 matrices, on float32 weights and in every mode,
            compiled by inductor and eager, in turn; processor time, on one thread. The gradients
            are those of the weights' dtype. "floor": the compiled step with the same tensors, in
            which weights are cast and added, without the rounding of the mode.
    loss    the small model of examples/train_torch.py, 1,000 steps: float32 weights in a bfloat16
            region, bfloat16 weights alone ("naive"), and every mode; each over the same seeds, in a
            process for each core.

`make bench` runs it.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from pairing import ROOT, Row, in_processes, machine, measure, row, save, show, timed
from torch import nn

from polymp.backends.torch.weights import low_step
from polymp.torch import autocast, low_weights

sys.path.insert(0, str(ROOT / "examples"))
import job
import train_torch

MODES = ("master", "split", "stochastic")
BAR_COMPILED = 1.25
BAR_LOSS = 0.005


@dataclass(frozen=True)
class Loss:
    """The held-out loss at the end, and its distance from that of float32 weights.

    The mean over seeds, in nats; `off` is relative, `spread` the largest distance of a seed of
    float32 weights from their mean; 0 of one seed.
    """

    weights: str
    loss: float
    off: float
    spread: float
    bar: float | None


def stepping(
    mode: str | None, compiled: bool, matrices: int, shape: tuple[int, int], device: str = "cpu"
) -> Any:
    """A program that takes one step on weights with gradients; None: float32 weights."""
    made = torch.Generator(device).manual_seed(0)
    numbers = partial(torch.randn, shape, generator=made, device=device)
    params = [nn.Parameter(numbers() / 32) for _ in range(matrices)]
    optimizer: Any = torch.optim.AdamW(params, lr=1e-4)
    if mode is not None:
        optimizer = low_weights(optimizer, mode)
    for p in params:
        p.grad = numbers().to(p.dtype)
    return torch.compile(optimizer.step) if compiled else optimizer.step


def without_rounding(step: Callable[[], Any]) -> Callable[[], Any]:
    """A compiled step in which weights are only cast and added."""
    plain = patch.multiple(
        low_step,
        load=lambda mode, low, rest: low if rest is None else low + rest,
        keep=lambda mode, full, random: (full, full),
        opened=lambda beside: None if beside is None else beside.to(torch.float32),
    )

    def run() -> None:
        with plain:  # in each step: the graph is compiled again where these functions change
            step()

    return run


def costs(
    compiled: bool,
    rounds: int,
    matrices: int = 12,
    shape: tuple[int, int] = (1024, 2048),
    device: str = "cpu",
) -> list[Row]:
    """The cost of a step in every mode against float32 weights: on a GPU, of its time."""
    rows = []
    how = "compiled" if compiled else "eager"
    measured = partial(timed, clock=time.process_time)
    if device == "cuda":
        measured = partial(timed, finish=torch.cuda.synchronize)
    for mode in MODES:  # few programs at a time, so that memory stays small
        programs = {}
        for each in (None, mode, "floor") if compiled else (None, mode):
            program = stepping(mode if each == "floor" else each, compiled, matrices, shape, device)
            program = without_rounding(program) if each == "floor" else program
            programs[str(each)] = measured(program)
        times = measure(programs, rounds, warm=3)
        bar = BAR_COMPILED if compiled else None
        rows.append(row(f"torch, {how}: {mode} / float32", times["None"], times[mode], bar))
        if compiled:
            floor = row(f"torch, {how}: floor of {mode} / float32", times["None"], times["floor"])
            rows.append(floor)
        torch.compiler.reset()
    return rows


def final_loss(weights: str, steps: int, seed: int) -> float:
    """The held-out loss of the example after its steps, with weights kept in one of the ways."""
    torch.set_num_threads(1)
    given = ["--steps", str(steps), "--seed", str(seed), "--quiet"]
    args = job.arguments(job.parser("low_weights.py", "", job.SMALL), given)
    text = job.read(args.text, args.context)
    model = train_torch.first_model(text, args)
    if weights == "naive":
        model = model.bfloat16()
    region = partial(autocast, "cpu", dtype=torch.bfloat16)
    exam = torch.from_numpy(job.held_out(text, args))

    def loss_on(tokens: torch.Tensor) -> torch.Tensor:
        with region():
            return train_torch.loss_on(model, tokens)

    optimizer: Any = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    if weights in MODES:
        optimizer = low_weights(optimizer, weights, keep=lambda: loss_on(exam[:2]))
    for step, numbers in enumerate(job.batches(text, args)):
        if step == args.steps:
            break
        for group in optimizer.param_groups:
            group["lr"] = job.learning_rate(step, args)
        optimizer.zero_grad()
        loss_on(torch.from_numpy(numbers)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        parts = exam.split(args.batch)
        return sum(loss_on(part).item() * len(part) for part in parts) / len(exam)


def losses(steps: int, seeds: int) -> list[Loss]:
    """The final loss with every kind of weights."""
    runs = [(w, steps, seed) for seed in range(seeds) for w in ("float32", "naive", *MODES)]
    found: dict[str, list[float]] = {}
    for (weights, _, seed), loss in zip(runs, in_processes(final_loss, runs), strict=True):
        found.setdefault(weights, []).append(loss)
        print(f"seed {seed}, {weights}: {loss:.4f}", flush=True)
    base = statistics.mean(found["float32"])
    spread = max(abs(loss - base) / base for loss in found["float32"])
    rows = []
    for weights, each in found.items():
        mean = statistics.mean(each)
        bar = BAR_LOSS if weights in MODES else None
        rows.append(Loss(weights, mean, mean / base - 1, spread, bar))
    return rows


def main() -> int:
    """Measure, print the tables, save them as JSON; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="steps of each program")
    parser.add_argument("--steps", type=int, default=1000, help="of the example")
    parser.add_argument("--seeds", type=int, default=1, help="of the example")
    parser.add_argument("--out", type=Path, help="JSON file; default: results/ by date")
    args = parser.parse_args()
    torch.set_num_threads(1)
    compiled = costs(True, args.rounds)
    eager = costs(False, args.rounds)
    show(f"a step of AdamW on 25 million parameters; torch {torch.__version__}, CPU", compiled)
    show("the same, eager", eager)
    rows = losses(args.steps, args.seeds)
    show(f"examples/train_torch.py, {args.steps} steps: held-out loss", rows)
    record = {
        "machine": machine("torch"),
        "threads": 1,
        "compiler": "inductor",
        "tables": {"a step on low weights": [*compiled, *eager]},
        "losses": rows,
    }
    save("low-weights", "cpu", record, args.out)
    far = any(r.bar is not None and abs(r.off) > r.bar for r in rows)
    return int(far or any(r.met is False for r in compiled))


if __name__ == "__main__":
    sys.exit(main())
