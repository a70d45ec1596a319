"""Around products in 8 bits: compiled code, checkpoints, held weights, ranks, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import polymp
from polymp.torch import autocast
from tests.support.torch.fp8_models import (
    RECIPES,
    LowRank,
    Net,
    differing,
    policy,
    saved_bytes,
    step,
)
from tests.support.torch.fp8_ranks import trained
from tests.support.torch.ranks import launch


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x():
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpoints_recompute_the_same(recipe, reentrant, net, x):
    plain = step(net, x, policy(recipe))
    again = step(net, x, policy(recipe), lambda x: checkpoint(net, x, use_reentrant=reentrant))
    assert differing(plain, again) == []
    assert differing(plain, step(net, x, "lean")), "the comparison can fail"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_backward_pass_in_a_region_is_the_same(recipe, net, x):
    plain = step(net, x, policy(recipe))
    net.zero_grad()
    with autocast("cpu", policy=policy(recipe)):
        y = net(x)
        (y.float() ** 2).sum().backward()
    assert (
        differing(
            {name: plain[name] for name, _ in net.named_parameters()},
            {name: p.grad for name, p in net.named_parameters()},
        )
        == []
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_code_has_the_bits_of_eager_code(recipe, net, x):
    compiled(recipe, "aot_eager", net, x)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("recipe", RECIPES)
def test_inductor_s_code_has_the_bits_of_eager_code(recipe, net, x):
    """The net has no op but products that inductor would round in another place."""
    compiled(recipe, "inductor", nn.Sequential(net.a, nn.ReLU(), net.b), x)


def compiled(recipe, backend, model, x):
    torch._dynamo.reset()
    made = torch.compile(model, fullgraph=True, backend=backend)
    assert differing(step(model, x, policy(recipe)), step(model, x, policy(recipe), made)) == []
    torch._dynamo.reset()


def test_a_low_rank_pair_is_trained_on_a_frozen_layer(x):
    torch.manual_seed(0)
    model = LowRank()
    found = step(model, x, "fp8")
    assert {*found} == {"output", "input", "down.weight", "up.weight"}
    exact = step(model, x, polymp.policy("lean").override(fp32=["class:matmul"]))
    for name, gradient in found.items():
        error = (gradient.float() - exact[name].float()).norm() / exact[name].float().norm()
        assert error < 0.15, name
    # Nothing is saved for the gradient of the frozen weight.
    base = nn.Linear(64, 64).requires_grad_(False)
    assert saved_bytes(base, x.requires_grad_(), "fp8") == 0


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return launch("tests.support.torch.fp8_ranks", 2, tmp_path_factory.mktemp("fp8"))


@pytest.mark.parametrize("how", ["fsdp2", "ddp"])
def test_two_ranks_have_the_bits_of_one_process(how, ranks):
    for recipe in RECIPES:
        for notes in ranks:
            assert notes[recipe, how] == trained(recipe, "alone")
    assert ranks[0]["rowwise", how] != ranks[0]["tensorwise", how], "the comparison can fail"


# --- memory ---------------------------------------------------------------------------------------


def test_products_of_one_activation_save_it_once():
    a, b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = a, b

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x), self.b(x)

    x = torch.randn(32, 64)
    assert saved_bytes(Both(), x, "fp8") == saved_bytes(a, x, "fp8") == 32 * 64 + 4
