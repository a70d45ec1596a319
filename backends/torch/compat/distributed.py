"""torch.distributed: ops and modules that talk to other ranks, and their process groups."""

import sys
from functools import cache
from typing import Any

import torch
import torch.nn as nn


@cache
def talks(op: torch._ops.OpOverload) -> bool:
    """Return whether an op talks to other ranks. Their namespaces: since torch 2.0 and 2.1."""
    return op.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd")


@cache  # asked of every op that runs
def receives(op: torch._ops.OpOverload) -> bool:
    """Return whether other ranks write an op's results: they are not there when it returns.

    FSDP2 makes the room for an all-gather with an op of its own, `fsdp::all_gather_copy_in`, whose
    results hold what was in that memory before. Since torch 2.3.
    """
    return talks(op) or op.name().startswith("fsdp::all_gather_copy_in")


def will_talk(module: nn.Module) -> bool:
    """Return whether a call of a module, or its backward pass, is sure to talk to other ranks.

    FSDP's classes are public; `require_backward_grad_sync` of DDP is what its `no_sync` sets.
    """
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return torch.is_grad_enabled() and bool(module.require_backward_grad_sync)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # before it is imported, no module is one
    names = ("FullyShardedDataParallel", "FSDPModule")  # the second since torch 2.6
    kinds = tuple(getattr(fsdp, name) for name in names if hasattr(fsdp, name))
    return isinstance(module, kinds)


def default_store() -> Any:
    """Return the key-value store of the default process group. Since torch 1.8."""
    return torch.distributed.distributed_c10d._get_default_store()


def speaking(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy of it on a device that the process group can exchange.

    A group is for the devices in `get_backend_config`, such as "cpu:gloo,cuda:nccl".
    """
    parts = torch.distributed.get_backend_config(group).split(",")
    kinds = [part.split(":")[0] for part in parts if ":" in part]
    if not kinds or tensor.device.type in kinds:
        return tensor
    return tensor.to(kinds[0])


def in_fsdp1(tensor: torch.Tensor) -> bool:
    """Return whether FSDP1 manages a parameter. `_fsdp_flattened`: since torch 2.0."""
    return getattr(tensor, "_fsdp_flattened", False)


def settle_dtypes(module: Any) -> None:
    """Tell an FSDP2 module the dtypes of parameters that were all frozen in its first forward.

    FSDP asks once, and does not cast the gradients of what is unfrozen later. Since torch 2.6.
    """
    state = module._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        if group is not None and group._orig_dtype is None:
            first = group.fsdp_params[0]
            group._orig_dtype, group._reduce_dtype = first.orig_dtype, first.reduce_dtype
