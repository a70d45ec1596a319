"""An audit as a page: what is said of the run, and a row for every op and parameter."""

from polymp.diagnostics.audit_records import AuditRecord, Measured
from polymp.diagnostics.audit_text import HEADS, RIGHT, cells, head, legend, listed
from polymp.diagnostics.magnitudes import NARROW
from polymp.diagnostics.page import Cell, Head, Line, Page
from polymp.diagnostics.report_text import PROGRAM


def page(audit: AuditRecord, sort: str = PROGRAM, fold: bool = True) -> Page:
    """The page of an audit; see `Audit.to_html`, which raises the same."""
    rows, notes = listed(audit, sort, fold)
    first, *said = filter(None, head(audit))
    table = [cells(row.measured, row.name) for row in rows]
    used = [i for i in range(len(HEADS)) if any(texts[i] for texts in table)]
    lines = []
    for at, (row, texts) in enumerate(zip(rows, table, strict=True)):
        values = dict(zip(RIGHT, _values(row.measured), strict=True))
        start = Cell(str(at + 1), at), Cell(row.module, breaks="parts")
        shown = [Cell(texts[i], values.get(HEADS[i])) for i in used]
        lines.append(Line((*start, *shown), (row.section, row.measured.run)))
    return Page(
        title=first,
        about="",
        figures=(),
        notes=[*said, *legend(audit), *notes],
        heads=(Head("#", True), Head("module"), *(Head(HEADS[i], HEADS[i] in RIGHT) for i in used)),
        sorted=("#", True) if sort == PROGRAM else None,
        selects=("section", "dtype"),
        lines=lines,
        what="row",
    )


def _values(measured: Measured) -> tuple[float, ...]:
    """Numbers that the columns are sorted by."""
    m, (low, *others) = measured.magnitudes, NARROW
    errors = measured.rounding or 0.0, measured.drift or 0.0
    return m.largest, *m.shares(low), *errors, *(sum(m.shares(name)) for name in others)
