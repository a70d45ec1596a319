"""CUDA regions on fake tensors, which need no GPU: what PyTorch's tests check besides lists.

`test_ops` has torch's lists. Nothing here needs a gradient: autograd on such tensors would abort
the process.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from polymp.torch import autocast
from tests.support.torch.outcomes import fake_mode, on_cuda, torch_cuda

pytestmark = pytest.mark.usefixtures("left_as_found", "cuda_there")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOW = (FP16, BF16)


@pytest.fixture
def cuda_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU a CUDA region turns itself off; here it believes that there is one."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def ones(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    with fake_mode():
        return torch.ones(shape, dtype=dtype, device="cuda")


IGNORING = {
    "lower": lambda x: torch.mm(x, x),
    "fp32": lambda x: torch.pow(x, 2.0),
    "fp32 by dtype argument": torch.sum,
    "fp32 by appended dtype": torch.norm,
}
IGNORED = (torch.float64, torch.int32, torch.complex64)


@pytest.mark.parametrize("dtype", IGNORED, ids=short)
@pytest.mark.parametrize("rule", IGNORING)
def test_other_types_are_left_alone(rule: str, dtype: torch.dtype) -> None:
    x = ones(8, 8, dtype=dtype)
    in_region = on_cuda(lambda: IGNORING[rule](x), lambda: autocast("cuda"))
    outside = on_cuda(lambda: IGNORING[rule](x), nullcontext)
    in_torch = on_cuda(lambda: IGNORING[rule](x), lambda: torch_cuda(FP16))
    assert in_region == in_torch
    assert (in_region.outputs, in_region.error) == (outside.outputs, outside.error)


def test_a_float64_keeps_its_type_beside_the_low_one() -> None:
    wide, low = ones(8, 8, dtype=torch.float64), ones(8, 8, dtype=FP16)
    ours = on_cuda(lambda: torch.mm(wide, low), lambda: autocast("cuda"))
    assert ours == on_cuda(lambda: torch.mm(wide, low), lambda: torch_cuda(FP16))
    assert ours.calls == ("aten::mm(float64, float16)",)  # which fails on tensors with data
