"""Low weights, policies, records, and what looks at a step, in torch on a GPU."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pairing import Row, machine, measure, row

import polymp.torch
from gpu_steps.worker import Here


def low_weights(here: Here) -> dict[str, Any]:
    """A step of AdamW on low weights, and the memory of weights and optimizer."""
    import low_weights as benchmark

    matrices, shape = (2, (64, 64)) if here.small else (12, (4096, 4096))
    rounds = 2 if here.small else 12
    rows = [
        each
        for compiled in ((False,) if here.small else (False, True))
        for each in benchmark.costs(compiled, rounds, matrices, shape, here.device)
    ]
    millions = round(matrices * shape[0] * shape[1] / 1e6)
    return {
        "machine": machine("torch", "triton", device=here.device),
        "tables": {f"a step on low weights, {millions} million": rows},
        "lists": {"memory of low weights": list(_held(benchmark.stepping, matrices, shape, here))},
    }


def _held(make: Callable[..., Any], matrices: int, shape: Any, here: Here) -> Iterator[Any]:
    """Bytes a parameter, with gradients and the state of the optimizer, after a step."""
    if here.device != "cuda":
        return
    count = matrices * shape[0] * shape[1]
    for mode in (None, "master", "split", "stochastic"):
        before = torch.cuda.memory_allocated()
        step = make(mode, False, matrices, shape, here.device)
        step()
        held = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated() - before
        yield {
            "weights": mode or "float32",
            "bytes a parameter, held": round(held / count, 2),
            "at the peak of a step": round(peak / count, 2),
        }
        del step
        torch.cuda.empty_cache()


def policies(here: Here) -> dict[str, Any]:
    """Time that a policy adds to calls of ops that it gives other rules: the host's."""
    import policy_costs as benchmark

    rounds = 20 if here.small else 1000
    found = [  # a case takes two processes, which take seconds to start on a GPU
        benchmark.rounded(benchmark.eager(what, 1, rounds, 1, here.device))
        for what in (["keep"] if here.small else ["keep", "mm = fp32", benchmark.PASSES_ON])
    ]
    return {
        "machine": machine("torch", device=here.device),
        "lists": {"a call under a policy, in microseconds": found},
        "tables": {"a training step under a policy": list(_steps(here))},
    }


def _steps(here: Here) -> Iterator[Row]:
    """The example's training step under shipped policies, eager."""
    import seeing

    job, train_torch, device = seeing.job, seeing.train_torch, here.device
    sizes = job.SMALL if here.small else job.default_sizes()
    args = job.arguments(job.parser("train.py", "", sizes), [])
    with torch.device(device):
        model = train_torch.Transformer(100, args.context, args.width, args.layers, args.heads)
        tokens = torch.randint(100, (args.batch, args.context + 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def program(region: Callable[[], Any]) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            with region():
                loss = train_torch.loss_on(model, tokens)
            loss.backward()
            optimizer.step()

        return step

    programs = {"torch.autocast": lambda: torch.autocast(device, torch.bfloat16)} | {
        name: lambda name=name: polymp.torch.autocast(device, torch.bfloat16, policy=name)
        for name in (f"torch-{device}", "amp", "lean")
    }
    clocked = {name: seeing.clocked(program(region), device) for name, region in programs.items()}
    base, *others = measure(clocked, 2 if here.small else 40).items()
    for name, times in others:
        yield row(f"train step, policy {name} / torch.autocast", base[1], times)


def seeing(here: Here) -> dict[str, Any]:
    """Costs of `explain`, `audit`, `locate`, `catch` and `record`, each beside the step."""
    import seeing as benchmark

    if here.small:
        benchmark.EVERY = 2
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    rounds, device = 1 if here.small else 10, here.device
    rows: list[Row] = []

    def beside(what: str, base: list[float], ours: list[float], bar: float | None = None) -> None:
        rows.append(row(what, base, ours, bar))

    for name in ("fp16",) if here.small else ("bf16", "fp16"):
        found = benchmark.in_torch(name, device).items()
        steps = {n: benchmark.clocked(p, device) for n, p in found}
        base, explained = measure(steps, rounds, 1).values()
        beside(f"explain, torch, {name}: explain / step", base, explained)
        training = benchmark.training_in_torch(name, device)
        base, inside, _ = measure(benchmark.audited_in_torch(training, device), rounds, 1).values()
        beside(f"audit, torch, {name}: step / plain step", base, inside)
        base, _, located = measure(benchmark.seen_in_torch(training, device), rounds, 1).values()
        beside(f"locate, torch, {name}, nothing wrong / step", base, located)
        every, caught_steps = benchmark.EVERY, benchmark.caught_in_torch(name, device)
        pairs = measure(caught_steps, every * (rounds // 5 or 1)).values()
        base, caught = (
            [statistics.mean(each[at : at + every]) for at in range(0, len(each), every)]
            for each in pairs
        )
        beside(f"catch, torch, {name}: step / plain step", base, caught, benchmark.CATCH_BAR)
        programs = benchmark.recorded_in_torch(training, 0, 8, device=device)
        base, *recorded = measure(programs, max(rounds // 3, 1), 1).values()
        for probes, times in zip((0, 8), recorded, strict=True):
            beside(f"record, torch, {name}, {probes} probes: step / plain step", base, times)
    title = "explain, audit, locate, catch and record, compared with the step that they examine"
    return {"machine": machine("torch", device=device), "tables": {title: rows}}
