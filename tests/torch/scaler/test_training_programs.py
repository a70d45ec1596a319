"""`GradScaler` in training programs, against torch.amp's bit for bit, and without interruption."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from polymp.torch import GradScaler, autocast
from tests.support.torch.training import (
    PROGRAMS,
    Amp,
    Log,
)

# torch's Adagrad makes sparse tensors without saying whether they are to be checked.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")

POLYMP, TORCH = Amp(autocast, GradScaler), Amp(torch.autocast, torch.amp.GradScaler)


@functools.cache
def torch_log(program: str) -> Log:
    return PROGRAMS[program](TORCH)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_bit_is_torch_s(program: str) -> None:
    log = PROGRAMS[program](POLYMP)
    assert len(log) > 3
    assert log == torch_log(program)


# --- scalers that are wrong ----------------------------------------------------------------------


class Disabled(GradScaler):
    def __init__(self, device: str, enabled: bool = True, **arguments: Any) -> None:
        super().__init__(device, enabled=not enabled, **arguments)


class NeverSkips(GradScaler):
    def _unscale_grads_(self, *args: Any) -> Any:
        return {device: found * 0 for device, found in super()._unscale_grads_(*args).items()}


class SeesNoNaN(GradScaler):
    def _unscale_grads_(self, optimizer: Any, *args: Any) -> Any:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and not p.grad.is_sparse:
                    p.grad.nan_to_num_(0.0, float("inf"), float("-inf"))
        return super()._unscale_grads_(optimizer, *args)


class ForgetsToUnscale(GradScaler):
    def _unscale_grads_(self, optimizer: Any, inverse: torch.Tensor, *args: Any) -> Any:
        return super()._unscale_grads_(optimizer, torch.ones_like(inverse), *args)


class NeverUpdates(GradScaler):
    def update(self, new_scale: Any = None) -> None:
        before = self._scale.clone()
        super().update(new_scale)
        self._scale.copy_(before)


class OneForAll(GradScaler):
    """Skips every optimizer if the first one found something."""

    def _maybe_opt_step(self, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        first = next(iter(self._per_optimizer_states.values()))
        return super()._maybe_opt_step(optimizer, first, *args, **kwargs)


class ForgetsTheCount(GradScaler):
    def state_dict(self) -> Any:
        return super().state_dict() | ({"_growth_tracker": 0} if self._enabled else {})


MUTANTS = {
    Disabled: set(PROGRAMS),
    NeverSkips: {"plain SGD", "clipped SGD", "accumulated", "several", "sparse SGD"},
    SeesNoNaN: {"plain SGD", "clipped Adam, foreach"},
    ForgetsToUnscale: {"plain SGD", "clipped SGD, fused", "gradient penalty", "mixed parameters"},
    NeverUpdates: {"plain SGD", "no overflow", "odd factors", "scheduled", "set by hand"},
    OneForAll: {"several", "several, all unscaled"},
    ForgetsTheCount: {"resumed at 1", "resumed at 5", "resumed by a scaler in use"},
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_a_wrong_scaler_is_seen(mutant: type[GradScaler]) -> None:
    missed = set()
    for program in MUTANTS[mutant]:
        try:
            same = PROGRAMS[program](Amp(autocast, mutant)) == torch_log(program)
        except (AssertionError, AttributeError, TypeError):
            same = False
        if same:
            missed.add(program)
    assert missed == set()
