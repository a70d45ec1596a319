"""`freeze` of weights of products in 8 bits: what is stored, what stays, and what is refused.

That whole models and random ones keep their bits is in test_freeze_models.py.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from polymp import PolicyError
from polymp.backends.torch.autocast import fp8_product
from polymp.backends.torch.autocast.fp8_product import InBits, WeightInBits
from polymp.torch import autocast, freeze
from tests.support.torch.fp8_models import RECIPES, Net, differing, policy, step

pytestmark = pytest.mark.usefixtures("left_as_found")


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().requires_grad_(False)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def result(model: nn.Module, x: torch.Tensor, recipe: str = "tensorwise") -> torch.Tensor:
    """In a region of its own, which a frozen model may be in as well."""
    with torch.no_grad(), autocast("cpu", policy=policy(recipe)):
        return model(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_weight_takes_a_byte_for_each_form_that_products_read(
    recipe: str, net: Net, x: torch.Tensor
) -> None:
    plain, asking = copy.deepcopy(net), copy.deepcopy(net)
    numbers = sum(p.numel() for p in net.parameters())
    rows = sum(p.shape[0] for p in net.parameters())
    handle = freeze(net, (x,), policy=policy(recipe), drop=True)
    assert handle.stored == handle.stored_fp8 == tuple(n for n, _ in net.named_parameters())
    scales = 4 if recipe == "tensorwise" else rows
    assert (handle.bytes_before, handle.bytes_after) == (4 * numbers, numbers + 4 * scales)
    assert repr(handle) == "Frozen(Net, 0 stored in bfloat16, 4 in 8 bits, 0 kept)"
    assert torch.equal(net(x), result(plain, x, recipe)), "it enters its region"
    # For the gradient of its input a weight is read by columns, where it is read by rows before.
    handle = freeze(asking, (x.requires_grad_(),), policy=policy(recipe), drop=True)
    forms = 1 if recipe == "tensorwise" else 2
    assert forms * numbers < handle.bytes_after < 1.1 * forms * numbers
    x = x.detach()
    assert differing(step(asking, x, policy(recipe)), step(plain, x, policy(recipe))) == []


def test_copies_and_checkpoints(net: Net, x: torch.Tensor) -> None:
    plain, other = copy.deepcopy(net), copy.deepcopy(net)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(3).add_(0.01)
    handle = freeze(net, (x,), policy="fp8")
    expected = result(plain, x)
    for made in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), copy.deepcopy(net).cpu()):
        assert torch.equal(made(x), expected)
        assert all(type(p) is WeightInBits and not p.requires_grad for p in made.parameters())
    twin = copy.deepcopy(net)
    twin.load_state_dict(other.state_dict())  # float32, quantised as it is loaded
    assert torch.equal(twin(x), result(other, x))
    net.load_state_dict(twin.state_dict())
    assert torch.equal(net(x), result(other, x))
    handle.remove()  # what was written since stays, as far as 8 bits have it
    error = (net.a.weight - other.a.weight).abs().max() / other.a.weight.abs().max()
    assert 0 < error < 2**-4


@pytest.mark.one_in(3)
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_code(recipe: str, net: Net, x: torch.Tensor) -> None:
    torch._dynamo.reset()
    plain = copy.deepcopy(net)
    freeze(net, (x.clone().requires_grad_(),), policy=policy(recipe))
    made = torch.compile(net, fullgraph=True, backend="aot_eager")
    found = step(net, x, policy(recipe), made)
    assert differing(found, step(plain, x, policy(recipe))) == []
    torch._dynamo.reset()


class Uses(nn.Module):
    """Weights that are read in 8 bits and otherwise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.both, self.turned, self.read, self.plain, self.tied = (
            nn.Linear(64, 64, bias=False).requires_grad_(False) for _ in range(5)
        )
        self.twin = nn.Linear(64, 64, bias=False)
        self.twin.weight = self.tied.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.both(x) + self.both(x[:15]).float().sum()
        x = x @ self.turned.weight.t() + self.read(x) + self.read.weight[0]
        return self.twin(self.tied(self.plain(x)))


def test_weights_that_stay_say_why(x: torch.Tensor) -> None:
    model, other = Uses(), Uses()
    weight = model.plain.weight
    handle = freeze(model, (x,), policy="fp8")
    assert handle.stored_fp8 == ("plain.weight", "tied.weight", "twin.weight")
    assert model.tied.weight is model.twin.weight
    assert handle.kept == {
        "both.weight": "used in 8 bits and in bfloat16",
        "turned.weight": "read in float32 by aten.linalg_vector_norm.default",
        "read.weight": "read in float32 by aten.add.Tensor",
    }
    assert torch.equal(model(x), result(other, x))
    handle.remove()
    assert model.plain.weight is weight
    assert torch.equal(weight, other.plain.weight)


def test_what_a_weight_in_8_bits_cannot_do_is_said(net: Net, x: torch.Tensor) -> None:
    freeze(net, (x.requires_grad_(False),), policy=policy("rowwise"))
    with pytest.raises(PolicyError) as raised:
        net(x[:17])
    assert str(raised.value) == (
        "aten._to_copy.default reads a weight of shape (128, 64) that freeze() stored in 8 bits. "
        "Only a product that runs in 8 bits can read it; explain() says why one does not. Give "
        "freeze() an example of this call as well: the weight then stays in float32."
    )
    y = net(x.clone().requires_grad_())
    with pytest.raises(PolicyError) as raised:
        y.sum().backward()
    assert str(raised.value) == (
        "freeze() stored a weight of shape (64, 64) in 8 bits as its examples read it, and it is "
        "now read in another way: for the gradient of its layer's input, or by another recipe. "
        "Give freeze() an example whose input requires gradients, with gradients enabled, and the "
        "policy that the model runs with."
    )


def other_scale(self: Any, how: Any) -> InBits:
    array, scale = self.forms[how]
    return InBits(array, scale * (1 + 2**-6))


@pytest.mark.parametrize("fault", ["another scale", "stale forms"])
def test_a_planted_fault_is_noticed(
    fault: str, net: Net, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = copy.deepcopy(net)
    if fault == "another scale":
        monkeypatch.setattr(WeightInBits, "form", other_scale)
        with pytest.raises(PolicyError, match="does not run with weights in bfloat16 as under"):
            freeze(net, (x,), policy="fp8")
        assert type(net.a.weight) is nn.Parameter, "the model is as it was"
    else:
        monkeypatch.setattr(WeightInBits, "_load", lambda self, source: None)
        freeze(net, (x,), policy="fp8")
        net.load_state_dict({n: 2 * t for n, t in plain.state_dict().items()})
        assert torch.equal(net(x), result(plain, x)), "the check of loaded weights can fail"


def test_a_weight_that_an_example_writes_stays(net: Net, x: torch.Tensor) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = net.a, net.b

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.b(self.a(x))
            with torch.no_grad():
                self.a.weight.mul_(0.5)
            return y + self.b(self.a(x))

    model = Writes()
    plain = copy.deepcopy(model)
    handle = freeze(model, (x,), policy="fp8")
    assert handle.stored_fp8 == ("b.weight",)
    assert handle.kept == {"a.weight": "written by aten.mul_.Tensor"}
    assert torch.equal(model.a.weight, plain.a.weight)
    assert torch.equal(result(model, x), result(plain, x))
    assert not fp8_product.noted.by_id
