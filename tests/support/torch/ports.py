"""The models of `tests.support.ports` in torch, and a step of their training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import ports
from tests.support.ports import (
    CHANNELS,
    CLASSES,
    HEADS,
    HIDDEN,
    LENGTH,
    RATE,
    SIDE,
    WIDTH,
    WORDS,
    Bert,
    Block,
    Config,
    ResNet,
)


class Layer(nn.Module):
    """A layer of BERT: the norms are behind what they norm."""

    def __init__(self, eps: float, tanh: bool) -> None:
        super().__init__()
        for name in ("query", "key", "value", "out"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH, eps), nn.LayerNorm(WIDTH, eps)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.approximate = "tanh" if tanh else "none"

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        q, k, v = (split(getattr(self, name)(x)) for name in ("query", "key", "value"))
        mixed = F.scaled_dot_product_attention(q, k, v, seen[:, None, None, :])
        x = self.attention_norm(x + self.out(mixed.transpose(1, 2).flatten(2)))
        return self.norm(x + self.down(F.gelu(self.up(x), approximate=self.approximate)))


class BertModel(nn.Module):
    def __init__(self, config: Bert) -> None:
        super().__init__()
        self.start, self.pooled = config.start, config.pooled
        self.words, self.kinds = nn.Embedding(WORDS, WIDTH), nn.Embedding(2, WIDTH)
        self.positions = nn.Embedding(LENGTH + 1, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, 1e-12)
        self.layers = nn.ModuleList([Layer(1e-12, False), Layer(config.eps, config.tanh)])
        self.pooler, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, seen: Tensor) -> Tensor:
        places = torch.arange(LENGTH) + self.start
        x = self.words(tokens) + self.kinds(torch.zeros_like(tokens)) + self.positions(places)
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, seen)
        return self.head(torch.tanh(self.pooler(x[:, self.pooled])))


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, config: ResNet, width: int, out: int, strides: tuple[int, int]) -> None:
        super().__init__()
        self.same = config.padding == "same" and strides[0] == 2
        padding = 0 if self.same else 1
        self.conv1 = nn.Conv2d(width, out, 3, strides[0], padding, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, strides[1], 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out, config.eps, config.momentum)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut = None
        if width != out:
            self.shortcut = nn.Conv2d(width, out, 1, max(strides), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.pad(x, (0, 1, 0, 1)) if self.same else x
        y = F.relu(self.norm1(self.conv1(y)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNetModel(nn.Module):
    def __init__(self, config: ResNet) -> None:
        super().__init__()
        self.flat, wide = config.flat, 2 * CHANNELS
        self.stem, self.norm = nn.Conv2d(3, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS)
        self.blocks = nn.ModuleList(
            [
                Residual(ResNet(), CHANNELS, CHANNELS, (1, 1)),
                Residual(config, CHANNELS, wide, config.strides),
            ]
        )
        self.head = nn.Linear(wide * (SIDE // 4) ** 2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        x = F.avg_pool2d(x, 2)
        x = x if self.flat == "NCHW" else x.permute(0, 2, 3, 1)
        return self.head(x.flatten(1))


class BlockModel(nn.Module):
    def __init__(self, config: Block) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, config.bias), nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.activation = getattr(F, config.activation)
        self.scale = 1.0 if config.scaled else (WIDTH / HEADS) ** 0.5

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        x = (
            x
            + self.attention(y * self.scale if self.scale != 1 else y, y, y, need_weights=False)[0]
        )
        x = x + self.down(self.activation(self.up(self.after(x))))
        return self.head(x.mean(1))


MODELS: dict[str, Any] = {"bert": BertModel, "resnet": ResNetModel, "block": BlockModel}


def weights(config: Config, seed: int) -> dict[str, Any]:
    """Weights of the model without a fault, in numpy, by their paths."""
    torch.manual_seed(seed)
    made = MODELS[config.name](type(config)()).state_dict()
    for path, x in made.items():  # biases of zero, and norms that do nothing, hide faults
        if x.ndim == 1 and "running" not in path:
            x += 0.1 * torch.randn(x.shape)
    return {path: x.numpy() for path, x in made.items()}


class Training:
    def __init__(self, config: Config, seed: int = 0) -> None:
        self.model: nn.Module = MODELS[config.name](config)
        made = {path: torch.tensor(x) for path, x in weights(config, seed).items()}
        self.model.load_state_dict(made, strict=False)
        self.batch = [torch.tensor(x) for x in ports.batch(config, seed)]
        self.optimizer = torch.optim.SGD(self.model.parameters(), RATE, momentum=0.9)

    def step(self) -> None:
        *inputs, classes = self.batch
        F.cross_entropy(self.model(*inputs), classes).backward()
        self.optimizer.step()
