"""Programs of the corpus in plain JAX: loops, branches, derivatives, custom rules, effects."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from tests.support.jax.corpus import F32, LOW, Draw, Made, program

# Loops and branches.


@program(F32, LOW, tags="scan rnn carry")
def scan_rnn(draw: Draw) -> Made:
    def apply(p: Any, xs: jax.Array) -> Any:
        def step(h: jax.Array, x: jax.Array) -> Any:
            h = jnp.tanh(x @ p["x"] + h @ p["h"] + p["b"])
            return h, h

        return lax.scan(step, jnp.zeros((2, 6)), xs)

    p = {"x": draw.weight(4, 6), "h": draw.weight(6, 6), "b": draw.normal(6)}
    return apply, (p, draw.normal(5, 2, 4))


@program(F32, tags="scan remat transformer layers")
def scan_over_layers_remat(draw: Draw) -> Made:
    def apply(layers: Any, x: jax.Array) -> jax.Array:
        @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        def layer(x: jax.Array, p: Any) -> Any:
            h = jax.nn.standardize(x)
            q, k, v = h @ p["q"], h @ p["k"], h @ p["v"]
            x = x + jax.nn.softmax(q @ k.T / 3) @ v
            return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

        x, _ = lax.scan(layer, x, layers)
        return jnp.mean(x**2)

    p = {n: draw.normal(3, 8, 8, scale=0.35) for n in "qkv"}
    p |= {"up": draw.normal(3, 8, 16, scale=0.3), "down": draw.normal(3, 16, 8, scale=0.2)}
    return apply, (p, draw.normal(5, 8))


@program(F32, tags="fori_loop power_iteration")
def fori_power_iteration(draw: Draw) -> Made:
    def norm(w: jax.Array, v: jax.Array) -> jax.Array:
        def body(_: int, v: jax.Array) -> jax.Array:
            v = w.T @ (w @ v)
            return v / jnp.linalg.norm(v)

        v = lax.fori_loop(0, 4, body, v)
        return jnp.linalg.norm(w @ v)

    return norm, (draw.weight(6, 5), draw.normal(5))


@program(F32, tags="while_loop newton stop_gradient")
def while_newton(draw: Draw) -> Made:
    def cube_root(w: jax.Array, x: jax.Array) -> jax.Array:
        target = jnp.sum((x @ w) ** 2, -1) + 1

        def step(y: jax.Array) -> jax.Array:
            return y - (y * y * y - target) / (3 * y * y)

        def far(state: Any) -> jax.Array:
            return jnp.logical_and(state[1] < 20, jnp.any(jnp.abs(step(state[0]) - state[0]) > 0.1))

        start = lax.stop_gradient((jnp.ones_like(target) * 3, 0))
        y, _ = lax.while_loop(far, lambda s: (lax.stop_gradient(step(s[0])), s[1] + 1), start)
        return step(lax.stop_gradient(y))

    return cube_root, (draw.weight(4, 3), draw.normal(5, 4))


@program(LOW, tags="cond switch mixture")
def branches(draw: Draw) -> Made:
    def apply(p: Any, x: jax.Array, which: jax.Array, flag: jax.Array) -> jax.Array:
        x = lax.cond(flag, lambda x: jnp.tanh(x @ p["a"]), lambda x: x @ p["b"], x)
        experts = (lambda x: x @ p["a"], lambda x: jax.nn.relu(x) @ p["b"], lambda x: x)
        return lax.switch(which, experts, x)

    p = {"a": draw.weight(5, 5), "b": draw.weight(5, 5)}
    return apply, (p, draw.normal(3, 5), jnp.int32(1), jnp.bool_(True))


@program(LOW, tags="associative_scan linear_recurrence")
def associative_recurrence(draw: Draw) -> Made:
    def apply(p: Any, x: jax.Array) -> jax.Array:
        decay, drive = jax.nn.sigmoid(x @ p["decay"]), x @ p["drive"]

        def join(a: Any, b: Any) -> Any:
            return a[0] * b[0], a[1] * b[0] + b[1]

        _, h = lax.associative_scan(join, (decay, drive))
        return h @ p["out"]

    p = {"decay": draw.weight(4, 6), "drive": draw.weight(4, 6), "out": draw.weight(6, 3)}
    return apply, (p, draw.normal(6, 4))


@program(F32, tags="lax.map")
def mapped_rows(draw: Draw) -> Made:
    def apply(w: jax.Array, xs: jax.Array) -> jax.Array:
        return lax.map(lambda x: jax.nn.logsumexp(x @ w), xs)

    return apply, (draw.weight(4, 6), draw.normal(5, 4))


@program(F32, tags="vmap per_example grad_inside norm")
def per_example_gradient_norms(draw: Draw) -> Made:
    def apply(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            return (jnp.tanh(x @ p["w"]) @ p["v"] - y) ** 2

        grads = jax.vmap(jax.grad(loss), (None, 0, 0))(p, x, y)
        squares = [jnp.sum(g.reshape(4, -1) ** 2, -1) for g in jax.tree.leaves(grads)]
        return jnp.sqrt(sum(squares))

    p = {"w": draw.weight(5, 6), "v": draw.normal(6, scale=0.4)}
    return apply, (p, draw.normal(4, 5), draw.normal(4))


@program(F32, tags="grad_inside gradient_penalty vmap")
def gradient_penalty(draw: Draw) -> Made:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        def critic(x: jax.Array) -> jax.Array:
            return jax.nn.softplus(x @ p["w"]) @ p["v"]

        slope = jax.vmap(jax.grad(critic))(x)
        return jnp.mean((jnp.sqrt(jnp.sum(slope**2, -1) + 1e-6) - 1) ** 2)

    return loss, ({"w": draw.weight(4, 8), "v": draw.normal(8, scale=0.5)}, draw.normal(5, 4))


@program(F32, tags="jacfwd jvp pinn")
def physics_informed(draw: Draw) -> Made:
    def loss(p: Any, t: jax.Array) -> jax.Array:
        def u(t: jax.Array) -> jax.Array:
            return jnp.tanh(t * p["w"] + p["b"]) @ p["v"]

        def residual(t: jax.Array) -> jax.Array:
            return jax.jacfwd(jax.jacfwd(u))(t) + 4 * u(t)

        return jnp.mean(jax.vmap(residual)(t) ** 2)

    p = {"w": draw.normal(8), "b": draw.normal(8), "v": draw.normal(8, scale=0.4)}
    return loss, (p, draw.uniform(5))


# Custom rules, solvers, callbacks.


@program(LOW, tags="custom_jvp straight_through")
def custom_jvp_sign(draw: Draw) -> Made:
    @jax.custom_jvp
    def sign(x: jax.Array) -> jax.Array:
        return jnp.where(x > 0, 1.0, -1.0) * (1 + 0 * x)

    @sign.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (x,), (t,) = primals, tangents
        return sign(x), t * jnp.where(jnp.abs(x) < 1, 1.0, 0.25)

    def apply(p: Any, x: jax.Array) -> jax.Array:
        return sign(x @ p["w"]) @ p["v"]

    return apply, ({"w": draw.weight(5, 7), "v": draw.weight(7, 3)}, draw.normal(4, 5))


@program(LOW, tags="custom_vjp matmul_inside gradient_scale")
def custom_vjp_linear(draw: Draw) -> Made:
    @jax.custom_vjp
    def linear(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    def forward(x: jax.Array, w: jax.Array) -> Any:
        return x @ w, (x, w)

    def backward(saved: Any, g: jax.Array) -> Any:
        x, w = saved
        return 0.5 * (g @ w.T), 3.0 * (x.T @ g)  # not the true gradients, and so recognisable

    linear.defvjp(forward, backward)

    def apply(p: Any, x: jax.Array) -> jax.Array:
        return linear(jax.nn.relu(linear(x, p["w"])), p["v"])

    return apply, ({"w": draw.weight(5, 7), "v": draw.weight(7, 3)}, draw.normal(4, 5))


SOLVER = "the derivative of custom_linear_solve applies the matrix once more, outside of it"


@program(F32, tags="cg custom_linear_solve", lowers=False, exceptions={"low": SOLVER})
def conjugate_gradients(draw: Draw) -> Made:
    def apply(half: jax.Array, b: jax.Array) -> jax.Array:
        a = half * half.T * 0.2 + 2 * jnp.eye(6)
        x, _ = jsp.sparse.linalg.cg(lambda v: a @ v, b, maxiter=8)
        return x

    return apply, (draw.normal(6, 6, scale=0.5), draw.normal(6))


@program(F32, tags="cholesky triangular_solve gaussian_process linalg", lowers=False)
def gaussian_process(draw: Draw) -> Made:
    def nll(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        z = x / jnp.exp(p["length"])
        square = jnp.sum((z[:, None] - z[None]) ** 2, -1)
        k = jnp.exp(p["gain"] - 0.5 * square) + jnp.exp(p["noise"]) * jnp.eye(len(x))
        chol = jnp.linalg.cholesky(k)
        white = jsp.linalg.solve_triangular(chol, y, lower=True)
        return 0.5 * jnp.sum(white**2) + jnp.sum(jnp.log(jnp.diag(chol)))

    p = {"length": draw.normal(2, scale=0.3), "gain": jnp.float32(0.1), "noise": jnp.float32(-0.5)}
    return nll, (p, draw.normal(6, 2), draw.normal(6))


@program(F32, F32, F32, tags="solve inv slogdet linalg", lowers=False)
def linear_algebra(draw: Draw) -> Made:
    def apply(a: jax.Array, b: jax.Array) -> Any:
        return jnp.linalg.solve(a, b), jnp.linalg.inv(a), jnp.linalg.slogdet(a)[1]

    return apply, (draw.normal(4, 4, scale=0.2) + jnp.eye(4), draw.normal(4))


@program(F32, tags="pure_callback debug stop_gradient")
def callbacks(draw: Draw) -> Made:
    def host(x: np.ndarray) -> np.ndarray:
        assert x.dtype == np.float32, f"the callback was given {x.dtype}"
        return np.sort(x, axis=-1)

    def apply(w: jax.Array, x: jax.Array) -> jax.Array:
        y = x @ w
        shape = jax.ShapeDtypeStruct(y.shape, jnp.float32)
        sorted_ = jax.pure_callback(host, shape, lax.stop_gradient(y), vmap_method="expand_dims")
        jax.debug.callback(lambda m: None, y.max())
        return jax.nn.softmax(y * sorted_)

    return apply, (draw.weight(4, 5), draw.normal(3, 4))


@program(LOW, tags="io_callback effects")
def ordered_effects(draw: Draw) -> Made:
    def log(x: np.ndarray) -> None:
        assert x.dtype == np.float32, f"the callback was given {x.dtype}"

    def apply(w: jax.Array, x: jax.Array) -> jax.Array:
        y = x @ w
        io_callback(log, None, lax.stop_gradient(y), ordered=True)
        return jnp.maximum(y, 0.1 * y)

    return apply, (draw.weight(4, 5), draw.normal(3, 4))


@program(LOW, tags="prng dropout key")
def dropout(draw: Draw) -> Made:
    def apply(p: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        h = jax.nn.relu(x @ p["w"])
        h = jnp.where(jax.random.bernoulli(key, 0.75, h.shape), h / 0.75, 0.0)
        return h @ p["v"]

    p = {"w": draw.weight(5, 8), "v": draw.weight(8, 3)}
    return apply, (p, draw.normal(4, 5), jax.random.key(3))


@program(LOW, tags="pallas interpret opaque")
def pallas_kernel(draw: Draw) -> Made:
    def kernel(x: Any, y: Any) -> None:
        y[...] = jnp.exp(-x[...] * x[...])

    @jax.custom_jvp
    def bump(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x)

    @bump.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        y = bump(primals[0])
        return y, -2 * primals[0] * y * tangents[0]

    def apply(p: Any, x: jax.Array) -> jax.Array:
        return bump(x @ p["w"]) @ p["v"]

    return apply, ({"w": draw.weight(5, 8), "v": draw.weight(8, 3)}, draw.normal(4, 5))


@program(LOW, tags="named_scope named_call jit_nested")
def named_parts(draw: Draw) -> Made:
    @jax.named_call
    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.nn.leaky_relu(x @ w)

    @partial(jax.jit, static_argnames="twice")
    def block(w: jax.Array, x: jax.Array, twice: bool) -> jax.Array:
        with jax.named_scope("block"):
            return layer(w, layer(w, x)) if twice else layer(w, x)

    def apply(w: jax.Array, x: jax.Array) -> jax.Array:
        return block(w, block(w, x, twice=False), twice=True)

    return apply, (draw.weight(5, 5), draw.normal(4, 5))


@program(F32, tags="shard_map psum collective")
def sharded_loss(draw: Draw) -> Made:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.psum(jnp.sum(jnp.tanh(x @ w) ** 2), "i")

    return loss, (draw.weight(5, 4), draw.normal(2, 5))


@program(LOW, tags="donation jit")
def donated_buffer(draw: Draw) -> Made:
    update = jax.jit(lambda buffer, w: jnp.tanh(buffer @ w), donate_argnums=0)
    return lambda w, x: update(x * 1.5, w), (draw.weight(5, 5), draw.normal(4, 5))


@program("bfloat16", F32, tags="explicit_casts")
def explicit_bfloat16(draw: Draw) -> Made:
    """The program has casts of its own to bfloat16, which every region respects."""

    def apply(w: jax.Array, x: jax.Array) -> Any:
        y = (x * 3).astype(jnp.bfloat16)
        return y * y + 1, jnp.sum(jax.nn.relu(x @ w) ** 2)

    return apply, (draw.weight(5, 4), draw.normal(3, 5))


@program(F32, tags="precision as_written", lowers=False)
def highest_precision(draw: Draw) -> Made:
    def apply(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.matmul(x, w, precision=lax.Precision.HIGHEST)

    return apply, (draw.weight(5, 4), draw.normal(3, 5))


# Regions of the program's own.


@program(F32, LOW, tags="region off nested")
def region_off(draw: Draw) -> Made:
    from polymp.jax import autocast

    @partial(autocast, enabled=False)
    def exact(w: jax.Array, x: jax.Array) -> jax.Array:
        with jax.named_scope("as_written"):  # for the walker
            return jnp.tanh(x @ w) @ w.T

    def apply(w: jax.Array, x: jax.Array) -> Any:
        return exact(w, x), x @ w

    return apply, (draw.weight(5, 4), draw.normal(3, 5))
