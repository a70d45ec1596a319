"""The rows that hold inside a module: those whose scope matches come before those without one."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from polymp.errors import PolicyError
from polymp.rules.row import Row, holds_in_scope, without


def folded(rows: Iterable[Row], found: Sequence[tuple[object, str]], where: str) -> tuple[Row, ...]:
    """Return the rows that hold where some scopes match."""
    rows = tuple(rows)
    holding = tuple(row for row in rows if not row.scope)
    tied: list[tuple[Row, Row]] = []
    for _, alike in groupby(found, lambda ranked: ranked[0]):
        patterns = [pattern for _, pattern in alike]
        own: dict[tuple[str, str], Row] = {}
        for row in [row for row in rows if row.scope in patterns]:
            other = own.setdefault((row.of, row.dtype), row)
            if other.rule is not row.rule:
                tied.append((other, row))
        holding = (*without(holding, own.values(), holds_in_scope), *own.values())
    for one, other in tied:
        if one in holding:  # else a stronger pattern has settled it
            raise PolicyError(
                f"{where}: {one.scope!r} gives {one.of!r} {one.rule} and {other.scope!r} gives it "
                f"{other.rule}, and neither pattern is the more exact. Make one of them longer."
            )
    return holding
