"""`Packed`: a compiled function whose results leave the device as one array for each dtype.

A program that measures has hundreds of results of a few numbers each. To make an array of its own
of each takes the host longer than the device needs to compute it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax


class Packed:
    """A function of arrays, compiled; `run` returns its results packed, `read` takes them apart.

    Args:
        fn: the function; it is traced once.
        options: of XLA's compiler.
    """

    def __init__(
        self, fn: Callable[..., object], options: Mapping[str, bool | int] | None = None
    ) -> None:
        self._fn = fn
        self._kinds: list[tuple[str, tuple[int, ...]]] = []  # dtype and shape of each result
        self.run: Callable[..., dict[str, jax.Array]] = jax.jit(
            self._packed, compiler_options=None if options is None else dict(options)
        )

    def _packed(self, arrays: Sequence[jax.Array]) -> dict[str, jax.Array]:
        leaves, self._structure = jax.tree.flatten(self._fn(arrays))
        self._kinds = [(x.dtype.name, tuple(x.shape)) for x in leaves]
        rows: dict[str, list[jax.Array]] = {}
        for x in leaves:
            if x.size:
                rows.setdefault(x.dtype.name, []).append(lax.reshape(x, (x.size,)))
        return {dtype: lax.concatenate(many, 0) for dtype, many in rows.items()}

    def read(self, packed: Mapping[str, jax.Array]) -> Any:
        """Return the results of a call of `run` as numpy arrays. Waits for the device."""
        rows: dict[str, np.ndarray[Any, Any]] = jax.device_get(dict(packed))
        done: dict[str, int] = {}
        leaves = []
        for dtype, shape in self._kinds:
            start = done.setdefault(dtype, 0)
            done[dtype] += math.prod(shape)
            row = rows.get(dtype, np.empty(0, dtype))  # none if there are no values of it
            leaves.append(row[start : done[dtype]].reshape(shape))
        return jax.tree.unflatten(self._structure, leaves)
