"""Random histories of a run on low weights, against a run on float32 weights that is told the same.

What may happen: steps, steps without some gradients, skipped steps, Inf gradients, a rate that
changes, weights written by hand, a save and a load, a new group of parameters.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from polymp.torch import GradScaler, low_weights
from tests.support.sizes import size

SHAPES = ((3, 4), (5,), (2, 2, 2))
OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
}
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["step"] * 3
            + ["some", "skip", "device skip", "inf", "rate", "copy", "save", "add"]
        ),
        st.integers(0, 2**16),
    ),
    min_size=1,
    max_size=14,
)  # fmt: skip


class Run:
    """Parameters and their optimizer; with low weights or without."""

    def __init__(self, kind: str, mode: str | None) -> None:
        made = torch.Generator().manual_seed(0)
        self.kind, self.mode = kind, mode
        self.params = [nn.Parameter(torch.randn(s, generator=made)) for s in SHAPES]
        self.optimizer = self.start(OPTIMIZERS[kind]([{"params": self.params}]))

    def start(self, optimizer: Any) -> Any:
        return low_weights(optimizer, self.mode) if self.mode else optimizer

    def happens(self, event: str, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        if event == "rate":
            for group in self.optimizer.param_groups:
                group["lr"] = 0.001 * (1 + seed % 50)
        elif event == "copy":
            at = seed % len(self.params)
            new = torch.randn(self.params[at].shape, generator=made).bfloat16()
            with torch.no_grad():
                self.params[at].copy_(new)
        elif event == "save":
            self.through_file()
        elif event == "add":
            p = nn.Parameter(torch.randn(4, generator=made))
            self.params.append(p)
            self.optimizer.add_param_group({"params": [p]})
        else:
            self.step(event, seed, made)

    def step(self, event: str, seed: int, made: torch.Generator) -> None:
        for at, p in enumerate(self.params):
            grad = torch.randn(p.shape, generator=made).bfloat16()
            p.grad = None if event == "some" and at == seed % 2 else grad.to(p.dtype)
        skips = event in ("skip", "device skip")
        if event == "inf" or skips:
            self.params[-1].grad = torch.full_like(self.params[-1], torch.inf)
        if not skips:
            self.optimizer.step()
            return
        device = "device" if event == "device skip" else "host"
        scaler = GradScaler("cpu", init_scale=1.0, skip_on=device)
        scaler.scale(torch.zeros(()))
        scaler.step(self.optimizer)

    def through_file(self) -> None:
        """Save, and go on in new objects."""
        file = io.BytesIO()
        torch.save(([p.detach() for p in self.params], self.optimizer.state_dict()), file)
        file.seek(0)
        values, state = torch.load(file, weights_only=True)
        groups = [len(g["params"]) for g in self.optimizer.param_groups]
        self.params = [nn.Parameter(torch.zeros(v.shape)) for v in values]
        each = iter(self.params)
        parts = [{"params": [next(each) for _ in range(n)]} for n in groups]
        self.optimizer = self.start(OPTIMIZERS[self.kind](parts))
        with torch.no_grad():
            for p, value in zip(self.params, values, strict=True):
                p.copy_(value)
        self.optimizer.load_state_dict(state)

    def full(self) -> list[torch.Tensor]:
        if self.mode is None:
            return [p.detach() for p in self.params]
        module = nn.ParameterList(self.params)
        return list(self.optimizer.float32_state_dict(module).values())


@pytest.mark.parametrize("mode", ["master", "split"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@settings(max_examples=size(20, 200))
@given(events=EVENTS)
def test_an_exact_mode_has_the_bits_of_float32(
    mode: str, kind: str, events: list[tuple[str, int]]
) -> None:
    plain, low = Run(kind, None), Run(kind, mode)
    for event, seed in events:
        plain.happens(event, seed)
        low.happens(event, seed)
        for one, other in zip(plain.full(), low.full(), strict=True):
            same = one.view(torch.int32) == other.view(torch.int32)
            assert (same | (one.isnan() & other.isnan())).all(), event
        for p, full in zip(low.params, low.full(), strict=True):
            assert p.dtype is torch.bfloat16
            gap = (p.detach().float() - full).abs()
            # A subnormal number has the same last place as the smallest normal one.
            half = full.abs().clamp(min=2.0**-126) * 2.0**-8
            assert ((gap <= half) | ~full.isfinite() | (full.abs() > 3.38e38)).all()


@settings(max_examples=size(20, 200))
@given(events=EVENTS)
@example(events=[("copy", 0), ("save", 0)])  # the values that the weights have already
def test_stochastic_is_the_same_in_every_run(events: list[tuple[str, int]]) -> None:
    """And a save and a load, wherever it happens, changes nothing."""
    one, other = Run("adamw", "stochastic"), Run("adamw", "stochastic")
    for event, seed in events:
        one.happens(event, seed)
        if event != "save":
            other.happens(event, seed)
    for a, b in zip(one.full(), other.full(), strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32)) or a.isnan().any()
