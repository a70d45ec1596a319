"""Draws the pictures of the documentation, each for light and for dark pages.

    python docs/pictures/draw.py

formats: the ranges of the float formats, of `polymp.dtypes`. speed, low-weights: rows of the newest
records in benchmarks/results. The others: the walks through the code of walks.toml. In the
repository are the files that this makes; a test compares them.
"""

from __future__ import annotations

import io
import json
import math
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from polymp.dtypes import FORMATS

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"

THEMES = {
    "light": {"ink": "#1f2430", "soft": "#8a93a5", "main": "#3f51b5", "other": "#e0872f"},
    "dark": {"ink": "#e6e8ee", "soft": "#8a93a5", "main": "#8c9eff", "other": "#ffb066"},
}
WIDTH = 4.6  # inches; what fits a phone with letters of a readable size
STEP = 0.56  # inches, of a step of a walk
SHOWN = ("float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn")

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Colors = dict[str, str]


def formats(colors: Colors) -> Figure:
    """One bar a format, from its smallest to its largest number; pale where digits are lost."""
    figure, axes = _figure(2.5, left=0.235, bottom=0.2, top=0.97)
    for y, name in enumerate(reversed(SHOWN)):
        format = FORMATS[name]
        low, normal, high = map(
            math.log2, (format.smallest_subnormal, format.smallest_normal, format.max)
        )
        axes.barh(y, high - normal, left=normal, height=0.5, color=colors["main"])
        axes.barh(y, normal - low, left=low, height=0.5, color=colors["main"], alpha=0.4)
        digits = f"{format.mantissa + 1} bits"
        axes.annotate(
            digits, (high, y), (4, 0), textcoords="offset points", va="center", color=colors["ink"]
        )
    axes.set_yticks(range(len(SHOWN)), [*reversed(SHOWN)])
    axes.set_xlim(-155, 172)
    ticks = (-126, -64, -14, 16, 64, 128)
    axes.set_xticks(ticks, [f"2{str(t).translate(RAISED)}" for t in ticks])
    axes.set_xlabel("magnitude (pale: subnormal); beside it, the precision")
    return _styled(figure, axes, colors)


# By framework, what is 1: a label, the row that has polymp's time, and the row that has float32's.
SPEED = {
    ("torch-speed", "torch.autocast"): (
        ("MLP, batch 1: freeze", "mlp 1: frozen", "mlp 1: fp32"),
        ("one token after another: freeze", "decode: frozen", "decode: fp32"),
        ("LoRA, 32 tokens: freeze", "lora short: frozen", "lora short: fp32"),
        ("convnet, one picture: freeze", "convnet: frozen", "convnet: fp32"),
        ("language model, train: autocast", "train: polymp", "train: fp32"),
    ),
    ("jax-speed", "by hand"): (
        ("one token after another: freeze", "decode: frozen", "decode: float32"),
        ("transformer, train: autocast", "train: autocast", "train: float32"),
    ),
}


def speed(colors: Colors) -> Figure:
    """Time of workloads, in units of what the framework's own way takes."""
    figure, axes = _figure(5.2, left=0.04, right=0.95, bottom=0.11, top=0.97)
    y, names = 0.0, {"torch-speed": "PyTorch", "jax-speed": "JAX"}
    for (part, base), rows in SPEED.items():
        times = _times(part)
        y -= 0.5
        axes.text(0, y + 0.15, f"{names[part]}: {base} is 1", color=colors["ink"], weight="bold")
        for label, ours, exact in rows:
            y -= 1
            one = times[f"{ours} / {base}"]["base"]
            ratio = times[f"{ours} / {base}"]["ours"] / one
            key = f"{exact} / {base}"
            other = times[key]["ours"] if key in times else _base(times, ours, exact)
            axes.text(0, y + 0.3, label, color=colors["ink"], va="bottom")
            axes.barh(y, ratio, height=0.42, color=colors["main"])
            axes.plot(other / one, y, "o", color=colors["other"], markersize=6)
            where = max(ratio, other / one) if abs(ratio - other / one) < 0.3 else ratio
            axes.annotate(
                f"{ratio:.2f}", (where, y), (6, 0), textcoords="offset points", va="center",
                color=colors["ink"],
            )  # fmt: skip
        y -= 0.5
    axes.axvline(1, color=colors["soft"], linewidth=1, zorder=0)
    axes.set_ylim(y + 0.1, 0.1)
    axes.set_xlim(0, 2.0)
    axes.set_yticks([])
    axes.set_xticks((0, 0.5, 1, 1.5, 2), ("0", "0.5", "1", "1.5", "2"))
    axes.set_xlabel("time; bar: polymp, dot: float32")
    return _styled(figure, axes, colors)


def _times(part: str) -> dict[str, dict[str, Any]]:
    """The rows of the newest record of a part, by what they compare."""
    path = max(RESULTS.glob(f"*-{part}-cpu.json"))  # the name starts with the date
    tables = json.loads(path.read_text(encoding="utf-8"))["tables"]
    return {row["what"]: row for rows in tables.values() for row in rows}


def _base(times: dict[str, dict[str, Any]], ours: str, exact: str) -> float:
    """Of a record that has no row of its own for float32: the time beside ours."""
    return float(times[f"{ours} / {exact.partition(': ')[2]}"]["base"])


WINDOW = 50  # steps of a point


def low_weights(colors: Colors) -> Figure:
    """Training loss over steps, and how far it is above that of float32 weights."""
    curves = _curves()
    base = curves["float32"]
    steps = [WINDOW * (i + 1) for i in range(len(base))]
    figure = Figure(figsize=(WIDTH, 4.4))
    figure.subplots_adjust(left=0.12, right=0.97, bottom=0.11, top=0.98, hspace=0.16)
    upper, lower = figure.subplots(2, sharex=True)
    for name, losses in curves.items():
        above = [100 * (a / b - 1) for a, b in zip(losses, base, strict=True)]
        plain = name in ("float32", "naive")
        color = colors["other" if name == "naive" else "soft" if plain else "main"]
        style = {"color": color, "linewidth": 2.4 if name == "float32" else 1.2}
        upper.plot(steps, losses, **style)
        lower.plot(steps, above, **style)
        if name == "naive":
            note = {"textcoords": "offset points", "color": color, "ha": "right"}
            lower.annotate("plain bfloat16", (steps[-1], above[-1]), (0, 6), **note)
    lower.annotate(
        "master, split, stochastic", (steps[-1], 0), (0, 8), color=colors["main"],
        textcoords="offset points", ha="right",
    )  # fmt: skip
    upper.set_ylabel("loss, nats", color=colors["ink"])
    lower.set_ylabel("above float32, %", color=colors["ink"])
    lower.set_xlabel("step")
    for axes in (upper, lower):
        _styled(figure, axes, colors)
    return figure


def _curves() -> dict[str, list[float]]:
    """The losses of the newest record of low weights, by what is trained."""
    path = max(RESULTS.glob("*-low-weights-jax-cpu.json"))
    curves: dict[str, list[float]] = json.loads(path.read_text(encoding="utf-8"))["curves"]
    return curves


def walks() -> dict[str, list[tuple[str, str]]]:
    """The steps of each walk by its name: what happens, and the file that does it."""
    data = tomllib.loads((HERE / "walks.toml").read_text(encoding="utf-8"))
    return {name: [(text, file) for text, file in walk["steps"]] for name, walk in data.items()}


def walk(steps: list[tuple[str, str]], colors: Colors) -> Figure:
    """A box for each step, from top to bottom; pale if none of our files does it."""
    figure, axes = _figure(STEP * len(steps), left=0.01, right=0.99, bottom=0.01, top=0.99)
    for at, (text, file) in enumerate(steps):
        y, edge = -float(at), colors["main"] if file else colors["soft"]
        box = FancyBboxPatch(
            (0.02, y - 0.34), 0.96, 0.68, boxstyle="round,pad=0,rounding_size=0.02",
            mutation_aspect=WIDTH / STEP, linewidth=1.2, edgecolor=edge, facecolor="none",
        )  # fmt: skip
        axes.add_patch(box)
        shift = 0.13 if file else 0.0
        middle = {"ha": "center", "va": "center"}
        axes.text(0.5, y + shift, text, color=colors["ink"], weight="bold", **middle)
        axes.text(0.5, y - 0.17, file, color=colors["ink"], fontsize=8, **middle)
        if at:
            arrow = {"arrowstyle": "->", "color": colors["soft"], "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (0.5, y + 0.34), (0.5, y + 0.66), arrowprops=arrow)
    axes.set_xlim(0, 1)
    axes.set_ylim(-len(steps) + 0.5, 0.5)
    axes.set_axis_off()
    return figure


def _figure(height: float, **margins: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height))
    figure.subplots_adjust(**({"right": 0.98} | margins))
    return figure, figure.add_subplot()


def _styled(figure: Figure, axes: Axes, colors: Colors) -> Figure:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(colors["soft"])
    axes.tick_params(colors=colors["ink"], length=3)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.label.set_color(colors["ink"])
    return figure


def pictures() -> Iterator[tuple[str, str]]:
    """Name and text of every file."""
    style = {"svg.hashsalt": "polymp", "svg.fonttype": "none", "font.size": 9}
    drawings: dict[str, Callable[[Colors], Figure]] = {
        "formats": formats, "speed": speed, "low-weights": low_weights,
    }  # fmt: skip
    drawings |= {name: partial(walk, steps) for name, steps in walks().items()}
    with mpl.rc_context(style):
        for name, draw in drawings.items():
            for theme, colors in THEMES.items():
                out = io.StringIO()
                draw(colors).savefig(out, format="svg", transparent=True, metadata={"Date": None})
                text = "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
                yield f"{name}-{theme}.svg", text


def main() -> int:
    """Write the files."""
    for name, text in pictures():
        (HERE / name).write_text(text, encoding="utf-8")
        print(f"saved {HERE / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
