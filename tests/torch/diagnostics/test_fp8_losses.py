"""Losses of products in 8 bits in torch: checkpoints, shared inputs, regions without them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import polymp.torch
from polymp.torch import autocast
from tests.support.torch.fp8_models import Net, policy


class Layers(nn.Module):
    """Three layers; the middle one may be computed again for the backward pass."""

    def __init__(self, again: bool | None = None, odd: int = 64) -> None:
        super().__init__()
        self.again = again  # as `use_reentrant`
        self.a, self.b, self.c = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, odd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        if self.again is None:
            x = self.b(x)
        else:
            x = checkpoint(self.b, x, use_reentrant=self.again)
        return self.c(torch.tanh(x))


def audited(model: nn.Module, dtype=torch.bfloat16, policy="lean", recipe: str = "rowwise"):
    torch.manual_seed(0)
    x = torch.randn(2, 16, 64)
    with polymp.torch.audit(model, fp8=recipe) as found:
        with autocast("cpu", dtype, policy=policy):
            loss = (model(x).float() ** 2).mean()
        loss.backward()
    return found


def of(model: nn.Module, **given):
    return {one.module: one for one in audited(model, **given).fp8_losses}


def layers(**given) -> Layers:
    torch.manual_seed(0)
    return Layers(**given)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_changes_no_loss(reentrant):
    plain, again = of(layers()), of(layers(again=reentrant))
    assert plain.keys() == {"a", "b", "c"}
    for name, one in plain.items():
        assert again[name].operands == one.operands
        assert again[name].results == one.results
        wanted = {"result", "weight_gradient"} | ({"input_gradient"} if name != "a" else set())
        assert one.results.keys() == wanted


def test_a_product_that_cannot_run_in_8_bits_is_not_measured():
    assert of(layers(odd=40)).keys() == {"a", "b"}


@pytest.mark.parametrize(
    ("dtype", "rules"),
    [
        (torch.float16, "lean"),
        (torch.bfloat16, policy("rowwise")),
        (torch.bfloat16, polymp.policy("lean").override(fp32=["linear"])),
    ],
)
def test_only_products_that_run_in_bfloat16_are_measured(dtype, rules):
    found = audited(layers(), dtype, rules)
    assert found.fp8 == "rowwise"
    assert not found.fp8_losses
    with pytest.raises(ValueError, match="no product was measured"):
        found.suggest(fp8=True)


def test_an_operand_that_is_written_before_the_backward_pass_is_left_out():
    class Written(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = self.a(x)
            x.zero_()  # the cast of it is what is saved
            return made

    assert of(layers(), recipe="tensorwise")["a"].results.keys() == {"result", "weight_gradient"}
    torch.manual_seed(0)
    assert of(Written(), recipe="tensorwise")["a"].results.keys() == {"result"}


def test_every_product_of_an_input_is_measured():
    torch.manual_seed(0)
    assert of(Net()).keys() == {"a", "b", "q", "k"}


class Products(nn.Module):
    """The same product by the four ops that have one in 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, 64)
        one, other = nn.functional.linear(x, self.w.t()), torch.mm(x, self.w)
        return one + other + x @ self.w + torch.addmm(x, x, self.w, alpha=2)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_each_op_loses_the_same(recipe):
    torch.manual_seed(0)
    found = audited(Products(), recipe=recipe).fp8_losses
    assert [one.op for one in found] == ["linear", "mm", "matmul", "addmm"]
    for one in found:
        assert one.results.keys() == {"result", "weight_gradient"}
        assert one.results["result"] == pytest.approx(found[0].results["result"], rel=1e-5)


def test_without_a_backward_pass_there_are_forward_losses():
    model = layers()
    with torch.no_grad(), polymp.torch.audit(model, fp8="tensorwise") as found:
        with autocast("cpu", torch.bfloat16, policy="lean"):
            model(torch.randn(16, 64))
    assert [one.results.keys() for one in found.fp8_losses] == [{"result"}] * 3
    assert [one.operands.keys() for one in found.fp8_losses] == [{"activation", "weight"}] * 3
