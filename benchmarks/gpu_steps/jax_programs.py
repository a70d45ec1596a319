"""JAX's workloads on a GPU, as jax_speed.py and contraction.py measure them."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import cache
from typing import Any

import contraction as forms
import jax
import jax_speed
import ways_jax
from jax_speed import Bench
from pairing import machine
from workloads_jax import LARGE, SMALL

from gpu_steps.worker import Here


@cache
def _bench(here: Here) -> Bench:
    size = SMALL if here.small else LARGE
    return Bench(size, 2 if here.small else 7, time.perf_counter, bars=False)


def speed(here: Here, workload: str) -> dict[str, Any]:
    """One workload, in all ways; its casts, fusions and memory."""
    bench = _bench(here)
    bench.tables, bench.missing, bench.facts = {}, {}, {}
    bench.run(workload, 2 if here.small else None)
    jax.clear_caches()  # and the memory of what was compiled
    packages = ("jax", "jaxlib", "optax", *dict.fromkeys(ways_jax.PACKAGES.values()))
    rows = []
    for way, known in bench.facts.get(workload, {}).items():
        counts = {name: value for name, value in asdict(known).items() if name != "contractions"}
        run_as = ", ".join(f"{n} {of}" for of, n in known.contractions.items())
        rows.append({"workload": workload, "way": way, **counts, "contractions": run_as})
    return {
        "machine": machine(*packages, device=here.device),
        "size": asdict(bench.size),
        "tables": bench.tables,
        "lists": {"The programs that XLA compiled": rows},
        "missing": bench.missing,
        "notes": list(jax_speed.NOTES),
    }


def contraction(here: Here) -> dict[str, Any]:
    """Every form of the contraction, in every part of every shape."""
    bench = forms.Bench(2 if here.small else 7)
    shapes = forms.shapes(1 / 64 if here.small else 2)
    chosen = dict(list(shapes.items())[:1]) if here.small else shapes
    for name, shape in chosen.items():
        for part in forms.PARTS:
            bench.run(name, shape, part)
    return {"machine": machine("jax", "jaxlib", device=here.device), **bench.record()}
