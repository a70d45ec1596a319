"""DTensors: the part that this process holds and its place, sums not added up yet, meshes."""

import sys
from typing import Any

import torch


def _dtensor() -> type | None:
    """Return DTensor's class; None before it is imported, when no tensor can be one."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a DTensor, in the same memory; other tensors as they are."""
    kind = _dtensor()
    if kind is None or not isinstance(tensor, kind):
        return tensor
    if not torch.is_grad_enabled():
        return tensor.to_local()  # type: ignore[attr-defined,no-any-return]
    with torch.no_grad():  # otherwise it would be a new node in the graph
        return tensor.to_local()  # type: ignore[attr-defined,no-any-return]


def is_partial(tensor: torch.Tensor) -> bool:
    """Return whether the ranks hold terms of a sum, as for some gradients of replicated DTensors.

    The answer is the same on every rank of the mesh.
    """
    kind = _dtensor()
    if kind is None or not isinstance(tensor, kind):
        return False
    return any(p.is_partial() for p in tensor.placements)  # type: ignore[attr-defined]


def added_up(tensor: Any) -> Any:
    """Add up every sum of a DTensor over the ranks, so that each holds it. Talks to them."""
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    return tensor.redistribute(placements=placements)


def meshes(tensors: list[torch.Tensor]) -> list[Any]:
    """Return the meshes of DTensors that this process is in, each once, in the order of first use.

    Equal meshes count as one: they have the same process groups.
    """
    kind = _dtensor()
    if kind is None or not any(issubclass(t, kind) for t in set(map(type, tensors))):
        return []
    dtensors: Any = (t for t in tensors if isinstance(t, kind))
    found = {id(t.device_mesh): t.device_mesh for t in dtensors}  # to compare meshes takes longer
    return [m for m in dict.fromkeys(found.values()) if m.get_coordinate() is not None]


def offset(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the place of this process's part in the whole tensor, along each dimension.

    `compute_local_shape_and_global_offset` of torch.distributed.tensor._utils, since torch 2.5.
    """
    kind = _dtensor()
    if kind is None or not isinstance(tensor, kind):
        return (0,) * tensor.dim()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole: Any = tensor
    found = compute_local_shape_and_global_offset(whole.shape, whole.device_mesh, whole.placements)
    return tuple(found[1])


def like(part: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor as a DTensor that is laid out as another tensor."""
    kind: Any = _dtensor()
    if kind is None or not isinstance(tensor, kind):
        return part
    whole: Any = tensor
    return kind.from_local(  # type: ignore[no-any-return]
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape,
        stride=whole.stride(),
    )  # fmt: skip
