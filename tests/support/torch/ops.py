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


def _made(op: str, *args: Any, outputs: tuple[int, ...] | None = None, **kwargs: Any) -> Row:
    """A call in which tuples are the shapes of normal tensors."""

    def tensor(r: Source, arg: Any) -> Any:
        if isinstance(arg, list):
            return [tensor(r, each) for each in arg]
        return r.normal(*arg) if isinstance(arg, tuple) else arg

    def make(r: Source) -> Call:
        return call(*[tensor(r, x) for x in args], **{k: tensor(r, x) for k, x in kwargs.items()})

    return Row(op, make, outputs)


def _pointwise(op: str, low: float = 0.1, high: float = 0.9) -> Row:
    return Row(op, lambda r: call(r.uniform(3, 5, low=low, high=high)))


def _square(op: str, outputs: tuple[int, ...] | None = None, **kwargs: Any) -> Row:
    return Row(op, lambda r: call(r.regular(4), **kwargs), outputs)


def _loss(op: str, *more: Any) -> Row:
    return Row(op, lambda r: call(r.uniform(3, 4), r.uniform(3, 4), *more))


def _image(op: str, dims: int, *args: Any, outputs: tuple[int, ...] | None = None) -> Row:
    return Row(op, lambda r: call(r.normal(2, 3, *(6,) * dims), *args), outputs)


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


def _ctc(r: Source, *, as_tensor: bool) -> Call:
    log_probs = torch.log_softmax(r.normal(6, 2, 4), 2)
    targets = 1 + r.integers(3, 2, 3)
    lengths: tuple[Any, Any] = ([6, 5], [3, 2])
    if as_tensor:
        lengths = (torch.tensor(lengths[0]), torch.tensor(lengths[1]))
    return call(log_probs, targets, *lengths)


# Stride ... groups of the `convolution` family.
_CONV2D = [1, 1], [1, 1], [1, 1], False, [0, 0], 1

LOWER = (
    _made("_addmm_activation", (3,), (4, 5), (5, 3), outputs=()),
    _made("_addmm_activation", (3,), (4, 5), (5, 3), beta=2, use_gelu=True, outputs=()),
    _made("_convolution", (2, 3, 6, 6), (4, 3, 3, 3), (4,), *_CONV2D, False, True, True, True),
    _made("_convolution.deprecated", (2, 3, 6, 6), (4, 3, 3, 3), (4,), *_CONV2D, False, True, True),
    _made("_convolution.deprecated", (2, 3, 6, 6), (4, 3, 3, 3), None, *_CONV2D, False, True, True),
    Row("_native_multi_head_attention", _attention_layer, ()),  # inference only: no derivative
    _made("_scaled_dot_product_flash_attention", (2, 2, 4, 8), (2, 2, 4, 8), (2, 2, 4, 8)),
    _made("_thnn_fused_gru_cell", (2, 12), (2, 12), (2, 4), (12,), (12,)),
    _made("_thnn_fused_lstm_cell", (2, 16), (2, 16), (2, 4), (16,), (16,)),
    _made("addbmm", (4, 3), (2, 4, 5), (2, 5, 3)),
    _made("addmm", (4, 3), (4, 5), (5, 3), beta=0.5, alpha=2),
    _made("addmm", (3,), (4, 5), (5, 3)),
    _made("addmv", (4,), (4, 5), (5,)),
    _made("addr", (4, 3), (4,), (3,)),
    _made("baddbmm", (2, 4, 3), (2, 4, 5), (2, 5, 3)),
    _made("bmm", (2, 4, 5), (2, 5, 3)),
    _made("chain_matmul", [(2, 3), (3, 4), (4, 5)]),
    _made("conv1d", (2, 3, 8), (4, 3, 3), (4,)),
    _made("conv1d", (2, 4, 8), (4, 2, 3), None, [2], [1], [1], 2),
    _made("conv1d.padding", (2, 3, 8), (4, 3, 3), (4,)),
    _made("conv1d.padding", (2, 3, 8), (4, 3, 3), (4,), [1], "same"),
    _made("conv2d", (2, 3, 6, 6), (4, 3, 3, 3), (4,)),
    _made("conv2d", (3, 6, 6), (4, 3, 3, 3)),
    Row(
        "conv2d",
        lambda r: call(
            r.normal(2, 3, 6, 6).to(memory_format=torch.channels_last), r.normal(4, 3, 1, 1)
        ),
    ),
    _made("conv2d.padding", (2, 3, 6, 6), (4, 3, 3, 3), (4,), padding="same"),
    _made("conv3d", (2, 2, 4, 4, 4), (3, 2, 2, 2, 2), (3,)),
    _made("conv3d.padding", (2, 2, 4, 4, 4), (3, 2, 3, 3, 3), padding="same"),
    _made("conv_tbc", (7, 2, 3), (3, 3, 4), (4,), 1),
    _made("conv_transpose1d", (2, 3, 5), (3, 4, 3), (4,)),
    _made("conv_transpose2d.input", (2, 3, 5, 5), (3, 4, 3, 3), (4,), [2, 2]),
    _made("conv_transpose3d.input", (2, 2, 3, 3, 3), (2, 3, 2, 2, 2), bias=(3,)),
    _made("convolution", (2, 3, 6, 6), (4, 3, 3, 3), (4,), *_CONV2D),
    _made(
        "cudnn_convolution",
        *((2, 3, 6, 6), (4, 3, 3, 3)),
        *([1, 1], [1, 1], [1, 1], 1, False, True, True),
    ),
    _made(
        "cudnn_convolution_transpose",
        *((2, 3, 6, 6), (3, 4, 3, 3)),
        *([1, 1], [0, 0], [1, 1], [1, 1], 1, False, True, True),
    ),
    _made("einsum", "bij,bjk->bik", [(2, 3, 4), (2, 4, 5)]),
    _made("einsum", "ij,j,j->i", [(3, 4), (4,), (4,)]),
    _rnn_cell("gru_cell", 3, bias=True),
    _rnn_cell("gru_cell", 3, bias=False),
    _made("linalg_multi_dot", [(2, 3), (3, 4), (4, 5)]),
    _made("linalg_vecdot", (3, 4), (3, 4)),
    _made("linalg_vecdot", (3, 4), (3, 4), dim=0),
    _made("linear", (2, 3, 4), (5, 4), (5,)),
    _made("linear", (3, 4), (5, 4)),
    _rnn_cell("lstm_cell", 4, bias=True),
    _rnn_cell("lstm_cell", 4, bias=False),
    _made("matmul", (2, 3, 4), (4, 5)),
    _made("matmul", (4,), (4,)),
    Row("_cudnn_rnn", _cudnn_lstm),
    Row("mkldnn_rnn_layer", _mkldnn_lstm, (0, 1, 2), scratch=(3,)),  # 3 is its workspace
    _made("mm", (4, 5), (5, 3)),
    Row("mm", lambda r: call(r.normal(4, 5), r.normal(3, 5).mT)),
    Row("mm", lambda r: call(r.normal(1, 5).expand(4, 5), r.normal(5, 3))),
    Row("mm", lambda r: call(r.normal(4, 5).to_sparse(), r.normal(5, 3)), ()),  # forward only
    _made("mv", (4, 5), (5,)),
    Row("prelu", lambda r: call(r.normal(2, 3, 4), r.uniform(3))),
    _rnn_cell("rnn_relu_cell", 1, bias=True),
    _rnn_cell("rnn_tanh_cell", 1, bias=True),
    _made("scaled_dot_product_attention", (2, 2, 4, 8), (2, 2, 4, 8), (2, 2, 4, 8)),
    _made("scaled_dot_product_attention", (2, 2, 4, 8), (2, 2, 4, 8), (2, 2, 4, 8), (4, 4)),
    _made(
        "scaled_dot_product_attention",
        *((2, 2, 4, 8), (2, 1, 4, 8), (2, 1, 4, 8)),
        is_causal=True,
        scale=0.5,
        enable_gqa=True,
    ),
)

WIDEST = (
    Row("addcdiv", lambda r: call(r.normal(3, 4), r.normal(3, 4), r.uniform(3, 4), value=2)),
    _made("addcmul", (3, 4), (3, 4), (4,)),
    Row("addcmul", lambda r: call(r.normal(3, 4), Host(r.normal()), r.normal(4))),
    Row("atan2", lambda r: call(r.normal(3, 4), r.uniform(3, 4))),
    Row("atan2", lambda r: call(r.normal(3, 4), Host(r.uniform()))),
    _made("bilinear", (3, 2), (3, 4), (5, 2, 4), (5,)),
    _made("bilinear", (3, 2), (3, 4), (5, 2, 4)),
    _made("cat", [(2, 3), (1, 3), (4, 3)]),
    Row("cat", lambda r: call([r.normal(2, 3), r.integers(5, 2, 3), r.normal(2, 1)], -1)),
    _made("cross", (4, 3), (4, 3), 1),
    _made("dot", (5,), (5,)),
    _made("index_copy", (4, 3), 0, torch.tensor([2, 0]), (2, 3)),
    _made("index_put", (4, 3), [torch.tensor([2, 0])], (2, 3)),
    _made("index_put", (4, 3), [None, torch.tensor([1, 1])], (4, 2), True),
    Row(
        "scatter_add",
        lambda r: call(r.normal(3, 4), 0, r.integers(3, 3, 4), r.normal(3, 4)),
    ),
    _made("stack", [(2, 3), (2, 3), (2, 3)], 1),
    _made("tensordot", (2, 3, 4), (4, 3, 5), [1, 2], [1, 0]),
    _made("vdot", (5,), (5,)),
)

POINTWISE = (
    *map(_pointwise, "acos asin erfinv log log10 log1p log2 reciprocal rsqrt tan".split()),
    *(_pointwise(op, -2, 2) for op in ("cosh", "exp", "expm1", "sinh", "softplus")),
    _made("pow.Scalar", 2.5, (3, 4)),
    Row("pow.Tensor_Scalar", lambda r: call(r.uniform(3, 4), 1.5)),
    Row("pow.Tensor_Tensor", lambda r: call(r.uniform(3, 4), r.normal(3, 4))),
    Row("pow.Tensor_Tensor", lambda r: call(Host(r.uniform()), r.normal(3, 4))),
    Row("polar", lambda r: call(r.uniform(3, 4), r.normal(3, 4))),
    _made("view_as_complex", (3, 4, 2)),
    _made("fake_quantize_per_tensor_affine", (3, 4), 0.1, 0, -8, 7),
)

REDUCTIONS = (
    Row("cumprod", lambda r: call(r.uniform(3, 4), 1)),
    Row("cumprod", lambda r: call(r.uniform(3, 4), 1, dtype=torch.float64)),
    _made("cumsum", (3, 4), 0),
    _made("cumsum", (3, 4), 0, dtype=torch.bfloat16),
    _made("frobenius_norm.dim", (3, 4), [0, 1]),
    _made("linalg_matrix_norm", (3, 4), 1),
    _made("linalg_matrix_norm", (3, 4), 1, dtype=torch.float64),
    _made("linalg_matrix_norm.str_ord", (3, 4)),
    _made("linalg_matrix_norm.str_ord", (3, 4), dtype=torch.float64),
    _made("linalg_vector_norm", (3, 4)),
    _made("linalg_vector_norm", (3, 4), 1, [0], dtype=torch.float64),
    _made("log_softmax.int", (3, 4), 1),
    _made("log_softmax.int", (3, 4), 1, torch.float64),
    _made("logsumexp", (3, 4), [1]),
    _made("norm.Scalar", (3, 4)),
    _made("norm.Scalar", (3, 4), 1),
    _made("norm.ScalarOpt_dim", (3, 4), None, [1]),
    _made("norm.ScalarOpt_dim", (3, 4), 3, [0], True),
    _made("nuclear_norm", (3, 4)),
    _made("nuclear_norm.dim", (2, 3, 4), [1, 2]),
    Row("prod", lambda r: call(r.uniform(3, 4))),
    Row("prod", lambda r: call(r.uniform(3, 4), dtype=torch.float64)),
    Row("prod.dim_int", lambda r: call(r.uniform(3, 4), 1)),
    Row("prod.dim_int", lambda r: call(r.uniform(3, 4), 1, True, dtype=torch.bfloat16)),
    _made("renorm", (3, 4), 2, 0, 1.0),
    _made("softmax.int", (3, 4), 1),
    _made("softmax.int", (3, 4), -1, torch.float16),
    _made("sum", (3, 4)),
    _made("sum", (3, 4), dtype=torch.float16),
    _made("sum.dim_IntList", (3, 4), [1]),
    _made("sum.dim_IntList", (3, 4), None, True, dtype=torch.int64),
    _made("trace", (3, 4)),
    Row("nanquantile", lambda r: call(r.normal(3, 5), Constant(r.uniform(2)), 1)),
    _made("nanquantile.scalar", (3, 5), 0.3, 1),
    Row("quantile", lambda r: call(r.normal(3, 5), Constant(r.uniform(2)), 0)),
    _made("quantile.scalar", (3, 5), 0.7, interpolation="higher"),
)

NORMS_AND_DISTANCES = (
    _made("cdist", (3, 4), (5, 4)),
    _made("cdist", (3, 4), (5, 4), 1.0),
    _made("cosine_similarity", (3, 4), (3, 4)),
    _made("dist", (3, 4), (3, 4)),
    _made("pdist", (4, 3)),
    _made("group_norm", (2, 4, 3), 2, (4,), (4,)),
    _made("group_norm", (2, 4, 3), 2),
    _made("layer_norm", (3, 4), [4], (4,), (4,)),
    _made("layer_norm", (3, 4), [4]),
    _made("native_layer_norm", (3, 4), [4], (4,), (4,), 1e-5),
    _made("native_layer_norm", (3, 4), [4], None, None, 1e-5),
    _made("rms_norm", (3, 4), [4], (4,)),
    _made("rms_norm", (3, 4), [4], eps=1e-3),
)

LOSSES = (
    _loss("binary_cross_entropy"),
    Row(
        "binary_cross_entropy",
        lambda r: call(r.uniform(3, 4), r.uniform(3, 4), Constant(r.uniform(4)), SUM),
    ),
    _loss("binary_cross_entropy_with_logits"),
    Row(
        "binary_cross_entropy_with_logits",
        lambda r: call(
            *(r.normal(3, 4), r.uniform(3, 4), Constant(r.uniform(4))),
            pos_weight=Constant(r.uniform(4)),
            reduction=NONE,
        ),
    ),
    Row(
        "cosine_embedding_loss",
        lambda r: call(r.normal(3, 4), r.normal(3, 4), Constant(r.signs(3))),
    ),
    Row("cross_entropy_loss", lambda r: call(r.normal(3, 4), r.integers(4, 3))),
    Row(
        "cross_entropy_loss",
        lambda r: call(
            r.normal(3, 4), r.integers(4, 3), Constant(r.uniform(4)), label_smoothing=0.1
        ),
    ),
    Row("cross_entropy_loss", lambda r: call(r.normal(3, 4), torch.softmax(r.normal(3, 4), 1))),
    Row("ctc_loss.IntList", lambda r: _ctc(r, as_tensor=False)),
    Row("ctc_loss.Tensor", lambda r: _ctc(r, as_tensor=True)),
    Row("hinge_embedding_loss", lambda r: call(r.normal(3, 4), Constant(r.signs(3, 4)))),
    _loss("huber_loss"),
    _loss("huber_loss", NONE, 0.3),
    Row("kl_div", lambda r: call(r.normal(3, 4), r.uniform(3, 4))),
    _made("kl_div", (3, 4), (3, 4), SUM, log_target=True),
    _loss("l1_loss"),
    Row(
        "margin_ranking_loss",
        lambda r: call(r.normal(3), r.normal(3), Constant(r.signs(3)), 0.1),
    ),
    _loss("mse_loss"),
    _loss("mse_loss", NONE),
    Row("multi_margin_loss", lambda r: call(r.normal(3, 4), r.integers(4, 3))),
    Row(
        "multi_margin_loss",
        lambda r: call(r.normal(3, 4), r.integers(4, 3), 2, 0.5, Constant(r.uniform(4))),
    ),
    Row("multilabel_margin_loss", lambda r: call(r.normal(3, 4), r.integers(4, 3, 4))),
    Row(
        "multilabel_margin_loss_forward",
        lambda r: call(r.normal(3, 4), r.integers(4, 3, 4), MEAN),
        (0,),
    ),
    Row("nll_loss", lambda r: call(r.normal(3, 4), r.integers(4, 3))),
    Row("nll_loss", lambda r: call(r.normal(3, 4), r.integers(4, 3), Constant(r.uniform(4)), SUM)),
    Row("nll_loss2d", lambda r: call(r.normal(2, 4, 3, 3), r.integers(4, 2, 3, 3))),
    Row(
        "poisson_nll_loss",
        lambda r: call(r.normal(3, 4), r.uniform(3, 4), True, False, 1e-8, MEAN),
    ),
    Row(
        "poisson_nll_loss",
        lambda r: call(r.uniform(3, 4), r.uniform(3, 4), False, True, 1e-8, NONE),
    ),
    _loss("smooth_l1_loss"),
    Row("soft_margin_loss", lambda r: call(r.normal(3, 4), Constant(r.signs(3, 4)))),
    _made("triplet_margin_loss", (3, 4), (3, 4), (3, 4)),
    _made("triplet_margin_loss", (3, 4), (3, 4), (3, 4), 2.0, 1.0, swap=True),
)

IMAGES = (
    _image("_upsample_bicubic2d_aa", 2, [4, 4], False),
    _image("_upsample_bilinear2d_aa", 2, [4, 4], False),
    _image("_upsample_nearest_exact1d", 1, [4]),
    _image("_upsample_nearest_exact2d", 2, [4, 4]),
    _image("_upsample_nearest_exact3d", 3, [4, 4, 4]),
    _image("upsample_bicubic2d", 2, [9, 9], True),
    _image("upsample_bilinear2d", 2, [9, 9], False),
    _image("upsample_linear1d", 1, [9], False),
    _image("upsample_nearest1d", 1, [9]),
    _image("upsample_nearest2d", 2, [9, 9]),
    _image("upsample_nearest3d", 3, [9, 9, 9]),
    _image("upsample_trilinear3d", 3, [9, 9, 9], False),
    _image("adaptive_avg_pool3d", 3, [2, 3, 4]),
    _image("adaptive_max_pool3d", 3, [2, 3, 4], outputs=(0,)),
    _image("avg_pool3d", 3, [2, 2, 2]),
    _image("max_pool3d", 3, [2, 2, 2]),
    Row(
        "fractional_max_pool2d",
        lambda r: call(r.normal(2, 3, 6, 6), [2, 2], [3, 3], Constant(r.uniform(2, 3, 2))),
        (0,),
    ),
    Row(
        "fractional_max_pool3d",
        lambda r: call(r.normal(2, 3, 6, 6, 6), [2, 2, 2], [3, 3, 3], Constant(r.uniform(2, 3, 3))),
        (0,),
    ),
    _made("max_unpool2d", (2, 3, 2, 2), _spread(2, 3, 2, 2, step=5), [4, 4]),
    _made(
        "max_unpool3d",
        (2, 3, 2, 2, 2),
        _spread(2, 3, 2, 2, 2, step=9),
        [4, 4, 4],
        [2, 2, 2],
        [0, 0, 0],
    ),
    _image("reflection_pad1d", 1, [1, 2]),
    _image("reflection_pad2d", 2, [1, 2, 2, 1]),
    _image("replication_pad1d", 1, [1, 2]),
    _image("replication_pad2d", 2, [1, 2, 2, 1]),
    _image("replication_pad3d", 3, [1, 2, 2, 1, 1, 1]),
    *(
        Row(
            op,
            lambda r: call(
                r.normal(2, 3, 6, 6), r.uniform(2, 4, 4, 2, low=-0.8), BILINEAR, ZEROS, False
            ),
        )
        for op in ("_grid_sampler_2d_cpu_fallback", "grid_sampler", "grid_sampler_2d")
    ),
    Row(
        "grid_sampler_3d",
        lambda r: call(
            *(r.normal(2, 3, 4, 4, 4), r.uniform(2, 3, 3, 3, 3, low=-0.8)),
            *(BILINEAR, ZEROS, True),
        ),
    ),
)

FFT = (
    *(
        _made(f"fft_{op}", sizes)
        for sizes, ops in {
            (3, 8): "fft ifft ihfft rfft",
            (3, 5): "hfft irfft",
            (3, 4, 8): "fft2 ifft2 rfft2",
            (2, 4, 8): "fftn ifftn rfftn",
            (3, 4, 5): "irfft2",
            (2, 4, 5): "irfftn",
        }.items()
        for op in ops.split()
    ),
    _made("fft_fft", (3, 8), 6, 0, "ortho"),
    Row("stft", lambda r: call(r.normal(2, 32), 8, 4, 8, r.uniform(8), return_complex=True)),
    _made("stft", (32,), 8, onesided=False, return_complex=True),
    Row(
        "stft.center", lambda r: call(r.normal(2, 32), 8, window=r.uniform(8), return_complex=True)
    ),
)

LINALG = (
    _square("_lu_with_info"),
    _square("geqrf", ()),
    _square("inverse"),
    _square("linalg_cond"),
    _square("linalg_cond.p_str", p="nuc"),
    Row("linalg_eig", lambda r: call(r.regular(4)), (0,)),
    _square("linalg_eigvals"),
    _square("linalg_inv"),
    Row("linalg_inv_ex", lambda r: call(r.regular(4)), (0,)),
    _square("linalg_matrix_rank", (), tol=0.1),
    _square("linalg_matrix_rank.atol_rtol_float", (), atol=0.1),
    Row(
        "linalg_matrix_rank.atol_rtol_tensor",
        lambda r: call(r.regular(4), atol=r.uniform(1), rtol=r.uniform(1)),
        (),
    ),
    Row("linalg_matrix_rank.tol_tensor", lambda r: call(r.regular(4), r.uniform(1)), ()),
    _made("linalg_qr", (5, 3)),
    _made("linalg_svd", (5, 3), False),
    _made("linalg_svdvals", (5, 3)),
    _made("pinverse", (5, 3)),
    _made("qr", (5, 3)),
    _made("svd", (5, 3)),
    Row("cholesky", lambda r: call(r.symmetric())),
    Row("cholesky", lambda r: call(r.symmetric(), True)),
    Row("cholesky_inverse", lambda r: call(r.lower(4))),
    Row("cholesky_solve", lambda r: call(r.normal(4, 2), r.lower(4))),
    Row("linalg_cholesky", lambda r: call(r.symmetric())),
    Row("linalg_cholesky_ex", lambda r: call(r.symmetric(), upper=True), (0,)),
    Row("linalg_matrix_sqrth", lambda r: call(r.symmetric())),
    Row("linalg_eigh", lambda r: call(r.symmetric())),
    Row("linalg_eigvalsh", lambda r: call(r.symmetric(), "U")),
    Row("linalg_householder_product", lambda r: call(r.normal(5, 3), r.uniform(3))),
    # Not the default driver: its pivots start from unset memory, so its last bits vary by the run.
    _made("linalg_lstsq", (5, 3), (5, 2), driver="gels", outputs=(0,)),
    Row("linalg_solve", lambda r: call(r.regular(4), r.normal(4, 2))),
    Row("linalg_tensorinv", lambda r: call(r.regular(6).reshape(2, 3, 6))),
    Row("linalg_tensorsolve", lambda r: call(r.regular(6).reshape(2, 3, 6), r.normal(2, 3))),
    Row("lu_solve", lambda r: call(r.normal(4, 2), *torch.linalg.lu_factor(r.regular(4)))),
    Row("orgqr", lambda r: call(r.normal(5, 3), r.uniform(3))),
    Row("ormqr", lambda r: call(r.normal(5, 3), r.uniform(3), r.normal(5, 2))),
    Row("triangular_solve", lambda r: call(r.normal(4, 2), r.lower(4), False), (0,)),
)

ROWS = (
    *LOWER,
    *WIDEST,
    *POINTWISE,
    *REDUCTIONS,
    *NORMS_AND_DISTANCES,
    *LOSSES,
    *IMAGES,
    *FFT,
    *LINALG,
)
