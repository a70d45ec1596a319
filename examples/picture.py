"""The picture of the training: losses, how far they lie from fp32's, and the scaler's scale.

Runs in, one for each format; a PNG out. Nothing here knows torch or jax.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from job import Text
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from report import Run, percent_above

INK, SOFT, GRID = "#222222", "#6f7680", "#e8eaed"
# Formats that agree draw the same line, so each is narrower than the one that it lies on.
LOOKS: dict[str, dict[str, Any]] = {
    "fp32": {"color": "#b4bac2", "linewidth": 6.0, "markersize": 13},
    "bf16": {"color": "#0072b2", "linewidth": 2.8, "markersize": 8.5},
    "fp16": {"color": "#f28e2b", "linewidth": 1.0, "markersize": 4.5},
}


def draw(path: Path, runs: Sequence[Run], text: Text, where: str) -> None:
    """Save the picture.

    Args:
        path: of the PNG.
        runs: at least one, all of as many steps.
        text: what was learnt.
        where: framework and device.
    """
    base = next((run for run in runs if run.format == "fp32"), None)
    below = ["gap"] * bool(base and len(runs) > 1) + ["scale"] * any(run.scale for run in runs)
    rows = [["loss"] * max(1, len(below)), *([below] if below else [])]
    figure = Figure(figsize=(10, 7.6 if below else 5), dpi=150, layout="constrained")
    panels = figure.subplot_mosaic(rows, height_ratios=[1.8, 1][: len(rows)])
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12)
    _losses(panels["loss"], runs, text, where)
    if base and "gap" in panels:
        _gaps(panels["gap"], runs, base)
    if "scale" in panels:
        _scales(panels["scale"], runs)
    steps = len(runs[0].train_loss)
    for panel in panels.values():
        panel.set_xlim(-0.015 * steps, 1.015 * steps)
        panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        panel.set_xlabel("step", color=SOFT)
        panel.grid(color=GRID)
        panel.set_axisbelow(True)
        panel.tick_params(color=GRID, labelcolor=SOFT)
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color(GRID)
    figure.savefig(path)


def smooth(losses: Sequence[float]) -> list[float]:
    """A running mean that forgets over a fortieth of the run; NaN where a loss is not finite."""
    rate = min(1.0, 40 / len(losses))
    total = weight = 0.0
    means = []
    for loss in losses:
        if math.isfinite(loss):
            total += rate * (loss - total)
            weight += rate * (1 - weight)
        means.append(total / weight if math.isfinite(loss) else math.nan)
    return means


def _losses(axes: Axes, runs: Sequence[Run], text: Text, where: str) -> None:
    chance = text.chance
    early = len(runs[0].train_loss) // 25  # cut off: the fall at the start would flatten the rest
    seen = [chance]
    for run in runs:
        line = smooth(run.train_loss)
        _line(axes, run, line)
        _points(axes, run, run.held_out)
        seen += [*line[early:], *(loss for step, loss in run.held_out if step >= early)]
    seen = [loss for loss in seen if math.isfinite(loss)]
    margin = 0.1 * max(max(seen) - min(seen), 0.1)
    axes.set_ylim(min(seen) - margin, max(seen) + margin)
    axes.axhline(chance, color=SOFT, linewidth=1, linestyle=(0, (5, 3)))
    axes.annotate(
        f"byte frequencies alone: {chance:.3f}",
        (1, chance),
        (-4, 6),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        horizontalalignment="right",
        color=SOFT,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )
    axes.legend(
        [_handle(run) for run in runs],
        [f"{run.format}  {run.loss:.4f}" for run in runs],
        ncols=len(runs),
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.2,
        borderpad=0.2,
        frameon=False,
        labelcolor=INK,
    )
    axes.annotate(
        "lines: training, running mean; dots and figures: held-out text",
        (1, 1),
        (0, 7),
        xycoords="axes fraction",
        textcoords="offset points",
        horizontalalignment="right",
        color=SOFT,
    )
    axes.set_ylabel("loss, nats per byte", color=SOFT)
    names = [run.format for run in runs]
    title = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    about = f"{runs[0].parameters:,} parameters, {text.name[:40]}, {where}"
    _title(axes, f"One language model, trained in {title}", about, size=15, lift=22)


def _gaps(axes: Axes, runs: Sequence[Run], base: Run) -> None:
    seen = [0.5]
    axes.axhline(0, color=LOOKS["fp32"]["color"], linewidth=LOOKS["fp32"]["linewidth"])
    for run in runs:
        if run is base:
            continue
        line = list(map(percent_above, smooth(run.train_loss), smooth(base.train_loss)))
        points = [
            (step, percent_above(loss, other))
            for (step, loss), (_, other) in zip(run.held_out, base.held_out, strict=True)
        ]
        _line(axes, run, line)
        _points(axes, run, points)
        seen += [abs(gap) for gap in (*line, *(gap for _, gap in points)) if math.isfinite(gap)]
    axes.set_ylim(-1.15 * max(seen), 1.15 * max(seen))
    _title(axes, "Loss above that of fp32", "in percent")


def _scales(axes: Axes, runs: Sequence[Run]) -> None:
    (run,) = (run for run in runs if run.scale)
    axes.step(
        range(len(run.scale)),
        run.scale,
        where="post",
        color=LOOKS[run.format]["color"],
        linewidth=2,
    )
    after = [run.scale[step] for step in run.skipped]
    axes.plot(run.skipped, after, "x", color=INK, markersize=7, markeredgewidth=1.6, zorder=4)
    count = len(run.skipped)
    skipped = f"{count} skipped step{'s' * (count != 1)}{', marked x' * bool(count)}"
    _title(axes, f"Loss scale of {run.format}", skipped)
    positive = [scale for scale in run.scale if scale] or [1.0]
    axes.set_yscale("log", base=2)
    axes.set_ylim(min(positive) / 2.5, max(positive) * 2.5)


def _line(axes: Axes, run: Run, values: Sequence[float]) -> None:
    look = LOOKS[run.format]
    axes.plot(range(1, len(values) + 1), values, color=look["color"], linewidth=look["linewidth"])


def _points(axes: Axes, run: Run, points: Sequence[tuple[int, float]]) -> None:
    look = LOOKS[run.format]
    axes.plot(
        *zip(*points, strict=True),
        "o",
        color=look["color"],
        markersize=look["markersize"],
        markeredgecolor="white",
        markeredgewidth=0.8,
        zorder=3,
    )


def _handle(run: Run) -> Line2D:
    look = LOOKS[run.format]
    return Line2D([], [], marker="o", markeredgecolor="white", markeredgewidth=0.8, **look)


def _title(axes: Axes, title: str, subtitle: str, size: int = 11, lift: int = 0) -> None:
    pad = 22 + lift
    axes.set_title(title, loc="left", color=INK, fontsize=size, fontweight="bold", pad=pad)
    axes.annotate(
        subtitle,
        (0, 1),
        (0, 7 + lift),
        xycoords="axes fraction",
        textcoords="offset points",
        color=SOFT,
        parse_math=False,  # a file may have a $ in its name
    )
