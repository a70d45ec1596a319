"""Arithmetic of trees with a loss scale: multiply, divide, and see whether all is finite.

A pytree and a scale, float32 [], in; a pytree or one bool out. Floats and complex numbers take
part, in float32 or wider; integers, keys, float0 and what is no array pass as they are.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polymp.backends.jax import compat

_ARRAYS = (jax.Array, np.ndarray, np.generic)


def multiplied(tree: Any, scale: Any) -> Any:
    """Every float of the tree times the scale."""
    return _each_float(operator.mul, tree, scale)


def divided(tree: Any, scale: Any) -> Any:
    """Every float of the tree through the scale."""
    return _each_float(_quotient, tree, scale)


def all_finite(tree: Any, scale: Any, axis_names: str | Sequence[str] | None = None) -> Any:
    """Bool []: no quotient of a float of the tree by the scale is Inf or NaN.

    On all devices along `axis_names`; None for every axis along which they could find otherwise.
    """
    finite = _all_finite([x for x in jax.tree.leaves(tree) if _is_float(x)], scale)
    if axis_names is None:
        axis_names = _differing_axes(finite)
    elif isinstance(axis_names, str):
        axis_names = (axis_names,)
    if not axis_names:
        return finite
    return lax.psum(jnp.where(finite, 0, 1), tuple(axis_names)) == 0


def is_array(x: Any) -> bool:
    """True for what a traced program can carry: arrays and Python numbers."""
    return isinstance(x, (*_ARRAYS, bool, int, float, complex))


def _is_float(x: Any) -> bool:
    if isinstance(x, _ARRAYS):
        return bool(jnp.issubdtype(x.dtype, jnp.inexact))
    return isinstance(x, (float, complex))


def _parts(x: Any) -> list[Any]:
    """X in at least float32; real and imaginary part apart, for Inf times a complex is NaN."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [x.real, x.imag]
    return [x.astype(jnp.float32) if x.dtype.itemsize < 4 else x]


def _quotient(x: Any, scale: Any) -> Any:
    """X times the float nearest to 1/scale, as torch computes it.

    In two steps, for 1/scale is subnormal above 2**126 and XLA on CPU would take it for 0; a
    quotient by a scalar comes to the same, as XLA turns it into a product.
    """
    half = jnp.where(scale >= 2.0**64, 2.0**-64, 1.0).astype(scale.dtype)
    return x * half * (1 / (scale * half))


@partial(jax.jit, inline=True)
def _all_finite(xs: list[Any], scale: Any) -> Any:
    """One pass over what is divided; nothing of its size is stored.

    0 times a finite number is 0, and times Inf or NaN it is NaN, which a sum keeps. A maximum
    does not: XLA on CPU loses a NaN among 4,096 numbers and more.
    """
    bad = jnp.zeros((), jnp.float32)
    for part in (part for x in xs for part in _parts(x)):
        bad += jnp.sum(_quotient(part, scale.astype(part.dtype)) * 0).astype(jnp.float32)
    return bad == 0


def _differing_axes(x: Any) -> tuple[str, ...]:
    """The axes of the shard_maps around over which the devices may hold different x."""
    differing = compat.varying_axes(x)
    # Where check_vma=False has switched the types off, not even an axis's own index varies.
    return tuple(
        axis
        for axis in jax.sharding.get_abstract_mesh().manual_axes
        if axis in differing or axis not in compat.varying_axes(lax.axis_index(axis))
    )


@partial(jax.jit, static_argnums=0, inline=True)
def _by_scale(operation: Callable[[Any, Any], Any], xs: list[Any], scale: Any) -> list[Any]:
    results = []
    for x in xs:
        parts = [operation(part, scale.astype(part.dtype)) for part in _parts(x)]
        results.append(lax.complex(*parts) if len(parts) == 2 else parts[0])
    return results


def _each_float(operation: Callable[[Any, Any], Any], tree: Any, scale: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    results = iter(_by_scale(operation, [x for x in leaves if _is_float(x)], scale))
    return jax.tree.unflatten(structure, [next(results) if _is_float(x) else x for x in leaves])
