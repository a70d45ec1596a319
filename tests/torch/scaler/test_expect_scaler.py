"""`expect_scaler`: a float16 step without a scaler is flagged, and nothing else is."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from polymp.errors import ScalerWarning, UnscaledError
from polymp.torch import GradScaler, autocast, expect_scaler
from tests.support import forks

LOW = torch.float16


class Run:
    def __init__(self, make: Callable[[Any], torch.optim.Optimizer] | None = None) -> None:
        self.model = nn.Linear(2, 1)
        make = make or (lambda p: torch.optim.SGD(p, lr=0.25))
        self.optimizer = make(self.model.parameters())

    def loss(self, dtype: torch.dtype | None = LOW) -> torch.Tensor:
        with autocast("cpu", dtype or LOW, enabled=dtype is not None):
            return self.model(torch.ones(1, 2)).float().sum()

    def backward(self, dtype: torch.dtype | None = LOW) -> None:
        self.optimizer.zero_grad()
        self.loss(dtype).backward()

    def step(self, dtype: torch.dtype | None = LOW) -> None:
        self.backward(dtype)
        self.optimizer.step()


def test_a_step_without_a_scaler_warns_once_for_each_optimizer() -> None:
    first, second = Run(), Run(lambda p: torch.optim.AdamW(p, lr=0.1, fused=True))
    with expect_scaler(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            first.step()
            second.step()
    assert [w.category for w in caught] == [ScalerWarning] * 2
    assert str(caught[0].message) == (
        "SGD steps on gradients that went through float16 ('cpu') without a scaler that "
        "takes the step: gradients below float16's smallest number are lost there, and those of a "
        "scaled loss are still multiplied by the scale. Make scaler = GradScaler('cpu'), and in "
        "each iteration call scaler.scale(loss).backward(), scaler.step(optimizer) in place of "
        "optimizer.step(), and scaler.update(). Or use bfloat16, which needs no scaler."
    )
    assert str(caught[1].message).startswith("AdamW steps on")
    assert caught[0].filename == __file__


def test_raise_raises_before_the_step_every_time() -> None:
    run = Run()
    run.backward()
    before = [p.detach().clone() for p in run.model.parameters()]
    with expect_scaler("raise"):
        run.backward()
        for _ in range(2):
            with pytest.raises(UnscaledError, match="SGD steps on gradients"):
                run.optimizer.step()
    assert all(map(torch.equal, run.model.parameters(), before))


def test_a_scaled_loss_is_not_enough() -> None:
    """Whoever scales and forgets `scaler.step` steps on scaled gradients."""
    run, scaler = Run(), GradScaler("cpu")
    with expect_scaler("raise"):
        scaler.scale(run.loss()).backward()
        with pytest.raises(UnscaledError, match=r"in place of optimizer\.step\(\)"):
            run.optimizer.step()


def test_a_closure_with_a_region_in_it_is_flagged_at_the_next_step() -> None:
    run = Run(lambda p: torch.optim.LBFGS(p, max_iter=2))

    def closure() -> torch.Tensor:
        run.optimizer.zero_grad()
        loss = run.loss().square()
        loss.backward()
        return loss

    with expect_scaler("raise"):
        run.optimizer.step(closure)
        with pytest.raises(UnscaledError):
            run.optimizer.step(closure)


def iterate(run: Run, scaler: Any, times: int = 1, *, by_hand: bool = False) -> None:
    """Iterations with a scaler; `by_hand` it unscales only, and the optimizer steps itself."""
    for _ in range(times):
        run.optimizer.zero_grad()
        scaler.scale(run.loss()).backward()
        if by_hand:
            scaler.unscale_(run.optimizer)
            run.optimizer.step()
        else:
            scaler.step(run.optimizer)
        scaler.update()


def by_scaler_with_a_closure(run: Run) -> None:
    scaler = GradScaler("cpu")

    def closure() -> torch.Tensor:
        run.optimizer.zero_grad()
        loss = run.loss()
        scaler.scale(loss).backward()
        return loss

    scaler.step(run.optimizer, closure)
    scaler.update()
    scaler.step(run.optimizer, closure)


def by_a_subclass(run: Run) -> None:
    class Mine(torch.amp.GradScaler):
        def _maybe_opt_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            return optimizer.step()

    iterate(run, Mine("cpu"))


def in_other_dtypes(run: Run) -> None:
    run.step(torch.bfloat16)
    run.step(None)


def after_inference(run: Run) -> None:
    teacher = Run()
    teacher.model.requires_grad_(False)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            run.loss()
        with autocast("cpu", LOW), mode():
            targets = run.loss().detach() + teacher.loss()
    run.optimizer.zero_grad()
    (run.loss(None) - targets).backward()
    run.optimizer.step()


def after_gradients_that_are_gone(run: Run) -> None:
    run.backward()
    run.step(None)


def after_a_skip(run: Run) -> None:
    """The region of a skipped step does not make `expect_scaler` flag another optimizer."""
    scaler, other = GradScaler("cpu"), Run()
    (scaler.scale(run.loss()) * float("inf")).backward()
    scaler.step(run.optimizer)
    scaler.update()
    other.step(None)


def without_gradients(run: Run) -> None:
    run.loss()
    run.optimizer.zero_grad()
    run.optimizer.step()


def beside_a_float32_model(run: Run) -> None:
    scaler, other = GradScaler("cpu"), Run()
    scaler.scale(run.loss()).backward()
    other.step(None)
    scaler.step(run.optimizer)


FUNCTIONS: tuple[Callable[[Run], None], ...] = (
    by_scaler_with_a_closure, by_a_subclass, in_other_dtypes, after_inference, after_a_skip,
    without_gradients, after_gradients_that_are_gone, beside_a_float32_model,
)  # fmt: skip
FINE: dict[str, Callable[[Run], None]] = {f.__name__: f for f in FUNCTIONS} | {
    "by scaler": lambda run: iterate(run, GradScaler("cpu")),
    "disabled": lambda run: iterate(run, GradScaler("cpu", enabled=False)),
    "unscaled": lambda run: iterate(run, GradScaler("cpu"), by_hand=True),
    "by torch's": lambda run: iterate(run, torch.amp.GradScaler("cpu"), 2),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("train", FINE)
def test_not_flagged(train, fused) -> None:
    run = Run(lambda p: torch.optim.SGD(p, lr=0.25, fused=fused))
    with expect_scaler("raise"):
        FINE[train](run)
        with torch.autocast("cpu", LOW):
            loss = run.model(torch.ones(1, 2)).sum()
        loss.backward()
        with pytest.raises(UnscaledError, match="without a scaler"):  # the check is awake
            run.optimizer.step()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
def test_a_compiled_step_is_not_flagged() -> None:
    run = Run()
    before = [p.detach().clone() for p in run.model.parameters()]
    with expect_scaler("raise"):
        run.backward()
        torch.compile(run.optimizer.step, backend="eager")()
    assert not any(map(torch.equal, run.model.parameters(), before))
    torch._dynamo.reset()


def hooks() -> int:
    return len(_global_optimizer_pre_hooks)


def test_it_ends() -> None:
    before = hooks()
    check = expect_scaler("raise")
    assert hooks() == before + 1
    check.remove()
    check.remove()
    assert hooks() == before
    Run().step()
    with pytest.raises(KeyError, match="mine"), expect_scaler():
        raise KeyError("mine")
    assert hooks() == before


def test_it_keeps_no_optimizer_alive() -> None:
    run = Run()
    with expect_scaler():
        with pytest.warns(ScalerWarning):
            run.step()
        gone = weakref.ref(run.optimizer)
        del run.optimizer
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("action", ["ignore", None, True])
def test_actions_that_are_none(action) -> None:
    before = hooks()
    with pytest.raises(ValueError, match=f"action must be 'warn' or 'raise', got {action!r}"):
        expect_scaler(action)
    assert hooks() == before


def test_nothing_is_hooked_unless_asked_for() -> None:
    code = (
        "import torch; from torch.optim import optimizer as o\n"
        "before = len(o._global_optimizer_pre_hooks)\n"
        "from polymp.torch import autocast, GradScaler, expect_scaler\n"
        "w = torch.ones(2, 2, requires_grad=True)\n"
        "s, opt = GradScaler('cpu'), torch.optim.SGD([w], lr=1.0)\n"
        "with autocast('cpu', torch.float16): loss = (w @ w).sum()\n"
        "s.scale(loss).backward(); s.step(opt); s.update()\n"
        "assert len(o._global_optimizer_pre_hooks) == before == 0\n"
        "expect_scaler(); assert len(o._global_optimizer_pre_hooks) == 1"
    )
    forks.program(code)


@pytest.mark.parametrize("actions", [("warn", "raise"), ("raise", "warn")])
def test_a_check_does_not_hide_a_step_from_another_one(actions) -> None:
    outer, inner = actions
    with expect_scaler(outer), expect_scaler(inner), warnings.catch_warnings():
        warnings.simplefilter("ignore", ScalerWarning)
        run = Run()
        for _ in range(2):
            with pytest.raises(UnscaledError):
                run.step()
    gone, left = map(expect_scaler, actions)
    gone.remove()
    with pytest.raises(UnscaledError) if inner == "raise" else pytest.warns(ScalerWarning):
        Run().step()
    Run().step(None)  # a step ends all notes, with a warning or without one
    left.remove()
    Run().step()
