"""Norms that add up in float32 anyway: under `lean` their kernels read and write the low dtype.

On CUDA the tensors are fake, and the kernels are those that torch would launch. amp casts before
layer_norm, rms_norm and group_norm, and so does torch.autocast.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polymp.torch import autocast
from tests.support import forks
from tests.support.decisions import recording

POLICIES = ("torch.autocast", "torch-cuda", "amp", "lean")
SHAPE = (4, 6, 32)  # of the activation [batch, channels, width]
Norm = Callable[[torch.Tensor, Callable[[int], torch.Tensor]], torch.Tensor]
NORMS: dict[str, Norm] = {
    "layer_norm": lambda x, w: F.layer_norm(x, SHAPE[2:], w(2), w(2)),
    "rms_norm": lambda x, w: F.rms_norm(x, SHAPE[2:], w(2)),
    "group_norm": lambda x, w: F.group_norm(x, 2, w(1), w(1)),
    "batch_norm": lambda x, w: F.batch_norm(x, None, None, w(1), w(1), training=True),
    "instance_norm": lambda x, w: F.instance_norm(x),
}


class Kernels(TorchDispatchMode):
    """Notes each kernel that reads a float tensor, with the dtypes and shapes of these."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[tuple[str, list[int]]], list[str]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Fake tensors would take it apart, though on CUDA it is one kernel.
        run = stand_in if func.overloadpacket is torch.ops.aten._fused_rms_norm else func
        result = run(*args, **(kwargs or {}))
        reads, makes = (
            [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.is_floating_point()]
            for tree in ((args, kwargs), result)
        )
        if reads and makes and func.namespace == "aten":
            name = func.overloadpacket.__name__
            read = [(str(t.dtype)[6:], list(t.shape)) for t in reads]
            self.found.append((name, read, [str(t.dtype)[6:] for t in makes]))
        return result


def region(device: str, low: torch.dtype, policy: str) -> AbstractContextManager[Any]:
    if policy == "torch.autocast":
        return torch.autocast(device, low)
    return autocast(device, low, policy=policy)


@contextmanager
def cuda() -> Iterator[None]:
    """Let autograd, and regions of torch's own, have CUDA tensors without CUDA.

    A torch without CUDA has no guard for its tensors, which autograd needs. So it gets the guard of
    meta tensors, as a CUDA build has on a machine without a GPU (`_ensureCUDADeviceGuardSet`). The
    numbers are those of `c10::DeviceType`. This process does nothing else afterwards.
    """
    common = torch.cuda.amp.common
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    name = "_ZN3c104impl26device_guard_impl_registryE"
    guards = (ctypes.c_void_p * 15).in_dll(library, name)
    guards[1] = guards[1] or guards[14]
    with FakeTensorMode():
        with mock.patch.object(common, "amp_definitely_not_available", return_value=False):
            with mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True):
                yield


def of(norm: Norm, low: torch.dtype, policy: str, weights: torch.dtype) -> Any:
    x = torch.empty(SHAPE, dtype=low, device="cuda", requires_grad=True)

    def weight(axis: int) -> torch.Tensor:
        return torch.empty(SHAPE[axis], dtype=weights, device="cuda", requires_grad=True)

    with region("cuda", low, policy), Kernels() as kernels:
        norm(x, weight)
    return kernels.found


def stand_in(x: torch.Tensor, shape: Any, weight: torch.Tensor | None, eps: Any) -> Any:
    rows = x.new_empty((*x.shape[: -len(shape)], *(1 for _ in shape)), dtype=torch.float32)
    return torch.empty_like(x), rows


def main() -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm", stand_in, "CUDA")
    found = {}
    with cuda():
        for name, norm in NORMS.items():
            for low in (torch.bfloat16, torch.float16):
                for policy in POLICIES:
                    for weights in (torch.float32, low):
                        key = f"{name} {str(low)[6:]} {policy} {str(weights)[6:]}"
                        found[key] = of(norm, low, policy, weights)
    json.dump(found, sys.stdout)


LOW = ("bfloat16", "float16")
FLOAT32 = ("layer_norm", "group_norm")  # in torch's list in every version that is supported
KERNEL = {"rms_norm": "_fused_rms_norm", "instance_norm": "native_batch_norm"}


@pytest.fixture(scope="module")
def kernels() -> Any:
    program = "from tests.torch.autocast.test_norm_kernels import main; main()"
    return json.loads(forks.program(program, strict=True))


def activation_casts(found: Any) -> list[Any]:
    """The casts of what is as large as the activation."""
    return [k for k in found if k[0] == "_to_copy" and k[1][0][1] == list(SHAPE)]


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("norm", NORMS)
def test_lean_casts_no_activation_before_or_after_a_norm(kernels: Any, norm: str, low: str) -> None:
    for weights in ("float32", low):
        found = kernels[f"{norm} {low} lean {weights}"]
        assert activation_casts(found) == []
        (ran,) = (k for k in found if k[0] == KERNEL.get(norm, f"native_{norm}"))
        assert (ran[1][0][0], ran[2][0]) == (low, low)
        # Only batch_norm's kernel takes float32 weights beside a low input on CUDA.
        casts = [k for k in found if k[0] == "_to_copy"]
        assert bool(casts) == (weights == "float32" and norm not in ("batch_norm", "instance_norm"))


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("norm", NORMS)
def test_torchs_table_runs_the_kernels_of_torch_autocast(kernels: Any, norm: str, low: str) -> None:
    for weights in ("float32", low):
        theirs = kernels[f"{norm} {low} torch.autocast {weights}"]
        assert kernels[f"{norm} {low} torch-cuda {weights}"] == theirs
        if norm in FLOAT32:  # so that the test above can fail
            assert len(activation_casts(theirs)) == 1
            assert activation_casts(kernels[f"{norm} {low} amp {weights}"]) != []


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("norm", NORMS)
def test_a_record_changes_no_kernel_of_a_norm_on_a_cpu(norm: str) -> None:
    """The CPU's kernels take float32 weights beside a low input; a record lends every op ours."""
    x, low = torch.ones(SHAPE, dtype=torch.bfloat16), torch.bfloat16
    found = []
    for record in (nullcontext(), recording()):
        with record, autocast("cpu", low, policy="lean"), Kernels() as kernels:
            NORMS[norm](x, lambda axis: torch.ones(SHAPE[axis]))
        found.append(kernels.found)
    assert found[0] == found[1]
    assert [k for k in found[0] if k[0] == "_to_copy" and k[1][0][1] != list(SHAPE)] == []


@pytest.mark.parametrize("low", LOW)
def test_gradients_of_weights_are_added_up_in_float32_on_a_cpu(low: str) -> None:
    """torch's backward kernel of layer_norm adds them up in the dtype of the input there."""
    dtype, rows = getattr(torch, low), 16384
    torch.manual_seed(0)
    x, back = torch.randn(rows, 8).to(dtype), (torch.randn(rows, 8) + 0.5).to(dtype)

    def gradients(x: torch.Tensor, policy: str | None) -> list[torch.Tensor]:
        weights = [torch.ones(8, dtype=torch.float32, requires_grad=True) for _ in range(2)]
        if x.dtype is torch.float64:
            weights = [w.detach().double().requires_grad_() for w in weights]
        with autocast("cpu", dtype, policy=policy or "lean", enabled=policy is not None):
            y = torch.nn.functional.layer_norm(x, (8,), *weights)
        return [g.double() for g in torch.autograd.grad(y, weights, back.to(y.dtype))]

    def off(found: list[torch.Tensor]) -> float:
        return max(float((g - e).abs().max() / e.abs().max()) for g, e in zip(found, exact))  # noqa: B905

    exact = gradients(x.double(), None)
    without, lean = off(gradients(x, None)), off(gradients(x, "lean"))
    print(f"\n{low}: weights' gradients off by {without:.2g} without a region, {lean:.2g} in lean")
    assert without > 0.01  # else torch has changed, and needs no kernel of ours
    assert lean < 1e-4


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch.func.jvp
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_on_a_cpu_differentiates_in_every_way(affine: bool) -> None:
    """Forward mode, vmap, second derivatives, and compiled: as without a region, up to rounding."""
    torch.manual_seed(0)
    x = torch.randn(6, 8).bfloat16()
    weights = [torch.randn(8) for _ in range(2)] if affine else []

    def norm(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        with autocast("cpu", torch.bfloat16, policy="lean"):
            return torch.nn.functional.layer_norm(x, (8,), *weights)

    def exact(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (8,), *weights)

    given, wide = (x, *weights), (x.float(), *weights)
    tangents = [torch.randn_like(t) for t in given]
    low = torch.func.jvp(norm, given, tuple(tangents))
    high = torch.func.jvp(exact, wide, tuple(t.float() for t in tangents))
    for one, other in zip(low, high, strict=True):
        assert one.dtype is torch.bfloat16
        torch.testing.assert_close(one.float(), other, rtol=0.01, atol=0.02)
    for transform in (
        lambda f: torch.func.grad(lambda *a: f(*a).float().pow(3).sum()),
        lambda f: torch.func.grad(lambda *a: torch.func.grad(
            lambda *b: f(*b).float().pow(3).sum())(*a).float().square().sum()),
        lambda f: torch.func.vmap(f, in_dims=(0, *(None for _ in weights))),
    ):  # fmt: skip
        one, other = transform(norm)(*given), transform(exact)(*wide)
        torch.testing.assert_close(
            one.float(), other, rtol=0.1, atol=0.05 * float(other.abs().max())
        )
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangents[0])
        assert torch.autograd.forward_ad.unpack_dual(norm(dual, *weights)).tangent is not None
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    for t in given:
        t.requires_grad_()
    results = [
        torch.autograd.grad(f(*given).float().square().sum(), given) for f in (norm, compiled)
    ]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


# With float32 weights on a CPU, torch says once that it cannot use its fused kernel of RMSNorm.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("norm", list(NORMS)[:3])
def test_values_under_lean_are_off_by_a_few_roundings(norm: str, low: str) -> None:
    """Behind a product, which rounds its operands and its result."""
    dice = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 32, generator=dice) for n in (24, 32))
    weights = [1 + 0.1 * torch.randn(n, generator=dice) for n in SHAPE]

    def run(dtype: torch.dtype) -> torch.Tensor:
        y = (x.to(dtype) @ w.to(dtype)).view(SHAPE)
        return NORMS[norm](y, lambda axis: weights[axis].to(dtype))

    with autocast("cpu", getattr(torch, low), policy="lean"):
        lean = run(torch.float32)
    exact = run(torch.float64)
    assert lean.dtype is getattr(torch, low)
    error = float((lean.double() - exact).abs().max() / exact.abs().max())
    print(f"\n{norm} in {low} under lean: off by {error:.2g}")
    assert error <= torch.finfo(lean.dtype).eps
