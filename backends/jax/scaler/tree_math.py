"""Arithmetic of trees with a loss scale: multiply, divide, and see whether all is finite.

Floats and complex numbers take part, in float32 or wider; integers, keys, float0 and what is no
array pass as they are. All of it runs as written, also where an autocast function calls it.
"""

from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polymp.backends.jax import compat
from polymp.backends.jax.arrays import apart
from polymp.backends.jax.autocast import regions

T = TypeVar("T")

_ARRAYS = (jax.Array, np.ndarray, np.generic)


def multiplied(tree: T, scale: jax.Array) -> T:
    """Every float of the tree times the scale, in the scope that `expect_scaler` looks for."""
    with jax.named_scope(regions.SCALED):
        return _each_float(False, tree, scale)


@regions.as_written()
def settled(tree: T) -> T:
    """Return the same floats, as numbers that XLA cannot compute in two ways."""
    # It takes x * 1e30 * (1 / scale) for x * (1e30 / scale) in one place and not in another: the
    # check would call a gradient finite that is Inf where it is used.
    floats, together = apart(tree, is_traced_float)
    # One each: the results of one for all would vary over every axis of a shard_map that any does.
    return together([lax.optimization_barrier(x) for x in floats])


def divided(tree: T, scale: jax.Array) -> T:
    """Every float of the tree times the float nearest to 1/scale, as torch computes it."""
    return _each_float(True, tree, scale)


@regions.as_written()
def all_finite(tree: object, scale: jax.Array) -> jax.Array:
    """Bool []: no quotient of a float of the tree by the scale is Inf or NaN."""
    # On all devices along every axis along which they could find otherwise.
    finite: jax.Array = _all_finite([x for x in jax.tree.leaves(tree) if is_scalable(x)], scale)
    if axes := _differing_axes(finite):
        finite = lax.psum(jnp.where(finite, 0, 1), axes) == 0
    return finite


def is_carried(x: object) -> bool:
    """True for what a traced program can carry: arrays and Python numbers."""
    return isinstance(x, (*_ARRAYS, bool, int, float, complex))


def is_scalable(x: object) -> bool:
    """True for float and complex arrays and numbers: what a scale multiplies."""
    if isinstance(x, _ARRAYS):
        return bool(jnp.issubdtype(x.dtype, jnp.inexact))
    return isinstance(x, (float, complex))


def is_traced_float(x: object) -> bool:
    """True for such an array whose values are not known yet."""
    return isinstance(x, jax.core.Tracer) and is_scalable(x)


def shown_dtype(x: object) -> str:
    """Dtype and shape of an array, as messages show them."""
    kind = jax.typeof(x)
    return f"{kind.dtype}{list(kind.shape)}"


def shown(value: object) -> str:
    """An array's value, or its dtype where it has none yet."""
    if isinstance(value, jax.core.Tracer):
        return shown_dtype(value)
    return str(value.tolist()) if isinstance(value, (jax.Array, np.ndarray)) else repr(value)


def parts_of(x: jax.typing.ArrayLike) -> list[jax.Array]:
    """X in at least float32; as real and imaginary part, because Inf times a complex is NaN."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [x.real, x.imag]
    return [x.astype(jnp.float32) if x.dtype.itemsize < 4 else x]


@partial(jax.jit, inline=True)
def _all_finite(xs: list[jax.typing.ArrayLike], scale: jax.Array) -> jax.Array:
    """Bool []; on CPUs by sums, which XLA there computes five times as fast as it looks for Inf."""
    # A sum of numbers among which there is an Inf or a NaN is Inf or NaN. If a sum overflows though
    # its numbers are finite, or the scale is below 1, they are looked at one by one.
    parts = [part for x in xs for part in parts_of(x)]

    def by_sums(parts: list[jax.Array], scale: jax.Array) -> jax.Array:
        sure = scale >= 1
        for part in parts:
            sure &= jnp.isfinite(jnp.sum(part))
        found: jax.Array = lax.cond(sure, lambda: sure, lambda: _each_finite(parts, scale))
        return found

    if all(part.ndim == 0 for part in parts):
        return _each_finite(parts, scale)
    # On a GPU, the host waits to read the predicate of a conditional.
    finite: jax.Array = lax.platform_dependent(parts, scale, cpu=by_sums, default=_each_finite)
    return finite


def _each_finite(parts: list[jax.Array], scale: jax.Array) -> jax.Array:
    """One pass over what is divided; nothing of its size is stored."""
    # A scale above 1 makes no quotient larger than what is divided, so that both are finite if this
    # product is. It has no factor that XLA could take together with one of the gradient's own: of x
    # * 64 * (1 / 64), or of x * 64 * 0, it only multiplies x by the product of the rest, and an
    # overflow of x * 64 is not seen. Nor is a maximum safe: XLA on CPU loses a NaN among 4,096
    # numbers and more.
    finite = jnp.asarray(True)
    for part in parts:
        largest = part * jnp.maximum(1 / scale.astype(part.dtype), 1)
        finite &= jnp.all(jnp.isfinite(largest))
    return finite


def _differing_axes(x: jax.Array) -> tuple[str, ...]:
    """The axes of the shard_maps around over which the devices may hold different x."""
    differing = compat.varying_axes(x)
    # Where check_vma=False has switched the types off, not even an axis's own index varies.
    return tuple(
        axis
        for axis in jax.sharding.get_abstract_mesh().manual_axes
        if axis in differing or axis not in compat.varying_axes(lax.axis_index(axis))
    )


@partial(jax.jit, static_argnums=0, inline=True)
def _by_scale(divide: bool, xs: list[jax.typing.ArrayLike], scale: jax.Array) -> list[jax.Array]:
    results = []
    for x in xs:
        parts = parts_of(x)
        factor = scale.astype(parts[0].dtype)
        parts = [part * (1 / factor if divide else factor) for part in parts]
        results.append(lax.complex(*parts) if len(parts) == 2 else parts[0])
    return results


@regions.as_written()
def _each_float(divide: bool, tree: T, scale: jax.Array) -> T:
    floats, together = apart(tree, is_scalable)
    return together(_by_scale(divide, floats, scale))
