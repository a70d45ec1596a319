"""Regions: nested, disabled, left by exceptions, in every grad mode, of two devices at once.

The expectation is torch.autocast's own outcome where torch is right, and written out where it is
not. Every test must leave torch's autocast state as it found it. Regions nested at random, with
writes, recursion, generators and errors, are in `test_random_programs`.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from polymp import policy
from polymp.torch import autocast
from tests.support.torch.compiled import mm
from tests.support.torch.each_op import inside

pytestmark = pytest.mark.usefixtures("left_as_found")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


ERRORS = (ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration)


@pytest.mark.parametrize("kind", ERRORS)
def test_an_exception_passes_and_restores_every_depth(kind, x, w) -> None:
    error, seen = kind("on purpose"), []

    def fail() -> None:
        with autocast("cpu", dtype=BF16):
            try:
                with autocast("cpu", dtype=FP16), autocast("cpu", enabled=False):
                    raise error
            finally:
                seen.append(torch.mm(x, w).dtype)

    with pytest.raises(kind) as caught:
        fail()
    assert caught.value is error
    assert seen == [BF16]
    assert torch.mm(x, w).dtype is FP32


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_region_entered_in_one_grad_mode_and_used_in_another(mode, x, w) -> None:
    with mode():
        region = autocast("cpu", dtype=FP16)
        with region:
            y = torch.mm(x, w)
            with torch.inference_mode(False), torch.enable_grad():
                z = torch.mm(x, w)
    assert torch.equal(y, mm(x, w, FP16))
    assert not y.requires_grad
    (gradient,) = torch.autograd.grad(z.float().sum(), w)
    assert torch.equal(gradient, torch.autograd.grad(mm(x, w, FP16).float().sum(), w)[0])


def two_devices() -> dict[str, torch.dtype]:
    """Dtypes of a product on each device, of softmax (a rule on CUDA only), of a mix of both."""
    on_cpu, on_cuda = torch.empty(4, 4), torch.empty(4, 4, device="cuda")
    return {
        "cpu mm": torch.mm(on_cpu, on_cpu).dtype,
        "cuda mm": torch.mm(on_cuda, on_cuda).dtype,
        "cpu softmax": torch.softmax(on_cpu.half(), -1).dtype,
        "cuda softmax": torch.softmax(on_cuda.half(), -1).dtype,
        "both": torch.mul(on_cuda, torch.tensor(2.0)).dtype,
    }


OUTSIDE = {"cpu mm": FP32, "cuda mm": FP32, "cpu softmax": FP16, "cuda softmax": FP16, "both": FP32}
ONLY_CPU = OUTSIDE | {"cpu mm": BF16}
ONLY_CUDA = OUTSIDE | {"cuda mm": FP16, "cuda softmax": FP32}
AT_ONCE = ONLY_CUDA | {"cpu mm": BF16}


def test_cpu_and_cuda_regions_at_once() -> None:
    with FakeTensorMode():
        with inside("cuda", "float16"):
            assert two_devices() == ONLY_CUDA
            with autocast("cpu", dtype=BF16):
                assert two_devices() == AT_ONCE
                with autocast("cpu", enabled=False):
                    assert two_devices() == ONLY_CUDA
                with inside("cuda", enabled=False):
                    assert two_devices() == ONLY_CPU
                with inside("cuda", "bfloat16"), autocast("cpu", dtype=FP16):
                    swapped = {"cpu mm": FP16, "cuda mm": BF16, "cuda softmax": FP32}
                    assert two_devices() == OUTSIDE | swapped
                assert two_devices() == AT_ONCE
            assert two_devices() == ONLY_CUDA
        assert two_devices() == OUTSIDE


def test_policies_of_two_devices_at_once() -> None:
    on_cuda = policy({"name": "cuda", "rules": {"mm": "fp32"}})
    on_cpu = policy({"name": "cpu", "rules": {"softmax": "fp32"}})
    with FakeTensorMode(), inside("cuda", "float16", policy=on_cuda):
        assert two_devices() == OUTSIDE
        with autocast("cpu", dtype=BF16, policy=on_cpu):
            assert two_devices() == OUTSIDE | {"cpu softmax": FP32}
            with inside("cuda", "float16"):
                assert two_devices() == ONLY_CUDA | {"cpu softmax": FP32}
        assert two_devices() == OUTSIDE


ACTIVATIONS = (
    "relu_ relu6_ hardtanh_ silu_ gelu_ elu_ leaky_relu_ hardswish_ hardsigmoid_ sigmoid_ tanh_ "
    "threshold_ celu_ selu_ mish_"
)


@pytest.mark.parametrize("name", ACTIVATIONS.split())
def test_activations_in_place_run_no_kernel_of_python(name: str, x: torch.Tensor) -> None:
    """Also if they are made of other ops, as relu_ is of clamp_min_."""
    op = getattr(torch.ops.aten, name)
    more = (0.0, 0.0) if name == "threshold_" else ()
    codes = []

    def watch(frame: Any, event: str, _: object) -> None:
        if event == "call":
            codes.append(frame.f_code.co_filename)

    with torch.no_grad(), autocast("cpu"):
        into = x.clone()
        sys.setprofile(watch)
        try:
            op(into, *more)
            into += 1  # which may be how a weight is written
        finally:
            sys.setprofile(None)
    assert sum(file.endswith("region_casts.py") for file in codes) == 1  # of the addition
