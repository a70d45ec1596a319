"""`GradScaler` with parameters on several devices, and with findings that subclasses change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from polymp.torch import GradScaler
from tests.support.torch.each_op import EachOp
from tests.torch.scaler.test_torch_amp_interface import BOTH, ready, sgd, weight


def unscaled(op: Any, args: Any, _: Any) -> list[tuple[str, torch.dtype]] | None:
    """Devices and dtypes of the gradients that are unscaled in one call."""
    if op is not torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
        return None
    gradients, found, inverse = args
    assert {t.device for t in gradients} == {found.device} == {inverse.device}
    return [(str(t.device), t.dtype) for t in gradients]


class Fused(torch.optim.Optimizer):
    """Keeps what a scaler hands to an optimizer that decides on the device."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> Any:
        return self.grad_scale, self.found_inf  # type: ignore[attr-defined]


@BOTH
def test_gradients_of_several_devices_are_unscaled_where_they_are(kind: Any) -> None:
    """On fake devices: each has a copy of the inverse and a finding of its own."""
    devices = [torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")]
    calls: list[tuple[Any, ...]] = []

    class Watched(kind):  # type: ignore[misc]
        def _unscale_grads_(self, *args: Any) -> Any:
            found = super()._unscale_grads_(*args)
            calls.append(tuple(found))
            return found

    with FakeTensorMode():
        scaler = Watched("cpu")
        scaled = scaler.scale([torch.ones((), device=d) for d in devices])
        assert [t.device for t in scaled] == devices
        assert scaler._scale.device == devices[0]
        weights = [torch.ones(2, device=d) for d in (*devices, devices[2])]
        weights.append(torch.ones(2, device=devices[1], dtype=torch.float64))
        for w in weights:
            w.grad = torch.ones_like(w)
        optimizer, other = Fused(weights, {}), Fused(weights[1:2], {})
        with EachOp(unscaled) as unscalings:
            scaler.unscale_(optimizer)
        assert sorted(unscalings.seen, key=str) == [
            [("cpu", torch.float32)],
            [("cuda:0", torch.float32)],
            [("cuda:0", torch.float64)],
            [("cuda:1", torch.float32)] * 2,
        ]
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        assert [(d, t.device, t.dtype, t.shape) for d, t in found.items()] == [
            (d, d, torch.float32, torch.Size([])) for d in devices
        ]
        scale, combined = scaler.step(optimizer)
        assert (scale, combined.device) == (None, devices[0])
        scale, combined = scaler.step(other)
        assert (scale.device, combined.device) == (devices[0], devices[0])
        scaler.update()
        assert scaler._scale.device == devices[0]
    assert calls == [tuple(devices), (devices[1],)]


@pytest.mark.parametrize("which", [0, 1, 2, None])
def test_a_finding_on_any_device_skips_the_whole_step_and_counts_once(which: int | None) -> None:
    class Devices(GradScaler):
        def _unscale_grads_(self, *args: Any) -> Any:
            super()._unscale_grads_(*args)
            return {at: torch.tensor(float(at == which)) for at in range(3)}

    def run(optimizer: Any) -> tuple[Any, ...]:
        scaler = ready(Devices, growth_interval=1)
        result = scaler.step(optimizer)
        scaler.update()
        return result, scaler.get_scale()

    w = weight()
    run(sgd(w))
    assert w.tolist() == ([0.875, 0.875] if which is None else [1.0, 1.0])
    (_, found), scale = run(Fused([weight()], {}))
    assert (found.item(), scale) == ((0.0, 8.0) if which is None else (1.0, 2.0))


@pytest.mark.parametrize("factor", [2.0, 0.5], ids=["sum", "mean"])
@pytest.mark.parametrize("kind", ["host", "fused", "undone"])
def test_sums_and_means_of_findings_over_ranks_skip_and_count_once(
    kind: str, factor: float
) -> None:
    """Fused kernels of torch skip for 1 and for nothing else."""
    w = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.5, fused=kind == "fused")
    scaler = GradScaler("cpu", skip_on="device" if kind == "undone" else "auto")
    scaler.scale(w.sum()).backward()
    assert w.grad is not None
    w.grad[0] = float("inf")
    scaler.unscale_(optimizer)
    for found in scaler._found_inf_per_device(optimizer).values():
        found.mul_(factor)
    scaler.step(optimizer)
    scaler.update()
    assert w.tolist() == [1.0, 1.0]
    state = scaler.state_dict()
    assert (state["skips"], state["skipped"], state["scale"]) == (1, 1, 2.0**15)
