"""Models and trainers for `polymp.lightning`: small, on the CPU, without files or bars."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what Lightning imports
    import lightning
    from lightning.fabric.plugins.environments import ClusterEnvironment

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=4),
}


def make_net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))


def batches(
    rows: int = 8, rank: int = 0, ranks: int = 1
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """16 batches, of all their rows or of this rank's."""
    made = torch.Generator().manual_seed(0)
    inputs = torch.randn(16, rows, 16, generator=made)
    targets = inputs @ torch.randn(16, 4, generator=made) / 4
    mine = slice(rank * rows // ranks, (rank + 1) * rows // ranks)
    return [(x[mine], y[mine]) for x, y in zip(inputs, targets, strict=True)]


class Regression(lightning.LightningModule):
    """A small network with mean squared error; remembers losses, and the norms that hooks saw."""

    def __init__(self, optimizer: str = "sgd", manual: bool = False) -> None:
        super().__init__()
        self.net = make_net()
        self.optimizer = optimizer
        self.automatic_optimization = not manual
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        self.dtypes.add(out.dtype)
        return out

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.dtypes.add(self(batch[0]).dtype)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.norms.append(nn.utils.get_total_norm(grads).item())

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


def fit(plugin: Any, model: Any = None, epochs: int = 1, **settings: Any) -> Any:
    """Train a model, `Regression` by default; returns it, with its `trainer`."""
    model = Regression() if model is None else model
    checkpoint = settings.pop("ckpt_path", None)
    data = DataLoader(settings.pop("data", batches()), batch_size=None)  # type: ignore[arg-type]
    trainer = lightning.Trainer(
        plugins=plugin if isinstance(plugin, list) else [plugin],
        max_epochs=epochs,
        **{**QUIET, **settings},
    )
    trainer.fit(model, data, ckpt_path=checkpoint)
    return model


class StartedRanks(ClusterEnvironment):
    """A rank of a process group that is initialised already."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    creates_processes_externally = True
    main_address = "localhost"
    main_port = 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._ranks

    def set_world_size(self, size: int) -> None: ...

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None: ...

    def local_rank(self) -> int:
        return self._rank

    def node_rank(self) -> int:
        return 0
