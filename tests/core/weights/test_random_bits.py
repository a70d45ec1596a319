"""The hash that random bits come from: evenly spread, and not related from key to key."""

import numpy as np
import pytest

from polymp.weights import random_bits

N = 2**16


def drawn(seed: int = 0, step: int = 0, parameter: int = 0, first: int = 0) -> np.ndarray:
    index = np.arange(first, first + N, dtype=np.int32)
    return random_bits.random16(random_bits.key(seed, step, parameter), index)


KEYS = [(0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0), (2**40, 0, 0), (0, 10**6, 7), (-1, 3, 3)]


@pytest.mark.parametrize("key", KEYS)
def test_every_bit_is_even(key: tuple[int, int, int]) -> None:
    bits = drawn(*key)
    assert bits.min() >= 0
    assert bits.max() < 2**16
    for at in range(16):
        ones = int(((bits >> at) & 1).sum())
        assert abs(ones - N / 2) < 5 * np.sqrt(N) / 2
    counts = np.bincount(bits >> 8, minlength=256)
    chi = ((counts - N / 256) ** 2 / (N / 256)).sum()
    assert abs(chi - 255) < 6 * np.sqrt(2 * 255)


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.corrcoef(one, other)[0, 1]) * np.sqrt(len(one))


def test_bits_of_two_keys_and_of_neighbours_are_not_correlated() -> None:
    rows = [drawn(*key).astype(float) for key in KEYS]
    assert all(
        abs(correlation(one, other)) < 5 for at, one in enumerate(rows) for other in rows[:at]
    )
    for row in rows:
        for lag in (1, 2, 3, 16, 64, 1024):
            assert abs(correlation(row[:-lag], row[lag:])) < 5
    assert abs(correlation(rows[0], rows[0])) > 100, "the check cannot fail"


def test_no_key_is_another_one_shifted() -> None:
    """As it would be with one word added to the index."""
    one = set(zip(drawn().tolist(), drawn()[1:].tolist(), strict=False))
    other = set(zip(drawn(step=1).tolist(), drawn(step=1)[1:].tolist(), strict=False))
    assert len(one & other) < 20  # by chance one pair in 2**32 / N**2 * ...: about 1


def test_pieces_of_an_array_have_the_bits_of_the_whole() -> None:
    assert (drawn(first=N) == random_bits.random16(
        random_bits.key(0, 0, 0), np.arange(2 * N, dtype=np.int32))[N:]).all()  # fmt: skip


def test_the_words_of_a_key_are_the_same_for_numbers_and_arrays() -> None:
    for seed, step, parameter in KEYS:
        numbers = random_bits.key(seed, step, parameter)
        arrays = random_bits.key(seed, np.full(1, step, np.int32), parameter)
        assert [a.tolist() for a in arrays] == [[n] for n in numbers]


KEY = (-269595373, 1631562366)
BITS = [29431, 40733, 29879, 30719]


def test_these_bits_never_change() -> None:
    """Saved runs go on with them."""
    key = random_bits.key(7, 1000, 3)
    assert key == KEY
    assert random_bits.random16(key, np.arange(4, dtype=np.int32)).tolist() == BITS
