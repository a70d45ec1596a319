"""The results of a training: a run's figures, the table of all runs, the file of all figures.

Runs in, one for each dtype; text and JSON out, and the JSON in again. Nothing here knows torch or
jax.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from job import Text
from rich.console import Console
from rich.table import Table

COLUMNS = (
    "loss",
    "against fp32",
    "tokens per s",
    "saved, MiB",
    "peak, MiB",
    "steps skipped",
    "final scale",
)
SPEED = "tokens per s: in the median step, so a first step that compiles does not count"
SAVED = "saved: what a forward pass keeps for backward, besides the parameters"


@dataclass
class Run:
    """The training in one dtype. `scale` stays empty where there is no scaler."""

    dtype: str
    parameters: int
    train_loss: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)  # steps done, loss
    seconds: list[float] = field(default_factory=list)
    scale: list[float] = field(default_factory=list)  # before the first step and after each
    skipped: list[int] = field(default_factory=list)  # steps, counted from 1
    saved: int = 0  # bytes that a forward pass keeps for backward, besides the parameters
    peak_memory: int = 0

    @property
    def loss(self) -> float:
        """On the held-out text, after the last step."""
        return self.held_out[-1][1]

    def tokens_per_second(self, args: argparse.Namespace) -> float:
        """In the median step, so that a slow start or a busy moment does not count."""
        return args.batch * args.context / sorted(self.seconds)[len(self.seconds) // 2]


class Figures(NamedTuple):
    """The figures that a training example saved, read back.

    `made_by` has the framework, the device, and the meaning of the memory column; `text` has the
    text's name, train_bytes, held_out_bytes, alphabet and chance.
    """

    made_by: dict[str, str]
    args: argparse.Namespace
    text: argparse.Namespace
    runs: list[Run]


def percent_above(value: float, base: float) -> float:
    """How far value lies above base, in percent; NaN if base is 0."""
    return 100 * (value / base - 1) if base else math.nan


def show(runs: Sequence[Run], text: Text, args: argparse.Namespace, memory: str) -> None:
    """Print the table; `memory` explains its memory column."""
    base = next((run for run in runs if run.dtype == "fp32"), None)
    console = Console(markup=False, emoji=False)
    console.print(
        f"{runs[0].parameters:,} parameters learn {text.name}, {args.steps:,} times "
        f"{args.batch * args.context:,} bytes. Loss is in nats per byte; knowing only how often "
        f"each byte comes gives {text.chance:.3f}.",
        highlight=False,
    )
    lines = ("loss: on held-out text, after the last step", SPEED, SAVED, f"peak: {memory}")
    table = Table("dtype", caption="\n".join(lines), caption_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for run in runs:
        table.add_row(
            run.dtype,
            f"{run.loss:.4f}",
            percent(run, base),
            f"{run.tokens_per_second(args):,.0f}",
            f"{run.saved / 2**20:,.2f}",
            f"{run.peak_memory / 2**20:,.2f}",
            f"{len(run.skipped):,}",
            last_scale(run),
        )
    console.print(table)
    for line in gains(runs, args):
        console.print(line, highlight=False)


def gains(runs: Sequence[Run], args: argparse.Namespace) -> list[str]:
    """How the speed and the memory of each lower dtype compare with those of fp32."""
    base = next((run for run in runs if run.dtype == "fp32"), None)
    if base is None:
        return []
    return [
        f"{run.dtype}: {run.tokens_per_second(args) / base.tokens_per_second(args):.2f} times the "
        f"tokens per s of fp32, {run.saved / base.saved:.2f} times the bytes saved for backward"
        for run in runs
        if run is not base
    ]


def percent(run: Run, base: Run | None) -> str:
    """How far a run's loss lies above the base's, for a table."""
    return f"{percent_above(run.loss, base.loss):+z.2f} %" if base and run is not base else "-"


def last_scale(run: Run) -> str:
    """The scale after the last step as a power of two, for a table."""
    scale = run.scale[-1] if run.scale else None
    return "-" if scale is None else f"2^{math.log2(scale):g}" if scale else "0"


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


def load(path: Path) -> Figures:
    """The figures in a file that `save` wrote, with NaN for null.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else.
    """
    try:
        figures = json.loads(path.read_text())
        made_by = {name: figures[name] for name in ("framework", "device", "memory")}
        settings, text = (argparse.Namespace(**figures[name]) for name in ("settings", "text"))
        return Figures(made_by, settings, text, [_run(saved) for saved in figures["runs"]])
    except (KeyError, TypeError) as error:
        raise ValueError(f"no figures: {error!r}") from None


def _run(saved: dict[str, Any]) -> Run:
    run = Run(**{part.name: saved[part.name] for part in fields(Run)})
    run.train_loss = [_number(loss) for loss in run.train_loss]
    run.held_out = [(step, _number(loss)) for step, loss in run.held_out]
    return run


def _number(loss: float | None) -> float:
    return math.nan if loss is None else loss


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
