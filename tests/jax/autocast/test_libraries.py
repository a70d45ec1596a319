"""Train steps of the libraries that people build models with, unchanged but for `autocast`.

Each model learns the same regression with optax, in float32 and under autocast in both dtypes. It
has to get as far, with float32 parameters and gradients, and to compute its products low.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import linen, nnx
from numpyro.infer import SVI, Trace_ELBO, autoguide

from polymp.errors import EscapedValueError
from polymp.jax import GradScaler, autocast
from tests.support.jax.walker import CONTRACTIONS, OURS, equations

STEPS = 60


def batch():
    x = jax.random.normal(jax.random.key(0), (64, 6, 4))
    return x, jnp.tanh(x.sum(1)).sum(-1, keepdims=True)


class Run(NamedTuple):
    first: float
    last: float
    params: Any
    grads: Any
    products: set[str]


Wrap = Callable[[Any], Any]


def products(jaxpr: Any) -> set[str]:
    """The dtypes in which the contractions of a program run."""
    contractions = [site for site in equations(jaxpr) if site.op in (OURS, *CONTRACTIONS)]
    return {site.params["run"] if site.op == OURS else site.operands[0] for site in contractions}


def fit(loss: Any, params: Any, wrap: Wrap, scaled: bool) -> Run:
    """Train with optax.adam on pure functions; with a scaler if asked to."""
    optimizer, x_y = optax.adam(0.01), batch()
    scaler = GradScaler(enabled=scaled, growth_interval=20)
    wrapped = wrap(loss)

    @jax.jit
    def step(params, state, scaler):
        def scaled_loss(params):
            value = wrapped(params, *x_y)
            return scaler.scale(value), value

        def update(grads, params, state):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        grads, value = jax.grad(scaled_loss, has_aux=True)(params)
        (params, state), scaler, _ = scaler.step(grads, update, params, state)
        return params, state, scaler, value, grads

    state, losses = optimizer.init(params), []
    found = products(jax.make_jaxpr(step)(params, state, scaler))
    for _ in range(STEPS):
        params, state, scaler, value, grads = step(params, state, scaler)
        losses.append(float(value))
    return Run(losses[0], losses[-1], params, grads, found)


def train_nnx(wrap: Wrap, scaled: bool) -> Run:
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(4, 16, kernel_size=(3,), rngs=rngs)
            self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)
            self.out = nnx.Linear(16, 1, rngs=rngs)

        def __call__(self, x):
            h = jax.nn.gelu(self.norm(self.conv(x)))
            return self.out(self.drop(h + self.attention(h)).mean(1))

    net, x_y = Net(nnx.Rngs(0)), batch()
    optimizer = nnx.Optimizer(net, optax.adam(0.01), wrt=nnx.Param)
    scaler = GradScaler(enabled=scaled, growth_interval=20)
    wrapped = wrap(lambda net, x, y: jnp.mean((net(x) - y) ** 2))

    @nnx.jit
    def step(net, optimizer, scaler):
        def scaled_loss(net):
            value = wrapped(net, *x_y)
            return scaler.scale(value), value

        (_, value), grads = nnx.value_and_grad(scaled_loss, has_aux=True)(net)
        graph, state = nnx.split((net, optimizer))

        def update(grads, state):
            net, optimizer = nnx.merge(graph, state)
            optimizer.update(net, grads)
            return nnx.split((net, optimizer))[1]

        state, scaler, _ = scaler.step(grads, update, state)
        nnx.update((net, optimizer), state)
        return value, grads, scaler

    losses = []
    for _ in range(STEPS):
        value, grads, scaler = step(net, optimizer, scaler)
        losses.append(float(value))
    assert np.abs(net.norm.mean[...]).max() > 0, "the batch statistics stood still"
    graph, state = nnx.split(net)
    found = products(jax.make_jaxpr(lambda s: wrapped(nnx.merge(graph, s), *x_y))(state))
    return Run(losses[0], losses[-1], nnx.state(net, nnx.Param), grads, found)


def train_linen(wrap: Wrap, scaled: bool) -> Run:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x, train):
            h = linen.Dense(16)(x)
            h = linen.BatchNorm(use_running_average=not train, momentum=0.9)(h)
            h = h + linen.MultiHeadDotProductAttention(2)(linen.LayerNorm()(h))
            h = linen.RNN(linen.LSTMCell(16))(h)
            return linen.Dense(1)(h[:, -1])

    net = Net()
    variables = net.init(jax.random.key(1), batch()[0], True)
    stats = variables["batch_stats"]

    def loss(params, x, y):
        held = {"params": params, "batch_stats": stats}
        out, state = net.apply(held, x, True, mutable=["batch_stats"])
        return jnp.mean((out - y) ** 2) + 0 * state["batch_stats"]["BatchNorm_0"]["mean"].sum()

    return fit(loss, variables["params"], wrap, scaled)


def train_equinox(wrap: Wrap, scaled: bool) -> Run:
    class Net(eqx.Module):
        cell: eqx.nn.GRUCell
        norm: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP

        def __init__(self, key):
            k1, k2 = jax.random.split(key)
            self.cell = eqx.nn.GRUCell(4, 16, key=k1)
            self.norm = eqx.nn.LayerNorm(16)
            self.mlp = eqx.nn.MLP(16, 1, 32, 1, key=k2)

        def __call__(self, x):
            h, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(16), x)
            return self.mlp(self.norm(h))

    params, static = eqx.partition(Net(jax.random.key(1)), eqx.is_array)

    def loss(params, x, y):
        net = eqx.combine(params, static)
        return jnp.mean((jax.vmap(net)(x) - y) ** 2)

    return fit(loss, params, wrap, scaled)


def train_haiku(wrap: Wrap, scaled: bool) -> Run:
    def forward(x):
        h, _ = hk.dynamic_unroll(hk.LSTM(16), x.swapaxes(0, 1), hk.LSTM(16).initial_state(64))
        return hk.nets.MLP([16, 1])(hk.LayerNorm(-1, True, True)(h[-1]))

    net = hk.without_apply_rng(hk.transform(forward))

    def loss(params, x, y):
        return jnp.mean((net.apply(params, x) - y) ** 2)

    return fit(loss, net.init(jax.random.key(1), batch()[0]), wrap, scaled)


TRAIN = {
    "flax nnx": train_nnx,
    "flax linen": train_linen,
    "equinox": train_equinox,
    "haiku": train_haiku,
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("library", TRAIN)
def test_a_model_of_the_library_trains_as_well_as_in_float32(library):
    train = TRAIN[library]
    plain = train(lambda loss: loss, False)
    assert plain.last < plain.first / 2, "the problem is too hard to tell anything"
    assert plain.products == {"float32"}
    for low, scaled in (("bfloat16", False), ("float16", True)):
        run = train(partial(autocast, dtype=low), scaled)
        assert run.products == {low}
        assert abs(run.first - plain.first) < 0.05 * plain.first
        assert run.last < plain.first / 2
        for leaf in jax.tree.leaves((run.params, run.grads)):
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
    "haiku": hk.without_apply_rng(hk.transform(autocast(lambda x: hk.Linear(2)(x)))),
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
    with pytest.raises(EscapedValueError, match=r"as in autocast\(net\.init\)"):
        (jax.jit(net.init) if jit else net.init)(jax.random.key(0), XS)
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
    with pytest.raises(EscapedValueError, match="only functions inside that store nothing"):
        posterior(autocast(partial(model, product=jnp.matmul)))
