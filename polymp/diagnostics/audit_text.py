"""An audit as text, as `print(audit)` shows it.

    AuditRecord -> the fault, the fitting scale, then a row for every op and parameter

Plain characters, and equal layers as one, as in `report_text`; nothing but the standard library is
needed.
"""

import math
from collections.abc import Callable, Iterator, Sequence

from polymp import text_table
from polymp.diagnostics import audit_fp8_text
from polymp.diagnostics.audit_order import SORTS, ordered
from polymp.diagnostics.audit_records import AuditRecord, Measured, by_module, by_owner, split
from polymp.diagnostics.call_record import BACKWARD, FORWARD, RECOMPUTE
from polymp.diagnostics.equal_layers import ModuleRows, label
from polymp.diagnostics.magnitudes import NARROW
from polymp.diagnostics.report_text import OUTSIDE, PROGRAM, check_sort, folding
from polymp.weights import lost_updates

SECTIONS = {
    FORWARD: "forward: results of ops",
    RECOMPUTE: "recompute: the forward again, for the backward",
    BACKWARD: "backward: gradients that ops made",
}
PARAMETERS = "backward: gradients of parameters"
_FIRST, *_OTHERS = NARROW
_HEADS = (
    "op", "source", "largest |x|", "over", "under", "sub",
    *(f"in {text_table.short(name)}" for name in _OTHERS), "here",
)  # fmt: skip
_RIGHT = _HEADS[2:-1]
_WORST = 8  # parameters named of those that lose updates


def audit_table(
    audit: AuditRecord, width: int | None = None, sort: str = PROGRAM, fold: bool = True
) -> str:
    """Return an audit as text.

    Args:
        audit: the measurements.
        width: of a line, in characters; None for the terminal's.
        sort: "program", "cost" or "largest"; see `Audit.table`.
        fold: True to show equal layers as one.

    Returns:
        The text.

    Raises:
        ValueError: `sort` is something else.
    """
    check_sort(sort, SORTS)
    lines = [f"audit of {text_table.plural(audit.steps, 'step')}"]
    if audit.fault is not None:
        lines += [
            "",
            "first value that is not finite:",
            *text_table.folded(str(audit.fault), width),
        ]
    if audit.backward:
        lines += ["", *text_table.folded("\n".join(scales(audit)), width)]
    if audit.lost_updates:
        lines += ["", *text_table.folded("\n".join(lost(audit)), width)]
    results, owners = by_module(audit.results, fold), by_owner(audit.gradients, fold)
    rows: list[str | tuple[str, ...]] = []
    for direction, name in SECTIONS.items():
        section = [one for one in results if one.section == direction]
        rows += _section(name, section, lambda m: m.op, width, sort)
    rows += _section(PARAMETERS, owners, lambda m: split(m.module)[1], width, sort)
    if rows:
        legend = (
            f"over, under, sub: percent of values that {_FIRST} would make Inf, zero, subnormal"
        )
        lines += ["", *text_table.folded(legend, width)]
        lines += text_table.folded(folding([*results, *owners]), width)
        lines += ["", *text_table.columns(_HEADS, rows, _RIGHT, width)]
    if audit.fp8:
        lines += ["", *audit_fp8_text.fp8_table(audit, width, fold)]
    return "\n".join(lines)


def _section(
    title: str,
    modules: Sequence[ModuleRows[Measured]],
    name: Callable[[Measured], str],
    width: int | None,
    sort: str,
) -> Iterator[str | tuple[str, ...]]:
    """The rows of a section, under their modules."""
    if modules:
        yield text_table.heading(title, width)
    for one in ordered(modules, sort, lambda one: (m.magnitudes for m in one.rows)):
        yield label(one, OUTSIDE)
        found = ordered(one.rows, sort, lambda m: (m.magnitudes,))
        yield from (_cells(m, f"  {name(m)}") for m in found)


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


def _cells(measured: Measured, name: str) -> tuple[str, ...]:
    m = measured.magnitudes
    others = (tuple(map(_percent, m.shares(dtype))) for dtype in _OTHERS)
    return (
        name,
        measured.source,
        power(m.largest),
        *map(_percent, m.shares(_FIRST)),
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


def _here(measured: Measured) -> Iterator[str]:
    """Words on the Inf, NaN and zeros that the values became in this run."""
    m = measured.magnitudes
    yield from (what for what, found in (("Inf", m.inf), ("NaN", m.nan)) if found)
    run = text_table.short(measured.run)
    if m.burst:
        yield f"{text_table.share(m.burst)} Inf because of {run}"
    if m.vanished:
        yield f"{text_table.share(m.vanished)} zero because of {run}"
    yield from (f"{number:g} is zero in {run}" for number in measured.numbers)


def power(value: float) -> str:
    """A magnitude as a power of two and as a number: "2**13.3 = 1e+04"; "0" for zero."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.log2(value)
    if exponent == int(exponent):
        number = f"{value:.0f}" if 0 <= exponent <= 20 else f"{value:.2g}"
        return f"2**{exponent:.0f} = {number}"
    return f"2**{exponent:.1f} = {value:.2g}"
