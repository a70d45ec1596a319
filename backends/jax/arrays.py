"""Tests of what counts as an array, and as one of floats, for traces, scalers and reports alike."""

from collections.abc import Callable, Iterable
from typing import Any, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from polymp import dtypes

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


def float_dtype(dtype: object) -> np.dtype | None:
    """Return the float dtype that a user named, by an alias or as jax does; None for another."""
    if isinstance(dtype, str) or type(dtype).__module__ == "torch":
        try:
            return jnp.dtype(dtypes.name(dtype))
        except ValueError:
            return None
    try:
        found = None if dtype is None else jnp.dtype(dtype)  # type: ignore[arg-type]
    except TypeError:
        return None
    return found if found is not None and jnp.issubdtype(found, jnp.floating) else None


def is_inexact(x: object) -> bool:
    """True for what has a float or complex dtype, and so may have a derivative."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, np.inexact))


def apart(
    tree: T, wanted: Callable[[object], bool]
) -> tuple[list[Any], Callable[[Iterable[object]], T]]:
    """Some leaves of a tree, and what makes the tree with others in their places."""
    leaves, structure = jax.tree.flatten(tree)
    places = list(map(wanted, leaves))

    def together(others: Iterable[object]) -> T:
        left = iter(others)
        pairs = zip(leaves, places, strict=True)
        whole: T = jax.tree.unflatten(structure, [next(left) if at else x for x, at in pairs])
        return whole

    return [x for x, at in zip(leaves, places, strict=True) if at], together
