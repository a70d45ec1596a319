"""Counts of what a tree of gradients holds, by one program for all leaves, in one array."""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polymp.backends.jax.modules.pin import leaf_path
from polymp.backends.jax.scaler.optimizer_step import factor
from polymp.backends.jax.scaler.tree_math import is_scalable, parts_of
from polymp.scaling.gradient_report import SMALLEST_NORMAL, Gradient, GradientReport
from polymp.scaling.scale_rule import ScaleRule, ScaleState

_INT32 = 2**31  # a leaf with as many values is counted in int64


def report(rule: ScaleRule, state: ScaleState, grads: object, scaled: bool) -> GradientReport:
    """`GradScaler.report` for a rule and a state."""
    if any(isinstance(x, jax.core.Tracer) for x in state):
        raise TypeError(_TRACED)
    scale = factor(state)
    rows = _counted(grads, jnp.float32(1) if scaled else on_host(scale))
    scale, *counts = (on_host(x).item() for x in state)
    return GradientReport(rule, ScaleState(scale, *counts), rows)


_TRACED = (
    "a report needs values, and traced code has none yet. Return the gradients from the jitted "
    "function, and call scaler.report(grads) on what it returns."
)


def _counted(grads: object, factor: jax.typing.ArrayLike) -> tuple[Gradient, ...]:
    """Count every float leaf of a tree. Waits for the device."""
    pairs = jax.tree_util.tree_leaves_with_path(grads)
    if any(isinstance(x, jax.core.Tracer) for _, x in pairs):
        raise TypeError(_TRACED)
    rows = [(leaf_path(path) or "gradient", x) for path, x in pairs if is_scalable(x)]
    table = on_host(_table([x for _, x in rows], factor)).tolist()
    counts = zip(rows, table, strict=True)
    return tuple(Gradient(path, tuple(np.shape(x)), *numbers) for (path, x), numbers in counts)


def on_host(x: jax.typing.ArrayLike) -> np.ndarray[Any, Any]:
    """An array's values; of one over several processes, which is the same on all, its copy here."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = x.addressable_data(0)
    return np.asarray(x)


@jax.jit
def _table(leaves: list[jax.typing.ArrayLike], factor: jax.Array) -> jax.Array:
    xs = list(map(jnp.asarray, leaves))
    if all(x.size < _INT32 for x in xs):
        return _stacked(xs, factor, jnp.int32)
    with jax.enable_x64(True):
        return _stacked(xs, factor, jnp.int64)


def _stacked(xs: list[jax.Array], factor: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    if not xs:
        return jnp.zeros((0, 4), dtype)
    return jnp.stack([jnp.stack([kind.sum(dtype=dtype) for kind in _kinds(x, factor)]) for x in xs])


def _kinds(x: jax.Array, factor: jax.Array) -> tuple[jax.Array, ...]:
    """Where x is Inf, NaN, zero and subnormal, no value in two kinds; bool of its shape."""
    # What is subnormal in float32 counts as zero: XLA on CPU takes it for 0, if not everywhere.
    parts = parts_of(x)
    inf = reduce(operator.or_, map(jnp.isinf, parts))
    nan = reduce(operator.or_, map(jnp.isnan, parts)) & ~inf
    zero = reduce(operator.and_, (abs(part) < np.finfo(part.dtype).tiny for part in parts))
    size = jnp.abs(lax.complex(*parts) if len(parts) == 2 else parts[0])
    tiny = size * factor.astype(size.dtype) < SMALLEST_NORMAL
    return inf, nan, zero, tiny & ~zero
