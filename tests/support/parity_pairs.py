"""Functions that are not the same in torch and JAX, and pairs that are, for `test_parity_cases`.

A `Mismatch` is one function written twice with one planted difference. Nothing here knows how it is
found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Mismatch(NamedTuple):
    """One function, twice."""

    name: str  # what differs
    op: str  # in which op of torch's
    torch: Callable[[], Any]  # makes the function in torch
    jax: Callable[[], Any]  # makes the other one in JAX
    shapes: tuple[tuple[int, ...], ...] = ((4, 6), (6, 6))  # of its float inputs
    dtype: str = "bfloat16"  # the low dtype
    dtypes: bool = False  # True if dtypes part, not values alone
    within: bool = False  # True if rounding to the low dtype hides it

    def inputs(self) -> list[Any]:
        rng = np.random.default_rng(7)
        return [rng.standard_normal(shape) for shape in self.shapes]


def _network() -> Callable[..., Any]:
    """A layer, an activation, a normalisation, a layer and a softmax in torch."""
    import torch
    from torch.nn import functional as F

    def network(x: Any, w: Any, b: Any, v: Any) -> Any:
        x = F.gelu(F.linear(x, w, b))
        x = F.layer_norm(x, x.shape[-1:])
        return torch.softmax(F.linear(x, v), -1)

    return network


def _in_jax(
    bias: bool = True,
    transposed: bool = False,
    approximate: bool = False,
    eps: float = 1e-5,
    axis: int = -1,
    cast: bool = False,
    second: Any = None,
) -> Callable[..., Any]:
    """The same in JAX, with one thing changed."""

    def network(x: Any, w: Any, b: Any, v: Any) -> Any:
        x = x @ (w if transposed else w.T)
        x = jax.nn.gelu(x + b if bias else x, approximate=approximate)
        mean = x.mean(-1, keepdims=True)
        x = (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + eps)
        if cast:
            x = x.astype(jnp.float16).astype(jnp.float32)
        x = x @ v.T if second is None else second()(x, v)
        return jax.nn.softmax(x, axis=axis)

    return network


def _product_in(**region: Any) -> Callable[[], Any]:
    """A product in a region of its own."""

    def make() -> Callable[..., Any]:
        from polymp.jax import autocast

        return autocast(lambda x, v: x @ v.T, **region)

    return make


def _torch_attention(q: Any, k: Any, v: Any) -> Any:
    import torch

    return torch.softmax(torch.matmul(q, k.T) * q.shape[-1] ** -0.5, -1) @ v


def _torch_mean(x: Any, w: Any) -> Any:
    return (x @ w).exp().mean(-1)


OTHER_RULE = _product_in(policy={"extends": "amp", "rules": {"linear": "fp32"}})
FOUR = ((4, 6), (6, 6), (6,), (5, 6))


def _planted(name: str, op: str, dtypes: bool = False, **changed: Any) -> Mismatch:
    return Mismatch(name, op, _network, lambda: _in_jax(**changed), FOUR, dtypes=dtypes)


MISMATCHES = (
    _planted("another rule in JAX's policy", "linear", True, second=OTHER_RULE),
    _planted("a product in float32 by hand", "linear", True, second=_product_in(enabled=False)),
    _planted("gelu by tanh, not by erf", "gelu", approximate=True)._replace(within=True),
    _planted("a missing bias", "linear", bias=False),
    _planted("a transposed weight", "linear", transposed=True),
    _planted("another eps", "layer_norm", eps=1e-1),
    _planted("an eps of 1e-3, not 1e-5", "layer_norm", eps=1e-3),
    _planted("softmax along another axis", "softmax", axis=0),
    _planted("a cast that only one side has", "to", True, cast=True),
    Mismatch(
        "a mean in torch, a sum in JAX", "mean", lambda: _torch_mean,
        lambda: lambda x, w: jnp.exp(x @ w).sum(-1),
    ),
    Mismatch(
        "attention without 1 / sqrt(d)", "mul", lambda: _torch_attention,
        lambda: lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, ((5, 8), (5, 8), (5, 8)),
    ),
)  # fmt: skip


HEADS = 4


def block_inputs(seed: int, batch: int = 2, length: int = 8, width: int = 32) -> list[Any]:
    """Numbers for a block: x [batch, length, width], and weights by name."""
    rng = np.random.default_rng(seed)
    vectors = {name: (1.0, width) for name in ("scale1", "scale2")}
    vectors |= {name: (0.0, width) for name in ("shift1", "shift2", "out_bias", "down_bias")}
    vectors |= {"qkv_bias": (0.0, 3 * width), "up_bias": (0.0, 4 * width)}
    made = {name: mean + 0.1 * rng.standard_normal(n) for name, (mean, n) in vectors.items()}
    for name, *shape in (
        ("qkv", 3 * width, width), ("out", width, width), ("up", 4 * width, width),
        ("down", width, 4 * width),
    ):  # fmt: skip
        made[name] = rng.standard_normal(shape) * shape[1] ** -0.5
    return [rng.standard_normal((batch, length, width)), made]


def torch_block() -> Callable[..., Any]:
    """A pre-norm transformer block in torch: attention, then a layer with a gelu."""
    from torch.nn import functional as F

    def split(y: Any) -> Any:
        return y.unflatten(-1, (HEADS, -1)).transpose(-2, -3)

    def block(x: Any, p: Any) -> Any:
        h = F.layer_norm(x, x.shape[-1:], p["scale1"], p["shift1"])
        q, k, v = map(split, F.linear(h, p["qkv"], p["qkv_bias"]).chunk(3, -1))
        a = F.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v
        x = x + F.linear(a.transpose(-2, -3).flatten(-2), p["out"], p["out_bias"])
        h = F.layer_norm(x, x.shape[-1:], p["scale2"], p["shift2"])
        return x + F.linear(F.gelu(F.linear(h, p["up"], p["up_bias"])), p["down"], p["down_bias"])

    return block


def jax_block(
    eps: float = 1e-5, approximate: bool = False, axis: int = -1, power: float = -0.5
) -> Callable[..., Any]:
    """The same in JAX, by default."""

    def split(y: Any) -> Any:
        return jnp.swapaxes(y.reshape(*y.shape[:-1], HEADS, -1), -2, -3)

    def norm(x: Any, scale: Any, shift: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + eps) * scale + shift

    def block(x: Any, p: Any) -> Any:
        h = norm(x, p["scale1"], p["shift1"])
        q, k, v = map(split, jnp.split(h @ p["qkv"].T + p["qkv_bias"], 3, -1))
        a = jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) * q.shape[-1] ** power, axis) @ v
        a = jnp.swapaxes(a, -2, -3).reshape(x.shape)
        x = x + (a @ p["out"].T + p["out_bias"])
        h = norm(x, p["scale2"], p["shift2"])
        h = jax.nn.gelu(h @ p["up"].T + p["up_bias"], approximate=approximate)
        return x + (h @ p["down"].T + p["down_bias"])

    return block
