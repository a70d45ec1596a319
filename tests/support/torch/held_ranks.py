"""One rank of two: models that torch cuts up, trained with held casts and without.

The notes say what every step gave. A block is entered before the first step, or once weights are
gathered, which is when a cut model shows whole weights.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from polymp.backends.torch.autocast import held_casts
from polymp.torch import autocast, hold_casts
from tests.support.torch.ranks import bits

STEPS = 3
MODULE: Any = sys.modules[hold_casts.__module__]
CUTS = ("ddp", "fsdp2", "fsdp2 kept", "fsdp1", "fsdp1 original")


class Net(nn.Module):
    """Two layers, the second one used twice, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)
        self.register_buffer("scale", torch.full((16, 16), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.b(torch.tanh(self.a(x))) @ self.scale)  # type: ignore[no-any-return]


def cut(how: str) -> nn.Module:
    model = Net()
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if how.startswith("fsdp1"):
        return FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=how.endswith("original")
        )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model.a, model):
        fully_shard(module, mesh=mesh, reshard_after_forward="kept" not in how)
    return model


def train(how: str, *, held: bool, late: bool) -> list[Any]:
    """A few steps of two microbatches: losses, gradients and parameters of this rank, as bits."""
    model = cut(how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    notes: list[Any] = []
    made = torch.Generator().manual_seed(dist.get_rank())
    scale: Any = model.get_buffer(next(n for n, _ in model.named_buffers()))
    with contextlib.ExitStack() as stack:
        for at in range(STEPS):
            if late and hasattr(model, "unshard"):
                model.unshard()
            if held and (at == 0 or late):
                stack.enter_context(hold_casts(model))
            for _ in range(2):
                with autocast("cpu"):
                    loss = model(torch.randn(8, 16, generator=made)).float().square().mean()
                loss.backward()
                notes.append(bits(loss))
            with torch.no_grad(), autocast("cpu"):
                notes.append(bits(model(torch.ones(2, 16)).float()))
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            notes.extend(bits(local(g)) for g in grads)
            with torch.no_grad():
                scale.mul_(dist.get_rank() + 1)  # DDP sends that of the first rank to all
            optimizer.step()
            optimizer.zero_grad()
            notes.extend(bits(local(p)) for p in model.parameters())
    return notes


def local(t: torch.Tensor) -> torch.Tensor:
    return (t.to_local() if isinstance(t, DTensor) else t).clone()  # numpy pins what it is given


def sends_unseen() -> bool:
    """Whether DDP writes buffers without a new version, as torch does since 2.12 or 2.13."""
    model = cut("ddp")
    (scale,) = model.buffers()
    before = scale._version
    model(torch.ones(2, 16))
    return scale._version == before


def main(rank: int, ranks: int, folder: Path) -> Any:
    held_casts.SMALL = 0
    notes: dict[Any, Any] = {
        (how, late, held): train(how, held=held, late=late)
        for how in CUTS
        for late in (False, True)
        for held in (False, True)
    }
    unseen = MODULE._written_unseen
    MODULE._written_unseen = lambda model: set()
    notes["fault"] = train("ddp", held=True, late=False)
    notes["sends unseen"] = sends_unseen()
    MODULE._written_unseen = unseen
    return notes
