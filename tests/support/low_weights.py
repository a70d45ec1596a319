"""The verbs of low weights in NumPy, and float32 numbers to try them on."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from polymp.weights import Verbs

BF16 = ml_dtypes.bfloat16


def _narrow(x: Any) -> Any:
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(BF16)


NUMPY = Verbs(
    bits=lambda x: x.view(np.int32),
    float32=lambda x: x.view(np.float32),
    bits16=lambda x: x.view(np.int16),
    bfloat16=lambda x: x.view(BF16),
    to_int32=lambda x: x.astype(np.int32),
    to_int16=lambda x: x.astype(np.int16),
    wide=lambda x: (x.view(np.int16).astype(np.int32) << 16).view(np.float32),
    narrow=_narrow,
    where=lambda condition, one, other: np.where(
        condition, one, np.asarray(other, getattr(one, "dtype", None))
    ),
)


def edges() -> Any:
    """Numbers at which rounding or bits could go wrong, of both signs; float32."""
    ends = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    upper = (
        0x0000, 0x0001, 0x0002, 0x007F, 0x0080, 0x0081, 0x00FF, 0x0100, 0x3F7F, 0x3F80, 0x3F81,
        0x7F7E, 0x7F7F, 0x7F80, 0x7F81, 0x7FBF, 0x7FC0, 0x7FC1, 0x7FFE, 0x7FFF,
    )  # fmt: skip
    bits = [sign | (up << 16) | low for sign in (0, 1 << 31) for up in upper for low in ends]
    return np.array(bits, np.uint32).view(np.float32)


# 260 patterns of the lower 16 bits, those at the ends among them.
_LOWER = np.unique(
    np.concatenate(
        [np.arange(0, 2**16, 258), [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]]
    ).astype(np.uint32)
)


def upper_halves(step: int = 1) -> Any:
    """Return every `step`-th pattern of the upper 16 bits, with 260 of the lower ones each.

    With step 1 these are a little more than 2**24 float32 numbers.
    """
    upper = np.arange(0, 2**16, step, dtype=np.uint32)
    return ((upper[:, None] << 16) | _LOWER[None]).reshape(-1).view(np.float32)


def spread(n: int, seed: int = 0) -> Any:
    """Return n float32 numbers of random bits: every exponent, sign and payload of NaN."""
    return np.random.default_rng(seed).integers(0, 2**32, n, np.uint32).view(np.float32)


def ties(x: Any) -> Any:
    """Return where float32 numbers are finite and midway between two bfloat16 numbers."""
    bits = x.view(np.uint32)
    return np.isfinite(x) & (bits & 0xFFFF == 0x8000)
