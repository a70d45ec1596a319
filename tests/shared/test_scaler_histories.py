"""One history, every implementation: the same scale, tracker and counters after every step.

A history is a scaler's settings and a list of events: a step and what was found in it, another
scale, another interval. `COLUMNS` lists the implementations, which all run the same thousands
of histories; what they are held to, bit for bit, is the rule on Python numbers. That is held to
torch's own kernel, until a bound, a hysteresis or a lowered interval matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from polymp import scaling
from polymp.scaling import LARGEST, SMALLEST, ScaleRule, ScaleState
from tests.conftest import need
from tests.support.sizes import LONG

# Hypothesis draws the bytes of many histories at a time: one by one, drawing would take most of
# the time.
COUNT, EXAMPLES, ROWS = (4_000, 20, 250) if LONG else (200, 12, 25)
WIDTH = 12

# An event, by what is drawn for it; a zero is a good step, so that histories shrink to those.
GOOD, OVERFLOW, LOST, LOST_ONLY, INTERVAL, SCALE = range(6)
DRAWN = [GOOD] * 8 + [OVERFLOW] * 3 + [LOST, LOST, LOST_ONLY, INTERVAL, SCALE]
FOUND = {  # gradients finite, loss finite
    GOOD: (True, True),
    OVERFLOW: (False, True),
    LOST: (False, False),
    LOST_ONLY: (True, False),
}

INTERVALS = (2, 1, 3, 5)
SCALES = (2.0**16, 1.0, 3.0, 0.7, SMALLEST, LARGEST, 1e-30, 1e30, 40.0, 1 / 3)
RULES = tuple(
    map(
        scaling.checked,
        (
            ScaleRule(),
            ScaleRule(1.1, 0.7),
            ScaleRule(2.0, 0.5, min_scale=0.125, max_scale=32.0, hysteresis=2),
            ScaleRule(1.1, 0.7, min_scale=0.3, max_scale=44.4, hysteresis=1),
            ScaleRule(3.0, 0.25, min_scale=1.0, max_scale=2.0**24),
            ScaleRule(5.0, 0.1),  # grows by more than the kernel is asked for
            ScaleRule(1e300, 1e-300),  # from bound to bound
        ),
    )
)


class Event(NamedTuple):
    kind: int
    interval: int  # in force from here on
    scale: float  # what SCALE sets


class History(NamedTuple):
    rule: ScaleRule  # but for the interval
    first: float
    interval: int
    events: tuple[Event, ...]


def history(rule: ScaleRule, drawn: bytes) -> History:
    """Read a history from `WIDTH` bytes: its first scale, first interval, length and events."""
    start, length, *rest = drawn

    def scale(at: int) -> float:
        bounded = min(max(SCALES[at % len(SCALES)], rule.min_scale), rule.max_scale)
        return float(scaling.as_float32(bounded))

    interval = INTERVALS[start // 16 % len(INTERVALS)]
    first, events = scale(start), []
    now = interval
    for byte in rest[: 3 + length % (len(rest) - 2)]:
        kind = DRAWN[byte % len(DRAWN)]
        now = INTERVALS[byte // 16 % len(INTERVALS)] if kind == INTERVAL else now
        events.append(Event(kind, now, scale(byte // 16)))
    return History(rule, first, interval, tuple(events))


def histories(rule: ScaleRule, drawn: bytes) -> list[History]:
    rows = [drawn[at : at + WIDTH] for at in range(0, len(drawn), WIDTH)]
    return [history(rule, row) for row in rows]


# --- the implementations: the state after every event --------------------------------------------

States = list[tuple[float, ...]]  # scale, tracker, skips, spoiled, skipped
Column = Callable[[list[History]], list[States]]


def by_numbers(all_: list[History]) -> list[States]:
    """The rule on Python numbers."""

    def run(it: History) -> Iterator[ScaleState]:
        state = ScaleState(it.first)
        for event in it.events:
            if event.kind in FOUND:
                finite, loss = FOUND[event.kind]
                rule = it.rule._replace(interval=event.interval)
                state = scaling.step(rule, state, finite, loss_finite=loss)
            elif event.kind == SCALE:
                state = state._replace(scale=event.scale)
            yield state

    return [[tuple(map(float, state)) for state in run(it)] for it in all_]


def with_torch(make: Callable[[Any], Any]) -> Column:
    """`GradScaler` around an optimizer; nothing reads its state before the end."""

    def run(it: History) -> States:
        import torch

        from polymp.torch import GradScaler

        rule = it.rule
        scaler = GradScaler(
            "cpu", it.first, rule.growth, rule.backoff, it.interval, min_scale=rule.min_scale,
            max_scale=rule.max_scale, hysteresis=rule.hysteresis,
        )  # fmt: skip
        weight = torch.ones((), requires_grad=True)
        optimizer = make([weight])
        kept = []
        for event in it.events:
            if event.kind == INTERVAL:
                scaler.set_growth_interval(event.interval)
            finite, loss = FOUND.get(event.kind, (True, True))
            value = _numbers()[loss, True].clone().requires_grad_()
            scaled = scaler.scale(value)
            if event.kind in FOUND:
                # What backward gives for the loss, finite or not, times the weight; or times Inf.
                (factor,) = torch.autograd.grad(scaled, value)
                weight.grad = factor * _numbers()[finite, False]
                assert loss or bool(scaled.isnan())
                scaler.step(optimizer)
                scaler.update()
            elif event.kind == SCALE:
                scaler.update(event.scale)
            state = scaler._tensors()
            kept.append(torch.cat([tensor.view(-1) for tensor in state]))
        saved = scaler.state_dict()
        last = tuple(
            float(saved[k]) for k in ("scale", "_growth_tracker", "skips", "spoiled", "skipped")
        )
        states = [(*row[:3], row[2] - row[3], row[4]) for row in torch.stack(kept).tolist()]
        assert states[-1] == last
        return states

    return lambda all_: [run(it) for it in all_]


@cache
def _numbers() -> dict[tuple[bool, bool], Any]:
    """A loss (True) and a factor of a gradient (False), finite or not."""
    import torch

    values = {(True, True): 1.0, (False, True): np.nan, (True, False): 1.0, (False, False): np.inf}
    return {key: torch.tensor(value) for key, value in values.items()}


def host(all_: list[History]) -> list[States]:
    import torch

    return with_torch(lambda ws: torch.optim.SGD(ws, lr=0.1, foreach=False))(all_)


def device(all_: list[History]) -> list[States]:
    """A fused optimizer, which skips by itself."""
    import torch

    return with_torch(lambda ws: torch.optim.SGD(ws, lr=0.1, fused=True))(all_)


@cache
def _compiled(rule: ScaleRule, backend: str) -> Any:
    import torch

    from polymp.backends.torch.scaler import device_state

    # The interval is a tensor here, so that a rule is compiled once.
    @torch.compile(backend=backend, fullgraph=True, dynamic=False)
    def update(interval: Any, *state_and_found: Any) -> None:
        device_state.update(rule._replace(interval=interval), *state_and_found)

    return update


def compiled(all_: list[History]) -> list[States]:
    """The update on the device, compiled."""
    import torch

    def run(it: History) -> Iterator[tuple[float, ...]]:
        # One rule goes through the compiler of code, too: it is the one that could round otherwise.
        code = it.rule.growth == 1.1 and it.rule.hysteresis
        update = _compiled(it.rule, "inductor" if code else "eager")
        scale, tracker = torch.tensor(it.first), torch.tensor(0, dtype=torch.int32)
        counts = torch.zeros(3)
        for event in it.events:
            if event.kind in FOUND:
                found = [torch.tensor(float(not finite)) for finite in FOUND[event.kind]]
                interval = torch.tensor(event.interval, dtype=torch.int32)
                update(interval, scale, tracker, counts, *found)
            elif event.kind == SCALE:
                scale.fill_(event.scale)
            skips, overflows, skipped = counts.tolist()
            yield scale.item(), float(tracker), skips, skips - overflows, skipped

    return [[*run(it)] for it in all_]


@cache
def _with_interval(rule: ScaleRule, interval: int) -> Any:
    from polymp.jax import GradScaler

    return GradScaler(
        rule.min_scale, rule.growth, rule.backoff, interval,
        min_scale=rule.min_scale, max_scale=rule.max_scale, hysteresis=rule.hysteresis,
    )  # fmt: skip


def _of(rule: ScaleRule, interval: int, leaves: Iterable[Any]) -> Any:
    """A scaler from its leaves, under a rule that is part of its structure."""
    import jax

    return jax.tree.unflatten(jax.tree.structure(_with_interval(rule, interval)), list(leaves))


@cache
def _scale(number: float) -> Any:
    import jax.numpy as jnp

    return jnp.float32(number)


def _in_jax(advance: Callable[..., Any]) -> Column:
    """One history after the other, event by event.

    A scaler of JAX is a value and its update a function of it: each update is made once, and what
    came out is kept for the histories that meet the same scaler with the same things found.
    """
    kept: dict[tuple[Any, ...], tuple[tuple[float, ...], list[Any]]] = {}

    def run(it: History) -> States:
        import jax

        fresh = jax.tree.leaves(_with_interval(it.rule, it.interval))
        leaves = [_scale(it.first), *fresh[1:]]
        numbers: tuple[float, ...] = (it.first, 0.0, 0.0, 0.0, 0.0)
        states = []
        for event in it.events:
            if event.kind in FOUND:
                key = it.rule, event.interval, numbers, event.kind
                if key not in kept:
                    scaler = advance(_of(it.rule, event.interval, leaves), *FOUND[event.kind])
                    new = jax.tree.leaves(scaler)
                    kept[key] = tuple(float(x) for x in new), new
                numbers, leaves = kept[key]
            elif event.kind == SCALE:
                numbers, leaves = (event.scale, *numbers[1:]), [_scale(event.scale), *leaves[1:]]
            states.append(numbers)
        return states

    return lambda all_: [run(it) for it in all_]


@cache
def _eagerly() -> Column:
    import jax.numpy as jnp

    one = {value: jnp.asarray(value) for value in (True, False)}
    return _in_jax(lambda s, finite, loss: s.update(one[finite], loss_finite=one[loss]))


def eager(all_: list[History]) -> list[States]:
    return _eagerly()(all_)


def _train(scaler: Any, finite: Any, loss: Any) -> Any:
    """A step of training by a loss whose gradient is 1, Inf, or, with the loss, NaN."""
    import jax
    import jax.numpy as jnp

    value = jnp.where(loss, 1.0, jnp.nan)
    grads = scaler.state.scale * jnp.where(finite, 1.0, jnp.inf)
    _, scaler, _ = scaler.step(grads, lambda g, w: w - g, jnp.float32(1), loss=value)
    assert isinstance(scaler.state.scale, jax.Array)
    return scaler


@cache
def _jitted() -> Column:
    import jax

    return _in_jax(jax.jit(_train))


def jit(all_: list[History]) -> list[States]:
    return _jitted()(all_)


COLUMNS: dict[str, Column] = {
    "torch, host": host,
    "torch, device": device,
    "torch, compiled": compiled,
    "jax, eager": eager,
    "jax, jit": jit,
}


def all_alike(all_: list[History], expected: list[States], found: list[States]) -> None:
    """Raise with the first history in which the states differ, up to the event where they do."""
    assert len(all_) == len(expected) == len(found)
    for it, wanted, got in zip(all_, expected, found, strict=True):
        if wanted != got:
            at = [a == b for a, b in zip(wanted, got, strict=True)].index(False)
            raise AssertionError(
                f"{it._replace(events=it.events[: at + 1])}\n{got[at]} is not {wanted[at]}"
            )


@cache
def drawn() -> tuple[tuple[list[History], list[States]], ...]:
    """Different histories, many at a time, each with its states by the rule on numbers."""
    seen: set[History] = set()
    used: set[ScaleRule] = set()
    kept: list[tuple[list[History], list[States]]] = []

    @settings(max_examples=EXAMPLES, phases=[Phase.generate])
    @given(st.binary(min_size=ROWS * WIDTH, max_size=ROWS * WIDTH))
    def draw(bytes_: bytes) -> None:
        rule = RULES[len(kept) % len(RULES)]  # each of them in turn
        new = [*dict.fromkeys(it for it in histories(rule, bytes_) if it not in seen)]
        if new:
            kept.append((new, by_numbers(new)))
        seen.update(new)
        used.add(rule)

    draw()
    assert len(seen) >= COUNT
    assert used == set(RULES)
    return tuple(kept)


# Torch's own code warns when its compiler is imported.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.sized
@pytest.mark.parametrize("column", COLUMNS)
def test_every_implementation_follows_the_rule_bit_for_bit(column: str) -> None:
    need(column.split(",")[0])
    for all_, expected in drawn():
        all_alike(all_, expected, COLUMNS[column](all_))


def sound(it: History, states: States) -> int:
    """How many events of a history come before one in which the rule has more than torch.amp."""
    tracker, scale = 0.0, it.first
    rule = it.rule
    for at, (event, state) in enumerate(zip(it.events, states, strict=True)):
        finite, _ = FOUND.get(event.kind, (True, True))
        product = scale * (rule.growth if finite else rule.backoff)
        if not finite and rule.hysteresis:
            return at
        if event.kind in FOUND:
            if tracker >= event.interval or not rule.min_scale <= product <= rule.max_scale:
                return at
        scale, tracker = state[:2]
    return len(it.events)


def by_torch_s_kernel(it: History, count: int) -> list[tuple[float, ...]]:
    """Scale and tracker after each of the first events, as torch.amp has them."""
    import torch

    scale, tracker = torch.tensor(it.first), torch.tensor(0, dtype=torch.int32)
    states = []
    for event in it.events[:count]:
        if event.kind in FOUND:
            found = torch.tensor(float(not FOUND[event.kind][0]))
            torch._amp_update_scale_(
                scale, tracker, found, it.rule.growth, it.rule.backoff, event.interval
            )
        elif event.kind == SCALE:
            scale.fill_(event.scale)
        states.append((scale.item(), float(tracker.item())))
    return states


def agrees_with_torch(all_: list[History], states: list[States]) -> int:
    """Raise where torch.amp differs; how many events were compared."""
    compared = 0
    for it, ours in zip(all_, states, strict=True):
        count = sound(it, ours)
        theirs = by_torch_s_kernel(it, count)
        assert [state[:2] for state in ours[:count]] == theirs, it
        compared += count
    return compared


@pytest.mark.sized
def test_the_rule_is_torch_s() -> None:
    need("torch")
    assert sum(agrees_with_torch(*each) for each in drawn()) > COUNT


@pytest.mark.sized
def test_a_wrong_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    need("torch")
    (all_, right), step = drawn()[0], scaling.step

    def late(rule: ScaleRule, *args: Any, **more: Any) -> ScaleState:
        return step(rule._replace(interval=rule.interval + 1), *args, **more)

    monkeypatch.setattr(scaling, "step", late)
    wrong = by_numbers(all_)
    for judge in (partial(all_alike, all_, right), partial(agrees_with_torch, all_)):
        with pytest.raises(AssertionError):
            judge(wrong)
