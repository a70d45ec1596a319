"""The ranks that must find the same as this one in gradients: process groups, and the exchange.

A gradient in pieces on several ranks can be Inf on one of them only. Parameters that are DTensors
(FSDP2, tensor parallel) have a mesh; those of FSDP1 belong to all ranks; DDP adds gradients up, so
that Inf reaches every rank by itself.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from polymp.backends.torch.compat import distributed, dtensor


class Circle(NamedTuple):
    """The ranks that a finding is exchanged with.

    Attributes:
        groups: process groups, in the order of their exchanges, which every rank has to keep.
        everybody: True if all ranks of the job know the same afterwards.
    """

    groups: tuple[Any, ...]
    everybody: bool


ALONE = Circle((), True)


def has_peers() -> bool:
    """Return whether this process is one of several that can talk to each other."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def circle(params: Iterable[torch.Tensor], given: Any = None) -> Circle:
    """Return the groups over which a finding about parameters has to be exchanged.

    They are the same on every rank that holds the same parameters, with gradients or without. A
    group of all ranks replaces the others. The group that the caller gives comes last: ranks may
    hold other parameters, on other meshes, and every rank of a mesh is then done with the mesh
    before it waits for ranks outside of it.
    """
    if not has_peers():
        return ALONE
    world = dist.get_world_size()
    if given is not None and dist.get_world_size(given) == world:
        return Circle((given,), True)
    params = list(params)
    meshes = dtensor.meshes(params)
    found = [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)]
    if given is None and any(map(distributed.in_fsdp1, params)):
        found.append(dist.group.WORLD)
    sizes = {group: dist.get_world_size(group) for group in found if group is not given}
    for group, size in sizes.items():
        if size == world:
            return Circle((group,), True)
    over = [group for group, size in sizes.items() if size > 1]
    if given is not None:
        over.append(given)
    return Circle(tuple(over), any(mesh.size() == world for mesh in meshes))


def agree(findings: list[torch.Tensor], groups: Iterable[Any]) -> None:
    """Make every finding the largest one of any rank, in place; one exchange for each group."""
    together = torch.stack(findings)
    for group in groups:
        there = distributed.speaking(group, together)
        dist.all_reduce(there, op=dist.ReduceOp.MAX, group=group)
        together = there.to(together.device)
    for finding, largest in zip(findings, together.unbind(), strict=True):
        finding.copy_(largest)


def check_group(group: object) -> None:
    """Raise if findings cannot be exchanged over the group."""
    if group is None:
        return
    if dist.is_available():
        if group is dist.GroupMember.NON_GROUP_MEMBER or (
            isinstance(group, dist.ProcessGroup) and dist.get_rank(group) < 0
        ):
            raise ValueError(
                f"process_group={group!r} is one that this process is not in. Give every rank a "
                "group that it belongs to, such as torch.distributed.group.WORLD."
            )
        if isinstance(group, dist.ProcessGroup):
            return
    raise TypeError(
        f"process_group must be a torch.distributed.ProcessGroup or None, got {group!r}."
    )
