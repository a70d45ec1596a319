"""`scaling.step` on a device: state and findings are tensors, and nobody waits for them."""

from functools import cache

import torch

from polymp import scaling
from polymp.scaling import ScaleRule, ScaleState

# A scale of at most 2**126 that grows by no more than this is finite, or was at its bound already:
# then torch's kernel, which drops an infinite scale, and a clamp do what the rule says.
_TAME = 4.0
_FAR = 2**31 - 1  # below 0 for every count, and still an int32


def update(
    rule: ScaleRule,
    scale: torch.Tensor,
    tracker: torch.Tensor,
    counts: torch.Tensor,
    found: torch.Tensor,
    loss: torch.Tensor | None,
) -> None:
    """Bring the tensors to the state after one optimizer step, in place.

    Args:
        rule: the constants.
        scale: float32 [].
        tracker: int32 [].
        counts: float32 [3]: skips, spoiled, skipped; exact up to 2**24.
        found: float32 []; 1 if a gradient or a loss was not finite, else 0.
        loss: float32 []; 1 if a loss was not finite, else 0; None where nobody looked.
    """
    if rule.hysteresis or rule.growth > _TAME or torch.compiler.is_compiling():
        _by_rule(rule, scale, tracker, counts, found, loss)
    else:
        _by_kernel(rule, scale, tracker, counts, found, loss)


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
    after = scaling.step(
        rule,
        ScaleState(wide, tracker, *counts.unbind()),
        found == 0,
        torch.where,
        loss_finite=None if loss is None else loss == 0,
    )
    scale.copy_(after.scale)
    tracker.copy_(after.tracker)
    counts.copy_(torch.stack(after[2:]))


def _by_kernel(
    rule: ScaleRule,
    scale: torch.Tensor,
    tracker: torch.Tensor,
    counts: torch.Tensor,
    found: torch.Tensor,
    loss: torch.Tensor | None,
) -> None:
    """The same in a third of the launches, by the kernel that torch.amp uses."""
    # A fake tensor belongs to a mode, which ends: nothing of it may be kept.
    weights = _weights if type(counts) is torch.Tensor else _weights.__wrapped__
    skip, spoil, keep, total = weights(counts.device)
    after = torch.addcmul(counts, skip, found)
    overflow = found
    lost = None
    if loss is not None:
        after.addcmul_(spoil, loss)
        overflow = found - loss
        # The kernel is not told of a lost loss and counts it: where it cannot grow, and back.
        lost = loss.to(torch.int32)
        tracker.sub_(lost, alpha=_FAR)
    # The kernel compares by equality: a count past a lowered interval is brought to just below it.
    tracker.clamp_(max=rule.interval - 1)
    torch._amp_update_scale_(scale, tracker, overflow, rule.growth, rule.backoff, rule.interval)
    if lost is not None:
        tracker.add_(lost, alpha=_FAR - 1)
    scale.clamp_(rule.min_scale, rule.max_scale)
    torch.mul(after, torch.addcmul(total, keep, found), out=counts)


@cache
def _weights(device: torch.device) -> tuple[torch.Tensor, ...]:
    """What a skip adds to the counts, what a lost loss adds, and which of them end or go on.

    The last two: 1 for counts that a good step sets to 0, and 1 for those that it leaves.
    """
    rows = ([1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 1])
    return tuple(torch.tensor(row, dtype=torch.float32, device=device) for row in rows)
