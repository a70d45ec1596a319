"""The split of float32 into bfloat16 and a remainder: exact, and the cast but for ties."""

import numpy as np
import pytest

from polymp.weights import store
from tests.support.low_weights import BF16, NUMPY, edges, spread, ties, upper_halves
from tests.support.sizes import size


def numbers() -> np.ndarray:
    """More than 2**24 numbers; `make test` takes an eighth of the upper halves."""
    return upper_halves(size(8, 1))


def same_bits(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return one.view(np.uint32) == other.view(np.uint32)


@pytest.mark.sized
@pytest.mark.parametrize("full", [numbers(), edges(), spread(2**18)], ids=["all", "edges", "any"])
def test_the_rebuild_is_exact(full: np.ndarray) -> None:
    assert same_bits(store.join(NUMPY, *store.split(NUMPY, full)), full).all()


@pytest.mark.long
def test_the_rebuild_is_exact_on_two_to_the_24_values() -> None:
    full = spread(2**24, seed=1)
    assert same_bits(store.join(NUMPY, *store.split(NUMPY, full)), full).all()


@pytest.mark.sized
def test_the_high_part_is_the_cast_but_for_ties() -> None:
    full = np.concatenate([numbers(), edges(), spread(2**18)])
    full = full[~np.isnan(full)]
    high, _ = store.split(NUMPY, full)
    with np.errstate(over="ignore"):
        cast = full.astype(BF16)
    differ = high.view(np.uint16) != cast.view(np.uint16)
    assert differ.any()
    assert ties(full)[differ].all()


def test_ties_go_away_from_zero() -> None:
    full = np.array([0x3F808000, 0x3F818000, 0xBF808000], np.uint32).view(np.float32)
    high, _ = store.split(NUMPY, full)
    assert [hex(b) for b in high.view(np.uint16)] == ["0x3f81", "0x3f82", "0xbf81"]


def test_infinity_stays_and_overflow_is_that_of_the_cast() -> None:
    full = np.array([np.inf, -np.inf, 3.4e38, -3.4e38, 3.38e38], np.float32)
    high, _ = store.split(NUMPY, full)
    assert high.astype(np.float32).tolist()[:4] == [np.inf, -np.inf, np.inf, -np.inf]
    assert np.isfinite(high.astype(np.float32)[4])


def test_nan_that_arithmetic_makes_is_nan_in_the_high_part() -> None:
    """Quiet ones, NVIDIA's 0x7fffffff among them, of both signs."""
    quiet = np.random.default_rng(0).integers(0, 2**22, 2**16, np.uint32) | 0x7FC00000
    nan = np.concatenate([quiet, [0x7FFFFFFF, 0x7FC00000, 0x7FFF8000]]).astype(np.uint32)
    for sign in (0, 1 << 31):
        high, _ = store.split(NUMPY, (nan | np.uint32(sign)).view(np.float32))
        assert np.isnan(high.astype(np.float32)).all()


def test_the_check_finds_a_remainder_that_lost_a_bit() -> None:
    high, remainder = store.split(NUMPY, spread(2**12))
    assert not same_bits(store.join(NUMPY, high, remainder & ~1), spread(2**12)).all()
