"""The verbs of `tests.support.frameworks` in JAX: its default table, which is torch's for CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
from jax import lax

from polymp.jax import autocast
from tests.support.frameworks import alike, named

name, xp = "jax", jnp


def array(values: Any, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(values, "int32" if dtype == "int" else dtype)


def cast(x: jax.Array, dtype: str) -> jax.Array:
    return x.astype("int32" if dtype == "int" else dtype)


def dtype(x: jax.Array) -> str:
    return "int" if jnp.issubdtype(x.dtype, jnp.integer) else x.dtype.name


def numbers(x: jax.Array) -> Any:
    return np.asarray(x).astype(np.float64)


def wide() -> AbstractContextManager[Any]:
    return jax.enable_x64(True)


def region(kind: str, fn: Any = None) -> Any:
    if kind == "off":
        return autocast(fn, enabled=False)
    return autocast(fn, dtype=kind)


def run(
    fn: Callable[..., Any],
    arrays: Sequence[Any],
    regions: Sequence[str] = (),
    made: Sequence[bool] = (),
    region: Callable[..., Any] = region,
) -> Any:
    """Call the function in nested regions: the outermost transforms, the others are inside."""
    if not regions:
        return fn(*arrays)

    def outermost(*arrays: Any) -> Any:
        marks = made or [False] * len(arrays)
        return within([product(x) if m else x for x, m in zip(arrays, marks, strict=True)], 1)

    def within(arrays: Sequence[Any], depth: int) -> Any:
        if depth == len(regions):
            return fn(*arrays)
        with region(regions[depth]):
            return within(arrays, depth + 1)

    return region(regions[0], outermost)(*arrays)


def product(x: Any) -> Any:
    """The same numbers as the result of a matrix product, which adds something up: two halves."""
    twice = jnp.broadcast_to(x.reshape(-1, 1), (x.size, 2))
    return (twice @ jnp.full((2, 1), 0.5)).reshape(x.shape)


# Both shorten compiling: what is asked is which dtype and which numbers, not how fast.
_QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # a newer XLA has no such option
    _QUICK["xla_cpu_use_fusion_emitters"] = False


def dtype_of(
    fn: Callable[..., Any],
    arrays: Sequence[Any],
    regions: Sequence[str] = (),
    made: Sequence[bool] = (),
    region: Callable[..., Any] = region,
) -> str:
    """The dtype of `run`'s result, by tracing; for a refusal see `run` itself, too."""
    try:
        return dtype(
            jax.eval_shape(lambda *arrays: run(fn, arrays, regions, made, region), *arrays)
        )
    except Exception:
        return "raises"


def together(functions: Sequence[Callable[..., Any]], arrays: Sequence[Any]) -> list[Any]:
    """In one program: compiling is nearly all the time that it takes."""
    program = jax.jit(lambda arrays: [fn(*arrays) for fn in functions], compiler_options=_QUICK)
    return program(list(arrays))


def grad(fn: Callable[..., Any], x: Any) -> tuple[Any, Any]:
    return jax.value_and_grad(fn)(x)


def _conv(x: Any, w: Any, groups: int = 1) -> Any:
    spatial = "DHW"[5 - x.ndim :]
    return lax.conv_general_dilated(
        x, w, (1,) * (x.ndim - 2), "VALID", feature_group_count=groups,
        dimension_numbers=(f"NC{spatial}", f"OI{spatial}", f"NC{spatial}"),
    )  # fmt: skip


def _conv_transpose(x: Any, w: Any) -> Any:
    spatial, n = "DHW"[5 - x.ndim :], x.ndim - 2
    return lax.conv_general_dilated(
        x, jnp.flip(w, tuple(range(2, w.ndim))), (1,) * n, [(k - 1, k - 1) for k in w.shape[2:]],
        lhs_dilation=(2,) * n,
        dimension_numbers=(f"NC{spatial}", f"IO{spatial}", f"NC{spatial}"),
    )  # fmt: skip


def _conv_tbc(x: Any, w: Any, b: Any) -> Any:
    return (
        lax.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=("HNC", "HIO", "HNC")) + b
    )


def _attention(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    return jnp.swapaxes(jax.nn.dot_product_attention(q, k, v), 1, 2)


def _rnn(act: Any) -> Any:
    return lambda x, h, wi, wh, bi, bh: act(x @ wi.T + bi + h @ wh.T + bh)


def _gru(x: Any, h: Any, wi: Any, wh: Any, bi: Any, bh: Any) -> Any:
    ri, zi, ni = jnp.split(x @ wi.T + bi, 3, -1)
    rh, zh, nh = jnp.split(h @ wh.T + bh, 3, -1)
    r, z = jax.nn.sigmoid(ri + rh), jax.nn.sigmoid(zi + zh)
    n = jnp.tanh(ni + r * nh)
    return (1 - z) * n + z * h


def _lstm(x: Any, h: Any, c: Any, wi: Any, wh: Any, bi: Any, bh: Any) -> Any:
    i, f, g, o = jnp.split(x @ wi.T + bi + h @ wh.T + bh, 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c)


def _group_norm(x: Any, w: Any, b: Any) -> Any:
    groups = jax.nn.standardize(x.reshape(x.shape[0], 2, -1), epsilon=1e-5).reshape(x.shape)
    return groups * w[:, None] + b[:, None]


def _renorm(x: Any) -> Any:
    norms = jnp.linalg.norm(x.reshape(len(x), -1), axis=1)
    scale = jnp.where(norms > 1.0, 1.0 / (norms + 1e-7), 1.0)
    return x * scale.reshape(-1, *[1] * (x.ndim - 1))


def _pdist(x: Any) -> Any:
    i, j = np.triu_indices(len(x), 1)
    return jnp.linalg.norm(x[i] - x[j], axis=-1)


def _cosine(a: Any, b: Any) -> Any:
    return (a * b).sum(1) / jnp.sqrt((a * a).sum(1) * (b * b).sum(1))


def _huber(a: Any, b: Any) -> Any:
    d = jnp.abs(a - b)
    return jnp.where(d < 1, 0.5 * d * d, d - 0.5).mean()


def _nll(log_p: Any, y: Any) -> Any:
    return -jnp.take_along_axis(log_p, y[:, None], 1).mean()


def _bce_with_logits(x: Any, t: Any) -> Any:
    return (jnp.maximum(x, 0) - x * t + jnp.log1p(jnp.exp(-jnp.abs(x)))).mean()


def _multi_margin(x: Any, y: Any) -> Any:
    margins = jnp.maximum(0, 1 - jnp.take_along_axis(x, y[:, None], 1) + x)
    others = jnp.arange(x.shape[1]) != y[:, None]
    return jnp.where(others, margins, 0).sum(1).mean() / x.shape[1]


def _triplet(a: Any, p: Any, n: Any) -> Any:
    def far(x: Any, y: Any) -> Any:
        return jnp.linalg.norm(x - y + 1e-6, axis=-1)

    return jnp.maximum(far(a, p) - far(a, n) + 1, 0).mean()


def _cosine_embedding(a: Any, b: Any, y: Any) -> Any:
    cosine = _cosine(a, b)
    return jnp.where(y == 1, 1 - cosine, jnp.maximum(cosine, 0)).mean()


def _resize(how: str) -> Any:
    def resize(x: Any) -> Any:
        return jax.image.resize(x, (*x.shape[:2], *(2 * n for n in x.shape[2:])), how)

    return resize


def _pool(x: Any, start: Any, op: Any) -> Any:
    return lax.reduce_window(x, start, op, (1, 1, 2), (1, 1, 2), "VALID")


ops: dict[str, Callable[..., Any]] = {
    **alike(jnp),
    **named(
        jnp,
        "matmul cosh exp expm1 log log10 log1p log2 reciprocal sinh tan sum prod mean cross dot "
        "vdot add maximum minimum abs sqrt square sin cos floor round sign tanh logaddexp exp2 "
        "logaddexp2 max min triu",
    ),
    "rsqrt": lax.rsqrt,
    "zeta": lax.zeta,
    **named(jax.nn, "softplus softmax log_softmax sigmoid relu relu6 leaky_relu elu silu mish glu"),
    **named(jsp.special, "erfinv erf digamma gammainc i0e i1e"),
    **named(jnp.linalg, "solve inv det pinv eigvalsh cond"),
    # Matrix products
    **dict.fromkeys(["mm", "bmm", "mv"], jnp.matmul),
    **dict.fromkeys(["addmm", "addmv", "baddbmm"], lambda c, a, b: c + a @ b),
    "addr": lambda c, a, b: c + jnp.outer(a, b),
    "addbmm": lambda c, a, b: c + jnp.einsum("nij,njk->ik", a, b),
    "linear": lambda x, w, b: x @ w.T + b,
    "linear without bias": lambda x, w: x @ w.T,
    # Convolutions
    **dict.fromkeys(["conv1d", "conv2d", "conv3d"], _conv),
    "conv1d with bias": lambda x, w, b: _conv(x, w) + b[:, None],
    "conv_tbc": _conv_tbc,
    "depthwise conv1d": lambda x, w: _conv(x, w, groups=x.shape[1]),
    **{f"conv_transpose{n}d": _conv_transpose for n in (1, 2, 3)},
    # Attention and cells
    "attention": _attention,
    "rnn_tanh_cell": _rnn(jnp.tanh),
    "rnn_relu_cell": _rnn(jax.nn.relu),
    "gru_cell": _gru,
    "lstm_cell": _lstm,
    "prelu": lambda x, a: jnp.where(x >= 0, x, a * x),
    # Powers, exponentials and logarithms
    "x ** y": jnp.power,
    "acos": jnp.arccos,
    "asin": jnp.arcsin,
    # Softmax, normalisations, norms
    "logsumexp": lambda x: jax.nn.logsumexp(x, axis=-1),
    "layer_norm": lambda x, w, b: jax.nn.standardize(x, epsilon=1e-5) * w + b,
    "rms_norm": lambda x, w: x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * w,
    "group_norm": _group_norm,
    "renorm": _renorm,
    "cdist": lambda a, b: jnp.linalg.norm(a[:, None] - b[None], axis=-1),
    "pdist": _pdist,
    "dist": lambda a, b: jnp.linalg.norm((a - b).reshape(-1)),
    "cosine_similarity": _cosine,
    "norm": lambda x: jnp.linalg.norm(x.reshape(-1)),
    "norm of rows": lambda x: jnp.linalg.norm(x, axis=1),
    "linalg_matrix_norm": jnp.linalg.matrix_norm,
    "linalg_matrix_norm of order 1": lambda x: jnp.linalg.norm(x, 1),
    # Losses
    "mse_loss": lambda a, b: ((a - b) ** 2).mean(),
    "l1_loss": lambda a, b: jnp.abs(a - b).mean(),
    **dict.fromkeys(["huber_loss", "smooth_l1_loss"], _huber),
    **dict.fromkeys(["nll_loss", "nll_loss2d"], _nll),
    "cross_entropy": lambda x, y: _nll(jax.nn.log_softmax(x), y),
    "binary_cross_entropy": lambda p, t: -(t * jnp.log(p) + (1 - t) * jnp.log(1 - p)).mean(),
    "binary_cross_entropy_with_logits": _bce_with_logits,
    "kl_div": lambda x, t: (t * (jnp.log(t) - x)).sum(),
    "hinge_embedding_loss": lambda x, y: jnp.where(y == 1, x, jnp.maximum(1 - x, 0)).mean(),
    "margin_ranking_loss": lambda a, b, y: jnp.maximum(-y * (a - b), 0).mean(),
    "cosine_embedding_loss": _cosine_embedding,
    "multi_margin_loss": _multi_margin,
    "poisson_nll_loss": lambda x, t: (jnp.exp(x) - t * x).mean(),
    "soft_margin_loss": lambda x, y: jnp.log1p(jnp.exp(-y * x)).mean(),
    "triplet_margin_loss": _triplet,
    # Sums and products along an axis
    "logcumsumexp": lambda x: lax.cumlogsumexp(x, 1),
    "var": lambda x: jnp.var(x, ddof=1),
    "std": lambda x: jnp.std(x, ddof=1),
    # Several inputs that must agree
    "addcdiv": lambda x, a, b: x + a / b,
    "addcmul": lambda x, a, b: x + a * b,
    "atan2": jnp.arctan2,
    "bilinear": lambda a, b, w: jnp.einsum("ni,oij,nj->no", a, w, b),
    "tensordot": lambda a, b: jnp.tensordot(a, b, axes=1),
    "index_put": lambda x, v, i: x.at[i].set(v),
    "scatter_add": lambda x, v, i: x.at[i, jnp.arange(x.shape[1])].add(v),
    # Interpolation
    "upsample_nearest2d": _resize("nearest"),
    "upsample_linear1d": _resize("linear"),
    "upsample_bilinear2d": _resize("linear"),
    "upsample_trilinear3d": _resize("linear"),
    # No row in torch's lists
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": jnp.divide,
    "eq": jnp.equal,
    "lt": jnp.less,
    "ge": jnp.greater_equal,
    "neg": jnp.negative,
    "atan": jnp.arctan,
    "asinh": jnp.arcsinh,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu by tanh": jax.nn.gelu,
    "hardtanh": jax.nn.hard_tanh,
    "hardswish": jax.nn.hard_swish,
    "softsign": jax.nn.soft_sign,
    "logsigmoid": jax.nn.log_sigmoid,
    "lgamma": jsp.special.gammaln,
    "polygamma": lambda x: lax.polygamma(jnp.ones_like(x), x),
    "amax of rows": lambda x: x.max(1),
    "clamp": lambda x: jnp.clip(x, -0.5, 0.5),
    "masked to the lowest": lambda x, m: jnp.maximum(jnp.where(m, x, jnp.finfo(x.dtype).min), -4),
    "cat": lambda *x: jnp.concatenate(x),
    "pad": lambda x: jnp.pad(x, ((0, 0), (1, 1))),
    "transpose": lambda x: x.T,
    "slice": lambda x: x[1:, :2],
    "flip": lambda x: x[::-1],
    "gather": lambda x, i: jnp.take_along_axis(x, i, 1),
    "embedding": lambda w, i: w[i],
    "sort": lambda x: jnp.sort(x, -1),
    "topk": lambda x: lax.top_k(x, 2)[0],
    "max_pool1d": lambda x: _pool(x, -jnp.inf, lax.max),
    "avg_pool1d": lambda x: _pool(x, 0.0, lax.add) / 2,
    # Linear algebra
    "matrix_exp": jsp.linalg.expm,
    "solve_triangular": lambda a, b: jsp.linalg.solve_triangular(a, b, lower=True),
    "cholesky_solve": lambda b, a: jsp.linalg.cho_solve((a, True), b),
    "lu_solve": lambda a, b: jsp.linalg.lu_solve(jsp.linalg.lu_factor(a), b),
}
