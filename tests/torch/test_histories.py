"""Random scaler histories: polymp's GradScaler against torch.amp's, bit for bit.

A history is a list of calls on one scaler and up to three optimizers, right and wrong ones mixed.
Both scalers play it from equal starts; what each call returned or raised, the scale, the count,
every parameter and every optimizer state must agree after every call.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polymp.scaling import ScaleRule, ScaleState, step
from polymp.torch import GradScaler

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "loop": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, foreach=False),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.5, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.5, fused=True),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}
# What the loss is multiplied by, so that its gradient is good, overflows or is spoiled.
LOSSES = {"good": 0.37, "overflows": 1e36, "inf": float("inf"), "nan": float("nan"), "none": None}

which = st.integers(0, 2)
losses = st.lists(st.sampled_from(["good", "good", "good", *LOSSES]), min_size=3, max_size=3)
ordinary = st.tuples(st.just("iterate"), losses, st.booleans())
calls = st.one_of(
    ordinary,
    ordinary,
    st.tuples(st.just("backward"), losses),
    st.tuples(st.sampled_from(["unscale", "clip", "step", "double_step"]), which),
    st.tuples(st.just("update"), st.none()),
    st.tuples(st.just("update"), st.sampled_from([8.0, 2.0**-20, 3.3, "tensor", "vector"])),
    st.tuples(st.just("growth"), st.sampled_from([2.0, 4.0, 1.5, 1.1])),
    st.tuples(st.just("backoff"), st.sampled_from([0.5, 0.25, 0.7])),
    st.tuples(st.just("raise_interval"), st.integers(0, 3)),
    st.tuples(st.sampled_from(["save", "pickle", "copy"]), st.none()),
)
starts = st.fixed_dictionaries(
    {
        "init_scale": st.sampled_from([2.0**16, 1.0, 3.0, 2.0**126, 2.0**-120]),
        "growth_factor": st.sampled_from([2.0, 1.5, 1.1]),
        "backoff_factor": st.sampled_from([0.5, 0.7]),
        "growth_interval": st.integers(1, 4),
    }
)
kinds = st.lists(st.sampled_from(sorted(OPTIMIZERS)), min_size=3, max_size=3)


def bits(t: torch.Tensor) -> bytes:
    return t.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


class Player:
    """One scaler, three optimizers of one parameter each, and the calls on them."""

    def __init__(self, make: Callable[..., Any], start: dict[str, Any], kinds: list[str]) -> None:
        self.make = make
        self.scaler = make("cpu", **start)
        self.params = [torch.linspace(-1, 1, 3).requires_grad_() for _ in kinds]
        made = zip(kinds, self.params, strict=True)
        self.optimizers = [OPTIMIZERS[kind]([p]) for kind, p in made]

    def backward(self, losses: list[str]) -> None:
        for optimizer, p, loss in zip(self.optimizers, self.params, losses, strict=True):
            optimizer.zero_grad()
            if LOSSES[loss] is not None:
                self.scaler.scale((p * LOSSES[loss]).sum()).backward()

    def iterate(self, losses: list[str], clip: bool) -> None:
        self.backward(losses)
        for i, loss in enumerate(losses):
            if loss != "none":
                if clip:
                    self.unscale(i)
                    self.clip(i)
                self.step(i)
        self.update(None)

    def unscale(self, i: int) -> None:
        self.scaler.unscale_(self.optimizers[i])

    def clip(self, i: int) -> float:
        return float(torch.nn.utils.clip_grad_norm_([self.params[i]], 1.0))

    def step(self, i: int) -> Any:
        return self.scaler.step(self.optimizers[i])

    def double_step(self, i: int) -> None:
        self.step(i)
        self.step(i)

    def update(self, new: Any) -> None:
        new = {"tensor": torch.tensor(16.0), "vector": torch.ones(2)}.get(new, new)
        self.scaler.update(new)

    def growth(self, factor: float) -> None:
        self.scaler.set_growth_factor(factor)

    def backoff(self, factor: float) -> None:
        self.scaler.set_backoff_factor(factor)

    def raise_interval(self, by: int) -> None:
        self.scaler.set_growth_interval(self.scaler.get_growth_interval() + by)

    def save(self, _: None) -> dict[str, Any]:
        saved = self.scaler.state_dict()
        self.scaler = self.make("cpu")
        self.scaler.load_state_dict(saved)
        return saved  # type: ignore[no-any-return]

    def pickle(self, _: None) -> None:
        self.scaler = pickle.loads(pickle.dumps(self.scaler))

    def copy(self, _: None) -> None:
        self.scaler = copy.deepcopy(self.scaler)

    def log(self, call: tuple[Any, ...]) -> tuple[Any, ...]:
        """What a call came to, and all that it left behind."""
        try:
            outcome: Any = repr(getattr(self, call[0])(*call[1:]))
        except Exception as error:
            outcome = type(error), str(error)
        states = [
            sorted((key, bits(value)) for key, value in optimizer.state[p].items())
            for optimizer, p in zip(self.optimizers, self.params, strict=True)
        ]
        scale, tracker = self.scaler.get_scale(), self.scaler._get_growth_tracker()
        grads = [None if p.grad is None else bits(p.grad) for p in self.params]
        return call, outcome, repr(scale), tracker, grads, list(map(bits, self.params)), states


def play(make: Callable[..., Any], start: Any, kinds: Any, history: Any) -> list[Any]:
    player = Player(make, start, kinds)
    return [player.log(call) for call in history]


@settings(max_examples=1000)
@given(start=starts, kinds=kinds, history=st.lists(calls, min_size=1, max_size=10))
def test_a_thousand_histories(start: Any, kinds: Any, history: Any) -> None:
    theirs = play(torch.amp.GradScaler, start, kinds, history)
    ours = play(GradScaler, start, kinds, history)
    for expected, found in zip(theirs, ours, strict=True):
        assert found == expected


class NoBackoff(GradScaler):
    def update(self, new_scale: Any = None) -> None:
        before = None if self._scale is None else self._scale.clone()
        super().update(new_scale)
        if before is not None and self._scale is not None and bool(self._scale < before):
            self._scale.copy_(before)


class NeverSkips(GradScaler):
    def _maybe_opt_step(self, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)


class StepsTwice(GradScaler):
    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._per_optimizer_states[id(optimizer)]["stage"] = type(
            self._per_optimizer_states[id(optimizer)]["stage"]
        ).READY
        return super().step(optimizer, *args, **kwargs)


@pytest.mark.parametrize("wrong", [NoBackoff, NeverSkips, StepsTwice])
def test_a_wrong_scaler_is_noticed(wrong: type[GradScaler]) -> None:
    history = [
        ("iterate", ["good", "good", "good"], False),
        ("iterate", ["inf", "good", "nan"], False),
        ("backward", ["good", "good", "good"]),
        ("double_step", 0),
        ("update", None),
    ]
    start = {"init_scale": 8.0, "growth_interval": 3}
    kinds = ["loop", "foreach", "adamw"]
    expected = play(torch.amp.GradScaler, start, kinds, history)
    assert play(GradScaler, start, kinds, history) == expected
    assert play(wrong, start, kinds, history) != expected


positive = st.floats(2.0**-149, 2.0**127, width=32)


@settings(max_examples=1000)
@given(
    scale=positive,
    growth=st.floats(1.0009765625, 16, width=32) | st.floats(1.001, 16),
    backoff=st.floats(0.0625, 0.9990234375, width=32) | st.floats(0.01, 0.999),
    interval=st.integers(1, 4),
    history=st.lists(st.booleans(), max_size=60),
)
def test_the_plain_rule_is_the_fused_kernel(
    scale: float, growth: float, backoff: float, interval: int, history: list[bool]
) -> None:
    rule, state = ScaleRule(growth, backoff, interval), ScaleState(scale, 0)
    fused = torch.tensor(scale), torch.tensor(0, dtype=torch.int32)
    exact = all(float(torch.tensor(f)) == f for f in (growth, backoff))
    tensors = ScaleState(fused[0].clone(), fused[1].clone())
    for finite in history:
        state = step(rule, state, finite)
        torch._amp_update_scale_(*fused, torch.tensor(float(not finite)), growth, backoff, interval)
        assert (state.scale, state.tracker) == (float(fused[0]), int(fused[1]))
        if exact:
            tensors = step(rule, tensors, torch.tensor(finite), torch.where)
            assert torch.equal(tensors.scale, fused[0])
            assert torch.equal(tensors.tracker, fused[1])
