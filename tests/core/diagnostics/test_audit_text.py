"""An audit as text: rows by direction and module, their orders, widths, and words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polymp.diagnostics.audit import Suggestion
from polymp.diagnostics.audit_records import Fault, Operand
from polymp.rules.row import Row, Rule
from tests.support import reports
from tests.support.reports import gradient, magnitudes, measured


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

loss scale: 1024; the largest at which no float16 gradient overflows: 16384
gradients that become zero in float16: 67 % unscaled, none at 1024, none at 16384
over, under, sub: percent of values that float16 would make Inf, zero, subnormal; here: those that
  float16 made so in this run

op                   largest |x|  over  under  sub  here
-------------------  -----------  ----  -----  ---  ----

-- forward: results of ops -------------------------------------------------------------------------
net.up
  linear model.py:1        7e+04    10              Inf
  exp model.py:2         9.5e-07                75
(top level)
  sum train.py:3           3e+02

-- recompute: the forward again, for the backward --------------------------------------------------
net.up
  linear model.py:1            1

-- backward: gradients that ops made ---------------------------------------------------------------
net.up
  matmul model.py:1            1           50

-- backward: gradients of parameters ---------------------------------------------------------------
net.up
  weight                 1.5e-05           75   25"""


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
    audit = small()
    assert "not finite" not in str(audit)
    audit.fault = reports.fault()
    text = str(audit)
    said = text.index("first value that is not finite:\nmatmul (aten:matmul) in module 'blocks")
    assert said < text.index("loss scale") < text.index("net.up")
    assert max(map(len, text.splitlines())) == 100


def test_an_audit_of_nothing_and_of_zeros() -> None:
    first, _, sees, *_ = str(reports.audit([], [], steps=0)).splitlines()
    assert first == "audit of 0 steps"
    assert sees.startswith("outside of optimizers and JAX's while loops, no op on floats ran")
    assert "no finite gradient other than zero" in str(reports.audit([], [gradient("w", [0.0])]))


def long_names() -> Any:
    """Rows with all columns, and names as models have them."""
    base = magnitudes([2.0**-30, 1e-5, 3e38, *[1.0] * 17])._replace(vanished=0.75, burst=0.01)
    at = {"source": "modeling_llama_attention.py:1234"}
    ops = ("scaled_dot_product_attention", "linear", "native_layer_norm")
    rows = [measured(op, f"model.layers.{i}.self_attn", base, **at) for i, op in enumerate(ops)]
    return reports.audit(rows, [gradient("model.layers.0.self_attn.q_proj.weight", [1e-9, 1.0])])


@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_cell_of_a_table_is_broken_over_many_lines(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = str(long_names())
    assert max(map(len, text.splitlines())) <= width
    assert text.count("scaled_dot_product_attention") == 1
    assert text.count("attention.py:1234") == 3


def test_an_audit_is_a_page_and_its_records_have_short_words(tmp_path: Path) -> None:
    audit = small()
    page = audit.to_html(tmp_path / "audit.html")
    assert (tmp_path / "audit.html").read_text(encoding="utf-8") == page
    for words in ("gradients that become zero", "net.up", "exp", "model.py:2", "in e5m2"):
        assert words in page
    assert page.count("<tr") == 1 + len(audit.results) + len(audit.gradients)
    named = reports.audit([measured("exp", "<script>", [1.0])], [])
    assert "<script>" not in named.to_html().partition("<tbody>")[2].partition("</tbody>")[0]
    assert len(repr(audit.results[0])) < 400
    assert len(repr(audit)) < 100


def test_a_scale_is_exact() -> None:
    """One is the scale of a scaler or stands for none."""
    of_one = str(reports.audit([], [gradient("w", [2.0**-22])], scale=1.0))
    assert "loss scale: 1, or none is known; " in of_one
    assert "overflows: 2.0**36" in of_one
    assert "# Start with a loss scale of 2.0**36." in str(Suggestion(init_scale=2.0**36))
    assert "# Start with a loss scale of 65536." in str(Suggestion(init_scale=65536.0))


def test_the_row_of_a_backward_is_that_of_its_forward() -> None:
    row = Row("cross_entropy", Rule.FP32)
    fault = Fault("cross_entropy", "", "", "", "backward", "overflow", "float16", row, (), "", "")
    assert "ran in float16, its forward by the row cross_entropy = fp32" in str(fault)
    fault = fault._replace(direction="forward")
    assert "ran in float16, by the row" in str(fault)
    kept = str(fault._replace(row=Row("elu", Rule.FP32_KEEP)))
    assert "ran in float32, with its result in float16, by the row elu = fp32_keep" in kept


def test_an_input_of_which_the_ends_are_known_has_some_nan() -> None:
    ends = 1.0, float("nan")
    assert (
        str(Operand.of_ends("float32", (2,), ends, "w")) == "w: float32[2], |x| up to 1, some NaN"
    )
    assert str(Operand.of_ends("float32", (1,), ends[1:], "w")) == "w: float32[1], all NaN"
    assert str(Operand.of_ends("float32", (2,), (0.5, 1.0), "")) == "float32[2], |x| up to 1"
