"""A training whose optimizer evaluates the loss several times in a step, as LBFGS does."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


def losses_of_closures(
    model: nn.Module,
    optimizer: Any,
    backward: Callable[[torch.Tensor], None],
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> list[float]:
    """Train, and return the loss of each evaluation; `backward` is that of a framework."""
    losses = []
    for x, y in batches:

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)  # noqa: B023
            backward(loss)
            losses.append(loss.item())
            return loss

        optimizer.step(closure)
    return losses
