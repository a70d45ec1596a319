"""The state_dict of an optimizer with low weights; checkpoints in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel

from polymp.torch import low_weights
from tests.support.torch.low_training import low, made, step, weights
from tests.support.torch.models import same, seen, through_file

MODES = ("master", "split", "stochastic")


def start(mode: str | None) -> tuple[Any, Any]:
    model = made("mlp")
    return model, low("mlp", model, torch.optim.AdamW(model.parameters(), lr=1e-3), mode)


def go(model: Any, optimizer: Any, first: int, last: int) -> None:
    for at in range(first, last):
        step(model, optimizer, at)


def state_bits(optimizer: Any) -> Any:
    return seen(optimizer.state_dict()["state"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("saved_at", [0, 5])
def test_a_run_goes_on_exactly(mode: str, order: str, saved_at: int) -> None:
    model, optimizer = start(mode)
    go(model, optimizer, 0, saved_at)
    of_model, of_optimizer = through_file((model.state_dict(), optimizer.state_dict()))
    go(model, optimizer, saved_at, 10)
    other, second = start(mode)
    go(other, second, 20, 22)  # whatever was there before
    if order == "model first":
        other.load_state_dict(of_model)
        second.load_state_dict(of_optimizer)
    else:
        second.load_state_dict(of_optimizer)
        other.load_state_dict(of_model)
    if saved_at == 0:  # Adam's own state was not there yet, and torch drops what is
        assert all(set(own) <= {"beside", "low_steps"} for own in second.state.values())
    go(other, second, saved_at, 10)
    assert same(weights(model, optimizer), weights(other, second))
    assert state_bits(optimizer) == state_bits(second)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_state_stays_float32_and_what_is_beside_keeps_its_bits(mode, default) -> None:
    """torch casts a state to the dtype of its parameter, which would be bfloat16."""
    model, optimizer = start(mode)
    go(model, optimizer, 0, 3)
    before = state_bits(optimizer)
    torch.set_default_dtype(default)
    try:
        optimizer.load_state_dict(through_file(optimizer.state_dict()))
    finally:
        torch.set_default_dtype(torch.float32)
    assert state_bits(optimizer) == before
    for p in optimizer.low:
        assert optimizer.state[p]["exp_avg"].dtype is torch.float32


def test_load_hooks_see_the_low_parameters() -> None:
    model, optimizer = start("split")
    go(model, optimizer, 0, 1)
    seen: list[Any] = []
    optimizer.register_load_state_dict_post_hook(
        lambda o: seen.append([p.dtype for p in o.param_groups[0]["params"]])
    )
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [[torch.bfloat16] * 4]
    assert optimizer.low == list(model.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_from_float32_and_to_float32(mode: str) -> None:
    """A low run goes on from a plain float32 one, and a plain one from it."""
    plain, adam = start(None)
    go(plain, adam, 0, 5)
    model = made("mlp")
    model.load_state_dict(through_file(plain.state_dict()))
    optimizer = low("mlp", model, torch.optim.AdamW(model.parameters(), lr=1e-3), mode)
    optimizer.load_state_dict(through_file(adam.state_dict()))
    if mode in ("master", "split"):
        assert same(weights(model, optimizer), weights(plain))
    go(model, optimizer, 5, 8)
    full = through_file(optimizer.float32_state_dict(model))
    assert {t.dtype for t in full.values()} == {torch.float32}
    again, other = start(None)
    again.load_state_dict(full)
    other.load_state_dict(through_file(optimizer.state_dict()))
    for run in ((plain, adam, 5, 10), (model, optimizer, 8, 10), (again, other, 8, 10)):
        go(*run)
    if mode == "master":
        assert same(weights(model, optimizer), weights(plain))
        assert same(weights(again), weights(plain))


@pytest.mark.parametrize("mode", MODES)
def test_a_float32_checkpoint_of_the_model_alone_rounds(mode: str) -> None:
    plain, adam = start(None)
    go(plain, adam, 0, 5)
    model, optimizer = start(mode)
    go(model, optimizer, 0, 3)
    model.load_state_dict(plain.state_dict())
    full = weights(model, optimizer)
    for name, t in plain.state_dict().items():
        assert torch.equal(model.get_parameter(name), t.bfloat16())
        off = (full[name] - t.bfloat16().float()).abs()
        assert (off <= (2.0**-8 * t.abs() if mode != "stochastic" else 0 * t)).all()


def test_the_state_of_another_mode_is_refused() -> None:
    model, optimizer = start("split")
    go(model, optimizer, 0, 2)
    other, second = start("stochastic")
    go(other, second, 0, 2)
    before = state_bits(second)
    with pytest.raises(ValueError, match="load_state_dict") as error:
        second.load_state_dict(optimizer.state_dict())
    assert str(error.value) == (
        "load_state_dict(): the state was saved with mode 'split', and this optimizer keeps its "
        "weights with mode 'stochastic'. Make it with low_weights(optimizer, mode='split'). To "
        "change the mode, load both there, take float32_state_dict(model), and load that into the "
        "model here before low_weights()."
    )
    assert state_bits(second) == before


def test_a_state_with_other_parameters_low_is_refused() -> None:
    _, optimizer = start("split")
    other = made("mlp")
    second = low_weights(torch.optim.AdamW(other.parameters()), keep=[other[0].bias])
    with pytest.raises(ValueError, match="load_state_dict") as error:
        second.load_state_dict(optimizer.state_dict())
    assert str(error.value) == (
        "load_state_dict(): parameter 1, of shape (32,), was low in the run that saved the state, "
        "and is kept here. Call low_weights() with the same keep= as there."
    )


@pytest.mark.parametrize("change", [torch.Tensor.float, torch.Tensor.half, lambda t: t[:1]])
def test_what_stands_beside_a_weight_is_loaded_as_it_was_saved_or_refused(change: Any) -> None:
    """A checkpoint tool casts floats of the second parameter, or cuts them: and nothing moves."""
    model, optimizer = start("split")
    go(model, optimizer, 0, 3)
    saved = through_file(optimizer.state_dict())
    saved["state"][1]["beside"] = change(saved["state"][1]["beside"])
    saved["state"][0]["exp_avg"] += 1
    before = state_bits(optimizer), weights(model, optimizer)
    with pytest.raises(ValueError, match=r"beside' of parameter 1 is .*, and has to be bfloat16"):
        optimizer.load_state_dict(saved)
    assert state_bits(optimizer) == before[0]
    assert same(weights(model, optimizer), before[1])


# --- Averages of low weights: torch's `AveragedModel`, with which functions it works, and when ----


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
    found = [*model.named_parameters(), *(model.named_buffers() if buffers else ())]
    return {name: t.detach().clone() for name, t in found if t.is_floating_point()}


def trained(model: nn.Module, optimizer: Any, average: AveragedModel) -> Any:
    seen = []
    for at in range(5):
        step(model, optimizer, at)
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
        for at, given in enumerate(seen[1:], 1):
            expected = function(expected, given[name], torch.tensor(at))
        assert ((mean - expected).abs() <= off * (expected.abs() + 0.1)).all(), name
        assert ((mean - seen[-1][name]).abs() > 0.001).any(), "the check cannot fail"


def test_torchs_ema_of_many_tensors_refuses_two_dtypes() -> None:
    """Once torch has no such refusal, docs/low-weights.md need not mention it."""
    model = made("mlp")
    average = AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = low_weights(torch.optim.AdamW(model.parameters()))
    with pytest.raises(RuntimeError, match="expected dtype float for `end` but got dtype"):
        trained(model, optimizer, average)


def test_an_average_that_is_made_last_is_bfloat16_and_stays_behind() -> None:
    """A thousandth of a difference rounds away."""
    model = nn.ParameterList([torch.ones(64)])
    low_weights(torch.optim.SGD(model.parameters(), lr=0.1))
    average = AveragedModel(model, avg_fn=lambda mean, p, n: mean + (p - mean) * 0.001)
    average.update_parameters(model)
    torch.nn.init.constant_(model[0], 2.0)
    for _ in range(100):
        average.update_parameters(model)
    assert torch.equal(average.module[0], torch.ones(64, dtype=torch.bfloat16))
