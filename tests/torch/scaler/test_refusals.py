"""`GradScaler`: misuse that torch.amp has no word for, and optimizers that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polymp.torch import GradScaler
from tests.torch.scaler.test_torch_amp_interface import outcome, ready, sgd

INF, NAN = float("inf"), float("nan")
# Arguments that this scaler alone has, and what is said about them.
OWN: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    (
        {"dtype": 16},
        TypeError,
        "GradScaler(): dtype 16 is not a dtype. Write float8_e4m3fn (fp8_e4m3), float8_e5m2 "
        "(fp8_e5m2), float16 (fp16), bfloat16 (bf16), float32 (fp32), float64 (fp64), or such a "
        "dtype of torch, jax or numpy.",
    ),
    (
        {"dtype": torch.int32},
        TypeError,
        "dtype must be the region's low dtype, a float dtype, got torch.int32.",
    ),
    (
        {"device": 1024.0},
        TypeError,
        "device must be a name such as 'cuda' or 'cpu', got 1024.0. The first scale is "
        "GradScaler(device, init_scale).",
    ),
    ({"skip_on": "gpu"}, ValueError, "skip_on must be 'auto', 'host' or 'device', got 'gpu'."),
    (
        {"on_stuck": "ignore"},
        ValueError,
        "on_stuck must be 'warn', 'raise' or a function, got 'ignore'.",
    ),
    *(
        ({"stuck_after": x}, ValueError, f"stuck_after must be a whole number from 1 up, got {x}.")
        for x in (0, True)
    ),
    (
        {"named": 3},
        TypeError,
        "named must be a module, got 3. Without one, names come from an optimizer that is made "
        "with model.named_parameters().",
    ),
)


@pytest.mark.parametrize(("arguments", "error", "message"), OWN, ids=lambda v: str(v)[:40])
def test_wrong_arguments_raise_what_names_them(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    assert outcome(lambda: GradScaler(**{"device": "cpu"} | arguments)) == (error, message)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("growth_factor", 1.0, ValueError, "growth_factor must be finite and above 1, got 1.0."),
        ("backoff_factor", 2.0, ValueError, "backoff_factor must be between 0 and 1, got 2.0."),
        ("growth_interval", 0, ValueError, "growth_interval must be at least 1, got 0."),
        ("growth_interval", 2.5, TypeError, "growth_interval must be a whole number, got 2.5."),
    ],
)
def test_constants_out_of_range_are_not_set(
    name: str, value: float, error: type[Exception], message: str
) -> None:
    scaler = ready(GradScaler)
    before = scaler.state_dict()
    assert outcome(lambda: getattr(scaler, f"set_{name}")(value)) == (error, message)
    assert scaler.state_dict() == before


NEW = f"new_scale must be from min_scale to max_scale, {2.0**-126!r} to {2.0**126!r}; got "


@pytest.mark.parametrize(
    ("new", "error", "message"),
    [
        *((x, ValueError, f"{NEW}{x!r}.") for x in (0.0, -1.0, 2.0**127, INF, NAN)),
        ("8", TypeError, "new_scale must be a number, got '8'."),
    ],
    ids=str,
)
def test_a_new_scale_that_is_none_changes_nothing(
    new: Any, error: type[Exception], message: str
) -> None:
    scaler = ready(GradScaler)
    before, looked = scaler.state_dict(), sgd()
    scaler.step(looked)
    assert outcome(lambda: scaler.update(new)) == (error, message)
    assert scaler.state_dict() == before
    scaler.update()  # the iteration is still open
    assert scaler._get_growth_tracker() == 1


@pytest.mark.parametrize(
    ("new", "scale"),
    [(0.0, 2.0**-126), (INF, 2.0**126), (2.0**127, 2.0**126), (NAN, 4.0), (-3.0, 2.0**-126)],
)
def test_a_new_scale_on_the_device_is_brought_between_the_bounds(new: float, scale: float) -> None:
    scaler = ready(GradScaler)
    scaler.update(torch.tensor(new))
    assert scaler.get_scale() == scale


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_without_gradients_is_left_alone(fused: bool) -> None:
    scaler, w = ready(GradScaler), torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=1.0, momentum=0.9, weight_decay=0.5, fused=fused)
    before = scaler.state_dict()
    assert scaler.step(optimizer) is None
    assert (w.tolist(), dict(optimizer.state)) == ([1.0, 1.0], {})
    assert scaler.step_skipped(optimizer)
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()
    assert scaler.state_dict() == before
    scaler.step(sgd())  # another one goes on
    scaler.update()
    assert scaler._get_growth_tracker() == 1
    assert not scaler.found_inf(optimizer)


def test_a_strict_scaler_wants_gradients_as_torch_s_does() -> None:
    without, fused = (sgd(torch.ones(2, requires_grad=True), fused=f) for f in (False, True))
    for misuse in (
        lambda scaler: scaler.step(without),
        lambda scaler: (scaler.unscale_(without), scaler.update()),
    ):
        ours = outcome(lambda m=misuse: m(ready(GradScaler, strict=True)))
        assert ours == outcome(lambda m=misuse: m(ready(torch.amp.GradScaler)))
        assert ours[0] is AssertionError
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        ready(GradScaler, strict=True).step(fused)  # torch.amp raises in update() only
