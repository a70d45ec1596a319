"""Magnitudes: their shares against what numpy and ml_dtypes make of every single value."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polymp.diagnostics.magnitudes import INF, NARROW, SHIFT, Shares, joined, lower_edge
from polymp.dtypes import FORMATS
from tests.conftest import need
from tests.support.reports import magnitudes
from tests.support.sizes import size

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
TINY = lower_edge(1)  # below it, bins do not tell values from zero


def edges(dtype: str) -> list[float]:
    """Where a dtype changes its mind, and the float32 beside on both sides."""
    it = FORMATS[dtype]
    step = 2.0 ** (math.frexp(it.max)[1] - 1 - it.mantissa)
    points = [it.max, it.max + step / 2, it.smallest_normal, it.smallest_subnormal / 2]
    found = [np.float32(p) for p in points if p < 3.4e38]
    for direction in (np.float32(0), np.float32(np.inf)):
        found += [np.nextafter(p, direction) for p in found[: len(points)]]
    return [float(x) for x in found]


ALL_EDGES = sorted({x for dtype in NARROW for x in edges(dtype)})


def rounded(values: Any, dtype: str) -> Shares:
    """Return the shares of values that a framework's cast makes Inf, zero or subnormal."""
    wide = np.abs(np.asarray(values, np.float32))
    with np.errstate(over="ignore"):
        low = wide.astype(DTYPES[dtype]).astype(np.float32)
    lost = ~np.isfinite(low)
    zero = (low == 0) & (wide != 0)
    small = ~lost & ~zero & (wide != 0) & (wide < FORMATS[dtype].smallest_normal)
    return Shares(float(lost.mean()), float(zero.mean()), float(small.mean()))


def told(value: float, dtype: str) -> bool:
    """False of the values of which the docstring says that bins do not tell."""
    size, bottom = abs(value), FORMATS[dtype].smallest_subnormal / 2
    if size == bottom or 0 < size < TINY:
        return False
    return {
        "float16": not 65520 <= size < 65536,
        "bfloat16": not (2 - 2**-8) * 2.0**127 <= size < math.inf,
        "float8_e4m3fn": size != 464,
        "float8_e5m2": True,
    }[dtype]


anything = st.one_of(
    st.floats(width=32),
    st.sampled_from([*ALL_EDGES, 0.0, -0.0, math.inf, -math.inf, math.nan]),
    st.integers(-149, 127).map(lambda e: math.ldexp(1.0, e)),
    st.tuples(st.integers(-28, 17), st.floats(1, 2, width=32)).map(lambda p: p[1] * 2.0 ** p[0]),
)


@pytest.mark.parametrize("dtype", NARROW)
@settings(max_examples=size(50, 150))
@given(st.lists(anything, min_size=1, max_size=30))
@example([0.0])
@example(ALL_EDGES)
def test_shares_are_those_of_rounding_every_value(dtype: str, values: list[float]) -> None:
    kept = [x for x in values if told(x, dtype)]
    if kept:
        np.testing.assert_allclose(magnitudes(kept).shares(dtype), rounded(kept, dtype))


@pytest.mark.parametrize(
    ("dtype", "value", "ours", "right"),
    [
        ("float16", 65520.0, Shares(0, 0, 0), Shares(1, 0, 0)),
        ("bfloat16", 3.4e38, Shares(0, 0, 0), Shares(1, 0, 0)),
        ("float8_e4m3fn", 464.0, Shares(1, 0, 0), Shares(0, 0, 0)),
        ("float16", 2.0**-25, Shares(0, 0, 1), Shares(0, 1, 0)),
        ("bfloat16", 1e-40, Shares(0, 0, 0), Shares(0, 0, 1)),
    ],
)
def test_what_the_docstring_says_is_not_told(
    dtype: str, value: float, ours: Shares, right: Shares
) -> None:
    assert magnitudes([value]).shares(dtype) == ours
    assert rounded([value], dtype) == right


@given(st.lists(st.floats(2**-40, 2**40), min_size=1, max_size=20), st.integers(-30, 30))
def test_shares_at_a_scale_are_those_of_the_scaled_values(values: list[float], power: int) -> None:
    values = [float(np.float32(x)) for x in values]
    scale = 2.0**power
    for dtype in NARROW:
        found = magnitudes(values).shares(dtype, scale)
        assert found == magnitudes([x * scale for x in values]).shares(dtype)


@given(st.lists(anything, min_size=1, max_size=30), st.integers(-20, 20))
def test_scaled_is_what_the_scaled_values_are(values: list[float], power: int) -> None:
    """Exact while both are normal in float32."""
    factor, low, high = 2.0**power, 2.0**-126, FORMATS["float32"].max

    def stays(x: float) -> bool:
        return x == 0 or not math.isfinite(x) or all(low <= abs(x) * f <= high for f in (1, factor))

    kept = [x for x in values if stays(x)]
    if kept:
        found, exact = magnitudes(kept).scaled(factor), magnitudes([x * factor for x in kept])
        assert found.bins[:INF] == exact.bins[:INF]
        assert sum(found.bins[INF:]) == sum(exact.bins[INF:])
        assert found.largest == exact.largest


def test_scaled_at_the_ends_of_float32_stays_finite_and_is_not_zero() -> None:
    top = magnitudes([3e38, math.inf, 0.0]).scaled(4.0)
    assert (top.bins[INF - 1], top.bins[INF], top.bins[0]) == (1, 1, 1)
    assert top.largest == float(np.float32(3e38)) * 4
    bottom = magnitudes([2.0**-125, 0.0]).scaled(2.0**-20)
    assert (bottom.bins[1], bottom.bins[0]) == (1, 1)
    subnormal = magnitudes([2.0**-127]).scaled(2.0)
    assert subnormal.bins == magnitudes([2.0**-126]).bins
    assert magnitudes([2.0**-126]).scaled(0.5).bins == magnitudes([2.0**-127]).bins
    same = magnitudes([1.0])
    assert same.scaled(1) is same


@given(st.lists(st.lists(anything, min_size=1, max_size=10), min_size=1, max_size=5))
def test_joined_is_what_all_values_are(many: list[list[float]]) -> None:
    assert joined(map(magnitudes, many)) == magnitudes([x for values in many for x in values])


def test_joined_weighs_what_was_lost_by_the_number_of_values() -> None:
    one, other = (magnitudes([1.0] * n) for n in (1, 3))
    found = joined([one._replace(burst=1.0, vanished=0.5), other._replace(vanished=0.5)])
    assert (found.burst, found.vanished) == (0.25, 0.5)


def test_bins_begin_where_they_say() -> None:
    edges = np.array([lower_edge(bin) for bin in range(INF)])
    bits = np.arange(INF, dtype=np.uint32) << SHIFT
    assert (edges == bits.view(np.float32)).all()


def patterns(dtype: Any) -> Any:
    """Every value of a dtype of 16 bits or less; of float32, one of each of many bits."""
    if dtype == np.float32:
        return np.arange(0, 2**32, 104729, np.uint64).astype(np.uint32).view(np.float32)
    return np.arange(2**16, dtype=np.uint16).view(dtype)


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_backends_count_as_numpy_does(framework: str, dtype: str) -> None:
    need(framework)
    values = patterns({**DTYPES, "float32": np.float32}[dtype])
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        wide = values.astype(np.float32)
    expected = (wide.view(np.uint32) & 0x7FFFFFFF) >> SHIFT
    if framework == "torch":
        import torch

        from polymp.backends.torch.diagnostics.values import bins_of

        bits = torch.from_numpy(values.view(np.int32 if dtype == "float32" else np.int16))
        found = bins_of(bits.view(getattr(torch, dtype)).to(torch.float32, copy=True)).numpy()
    else:
        import jax.numpy as jnp

        from polymp.backends.jax.diagnostics import instrument

        chunks = np.array_split(values, range(instrument.SAMPLE, values.size, instrument.SAMPLE))
        found = np.concatenate([np.asarray(instrument.sample(jnp.asarray(c))) for c in chunks])
    real = ~np.isnan(wide)
    np.testing.assert_array_equal(found[real], expected[real])
    assert (found[~real] >= INF).all()
