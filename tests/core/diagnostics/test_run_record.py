"""The file of a record: what is written is read, and what is no record is refused in words."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polymp.diagnostics import run_record
from polymp.diagnostics.run_record import (
    AMAX,
    BLOCK,
    ELEMENTS,
    MEAN,
    MEAN_MAGNITUDE,
    PROJECTIONS,
    RMS,
    VALUES,
    places,
    signs,
)
from polymp.errors import RecordError
from tests.support import run_records
from tests.support.run_records import summary


@pytest.fixture
def two_steps(tmp_path: Path) -> Path:
    program = run_records.calls(2)
    steps = [run_records.arrays(program, seed) for seed in (1, 2)]
    return run_records.written(tmp_path / "two.rec", run_records.record(*steps))


def test_what_is_written_is_read(two_steps: Path) -> None:
    found = run_records.record(*(step.arrays for step in run_record.read(two_steps).steps))
    program = run_records.calls(2)
    made = run_records.record(*(run_records.arrays(program, seed) for seed in (1, 2)))
    for step, other in zip(found.steps, made.steps, strict=True):
        for one, two in zip(step.arrays, other.arrays, strict=True):
            assert one._replace(spread=(), own=0.0) == two._replace(spread=(), own=0.0)
            assert one.spread == pytest.approx(two.spread, rel=1e-6), "in float32"
    assert run_record.read(two_steps).header.items() >= run_records.HEADER.items()
    assert not run_record.read(two_steps).cut


@pytest.mark.parametrize("size", [1e-300, 1e300])
def test_how_far_rounding_moves_what_float64_alone_holds(tmp_path: Path, size: float) -> None:
    made = run_records.arrays(run_records.calls(1))
    for at, a in enumerate(made):
        values, spread = (tuple(size * v for v in each) for each in (a.values, a.spread))
        made[at] = a._replace(values=values, spread=spread)
    path = run_records.written(tmp_path / "a.rec", run_records.record(made))
    (step,) = run_record.read(path).steps
    for one, two in zip(step.arrays, made, strict=True):
        assert one.spread == pytest.approx(two.spread, rel=1e-6, abs=0.0)


@pytest.mark.parametrize("moved", [[1e30, 1.0], [3e38, -3e38], [0.0, 1e20]])
def test_a_change_that_float32_has_no_square_of_is_not_known(moved: list[float]) -> None:
    x, rows = np.float32([-1e-8, 1.0]), np.float32([moved, moved])
    with np.errstate(over="ignore", invalid="ignore"):
        changes = run_record.changes(x, rows - x, run_record.places(2), np)
    assert run_record.spread(changes, [1.0] * VALUES, 2) == (math.inf,) * VALUES


def test_without_probes_there_is_no_spread(tmp_path: Path) -> None:
    made = run_records.record(run_records.arrays(run_records.calls(1), probes=0))
    (step,) = run_record.read(run_records.written(tmp_path / "a.rec", made)).steps
    assert {a.spread for a in step.arrays} == {()}


# --- the numbers of an array ----------------------------------------------------------------------


def test_the_numbers_of_an_array() -> None:
    x = np.array([[3.0, -4.0], [0.0, np.nan], [np.inf, 1.0]])
    values, zeros, bad = summary(x)
    assert (len(values), zeros, bad) == (VALUES, 1, 2)
    assert values[AMAX] == 4.0
    assert values[RMS] == pytest.approx((26 / 6) ** 0.5)
    assert (values[MEAN], values[MEAN_MAGNITUDE]) == (pytest.approx(0.0), pytest.approx(8 / 6))
    assert {*values[ELEMENTS]} <= {3.0, -4.0, 0.0, 1.0}
    assert summary(np.zeros((0, 3))) == ((0.0,) * VALUES, 0, 0)
    assert summary(np.full(9, 1e300))[0][RMS] == pytest.approx(1e300), "whose square is not finite"
    assert summary(np.full(9, 1e-300))[0][RMS] == pytest.approx(1e-300), "whose square is zero"
    assert summary(np.array([1e300, np.inf]))[1:] == (0, 1)


@pytest.mark.parametrize("count", [5, BLOCK, 16 * BLOCK, 16 * BLOCK + 1, 40 * BLOCK - 3])
def test_the_numbers_of_a_long_array_are_those_of_its_definition(count: int) -> None:
    x = np.random.default_rng(0).standard_normal(count)
    outer, inner = (each[1:].T for each in signs(count // BLOCK + 1))
    signed = np.repeat(outer, BLOCK, 0)[:count] * np.tile(inner, (count // BLOCK + 1, 1))[:count]
    values, zeros, bad = summary(x)
    assert (zeros, bad) == (0, 0)
    np.testing.assert_allclose(values[PROJECTIONS], x @ signed / count**0.5, atol=1e-9)
    np.testing.assert_array_equal(values[ELEMENTS], x[[*places(count)]])
    ends = np.abs(x).max(), (x**2).mean() ** 0.5, x.mean(), np.abs(x).mean()
    np.testing.assert_allclose(values[:4], ends, atol=1e-12)


def test_the_mean_square_of_projections_is_that_of_the_array() -> None:
    """So that a difference of any kind shows, wherever it is."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 3 * BLOCK + 17))
    projected = np.array([summary(row)[0][PROJECTIONS] for row in x])
    assert (projected**2).mean() == pytest.approx(1.0, rel=0.15)
    one = np.zeros(2 * BLOCK)
    one[BLOCK + 5] = 7.0
    assert np.abs(summary(one)[0][PROJECTIONS]) == pytest.approx(7.0 / (2 * BLOCK) ** 0.5)


# --- files that are no whole records --------------------------------------------------------------


def test_a_file_that_is_cut_anywhere_has_the_whole_steps_or_none(two_steps: Path) -> None:
    whole = two_steps.read_bytes()
    header, first, _, rest = whole.split(b"\n")
    assert rest == b""
    ends = len(header) + 1, len(header) + len(first) + 2
    for at in {*range(0, len(whole), 997), ends[0] - 1, ends[0], *range(ends[1] - 2, ends[1] + 2)}:
        two_steps.write_bytes(whole[:at])
        if at < ends[1]:
            with pytest.raises(RecordError, match=r"no whole step|does not begin as one"):
                run_record.read(two_steps)
        else:
            found = run_record.read(two_steps)
            assert (len(found.steps), found.cut) == (1, at > ends[1])


def changed(path: Path, change: Callable[[Any], object], line: int = 1) -> None:
    """Change one line of a file by a function of its data."""
    lines = path.read_text().split("\n")
    data = json.loads(lines[line])
    change(data)
    lines[line] = json.dumps(data)
    path.write_text("\n".join(lines))


DAMAGE = {
    "a key is gone": lambda d: d.pop("values"),
    "no table": lambda d: d.update(arrays=3),
    "a row too short": lambda d: d["arrays"][0].pop(),
    "no number": lambda d: d["arrays"][0].__setitem__(3, "many"),
    "below zero": lambda d: d["arrays"][0].__setitem__(3, -1),
    "beyond 63 bits": lambda d: d["arrays"][0].__setitem__(2, [2**70]),
    "a place that is not there": lambda d: d["arrays"][0].__setitem__(0, [99999] * 8),
    "it reads a later array": lambda d: d["arrays"][2].__setitem__(5, [50]),
    "it reads itself": lambda d: d["arrays"][2].__setitem__(5, [2]),
    "no text": lambda d: d.update(texts=[3] * len(d["texts"])),
    "too few numbers": lambda d: d.update(values=d["values"][:64]),
    "no base64": lambda d: d.update(own="\u20ac" * 8),
    "numbers of no size": lambda d: d.update(own="AAA="),
    "no settings": lambda d: d.update(settings=[]),
    "settings of nothing": lambda d: d.update(settings={"SGD 1": 3}),
    "no counts": lambda d: d.update({"left out": {"why": "many"}}),
    "no list of what is left out": lambda d: d.update({"left out": None}),
    "no step": lambda d: d.update(step=None),
}


@pytest.mark.parametrize("change", DAMAGE.values(), ids=[*DAMAGE])
def test_damage_is_named_with_its_line(change: Callable[[Any], object], two_steps: Path) -> None:
    changed(two_steps, change, line=2)
    with pytest.raises(RecordError, match=r"^'two\.rec' is damaged in line 3: \w+Error: "):
        run_record.read(two_steps)


HEADERS = {
    "format": ({"polymp record": 1}, "is a record of format 1, by polymp"),
    "old": ({"polymp record": "x" * 5000}, "is a record of format 'xxx"),
    "versions": ({"versions": 3}, "is damaged in line 1: versions is 3."),
    "ranks": ({"ranks": "many"}, "is damaged in line 1: ranks is 'many'."),
    "probes": ({"probes": [8]}, "is damaged in line 1: probes is"),
    "modules": ({"modules": "blocks"}, "is damaged in line 1: modules is 'blocks'."),
}


@pytest.mark.parametrize(("header", "said"), HEADERS.values(), ids=[*HEADERS])
def test_another_header(header: dict[str, object], said: str, two_steps: Path) -> None:
    changed(two_steps, lambda data: data.update(header), line=0)
    with pytest.raises(RecordError) as caught:
        run_record.read(two_steps)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    "text", ["", "\n", "[]\n", "3\n", "null\n", "{}\n", "[" * 100_000, "{" + "\n" * 9]
)
def test_other_files(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other\x1b[31m.txt"
    path.write_text(text)
    with pytest.raises(
        RecordError, match=r"^'other\\x1b\[31m\.txt' is no record of polymp: it does"
    ):
        run_record.read(path)
