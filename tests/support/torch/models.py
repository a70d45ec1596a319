"""Whole models, run forward and backward in regions.

A model is a module and its inputs. An outcome is every bit and dtype of outputs, loss and
gradients, or the exception. `main` writes the outcomes of torch.autocast, taken before
polymp is imported, and those of polymp on its compiled kernels and with every op on its own.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

LOW = (torch.bfloat16, torch.float16)

# Who runs the models.
STAGES = ("torch", "native", "python")

# How: a training step, its backward inside the region, two microbatches in one region, no
# gradients at all, and under inference mode.
WITH_GRADIENTS = ("train", "backward inside", "twice")
WITHOUT = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
WAYS = (*WITH_GRADIENTS, *WITHOUT)


class Model(NamedTuple):
    module: nn.Module
    inputs: tuple[Any, ...]


class First(nn.Module):
    def __init__(self, layer: nn.Module, at: int = 0) -> None:
        super().__init__()
        self.layer, self.at = layer, at

    def forward(self, *args: Any) -> Any:
        return self.layer(*args)[self.at]


class Packed(nn.Module):
    """A recurrent net on sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 2]), batch_first=True)
        out, _ = self.lstm(packed)
        return nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0]


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm, self.rnn = nn.GRUCell(8, 8), nn.LSTMCell(8, 8), nn.RNNCell(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(x.shape[1], 8)
        for t in x:
            h, c = self.lstm(self.rnn(self.gru(t, h), h), (h, c))
            h, c = h.float(), c.float()
        return h


class ConvNet(nn.Module):
    """Convolutions, batch norm, ReLU in place, pooling, and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, padding="same", groups=8),
            nn.GroupNorm(2, 8),
            nn.GELU(),
            nn.MaxPool2d(2),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
            nn.PReLU(4),
        )
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        y = F.interpolate(y, scale_factor=0.5, mode="bilinear")
        y += y.detach().mean()
        return self.head(F.adaptive_avg_pool2d(y, 1).flatten(1))


class Spectral(nn.Module):
    """Filters in the frequency domain, as neural operators do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, 3, dtype=torch.complex64) / 8)
        self.skip = nn.Conv1d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modes = torch.fft.rfft(x)
        low = torch.einsum("bix,iox->box", modes[..., :3], self.weight)
        modes = torch.cat([low, torch.zeros_like(modes[..., 3:])], -1)
        return F.gelu(torch.fft.irfft(modes, n=x.shape[-1]) + self.skip(x))


class ComplexLayer(nn.Module):
    """A complex product, from real parameters and with complex ones."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = nn.Linear(8, 8), nn.Linear(8, 8)
        self.rotation = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(self.real(x).float(), self.imaginary(x).float())
        z = z @ self.rotation + torch.view_as_complex(torch.stack([x, -x], -1))
        return torch.view_as_real(z * torch.polar(z.abs(), z.angle())).flatten(1)


class Tables(nn.Module):
    """Sparse gradients from a table and a bag, then a net."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, sparse=True)
        self.bag = nn.EmbeddingBag(20, 8, mode="mean", sparse=True)
        self.net = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, words: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([self.table(words).sum(1), self.bag(bags)], -1))


class Attention(nn.Module):
    """Attention by hand, by einsum, and by the fused op, with a mask and without."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = torch.softmax(q @ k.mT / 2, -1)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        mixed = [
            torch.einsum("bhij,bhjd->bhid", weights, v),
            F.scaled_dot_product_attention(q, k, v, is_causal=True),
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        ]
        return self.out(torch.cat([t.transpose(1, 2).flatten(2) for t in mixed], -1))


class Language(nn.Module):
    """A causal language model with tied weights and its loss; the output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], words.device)
        h = self.block(self.table(words), src_mask=mask, is_causal=True)
        logits = F.linear(self.norm(h), self.table.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


class Speech(nn.Module):
    """A CTC loss, a quantile and a distance on top of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(8, 8, 3), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(F.silu(self.conv(x)).mT)
        loss = F.ctc_loss(
            F.log_softmax(y.transpose(0, 1), -1),
            torch.tensor([[1, 2], [3, 4]], device=x.device),
            torch.tensor([y.shape[1]] * 2),
            torch.tensor([2, 2]),
        )
        return loss + torch.quantile(y.float(), 0.9) + torch.cdist(y, y).mean()


class Solver(nn.Module):
    """An implicit layer: a linear system, its determinant, a bilinear form."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.form = nn.Linear(4, 16), nn.Bilinear(4, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.net(x).unflatten(-1, (4, 4))
        a = a @ a.mT + 4 * torch.eye(4, device=x.device)
        y = torch.linalg.solve(a, x.unsqueeze(-1)).squeeze(-1)
        return self.form(x, y) + torch.linalg.inv(a).diagonal(dim1=-2, dim2=-1).sum(-1, True)


def build() -> dict[str, Callable[[], Model]]:
    rows, sequences, images = (3, 8), (3, 6, 8), (2, 3, 8, 8)

    def on(module: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> Callable[[], Model]:
        return lambda: Model(module(), tuple(torch.randn(shape) for shape in shapes))

    def words(module: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> Callable[[], Model]:
        return lambda: Model(module(), tuple(torch.randint(0, 20, shape) for shape in shapes))

    encoder: dict[str, Any] = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0}
    return {
        "RNN": on(lambda: First(nn.RNN(8, 6, 2)), sequences),
        "LSTM": on(
            lambda: First(nn.LSTM(8, 6, 2, bidirectional=True, batch_first=True)), sequences
        ),
        "LSTM with projections": on(lambda: First(nn.LSTM(8, 6, proj_size=4)), sequences),
        "GRU": on(lambda: First(nn.GRU(8, 6, bias=False)), sequences),
        "packed LSTM": on(Packed, sequences),
        "cells": on(Cells, sequences),
        "multi-head attention": on(
            lambda: First(nn.MultiheadAttention(8, 2, batch_first=True)), *[sequences] * 3
        ),
        "multi-head attention, other widths": on(
            lambda: First(nn.MultiheadAttention(8, 2, kdim=4, vdim=5)),
            (6, 3, 8),
            (5, 3, 4),
            (5, 3, 5),
        ),
        "transformer encoder layer, norm first": on(
            lambda: nn.TransformerEncoderLayer(**encoder, norm_first=True, activation="gelu"),
            sequences,
        ),
        "transformer": on(
            lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True),
            sequences,
            (3, 4, 8),
        ),
        "convnet": on(ConvNet, images),
        "convnet, channels last": lambda: Model(
            ConvNet().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
            (torch.randn(images).contiguous(memory_format=torch.channels_last),),
        ),
        "conv3d": on(lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.AvgPool3d(2)), (2, 1, 5, 5, 5)),
        "spectral": on(Spectral, (2, 8, 16)),
        "complex": on(ComplexLayer, rows),
        "sparse tables": words(Tables, (3, 4), (3, 5)),
        "attention": on(Attention, sequences),
        "language model": words(Language, (3, 7)),
        "speech": on(Speech, (2, 8, 12)),
        "solver": on(Solver, (3, 4)),
    }


MODELS = build()


def seen(t: Any) -> Any:
    """Return everything that can be seen of a tensor, or of all in lists and dicts, as data."""
    if isinstance(t, dict):
        return {key: seen(value) for key, value in t.items()}
    if isinstance(t, (list, tuple)):
        return [seen(value) for value in t]
    if not isinstance(t, torch.Tensor):
        return t
    dense = t.detach().to_dense() if t.is_sparse else t.detach()
    flat = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    bits = flat.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(t.dtype), tuple(t.shape), t.is_sparse, bits


def same(one: Any, other: Any) -> bool:
    """Return whether two lists or dicts of tensors agree in every dtype, shape and bit."""
    return bool(seen(one) == seen(other))


def through_file(value: Any, *, weights_only: bool = True) -> Any:
    """Save a value, and return what is loaded."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def outcome(
    title: str, way: str, low: torch.dtype, amp: Any, device: str = "cpu"
) -> dict[str, Any]:
    """Outputs, loss and gradients, or the error, of a model in a region of `amp`."""
    torch.manual_seed(0)
    module, inputs = MODELS[title]()
    module.to(device).train(way in WITH_GRADIENTS)
    inputs = tuple(t.to(device) for t in inputs)
    leaves = [t.requires_grad_() for t in inputs if t.is_floating_point() and way not in WITHOUT]
    leaves += list(module.parameters())

    def loss_of(outputs: Any) -> torch.Tensor:
        parts = [t.float().square().mean() for t in tree_leaves(outputs)]
        return torch.stack(parts).sum()

    with warnings.catch_warnings(), WITHOUT.get(way, contextlib.nullcontext)():
        warnings.simplefilter("ignore")
        try:
            with amp(device, dtype=low):
                outputs = [module(*inputs) for _ in range(2 if way == "twice" else 1)]
                loss = loss_of(outputs) if way == "backward inside" else None
                if loss is not None:
                    loss.backward()
            if loss is None:
                loss = loss_of(outputs)
                if way in WITH_GRADIENTS:
                    loss.backward()
        except Exception as error:
            return {"error": (type(error).__name__, str(error))}
    gradients, buffers = [t.grad for t in leaves], list(module.buffers())
    return seen(
        {"outputs": tree_leaves(outputs), "loss": loss, "gradients": gradients, "buffers": buffers}
    )


Outcomes = dict[tuple[str, str, str], dict[str, Any]]


def outcomes(amp: Any) -> Outcomes:
    return {
        (title, way, str(low)): outcome(title, way, low, amp)
        for title in MODELS
        for way in WAYS
        for low in LOW
    }


def main(path: str) -> None:
    torch.set_num_threads(1)
    found = {"torch": outcomes(torch.autocast)}
    assert not any(name.startswith("polymp") for name in sys.modules)
    from polymp.torch import autocast
    from tests.support.torch.kernels import all_python

    found["native"] = outcomes(autocast)
    with all_python("cpu"):
        found["python"] = outcomes(autocast)
    Path(path).write_bytes(pickle.dumps(found))
