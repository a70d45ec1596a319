"""Dynamic loss scaling: the update rule, once, for every framework.

State in, state out. `step` uses only arithmetic, comparison and one foreign verb, `where`, so the
same lines run on Python numbers, on torch tensors and on jax arrays, eager or traced.
"""

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from polymp.dtypes import FORMATS

Where = Callable[[Any, Any, Any], Any]

_LARGEST = FORMATS["float32"].max


class ScaleRule(NamedTuple):
    """The constants of loss scaling.

    Attributes:
        growth: factor after `interval` good steps in a row, above 1.
        backoff: factor after a step with a gradient that is not finite, below 1.
        interval: good steps between two growths, at least 1.
    """

    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000


class ScaleState(NamedTuple):
    """What one step hands to the next.

    Attributes:
        scale: what the loss is multiplied by; float32 [].
        tracker: good steps since the scale last changed; int32 [].
    """

    scale: Any = 2.0**16
    tracker: Any = 0


def pick(condition: Any, yes: Any, no: Any) -> Any:
    """`where` for Python numbers."""
    return yes if condition else no


def step(rule: ScaleRule, state: ScaleState, finite: Any, where: Where = pick) -> ScaleState:
    """The state after one optimizer step.

        finite, streak short of interval    scale            tracker + 1
        finite, streak reaches interval     scale * growth   0
        not finite                          scale * backoff  0

    A grown scale that float32 cannot hold is dropped: the scale stays and the tracker restarts.
    The streak is compared with >=, so a lowered interval still lets the scale grow.

    Bit for bit what torch computes wherever float32 holds the factors exactly (2, 0.5, 1.25, ...).
    For others, such as 1.1, Python numbers still match torch, which multiplies in float64; arrays
    multiply in float32.

    Args:
        rule: the constants.
        state: the state the gradients were computed under.
        finite: bool []; True if every gradient was finite.
        where: `pick` for Python numbers, `torch.where`, or `jax.numpy.where`.

    Returns:
        A state of the same types and dtypes as `state`.

    Source:
        Skip and back off: Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740.
        Growth: torch v2.13 aten/src/ATen/native/cuda/AmpKernels.cu.
    """
    scale, tracker = state
    streak = tracker + 1
    due = streak >= rule.interval
    grown = _float32(scale * rule.growth)
    good = where(due, where(grown <= _LARGEST, grown, scale), scale)
    return ScaleState(
        scale=where(finite, good, _float32(scale * rule.backoff)),
        tracker=where(finite, where(due, streak * 0, streak), streak * 0),
    )


def to_state_dict(rule: ScaleRule, state: ScaleState) -> dict[str, Any]:
    """The five entries that torch.amp.GradScaler saves, as Python numbers."""
    return {
        "scale": float(state.scale),
        "growth_factor": rule.growth,
        "backoff_factor": rule.backoff,
        "growth_interval": rule.interval,
        "_growth_tracker": int(state.tracker),
    }


def from_state_dict(saved: Mapping[str, Any]) -> tuple[ScaleRule, ScaleState]:
    """Rule and state, as Python numbers, from what `to_state_dict` or torch.amp saved.

    Raises:
        KeyError: an entry is missing; names it and lists those that are there.
        TypeError: an entry is not a number, or an integer entry is not whole.
    """
    for key in ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"):
        if key not in saved:
            there = ", ".join(map(repr, saved)) or "nothing"
            raise KeyError(f"a scaler's state needs the entry {key!r}; it has {there}")
        _check(key, saved[key], whole=key in ("growth_interval", "_growth_tracker"))
    return (
        ScaleRule(saved["growth_factor"], saved["backoff_factor"], int(saved["growth_interval"])),
        ScaleState(float(saved["scale"]), int(saved["_growth_tracker"])),
    )


def _check(key: str, value: Any, *, whole: bool) -> None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"a scaler's {key} must be a number, got {value!r}") from None
    if whole and not number.is_integer():
        raise TypeError(f"a scaler's {key} must be a whole number, got {value!r}")


def _float32(x: Any) -> Any:
    """Round a Python float as storing it in float32 would; arrays are float32 already."""
    if not isinstance(x, float):
        return x
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)
