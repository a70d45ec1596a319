"""Fused optimizers, which skip by themselves: SGD's first momentum, and scales below 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from polymp.backends.torch.scaler import optimizer_step
from polymp.torch import GradScaler

# What the gradients are, before they are scaled: the first two steps are skipped.
HISTORY = (float("inf"), float("nan"), 1.0, -0.5, 2.0)


@pytest.fixture
def no_memory_is_zero_by_chance() -> Iterator[None]:
    """In this mode torch fills with NaN what it makes without a value."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


garbage = pytest.mark.usefixtures("no_memory_is_zero_by_chance")


def train(kind: Any, late: bool = False, **options: Any) -> tuple[list[list[float]], float]:
    """Both parameters after each step, and the last scale; `late`: one's gradient comes later."""
    params = [torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)]
    optimizer = torch.optim.SGD(params, lr=0.25, **options)
    scaler = kind("cpu", init_scale=2.0**10)
    log = []
    for at, value in enumerate(HISTORY):
        optimizer.zero_grad()
        used = params[:1] if late and at < 3 else params
        scale = scaler.scale(torch.ones(()))
        for p in used:
            p.grad = torch.full_like(p, value) * scale
        scaler.step(optimizer)
        scaler.update()
        log += [p.tolist() for p in params]
    return log, scaler.get_scale()


OPTIONS: list[dict[str, Any]] = [
    {"momentum": 0.5},
    {"momentum": 0.5, "dampening": 0.25},
    {"momentum": 0.5, "nesterov": True, "weight_decay": 0.125},
    {"momentum": 0.5, "maximize": True},
    {"momentum": 0.5, "late": True},
    {},
]


@garbage
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_steps_of_a_fused_sgd_are_those_of_one_that_is_not(options: dict[str, Any]) -> None:
    expected = train(torch.amp.GradScaler, fused=False, foreach=False, **options)
    assert train(GradScaler, fused=True, **options) == expected
    assert expected[1] == 256.0


@garbage
def test_momentum_of_garbage_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_step, "prepare_to_skip", lambda optimizer, found: True)
    log, _ = train(GradScaler, fused=True, momentum=0.5)
    assert str(log[-1]) == "[nan, nan]"


def test_a_fused_sgd_waits_only_with_dampening() -> None:
    """Reading the finding would raise: a tensor on the device meta has no value."""
    p = torch.ones(2, requires_grad=True)
    p.grad = torch.ones(2)
    found = torch.zeros((), device="meta")
    plain = torch.optim.SGD([p], lr=0.1, momentum=0.5, fused=True)
    assert optimizer_step.prepare_to_skip(plain, found)
    assert plain.state[p]["momentum_buffer"].tolist() == [0.0, 0.0]
    damped = torch.optim.SGD([p], lr=0.1, momentum=0.5, dampening=0.1, fused=True)
    with pytest.raises(RuntimeError, match="meta"):
        optimizer_step.prepare_to_skip(damped, found)
    assert optimizer_step.prepare_to_skip(torch.optim.AdamW([p], fused=True), found)


KINDS = {
    "SGD": lambda w: torch.optim.SGD(w, lr=0.01, fused=True),
    "Adam": lambda w: torch.optim.Adam(w, lr=0.01, eps=1e-3, fused=True),
    "AdamW": lambda w: torch.optim.AdamW(w, lr=0.01, eps=1e-3, fused=True),
    "Adagrad": lambda w: torch.optim.Adagrad(w, lr=0.01, eps=1e-3, fused=True),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float16, 1.0), (torch.float32, 1e30), (torch.float64, 1e300)],
    ids=str,
)
def test_below_a_scale_of_1_no_quotient_makes_a_weight_inf(kind, dtype, value) -> None:
    """Of 35 elements torch's kernels for a CPU divide the last three in the weight's own dtype."""
    for scale in (2.0**-8, 2.0**-24, 2.0**-40, 2.0**-100, 2.0**-126):
        weight = torch.ones(35, dtype=dtype, requires_grad=True)
        scaler, optimizer = GradScaler("cpu", init_scale=scale), KINDS[kind]([weight])
        scaler.scale(torch.ones(()))
        weight.grad = torch.full_like(weight, value)
        weight.grad[3] = 0
        scaler.step(optimizer)
        scaler.update()
        assert weight.isfinite().all()
        fits = value / scale < torch.finfo(dtype).max and (dtype, scale) != (torch.float16, 2**-40)
        assert bool(scaler.step_skipped(optimizer)) == (not fits)
        assert weight.grad[0] == (value if not fits else value / scale)
