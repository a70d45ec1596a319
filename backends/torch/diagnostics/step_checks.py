"""Whether the numbers of a training step are finite: its losses, gradients and weights.

`StepChecks` finds out on the device, for which the host does not wait. `Described` waits, and says
in words what is not finite.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from polymp.backends.torch.compat import dtensor

# Of the mean loss, the share that stays at each step; a loss is compared with it from this many on.
_STAYS, _WARM_UP = 0.9, 10

Optimizer = torch.optim.Optimizer


class MeanLoss(NamedTuple):
    """The mean of the last losses, in which older ones count less.

    Attributes:
        value: float32 [], on the loss's device; None before the first.
        seen: how many losses it is of.
    """

    value: torch.Tensor | None = None
    seen: int = 0

    def jumped(self, loss: torch.Tensor, factor: float) -> torch.Tensor | None:
        """Return whether a loss is more than `factor` above it, bool []; None if it is too new."""
        if self.value is None or self.seen < _WARM_UP:
            return None
        return loss.float() > self.value.to(loss.device) + (factor - 1) * self.value.abs()

    def and_also(self, loss: torch.Tensor) -> "MeanLoss":
        """Return the mean with one more loss, float [], in it."""
        loss = loss.float()
        value = loss if self.value is None else self.value * _STAYS + loss * (1 - _STAYS)
        return MeanLoss(value, self.seen + 1)


class StepChecks:
    """The findings of the steps since the last `now`; some are still on their way to the host.

    Args:
        jump: the factor by which a loss may be above the mean; None for any.
        mean: of the losses so far.

    Attributes:
        mean: likewise.
    """

    def __init__(self, jump: float | None, mean: MeanLoss | None = None) -> None:
        self.mean: MeanLoss = mean or MeanLoss()
        self._jump = jump
        self._arriving: list[tuple[torch.Tensor, torch.Event]] = []

    def add(self, result: object, bad_gradients: Sequence[torch.Tensor]) -> bool:
        """Check the results of a step; return whether something is not finite, if that is known.

        On a CPU it is known at once, on other devices some steps later. Several ranks with other
        devices learn of it in `now` alone, so that all of them stop at the same step.
        """
        bad = list(bad_gradients)
        for loss in losses(result):
            bad.append(~loss.isfinite())
            if self._jump is not None:
                jumped = self.mean.jumped(loss, self._jump)
                bad += [] if jumped is None else [jumped]
                self.mean = self.mean.and_also(loss)
        ranks = _ranks()
        if not bad and ranks == 1:
            return False
        device = max((b.device for b in bad), key=lambda d: d.type != "cpu", default=_device())
        found = torch.stack([b.to(device, non_blocking=True) for b in bad]).any() if bad else None
        found = torch.zeros((), dtype=torch.bool, device=device) if found is None else found
        if ranks > 1:
            found = over_ranks(found)
        if device.type == "cpu":
            return bool(found)
        copy, event = found.to("cpu", non_blocking=True), torch.Event(device)
        event.record()
        self._arriving.append((copy, event))
        return ranks == 1 and self._arrived(wait=False)

    def now(self) -> bool:
        """Wait for what is on its way, and return whether something is not finite."""
        return self._arrived(wait=True)

    def _arrived(self, *, wait: bool) -> bool:
        found = False
        while self._arriving and (wait or self._arriving[0][1].query()):
            copy, event = self._arriving.pop(0)
            event.synchronize()
            found = found or bool(copy)
        return found


@contextmanager
def stepping(look: Callable[[Optimizer], None]) -> Iterator[None]:
    """Show `look` every optimizer that is about to step, in a `with` block."""

    def before(optimizer: Optimizer, *_: object) -> None:
        look(optimizer)

    hook = register_optimizer_step_pre_hook(before)
    try:
        yield
    finally:
        hook.remove()


def with_gradients(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer that have a gradient."""
    groups = optimizer.param_groups
    return [p for group in groups for p in group["params"] if p.grad is not None]


def lost_eps(optimizers: Iterable[Optimizer]) -> dict[str, list[dict[str, Any]]]:
    """Return the groups of parameters whose eps is zero in their dtype, by a clause on it."""
    found: dict[str, list[dict[str, Any]]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            for dtype in {p.dtype for p in group["params"]} if isinstance(eps, float) else ():
                if eps and not float(torch.tensor(eps, dtype=dtype)):
                    said = f"{type(optimizer).__name__}'s eps={eps:g} is zero in {dtype}"
                    found.setdefault(said, []).append(group)
    return found


def differing(recorded: Sequence[torch.Tensor], result: object) -> str:
    """Say which finite loss of a step was another when it was repeated; "" if none.

    On a CPU within a few roundings of the loss; other devices may add up in another order.
    """
    for loss, now in zip(recorded, values(result), strict=False):
        was, eps = float(loss), max(4 * torch.finfo(loss.dtype).eps, 1e-5)
        close = math.isclose(was, now, rel_tol=eps if loss.device.type == "cpu" else 0.1)
        if math.isfinite(was) and not close:
            return f"{now:.4g}, where it was {was:.4g}"
    return ""


def losses(result: object) -> list[torch.Tensor]:
    """Return the floats with one element among a step's results, each as a tensor []."""
    found = []
    for leaf in tree_leaves(result):
        if isinstance(leaf, float):
            found.append(torch.tensor(leaf))
        elif isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel() == 1:
            found.append(dtensor.local(leaf.detach()).reshape(()))
    return found


def bad(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return, for each device, whether one of its tensors has Inf or NaN: bool []."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for t in tensors:
        values = _values(t)
        if values.numel():
            by_device.setdefault(values.device, []).append(values)
    with torch.no_grad():
        found = [torch.stack(_extremes(many)) for many in by_device.values()]
        return [~extremes.isfinite().all() for extremes in found]


def _extremes(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return numbers, each [], that are finite if all values of some tensors of a device are."""
    if tensors[0].device.type == "cpu" and not any(t.is_complex() for t in tensors):
        # torch 2.13 takes 11 times as long for these norms on CPUs, which it does not vectorise.
        return [extreme for t in tensors for extreme in t.aminmax()]
    return list(torch._foreach_norm(tensors, math.inf))


def not_finite(named: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the tensors that have Inf or NaN, by name: "Inf" or "NaN". Waits for the device."""
    found = {}
    for name, t in named.items():
        values = _values(t)
        if values.is_floating_point() and not bool(values.isfinite().all()):
            found[name] = "NaN" if bool(values.isnan().any()) else "Inf"
    return found


def _values(t: torch.Tensor) -> torch.Tensor:
    local = dtensor.local(t.detach())
    return local.coalesce().values() if local.is_sparse else local


def any_rank(found: bool) -> bool:
    """Return whether any rank found something; all ranks have to ask."""
    if _ranks() == 1:
        return found
    return bool(over_ranks(torch.tensor(found, device=_device())))


def over_ranks(found: torch.Tensor) -> torch.Tensor:
    """Return whether any rank found something, bool []; all ranks have to ask."""
    most = found.to(_device(), torch.float32)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.bool()


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _device() -> torch.device:
    """Return a device on which ranks can talk."""
    nccl = _ranks() > 1 and "nccl" in str(dist.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def described(kind: str, found: Mapping[str, str]) -> str:
    """Say which tensors of a kind are not finite; "" if none."""
    if not found:
        return ""
    (name, what), *others = found.items()
    more = f", and {len(others)} more" if others else ""
    return f"{kind} {name} is {what}{more}"


def described_losses(result: object, mean: MeanLoss, jump: float | None) -> str:
    """Say which loss is not finite, or has jumped; "" if none."""
    for loss in losses(result):
        value = float(loss)
        if not math.isfinite(value):
            return f"the loss is {'NaN' if math.isnan(value) else 'Inf' if value > 0 else '-Inf'}"
        jumped = None if jump is None else mean.jumped(loss, jump)
        if jumped is not None and bool(jumped) and mean.value is not None:
            return f"the loss is {value:.4g}; the mean of the last ones is {float(mean.value):.4g}"
    return ""


def mean_after(result: object, mean: MeanLoss) -> MeanLoss:
    """Return the mean with a step's losses in it."""
    for loss in losses(result):
        mean = mean.and_also(loss)
    return mean


def values(result: Any) -> list[float]:
    """Return a step's losses as numbers. Waits for the device."""
    return [float(loss) for loss in losses(result)]
