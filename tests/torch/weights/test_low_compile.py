"""Compiled steps on low weights: one graph, and the numbers of the eager step up to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from polymp.backends.torch.weights import low_parameters, low_step
from polymp.torch import low_weights
from polymp.weights import store
from tests.support.low_weights import edges, spread

# Inductor imports torch.jit, which warns when it is imported; dynamo, of the profiler.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script", "ignore:.*record_function.*will be ignored"
)

MODES = ("master", "split", "stochastic")


def start(mode: str, kind: Any = torch.optim.AdamW, **options: Any) -> tuple[list[Any], Any]:
    made = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(s, generator=made)) for s in ((9, 7), (5,), (3, 4))]
    return params, low_weights(kind(params, **options), mode, keep=[params[1]])


def give(params: list[Any], seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=made).to(p.dtype)


def full(params: list[Any], optimizer: Any) -> list[torch.Tensor]:
    return list(optimizer.float32_state_dict(nn.ParameterList(params)).values())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_step_is_one_graph_and_the_eager_step(mode: str) -> None:
    torch._dynamo.reset()
    params, optimizer = start(mode)
    others, eager = start(mode)
    compiled = torch.compile(optimizer.step)
    counters.clear()
    for at in range(4):
        give(params, at)
        give(others, at)
        compiled()
        eager.step()
    assert counters["stats"]["unique_graphs"] == 1
    for one, other in zip(full(params, optimizer), full(others, eager), strict=True):
        assert torch.allclose(one, other, rtol=2.0**-7 if mode == "stochastic" else 1e-5, atol=1e-6)
    torch._dynamo.reset()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mode", MODES)
def test_weights_written_by_hand_between_compiled_steps(mode: str) -> None:
    torch._dynamo.reset()
    params, optimizer = start(mode, torch.optim.SGD, lr=0.0)
    compiled = torch.compile(optimizer.step)
    for at in range(3):
        give(params, at)
        compiled()
        with torch.no_grad():
            params[0].data.mul_(0 if at else 1)
            params[2].fill_(0.625)
    give(params, 4)
    compiled()
    assert (params[0] == 0).all()
    assert (params[2] == 0.625).all()
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", MODES)
def test_the_verbs_of_a_graph_store_the_bits_of_the_core(mode: str) -> None:
    """NaN aside, whose payload a cast to bfloat16 does not keep."""
    x = torch.cat([torch.from_numpy(edges().copy()), torch.from_numpy(spread(2**16))])
    x = x[~x.isnan()]
    random = torch.randint(0, 2**16, x.shape, dtype=torch.int32)
    kept = store.MODES[mode]
    low, beside = store.store(low_parameters.VERBS, kept, "bfloat16", x, random)
    wide, rest = low_step.keep(kept, x, random)
    assert torch.equal(wide.bfloat16().view(torch.int16), low.view(torch.int16))
    if beside is not None:
        made = torch.empty_like(beside)
        low_step.put(made, rest)
        assert torch.equal(made.view(torch.uint8), beside.view(torch.uint8))
    read = low_step.load(kept, low.float(), low_step.opened(low_step.viewed(beside)))
    again = store.load(low_parameters.VERBS, kept, low, beside)
    assert torch.equal(read.view(torch.int32), again.view(torch.int32))
