"""`UpdateWatch`: are the updates of low weights rounded away?

before the step     a few values of each low parameter, and whether their gradients are not 0
after it            how many of these values kept their bits, counted on the device
in a later step     the host reads the counts, which have arrived, and may warn
"""

from typing import NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from polymp.backends.torch.autocast.dtype_names import NAMES
from polymp.backends.torch.compat import distributed, optimizers
from polymp.backends.torch.snapshot import AsyncCopy
from polymp.backends.torch.weights.low_weights import LowOptimizer
from polymp.errors import brief
from polymp.weights import LostUpdatesWatch

# The first step that is looked at, if `every` is no less: a warm-up has begun by then.
FIRST = 100
# Values of each parameter that are looked at, spread evenly.
VALUES = 2**11

_LOW = (torch.bfloat16, torch.float16)


class Sample(NamedTuple):
    """Values of a low parameter before a step."""

    name: str
    dtype: str
    param: torch.Tensor
    bits: torch.Tensor
    updated: torch.Tensor  # which of them have a gradient

    def counts(self, found: torch.Tensor | None) -> torch.Tensor:
        """Count updates and lost updates, int64 [2]; a fused step skips what was `found`."""
        updated = self.updated
        if found is not None:
            updated = updated & (found.to(updated.device) == 0)
        lost = updated & (_some(self.param).view(torch.int16) == self.bits)
        return torch.stack([updated.sum(), lost.sum()])


def samples(optimizer: torch.optim.Optimizer) -> list[Sample]:
    """Return values of the low parameters that an optimizer is about to step."""
    found: list[Sample] = []
    if isinstance(optimizer, LowOptimizer):  # it loses nothing
        return found
    names = optimizers.names(optimizer)
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), float) and group["lr"] == 0:
            continue
        for p in group["params"]:
            if p.dtype in _LOW and p.grad is not None and p.grad.layout is torch.strided:
                grad = _some(p.grad)
                updated = (grad != 0) & grad.isfinite()
                bits = _some(p).view(torch.int16).clone()
                found.append(Sample(names[p], NAMES[p.dtype], p, bits, updated))
    return found


def _some(t: torch.Tensor) -> torch.Tensor:
    """Return some values of this process's part of a tensor."""
    row = distributed.local(t).detach().reshape(-1)
    return row[:: max(1, row.numel() // VALUES)][:VALUES]


class UpdateWatch(LostUpdatesWatch):
    """Warns of low weights whose updates are rounded away.

        watch = polymp.torch.UpdateWatch(optimizer)      # and the loop as it is

    It looks at one step in `every`, the first of them the 100th: at up to 2,048 values of each
    bfloat16 or float16 parameter, before and after the step, on the device. The host reads the
    counts in a later step, when they have arrived, and never waits. If a tenth or more of the
    values with a gradient that is not 0 kept their bits, it warns, once.

    Groups whose rate is 0 are not looked at, nor steps inside compiled code, nor an optimizer that
    keeps its weights by `low_weights`, which loses nothing.

    Args:
        optimizer: any; two step hooks are registered on it. `remove()` takes them off.
        every: how often to look, in steps.

    Attributes:
        records: of the last step that was looked at, a record for each low parameter.

    Raises:
        TypeError: `optimizer` is no optimizer.
        ValueError: `every` is no whole number above 0.

    Warns:
        LowWeightsWarning: updates were rounded away; names the parameters and `low_weights`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, every: int = 1000) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"UpdateWatch() takes a torch.optim.Optimizer, got {brief(optimizer)}. Write: "
                "watch = UpdateWatch(optimizer)."
            )
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(
                f"UpdateWatch(every=...) must be a whole number above 0, got {every!r}."
            )
        super().__init__("optimizer = polymp.torch.low_weights(optimizer)")
        self._every, self._first = every, min(FIRST, every) % every
        self._steps = 0
        self._samples: list[Sample] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if is_dynamo_compiling():
            return
        self._steps += 1
        if self._steps % self._every == self._first:
            with torch.no_grad():
                self._samples = samples(optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if is_dynamo_compiling():
            return
        self._arrive()
        if self._samples:
            with torch.no_grad():
                rows = [s.counts(getattr(optimizer, "found_inf", None)) for s in self._samples]
                counts = torch.stack([row.to(rows[0].device) for row in rows])
            self._send([(s.name, s.dtype) for s in self._samples], AsyncCopy(counts))
            self._samples = []
