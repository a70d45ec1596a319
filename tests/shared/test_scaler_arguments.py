"""Arguments and states that a scaler refuses: both frameworks raise the errors of the core."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from tests.conftest import need
from tests.support.scaler_arguments import CONSTANTS, FIRSTS, SAVED, STATES, spoiled


@pytest.fixture(params=["torch", "jax"])
def make(request: pytest.FixtureRequest) -> Any:
    """Makes a framework's `GradScaler`."""
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
