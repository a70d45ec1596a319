"""Programs of the corpus that are built from installed packages.

The models follow the kinds of model that the packages' users build, written small and by us.
Parameters come from shapes alone, so that no initialiser has to be compiled.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tests.support.jax.corpus import F32, LOW, Draw, Lazy, Made, program, shapes

nn, nnx = Lazy("flax.linen"), Lazy("flax.nnx")
eqx, hk, keras = Lazy("equinox"), Lazy("haiku"), Lazy("keras")
numpyro, dist = Lazy("numpyro"), Lazy("numpyro.distributions")
infer = Lazy("numpyro.infer.util")
diffrax, optax, optx = Lazy("diffrax"), Lazy("optax"), Lazy("optimistix")

# linen.


@program(F32, tags="flax linen conv cnn loss optax", needs="flax")
def linen_cnn(draw: Draw) -> Made:
    class CNN(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for width in (3, 4):
                x = nn.relu(nn.Conv(width, (3, 3))(x))
                x = nn.avg_pool(x, (2, 2), strides=(2, 2))
            x = nn.relu(nn.Dense(8)(x.reshape(len(x), -1)))
            return nn.Dense(5)(x)

    x, model = draw.normal(2, 8, 8, 1), CNN()

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = model.apply(p, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return loss, (draw.fill(shapes(model.init, x)), x, draw.integers(5, 2))


@program(F32, tags="flax linen lstm rnn seq2seq", needs="flax")
def linen_seq2seq(draw: Draw) -> Made:
    class Seq2Seq(nn.Module):
        @nn.compact
        def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
            cell = nn.LSTMCell(6)  # reads and writes alike
            carry, _ = nn.RNN(cell, return_carry=True)(source)
            return nn.Dense(4)(nn.RNN(cell)(target, initial_carry=carry))

    source, target = draw.normal(2, 4, 4), jax.nn.one_hot(draw.integers(4, 2, 3), 4)
    model = Seq2Seq()

    def loss(p: Any, source: jax.Array, target: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(model.apply(p, source, target))
        return -jnp.sum(log_p * target) / 6

    return loss, (draw.fill(shapes(model.init, source, target)), source, target)


@program(F32, tags="flax linen vae prng kl loss", needs="flax")
def linen_vae(draw: Draw) -> Made:
    class VAE(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, key: jax.Array) -> Any:
            h = nn.relu(nn.Dense(8)(x))
            mean, log_var = nn.Dense(2, name="mean")(h), nn.Dense(2, name="spread")(h)
            z = mean + jnp.exp(0.5 * log_var) * jax.random.normal(key, mean.shape)
            return nn.Dense(6)(nn.relu(nn.Dense(8)(z))), mean, log_var

    model, x, key = VAE(), draw.uniform(3, 6), jax.random.key(1)

    def loss(p: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        logits, mean, log_var = model.apply(p, x, key)
        bits = nn.log_sigmoid(logits)
        likelihood = jnp.sum(x * bits + (1.0 - x) * jnp.log(-jnp.expm1(bits)), -1)
        kl = -0.5 * jnp.sum(1 + log_var - mean**2 - jnp.exp(log_var), -1)
        return (kl - likelihood).mean()

    return loss, (draw.fill(shapes(model.init, x, key)), x, key)


@program(F32, "float32", "float32", tags="flax linen batchnorm mutable resnet", needs="flax")
def linen_batch_norm(draw: Draw) -> Made:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            y = nn.Conv(4, (3, 3), use_bias=False)(x)
            y = nn.relu(nn.BatchNorm(use_running_average=False)(y))
            return jnp.mean(nn.relu(x + nn.Conv(4, (3, 3), use_bias=False)(y)), (1, 2))

    model, x = Block(), draw.normal(2, 4, 4, 4)
    variables = draw.fill(shapes(model.init, x))

    def apply(p: Any, stats: Any, x: jax.Array) -> Any:
        return model.apply({"params": p, "batch_stats": stats}, x, mutable=["batch_stats"])

    return apply, (variables["params"], variables["batch_stats"], x)


# nnx.


@program(F32, tags="flax nnx transformer attention lm embedding layernorm", needs="flax")
def nnx_transformer_lm(draw: Draw) -> Made:
    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(7, 8, rngs=rngs)
            self.norm = nnx.LayerNorm(8, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
            self.up = nnx.Linear(8, 12, rngs=rngs)
            self.down = nnx.Linear(12, 8, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embed(tokens)
            x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(tokens))
            return self.embed.attend(x + self.down(nnx.gelu(self.up(self.norm(x)))))

    apply, params = _pure(draw, Block)
    tokens = draw.integers(7, 2, 5)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        log_p = nnx.log_softmax(apply(params, tokens)[:, :-1])
        return -jnp.take_along_axis(log_p, tokens[:, 1:, None], -1).mean()

    return loss, (params, tokens)


@program(LOW, tags="flax nnx resnet batchnorm conv", needs="flax")
def nnx_resnet_block(draw: Draw) -> Made:
    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.conv = nnx.Conv(3, 4, (3, 3), strides=2, rngs=rngs)
            self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)
            self.side = nnx.Conv(3, 4, (1, 1), strides=2, rngs=rngs)
            self.head = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = nnx.relu(self.norm(self.conv(x)) + self.side(x))
            return self.head(x.mean((1, 2)))

    apply, params = _pure(draw, Block)
    return apply, (params, draw.normal(2, 6, 6, 3))


@program(F32, tags="flax nnx ppo reinforcement_learning actor_critic loss", needs="flax")
def nnx_ppo(draw: Draw) -> Made:
    class ActorCritic(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.trunk = nnx.Linear(5, 10, rngs=rngs)
            self.actor = nnx.Linear(10, 3, rngs=rngs)
            self.critic = nnx.Linear(10, 1, rngs=rngs)

        def __call__(self, x: jax.Array) -> Any:
            h = nnx.tanh(self.trunk(x))
            return nnx.log_softmax(self.actor(h)), self.critic(h)[:, 0]

    apply, params = _pure(draw, ActorCritic)

    def loss(params: Any, states: Any, actions: Any, old: Any, gains: Any, returns: Any) -> Any:
        log_p, values = apply(params, states)
        taken = jnp.take_along_axis(log_p, actions[:, None], 1)[:, 0]
        ratio = jnp.exp(taken - old)
        policy = -jnp.minimum(ratio * gains, jnp.clip(ratio, 0.8, 1.2) * gains).mean()
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, -1).mean()
        return policy + 0.5 * jnp.mean((values - returns) ** 2) - 0.01 * entropy

    old = draw.normal(6, scale=0.1) - 1
    data = (draw.normal(6, 5), draw.integers(3, 6), old, draw.normal(6), draw.normal(6))
    return loss, (params, *data)


@program(LOW, tags="flax nnx graph gcn segment_sum", needs="flax")
def nnx_graph_convolution(draw: Draw) -> Made:
    class GCN(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(4, 8, use_bias=False, rngs=rngs)
            self.second = nnx.Linear(8, 3, use_bias=False, rngs=rngs)

        def __call__(self, x: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
            count = jax.ops.segment_sum(jnp.ones(len(senders)), receivers, len(x)) + 1
            for layer in (self.first, self.second):
                h = layer(nnx.elu(x))
                x = h + jax.ops.segment_sum(h[senders], receivers, len(h)) / count[:, None]
            return self.second(jnp.tanh(x @ jnp.ones((3, 8))))

    apply, params = _pure(draw, GCN)
    return apply, (params, draw.normal(5, 4), draw.integers(5, 9), draw.integers(5, 9))


@program(LOW, tags="flax nnx decode kv_cache rope rms_norm geglu scan gemma", needs="flax")
def nnx_decode(draw: Draw) -> Made:
    """Greedy decoding with a cache of keys and values, as Gemma's sampler runs it."""
    heads, width, length = 2, 4, 4

    def rotated(x: jax.Array, at: jax.Array) -> jax.Array:
        angle = at * 100.0 ** -(jnp.arange(width // 2) / (width // 2))
        (a, b), cos, sin = jnp.split(x, 2, -1), jnp.cos(angle), jnp.sin(angle)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    class Decoder(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            size = heads * width
            self.embed = nnx.Embed(7, size, rngs=rngs)
            self.norms = nnx.List([nnx.RMSNorm(size, rngs=rngs) for _ in range(3)])
            self.query = nnx.LinearGeneral(size, (heads, width), use_bias=False, rngs=rngs)
            self.pair = nnx.LinearGeneral(size, (2, width), use_bias=False, rngs=rngs)
            self.out = nnx.LinearGeneral((heads, width), size, axis=(-2, -1), rngs=rngs)
            self.gate, self.up = (nnx.Linear(size, 12, use_bias=False, rngs=rngs) for _ in "gu")
            self.down = nnx.Linear(12, size, use_bias=False, rngs=rngs)

        def __call__(self, token: Any, at: Any, cache: Any) -> Any:
            x = self.embed(token) * jnp.sqrt(float(heads * width))
            h = self.norms[0](x)
            query, (key, value) = rotated(self.query(h), at) / jnp.sqrt(float(width)), self.pair(h)
            keys, values = cache
            keys = keys.at[at].set(rotated(key, at))
            values = values.at[at].set(value)
            scores = jnp.where(jnp.arange(length) <= at, query @ keys.T, -1e30)
            x = x + self.out(jax.nn.softmax(scores) @ values)
            h = self.norms[1](x)
            x = x + self.down(nnx.gelu(self.gate(h)) * self.up(h))
            return self.embed.attend(self.norms[2](x)), (keys, values)

    apply, params = _pure(draw, Decoder)

    def decode(params: Any, prompt: jax.Array) -> jax.Array:
        def body(state: Any, given: Any) -> Any:
            token, cache = state
            at, forced = given
            logits, cache = apply(params, jnp.where(at < 2, forced, token), at, cache)
            return (jnp.argmax(logits), cache), logits

        cache = jnp.zeros((length, width)), jnp.zeros((length, width))
        start = jnp.int32(0), cache
        _, logits = jax.lax.scan(body, start, (jnp.arange(length), prompt))
        return logits

    return decode, (params, draw.integers(7, length))


def _pure(draw: Draw, module: Any) -> tuple[Any, Any]:
    """An nnx module as a function of its state."""
    definition, shapes = nnx.split(nnx.eval_shape(lambda: module(nnx.Rngs(0))))
    state = nnx.to_pure_dict(shapes)

    def apply(params: Any, *args: Any) -> Any:
        full = jax.tree.map(lambda x: x, shapes)
        nnx.replace_by_pure_dict(full, params)
        return nnx.merge(definition, full)(*args)

    return apply, draw.fill(state)


# equinox.


@program(LOW, tags="equinox mlp vmap", needs="equinox")
def equinox_mlp(draw: Draw) -> Made:
    apply, params = _equinox(draw, lambda key: eqx.nn.MLP(4, 3, 8, 2, key=key))
    return lambda p, x: jax.vmap(apply(p))(x), (params, draw.normal(5, 4))


@program(LOW, tags="equinox attention layernorm vmap", needs="equinox")
def equinox_attention(draw: Draw) -> Made:
    apply, params = _equinox(
        draw, lambda key: (eqx.nn.MultiheadAttention(2, 8, key=key), eqx.nn.LayerNorm(8))
    )

    def run(p: Any, x: jax.Array) -> jax.Array:
        attention, norm = apply(p)
        x = jax.vmap(norm)(x)
        return attention(x, x, x, mask=jnp.tri(5, dtype=bool))

    return run, (params, draw.normal(5, 8))


@program(F32, tags="equinox gru rnn scan loss", needs="equinox")
def equinox_gru(draw: Draw) -> Made:
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
    def model(x: jax.Array, y: jax.Array) -> None:
        w = numpyro.sample("w", dist.Normal(jnp.zeros(4), 1.0).to_event(1))
        b = numpyro.sample("b", dist.Cauchy(0.0, 2.0))
        numpyro.sample("y", dist.Bernoulli(logits=x @ w + b), obs=y)

    def log_p(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return infer.log_density(model, (x, y), {}, p)[0]

    y = draw.integers(2, 6).astype(jnp.float32)
    return log_p, ({"w": draw.normal(4), "b": jnp.float32(0.3)}, draw.normal(6, 4), y)


@program(F32, tags="numpyro hierarchical distributions", needs="numpyro", lowers=False)
def numpyro_eight_schools(draw: Draw) -> Made:
    def log_p(p: Any, y: jax.Array, sigma: jax.Array) -> jax.Array:
        tau = jnp.exp(p["log_tau"])
        total = dist.Normal(0, 5).log_prob(p["mu"]) + dist.HalfCauchy(5).log_prob(tau)
        total += dist.StudentT(4.0, p["mu"], tau).log_prob(p["theta"]).sum()
        return total + dist.Normal(p["theta"], sigma).log_prob(y).sum() + p["log_tau"]

    p = {"mu": jnp.float32(0.4), "log_tau": jnp.float32(0.2), "theta": draw.normal(8)}
    return log_p, (p, draw.normal(8, scale=3), draw.uniform(8, low=1, high=2))


@program(F32, tags="diffrax ode neural_ode while_loop", needs="diffrax", lowers=False)
def diffrax_neural_ode(draw: Draw) -> Made:
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
    def loss(w: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
        pads = jnp.zeros(x.shape[:2])
        return optax.ctc_loss(x @ w, pads, labels, jnp.zeros(labels.shape)).mean()

    return loss, (draw.weight(4, 5), draw.normal(2, 6, 4), jnp.array([[1, 2, 1], [3, 4, 2]]))


@program(F32, tags="optimistix root_find", needs="optimistix")
def optimistix_fixed_point(draw: Draw) -> Made:
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
    shapes = eqx.filter_eval_shape(make, jax.random.key(0))
    dynamic, static = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    return lambda p: eqx.combine(p, static), draw.fill(dynamic)
