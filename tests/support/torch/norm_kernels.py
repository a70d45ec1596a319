"""The kernels that norms run under a policy, with the dtypes they read, on fake CUDA tensors.

`main` prints a line of JSON: by norm, dtype, policy and weights, the kernels of a forward pass. It
has a process of its own, as `saved_dtypes` has. A build of torch for CUDA has a kernel of
`_fused_rms_norm`; in one for CPUs this registers a stand-in for it, so that torch takes the same
way as there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.torch import saved_dtypes

SHAPE = (4, 6, 32)  # of the activation [batch, channels, width]
POLICIES = ("torch.autocast", "torch-cuda", "amp", "lean")
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


def of(norm: Norm, low: torch.dtype, policy: str, weights: torch.dtype) -> Any:
    x = torch.empty(SHAPE, dtype=low, device="cuda", requires_grad=True)

    def weight(axis: int) -> torch.Tensor:
        return torch.empty(SHAPE[axis], dtype=weights, device="cuda", requires_grad=True)

    with saved_dtypes.region("cuda", low, policy), Kernels() as kernels:
        norm(x, weight)
    return kernels.found


def stand_in(x: torch.Tensor, shape: Any, weight: torch.Tensor | None, eps: Any) -> Any:
    """The shapes and dtypes that torch's kernel returns."""
    rows = x.new_empty((*x.shape[: -len(shape)], *(1 for _ in shape)), dtype=torch.float32)
    return torch.empty_like(x), rows


def main() -> None:
    saved_dtypes.cuda_guard()
    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm", stand_in, "CUDA")
    found = {}
    with FakeTensorMode():
        for name, norm in NORMS.items():
            for low in (torch.bfloat16, torch.float16):
                for policy in POLICIES:
                    for weights in (torch.float32, low):
                        key = f"{name} {str(low)[6:]} {policy} {str(weights)[6:]}"
                        found[key] = of(norm, low, policy, weights)
    json.dump(found, sys.stdout)
