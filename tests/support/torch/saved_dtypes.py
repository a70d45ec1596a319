"""The values that autograd saves for backward, by dtype, on fake CUDA tensors.

`main` prints as JSON what the example's model and its block save in regions of torch.autocast and
of polymp's policies, in a process of its own, where no other test has put kernels on an op.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from polymp.torch import autocast
from tests.support.examples import modules

BF16, FP16 = torch.bfloat16, torch.float16
POLICIES = ("torch.autocast", "torch-cuda", "amp", "lean")
# Less than this is a statistic: a mean or a sum of exponentials for each row.
ACTIVATION = 4096


class Saved(NamedTuple):
    """A storage that is saved for backward."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int


def saved(forward: Callable[[], Any], parameters: list[torch.Tensor]) -> list[Saved]:
    """Return the storages that a forward pass saves, each once, without parameters and copies.

    A copy of a parameter is a tensor of its shape, or of its transpose's, in another dtype.
    """
    own = {p.untyped_storage()._cdata for p in parameters}
    weights = {tuple(shape) for p in parameters for shape in (p.shape, p.t().shape)}
    found: dict[int, Saved] = {}
    alive = []

    def hold(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        alive.append(storage)  # or another would come to lie where it was
        if storage._cdata not in own and tuple(tensor.shape) not in weights:
            dtype = str(tensor.dtype).removeprefix("torch.")
            found.setdefault(storage._cdata, Saved(dtype, tuple(tensor.shape), storage.nbytes()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        forward()
    return list(found.values())


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> Any:
    """Attention as models write it out: a softmax over masked scores, between two products."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill(future, float("-inf")), -1) @ v


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> Any:
    """Run the kernel that scaled_dot_product_attention chooses on a GPU."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


def region(device: str, low: torch.dtype, policy: str) -> AbstractContextManager[Any]:
    if policy == "torch.autocast":
        return torch.autocast(device, low)
    return autocast(device, low, policy=policy)


def attention(module: Any, how: Callable[..., Any] | None) -> AbstractContextManager[Any]:
    """The example's model with another attention."""
    name = "scaled_dot_product_attention"
    return mock.patch.object(module.F, name, how or getattr(module.F, name))


def on_device(module: nn.Module, device: str) -> nn.Module:
    """The module with parameters that lie on the device and have no values."""
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None:
                part._parameters[name] = nn.Parameter(torch.empty(p.shape, device=device))
    return module


def sizes(example: Any) -> Any:
    """The arguments of the example for its small model."""
    return example.job.arguments(example.job.parser("train_torch.py", "", example.job.SMALL), [])


def of_model(example: Any, device: str, low: torch.dtype, policy: str) -> list[Saved]:
    """Return the values that the example's model and loss save."""
    size = sizes(example)
    model = example.Transformer(100, size.context, size.width, size.layers, size.heads)
    tokens = torch.zeros(size.batch, size.context + 1, dtype=torch.int64, device=device)
    with region(device, low, policy):
        parameters = list(on_device(model, device).parameters())
        return saved(lambda: example.loss_on(model, tokens), parameters)


def of_block(example: Any, device: str, low: torch.dtype, policy: str) -> list[Saved]:
    """Return the values that a block of it saves if its input has a low dtype."""
    size = sizes(example)
    block = on_device(example.Block(size.width, size.heads), device)
    shape = size.batch, size.context, size.width
    x = torch.empty(shape, dtype=low, device=device, requires_grad=True)
    with region(device, low, policy):
        return saved(lambda: block(x), list(block.parameters()))


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


def main() -> None:
    found = {}
    ways = itertools.product(
        {"model": of_model, "block": of_block}.items(), (written_out, fused), (BF16, FP16), POLICIES
    )
    with modules("job", "train_torch") as parts, cuda():
        for (what, measure), how, low, policy in ways:
            with attention(parts.train_torch, how):
                key = f"{what} {how.__name__} {str(low)[6:]} {policy}"
                found[key] = measure(parts.train_torch, "cuda", low, policy)
    json.dump(found, sys.stdout)
