"""How users write a float dtype: one table, asked at every place that takes a dtype."""

import importlib
from importlib.util import find_spec

import ml_dtypes
import numpy as np

# By full name: the other names of a dtype.
NAMES = {
    "float8_e4m3fn": ("fp8_e4m3", "fp8_e4m3fn", "e4m3", "e4m3fn", "torch.float8_e4m3fn"),
    "float8_e5m2": ("fp8_e5m2", "e5m2", "torch.float8_e5m2"),
    "float16": ("fp16", "half", "f16", "torch.float16", "torch.half"),
    "bfloat16": ("bf16", "torch.bfloat16"),
    "float32": ("fp32", "float", "single", "f32", "torch.float32", "torch.float"),
    "float64": ("fp64", "double", "f64", "torch.float64", "torch.double"),
}


def spellings(full: str) -> list[object]:
    """All that means a dtype: its names, and the objects of those libraries that are installed."""
    kind = getattr(np, full, None) or getattr(ml_dtypes, full)
    found: list[object] = [full, *NAMES[full], kind, np.dtype(kind)]
    for module in ("torch", "jax.numpy"):
        if find_spec(module.partition(".")[0]):
            found.append(getattr(importlib.import_module(module), full))
    return found
