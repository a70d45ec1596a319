"""An audit as text and as a picture: the numbers are those of the arrays, and nothing overlaps."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")
import matplotlib

from polymp.diagnostics import audit as audits
from polymp.diagnostics import audit_plot
from polymp.diagnostics.audit_records import Operand
from polymp.diagnostics.magnitudes import NARROW
from polymp.dtypes import FORMATS
from tests.support import reports
from tests.support.dtype_spellings import spellings
from tests.support.reports import gradient, magnitudes, measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RANDOM = np.random.default_rng(1)


def small() -> Any:
    """Two modules; one overflows, and its weight's gradient vanishes."""
    up = [1.0] * 90 + [70_000.0] * 9 + [np.inf]
    results = [
        measured("linear", "net.up", up),
        measured("exp", "net.up", [2.0**-20] * 3 + [0.0], run="bfloat16", source="model.py:2"),
        measured("sum", "", [300.0], source="train.py:3", run="float32"),
        measured("matmul", "net.up", [2.0**-30, 1.0], direction="backward", source="model.py:1"),
        measured("linear", "net.up", [1.0], direction="recompute"),
    ]
    small = [2.0**-26] * 3 + [2.0**-16]
    return reports.audit(results, [gradient("net.up.weight", small)], scale=1024.0)


PRINTED = """\
audit of 3 steps

loss scale: 2**10 = 1024; the largest at which no float16 gradient overflows: 2**14 = 16384
gradients that become zero in float16: 67 % unscaled, none at 1024, none at 16384
rounding errors: not measured, audit(..., rounding=True) does

over, under, sub: percent of values that float16 would make Inf, zero, subnormal; here: those that
  float16 made so in this run

op        source           largest |x|  over  under  sub  in bf16  in e4m3  in e5m2  here
--------  ----------  ----------------  ----  -----  ---  -------  -------  -------  ----
-- forward: results of ops -------------------------------------------------------------------------
net.up
  linear  model.py:1   2**16.1 = 7e+04    10              1.0/-/-   10/-/-   10/-/-  Inf
  exp     model.py:2  2**-20 = 9.5e-07                75            -/75/-   -/75/-
(top level)
  sum     train.py:3    2**8.2 = 3e+02
-- recompute: the forward again, for the backward --------------------------------------------------
net.up
  linear  model.py:1          2**0 = 1
-- backward: gradients that ops made ---------------------------------------------------------------
net.up
  matmul  model.py:1          2**0 = 1           50                 -/50/-   -/50/-
-- backward: gradients of parameters ---------------------------------------------------------------
net.up
  weight              2**-16 = 1.5e-05           75   25           -/100/-  -/75/25"""


def test_printed_by_direction_and_module() -> None:
    assert str(small()) == PRINTED


def test_what_became_of_the_values_here_is_told() -> None:
    base = magnitudes([1.0, 2.0])
    rows = [
        measured("exp", "m", base._replace(burst=0.25, inf=True, nan=True)),
        measured("mul", "m", base._replace(vanished=0.5)),
        measured("add", "m", base, numbers=(1e-12,)),
    ]
    text = " ".join(str(reports.audit(rows, [])).split())
    for words in ("Inf, NaN, 25 % Inf", "50 % zero", "1e-12 is zero"):
        assert words in text
    assert "loss scale" not in text


def test_the_fault_stands_first() -> None:
    audit = reports.transformer(8)
    text = str(audit)
    said = text.index("first value that is not finite:\nmatmul (aten:matmul) in module 'blocks")
    assert said < text.index("loss scale") < text.index("encoder.blocks.0")
    assert max(map(len, text.splitlines())) == 100
    assert "not finite" not in str(reports.transformer(8, faulty=False))


def test_an_audit_of_nothing_and_of_zeros() -> None:
    assert str(reports.audit([], [], steps=0)) == "audit of 0 steps"
    assert "no finite gradient other than zero" in str(reports.audit([], [gradient("w", [0.0])]))


def long_names() -> Any:
    """Rows with all columns, and names as models have them."""
    base = magnitudes([2.0**-30, 1e-5, 3e38, *[1.0] * 17])._replace(vanished=0.75, burst=0.01)
    at = {"source": "modeling_llama_attention.py:1234"}
    ops = ("scaled_dot_product_attention", "linear", "native_layer_norm")
    rows = [measured(op, f"model.layers.{i}.self_attn", base, **at) for i, op in enumerate(ops)]
    return reports.audit(rows, [gradient("model.layers.0.self_attn.q_proj.weight", [1e-9, 1.0])])


@pytest.mark.parametrize("width", [80, 90, 100, 140])
def test_no_cell_of_a_table_is_broken_over_many_lines(width: int) -> None:
    text = long_names().table(width=width)
    assert max(map(len, text.splitlines())) <= width
    for words in ("scaled_dot_product_attention", "attention.py:1234", "1 % Inf, 75 % zero"):
        assert text.count(words) == {"attention.py:1234": 3, "1 % Inf, 75 % zero": 3}.get(words, 1)
    rows = text[text.index("-- forward") :].splitlines()
    assert len(rows) == 2 + 4 + 4 * (2 if width < 140 else 1)  # sections, modules, rows
    wider = re.search(r"no room for .*float8_e5m2: table\(width=(\d+)\) has them", text)
    assert (wider is None) == ("in e5m2" in text) == (width in (90, 100))
    if wider:
        assert "no room for" not in long_names().table(width=int(wider[1]))


def test_the_rows_of_which_float16_loses_most_are_listed_alone() -> None:
    rows = [measured("exp", "m", [2.0**-30] * n + [1.0] * (9 - n)) for n in (1, 5, 3)]
    text = reports.audit(rows, []).table(limit=2)
    assert [line.split()[5] for line in text.splitlines() if line.startswith("  exp")] == [
        "56",
        "33",
    ]
    assert "1 row of which float16 loses less not listed" in text
    assert "not listed" not in reports.audit(rows, []).table(limit=3)
    with pytest.raises(ValueError, match="limit=0 lists no call"):
        small().table(limit=0)


def test_an_audit_is_a_page_and_its_records_have_short_words(tmp_path: Path) -> None:
    audit = small()
    page = audit.to_html(tmp_path / "audit.html")
    assert (tmp_path / "audit.html").read_text(encoding="utf-8") == page
    for words in ("gradients that become zero", "net.up", "exp", "model.py:2", "backward: grad"):
        assert words in page
    assert page.count("<tr") == 1 + len(audit.results) + len(audit.gradients)
    named = reports.audit([measured("exp", "<script>", [1.0])], [])
    assert "<script>" not in named.to_html().partition("<tbody>")[2].partition("</tbody>")[0]
    assert len(repr(audit.results[0])) < 400
    assert len(repr(audit)) < 100


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0, "0"), (1.0, "2**0 = 1"), (65536.0, "2**16 = 65536"), (1e-3, "2**-10.0 = 0.001")],
)
def test_powers(value: float, words: str) -> None:
    assert audits.power(value) == words


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (0, ""),
        (1e-7, "<.1"),
        (0.0014, "0.1"),
        (0.0999, "10"),
        (0.53, "53"),
        (0.9999, ">99"),
        (1, "100"),
    ],
)
def test_percents_are_all_or_nothing_only_if_they_are(part: float, words: str) -> None:
    assert audits._percent(part) == words


# The picture.


def panels(figure: Figure) -> tuple[Axes, Axes]:
    """The two that have the rows."""
    left, right = (axes for axes in figure.axes if axes.get_xlabel() == "magnitude")
    return left, right


def bands(axes: Axes) -> dict[int, tuple[float, float]]:
    """The ends of each row's band."""
    return {
        round(bar.get_y() + bar.get_height() / 2): (bar.get_x(), bar.get_x() + bar.get_width())
        for bars in axes.containers
        for bar in bars
    }


def ticks(axes: Axes) -> dict[int, float]:
    """Where each row's largest magnitude is marked."""
    upright = [line for line in axes.lines if list(line.get_xdata()) == [line.get_xdata()[0]] * 2]
    return {
        round(float(np.mean(line.get_ydata()))): float(line.get_xdata()[0])
        for line in upright
        if np.ptp(line.get_ydata()) == pytest.approx(0.8)
    }


def drawn_texts(figure: Figure) -> list[Any]:
    """The visible texts, with where they are."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    found = [t for t in figure.findobj(matplotlib.text.Text) if t.get_visible() and t.get_text()]
    hidden = [t for axes in figure.axes if not axes.axison for t in axes.get_xticklabels()]
    hidden += [t for axes in figure.axes if not axes.axison for t in axes.get_yticklabels()]
    return [t for t in found if t not in hidden]


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that are drawn over each other, or over the figure's edge."""
    boxes = [(t.get_text(), t.get_window_extent()) for t in drawn_texts(figure)]
    page = figure.bbox
    bad = [
        (text, "edge")
        for text, box in boxes
        if box.x0 < page.x0 or box.x1 > page.x1 or box.y0 < page.y0 or box.y1 > page.y1
    ]
    for at, (text, box) in enumerate(boxes):
        bad += [(text, other) for other, there in boxes[:at] if box.overlaps(there)]
    return bad


def test_a_band_reaches_from_5_to_95_percent_and_the_tick_is_the_largest() -> None:
    values = RANDOM.lognormal(-3, 2, 20_000).astype(np.float32)
    back = RANDOM.lognormal(-12, 1, 20_000).astype(np.float32)
    audit = reports.audit([measured("linear", "m", values)], [gradient("m.weight", back)])
    for axes, array in zip(panels(audit.plot()), (values, back), strict=True):
        low, high = bands(axes)[0]
        # A bin is a sixteenth of a power of two wide, and drawn from where it begins.
        assert low == pytest.approx(np.log2(np.quantile(array, 0.05)), abs=0.1)
        assert high == pytest.approx(np.log2(np.quantile(array, 0.95)), abs=0.1)
        assert ticks(axes) == {0: pytest.approx(math.log2(array.max()))}


def test_a_row_for_each_module_with_all_that_belongs_to_it() -> None:
    audit = small()
    rows = {row.module: row for row in audit_plot.layers(audit)}
    assert list(rows) == ["net.up", ""]
    forward, back = rows["net.up"].forward, rows["net.up"].gradient
    assert forward is not None
    assert back is not None
    assert forward.values == 104, "both ops, and not the recompute"
    assert back.values == 6, "of the op and of the parameter"
    assert rows[""].gradient is None
    left, right = panels(audit.plot())
    assert [t.get_text() for t in left.get_yticklabels()] == ["net.up", "(top level)"]
    assert ticks(left) == {0: math.log2(70_000), 1: math.log2(300)}
    assert ticks(right) == {0: 0.0}
    assert left.get_xlim() == right.get_xlim()
    assert left.get_ylim() == right.get_ylim()


def test_parameters_belong_to_the_innermost_module_that_ran() -> None:
    names = ["a.b.weight", "a.b.c.weight", "x.y.bias", "scale"]
    audit = reports.audit([measured("linear", "a.b", [1.0])], [gradient(n, [1.0]) for n in names])
    found = {row.module: row.gradient.values for row in audit_plot.layers(audit) if row.gradient}
    assert found == {"a.b": 2, "x.y": 1, "": 1}


def test_the_ranges_are_those_of_the_dtypes() -> None:
    left, _ = panels(small().plot())
    lines = {
        (round(float(line.get_xdata()[0]), 6), line.get_color())
        for line in left.lines
        if list(line.get_ydata()) == [0, 1]
    }
    colors = audit_plot._LIGHT.dtypes
    for name in NARROW:
        f = FORMATS[name]
        for edge in (f.smallest_subnormal, f.smallest_normal, f.max):
            assert (round(math.log2(edge), 6), colors[name]) in lines
    assert len(lines) == 3 * len(NARROW)
    texts = [t.get_text() for t in drawn_texts(small().plot())]
    assert all(texts.count(name) == 2 for name in NARROW), "each labelled in both panels"
    one = small().plot(dtype="bfloat16")
    assert [n for n in NARROW if n in {t.get_text() for t in drawn_texts(one)}] == ["bfloat16"]
    assert one.get_figheight() < small().plot().get_figheight()


def test_what_has_no_place_on_the_axis_is_written_beside_it() -> None:
    audit = reports.audit(
        [measured("linear", "m", [1.0, np.inf, np.nan]), measured("linear", "n", [np.nan])],
        [gradient("m.w", [0.0, 0.0]), gradient("n.w", [1.0])],
    )
    left, right = panels(audit.plot())
    assert [(t.get_text(), t.xy[1]) for t in left.texts] == [("Inf NaN", 0), ("NaN", 1)]
    assert [(t.get_text(), t.xy[1]) for t in right.texts] == [("all zero", 0)]
    assert ticks(left) == {0: 0.0}
    assert ticks(right) == {1: 0.0}


@pytest.mark.parametrize("depth", [1, 8, 60])
def test_nothing_overlaps_and_the_height_grows(depth: int) -> None:
    figure = reports.transformer(depth + 2).plot(dark=depth == 8)
    assert overlapping(figure) == []
    sizes = {t.get_fontsize() for t in panels(figure)[0].get_yticklabels()}
    assert sizes == {8.5}
    rows = len(audit_plot.layers(reports.transformer(depth + 2)))
    base = figure.get_figheight() - 0.2 * rows
    assert base == pytest.approx(0.62 + 4 * 0.22 + 0.06 + 0.55)


def test_the_overlap_is_noticed() -> None:
    figure = reports.transformer(8).plot()
    left, _ = panels(figure)
    left.text(0.5, 0.5, "one thing", transform=left.transAxes)
    left.text(0.5, 0.5, "another", transform=left.transAxes)
    figure.text(0.99, 0.5, "beyond the edge")
    bad = overlapping(figure)
    assert ("another", "one thing") in bad
    assert ("beyond the edge", "edge") in bad


def test_far_out_magnitudes_stay_on_the_axis() -> None:
    wide = [2.0**-120] * 10 + [2.0**120]
    figure = reports.audit([measured("linear", "m" * 70, wide)], []).plot()
    left, _ = panels(figure)
    low, high = left.get_xlim()
    assert low < -120
    assert high > 120
    assert overlapping(figure) == []
    label = left.get_yticklabels()[0].get_text()
    assert len(label) == 40
    assert label.startswith("\u2026m")


def test_saved_by_suffix(tmp_path: Path) -> None:
    audit = small()
    audit.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    for name in ("a.svg", "b.svg"):
        audit.plot(tmp_path / name, dark=True)
    svg = (tmp_path / "a.svg").read_text()
    assert "net.up</text>" in svg
    assert audit_plot._DARK.page in svg
    assert svg == (tmp_path / "b.svg").read_text(), "the same picture is the same file"


def test_names_are_drawn_as_they_are_and_a_picture_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    names = ["a$x_1$b", r"$\frac{1", "100%_of_$", r"\alpha^{2}"]
    audit = reports.audit([measured("exp", name, [1.0]) for name in names], [])
    path = tmp_path / "audit.svg"
    left, _ = panels(audit.plot(path))
    assert [label.get_text() for label in left.get_yticklabels()] == names
    before = path.read_text(encoding="utf-8")
    assert all(name in before for name in names)

    def broken(self: Figure, path: Any, **_: Any) -> None:
        Path(path).write_text("half", encoding="utf-8")
        raise OSError("the disk is full")

    monkeypatch.setattr(Figure, "savefig", broken)
    with pytest.raises(OSError, match="full"):
        audit.plot(path)
    assert path.read_text(encoding="utf-8") == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_users_own_style_does_not_change_it() -> None:
    def look(figure: Figure) -> Any:
        return [(t.get_text(), t.get_fontsize(), t.get_color()) for t in drawn_texts(figure)]

    plain = look(small().plot())
    own = {"font.size": 30, "text.color": "red", "axes.grid": True, "axes.titlesize": 40}
    with matplotlib.rc_context(own):
        assert look(small().plot()) == plain
        assert matplotlib.rcParams["font.size"] == 30


@pytest.mark.one_in(2)
@pytest.mark.parametrize("low", ["float16", "float8_e5m2"])
def test_every_spelling_of_a_dtype(low: str) -> None:
    audit = small()
    drawn = [t.get_text() for t in drawn_texts(audit.plot(dtype=low))]
    for spelling in spellings(low):
        assert [t.get_text() for t in drawn_texts(audit.plot(dtype=spelling))] == drawn
        assert audit.fitting_scale(spelling) == audit.fitting_scale(low)
        assert audit.lost_gradients(spelling) == audit.lost_gradients(low)


def test_bad_input_is_refused_before_anything_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"dtype 'float32' is not accepted here\. Write float16"):
        small().plot(dtype="float32")
    with pytest.raises(ValueError, match=r"a\.txt' does not end in one of \.png, \.svg, \.pdf"):
        small().plot(tmp_path / "a.txt")
    with pytest.raises(ValueError, match="nothing was measured: run a step in the"):
        reports.audit([], []).plot(tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        ImportError, match=r"^Audit\.plot needs matplotlib: pip install matplotlib$"
    ):
        small().plot(tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []
    assert str(small()) == PRINTED, "the table needs no package"


def test_a_fault_has_its_module_and_line_if_they_are_known() -> None:
    fault = reports.transformer(8).fault
    assert fault is not None
    known = fault._replace(module="0", source="train.py:12")
    first, *_ = str(known).splitlines()
    assert first == (
        "matmul (aten:matmul) in module '0' at train.py:12, forward, ran in float16, "
        f"by the row {fault.row}"
    )
    bare, *_ = str(fault._replace(module="", source="", row=None)).splitlines()
    assert bare == "matmul (aten:matmul), forward, ran in float16"


def test_an_operand_has_its_shares_in_percent() -> None:
    some = Operand("float16", (2, 3), 1e-7, 2.0, zeros=0.46, inf=0.0, nan=0.0, name="w")
    assert str(some) == "w: float16[2, 3], |x| from 1e-07 to 2, 46 % zero"
    assert str(Operand("float16", (2,), 0.0, 0.0, zeros=0.0, inf=0.0, nan=1.0)) == (
        "float16[2], all NaN"
    )


def test_effects_on_the_loss_are_shown_and_added_up() -> None:
    results = [
        measured("linear", f"layers.{i}", [1.0], loss_effect=effect)
        for i, effect in enumerate((0.02, -0.005, None))
    ]
    results.append(measured("sum", "", [1.0], run="float32"))
    audit = reports.audit(results, [])
    assert "changes the loss" not in str(audit), "rounding was not asked for"
    audit.rounding = True
    assert audit.loss_effect == audit.to_dict()["loss_effect"] == pytest.approx(0.015)
    assert audit.to_dict()["results"][0]["loss_effect"] == 0.02
    lines = str(audit).splitlines()
    assert "rounding changes the loss by 1.5 %, to first order" in lines
    assert "layers.* x3" in lines
    assert re.search(r"linear +model.py:1 .* 1\.5$", lines[lines.index("layers.* x3") + 1])
    assert any(re.search(r"linear .* -0\.5$", line) for line in audit.table(fold=False).split("\n"))
    assert ">-0.5<" in audit.to_html(fold=False)
    shown = audit.table(sort="loss", fold=False, limit=1)
    assert "layers.0" in shown
    assert "layers.1" not in shown
    assert "3 rows that change the loss less not listed" in shown


def test_without_a_backward_pass_no_effect_on_the_loss_is_said() -> None:
    audit = reports.audit([measured("linear", "", [1.0])], [])
    audit.rounding = True
    assert audit.loss_effect is None
    assert "of the loss: not measured, for it needs the backward pass" in str(audit)
