"""Gradients of one optimizer: multiply them by the inverse scale, find Inf and NaN, count values.

A finding is float32 [], one for each device: 0 if all gradients there are finite. The host does not
wait for it.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from polymp.backends.torch.compat import distributed, optimizers
from polymp.scaling import SMALLEST_NORMAL, Gradient

Findings = dict[torch.device, torch.Tensor]


class OnDevices:
    """Copies of a scalar tensor on other devices, made when needed; with `copy` on its own, too."""

    def __init__(self, master: torch.Tensor, *, copy: bool = True) -> None:
        self.master = master
        self.copy = copy  # True where the copies will be written
        self.copies: dict[torch.device, torch.Tensor] = {}

    def get(self, device: torch.device) -> torch.Tensor:
        """Return the copy on a device."""
        if device not in self.copies:
            self.copies[device] = moved(self.master, device, copy=self.copy)
        return self.copies[device]


def moved(tensor: torch.Tensor, device: torch.device, *, copy: bool = False) -> torch.Tensor:
    """Move a tensor to a device without waiting, except to the CPU."""
    # There torch would return before the values have arrived.
    return tensor.to(device, non_blocking=device.type != "cpu", copy=copy)


def largest(findings: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Return the largest of findings on one device, float32 []; None if there are none."""
    most = None
    for finding in findings:
        if most is None:
            most = finding
        elif finding is not most:
            most = torch.maximum(most, finding)
    return most


def unscale_gradients(
    optimizer: torch.optim.Optimizer,
    inverse: torch.Tensor,
    found: torch.Tensor,
    float16: bool,
) -> Findings:
    """Multiply every gradient by `inverse`, in place; find Inf and NaN in what it was before."""
    inverses, founds = OnDevices(inverse, copy=False), OnDevices(found)

    def each(alike: list[list[torch.Tensor]]) -> None:
        for grads in alike:
            device = grads[0].device
            # On CUDA the kernel has no bfloat16 (pytorch/pytorch#127176).
            if device.type == "cpu" or grads[0].dtype is not torch.bfloat16:
                torch._amp_foreach_non_finite_check_and_unscale_(
                    grads, founds.get(device), inverses.get(device)
                )
            else:
                _unscale_each(grads, founds.get(device), inverses.get(device))

    with torch.no_grad():
        grads = gradients(optimizer)
        dtypes = {g.dtype for g in grads}
        if not float16 and torch.float16 in dtypes:
            raise ValueError("Attempting to unscale FP16 gradients.")
        if not grads:
            return {}
        if _alike(grads, dtypes):
            try:
                each([grads])
            except NotImplementedError:  # one of them is sparse, and nothing has changed yet
                each(_by_kind(optimizer))
        else:
            each(_by_kind(optimizer))
    return founds.copies


def add_overflows(found: Findings, optimizer: torch.optim.Optimizer, divisor: torch.Tensor) -> None:
    """Add to findings whether quotients of gradients by `divisor` are finite; none is written."""
    # The largest magnitude is divided, as torch's fused optimizers divide: in float32, or in
    # float64 where the gradient is; on the CPU the last few elements in the gradient's dtype
    # (torch 2.13, aten/src/ATen/native/cpu/FusedSGDKernel.cpp and its like).
    divisors = OnDevices(divisor, copy=False)
    with torch.no_grad():
        for grads in _by_kind(optimizer):
            grads = [g for g in grads if g.numel()]  # there is no largest of none
            if grads:
                device = grads[0].device
                largest = torch.stack(torch._foreach_norm(grads, float("inf"))).amax()
                wide = largest.dtype
                if device.type != "cpu":
                    wide = torch.promote_types(wide, torch.float32)
                quotient = largest.to(wide) / divisors.get(device).to(wide)
                bad = quotient.isfinite().logical_not().float()
                found[device] = torch.maximum(found[device], bad) if device in found else bad


def gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the gradients of the optimizer's parameters that have one."""
    # Over `optimizers.parameters` it would be one pass more: a twentieth of the time of `unscale_`.
    grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    return [g for g in grads if g is not None]


def _alike(grads: list[torch.Tensor], dtypes: set[torch.dtype]) -> bool:
    """Return whether one call of the kernel can take all gradients, unless one is sparse."""
    # The kernel checks that before it writes, and raises: to check it here would cost as much as
    # gathering the gradients. An index stands for a device: a process has the CPU, -1, and one
    # kind of accelerator, if this build of torch has any.
    if len(dtypes) > 1 or grads[0].is_complex() or set(map(type, grads)) != {torch.Tensor}:
        return False
    if torch.accelerator.current_accelerator() is None:
        return True
    return len(set(map(torch.Tensor.get_device, grads))) == 1


def _by_kind(optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
    """Return the values of all gradients, in lists of one device and dtype."""
    kinds: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for param in optimizers.parameters(optimizer):
        if param.grad is not None:
            values = _values(param)
            kinds[values.device, values.dtype].append(values)
    return list(kinds.values())


def _unscale_each(grads: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
    for grad in grads:
        found.copy_(torch.maximum(found, (~grad.isfinite()).any()))
        grad.mul_(inverse)


def _values(param: torch.Tensor) -> torch.Tensor:
    """Return the values of a parameter's gradient as a dense real tensor that can be written."""
    grad = param.grad
    assert grad is not None
    if (total := distributed.added_up(grad)) is not grad:  # the step needs the sums anyway
        grad = param.grad = total
    grad = distributed.local(grad)
    if grad.is_sparse:
        # Entries that share an index add up, and float16 can overflow there: only the sums can
        # be judged.
        if grad.dtype is torch.float16 and not grad.is_coalesced():
            grad = param.grad = grad.coalesce()
        grad = grad._values()
    elif grad.layout is not torch.strided:  # compressed rows, columns and blocks of them
        grad = grad.values()
    if grad.is_complex():
        if grad.is_conj():
            grad = param.grad = grad.resolve_conj()
        grad = torch.view_as_real(grad)
    return grad


# Rows of a scaler's report: counts of the values of each gradient.


def rows(optimizer: torch.optim.Optimizer, factor: torch.Tensor) -> list[Gradient]:
    """Count the values of each gradient of the optimizer. Waits for the device, once."""
    heads, counts = [], []
    for param, name in optimizers.names(optimizer).items():
        if param.grad is not None:
            heads.append((name, tuple(distributed.local(param).shape)))
            counted = _counts(distributed.local(param.grad), factor)
            counts.append(moved(counted, factor.device))
    if not counts:
        return []
    table = torch.stack(counts).tolist()
    return [Gradient(*head, *numbers) for head, numbers in zip(heads, table, strict=True)]


@torch.no_grad()
def _counts(grad: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Count Inf, NaN, zero and subnormal values; int64 [4]."""
    absent = 0
    if grad.layout is not torch.strided:  # absent elements are zeros
        values = grad.coalesce().values() if grad.layout is torch.sparse_coo else grad.values()
        absent, grad = grad.numel() - values.numel(), values
    size = grad.abs()  # of a complex number, its distance from 0
    wide = size if size.dtype is torch.float64 else size.float()
    tiny = wide * moved(factor, wide.device) < SMALLEST_NORMAL
    zero = wide == 0
    kinds = (wide.isinf(), wide.isnan(), zero, tiny & ~zero)
    return torch.stack([k.sum() for k in kinds]) + torch.tensor(
        [0, 0, absent, 0], device=wide.device
    )


# The ranks that must find the same as this one in gradients: process groups, and the exchange.
#
# A gradient in pieces on several ranks can be Inf on one of them only. Parameters that are
# DTensors (FSDP2, tensor parallel) have a mesh; those of FSDP1 belong to all ranks; DDP adds
# gradients up, so that Inf reaches every rank by itself.


class RankGroups(NamedTuple):
    """The ranks that a finding is exchanged with."""

    groups: tuple[Any, ...]  # in the order of their exchanges, which every rank has to keep
    everybody: bool  # whether all ranks of the job know the same afterwards


def rank_groups(optimizer: torch.optim.Optimizer, given: Any = None) -> RankGroups:
    """Return the groups over which a finding about an optimizer's gradients is exchanged."""
    # They are the same on every rank that holds the same parameters, with gradients or without. A
    # group of all ranks replaces the others. The one that the caller gives comes last: ranks may
    # hold other parameters, on other meshes, and every rank of a mesh is then done with the mesh
    # before it waits for ranks outside of it.
    if (world := distributed.ranks()) == 1:
        return RankGroups((), True)
    if given is not None and dist.get_world_size(given) == world:
        return RankGroups((given,), True)
    params = optimizers.parameters(optimizer)
    meshes = distributed.meshes(params)
    found = [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)]
    if given is None and any(map(distributed.in_fsdp1, params)):
        found.append(dist.group.WORLD)
    sizes = {group: dist.get_world_size(group) for group in found if group is not given}
    for group, size in sizes.items():
        if size == world:
            return RankGroups((group,), True)
    over = [group for group, size in sizes.items() if size > 1]
    if given is not None:
        over.append(given)
    return RankGroups(tuple(over), any(mesh.size() == world for mesh in meshes))


def agreed(
    found: Findings, loss: torch.Tensor | None, scale: torch.Tensor, groups: Iterable[Any]
) -> tuple[Findings, torch.Tensor | None]:
    """Return findings and the note of a loss as all ranks of the groups have them together."""
    # A rank may have no loss, or no gradient, where others have: stages of a pipeline.
    together = torch.zeros_like(scale)
    for finding in found.values():
        together.copy_(torch.maximum(together, finding.to(scale.device)))
    bad = torch.zeros_like(scale) if loss is None else (loss != 0).float()
    any_gradient = torch.full_like(scale, bool(found))
    findings = torch.stack([together, bad, any_gradient])
    for group in groups:
        there = distributed.speaking(group, findings)
        dist.all_reduce(there, op=dist.ReduceOp.MAX, group=group)
        findings = there.to(findings.device)
    together, bad, any_gradient = findings.unbind()
    if not found and any_gradient.item():
        found = {scale.device: together}
    for finding in found.values():
        finding.copy_(together)
    return found, None if loss is None else bad


def check_group(group: object) -> None:
    """Raise if findings cannot be exchanged over the group."""
    if group is None:
        return
    known = dist.is_available() and isinstance(group, dist.ProcessGroup)
    if not known or dist.get_rank(cast("dist.ProcessGroup", group)) < 0:
        raise TypeError(
            "process_group must be None or a torch.distributed.ProcessGroup that this process is "
            f"in, such as torch.distributed.group.WORLD, got {group!r}."
        )
