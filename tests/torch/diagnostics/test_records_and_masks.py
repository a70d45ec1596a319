"""Faults of the past: records in records, closures, masks, scales that do not fit."""

import gc
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import polymp
from polymp.torch import GradScaler, audit, autocast, explain, locate, record

LOW = torch.float16


def test_gradients_that_overflow_by_a_large_scale_need_another_scale() -> None:
    """The loss is cast up after the model, so the first Inf is made by a cast on the way in."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    scaler, optimizer = GradScaler("cpu", init_scale=2.0**24), torch.optim.SGD(model.parameters())
    with audit(model, scaler) as a:
        with autocast("cpu", torch.float16):
            loss = model(x).float().pow(2).mean() * 50
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert a.fault.direction == "backward"
    suggestion = a.suggest()
    assert suggestion.dtype is None
    assert suggestion.init_scale is not None
    assert suggestion.init_scale < 2.0**16


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SGD])
def test_what_a_closure_runs_is_measured(kind: type[torch.optim.Optimizer]) -> None:
    def trained(watched: bool) -> tuple[list[torch.Tensor], Any]:
        torch.manual_seed(0)
        net, x = nn.Linear(4, 2), torch.randn(8, 4)
        optimizer: Any = kind(net.parameters(), lr=0.1)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            with autocast("cpu", torch.bfloat16):
                loss = net(x).float().square().mean()
            loss.backward()
            return loss

        with audit(net) if watched else nullcontext() as found:
            optimizer.step(closure)
        return [p.detach() for p in net.parameters()], found

    (plain, _), (same, found) = trained(False), trained(True)
    assert all(map(torch.equal, plain, same))
    ops = [m.op for m in found.results if m.direction == "forward"]
    assert ops == ["linear", "pow", "mean"]
    assert {m.module for m in found.gradients} == {"weight", "bias"}


def test_an_audit_inside_an_explanation_leaves_no_rows_of_its_own() -> None:
    net, x = nn.Linear(4, 2), torch.randn(8, 4)

    def rows(audited: bool) -> list[tuple[str, str]]:
        net.zero_grad()
        with polymp.torch.explain(model=net) as report, autocast("cpu", torch.bfloat16):
            with audit(net) if audited else nullcontext():
                net(x).sum().backward()
        return [(call.op, call.direction) for call in report]

    assert rows(audited=True) == rows(audited=False)


def test_a_mask_that_float16_rounds_to_inf_is_no_fault() -> None:
    """Scores and the lowest float16: below that is -Inf, of which a softmax makes 0 as well."""
    scores, mask = torch.full((4, 4), -20.0), torch.full((4, 4), torch.finfo(torch.float16).min)
    mask = mask.half().triu(1)

    def attend(weight: torch.Tensor) -> torch.Tensor:
        return (scores.half() + mask * weight.half()).softmax(-1)

    assert locate(attend, torch.ones(())) is None
    assert locate(lambda: 1 / (scores.half() * 1e4)) is not None, "x / Inf hides an overflow"


def spread(p: torch.Tensor) -> torch.Tensor:
    return (p.half() - p.half().mean()) / (p.half().std() + 1e-8)


SCALED: dict[str, tuple[Any, torch.Tensor, bool]] = {
    "a quotient": (lambda p: p.half() / (p.half().abs().amax() + 1e-8), torch.zeros(3, 4), True),
    "a root": (lambda p: (p.half() + 1e-12).sqrt(), torch.zeros(3, 4), True),
    "a spread": (spread, torch.ones(3, 4), False),
    "two products": (lambda p: (p.half() * 3e4).float() * 1e6, torch.zeros(3, 4), False),
}


@pytest.mark.filterwarnings("ignore:GradScaler is not needed")
@pytest.mark.parametrize("name", SCALED)
def test_suggestions_end(name: str) -> None:
    """Each is followed; a scale is not halved again and again: that which fits was measured."""
    forward, x, helps = SCALED[name]
    policy, scale, dtype, seen = polymp.policy("torch-cpu"), 2.0**16, LOW, list[Any]()
    for _ in range(8):
        p, scaler = nn.Parameter(x.clone()), GradScaler("cpu", init_scale=scale)
        with audit(None, scaler) as found:
            with autocast("cpu", dtype, policy=policy):
                loss = forward(p).sum().float()
            scaler.scale(loss).backward()
        suggestion = found.suggest(policy)
        seen.append(suggestion)
        if not suggestion:
            break
        policy, scale = suggestion.apply(policy), suggestion.init_scale or scale
        dtype = torch.bfloat16 if suggestion.dtype else dtype
    assert not seen[-1]
    assert sum(one.init_scale is not None for one in seen) <= 2
    assert bool(p.grad.isfinite().all()) == helps
    assert helps or seen[-1].reasons[0].endswith("asks for float16: change that.")


def test_no_scale_is_said_to_fit_where_gradients_overflowed_on_the_way() -> None:
    """The first op that overflows hides how large later gradients are, and the true scale is 256.

    An op of the backward pass multiplies by 300, after others have made Inf already.
    """
    torch.manual_seed(0)
    net, x, scale = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 4)), torch.randn(4, 8), 2.0**16
    for _ in range(4):
        scaler = GradScaler("cpu", init_scale=scale)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        with audit(net, scaler) as found:
            for _ in range(2):
                optimizer.zero_grad()
                with autocast("cpu", torch.float16):
                    loss = (net(x) * 300).norm(dim=-1).mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        suggestion = found.suggest("torch-cpu")
        assert (found.fitting_scale() is None) == (int(scaler.skipped_steps) > 0)
        if not suggestion:
            break
        scale = suggestion.init_scale or 0.0
        assert suggestion.reasons[0].endswith(f"; try {scale:g}.")
    assert not int(scaler.skipped_steps)
    assert 2.0**4 < scale < 2.0**16


def test_the_fitting_scale_is_of_gradients_that_float16_holds() -> None:
    """A float32 gradient of 2**20 does not keep the scale down."""
    net, x = nn.Linear(4, 1), torch.ones(1, 4)
    with audit(net) as found:
        with autocast("cpu", torch.float16):
            low = net(x)
        (low.float() * torch.full((1, 1), 2.0**20) * 2.0**-20).sum().backward()
    largest = max(m.magnitudes.largest for m in found.backward if m.run == "float16")
    assert largest == 1
    assert found.fitting_scale() == 2.0**14
    with audit(net) as found:
        with autocast("cpu", torch.float16):
            loss = (net(x) * 1e-4).sum()
        loss.backward()  # its own gradient is 1, and times the scale
    assert (loss.dtype, found.fitting_scale()) == (torch.float16, 2.0**14)


def test_what_was_not_measured_gets_no_suggestion() -> None:
    with (block := audit()):
        pass
    for unused in (block, audit(nn.Linear(2, 2))):
        with pytest.raises(ValueError, match="nothing was measured"):
            unused.suggest()
    with pytest.raises(TypeError, match=r"around steps, and needs .* a GradScaler, got 0\.5"):
        audit(nn.Linear(2, 2), 0.5)
    with pytest.raises(RuntimeError, match="was entered before"), block:
        raise AssertionError("entered")
    with (again := audit()), pytest.raises(RuntimeError, match="was entered before"), again:
        raise AssertionError("entered")
    sgd = torch.optim.SGD(nn.Linear(2, 2).parameters())
    for no_module, said in ((sgd, r"SGD \( Parameter .* \)"), ("net", r"'net'")):
        with pytest.raises(TypeError, match=rf"torch.nn.Module, got {said}\. It is .*with audit\("):
            audit(no_module)


def test_only_what_ran_ops_without_a_fault_is_called_healthy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert locate(lambda x: x**0.5, 2.0) is None
    assert "the step ran no op of torch on floats in this thread" in capsys.readouterr().err
    assert locate(lambda: torch.ones(3) / 0) is not None
    assert not capsys.readouterr().err


@pytest.mark.parametrize("tool", ["audit", "explain", "locate", "record"])
def test_no_tensor_is_left_when_a_tool_has_ended(tool: str) -> None:
    """And none waits for Python's collector, which may come many steps later."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tools: Any = {"audit": audit, "explain": explain, "record": partial(record, None)}

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        with autocast("cpu", torch.bfloat16):
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    def looked_at() -> int:
        if tool == "locate":
            assert locate(step, model=model) is None
        else:
            with tools[tool](model=model):
                step()
        return sum(isinstance(it, torch.Tensor) for it in gc.get_objects())

    looked_at()
    gc.collect()
    gc.disable()
    try:
        assert len({looked_at() for _ in range(3)}) == 1
    finally:
        gc.enable()
