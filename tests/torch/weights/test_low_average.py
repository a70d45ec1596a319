"""Averages of low weights: torch's `AveragedModel`, with which functions it works, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel

from polymp.torch import low_weights
from tests.support.torch.low_training import loss_of, made


def ema(mean: Any, p: Any, n: Any) -> Any:
    """As in docs/low-weights.md: the difference of float32 and bfloat16 is float32."""
    return mean + (p - mean) * 0.1


SWA = swa_utils.get_swa_avg_fn()
# The options of AveragedModel, the function of float32 numbers that it stands for, and by how much
# of a weight it may be off: torch's function for one tensor multiplies in bfloat16.
WAYS: dict[str, tuple[dict[str, Any], Any, float]] = {
    "ema": ({"avg_fn": ema}, ema, 0),
    "swa": ({"avg_fn": SWA}, SWA, 0),
    "default": ({}, SWA, 2.0**-22),
    "torch's ema": ({"avg_fn": swa_utils.get_ema_avg_fn(0.9)}, ema, 2.0**-8),
}


class Normed(nn.Sequential):
    """A model with buffers: float ones, and a counter."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))


def tensors(model: nn.Module, buffers: bool) -> dict[str, torch.Tensor]:
    """Parameters, and buffers if asked for; float ones."""
    found = [*model.named_parameters(), *(model.named_buffers() if buffers else ())]
    return {name: t.detach().clone() for name, t in found if t.is_floating_point()}


def trained(model: nn.Module, optimizer: Any, average: AveragedModel) -> Any:
    """The weights that the average was given in each of five steps, in float32."""
    seen = []
    for at in range(5):
        optimizer.zero_grad()
        loss_of("mlp", model, at).backward()
        optimizer.step()
        average.update_parameters(model)
        seen.append({name: t.float() for name, t in tensors(model, True).items()})
    return seen


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_an_average_in_float32_is_the_mean_of_the_low_weights(way: str, buffers: bool) -> None:
    """Of a model that is copied before its weights are low."""
    options, function, off = WAYS[way]
    model = Normed()
    average = AveragedModel(model, use_buffers=buffers, **options)
    optimizer = low_weights(torch.optim.AdamW(model.parameters(), lr=0.01), keep=[model[1]])
    seen = trained(model, optimizer, average)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
    assert {p.dtype for p in average.module.parameters()} == {torch.float32}
    means = tensors(average.module, buffers)
    assert ("1.running_mean" in means) == buffers
    for name, mean in means.items():
        expected = seen[0][name]
        for at, step in enumerate(seen[1:], 1):
            expected = function(expected, step[name], torch.tensor(at))
        assert ((mean - expected).abs() <= off * (expected.abs() + 0.1)).all(), name
        assert ((mean - seen[-1][name]).abs() > 0.001).any(), "the check cannot fail"


def test_torchs_ema_of_many_tensors_refuses_two_dtypes() -> None:
    """It is torch's own refusal; once it is gone, docs/low-weights.md need not tell of it."""
    model = made("mlp")
    average = AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = low_weights(torch.optim.AdamW(model.parameters()))
    with pytest.raises(RuntimeError, match="expected dtype float for `end` but got dtype"):
        trained(model, optimizer, average)


@pytest.mark.parametrize("first", [True, False])
def test_an_average_that_is_made_last_is_bfloat16_and_stays_behind(first: bool) -> None:
    """A thousandth of a difference rounds away."""
    model = nn.ParameterList([torch.ones(64)])

    def made() -> AveragedModel:
        return AveragedModel(model, avg_fn=lambda mean, p, n: mean + (p - mean) * 0.001)

    average = made() if first else None
    low_weights(torch.optim.SGD(model.parameters(), lr=0.1))
    average = average or made()
    average.update_parameters(model)
    with torch.no_grad():
        model[0].fill_(2.0)
    for _ in range(100):
        average.update_parameters(model)
    mean = average.module[0].detach()
    assert mean.dtype is (torch.float32 if first else torch.bfloat16)
    expected = 2 - 0.999**100 if first else 1.0
    assert torch.allclose(mean.float(), torch.full((64,), expected), atol=1e-4)
