"""An audit as text, as `print(audit)` shows it.

    AuditRecord -> the fault, the fitting scale, then a row for every op and parameter

Plain characters, and equal layers as one, as in `report_text`; nothing but the standard library is
needed.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, TypeVar

from polymp import text_table
from polymp.diagnostics.audit_records import AuditRecord, Measured, by_module, by_owner, split
from polymp.diagnostics.blame import lost_constants
from polymp.diagnostics.call_record import BACKWARD, FORWARD, RECOMPUTE, folded, label
from polymp.diagnostics.fp8_loss import LIMIT, Fp8Loss, together
from polymp.diagnostics.magnitudes import NARROW, Magnitudes
from polymp.diagnostics.report_text import COST, OUTSIDE, PROGRAM, check_limit, check_sort, folding
from polymp.errors import escaped
from polymp.fp8 import loss
from polymp.fp8.recipes import (
    ACTIVATION,
    GRADIENT,
    INPUT_GRADIENT,
    RECIPES,
    RESULT,
    WEIGHT,
    WEIGHT_GRADIENT,
)
from polymp.weights import lost_updates

SECTIONS = {
    FORWARD: "forward: results of ops",
    RECOMPUTE: "recompute: the forward again, for the backward",
    BACKWARD: "backward: gradients that ops made",
}

PARAMETERS = "backward: gradients of parameters"
_FIRST, *_OTHERS = NARROW

HEADS = (
    "op", "source", "largest |x|", "over", "under", "sub", "rounding", "drift", "of the loss",
    *(f"in {text_table.short(name)}" for name in _OTHERS), "here",
)  # fmt: skip

RIGHT = HEADS[2:-1]

_LEGEND = (
    f"over, under, sub: percent of values that {_FIRST} would make Inf, zero, subnormal; here: "
    f"those that {_FIRST} made so in this run"
)

_ERRORS = (
    "rounding: percent by which an op is off from the same op in float32 on the same inputs; "
    "drift: from the same steps in float32; of the loss: percent by which the op's own rounding "
    "changes the loss, to first order"
)

_Rows = list[str | tuple[str, ...]]
_WORST = 8  # parameters named of those that lose updates


class Listed(NamedTuple):
    """A row of a table: its section and its module in words, and what was measured."""

    section: str
    module: str
    name: str
    measured: Measured


def listed(
    audit: AuditRecord, sort: str = PROGRAM, fold: bool = True, limit: int | None = None
) -> tuple[list[Listed], list[str]]:
    """The rows of an audit in order, and notes on what is folded and what is left out."""
    check_sort(sort, SORTS)
    check_limit(limit)
    results, owners = by_module(audit.results, fold), by_owner(audit.gradients, fold)
    rows: list[Listed] = []
    for title, modules in [
        *((name, [m for m in results if m.section == key]) for key, name in SECTIONS.items()),
        (PARAMETERS, owners),
    ]:
        for one in ordered(modules, sort, lambda one: map(_measures, one.rows)):
            for m in ordered(one.rows, sort, lambda m: (_measures(m),)):
                name = split(m.module)[1] if title == PARAMETERS else m.op
                rows.append(Listed(title, label(one, OUTSIDE), name, m))
    rank = COST if sort == PROGRAM else sort
    first = ordered(rows, rank, lambda row: (_measures(row.measured),))
    kept = {id(row) for row in first[:limit]}
    notes = [folding([*results, *owners])]
    if hidden := len(rows) - len(kept):
        less = "that change the loss less" if sort == LOSS else "of which float16 loses less"
        notes.append(f"{text_table.plural(hidden, 'row')} {less} not listed")
    return [row for row in rows if id(row) in kept], list(filter(None, notes))


def audit_table(
    audit: AuditRecord,
    width: int | None = None,
    sort: str = PROGRAM,
    fold: bool = True,
    limit: int | None = None,
) -> str:
    """Return an audit as text; see `Audit.table`, which raises the same."""
    width = text_table.terminal_width() if width is None else width
    found, notes = listed(audit, sort, fold, limit)
    rows, above = _Rows(), ""
    for (section, module), many in groupby(found, lambda row: row[:2]):
        rows += [module] if section == above else [text_table.heading(section, width), module]
        rows += [cells(row.measured, f"  {row.name}") for row in many]
        above = section
    whole = text_table.needed(HEADS, rows)
    rows, left_out = _fitting(rows, width)
    if left_out:
        notes.append(f"no room for {', '.join(left_out)}: table(width={whole}) has them")
    lines = [*head(audit), *(["", *legend(audit), *notes, ""] if rows else [])]
    lines = [part for line in lines for part in text_table.folded(line, width) or [""]]
    if rows:
        lines += text_table.columns(HEADS, rows, RIGHT, width)
    if audit.fp8:
        lines += ["", *fp8_table(audit, width, fold)]
    return escaped("\n".join(lines))


def head(audit: AuditRecord) -> Iterator[str]:
    """Lines on the whole run, above the table."""
    yield f"audit of {text_table.plural(audit.steps, 'step')}"
    if audit.fault is not None:
        yield from ("", "first value that is not finite:", str(audit.fault))
    if audit.backward:
        yield from ("", *scales(audit))
    if (last := audit.last_forward()) is not None:
        at = " ".join(filter(None, (last.op, last.source)))
        error = "rounding errors: not measured, audit(..., rounding=True) does"
        if audit.rounding:
            error = f"the last result before the backward pass, {at}, is off by "
            error += f"{_error(last.drift or 0.0)} % from the same step in float32"
        yield from (*([] if audit.backward else [""]), error)
    if audit.rounding:
        effect = audit.loss_effect
        yield (
            "of the loss: not measured, for it needs the backward pass of a loss of one value"
            if effect is None
            else f"rounding changes the loss by {_error(effect)} %, to first order"
        )
    if audit.lost_updates:
        yield from ("", *lost(audit))
    yield from unsummed(audit)


def legend(audit: AuditRecord) -> list[str]:
    """How to read the columns."""
    return [_LEGEND, *([_ERRORS] if audit.rounding else [])]


def _fitting(rows: _Rows, width: int) -> tuple[_Rows, list[str]]:
    """Rows that fit, without columns of `_OTHERS`, which are named; or with ops above numbers."""
    for apart in (False, True):
        made: _Rows = []
        for row in rows:
            alone = isinstance(row, str) or not apart
            made += [row] if alone else [f"{row[0]} {row[1]}".rstrip(), ("    ", "", *row[2:])]
        for shown in range(len(_OTHERS), -1, -1):
            first = HEADS.index("here") - len(_OTHERS) + shown
            gone = [""] * (len(_OTHERS) - shown)
            cut = [r if isinstance(r, str) else (*r[:first], *gone, r[-1]) for r in made]
            if text_table.needed(HEADS, cut) <= width:
                return cut, list(_OTHERS[shown:])
    return cut, _OTHERS


def scales(audit: AuditRecord) -> list[str]:
    """The loss scale of the run, and the one that fits."""
    used = "none, or not known" if audit.scale == 1 else power(audit.scale)
    fitting = audit.fitting_scale(_FIRST)
    if fitting is None:
        return [f"loss scale: {used}; no finite gradient other than zero to fit one to"]
    shares = {s: audit.lost_gradients(_FIRST, s) for s in (1.0, audit.scale, fitting)}
    lost = [
        f"{text_table.share(share) or 'none'} {'unscaled' if s == 1 else f'at {s:g}'}"
        for s, share in shares.items()
    ]
    return [
        f"loss scale: {used}; the largest at which no {_FIRST} gradient overflows: "
        f"{power(fitting)}",
        f"gradients that become zero in {_FIRST}: {', '.join(lost)}",
    ]


def lost(audit: AuditRecord) -> list[str]:
    """The share of updates of low weights that were rounded away, and the worst parameters."""
    records = audit.lost_updates
    share = text_table.share(lost_updates.share(records)) or "none"
    advice = "" if share == "none" else "; low_weights() keeps them"
    worst = [each for each in lost_updates.worst(records, _WORST) if each.lost]
    return [
        f"updates of low weights that were rounded away: {share}{advice}",
        *(f"  {each.name} ({each.dtype}): {text_table.share(each.share)}" for each in worst),
    ]


def unsummed(audit: AuditRecord) -> list[str]:
    """The products that sum over nothing and were lowered, each with the row that mends it."""
    lines = {}
    for m in audit.results:
        if m.unsummed and m.row is not None:
            where = f'[scopes."{m.module}"]' if m.module else "[rules]"
            lines[f"{m.op} {m.source}", m.module] = (
                f"{m.op} {m.source} sums over nothing: a multiplication, in {m.run}. The row "
                f'`"{m.row.of}" = "fp32"` in {where} keeps it in float32'
            )
    rest = len(lines) - _WORST
    more = [f"and {text_table.plural(rest, 'more product')} that sum over nothing"]
    return ["", *list(lines.values())[:_WORST], *(more if rest > 0 else [])] if lines else []


def cells(measured: Measured, name: str) -> tuple[str, ...]:
    """The cells of a row."""
    m = measured.magnitudes
    errors = (measured.rounding, measured.drift, measured.loss_effect)
    others = (tuple(map(_percent, m.shares(dtype))) for dtype in _OTHERS)
    return (
        name,
        measured.source,
        power(m.largest),
        *map(_percent, m.shares(_FIRST)),
        *("" if x is None else _error(x) for x in errors),
        *("/".join(part or "-" for part in parts) if any(parts) else "" for parts in others),
        ", ".join(_here(measured)),
    )


def _percent(part: float) -> str:
    """A share in percent, in few characters: "0.1", "53", ">99"; "" for 0."""
    percent = 100 * part
    if percent == 0 or percent == 100:
        return "100" if percent else ""
    if percent < 0.1:
        return "<.1"
    if percent > 99:
        return ">99"
    return f"{percent:.1f}" if percent < 9.95 else f"{percent:.0f}"


def _error(part: float) -> str:
    """A relative error in percent: "0.2", "-0.2", "150", ">999"."""
    percent = 100 * part
    if abs(percent) > 999:
        return ">999" if percent > 0 else "<-999"
    return f"{percent:.0f}" if abs(percent) > 9.95 else f"{percent:.2g}"


def _here(measured: Measured) -> Iterator[str]:
    """Words on the Inf, NaN and zeros that the values became in this run."""
    m = measured.magnitudes
    yield from (what for what, found in (("Inf", m.inf), ("NaN", m.nan)) if found)
    if m.burst:
        yield f"{text_table.share(m.burst)} Inf"
    if m.vanished:
        yield f"{text_table.share(m.vanished)} zero"
    if measured.numbers:
        run = text_table.short(measured.run)
        yield lost_constants(measured.numbers, measured.run).replace(measured.run, run)


def power(value: float) -> str:
    """A magnitude as a power of two and as a number: "2**13.3 = 1e+04"; "0" for zero."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.log2(value)
    if exponent == int(exponent):
        number = f"{value:.0f}" if 0 <= exponent <= 20 else f"{value:.2g}"
        return f"2**{exponent:.0f} = {number}"
    return f"2**{exponent:.1f} = {value:.2g}"


# The losses of products, were they in 8 bits: a table below that of an audit.


_OPERANDS = (ACTIVATION, WEIGHT, GRADIENT)
_RESULTS = (RESULT, INPUT_GRADIENT, WEIGHT_GRADIENT)

_HEADS = (
    "op", "source", *_OPERANDS, "result", "input grad", "weight grad", "times",
)  # fmt: skip

_RIGHT = _HEADS[2:]


def fp8_table(audit: AuditRecord, width: int | None = None, fold: bool = True) -> list[str]:
    """Return the lines of the table."""
    title = text_table.heading(f"products in 8 bits, by recipe {audit.fp8}", width)
    if not audit.fp8_losses:
        none = "no product that ran in bfloat16 would run in 8 bits; `explain` has the reasons"
        return [title, *text_table.folded(none, width)]
    recipe = RECIPES[audit.fp8]
    formats = dict.fromkeys(recipe.format_of(role) for role in _OPERANDS)
    alone = " and ".join(
        f"{_short_percent(loss.rounding_error(name))} in {text_table.short(name)}"
        for name in formats
    )
    legend = (
        "percent by which 8 bits would change operands and results, and of operands, after a "
        f"slash, the percent of values that would become zero; by rounding alone, {alone}; times: "
        "the largest change over that of rounding alone"
    )
    modules = folded(audit.fp8_losses, lambda one: ("", one.module), _alike, together, fold)
    rows: list[str | tuple[str, ...]] = []
    for module in modules:
        rows.append(label(module, OUTSIDE))
        rows += map(_cells, module.rows)
    return [
        title, *text_table.folded(legend, width), "",
        *text_table.columns(_HEADS, rows, _RIGHT, width),
    ]  # fmt: skip


def _alike(one: Fp8Loss) -> Hashable:
    worst = one.worst.of if one.worst.times > LIMIT else ""
    return one.op, one.source, tuple(one.operands), tuple(one.results), worst


def _cells(one: Fp8Loss) -> tuple[str, ...]:
    operands = (one.operands.get(role) for role in _OPERANDS)
    return (
        f"  {one.op}",
        one.source,
        *("" if o is None else _both(o.error, o.zero) for o in operands),
        *(_short_percent(one.results[p]) if p in one.results else "" for p in _RESULTS),
        f"{one.worst.times:.3g}",
    )


def _both(error: float, zero: float) -> str:
    return f"{_short_percent(error)}/{_short_percent(zero)}" if zero else _short_percent(error)


def _short_percent(part: float) -> str:
    percent = 100 * part
    if 0 < percent < 0.1:
        return "<.1"
    return f"{percent:.2g}" if percent < 10 else f"{percent:.0f}"


# The orders of an audit's rows, in its table and in its picture.
#
#     rows, each with magnitudes and effects -> the same rows, those first that an order asks for


LARGEST, LOSS = "largest", "loss"
SORTS = (PROGRAM, COST, LARGEST, LOSS)
R = TypeVar("R")
_NARROWEST = NARROW[0]


class Measures(NamedTuple):
    """The measures by which rows are ordered."""

    magnitudes: Magnitudes
    loss_effect: float | None


def ordered(
    rows: Sequence[R], sort: str, measures: Callable[[R], Iterable[Measures]]
) -> Sequence[R]:
    """Return rows in one of the `SORTS`.

    A row of several measures stands where the first of them would.
    """
    if sort == PROGRAM:
        return rows
    key = {COST: _lost, LARGEST: _largest, LOSS: _effect}[sort]
    return sorted(rows, key=lambda row: min(map(key, measures(row))))


def _measures(measured: Measured) -> Measures:
    return Measures(measured.magnitudes, measured.loss_effect)


def _lost(measures: Measures) -> tuple[float, ...]:
    return tuple(-share for share in measures.magnitudes.shares(_NARROWEST))


def _largest(measures: Measures) -> tuple[float, ...]:
    return (-measures.magnitudes.largest,)


def _effect(measures: Measures) -> tuple[float, ...]:
    return (-abs(measures.loss_effect or 0.0),)
