"""The rule of the modes: what is stored, what is read back, what a message says."""

import math

import numpy as np
import pytest

from polymp import weights
from polymp.weights import LostUpdates
from tests.support.low_weights import BF16, NUMPY, edges, spread

# Inf and overflow are among the numbers, and NumPy warns of them.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")

FULL = np.concatenate([edges(), spread(2**12)])


@pytest.mark.parametrize("name", weights.MODES)
def test_a_weight_that_no_step_changed_keeps_its_bits(name: str) -> None:
    mode = weights.MODES[name]
    full = FULL[~np.isnan(FULL)] if name == "split" else FULL
    low, beside = weights.store(NUMPY, mode, full)
    read = weights.load(NUMPY, mode, low, beside)
    random = weights.random16((1, 2), np.arange(read.size, dtype=np.int32))
    again, rest = weights.store(NUMPY, mode, read, random)
    if beside is not None:
        follows = weights.beside_written(NUMPY, mode, low, beside)
        assert follows.tobytes() == beside.tobytes() == rest.tobytes()
    finite = ~np.isnan(low.astype(np.float32))
    assert again[finite].tobytes() == low[finite].tobytes()
    if mode.beside:
        assert read.tobytes() == full.tobytes()


@pytest.mark.parametrize("value", [0.0, -0.0, np.inf, -np.inf])
def test_a_mask_beside_an_old_remainder_is_not_nan(value: float) -> None:
    mode, remainders = weights.MODES["split"], np.arange(-(2**15), 2**15).astype(np.int16)
    low = np.full(2**16, value, np.float32).astype(BF16)
    beside = weights.beside_written(NUMPY, mode, low, remainders)
    read = weights.load(NUMPY, mode, low, beside)
    assert np.isnan(weights.load(NUMPY, mode, low, remainders)).any()
    assert not np.isnan(read).any()
    assert (read.astype(BF16) == low).all()


def test_the_warning_about_lost_updates() -> None:
    records = [
        LostUpdates("a.weight", "bfloat16", 100, 90),
        LostUpdates("b.weight", "bfloat16", 300, 30),
        LostUpdates("unused", "bfloat16", 0, 0),
    ]
    assert weights.share(records) == 0.3
    assert weights.share([]) == records[2].share == 0.0
    assert weights.message(records, "f(x)") == (
        "30% of the updates of low weights were rounded away in this step: the gradient is not 0, "
        "and the weight keeps its bits, because the update is below half of its last place. Most "
        "in: a.weight (bfloat16) 90%, b.weight (bfloat16) 10%. Such weights hardly learn. Write "
        "f(x), which keeps the rest of each weight beside it."
    )


# --- The split of float32 into bfloat16 and a remainder; shared tests say that it is exact --------


def test_ties_go_away_from_zero_and_infinity_and_overflow_are_those_of_the_cast() -> None:
    ties = np.array([0x3F808000, 0x3F818000, 0xBF808000], np.uint32).view(np.float32)
    ends = np.array([np.inf, -np.inf, 3.4e38, -3.4e38, 3.38e38], np.float32)
    high, _ = weights.split(NUMPY, np.concatenate([ties, ends]))
    found = [f"{bits:04x}" for bits in high.view(np.uint16)]
    assert found == ["3f81", "3f82", "bf81", "7f80", "ff80", "7f80", "ff80", "7f7e"]


def test_nan_that_arithmetic_makes_is_nan_in_the_high_part() -> None:
    """Quiet ones, NVIDIA's 0x7fffffff among them, of both signs."""
    quiet = np.random.default_rng(0).integers(0, 2**22, 2**16, np.uint32) | 0x7FC00000
    nan = np.concatenate([quiet, [0x7FFFFFFF, 0x7FC00000, 0x7FFF8000]]).astype(np.uint32)
    for sign in (0, 1 << 31):
        high, _ = weights.split(NUMPY, (nan | np.uint32(sign)).view(np.float32))
        assert np.isnan(high.astype(np.float32)).all()


# --- Random rounding: to one of the two neighbours, without bias, never from finite to Inf --------


def random(n: int, step: int = 0) -> np.ndarray:
    return weights.random16(weights.key(0, step, 0), np.arange(n, dtype=np.int32))


def test_results_are_neighbours_and_numbers_of_bfloat16_stay() -> None:
    full = np.concatenate([edges(), spread(2**16)])
    low = weights.rounded(NUMPY, full, random(full.size))
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
        low = weights.rounded(NUMPY, full, bits).astype(np.float32)
        assert (np.isfinite(low) == np.isfinite(full)).all()
        assert (np.isnan(low) == np.isnan(full)).all()
        assert (low[np.isinf(full)] == full[np.isinf(full)]).all()


def test_the_threshold_is_the_fraction() -> None:
    """As in torchao: up if the random number is below the lower 16 bits, and only then."""
    full = np.array([0x3F800000 | f for f in (0, 1, 0x8000, 0xFFFF)], np.uint32).view(np.float32)
    rounds_up = [
        (weights.rounded(NUMPY, full, np.full(4, r, np.int32)).view(np.uint16) - 0x3F80).tolist()
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
    found = [bias(full, weights.rounded(NUMPY, full, random(full.size, s))) for s in range(8)]
    assert max(map(abs, found)) < 4


# --- The hash that random bits come from: evenly spread, and not related from key to key ----------


N = 2**16


def drawn(seed: int = 0, step: int = 0, parameter: int = 0, first: int = 0) -> np.ndarray:
    index = np.arange(first, first + N, dtype=np.int32)
    return weights.random16(weights.key(seed, step, parameter), index)


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


def test_no_key_is_another_one_shifted() -> None:
    """As it would be with one word added to the index."""
    one = set(zip(drawn().tolist(), drawn()[1:].tolist(), strict=False))
    other = set(zip(drawn(step=1).tolist(), drawn(step=1)[1:].tolist(), strict=False))
    assert len(one & other) < 20  # by chance one pair in 2**32 / N**2 * ...: about 1


def test_pieces_of_an_array_have_the_bits_of_the_whole() -> None:
    whole = weights.random16(weights.key(0, 0, 0), np.arange(2 * N, dtype=np.int32))
    assert (drawn(first=N) == whole[N:]).all()


def test_the_words_of_a_key_are_the_same_for_numbers_and_arrays() -> None:
    for seed, step, parameter in KEYS:
        numbers = weights.key(seed, step, parameter)
        arrays = weights.key(seed, np.full(1, step, np.int32), parameter)
        assert [a.tolist() for a in arrays] == [[n] for n in numbers]


def test_these_bits_never_change() -> None:
    """Saved runs go on with them."""
    key = weights.key(7, 1000, 3)
    assert key == (-269595373, 1631562366)
    bits = weights.random16(key, np.arange(4, dtype=np.int32))
    assert bits.tolist() == [29431, 40733, 29879, 30719]
