"""A train step under autocast: its casts, what it keeps and rounds, and loops of every kind in it.

Loops are gradient accumulation, scans over layers, remat, and all of them at once. A weight that is
the same in every turn is cast before the loop; what is kept for the backward pass is at most what
bfloat16 written by hand keeps; and gradients over eight microbatches add up in float32. Each reader
is shown a program that does the opposite.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from polymp.backends.jax.autocast.frame import Cast, Frame, ValueFacts
from polymp.jax import autocast
from tests.support.jax import forms, hlo, transformer
from tests.support.jax.corpus_runs import QUICK, apart
from tests.support.sizes import size

# In a list, one layer says it all; a scan needs two, or it is no loop.
SIZE = transformer.Size(layers=1, width=48, heads=4, hidden=80, vocabulary=56, batch=2, length=16)
SMALL = transformer.SMALL
MICROBATCHES = 8
cpu_only = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="reads loops that other backends unroll"
)
Loss = Callable[..., jax.Array]


def in_a_list(
    params: Any, batch: Any, *, compute: Any = jnp.float32, prevent_cse: bool = True
) -> jax.Array:
    """The transformer's layers one by one, each of them recomputed in the backward pass."""
    params = jax.tree.map(lambda p: p.astype(compute), params)
    run = partial(transformer.layer, heads=SIZE.heads, compute=compute)
    run = jax.checkpoint(run, prevent_cse=prevent_cse)
    x = params["embedding"][batch[:, :-1]] + params["position"]
    for p in params["layers"]:
        x = run(p, x)
    logits = transformer.layer_norm(params["norm"], x, compute) @ params["head"]
    return transformer.cross_entropy(logits, batch[:, 1:])


plain = partial(transformer.loss, heads=SIZE.heads)
# By name: the loss, and whether its layers are one stack to scan over.
MODELS: dict[str, tuple[Loss, bool]] = {
    "a list of layers": (plain, False),
    "a list, remat": (partial(in_a_list, prevent_cse=False), False),
    "scan": (partial(plain, remat=False), True),
    "scan and remat": (plain, True),
}


def parameters(scanned: bool) -> transformer.Params:
    return transformer.parameters(replace(SIZE, layers=2) if scanned else SIZE, scanned=scanned)


def mean_loss(loss: Loss) -> Loss:
    """One loss over microbatches, which a scan adds up: its derivative is a loop, too."""

    def mean(params: Any, batches: Any) -> jax.Array:
        def turn(total: Any, batch: Any) -> tuple[Any, None]:
            return total + loss(params, batch), None

        total, _ = jax.lax.scan(turn, jnp.float32(0), batches)
        return total / len(batches)

    return mean


def accumulated(loss: Loss) -> Callable[..., Any]:
    def gradient(params: Any, batches: Any) -> Any:
        def turn(sums: Any, batch: Any) -> tuple[Any, None]:
            grads = jax.grad(loss)(params, batch)
            return jax.tree.map(jnp.add, sums, grads), None

        return jax.lax.scan(turn, jax.tree.map(jnp.zeros_like, params), batches)[0]

    return gradient


def batches() -> jax.Array:
    return jnp.stack([transformer.tokens(SIZE, seed) for seed in range(MICROBATCHES)])


def compiled(f: Any, *args: Any) -> Any:
    """The program, after it ran: XLA compiles some that it cannot run."""
    made = jax.jit(f, compiler_options=QUICK).lower(*args).compile(hlo.AS_FOR_USERS)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(made(*args)))
    return made


@cache
def accumulation(model: str) -> Any:
    loss, scanned = MODELS[model]
    return compiled(accumulated(autocast(loss)), parameters(scanned), batches())


def text(program: Any) -> str:
    """HLO with a loop that has contractions in it."""
    found: str = program.as_text()
    assert any(c.looped for c in hlo.contractions(found)), "no loop is left to look into"
    return found


# Casts


@cpu_only
@pytest.mark.one_in(3)
@pytest.mark.parametrize("model", ["scan and remat", "a list, remat", "scan"])
def test_accumulation_casts_no_weight_again_and_again(model):
    found = text(accumulation(model))
    assert hlo.casts(found) > 0
    assert hlo.repeated_casts(found) == []


@cpu_only
def test_the_derivative_of_a_loop_over_microbatches_casts_no_weight_again_and_again():
    loss = autocast(mean_loss(MODELS["a list of layers"][0]))
    program = compiled(jax.grad(loss), parameters(False), batches())
    assert hlo.repeated_casts(text(program)) == []


@cpu_only
def test_casts_behind_the_barrier_of_remat_are_seen():
    # jax.checkpoint keeps XLA from taking what it computes again for what is there already, and so
    # from taking it out of a loop; in scans, JAX's documentation asks for prevent_cse=False.
    loss = autocast(partial(in_a_list, prevent_cse=True))
    program = compiled(accumulated(loss), parameters(False), batches())
    seen = {op.shape for op in hlo.repeated_casts(text(program), size=SIZE.width**2)}
    width, hidden = SIZE.width, SIZE.hidden
    assert {(width, 3 * width), (width, hidden), (hidden, width)} <= seen


# Memory


def kept(loss: Loss, scanned: bool, over: Any) -> int:
    return hlo.residual_bytes(loss, parameters(scanned), over)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("over", ["one batch", "a loop over microbatches"])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_kept_is_at_most_what_bfloat16_by_hand_keeps(model, over):
    loss, scanned = MODELS[model]
    one = over == "one batch"
    around = (lambda f: f) if one else mean_loss
    given = transformer.tokens(SIZE) if one else batches()
    held = {
        "autocast": kept(autocast(around(loss)), scanned, given),
        "by hand": kept(around(partial(loss, compute=jnp.bfloat16)), scanned, given),
        "float32": kept(around(loss), scanned, given),
    }
    assert 0 < held["autocast"] <= held["by hand"]
    assert held["autocast"] < held["float32"]


# Gradients


def test_accumulated_gradients_are_the_sum_of_separate_ones():
    model = "scan and remat"
    loss, scanned = MODELS[model]
    params = parameters(scanned)
    one = jax.jit(jax.grad(autocast(loss)), compiler_options=QUICK)
    separate = [jax.tree.map(np.asarray, one(params, batch)) for batch in batches()]
    total = jax.tree.map(lambda *g: np.sum(np.asarray(g, np.float64), 0), *separate)
    ours = accumulation(model)(params, batches())
    assert {g.dtype for g in jax.tree.leaves(ours)} == {np.dtype("float32")}
    # float32 rounds each of eight sums by 2**-24; XLA may round one activation in another place.
    assert apart(ours, total) < 2e-4
    low = jax.tree.map(lambda *g: sum(jnp.asarray(x, jnp.bfloat16) for x in g), *separate)
    assert apart(low, total) > 1e-3, "a sum in bfloat16 is not seen"


# --- Casts of parameters are not merged: gradients are as exact however often a weight is used ----


def error_of_uses(count: int) -> float:
    """How far the gradient is of a weight that is used many times, each time on its own rows."""
    keys = jax.random.split(jax.random.key(1))
    w = jax.random.normal(keys[0], (16, 16)) / 4
    xs = jax.random.normal(keys[1], (count, 8, 16))

    def fn(w: Any) -> Any:
        return sum(((x @ w) ** 2).sum() for x in xs)

    rows = np.asarray(xs, np.float64).reshape(-1, 16)
    return apart(jax.grad(autocast(fn))(w), 2 * rows.T @ rows @ np.asarray(w, np.float64))


def error_of_rnn(length: int, before: Any = lambda w: w) -> float:
    """The same of a weight in a loop, which `before` may change before the loop."""
    keys = jax.random.split(jax.random.key(3))
    w = jax.random.normal(keys[0], (24, 24)) * 0.9 / 24**0.5
    xs = jax.random.normal(keys[1], (length, 4, 24))

    def fn(w: Any) -> Any:
        def turn(h: Any, x: Any) -> Any:
            h = jnp.tanh(h @ w + x)
            return h, h

        return (lax.scan(turn, jnp.zeros_like(xs[0]), xs)[1] ** 2).mean()

    quick = partial(jax.jit, compiler_options=QUICK)
    ours = quick(jax.grad(autocast(lambda w: fn(before(w)))))(w)
    return apart(ours, quick(jax.grad(fn))(w))


def merge_all_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One low copy of a parameter for all that read it."""
    real = Frame.read

    def read(self: Any, atom: Any, dtype: str | None) -> Any:
        operand = real(self, atom, dtype)
        return operand._replace(shared=True) if type(operand) is Cast else operand

    monkeypatch.setattr(Frame, "read", read)
    monkeypatch.setattr(ValueFacts, "is_parameter", False)


def test_the_gradient_of_a_weight_used_often_is_as_exact(monkeypatch):
    few, often = map(error_of_uses, (4, 64))
    assert 1e-4 < few
    assert often < 1.3 * few
    merge_all_casts(monkeypatch)
    assert error_of_uses(64) > 2 * often, "merged casts are not noticed"


def test_the_gradient_of_a_weight_in_a_loop_is_as_exact():
    """Short and long; a copy cast by hand before the loop is what must not come of it."""
    short, long = map(error_of_rnn, (16, 256))
    assert 1e-4 < short
    assert long < 1.3 * short
    assert error_of_rnn(256, lambda w: w.astype("bfloat16")) > 2 * long


# --- The whole step, as XLA compiles it -----------------------------------------------------------

# Of a layer qkv, scores, mix, out, up, down; then the head. Each has two transposes.
CONTRACTIONS = 3 * (6 + 1)
LOOPED = 6 + 12  # one layer forward, then its transposes; what remat repeats comes on top
# Processors that do not multiply bfloat16 widen the operands of each product.
multiplied_low = forms.lowered_as("row_by_row")
LOSSES = {
    "float32": plain,
    "by hand": partial(plain, compute=jnp.bfloat16),
    "autocast": autocast(plain),
}


def contractions(version: str, scanned: bool) -> list[Any]:
    """Those of a compiled train step, of one layer where each has its own instructions."""
    model = SMALL if scanned else replace(SMALL, layers=1)
    args = transformer.parameters(model, scanned=scanned), transformer.tokens(model)
    return hlo.contractions(compiled(transformer.train_step(LOSSES[version]), *args).as_text())


@multiplied_low
@pytest.mark.one_in(2)
@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scan and remat"])
def test_every_contraction_of_the_step_is_low_and_sums_in_float32(scanned):
    found = contractions("autocast", scanned)
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
    found = contractions("float32", scanned)
    assert {c.operands for c in found} == {("float32", "float32")}
    assert scanned or len(found) == CONTRACTIONS


def test_residuals_count_copies_and_not_arguments():
    w, x = jnp.ones((4, 4)), jnp.ones((2, 4))

    def kept(f):
        return hlo.residual_bytes(f, w, x)

    assert kept(lambda w, x: (x @ w).sum()) == 0  # x is an argument
    assert kept(lambda w, x: jnp.sin(x @ w).sum()) == 2 * 4 * 4  # cos
    low = jnp.bfloat16
    assert kept(lambda w, x: (x.astype(low) @ w.astype(low)).sum()) == 2 * 4 * 2
    assert kept(lambda w, x: (jnp.sin(x @ w) * jnp.sin(x @ w)).sum()) > 2 * 4 * 4


@pytest.mark.sized
@multiplied_low
def test_the_gradient_is_at_least_as_exact_as_bfloat16_by_hand():
    """Rounding is random, so one seed may go either way by a little: the median of several."""
    errors: dict[str, list[float]] = {"autocast": [], "by hand": []}
    graded = {version: jax.jit(jax.grad(loss)) for version, loss in LOSSES.items()}
    model = replace(SMALL, layers=size(1, 2))
    for seed in range(5):
        args = transformer.parameters(model, seed), transformer.tokens(model, seed)
        for version, found in errors.items():
            found.append(apart(graded[version](*args), graded["float32"](*args)))
    assert 1e-4 < statistics.median(errors["autocast"]) <= statistics.median(errors["by hand"])
