"""One small model, cut up in every way that torch has, and trained with gradients that are exact.

The loss is linear in the parameters and everything in it is a small whole number, so that gradients
and the steps of SGD are exact in float32, however many ranks add them up and in whatever order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

BATCH = 4


class Toy(nn.Module):
    """Two layers side by side, one of an odd size, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(6, 5)
        self.c = nn.Linear(6, 4, bias=False)
        self.gain = nn.Parameter(torch.empty(3))
        made = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randint(-8, 9, p.shape, generator=made) / 8)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """The mean over the batch of the outputs, weighted with t: float32 []."""
        outputs = (self.a(x), self.b(x), self.c(x), self.gain)
        return sum((y * t[:, : y.shape[-1]]).sum() for y in outputs) / len(x)  # type: ignore[return-value]


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The step's whole batch: float32 [4, 6] and [4, 8]."""
    made = torch.Generator().manual_seed(step)
    x, t = (torch.randint(-4, 5, (BATCH, n), generator=made).float() for n in (6, 8))
    return x, t


class Cut(NamedTuple):
    model: nn.Module  # the module to call
    shares: int  # over how many ranks the batch is divided
    share: int  # this rank's part of it
    full: Callable[[], dict[str, torch.Tensor]]  # every parameter as a whole, by its name in `Toy`


def whole(p: torch.Tensor) -> torch.Tensor:
    """A copy of a parameter, gathered if it is in pieces."""
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by their names without what wrappers add."""
    return {
        n.replace("_fsdp_wrapped_module.", "").removeprefix("module."): p
        for n, p in model.named_parameters()
    }


def _cut(model: nn.Module, *, shared: bool = True) -> Cut:
    shares, share = (dist.get_world_size(), dist.get_rank()) if shared else (1, 0)
    return Cut(model, shares, share, lambda: {n: whole(p) for n, p in named(model).items()})


def ddp() -> Cut:
    return _cut(nn.parallel.DistributedDataParallel(Toy()))


def fsdp2(mesh: DeviceMesh | None = None) -> Cut:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    model = Toy().to(mesh.device_type)
    for module in (model.a, model):
        fully_shard(module, mesh=mesh)
    return _cut(model)


def hsdp() -> Cut:
    return fsdp2(init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "pieces")))


def _tensor_parallel(model: Toy, mesh: DeviceMesh) -> None:
    plan = {
        "a": ColwiseParallel(output_layouts=Replicate()),
        "c": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def tp() -> Cut:
    """Two layers in pieces; the third and the parameter of its own are the same on every rank."""
    model = Toy()
    _tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return _cut(model, shared=False)


def fsdp2_and_tp() -> Cut:
    """Parameters on the 2D mesh, and on its data-parallel axis."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Toy()
    _tensor_parallel(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    return _cut(model)._replace(shares=2, share=mesh["dp"].get_local_rank())


def two_meshes() -> Cut:
    """One layer on one axis of the mesh, another on the other; no mesh of all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Toy()
    fully_shard(model.b, mesh=mesh["dp"])
    _tensor_parallel(model, mesh["tp"])
    return _cut(model, shared=False)


def fsdp1(*, original: bool = False) -> Cut:
    model = FullyShardedDataParallel(
        Toy(), device_id=torch.device("cpu"), use_orig_params=original, sync_module_states=False
    )

    def full() -> dict[str, torch.Tensor]:
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {n: p.detach().clone() for n, p in named(model).items()}

    return _cut(model)._replace(full=full)


def fsdp1_original() -> Cut:
    return fsdp1(original=True)


CUTS: dict[str, Callable[[], Cut]] = {
    f.__name__: f for f in (ddp, fsdp2, tp, fsdp1, fsdp1_original, hsdp, fsdp2_and_tp, two_meshes)
}
FOR_FOUR = ("hsdp", "fsdp2_and_tp", "two_meshes")  # the others are for any number of ranks


def cuts(ranks: int) -> Iterator[str]:
    """The names of those that so many ranks can have."""
    return (name for name in CUTS if ranks == 4 or name not in FOR_FOUR)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Groups for an optimizer, one for each mesh: torch's fused steps cannot mix them."""
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for p in model.parameters():
        by_mesh.setdefault(getattr(p, "device_mesh", None), []).append(p)
    return [{"params": params} for params in by_mesh.values()]
