"""The harness of the benchmarks: who runs when, what a ratio is of, what a record holds."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import need
from tests.support.benchmarks import benchmark


@pytest.fixture(scope="module")
def pairing() -> ModuleType:
    need("rich")
    return benchmark("pairing")


def test_programs_run_in_turn_and_each_round_starts_with_another(pairing: ModuleType) -> None:
    ran: list[str] = []

    def program(name: str, seconds: float) -> Any:
        def once() -> float:
            ran.append(name)
            return seconds * len(ran)

        return once

    programs = {"a": program("a", 1.0), "b": program("b", 10.0), "c": program("c", 100.0)}
    times = pairing.measure(programs, rounds=4, warm=2)
    assert "".join(ran) == "abcabc" + "abc" + "bca" + "cab" + "abc"
    assert times["a"] == [7e3, 12e3, 14e3, 16e3]
    assert times["b"] == [80e3, 100e3, 150e3, 170e3]


def test_a_ratio_is_of_medians(pairing: ModuleType) -> None:
    row = pairing.row("x", [1.0, 2.0, 9.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0, 3.0], 0.8, "us")
    assert row == pairing.Row("x", 2.0, 3.0, 1.5, 1.5, 3.0, 0.8, "us")


def test_quartiles_are_of_pairs_and_not_of_medians(pairing: ModuleType) -> None:
    base = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
    row = pairing.row("a machine that slows down", base, [b / 2 for b in base])
    assert (row.low, row.high, row.ratio) == (0.5, 0.5, 0.5)
    row = pairing.row("eight ratios", [1.0] * 8, [8.0, 1.0, 7.0, 2.0, 6.0, 3.0, 5.0, 4.0])
    assert (row.low, row.high) == (3.0, 6.0)


@pytest.mark.parametrize(
    ("ratio", "bar", "met"),
    [(0.5, None, None), (0.5, 0.5, True), (0.51, 0.5, False), (math.nan, 0.5, False)],
)
def test_a_bar_is_the_most_a_ratio_may_be(
    pairing: ModuleType, ratio: float, bar: float | None, met: bool | None
) -> None:
    row = pairing.Row("x", 1.0, ratio, ratio, ratio, ratio, bar)
    assert row.met is met
    assert pairing.missed([row]) == (["x"] if met is False else [])


@pytest.mark.parametrize(("base", "ours"), [([], []), ([1.0], [1.0, 2.0])])
def test_figures_without_a_pair_are_refused(
    pairing: ModuleType, base: list[float], ours: list[float]
) -> None:
    with pytest.raises(ValueError, match=f"x: {len(ours)} figures of ours and {len(base)}"):
        pairing.row("x", base, ours)


def test_a_figure_is_the_mean_of_its_runs_and_waits_for_them(pairing: ModuleType) -> None:
    done: list[str] = []
    clock = iter([100.0, 106.0])
    once = pairing.timed(
        lambda: done.append("run"), 3, lambda: next(clock), lambda: done.append("wait")
    )
    assert once() == 2.0
    assert done == ["wait", "run", "run", "run", "wait"]


def test_a_record_is_what_was_given_and_where(pairing: ModuleType, tmp_path: Path) -> None:
    rows = [pairing.row("a / b", [2.0], [1.0], 0.4), pairing.row("c / b", [2.0], [1.0], 0.6)]
    data = {
        "machine": pairing.machine("rich", "no-such-package"),
        "tables": {"some": rows},
        "reasons": {"a / b": "it is so"},
    }
    out = tmp_path / "new" / "x.json"
    assert pairing.save("part", "gpu", data, out) == out
    record = json.loads(out.read_text())
    assert (record["part"], record["device"], record["missed"]) == ("part", "cuda", ["a / b"])
    assert [pairing.Row(**r) for r in record["tables"]["some"]] == rows
    assert set(record["machine"]["versions"]) == {"rich", "polymp"}
    assert record["machine"]["python"] == sys.version.split()[0]
    assert record["machine"]["cores"] >= 1


def test_by_default_a_record_has_its_date_part_and_device_in_its_name(
    pairing: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairing, "RESULTS", tmp_path)
    path = pairing.save("part", "cpu", {"tables": {}})
    record = json.loads(path.read_text())
    assert path == tmp_path / f"{record['date']}-part-cpu.json"


def test_rows_with_one_name_are_refused(pairing: ModuleType, tmp_path: Path) -> None:
    row = pairing.row("a / b", [1.0], [1.0])
    out = tmp_path / "x.json"
    with pytest.raises(ValueError, match="part: more than one row for a / b"):
        pairing.save("part", "cpu", {"tables": {"one": [row], "two": [row]}}, out)
    with pytest.raises(ValueError, match="part: a reason, but no row, for c / b"):
        pairing.save("part", "cpu", {"tables": {"one": [row]}, "reasons": {"c / b": "so"}}, out)
    assert not out.exists()


def test_what_has_no_json_is_refused_before_anything_is_written(
    pairing: ModuleType, tmp_path: Path
) -> None:
    out = tmp_path / "x.json"
    with pytest.raises(TypeError, match="no JSON for <object"):
        pairing.save("part", "cpu", {"tables": {}, "size": object()}, out)
    assert not out.exists()


@dataclass(frozen=True)
class Other:
    name: str
    some_count: int
    by: dict[str, int]
    bar: float | None = None


def test_what_is_shown(pairing: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        pairing.Row("mine / theirs", 200.0, 100.0, 0.5, 0.45, 0.55, 0.4),
        pairing.Row("yours / theirs", 200.0, 1234.5, 0.3, 0.2, 0.4, 0.4, "us"),
    ]
    pairing.show("first", rows)
    pairing.show("second", [Other("x", 12345, {"dots": 3, "adds": 1})])
    pairing.show("nothing", [])
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in lines]
    assert ["what", "ratio", "middle half", "bar", "", "base", "ours", "unit"] in cells
    first = ["mine / theirs", "0.500", "0.450 - 0.550", "0.40", "missed", "200", "100", "ms"]
    second = ["yours / theirs", "0.300", "0.200 - 0.400", "0.40", "met", "200", "1,234", "us"]
    assert cells[4:6] == [first, second]
    assert ["name", "some count", "by", "bar"] in cells
    assert ["x", "12,345", "3 dots, 1 adds", ""] in cells
    assert not any("nothing" in line for line in lines)
