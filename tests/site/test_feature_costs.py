"""The table of costs in docs/speed.md is what its generator makes of the records that are kept."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.conftest import need
from tests.support.benchmarks import benchmark


@pytest.fixture(scope="module")
def costs() -> ModuleType:
    need("rich")
    return benchmark("feature_costs")


def rows(**ratios: float) -> dict[str, object]:
    found = [
        {"what": what, "base": 1.0, "ours": r, "ratio": r, "low": r, "high": r, "bar": None,
         "unit": "ms"}
        for what, r in ratios.items()
    ]  # fmt: skip
    return {"tables": {"some": found}}


def test_the_page_has_the_costs_of_the_records(costs: ModuleType) -> None:
    text = costs.PAGE.read_text(encoding="utf-8")
    assert costs.with_costs(text, costs.newest(costs.RESULTS)) == text, (
        "docs/speed.md is not what benchmarks/feature_costs.py makes of benchmarks/results; run it"
    )


def test_every_feature_has_been_measured(costs: ModuleType) -> None:
    """A pattern that fits no row any more would be an empty line of the table."""
    lines = costs.table(costs.newest(costs.RESULTS)).splitlines()[2:]
    assert len(lines) == len(costs.FEATURES)
    assert [line for line in lines if line.count("not measured") == 2] == []


def test_a_cell_is_the_range_of_all_rows_of_the_feature(costs: ModuleType) -> None:
    found = rows(**{
        "mlp 1: frozen / torch.autocast": 0.5,
        "decode: frozen / torch.autocast": 1.256,
        "kernels, decode: frozen / torch.autocast": 9.0,
        "decode: frozen / by hand": 9.0,
        "lora: frozen / torch.autocast": 1.1,
    })  # fmt: skip
    lines = costs.table({"torch-speed": {"cuda": found}}).splitlines()
    assert lines[10].split("|")[3:5] == [" not measured ", " 0.50 to 1.26 "]
    assert lines[11].split("|")[3:5] == [" not measured ", " not measured "]
    assert lines[12].split("|")[3:5] == [" not measured ", " 1.10 "]
    assert "9.00" not in "".join(lines)


def test_a_page_without_the_marks_is_refused(costs: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"docs/speed\.md has to have the lines '<!-- costs"):
        costs.with_costs("# Fast", {})
