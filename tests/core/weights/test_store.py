"""The rule of the modes: what is stored, what is read back, what a message says."""

import numpy as np
import pytest

from polymp.weights import lost_updates, random_bits, store
from polymp.weights.lost_updates import LostUpdates
from tests.support.low_weights import BF16, NUMPY, edges, spread

# Inf and overflow are among the numbers, and NumPy warns of them.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")

FULL = np.concatenate([edges(), spread(2**12)])


@pytest.mark.parametrize("name", store.MODES)
def test_a_weight_that_no_step_changed_keeps_its_bits(name: str) -> None:
    mode = store.MODES[name]
    full = FULL[~np.isnan(FULL)] if name == "split" else FULL
    low, beside = store.first(NUMPY, mode, "bfloat16", full)
    read = store.load(NUMPY, mode, low, beside)
    random = random_bits.random16((1, 2), np.arange(read.size, dtype=np.int32))
    again, rest = store.store(NUMPY, mode, "bfloat16", read, random)
    if beside is not None:
        follows = store.beside_written(NUMPY, mode, "bfloat16", low, beside)
        assert follows.tobytes() == beside.tobytes() == rest.tobytes()
    finite = ~np.isnan(low.astype(np.float32))
    assert again[finite].tobytes() == low[finite].tobytes()
    if mode.exact:
        assert read.tobytes() == full.tobytes()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("master", "bfloat16"), ("master", "float16"), ("split", "bfloat16")],
)
def test_a_weight_that_was_written_is_what_was_written(name: str, dtype: str) -> None:
    mode = store.MODES[name]
    full = np.linspace(-3, 3, 101, dtype=np.float32)
    low, beside = store.first(NUMPY, mode, dtype, full)
    low = low.copy()
    low[10:20] = 7
    now = store.load(NUMPY, mode, low, store.beside_written(NUMPY, mode, dtype, low, beside))
    before = store.load(NUMPY, mode, *store.first(NUMPY, mode, dtype, full))
    last_place = 0 if name == "master" else 2.0**-5  # of 7
    assert (np.abs(now[10:20] - 7) <= last_place / 2).all()
    assert (now[:10] == before[:10]).all()
    assert (now[20:] == before[20:]).all()


@pytest.mark.parametrize("value", [0.0, -0.0, np.inf, -np.inf])
def test_a_mask_beside_an_old_remainder_is_not_nan(value: float) -> None:
    mode, remainders = store.MODES["split"], np.arange(-(2**15), 2**15).astype(np.int16)
    low = np.full(2**16, value, np.float32).astype(BF16)
    beside = store.beside_written(NUMPY, mode, "bfloat16", low, remainders)
    read = store.load(NUMPY, mode, low, beside)
    assert np.isnan(store.load(NUMPY, mode, low, remainders)).any()
    assert not np.isnan(read).any()
    assert (read.astype(BF16) == low).all()


def test_bytes_a_weight() -> None:
    assert {name: mode.bytes_a_weight() for name, mode in store.MODES.items()} == {
        "master": 6, "split": 4, "stochastic": 2,
    }  # fmt: skip


def test_another_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="low_weights") as error:
        store.mode("spilt")
    assert str(error.value) == (
        "low_weights(): mode 'spilt' is not one of 'master', 'split', 'stochastic'."
    )
    with pytest.raises(ValueError, match=r"mode None is not one of"):
        store.mode(None)


def test_float16_is_for_master_alone() -> None:
    assert store.low_dtype(store.mode("master"), "fp16") == "float16"
    with pytest.raises(ValueError, match="low_weights") as error:
        store.low_dtype(store.mode("split"), "fp16")
    assert str(error.value) == (
        "low_weights(): mode 'split' keeps weights in bfloat16, not in float16, because it works "
        "on the upper 16 bits of float32. Write mode='master' to keep float16 weights."
    )
    with pytest.raises(ValueError, match=r"low_weights\(\): dtype 'float32' is not accepted here"):
        store.low_dtype(store.mode("split"), "float32")


def test_the_warning_about_lost_updates() -> None:
    records = [
        LostUpdates("a.weight", "bfloat16", 100, 90),
        LostUpdates("b.weight", "bfloat16", 300, 30),
        LostUpdates("unused", "bfloat16", 0, 0),
    ]
    assert lost_updates.share(records) == 0.3
    assert lost_updates.share([]) == records[2].share == 0.0
    assert lost_updates.message(records, "f(x)") == (
        "30% of the updates of low weights were rounded away in this step: the gradient is not 0, "
        "and the weight keeps its bits, because the update is below half of its last place. Most "
        "in: a.weight (bfloat16) 90%, b.weight (bfloat16) 10%. Such weights hardly learn. Write "
        "f(x), which keeps the rest of each weight beside it."
    )


def test_naive_training_loses_what_every_mode_keeps() -> None:
    """Fifty updates of 2**-10 on weights near 1, whose last place is 2**-7."""
    start = np.linspace(1, 1.9, 4096, dtype=np.float32).astype(BF16).astype(np.float32)
    naive = start.astype(BF16)
    kept = {n: store.first(NUMPY, m, "bfloat16", start) for n, m in store.MODES.items()}
    for step in range(50):
        naive = (naive.astype(np.float32) + np.float32(2**-10)).astype(BF16)
        for name, mode in store.MODES.items():
            new = store.load(NUMPY, mode, *kept[name]) + np.float32(2**-10)
            key = random_bits.key(0, step, 0)
            random = random_bits.random16(key, np.arange(4096, dtype=np.int32))
            kept[name] = store.store(NUMPY, mode, "bfloat16", new, random)
    assert (naive.astype(np.float32) == start).all()
    for low, _ in kept.values():
        moved = (low.astype(np.float64) - start).mean()
        assert abs(moved - 50 * 2**-10) <= 2**-8  # half of the last place
