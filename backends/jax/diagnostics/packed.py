"""`Packed`: a compiled function whose results leave the device as one array for each dtype.

A program that measures has hundreds of results of a few numbers each. To make an array of its own
of each takes the host longer than the device needs to compute it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


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
            rows.setdefault(x.dtype.name, []).append(jnp.ravel(x))
        return {dtype: jnp.concatenate(many) for dtype, many in rows.items()}

    def read(self, packed: Mapping[str, jax.Array]) -> Any:
        """Return the function's results, of a call of `run`, as numpy arrays. Waits for the device.

        Args:
            packed: as `run` returned it.

        Returns:
            The tree that the function returns.
        """
        rows: dict[str, np.ndarray[Any, Any]] = jax.device_get(dict(packed))
        done, leaves = dict.fromkeys(rows, 0), []
        for dtype, shape in self._kinds:
            start = done[dtype]
            done[dtype] += math.prod(shape)
            leaves.append(rows[dtype][start : done[dtype]].reshape(shape))
        return jax.tree.unflatten(self._structure, leaves)
