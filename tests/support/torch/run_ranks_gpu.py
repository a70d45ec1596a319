"""One rank on a GPU of its own, over NCCL: the history of `run_ranks` with FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from polymp.torch import GradScaler
from tests.support.torch.run_ranks import SETTINGS, WAYS, Run, go
from tests.support.torch.sharded_models import fsdp2


def main(rank: int, ranks: int, folder: Path) -> dict[Any, Any]:
    torch.cuda.set_device(rank)
    mesh = init_device_mesh("cuda", (ranks,))
    notes: dict[Any, Any] = {}
    for name in ("sgd", "sgd, device", "adamw, fused"):
        way = WAYS[name]
        notes["fsdp2", name] = go(Run(fsdp2(mesh), way, GradScaler(**SETTINGS, **way.options)))
    return notes
