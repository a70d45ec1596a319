"""The measurements of benchmarks/advice.py: layers as a user has them, and rows with bars."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import FRAMEWORKS, need
from tests.support.benchmarks import benchmark


@pytest.fixture(scope="module")
def advice() -> ModuleType:
    need("rich")
    return benchmark("advice")


@pytest.mark.long  # four processes; `make test` has the try-outs of other benchmarks
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_try_out(advice: ModuleType, framework: str, tmp_path: Path) -> None:
    need(framework)
    out = tmp_path / "record.json"
    argv = ["--framework", framework, "--small", "--rounds", "2", "--out", str(out)]
    assert advice.main(argv) == 0
    record = json.loads(out.read_text())
    assert (record["part"], record["missed"]) == ("advice", [])
    name = advice.NAMES[framework]
    said, advised, scarce, floor = (record["tables"][title] for title in record["tables"])
    shapes = [advice.text(shape) for shape in advice.SMALL]
    assert [r["what"] for r in said] == [
        f"{framework} {shape}, {low}: larger / smaller" for shape in shapes for low in advice.LOW
    ]
    assert all(r["ratio"] >= 1 and r["bar"] is None for r in said)
    assert [r["what"].partition(",")[0] for r in advised] == [f"{framework} {s}" for s in shapes]
    assert len(scarce) <= len(said)
    assert [r["what"].partition(":")[0] for r in floor] == [
        r["what"].partition(":")[0] for r in said
    ]
    assert next(iter(record["tables"])).startswith(name)


def figures(float32: float, bfloat16: float, float16: float) -> dict[str, list[float]]:
    return {"float32": [float32] * 3, "bfloat16": [bfloat16] * 3, "float16": [float16] * 3}


def said(bfloat16: float, use: str, high: float = 0.0) -> dict[str, Any]:
    product = {"m": 1, "k": 2, "n": 3, "use": use, "ratio": {"bfloat16": bfloat16}}
    return {"products": [product | {"spread": {"bfloat16": [0.0, high]}}]}


@pytest.mark.parametrize(
    ("told", "ratio", "met"),
    [(0.5, 1.0, True), (0.6, 1.2, True), (0.61, 1.22, False), (0.4, 1.25, False)],
)
def test_a_prediction_may_be_off_by_a_fifth_either_way(
    advice: ModuleType, told: float, ratio: float, met: bool
) -> None:
    found = {"1x2x3": figures(2.0, 1.0, 3.0)}
    (row,) = advice.differences("torch", said(told, "bfloat16"), found, advice.RIGHT)
    assert row.ratio == pytest.approx(ratio)
    assert (row.ratio <= row.bar + 1e-9) is met


def test_the_floor_is_the_process_that_is_farthest_from_the_others(advice: ModuleType) -> None:
    parts = [{"1x2x3": figures(2.0, low, 2.0)} for low in (1.0, 1.0, 1.5)]
    rows = advice.floor("torch", parts)
    assert [(r.base, r.ours, r.ratio) for r in rows] == [(0.5, 0.75, 1.5), (1.0, 1.0, 1.0)]
    assert all(r.bar is None for r in rows)


def test_a_prediction_without_a_measurement_is_held_to_what_doctor_says_of_it(
    advice: ModuleType,
) -> None:
    found = {"1x2x3": figures(2.0, 1.0, 3.0)}
    (row,) = advice.differences("torch", said(1.0, "bfloat16", 1.9), found, advice.STATED)
    assert (row.bar, row.met) == (pytest.approx(1.9), False)
    (row,) = advice.differences("torch", said(1.0, "bfloat16", 2.1), found, advice.STATED)
    assert row.met


def test_wrong_advice_misses_its_bar(advice: ModuleType) -> None:
    found = {"1x2x3": figures(2.0, 1.0, 3.0)}
    rows = {
        use: advice.advised("torch", said(0.5, use), found, advice.HARMLESS)[0]
        for use in ("float32", "bfloat16", "float16")
    }
    assert {use: row.met for use, row in rows.items()} == {
        "float32": True,
        "bfloat16": True,
        "float16": False,
    }


def test_twelve_shapes_of_every_kind(advice: ModuleType) -> None:
    shapes = advice.SHAPES
    assert len(set(shapes)) == 12
    assert any(m == 1 for m, *_ in shapes)
    assert any(m == k == n for m, k, n in shapes)
    assert any(m * k * n < 2**18 for m, k, n in shapes)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_layer_runs_in_the_dtype_that_it_is_measured_in(
    advice: ModuleType, framework: str
) -> None:
    need(framework)
    for dtype in ("float32", *advice.LOW):
        layer = advice.Layer(framework, (4, 8, 16), dtype)
        with layer.region:
            made = layer.run()
        if framework == "torch":
            assert str(made.dtype) == f"torch.{dtype}"
        else:
            assert layer.finish()[0].dtype.name == dtype
