"""Measurements of an equation's results, as arrays: each of these runs beside the program.

Arrays in, small arrays out. What of a program is measured, and when, is `instrument`'s part. What
every event has is made by `jax.lax`: to trace a function of `jax.numpy` takes several times longer.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polymp.backends.jax import compat
from polymp.backends.jax.arrays import largest_magnitude
from polymp.backends.jax.autocast.evaluate import update_in
from polymp.backends.jax.autocast.known_functions import FREE
from polymp.backends.jax.compat.programs import Equation
from polymp.diagnostics.magnitudes import BINS, SHIFT
from polymp.dtypes import FORMATS

# Of a larger array, every n-th value is in the sample, about as many as these.
SAMPLE = 2048

# In a sample, the place of a value that was not there: of a branch that was not taken.
ABSENT = BINS


# What was not measured.
_NOTHING: Any = np.empty(0, np.float32)
_NO_BINS: Any = np.empty(0, np.int32)


class Facts(NamedTuple):
    """Measurements of an event, as arrays; with one axis more inside of a `scan`."""

    # float32 [], the largest magnitude; NaN if a value is NaN, -1 if nothing ran; float64 of
    # float64.
    peak: Any = np.float32(-1)
    # float32 [3], of low results: the largest magnitude in float32, and in float16 the shares of
    # values that became Inf and zero; empty for others.
    lost: Any = _NOTHING
    sample: Any = _NO_BINS  # int32 [n], bins of the values; empty but of the end of a call
    # float32 [k, 6], what it was given, where that is asked for; else empty
    operands: Any = np.empty((0, 6), np.float32)


def is_measured(x: Any) -> bool:
    """True for a float or complex array with values."""
    name = getattr(getattr(x, "dtype", None), "name", "")
    return (name in FORMATS or name.startswith("complex")) and math.prod(np.shape(x)) > 0


def real(x: jax.Array) -> jax.Array:
    """A complex array's real and imaginary numbers; another array as it is.

    |z| itself may be Inf where both of them are finite.
    """
    if not jnp.iscomplexobj(x):
        return x
    return lax.concatenate([lax.expand_dims(part, (0,)) for part in (lax.real(x), lax.imag(x))], 0)


def peak(*arrays: jax.Array) -> jax.Array:
    """The largest magnitude in some arrays, NaN if there is one; float32 [], or float64 []."""
    arrays = tuple(map(real, arrays))
    wide = [np.float64 if x.dtype == np.float64 else np.float32 for x in arrays]
    sizes = [lax.convert_element_type(*both) for both in zip(arrays, wide, strict=True)]
    peaks = [largest_magnitude(x, range(x.ndim)) for x in sizes]
    return functools.reduce(jnp.maximum, peaks)


def few(x: jax.Array) -> jax.Array:
    """A sample of an array's values, in one row."""
    x = real(x)
    flat = lax.reshape(x, (x.size,))
    step = -(-x.size // SAMPLE)
    return flat if step <= 1 else lax.slice(flat, (0,), (x.size,), (step,))


def sample(x: jax.Array) -> jax.Array:
    """The bins of a sample of an array's values; int32."""
    bits = lax.bitcast_convert_type(lax.convert_element_type(few(x), np.float32), np.int32)
    return lax.bitwise_and(lax.shift_right_logical(bits, np.int32(SHIFT)), np.int32(BINS - 1))


def lost(
    eqn: Equation,
    args: list[jax.Array],
    outs: Sequence[jax.Array],
    numbers: Sequence[tuple[int, float]],
) -> jax.Array:
    """The loss in a low dtype, by the same equation on the same operands in float32.

    Operands that are constants of the program are those that it has, before they were rounded.
    """
    counts = outs[0].dtype == np.float16 or eqn.primitive.name in _SATURATE or numbers
    exact = dict(numbers)
    args = [
        lax.full(np.shape(x), exact[at], np.float32) if at in exact else x
        for at, x in enumerate(args)
    ]
    wide = in_float32(eqn, args) if counts else None
    if wide is None:
        return jnp.zeros(0, jnp.float32)
    if outs[0].dtype != np.float16:
        return jnp.stack([peak(wide), 0, 0])
    some, low = few(wide), few(outs[0]).astype(jnp.float32)
    burst = jnp.mean((jnp.isinf(low) & jnp.isfinite(some)).astype(jnp.float32))
    vanished = jnp.mean(((low == 0) & (some != 0)).astype(jnp.float32))
    return jnp.stack([peak(wide), burst, vanished])


def operand(x: jax.Array) -> jax.Array:
    """Smallest, largest finite magnitude, shares of zeros, Inf, NaN, negatives; float32 [6]."""
    values = jnp.ravel(real(x)).astype(jnp.float32)
    size = jnp.abs(values)
    finite = jnp.isfinite(size)
    some = jnp.where(finite & (size > 0), size, jnp.inf)
    most = jnp.where(finite, size, 0)
    shares = [
        jnp.mean(s.astype(jnp.float32))
        for s in (size == 0, jnp.isinf(size), jnp.isnan(size), values < 0)
    ]
    return jnp.stack([jnp.min(some), jnp.max(most), *shares])


def in_float32(eqn: Equation, args: list[jax.Array]) -> jax.Array | None:
    """The first result of an equation whose low dtypes are float32; None if it has no such form."""
    wide = [wider(x) for x in args]
    if eqn.primitive.name == "convert_element_type":
        x = jnp.asarray(wide[0])
        return x if is_measured(x) else lax.convert_element_type(x, np.float32)
    if eqn.primitive.name not in _WIDENS:
        return None
    params = {key: _wider_param(value) for key, value in eqn.params.items()}
    if params.get("update_jaxpr") is not None:
        params["update_jaxpr"] = update_in(params["update_jaxpr"], "float32")
    try:
        made: jax.Array = compat.put(eqn.primitive, wide, params)[0]
    except (TypeError, ValueError, NotImplementedError):
        return None
    return None if made.dtype in _LOW else made


# In bfloat16, where no range is lost, what of these becomes 1.
_SATURATE = {"logistic", "tanh", "erf", "convert_element_type"}

_WIDENS = FREE | {"polymp_contraction"}


def wider(x: jax.Array) -> jax.Array:
    """The array in float32 if it is in a low dtype."""
    low = getattr(x, "dtype", None) in _LOW
    return jnp.asarray(x).astype(jnp.float32) if low else x


def _wider_param(value: object) -> object:
    if isinstance(value, str):
        return "float32" if value in ("float16", "bfloat16") else value
    return np.dtype(np.float32) if isinstance(value, np.dtype) and value in _LOW else value


_LOW = (np.dtype(np.float16), np.dtype(jnp.bfloat16))


def absent(shape: Facts) -> Facts:
    """The facts of an event that did not run."""
    # Constants of a program, where `jax.numpy` would add equations.
    pairs = zip(shape, _ABSENT, strict=True)
    return Facts(*(np.full(x.shape, value, x.dtype) for x, value in pairs))


_ABSENT = (-1, 0, ABSENT, 0)
