"""`freeze`: where a frozen model may be called, copied and loaded, and what a trial undoes."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polymp
from polymp import PolicyError
from polymp.backends.torch.weights import freeze as freezing
from polymp.backends.torch.weights import freeze_usage
from polymp.torch import autocast, freeze, pin, scoped
from tests.support.torch.freezable_models import Mixed, Uses, bits, frozen_weights, held, plainly
from tests.support.torch.models import through_file

pytestmark = pytest.mark.usefixtures("left_as_found")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


REGIONS = {
    "none": contextlib.nullcontext,
    "its own": lambda: autocast("cpu", policy="lean"),
    "disabled": lambda: autocast("cpu", enabled=False),
    "float16": lambda: autocast("cpu", FP16, policy="lean"),
    "no policy": lambda: autocast("cpu"),
    "torch's": lambda: torch.autocast("cpu"),
    "another policy": lambda: autocast("cpu", policy="amp"),
}


@pytest.mark.parametrize("around", REGIONS)
def test_it_enters_its_region_whatever_is_around(around: str, x: torch.Tensor) -> None:
    model, other = Mixed(), Mixed()
    freeze(model, (x,), policy="lean")
    expected = plainly(other.eval(), x, policy="lean")
    with REGIONS[around]():
        assert bits(model.eval()(x)) == bits(expected)


def test_inside_a_region_it_is_frozen_for_that_one(x: torch.Tensor) -> None:
    model, other = (frozen_weights(nn.Linear(8, 8)) for _ in range(2))
    with autocast("cpu", FP16):
        assert freeze(model, (x,)).dtype == "float16"
        assert freeze(other, (x,), dtype=BF16).dtype == "bfloat16"


def test_without_gradients_only_that_is_tried(x: torch.Tensor) -> None:
    seen: list[bool] = []

    def use(m: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        return F.linear(x, m.weight)

    freeze(Uses(use), (x,))
    assert {*seen} == {True, False}
    seen.clear()
    with torch.no_grad():
        freeze(Uses(use), (x,))
    assert {*seen} == {False}
    seen.clear()
    outside = Uses(use)
    with torch.inference_mode():
        freeze(outside, (x,))
        assert not outside.weight.is_inference()
    assert {*seen} == {False}


def test_a_graph_made_before_does_not_use_the_weights_of_after(x: torch.Tensor) -> None:
    model = frozen_weights(nn.Linear(8, 8))
    y = model(x.requires_grad_()).sum()
    freeze(model, (x,))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_checkpoint_is_rounded_as_freezing_rounds_it(x: torch.Tensor) -> None:
    model, other = Mixed().eval(), Mixed().eval()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(5)))
    checkpoint = copy.deepcopy(other.state_dict())
    freeze(model, (x,))
    model.load_state_dict(checkpoint)
    assert bits(model(x)) == bits(plainly(other, x))
    freeze(other, (x,))
    ours, theirs = model.state_dict(), other.state_dict()
    assert {n: (t.dtype, bits(t)) for n, t in ours.items()} == {
        n: (t.dtype, bits(t)) for n, t in theirs.items()
    }
    assert ours["first.weight"].dtype is BF16


saved = partial(through_file, weights_only=False)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved])
@pytest.mark.parametrize("policy", [None, "lean"])
def test_it_goes_with_copies(way, policy, x) -> None:
    model = Mixed().eval()
    freeze(model, (x,), policy=policy)
    expected = bits(model(x))
    again = way(model)
    assert bits(again(x)) == expected
    assert again.first.weight.dtype is BF16
    with autocast("cpu", FP16):
        assert bits(again(x)) == expected


def test_scoped_models_follow_their_scopes(x: torch.Tensor) -> None:
    policy = polymp.policy("torch-cpu").override(name="f", scopes={"last": {"linear": "fp32"}})
    model, other = Mixed().eval(), Mixed().eval()
    scoping = scoped(model, policy)
    scoped(other, policy)
    handle = freeze(model, (x,))
    assert handle.stored == ("first.weight", "first.bias")
    assert handle.kept["last.weight"] == "read in float32 by aten.mm.default in last"
    for outside in (None, "lean"):
        assert bits(plainly(model, x, policy=outside)) == bits(plainly(other, x, policy=outside))
    assert bits(model(x)) == bits(plainly(other, x))
    scoping.remove()
    with pytest.raises(PolicyError) as raised:
        model(x)
    assert str(raised.value) == (
        "Mixed has other rules from scoped() than when it was frozen. Freeze the float32 model "
        "with these rules."
    )


def test_pinned_weights_stay(x: torch.Tensor) -> None:
    model, other = Mixed().eval(), Mixed().eval()
    pin(model, "float32", paths=["first"])
    handle = freeze(model, (x,))
    assert handle.stored == ("last.weight",)
    assert handle.kept["first.weight"] == "pinned to float32"
    assert bits(model(x)) == bits(plainly(other, x))


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """An analysis that sees no reading: whatever is cast once is stored low."""
    stays = freeze_usage.Group.stays

    def blind(self: freeze_usage.Group, why: str) -> None:
        if not why.startswith(("read", "its dtype")):
            stays(self, why)

    monkeypatch.setattr(freeze_usage.Group, "stays", blind)


READ_TOO: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str]] = {
    "a sum": (
        lambda m, x: F.linear(x, m.weight) + m.weight[0],
        "aten.add.Tensor(bfloat16, bfloat16) -> (bfloat16); "
        "under autocast it is aten.add.Tensor(bfloat16, float32) -> (float32)",
    ),
    "an index": (
        lambda m, x: (F.linear(x, m.weight) + 100 * m.weight[0]).argmax(-1) * 0,
        "aten.mul.Tensor(bfloat16) -> (bfloat16); "
        "under autocast it is aten.mul.Tensor(float32) -> (float32)",
    ),
    "a dtype": (
        lambda m, x: F.linear(x.to(m.weight.dtype), m.weight).relu(),
        "aten.mm.default(bfloat16, bfloat16) -> (bfloat16); "
        "under autocast it is aten._to_copy.default(bfloat16) -> (float32)",
    ),
}


@pytest.mark.parametrize("use", READ_TOO)
def test_a_weight_that_is_read_in_float32_too_is_noticed(use, x, blind) -> None:
    function, op = READ_TOO[use]
    model = Uses(function)
    before = held(model)
    with pytest.raises(PolicyError) as raised:
        freeze(model, (x,))
    assert str(raised.value) == (
        "freeze(): Uses, called with example 0, does not run with weights in bfloat16 as under "
        f"autocast. The first op that differs is {op}. The model was not changed. "
        "Freeze the submodules without this op."
    )
    assert held(model) == before


def test_results_alone_show_it_too(x, blind, monkeypatch) -> None:
    monkeypatch.setattr(freeze_usage, "first_difference", lambda one, other: None)
    model = Uses(READ_TOO["a sum"][0])
    with pytest.raises(PolicyError, match="does not run with weights in bfloat16"):
        freeze(model, (x,))
    monkeypatch.setattr(freeze_usage, "same", lambda one, other: True)
    assert "weight" in freeze(model, (x,)).stored, "the plant is none"


def test_an_op_is_named_with_the_module_it_ran_in(x: torch.Tensor, blind: None) -> None:
    norm = nn.Sequential(nn.Linear(8, 8), Uses(READ_TOO["a sum"][0]), nn.ReLU())
    with pytest.raises(PolicyError, match=r"-> \(bfloat16\) in 1; under autocast it is .* in 1\."):
        freeze(frozen_weights(norm), (x,))


class Backward(torch.autograd.Function):
    """A product whose backward reads the weight as it is stored."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(w)
        return F.linear(x, w)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (w,) = ctx.saved_tensors
        return torch.ones(len(grads[0]), 8).to(w) @ w.abs(), None


def backward(m: Any, x: torch.Tensor) -> torch.Tensor:
    return Backward.apply(x, m.weight)  # type: ignore[no-any-return,no-untyped-call]


def test_a_weight_that_backward_reads_stays(x: torch.Tensor) -> None:
    handle = freeze(Uses(backward), (x.requires_grad_(),))
    assert handle.kept == {"weight": "read in float32 by aten.abs.default"}


def test_gradients_are_compared(x, blind, monkeypatch) -> None:
    monkeypatch.setattr(freeze_usage, "first_difference", lambda one, other: None)
    model = Uses(backward)
    assert freeze(model, (x,)).stored == ("weight", "other.weight", "other.bias")
    with pytest.raises(PolicyError, match="does not run with weights in bfloat16"):
        freeze(Uses(backward), (x.requires_grad_(),))


def test_a_model_that_gives_other_bits_each_time_is_refused(x: torch.Tensor) -> None:
    count = iter(range(1000))
    model = Uses(lambda m, x: F.linear(x, m.weight) + next(count))
    with pytest.raises(PolicyError, match="gives other bits each time, so that"):
        freeze(model, (x,))
    assert model.weight.dtype is FP32


def test_random_numbers_buffers_and_attributes_are_as_before(x: torch.Tensor) -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.batch = nn.Linear(8, 8), nn.BatchNorm1d(8)
            self.register_buffer("cache", None)
            self.calls, self.seen = 0, [1]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.seen.append(self.calls)
            self.cache = self.batch.running_mean.clone()
            x += 1
            noise = torch.rand(()) + random.random() + float(np.random.rand())
            return F.dropout(self.batch(self.layer(x)), 0.5) * noise

    model = frozen_weights(Stateful())
    random.seed(0)
    np.random.seed(0)
    state = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    before, given = held(model), x.clone()
    statistics = {name: bits(t) for name, t in model.batch.state_dict().items()}
    freeze(model, (x,))
    assert {name: bits(t) for name, t in model.batch.state_dict().items()} == statistics
    assert torch.equal(x, given)
    assert (model.calls, model.seen, model.cache) == (0, [1], None)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (random.getstate(), str(np.random.get_state())) == state[1:]
    assert held(model).keys() == before.keys()


def test_an_example_that_raises_leaves_the_model_as_it_was(x: torch.Tensor) -> None:
    def fails(m: Any, x: torch.Tensor) -> torch.Tensor:
        F.linear(x, m.weight)
        m.other.extra = 1
        m.weight.zero_()
        raise ValueError("no")

    model = Uses(fails)
    before = held(model)
    with pytest.raises(ValueError, match="no"):
        freeze(model, (x,))
    after = held(model)
    assert after["other"] == before["other"]
    assert after["weight"][-1] == before["weight"][-1]
    assert after["other.weight"] == before["other.weight"]


def test_an_interrupt_leaves_the_model_as_it_was(x, monkeypatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    model = frozen_weights(nn.Linear(8, 8))
    before = held(model)
    for where in ((freezing.Trial, "verify"), (freezing.subclass, "extend")):
        with monkeypatch.context() as patch:
            patch.setattr(*where, interrupt)
            with pytest.raises(KeyboardInterrupt):
                freeze(model, (x,))
        assert held(model) == before
