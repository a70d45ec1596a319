"""The values that autograd saves for backward, by dtype: of the example's model and its block."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

import torch

from polymp.torch import autocast

# Less than this is a statistic: a mean or a sum of exponentials for each row.
ACTIVATION = 4096


class Saved(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def held(forward: Callable[[], Any], parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that a forward pass saves, but for parameters."""
    own, found = {p.untyped_storage()._cdata for p in parameters}, []

    def hold(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor.detach())  # kept, or another would come to lie where it was
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        forward()
    return [tensor for tensor in found if tensor.untyped_storage()._cdata not in own]


def saved(forward: Callable[[], Any], parameters: list[torch.Tensor]) -> list[Saved]:
    """Return the storages that a forward pass saves, each once, without parameters and copies.

    A copy of a parameter is a tensor of its shape, or of its transpose's, in another dtype.
    """
    weights = {tuple(shape) for p in parameters for shape in (p.shape, p.t().shape)}
    found: dict[int, Saved] = {}
    for tensor in held(forward, parameters):
        if tuple(tensor.shape) not in weights:
            storage, dtype = tensor.untyped_storage(), str(tensor.dtype).removeprefix("torch.")
            found.setdefault(storage._cdata, Saved(dtype, tuple(tensor.shape), storage.nbytes()))
    return list(found.values())


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> Any:
    """Attention as models write it out: a softmax over masked scores, between two products."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill(future, float("-inf")), -1) @ v


def attention(module: Any, how: Callable[..., Any] | None) -> AbstractContextManager[Any]:
    """The example's model with another attention."""
    name = "scaled_dot_product_attention"
    return mock.patch.object(module.F, name, how or getattr(module.F, name))


def sizes(example: Any) -> Any:
    """The arguments of the example for its small model."""
    return example.job.arguments(example.job.parser("train_torch.py", "", example.job.SMALL), [])


def of_model(example: Any, low: torch.dtype, policy: str) -> list[Saved]:
    """Return the values that the example's model and loss save."""
    size = sizes(example)
    model = example.Transformer(100, size.context, size.width, size.layers, size.heads)
    tokens = torch.zeros(size.batch, size.context + 1, dtype=torch.int64)
    with autocast("cpu", low, policy=policy):
        return saved(lambda: example.loss_on(model, tokens), list(model.parameters()))


def of_block(example: Any, low: torch.dtype, policy: str) -> list[Saved]:
    """Return the values that a block of it saves if its input has a low dtype."""
    size = sizes(example)
    block = example.Block(size.width, size.heads)
    x = torch.ones(size.batch, size.context, size.width, dtype=low, requires_grad=True)
    with autocast("cpu", low, policy=policy):
        return saved(lambda: block(x), list(block.parameters()))
