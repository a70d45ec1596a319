"""Steps with a closure: every evaluation is scaled and checked; a spoiled one is undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from polymp.torch import GradScaler
from tests.support.torch.models import seen

INF, NAN = float("inf"), float("nan")
Make = Callable[[Any], torch.optim.Optimizer]


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization: up along the gradient, and from there a step of SGD.

    Source: Foret et al. 2021, arXiv:2010.01412.
    """

    def __init__(self, params: Any, lr: float = 0.125, rho: float = 0.25) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["before"] = p.detach().clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / norm))
            p.grad = None
        with torch.enable_grad():
            loss = closure()
        for p in params:
            p.copy_(self.state[p]["before"])
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])
        return loss


MAKES: dict[str, Make] = {
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=5),
    "lbfgs-wolfe": lambda p: torch.optim.LBFGS(p, max_iter=5, line_search_fn="strong_wolfe"),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.125, momentum=0.5),
    "adam": lambda p: torch.optim.Adam(p, lr=0.125),
    "fused": lambda p: torch.optim.SGD(p, lr=0.125, fused=True),
    "sam": Sam,
}
every = pytest.mark.parametrize("kind", MAKES)


class Task:
    """A small fit, and how its closure is spoiled: at which evaluations, by what."""

    def __init__(self, kind: str, scaler: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.x, self.y = torch.randn(8, 3), torch.randn(8, 1)
        self.sam = kind == "sam"
        self.optimizer = MAKES[kind](self.model.parameters())
        self.scaler = scaler
        self.calls = 0
        self.spoil: dict[int, str] = {}
        self.clip: float | None = None

    def closure(self) -> torch.Tensor:
        self.calls += 1
        how = self.spoil.get(self.calls)
        self.optimizer.zero_grad()
        loss = (self.model(self.x) - self.y).square().mean()
        if how == "loss":
            loss = loss * NAN
        self.scaler.scale(loss).backward()
        if how == "gradient":
            next(self.model.parameters()).grad[0, 0] = INF
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        return loss

    def step(self) -> Any:
        if self.sam:
            self.closure()
        result = self.scaler.step(self.optimizer, self.closure)
        self.scaler.update()
        return result

    def bits(self) -> str:
        return repr(seen([*self.model.parameters(), self.optimizer.state_dict()["state"]]))


def scaler(**options: Any) -> GradScaler:
    return GradScaler("cpu", **{"init_scale": 2.0**10, "growth_interval": 2} | options)


def unscaled(kind: str) -> Task:
    return Task(kind, torch.amp.GradScaler("cpu", enabled=False))


@every
@pytest.mark.parametrize("clip", [None, 0.05])
def test_with_a_power_of_two_the_run_is_the_unscaled_one_bit_for_bit(kind, clip) -> None:
    ours, plain = Task(kind, scaler()), unscaled(kind)
    ours.clip = plain.clip = clip
    for _ in range(5):
        returned, wanted = ours.step(), plain.step()
        assert torch.equal(returned, wanted)
        assert ours.bits() == plain.bits()
        assert ours.calls == plain.calls
    assert ours.scaler.get_scale() == 2.0**12
    if kind.startswith("lbfgs"):
        assert ours.calls > 10, "it did not search"


@pytest.mark.parametrize("how", ["loss", "gradient"])
@pytest.mark.parametrize(
    ("kind", "later"),
    [(kind, 0) for kind in MAKES]
    + [("lbfgs-wolfe", 1), ("sam", 1), *(("lbfgs", at) for at in range(1, 5))],
)
def test_a_spoiled_evaluation_takes_the_step_back(kind, how, later) -> None:
    """The first evaluation of a step, or a later one. That of SAM's before the step is one."""
    run = Task(kind, scaler(growth_interval=100))
    run.step()
    before = run.bits()
    run.spoil = {run.calls + 1 + later: how}
    calls = run.calls
    assert run.step() is None
    assert run.bits() == before
    assert run.calls - calls == 1 + later, "it went on from a spoiled point"
    assert bool(run.scaler.step_skipped(run.optimizer))
    assert bool(run.scaler.step_skipped(run.optimizer))
    state = run.scaler.state_dict()
    wanted = (2.0**9, 0, int(how == "loss"))
    assert (state["scale"], state["_growth_tracker"], state["spoiled"]) == wanted
    assert (state["skips"], state["skipped"]) == (1, 1)
    run.spoil = {}
    assert run.step() is not None
    assert run.bits() != before
    assert not bool(run.scaler.step_skipped(run.optimizer))
    assert run.scaler.state_dict()["skips"] == 0


@every
def test_a_first_step_that_is_spoiled_leaves_no_state(kind) -> None:
    run = Task(kind, scaler())
    before = run.bits()
    run.spoil = {1: "gradient"}
    run.step()
    assert run.bits() == before
    run.spoil = {}
    plain = unscaled(kind)
    run.step()
    plain.step()
    assert run.bits() == plain.bits(), "the skipped step has left something behind"


@every
def test_a_closure_that_forgets_to_scale_is_told_so(kind) -> None:
    run = Task(kind, scaler())
    if run.sam:
        run.closure()  # scaled, as it should be; the closure itself is not
    before = [p.detach().clone() for p in run.model.parameters()]

    def closure() -> torch.Tensor:
        run.optimizer.zero_grad()
        loss = (run.model(run.x) - run.y).square().mean()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match=r"the closure given to step\(\) did not scale its loss"):
        run.scaler.step(run.optimizer, closure)
    if not run.sam:
        assert all(map(torch.equal, run.model.parameters(), before))


@every
def test_the_closures_own_error_comes_through(kind) -> None:
    """And if the caller catches it, the next iteration goes on."""
    run, plain = Task(kind, scaler()), unscaled(kind)

    def closure() -> torch.Tensor:
        raise KeyError("mine")

    for task in (run, plain):
        task.step()
        if task.sam:
            task.closure()
        with pytest.raises(KeyError, match="mine"):
            task.scaler.step(task.optimizer, closure)
        task.scaler.update(2.0**10)
        task.step()
    assert run.bits() == plain.bits()


def test_several_optimizers_one_with_a_closure() -> None:
    """A lost loss of one iteration spoils what steps after it, and each skips for itself."""
    run = Task("lbfgs", scaler(growth_interval=100))
    w = torch.ones(2, requires_grad=True)
    other = torch.optim.SGD([w], lr=0.5)
    run.scaler.scale(w.sum()).backward()
    run.scaler.step(other)
    run.spoil = {1: "gradient"}
    run.scaler.step(run.optimizer, run.closure)
    run.scaler.update()
    assert w.tolist() == [0.5, 0.5]
    assert bool(run.scaler.step_skipped(run.optimizer))
    assert not bool(run.scaler.step_skipped(other))
    assert run.scaler.get_scale() == 2.0**9


def test_two_models_with_closures_share_a_scaler() -> None:
    first, shared = Task("lbfgs", scaler(growth_interval=100)), scaler(growth_interval=100)
    one, two = Task("lbfgs", shared), Task("sam", shared)
    for _ in range(2):
        first.step()
        shared.step(one.optimizer, one.closure)
        two.closure()
        shared.step(two.optimizer, two.closure)
        shared.update()
    assert one.bits() == first.bits()
    alone = unscaled("sam")
    alone.step()
    alone.step()
    assert two.bits() == alone.bits()
    assert shared.state_dict()["_growth_tracker"] == 2


@every
def test_stepping_twice_is_an_error(kind) -> None:
    run = Task(kind, scaler())
    if run.sam:
        run.closure()
    run.scaler.step(run.optimizer, run.closure)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called since"):
        run.scaler.step(run.optimizer, run.closure)


class Stubborn(torch.optim.Optimizer):
    """Counts in its group and beside its parameters, and goes on after an error of the closure."""

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        self.param_groups[0]["k"] += 1
        self.state["all"] = {"k": self.param_groups[0]["k"]}
        try:
            closure()
        except Exception:
            pass
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_parameters_may_get_their_values_in_the_closure() -> None:
    model, x = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1)), torch.randn(8, 3)
    optimizer, own = torch.optim.SGD(model.parameters(), lr=0.125), scaler()

    def closure() -> torch.Tensor:
        loss = model(x).square().mean()
        own.scale(loss).backward()
        return loss

    assert own.step(optimizer, closure).isfinite()


def test_a_step_is_taken_back_whatever_the_optimizer_does_with_errors() -> None:
    w = torch.ones(2, requires_grad=True)
    optimizer = Stubborn([w], {"k": 0})
    scaler = GradScaler("cpu")

    def run(factor: float) -> tuple[Any, ...]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = w.sum() * factor
            scaler.scale(loss).backward()
            return loss

        scaler.step(optimizer, closure)
        scaler.update()
        return w.tolist(), optimizer.param_groups[0]["k"], dict(optimizer.state)

    assert run(INF) == ([1.0, 1.0], 0, {})
    assert run(1.0) == ([0.0, 0.0], 1, {"all": {"k": 1}})
    assert run(NAN) == ([0.0, 0.0], 1, {"all": {"k": 1}})
    assert int(scaler.skipped_steps) == 2
