"""Models of the libraries that people build them with, unchanged but for `autocast`.

They train as far as in float32, and functions inside of them may be autocast ones.
"""

from functools import partial
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import linen
from numpyro.infer import SVI, Trace_ELBO, autoguide

from polymp.jax import GradScaler, autocast
from tests.support.jax.corpus import corpus
from tests.support.jax.corpus_runs import problem
from tests.support.jax.scaler_tools import by_optax
from tests.support.jax.walker import products

STEPS = 60
LIBRARIES = ("nnx_transformer_lm", "linen_seq2seq", "equinox_gru", "haiku_lstm")


def train(loss: Any, params: Any, data: Any, scaled: bool) -> tuple[list[float], Any, set[str]]:
    """The losses of all steps, the last parameters and gradients, and the `products` of a step."""
    optimizer = optax.adam(0.05)

    @jax.jit
    def step(params, state, scaler):
        def scaled_loss(params):
            value = loss(params, *data)
            return scaler.scale(value), value

        grads, value = jax.grad(scaled_loss, has_aux=True)(params)
        (params, state), scaler, _ = scaler.step(grads, by_optax(optimizer), params, state)
        return params, state, scaler, value, grads

    carry = params, optimizer.init(params), GradScaler(enabled=scaled, growth_interval=20)
    found, losses = {*products(jax.make_jaxpr(step)(*carry))}, []
    for _ in range(STEPS):
        *carry, value, grads = step(*carry)
        losses.append(float(value))
    return losses, (carry[0], grads), found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [p.name for p in corpus() if p.name in LIBRARIES])
def test_a_model_of_the_library_trains_as_well_as_in_float32(name):
    it = problem(name)
    params, *data = it.args
    plain, _, found = train(it.fn, params, data, False)
    assert plain[-1] < plain[0] / 2, "the problem is too hard to tell anything"
    assert found == {"float32"}
    for low, scaled in (("bfloat16", False), ("float16", True)):
        losses, trees, found = train(autocast(it.fn, dtype=low), params, data, scaled)
        assert found == {low}
        assert abs(losses[0] - plain[0]) < 0.05 * plain[0]
        assert losses[-1] < plain[0] / 2
        for leaf in jax.tree.leaves(trees):
            assert leaf.dtype == jnp.float32
            assert np.isfinite(leaf).all()


# Functions that read and write a context of their library

XS = jnp.linspace(-1, 1, 12).reshape(3, 4)


class Decorated(linen.Module):
    """A module with a region inside it: `how` says where."""

    how: str

    def setup(self):
        self.dense = linen.Dense(2)

    def __call__(self, x):
        if self.how == "a method":
            return self.low(x)
        if self.how == "a submodule":
            return autocast(self.dense)(x)
        return autocast(lambda x: self.dense(x))(x)

    @autocast
    def low(self, x):
        return self.dense(x)


NETS: dict[str, Any] = {
    "haiku": hk.without_apply_rng(hk.transform(autocast(lambda x: hk.Linear(2)(x))))
} | {f"linen, {how}": Decorated(how) for how in ("a method", "a submodule", "a function")}


@pytest.mark.parametrize("name", NETS)
def test_a_region_inside_a_net_follows_its_parameters(name):
    net = NETS[name]
    params = autocast(net.init)(jax.random.key(0), XS)
    for scale in (1, 2):
        scaled = jax.tree.map(lambda p, scale=scale: p * scale, params)
        low = net.apply(scaled, XS)
        want = autocast(net.apply)(scaled, XS)
        assert low.dtype == jnp.bfloat16
        assert np.array_equal(low, want)
    grads = jax.grad(lambda p: net.apply(p, XS).sum().astype(jnp.float32))(params)
    for leaf in jax.tree.leaves(grads):
        assert leaf.dtype == jnp.float32
        assert np.abs(leaf).max() > 0.1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_parameters_made_in_a_region_inside_are_refused_or_come_out_alive(name, jit):
    net = NETS[name]
    with pytest.raises(jax.errors.UnexpectedTracerError):
        net.apply((jax.jit(net.init) if jit else net.init)(jax.random.key(0), XS), XS)
    for region in (autocast, partial(autocast, enabled=False)):
        init = region(net.init)
        for leaf in jax.tree.leaves((jax.jit(init) if jit else init)(jax.random.key(0), XS)):
            assert leaf.dtype == jnp.float32
            assert np.isfinite(leaf).all()


def test_a_numpyro_model_is_refused_and_a_function_in_it_is_not():
    def model(x, y, product):
        w = numpyro.sample("w", dist.Normal(jnp.zeros(4), 1).to_event(1))
        numpyro.sample("y", dist.Normal(product(x, w), 0.1), obs=y)

    def posterior(model):
        guide = autoguide.AutoNormal(model)
        svi = SVI(model, guide, numpyro.optim.Adam(0.05), Trace_ELBO())
        found = svi.run(jax.random.key(0), 50, x, y, progress_bar=False)
        return found.params["w_auto_loc"]

    x = jnp.linspace(-1, 1, 32).reshape(8, 4)
    y = x @ jnp.arange(4.0)
    plain = posterior(partial(model, product=jnp.matmul))
    low = posterior(partial(model, product=autocast(jnp.matmul)))
    assert not np.array_equal(low, plain)
    np.testing.assert_allclose(low, plain, atol=0.05)
    with pytest.raises(jax.errors.UnexpectedTracerError, match="side effect"):
        posterior(autocast(partial(model, product=jnp.matmul)))
