"""Makes the table of docs/speed.md, of the newest records in benchmarks/results.

A row is a feature, and the range of its ratios over the workloads that were measured. `make bench`
and `make gpu` run this after speed_page.py; a test holds the page to the records.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

import records
from pairing import RESULTS
from records import DEVICES, FEW_DEVICES, Devices, newest

PAGE = Path(__file__).parent.parent / "docs" / "speed.md"
BEGIN, END = "<!-- costs: made by benchmarks/feature_costs.py -->", "<!-- end of costs -->"


class Feature(NamedTuple):
    """A row of the table.

    Attributes:
        text: the feature, and when it was used.
        beside: the program that it is compared with.
        part: of the records.
        rows: an expression that the names of its rows match as a whole.
    """

    text: str
    beside: str
    part: str
    rows: str


_SERVED = "mlp [0-9]+|decode|convnet"  # no weight changes

_TRAINED = "train|train deep|convnet train|accumulate|accumulate short"
_JAX = "mlp|train|train scanned|accumulate|convnet"

FEATURES = (
    Feature("`autocast` in PyTorch, a training step", "torch.autocast", "torch-speed",
            f"({_TRAINED}): polymp / torch.autocast"),
    Feature("the same step in float32", "torch.autocast", "torch-speed",
            f"({_TRAINED}): fp32 / torch.autocast"),
    Feature("`autocast` in PyTorch, inference", "torch.autocast", "torch-speed",
            f"({_SERVED}): polymp / torch.autocast"),
    Feature("entering and leaving a region", "torch.autocast", "torch-overhead",
            "region: enter and leave"),
    Feature("`GradScaler` in PyTorch, its own work", "torch.amp", "scaler",
            "(SGD|AdamW), (fused|foreach) / torch.amp"),
    Feature("`autocast` in JAX, a training step", "float32", "jax-speed",
            f"({_JAX}): autocast / float32"),
    Feature("the same, cast by hand", "float32", "jax-speed", f"({_JAX}): by hand / float32"),
    Feature("`autocast` in JAX, 77 small programs, median", "float32", "jax-corpus",
            "median of 77 programs: autocast / float32"),
    Feature("`freeze` in PyTorch, inference", "torch.autocast", "torch-speed",
            f"({_SERVED}): frozen / torch.autocast"),
    Feature("`freeze` in PyTorch, inference, peak memory", "torch.autocast", "torch-speed",
            f"peak memory, ({_SERVED}): frozen / torch.autocast"),
    Feature("`freeze` in PyTorch, a LoRA step on a frozen base", "torch.autocast", "torch-speed",
            "lora( short)?: frozen / torch.autocast"),
    Feature("`freeze` in JAX, decoding", "autocast", "jax-speed",
            "decode[ 0-9]*: frozen / autocast"),
    Feature("`explain`, PyTorch", "the same step", "seeing", "explain, torch, .*: explain / step"),
    Feature("`explain`, JAX", "`jax.make_jaxpr`", "seeing", "explain, JAX, .*"),
    Feature("`audit`, PyTorch, a step", "the same step", "seeing",
            "audit, torch, .*: step / plain step"),
    Feature("`audit`, JAX, a call", "the same step", "seeing",
            "audit, JAX, .*: call / plain step"),
    Feature("`record` without probes, PyTorch, a step", "the same step", "seeing",
            "record, torch, .*no probes / step"),
    Feature("`record` without probes, JAX, a call", "the same step", "seeing",
            "record, JAX, .*no probes / step"),
    Feature("`record` with 8 probes, PyTorch, a step", "the same step", "seeing",
            "record, torch, .*8 probes / step"),
    Feature("`record` with 8 probes, JAX, a call", "the same step", "seeing",
            "record, JAX, .*8 probes / step"),
    Feature("`catch`, PyTorch, a step", "the same step", "seeing",
            "catch, torch, .*: step / plain step"),
    Feature("`catch`, JAX, a step", "the same step", "seeing",
            "catch, JAX, .*: step / plain step"),
)  # fmt: skip


def table(parts: dict[str, Devices]) -> str:
    """The table, as Markdown, with a column for each device."""
    head = ["feature", "compared with", *(DEVICES[d] for d in FEW_DEVICES)]
    lines = []
    for feature in FEATURES:
        cells = [
            _range(feature, parts.get(feature.part, {}).get(device, {"tables": {}}))
            for device in FEW_DEVICES
        ]
        lines.append([feature.text, feature.beside, *cells])
    return "\n".join(records.table(head, lines, ["compared with"])).strip()


def _range(feature: Feature, record: dict[str, object]) -> str:
    ratios = [r.ratio for r in records.rows(record) if re.fullmatch(feature.rows, r.what)]
    if not ratios:
        return "not measured"
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return low if low == high else f"{low} to {high}"


def with_costs(page: str, parts: dict[str, Devices]) -> str:
    """docs/speed.md with its table made again.

    Raises:
        ValueError: it does not have both marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"docs/speed.md has to have the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{table(parts)}\n\n{END}{after}"


def write() -> int:
    """Write the page."""
    text = with_costs(PAGE.read_text(encoding="utf-8"), newest(RESULTS))
    PAGE.write_text(text, encoding="utf-8")
    print(f"saved {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(write())
