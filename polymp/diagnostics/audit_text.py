"""An audit as text, as `print(audit)` shows it, and as a page.

AuditRecord -> the fault, the fitting scale, then a row for every op and parameter
"""

import math
from collections.abc import Hashable, Iterable, Iterator

from polymp import text_table
from polymp.diagnostics import fp8_loss, tables
from polymp.diagnostics.audit_records import MANY, AuditRecord, Measured, split, together
from polymp.diagnostics.blame import lost_constants
from polymp.diagnostics.call_record import BACKWARD, FORWARD, RECOMPUTE
from polymp.diagnostics.fp8_loss import LIMIT, Fp8Loss
from polymp.diagnostics.magnitudes import NARROW, Magnitudes
from polymp.diagnostics.page import Page
from polymp.diagnostics.tables import COST, PROGRAM
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

_PARAMETERS = "parameters"

SECTIONS = {
    FORWARD: "forward: results of ops",
    RECOMPUTE: "recompute: the forward again, for the backward",
    BACKWARD: "backward: gradients that ops made",
    _PARAMETERS: "backward: gradients of parameters",
}

_FIRST, *_OTHERS = NARROW

COLUMNS = (
    tables.Column("op"),
    tables.Column("source"),
    *(tables.Column(name, True) for name in (
        "largest |x|", "over", "under", "sub", "rounding", "drift", "of the loss",
        *(f"in {text_table.short(name)}" for name in _OTHERS),
    )),
    tables.Column("here"),
)  # fmt: skip

_HEADS = tuple(column.name for column in COLUMNS)

_LEGEND = (
    f"over, under, sub: percent of values that {_FIRST} would make Inf, zero, subnormal; here: "
    f"those that {_FIRST} made so in this run"
)

_ERRORS = (
    "rounding: percent by which an op is off from the same op in float32 on the same inputs; "
    "drift: from the same steps in float32; of the loss: percent by which the op's own rounding "
    "changes the loss, to first order"
)

_WORST = 8  # parameters named of those that lose updates


def audit_table(
    audit: AuditRecord,
    width: int | None = None,
    sort: str = PROGRAM,
    fold: bool = True,
    limit: int | None = None,
) -> str:
    """Return an audit as text; see `Audit.table`, which raises the same."""
    width = text_table.terminal_width() if width is None else width
    table, notes = _listed(audit, sort, fold, limit)
    rows = [row for row in tables.text_rows(table, width) if row]  # no empty lines
    whole = text_table.needed(_HEADS, rows)
    rows, left_out = _fitting(rows, width)
    if left_out:
        notes.append(f"no room for {', '.join(left_out)}: table(width={whole}) has them")
    lines = [*summary(audit), *(["", *legend(audit), *notes, ""] if rows else [])]
    lines = [part for line in lines for part in text_table.folded(line, width) or [""]]
    if rows:
        right = [column.name for column in COLUMNS if column.numeric]
        lines += text_table.columns(_HEADS, rows, right, width)
    if audit.fp8:
        lines += ["", *fp8_table(audit, width, fold)]
    return escaped("\n".join(lines))


def audit_page(audit: AuditRecord, sort: str = PROGRAM, fold: bool = True) -> Page:
    """The page of an audit; see `Audit.to_html`, which raises the same."""
    table, notes = _listed(audit, sort, fold)
    first, *others = filter(None, summary(audit))
    return Page(
        title=first,
        about="",
        figures=(),
        notes=[*others, *legend(audit), *notes],
        table=table.without_empty(),
        sorted=("#", True) if sort == PROGRAM else None,
        what="row",
    )


def _listed(
    audit: AuditRecord, sort: str, fold: bool, limit: int | None = None
) -> tuple[tables.Table, list[str]]:
    """The rows of an audit in order, and notes on what is folded and what is left out."""
    every = [*audit.results, *audit.gradients]
    modules, hidden, note = tables.arranged(every, MEASURED, sort, fold, limit)
    lines = [
        tables.Line(SECTIONS[one.section], one.label, cells(m), (SECTIONS[one.section], m.run))
        for one in modules
        for m in one.rows
    ]
    notes = [note] if note else []
    if hidden:
        less = "that change the loss less" if sort == LOSS else "of which float16 loses less"
        notes.append(f"{text_table.plural(hidden, 'row')} {less} not listed")
    return tables.Table(COLUMNS, ("section", "dtype"), lines), notes


def summary(audit: AuditRecord) -> Iterator[str]:
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


def _fitting(rows: list[tables.TextRow], width: int) -> tuple[list[tables.TextRow], list[str]]:
    """Rows that fit, without columns of `_OTHERS`, which are named; or with ops above numbers."""
    for apart in (False, True):
        laid = list[tables.TextRow]()
        for row in rows:
            alone = isinstance(row, str) or not apart
            laid += [row] if alone else [f"{row[0]} {row[1]}".rstrip(), ("    ", "", *row[2:])]
        for shown in range(len(_OTHERS), -1, -1):
            first = _HEADS.index("here") - len(_OTHERS) + shown
            gone = [""] * (len(_OTHERS) - shown)
            cut = [r if isinstance(r, str) else (*r[:first], *gone, r[-1]) for r in laid]
            if text_table.needed(_HEADS, cut) <= width:
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


def cells(measured: Measured) -> tuple[tables.Cell, ...]:
    """The cells of a row; the numbers are what columns are sorted by."""
    m = measured.magnitudes
    errors = (measured.rounding, measured.drift, measured.loss_effect)
    first, *others = (m.shares(dtype) for dtype in NARROW)
    texts = (tuple(map(_percent, shares)) for shares in others)
    joined = ("/".join(part or "-" for part in parts) if any(parts) else "" for parts in texts)
    return (
        tables.Cell(split(measured.module)[1] if _is_gradient(measured) else measured.op),
        tables.Cell(measured.source),
        tables.Cell(power(m.largest), m.largest),
        *(tables.Cell(_percent(share), share) for share in first),
        *(tables.Cell("" if x is None else _error(x), abs(x or 0.0)) for x in errors),
        *(tables.Cell(words, sum(shares)) for words, shares in zip(joined, others, strict=True)),
        tables.Cell(", ".join(_here(measured))),
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
    yield from (what for what, there in (("Inf", m.inf), ("NaN", m.nan)) if there)
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


# How an audit's rows are placed, folded and ordered.
#
# A layer that its dtype broke, by an Inf or by making most values zero, is not equal to others.


LARGEST, LOSS = "largest", "loss"


def _is_gradient(measured: Measured) -> bool:
    """True of the gradient of a parameter."""
    return measured.op == "gradient" and not measured.spelling


def _place(measured: Measured) -> tuple[str, str]:
    if _is_gradient(measured):
        return _PARAMETERS, split(measured.module)[0]
    return measured.direction, measured.module


def _alike_measured(measured: Measured) -> Hashable:
    m = measured.magnitudes
    broken = m.inf, m.nan, m.burst > 0, m.vanished > MANY
    if _is_gradient(measured):
        return split(measured.module)[1], measured.run, *broken
    same = measured._replace(module="", magnitudes=_EMPTY)
    return same._replace(rounding=None, drift=None, loss_effect=None), *broken


_EMPTY = Magnitudes(0, 0, (), 0.0)


def by_loss(many: Iterable[Magnitudes]) -> tuple[float, ...]:
    """The sort key that puts first that of which float16 would lose most; see `Audit.table`."""
    return min(tuple(-share for share in m.shares(_FIRST)) for m in many)


def by_size(many: Iterable[Magnitudes]) -> tuple[float, ...]:
    """The sort key that puts the largest magnitudes first."""
    return (-max(m.largest for m in many),)


def by_effect(effects: Iterable[float | None]) -> tuple[float, ...]:
    """The sort key that puts the largest effect on the loss first, whatever its sign."""
    return (-max(abs(effect or 0.0) for effect in effects),)


MEASURED: tables.RowKind[Measured] = tables.RowKind(
    SECTIONS,
    _place,
    _alike_measured,
    together,
    {
        COST: lambda rows: by_loss(m.magnitudes for m in rows),
        LARGEST: lambda rows: by_size(m.magnitudes for m in rows),
        LOSS: lambda rows: by_effect(m.loss_effect for m in rows),
    },
)


# The losses of products, were they in 8 bits: a table below that of an audit.


_OPERANDS = (ACTIVATION, WEIGHT, GRADIENT)
_RESULTS = (RESULT, INPUT_GRADIENT, WEIGHT_GRADIENT)

_LOSSES = (
    tables.Column("op"),
    tables.Column("source"),
    *(
        tables.Column(name, True)
        for name in (*_OPERANDS, "result", "input grad", "weight grad", "times")
    ),
)


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
    modules, _, _ = tables.arranged(audit.fp8_losses, _FP8, fold=fold)
    lines = [tables.Line("", one.label, _cells(row)) for one in modules for row in one.rows]
    table = tables.text(tables.Table(_LOSSES, (), lines), width)
    return [title, *text_table.folded(legend, width), "", *table]


def _alike(one: Fp8Loss) -> Hashable:
    worst = one.worst.of if one.worst.times > LIMIT else ""
    return one.op, one.source, tuple(one.operands), tuple(one.results), worst


_FP8: tables.RowKind[Fp8Loss] = tables.RowKind(
    {"": ""}, lambda one: ("", one.module), _alike, fp8_loss.together
)


def _cells(one: Fp8Loss) -> tuple[tables.Cell, ...]:
    operands = (one.operands.get(role) for role in _OPERANDS)
    texts = (
        one.op,
        one.source,
        *("" if o is None else _both(o.error, o.zero) for o in operands),
        *(_short_percent(one.results[p]) if p in one.results else "" for p in _RESULTS),
        f"{one.worst.times:.3g}",
    )
    return tuple(map(tables.Cell, texts))


def _both(error: float, zero: float) -> str:
    return f"{_short_percent(error)}/{_short_percent(zero)}" if zero else _short_percent(error)


def _short_percent(part: float) -> str:
    percent = 100 * part
    if 0 < percent < 0.1:
        return "<.1"
    return f"{percent:.2g}" if percent < 10 else f"{percent:.0f}"
