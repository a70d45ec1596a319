"""Tools for the tests of torch.compile: a backend that counts, a model, and its exact results.

The backend is aot_eager: dynamo and AOT autograd as in earnest, the kernels of eager torch. So
results and gradients must be eager's, bit for bit, and each compilation is counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

from polymp import policy
from polymp.torch import autocast, custom_bwd, custom_fwd

KEEPS_RELU = {"name": "keeps_relu", "rules": {"linear": "lower", "relu": "fp32"}}
KEEPS_LINEAR = {"name": "keeps_linear", "rules": {"linear": "fp32", "relu": "lower"}}
AS_OBJECT = policy(KEEPS_LINEAR)


class Count:
    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.graphs += 1
        return aot_eager(module, inputs)


class Net(nn.Module):
    """Two layers, the same ones every time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class Decorated(Net):
    """The same in a region of its own."""

    @autocast("cpu", dtype=torch.float16)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def product(**given: Any) -> Any:
    """Return a product with a gradient by hand; `given` goes to the decorator of its forward."""

    class Product(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu", **given)
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            return torch.mm(a, b)

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            a, b = ctx.saved_tensors
            return torch.mm(g, b.mT), torch.mm(a.mT, g)

    return Product.apply


def mm(x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute `torch.mm(x, w)` with the casts of a region of that low dtype, by hand."""
    return torch.mm(x.to(dtype), w.to(dtype))


def short(arguments: dict[str, Any]) -> str:
    dtype = str(arguments.get("dtype", "inherit")).removeprefix("torch.")
    return dtype if arguments.get("enabled", True) else f"off({dtype})"


def one_region(net: nn.Module, x: torch.Tensor) -> Any:
    with autocast("cpu", dtype=torch.float16):
        y = net(x)
    return y, net(x)


def dtypes(tensors: Any) -> list[torch.dtype]:
    return [t.dtype for t in tensors]


def gradients(y: torch.Tensor, net: nn.Module) -> list[torch.Tensor]:
    """Gradients of one result; of several, eager torch would add some up in the low dtype."""
    loss = y.float().square().sum()
    found = torch.autograd.grad(
        loss, list(net.parameters()), retain_graph=True, materialize_grads=True
    )
    return list(found)


def assert_same(compiled: Any, eager: Any, net: nn.Module | None = None) -> None:
    """The same dtypes and bits; of the gradients too, if the net is given."""
    assert dtypes(compiled) == dtypes(eager)
    assert all(map(torch.equal, compiled, eager))
    if net is not None:
        for ours, theirs in zip(compiled, eager, strict=True):
            assert all(map(torch.equal, gradients(ours, net), gradients(theirs, net)))
