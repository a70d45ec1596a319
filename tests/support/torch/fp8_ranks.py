"""Products in 8 bits on the ranks of FSDP2 and DDP; every rank has the same batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from polymp.torch import autocast
from tests.support.torch.fp8_models import RECIPES, Net, policy
from tests.support.torch.ranks import bits
from tests.support.torch.sharded_models import named, whole

STEPS = 3


def trained(recipe: str, how: str) -> dict[str, Any]:
    """The bits of the weights after some steps."""
    torch.manual_seed(0)
    model: nn.Module = Net()
    if how == "fsdp2":
        fully_shard(model.a)
        fully_shard(model)
    if how == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(STEPS):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        with autocast("cpu", torch.bfloat16, policy=policy(recipe)):
            loss = (model(x).float() ** 2).mean()
        loss.backward()
        optimizer.step()
    return {name: bits(whole(p)) for name, p in named(model).items()}


def main(rank: int, ranks: int, folder: Path) -> dict[Any, Any]:
    return {(recipe, how): trained(recipe, how) for recipe in RECIPES for how in ("fsdp2", "ddp")}
