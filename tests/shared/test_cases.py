"""One table of cases, two frameworks: dtypes and values.

The table is `cases`, the frameworks' verbs are `frameworks`. torch runs CUDA's table on CPU
tensors, JAX its default table.
"""

from __future__ import annotations

import contextlib
import zlib
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.conftest import FRAMEWORKS, need
from tests.support import cases, frameworks
from tests.support.cases import LOW, MAIN, OFF, OPS, OTHER, RAISES, Case, Op
from tests.support.regions import region
from tests.support.sizes import LONG

BY_OP: dict[str, list[Case]] = {op.name: [] for op in OPS}
for _case in cases.rows():
    BY_OP[_case.op].append(_case)

by_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def arrays(fw: Any, case: Case) -> list[Any]:
    return [fw.array(v, f) for v, f in zip(cases.values(case.op), case.dtypes, strict=True)]


def found(fw: Any, case: Case) -> str:
    """The dtype that comes out, or "raises"."""
    with fw.wide() if "float64" in case.dtypes else contextlib.nullcontext():
        call = fw.ops[case.op], arrays(fw, case), case.regions, case.made, fw.region
        dtype = fw.dtype_of(*call)
        if dtype != RAISES == getattr(case, fw.name):  # some refusals come when it is compiled
            try:
                fw.run(*call)
            except Exception:
                return RAISES
    return dtype


def in_turn(case: Case) -> bool:
    """True for every row in `make test-long`, and for about a sixth of them in `make test`."""
    return LONG or zlib.crc32(str(case).encode()) % 6 == 0


@pytest.mark.sized
@by_op
def test_a_result_has_the_dtype_that_the_row_names(fw: ModuleType, op: Op) -> None:
    first, *others = BY_OP[op.name]
    rows = [first, *filter(in_turn, others)]
    wanted = {str(case): getattr(case, fw.name) for case in rows}
    assert {str(case): found(fw, case) for case in rows} == wanted


def test_wrong_regions_are_noticed(fw: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [case for name in cases.NESTED for case in BY_OP[name]][::12]
    right = fw.region
    for kinds in ({low: OFF for low in LOW}, OTHER, {OFF: "bfloat16"}):
        monkeypatch.setattr(fw, "region", lambda kind, *fn: right(kinds.get(kind, kind), *fn))  # noqa: B023
        assert sum(found(fw, case) != getattr(case, fw.name) for case in rows) > 0.05 * len(rows)


# float16 inputs whose result is beyond float16, or 0 in it, and is needed by what comes next.
RANGES: dict[str, tuple[list[float], ...]] = {
    "logsigmoid": ([20.0],), "logaddexp": ([0.0], [-20.0]), "logaddexp2": ([0.0], [-30.0]),
    "exp2": ([20.0],), "lgamma": ([2e4],), "digamma": ([1e-5],), "exp": ([12.0],),
    "x ** 2": ([300.0],), "reciprocal": ([1e-5],), "sum": ([6e4, 6e4],), "prod": ([6e4, 6e4],),
}  # fmt: skip


@pytest.mark.parametrize("policy", ["amp", "lean"])
@pytest.mark.parametrize("name", RANGES)
def test_float16_keeps_what_the_next_op_needs(fw: ModuleType, name: str, policy: str) -> None:
    """A logarithm of the result's size, in the same region, is finite."""
    if fw.name == "jax" and name in ("sum", "prod"):
        pytest.skip(cases.CASTS_BACK)
    values = [fw.array(value, "float16") for value in RANGES[name]]

    def sizes(*arrays: Any) -> Any:
        return fw.ops["log"](fw.ops["abs"](fw.ops[name](*arrays)))

    rounded = fw.numbers(fw.cast(fw.ops[name](*values), "float16"))
    assert not np.isfinite(rounded).all() or (rounded == 0).any(), "float16 holds it"
    assert np.isfinite(fw.numbers(region(fw.name, "float16", policy)(sizes)(*values))).all()


def valued(op: Op) -> list[Case]:
    """The cases of an op whose values are looked at: each of the main patterns in one region."""

    def chosen(case: Case) -> bool:
        low = LOW[zlib.crc32(f"{op.name} {MAIN.index(case.inputs) // 2}".encode()) % 2]
        return case.low == low

    rows = [c for c in BY_OP[op.name] if c.inputs in MAIN and c.nesting == "on"]
    return [c for c in rows if RAISES not in (c.torch, c.jax) and chosen(c)]


def computed(fw: Any, op: Op, rows: list[Case]) -> tuple[Any, list[Any]]:
    """The result in float32 outside of regions, and (dtype, numbers) of each case."""

    def call(case: Case) -> Any:
        def run(*arrays: Any) -> Any:
            cast = [fw.cast(x, f) for x, f in zip(arrays, case.dtypes, strict=True)]
            return fw.run(fw.ops[op.name], cast, case.regions, case.made)

        return run

    wide = {"f": "float32", "i": "int", "b": "bool"}
    inputs = [fw.array(v, wide[v.dtype.kind]) for v in cases.values(op.name)]
    exact, *results = fw.together([fw.ops[op.name], *map(call, rows)], inputs)
    return fw.numbers(exact), [(fw.dtype(r), fw.numbers(r)) for r in results]


def too_far(case: Case, name: str, dtype: str, result: Any, exact: Any) -> str:
    error = float(np.abs(result - exact).max(initial=0))
    limit = cases.bound(case, name, dtype, exact)
    return "" if error <= limit else f"{case} in {name}: off by {error:.3g}, bound {limit:.3g}"


@pytest.mark.parametrize("low", LOW)
def test_a_low_softmax_that_is_called_float32_is_noticed(fw, low, monkeypatch) -> None:
    op, right = cases.BY_NAME["softmax"], fw.ops["softmax"]
    rows = [c for c in BY_OP[op.name] if (c.inputs, c.low, c.nesting) == ("made", low, "on")]
    exact, _ = computed(fw, op, rows)
    monkeypatch.setitem(fw.ops, op.name, lambda x: fw.cast(fw.cast(right(x), low), "float32"))
    _, [(dtype, numbers)] = computed(fw, op, rows)
    assert dtype == "float32"
    assert "off by" in too_far(rows[0], fw.name, dtype, numbers, exact)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("op", [op for op in OPS if valued(op)], ids=lambda op: op.name)
def test_results_agree(op: Op) -> None:
    """Each framework's with its own float32, and with the other's within both bounds."""
    rows, results, exacts = valued(op), {}, {}
    need(*FRAMEWORKS)
    for name in FRAMEWORKS:
        fw = frameworks.load(name)
        exacts[name], results[name] = computed(fw, op, rows)
        for case, (dtype, result) in zip(rows, results[name], strict=True):
            assert dtype == getattr(case, name)
            assert too_far(case, name, dtype, result, exacts[name]) == ""
    exact = exacts["torch"]
    far = np.abs(exact - exacts["jax"]).max(initial=0)
    assert far <= 2 * cases.bound(rows[0], "jax", "float32", exact), "float32 itself differs"
    for case, torch, jax in zip(rows, results["torch"], results["jax"], strict=True):
        limit = cases.bound(case, "torch", torch[0], exact) + cases.bound(
            case, "jax", jax[0], exact
        )
        assert np.abs(torch[1] - jax[1]).max(initial=0) <= limit, str(case)
