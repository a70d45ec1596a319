"""One rank of two: Lightning's strategies with polymp's plugin, and one overflow on one rank."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

warnings.simplefilter("ignore")  # Lightning warns of much, and this process is no test

from lightning.pytorch import plugins, strategies  # noqa: E402

from polymp.lightning import Precision  # noqa: E402
from polymp.torch import GradScaler  # noqa: E402
from tests.support.torch.lightning_models import (  # noqa: E402
    Regression,
    StartedRanks,
    batches,
    fit,
)

OVERFLOW = 3  # the batch in which the gradients of rank 1 overflow


class Sharded(Regression):
    """FSDP2 shards it in the hook that Lightning has for that."""

    def configure_model(self) -> None:
        fully_shard(self.net[0])
        fully_shard(self.net[3])
        fully_shard(self.net)


class FSDPOnCPU(strategies.FSDPStrategy):
    """Lightning refuses its FSDP strategy on a CPU, but not a subclass, which names the device."""

    def _setup_model(self, model: Any) -> Any:
        return FullyShardedDataParallel(
            model,
            mixed_precision=self.mixed_precision_config,
            device_id=torch.device("cpu"),
            **self.kwargs,
        )


def strategy(name: str) -> Any:
    if name == "ddp":
        return strategies.DDPStrategy(process_group_backend="gloo")
    if name == "fsdp":
        return FSDPOnCPU(process_group_backend="gloo", auto_wrap_policy={torch.nn.Linear})
    return strategies.ModelParallelStrategy(2, 1, process_group_backend="gloo")


def theirs(name: str) -> Any:
    if name != "fsdp":
        return plugins.MixedPrecision("bf16-mixed", "cpu")
    plugin: Any = plugins.FSDPPrecision("bf16-mixed")
    plugin.forward_context = lambda: torch.autocast("cpu", torch.bfloat16)  # its own is for CUDA
    return plugin


def train(name: str, plugin: Any, rank: int, ranks: int, clip: float | None) -> dict[str, Any]:
    data = batches(rank=rank, ranks=ranks)
    if rank == 1 and plugin.precision == "16-mixed":
        data[OVERFLOW][1][0] = 1e6
    model = fit(
        [plugin, StartedRanks(rank, ranks)], Sharded() if name == "fsdp2" else Regression(),
        data=data, devices=ranks, strategy=strategy(name), gradient_clip_val=clip,
        use_distributed_sampler=False,
    )  # fmt: skip
    metrics = {k: float(v) for k, v in model.trainer.callback_metrics.items()}
    return {"losses": model.losses, "metrics": metrics}


def main(rank: int, ranks: int, folder: Path) -> dict[tuple[str, ...], Any]:
    notes: dict[tuple[str, ...], Any] = {}
    for name in ("ddp", "fsdp", "fsdp2"):
        for precision in ("bf16-mixed", "16-mixed"):
            half = precision == "16-mixed"
            for policy in (None, "lean"):
                scaler = GradScaler("cpu", init_scale=2.0**10) if half else None
                plugin = Precision(precision, policy, scaler=scaler)
                notes[name, precision, str(policy)] = train(name, plugin, rank, ranks, 0.1)
        clip = None if name == "fsdp" else 0.1  # Lightning's plugin for FSDP refuses to clip
        for who, plain in ("ours", Precision("bf16-mixed")), ("theirs", theirs(name)):
            notes[name, who] = train(name, plain, rank, ranks, clip)
    return notes
