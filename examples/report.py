"""What came of the training: a run's figures, the table of all runs, the file of all figures.

Runs in, one for each format; text and JSON out. Nothing here knows torch or jax.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from job import Text
from rich.console import Console
from rich.table import Table

COLUMNS = (
    "loss on held-out text",
    "against fp32",
    "tokens/s",
    "peak memory",
    "steps skipped",
    "final scale",
)


@dataclass
class Run:
    """The training in one format. `scale` stays empty where there is no scaler."""

    format: str
    parameters: int
    train_loss: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)  # steps done, loss
    seconds: list[float] = field(default_factory=list)
    scale: list[float] = field(default_factory=list)  # before the first step and after each
    skipped: list[int] = field(default_factory=list)  # steps, counted from 1
    peak_memory: int = 0

    @property
    def loss(self) -> float:
        """On the held-out text, after the last step."""
        return self.held_out[-1][1]

    def tokens_per_second(self, args: argparse.Namespace) -> float:
        """In the median step, so that a slow start or a busy moment does not count."""
        return args.batch * args.context / sorted(self.seconds)[len(self.seconds) // 2]


def percent_above(value: float, base: float) -> float:
    """How far value lies above base, in percent; NaN where there is no saying."""
    return 100 * (value / base - 1) if base else math.nan


def show(runs: Sequence[Run], text: Text, args: argparse.Namespace, memory: str) -> None:
    """Print the table; `memory` says what its column counts."""
    base = next((run for run in runs if run.format == "fp32"), None)
    console = Console(markup=False, emoji=False)
    console.print(
        f"{runs[0].parameters:,} parameters learn {text.name}, {args.steps:,} times "
        f"{args.batch * args.context:,} bytes. Loss is in nats per byte; knowing only how often "
        f"each byte comes gives {text.chance:.3f}.",
        highlight=False,
    )
    table = Table("format", caption=f"peak memory: {memory}", caption_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for run in runs:
        table.add_row(
            run.format,
            f"{run.loss:.4f}",
            f"{percent_above(run.loss, base.loss):+.2f} %" if base and run is not base else "-",
            f"{run.tokens_per_second(args):,.0f}",
            f"{run.peak_memory / 2**20:,.2f} MiB",
            f"{len(run.skipped):,}",
            _power_of_two(run.scale[-1]) if run.scale else "-",
        )
    console.print(table)


def save(runs: Sequence[Run], text: Text, args: argparse.Namespace, **made_by: str) -> None:
    """Write all figures as JSON, with null for what is not finite."""
    figures = {
        **made_by,
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "text": {
            "name": text.name,
            "train_bytes": len(text.train),
            "held_out_bytes": len(text.held_out),
            "alphabet": text.alphabet,
            "chance": text.chance,
        },
        "runs": [
            {"loss": run.loss, "tokens_per_second": run.tokens_per_second(args), **asdict(run)}
            for run in runs
        ],
    }
    args.json.write_text(json.dumps(_finite(figures), allow_nan=False) + "\n")


def _power_of_two(scale: float) -> str:
    return f"2^{math.log2(scale):g}" if scale else "0"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
