"""Low weights on a GPU: the bits that a CPU computes, and a capturable optimizer.

Without CUDA, the parameters on the CPU alone run: other implementations of the same optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polymp.torch import autocast, low_weights
from tests.support.low_weights import edges, spread
from tests.support.torch.models import seen

MODES = ("master", "split", "stochastic")
CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    ],
)
# Kernels differ in the order of a product, a quotient and a sum, and in how many roundings they
# make of them. With factors that are powers of two and low gradients there is one way to round.
EXACT: dict[str, Callable[..., Any]] = {
    "SGD": lambda x, **how: torch.optim.SGD(x, lr=2**-5, momentum=0.5, **how),
    "AdamW": lambda x, **how: torch.optim.AdamW(
        x, lr=2**-10, betas=(0.0, 0.0), eps=2**-24, weight_decay=2**-3, **how
    ),
}


def numbers(mode: str) -> torch.Tensor:
    x = np.concatenate([edges(), spread(2**16)])
    return torch.from_numpy(x if mode == "split" else x[~np.isnan(x)])


def made_bits(params: list[nn.Parameter], optimizer: Any) -> Any:
    """Weights, everything in the optimizer's state, and the float32 values of the weights."""
    full = optimizer.float32_state_dict(nn.ParameterList(params))
    return seen([params, optimizer.state_dict()["state"], full])


def stored(device: str, mode: str) -> Any:
    params = [nn.Parameter(numbers(mode).to(device))]
    optimizer = low_weights(torch.optim.SGD(params, lr=0.1), mode)
    assert params[0].device.type == device
    return made_bits(params, optimizer)


def trained(device: str, mode: str, make: Callable[[Any], Any]) -> Any:
    g = torch.Generator().manual_seed(0)
    shapes = (64, 33), (7,)
    params = [nn.Parameter(torch.randn(shape, generator=g).to(device)) for shape in shapes]
    optimizer = low_weights(make(params), mode)
    for _ in range(5):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g).bfloat16().to(device)
        optimizer.step()
    return made_bits(params, optimizer)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", [CUDA])
def test_a_gpu_stores_and_reads_the_bits_of_a_cpu(device: str, mode: str) -> None:
    assert stored(device, mode) == stored("cpu", mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("how", ["foreach", "fused"])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_five_steps_have_the_bits_of_a_loop_on_a_cpu(device, how, name, mode) -> None:
    got = trained(device, mode, lambda x: EXACT[name](x, **{how: True}))
    assert got == trained("cpu", mode, EXACT[name])
    assert got != trained("cpu", mode, lambda x: torch.optim.SGD(x, lr=2**-6)), "it cannot fail"


@pytest.mark.parametrize("mode", ["master", "split"])
@pytest.mark.parametrize("how", ["foreach", "fused"])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_the_weights_are_those_of_float32_on_the_same_device(device, how, mode) -> None:
    g = torch.Generator().manual_seed(0)
    low, wide = (nn.Parameter(torch.ones(65, 64, device=device)) for _ in range(2))
    optimizer = low_weights(torch.optim.AdamW([low], lr=1e-3, **{how: True}), mode)
    plain = torch.optim.AdamW([wide], lr=1e-3, **{how: True})
    for _ in range(5):
        low.grad = torch.randn(low.shape, generator=g).bfloat16().to(device)
        wide.grad = low.grad.float()
        optimizer.step()
        plain.step()
    (full,) = optimizer.float32_state_dict(nn.ParameterList([low])).values()
    assert torch.equal(full.view(torch.int32), wide.detach().view(torch.int32))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_capturable_optimizer_trains(device, mode, request) -> None:
    if device == "cpu":
        request.getfixturevalue("capturable_here")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 4))
    model.to(device)
    x = torch.randn(32, 8).to(device)

    def loss_of() -> torch.Tensor:
        with autocast(device, dtype=torch.bfloat16):
            return F.mse_loss(model(x).float(), x[:, :4].sin())

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)
    optimizer = low_weights(optimizer, mode, keep=loss_of)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert model[0].weight.dtype is model[3].weight.dtype is torch.bfloat16
    assert model[1].weight.dtype is torch.float32
    step = optimizer.state[model[0].weight]["step"]
    assert (step.device.type, step.item()) == (device, 20)
