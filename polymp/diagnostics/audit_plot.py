"""An audit as a picture: the magnitudes of every module beside the ranges of the dtypes.

A row for a module, with its results in the left panel and its gradients in the right one. Above
both, each dtype is a bar from its smallest number to its largest, hatched where it is subnormal;
its range goes on through the rows as a shade. matplotlib is imported here only.
"""

import math
import typing
from collections.abc import Hashable, Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, cast

from polymp import progress, text_table
from polymp.diagnostics.audit_records import AuditRecord, split
from polymp.diagnostics.call_record import BACKWARD, FORWARD
from polymp.diagnostics.magnitudes import NARROW, Magnitudes, joined
from polymp.diagnostics.page import replacing
from polymp.diagnostics.tables import OUTSIDE, RowKind, arranged
from polymp.dtypes import FORMATS
from polymp.dtypes import name as dtype_name
from polymp.errors import escaped

if typing.TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SUFFIXES = (".png", ".svg", ".pdf")

# Inches: of a row, a dtype's bar, the panels, what stands right of a row, and the margins.
_ROW, _BAR, _PANEL, _GUTTER = 0.2, 0.22, 4.3, 0.75
_TOP, _BOTTOM, _EDGE, _GAP = 0.62, 0.55, 0.15, 0.06
_LONGEST = 40  # letters of a row's name
_POINTS = 8.5  # of the font


class Look(NamedTuple):
    """Colours; those of the dtypes differ for any kind of colour vision.

    Source:
        Okabe and Ito, "Color universal design", 2008.
    """

    page: str
    ink: str
    soft: str
    line: str
    band: str
    alarm: str
    dtypes: dict[str, str]


_LIGHT = Look(
    "#ffffff", "#1c2024", "#5f656c", "#d9dde2", "#4a5058", "#b34700",
    dict(zip(NARROW, ("#0072b2", "#007a5a", "#a9640a", "#a8447f"), strict=True)),
)  # fmt: skip

_DARK = Look(
    "#14171a", "#e7e9ec", "#a3aab3", "#343a42", "#c3cad2", "#ff9d5c",
    dict(zip(NARROW, ("#56b4e9", "#2fbf94", "#e69f00", "#dd88b8"), strict=True)),
)  # fmt: skip


def audit_figure(
    audit: AuditRecord,
    path: "str | PathLike[str] | None" = None,
    dtype: object = None,
    dark: bool = False,
    fold: bool = True,
) -> "Figure":
    """Draw an audit; see `Audit.plot`, which raises the same."""
    dtypes = NARROW if dtype is None else (dtype_name(dtype, NARROW, "plot(): dtype"),)
    suffix = "" if path is None else Path(path).suffix.lower()
    if path is not None and suffix not in _SUFFIXES:
        raise ValueError(f"path={str(path)!r} does not end in one of {', '.join(_SUFFIXES)}.")
    rows = layers(audit, fold)
    if not rows:
        raise ValueError("nothing was measured: run a step in the audit's block first.")
    try:
        from matplotlib import rc_context
    except ImportError:
        raise ImportError("Audit.plot needs matplotlib: pip install matplotlib") from None
    look = _DARK if dark else _LIGHT
    style: dict[str, Any] = {
        "font.family": "sans-serif",
        "font.size": _POINTS,
        "text.usetex": False,
        "text.color": look.ink,
        "hatch.linewidth": 0.7,
        "svg.fonttype": "none",
        "svg.hashsalt": "polymp",
    }
    with rc_context(cast(Any, style)), progress.line("plot", 2 * len(rows), "row") as line:
        figure = _figure(audit, rows, dtypes, look, line)
        if path is not None:
            line.stage("writing the file", long=False)
            undated = {"Date": None} if suffix == ".svg" else None
            with replacing(path) as beside:
                figure.savefig(beside, dpi=150, facecolor=look.page, metadata=undated)
    return figure


class Layer(NamedTuple):
    """A row: a module with the magnitudes of its results and of its gradients, if it has any."""

    module: str  # its path; of equal layers, as in tables: "layers.*.attn"
    forward: Magnitudes | None
    gradient: Magnitudes | None
    ops: tuple[str, ...]  # names of its ops and parameters; equal layers have the same
    modules: int = 1

    @property
    def sides(self) -> tuple[Magnitudes | None, Magnitudes | None]:
        return self.forward, self.gradient


def layers(audit: AuditRecord, fold: bool = True) -> list[Layer]:
    """A row for every module, equal layers as one; gradients are of parameters and of ops."""
    parts: dict[str, list[tuple[str, str, Magnitudes]]] = {}
    for m in audit.results:
        if m.direction in (FORWARD, BACKWARD):
            part = m.direction, f"{m.direction} {m.op}", m.magnitudes
            parts.setdefault(m.module, []).append(part)
    ran = {*parts}
    for m in audit.gradients:
        owner, name = split(m.module)
        path = owner
        while path and path not in ran:  # the innermost module that a name begins with
            path = path.rpartition(".")[0]
        parts.setdefault(path or owner, []).append((BACKWARD, name, m.magnitudes))

    def row(module: str) -> Layer:
        forward, gradient = (
            _union(m for direction, _, m in parts[module] if direction == side)
            for side in (FORWARD, BACKWARD)
        )
        names = sorted(name for _, name, _ in parts[module])
        return Layer(module, forward, gradient, tuple(names))

    rows = sorted(map(row, parts), key=lambda row: row.forward is None)
    folded, _, _ = arranged(rows, _LAYERS, fold=fold)
    return [one.rows[0]._replace(module=one.module, modules=one.layers) for one in folded]


def _union(sides: Iterable[Magnitudes | None]) -> Magnitudes | None:
    measured = [m for m in sides if m is not None]
    return joined(measured) if measured else None


def _alike(row: Layer) -> Hashable:
    broken = tuple(m and (m.inf, m.nan) for m in row.sides)
    return row.forward is None, row.gradient is None, row.ops, broken


def _together(rows: Sequence[Layer]) -> Layer:
    forward, gradient = map(_union, zip(*(row.sides for row in rows), strict=True))
    return rows[0]._replace(forward=forward, gradient=gradient)


_LAYERS: RowKind[Layer] = RowKind({"": ""}, lambda row: ("", row.module), _alike, _together)


def _figure(
    audit: AuditRecord,
    rows: Sequence[Layer],
    dtypes: tuple[str, ...],
    look: Look,
    line: progress.Line,
) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    names, font = [_label(row) for row in rows], FontProperties(size=_POINTS)
    widths = [text_to_path.get_text_width_height_descent(n, font, False)[0] / 72 for n in names]
    left = _EDGE + max(1.2, *widths) + 0.15
    ruler, body = _BAR * len(dtypes), _ROW * len(rows)
    wide = left + 2 * (_PANEL + _GUTTER)
    high = _TOP + ruler + _GAP + body + _BOTTOM
    figure = Figure(figsize=(wide, high), facecolor=look.page)
    # The axis, in powers of two: all that is drawn, and float16's range.
    drawn = [m for row in rows for m in row.sides if m is not None and m.largest]
    edges = [-26.0, 18.0, *(math.log2(x) for m in drawn for x in (*_ends(m), m.largest))]
    span = min(edges) - 2, max(edges) + 2
    scale = math.log2(audit.scale) if audit.scale > 0 else 0.0
    note = f", without the loss scale of $2^{{{scale:g}}}$" if scale else ""
    for at, title in enumerate(("forward: results of ops", f"backward: gradients{note}")):
        x, y = (left + at * (_PANEL + _GUTTER)) / wide, (_BOTTOM + body + _GAP) / high
        above = figure.add_axes((x, y, _PANEL / wide, ruler / high))
        main = figure.add_axes((x, _BOTTOM / high, _PANEL / wide, body / high))
        above.set_title(title, loc="left", fontsize=10, color=look.ink, pad=6)
        _ranges(above, main, dtypes, span, look)
        for row, layer in enumerate(rows):
            line.step()
            if (m := layer.sides[at]) is not None:
                _band(main, row, m, look)
        _frame(main, span, len(rows), look)
        shown = [""] * len(rows) if at else names
        main.set_yticks(range(len(rows)), shown, color=look.ink, parse_math=False)  # "$" is a sign
    title = f"magnitudes of {text_table.plural(audit.steps, 'step')}"
    begin, top = _EDGE / wide, 1 - 0.2 / high
    figure.text(begin, top, title, fontsize=10, va="center", weight="bold", color=look.ink)
    key = "bar: from 5 to 95 %\ntick: largest"
    figure.text(begin, 1 - 0.36 / high, key, fontsize=7.5, va="top", color=look.soft)
    return figure


def _label(row: Layer) -> str:
    """The name of a row; of a long one, its end."""
    name, times = escaped(row.module) or OUTSIDE, f" x{row.modules}" if row.modules > 1 else ""
    room = _LONGEST - len(times)
    if len(name) > room:
        end = name[1 - room :]
        name = f"\u2026{end[end.find('.') + 1 :]}"  # whole parts of the path
    return name + times


def _ends(m: Magnitudes) -> tuple[float, float]:
    """The ends of the band; the largest magnitude, if the bins hold no other than zero."""
    return m.quantile(0.05) or m.largest, m.quantile(0.95) or m.largest


def _ranges(
    above: "Axes", main: "Axes", dtypes: tuple[str, ...], span: tuple[float, float], look: Look
) -> None:
    """A bar with its name for each dtype, and a shade through the rows; shades add up."""
    inch = _PANEL / (span[1] - span[0])
    text: dict[str, Any] = {"va": "center", "fontsize": 7.5}
    alpha = 0.15 if len(dtypes) == 1 else 0.075
    for y, dtype in enumerate(dtypes):
        f, color = FORMATS[dtype], look.dtypes[dtype]
        low, normal, top = map(math.log2, (f.smallest_subnormal, f.smallest_normal, f.max))
        hatched: dict[str, Any] = {"facecolor": look.page, "edgecolor": color, "hatch": "/////"}
        above.barh(y, top - normal, left=normal, height=0.8, color=color)
        above.barh(y, normal - low, left=low, height=0.8, linewidth=0.8, **hatched)
        seen = max(normal, span[0]), min(top, span[1])
        if (seen[1] - seen[0]) * inch > 0.062 * len(dtype) + 0.1:
            above.text(sum(seen) / 2, y, dtype, ha="center", color=look.page, **text)
        else:
            above.text(seen[1] + 0.06 / inch, y, dtype, ha="left", color=color, **text)
        if low > span[0] + 0.75 / inch:
            above.text(low - 0.05 / inch, y, "subnormal", ha="right", color=color, **text)
        main.axvspan(normal, top, color=color, alpha=alpha, linewidth=0, zorder=0)
        main.axvspan(low, normal, color=color, alpha=0.4 * alpha, linewidth=0, zorder=0)
        for edge, style in ((top, "-"), (normal, "-"), (low, (0, (1, 2)))):
            main.axvline(edge, color=color, linewidth=0.9, alpha=0.8, linestyle=style, zorder=1)
    above.set(xlim=span, ylim=(len(dtypes) - 0.5, -0.5))
    above.axis("off")


def _band(axes: "Axes", y: int, m: Magnitudes, look: Look) -> None:
    """A row's band and tick; Inf, NaN and "all zero" as words at the right."""
    if m.largest:
        low, high, at = map(math.log2, (*_ends(m), m.largest))
        axes.barh(y, max(high - low, 0.15), left=low, height=0.5, color=look.band, zorder=3)
        axes.plot([high, at], [y, y], color=look.band, linewidth=0.8, zorder=2)
        axes.plot([at, at], [y - 0.4, y + 0.4], color=look.ink, linewidth=1.6, zorder=4)
    words = [word for word, true in (("Inf", m.inf), ("NaN", m.nan)) if true]
    if words or not m.largest:
        axes.annotate(
            " ".join(words) or "all zero", (1, y), xycoords=("axes fraction", "data"),
            xytext=(5, 0), textcoords="offset points", va="center", annotation_clip=False,
            weight="bold" if words else "normal", color=look.alarm if words else look.soft,
        )  # fmt: skip


def _frame(axes: "Axes", span: tuple[float, float], rows: int, look: Look) -> None:
    axes.set(xlim=span, ylim=(rows - 0.5, -0.5), facecolor="none")
    step = next(s for s in (4, 8, 16, 32, 64) if (span[1] - span[0]) / s <= 9)
    ticks = range(step * math.ceil(span[0] / step), math.floor(span[1]) + 1, step)
    axes.set_xticks(list(ticks), [f"$2^{{{tick}}}$" for tick in ticks])
    axes.tick_params(axis="both", length=0, colors=look.soft, pad=4)
    axes.set_xlabel("magnitude", color=look.soft)
    axes.hlines(range(rows), *span, color=look.line, linewidth=0.6, zorder=1)
    axes.spines[:].set_visible(False)
