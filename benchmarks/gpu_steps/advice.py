"""The predictions of `polymp doctor`, held to a measurement as advice.py does it."""

from __future__ import annotations

from typing import Any

import advice as benchmark
from pairing import machine

from gpu_steps.worker import Here


def held(here: Here, framework: str) -> dict[str, Any]:
    """The tables of one framework."""
    found = benchmark.held(framework, 2 if here.small else 21, 4.5, here.small)
    found.pop("device")
    where = machine(framework, device=here.device)
    return {"machine": where, "notes": list(benchmark.NOTES), **found}
