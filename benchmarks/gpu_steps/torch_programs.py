"""Torch's workloads, overhead and scalers on a GPU, as torch_speed.py and others measure them."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import torch_speed
from pairing import machine
from torch_speed import PLANS, Bench, once_a_way, unmeasured
from ways_torch import COMPILED, GRAPHED
from workloads_torch import LARGE, SMALL

from gpu_steps.worker import Here


@cache  # its processes live from step to step
def _bench(here: Here) -> Bench:
    rounds = 2 if here.small else 12
    return Bench(here.device, SMALL if here.small else LARGE, rounds, (1,), sys.executable, "")


def speed(here: Here, workload: str, kind: str) -> dict[str, Any]:
    """One workload, in all ways: "eager", compiled by "inductor", or with "reduce-overhead"."""
    bench, plan = _bench(here), PLANS[workload]
    bench.tables, bench.missing, bench.host_sync = {}, {}, {}
    if here.small:  # a process for each way takes seconds to start
        bench.eager(workload, replace(plan, ways=()), (torch_speed.BASE, "polymp"))
    elif kind == "eager":
        bench.eager(workload, plan)
    else:
        bench.compiled(workload, plan, COMPILED if kind == "inductor" else GRAPHED)
    where = machine("torch", "triton", device=here.device)
    for there in bench.versions.values():
        where["versions"] = there | where["versions"]
    return {
        "machine": where,
        "size": asdict(bench.size),
        "tables": bench.tables,
        "host_sync": bench.host_sync,
        "missing": once_a_way(bench.missing),
        "unmeasured": unmeasured(bench) if kind == "eager" else {},
        "notes": [note.format(**asdict(bench.size)) for note in torch_speed.NOTES],
    }


def overhead(here: Here) -> dict[str, Any]:
    """Costs of a region, of ops in it and of a whole step, beside torch.amp."""
    import torch_overhead

    rows = torch_overhead.rows(here.device, 2 if here.small else 12, here.small)
    return {
        "machine": machine("torch", device=here.device),
        "tables": {torch_overhead.TITLE: rows},
    }


def scaler(here: Here) -> dict[str, Any]:
    """Host time of the scaler, beside torch.amp's, by optimizer."""
    import scaler as benchmark

    count, rounds = (4, 3) if here.small else (300, 60)
    rows = list(benchmark.on_torch(here.device, count, rounds))
    return {
        "machine": machine("torch", device=here.device),
        "tables": {benchmark.torch_title(count): rows},
    }


def fp8_layers(here: Here) -> dict[str, Any]:
    """The block of a Llama in 8 bits, compiled, beside torchao's layers and bfloat16."""
    import fp8

    size, rounds = (fp8.SMALL, 2) if here.small else (fp8.LARGE, 12)
    found = fp8.compiled(here.device, size, rounds)
    return {"machine": machine("torch", "torchao", "triton", device=here.device), **found}
