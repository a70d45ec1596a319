"""Mode `stochastic` against torchao's own optimizer with random rounding, given the same bits.

torchao's AdamW, float32 moments in both      equal, weights and moments, after 20 steps
torchao's AdamW as it is, bfloat16 moments    equal after one step
torch's AdamW in low_weights                  equal but for few roundings of float32
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from polymp.torch import low_weights
from polymp.weights import random_bits

adam: Any = pytest.importorskip(
    "torchao.optim.adam", reason="torchao is not among the packages of the tests"
)
SHAPES = (65, 33), (17,)
STEPS = 20


class WideMoments(adam._AdamW):  # type: ignore[misc]
    """torchao's AdamW; beside bfloat16 weights, too, its moments are float32."""

    def _new_buffer(self, p: torch.Tensor, signed: bool) -> torch.Tensor:
        return torch.zeros_like(p, dtype=torch.float32)


def start() -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=g).bfloat16()) for shape in SHAPES]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    g = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g).bfloat16()


def drawn(step: int, place: int) -> torch.Tensor:
    """The random bits of a parameter in a step, as `low_weights(seed=0)` makes them."""
    shape = torch.Size(SHAPES[place])
    index = torch.arange(shape.numel(), dtype=torch.int32)
    bits: torch.Tensor = random_bits.random16(random_bits.key(0, step, place), index)
    return bits.view(shape)


def theirs(kind: Any, monkeypatch: pytest.MonkeyPatch, steps: int) -> tuple[Any, Any]:
    """Parameters and optimizer after some steps in which torchao draws our random bits."""
    params = start()
    optimizer = kind(params, lr=1e-2, bf16_stochastic_round=True)
    for step in range(steps):
        give_gradients(params, step)
        bits = iter([drawn(step, place) for place in range(len(params))])
        with monkeypatch.context() as patch, torch.compiler.set_stance("force_eager"):
            patch.setattr(torch, "randint", lambda *_, bits=bits, **__: next(bits))
            optimizer.step()
        assert next(bits, None) is None
    return params, optimizer


def ours(make: Any, steps: int, seed: int = 0) -> tuple[Any, Any]:
    params = start()
    optimizer = low_weights(make(params, lr=1e-2), "stochastic", seed=seed)
    for step in range(steps):
        give_gradients(params, step)
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
    return params, optimizer


def equal(one: list[Any], other: list[Any]) -> float:
    """The share of numbers that are the same."""
    pairs = list(zip(one, other, strict=True))
    same = sum(int((a.detach() == b.detach()).sum()) for a, b in pairs)
    return same / sum(a.numel() for a, _ in pairs)


def moments(params: list[Any], optimizer: Any) -> list[Any]:
    return [optimizer.state[p][name] for p in params for name in ("exp_avg", "exp_avg_sq")]


def test_every_step_is_that_of_torchaos_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the same arithmetic, and with float32 moments in both: weights and moments."""
    want, their_optimizer = theirs(WideMoments, monkeypatch, STEPS)
    got, optimizer = ours(WideMoments, STEPS)
    assert {p.dtype for p in (*want, *got)} == {torch.bfloat16}
    assert equal(got, want) == 1
    assert equal(moments(got, optimizer), moments(want, their_optimizer)) == 1
    assert equal(ours(WideMoments, STEPS, seed=1)[0], want) < 1, "the check cannot fail"


def test_the_first_step_is_that_of_torchaos_optimizer_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stores moments in bfloat16, which later steps read."""
    want, _ = theirs(adam._AdamW, monkeypatch, 1)
    assert equal(ours(adam._AdamW, 1)[0], want) == 1
    later, _ = theirs(adam._AdamW, monkeypatch, STEPS)
    share = equal(ours(adam._AdamW, STEPS)[0], later)
    print(
        f"equal to torchao's with bfloat16 moments after {STEPS} steps: {share:.4f} of the weights"
    )
    assert share < 1


def test_the_arithmetic_of_torch_differs_in_few_roundings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A last place of float32 decides about one in 2**16 roundings to bfloat16."""
    want, their_optimizer = theirs(WideMoments, monkeypatch, STEPS)
    got, optimizer = ours(torch.optim.AdamW, STEPS)
    weights = equal(got, want)
    state = equal(moments(got, optimizer), moments(want, their_optimizer))
    print(f"equal after {STEPS} steps of torch.optim.AdamW: weights {weights}, moments {state}")
    assert weights > 0.99
