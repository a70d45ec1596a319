"""Losses of products in 8 bits in JAX: loops, branches, rematerialisation, vmap."""

import jax
import jax.numpy as jnp
import pytest

import polymp
import polymp.jax
from polymp.jax import autocast
from tests.support.jax.fp8_models import batch, layers, policy


def layer(h, w):
    with jax.named_scope("layer"):
        return jnp.tanh(h @ w)


def straight(ws, x):
    for w in ws:
        x = layer(x, w)
    return x


def scanned(ws, x):
    return jax.lax.scan(lambda h, w: (layer(h, w), None), x, ws)[0]


def looped(ws, x):
    return jax.lax.fori_loop(0, len(ws), lambda i, h: layer(h, ws[i]), x)


def branched(ws, x):
    for w in ws:
        x = jax.lax.cond(x[0, 0, 0] < 9, layer, lambda h, w: h, x, w)
    return x


def again(ws, x):
    for w in ws:
        x = jax.checkpoint(layer)(x, w)
    return x


def audited(fn, ws, x, policy="lean", dtype=jnp.bfloat16, recipe="rowwise"):
    def loss(ws, x):
        return jnp.mean(fn(ws, x).astype(jnp.float32) ** 2)

    step = jax.grad(autocast(loss, policy=policy, dtype=dtype))
    found = polymp.jax.audit(jax.jit(step), fp8=recipe)
    found(ws, x)
    return found.audit


def given():
    return jnp.stack([*layers().values()][:2]), batch()


def worst(losses):
    """The largest error of each operand and result."""
    found: dict[str, float] = {}
    for one in losses:
        errors = {role: each.error for role, each in one.operands.items()} | dict(one.results)
        for name, error in errors.items():
            found[name] = max(found.get(name, 0.0), error)
    return found


@pytest.fixture(scope="module")
def plain():
    return worst(audited(straight, *given()).fp8_losses)


@pytest.mark.parametrize("fn", [scanned, branched, again])
def test_control_flow_changes_no_loss(fn, plain):
    found = worst(audited(fn, *given()).fp8_losses)
    print(fn.__name__, found)
    assert found.keys() == plain.keys()
    if fn is scanned:  # there the first layer's input has a gradient, too
        del found["input_gradient"]
    assert all(found[name] == pytest.approx(plain[name], rel=0.02) for name in found)


def test_a_loop_without_derivative(plain):
    ws, x = given()
    found = polymp.jax.audit(autocast(looped, policy="lean"), fp8="rowwise")
    found(ws, x)
    (one,) = found.audit.fp8_losses
    assert one.results["result"] == pytest.approx(plain["result"], rel=0.02)


def test_elements_of_a_batch_have_scales_of_their_own():
    ws, x = given()
    x = x.at[0].multiply(1e-7)
    for batched, lost in ((lambda fn: fn, True), (lambda fn: jax.vmap(fn, (None, 0)), False)):
        fn = batched(autocast(straight, policy="lean"))
        found = polymp.jax.audit(
            jax.grad(lambda ws, x, fn=fn: jnp.sum(fn(ws, x))), fp8="tensorwise"
        )
        found(ws[:1], x)
        (one,) = found.audit.fp8_losses
        print(one)
        assert (one.operands["activation"].error > 0.4) == lost


@pytest.mark.parametrize(
    ("rules", "dtype"),
    [
        ("lean", jnp.float16),
        (policy("rowwise"), jnp.bfloat16),
        (polymp.policy("lean").override(fp32=["linear", "matmul"]), jnp.bfloat16),
    ],
)
def test_only_products_that_run_in_bfloat16_are_measured(rules, dtype):
    found = audited(straight, *given(), rules, dtype)
    assert not found.fp8_losses
    with pytest.raises(ValueError, match="no product was measured"):
        found.suggest(fp8=True)


def test_an_explanation_inside_has_no_trial():
    ws, x = given()
    report = polymp.jax.explain(straight, ws, x, policy="lean")
    assert {call.recipe for call in report} == {""}
