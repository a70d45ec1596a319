"""One rank of some: what it sends of a sharded model, and the loss and gradients of its batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from polymp.torch import explain
from polymp.torch.fsdp import fully_shard
from tests.support.torch.fsdp_models import by_torch, data, gradients, made, shard, step


class Sent(TorchDispatchMode):
    """Notes the dtypes of what ranks send, as (collective, dtype)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, str]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            of = next(t for t in torch.utils._pytree.tree_leaves(args) if hasattr(t, "dtype"))
            self.found.add((func.overloadpacket.__name__, str(of.dtype).removeprefix("torch.")))
        return func(*args, **(kwargs or {}))


def main(rank: int, ranks: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Notes of a model sharded by polymp's `fully_shard`, and by torch's with polymp's policy."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    ways: dict[str, Callable[..., Any]] = {"polymp": fully_shard, "torch": by_torch}
    return {name: noted(how, rank, ranks) for name, how in ways.items()}


def noted(how: Callable[..., Any], rank: int, ranks: int) -> dict[str, Any]:
    model, mine = shard(made(), "amp", how), data()[rank::ranks]
    loss = step(model, mine, "amp")
    dist.all_reduce(loss)
    notes = {
        "loss": (loss / ranks).numpy(),
        "gradients": [g.numpy() for g in gradients(model)],
    }
    with Sent() as sent:
        step(model, mine, "amp")
    with explain(model=model) as report:
        step(model, mine, "amp")
    casts = [
        (c.op, c.module, c.direction, c.inputs, c.outputs, c.casts)
        for c in report
        if c.op in ("all_gather", "reduce_scatter")
    ]
    return notes | {"sent": sent.found, "casts": casts}
