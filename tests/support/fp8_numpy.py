"""The verbs of quantisation in numpy and ml_dtypes: an oracle for those of torch and JAX."""

import ml_dtypes
import numpy as np

from polymp.fp8 import Verbs

DTYPES = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}


def _amax(array, axis):
    magnitude = np.abs(np.asarray(array).astype(np.float32))
    return np.max(magnitude, axis=axis, keepdims=axis is not None)


def _power_of_two(scale):
    return (np.asarray(scale, np.float32).view(np.int32) & 0x7F800000).view(np.float32)


def _float32(array):
    return np.asarray(array, np.float32)


VERBS = Verbs(
    amax=_amax,
    float32=_float32,
    where=lambda condition, a, b: np.where(condition, a, b).astype(np.float32),
    clip=np.clip,
    cast=lambda array, name: array.astype(DTYPES[name]),
    isfinite=np.isfinite,
    power_of_two=_power_of_two,
)
