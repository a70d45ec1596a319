"""torch.distributed: ops and modules that talk to other ranks, process groups, DTensors."""

import sys
from functools import cache
from typing import Any

import torch
import torch.nn as nn


def ranks() -> int:
    """Return how many ranks there are: 1 without a process group."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if there else 1


@cache
def talks(op: torch._ops.OpOverload) -> bool:
    """Return whether an op talks to other ranks."""
    return op.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd")


@cache  # asked of every op that runs
def receives(op: torch._ops.OpOverload) -> bool:
    """Return whether other ranks write an op's results: they are not there when it returns."""
    # FSDP2 makes the room for an all-gather with an op of its own, `fsdp::all_gather_copy_in`,
    # whose results hold what was in that memory before.
    return talks(op) or op.name().startswith("fsdp::all_gather_copy_in")


def will_talk(module: nn.Module) -> bool:
    """Return whether a call of a module, or its backward pass, is sure to talk to other ranks."""
    # FSDP's classes are public; `require_backward_grad_sync` of DDP is what its `no_sync` sets.
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return torch.is_grad_enabled() and bool(module.require_backward_grad_sync)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # before it is imported, no module is one
    kinds = () if fsdp is None else (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    return isinstance(module, kinds)


def default_store() -> Any:
    """Return the key-value store of the default process group."""
    return torch.distributed.distributed_c10d._get_default_store()


def speaking(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy of it on a device that the process group can exchange."""
    # A group is for the devices in `get_backend_config`, such as "cpu:gloo,cuda:nccl".
    parts = torch.distributed.get_backend_config(group).split(",")
    kinds = [part.split(":")[0] for part in parts if ":" in part]
    if not kinds or tensor.device.type in kinds:
        return tensor
    return tensor.to(kinds[0])


def in_fsdp1(tensor: torch.Tensor) -> bool:
    """Return whether FSDP1 manages a parameter."""
    return getattr(tensor, "_fsdp_flattened", False)


def settle_dtypes(module: Any) -> None:
    """Tell an FSDP2 module the dtypes of parameters that were all frozen in its first forward."""
    # FSDP asks once, and does not cast the gradients of what is unfrozen later.
    state = module._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        if group is not None and group._orig_dtype is None:
            first = group.fsdp_params[0]
            group._orig_dtype, group._reduce_dtype = first.orig_dtype, first.reduce_dtype


# DTensors: the part that this process holds and its place, sums not added up yet, meshes.


def _dtensor() -> type | None:
    """Return DTensor's class; None before it is imported, when no tensor can be one."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def _is_dtensor(tensor: object) -> bool:
    kind = _dtensor()
    return kind is not None and isinstance(tensor, kind)


def local(tensor: Any) -> torch.Tensor:
    """Return this process's part of a DTensor, in the same memory; other tensors as they are."""
    if not _is_dtensor(tensor):
        return tensor  # type: ignore[no-any-return]
    with torch.no_grad():  # otherwise it would be a new node in the graph
        return tensor.to_local()  # type: ignore[no-any-return]


def added_up(tensor: Any) -> Any:
    """Return a DTensor of which every rank holds the sum, where ranks hold terms of it."""
    # So it is for some gradients of replicated DTensors, on every rank of the mesh alike. Talks to
    # the ranks then; other tensors are returned as they are.
    if not _is_dtensor(tensor) or not any(p.is_partial() for p in tensor.placements):
        return tensor
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    return tensor.redistribute(placements=placements)


def meshes(tensors: list[torch.Tensor]) -> list[Any]:
    """Return the meshes of DTensors that this process is in, each once, in order of first use."""
    # Equal meshes count as one: they have the same process groups.
    kind = _dtensor()
    if kind is None or not any(issubclass(t, kind) for t in set(map(type, tensors))):
        return []
    dtensors: Any = (t for t in tensors if isinstance(t, kind))
    found = {id(t.device_mesh): t.device_mesh for t in dtensors}  # to compare meshes takes longer
    return [m for m in dict.fromkeys(found.values()) if m.get_coordinate() is not None]


def offset(whole: Any) -> tuple[int, ...]:
    """Return the place of this process's part in the whole tensor, along each dimension."""
    if not _is_dtensor(whole):
        return tuple([0] * whole.dim())
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    found = compute_local_shape_and_global_offset(whole.shape, whole.device_mesh, whole.placements)
    return tuple(found[1])


def like(part: torch.Tensor, whole: Any) -> torch.Tensor:
    """Return this process's part of a tensor as a DTensor that is laid out as another tensor."""
    if not _is_dtensor(whole):
        return part
    return type(whole).from_local(  # type: ignore[no-any-return]
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape,
        stride=whole.stride(),
    )  # fmt: skip
