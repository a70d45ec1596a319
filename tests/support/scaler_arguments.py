"""Arguments and states that no scaler accepts, and the message for each, in every framework."""

import math
from typing import Any

from polymp.scaling import LARGEST, SMALLEST

INF, NAN = math.inf, math.nan
Refused = tuple[dict[str, Any], type[Exception], str]

COUNT = "{} must be from 0 to 2147483647, got {}."
RANGE = (
    "min_scale and max_scale must be from 2**-126 to 2**126, where the scale and its inverse are "
    "both normal float32 numbers, and min_scale not above max_scale; got min_scale={} and "
    "max_scale={}."
)
GROWTH = "growth_factor must be finite and above 1, got {}."
BACKOFF = "backoff_factor must be between 0 and 1, got {}."


# Constants of the rule.
CONSTANTS: tuple[Refused, ...] = (
    ({"growth_factor": 1}, ValueError, GROWTH.format(1)),
    ({"growth_factor": INF}, ValueError, GROWTH.format(INF)),
    ({"growth_factor": NAN}, ValueError, GROWTH.format(NAN)),
    ({"growth_factor": "2"}, TypeError, "growth_factor must be a number, got '2'."),
    ({"growth_factor": True}, TypeError, "growth_factor must be a number, got True."),
    ({"backoff_factor": 1.0}, ValueError, BACKOFF.format(1.0)),
    ({"backoff_factor": 0}, ValueError, BACKOFF.format(0)),
    ({"backoff_factor": -0.5}, ValueError, BACKOFF.format(-0.5)),
    ({"backoff_factor": NAN}, ValueError, BACKOFF.format(NAN)),
    ({"backoff_factor": [0.5]}, TypeError, "backoff_factor must be a number, got [0.5]."),
    ({"growth_interval": 0}, ValueError, "growth_interval must be at least 1, got 0."),
    ({"growth_interval": 2.5}, TypeError, "growth_interval must be a whole number, got 2.5."),
    ({"growth_interval": INF}, TypeError, "growth_interval must be a whole number, got inf."),
    ({"growth_interval": None}, TypeError, "growth_interval must be a number, got None."),
    ({"min_scale": 0.0}, ValueError, RANGE.format(0.0, LARGEST)),
    ({"min_scale": 2.0**-127}, ValueError, RANGE.format(2.0**-127, LARGEST)),
    ({"max_scale": 2.0**127}, ValueError, RANGE.format(SMALLEST, 2.0**127)),
    ({"max_scale": NAN}, ValueError, RANGE.format(SMALLEST, NAN)),
    ({"min_scale": 2.0, "max_scale": 1.0}, ValueError, RANGE.format(2.0, 1.0)),
    ({"max_scale": "1"}, TypeError, "max_scale must be a number, got '1'."),
    ({"hysteresis": -1}, ValueError, COUNT.format("hysteresis", -1)),
    ({"hysteresis": 2**31}, ValueError, COUNT.format("hysteresis", 2**31)),
    ({"hysteresis": 0.5}, TypeError, "hysteresis must be a whole number, got 0.5."),
)

FIRST = "init_scale must be a positive number that float32 holds, such as 2.0**16; got {}."
BETWEEN = "init_scale must be from min_scale to max_scale, {!r} to {!r}; got {}."
FIRSTS: tuple[Refused, ...] = (
    *(({"init_scale": x}, ValueError, FIRST.format(x)) for x in (0, 0.0, -8.0, INF, NAN)),
    *(({"init_scale": x}, ValueError, FIRST.format(x)) for x in (1e-46, 3.5e38)),
    ({"init_scale": "big"}, TypeError, "init_scale must be a number, got 'big'."),
    ({"init_scale": True}, TypeError, "init_scale must be a number, got True."),
    ({"init_scale": 8.0, "max_scale": 4.0}, ValueError, BETWEEN.format(SMALLEST, 4.0, 8.0)),
    ({"init_scale": 2.0, "min_scale": 4.0}, ValueError, BETWEEN.format(4.0, LARGEST, 2.0)),
)

# A scaler's state, and what is wrong with it if these entries are others; None is one that lacks.
SAVED = {
    "scale": 12.0,
    "growth_factor": 3.0,
    "backoff_factor": 0.25,
    "growth_interval": 7,
    "_growth_tracker": 4,
    "min_scale": 1.0,
    "max_scale": 64.0,
    "hysteresis": 2,
    "skips": 5,
    "spoiled": 3,
    "skipped": 9,
}
TORCHS = {key: SAVED[key] for key in list(SAVED)[:5]}
LOST_SCALE = (
    "scale must be positive and finite, got {}: the run that saved it had lost its scale. Start "
    "again from another one, such as 2.0**16."
)
STATES: tuple[Refused, ...] = (
    *(
        ({key: None}, KeyError, f"a scaler's state needs the entry {key!r}; it has "
         + ", ".join(repr(k) for k in SAVED if k != key) + ". Give what state_dict() returned")
        for key in TORCHS
    ),
    ({"scale": "big"}, TypeError, "scale must be a number, got 'big'."),
    *(({"scale": x}, ValueError, LOST_SCALE.format(x)) for x in (0.0, -1.0, INF, NAN)),
    ({"growth_factor": 1.0}, ValueError, GROWTH.format(1.0)),
    ({"backoff_factor": 2}, ValueError, BACKOFF.format(2)),
    ({"growth_interval": 0}, ValueError, "growth_interval must be at least 1, got 0."),
    ({"_growth_tracker": 1.5}, TypeError, "_growth_tracker must be a whole number, got 1.5."),
    ({"_growth_tracker": "3"}, TypeError, "_growth_tracker must be a number, got '3'."),
    ({"_growth_tracker": -1}, ValueError, COUNT.format("_growth_tracker", -1)),
    ({"min_scale": 65.0}, ValueError, RANGE.format(65.0, 64.0)),
    ({"hysteresis": "2"}, TypeError, "hysteresis must be a number, got '2'."),
    ({"skips": -3}, ValueError, COUNT.format("skips", -3)),
    ({"spoiled": NAN}, TypeError, "spoiled must be a whole number, got nan."),
    ({"skipped": 2**31}, ValueError, COUNT.format("skipped", 2**31)),
)  # fmt: skip


def spoiled(change: dict[str, Any]) -> dict[str, Any]:
    """The state with other entries, or without."""
    return {key: value for key, value in (SAVED | change).items() if value is not None}
