"""A run goes on in the other framework, and back, with every bit of its scaler."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polymp.scaling import SMALLEST, ScaleRule, ScaleState, step, to_state_dict
from tests.conftest import need
from tests.support.scaler_arguments import CONSTANTS, FIRSTS, SAVED, STATES, spoiled
from tests.support.sizes import size

# What a step finds: all is finite; a gradient is not; the loss is not.
GOOD, OVERFLOW, SPOILED = "good", "overflow", "spoiled"
steps = st.lists(st.sampled_from([GOOD, GOOD, OVERFLOW, SPOILED]), max_size=6)
rules = st.fixed_dictionaries(
    {
        "growth_factor": st.sampled_from([2.0, 4.0, 1.5, 1.1, 3.0]),
        "backoff_factor": st.sampled_from([0.5, 0.25, 0.3]),
        "growth_interval": st.integers(1, 3),
        "hysteresis": st.integers(0, 2),
        "max_scale": st.sampled_from([2.0**126, 2.0**18]),
        "min_scale": st.sampled_from([SMALLEST, 2.0**14]),
    }
)


class Torch:
    """A run of `polymp.torch.GradScaler`: real losses, backwards and an optimizer."""

    def __init__(self, **options: Any) -> None:
        import torch

        from polymp.torch import GradScaler

        self.torch = torch
        self.weight = torch.ones(2, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.0)
        self.scaler = GradScaler("cpu", **options)

    def step(self, found: str) -> None:
        self.optimizer.zero_grad()
        loss = (self.weight * 1e-3).sum()
        loss = loss * float("nan") if found == SPOILED else loss
        self.scaler.scale(loss).backward()
        if found == OVERFLOW:
            assert self.weight.grad is not None
            self.weight.grad[1] = float("inf")
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)


class Jax:
    """A run of `polymp.jax.GradScaler`: a jitted step."""

    def __init__(self, **options: Any) -> None:
        import jax

        from polymp.jax import GradScaler

        self.scaler = GradScaler(**options)
        self.jitted = jax.jit(_jax_step)

    def step(self, found: str) -> None:
        nan, inf = float("nan"), float("inf")
        spoil = nan if found == SPOILED else 1.0
        self.scaler = self.jitted(self.scaler, spoil, inf if found == OVERFLOW else 0.0)

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        self.scaler = self.scaler.load_state_dict(state)


def _jax_step(scaler: Any, spoil: Any, inf: Any) -> Any:
    import jax
    import jax.numpy as jnp

    def loss(w: Any) -> Any:
        value = (w * 1e-3).sum() * spoil
        return scaler.scale(value), value

    grads, value = jax.grad(loss, has_aux=True)(jnp.ones(2))
    _, scaler, _ = scaler.step(grads.at[1].add(inf), lambda g, w: w - g, jnp.ones(2), loss=value)
    return scaler


def by_rule(options: dict[str, Any], history: list[str]) -> dict[str, Any]:
    names = {"growth_factor": "growth", "backoff_factor": "backoff", "growth_interval": "interval"}
    rule = ScaleRule(**{names.get(key, key): value for key, value in options.items()})
    state = ScaleState(2.0**16)
    for found in history:
        state = step(rule, state, found == GOOD, loss_finite=found != SPOILED)
    return to_state_dict(rule, state)


@pytest.fixture(autouse=True)
def _both() -> None:
    need("torch", "jax")


@settings(max_examples=size(5, 25))
@given(options=rules, legs=st.lists(steps, min_size=3, max_size=3))
@pytest.mark.parametrize("first", [Torch, Jax])
def test_there_and_back_is_one_run(first, options, legs):
    second = Jax if first is Torch else Torch
    one, other = first(**options), second()
    saved = None
    for runner, history in zip((one, other, one), legs, strict=True):
        if saved is not None:
            runner.load(saved)
            assert runner.state_dict() == saved, "loaded and saved again"
        for found in history:
            runner.step(found)
        saved = json.loads(json.dumps(runner.state_dict()))  # Python numbers, and as they were
        assert saved == runner.state_dict()
    assert saved == by_rule(options, [found for leg in legs for found in leg])


@settings(max_examples=size(5, 25))
@given(options=rules, history=steps)
def test_torch_amp_loads_what_jax_saved(options, history):
    import torch

    run = Jax(**options)
    for found in history:
        run.step(found)
    saved = run.state_dict()
    amp = torch.amp.GradScaler("cpu")
    amp.load_state_dict(saved)
    theirs = amp.state_dict()
    assert theirs == {key: saved[key] for key in theirs}
    loaded = Jax(**options).scaler.load_state_dict(theirs).state_dict()  # with its own bounds
    assert loaded == saved | dict.fromkeys(("skips", "spoiled", "skipped"), 0)


# --- Arguments and states that a scaler refuses: both frameworks raise the errors of the core -----


@pytest.fixture(params=["torch", "jax"])
def make(request: pytest.FixtureRequest) -> Any:
    need(request.param)
    if request.param == "torch":
        from polymp.torch import GradScaler

        return functools.partial(GradScaler, "cpu")
    from polymp.jax import GradScaler as OfJax

    return OfJax


@pytest.mark.parametrize(("arguments", "error", "message"), CONSTANTS + FIRSTS, ids=str)
def test_arguments(make: Any, arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises((error, AssertionError)) as raised:
        make(**arguments)
    if isinstance(make, functools.partial) and raised.type is AssertionError:
        import torch

        with pytest.raises(AssertionError, match=f"^{re.escape(str(raised.value))}$"):
            torch.amp.GradScaler("cpu", **arguments)  # whose words they are then
    else:
        assert (raised.type, raised.value.args) == (error, (message,))
    assert make(**arguments, enabled=False).state_dict() == {}, "nor is it looked at if disabled"


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(("change", "error", "message"), STATES, ids=lambda v: str(v)[:30])
def test_a_bad_state_changes_nothing(
    make: Any, change: Any, error: type[Exception], message: str, used: bool
) -> None:
    scaler = make(init_scale=4.0, growth_interval=3)
    if used and isinstance(make, functools.partial):
        import torch

        scaler.scale(torch.ones(()))
    elif used:
        scaler = scaler.update(True)
    before = scaler.state_dict()
    with pytest.raises(error) as raised:
        scaler.load_state_dict(spoiled(change))
    assert (raised.type, raised.value.args) == (error, (message,))
    assert scaler.state_dict() == before
    loaded = scaler.load_state_dict(SAVED) or scaler
    assert loaded.state_dict() == SAVED


def test_what_is_no_state_at_all(make: Any) -> None:
    scaler = make()
    before = scaler.state_dict()
    for state in (None, 3, [1.0], "scale"):
        said = re.escape(f"a scaler's state must be a dictionary, got {state!r}.")
        with pytest.raises(TypeError, match=f"^{said}$"):
            scaler.load_state_dict(state)
    with pytest.raises(RuntimeError, match="The source state dict is empty, possibly because it"):
        scaler.load_state_dict({})
    assert scaler.state_dict() == before
