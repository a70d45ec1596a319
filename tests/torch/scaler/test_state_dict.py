"""A scaler's state: to and from torch.amp's, through files, copies and bad hands."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polymp import scaling
from polymp.scaling import ScaleRule, ScaleState, to_state_dict
from polymp.torch import GradScaler
from tests.support.sizes import size
from tests.support.torch.models import through_file

INF, NAN = float("inf"), float("nan")
TORCHS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
KINDS = ("loop", "fused")


class Run:
    """A weight trained under a scaler; spoiled where the history says so."""

    def __init__(self, scaler: Any, kind: str = "loop") -> None:
        self.scaler = scaler
        self.w = torch.tensor([1.0, -0.5, 2.0], requires_grad=True)
        self.optimizer = torch.optim.Adam([self.w], lr=0.125, fused=kind == "fused")

    def take_over(self, other: Run) -> None:
        self.w.data.copy_(other.w.data)
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))

    def play(self, history: str) -> list[Any]:
        """`+` a good step, `-` an overflow, `?` a lost loss; the state and weight after each."""
        log = []
        for what in history:
            self.optimizer.zero_grad()
            self.scaler.scale((self.w.square() * (NAN if what == "?" else 1.0)).sum()).backward()
            if what == "-":
                self.w.grad[0] = INF
            self.scaler.step(self.optimizer)
            self.scaler.update()
            log.append((self.scaler.state_dict(), self.w.tolist()))
        return log


def polymps(**options: Any) -> GradScaler:
    return GradScaler("cpu", **{"init_scale": 64.0, "growth_interval": 3} | options)


histories = st.text("++-?", max_size=10)
ours = st.fixed_dictionaries(
    {
        "init_scale": st.sampled_from([1.0, 64.0, scaling.as_float32(3.3), 2.0**20]),
        "growth_factor": st.sampled_from([2.0, 1.5, 8.0]),
        "backoff_factor": st.sampled_from([0.5, 0.7]),
        "growth_interval": st.integers(1, 4),
        "min_scale": st.sampled_from([2.0**-126, 2.0**-3, 1.0]),
        "max_scale": st.sampled_from([2.0**20, 2.0**126]),
        "hysteresis": st.integers(0, 2),
    }
)
every = pytest.mark.parametrize("kind", KINDS)


@every
@settings(max_examples=size(5, 20))
@given(history=st.text("++-", max_size=8), after=st.text("++-", min_size=1, max_size=8))
def test_out_of_torchs_scaler(kind, history, after) -> None:
    one = Run(torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3), kind)
    one.play(history)
    other = Run(polymps(init_scale=2.0, growth_interval=7, hysteresis=0), kind)
    other.play("+--")
    other.scaler.load_state_dict(one.scaler.state_dict())
    assert [other.scaler.state_dict()[k] for k in ("skips", "spoiled", "skipped")] == [0, 0, 0]
    other.take_over(one)
    for (theirs, w), (mine, v) in zip(one.play(after), other.play(after), strict=True):
        assert {k: mine[k] for k in TORCHS} == theirs
        assert w == v


def through_state(scaler: GradScaler, how: Any) -> GradScaler:
    twin = polymps(init_scale=1.0)
    twin.load_state_dict(how(scaler.state_dict()))
    return twin


WAYS = {
    "state_dict": lambda s: through_state(s, dict),
    "torch.save": lambda s: through_state(s, through_file),
    "json": lambda s: through_state(s, lambda d: json.loads(json.dumps(d))),
    "pickled state": lambda s: through_state(s, lambda d: pickle.loads(pickle.dumps(d))),
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("way", WAYS)
@every
@settings(max_examples=size(4, 10))
@given(options=ours, history=histories, after=histories)
def test_a_run_goes_on_bit_for_bit(way, kind, options, history, after) -> None:
    whole = Run(polymps(on_stuck=print, **options), kind)
    first = Run(polymps(on_stuck=print, **options), kind)
    wanted = whole.play(history + after)
    log = first.play(history)
    before = first.scaler.state_dict()
    second = Run(WAYS[way](first.scaler), kind)
    assert second.scaler.state_dict() == before
    assert second.scaler._scale is None
    second.take_over(first)
    assert log + second.play(after) == wanted
    assert first.scaler.state_dict() == before, "the copy shares something with the first"


def test_a_copy_keeps_what_was_asked_for() -> None:
    told: list[Any] = []
    scaler = polymps(on_stuck="raise", stuck_after=7, strict=True)
    for twin in (copy.copy(scaler), copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert (twin._on_stuck, twin._stuck_after, twin._strict) == ("raise", 7, True)
        assert twin._rule == scaler._rule
    assert copy.copy(polymps(on_stuck=told.append))._on_stuck == told.append


def test_the_first_scale_is_float32_once_it_is_used() -> None:
    """The scale that gradients are divided by and the one that is saved are the loss's scale."""
    scaler = polymps(init_scale=1.1)
    run = Run(scaler)
    scaler.scale(run.w.sum())
    assert scaler.get_scale() == scaler._scale.item() == scaling.as_float32(1.1)
    (last,) = run.play("-")
    rule = ScaleRule(interval=3)
    assert last[0] == to_state_dict(
        rule, scaling.step(rule, ScaleState(scaling.as_float32(1.1)), False)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_written_without_a_new_version_is_the_one_that_is_divided_by(kind) -> None:
    """As `torch.distributed` writes, or `.data`."""
    run = Run(polymps(), kind)
    run.play("+++")
    run.scaler._scale.data.fill_(2.0)
    run.optimizer.zero_grad()
    run.scaler.scale(run.w.sum()).backward()
    run.scaler.unscale_(run.optimizer)
    assert run.w.grad.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["written", "replaced"])
def test_a_quotient_that_overflows_by_a_scale_that_others_wrote_is_a_skip(kind, way) -> None:
    run = Run(polymps(), kind)
    run.play("+" * 12)  # so many that what was copied to the host has arrived
    if way == "written":
        run.scaler._scale.fill_(2.0**-10)
    else:
        run.scaler._scale = torch.tensor(2.0**-10)
    before = run.w.tolist()
    run.optimizer.zero_grad()
    run.scaler.scale(run.w.sum()).backward()
    run.w.grad.fill_(1e37)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    assert run.w.tolist() == before
    assert run.scaler.get_scale() == 2.0**-11


def test_a_scaler_first_used_in_inference_mode_trains() -> None:
    expected = Run(polymps()).play("+-+")
    scaler = polymps()
    with torch.inference_mode():
        assert scaler.scale(torch.ones(())).item() == 64.0
    assert Run(scaler).play("+-+") == expected
