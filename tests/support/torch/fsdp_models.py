"""A model that FSDP2 shards for a policy, by polymp's `fully_shard` or torch's, and its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_s_fully_shard

import polymp
from polymp.torch import autocast
from polymp.torch.fsdp import fully_shard, mixed_precision

BF16, FP32 = torch.bfloat16, torch.float32
LOW = MixedPrecisionPolicy(BF16, FP32, None, cast_forward_inputs=False)
FULL = MixedPrecisionPolicy(None, FP32, None, cast_forward_inputs=False)
HEAD_FULL = polymp.policy("amp").override(scopes={"head": {"all": "fp32"}})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def made(tied: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(tied)


def data() -> torch.Tensor:
    return torch.randint(0, 11, (8, 6), generator=torch.Generator().manual_seed(1))


def shard(model: Model, policy: Any, how: Callable[..., Any] = fully_shard) -> Model:
    for i, block in enumerate(model.blocks):
        how(block, policy, path=f"blocks.{i}")
    return how(model, policy)


def by_torch(module: nn.Module, policy: Any, path: str = "") -> Any:
    return torch_s_fully_shard(module, mp_policy=mixed_precision(policy, BF16, path))


def loss_of(call: Callable[..., torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    logits = call(ids[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def step(model: nn.Module, ids: torch.Tensor, policy: Any) -> torch.Tensor:
    """Loss of one forward pass, with gradients left on the model."""
    with autocast("cpu", BF16, policy=policy):
        loss = loss_of(model, ids)
    loss.backward()
    return loss.detach()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    grads = [p.grad for p in model.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
