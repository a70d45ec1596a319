"""One rank of two: accelerate's DDP and FSDP with polymp's scaler and policy, and one overflow."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

warnings.simplefilter("ignore")  # accelerate's dependencies warn of much, and this is no test

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin  # noqa: E402

from polymp.accelerate import use  # noqa: E402
from polymp.torch import GradScaler  # noqa: E402

OVERFLOW = 2  # the batch in which the gradients of rank 1 overflow


class Net(nn.Module):
    """A small network whose linear layers FSDP wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.norm(self.up(x)))
        return out


def make(strategy: str, mode: str) -> Any:
    """An `Accelerator`; accelerate has FSDP for accelerators only, so here its state is told."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(mixed_precision=mode, cpu=True)
    if strategy != "ddp":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=int(strategy[-1]),
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Linear"],
            cpu_ram_efficient_loading=False,
            use_orig_params=True if strategy == "fsdp1" else None,
        )
        plugin.set_mixed_precision(mode)
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = DistributedType.FSDP
    return accelerator


def train(accelerator: Any, rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    model, optimizer = accelerator.prepare(net, optimizer)
    made = torch.Generator().manual_seed(10 + rank)
    notes: dict[str, Any] = {"losses": [], "skipped": [], "norms": []}
    for at in range(6):
        x, y = torch.randn(4, 8, generator=made), torch.randn(4, 2, generator=made)
        if accelerator.scaler is not None and (at, rank) == (OVERFLOW, 1):
            y[0] = 1e6
        loss = nn.functional.mse_loss(model(x).float(), y)
        accelerator.backward(loss)
        notes["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
        notes["losses"].append(loss.item())
        notes["skipped"].append(accelerator.optimizer_step_was_skipped)
    return notes


def main(rank: int, ranks: int, folder: Path) -> dict[tuple[str, ...], Any]:
    # The process group is there already, so that nothing is at this address.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    notes: dict[tuple[str, ...], Any] = {}
    for strategy in ("ddp", "fsdp1", "fsdp2"):
        notes[strategy, "theirs"] = train(make(strategy, "bf16"), rank)
        for policy in (None, "lean"):
            accelerator = use(make(strategy, "bf16"), policy)
            notes[strategy, str(policy)] = train(accelerator, rank)
        scaler = GradScaler("cpu", init_scale=2.0**10)
        accelerator = use(make(strategy, "fp16"), "lean", scaler=scaler)
        notes[strategy, "fp16"] = train(accelerator, rank)
        notes[strategy, "scale"] = scaler.get_scale()
    return notes
