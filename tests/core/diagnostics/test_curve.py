"""The curve of a page: a point for each module, those beyond rounding in another colour."""

from __future__ import annotations

import math
import re

import pytest

import polymp
from polymp.diagnostics import page, tables
from tests.core.diagnostics.test_report_html import NASTY, Parsed
from tests.support import run_records


def drawn(*points: tuple[str, float, float]) -> Parsed:
    table = tables.Table((tables.Column("op"),), (), [])
    made = page.Page("title", "", [], table, None, "row", curve=points)
    return Parsed(page.html(made))


def percents(parsed: Parsed, of: str) -> list[float]:
    return [float(str(circle[of]).removesuffix("%")) for circle in parsed.of("circle")]


def test_the_order_is_that_of_the_points_and_larger_is_higher() -> None:
    parsed = drawn(("a", 1e-6, 1e-5), ("b", 1e-4, 1e-5), ("c", 1e-2, 1e-5))
    x, y = percents(parsed, "cx"), percents(parsed, "cy")
    assert x == sorted(x)
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.02), "two decades each"
    assert y[0] > y[1] > y[2]
    assert [circle["class"] for circle in parsed.of("circle")] == ["", "alarm", "alarm"]
    (band,) = parsed.of("polygon")
    (line,) = parsed.of("polyline")
    assert str(line["points"]).split() == [f"{a},{b}" for a, b in zip(x, y, strict=True)]
    corners = str(band["points"]).split()
    assert (corners[0], corners[-1]) == ("0,100", "100,100"), "it is filled down to the bottom"
    assert [corner.split(",")[0] for corner in corners[2:-2]] == [str(each) for each in x]


def test_the_numbers_are_titles_and_texts_are_escaped() -> None:
    parsed = drawn((NASTY, 1e-6, 2.5e-5))
    assert f"{NASTY}: 1e-06, rounding explains 2.5e-05" in parsed.texts["title"]
    assert NASTY in parsed.texts["span"]


@pytest.mark.parametrize(
    "points",
    [
        [("a", 0.0, 0.0)],
        [("a", 0.0, 1e-7), ("b", 0.0, 0.0)],
        [("a", math.inf, 1e-7), ("b", 1e-8, 1e-7)],
        [("a", math.inf, 0.0)],
        [("a", math.nan, 1e-7), ("b", 1e-30, math.inf)],
        [("a", 1e-3, 1e-3)],
        [("a", 5e-324, 1e308)],
        [("a", 1.0, 0.0), ("b", 0.0, 10.0)],
    ],
)
def test_zero_and_what_is_not_finite_stay_in_the_box(
    points: list[tuple[str, float, float]],
) -> None:
    parsed = drawn(*points)
    shapes = " ".join(str(s["points"]) for t in ("polygon", "polyline") for s in parsed.of(t))
    ys = percents(parsed, "cy") + [float(pair.split(",")[1]) for pair in shapes.split()]
    assert all(0 <= y <= 100 for y in ys)
    for circle, y, (_, off, _) in zip(
        parsed.of("circle"), percents(parsed, "cy"), points, strict=True
    ):
        if off == 0:
            assert (y, circle["class"]) == (100, "")
        if not math.isfinite(off):
            assert (y, circle["class"]) == (0, "alarm")
    assert 1 <= len(parsed.texts["text"]) <= 8
    assert all(re.fullmatch(r"1e-?\d+", text) for text in parsed.texts["text"])


def test_the_page_of_a_comparison_has_a_point_for_each_module() -> None:
    one, other = run_records.pair(6, epsilon=1e-3)
    found = polymp.compare(one, other)
    parsed = Parsed(found.to_html())
    assert len(parsed.of("circle")) == len(found.growth()) == 6 * 4
    assert {circle["class"] for circle in parsed.of("circle")} == {"alarm"}
    again = polymp.compare(*run_records.pair(6))
    assert {circle["class"] for circle in Parsed(again.to_html()).of("circle")} == {""}


def test_a_page_without_a_curve_has_no_figure() -> None:
    assert not Parsed(page.html(page.Page("t", "", [], tables.Table((), (), []), None, "row"))).of(
        "svg"
    )
