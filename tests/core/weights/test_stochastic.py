"""Random rounding: to one of the two neighbours, without bias, never from finite to Inf."""

import math

import numpy as np

from polymp.weights import random_bits, store
from tests.support.low_weights import NUMPY, edges, spread


def random(n: int, step: int = 0) -> np.ndarray:
    return random_bits.random16(random_bits.key(0, step, 0), np.arange(n, dtype=np.int32))


def test_results_are_neighbours_and_numbers_of_bfloat16_stay() -> None:
    full = np.concatenate([edges(), spread(2**16)])
    low = store.rounded(NUMPY, full, random(full.size))
    bits, made = full.view(np.uint32), low.view(np.uint16)
    finite = np.isfinite(full)
    toward_zero = (bits >> 16).astype(np.uint16)
    up = made[finite] - toward_zero[finite]
    assert set(up.tolist()) == {0, 1}
    exact = finite & (bits & 0xFFFF == 0)
    assert (made[exact] == toward_zero[exact]).all()


def test_finite_stays_finite_and_inf_and_nan_stay() -> None:
    full = np.concatenate([edges(), spread(2**18)])
    for bits in (random(full.size), np.full(full.size, 0, np.int32)):
        low = store.rounded(NUMPY, full, bits).astype(np.float32)
        assert (np.isfinite(low) == np.isfinite(full)).all()
        assert (np.isnan(low) == np.isnan(full)).all()
        assert (low[np.isinf(full)] == full[np.isinf(full)]).all()


def test_the_threshold_is_the_fraction() -> None:
    """As in torchao: up if the random number is below the lower 16 bits, and only then."""
    full = np.array([0x3F800000 | f for f in (0, 1, 0x8000, 0xFFFF)], np.uint32).view(np.float32)
    rounds_up = [
        (store.rounded(NUMPY, full, np.full(4, r, np.int32)).view(np.uint16) - 0x3F80).tolist()
        for r in (0, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF)
    ]
    assert rounds_up == [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0]]


def bias(full: np.ndarray, low: np.ndarray) -> float:
    """Return the mean of the roundings in units of their standard deviation."""
    bits = full.view(np.uint32)
    fraction = (bits & 0xFFFF) / 2**16
    went_up = low.view(np.uint16) != (bits >> 16).astype(np.uint16)
    return float((went_up - fraction).sum() / math.sqrt((fraction * (1 - fraction)).sum()))


def test_the_bias_over_a_million_values_is_under_four_sigma() -> None:
    full = np.random.default_rng(0).standard_normal(10**6).astype(np.float32)
    found = [bias(full, store.rounded(NUMPY, full, random(full.size, s))) for s in range(8)]
    print("bias in sigma, step by step:", [round(each, 2) for each in found])
    assert max(map(abs, found)) < 4
    toward_zero = (full.view(np.uint32) >> 16).astype(np.uint16)
    assert abs(bias(full, toward_zero)) > 100, "the check cannot fail"


def test_one_weight_over_a_million_steps_has_no_bias() -> None:
    value = np.full(1, 1 + 2**-9, np.float32)
    full = np.broadcast_to(value, 2**14).copy()
    keys = [random_bits.key(0, step, 3) for step in range(2**14)]
    index = np.full(1, 12345, np.int32)
    drawn = np.concatenate([random_bits.random16(key, index) for key in keys]).astype(np.int32)
    assert abs(bias(full, store.rounded(NUMPY, full, drawn))) < 4
