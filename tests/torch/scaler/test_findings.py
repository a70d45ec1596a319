"""A scaler's reports of its checks: step_skipped, skipped_steps, report()."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from polymp.scaling import Gradient
from polymp.torch import GradScaler
from tests.torch.scaler.test_safety import DECIDERS, everywhere

INF, NAN = float("inf"), float("nan")
pytestmark = pytest.mark.filterwarnings("ignore:.*invariant checks:UserWarning")


def start(by: str, **options: Any) -> tuple[torch.Tensor, torch.optim.Optimizer, GradScaler]:
    w = torch.ones(3, requires_grad=True)
    return w, DECIDERS[by]([w]), GradScaler("cpu", **{"init_scale": 8.0} | options)


def backward(scaler: GradScaler, w: torch.Tensor, bad: float | None = None) -> None:
    w.grad = None
    scaler.scale(w.sum()).backward()
    if bad is not None:
        w.grad[1] = bad


def iterate(
    scaler: GradScaler, optimizer: torch.optim.Optimizer, w: torch.Tensor, bad: float | None = None
) -> None:
    backward(scaler, w, bad)
    scaler.step(optimizer)
    scaler.update()


@everywhere
@pytest.mark.parametrize("bad", [None, INF, NAN])
@pytest.mark.parametrize("unscale", [False, True])
def test_step_skipped_before_and_after_step_and_update(by, bad, unscale) -> None:
    w, optimizer, scaler = start(by)
    for _ in range(2):  # the second iteration answers for itself
        backward(scaler, w, bad)
        if unscale:
            scaler.unscale_(optimizer)
            assert bool(scaler.step_skipped(optimizer)) == (bad is not None)
        scaler.step(optimizer)
        for _ in range(2):
            said = scaler.step_skipped(optimizer)
            assert (said.dtype, said.shape, said.device) == (torch.bool, (), w.device)
            assert bool(said) == (bad is not None)
            if scaler._per_optimizer_states:
                scaler.update()


def test_what_was_never_stepped_or_long_ago_is_an_error() -> None:
    w, optimizer, scaler = start("host")
    with pytest.raises(RuntimeError, match="in this iteration or the last: call step"):
        scaler.step_skipped(optimizer)
    iterate(scaler, optimizer, w)
    v, other, _ = start("host")
    iterate(scaler, other, v)
    with pytest.raises(RuntimeError, match="in this iteration or the last"):
        scaler.step_skipped(optimizer)


finite = [0.0, -0.0, 1.0, -3.0, 2.0**-14, 2.0**-17, 2.0**-17 * 0.999, -(2.0**-30), 1e-40]
rows = st.one_of(
    st.lists(st.lists(st.sampled_from(numbers), min_size=1, max_size=12), min_size=1, max_size=5)
    for numbers in (finite, [*finite, INF, -INF, NAN])
)


def counted(grad: np.ndarray[Any, Any], scale: float) -> tuple[int, ...]:
    """Inf, NaN, zero, subnormal, by numpy; of the true gradient and the scale."""
    size = np.abs(grad)
    with np.errstate(invalid="ignore"):
        small = (size != 0) & (size * scale < 2.0**-14)
    return tuple(int(a.sum()) for a in (np.isinf(size), np.isnan(size), size == 0, small))


def given_gradients(
    values: list[list[float]], dtype: torch.dtype, by: str
) -> tuple[list[np.ndarray[Any, Any]], GradScaler, torch.optim.Optimizer]:
    """True gradients, a scaler of scale 8 that has looked at the scaled ones, and the optimizer."""
    params, true = [], []
    for row in values:
        t = torch.tensor(row, dtype=torch.float64).to(dtype)
        if dtype.is_complex:
            t = torch.complex(t.real, t.real.flip(0))
        p = torch.zeros_like(t).requires_grad_()
        p.grad = torch.view_as_complex(torch.view_as_real(t) * 8) if t.is_complex() else t * 8
        params.append(p)
        true.append(t.numpy() + 0)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    optimizer = DECIDERS[by](params)
    scaler.step(optimizer)
    scaler.update(8.0)
    return true, scaler, optimizer


@everywhere
@given(values=rows)
def test_counts_are_numpys(by, values) -> None:
    true, scaler, _optimizer = given_gradients(values, torch.float32, by)
    report = scaler.report()
    assert [g[2:] for g in report.gradients] == [counted(t, 8.0) for t in true]
    assert [g.shape for g in report.gradients] == [t.shape for t in true]
    size = sum(t.size for t in true)
    lost = sum(sum(counted(t, 8.0)[2:]) for t in true)
    assert report.underflowed == lost / size
    assert [g.name for g in report.bad] == [
        f"group 0, parameter {i}" for i, t in enumerate(true) if not np.isfinite(t).all()
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128], ids=str)
@given(values=rows)
def test_counts_of_wide_and_complex_gradients(dtype, values) -> None:
    true, scaler, _optimizer = given_gradients(values, dtype, "host")
    # Inf beside NaN is Inf, as numpy and torch have it.
    assert [g[2:5] for g in scaler.report().gradients] == [counted(t, 8.0)[:3] for t in true]


@pytest.mark.parametrize("unique", [True, False])
def test_what_a_sparse_gradient_lacks_is_zero(unique) -> None:
    p = torch.zeros(5, 4, requires_grad=True)
    where = torch.tensor([[0, 3 if unique else 0]])
    each = torch.tensor([[1.0, 0.0, INF, 2.0**-20], [1.0, 0.0, 0.0, 0.0]])
    p.grad = torch.sparse_coo_tensor(where, each, (5, 4))
    optimizer, scaler = torch.optim.SGD([p], lr=1.0), GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    wanted = counted(p.grad.to_dense().numpy(), 2.0)
    assert scaler.report().gradients == (Gradient("group 0, parameter 0", (5, 4), *wanted),)
    assert wanted[0] == 1
    assert wanted[2] == (16 if unique else 17)


@everywhere
def test_a_report_before_and_after_unscaling_says_the_same(by) -> None:
    """Fused optimizers unscale by themselves; gradients stay scaled in a step that they skip."""
    w, optimizer, scaler = start(by)
    for bad in (0.0, INF):
        backward(scaler, w)
        w.grad.copy_(torch.tensor([2.0**-13, 2.0**-15, bad]))
        if by == "fused":
            scaler._check_inf_per_device(optimizer)
            assert scaler.report().gradients[0][4:] == (int(bad == 0), 1)
        scaler.step(optimizer)
        (row,) = scaler.report().gradients
        assert row[2:] == (int(bad == INF), 0, int(bad == 0), 1)
        scaler.update(8.0)
        assert scaler.report().gradients == (row,)
        assert w.grad[0] == 2.0 ** (-13 if by == "fused" and bad else -16)


def test_after_zero_grad_there_is_nothing_to_say() -> None:
    w, optimizer, scaler = start("host")
    iterate(scaler, optimizer, w, INF)
    assert len(scaler.report().bad) == 1
    optimizer.zero_grad()
    report = scaler.report()
    assert report.gradients == ()
    assert (report.underflowed, report.bad) == (0.0, ())
    assert "no gradients: call report() after step and before zero_grad" in str(report)
    assert report.state.skips == 1


def test_reports_before_anything_and_after_the_optimizer_is_gone() -> None:
    w, optimizer, scaler = start("host")
    assert scaler.report().gradients == ()
    iterate(scaler, optimizer, w)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None, "the scaler keeps optimizers alive"
    assert scaler.report().gradients == ()


def test_the_table() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    scaler = GradScaler("cpu", 16.0)
    scaler.scale(model(torch.ones(1, 2)).sum() * 0).backward()
    model[1].weight.grad.copy_(torch.tensor([[INF, NAN]]))
    model[0].bias.grad.fill_(2.0**-16)
    scaler.step(optimizer)
    scaler.update()
    assert str(scaler.report()).splitlines() == [
        "the loss scale is 8; 1 step skipped so far, among them the last",
        "1 of 4 gradients have Inf or NaN",
        "77.8% of all values are 0 or below normal float16 numbers",
        "          size  Inf  NaN    zero  subnormal",
        "--------  ----  ---  ---  ------  ---------",
        "1.weight     2    1    1    0.0%       0.0%",
        "0.weight     4    0    0  100.0%       0.0%",
        "0.bias       2    0    0    0.0%     100.0%",
        "1.bias       1    0    0  100.0%       0.0%",
    ]


def names(optimizer: torch.optim.Optimizer) -> list[str]:
    scaler = GradScaler("cpu")
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    return [g.name for g in scaler.report().gradients]


def test_names_from_wherever_they_are_known() -> None:
    model = nn.Linear(2, 1)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    plain = torch.optim.SGD(groups, lr=0.1)
    own = torch.optim.SGD(model.named_parameters(prefix="own"), lr=0.1)
    assert names(plain) == ["group 0, parameter 0", "group 1, parameter 0"]
    assert names(own) == ["own.weight", "own.bias"]


@everywhere
@pytest.mark.parametrize("first", [None, INF], ids=["first good", "first skipped"])
@given(history=st.lists(st.sampled_from([None, None, INF, NAN]), max_size=6))
def test_a_scheduler_goes_on_with_taken_steps_only_and_does_not_warn(by, first, history) -> None:
    """The recipe. Warnings are errors here, and torch warns of a scheduler that is ahead."""
    w, optimizer, scaler = start(by)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    taken = 0
    for bad in (first, *history):
        iterate(scaler, optimizer, w, bad)
        if not scaler.step_skipped(optimizer):
            scheduler.step()
        taken += bad is None
        assert scheduler.last_epoch == taken
        assert scheduler.get_last_lr() == [0.5 * 0.5**taken]


def test_gradients_that_are_not_unscaled_yet_are_not_counted_as_those_of_the_last_step() -> None:
    """They are scaled: to scale them once more would hide what underflowed."""
    w = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.5)
    scaler = GradScaler("cpu")
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale((w * 1e-10).sum()).backward()
        assert scaler.report().gradients == ()
        scaler.unscale_(optimizer)
        assert [g.subnormal for g in scaler.report().gradients] == [2]
        scaler.step(optimizer)
        scaler.update()
        assert [g.subnormal for g in scaler.report().gradients] == [2]
