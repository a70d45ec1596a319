"""The programs of benchmarks/jax_speed.py and contraction.py compute the same."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.conftest import need
from tests.support.benchmarks import benchmark


@pytest.fixture(scope="module")
def speed() -> ModuleType:
    for name in ("jax", "flax", "optax", "rich"):
        need(name)
    return benchmark("jax_speed")


@pytest.fixture(scope="module")
def forms() -> ModuleType:
    for name in ("jax", "rich"):
        need(name)
    return benchmark("contraction")


def outcome(speed: ModuleType, name: str, way: str) -> list[Any]:
    """Return the results of a program's first step: arrays of its state, and its value; float64."""
    import jax

    made = speed.PLANS[name].make(way, speed.SMALL)
    state, value = jax.jit(made.step)(made.state, *made.rest)
    return [np.asarray(x, np.float64) for x in jax.tree.leaves((value, state))]


def apart(ours: list[Any], theirs: list[Any]) -> float:
    assert [x.shape for x in ours] == [x.shape for x in theirs]
    off = sum(((a - b) ** 2).sum() for a, b in zip(ours, theirs, strict=True))
    return float(np.sqrt(off / sum((b**2).sum() for b in theirs)))


def test_ways_are_the_same_model(speed: ModuleType) -> None:
    name = "mlp"
    exact = outcome(speed, name, speed.FULL)
    low = {way: outcome(speed, name, way) for way in (speed.OURS, speed.HAND)}
    for found in low.values():
        assert 0 < apart(found, exact) < 0.02
    # One value of the wrong model is enough to be seen: without its activation, say.
    assert apart([exact[0] * 2, *exact[1:]], exact) > 0.02


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["decode", "lora"])
def test_frozen_is_autocast_bit_for_bit(speed: ModuleType, name: str) -> None:
    frozen, ours = (outcome(speed, name, way) for way in (speed.FROZEN, speed.OURS))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(frozen, ours, strict=True))
    assert apart(ours, outcome(speed, name, speed.FULL)) > 0


def test_the_scaler_changes_no_step(speed: ModuleType) -> None:
    import jax

    after = {}
    for way in (speed.SCALED, speed.PLAIN, speed.DYNAMIC):
        made = speed.PLANS["scaler 64"].make(way, speed.SMALL)
        (params, opt, _), _ = jax.jit(made.step)(made.state, *made.rest)
        after[way] = [np.asarray(x) for x in jax.tree.leaves((params, opt))]
        before = [np.asarray(x) for x in jax.tree.leaves(made.state[0])]
    ours = after[speed.SCALED]
    # A scale is a power of two, so that what it multiplies is divided without a trace.
    assert all(np.array_equal(a, b) for a, b in zip(ours, after[speed.PLAIN], strict=True))
    assert apart(after[speed.DYNAMIC], ours) < 1e-5
    assert apart(ours[: len(before)], before) > 1e-4, "no step was taken"


def test_a_way_that_fails_is_recorded_with_its_reason(
    speed: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def make(way: str, size: Any) -> Any:
        if way == speed.JMP:
            raise ModuleNotFoundError("No module named 'jmp'", name="jmp")
        if way == speed.JAXAMP:
            raise ValueError("too many values to unpack\nand more")
        return speed.workloads.mlp(way, size)

    ways = (speed.OURS, speed.HAND, speed.FULL, speed.JMP, speed.JAXAMP)
    plan = speed.Plan("Tiny, {linears}", make, ways, bars={speed.HAND: 1e9, speed.FULL: 1e-9})
    monkeypatch.setattr(speed, "PLANS", {"tiny": plan})
    out = tmp_path / "record.json"
    assert speed.main(["--workloads", "tiny", "--small", "--rounds", "2", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["missing"]["tiny: jmp"] == "jmp is not installed"
    assert record["missing"]["tiny: jaxamp"].endswith("ValueError: too many values to unpack")
    (rows,) = record["tables"].values()
    bars = {r["what"]: r["bar"] for r in rows}
    assert bars["tiny: autocast / by hand"] is None, "a try-out is held to no bar"
    assert "tiny: autocast / jmp" not in bars
    facts = record["facts"]["tiny"]
    assert facts[speed.OURS]["casts"] > facts[speed.FULL]["casts"] == 0


def test_every_bar_is_of_a_row_that_is_measured(speed: ModuleType) -> None:
    for plan in speed.PLANS.values():
        bases = {b for a, b in plan.pairs if a == plan.ways[0]} or set(plan.ways[1:])
        assert set(plan.bars) <= bases | set(plan.pairs)
        assert {way for pair in plan.pairs for way in pair} <= set(plan.ways)


def test_forms_compute_the_same_and_the_table_is_put_back(forms: ModuleType) -> None:
    import jax

    rules = {p: dict(forms.contraction.FORMS)[p] for p in forms.contraction.FORMS}
    assert next(iter(forms.shapes())) == "up, 4 x 256 x 512 . 512 x 2048"
    shape = forms.shapes(1 / 32)["up, 1 x 8 x 16 . 16 x 64"]
    for part in forms.PARTS:
        right = forms.exact(shape, part)
        # A gradient of a parameter is not rounded at the end; bfloat16 has 8 bits.
        bound = 1e-3 if part == forms.PARTS[2] else 0.4
        for form in (forms.FORMS["row by row"], forms.FORMS["float32 result"]):
            assert forms.error(forms.compiled(shape, part, form)(), right) < bound
        assert forms.error(right * (1 + 2 * bound / 100), right) > bound
    assert dict(forms.contraction.FORMS) == rules

    def text() -> str:
        lowered = jax.jit(forms.program(shape, "forward")).lower(*forms.operands(shape))
        return str(lowered.as_text())

    own = text()
    with forms.lowered_as(forms.FORMS["as asked"]):
        assert text() != own
    assert text() == own
