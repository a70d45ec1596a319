"""Tests of what counts as an array, and as one of floats; its largest number, Inf, NaN; copies."""

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any, Generic, NamedTuple, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polymp import dtypes
from polymp.backends.jax import compat

T = TypeVar("T")


def is_array(x: object) -> TypeGuard[jax.Array]:
    """True for what is traced; everything else is passed as it is."""
    if isinstance(x, (np.ndarray, np.generic)):
        return x.dtype == np.bool_ or bool(jnp.issubdtype(x.dtype, np.number))
    return isinstance(x, jax.Array)


def is_typed(x: object) -> TypeGuard[jax.Array]:
    """True for an array, and for what stands for one where nothing is run."""
    return is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def is_float(x: object) -> bool:
    """True for what has a float dtype: arrays, their types, and what stands for them."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, np.floating))


def float_dtype(dtype: object, what: str = "dtype") -> np.dtype:
    """Return the float dtype that a user named, by an alias or as jax does."""
    found = None
    if isinstance(dtype, str) or type(dtype).__module__ == "torch":
        with suppress(ValueError):
            found = jnp.dtype(dtypes.name(dtype))
    elif dtype is not None:
        with suppress(TypeError, ValueError):
            found = jnp.dtype(dtype)  # type: ignore[call-overload]
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise TypeError(
            f"{what} must be a float dtype, such as jax.numpy.bfloat16 or 'bf16', got "
            f"{reprlib.repr(dtype)}"
        )
    return found


def is_inexact(x: object) -> bool:
    """True for what has a float or complex dtype, and so may have a derivative."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, np.inexact))


def count_of(shape: Sequence[Any]) -> int:
    """How many elements an array of a shape has; a symbol, as in an export, counts as 1."""
    return prod(1 if is_symbol(n) else int(n) for n in shape)


def is_symbol(size: object) -> bool:
    """True for the size of a dimension that is not known before the program runs."""
    return not isinstance(size, (int, np.integer))


def leaf_path(keys: Sequence[Any]) -> str:
    """The keys of a leaf, joined by dots; an nnx variable's own "value" is no part of it."""
    if len(keys) > 1 and keys[-1] == jax.tree_util.GetAttrKey("value"):
        keys = keys[:-1]
    return jax.tree_util.keystr(tuple(keys), simple=True, separator=".")


# Stands for a leaf that was taken out of a tree.
_TAKEN: object = object()


class Rest(NamedTuple, Generic[T]):
    """A tree without some of its leaves; a call puts others in their places."""

    structure: jax.tree_util.PyTreeDef
    leaves: tuple[object, ...]  # with a mark in the places of those

    def __call__(self, others: Iterable[object]) -> T:
        left = iter(others)
        leaves = [next(left) if leaf is _TAKEN else leaf for leaf in self.leaves]
        whole: T = jax.tree.unflatten(self.structure, leaves)
        return whole


def apart(tree: T, wanted: Callable[[object], bool]) -> tuple[list[Any], Rest[T]]:
    """Some leaves of a tree, and what makes the tree with others in their places."""
    leaves, structure = jax.tree.flatten(tree)
    taken, rest = list[Any](), list[object]()
    for leaf in leaves:
        if wanted(leaf):
            taken.append(leaf)
            leaf = _TAKEN
        rest.append(leaf)
    return taken, Rest(structure, tuple(rest))


class AsyncCopy:
    """A copy of an array on its way to the host."""

    def __init__(self, x: jax.Array) -> None:
        self._array = x if x.is_fully_addressable else x.addressable_data(0)
        self._array.copy_to_host_async()

    def is_ready(self) -> bool:
        """Return whether `values` would not wait."""
        return compat.is_ready(self._array)

    def values(self) -> np.ndarray[Any, Any]:
        """Return the values. Waits for them."""
        return np.asarray(self._array)  # faster than jax's own conversions


def largest_magnitude(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The largest magnitude along some axes of float32 or float64; NaN if there is a NaN."""
    # By their bits, which as integers have the order of the numbers and NaN at the top: XLA on CPUs
    # loses a NaN in the maximum of a large float32 array (openxla/xla #21461). XLA leaves out the
    # `abs` of what is never negative, such as exp, and NaN may have a sign.
    bits = lax.bitcast_convert_type(x, np.dtype(f"int{8 * x.dtype.itemsize}"))
    size = lax.bitwise_and(bits, bits.dtype.type(np.iinfo(bits.dtype).max))
    return lax.bitcast_convert_type(lax.reduce_max(size, tuple(axes)), x.dtype)


@jax.jit
def _finite(arrays: Sequence[jax.Array]) -> jax.Array:
    """Whether each array is finite: bool [2, n], whether it has no NaN, and no Inf."""
    return jnp.stack([jnp.array([~jnp.isnan(x).any(), ~jnp.isinf(x).any()]) for x in arrays], 1)


def not_finite(leaves: Mapping[int, Any]) -> dict[int, str]:
    """Return the places of arrays and references that have Inf or NaN: "Inf" or "NaN". Waits."""
    # Other leaves, such as a dtype or a tensor of torch, have none.
    by_devices: dict[frozenset[jax.Device], list[int]] = {}
    leaves = {at: x[...] if isinstance(x, jax.Ref) else x for at, x in leaves.items()}
    for at, leaf in leaves.items():
        if is_array(leaf) and is_inexact(leaf) and leaf.size:
            devices = leaf.sharding.device_set if isinstance(leaf, jax.Array) else ()
            by_devices.setdefault(frozenset(devices), []).append(at)
    found = {}
    for places in by_devices.values():
        no_nan, no_inf = np.asarray(_finite([leaves[at] for at in places]))
        for at, numbers, bounded in zip(places, no_nan, no_inf, strict=True):
            if not (numbers and bounded):
                found[at] = "NaN" if not numbers else "Inf"
    return dict(sorted(found.items()))
