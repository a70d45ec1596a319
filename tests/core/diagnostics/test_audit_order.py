"""The orders of an audit: by the program, what float16 loses, size, and effect on the loss."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import reports
from tests.support.reports import gradient, measured


def unequal() -> Any:
    """Four modules, that are in another order by what float16 loses and in another by size."""
    results = [
        measured("linear", "plain", [1.0] * 4),
        measured("exp", "zeros", [2.0**-20] * 4),
        measured("linear", "zeros", [2.0**-30] * 3 + [4.0], loss_effect=1e-3),
        measured("linear", "wide", [70_000.0, 1.0, 1.0, 1.0], run="bfloat16"),
        measured("linear", "large", [60_000.0] * 4, loss_effect=-0.02),
    ]
    return reports.audit(results, [gradient("large.weight", [2.0**-16] * 4)])


def listed(text: str) -> tuple[list[str], list[str]]:
    """The modules and the ops of a table's forward section, in its order."""
    section = text.partition("-- forward")[2].partition("-- backward")[0].splitlines()[1:]
    modules = [line for line in section if not line.startswith(" ")]
    return modules, [line.split()[0] for line in section if line.startswith(" ")]


IN_ORDER = {
    "program": ["plain", "zeros", "wide", "large"],
    "cost": ["wide", "zeros", "plain", "large"],  # some Inf, some zero, and two that lose nothing
    "loss": ["large", "zeros", "plain", "wide"],  # by its size, whatever its sign
}


@pytest.mark.parametrize("sort", IN_ORDER)
def test_a_table_in_each_order(sort: str) -> None:
    modules, ops = listed(unequal().table(sort=sort))
    assert modules == IN_ORDER[sort]
    first = {"program": 1, "loss": 2}  # else it stands behind the other op of its module
    assert ops.index("exp") == first.get(sort, modules.index("zeros") + 1)
    assert sort != "program" or unequal().table() == str(unequal()) == unequal().table(sort=sort)


def test_an_order_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="sort='price'") as raised:
        unequal().table(sort="price")
    assert str(raised.value) == (
        'sort=\'price\' is no order of these rows: write "program", "cost" or "loss".'
    )
