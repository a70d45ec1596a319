"""An audit as a picture: how large the values are, layer by layer, against the dtypes' ranges.

    AuditRecord -> a row for each module -> two panels, forward and gradient, with one log2 axis

A row is a band from the 5 % to the 95 % quantile of the magnitudes that are not zero, and a tick at
the largest. Above the rows is a ruler: a bar for each dtype, hatched where it is subnormal, whose
range goes on through the rows as a shade. matplotlib is imported here only.
"""

import math
import typing
from collections.abc import Hashable, Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, cast

from polymp import progress
from polymp.diagnostics.audit_records import AuditRecord, Measured, effect_of, split
from polymp.diagnostics.audit_text import LARGEST, LOSS, by_effect, by_loss, by_size
from polymp.diagnostics.call_record import BACKWARD, FORWARD
from polymp.diagnostics.magnitudes import NARROW, Magnitudes, joined
from polymp.diagnostics.page import replacing
from polymp.diagnostics.tables import COST, OUTSIDE, PROGRAM, RowKind, arranged, check_sort
from polymp.dtypes import FORMATS
from polymp.dtypes import name as dtype_name
from polymp.errors import escaped

if typing.TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_SUFFIXES = (".png", ".svg", ".pdf")
_QUANTILES = (0.05, 0.95)


# Inches: of a row, a dtype's bar, the panels, what stands right of a row, and the margins.
_ROW, _BAR, _PANEL, _GUTTER = 0.2, 0.22, 4.3, 0.75
_TOP, _BOTTOM, _EDGE, _GAP, _KEY = 0.62, 0.55, 0.15, 0.06, 0.5
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
    inside: str
    dtypes: dict[str, str]


_LIGHT = Look(
    "#ffffff", "#1c2024", "#5f656c", "#d9dde2", "#4a5058", "#b34700", "#ffffff",
    dict(zip(NARROW, ("#0072b2", "#007a5a", "#a9640a", "#a8447f"), strict=True)),
)  # fmt: skip

_DARK = Look(
    "#14171a", "#e7e9ec", "#a3aab3", "#343a42", "#c3cad2", "#ff9d5c", "#14171a",
    dict(zip(NARROW, ("#56b4e9", "#2fbf94", "#e69f00", "#dd88b8"), strict=True)),
)  # fmt: skip


def audit_figure(
    audit: AuditRecord,
    path: "str | PathLike[str] | None" = None,
    dtype: object = None,
    dark: bool = False,
    fold: bool = True,
    sort: str = PROGRAM,
) -> "Figure":
    """Draw an audit; see `Audit.plot`, which raises the same."""
    check_sort(sort, _LAYERS)
    dtypes = NARROW if dtype is None else (dtype_name(dtype, NARROW, "plot(): dtype"),)
    if path is not None and Path(path).suffix.lower() not in _SUFFIXES:
        raise ValueError(f"path={str(path)!r} does not end in one of {', '.join(_SUFFIXES)}.")
    rows = layers(audit, fold, sort)
    if not rows:
        raise ValueError("nothing was measured: run a step in the audit's block first.")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
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
        figure = _figure(Figure, audit, rows, dtypes, look, line)
        if path is not None:
            line.stage("writing the file", long=False)
            undated = {"Date": None} if Path(path).suffix.lower() == ".svg" else None
            with replacing(path) as beside:
                figure.savefig(beside, dpi=150, facecolor=look.page, metadata=undated)
    return figure


class Layer(NamedTuple):
    """A row: a module with the magnitudes of its results and of its gradients, if it has any."""

    module: str  # its path; of equal layers, as in tables: "layers.*.attn"
    forward: Magnitudes | None
    gradient: Magnitudes | None
    loss_effect: float | None
    modules: int = 1
    ops: tuple[str, ...] = ()  # names of its ops and parameters; equal layers have the same


def _figure(
    make: "type[Figure]",
    audit: AuditRecord,
    rows: Sequence[Layer],
    dtypes: tuple[str, ...],
    look: Look,
    line: progress.Line,
) -> "Figure":
    names = [_label(row) for row in rows]
    left = _EDGE + max(1.2, _widest(names)) + 0.15
    ruler, body = _BAR * len(dtypes), _ROW * len(rows)
    wide = left + 2 * (_PANEL + _GUTTER)
    high = _TOP + ruler + _GAP + body + _BOTTOM
    figure = make(figsize=(wide, high), facecolor=look.page)

    def place(x: float, y: float, w: float, h: float) -> "Axes":
        return figure.add_axes((x / wide, y / high, w / wide, h / high))

    span = _span(rows)
    scale = math.log2(audit.scale) if audit.scale > 0 else 0.0
    note = f", without the loss scale of $2^{{{scale:g}}}$" if scale else ""
    sides = (
        ("forward: results of ops", [row.forward for row in rows]),
        (f"backward: gradients{note}", [row.gradient for row in rows]),
    )
    for at, (title, side) in enumerate(sides):
        x = left + at * (_PANEL + _GUTTER)
        above = place(x, _BOTTOM + body + _GAP, _PANEL, ruler)
        main = place(x, _BOTTOM, _PANEL, body)
        above.set_title(title, loc="left", fontsize=10, color=look.ink, pad=6)
        _ruler(above, dtypes, span, look)
        _shade(main, dtypes, look)
        _bands(main, side, look, line)
        _frame(main, span, len(rows), look)
        shown = names if at == 0 else [""] * len(rows)
        main.set_yticks(range(len(rows)), shown, color=look.ink, parse_math=False)  # "$" is a sign
    _key(place(_EDGE, _BOTTOM + body + _GAP, left - _EDGE - 0.15, _KEY), look)
    steps = "1 step" if audit.steps == 1 else f"{audit.steps} steps"
    figure.text(
        _EDGE / wide, 1 - 0.2 / high, f"magnitudes of {steps}", fontsize=10, va="center",
        weight="bold", color=look.ink,
    )  # fmt: skip
    return figure


def _widest(names: Iterable[str]) -> float:
    """The width of the widest name, in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=_POINTS)
    sizes = (text_to_path.get_text_width_height_descent(name, font, False) for name in names)
    return float(max(wide for wide, *_ in sizes)) / 72


def _label(row: Layer) -> str:
    """The name of a row; of a long one, its end."""
    name, times = escaped(row.module) or OUTSIDE, f" x{row.modules}" if row.modules > 1 else ""
    room = _LONGEST - len(times)
    if len(name) > room:
        end = name[1 - room :]
        name = f"\u2026{end[end.find('.') + 1 :]}"  # whole parts of the path
    return name + times


def _span(rows: Sequence[Layer]) -> tuple[float, float]:
    """The ends of the axis, as powers of two: all that is drawn, and float16's range."""
    edges = [-26.0, 18.0]
    for row in rows:
        for side in (row.forward, row.gradient):
            if side is not None and side.largest:
                edges += map(math.log2, (*_ends(side), side.largest))
    return min(edges) - 2, max(edges) + 2


def _ends(m: Magnitudes) -> tuple[float, float]:
    """The ends of the band; the largest magnitude, if the bins hold no other than zero."""
    low, high = (m.quantile(share) or m.largest for share in _QUANTILES)
    return low, high


def _ranges(dtype: str) -> tuple[float, float, float]:
    """Where a dtype begins, becomes normal and ends, as powers of two."""
    f = FORMATS[dtype]
    return math.log2(f.smallest_subnormal), math.log2(f.smallest_normal), math.log2(f.max)


def _ruler(axes: "Axes", dtypes: tuple[str, ...], span: tuple[float, float], look: Look) -> None:
    """A bar for each dtype, with its name on it."""
    inch = _PANEL / (span[1] - span[0])
    for y, dtype in enumerate(dtypes):
        low, normal, top = _ranges(dtype)
        color = look.dtypes[dtype]
        axes.barh(y, top - normal, left=normal, height=0.8, color=color)
        axes.barh(
            y, normal - low, left=low, height=0.8, facecolor=look.page, edgecolor=color,
            hatch="/////", linewidth=0.8,
        )  # fmt: skip
        seen = max(normal, span[0]), min(top, span[1])
        text: dict[str, Any] = {"va": "center", "fontsize": 7.5}
        if (seen[1] - seen[0]) * inch > 0.062 * len(dtype) + 0.1:
            axes.text(sum(seen) / 2, y, dtype, ha="center", color=look.inside, **text)
        else:
            axes.text(seen[1] + 0.06 / inch, y, dtype, ha="left", color=color, **text)
        if low > span[0] + 0.75 / inch:
            axes.text(low - 0.05 / inch, y, "subnormal", ha="right", color=color, **text)
    axes.set(xlim=span, ylim=(len(dtypes) - 0.5, -0.5))
    axes.axis("off")


def _shade(axes: "Axes", dtypes: tuple[str, ...], look: Look) -> None:
    """The ranges, behind the rows: where more dtypes hold a number, the shade is deeper."""
    strength = 2 if len(dtypes) == 1 else 1
    for dtype in dtypes:
        low, normal, top = _ranges(dtype)
        color = look.dtypes[dtype]
        axes.axvspan(normal, top, color=color, alpha=0.075 * strength, linewidth=0, zorder=0)
        axes.axvspan(low, normal, color=color, alpha=0.03 * strength, linewidth=0, zorder=0)
        axes.axvline(top, color=color, linewidth=0.9, alpha=0.8, zorder=1)
        axes.axvline(normal, color=color, linewidth=0.9, alpha=0.8, zorder=1)
        axes.axvline(low, color=color, linewidth=0.9, alpha=0.8, linestyle=(0, (1, 2)), zorder=1)


def _bands(axes: "Axes", side: list[Magnitudes | None], look: Look, line: progress.Line) -> None:
    """A band and a tick for each row; Inf, NaN and "all zero" as words at the right."""
    for y, m in enumerate(side):
        line.step()
        if m is None:
            continue
        if m.largest:
            low, high = map(math.log2, _ends(m))
            at = math.log2(m.largest)
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
    for spine in axes.spines.values():
        spine.set_visible(False)


def _key(axes: "Axes", look: Look) -> None:
    """How to read a row: one drawn, with words."""
    axes.barh(0, 0.5, left=0.0, height=0.24, color=look.band)
    axes.plot([0.5, 0.75], [0, 0], color=look.band, linewidth=0.8)
    axes.plot([0.75, 0.75], [-0.19, 0.19], color=look.ink, linewidth=1.6)
    axes.text(0.25, 0.25, "5\u201395 %", ha="center", va="bottom", fontsize=7.5, color=look.soft)
    axes.text(0.75, 0.25, "largest", ha="center", va="bottom", fontsize=7.5, color=look.soft)
    axes.set(xlim=(0, 1), ylim=(-0.3, 0.9))
    axes.axis("off")


# The rows of an audit's picture: a module each, with all that was measured in it.
#
#     AuditRecord -> results and gradients by module -> Layers, equal ones added up


def layers(audit: AuditRecord, fold: bool = True, sort: str = PROGRAM) -> list[Layer]:
    """A row for every module, in an order of `Audit.table`; equal layers as one.

    The gradients of a module are those of its parameters and those that its ops made.
    """
    forward: dict[str, list[Magnitudes]] = {}
    gradient: dict[str, list[Magnitudes]] = {}
    effects: dict[str, list[float | None]] = {}
    ops: dict[str, list[str]] = {}
    for measured in audit.results:
        side = {FORWARD: forward, BACKWARD: gradient}.get(measured.direction)
        if side is not None:
            side.setdefault(measured.module, []).append(measured.magnitudes)
            effects.setdefault(measured.module, []).append(measured.loss_effect)
            ops.setdefault(measured.module, []).append(f"{measured.direction} {measured.op}")
    modules = {*forward, *gradient}
    for measured in audit.gradients:
        owner = _module(measured, modules)
        gradient.setdefault(owner, []).append(measured.magnitudes)
        ops.setdefault(owner, []).append(split(measured.module)[1])
    names = {**forward, **gradient}
    rows = [
        Layer(
            m,
            _union(forward.get(m, ())),
            _union(gradient.get(m, ())),
            effect_of(effects.get(m, ())),
            1,
            tuple(sorted(ops[m])),
        )
        for m in names
    ]
    folded, _, _ = arranged(rows, _LAYERS, sort, fold)
    return [
        row._replace(module=one.module, modules=one.layers) for one in folded for row in one.rows
    ]


def _union(sides: Iterable[Magnitudes | None]) -> Magnitudes | None:
    listed = [m for m in sides if m is not None]
    return joined(listed) if listed else None


def _alike(row: Layer) -> Hashable:
    broken = tuple(m and (m.inf, m.nan) for m in (row.forward, row.gradient))
    return row.forward is None, row.gradient is None, row.ops, broken


def _together(rows: Sequence[Layer]) -> Layer:
    return rows[0]._replace(
        forward=_union(row.forward for row in rows),
        gradient=_union(row.gradient for row in rows),
        loss_effect=effect_of(row.loss_effect for row in rows),
    )


def _sides(rows: Iterable[Layer]) -> list[Magnitudes]:
    return [side for row in rows for side in (row.forward, row.gradient) if side is not None]


_LAYERS: RowKind[Layer] = RowKind(
    {"": ""},
    lambda row: ("", row.module),
    _alike,
    _together,
    {
        COST: lambda rows: by_loss(_sides(rows)),
        LARGEST: lambda rows: by_size(_sides(rows)),
        LOSS: lambda rows: by_effect(row.loss_effect for row in rows),
    },
)


def _module(gradient: Measured, modules: set[str]) -> str:
    """The module of a parameter: the innermost that its name begins with."""
    owner, _ = split(gradient.module)
    path = owner
    while path and path not in modules:
        path = path.rpartition(".")[0]
    return path or owner
