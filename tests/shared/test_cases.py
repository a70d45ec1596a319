"""One table of cases, two frameworks: dtypes, values, training.

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

from polymp.dtypes import FORMATS
from tests.conftest import FRAMEWORKS, need
from tests.support import cases, frameworks
from tests.support.cases import LOW, MAIN, OFF, OPS, OTHER, RAISES, Case, Op
from tests.support.sizes import LONG

BY_OP: dict[str, list[Case]] = {op.name: [] for op in OPS}
for _case in cases.rows():
    BY_OP[_case.op].append(_case)
ROWS = [case for rows in BY_OP.values() for case in rows]

by_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


# --- the table ------------------------------------------------------------------------------------


def test_a_row_says_why_exactly_where_the_frameworks_differ() -> None:
    assert [str(c) for c in ROWS if bool(c.why) != (c.torch != c.jax)] == []


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_both_have_the_ops_and_no_others(name: str) -> None:
    need(name)
    assert set(frameworks.load(name).ops) == {op.name for op in OPS}


@by_op
def test_the_inputs_are_exact_in_every_dtype(op: Op) -> None:
    for arg, value in zip(op.args, cases.values(op.name), strict=True):
        if arg.is_float:
            steps = value * 16
            assert np.array_equal(steps, np.round(steps))
            assert np.abs(steps).max() < 2 ** (FORMATS["bfloat16"].mantissa + 1)


# --- dtypes --------------------------------------------------------------------------------------


def arrays(fw: Any, case: Case) -> list[Any]:
    return [fw.array(v, f) for v, f in zip(cases.values(case.op), case.dtypes, strict=True)]


def found(fw: Any, case: Case, region: Any = None) -> str:
    """The dtype that comes out, or "raises"."""
    with fw.wide() if "float64" in case.dtypes else contextlib.nullcontext():
        call = fw.ops[case.op], arrays(fw, case), case.regions, case.made, region or fw.region
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


REPRESENTATIVES = [case for name in cases.NESTED for case in BY_OP[name]][::3]


def wrong(fw: Any, region: Any) -> float:
    """The share of rows that notice that another region is opened than the one asked for."""
    seen = [found(fw, c, region) != getattr(c, fw.name) for c in REPRESENTATIVES]
    return sum(seen) / len(seen)


def test_wrong_regions_are_noticed(fw: ModuleType) -> None:
    right = fw.region
    swapped = {OFF: OFF, **OTHER}
    assert wrong(fw, right) == 0
    assert wrong(fw, lambda kind, *fn: right(OFF, *fn)) > 0.1
    assert wrong(fw, lambda kind, *fn: right(swapped[kind], *fn)) > 0.1
    assert wrong(fw, lambda kind, *fn: right(kind if kind != OFF else "bfloat16", *fn)) > 0.05


def ruled(fw: Any, table: Any) -> Any:
    """Regions under a policy, as the frameworks' `region`."""
    from importlib import import_module

    autocast = import_module(f"polymp.{fw.name}").autocast
    if fw.name == "torch":
        import torch

        return lambda kind: autocast(
            "cpu", getattr(torch, kind, torch.bfloat16), kind != OFF, policy=table
        )
    return lambda kind, fn=None: autocast(
        fn, dtype="bfloat16" if kind == OFF else kind, enabled=kind != OFF, policy=table
    )


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
    region = ruled(fw, policy)
    if fw.name == "torch":
        with region("float16"):
            found = sizes(*values)
    else:
        found = region("float16", sizes)(*values)
    assert np.isfinite(fw.numbers(found)).all()


# --- values ---------------------------------------------------------------------------------------


def valued(op: Op) -> list[Case]:
    """The cases of an op whose values are looked at: each of the main patterns in one region."""

    def chosen(case: Case) -> bool:
        low = LOW[zlib.crc32(f"{op.name} {MAIN.index(case.inputs) // 2}".encode()) % 2]
        return case.low == low

    rows = [c for c in BY_OP[op.name] if c.inputs in MAIN and c.nesting == "on"]
    return [c for c in rows if RAISES not in (c.torch, c.jax) and chosen(c)]


def computed(fw: Any, op: Op, rows: list[Case], function: Any = None) -> tuple[Any, list[Any]]:
    """The result in float32 outside of regions, and (dtype, numbers) of each case."""
    function = function or fw.ops[op.name]

    def call(case: Case) -> Any:
        def run(*arrays: Any) -> Any:
            cast = [fw.cast(x, f) for x, f in zip(arrays, case.dtypes, strict=True)]
            return fw.run(function, cast, case.regions, case.made)

        return run

    wide = {"f": "float32", "i": "int", "b": "bool"}
    inputs = [fw.array(v, wide[v.dtype.kind]) for v in cases.values(op.name)]
    exact, *results = fw.together([fw.ops[op.name], *map(call, rows)], inputs)
    return fw.numbers(exact), [(fw.dtype(r), fw.numbers(r)) for r in results]


def too_far(case: Case, name: str, dtype: str, result: Any, exact: Any) -> str:
    error = float(np.abs(result - exact).max(initial=0))
    limit = cases.bound(case, name, dtype, exact)
    return "" if error <= limit else f"{case} in {name}: off by {error:.3g}, bound {limit:.3g}"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("op", [op for op in OPS if valued(op)], ids=lambda op: op.name)
def test_results_agree(op: Op) -> None:
    """Each framework's with its own float32, and with the other's within both bounds."""
    rows, results, exacts = valued(op), {}, {}
    for name in FRAMEWORKS:
        need(name)
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


@pytest.mark.parametrize("low", LOW)
def test_a_computation_in_the_low_dtype_that_is_called_float32_is_noticed(
    fw: ModuleType, low: str
) -> None:
    """And a value that is off by twice the bound."""
    seen = []
    for name in (
        "exp",
        "softmax",
        "layer_norm",
        "rms_norm",
        "logsumexp",
        "tan",
        "cosine_similarity",
    ):
        op = cases.BY_NAME[name]

        def lowered(*arrays: Any, op: Op = op) -> Any:
            return fw.cast(fw.cast(fw.ops[op.name](*arrays), low), "float32")

        rows = [c for c in BY_OP[name] if (c.inputs, c.low, c.nesting) == ("made", low, "on")]
        exact, results = computed(fw, op, rows, lowered)
        seen += [too_far(c, fw.name, *r, exact) for c, r in zip(rows, results, strict=True)]
        exact, [(dtype, right)] = computed(fw, op, rows)
        off = right + 2 * cases.bound(rows[0], fw.name, dtype, exact)
        assert "off by" in too_far(rows[0], fw.name, dtype, off, exact)
        assert "off by" in too_far(rows[0], fw.name, dtype, right * np.nan, exact)
    assert len(seen) == 7
    assert all(seen)


# --- training -------------------------------------------------------------------------------------


def trained(fw: Any, low: str, scaled: bool, regions: bool = True) -> float:
    """The excess of the loss after training in a dtype."""
    it = cases.regression()
    x, targets, w = (fw.array(a, "float32") for a in (it.x, it.targets, it.start))
    inside = () if low == "float32" or not regions else (low,)

    def loss(w: Any) -> Any:
        def mean_square(w: Any) -> Any:
            residual = fw.ops["mv"](x, w) - targets
            return (residual * residual).mean()

        return it.small * fw.run(mean_square, [w], inside)

    graded = fw.jit(lambda w, scale: fw.grad(lambda w: loss(w) * scale, w)[1])
    scaler = fw.Scaler(growth_interval=4) if scaled else fw.Scaler(enabled=False)
    for _ in range(it.steps):
        scale = scaler.scale(fw.array(1.0, "float32"))
        w = scaler.step(w, graded(w, scale), it.rate)
    return it.excess(fw.numbers(w))


@pytest.mark.parametrize("low", ["float32", *LOW])
def test_training_reaches_the_loss(fw: ModuleType, low: str) -> None:
    it = cases.regression()
    assert it.excess(it.start) > 100 * it.bound("bfloat16"), "there is nothing to learn"
    assert trained(fw, low, scaled=low == "float16") <= it.bound(low)


def test_float16_without_a_scaler_learns_nothing(fw: ModuleType) -> None:
    it = cases.regression()
    assert trained(fw, "float16", scaled=False) == it.excess(it.start)


@pytest.mark.filterwarnings("ignore:GradScaler has no effect in a bfloat16 region")
def test_a_bound_of_training_is_one_of_its_dtype(fw: ModuleType) -> None:
    """Float32's, which bfloat16 and float16 miss: they round."""
    it = cases.regression()
    for low in LOW:
        assert trained(fw, low, scaled=True) > it.bound("float32")
