"""The losses of products, were they in 8 bits: a table below that of an audit."""

from collections.abc import Hashable

from polymp import text_table
from polymp.diagnostics.audit_records import AuditRecord
from polymp.diagnostics.equal_layers import folded, label
from polymp.diagnostics.fp8_loss import LIMIT, Fp8Loss, together
from polymp.diagnostics.report_text import OUTSIDE
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
        f"{_percent(loss.rounding_error(name))} in {text_table.short(name)}" for name in formats
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
        *(_percent(one.results[p]) if p in one.results else "" for p in _RESULTS),
        f"{one.worst.times:.3g}",
    )


def _both(error: float, zero: float) -> str:
    return f"{_percent(error)}/{_percent(zero)}" if zero else _percent(error)


def _percent(part: float) -> str:
    percent = 100 * part
    if 0 < percent < 0.1:
        return "<.1"
    return f"{percent:.2g}" if percent < 10 else f"{percent:.0f}"
