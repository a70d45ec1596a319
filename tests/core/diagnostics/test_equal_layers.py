"""Equal layers are one row: what differs stays apart, and no count is lost."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from polymp.diagnostics.audit import Audit
from polymp.diagnostics.call_record import BACKWARD, Call
from polymp.diagnostics.report import Report
from polymp.diagnostics.tables import TableKind
from tests.support import reports
from tests.support.reports import call, gradient, linear, measured

Row = tuple[str, str, int]  # module, kind, count


def of(rows: list[Row]) -> list[tuple[str, int, list[tuple[str, int]]]]:
    kind: TableKind[Row] = TableKind(
        lambda row: ("", row[0]),
        alike=lambda row: row[1],
        added=lambda many: (many[0][0], many[0][1], sum(row[2] for row in many)),
        sections={"": ""},
    )
    found = kind.arranged(rows)
    return [(one.module, one.layers, [row[1:] for row in one.rows]) for one in found]


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        (["layers.0", "layers.1", "layers.2"], ["layers.* x3"]),
        (["h.0.a", "h.0.b", "h.1.a", "h.1.b"], ["h.*.a x2", "h.*.b x2"]),
        (["0", "1"], ["* x2"]),
        (["h.0.c.0", "h.0.c.1", "h.1.c.0", "h.1.c.1"], ["h.*.c.* x4"]),
        (["layers_0.up", "layers_1.up"], ["layers_*.up x2"]),
        (["h.9.up", "h.10.up", "h.8.up"], ["h.*.up x3"]),
        # Another layer has none of it.
        (["h.0.up", "h.1.gate", "h.2.up", "h.3.up"], ["h.*.up x3", "h.1.gate"]),
        (["h.0", "g.1"], ["h.0", "g.1"]),
        (["h.0.a", "h.1.b"], ["h.0.a", "h.1.b"]),
        (["layer1", "layer2", ""], ["layer1", "layer2", "(top level)"]),
    ],
)
def test_names(modules: list[str], names: list[str]) -> None:
    kind: TableKind[str] = TableKind(
        lambda m: ("", m), lambda m: None, lambda many: many[0], {"": ""}
    )
    assert [one.label for one in kind.arranged(modules)] == names


def test_a_layer_that_differs_stays_apart_and_in_its_place() -> None:
    rows = [(f"h.{i}", "fp32" if i == 7 else "bf16", 10**i) for i in range(12)]
    assert of(rows) == [
        ("h.0-6", 7, [("bf16", 1111111)]),
        ("h.7", 1, [("fp32", 10**7)]),
        ("h.8-11", 4, [("bf16", 111100000000)]),
    ]


def test_rows_in_another_order_or_one_more_are_another_layer() -> None:
    one, other = [("h.0", "a", 1), ("h.0", "b", 1)], [("h.1", "b", 1), ("h.1", "a", 1)]
    assert len(of(one + other)) == 2
    assert len(of([*one, ("h.1", "a", 1)])) == 2
    assert of([*one, ("h.1", "a", 1), ("h.1", "b", 5)]) == [("h.*", 2, [("a", 2), ("b", 6)])]


def test_no_count_is_lost_in_random_models() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        rows = [
            (f"h.{i}.{draw.choice('ab')}.{draw.randrange(3)}"[: draw.choice((3, 5, 7))],
             draw.choice("xy"), draw.randrange(9))
            for i in range(draw.randrange(9)) for _ in range(draw.randrange(4))
        ]  # fmt: skip
        found = of(rows)
        assert sum(n for _, _, many in found for _, n in many) == sum(row[2] for row in rows)
        assert sum(layers * len(many) for _, layers, many in found) == len(rows)
        assert len({name for name, *_ in found}) == len(found), "two modules of one name"


# The renderers, each of which folds.


def deep(layers: int = 24, odd: int | None = None) -> Report:
    """A model of equal layers, forward and backward; one of them may run in float32."""
    calls: list[Call] = [call("embedding", "embed", source="net.py:1")]
    for direction in ("forward", BACKWARD):
        for i in range(layers):
            at = layers - 1 - i if direction == BACKWARD else i
            run = {"run": "float32"} if at == odd else {}
            module = f"net.layers.{at}.attn"
            calls.append(linear(module, "net.py:7", direction=direction, **run))
            calls.append(call("softmax", module, source="net.py:8", direction=direction))
    return Report(calls, "Deep", "bfloat16", "amp")


def test_a_report_folds() -> None:
    text = str(deep())
    assert text.count("net.layers.*.attn x24") == 2
    assert " ".join(text.split()).count("linear 24 net.py:7") == 2
    assert len(text.splitlines()) < 30
    assert "72 1.69 MiB" in " ".join(text.split()), "casts and bytes of all 24"
    odd = str(deep(odd=7))
    for name in ("net.layers.0-6.attn x7", "net.layers.7.attn", "net.layers.8-23.attn x16"):
        assert odd.splitlines().count(name) == 2


def test_widened_calls_of_equal_layers_are_named_once() -> None:
    mixed: dict[str, Any] = {"inputs": ("bfloat16", "float32"), "outputs": ("float32",)}
    report = Report([call("add", f"h.{i}", run="float32", **mixed) for i in range(24)])
    assert "float32 input: add in h.* x24, model.py:1\n" in f"{report}\n"


def test_a_page_folds_too() -> None:
    page = deep().to_html()
    assert page.count("<tr") == 1 + 5
    assert page.count("net.layers.*.attn x24") == 4, "in each row"


def test_differences_fold() -> None:
    one = deep()
    lean = Report([c._replace(run="float32") for c in one], "Deep", "bfloat16", "lean")
    diff = one.diff(lean)
    assert len(diff) == 97
    assert str(diff).count("net.layers.*.attn x24") == 2


def layered(layers: int = 24, bad: int | None = None) -> Audit:
    results = [
        measured("linear", f"h.{i}.up", [2.0**i, np.inf if i == bad else 1.0], source="net.py:3")
        for i in range(layers)
    ]
    gradients = [gradient(f"h.{i}.up.weight", [2.0**-i]) for i in range(layers)]
    return reports.audit(results, gradients)


def test_an_audit_folds_and_shows_a_broken_layer() -> None:
    text = str(layered())
    assert text.count("h.*.up x24") == 2
    assert "8.4e+06" in text, "the largest of all"
    assert "4.2e+06" not in text
    broken = str(layered(bad=5))
    assert {"h.0-4.up x5", "h.5.up", "h.6-23.up x18", "h.*.up x24"} <= {*broken.splitlines()}
