"""`UpdateWatch`: are the updates of low weights rounded away?

before the step     a few values of each low parameter, and whether their gradients are not 0
after it            how many of these values kept their bits, counted on the device
in a later step     the host reads the counts, which have arrived, and may warn
"""

import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from polymp.backends.torch.async_copy import AsyncCopy
from polymp.backends.torch.autocast.dtype_names import NAMES
from polymp.backends.torch.compat import distributed
from polymp.backends.torch.weights.low_weights import LowOptimizer
from polymp.errors import LowWeightsWarning
from polymp.mailbox import Mailbox
from polymp.weights import lost_updates
from polymp.weights.lost_updates import LostUpdates

# The first step that is looked at, if `every` is no less: a warm-up has begun by then.
FIRST = 100
# Values of each parameter that are looked at, spread evenly.
VALUES = 2**11
INSTEAD = "optimizer = polymp.torch.low_weights(optimizer)"

_LOW = (torch.bfloat16, torch.float16)


class Sample(NamedTuple):
    """Some values of a low parameter before a step."""

    name: str
    parameter: torch.Tensor
    before: torch.Tensor  # the bits of the values
    updated: torch.Tensor  # whether they have a gradient


def _samples(optimizer: torch.optim.Optimizer) -> Iterator[Sample]:
    """Yield a sample of each low parameter that an optimizer is about to step."""
    for at, group in enumerate(optimizer.param_groups):
        if isinstance(group.get("lr"), float) and group["lr"] == 0:
            continue
        known = group.get("param_names") or ()
        for number, p in enumerate(group["params"]):
            name = known[number] if number < len(known) else f"parameter {number} of group {at}"
            if p.dtype in _LOW and p.grad is not None and p.grad.layout is torch.strided:
                grad = _some(p.grad)
                updated = (grad != 0) & grad.isfinite()
                yield Sample(name, p, _some(p).view(torch.int16).clone(), updated)


def _counts(sample: Sample, found_inf: torch.Tensor | None) -> torch.Tensor:
    """Return the updates of a parameter and how many of them were lost, int64 [2]."""
    updated = sample.updated
    if found_inf is not None:  # a fused optimizer that skips
        updated = updated & (found_inf.to(updated.device) == 0)
    lost = updated & (_some(sample.parameter).view(torch.int16) == sample.before)
    return torch.stack([updated.sum(), lost.sum()])


def _some(t: torch.Tensor) -> torch.Tensor:
    """Return some values of this process's part of a tensor."""
    row = distributed.local(t).detach().reshape(-1)
    return row[:: max(1, row.numel() // VALUES)][:VALUES]


class UpdateWatch:
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
                f"UpdateWatch() takes a torch.optim.Optimizer, got {optimizer!r:.80}. Write: "
                "watch = UpdateWatch(optimizer)."
            )
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(
                f"UpdateWatch(every=...) must be a whole number above 0, got {every!r}."
            )
        self.records: list[LostUpdates] = []
        self._every, self._first = every, min(FIRST, every) % every
        self._steps = 0
        self._warned = False
        self._samples: list[Sample] = []
        self._mailbox: Mailbox[list[tuple[str, str]]] = Mailbox()  # names and dtypes of parameters
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
        # Low weights of `low_weights` lose nothing.
        if self._steps % self._every == self._first and not isinstance(optimizer, LowOptimizer):
            with torch.no_grad():
                self._samples = list(_samples(optimizer))

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if is_dynamo_compiling():
            return
        for counts, named in self._mailbox.taken():
            each = zip(named, counts.tolist(), strict=True)
            self.records = [LostUpdates(*names, *numbers) for names, numbers in each]
            if not self._warned and lost_updates.share(self.records) >= lost_updates.TOO_MANY:
                self._warned = True
                text = lost_updates.message(self.records, INSTEAD)
                warnings.warn(text, LowWeightsWarning, stacklevel=2)
        samples, self._samples = self._samples, []
        if samples:
            found_inf, device = getattr(optimizer, "found_inf", None), samples[0].updated.device
            with torch.no_grad():
                counts = torch.stack([_counts(it, found_inf).to(device) for it in samples])
            named = [(it.name, NAMES[it.parameter.dtype]) for it in samples]
            self._mailbox.post(AsyncCopy(counts), named)
