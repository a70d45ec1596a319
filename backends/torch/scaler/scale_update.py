"""`scale_rule.step` on a device: state and findings are tensors, and the host does not wait."""

from typing import Any

import torch

from polymp.scaling import scale_rule
from polymp.scaling.scale_rule import ScaleRule, ScaleState

# A scale of at most 2**126 that grows by no more than this is finite, or was at its bound already:
# then torch's kernel, which drops an infinite scale, and a clamp do what the rule says.
_TAME = 4.0


def counted(state: ScaleState) -> tuple[Any, Any, Any]:
    """Return the counts as tensors hold them: skips in a row, overflows among them, all skips."""
    return state.skips, state.skips - state.spoiled, state.skipped


def state_of(scale: Any, tracker: Any, skips: Any, overflows: Any, skipped: Any) -> ScaleState:
    """Return the state as Python numbers, from a scale, a tracker and counts of `counted`."""
    counts = map(int, (tracker, skips, skips - overflows, skipped))
    return ScaleState(scale, *counts)


def new_bars(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the thresholds of a finding, float32 [6], and a view of the second one, float32 [].

    A finding above the first three adds 1 to the three counts; one above the last three keeps a
    count. The second threshold is 0, and NaN or 1 if a loss was not finite: no finding is above it
    then, and no overflow is counted.
    """
    bars = torch.zeros(6, dtype=torch.float32, device=device)
    bars.select(0, 5).fill_(-1.0)
    return bars, bars.select(0, 1)


def regular(rule: ScaleRule, state: ScaleState) -> bool:
    """Return whether the rule can lead to a state: within the bounds and the growth interval."""
    inside = rule.min_scale <= scale_rule.as_float32(state.scale) <= rule.max_scale
    return bool(inside and state.tracker < rule.interval)


def update(
    rule: ScaleRule,
    scale: torch.Tensor,
    tracker: torch.Tensor,
    counts: torch.Tensor,
    found: torch.Tensor,
    loss: torch.Tensor | None,
    bars: torch.Tensor | None = None,
) -> None:
    """Bring the tensors to the state after one optimizer step, in place."""
    wild = rule.hysteresis or rule.growth > _TAME
    if bars is None or wild or torch.compiler.is_compiling():
        _by_rule(rule, scale, tracker, counts, found, loss)
    else:
        _by_kernel(rule, scale, tracker, counts, found, bars)


def _by_rule(
    rule: ScaleRule,
    scale: torch.Tensor,
    tracker: torch.Tensor,
    counts: torch.Tensor,
    found: torch.Tensor,
    loss: torch.Tensor | None,
) -> None:
    # The factors act in float64, as in torch's kernel, and the scale is rounded when it is stored.
    wide = scale if scale.device.type == "mps" else scale.double()
    skips, overflows, skipped = counts.unbind()
    state = ScaleState(wide, tracker, skips, skips - overflows, skipped)
    fine = None if loss is None else loss == 0
    after = scale_rule.step(rule, state, found == 0, torch.where, loss_finite=fine)
    scale.copy_(after.scale)
    tracker.copy_(after.tracker)
    counts.copy_(torch.stack(counted(after)))


def _by_kernel(
    rule: ScaleRule,
    scale: torch.Tensor,
    tracker: torch.Tensor,
    counts: torch.Tensor,
    found: torch.Tensor,
    bars: torch.Tensor,
) -> None:
    """Do the same in a quarter of the launches, by the kernel that torch.amp uses."""
    above = torch.gt(found, bars, out=torch.empty_like(bars))  # 1 or 0, float32
    more, goes_on = above.view(2, 3).unbind()
    torch.addcmul(more, goes_on, counts, out=counts)
    skip = more.select(0, 0)
    torch._amp_update_scale_(scale, tracker, skip, rule.growth, rule.backoff, rule.interval)
    scale.clamp_(rule.min_scale, rule.max_scale)
