"""`GradScaler` cannot lose a run: bounds, hysteresis, lost losses, rows of skips, honest use."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from polymp.errors import ScalerWarning, StuckError
from polymp.scaling import GradientReport
from polymp.torch import GradScaler
from tests.support.torch import each_op

INF, NAN = float("inf"), float("nan")
Optimizer = torch.optim.Optimizer

# Who decides that a step is skipped: the host, or the optimizer on the device.
DECIDERS: dict[str, Callable[[Any], Optimizer]] = {
    "host": lambda p: torch.optim.SGD(p, lr=0.5),
    "fused": lambda p: torch.optim.SGD(p, lr=0.5, fused=True),
}
everywhere = pytest.mark.parametrize("by", DECIDERS)


class Run:
    """One weight, one optimizer, one scaler, and what losses do to them."""

    def __init__(self, by: str = "host", **options: Any) -> None:
        self.w = torch.tensor([1.0, -2.0], requires_grad=True)
        self.optimizer = DECIDERS[by]([self.w])
        self.scaler = GradScaler("cpu", **{"init_scale": 8.0, "on_stuck": "raise"} | options)

    def iterate(self, *factors: float, overflow: bool = False) -> None:
        """One iteration of a microbatch for each factor: its loss is `w.sum() * factor`."""
        self.optimizer.zero_grad()
        for factor in factors:
            self.scaler.scale((self.w * factor).sum()).backward()
        if overflow:
            self.w.grad[1] = INF
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def overflow(self) -> None:
        self.iterate(1.0, overflow=True)

    def skip(self, factor: float) -> None:
        """One iteration that is skipped: an overflow, or a loss that is NaN by its factor."""
        self.iterate(factor, overflow=factor == 1.0)

    @property
    def state(self) -> dict[str, Any]:
        return self.scaler.state_dict()


@everywhere
@pytest.mark.parametrize("at", range(3))
def test_one_lost_loss_among_three_microbatches_spoils_the_step(by, at) -> None:
    run = Run(by)
    before = run.w.detach().clone()
    run.iterate(*(NAN if i == at else 1.0 for i in range(3)))
    assert torch.equal(run.w, before)
    assert (run.state["scale"], run.state["spoiled"]) == (4.0, 1)
    run.iterate(1.0, 1.0, 1.0)  # and nothing of it is left in the next
    assert torch.equal(run.w, before - 1.5)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 2), (0,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.bfloat16])
def test_losses_of_every_shape_are_looked_at(shape, dtype) -> None:
    for spoil in (False, True):
        run = Run()
        factor = torch.ones(shape, dtype=dtype)
        if spoil and factor.numel():
            factor.view(-1)[-1] = INF
        scaled = run.scaler.scale(run.w.sum().to(dtype) * factor)
        scaled.sum().backward()
        run.scaler.step(run.optimizer)
        run.scaler.update()
        assert run.state["spoiled"] == int(spoil and factor.numel() > 0)


def test_losses_in_lists_and_tuples_are_all_looked_at() -> None:
    run = Run()
    good, bad = run.w.sum(), run.w.sum() * NAN
    scaled = run.scaler.scale((good, [good, bad]))
    torch.autograd.backward([scaled[0], *scaled[1]])
    run.scaler.step(run.optimizer)
    run.scaler.update()
    assert run.state["spoiled"] == 1


def test_a_value_that_overflows_when_scaled_only_is_no_lost_loss() -> None:
    run = Run(init_scale=2.0**16)
    run.iterate(1e37)  # the loss is finite; its scaled gradient is not
    assert [run.state[k] for k in ("scale", "spoiled", "skips")] == [2.0**15, 0, 1]


@pytest.mark.parametrize("fused", [False, True])
def test_a_lost_loss_skips_the_optimizers_whose_gradients_come_from_it(fused: bool) -> None:
    weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
    optimizers = [torch.optim.SGD([w], lr=0.5, fused=fused) for w in weights]
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(weights[0].sum()).backward()
    scaler.scale(weights[1].sum() * INF).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [w.tolist() for w in weights] == [[0.5, 0.5], [1.0, 1.0]]
    assert [bool(scaler.step_skipped(optimizer)) for optimizer in optimizers] == [False, True]
    assert [scaler.state_dict()[k] for k in ("scale", "skips", "spoiled")] == [4.0, 1, 1]


def given_up(kind: Any, make: Any, when: str) -> tuple[list[float], Any]:
    """A loop of four steps, whose second meets NaN and goes on to the next; and its scaler."""
    w = torch.ones(1, requires_grad=True)
    optimizer, scaler, seen = make([w]), kind("cpu", init_scale=8.0), []
    for step in range(4):
        optimizer.zero_grad()
        loss = scaler.scale((w * (NAN if step == 1 else 0.2)).sum())
        if when == "before backward" and not loss.isfinite():
            continue
        loss.backward()
        if when == "before step" and not loss.isfinite():
            continue
        scaler.step(optimizer)
        scaler.update()
        seen.append(round(w.item(), 4))
    return seen, scaler


@everywhere
@pytest.mark.parametrize("when", ["before backward", "before step"])
def test_a_loss_that_was_given_up_skips_no_later_step(by, when) -> None:
    make = DECIDERS[by]
    seen, scaler = given_up(GradScaler, make, when)
    assert seen == [0.9, 0.8, 0.7]
    assert seen == given_up(torch.amp.GradScaler, make, when)[0]
    assert [scaler.state_dict()[k] for k in ("_growth_tracker", "spoiled", "skipped")] == [3, 0, 0]
    # Nor is an overflow taken for a lost loss after the next update.
    w = scaler.scale(torch.ones(())), torch.zeros(1, requires_grad=True)
    w[1].grad = torch.full((1,), INF)
    scaler.step(make([w[1]]))
    scaler.update()
    assert [scaler.state_dict()[k] for k in ("scale", "spoiled", "skipped")] == [4.0, 0, 1]


@everywhere
@pytest.mark.parametrize("hysteresis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_under_another_default_dtype(by, hysteresis, dtype) -> None:
    def play() -> dict[str, Any]:
        run = Run(by, hysteresis=hysteresis)
        run.w = run.w.float().detach().requires_grad_()
        run.optimizer = DECIDERS[by]([run.w])
        for factor in (1.0, INF, 1.0, INF, 1.0):
            run.iterate(factor)
            run.scaler.report()
        return run.state | {"w": run.w.tolist()}

    expected = play()
    torch.set_default_dtype(dtype)
    try:
        assert play() == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_first_scale_that_is_interrupted_at_any_line_can_be_made_again() -> None:
    runs: list[Run] = []

    def first(at: int) -> None:
        runs.append(Run("fused"))
        loss = runs[-1].w.sum()
        each_op.interrupted(lambda: runs[-1].scaler.scale(loss), at)

    assert len(list(each_op.at_every_line(first))) > 30
    for run in runs:
        run.iterate(1.0)
        run.overflow()
        assert [run.state[k] for k in ("scale", "skipped")] == [4.0, 1]
        assert run.w.tolist() == [0.5, -2.5]


def play(run: Run, rows: list[int], good: int = 1) -> None:
    for row in rows:
        for _ in range(row):
            run.overflow()
        for _ in range(good):
            run.iterate(1.0)


@everywhere
@pytest.mark.parametrize("after", [1, 2, 5, 50])
def test_a_function_is_called_once_for_each_row_that_is_too_long(by, after) -> None:
    told: list[GradientReport] = []
    run = Run(by, on_stuck=told.append, stuck_after=after)
    # The host learns of what the device did at most seven updates later.
    late = 0 if by == "host" else 7
    play(run, [after + late, after - 1, after + late + 3, after + late])
    assert len(told) == 3
    if by == "host":
        assert [t.state.skips for t in told] == [after] * 3
    assert all(after <= t.state.skips <= after + late for t in told)


@everywhere
def test_warn_says_it_once(by) -> None:
    run = Run(by, on_stuck="warn", stuck_after=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        play(run, [30])
    assert [(w.category, w.filename) for w in caught] == [(ScalerWarning, __file__)]
    assert "steps in a row were skipped" in str(caught[0].message)


@everywhere
def test_raise_raises_when_everything_is_updated(by) -> None:
    run = Run(by, on_stuck="raise", stuck_after=5)
    with pytest.raises(StuckError, match=r"^\d+ steps in a row were skipped; the loss scale is "):
        play(run, [20])
    updates = run.state["skips"]
    assert updates == 5 if by == "host" else 5 <= updates <= 5 + 7
    assert run.state["scale"] == 8.0 * 0.5**updates
    run.overflow()  # told once in a row
    assert run.state["skips"] == updates + 1


def test_the_message_says_what_was_seen_and_what_to_try() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0, on_stuck="raise", stuck_after=2)

    def skip() -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        model[0].weight.grad[0, 0] = INF
        model[0].weight.grad[2, 1] = NAN
        model[1].bias.grad.fill_(-INF)
        scaler.step(optimizer)
        scaler.update()

    skip()
    with pytest.raises(StuckError) as raised:
        skip()
    assert str(raised.value) == (
        "2 steps in a row were skipped; the loss scale is 2. Inf or NaN in 2 of 4 gradients: "
        "0.weight (1 Inf, 1 NaN of 6), 1.bias (1 Inf, 0 NaN of 1). Gradients that overflow at any "
        "loss scale come from values beyond float16's largest, 65504: bfloat16 has the range of "
        "float32, and needs no scaler. To find the op, call polymp.torch.locate or "
        "polymp.jax.locate with the step; to run it in float32, give it a row: "
        "policy.override(fp32=[op])."
    )


@pytest.mark.parametrize(
    ("kinds", "said", "unsaid"),
    [
        ((NAN, NAN), "In 2 of these steps the loss itself was not finite", "overflow at any"),
        ((1.0, NAN), "In 1 of these steps the loss itself was not finite", "nothing"),
        ((1.0, 1.0), "Gradients that overflow at any loss scale", "loss itself"),
        ((1.0, 1.0), "the loss scale is 4 (its lower bound).", "loss itself"),
    ],
)
def test_the_message_says_what_was_skipped_and_at_which_scale(kinds, said, unsaid) -> None:
    run = Run(stuck_after=2, min_scale=4.0)
    run.skip(kinds[0])
    with pytest.raises(StuckError) as raised:
        run.skip(kinds[1])
    assert said in str(raised.value)
    assert unsaid not in str(raised.value)


def test_the_message_says_when_the_gradients_that_overflowed_are_gone() -> None:
    run = Run(stuck_after=1)
    run.scaler.scale((run.w * NAN).sum()).backward()
    run.scaler.step(run.optimizer)
    run.w.grad.zero_()
    with pytest.raises(StuckError, match="No gradient here has Inf or NaN now"):
        run.scaler.update()


@pytest.mark.parametrize("fused", [False, True])
def test_skips_are_counted_under_a_scale_that_is_given(fused: bool) -> None:
    w = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=1.0, fused=fused)
    told: list[Any] = []
    scaler = GradScaler("cpu", on_stuck=told.append, stuck_after=3)
    for scale in (8.0, torch.tensor(4.0), 2.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0):
        optimizer.zero_grad()
        scaler.scale(w.sum()).backward()
        w.grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update(scale)
        assert scaler.get_scale() == float(scale)
        assert scaler._get_growth_tracker() == 0
    said = scaler.skipped_steps
    assert (said.dtype, said.shape, int(said)) == (torch.int32, (), 9)
    assert w.tolist() == [1.0, 1.0]
    assert len(told) == 1


@everywhere
@pytest.mark.parametrize("first", [1e38, 3.4e38, 2.0**127, 2.0**-127, 1e-40, 1e-45])
def test_a_first_scale_beyond_the_bounds_is_torchs_and_writes_no_nan(by, first) -> None:
    run = Run(by, init_scale=first, growth_interval=2)
    theirs = torch.amp.GradScaler("cpu", init_scale=first, growth_interval=2)
    assert run.scaler.get_scale() == theirs.get_scale() == first
    w = torch.tensor([1.0, -2.0], requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.5)
    factor = 2.0**-12 if first > 1 else 1.0
    for step in range(6):
        run.iterate(factor if step != 3 else INF * factor)
        if step == 0 and first > 2.0**-128:  # less has no inverse, and is backed off from
            optimizer.zero_grad()
            theirs.scale((w * factor).sum()).backward()
            theirs.step(optimizer)
            theirs.update()
            assert torch.equal(run.w, w)
            assert theirs.state_dict().items() <= run.state.items()
        assert run.w.isfinite().all()
    assert run.state["scale"] <= 2.0**126
    assert run.state["scale"] >= 2.0**-126 or by == "fused"  # which divides by it
    assert not torch.equal(run.w, torch.tensor([1.0, -2.0]))
