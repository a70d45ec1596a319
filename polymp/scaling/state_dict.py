"""The state of a loss scaler as a dictionary, under the names of torch.amp.GradScaler.

Python numbers in and out, so that a run of one framework goes on in the other.
"""

import math
from collections.abc import Mapping
from typing import Any

from polymp.scaling.scale_rule import LONGEST, ScaleRule, ScaleState, as_float32, checked, number

# The entries that torch.amp.GradScaler saves, and those that polymp's scalers add.
_TORCH = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_BOUNDS = ("min_scale", "max_scale", "hysteresis")
_COUNTS = ("_growth_tracker", "skips", "spoiled", "skipped")


def to_state_dict(rule: ScaleRule, state: ScaleState) -> dict[str, Any]:
    """Return rule and state as Python numbers, under the names of torch.amp.GradScaler.

    torch.amp's scaler saves and loads `scale`, `growth_factor`, `backoff_factor`, `growth_interval`
    and `_growth_tracker`. It ignores the others: `min_scale`, `max_scale`, `hysteresis`, `skips`,
    `spoiled` and `skipped`.
    """
    return {
        "scale": float(state.scale),
        "growth_factor": rule.growth,
        "backoff_factor": rule.backoff,
        "growth_interval": rule.interval,
        "_growth_tracker": int(state.tracker),
        "min_scale": rule.min_scale,
        "max_scale": rule.max_scale,
        "hysteresis": rule.hysteresis,
        "skips": int(state.skips),
        "spoiled": int(state.spoiled),
        "skipped": int(state.skipped),
    }


def from_state_dict(
    saved: Mapping[str, Any],
    rule: ScaleRule = ScaleRule(),  # noqa: B008
) -> tuple[ScaleRule, ScaleState]:
    """Return rule and state, as Python numbers, from what `to_state_dict` or torch.amp saved.

    A positive scale outside the bounds becomes the nearer bound, as the next step would make it.

    Args:
        saved: the dictionary.
        rule: gives the bounds and the hysteresis where torch.amp has saved none.

    Returns:
        The rule and the state.

    Raises:
        TypeError: `saved` is no mapping, an entry is not a number, or a count is not whole.
        KeyError: an entry is missing; names it and lists those that are there.
        ValueError: an entry is out of its range.
    """
    if not isinstance(saved, Mapping):
        raise TypeError(f"a scaler's state must be a dictionary, got {saved!r}.")
    for key in _TORCH:
        if key not in saved:
            there = ", ".join(map(repr, saved)) or "nothing"
            raise KeyError(
                f"a scaler's state needs the entry {key!r}; it has {there}. Give what "
                "state_dict() returned"
            )
    bounds = {key: saved.get(key, getattr(rule, key)) for key in _BOUNDS}
    factors = (saved[key] for key in ("growth_factor", "backoff_factor", "growth_interval"))
    rule = checked(ScaleRule(*factors, **bounds))
    scale = number("scale", saved["scale"])
    if not 0 < scale < math.inf:
        raise ValueError(
            f"scale must be positive and finite, got {saved['scale']!r}: the run that saved it had "
            "lost its scale. Start again from another one, such as 2.0**16."
        )
    counts = [number(key, saved.get(key, 0), whole=True) for key in _COUNTS]
    for key, count in zip(_COUNTS, counts, strict=True):
        if not 0 <= count <= LONGEST:
            raise ValueError(f"{key} must be from 0 to {LONGEST}, got {saved[key]!r}.")
    scale = min(max(as_float32(scale), rule.min_scale), rule.max_scale)
    return rule, ScaleState(scale, *map(int, counts))
