"""The warning about low weights whose updates are rounded away."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from polymp.backends.torch.weights import update_watch
from polymp.errors import LowWeightsWarning
from polymp.torch import GradScaler, UpdateWatch, audit, low_weights

MODES = ("master", "split", "stochastic")


def run(
    dtype: torch.dtype, steps: int, rate: float = 1e-4, mode: str = "", **options: Any
) -> list[Any]:
    """The warnings of a training of weights near 1."""
    p = nn.Parameter(torch.linspace(1, 2, 4096, dtype=dtype))
    optimizer: Any = torch.optim.AdamW([("layer.weight", p)], lr=rate, weight_decay=0, **options)
    if mode:
        optimizer = low_weights(optimizer, mode)
    UpdateWatch(optimizer)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(steps):
            p.grad = torch.ones_like(p)
            optimizer.step()
    return [each for each in seen if each.category is LowWeightsWarning]


def test_naive_training_is_warned_of_once() -> None:
    (warning,) = run(torch.bfloat16, 1300)
    assert str(warning.message) == (
        "100% of the updates of low weights were rounded away in this step: the gradient is not 0, "
        "and the weight keeps its bits, because the update is below half of its last place. Most "
        "in: layer.weight (bfloat16) 100%. Such weights hardly learn. Write optimizer = "
        "polymp.torch.low_weights(optimizer), which keeps the rest of each weight beside it."
    )


@pytest.mark.parametrize("mode", MODES)
def test_low_weights_are_not_warned_of(mode: str) -> None:
    assert run(torch.bfloat16, 150, mode=mode) == []


def test_training_that_learns_is_not_warned_of() -> None:
    assert run(torch.float32, 150) == []
    assert run(torch.bfloat16, 150, rate=0.1) == []  # whole last places
    assert run(torch.bfloat16, 150, rate=0.0) == []  # a warm-up that has not begun
    assert run(torch.bfloat16, 99) == []  # not looked at yet


def test_a_fused_step_that_is_skipped_does_not_count() -> None:
    p, q = (nn.Parameter(torch.ones(8, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = torch.optim.AdamW([p, q], lr=0.1, fused=True)
    UpdateWatch(optimizer, every=1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(4):
            scaler = GradScaler("cpu", init_scale=1.0)
            scaler.scale(torch.zeros(()))
            p.grad, q.grad = torch.ones_like(p), torch.full_like(q, torch.inf)
            scaler.step(optimizer)
    assert [each for each in seen if each.category is LowWeightsWarning] == []


def test_a_sample_counts_what_a_step_left() -> None:
    p = nn.Parameter(torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.bfloat16))
    p.grad = torch.tensor([1.0, 2.0**-9, 0.0, 2.0**-9], dtype=torch.bfloat16)
    optimizer = torch.optim.SGD([p], lr=1.0)
    sample = update_watch.Sample(optimizer)
    optimizer.step()
    counts = sample.counts()
    assert counts.tolist() == [[3, 1]]
    assert [r.name for r in sample.records(counts)] == ["parameter 0 of group 0"]


def test_an_audit_says_which_updates_were_lost() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).bfloat16()

    def lost(optimizer: Any) -> Any:
        with audit(model) as found:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(4, 8, dtype=torch.bfloat16)).sum().backward()
                optimizer.step()
        return found

    found = lost(torch.optim.SGD(model.parameters(), lr=1e-6))
    assert [each.name for each in found.lost_updates] == [
        "0.weight", "0.bias", "1.weight", "1.bias",
    ]  # fmt: skip
    assert [each.share for each in found.lost_updates] == [1.0] * 4
    assert [each.updates for each in found.lost_updates] == [3 * 64, 3 * 8, 3 * 8, 3]
    text = str(found)
    assert "updates of low weights that were rounded away: 100 %; low_weights() keeps them" in text
    assert "  0.weight (bfloat16): 100 %" in text
    assert found.to_dict()["lost_updates"][0]["lost"] == 3 * 64
    kept = lost(low_weights(torch.optim.SGD(model.parameters(), lr=1e-6)))
    assert kept.lost_updates == []
    assert "rounded away" not in str(kept)


def test_what_it_does_not_take() -> None:
    with pytest.raises(TypeError) as error:
        UpdateWatch("adam")  # type: ignore[arg-type]
    assert str(error.value) == (
        "UpdateWatch() takes a torch.optim.Optimizer, got 'adam'. Write: watch = "
        "UpdateWatch(optimizer)."
    )
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="every") as wrong:
        UpdateWatch(optimizer, every=0)
    assert str(wrong.value) == "UpdateWatch(every=...) must be a whole number above 0, got 0."
    watch = UpdateWatch(optimizer, every=1)
    watch.remove()
    assert not optimizer._optimizer_step_pre_hooks
