"""The verbs of `tests.support.frameworks` in torch: CUDA's table on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from polymp.torch import autocast
from tests.support.frameworks import alike, named

name, xp = "torch", torch


def array(values: Any, dtype: str = "float32") -> torch.Tensor:
    return cast(torch.tensor(np.asarray(values)), dtype)


def cast(x: torch.Tensor, dtype: str) -> torch.Tensor:
    return x.to(getattr(torch, "int64" if dtype == "int" else dtype))


def dtype(x: torch.Tensor) -> str:
    if not x.is_floating_point() and x.dtype is not torch.bool:
        return "int"
    return str(x.dtype).removeprefix("torch.")


def numbers(x: torch.Tensor) -> Any:
    return x.detach().double().numpy()


def wide() -> AbstractContextManager[Any]:
    return nullcontext()


def region(kind: str) -> AbstractContextManager[Any]:
    if kind == "off":
        return autocast("cpu", enabled=False, policy="torch-cuda")
    return autocast("cpu", getattr(torch, kind), policy="torch-cuda")


def run(
    fn: Callable[..., Any],
    arrays: Sequence[Any],
    regions: Sequence[str] = (),
    made: Sequence[bool] = (),
    region: Callable[[str], AbstractContextManager[Any]] = region,
) -> Any:
    """Call the function in nested regions."""
    with ExitStack() as stack:
        for depth, kind in enumerate(regions):
            stack.enter_context(region(kind))
            if depth == 0:
                arrays = [
                    product(x) if m else x
                    for x, m in zip(arrays, made or [False] * len(arrays), strict=True)
                ]
        return fn(*arrays)


def product(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as the result of a matrix product, which adds something up: two halves."""
    twice = x.reshape(-1, 1).expand(-1, 2)
    return (twice @ x.new_full((2, 1), 0.5)).reshape(x.shape)


def dtype_of(*args: Any, **kwargs: Any) -> str:
    try:
        return dtype(run(*args, **kwargs))
    except Exception:
        return "raises"


def together(functions: Sequence[Callable[..., Any]], arrays: Sequence[Any]) -> list[Any]:
    return [fn(*arrays) for fn in functions]


def grad(fn: Callable[..., Any], x: torch.Tensor) -> tuple[Any, Any]:
    x = x.detach().requires_grad_()
    value = fn(x)
    return value.detach(), torch.autograd.grad(value, x)[0]


ops: dict[str, Callable[..., Any]] = {
    **alike(torch),
    **named(
        torch,
        "matmul mm bmm mv addmm addmv addr addbmm baddbmm conv_tbc rnn_tanh_cell rnn_relu_cell "
        "gru_cell cosh exp expm1 log log10 log1p log2 reciprocal rsqrt sinh acos asin erfinv "
        "tan cdist dist sum prod mean var std addcdiv addcmul atan2 dot vdot add sub mul div "
        "maximum minimum eq lt ge neg abs sqrt square sin cos atan asinh floor round sign erf "
        "tanh sigmoid relu logaddexp lgamma digamma exp2 logaddexp2 max min triu",
    ),
    **named(
        F,
        "linear conv1d conv2d conv3d prelu softplus pdist cosine_similarity mse_loss l1_loss "
        "huber_loss smooth_l1_loss nll_loss cross_entropy binary_cross_entropy "
        "binary_cross_entropy_with_logits hinge_embedding_loss margin_ranking_loss "
        "cosine_embedding_loss multi_margin_loss poisson_nll_loss soft_margin_loss "
        "triplet_margin_loss bilinear relu6 elu gelu silu mish hardtanh hardswish softsign "
        "logsigmoid",
    ),
    **named(torch.special, "zeta gammainc i0e i1e"),
    **named(torch.linalg, "solve inv det pinv matrix_exp eigvalsh cond"),
    # Matrix products
    "linear without bias": F.linear,
    # Convolutions
    "conv1d with bias": F.conv1d,
    "depthwise conv1d": lambda x, w: F.conv1d(x, w, groups=x.shape[1]),
    "conv_transpose1d": lambda x, w: F.conv_transpose1d(x, w, stride=2),
    "conv_transpose2d": lambda x, w: F.conv_transpose2d(x, w, stride=2),
    "conv_transpose3d": lambda x, w: F.conv_transpose3d(x, w, stride=2),
    # Attention and cells
    "attention": F.scaled_dot_product_attention,
    "lstm_cell": lambda x, h, c, *w: torch.lstm_cell(x, (h, c), *w)[0],
    # Powers, exponentials and logarithms
    "x ** y": torch.pow,
    # Softmax, normalisations, norms
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "layer_norm": lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
    "rms_norm": lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-5),
    "group_norm": lambda x, w, b: F.group_norm(x, 2, w, b),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "norm": lambda x: torch._VF.norm(x, 2.0),
    "norm of rows": lambda x: torch._VF.norm(x, 2.0, (1,), False),
    "linalg_matrix_norm": lambda x: torch.linalg.matrix_norm(x, "fro"),
    "linalg_matrix_norm of order 1": lambda x: torch.linalg.matrix_norm(x, 1),
    # Losses
    "nll_loss2d": F.nll_loss,
    "kl_div": lambda x, t: F.kl_div(x, t, reduction="sum"),
    # Sums and products along an axis
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 1),
    # Several inputs that must agree
    "cross": lambda a, b: torch.cross(a, b, dim=-1),
    "tensordot": lambda a, b: torch.tensordot(a, b, dims=1),
    "index_put": lambda x, v, i: x.index_put((i,), v),
    "scatter_add": lambda x, v, i: x.scatter_add(0, i, v),
    # Interpolation
    "upsample_nearest2d": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "upsample_linear1d": lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
    "upsample_bilinear2d": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "upsample_trilinear3d": lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
    # No row in torch's lists
    "leaky_relu": lambda x: F.leaky_relu(x, 0.01),
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "glu": lambda x: F.glu(x, -1),
    "polygamma": lambda x: torch.polygamma(1, x),
    "amax of rows": lambda x: x.amax(1),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "masked to the lowest": lambda x, m: torch.where(m, x, torch.finfo(x.dtype).min).clamp(min=-4),
    "cat": lambda *x: torch.cat(x),
    "pad": lambda x: F.pad(x, (1, 1)),
    "transpose": lambda x: x.mT,
    "slice": lambda x: x.narrow(0, 1, 2).narrow(1, 0, 2),
    "flip": lambda x: x.flip(0),
    "gather": lambda x, i: torch.take_along_dim(x, i, 1),
    "embedding": lambda w, i: F.embedding(i, w),
    "sort": lambda x: torch.sort(x, -1).values,
    "topk": lambda x: torch.topk(x, 2).values,
    "max_pool1d": lambda x: F.max_pool1d(x, 2),
    "avg_pool1d": lambda x: F.avg_pool1d(x, 2),
    # Linear algebra
    "solve_triangular": lambda a, b: torch.linalg.solve_triangular(a, b, upper=False),
    "cholesky_solve": lambda b, a: torch.cholesky_solve(b, a),
    "lu_solve": lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b),
}
