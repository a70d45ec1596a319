"""Every op that torch registers for autocast on CPU or CUDA, with inputs for it.

A `Row` names one aten overload and makes the arguments of one call; `ROWS` covers the union of both
registration lists, several rows for an op where optional arguments or shapes matter. Arguments come
out as float32 on CPU; `PATTERNS` says which dtype the first, second, ... floating-point tensor of
the call is turned into, and `arguments` builds the call. Nothing here enters an autocast region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.support.torch.version_changes import NAMED

NONE, MEAN, SUM = 0, 1, 2  # aten's reduction argument
ZEROS, BILINEAR = 0, 0  # aten's padding and interpolation arguments of grid_sampler

# Which dtype the floating-point tensors of a call take, in order; the last entry repeats.
# "low" is the region's dtype, "other" the other 16-bit one.
PATTERNS: dict[str, tuple[str, ...]] = {
    "all float32": ("float32",),
    "all bfloat16": ("bfloat16",),
    "all float16": ("float16",),
    "all float64": ("float64",),
    "low, then float32": ("low", "float32"),
    "float32, then low": ("float32", "low"),
    "other, then float32": ("other", "float32"),
    "float32, then other": ("float32", "other"),
    "low, then other": ("low", "other"),
    "other, then low": ("other", "low"),
    "float32, low, then other": ("float32", "low", "other"),
    "float32 twice, then low": ("float32", "float32", "low"),
    "low twice, then float32": ("low", "low", "float32"),
    "float64, then float32": ("float64", "float32"),
    "float64, then low": ("float64", "low"),
    "float32, then float64": ("float32", "float64"),
    "float8_e5m2, then float32": ("float8_e5m2", "float32"),
    "float8_e4m3fnuz, then low": ("float8_e4m3fnuz", "low"),
    "all complex64": ("complex64",),
    "complex64, then float32": ("complex64", "float32"),
    "all int64": ("int64",),
}

# Registered ops that cannot be tested, by device, each with its reason.
_NAMED = dict.fromkeys(NAMED, "takes named dimensions: left to torch")
EXCUSED: dict[str, dict[str, str]] = {"cpu": _NAMED, "cuda": _NAMED}


@dataclass(frozen=True)
class Constant:
    """A tensor argument that has no derivative; it takes part in the dtype pattern."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class Host:
    """A tensor argument that stays on the CPU, wherever the others go; without a derivative."""

    tensor: torch.Tensor


class Source:
    """Seeded float32 and int64 tensors in the ranges that the rows ask for."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator)

    def uniform(self, *shape: int, low: float = 0.1, high: float = 0.9) -> torch.Tensor:
        return low + (high - low) * torch.rand(shape, generator=self._generator)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=self._generator)

    def signs(self, *shape: int) -> torch.Tensor:
        return self.integers(2, *shape).float() * 2 - 1

    def regular(self, n: int) -> torch.Tensor:
        """A matrix far from singular, with distinct real eigenvalues in every float dtype."""
        return 0.1 * self.normal(n, n) + torch.diag(torch.arange(1.0, n + 1))

    def symmetric(self) -> torch.Tensor:
        """A symmetric positive definite matrix with distinct eigenvalues."""
        half = 0.1 * self.normal(4, 4)
        return half @ half.mT + torch.diag(torch.arange(1.0, 5))

    def lower(self, n: int) -> torch.Tensor:
        return torch.tril(self.regular(n))


Call = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


@dataclass(frozen=True)
class Row:
    """One call of one aten overload.

    `outputs` are the positions of the outputs to differentiate: None for all of them, () where the
    op has no derivative (or none that is defined for an arbitrary cotangent). `scratch` are the
    positions of outputs that the kernel leaves partly unwritten: they have dtypes but no values.
    """

    op: str
    make: Callable[[Source], Call]
    outputs: tuple[int, ...] | None = None
    scratch: tuple[int, ...] = ()

    @property
    def overload(self) -> torch._ops.OpOverload:
        name, _, overload = self.op.partition(".")
        found = getattr(getattr(torch.ops.aten, name), overload or "default")
        assert isinstance(found, torch._ops.OpOverload)
        return found


def dtypes(pattern: Sequence[str], low: torch.dtype) -> list[torch.dtype]:
    """The dtypes of a pattern for a region in `low`."""
    other = torch.float16 if low == torch.bfloat16 else torch.bfloat16
    named = {"low": low, "other": other}
    return [named.get(name) or getattr(torch, name) for name in pattern]


def floats(row: Row) -> int:
    """How many floating-point tensors a call of the row takes."""
    tensors = map(_tensor, tree_flatten(row.make(Source(0)))[0])
    return sum(tensor is not None and tensor.is_floating_point() for tensor in tensors)


def arguments(
    row: Row,
    pattern: Sequence[torch.dtype],
    place: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone,
    stay: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone,
) -> tuple[Call, list[torch.Tensor]]:
    """The row's call with its floating-point tensors in the pattern's dtypes."""
    leaves, spec = tree_flatten(row.make(Source(0)))
    made: list[Any] = []
    differentiable: list[torch.Tensor] = []
    count = 0
    for leaf in leaves:
        tensor = _tensor(leaf)
        if tensor is None:
            made.append(leaf)
            continue
        if tensor.is_floating_point():
            dtype = pattern[min(count, len(pattern) - 1)]
            tensor = (tensor * 4 if dtype == torch.int64 else tensor).to(dtype)
            count += 1
        made.append(stay(tensor) if isinstance(leaf, Host) else place(tensor))
        if not isinstance(leaf, (Constant, Host)) and _has_gradient(tensor):
            differentiable.append(made[-1])
    return tree_unflatten(made, spec), differentiable


def _tensor(leaf: Any) -> torch.Tensor | None:
    leaf = leaf.tensor if isinstance(leaf, (Constant, Host)) else leaf
    return leaf if isinstance(leaf, torch.Tensor) else None


def _has_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _row(op: str, *args: Any, outputs: tuple[int, ...] | None = None, **kwargs: Any) -> Row:
    """A call in which tuples are the shapes of normal tensors, and functions draw arguments."""

    def make(r: Source) -> Call:
        return call(
            *[_argument(r, x) for x in args], **{k: _argument(r, x) for k, x in kwargs.items()}
        )

    return Row(op, make, outputs)


def _rows(ops: str, *args: Any, **more: Any) -> list[Row]:
    return [_row(op, *args, **more) for op in ops.split()]


def _argument(r: Source, given: Any) -> Any:
    if isinstance(given, list):
        return [_argument(r, each) for each in given]
    if isinstance(given, tuple):
        return r.normal(*given)
    return given(r) if callable(given) else given


def _drawn(name: str) -> Callable[..., Callable[[Source], Any]]:
    return lambda *shape, **ranges: lambda r: getattr(r, name)(*shape, **ranges)


uniform, integers, signs, regular, symmetric, lower = map(
    _drawn, ("uniform", "integers", "signs", "regular", "symmetric", "lower")
)


def constant(given: Any) -> Callable[[Source], Constant]:
    return lambda r: Constant(_argument(r, given))


def host(given: Any) -> Callable[[Source], Host]:
    return lambda r: Host(_argument(r, given))


def _spread(*shape: int, step: int) -> torch.Tensor:
    """Distinct positions for unpooling: 0, step, 2 step, ... in every channel."""
    plane = shape[2:]
    count = int(torch.tensor(plane).prod())
    return (torch.arange(count) * step).reshape(1, 1, *plane).expand(shape).contiguous()


def _rnn_cell(op: str, gates: int, *, bias: bool) -> Row:
    def make(r: Source) -> Call:
        state = r.normal(2, 4)
        hidden = [state, r.normal(2, 4)] if op == "lstm_cell" else state
        weights = (r.normal(4 * gates, 3), r.normal(4 * gates, 4))
        biases = (r.normal(4 * gates), r.normal(4 * gates)) if bias else ()
        return call(r.normal(2, 3), hidden, *weights, *biases)

    return Row(op, make)


def _attention_layer(r: Source) -> Call:
    x = r.normal(2, 3, 8)
    project = (r.normal(24, 8), r.normal(24), r.normal(8, 8), r.normal(8))
    return call(x, x.clone(), x.clone(), 8, 2, *project, None, True, True, None)


def _mkldnn_lstm(r: Source) -> Call:
    weights = (r.normal(16, 3), r.normal(16, 4), r.normal(16), r.normal(16))
    state = (r.normal(1, 2, 4), r.normal(1, 2, 4))
    # reverse, batch sizes, mode (2 = LSTM), hidden size, layers, biases, bidirectional,
    # batch first, train
    options: tuple[Any, ...] = (False, [], 2, 4, 1, True, False, False, True)
    return call(r.normal(5, 2, 3), *weights, *state, *options)


def _cudnn_lstm(r: Source) -> Call:
    weights = [r.normal(16, 3), r.normal(16, 4), r.normal(16), r.normal(16)]
    buffer = Constant(torch.cat([w.flatten() for w in weights]))
    state = (r.normal(1, 2, 4), r.normal(1, 2, 4))
    # mode (2 = LSTM), hidden size, size of projections, layers, batch first, dropout, train,
    # bidirectional, batch sizes, state of dropout
    options: tuple[Any, ...] = (2, 4, 0, 1, False, 0.0, True, False, [], None)
    return call(r.normal(5, 2, 3), weights, 4, buffer, *state, *options)


IMAGES = {dims: (2, 3, *(6,) * dims) for dims in (1, 2, 3)}
PROBABILITIES = uniform(3, 4), uniform(3, 4)
# Log-probabilities and targets of ctc_loss.
CTC = lambda r: torch.log_softmax(r.normal(6, 2, 4), 2), lambda r: 1 + r.integers(3, 2, 3)
# Stride ... groups of the `convolution` family.
_CONV2D = [1, 1], [1, 1], [1, 1], False, [0, 0], 1

ROWS = (
    # Products, convolutions, cells, attention.
    _row("_addmm_activation", (3,), (4, 5), (5, 3), outputs=()),
    _row("_addmm_activation", (3,), (4, 5), (5, 3), beta=2, use_gelu=True, outputs=()),
    _row("_convolution", (2, 3, 6, 6), (4, 3, 3, 3), (4,), *_CONV2D, False, True, True, True),
    _row("_convolution.deprecated", (2, 3, 6, 6), (4, 3, 3, 3), (4,), *_CONV2D, False, True, True),
    _row("_convolution.deprecated", (2, 3, 6, 6), (4, 3, 3, 3), None, *_CONV2D, False, True, True),
    Row("_native_multi_head_attention", _attention_layer, ()),  # inference only: no derivative
    _row("_scaled_dot_product_flash_attention", *[(2, 2, 4, 8)] * 3),
    _row("_thnn_fused_gru_cell", (2, 12), (2, 12), (2, 4), (12,), (12,)),
    _row("_thnn_fused_lstm_cell", (2, 16), (2, 16), (2, 4), (16,), (16,)),
    _row("addbmm", (4, 3), (2, 4, 5), (2, 5, 3)),
    _row("addmm", (4, 3), (4, 5), (5, 3), beta=0.5, alpha=2),
    _row("addmm", (3,), (4, 5), (5, 3)),
    _row("addmv", (4,), (4, 5), (5,)),
    _row("addr", (4, 3), (4,), (3,)),
    _row("baddbmm", (2, 4, 3), (2, 4, 5), (2, 5, 3)),
    _row("bmm", (2, 4, 5), (2, 5, 3)),
    _row("chain_matmul", [(2, 3), (3, 4), (4, 5)]),
    _row("conv1d", (2, 3, 8), (4, 3, 3), (4,)),
    _row("conv1d", (2, 4, 8), (4, 2, 3), None, [2], [1], [1], 2),
    _row("conv1d.padding", (2, 3, 8), (4, 3, 3), (4,)),
    _row("conv1d.padding", (2, 3, 8), (4, 3, 3), (4,), [1], "same"),
    _row("conv2d", (2, 3, 6, 6), (4, 3, 3, 3), (4,)),
    _row("conv2d", (3, 6, 6), (4, 3, 3, 3)),
    _row(
        "conv2d", lambda r: r.normal(2, 3, 6, 6).to(memory_format=torch.channels_last), (4, 3, 1, 1)
    ),
    _row("conv2d.padding", (2, 3, 6, 6), (4, 3, 3, 3), (4,), padding="same"),
    _row("conv3d", (2, 2, 4, 4, 4), (3, 2, 2, 2, 2), (3,)),
    _row("conv3d.padding", (2, 2, 4, 4, 4), (3, 2, 3, 3, 3), padding="same"),
    _row("conv_tbc", (7, 2, 3), (3, 3, 4), (4,), 1),
    _row("conv_transpose1d", (2, 3, 5), (3, 4, 3), (4,)),
    _row("conv_transpose2d.input", (2, 3, 5, 5), (3, 4, 3, 3), (4,), [2, 2]),
    _row("conv_transpose3d.input", (2, 2, 3, 3, 3), (2, 3, 2, 2, 2), bias=(3,)),
    _row("convolution", (2, 3, 6, 6), (4, 3, 3, 3), (4,), *_CONV2D),
    _row(
        "cudnn_convolution",
        *((2, 3, 6, 6), (4, 3, 3, 3)),
        *([1, 1], [1, 1], [1, 1], 1, False, True, True),
    ),
    _row(
        "cudnn_convolution_transpose",
        *((2, 3, 6, 6), (3, 4, 3, 3)),
        *([1, 1], [0, 0], [1, 1], [1, 1], 1, False, True, True),
    ),
    _row("einsum", "bij,bjk->bik", [(2, 3, 4), (2, 4, 5)]),
    _row("einsum", "ij,j,j->i", [(3, 4), (4,), (4,)]),
    _rnn_cell("gru_cell", 3, bias=True),
    _rnn_cell("gru_cell", 3, bias=False),
    _row("linalg_multi_dot", [(2, 3), (3, 4), (4, 5)]),
    _row("linalg_vecdot", (3, 4), (3, 4)),
    _row("linalg_vecdot", (3, 4), (3, 4), dim=0),
    _row("linear", (2, 3, 4), (5, 4), (5,)),
    _row("linear", (3, 4), (5, 4)),
    _rnn_cell("lstm_cell", 4, bias=True),
    _rnn_cell("lstm_cell", 4, bias=False),
    _row("matmul", (2, 3, 4), (4, 5)),
    _row("matmul", (4,), (4,)),
    Row("_cudnn_rnn", _cudnn_lstm),
    Row("mkldnn_rnn_layer", _mkldnn_lstm, (0, 1, 2), scratch=(3,)),  # 3 is its workspace
    _row("mm", (4, 5), (5, 3)),
    _row("mm", (4, 5), lambda r: r.normal(3, 5).mT),
    _row("mm", lambda r: r.normal(1, 5).expand(4, 5), (5, 3)),
    _row("mm", lambda r: r.normal(4, 5).to_sparse(), (5, 3), outputs=()),  # forward only
    _row("mv", (4, 5), (5,)),
    _row("prelu", (2, 3, 4), uniform(3)),
    _rnn_cell("rnn_relu_cell", 1, bias=True),
    _rnn_cell("rnn_tanh_cell", 1, bias=True),
    _row("scaled_dot_product_attention", *[(2, 2, 4, 8)] * 3),
    _row("scaled_dot_product_attention", *[(2, 2, 4, 8)] * 3, (4, 4)),
    _row(
        "scaled_dot_product_attention",
        *((2, 2, 4, 8), (2, 1, 4, 8), (2, 1, 4, 8)),
        is_causal=True,
        scale=0.5,
        enable_gqa=True,
    ),
    # In the widest dtype.
    _row("addcdiv", (3, 4), (3, 4), uniform(3, 4), value=2),
    _row("addcmul", (3, 4), (3, 4), (4,)),
    _row("addcmul", (3, 4), host(()), (4,)),
    _row("atan2", (3, 4), uniform(3, 4)),
    _row("atan2", (3, 4), host(uniform())),
    _row("bilinear", (3, 2), (3, 4), (5, 2, 4), (5,)),
    _row("bilinear", (3, 2), (3, 4), (5, 2, 4)),
    _row("cat", [(2, 3), (1, 3), (4, 3)]),
    _row("cat", [(2, 3), integers(5, 2, 3), (2, 1)], -1),
    _row("cross", (4, 3), (4, 3), 1),
    _row("dot", (5,), (5,)),
    _row("index_copy", (4, 3), 0, torch.tensor([2, 0]), (2, 3)),
    _row("index_put", (4, 3), [torch.tensor([2, 0])], (2, 3)),
    _row("index_put", (4, 3), [None, torch.tensor([1, 1])], (4, 2), True),
    _row("scatter_add", (3, 4), 0, integers(3, 3, 4), (3, 4)),
    _row("stack", [(2, 3), (2, 3), (2, 3)], 1),
    _row("tensordot", (2, 3, 4), (4, 3, 5), [1, 2], [1, 0]),
    _row("vdot", (5,), (5,)),
    # Elementwise.
    *_rows("acos asin erfinv log log10 log1p log2 reciprocal rsqrt tan", uniform(3, 5)),
    *_rows("cosh exp expm1 sinh softplus", uniform(3, 5, low=-2, high=2)),
    _row("pow.Scalar", 2.5, (3, 4)),
    _row("pow.Tensor_Scalar", uniform(3, 4), 1.5),
    _row("pow.Tensor_Tensor", uniform(3, 4), (3, 4)),
    _row("pow.Tensor_Tensor", host(uniform()), (3, 4)),
    _row("polar", uniform(3, 4), (3, 4)),
    _row("view_as_complex", (3, 4, 2)),
    _row("fake_quantize_per_tensor_affine", (3, 4), 0.1, 0, -8, 7),
    # Reductions.
    _row("cumprod", uniform(3, 4), 1),
    _row("cumprod", uniform(3, 4), 1, dtype=torch.float64),
    _row("cumsum", (3, 4), 0),
    _row("cumsum", (3, 4), 0, dtype=torch.bfloat16),
    _row("frobenius_norm.dim", (3, 4), [0, 1]),
    _row("linalg_matrix_norm", (3, 4), 1),
    _row("linalg_matrix_norm", (3, 4), 1, dtype=torch.float64),
    _row("linalg_matrix_norm.str_ord", (3, 4)),
    _row("linalg_matrix_norm.str_ord", (3, 4), dtype=torch.float64),
    _row("linalg_vector_norm", (3, 4)),
    _row("linalg_vector_norm", (3, 4), 1, [0], dtype=torch.float64),
    _row("log_softmax.int", (3, 4), 1),
    _row("log_softmax.int", (3, 4), 1, torch.float64),
    _row("logsumexp", (3, 4), [1]),
    _row("norm.Scalar", (3, 4)),
    _row("norm.Scalar", (3, 4), 1),
    _row("norm.ScalarOpt_dim", (3, 4), None, [1]),
    _row("norm.ScalarOpt_dim", (3, 4), 3, [0], True),
    _row("nuclear_norm", (3, 4)),
    _row("nuclear_norm.dim", (2, 3, 4), [1, 2]),
    _row("prod", uniform(3, 4)),
    _row("prod", uniform(3, 4), dtype=torch.float64),
    _row("prod.dim_int", uniform(3, 4), 1),
    _row("prod.dim_int", uniform(3, 4), 1, True, dtype=torch.bfloat16),
    _row("renorm", (3, 4), 2, 0, 1.0),
    _row("softmax.int", (3, 4), 1),
    _row("softmax.int", (3, 4), -1, torch.float16),
    _row("sum", (3, 4)),
    _row("sum", (3, 4), dtype=torch.float16),
    _row("sum.dim_IntList", (3, 4), [1]),
    _row("sum.dim_IntList", (3, 4), None, True, dtype=torch.int64),
    _row("trace", (3, 4)),
    _row("nanquantile", (3, 5), constant(uniform(2)), 1),
    _row("nanquantile.scalar", (3, 5), 0.3, 1),
    _row("quantile", (3, 5), constant(uniform(2)), 0),
    _row("quantile.scalar", (3, 5), 0.7, interpolation="higher"),
    # Normalisations, norms, distances.
    _row("cdist", (3, 4), (5, 4)),
    _row("cdist", (3, 4), (5, 4), 1.0),
    _row("cosine_similarity", (3, 4), (3, 4)),
    _row("dist", (3, 4), (3, 4)),
    _row("pdist", (4, 3)),
    _row("group_norm", (2, 4, 3), 2, (4,), (4,)),
    _row("group_norm", (2, 4, 3), 2),
    _row("layer_norm", (3, 4), [4], (4,), (4,)),
    _row("layer_norm", (3, 4), [4]),
    _row("native_layer_norm", (3, 4), [4], (4,), (4,), 1e-5),
    _row("native_layer_norm", (3, 4), [4], None, None, 1e-5),
    _row("rms_norm", (3, 4), [4], (4,)),
    _row("rms_norm", (3, 4), [4], eps=1e-3),
    # Losses.
    *_rows("binary_cross_entropy binary_cross_entropy_with_logits", *PROBABILITIES),
    *_rows("huber_loss l1_loss mse_loss smooth_l1_loss", *PROBABILITIES),
    _row("binary_cross_entropy", *PROBABILITIES, constant(uniform(4)), SUM),
    _row(
        "binary_cross_entropy_with_logits",
        *((3, 4), uniform(3, 4), constant(uniform(4))),
        pos_weight=constant(uniform(4)),
        reduction=NONE,
    ),
    _row("cosine_embedding_loss", (3, 4), (3, 4), constant(signs(3))),
    _row("cross_entropy_loss", (3, 4), integers(4, 3)),
    _row("cross_entropy_loss", (3, 4), integers(4, 3), constant(uniform(4)), label_smoothing=0.1),
    _row("cross_entropy_loss", (3, 4), lambda r: torch.softmax(r.normal(3, 4), 1)),
    _row("ctc_loss.IntList", *CTC, [6, 5], [3, 2]),
    _row("ctc_loss.Tensor", *CTC, torch.tensor([6, 5]), torch.tensor([3, 2])),
    _row("hinge_embedding_loss", (3, 4), constant(signs(3, 4))),
    _row("huber_loss", *PROBABILITIES, NONE, 0.3),
    _row("kl_div", (3, 4), uniform(3, 4)),
    _row("kl_div", (3, 4), (3, 4), SUM, log_target=True),
    _row("margin_ranking_loss", (3,), (3,), constant(signs(3)), 0.1),
    _row("mse_loss", *PROBABILITIES, NONE),
    _row("multi_margin_loss", (3, 4), integers(4, 3)),
    _row("multi_margin_loss", (3, 4), integers(4, 3), 2, 0.5, constant(uniform(4))),
    _row("multilabel_margin_loss", (3, 4), integers(4, 3, 4)),
    _row("multilabel_margin_loss_forward", (3, 4), integers(4, 3, 4), MEAN, outputs=(0,)),
    _row("nll_loss", (3, 4), integers(4, 3)),
    _row("nll_loss", (3, 4), integers(4, 3), constant(uniform(4)), SUM),
    _row("nll_loss2d", (2, 4, 3, 3), integers(4, 2, 3, 3)),
    _row("poisson_nll_loss", (3, 4), uniform(3, 4), True, False, 1e-08, MEAN),
    _row("poisson_nll_loss", *PROBABILITIES, False, True, 1e-08, NONE),
    _row("soft_margin_loss", (3, 4), constant(signs(3, 4))),
    _row("triplet_margin_loss", (3, 4), (3, 4), (3, 4)),
    _row("triplet_margin_loss", (3, 4), (3, 4), (3, 4), 2.0, 1.0, swap=True),
    # Images.
    _row("_upsample_bicubic2d_aa", IMAGES[2], [4, 4], False),
    _row("_upsample_bilinear2d_aa", IMAGES[2], [4, 4], False),
    _row("_upsample_nearest_exact1d", IMAGES[1], [4]),
    _row("_upsample_nearest_exact2d", IMAGES[2], [4, 4]),
    _row("_upsample_nearest_exact3d", IMAGES[3], [4, 4, 4]),
    _row("upsample_bicubic2d", IMAGES[2], [9, 9], True),
    _row("upsample_bilinear2d", IMAGES[2], [9, 9], False),
    _row("upsample_linear1d", IMAGES[1], [9], False),
    _row("upsample_nearest1d", IMAGES[1], [9]),
    _row("upsample_nearest2d", IMAGES[2], [9, 9]),
    _row("upsample_nearest3d", IMAGES[3], [9, 9, 9]),
    _row("upsample_trilinear3d", IMAGES[3], [9, 9, 9], False),
    _row("adaptive_avg_pool3d", IMAGES[3], [2, 3, 4]),
    _row("adaptive_max_pool3d", IMAGES[3], [2, 3, 4], outputs=(0,)),
    _row("avg_pool3d", IMAGES[3], [2, 2, 2]),
    _row("max_pool3d", IMAGES[3], [2, 2, 2]),
    *(
        _row(
            f"fractional_max_pool{n}d",
            *(IMAGES[n], [2] * n, [3] * n, constant(uniform(2, 3, n))),
            outputs=(0,),
        )
        for n in (2, 3)
    ),
    _row("max_unpool2d", (2, 3, 2, 2), _spread(2, 3, 2, 2, step=5), [4, 4]),
    _row(
        "max_unpool3d", (2, 3, 2, 2, 2), _spread(2, 3, 2, 2, 2, step=9), [4] * 3, [2] * 3, [0] * 3
    ),
    _row("reflection_pad1d", IMAGES[1], [1, 2]),
    _row("reflection_pad2d", IMAGES[2], [1, 2, 2, 1]),
    _row("replication_pad1d", IMAGES[1], [1, 2]),
    _row("replication_pad2d", IMAGES[2], [1, 2, 2, 1]),
    _row("replication_pad3d", IMAGES[3], [1, 2, 2, 1, 1, 1]),
    *(
        _row(op, IMAGES[2], uniform(2, 4, 4, 2, low=-0.8), BILINEAR, ZEROS, False)
        for op in ("_grid_sampler_2d_cpu_fallback", "grid_sampler", "grid_sampler_2d")
    ),
    _row(
        "grid_sampler_3d", (2, 3, 4, 4, 4), uniform(2, 3, 3, 3, 3, low=-0.8), BILINEAR, ZEROS, True
    ),
    # Fourier transforms.
    *_rows("fft_fft fft_ifft fft_ihfft fft_rfft", (3, 8)),
    *_rows("fft_hfft fft_irfft", (3, 5)),
    *_rows("fft_fft2 fft_ifft2 fft_rfft2", (3, 4, 8)),
    *_rows("fft_fftn fft_ifftn fft_rfftn", (2, 4, 8)),
    *_rows("fft_irfft2 fft_irfftn", (3, 4, 5)),
    _row("fft_fft", (3, 8), 6, 0, "ortho"),
    _row("stft", (2, 32), 8, 4, 8, uniform(8), return_complex=True),
    _row("stft", (32,), 8, onesided=False, return_complex=True),
    _row("stft.center", (2, 32), 8, window=uniform(8), return_complex=True),
    # Linear algebra.
    *_rows("_lu_with_info inverse linalg_cond linalg_eigvals linalg_inv", regular(4)),
    *_rows("linalg_eig linalg_inv_ex", regular(4), outputs=(0,)),
    _row("geqrf", regular(4), outputs=()),
    _row("linalg_cond.p_str", regular(4), p="nuc"),
    _row("linalg_matrix_rank", regular(4), tol=0.1, outputs=()),
    _row("linalg_matrix_rank.atol_rtol_float", regular(4), atol=0.1, outputs=()),
    _row(
        "linalg_matrix_rank.atol_rtol_tensor",
        regular(4),
        atol=uniform(1),
        rtol=uniform(1),
        outputs=(),
    ),
    _row("linalg_matrix_rank.tol_tensor", regular(4), uniform(1), outputs=()),
    *_rows("linalg_qr linalg_svdvals pinverse qr svd", (5, 3)),
    _row("linalg_svd", (5, 3), False),
    *_rows("cholesky linalg_cholesky linalg_matrix_sqrth linalg_eigh", symmetric()),
    _row("cholesky", symmetric(), True),
    _row("cholesky_inverse", lower(4)),
    _row("cholesky_solve", (4, 2), lower(4)),
    _row("linalg_cholesky_ex", symmetric(), upper=True, outputs=(0,)),
    _row("linalg_eigvalsh", symmetric(), "U"),
    *_rows("linalg_householder_product orgqr", (5, 3), uniform(3)),
    # Not the default driver: its pivots start from unset memory, so its last bits vary by the run.
    _row("linalg_lstsq", (5, 3), (5, 2), driver="gels", outputs=(0,)),
    _row("linalg_solve", regular(4), (4, 2)),
    _row("linalg_tensorinv", lambda r: r.regular(6).reshape(2, 3, 6)),
    _row("linalg_tensorsolve", lambda r: r.regular(6).reshape(2, 3, 6), (2, 3)),
    Row("lu_solve", lambda r: call(r.normal(4, 2), *torch.linalg.lu_factor(r.regular(4)))),
    _row("ormqr", (5, 3), uniform(3), (5, 2)),
    _row("triangular_solve", (4, 2), lower(4), False, outputs=(0,)),
)
