"""Two language models: transformers' Gemma 2, tiny, and one as flax's of LM1B, of torch's layers.

Gemma writes its norms and its softmax out, in float32. The other adds sines to its embeddings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, LENGTH, WIDTH, HEADS, HIDDEN = 256, 32, 64, 4, 256


def gemma() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=2, head_dim=WIDTH // HEADS,
        attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    model: nn.Module = Gemma2ForCausalLM(config)
    return model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.heads(self.norm(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(future, -torch.inf)
        mixed = torch.softmax(scores, -1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(F.relu(self.up(self.feed_norm(x))))


class LM1B(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.register_buffer("places", torch.sin(torch.arange(LENGTH * WIDTH).view(LENGTH, -1)))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        for block in self.blocks:
            x = block(x, future)
        scores: Tensor = self.head(self.norm(x))
        return scores


KINDS: dict[str, Callable[[], nn.Module]] = {"gemma": gemma, "lm1b": LM1B}


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    """The loss of the words themselves."""
    out: Any = model(ids)
    scores = getattr(out, "logits", out)
    return F.cross_entropy(scores.reshape(-1, WORDS), ids.reshape(-1))
