"""Training on low weights against training on float32 weights under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from polymp.torch import low_weights
from tests.support.sizes import size
from tests.support.torch.low_training import MODELS, made, same_bits, train, weights

MODES = ("master", "split", "stochastic")


def few_steps(x: Any) -> Any:
    return torch.optim.LBFGS(x, lr=0.1, max_iter=3)


def matrices(x: list[torch.Tensor]) -> Any:
    """Muon, which takes matrices alone, with the biases left as they are."""
    return torch.optim.Muon([p for p in x if p.dim() == 2], lr=1e-3)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "Adam": torch.optim.Adam,
    "Adam-foreach": lambda x: torch.optim.Adam(x, foreach=True),
    "Adam-fused": lambda x: torch.optim.Adam(x, fused=True),
    "Adam-amsgrad": lambda x: torch.optim.Adam(x, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "LBFGS": few_steps,
    "Muon": matrices,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": torch.optim.RMSprop,
    "Rprop": torch.optim.Rprop,
    "SGD": lambda x: torch.optim.SGD(x, lr=0.1),
    "SGD-momentum": lambda x: torch.optim.SGD(x, lr=0.1, momentum=0.9, nesterov=True),
}
# Classes of torch.optim without a row, and why.
EXCLUDED = {
    "Optimizer": "the base class",
    "SparseAdam": "refused: its gradients are sparse",
}


def test_every_class_of_torch_optim_has_a_row() -> None:
    classes = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    assert {name.partition("-")[0] for name in OPTIMIZERS} | set(EXCLUDED) == classes


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
def test_every_optimizer_trains_in_every_mode(name: str, mode: str) -> None:
    """`master` to the bits of float32, the others near them."""
    plain, _, losses = train("mlp", None, 12, OPTIMIZERS[name])
    model, optimizer, low_losses = train("mlp", mode, 12, OPTIMIZERS[name])
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert {p.dtype for p in optimizer.low} == {torch.bfloat16}
    if mode == "master":
        assert low_losses == losses
        assert same_bits(weights(model, optimizer), weights(plain))
        return
    part = 0.4 if name == "LBFGS" else 0.15  # differences of rounded gradients are its curvature
    start = weights(made("mlp"))
    one, other = weights(model, optimizer), weights(plain)
    for key in one:
        moved = (other[key] - start[key]).norm()
        assert (one[key] - other[key]).norm() <= part * moved + 0.02 * start[key].norm(), key


@pytest.mark.sized
@pytest.mark.parametrize("name", MODELS)
def test_master_trains_to_the_bits_of_float32(name: str) -> None:
    steps = size(60, 1000)
    plain, _, losses = train(name, None, steps)
    model, optimizer, low_losses = train(name, "master", steps)
    assert losses == low_losses
    assert same_bits(weights(model, optimizer), weights(plain))
    print(f"{name}: {steps} steps, losses and weights bit-equal; low {len(optimizer.low)},")
    print(f"    kept {[f'{tuple(p.shape)}: {why}' for p, why in optimizer.kept.items()]}")
    assert optimizer.low
    assert bool(optimizer.kept) == (name == "tokens")


def test_the_comparison_finds_another_seed_of_bits() -> None:
    model, optimizer, losses = train("mlp", "stochastic", 20)
    other, second, others = train("mlp", "stochastic", 20, seed=1)
    again, third, same = train("mlp", "stochastic", 20)
    assert same == losses != others
    assert same_bits(weights(model, optimizer), weights(again, third))
    assert not same_bits(weights(model, optimizer), weights(other, second))


@pytest.mark.parametrize("mode", MODES)
def test_weights_move_that_naive_training_leaves(mode: str) -> None:
    """As reported of bfloat16 weights: AdamW, lr 1e-4, weights near 1."""
    start = torch.ones(64, 64)

    def run(low: bool) -> float:
        p = torch.nn.Parameter(start.clone())
        optimizer: Any = torch.optim.AdamW([p], lr=1e-4, weight_decay=0)
        if low:
            optimizer = low_weights(optimizer, mode)
        else:
            p.data = p.data.bfloat16()
        for _ in range(50):
            p.grad = torch.ones_like(p)
            optimizer.step()
        return float((p.detach().float() - start).mean())

    assert run(low=False) == 0
    assert abs(run(low=True) + 50e-4) < 2.0**-9
