"""The orders of an audit's rows, in its table and in its picture.

    rows, each with magnitudes -> the same rows, those first that an order asks for

Nothing here knows what a row is.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from polymp.diagnostics.magnitudes import NARROW, Magnitudes
from polymp.diagnostics.report_text import COST, PROGRAM

LARGEST = "largest"
SORTS = (PROGRAM, COST, LARGEST)
R = TypeVar("R")
_FIRST = NARROW[0]


def ordered(
    rows: Sequence[R], sort: str, magnitudes: Callable[[R], Iterable[Magnitudes | None]]
) -> Sequence[R]:
    """Return rows in one of the `SORTS`.

    A row of several magnitudes stands where the first of them would.
    """
    if sort == PROGRAM:
        return rows
    key = _lost if sort == COST else _largest
    return sorted(rows, key=lambda row: min(key(m) for m in magnitudes(row) if m is not None))


def _lost(m: Magnitudes) -> tuple[float, ...]:
    return tuple(-share for share in m.shares(_FIRST))


def _largest(m: Magnitudes) -> tuple[float, ...]:
    return (-m.largest,)
