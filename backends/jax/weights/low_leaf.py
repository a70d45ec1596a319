"""One array of low weights: read for the optimizer, stored after its step, and the update for it.

Arrays in, arrays out, element by element; the rule is `polymp.weights.store`, given JAX's verbs.

The update has to be a number that is added: `optax.apply_updates` rounds float32(p) + u, of the old
low weight p, to the low dtype. With u = float32(q) - float32(p), in float32, the result is the new
low weight q

    if p and q have the same bits: u is -0.0 there
    if q is 0: u is -p
    if |q| is at least 2**-16 of the largest power of two in |p|: p and q are then multiples of the
        last place of u, so that u is exact; or u is so large that its rounding is far below q's
    if q is smaller, and a multiple of that last place: so is a q that comes of p plus an update in
        float32, unless p was rounded up to a power of two

It is not if a weight shrinks by more in one step, goes from 0.0 to -0.0, moves by less than
2**-126, which some devices take for zero, moves by more than float32 holds, or was Inf. Then
`settled` finds what the sum will be, and that becomes the new value: what stands beside a weight
always belongs to the weight that is there. In float16 it is 2**-13 instead of 2**-16.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from polymp.weights import store
from polymp.weights.modes import Mode
from polymp.weights.random_bits import key, random16
from polymp.weights.verbs import Verbs


def _from_half(x: jax.Array) -> jax.Array:
    # XLA takes a cast to float16 and back for nothing to do, unless something stands between.
    full: jax.Array = lax.optimization_barrier(x).astype(jnp.float32)
    return full


def _wide(x: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(x, jnp.int16).astype(jnp.int32)
    return lax.bitcast_convert_type(bits << 16, jnp.float32)


VERBS = Verbs(
    bits=partial(lax.bitcast_convert_type, new_dtype=jnp.int32),
    float32=partial(lax.bitcast_convert_type, new_dtype=jnp.float32),
    bits16=partial(lax.bitcast_convert_type, new_dtype=jnp.int16),
    bfloat16=partial(lax.bitcast_convert_type, new_dtype=jnp.bfloat16),
    to_int32=partial(lax.convert_element_type, new_dtype=jnp.int32),
    to_int16=partial(lax.convert_element_type, new_dtype=jnp.int16),
    wide=_wide,
    narrow=lax.convert_element_type,
    from_half=_from_half,
    where=jnp.where,
)


_MAGNITUDE = 0x7FFF


@dataclass(frozen=True)
class LowLeaf:
    """The rule for one array.

    Attributes:
        mode: the mode.
        dtype: of the low weights.
        seed: of the random bits.
    """

    mode: Mode
    dtype: str
    seed: int

    def wide(self, x: jax.Array) -> jax.Array:
        """Return float32 or low weights as float32."""
        x = jnp.asarray(x)
        return x if x.dtype == jnp.float32 else store.as_float32(VERBS, x, self.dtype)

    def first(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return float32 or low weights as they are kept before any step, and what is beside."""
        low, beside = store.first(VERBS, self.mode, self.dtype, self.wide(x))
        return low, beside

    def loaded(self, low: jax.Array, beside: jax.Array | None) -> jax.Array:
        """Return the float32 weights that the optimizer steps on."""
        beside = store.beside_written(VERBS, self.mode, self.dtype, low, beside)
        full: jax.Array = store.load(VERBS, self.mode, low, beside)
        return full

    def stepped(
        self, low: jax.Array, full: jax.Array, step: jax.Array, number: int
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return the update that brings low weights to new values, and what is then beside them."""
        mode, dtype, random = self.mode, self.dtype, None
        if mode.beside:
            full = self.settled(low, full)
        else:
            random = random16(key(self.seed, step, number), flat_index(low.shape))
        if mode.beside and mode.beside != "float32":
            full = _computed_once(full)
        new, beside = store.store(VERBS, mode, dtype, full, random)
        return self.between(low, new), beside

    def settled(self, low: jax.Array, full: jax.Array) -> jax.Array:
        """Return new values such that an update leads to the low weights that they give."""
        new = store.first(VERBS, self.mode, self.dtype, full)[0]
        summed = VERBS.narrow(self.wide(low) + self.between(low, new), self.dtype)
        to, small = VERBS.bits16(new), _is_small(self.wide(new))
        reached = (to == VERBS.bits16(summed)) | (to == VERBS.bits16(low))
        kept = reached & (~small | ((to & _MAGNITUDE) == 0))
        return jnp.where(kept, full, jnp.where(small, 0.0, self.wide(summed)))

    def between(self, low: jax.Array, new: jax.Array) -> jax.Array:
        """Return the update from low weights to others, float32; never a subnormal one but -p.

        Nothing here depends on whether the device flushes subnormal numbers to zero: XLA may do so
        in one program and not in another.
        """
        before, after = self.wide(low), self.wide(new)
        if self.dtype == "float16":  # -0.0, which a sum in float32 can round to
            after = jnp.where(VERBS.bits16(new) == np.int16(-(2**15)), np.float32(-(2**-26)), after)
        moved = after - before
        moved = jnp.where(_is_small(moved), -0.0, moved)
        to_zero = VERBS.float32(VERBS.bits(before) ^ np.int32(-(2**31)))
        moved = jnp.where(_is_small(after), to_zero, moved)
        return jnp.where(VERBS.bits16(new) == VERBS.bits16(low), -0.0, moved)


def _is_small(x: jax.Array) -> jax.Array:
    """True for zero and subnormal float32 numbers."""
    small: jax.Array = (VERBS.bits(x) & 0x7F800000) == 0
    return small


def _computed_once(x: jax.Array) -> jax.Array:
    """The same numbers, which XLA on CPU then computes once, and not for each that reads them.

    There it gives every result a loop of its own, and repeats in each what they share, the whole
    step of the optimizer, unless that ends in what counts as expensive, as a division does. Both
    loops would also need copies of the old weights and of what was beside them. The divisor is 1,
    or 2 for NaN, so that XLA cannot leave it out before it has decided.
    """

    def divided(x: jax.Array) -> jax.Array:
        return x / jnp.where(x == x, jnp.float32(1), jnp.float32(2))

    once: jax.Array = lax.platform_dependent(x, cpu=divided, default=lambda x: x)
    return once


def flat_index(shape: Sequence[int]) -> jax.Array:
    """Return the place of each element in the whole array, flat; int32, modulo 2**32.

    Made of one count for each axis, so that an array over several devices needs no exchange.
    """
    index = jnp.zeros(shape, jnp.int32)
    for axis in range(len(shape)):
        stride = (math.prod(shape[axis + 1 :]) + 2**31) % 2**32 - 2**31
        index += lax.broadcasted_iota(jnp.int32, shape, axis) * stride
    return index
