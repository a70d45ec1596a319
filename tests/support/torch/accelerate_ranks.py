"""One rank of two: accelerate's DDP with polymp's scaler, and one overflow on one rank."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

warnings.simplefilter("ignore")  # accelerate's dependencies warn of much, and this is no test

from accelerate import Accelerator  # noqa: E402

from polymp.accelerate import use  # noqa: E402
from polymp.torch import GradScaler  # noqa: E402

OVERFLOW = 2  # the batch in which the gradients of rank 1 overflow


def main(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    # The process group is there already, so that nothing is at this address.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    accelerator = use(
        Accelerator(mixed_precision="fp16", cpu=True),
        "lean",
        scaler=GradScaler("cpu", init_scale=2.0**10),
    )
    torch.manual_seed(rank)  # DDP sends rank 0's parameters to all
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    model, optimizer = accelerator.prepare(net, optimizer)
    made = torch.Generator().manual_seed(10 + rank)
    notes: dict[str, Any] = {"kind": type(model).__name__, "skipped": [], "norms": []}
    for at in range(6):
        x, y = torch.randn(4, 8, generator=made), torch.randn(4, 2, generator=made)
        if (at, rank) == (OVERFLOW, 1):
            y[0] = 1e6
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        notes["norms"].append(accelerator.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
        notes["skipped"].append(accelerator.optimizer_step_was_skipped)
    notes["scale"] = accelerator.scaler.get_scale()
    notes["weights"] = net[0].weight.detach().numpy().tobytes()
    return notes
