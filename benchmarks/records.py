"""The newest record of each part and device in benchmarks/results, and its rows.

speed_page.py, cost_table.py and feature_costs.py make their tables of these.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pairing import Row, number

Record = dict[str, Any]
Devices = dict[str, Record]  # by device

# In this order; others follow by name. The words are the headings of benchmarks/results/FIGURES.md.
PARTS = {
    "torch-speed": "PyTorch",
    "jax-speed": "JAX",
    "jax-corpus": "Small programs in JAX",
    "torch-overhead": "The cost of a region in PyTorch",
    "jax-overhead": "The cost of rewriting a program in JAX",
    "contraction": "Ways to write a matrix product in JAX",
    "scaler": "Loss scaling",
    "seeing": "The cost of explain, audit and catch",
    "low-weights": "Weights in 16 bits in PyTorch",
    "low-weights-jax": "Weights in 16 bits in JAX",
    "trainers": "Lightning, accelerate and transformers",
    "trainers-jax": "Keras",
    "policies": "The cost of a policy in PyTorch",
    "gpu-machine": "The machine with the GPU",
    "exactness": "Every op on a GPU",
    "gpu-tests": "Tests on a GPU",
    "gpu-questions": "Measured on a GPU only",
    "fp8": "Products of 8-bit operands",
    "fp8-layers": "Layers in 8 bits",
}
DEVICES = {"cpu": "CPU", "amx": "CPU with AMX", "cuda": "GPU"}
FEW_DEVICES = ("cpu", "cuda")  # of tables that have no room for more

# Rows and lists of older records about what polymp no longer has.
RETIRED = ("*: held*", "*hold_casts*", "Memory of held casts*")


def newest(results: Path) -> dict[str, Devices]:
    """The newest record of each part and device, by part in the order of `PARTS`.

    Raises:
        ValueError: a record is not what its name says.
    """
    found: dict[str, Devices] = {}
    for path in sorted(results.glob("*.json")):  # the name starts with the date
        record = json.loads(path.read_text())
        if "tables" not in record:
            continue  # of another kind
        said = f"{record['date']}-{record['part']}-{record['device']}.json"
        if path.name != said or record["device"] not in DEVICES:
            raise ValueError(f"{path.name} has the record of {said}")
        found.setdefault(record["part"], {})[record["device"]] = _kept(record, path.name)
    order = [*PARTS, *sorted(set(found) - set(PARTS))]
    return {part: _in_order(found[part]) for part in order if part in found}


def _kept(record: Record, file: str) -> Record:
    """A record, with its file's name and without what is retired."""
    tables = {
        title: [r for r in table if not _is_retired(r["what"])]
        for title, table in record["tables"].items()
    }
    lists = {k: v for k, v in record.get("lists", {}).items() if not _is_retired(k)}
    return record | {"file": file, "tables": tables, "lists": lists}


def _is_retired(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in RETIRED)


def _in_order(devices: Devices) -> Devices:
    return {device: devices[device] for device in DEVICES if device in devices}


def with_reasons(parts: dict[str, Devices], reasons: Path) -> dict[str, Devices]:
    """The records, with the reasons of a TOML file in `reasons`.

    Raises:
        ValueError: a reason is for a row that no record has.
    """
    why = tomllib.loads(reasons.read_text()) if reasons.exists() else {}
    for part, devices in why.items():
        for device, said in devices.items():
            record = parts.get(part, {}).get(device, {"tables": {}})
            known = {r.what for r in rows(record)} | set(record.get("unmeasured", ()))
            for name, reason in said.items():
                fits = [what for what in known if fnmatch(what, name)]
                if not fits:
                    raise ValueError(f"{reasons.name}: {part}.{device} has no row {name!r}")
                record["reasons"] = record.get("reasons", {}) | dict.fromkeys(fits, reason)
    return parts


def rows(record: Record, title: str | None = None) -> list[Row]:
    """The rows of a record, or of one of its tables."""
    tables = record["tables"]
    chosen = tables.values() if title is None else [tables.get(title, [])]
    return [Row(**r) for table in chosen for r in table]


def medians(r: Row | None) -> tuple[str, str]:
    """The medians of A (ours) and B (the base), with their unit."""
    if r is None:
        return "", ""
    return f"{number(r.ours)} {r.unit}".strip(), f"{number(r.base)} {r.unit}".strip()


def table(head: list[str], lines: list[list[str]], words: Sequence[str] = ()) -> list[str]:
    """A Markdown table; the first column and those of words to the left, the rest to the right."""
    rule = ["---" if name in (head[0], *words) else "---:" for name in head]
    return [f"| {' | '.join(line)} |" for line in (head, rule, *lines)] + [""]
