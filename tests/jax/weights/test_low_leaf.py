"""The update that leads from one low weight to another, for what optax adds to the weights."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from polymp import weights
from polymp.backends.jax.weights.low_weights import VERBS, LowLeaf, flat_index
from polymp.weights import key, random16
from tests.support.sizes import size

KINDS = ("master", "split", "stochastic")
COUNT = size(1 << 17, 1 << 20)
STEP = jnp.int32(3)


def leaf_of(kind: str) -> LowLeaf:
    return LowLeaf(weights.mode(kind), 0)


def bits(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def as_float64(x: Any) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signaling NaN
        return np.asarray(x).astype(np.float64)


def any_pairs() -> tuple[jax.Array, jax.Array]:
    """Low weights of any bits, and float32 of any bits and of all distances from them."""
    random = np.random.default_rng(0)
    low = random.integers(0, 1 << 16, COUNT).astype(np.uint16).view(jnp.bfloat16)
    with np.errstate(all="ignore"):
        wide = low.astype(np.float32)
        near = 1 + random.choice([-1, 1], COUNT) * np.exp2(random.uniform(-26, 4, COUNT))
        kinds = [
            random.integers(0, 1 << 32, COUNT, dtype=np.uint64).astype(np.uint32).view(np.float32),
            wide * near.astype(np.float32),
            wide - wide * (1 + random.integers(-64, 64, COUNT) * np.float32(2**-23)),
            wide * np.exp2(random.uniform(-40, 10, COUNT)).astype(np.float32),
        ]
        which = [np.arange(COUNT) % 4 == i for i in range(4)]
        full = np.select(which, [numbers.astype(np.float32) for numbers in kinds], np.float32(0))
    return jnp.asarray(low), jnp.asarray(full)


def trained_pairs(kind: str) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Low weights of float32 ones, which take a step in float32, many of them to almost zero."""
    random = np.random.default_rng(1)
    full = random.normal(size=COUNT).astype(np.float32) * np.float32(0.02)
    step = random.normal(size=COUNT).astype(np.float32) * np.float32(0.02)
    half = COUNT // 2
    cancel = 1 + random.integers(-4096, 4096, half) * np.float32(2**-23)
    step[:half] = -full[:half] * cancel.astype(np.float32)
    if kind == "stochastic":  # nothing is kept of the float32 number
        full = np.asarray(leaf_of(kind).wide(leaf_of(kind).first(jnp.asarray(full))[0]))
    return leaf_of(kind).first(jnp.asarray(full))[0], jnp.asarray(full + step), full


def rounded(leaf: LowLeaf, full: jax.Array) -> jax.Array:
    """The new low weights as the rule of the core has them."""
    random = random16(key(0, STEP, 0), flat_index(full.shape))
    return weights.store(VERBS, leaf.mode, full, random)[0]


def stepped(leaf: LowLeaf, low: jax.Array, full: jax.Array) -> tuple[Any, Any, Any]:
    update, beside = leaf.stepped(low, full, STEP, 0)
    return update, beside, optax.apply_updates(low, update)


@cache
def of_any_pairs(kind: str) -> tuple[Any, ...]:
    """Low weights, float32 ones, and the step from the first to the second."""
    low, full = any_pairs()
    return low, full, *jax.jit(partial(stepped, leaf_of(kind)))(low, full)


@pytest.mark.sized
@pytest.mark.parametrize("kind", KINDS)
def test_of_trained_weights_optax_gives_the_rounded_ones(kind):
    """All of them, but where the old weight was rounded up to a power of two: see low_weights."""
    leaf, (low, full, before) = leaf_of(kind), trained_pairs(kind)
    _, beside, after = jax.jit(partial(stepped, leaf))(low, full)
    other = bits(after) != bits(rounded(leaf, full))
    raised = np.abs(as_float64(low)) > np.abs(before.astype(np.float64))
    power = np.frexp(np.abs(as_float64(low)))[0] == 0.5
    assert not np.any(other & ~(raised & power))
    assert other.mean() < 1e-5
    if leaf.mode.beside:
        kept = bits(leaf.loaded(after, beside)) == bits(full)
        assert np.array_equal(kept, ~other)
    moved = np.abs(as_float64(after) - as_float64(rounded(leaf, full)))
    assert np.all(moved <= 2.0**-22 * np.abs(before))


@pytest.mark.sized
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_beside_belongs_to_the_weight_that_is_there(kind):
    """Of any pair of numbers, Inf, NaN and subnormal ones too."""
    leaf, (_, full, _, beside, after) = leaf_of(kind), of_any_pairs(kind)
    if beside is None:
        return
    loaded = leaf.loaded(after, beside)
    again = leaf.first(loaded)[0]
    nan = np.isnan(as_float64(after))
    assert np.array_equal(bits(again)[~nan], bits(after)[~nan])
    assert np.all(np.isnan(as_float64(loaded))[nan])
    signaling = np.isnan(np.asarray(full)) & ((bits(full) & 0x400000) == 0)  # no arithmetic makes
    assert not np.any(np.isnan(as_float64(loaded)) & ~nan & ~signaling)


@pytest.mark.sized
@pytest.mark.parametrize("kind", KINDS)
def test_it_does_not_matter_which_program_adds_the_update(kind):
    low, _, update, _, after = of_any_pairs(kind)
    apart = jax.jit(optax.apply_updates)(low, update)
    eager = optax.apply_updates(low, update)
    assert np.array_equal(bits(after), bits(apart))
    assert np.array_equal(bits(after), bits(eager))
    assert update.dtype == jnp.float32


@pytest.mark.sized
@pytest.mark.parametrize("kind", KINDS)
def test_any_pair_within_reach_is_exact(kind):
    """The bound of the docstring: 2**-16 of the power of two in the old weight."""
    low, full, *_, after = of_any_pairs(kind)
    new = rounded(leaf_of(kind), full)
    old, to = np.abs(as_float64(low)), np.abs(as_float64(new))
    with np.errstate(invalid="ignore"):  # Inf and NaN
        reach = 2.0 ** (np.frexp(old)[1] - 1 - 16)
        moves = np.abs(as_float64(new) - as_float64(low))
    least = np.minimum(np.minimum(old, to), np.abs(as_float64(full)))
    ordinary = (least >= 2.0**-126) & (np.maximum(old, to) < 2.0**126)
    within = ordinary & (to >= reach) & ((moves >= 2.0**-126) | (moves == 0))
    assert within.mean() > 0.3
    assert np.array_equal(bits(after)[within], bits(new)[within])


def test_a_weight_that_stays_keeps_every_bit():
    """Also -0.0, Inf and NaN; subnormal ones become zero."""
    every = np.arange(1 << 16).astype(np.uint16)
    low = jnp.asarray(every.view(jnp.bfloat16))
    leaf = leaf_of("split")
    after = jax.jit(lambda p: stepped(leaf, p, leaf.loaded(p, leaf.first(p)[1]))[2])(low)
    magnitude = every & 0x7FFF
    subnormal = (0 < magnitude) & (magnitude < 0x80)
    nan = magnitude > 0x7F80
    assert np.array_equal(bits(after)[~subnormal & ~nan], every[~subnormal & ~nan])
    assert np.all(np.isnan(as_float64(after))[nan])
    assert not np.any(bits(after)[subnormal])


def test_this_oracle_finds_an_update_in_the_low_dtype():
    leaf = leaf_of("split")
    low, full, _ = trained_pairs("split")
    update = leaf.between(low, leaf.first(full)[0]).astype(jnp.bfloat16)
    after = optax.apply_updates(low, update)
    assert np.mean(bits(after) != bits(rounded(leaf, full))) > 0.01


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4, 5)])
def test_the_index_is_that_of_the_flat_array(shape):
    want = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    assert np.array_equal(jax.jit(lambda: flat_index(shape))(), want)
