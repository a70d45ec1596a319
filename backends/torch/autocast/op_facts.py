"""Facts about torch's kernels by the names of their ops: what they compute in, read and write.

Facts about ops that hold in every framework are in `policies/vocabulary.toml`.
"""

from collections.abc import Sequence
from typing import Any

import torch

from polymp.rules.vocabulary import vocabulary

# Given low inputs, these compute in float32 and round once, on every device. So for rule fp32_keep
# they take the inputs as they are, and nothing in float32 is made or saved for backward; without a
# row they do what fp32_keep asks for. Other ops are cast before and after.
# Source: acc_type and opmath_type in torch v2.13 aten/src/ATen/native (SoftMax, layer_norm,
# group_norm, SumKernel, ReduceOps, Normalization, LinearAlgebra: vector_norm).
ACCUMULATES = frozenset(
    """
    batch_norm cumsum exp2 group_norm instance_norm layer_norm linalg_vector_norm logaddexp
    logaddexp2 logcumsumexp mean mean.dim
    native_batch_norm native_group_norm native_layer_norm norm.Scalar norm.ScalarOpt_dim prod
    prod.dim_int rms_norm softmax.int std std.correction std.dim sum sum.dim_IntList var
    var.correction var.dim
    """.split()
)

# Ops that cannot have a kernel of ours: nn.Parameter turns the result of `detach` into itself,
# and the result of a Python kernel is a Python object already.
UNTOUCHED = frozenset({"detach"})


# Products that may have nothing to add up. Those of linear layers, which are called most, stay with
# torch's own kernels.
PRODUCTS = frozenset("addr bmm dot einsum inner kron matmul mm mv outer tensordot vdot".split())

# Ops that add up what they write into a tensor they are given, with the overload whose rows hold
# for them, too. Other forms with out= round once by themselves.
ADD_IN_PLACE = {
    "index_add_": "index_add",
    "index_add.out": "index_add",
    "index_put_": "index_put",
    "index_reduce_": "index_reduce",
    "index_reduce.out": "index_reduce",
    "put_": "put",
    "scatter_.reduce": "scatter.reduce",
    "scatter_add_": "scatter_add",
    "scatter_reduce_.two": "scatter_reduce.two",
}

# All ops that may add up what they write; scatter_add is none here, for its kernel rounds once.
WRITES = frozenset(ADD_IN_PLACE).union(ADD_IN_PLACE.values()) - {"scatter_add"}

# Kernels that on CPUs round each step of a low result, and add up its gradients in its dtype. Under
# every policy but torch's own, they compute in float32 there and round once.
STEPS_ON_CPU = frozenset(
    "grid_sampler grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback".split()
)

# These add up only if they are called with accumulate=True, their fourth argument.
_ADD_IF_TOLD = frozenset({"index_put", "index_put_", "put", "put_"})

# Ops that read at given places, whose backward pass on CPUs adds up in the dtype of what is read.
# Under every policy but torch's own, they have rule fp32_keep where there is no row for them.
READS = frozenset(
    "embedding embedding_bag embedding_bag.padding_idx index.Tensor index_select take".split()
)

# Views whose schema does not say so.
SILENT_VIEWS = frozenset({"_unsafe_view", "detach_"})

# Ops that make numbers without reading any, or read only the shape or the kind of a tensor.
FACTORIES = frozenset(
    "empty_like ones_like zeros_like full_like rand_like randn_like new_empty new_zeros new_ones "
    "new_full new_empty_strided bernoulli_ normal_ uniform_ zero_ fill_ lift_fresh "
    "_local_scalar_dense is_same_size _has_same_storage_numel".split()
)

# Kernels that copy numbers as they are; in a product, they are no result of it.
COPIES = frozenset({"clone", "copy_", "_reshape_copy", "_to_copy"})

# Kernels that are given a number, such as an epsilon or a bound, which keeps their result away from
# 0, or from 0 and 1: if its dtype makes the number just that, a later quotient or log may fail.
KEEPS = dict.fromkeys("add add_ sub sub_ rsub".split(), frozenset({0.0})) | dict.fromkeys(
    "clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ maximum minimum fmax fmin hardtanh "
    "threshold where masked_fill masked_fill_ index_fill index_fill_ index_put index_put_ scatter "
    "scatter_ fill fill_ full full_like new_full constant_pad_nd nan_to_num nan_to_num_".split(),
    frozenset({0.0, 1.0, -1.0}),
)

# Kernels that add up: called with the magnitudes of their operands, they return what is added up.
SUMS = frozenset(
    "mm bmm mv dot addmm addmv baddbmm convolution sum mean cumsum linalg_vecdot".split()
)

# In-place ops with which parameters are written by hand: updates, copies, initialisation, clipping.
# Activations (relu_, silu_, ...) are not among them; they keep their compiled fallthrough. Nor is
# `clamp_min_`, which relu_'s kernel calls through the dispatcher.
WRITERS = (
    "add_ sub_ mul_ div_ pow_ neg_ abs_ sqrt_ square_ exp_ sign_ round_ floor_ trunc_ lerp_ "
    "addcmul_ addcdiv_ addmm_ addmv_ addr_ baddbmm_ clamp_ clamp_max_ copy_ fill_ zero_ "
    "set_ put_ nan_to_num_ normal_ uniform_ bernoulli_ exponential_ random_ masked_fill_ "
    "masked_scatter_ index_add_ index_copy_ index_fill_ index_put_ scatter_ scatter_add_ tril_ "
    "triu_ fill_diagonal_ renorm_ "
    "_foreach_add_ _foreach_sub_ _foreach_mul_ _foreach_div_ _foreach_lerp_ _foreach_addcmul_ "
    "_foreach_addcdiv_ _foreach_copy_ _foreach_zero_ _foreach_neg_ _foreach_pow_ _foreach_sqrt_ "
    "_foreach_clamp_min_ _foreach_clamp_max_ _foreach_maximum_ _foreach_minimum_ "
    "_fused_sgd_ _fused_adam_ _fused_adamw_ _fused_adagrad_"
).split()


def in_float32(overload: str) -> bool:
    """Return whether the op's own kernel computes in float32 on low inputs, and rounds once."""
    kind = vocabulary().op(vocabulary().of_aten(overload)).kind
    return overload in ACCUMULATES or kind in ("activation", "special")  # element by element


# These of linear algebra are put together from ops that have low kernels.
_HAVE_LOW = frozenset({"linalg_matrix_exp", "trace"})

# Of the other classes, these lack a kernel for one low dtype or both, on CPUs.
_NO_LOW_ON_CPU = frozenset("avg_pool3d ctc_loss nanquantile polar quantile view_as_complex".split())


def has_low(overload: str, device: str, dtype: str) -> bool:
    """Return False where torch has no kernel of the op for a low dtype on the device."""
    # Linear algebra has none anywhere, Fourier transforms only in float16 on GPUs. Source: torch
    # v2.13 aten/src/ATen/native/BatchLinearAlgebra.cpp; SpectralOps.cpp, `promote_type_fft`.
    op = vocabulary().ops.get(vocabulary().of_aten(overload))
    if op is None or overload in _HAVE_LOW:
        return True
    if op.kind == "fft":
        return device in ("cuda", "xpu") and dtype == "float16"
    return op.kind != "linear_algebra" and (device != "cpu" or op.name not in _NO_LOW_ON_CPU)


def accumulates(name: str, args: Sequence[Any]) -> bool:
    """Return whether a call of one of `WRITES` adds up the numbers that meet in one place."""
    return name not in _ADD_IF_TOLD or bool(len(args) > 3 and args[3])


def reads_wide(name: str, args: Sequence[Any]) -> bool:
    """Return whether an op that reads is to read from float32, on a CPU: its gradients add up."""
    of_rows = name == "index_select" and args[0].dim() > 1  # torch adds whole rows up in float32
    return torch.is_grad_enabled() and args[0].requires_grad and not of_rows


def adds_up(name: str, args: Sequence[Any]) -> bool:
    """Return False for one of `PRODUCTS` whose contracted dimensions, if any, have size 1."""
    if name == "einsum":
        terms, arrow, kept = args[0].replace(" ", "").partition("->")
        kept = kept if arrow else ["...", *(c for c in terms if terms.count(c) == 1)]
        for term, t in zip(terms.split(","), args[1], strict=False):
            first, _, last = term.partition("...")
            ends = (first, t.shape), (last[::-1], t.shape[::-1])
            if any(n > 1 for end in ends for c, n in zip(*end, strict=False) if c not in kept):
                return True
        return "..." in terms and "..." not in kept
    if name == "tensordot":
        pairs = zip(args[:2], args[2:4], strict=True)
        return any(n > 1 for t, dims in pairs for n in map(t.size, dims))
    if name in ("addr", "kron", "outer"):
        return False
    # A number times a tensor is an inner product, too.
    return args[0].is_nested or (all(t.dim() for t in args[:2]) and args[0].size(-1) > 1)
