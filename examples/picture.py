"""The picture of the training: losses, how far they lie from fp32's, and the scaler's scale.

Runs in, one for each dtype; a PNG out. Nothing here knows torch or jax.
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

Look = dict[str, Any]
INK, SOFT, GRID = "#222222", "#6f7680", "#e8eaed"
# Dtypes that agree draw the same line, so each is narrower than the one that it lies on.
LOOKS: dict[str, Look] = {
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
    base = next((run for run in runs if run.dtype == "fp32"), None)
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
    for panel in panels.values():
        finish(panel, len(runs[0].train_loss))
    figure.savefig(path)


def finish(panel: Axes, steps: int) -> None:
    """Give a panel its x axis, and the look of them all."""
    panel.set_xlim(-0.015 * steps, 1.015 * steps)
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panel.set_xlabel("step", color=SOFT)
    panel.grid(color=GRID)
    panel.set_axisbelow(True)
    panel.tick_params(color=GRID, labelcolor=SOFT)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(GRID)


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


def losses(axes: Axes, run: Run, look: Look) -> list[float]:
    """Draw training as a line and held-out text as dots; returns what is to be seen of them."""
    early = len(run.train_loss) // 25  # cut off: the fall at the start would flatten the rest
    smoothed = smooth(run.train_loss)
    line(axes, smoothed, look)
    points(axes, run.held_out, look)
    seen = [*smoothed[early:], *(loss for step, loss in run.held_out if step >= early)]
    return [loss for loss in seen if math.isfinite(loss)]


def loss_limits(axes: Axes, seen: Sequence[float]) -> None:
    """Let the panel show these losses."""
    least, most = min(seen, default=0.0), max(seen, default=0.0)
    margin = 0.1 * max(most - least, 0.1)
    axes.set_ylim(least - margin, most + margin)


def gaps(axes: Axes, pairs: Sequence[tuple[Run, Run]]) -> None:
    """Draw how far each run's losses lie above those of the other in its pair, in percent."""
    seen = [0.5]
    for run, base in pairs:
        smoothed = list(map(percent_above, smooth(run.train_loss), smooth(base.train_loss)))
        dots = [
            (step, percent_above(loss, other))
            for (step, loss), (_, other) in zip(run.held_out, base.held_out, strict=True)
        ]
        line(axes, smoothed, LOOKS[run.dtype])
        points(axes, dots, LOOKS[run.dtype])
        seen += [abs(gap) for gap in (*smoothed, *(gap for _, gap in dots)) if math.isfinite(gap)]
    axes.set_ylim(-1.15 * max(seen), 1.15 * max(seen))


def scales(axes: Axes, runs: Sequence[Run], looks: Sequence[Look], marks: Sequence[str]) -> None:
    """Draw the loss scale of each run, and an x of its mark's colour after every skipped step."""
    for run, look in zip(runs, looks, strict=True):
        values = range(len(run.scale)), run.scale
        axes.step(*values, where="post", color=look["color"], linewidth=look["linewidth"])
    for run, mark in zip(runs, marks, strict=True):
        after = [run.scale[step] for step in run.skipped]
        axes.plot(run.skipped, after, "x", color=mark, markersize=7, markeredgewidth=1.6, zorder=4)
    positive = [scale for run in runs for scale in run.scale if scale] or [1.0]
    axes.set_yscale("log", base=2)
    axes.set_ylim(min(positive) / 2.5, max(positive) * 2.5)


def line(axes: Axes, values: Sequence[float], look: Look) -> None:
    """Draw a value for each step, from the first."""
    axes.plot(range(1, len(values) + 1), values, color=look["color"], linewidth=look["linewidth"])


def points(axes: Axes, where: Sequence[tuple[int, float]], look: Look) -> None:
    """Draw dots."""
    axes.plot(
        *zip(*where, strict=True),
        "o",
        color=look["color"],
        markersize=look["markersize"],
        markeredgecolor="white",
        markeredgewidth=0.8,
        zorder=3,
    )


def handle(look: Look) -> Line2D:
    """The handle of a line and its dots in a legend."""
    return Line2D([], [], marker="o", markeredgecolor="white", markeredgewidth=0.8, **look)


def title(axes: Axes, text: str, subtitle: str, size: int = 11, lift: int = 0) -> None:
    """Write a title and a line of explanation over a panel, `lift` points above their place."""
    pad = 22 + lift
    axes.set_title(text, loc="left", color=INK, fontsize=size, fontweight="bold", pad=pad)
    axes.annotate(
        subtitle,
        (0, 1),
        (0, 7 + lift),
        xycoords="axes fraction",
        textcoords="offset points",
        color=SOFT,
        parse_math=False,  # a file may have a $ in its name
    )


def listed(names: Sequence[str]) -> str:
    """Names as in a sentence: fp32, bf16 and fp16."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _losses(axes: Axes, runs: Sequence[Run], text: Text, where: str) -> None:
    chance = text.chance
    seen = [chance]
    for run in runs:
        seen += losses(axes, run, LOOKS[run.dtype])
    loss_limits(axes, seen)
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
        [handle(LOOKS[run.dtype]) for run in runs],
        [f"{run.dtype}  {run.loss:.4f}" for run in runs],
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
    title(
        axes,
        f"One language model, trained in {listed([run.dtype for run in runs])}",
        f"{runs[0].parameters:,} parameters, {text.name[:40]}, {where}",
        size=15,
        lift=22,
    )


def _gaps(axes: Axes, runs: Sequence[Run], base: Run) -> None:
    axes.axhline(0, color=LOOKS["fp32"]["color"], linewidth=LOOKS["fp32"]["linewidth"])
    gaps(axes, [(run, base) for run in runs if run is not base])
    title(axes, "Loss above that of fp32", "in percent")


def _scales(axes: Axes, runs: Sequence[Run]) -> None:
    (run,) = (run for run in runs if run.scale)
    scales(axes, [run], [LOOKS[run.dtype] | {"linewidth": 2}], [INK])
    count = len(run.skipped)
    skipped = f"{count} skipped step{'s' * (count != 1)}{', marked x' * bool(count)}"
    title(axes, f"Loss scale of {run.dtype}", skipped)
