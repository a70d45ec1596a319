"""A train step under autocast, compiled by XLA: its casts, and the values it keeps and rounds.

The program is the transformer of `transformer.py` at a small size. It is compared with its float32
self and with the same source cast by hand to bfloat16; the readers in `hlo.py` are shown to see
what they must see.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable
from functools import cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from polymp.jax import autocast
from tests.support.jax import forms, hlo, transformer

SIZE = transformer.SMALL
# Per layer qkv, scores, mix, out, up, down; then the head. Each has two transposes.
CONTRACTIONS = 3 * (6 * SIZE.layers + 1)
LOOPED = 6 + 12  # one layer forward, then its transposes; what remat repeats comes on top
LOSSES = {
    "float32": partial(transformer.loss, heads=SIZE.heads),
    "by hand": partial(transformer.loss, heads=SIZE.heads, compute=jnp.bfloat16),
}
LOSSES["autocast"] = autocast(LOSSES["float32"])


@cache
def compiled(version: str, scanned: bool = False) -> str:
    """The optimised HLO of a train step that has run: XLA compiles some that it cannot run."""
    params, batch = transformer.parameters(SIZE, scanned=scanned), transformer.tokens(SIZE)
    step = (
        jax.jit(transformer.train_step(LOSSES[version]))
        .lower(params, batch)
        .compile(hlo.AS_FOR_USERS)
    )
    assert jnp.isfinite(step(params, batch)[1])
    return step.as_text()


@pytest.fixture(scope="module", autouse=True)
def on_processors_that_multiply_bfloat16():
    """Others widen the operands of each product, which is no cast that a plan has."""
    with forms.lowered_as("row_by_row"):
        yield


GRADIENTS = {version: jax.jit(jax.grad(loss)) for version, loss in LOSSES.items()}


@cache
def gradient(version: str, seed: int) -> Any:
    return GRADIENTS[version](transformer.parameters(SIZE, seed), transformer.tokens(SIZE, seed))


def distance(grads: Any, exact: Any) -> float:
    """Relative l2 distance over the whole gradient."""
    a, b = jax.tree.leaves(grads), jax.tree.leaves(exact)
    apart = sum(float(jnp.sum((x - y) ** 2)) for x, y in zip(a, b, strict=True))
    return math.sqrt(apart / sum(float(jnp.sum(y**2)) for y in b))


# The step: dtypes of contractions


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scan and remat"])
def test_every_contraction_of_the_step_is_low_and_sums_in_float32(scanned):
    found = hlo.contractions(compiled("autocast", scanned))
    wrong = [c for c in found if not (c.low and c.full)]
    assert not wrong
    if scanned:
        assert sum(c.looped for c in found) >= LOOPED
    else:
        assert len(found) == CONTRACTIONS
    assert sum(c.backward for c in found) >= 2 * len(found) // 3 - 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scan and remat"])
def test_the_reader_sees_a_float32_step(scanned):
    found = hlo.contractions(compiled("float32", scanned))
    assert {c.operands for c in found} == {("float32", "float32")}
    assert scanned or len(found) == CONTRACTIONS


# What is kept for the backward pass


def test_residuals_count_copies_and_not_arguments():
    w, x = jnp.ones((4, 4)), jnp.ones((2, 4))

    def kept(f):
        return hlo.residual_bytes(f, w, x)

    assert kept(lambda w, x: (x @ w).sum()) == 0  # x is an argument
    assert kept(lambda w, x: jnp.sin(x @ w).sum()) == 2 * 4 * 4  # cos
    low = jnp.bfloat16
    assert kept(lambda w, x: (x.astype(low) @ w.astype(low)).sum()) == 2 * 4 * 2
    assert kept(lambda w, x: (jnp.sin(x @ w) * jnp.sin(x @ w)).sum()) > 2 * 4 * 4


# Gradients


def test_the_gradient_is_at_least_as_exact_as_bfloat16_by_hand():
    # Rounding is random, so one seed may go either way by a little: the median of several.
    errors = {
        version: [distance(gradient(version, s), gradient("float32", s)) for s in range(5)]
        for version in ("by hand", "autocast")
    }
    assert 1e-4 < statistics.median(errors["autocast"]) <= statistics.median(errors["by hand"])


# Norms between two layers, compiled by XLA: under `lean` no float32 activation is made for them


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


def compiled_norm_hlo(norm: str, low: Any, how: str) -> str:
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
    found = {how: activations(compiled_norm_hlo(norm, low, how), "float32")
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
