"""`freeze`: where a frozen model may be called, copied and loaded, and how it is undone."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polymp
from polymp import PolicyError
from polymp.torch import Frozen, autocast, freeze, pin, scoped
from tests.support.torch.freezable_models import Mixed, Uses, bits, frozen_weights, held, plainly

pytestmark = pytest.mark.usefixtures("left_as_found")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# --- where it may be called -----------------------------------------------------------------------


def test_it_enters_its_region_or_runs_in_it(x: torch.Tensor) -> None:
    lean = polymp.policy("lean")
    model, other = Mixed(), Mixed()
    freeze(model, (x,), policy=lean)
    expected = plainly(other.eval(), x, policy="lean")
    assert bits(model.eval()(x)) == bits(expected)
    with autocast("cpu", policy="lean"):
        assert bits(model(x)) == bits(expected)
        with autocast("cpu", enabled=False):
            assert bits(model(x)) == bits(expected)
    for region, shown in (
        (autocast("cpu", FP16, policy="lean"), "autocast('cpu', torch.float16, policy='lean')"),
        (autocast("cpu"), "autocast('cpu', torch.bfloat16)"),
        (torch.autocast("cpu"), "autocast('cpu', torch.bfloat16)"),
        (autocast("cpu", policy="amp"), "autocast('cpu', torch.bfloat16, policy='amp')"),
    ):
        with region, pytest.raises(PolicyError) as raised:
            model(x)
        assert str(raised.value) == (
            "Mixed was frozen for autocast('cpu', torch.bfloat16, policy='lean'), and is called in "
            f"{shown}. Call it in the first region, or outside of regions, where it enters that "
            "one by itself; or freeze it for the second."
        )


def test_torch_s_own_region_will_do(x: torch.Tensor) -> None:
    model, other = Mixed().eval(), Mixed().eval()
    freeze(model, (x,), dtype=FP16)
    with torch.autocast("cpu", FP16):
        assert bits(model(x)) == bits(other(x))


def test_inside_a_region_it_is_frozen_for_that_one_or_refused(x: torch.Tensor) -> None:
    model = frozen_weights(nn.Linear(8, 8))
    with autocast("cpu", FP16), pytest.raises(PolicyError, match="called in a region for float16"):
        freeze(model, (x,), dtype=BF16)
    assert model.weight.dtype is FP32
    with autocast("cpu", FP16):
        assert freeze(model, (x,)).dtype == "float16"


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
    with torch.inference_mode():
        model = Uses(use)
    del model
    outside = Uses(use)
    with torch.inference_mode():
        freeze(outside, (x,))
        assert not outside.weight.is_inference()
    assert {*seen} == {False}


# --- taking it back, and taking it along ----------------------------------------------------------


def test_remove_gives_back_the_same_parameters_bit_for_bit(x: torch.Tensor) -> None:
    model = Mixed().eval()
    before, expected = held(model), plainly(model, x)
    with freeze(model, (x,)) as handle:
        assert isinstance(handle, Frozen)
        assert model.first.weight.dtype is BF16
    after = held(model)
    for name, (*rest, version, grad, inside) in ((n, v) for n, v in before.items() if len(v) == 6):
        assert (*after[name][:3], *after[name][4:]) == (*rest, grad, inside)
        assert after[name][3] >= version
    assert bits(plainly(model, x)) == bits(expected)
    handle.remove()
    assert type(model) is Mixed


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
    handle = freeze(model, (x,))
    model.load_state_dict(checkpoint)
    assert bits(model(x)) == bits(plainly(other, x))
    freeze(other, (x,))
    ours, theirs = model.state_dict(), other.state_dict()
    assert {n: (t.dtype, bits(t)) for n, t in ours.items()} == {
        n: (t.dtype, bits(t)) for n, t in theirs.items()
    }
    assert ours["first.weight"].dtype is BF16
    handle.remove()
    assert bits(model.first.weight) == bits(theirs["first.weight"].float()), "not what it held then"


@pytest.mark.parametrize("low", [BF16, torch.float16])
@pytest.mark.parametrize(
    "conversion", ["float", "double", "half", "bfloat16", "half.float", "bfloat16.double"]
)
def test_what_was_moved_and_cast_since_comes_back(
    x: torch.Tensor, low: torch.dtype, conversion: str
) -> None:
    model = frozen_weights(nn.Linear(8, 8))
    model.weight[0, :2] = torch.tensor([1e-30, 3e38])  # which float16 does not hold
    expected = bits(model.weight)
    handle = freeze(model, (x,), dtype=low)
    for step in conversion.split("."):
        getattr(model, step)()
    handle.remove()
    assert model.weight.dtype is torch.float32
    assert bits(model.weight) == expected


@pytest.mark.parametrize("conversion", ["float", "double", "half"])
def test_what_was_written_and_cast_since_is_not_taken_back(
    x: torch.Tensor, conversion: str
) -> None:
    model = frozen_weights(nn.Linear(8, 8))
    handle = freeze(model, (x,))
    model.weight[0, 0] = 3.5
    getattr(model, conversion)()
    expected = bits(model.weight.float())
    handle.remove()
    assert bits(model.weight) == expected


def copied(pair: Any) -> Any:
    return copy.deepcopy(pair)


def pickled(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


def saved(pair: Any) -> Any:
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", [copied, pickled, saved])
@pytest.mark.parametrize("policy", [None, "lean"])
def test_it_goes_with_copies_and_the_handle_with_it(
    way: Any, policy: str | None, x: torch.Tensor
) -> None:
    model = Mixed().eval()
    original = bits(model.first.weight)
    handle = freeze(model, (x,), policy=policy)
    expected = bits(model(x))
    again, its = way((model, handle))
    assert bits(again(x)) == expected
    assert again.first.weight.dtype is BF16
    with autocast("cpu", FP16), pytest.raises(PolicyError, match="was frozen for"):
        again(x)
    its.remove()
    assert bits(again.first.weight) == original
    assert model.first.weight.dtype is BF16, "that was the copy's handle"


# --- with scoped and pin --------------------------------------------------------------------------


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
        "Mixed has other rules from scoped() than when it was frozen. Call remove() of the handle "
        "that freeze() returned, and freeze the model again."
    )
    handle.remove()
    assert type(model) is Mixed


def test_pinned_weights_stay(x: torch.Tensor) -> None:
    model, other = Mixed().eval(), Mixed().eval()
    pin(model, "float32", paths=["first"])
    handle = freeze(model, (x,))
    assert handle.stored == ("last.weight",)
    assert handle.kept["first.weight"] == "pinned to float32"
    assert bits(model(x)) == bits(plainly(other, x))
