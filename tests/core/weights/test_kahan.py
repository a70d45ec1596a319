"""A bfloat16 weight and its compensation."""

import numpy as np
import pytest

from polymp.weights import kahan
from tests.support.low_weights import BF16, NUMPY, edges, spread

# Inf and overflow are among the numbers, and NumPy warns of them.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")


def numbers() -> np.ndarray:
    full = np.concatenate([edges(), spread(2**18)])
    return full[~np.isnan(full)]


def test_the_weight_is_the_cast() -> None:
    full = numbers()
    low, _ = kahan.store(NUMPY, full)
    assert (low.view(np.uint16) == full.astype(BF16).view(np.uint16)).all()


def test_the_pair_holds_sixteen_bits() -> None:
    full = numbers()
    full = full[(np.abs(full) > 1e-30) & (np.abs(full) < 3.3e38)]
    back = kahan.load(NUMPY, *kahan.store(NUMPY, full))
    assert (np.abs(back.astype(float) - full) <= 2.0**-16 * np.abs(full)).all()


def test_a_pair_that_is_read_and_stored_again_keeps_its_bits() -> None:
    low, rest = kahan.store(NUMPY, numbers())
    again = kahan.store(NUMPY, kahan.load(NUMPY, low, rest))
    assert (again[0].view(np.uint16) == low.view(np.uint16)).all()
    assert (again[1].view(np.uint16) == rest.view(np.uint16)).all()


def test_infinity_has_no_compensation() -> None:
    low, rest = kahan.store(NUMPY, np.array([np.inf, -np.inf, 3.4e38], np.float32))
    assert np.isinf(kahan.load(NUMPY, low, rest)).all()


def test_small_updates_add_up() -> None:
    """A thousand updates of 2**-13 of a weight, each below half of its last place."""
    low, rest = kahan.store(NUMPY, np.ones(1, np.float32))
    naive = np.ones(1, BF16)
    for _ in range(1000):
        low, rest = kahan.store(NUMPY, kahan.load(NUMPY, low, rest) + np.float32(2**-13))
        naive = (naive.astype(np.float32) + np.float32(2**-13)).astype(BF16)
    assert naive[0] == 1
    assert abs(float(kahan.load(NUMPY, low, rest)[0]) - (1 + 1000 * 2**-13)) < 2**-9
