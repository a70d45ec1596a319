"""`GradScaler`: misuse that torch.amp has no word for, and optimizers that it refuses."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from polymp.backends.torch.scaler import optimizer_step
from polymp.torch import GradScaler
from tests.torch.scaler.test_torch_amp_interface import outcome, ready, sgd, weight

INF, NAN = float("inf"), float("nan")
# Arguments of torch's scaler alone, and what is said about them.
OWN: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    (
        {"dtype": 16},
        TypeError,
        "GradScaler(): dtype 16 is not a dtype. Write float8_e4m3fn (fp8_e4m3), float8_e5m2 "
        "(fp8_e5m2), float16 (fp16), bfloat16 (bf16), float32 (fp32), float64 (fp64), or such a "
        "dtype of torch, jax or numpy.",
    ),
    (
        {"skip_on": "gpu"},
        ValueError,
        "skip_on must be 'auto', 'host' or 'device', got 'gpu'.",
    ),
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
    assert outcome(lambda: GradScaler("cpu", **arguments)) == (error, message)


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
        *((x, ValueError, NEW + f"{x!r}.") for x in (0.0, -1.0, 2.0**127, INF, NAN)),
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
    [
        (0.0, 2.0**-126),
        (INF, 2.0**126),
        (2.0**127, 2.0**126),
        (float("nan"), 4.0),
        (-3.0, 2.0**-126),
    ],
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


@pytest.mark.parametrize("scale", [4.0, 0.5])
def test_a_fused_optimizer_takes_float16_gradients_at_any_scale(scale: float) -> None:
    """It unscales by itself, and `step` need not; below 1 it does."""

    def run(kind: Any) -> Any:
        scaler, w = ready(kind, init_scale=scale), weight(scale, torch.float16)
        optimizer = torch.optim.SGD([w], lr=0.25, fused=True)
        scaler.step(optimizer)
        scaler.update()
        return w.tolist(), scaler.get_scale()

    assert run(GradScaler) == run(torch.amp.GradScaler) == ([0.75, 0.75], scale)


def test_a_strict_scaler_wants_gradients_as_torch_s_does() -> None:
    def step(scaler: Any) -> None:
        scaler.step(torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=1.0))

    def unscale_and_update(scaler: Any) -> None:
        scaler.unscale_(torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=1.0))
        scaler.update()

    for misuse in (step, unscale_and_update):
        ours = outcome(lambda m=misuse: m(ready(GradScaler, strict=True)))
        assert ours == outcome(lambda m=misuse: m(ready(torch.amp.GradScaler)))
        assert ours[0] is AssertionError
    without = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=1.0, fused=True)
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        ready(GradScaler, strict=True).step(without)  # torch.amp raises in update() only


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": 1024.0}, "device must be a name such as 'cuda' or 'cpu', got 1024.0."),
        ({"device": "cpu", "dtype": torch.int32}, "a float dtype, got torch.int32."),
    ],
)
def test_what_cannot_be_a_device_or_a_low_dtype(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        GradScaler(**arguments)


def test_warnings_show_the_user_s_line() -> None:
    w = torch.ones(1, requires_grad=True)
    for on in ("host", "device"):
        scaler = GradScaler("cpu", stuck_after=1, skip_on=on)  # type: ignore[arg-type]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(12):
                optimizer = torch.optim.SGD([w], lr=1.0)
                w.grad = None
                scaler.scale(w.sum() * float("nan")).backward()
                scaler.step(optimizer)
                scaler.update()
        assert [c.filename for c in caught] == [__file__]


def test_a_step_s_signature_is_read_once() -> None:
    class Asks(torch.optim.SGD):
        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
            return None

    w = torch.ones(1, requires_grad=True)
    for kind, asks in ((torch.optim.SGD, False), (Asks, True)):
        for _ in range(2):
            assert optimizer_step.takes_scaler(kind([w], lr=1.0)) is asks
