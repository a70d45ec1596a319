"""Programs of the corpus in plain JAX: other number types, numerics and science."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
from jax import lax

from tests.support.jax.corpus import F32, LOW, Draw, Made, cross_entropy, program

# Numbers other than float32.


@program("complex64", F32, tags="complex fft", lowers=False)
def spectral_filter(draw: Draw) -> Made:
    def apply(h: jax.Array, x: jax.Array) -> Any:
        spectrum = jnp.fft.rfft(x) * jnp.exp(1j * h)
        return spectrum, jnp.fft.irfft(spectrum, n=8)

    return apply, (draw.normal(5), draw.normal(3, 8))


@program(LOW, tags="fft mixing")
def fourier_mixing(draw: Draw) -> Made:
    def apply(p: Any, x: jax.Array) -> jax.Array:
        x = x + jnp.fft.fft2(x).real / 6
        return jax.nn.gelu(x @ p["up"]) @ p["down"]

    return apply, ({"up": draw.weight(6, 8), "down": draw.weight(8, 6)}, draw.normal(6, 6))


@program("float64", LOW, tags="float64", x64=True)
def float64_beside_float32(draw: Draw) -> Made:
    def apply(w: jax.Array, x: jax.Array, a: jax.Array) -> Any:
        exact = jnp.sum(a @ a.T * 0.5)
        return exact, jax.nn.relu(x @ w) * 2.0

    rng = np.random.default_rng(5)
    return apply, (draw.weight(5, 4), draw.normal(3, 5), jnp.asarray(rng.standard_normal((3, 4))))


@program("int32", "bool", F32, tags="ints bools argmax")
def integer_results(draw: Draw) -> Made:
    def apply(w: jax.Array, x: jax.Array) -> Any:
        scores = x @ w
        counts = jnp.ones((3, 4), jnp.int32) @ jnp.arange(4, dtype=jnp.int32)
        return counts, scores.max(-1) > -100, jax.nn.softmax(scores * 2)

    return apply, (draw.weight(5, 4), draw.normal(3, 5))


# Numerics and science.


@program(F32, tags="sort order_statistics", lowers=False)
def sorted_losses(draw: Draw) -> Made:
    def apply(x: jax.Array, y: jax.Array) -> jax.Array:
        worst = jnp.sort((x - y) ** 2)[-4:]
        return worst.mean() + jnp.median(jnp.abs(x)) + jnp.quantile(y, 0.3)

    return apply, (draw.normal(9), draw.normal(9))


@program(LOW, tags="top_k gather ranking")
def top_k_readout(draw: Draw) -> Made:
    def apply(p: Any, x: jax.Array) -> jax.Array:
        best, at = lax.top_k(jnp.sum(x**2, -1), 3)
        return (x[at] * jnp.tanh(best)[:, None]) @ p

    return apply, (draw.weight(4, 3), draw.normal(7, 4))


@program(F32, tags="sparse segment_sum scatter graph")
def sparse_matmul(draw: Draw) -> Made:
    def apply(values: jax.Array, w: jax.Array, x: jax.Array, rows: Any, cols: Any) -> jax.Array:
        h = x @ w
        return jax.nn.relu(jax.ops.segment_sum(values[:, None] * h[cols], rows, 5))

    index = (draw.integers(5, 9), draw.integers(5, 9))
    return apply, (draw.normal(9), draw.weight(4, 3), draw.normal(5, 4), *index)


@program(F32, tags="logsumexp density mixture", lowers=False)
def gaussian_mixture(draw: Draw) -> Made:
    def nll(p: Any, x: jax.Array) -> jax.Array:
        z = (x[:, None] - p["mean"]) * jnp.exp(-p["log_sd"])
        parts = jsp.stats.norm.logpdf(z).sum(-1) - p["log_sd"].sum(-1)
        return -jsp.special.logsumexp(parts + jax.nn.log_softmax(p["weight"]), axis=1).mean()

    p = {
        "mean": draw.normal(3, 2),
        "log_sd": draw.normal(3, 2, scale=0.2),
        "weight": draw.normal(3),
    }
    return nll, (p, draw.normal(6, 2))


@program(F32, F32, F32, F32, tags="special_functions", lowers=False)
def special_functions(draw: Draw) -> Made:
    def apply(x: jax.Array) -> Any:
        gamma = jsp.special.gammaln(x) + jsp.special.digamma(x)
        errors = jsp.special.erf(x) + jsp.special.erfinv(x / 4)
        return gamma, errors, jsp.special.i0e(x) + jsp.special.xlogy(x, x), jsp.special.expit(x)

    return apply, (draw.uniform(6, low=0.5, high=3),)


@program(F32, tags="special_functions erfinv tan low_inputs")
def steep_functions(draw: Draw) -> Made:
    def apply(w: jax.Array, x: jax.Array) -> jax.Array:
        y = jnp.tanh(x @ w) * 0.5
        steep = jsp.special.erfinv(y) + jnp.tan(y) + jnp.arcsin(y) + jnp.sinh(y) + jnp.log1p(y)
        return steep + jnp.power(y + 1, 1.5) + jnp.arccos(y) + jnp.cosh(y) + jnp.expm1(y)

    return apply, (draw.weight(5, 4), draw.normal(3, 5))


@program(F32, tags="nbody physics verlet", lowers=False)
def n_body(draw: Draw) -> Made:
    def energy(x: jax.Array, v: jax.Array, mass: jax.Array) -> jax.Array:
        def pull(x: jax.Array) -> jax.Array:
            gap = x[:, None] - x[None]
            inverse = lax.rsqrt(jnp.sum(gap**2, -1) + 0.1) ** 3
            return -jnp.sum(gap * inverse[..., None] * mass[None, :, None], 1)

        def step(state: Any, _: None) -> Any:
            x, v = state
            v = v + 0.05 * pull(x)
            return (x + 0.05 * v, v), None

        (x, v), _ = lax.scan(step, (x, v), None, length=4)
        return jnp.sum(mass[:, None] * v**2) + jnp.sum(x**2)

    return energy, (draw.normal(4, 3), draw.normal(4, 3), draw.uniform(4, low=0.5))


@program(F32, tags="cumprod nerf rendering cumsum")
def volume_rendering(draw: Draw) -> Made:
    def colour(p: Any, points: jax.Array) -> jax.Array:
        h = jax.nn.relu(points @ p["w"])
        density, rgb = jax.nn.softplus(h @ p["d"]), jax.nn.sigmoid(h @ p["c"])
        alpha = 1 - jnp.exp(-density * 0.3)
        seen = jnp.cumprod(1 - alpha + 1e-6, axis=-1)
        return jnp.sum((alpha * seen)[..., None] * rgb, axis=-2)

    p = {"w": draw.weight(3, 8), "d": draw.normal(8, scale=0.4), "c": draw.weight(8, 3)}
    return colour, (p, draw.normal(2, 5, 3))


@program(F32, tags="scan logsumexp optimal_transport", lowers=False)
def sinkhorn(draw: Draw) -> Made:
    def cost(x: jax.Array, y: jax.Array) -> jax.Array:
        c = jnp.sum((x[:, None] - y[None]) ** 2, -1)

        def step(fg: Any, _: None) -> Any:
            f, g = fg
            f = -jax.nn.logsumexp(g[None] - c, axis=1)
            g = -jax.nn.logsumexp(f[:, None] - c, axis=0)
            return (f, g), None

        (f, g), _ = lax.scan(step, (jnp.zeros(4), jnp.zeros(5)), None, length=4)
        return jnp.sum(jnp.exp(f[:, None] + g[None] - c) * c)

    return cost, (draw.normal(4, 2), draw.normal(5, 2))


@program(F32, tags="contrastive normalise infonce")
def contrastive(draw: Draw) -> Made:
    def loss(p: Any, a: jax.Array, b: jax.Array) -> jax.Array:
        def embed(x: jax.Array) -> jax.Array:
            z = x @ p["w"]
            return z / jnp.linalg.norm(z, axis=-1, keepdims=True)

        logits = embed(a) @ embed(b).T * jnp.exp(p["temperature"])
        return cross_entropy(logits, jnp.arange(len(a))) + cross_entropy(
            logits.T, jnp.arange(len(a))
        )

    return loss, ({"w": draw.weight(6, 4), "temperature": jnp.float32(1.0)},
                  draw.normal(5, 6), draw.normal(5, 6))  # fmt: skip


@program(F32, tags="quantisation clamp argmin vq")
def vector_quantisation(draw: Draw) -> Made:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        z = jnp.tanh(x @ p["enc"])
        far = jnp.sum(jnp.abs(z[:, None] - p["codes"][None]), -1)
        code = p["codes"][jnp.argmin(far, -1)]
        quantised = z + lax.stop_gradient(code - z)
        return jnp.mean((quantised @ p["dec"] - x) ** 2) + jnp.mean(
            (lax.stop_gradient(z) - code) ** 2
        )

    p = {"enc": draw.weight(4, 2), "codes": jnp.array([[2.0, 0], [-2, 0], [0, 2], [0, -2]]) / 2,
         "dec": draw.weight(2, 4)}  # fmt: skip
    return loss, (p, draw.normal(5, 4))
