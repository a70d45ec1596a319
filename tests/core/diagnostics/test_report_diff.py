"""Two reports side by side: what is equal is not told, what differs is told once, in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from polymp.diagnostics.alignment import matched
from polymp.diagnostics.call_record import Call
from polymp.diagnostics.report import Report
from tests.support import reports
from tests.support.reports import BF16, FP16, FP32, call, linear


def changed(edit: Callable[[Call], Call]) -> Report:
    report = reports.in_torch()
    return Report([edit(c) for c in report], report.title, report.low, report.policy)


def softmax_only(**given: Any) -> Callable[[Call], Call]:
    return lambda c: c._replace(**given) if c.op == "softmax" else c


def test_a_report_does_not_differ_from_itself() -> None:
    diff = reports.in_torch().diff(reports.in_torch())
    assert not diff
    assert diff.same
    assert len(diff) == 0
    assert str(diff) == "one and other: no difference"


def test_what_is_no_report_is_refused() -> None:
    with pytest.raises(TypeError) as error:
        reports.in_torch().diff(3)  # type: ignore[arg-type]
    assert str(error.value) == (
        "diff(other) compares with another report, got 3. Write "
        "report.diff(polymp.explain(model, x, policy=...))."
    )


@pytest.mark.parametrize(
    ("given", "told", "same"),
    [
        ({"inputs": (FP32,)}, ("inputs",), False),
        ({"run": BF16, "outputs": (BF16,)}, ("run", "outputs"), False),
        ({"row": reports.MATMUL}, ("rule",), True),
        ({"casts": 2, "cast_bytes": 7}, ("casts", "cast_bytes"), True),
        ({"times": 2}, ("times",), True),
        ({"row": reports.SOFTMAX, "source": "elsewhere.py:1"}, (), True),
    ],
)
def test_each_thing_that_differs_is_told(given: Any, told: tuple[str, ...], same: bool) -> None:
    diff = reports.in_torch().diff(changed(softmax_only(**given)))
    assert [(row.op, row.module, row.changed) for row in diff] == (
        [("softmax", "blocks.0.attn", told)] if told else []
    )
    assert (bool(diff), diff.same) == (bool(told), same)


def test_a_call_that_only_one_has_leaves_the_others_in_their_pairs() -> None:
    ops = ["linear", "relu", "linear", "softmax"]
    one = Report([call(op, "m", source=f"a:{i}") for i, op in enumerate(ops)])
    more = ["linear", "gelu", "relu", "linear", "softmax"]
    other = Report([call(op, "m", source=f"b:{i}") for i, op in enumerate(more)])
    assert [(r.op, r.one, r.other and r.other.source) for r in one.diff(other)] == [
        ("gelu", None, "b:1")
    ]
    back = other.diff(one)
    assert [(r.op, r.one and r.one.source, r.other) for r in back] == [("gelu", "b:1", None)]
    assert not back.same
    assert not one.diff(other).same


def test_calls_of_another_direction_or_module_are_not_held_against_each_other() -> None:
    one = Report([linear("a", "x:1"), linear("b", "x:2", direction="backward")])
    other = Report([linear("a", "x:1", direction="backward"), linear("b", "x:2")])
    rows = [(r.module, r.direction, r.one is None) for r in one.diff(other)]
    assert rows == [
        ("a", "forward", False),
        ("b", "forward", True),
        ("b", "backward", False),
        ("a", "backward", True),
    ]


def test_torch_with_jax() -> None:
    diff = reports.in_torch().diff(reports.in_jax())
    assert diff.names == ("torch", "jax")
    told = [(r.module, r.op, r.changed) for r in diff if r.direction == "forward"]
    assert told == [
        # The operands are others, but of the same dtype, so the linears do not differ in that.
        ("blocks.0.attn", "linear", ("casts", "cast_bytes")),
        ("blocks.0.attn", "softmax", ()),
        ("blocks.0.attn", "exp", ()),
        ("head", "add", ("inputs", "run", "outputs", "rule")),
        ("", "sum", ()),
    ]
    turned = reports.in_jax().diff(reports.in_torch())
    assert {r.op for r in turned} == {r.op for r in diff}
    assert len(turned) == len(diff)
    assert {r.module for r in turned} == {"Net.blocks.layers.0.attn", "Net.head", ""}


def test_within_a_framework_the_operands_count_one_by_one() -> None:
    def with_inputs(backend: str, inputs: tuple[str, ...]) -> Report:
        return Report([call("linear", "m", backend=backend, inputs=inputs)])

    three, two = with_inputs("torch", (FP32,) * 3), (FP32,) * 2
    assert three.diff(with_inputs("torch", two))
    assert not three.diff(with_inputs("jax", two))
    assert three.diff(with_inputs("jax", (FP32, BF16)))


@pytest.mark.parametrize(
    ("ours", "theirs", "names"),
    [
        (["a", "b"], ["b", "a"], {"a": "a", "b": "b"}),
        (["net.0"], ["net.layers.0"], {"net.layers.0": "net.0"}),
        (["net.layers.0"], ["net.0"], {"net.0": "net.layers.0"}),
        (["fc"], ["MLP.fc", "MLP"], {"MLP.fc": "fc", "MLP": "MLP"}),
        (["", "fc"], ["MLP.fc", "MLP"], {"MLP.fc": "fc", "MLP": ""}),
        (["layers.0"], ["Net.layers.layers.0"], {"Net.layers.layers.0": "layers.0"}),
        # A module of ours has one counterpart, and what is equal is that.
        (["net.0"], ["net.0", "net.layers.0"], {"net.0": "net.0", "net.layers.0": "net.layers.0"}),
        (["fc"], ["A.fc", "fc"], {"A.fc": "A.fc", "fc": "fc"}),
        (["fc"], ["A.fc", "B.fc"], {"A.fc": "fc", "B.fc": "B.fc"}),
        # Two of ours would do: neither is taken.
        (["A.fc", "B.fc"], ["fc"], {"fc": "fc"}),
        # Equinox's own names of its layers are left out.
        (["mlp.up"], ["mlp.up.eqx.nn.Linear"], {"mlp.up.eqx.nn.Linear": "mlp.up"}),
        # A module may have a name like a class.
        (["Wq", "Wk"], ["Net.Wq", "Net.Wk"], {"Net.Wq": "Wq", "Net.Wk": "Wk"}),
        # Names in front that are no class names stay.
        (["fc"], ["mlp.fc"], {"mlp.fc": "mlp.fc"}),
        (["blocks.0"], ["stack.0"], {"stack.0": "stack.0"}),
    ],
)
def test_names_of_containers(ours: list[str], theirs: list[str], names: dict[str, str]) -> None:
    assert matched(ours, theirs) == names


def test_the_names_are_of_what_tells_them_apart() -> None:
    def made(policy: str, low: str, title: str = "net") -> Report:
        return Report([call("relu", "m", region=low)], title, low, policy)

    assert made("amp", BF16).diff(made("lean", FP16)).names == ("amp", "lean")
    assert made("amp", BF16).diff(reports.in_jax()).names == ("torch", "jax")
    assert made("amp", BF16).diff(Report([], policy="lean")).names == ("amp", "lean")
    assert made("amp", BF16).diff(made("amp", FP16)).names == (BF16, FP16)
    assert made("amp", BF16).diff(made("amp", BF16, "later")).names == ("net", "later")
    assert made("amp", BF16).diff(made("", "", "")).names == ("one", "other")


def test_printed_side_by_side() -> None:
    text = str(reports.in_torch().diff(reports.in_jax()))
    assert max(map(len, text.splitlines())) == 100
    head, _, body = text.partition("\n")
    assert head == "torch and jax: 8 differences, other dtypes"
    lines = [" ".join(line.split()) for line in body.splitlines()]
    assert (
        "add bf16, fp32 -> fp32; no row; model.py:32 bf16 x2 -> bf16; widest, in *.head, mine;"
        in lines
    )
    assert "linear 7 casts of 168 KiB; model.py:20 9 casts of 216 KiB; net.py:8" in lines
    sections = [line for line in lines if line.startswith("-- ")]
    assert [s.split()[1] for s in sections] == ["forward", "backward", "recompute:"]
    only = str(reports.in_torch().diff(changed(softmax_only(casts=9))))
    assert only.startswith("one and other: 1 difference, the same dtypes\n")
    assert "9 casts of 600 KiB" in only
    assert "linear" not in only
    none = str(reports.in_torch().diff(changed(softmax_only(casts=0, cast_bytes=0))))
    assert "1 cast of 600 KiB; model.py:22 no cast; model.py:22" in " ".join(none.split())


def test_long_reports_are_compared_call_by_call() -> None:
    one = Report([call("add", "", source=f"a:{i}") for i in range(3000)])
    other = Report([call("mul" if i == 1500 else "add", "", source=f"b:{i}") for i in range(3000)])
    rows = one.diff(other).rows
    assert sorted(r.op for r in rows) == ["add", "mul"]
