"""`GradScaler` for JAX under the transforms, and what becomes of it in jaxprs and in HLO."""

from __future__ import annotations

import re
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export

from polymp.jax import GradScaler, autocast, upper
from tests.support.jax.hlo import AS_FOR_USERS
from tests.support.jax.scaler_tools import by_optax, flat, with_shape


def test_a_batch_of_scalers_under_vmap():
    batch = jax.vmap(lambda _: GradScaler(4.0, growth_interval=1))(jnp.arange(3))
    with pytest.raises(
        TypeError,
        match=r"^this GradScaler is a batch of shape \(3,\); call its methods in jax.vmap\.$",
    ):
        batch.scale(1.0)
    grads = jnp.asarray([[1.0, 2.0], [np.inf, 1.0], [4.0, np.nan]]) * 4
    weights = jnp.zeros((3, 2))
    run = jax.vmap(lambda s, g, w: s.step(g, lambda g, w: w - g, w))
    new, after, finite = run(batch, grads, weights)
    assert finite.tolist() == [True, False, False]
    assert new.tolist() == [[-1.0, -2.0], [0.0, 0.0], [0.0, 0.0]]
    assert after.state.scale.tolist() == [8.0, 2.0, 2.0]


def test_microbatches_are_added_up_scaled_and_checked_once():
    scaler = GradScaler(2.0**10)

    @jax.jit
    def run(scaler, batches):
        def add(total, x):
            return total + jax.grad(lambda w: scaler.scale((w * x).sum()))(1.0), None

        total, _ = jax.lax.scan(add, 0.0, batches)
        return scaler.step(total, lambda g, w: g, jnp.float32(-1))

    assert run(scaler, jnp.arange(6.0).reshape(3, 2))[0] == 15.0
    new, after, finite = run(scaler, jnp.asarray([[1.0, 2.0], [np.inf, 1.0], [1.0, 1.0]]))
    assert (float(new), float(after.state.scale), bool(finite)) == (-1.0, 512.0, False)


def test_growth_in_every_turn_of_a_scan():
    """Interval 1: a gradient is divided by the scale of its own loss, though the next has grown."""

    def body(carry, x):
        scaler, w = carry
        grads = jax.grad(lambda w: scaler.scale((w * x).sum()))(w)
        w, after, finite = scaler.step(grads, lambda g, w: w - g, w)
        return (after, w), (scaler.state.scale, grads[0], finite)

    xs = jnp.asarray([[1.0, 2.0]] * 5).at[2].set(jnp.inf)
    start = GradScaler(4.0, growth_interval=1), jnp.zeros(2)
    (_, w), (scales, grads, finite) = jax.jit(lambda c: jax.lax.scan(body, c, xs))(start)
    assert scales.tolist() == [4, 8, 16, 8, 16]
    assert grads.tolist() == [4, 8, np.inf, 8, 16]
    assert finite.tolist() == [True, True, False, True, True]
    assert w.tolist() == [-4.0, -8.0]


SHAPE = (311, 257)


def adam_step(scaler: GradScaler, w: Any, state: Any, x: Any, penalty: float = 0.0) -> Any:
    def scaled_loss(w: Any) -> Any:
        loss = ((x @ w) ** 2).mean()
        if penalty:
            loss += penalty * (w**2).sum()
        return scaler.scale(loss), loss

    grads, loss = jax.grad(scaled_loss, has_aux=True)(w)
    return scaler.step(grads, by_optax(ADAM), w, state, loss=loss)


def by_select(scaler: GradScaler, w: Any, state: Any, x: Any) -> Any:
    """Take a step as other packages do: divide, step, and select."""
    grads = jax.grad(lambda w: scaler.scale(((x @ w) ** 2).mean()))(w)
    grads, finite = scaler.unscale(grads)
    new = by_optax(ADAM)(grads, w, state)
    kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (w, state))
    return kept, scaler.update(finite), finite


ADAM = optax.adam(1e-3)


def compiled(step: Any) -> tuple[str, float]:
    """The HLO, and the memory for intermediate results in copies of the weights."""
    w = jnp.ones(SHAPE)
    run = jax.jit(step, donate_argnums=(0, 1, 2))
    program = run.lower(GradScaler(), w, ADAM.init(w), jnp.ones((5, SHAPE[0]))).compile(
        AS_FOR_USERS
    )
    return program.as_text(), program.memory_analysis().temp_size_in_bytes / w.nbytes


def entry(text: str) -> list[str]:
    """The lines of the program itself that make an array of the weights' shape."""
    (lines,) = re.findall(r"^ENTRY .*?^\}", text, re.DOTALL | re.MULTILINE)
    made = rf"= f32\[{SHAPE[0]},{SHAPE[1]}\]\S* (?!parameter|get-tuple-element|bitcast)"
    return [line for line in lines.splitlines() if re.search(made, line)]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what XLA on CPU makes of it")
def test_no_select_and_no_more_passes_than_the_check():
    text, temp = compiled(adam_step)
    others, more = compiled(by_select)
    select = rf"f32\[{SHAPE[0]},{SHAPE[1]}\]\S* select\("
    assert re.search(select, others)  # the oracle sees one
    assert not re.search(select, text)
    assert text.count(" conditional(") == 2  # the step, and the check where a sum says nothing
    # Outside of the branches one array of that size is made, the scaled gradient; the check reads
    # it and the branch divides it within the optimizer's own loops.
    assert len(entry(text)) == 1
    assert "dot" in entry(text)[0]
    assert len(entry(others)) > 1
    assert temp < 1.3  # that gradient
    assert more > 1.8  # and some of the state, old and new
    # Weights that only the loss reads are not copied for the step.
    text, temp = compiled(partial(adam_step, penalty=0.1))
    assert not [line for line in entry(text) if " copy(" in line]
    assert temp < 1.3


@pytest.mark.parametrize("loss", [None, jnp.float32(1)], ids=["no loss", "loss"])
def test_the_quotients_are_made_in_the_branch_and_the_state_is_not_selected(loss):
    """A loss costs nothing of the gradients' size."""

    def run(scaler, grads, weights, loss):
        return scaler.step(grads, lambda g, w: w - g, weights, loss=loss)

    jaxpr = jax.make_jaxpr(run)(GradScaler(), jnp.ones((7, 3)), jnp.ones((7, 3)), loss)
    assert with_shape(jaxpr, (7, 3)) == ["optimization_barrier", "cond", "cond"]
    check, by_platform = (eqn for eqn in flat(jaxpr) if eqn.primitive.name == "cond")
    assert check.params["branches_platforms"] == (("cpu",), None)
    by_sums, one_by_one = (with_shape(b, (7, 3)) for b in check.params["branches"])
    assert by_sums == ["reduce_sum", "cond"]
    assert one_by_one == ["mul", "is_finite", "reduce_and"]
    assert by_platform.params["branches_platforms"] == (("cuda", "rocm"), None)
    on_gpus, elsewhere = by_platform.params["branches"]
    (cond,) = (eqn for eqn in flat(elsewhere) if eqn.primitive.name == "cond")
    branches = [with_shape(branch, (7, 3)) for branch in cond.params["branches"]]
    assert branches == [[], ["mul", "sub"]]
    assert [e for e in flat(on_gpus) if e.primitive.name == "cond"] == []
    assert with_shape(on_gpus, (7, 3))[-4:] == ["select_n", "mul", "sub", "select_n"]


def for_platform(platform: str) -> tuple[str, str]:
    """A training step as it is exported for a platform, and what XLA makes of it, here on a CPU."""
    w = jnp.ones(SHAPE)
    run = jax.jit(adam_step, donate_argnums=(0, 1, 2))
    arguments = GradScaler(), w, ADAM.init(w), jnp.ones((5, SHAPE[0]))
    anywhere = [export.DisabledSafetyCheck.platform()]
    made = export.export(run, platforms=[platform], disabled_checks=anywhere)(*arguments)
    return made.mlir_module(), jax.jit(made.call).lower(*arguments).compile(AS_FOR_USERS).as_text()


@pytest.mark.parametrize(
    ("platform", "conditionals"), [("cuda", 0), ("rocm", 0), ("tpu", 1), ("cpu", 2)]
)
def test_on_gpus_nothing_waits_for_the_host_and_the_state_is_donated(
    platform: str, conditionals: int
) -> None:
    """XLA reads a conditional's predicate on the host there; one by a constant it takes out."""
    module, compiled = for_platform(platform)
    assert compiled.count(" conditional(") == conditionals
    leaves = jax.tree.leaves((GradScaler(), jnp.ones(1), ADAM.init(jnp.ones(1))))
    assert module.count("tf.aliasing_output") == len(leaves)


def test_an_update_with_effects_is_a_conditional_everywhere() -> None:
    def update(grads: Any, w: Any) -> Any:
        jax.debug.print("took a step")
        return w - grads

    w = jnp.ones(3)
    jaxpr = jax.make_jaxpr(lambda scaler, grads, w: scaler.step(grads, update, w))
    conds = [e for e in flat(jaxpr(GradScaler(), w, w)) if e.primitive.name == "cond"]
    assert [e.params.get("branches_platforms") is None for e in conds] == [False, True]  # the check


def gradients(scaler, loss, w):
    return jax.grad(lambda w: scaler.scale(loss(w)))(w)


def sgd(grads, w):
    return w - 1e4 * grads


def by_optimizer(scaler, loss, w):
    optimizer, grads = optax.chain(optax.identity(), optax.sgd(1e4)), gradients(scaler, loss, w)
    (w, _), _, finite = scaler.step(grads, by_optax(optimizer), w, optimizer.init(w))
    return w, finite


INSIDE = {
    "unscale": lambda s, loss, w: s.unscale(gradients(s, loss, w)),
    "value_and_grad": lambda s, loss, w: itemgetter(0, 2)(s.value_and_grad(loss)(w)),
    "step": lambda s, loss, w: itemgetter(0, 2)(s.step(gradients(s, loss, w), sgd, w)),
    "optax": by_optimizer,
    "scale of an array": lambda s, loss, w: (s.scale(X @ w), jnp.asarray(True)),
}
X = jnp.ones((2, 4))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("scale", "slope"), [(2.0**16, 1e-9), (2.0**-4, 1e5)])
@pytest.mark.parametrize("what", INSIDE)
def test_a_region_casts_none_of_the_scalers_arithmetic(what, scale, slope):
    """Gradients of a float16 product, which float16 holds only as long as they are scaled."""
    scaler, w = GradScaler(scale), jnp.zeros((4, 1))

    def run(loss):
        return lambda w: INSIDE[what](scaler, loss, w)

    plain = run(lambda w: jnp.sum(X @ w) * slope)
    low = run(lambda w: upper(jnp.sum(X @ w)) * slope)
    wrapped = autocast(low, dtype=jnp.float16)
    for call in (wrapped, jax.jit(wrapped)):
        got, finite = call(w)
        want, _ = plain(w)
        assert finite
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == jnp.float32
            np.testing.assert_allclose(a, b, rtol=2e-3)


def test_a_policy_that_lowers_everything_lowers_no_scale():
    scaler, policy = GradScaler(2.0**20, growth_interval=1), {"rules": {"default": "lower"}}
    run = autocast(lambda s: (s.update(True), s.scale(1.0)), dtype=jnp.float16, policy=policy)
    after, scale = run(scaler)
    assert (float(after.state.scale), float(scale)) == (2.0**21, 2.0**20)
    assert after.state.scale.dtype == scale.dtype == jnp.float32
