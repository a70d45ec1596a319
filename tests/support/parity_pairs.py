"""Functions that are not the same in torch and JAX, and pairs that are, for `test_parity_cases`.

A `Mismatch` is one function written twice with one planted difference. Nothing here knows how it is
found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Mismatch(NamedTuple):
    """One function, twice.

    Attributes:
        name: what differs.
        op: in which op of torch's.
        torch: makes the function in torch.
        right: makes the same one in JAX.
        jax: makes the other one in JAX.
        shapes: of its float inputs.
        dtype: the low dtype.
        dtypes: True if dtypes part, not values alone.
    """

    name: str
    op: str
    torch: Callable[[], Any]
    right: Callable[[], Any]
    jax: Callable[[], Any]
    shapes: tuple[tuple[int, ...], ...] = ((4, 6), (6, 6))
    dtype: str = "bfloat16"
    dtypes: bool = False

    def inputs(self) -> list[Any]:
        """Normal numbers, the same ones each time."""
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
    import jax
    import jax.numpy as jnp

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


def _wide_product() -> Callable[..., Any]:
    from polymp.jax import autocast

    def product(x: Any, v: Any) -> Any:
        with autocast(enabled=False):
            return x @ v.T

    return product


def _other_rule() -> Callable[..., Any]:
    from polymp.jax import autocast

    def product(x: Any, v: Any) -> Any:
        with autocast(policy={"extends": "amp", "rules": {"linear": "fp32"}}):
            return x @ v.T

    return product


def _attention(scale: float) -> Callable[..., Any]:
    import jax

    def attention(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.softmax(scale * (q @ k.T)) @ v

    return attention


def _torch_attention(q: Any, k: Any, v: Any) -> Any:
    import torch

    return torch.softmax(torch.matmul(q, k.T) * q.shape[-1] ** -0.5, -1) @ v


def _torch_mean(x: Any, w: Any) -> Any:
    import torch

    return torch.exp(x @ w).mean(-1)


def _reduced(name: str) -> Callable[..., Any]:
    import jax.numpy as jnp

    return lambda x, w: getattr(jnp, name)(jnp.exp(x @ w), axis=-1)


FOUR = ((4, 6), (6, 6), (6,), (5, 6))


def _planted(name: str, op: str, dtypes: bool = False, **changed: Any) -> Mismatch:
    return Mismatch(name, op, _network, _in_jax, lambda: _in_jax(**changed), FOUR, dtypes=dtypes)


MISMATCHES = (
    _planted("another rule in JAX's policy", "linear", True, second=_other_rule),
    _planted("a product in float32 by hand", "linear", True, second=_wide_product),
    # In a low dtype the two are one within its roundings.
    _planted("gelu by tanh, not by erf", "gelu", approximate=True)._replace(dtype="float32"),
    _planted("a missing bias", "linear", bias=False),
    _planted("a transposed weight", "linear", transposed=True),
    _planted("another eps", "layer_norm", eps=1e-1),
    _planted("softmax along another axis", "softmax", axis=0),
    _planted("a cast that only one side has", "to", True, cast=True),
    Mismatch(
        "a mean in torch, a sum in JAX", "mean", lambda: _torch_mean, lambda: _reduced("mean"),
        lambda: _reduced("sum"),
    ),
    Mismatch(
        "attention without 1 / sqrt(d)", "mul", lambda: _torch_attention,
        lambda: _attention(8**-0.5), lambda: _attention(1.0), ((5, 8), (5, 8), (5, 8)),
    ),
)  # fmt: skip
