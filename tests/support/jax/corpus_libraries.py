"""Programs of the corpus that are built from installed packages other than flax.

The models follow the kinds of model that the packages' users build, written small and by us.
Parameters come from shapes alone, so that no initialiser has to be compiled.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tests.support.jax.corpus import F32, LOW, Draw, Made, program, shapes

# equinox.


@program(LOW, tags="equinox mlp vmap", needs="equinox")
def equinox_mlp(draw: Draw) -> Made:
    import equinox as eqx

    apply, params = _equinox(draw, lambda key: eqx.nn.MLP(4, 3, 8, 2, key=key))
    return lambda p, x: jax.vmap(apply(p))(x), (params, draw.normal(5, 4))


@program(LOW, tags="equinox attention layernorm vmap", needs="equinox")
def equinox_attention(draw: Draw) -> Made:
    import equinox as eqx

    apply, params = _equinox(
        draw,
        lambda key: (eqx.nn.MultiheadAttention(2, 8, key=key), eqx.nn.LayerNorm(8)),
    )

    def run(p: Any, x: jax.Array) -> jax.Array:
        attention, norm = apply(p)
        x = jax.vmap(norm)(x)
        return attention(x, x, x, mask=jnp.tri(5, dtype=bool))

    return run, (params, draw.normal(5, 8))


@program(F32, tags="equinox gru rnn scan loss", needs="equinox")
def equinox_gru(draw: Draw) -> Made:
    import equinox as eqx

    apply, params = _equinox(
        draw, lambda key: (eqx.nn.GRUCell(3, 5, key=key), eqx.nn.Linear(5, 1, key=key))
    )

    def loss(p: Any, xs: jax.Array, y: jax.Array) -> jax.Array:
        cell, readout = apply(p)
        h, _ = jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(5), xs)
        z = readout(h)[0]
        return jnp.maximum(z, 0) - z * y + jnp.log1p(jnp.exp(-jnp.abs(z)))

    return loss, (params, draw.normal(6, 3), jnp.float32(1.0))


# haiku.


@program(F32, tags="haiku lstm rnn dynamic_unroll", needs="haiku")
def haiku_lstm(draw: Draw) -> Made:
    import haiku as hk

    def forward(xs: jax.Array) -> jax.Array:
        core = hk.LSTM(5)
        outs, _ = hk.dynamic_unroll(core, xs, core.initial_state(xs.shape[1]))
        return hk.BatchApply(hk.Linear(3))(outs)

    model, xs = hk.without_apply_rng(hk.transform(forward)), draw.normal(4, 2, 3)

    def loss(p: Any, xs: jax.Array) -> jax.Array:
        return jnp.mean((model.apply(p, xs)[:-1] - xs[1:]) ** 2)

    return loss, (draw.fill(shapes(model.init, xs)), xs)


@program(LOW, tags="haiku mlp layernorm", needs="haiku")
def haiku_mlp(draw: Draw) -> Made:
    import haiku as hk

    def forward(x: jax.Array) -> jax.Array:
        x = hk.nets.MLP([8, 8], activation=jnp.tanh, activate_final=True)(x)
        x = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        return hk.Linear(3)(x)

    model, x = hk.without_apply_rng(hk.transform(forward)), draw.normal(4, 5)
    return model.apply, (draw.fill(shapes(model.init, x)), x)


# Probability, differential equations, losses.


@program(F32, tags="keras conv batchnorm dropout loss", needs="keras")
def keras_classifier(draw: Draw) -> Made:
    """The function that Keras differentiates when it trains on JAX."""
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            keras.layers.Conv2D(4, 3, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(3),
        ]
    )
    model.compile(None, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rest = [v.value for v in model.non_trainable_variables]
    x, y = draw.normal(4, 6, 6, 1), draw.integers(3, 4)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        found, _ = model.compute_loss_and_updates(params, rest, [], x, y, None, training=True)
        return found

    params = [draw.fill(jax.ShapeDtypeStruct(v.shape, v.dtype)) for v in model.trainable_variables]
    return loss, (params, x, y)


@program(F32, tags="numpyro log_density logistic_regression", needs="numpyro")
def numpyro_logistic_regression(draw: Draw) -> Made:
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.util import log_density

    def model(x: jax.Array, y: jax.Array) -> None:
        w = numpyro.sample("w", dist.Normal(jnp.zeros(4), 1.0).to_event(1))
        b = numpyro.sample("b", dist.Cauchy(0.0, 2.0))
        numpyro.sample("y", dist.Bernoulli(logits=x @ w + b), obs=y)

    def log_p(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return log_density(model, (x, y), {}, p)[0]

    y = draw.integers(2, 6).astype(jnp.float32)
    return log_p, ({"w": draw.normal(4), "b": jnp.float32(0.3)}, draw.normal(6, 4), y)


@program(F32, tags="numpyro hierarchical distributions", needs="numpyro", lowers=False)
def numpyro_eight_schools(draw: Draw) -> Made:
    import numpyro.distributions as dist

    def log_p(p: Any, y: jax.Array, sigma: jax.Array) -> jax.Array:
        tau = jnp.exp(p["log_tau"])
        total = dist.Normal(0, 5).log_prob(p["mu"]) + dist.HalfCauchy(5).log_prob(tau)
        total += dist.StudentT(4.0, p["mu"], tau).log_prob(p["theta"]).sum()
        return total + dist.Normal(p["theta"], sigma).log_prob(y).sum() + p["log_tau"]

    p = {"mu": jnp.float32(0.4), "log_tau": jnp.float32(0.2), "theta": draw.normal(8)}
    return log_p, (p, draw.normal(8, scale=3), draw.uniform(8, low=1, high=2))


@program(F32, tags="diffrax ode neural_ode while_loop", needs="diffrax", lowers=False)
def diffrax_neural_ode(draw: Draw) -> Made:
    import diffrax

    term = diffrax.ODETerm(lambda t, y, p: jnp.tanh(y @ p["w"] + p["b"]) @ p["v"])

    def loss(p: Any, y0: jax.Array) -> jax.Array:
        with jax.named_scope("as_written"):  # a solver runs in float32
            y = diffrax.diffeqsolve(
                term, diffrax.Heun(), 0.0, 0.6, 0.2, y0, args=p, max_steps=4,
                adjoint=diffrax.RecursiveCheckpointAdjoint(checkpoints=2),
            )  # fmt: skip
        return jnp.mean(y.ys[-1] ** 2)

    p = {"w": draw.weight(2, 6), "b": draw.normal(6), "v": draw.weight(6, 2)}
    return loss, (p, draw.normal(2))


@program(F32, tags="optax loss huber kl bce", needs="optax")
def optax_losses(draw: Draw) -> Made:
    import optax

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = x @ p
        q = jax.nn.softmax(y)
        total = optax.softmax_cross_entropy(logits, q).mean()
        total += optax.huber_loss(logits, y).mean()
        total += optax.kl_divergence(jax.nn.log_softmax(logits), q).mean()
        total += optax.sigmoid_binary_cross_entropy(logits, q).mean()
        return total + optax.cosine_distance(logits, y).mean()

    return loss, (draw.weight(5, 4), draw.normal(3, 5), draw.normal(3, 4))


@program(F32, tags="optax ctc loss scan", needs="optax")
def optax_ctc(draw: Draw) -> Made:
    import optax

    def loss(w: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
        pads = jnp.zeros(x.shape[:2])
        return optax.ctc_loss(x @ w, pads, labels, jnp.zeros(labels.shape)).mean()

    return loss, (draw.weight(4, 5), draw.normal(2, 6, 4), jnp.array([[1, 2, 1], [3, 4, 2]]))


@program(F32, tags="optimistix root_find", needs="optimistix")
def optimistix_fixed_point(draw: Draw) -> Made:
    import optimistix as optx

    solver = optx.FixedPointIteration(rtol=1e-3, atol=1e-3)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        def f(z: jax.Array, args: Any) -> jax.Array:
            p, x = args
            return 0.5 * jnp.tanh(z * p["w"] + x)

        z = optx.fixed_point(f, solver, jnp.zeros(4), (p, x), max_steps=32).value
        return jnp.sum(z @ p["v"])

    return loss, ({"w": draw.uniform(4), "v": draw.normal(4)}, draw.normal(4))


def _equinox(draw: Draw, make: Any) -> tuple[Any, Any]:
    """An equinox module as a function that gives it back from its arrays."""
    import equinox as eqx

    shapes = eqx.filter_eval_shape(make, jax.random.key(0))
    dynamic, static = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    return lambda p: eqx.combine(p, static), draw.fill(dynamic)
