"""Norms between two layers, compiled by XLA: under `lean` no float32 activation is made for them.

Flax's norms compute in float32 inside, whatever their dtype. So a module whose layers have
`dtype=bfloat16`, cast by hand, is what lean is measured against. XLA's library for sums on CPUs
reads float32, so that there both make one float32 copy of the norm's input.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from polymp.jax import autocast
from tests.support.jax import hlo

SHAPE = (4, 16, 64)  # of the activation [batch, length, width]
LOW = (jnp.bfloat16, jnp.float16)
NORMS: dict[str, Callable[..., Any]] = {
    "layer_norm": nnx.LayerNorm,
    "rms_norm": nnx.RMSNorm,
    "group_norm": lambda width, **kwargs: nnx.GroupNorm(width, num_groups=4, **kwargs),
}


class Layers(nnx.Module):
    """A layer, a norm, another layer."""

    def __init__(self, norm: Callable[..., Any], dtype: Any = None) -> None:
        width, given = SHAPE[-1], {"dtype": dtype, "rngs": nnx.Rngs(0)}
        self.first, self.norm = nnx.Linear(width, width, **given), norm(width, **given)
        self.last = nnx.Linear(width, width, **given)

    def __call__(self, x: Any) -> Any:
        return self.last(self.norm(self.first(x)))


def activations(text: str, dtype: str) -> int:
    """How many arrays of the activation's size a program holds between its kernels."""
    entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)
    assert entry is not None
    return sum(
        op.dtype == dtype and prod(op.shape) == prod(SHAPE) and op.opcode != "bitcast"
        for op in hlo.read(text)[entry[1]].values()
    )


def compiled(norm: str, low: Any, how: str) -> str:
    graph, state = nnx.split(Layers(NORMS[norm], low if how == "by hand" else None))

    def forward(state: Any, x: Any) -> Any:
        return nnx.merge(graph, state)(x)

    if how != "by hand":
        forward = autocast(forward, dtype=low, policy=how)
    lowered = jax.jit(forward).lower(state, jnp.ones(SHAPE, low))
    return lowered.compile(hlo.AS_FOR_USERS).as_text()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("low", LOW, ids=lambda low: jnp.dtype(low).name)
@pytest.mark.parametrize("norm", NORMS)
def test_lean_makes_no_float32_activation_that_casts_by_hand_do_not(norm: str, low: Any) -> None:
    found = {how: activations(compiled(norm, low, how), "float32")
             for how in ("by hand", "lean", "amp")}  # fmt: skip
    print(f"\n{norm} in {jnp.dtype(low).name}: float32 activations {found}")
    assert found["lean"] <= found["by hand"]
    assert found["amp"] >= found["lean"]


def test_the_reader_sees_a_norm_that_is_cast_after() -> None:
    """A float32 result of the norm is an array that lean has not."""
    x = jnp.ones(SHAPE, jnp.bfloat16)
    norm = nnx.LayerNorm(SHAPE[-1], rngs=nnx.Rngs(0))
    texts = [
        jax.jit(autocast(norm, policy=policy)).lower(x).compile(hlo.AS_FOR_USERS).as_text()
        for policy in ("lean", "amp")
    ]
    wide = [activations(text, "float32") for text in texts]
    assert wide[1] == wide[0] + 1
