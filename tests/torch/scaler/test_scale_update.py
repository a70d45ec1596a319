"""The scale's rule on a device, and what the host hears of it.

`update` against `scale_rule.step` on Python numbers, bit for bit, by the rule's own lines on
tensors and by torch's kernel; `AsyncRead` against a device that is late.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from polymp.backends.torch.scaler import device_state
from polymp.backends.torch.scaler.device_state import AsyncRead
from polymp.scaling import scale_rule
from polymp.scaling.scale_rule import LARGEST, SMALLEST, ScaleRule, ScaleState

TAME = (2.0, 4.0, 1.1, 1.5, 3.7, 1 + 2**-20)
WILD = (4.5, 10.0, 2.0**40, 1e300)
BACKOFFS = (0.5, 0.25, 0.7, 0.1, 0.99, 1e-30)
float32s = st.floats(SMALLEST, LARGEST, width=32)
# What was found, and what of it in the loss: the finding of a loss is one of the step.
FOUND = ((0, None), (1, None), (0, 0), (1, 0), (1, 1))


@st.composite
def rules(draw: st.DrawFn, growths: tuple[float, ...], hysteresis: int) -> ScaleRule:
    low, high = sorted((draw(float32s), draw(float32s)))
    if draw(st.booleans()):
        low, high = SMALLEST, LARGEST
    return scale_rule.checked(
        ScaleRule(
            draw(st.sampled_from(growths)), draw(st.sampled_from(BACKOFFS)),
            draw(st.sampled_from((1, 2, 3, 2000, 2**31 - 1))), low, high,
            draw(st.integers(0, hysteresis)),
        )
    )  # fmt: skip


@st.composite
def states(draw: st.DrawFn, rule: ScaleRule) -> ScaleState:
    scale = draw(st.floats(rule.min_scale, rule.max_scale, width=32))
    tracker = draw(st.sampled_from((0, 1, 2, 1998, 1999, 2000, 5000)))
    skips = draw(st.integers(0, 9))
    return ScaleState(
        scale, tracker, skips, draw(st.integers(0, skips)), draw(st.integers(skips, 2**23))
    )


def on_device(
    way: Any, rule: ScaleRule, state: ScaleState, history: list[tuple[int, int | None]]
) -> list[ScaleState]:
    scale, tracker = torch.tensor(state.scale), torch.tensor(state.tracker, dtype=torch.int32)
    counts = torch.tensor(device_state.counted(state), dtype=torch.float32)
    bars, bad = device_state.new_bars(torch.device("cpu"))
    seen = []
    for at, (found, loss) in enumerate(history):
        if loss is not None:
            bad.fill_((1.0, math.nan)[at % 2] if loss else 0.0)
        given = None if loss is None else bad
        by_kernel = way is not device_state.update or device_state.regular(rule, state)
        by = bars if by_kernel else None
        way(rule, scale, tracker, counts, torch.tensor(float(found)), given, by)
        bad.zero_()
        seen.append(device_state.state_of(scale.item(), tracker.item(), *counts.tolist()))
    assert (scale.dtype, tracker.dtype, counts.dtype) == (
        torch.float32, torch.int32, torch.float32,
    )  # fmt: skip
    return seen


def on_host(
    rule: ScaleRule, state: ScaleState, history: list[tuple[int, int | None]]
) -> list[ScaleState]:
    seen = []
    for found, loss in history:
        state = scale_rule.step(
            rule, state, not found, loss_finite=None if loss is None else not loss
        )
        seen.append(state)
    return seen


def by_rule(*state: Any) -> None:
    device_state.update(*state[:-1], None)  # without the bars that the kernel needs


histories = st.lists(st.sampled_from(FOUND), min_size=1, max_size=12)


@given(st.data(), histories)
def test_the_kernel_the_rule_on_tensors_and_python_numbers_agree(data: Any, history: Any) -> None:
    rule = data.draw(rules(TAME, 0))
    state = data.draw(states(rule))
    expected = on_host(rule, state, history)
    assert on_device(by_rule, rule, state, history) == expected
    assert on_device(device_state.update, rule, state, history) == expected


@given(st.data(), histories)
def test_with_hysteresis_and_wild_growth(data: Any, history: Any) -> None:
    rule = data.draw(rules(TAME + WILD, 4))
    state = data.draw(states(rule))
    expected = on_host(rule, state, history)
    assert on_device(by_rule, rule, state, history) == expected
    assert on_device(device_state.update, rule, state, history) == expected


def test_the_kernel_is_kept_from_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    monkeypatch.setattr(torch, "_amp_update_scale_", lambda *state: calls.append(state[3]))
    state, found = tensors(ScaleState(), torch.Tensor), torch.zeros(())
    for rule in (ScaleRule(), ScaleRule(growth=4.0), ScaleRule(hysteresis=1), ScaleRule(growth=5)):
        device_state.update(rule, *state, found, None, torch.zeros(6))
    device_state.update(ScaleRule(), *state, found, None)
    assert calls == [2.0, 4.0]


def forgets_the_loss(rule: Any, *state: Any) -> None:
    device_state.update(rule, *state[:-1], device_state.new_bars(torch.device("cpu"))[0])


def forgets_the_bounds(rule: ScaleRule, *state: Any) -> None:
    device_state.update(rule._replace(min_scale=SMALLEST, max_scale=LARGEST), *state)


def by_equality(
    rule: ScaleRule, scale: Any, tracker: Any, counts: Any, found: Any, *_: Any
) -> None:
    torch._amp_update_scale_(scale, tracker, found, rule.growth, rule.backoff, rule.interval)


def in_float32(rule: ScaleRule, scale: Any, tracker: Any, counts: Any, found: Any, *_: Any) -> None:
    skips, overflows, skipped = counts.unbind()
    state = ScaleState(scale, tracker, skips, skips - overflows, skipped)
    after = scale_rule.step(rule, state, found == 0, torch.where)
    scale.copy_(after.scale)
    tracker.copy_(after.tracker)
    counts.copy_(torch.stack(device_state.counted(after)))


@pytest.mark.parametrize(
    ("wrong", "rule", "state", "found"),
    [
        (forgets_the_loss, ScaleRule(), ScaleState(8.0), (1, 1)),
        (forgets_the_bounds, ScaleRule(min_scale=8.0), ScaleState(8.0), (1, 0)),
        (by_equality, ScaleRule(interval=2), ScaleState(8.0, 5), (0, None)),
        (in_float32, ScaleRule(growth=1.1, interval=1), ScaleState(3.0), (0, None)),
    ],
)
def test_a_wrong_update_is_seen(wrong: Any, rule: Any, state: ScaleState, found: Any) -> None:
    expected = on_host(rule, state, [found])
    assert on_device(device_state.update, rule, state, [found]) == expected
    assert on_device(wrong, rule, state, [found]) != expected


# --- AsyncRead -----------------------------------------------------------------------------------


class Late:
    """An event that comes after it was asked for so many times."""

    waits: ClassVar[list[int]] = []  # of the events still to be made

    def __init__(self, *_: Any) -> None:
        self.left = Late.waits.pop(0) if Late.waits else 0

    def record(self) -> None: ...

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0

    def synchronize(self) -> None: ...


class FarAway(torch.Tensor):
    """A tensor that says it is on a GPU; its copies to the CPU are true ones."""

    @property
    def device(self) -> Any:  # type: ignore[override]
        return torch.device("cuda:0")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return torch.device("cuda:0")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result.clone() if isinstance(result, torch.Tensor) else result


def tensors(state: ScaleState, kind: type[torch.Tensor]) -> list[torch.Tensor]:
    made = (
        torch.tensor(state.scale), torch.tensor(state.tracker, dtype=torch.int32),
        torch.tensor(device_state.counted(state), dtype=torch.float32),
    )  # fmt: skip
    return [t.as_subclass(kind) for t in made]


# A bound that float32 does not hold; `checked` rounds it, and the scale comes to rest on it.
THOUSANDTH = scale_rule.checked(ScaleRule(2.0, 0.1, 1, 1e-3))


@given(
    st.lists(st.sampled_from(FOUND), min_size=1, max_size=60),
    st.lists(st.integers(0, 9), max_size=20),
    st.sampled_from((ScaleRule(interval=2), ScaleRule(1.1, 0.7, 3), THOUSANDTH)),
    st.booleans(),
)
@example([(0, None)] * 5 + [(1, None)] * 7 + [(0, None)], [], THOUSANDTH, False)
def test_its_bound_is_never_above_the_scale(
    history: Any, waits: list[int], rule: ScaleRule, far: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Event", Late)
        patch.setattr(Late, "waits", list(waits))
        watch, state, past = AsyncRead(), ScaleState(16.0), []
        assert watch.at_least(rule.backoff, rule.min_scale) == rule.min_scale
        for found in history:
            state = on_host(rule, state, [found])[0]
            past.append(state)
            new = watch.updated(*tensors(state, FarAway if far else torch.Tensor))
            assert watch.at_least(rule.backoff, rule.min_scale) <= state.scale
            if watch.seen is None:
                assert not new
            else:  # it is a state that was there, as long ago as it says
                assert past[-1 - watch.age] == watch.seen
            if not far:
                assert (watch.seen is not None) == (len(past) > 4)
                assert watch.seen is None or watch.age <= 4


def test_it_forgets_the_age_and_is_seen() -> None:
    """The oracle above notices a AsyncRead that takes what arrives for new."""

    class Ageless(AsyncRead):
        def updated(self, *state: torch.Tensor) -> bool:
            new = super().updated(*state)
            self.age = 0
            return new

    rule, state, watch = ScaleRule(), ScaleState(16.0), Ageless()
    above = False
    for _ in range(12):
        state = on_host(rule, state, [(1, None)])[0]
        watch.updated(*tensors(state, torch.Tensor))
        above |= watch.at_least(rule.backoff, rule.min_scale) > state.scale
    assert above


def test_counts_beyond_float32_s_whole_numbers_come_over_exactly() -> None:
    watch = AsyncRead()
    tracker = torch.tensor(2**31 - 1, dtype=torch.int32)
    for _ in range(5):
        watch.updated(torch.tensor(8.0), tracker, torch.tensor([1.0, 1.0, 2.0**24]))
    assert watch.seen == ScaleState(8.0, 2**31 - 1, 1, 0, 2**24)


def test_an_op_in_compiled_code_reaches_the_scaler_while_it_lives() -> None:
    class Hears:
        def __init__(self) -> None:
            self.heard: list[list[Any]] = []

        def _updated(self, *state: torch.Tensor) -> None:
            self.heard.append([t.tolist() for t in state])

    one, two = Hears(), Hears()
    names = [device_state.listen(it) for it in (one, two)]
    state = tensors(ScaleState(8.0, 1, 2, 1, 5), torch.Tensor)
    for name in (names[0], names[1], names[1]):
        device_state.tell(name, *state)
    assert (len(one.heard), len(two.heard)) == (1, 2)
    assert two.heard[0] == [8.0, 1, [2.0, 1.0, 5.0]]  # two skips, one of them an overflow
    del two
    device_state.tell(names[1], *state)
    assert names[1] not in device_state.scalers
    assert names[0] in device_state.scalers


def test_a_cuda_graph_is_cut_where_the_host_hears_of_an_update() -> None:
    """By what inductor asks of an op, and cuts a graph for that it would replay without Python."""
    from torch._inductor.utils import is_cudagraph_unsafe_fx_node

    graph = torch.fx.Graph()
    for op, cut in ((torch.ops.polymp.updated.default, True), (torch.ops.aten.add.Tensor, False)):
        assert is_cudagraph_unsafe_fx_node(graph.call_function(op)) == cut
