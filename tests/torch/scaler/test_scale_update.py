"""`AsyncRead` tells the host of a scale on a device, also of one that is late.

The update itself is held to the rule, bit for bit, by tests/shared/test_scaler_histories.py.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from polymp import scaling
from polymp.backends.torch.scaler import device_state
from polymp.backends.torch.scaler.device_state import AsyncRead
from polymp.scaling import ScaleRule, ScaleState

# What was found, and what of it in the loss: the finding of a loss is one of the step.
FOUND = ((0, None), (1, None), (0, 0), (1, 0), (1, 1))


def after(rule: ScaleRule, state: ScaleState, found: tuple[int, int | None]) -> ScaleState:
    return scaling.step(rule, state, not found[0], loss_finite=not found[1])


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
THOUSANDTH = scaling.checked(ScaleRule(2.0, 0.1, 1, 1e-3))


@given(
    st.lists(st.sampled_from(FOUND), min_size=1, max_size=60),
    st.lists(st.integers(0, 9), max_size=20),
    st.sampled_from((ScaleRule(interval=2), ScaleRule(1.1, 0.7, 3), THOUSANDTH)),
    st.booleans(),
)
@example([(0, None)] * 5 + [(1, None)] * 7 + [(0, None)], [], THOUSANDTH, False)
def test_its_bound_is_never_above_the_scale(history, waits, rule, far) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Event", Late)
        patch.setattr(Late, "waits", list(waits))
        watch, state, past = AsyncRead(), ScaleState(16.0), []
        assert watch.at_least(rule.backoff) == 0
        for found in history:
            state = after(rule, state, found)
            past.append(state)
            new = watch.updated(*tensors(state, FarAway if far else torch.Tensor))
            assert watch.at_least(rule.backoff) <= state.scale
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
        state = after(rule, state, (1, None))
        watch.updated(*tensors(state, torch.Tensor))
        above |= watch.at_least(rule.backoff) > state.scale
    assert above


def test_counts_beyond_float32_s_whole_numbers_come_over_exactly() -> None:
    watch = AsyncRead()
    tracker = torch.tensor(2**31 - 1, dtype=torch.int32)
    for _ in range(5):
        watch.updated(torch.tensor(8.0), tracker, torch.tensor([1.0, 1.0, 2.0**24]))
    assert watch.seen == ScaleState(8.0, 2**31 - 1, 1, 0, 2**24)
