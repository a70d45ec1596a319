"""An audit as text, as `print(audit)` shows it.

    AuditRecord -> the fault, the fitting scale, then a row for every op and parameter

Plain characters, as `report_text`; nothing but the standard library is needed.
"""

import math
from collections.abc import Iterable, Iterator

from polymp import plain_text
from polymp.diagnostics.audit_records import AuditRecord, Measured
from polymp.diagnostics.call_record import BACKWARD, FORWARD, RECOMPUTE
from polymp.diagnostics.magnitudes import NARROW
from polymp.diagnostics.report_text import OUTSIDE
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
    *(f"in {plain_text.short(name)}" for name in _OTHERS), "here",
)  # fmt: skip
_RIGHT = _HEADS[2:-1]
_WORST = 8  # parameters named of those that lose updates


def audit_table(audit: AuditRecord, width: int = plain_text.WIDTH) -> str:
    """Return an audit as text.

    Args:
        audit: the measurements.
        width: of a line, in characters.

    Returns:
        The text.
    """
    lines = [f"audit of {plain_text.plural(audit.steps, 'step')}"]
    if audit.fault is not None:
        lines += [
            "",
            "first value that is not finite:",
            *plain_text.folded(str(audit.fault), width),
        ]
    if audit.backward:
        lines += ["", *plain_text.folded("\n".join(scales(audit)), width)]
    if audit.lost_updates:
        lines += ["", *plain_text.folded("\n".join(lost(audit)), width)]
    rows: list[str | tuple[str, ...]] = []
    for direction, name in SECTIONS.items():
        found = [(m.module, m.op, m) for m in audit.results if m.direction == direction]
        section = list(_by_module(found))
        rows += [plain_text.heading(name, width), *section] if section else []
    if audit.gradients:
        named = [(*_split(m.module), m) for m in audit.gradients]
        rows += [plain_text.heading(PARAMETERS, width), *_by_module(named)]
    if rows:
        lines += [
            "",
            f"over, under, sub: percent of values that {_FIRST} would make Inf, zero, subnormal",
            "",
            *plain_text.columns(_HEADS, rows, _RIGHT, width),
        ]
    return "\n".join(lines)


def _split(parameter: str) -> tuple[str, str]:
    """The module of a parameter and its name there."""
    module, _, name = parameter.rpartition(".")
    return module, name


def scales(audit: AuditRecord) -> list[str]:
    """The loss scale of the run, and the one that fits."""
    used = "none, or not known" if audit.scale == 1 else power(audit.scale)
    fitting = audit.fitting_scale(_FIRST)
    if fitting is None:
        return [f"loss scale: {used}; no finite gradient other than zero to fit one to"]
    lost = [plain_text.share(audit.lost_gradients(_FIRST, s)) or "none" for s in (1.0, fitting)]
    return [
        f"loss scale: {used}; the largest at which no {_FIRST} gradient overflows: "
        f"{power(fitting)}",
        f"gradients that become zero in {_FIRST}: {lost[0]} unscaled, {lost[1]} at that scale",
    ]


def lost(audit: AuditRecord) -> list[str]:
    """The share of updates of low weights that were rounded away, and the worst parameters."""
    records = audit.lost_updates
    share = plain_text.share(lost_updates.share(records)) or "none"
    advice = "" if share == "none" else "; low_weights() keeps them"
    worst = [each for each in lost_updates.worst(records, _WORST) if each.lost]
    return [
        f"updates of low weights that were rounded away: {share}{advice}",
        *(f"  {each.name} ({each.dtype}): {plain_text.share(each.share)}" for each in worst),
    ]


def _by_module(found: Iterable[tuple[str, str, Measured]]) -> Iterator[str | tuple[str, ...]]:
    """The rows, under their modules in the order in which these were first reached."""
    modules: dict[str, list[tuple[str, ...]]] = {}
    for module, name, measured in found:
        modules.setdefault(module, []).append(_cells(measured, f"  {name}"))
    for module, cells in modules.items():
        yield module or OUTSIDE
        yield from cells


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
    run = plain_text.short(measured.run)
    if m.burst:
        yield f"{plain_text.share(m.burst)} Inf because of {run}"
    if m.vanished:
        yield f"{plain_text.share(m.vanished)} zero because of {run}"
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
