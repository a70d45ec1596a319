"""Counts of each gradient's values under a loss scale, and the message of a scaler that is stuck.

The backends count; here the counts become tables and sentences.
"""

import math
import warnings
from collections.abc import Callable
from typing import Literal, NamedTuple

from polymp import text_table
from polymp.code_origin import outside
from polymp.dtypes import FORMATS
from polymp.errors import ScalerWarning, StuckError, escaped
from polymp.scaling.scale_rule import ScaleRule, ScaleState

# Scaled gradients below it lose bits in float16, and below half of its smallest number become 0.
SMALLEST_NORMAL = FORMATS["float16"].smallest_normal

# The warning of a scaler that is given a loss from a bfloat16 region.
NOT_NEEDED = (
    "GradScaler is not needed in a bfloat16 region: bfloat16 has the range of float32, so that "
    "gradients do not underflow. It scales and skips steps all the same. Leave the scaler out, or "
    "write GradScaler(..., dtype=<the region's dtype>), which scales only if that is float16."
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
        rows: list[tuple[str, ...]] = [("", "size", "Inf", "NaN", "zero", "subnormal")]
        for g in by_trouble[:_SHOWN]:
            shares = (f"{n / max(1, g.size):.1%}" for n in (g.zero, g.subnormal))
            rows.append((escaped(g.name), str(g.size), str(g.inf), str(g.nan), *shares))
        lines += text_table.aligned(rows)
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
