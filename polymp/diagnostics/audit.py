"""The audit of a run: its measurements as a table, a page and a suggestion.

    Measured ... -> Audit -> table, page, first fault, fitting scale, suggestion

`suggest` makes the suggestion; the rows of the table are made here.
"""

import math
from collections.abc import Hashable, Iterator
from os import PathLike
from typing import Any

from polymp import text_table
from polymp.diagnostics import page
from polymp.diagnostics.audit_records import MANY, AuditRecord, Measured, together
from polymp.diagnostics.blame import lost_constants
from polymp.diagnostics.call_record import BACKWARD, FORWARD, NOTHING_RAN, RECOMPUTE
from polymp.diagnostics.magnitudes import NARROW, Magnitudes
from polymp.diagnostics.suggest import Suggestion, suggest
from polymp.diagnostics.tables import PROGRAM, Cell, Column, Table, TableKind
from polymp.errors import escaped
from polymp.rules.policy_files import Source


class Audit(AuditRecord):
    """The measurements of a run, filled when its block ends; `print` shows them as a table.

    Attributes:
        results: of ops, in the order in which they were first reached.
        gradients: of parameters, by name.
        fault: the op that the first value that is not finite came from; None if all were finite.
        steps: how many steps were measured.
        scale: the loss scale that the gradients were multiplied by, 1 if none was known.
    """

    def suggest(self, base: Source = "amp") -> Suggestion:
        """Suggest a change with which the audited steps train: rows, a dtype or a loss scale.

            mine = audit.suggest("amp").apply("amp")

        Ops after the first Inf cannot be judged: if a step still breaks, audit it again.

        Args:
            base: the policy that the steps ran by. An op that ran by a float32 row of it gets no
                other.

        Returns:
            The suggestion, which is false if nothing has to change.

        Raises:
            PolicyError: no such policy.
            ValueError: nothing was measured.
        """
        if not self.results and self.fault is None:
            raise ValueError(
                "nothing was measured: first run a step in the block of polymp.torch.audit, or "
                "call the function that polymp.jax.audit returns."
            )
        return suggest(self, base)

    def table(self, width: int | None = None, *, sort: str = "program", fold: bool = True) -> str:
        """Return the audit as the text that `print(audit)` shows.

        "layers.*.attn x24" are 24 modules with the same ops; the row has the largest magnitude of
        all of them, and the shares of all their values.

        Args:
            width: of a line, in characters; by default the terminal's, and 100 without one.
            sort: "program" for the order in which modules and ops were first reached; "cost" to put
                those first of which float16 would lose most: by the share of values that become
                Inf, of these that become zero, of these that become subnormal.
            fold: False to show equal layers one by one.

        Returns:
            The text.

        Raises:
            ValueError: `sort` is neither.
        """
        width = text_table.terminal_width() if width is None else width
        table = self._table(sort, fold)
        lines = [*_summary(self), *(["", *_notes(table), ""] if table.lines else [])]
        lines = [part for line in lines for part in text_table.folded(line, width)]
        return escaped("\n".join([*lines, *table.text(width)]))

    def _table(self, sort: str = PROGRAM, fold: bool = True) -> Table:
        rows = [*self.results, *self.gradients]
        return _MEASURED.table(rows, _COLUMNS, _cells, sort, fold)

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """Return an HTML page: the same rows, to sort and to filter; see `Report.to_html`.

        Args:
            path: file to write it to as well, in UTF-8.

        Returns:
            The page as text.
        """
        table = self._table()
        first, *others = filter(None, _summary(self))
        return page.html(path, title=first, notes=[*others, *_notes(table)], table=table)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        rows = f"{len(self.results)} results, {len(self.gradients)} gradients"
        return f"Audit({text_table.plural(self.steps, 'step')}, {rows})"

    def _repr_html_(self) -> str:
        return page.framed(self.to_html(), "audit")

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "steps": self.steps,
            "scale": self.scale,
            "fitting_scale": self.fitting_scale(),
            "fault": None if self.fault is None else str(self.fault),
            "results": [m.to_dict() for m in self.results],
            "gradients": [m.to_dict() for m in self.gradients],
        }


# The table: a row for every op and parameter, below lines on the whole run.

_PARAMETERS = "parameters"

_SECTIONS = {
    FORWARD: "forward: results of ops",
    RECOMPUTE: "recompute: the forward again, for the backward",
    BACKWARD: "backward: gradients that ops made",
    _PARAMETERS: "backward: gradients of parameters",
}

_FIRST, *_OTHERS = NARROW

_NUMBERS = ("largest |x|", "over", "under", "sub")

_COLUMNS = (
    Column("op"),
    Column("direction", on_page=True),
    Column("dtype", on_page=True),
    *(Column(name, True) for name in _NUMBERS),
    *(Column(f"in {text_table.short(name)}", True, on_page=True) for name in _OTHERS),
    Column("here"),
)

_LEGEND = (
    f"over, under, sub: percent of values that {_FIRST} would make Inf, zero, subnormal; here: "
    f"those that {_FIRST} made so in this run"
)


def _notes(table: Table) -> list[str]:
    return [*filter(None, (_LEGEND, table.note))]


def _summary(audit: Audit) -> Iterator[str]:
    """Lines on the whole run, above the table."""
    yield f"audit of {text_table.plural(audit.steps, 'step')}"
    if not audit.results:
        yield from ("", f"outside of optimizers, {NOTHING_RAN}")
    if audit.fault is not None:
        yield from ("", "first value that is not finite:", str(audit.fault))
    if audit.backward:
        yield ""
        yield from _scales(audit)


def _scales(audit: Audit) -> Iterator[str]:
    """The loss scale of the run, and the one that fits."""
    used = "none, or not known" if audit.scale == 1 else power(audit.scale)
    fitting = audit.highest_scale()
    if fitting is None:
        yield f"loss scale: {used}; no finite gradient other than zero to fit one to"
        return
    shares = {s: audit.lost_gradients(s) for s in (1.0, audit.scale, fitting)}
    lost = [
        f"{text_table.share(share) or 'none'} {'unscaled' if s == 1 else f'at {s:g}'}"
        for s, share in shares.items()
    ]
    most = "at most " if audit.fitting_scale() is None else ""
    fits = f"the largest at which no {_FIRST} gradient overflows: {most}{power(fitting)}"
    yield f"loss scale: {used}; {fits}"
    yield f"gradients that become zero in {_FIRST}: {', '.join(lost)}"


def _cells(measured: Measured) -> list[Cell | str]:
    """The cells of a row; the numbers are what columns are sorted by."""
    m = measured.magnitudes
    op = measured.module.rpartition(".")[2] if _is_gradient(measured) else measured.op
    first, *others = (m.shares(dtype) for dtype in NARROW)
    texts = (tuple(map(_percent, shares)) for shares in others)
    joined = ("/".join(part or "-" for part in parts) if any(parts) else "" for parts in texts)
    return [
        f"{op} {measured.source}".rstrip(),
        measured.direction,
        text_table.short(measured.run),
        Cell(power(m.largest), m.largest),
        *(Cell(_percent(share), share) for share in first),
        *(Cell(words, sum(shares)) for words, shares in zip(joined, others, strict=True)),
        ", ".join(_here(measured)),
    ]


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


def power(value: float) -> str:
    """A magnitude as a power of two and as a number: "2**13.3 = 1e+04"; "0" for zero."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.log2(value)
    if exponent == int(exponent):
        number = f"{value:.0f}" if 0 <= exponent <= 20 else f"{value:.2g}"
        return f"2**{exponent:.0f} = {number}"
    return f"2**{exponent:.1f} = {value:.2g}"


def _is_gradient(measured: Measured) -> bool:
    """True of the gradient of a parameter."""
    return measured.op == "gradient" and not measured.spelling


def _place(measured: Measured) -> tuple[str, str]:
    if _is_gradient(measured):
        return _PARAMETERS, measured.module.rpartition(".")[0]
    return measured.direction, measured.module


def _alike_measured(measured: Measured) -> Hashable:
    """A layer that its dtype broke, by an Inf or by making most values zero, is like no other."""
    m = measured.magnitudes
    broken = m.inf, m.nan, m.burst > 0, m.vanished > MANY
    module = measured.module.rpartition(".")[2] if _is_gradient(measured) else ""
    same = measured._replace(module=module, magnitudes=_NOTHING)
    return same, *broken


_NOTHING = Magnitudes(0, 0, (), 0.0)

_MEASURED: TableKind[Measured] = TableKind(
    _place,
    _alike_measured,
    together,
    _SECTIONS,
    lambda rows: min(tuple(-s for s in m.magnitudes.shares(_FIRST)) for m in rows),
)
