"""The page of a report: complete, sorted as it says, and made of nothing that a program wrote."""

from __future__ import annotations

import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

import pytest

import polymp
from polymp.diagnostics import page as page_module
from polymp.diagnostics import tables
from polymp.diagnostics.report import Report
from tests.support import reports, run_records

VOID = {"meta", "input", "br", "link", "img"}
NASTY = "</script><script>alert('1')</script><b a=\"&amp;\">"


class Parsed(HTMLParser):
    """A page as a browser reads it: tags that close in order, rows of cells, and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(page)
        self.close()
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> in {self.open}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & {*self.open}:
            self.rows[-1][-1] += data
        if self.open:
            self.texts[self.open[-1]][-1] += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.seen if name == tag]

    def column(self, name: str) -> list[str]:
        return [row[self.rows[0].index(name)] for row in self.rows[1:]]


def nasty() -> Report:
    """Every text in it is markup."""
    given = {"spelling": NASTY, "direction": "forward", "region": NASTY, "run": NASTY}
    call = reports.call(NASTY, NASTY, source=NASTY, inputs=(NASTY,), outputs=(NASTY,), **given)
    call = call._replace(saved=((NASTY, 2),), casts=1, cast_bytes=8, flops=8, kept=4)
    widened = reports.call(NASTY, NASTY, inputs=("bfloat16", "float32"), outputs=("float32",))
    return Report([call, widened], title=NASTY, low=NASTY, policy=NASTY)


@pytest.mark.parametrize("make", [reports.in_torch, reports.in_jax, nasty, Report])
def test_well_formed_and_loads_nothing(make: type[Report]) -> None:
    page = make().to_html()
    parsed = Parsed(page)
    assert page.startswith("<!DOCTYPE html>")
    assert len(parsed.of("script")) == len(parsed.of("style")) == 1
    assert not {"link", "img", "iframe", "object", "base"} & {tag for tag, _ in parsed.seen}
    assert not [a for _, a in parsed.seen if {"src", "href", "action", "onclick"} & {*a}]
    assert "default-src 'none'" in str(parsed.of("meta"))
    assert not re.search(r"url\(|@import|https?:|fetch\(|XMLHttp", page)
    identifiers = [a["id"] for _, a in parsed.seen if "id" in a]
    assert len(identifiers) == len({*identifiers})


def test_what_a_program_wrote_is_only_text() -> None:
    page, plain = nasty().to_html(), reports.in_torch().to_html()
    parsed = Parsed(page)
    assert {tag for tag, _ in parsed.seen} == {tag for tag, _ in Parsed(plain).seen}
    for column in ("module", "op", "source"):
        assert NASTY in parsed.column(column)
    assert parsed.texts["title"] == parsed.texts["h1"]
    assert parsed.texts["title"][0].startswith(f"{NASTY}: 2 call sites")
    assert "<b a=" not in page
    assert "alert('" not in page


def test_every_call_has_its_row_in_the_order_of_the_program() -> None:
    report = reports.in_torch()
    parsed = Parsed(report.to_html())
    assert parsed.rows[0] == [
        "#", "module", "op", "times", "direction", "ran in", "source", "rule", "dtypes", "casts",
        "bytes", "saved", "FLOPs", "kept",
    ]  # fmt: skip
    assert len(parsed.rows) == 10
    assert parsed.column("#") == [str(at) for at in range(1, 10)]
    assert parsed.column("bytes")[:4] == ["", "168 KiB", "600 KiB", "72.0 KiB"]
    linear = parsed.rows[2]
    assert linear[3:7] == ["3", "forward", "bf16", "model.py:20"]
    assert linear[7:10] == ["lower, class:matmul, torch-cuda", "fp32 x3 \u2192 bf16", "7"]
    assert linear[10:] == ["168 KiB", "2 cached", "6.00 M", ""]
    assert "kept" not in Parsed(reports.in_jax().to_html()).rows[0], "columns without a text go"


def test_numbers_sort_by_their_values_and_not_by_their_words() -> None:
    report = reports.in_torch()
    cells = [td for td in Parsed(report.to_html()).of("td")]
    by_row = [cells[i : i + 14] for i in range(0, len(cells), 14)]
    for at, get in {10: "cast_bytes", 12: "flops", 13: "kept", 3: "times", 9: "casts"}.items():
        assert sorted(float(row[at]["data-v"] or "nan") for row in by_row) == sorted(
            float(getattr(call, get)) for call in report.calls
        )
    heads = Parsed(report.to_html()).of("th")
    numeric = [at for at, head in enumerate(heads) if head.get("class") == "n"]
    assert numeric == [at for at, cell in enumerate(by_row[0]) if "data-v" in cell]


def test_the_totals_of_the_text_are_notes() -> None:
    report = reports.in_torch()
    totals = str(report).split("\n\n")[1].splitlines()
    assert Parsed(report.to_html()).texts["p"] == totals


def test_many_rows_stay_small() -> None:
    page = reports.long(1000).to_html()
    assert len(Parsed(page).rows) == 1001
    assert len(page) < 1000 * 700


def test_written_to_a_file_and_framed_in_a_notebook(tmp_path: Path) -> None:
    report = nasty()
    page = report.to_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page == report.to_html()
    frames = Parsed(report._repr_html_()).of("iframe")
    assert [frame["srcdoc"] for frame in frames] == [page]
    assert str(frames[0]["title"]).startswith(NASTY)


def test_a_file_is_replaced_once_the_page_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    inode = path.stat().st_ino
    with monkeypatch.context() as broken:
        broken.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("no room")))
        with pytest.raises(OSError, match="no room"):
            nasty().to_html(path)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [
        ("report.html", "old")
    ]
    nasty().to_html(path)
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]
    assert path.stat().st_ino != inode


# --- the curve: a point for each module, those beyond rounding in another colour ------------------


def drawn(*points: tuple[str, float, float]) -> Parsed:
    table = tables.Table((tables.Column("op"),), [])
    return Parsed(page_module._page("title", [], table, points))


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


# --- the files it is made of ----------------------------------------------------------------------


def test_each_part_is_closed_and_filled_in_somewhere() -> None:
    code = Path(page_module.__file__).read_text(encoding="utf-8")
    parts = page_module._parts()
    assert len(parts) > 6
    for name, part in parts.items():
        Parsed(f"<tr>{part.template}</tr>")
        assert f'"{name}"' in code, f"no code fills in {name}"
    with pytest.raises(AssertionError, match="in "):
        Parsed(f"<tr>{parts['cell'].template.replace('</td>', '</th>')}</tr>")


def test_a_pipe_is_written_and_stays_one(tmp_path):
    pipe = tmp_path / "page.html"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_text, "utf-8")
        reports.in_torch().to_html(pipe)
        assert read.result().endswith("</html>\n")
    assert pipe.is_fifo()
