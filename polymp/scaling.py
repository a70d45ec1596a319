"""Loss scaling as arithmetic: the rule of the scale, its state, and reports of gradients.

The rule works on Python numbers, torch tensors and jax arrays; nothing here knows an optimizer.
"""

import math
import reprlib
import struct
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from polymp import text_table
from polymp.code_origin import outside
from polymp.dtypes import FORMATS
from polymp.errors import ScalerWarning, StuckError, escaped

__all__ = ["ScaleRule", "ScaleState", "from_state_dict", "pick", "step", "to_state_dict"]


def __dir__() -> list[str]:
    return __all__


Where = Callable[[Any, Any, Any], Any]

# The widest range in which a scale and its inverse are both normal float32 numbers: neither
# overflows, and neither is lost where subnormal numbers are flushed to zero. Only a first scale
# that the caller gave may lie outside, until it first grows or backs off.
SMALLEST, LARGEST = 2.0**-126, 2.0**126
LONGEST = 2**31 - 1  # counts are int32


class ScaleRule(NamedTuple):
    """The constants of loss scaling.

    Attributes:
        growth: factor after `interval` good steps in a row, above 1.
        backoff: factor after an overflow, below 1.
        interval: good steps between two growths, from 1 to 2**31 - 1.
        min_scale: no overflow brings the scale below it; at least 2**-126.
        max_scale: no growth brings the scale above it; at most 2**126.
        hysteresis: overflows in a row that leave the scale as it is; the next one lowers it.
    """

    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    min_scale: float = SMALLEST
    max_scale: float = LARGEST
    hysteresis: int = 0


class ScaleState(NamedTuple):
    """The state of a loss scaler between two optimizer steps.

    Attributes:
        scale: what the loss is multiplied by; float32 [].
        tracker: good steps since the scale last changed; int32 [].
        skips: steps skipped in a row, up to now; int32 [].
        spoiled: those of `skips` in which the loss itself was not finite; int32 [].
        skipped: all steps skipped so far; int32 [].
    """

    scale: Any = 2.0**16
    tracker: Any = 0
    skips: Any = 0
    spoiled: Any = 0
    skipped: Any = 0


def pick(condition: Any, yes: Any, no: Any) -> Any:
    """Choose between two Python numbers, as `where` chooses between arrays."""
    return yes if condition else no


def step(
    rule: ScaleRule,
    state: ScaleState,
    finite: Any,
    where: Where = pick,
    *,
    loss_finite: Any = None,
) -> ScaleState:
    """Return the state after one optimizer step.

        gradients                              scale                          tracker
        all finite, short of interval          stays                          + 1
        all finite, interval reached           * growth, at most max_scale    0
        one is not finite                      * backoff, at least min_scale  0
        one is not finite, within hysteresis   stays                          0

    The last two are skips; `loss_finite` only counts `spoiled`. The tracker is compared with >=, so
    a lowered interval still lets the scale grow.

    Bit for bit what torch computes wherever the bounds do not matter and float32 holds the factors
    exactly (2, 0.5, 1.25, ...). For others, such as 1.1, Python numbers and float64 scales still
    match torch, which multiplies in float64; float32 arrays multiply in float32.

    Source:
        Skip and back off: Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740.
        Growth: torch v2.13 aten/src/ATen/native/cuda/AmpKernels.cu.
    """
    scale, tracker, skips, spoiled, skipped = state
    loss_finite = finite | True if loss_finite is None else loss_finite
    zero = tracker * 0
    due = tracker + 1 >= rule.interval
    grown = as_float32(scale * rule.growth)
    lowered = as_float32(scale * rule.backoff)
    up = where(due, where(grown < rule.max_scale, grown, rule.max_scale), scale)
    skips = where(finite, zero, skips + 1)
    hit = skips > rule.hysteresis
    down = where(hit, where(lowered > rule.min_scale, lowered, rule.min_scale), scale)
    return ScaleState(
        scale=where(finite, up, down),
        tracker=where(finite, where(due, zero, tracker + 1), zero),
        skips=skips,
        spoiled=where(finite, zero, where(loss_finite, spoiled, spoiled + 1)),
        skipped=where(finite, skipped, skipped + 1),
    )


def checked(rule: ScaleRule) -> ScaleRule:
    """Return a rule with its numbers as floats and ints, if every one is in its range."""
    # An interval above 2**31 - 1, which no run reaches, becomes that. The bounds are rounded to the
    # nearest float32 number, so that Python numbers and arrays stop at the same scale.
    growth = number("growth_factor", rule.growth)
    backoff = number("backoff_factor", rule.backoff)
    interval = number("growth_interval", rule.interval, whole=True)
    least, most = number("min_scale", rule.min_scale), number("max_scale", rule.max_scale)
    hysteresis = number("hysteresis", rule.hysteresis, whole=True)
    if not 1 < growth < math.inf:
        raise ValueError(f"growth_factor must be finite and above 1, got {rule.growth!r}.")
    if not 0 < backoff < 1:
        raise ValueError(f"backoff_factor must be between 0 and 1, got {rule.backoff!r}.")
    if interval < 1:
        raise ValueError(f"growth_interval must be at least 1, got {rule.interval!r}.")
    if not SMALLEST <= least <= most <= LARGEST:
        raise ValueError(
            "min_scale and max_scale must be from 2**-126 to 2**126, where the scale and its "
            f"inverse are both normal float32 numbers, and min_scale not above max_scale; got "
            f"min_scale={rule.min_scale!r} and max_scale={rule.max_scale!r}."
        )
    if not 0 <= hysteresis <= LONGEST:
        raise ValueError(f"hysteresis must be from 0 to {LONGEST}, got {rule.hysteresis!r}.")
    interval = int(min(interval, LONGEST))
    return ScaleRule(
        growth, backoff, interval, as_float32(least), as_float32(most), int(hysteresis)
    )


def checked_scale(name: str, value: object, rule: ScaleRule, *, first: bool = False) -> float:
    """Return a value as a scale, or as the first one, if the rule allows it."""
    scale = number(name, value)
    held = as_float32(scale)
    if first and not 0 < held < math.inf:
        raise ValueError(
            f"{name} must be a positive number that float32 holds, such as 2.0**16; got {value!r}."
        )
    # The default bounds limit growth and backoff, not the first scale, as in torch.amp. Bounds that
    # the caller has set limit the first scale, too.
    beyond_widest = held < rule.min_scale == SMALLEST or rule.max_scale == LARGEST < held
    if not rule.min_scale <= held <= rule.max_scale and not (first and beyond_widest):
        raise ValueError(
            f"{name} must be from min_scale to max_scale, {rule.min_scale!r} to "
            f"{rule.max_scale!r}; got {value!r}."
        )
    return scale


def number(name: str, value: object, *, whole: bool = False) -> float:
    """Return a value as a float, if it is one number."""
    try:
        if isinstance(value, (bool, str, bytes)):
            raise TypeError
        given = float(value)  # type: ignore[arg-type]
    # A tensor of two numbers raises RuntimeError, a whole number beyond float64 OverflowError.
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"{name} must be a number, got {reprlib.repr(value)}.") from None
    if whole and not given.is_integer():
        raise TypeError(f"{name} must be a whole number, got {value!r}.")
    return given


def as_float32(x: Any) -> Any:
    """Round a Python float as storing it in float32 would; arrays are rounded when stored."""
    if not isinstance(x, float):
        return x
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


# The state of a loss scaler as a dictionary of Python numbers, so that a run of one framework goes
# on in the other: the entries that torch.amp saves, and those that polymp's scalers add.
_TORCH = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_BOUNDS = ("min_scale", "max_scale", "hysteresis")
_COUNTS = ("_growth_tracker", "skips", "spoiled", "skipped")


def to_state_dict(rule: ScaleRule, state: ScaleState) -> dict[str, Any]:
    """Return rule and state as Python numbers, under the names of torch.amp.GradScaler."""
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

    Args:
        saved: the dictionary.
        rule: gives the bounds and the hysteresis where torch.amp has saved none.

    Returns:
        The rule and the state.

    Raises:
        RuntimeError: `saved` is empty, as the state of a disabled scaler.
        TypeError: `saved` is no mapping, an entry is not a number, or a count is not whole.
        KeyError: an entry is missing; names it and lists those that are there.
        ValueError: an entry is out of its range.
    """
    if not isinstance(saved, Mapping):
        raise TypeError(f"a scaler's state must be a dictionary, got {saved!r}.")
    if not saved:
        raise RuntimeError(
            "The source state dict is empty, possibly because it was saved "
            "from a disabled instance of GradScaler."
        )
    for key in _TORCH:
        if key not in saved:
            raise KeyError(
                f"a scaler's state needs the entry {key!r}; it has {', '.join(map(repr, saved))}. "
                "Give what state_dict() returned"
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


# Counts of each gradient's values, which the backends make, and the message of a stuck scaler.

# Scaled gradients below it lose bits in float16, and below half of its smallest number become 0.
SMALLEST_NORMAL = FORMATS["float16"].smallest_normal

# The warning of a scaler that is given a loss from a bfloat16 region.
NOT_NEEDED = (
    "GradScaler is not needed in a bfloat16 region: bfloat16 has the range of float32, so that "
    "gradients do not underflow. It scales and skips steps all the same. Leave the scaler out, or "
    "write GradScaler(..., enabled=False)."
)

_ADVICE = (
    "To find the op, call polymp.torch.locate or polymp.jax.locate with the step; to run it in "
    "float32, give it a row: policy.override(fp32=[op])."
)

_SHOWN = 10  # gradients in a table, 3 in a message


class Gradient(NamedTuple):
    """Counts of the values of one gradient."""

    name: str  # its parameter's
    shape: tuple[int, ...]  # its parameter's
    inf: int  # values that are Inf or -Inf
    nan: int  # values that are NaN
    zero: int  # values that are 0, whether they underflowed or were 0 before
    subnormal: int  # other values that are, scaled, below float16's smallest normal number, 2**-14

    @property
    def size(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{escaped(self.name)} ({self.inf} Inf, {self.nan} NaN of {self.size})"


class GradientReport(NamedTuple):
    """The counts of a scaler's gradients, from `scaler.report()`; `print` shows them as a table."""

    rule: ScaleRule  # the scaler's constants
    state: ScaleState  # the scaler's state, as Python numbers
    gradients: tuple[Gradient, ...]  # one entry for each gradient

    @property
    def bad(self) -> tuple[Gradient, ...]:
        """The gradients with Inf or NaN in them."""
        return tuple(g for g in self.gradients if g.inf or g.nan)

    @property
    def underflowed(self) -> float:
        """The share of all values that are 0 or, scaled, too small for a normal float16."""
        lost = sum(g.zero + g.subnormal for g in self.gradients)
        return lost / max(1, sum(g.size for g in self.gradients))

    def __str__(self) -> str:
        lines = [f"{_scale(self)}; {_skips(self.state)}"]
        if not self.gradients:
            return f"{lines[0]}\nno gradients: call report() after step and before zero_grad"
        many = len(self.gradients)
        lines.append(f"{len(self.bad)} of {many} gradients have Inf or NaN")
        lines.append(f"{self.underflowed:.1%} of all values are 0 or below normal float16 numbers")
        by_trouble = sorted(
            self.gradients,
            key=lambda g: (g.inf + g.nan, (g.zero + g.subnormal) / max(1, g.size)),
            reverse=True,
        )
        heads, rows = ("", "size", "Inf", "NaN", "zero", "subnormal"), list[tuple[str, ...]]()
        for g in by_trouble[:_SHOWN]:
            shares = (f"{n / max(1, g.size):.1%}" for n in (g.zero, g.subnormal))
            rows.append((escaped(g.name), str(g.size), str(g.inf), str(g.nan), *shares))
        lines += text_table.columns(heads, rows, heads[1:])
        if many > _SHOWN:
            lines.append(f"... and {many - _SHOWN} more in .gradients")
        return "\n".join(lines)

    @property
    def why_stuck(self) -> str:
        """The message of a scaler that is stuck: what was counted, and what to do about it."""
        state = self.state
        said = f"{state.skips} steps in a row were skipped; {_scale(self)}."
        if bad := self.bad:
            first = ", ".join(map(str, bad[:3]))
            said += f" Inf or NaN in {len(bad)} of {len(self.gradients)} gradients: {first}"
            said += ", ..." if len(bad) > 3 else "."
        elif self.gradients:
            said += (
                " No gradient here has Inf or NaN now: they were in an earlier step, or in another "
                "process."
            )
        if state.spoiled:
            said += (
                f" In {state.spoiled} of these steps the loss itself was not finite before it was "
                "scaled: no loss scale can change that, unless scaled gradients are a part of the "
                "loss, as in a gradient penalty."
            )
        if state.spoiled < state.skips:
            said += (
                " Gradients that overflow at any loss scale come from values beyond float16's "
                "largest, 65504: bfloat16 has the range of float32, and needs no scaler."
            )
        return f"{said} {_ADVICE}"


OnStuck = Literal["warn", "raise"] | Callable[[GradientReport], object]


def checked_on_stuck(on_stuck: object, after: object) -> None:
    """Raise if these cannot be a scaler's `on_stuck` and `stuck_after`."""
    if on_stuck not in ("warn", "raise") and not callable(on_stuck):
        raise ValueError(f"on_stuck must be 'warn', 'raise' or a function, got {on_stuck!r}.")
    if isinstance(after, bool) or not isinstance(after, int) or after < 1:
        raise ValueError(f"stuck_after must be a whole number from 1 up, got {after!r}.")


def tell(on_stuck: OnStuck, report: GradientReport) -> None:
    """Warn, raise or call `on_stuck`."""
    if on_stuck == "warn":
        warnings.warn(report.why_stuck, ScalerWarning, stacklevel=outside())
    elif on_stuck == "raise":
        raise StuckError(report.why_stuck)
    elif callable(on_stuck):
        on_stuck(report)


def _scale(report: GradientReport) -> str:
    state = report.state
    bound = " (its lower bound)" if state.scale <= report.rule.min_scale else ""
    return f"the loss scale is {state.scale:g}{bound}"


def _skips(state: ScaleState) -> str:
    last = f"the last {state.skips} in a row" if state.skips > 1 else "among them the last"
    said = f"{state.skipped} step{'' if state.skipped == 1 else 's'} skipped so far"
    if state.skips:
        said += f", {last}"
    if state.spoiled:
        said += f"; in {state.spoiled} of these the loss itself was not finite"
    return said


def check_scaler(
    scaler: object,
    made: str,
    kind: type,
    enabled: Callable[[Any], bool],
    *,
    asked: str,
    half: bool,
    write: str,
) -> None:
    """Raise if a loss scaler that a user gave does not scale, or is for bfloat16."""
    if scaler is None:
        return
    if not half:
        raise ValueError(
            f"{asked} takes no scaler: loss scaling is for float16. Leave it out, or write {write}."
        )
    if not isinstance(scaler, kind):
        given = f"{type(scaler).__module__}.{type(scaler).__qualname__}".removeprefix("builtins.")
        raise TypeError(
            f"{asked} takes a {made.partition('(')[0]}, got {given}. Leave scaler out, or write "
            f"scaler={made}."
        )
    if not enabled(scaler):
        raise ValueError(
            f"{asked} needs a loss scaler, and the one given is disabled, so that small gradients "
            f"would become zero. Leave scaler out, or write scaler={made}."
        )
