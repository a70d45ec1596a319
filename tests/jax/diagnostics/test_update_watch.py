"""`UpdateWatch`: low weights that do not learn are noticed, on any training, without waiting."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from polymp.backends.jax.arrays import AsyncCopy
from polymp.errors import LowWeightsWarning
from polymp.jax import UpdateWatch, low_weights

LARGE = {"body": {"w": jnp.ones((64, 64))}, "norm": jnp.ones(8)}


def train(tx: Any, params: Any, watch: UpdateWatch, steps: int, grads: Any = None) -> Any:
    opt_state = tx.init(params)
    if hasattr(tx, "weights"):
        params = tx.weights(params)

    def step(params: Any, opt_state: Any) -> Any:
        gradients = jax.tree.map(jnp.ones_like, params) if grads is None else grads
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    step = jax.jit(step, donate_argnums=(0, 1))
    params = jax.tree.map(jnp.array, params)
    for _ in range(steps):
        params, opt_state = step(params, opt_state)
        watch.watch(params, opt_state, grads)
    return params


def low(params: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


def test_a_run_that_does_not_learn_is_named():
    watch = UpdateWatch(every=5)
    params = {"body": low(LARGE["body"]), "norm": LARGE["norm"]}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(optax.adamw(1e-3), params, watch, 12)
        (record,) = watch.finish()
    assert (record.name, record.dtype) == ("body.w", "bfloat16")
    assert (record.updates, record.lost) == (2048, 2048)
    assert [each.category for each in told] == [LowWeightsWarning]
    assert str(told[0].message) == (
        "100% of the updates of low weights were rounded away in this step: the weight keeps its "
        "bits, because the update is below half of its last place. "
        "Most in: body.w (bfloat16) 100%. Such weights hardly learn. Write "
        "polymp.jax.low_weights(optimizer), which keeps the rest of each weight beside it."
    )


TABLE = {"rows": jnp.ones((32, 4), jnp.bfloat16)}
HALF_OF_THE_ROWS = {"rows": jnp.zeros((32, 4)).at[::2].set(1.0)}


@pytest.mark.parametrize(
    ("tx", "params", "grads", "records"),
    [
        (optax.sgd(0.5), low(LARGE), None, [(2048, 0), (8, 0)]),  # of a sample
        (optax.sgd(0.5), TABLE, HALF_OF_THE_ROWS, [(64, 0)]),
        (optax.adamw(1e-9), LARGE, None, []),
        (low_weights(optax.adamw(1e-3), "split"), LARGE, None, []),
        (low_weights(optax.adamw(1e-3), "stochastic"), LARGE, None, []),
    ],
    ids=["learns", "rows without a gradient", "float32", "split", "stochastic"],
)
def test_weights_that_learn_or_are_not_plain_low_ones_are_not_named(tx, params, grads, records):
    """Weights without a gradient are not counted."""
    watch = UpdateWatch(every=2)
    train(tx, params, watch, 6, grads)
    assert [(record.updates, record.lost) for record in watch.finish()] == records


def test_the_last_records_are_of_the_last_step(monkeypatch):
    """Also where the host is so far ahead that no counts have arrived."""
    monkeypatch.setattr(AsyncCopy, "is_ready", lambda copy: False)
    watch = UpdateWatch(every=1)
    for w in (1, 1, 2):
        watch.watch([jnp.full(8, w, jnp.bfloat16), jnp.bfloat16])  # a dtype is no weight
    with pytest.warns(LowWeightsWarning, match="100% of the updates"):
        (record,) = watch.finish()
    assert (record.updates, record.lost) == (8, 0)


def test_traced_parameters_are_refused():
    watch = UpdateWatch(every=1)
    with pytest.raises(TypeError, match="watch runs on the host: call it after the jitted step"):
        jax.jit(lambda p: watch.watch(p))(jnp.ones(3, jnp.bfloat16))


@pytest.mark.parametrize("given", [3, None, {}, "params"])
def test_what_is_no_parameters_is_refused(given):
    watch = UpdateWatch()
    with pytest.raises(TypeError) as error:
        watch.watch(given)
    assert str(error.value) == (
        "watch(params, opt_state) needs the parameters, a pytree of arrays, got "
        f"{given!r}. Give it what the training step returned."
    )


def test_steps_that_cannot_be_counted_are_refused():
    with pytest.raises(ValueError, match=r"UpdateWatch\(every=0\) must be 1 or more"):
        UpdateWatch(every=0)
