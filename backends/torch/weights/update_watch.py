"""`UpdateWatch`: are the updates of low weights rounded away?

before the step     a few values of each low parameter, and whether their gradients are not 0
after it            how many of these values kept their bits, counted on the device
in a later step     the host reads the counts, which have arrived, and may warn
"""

import warnings

import torch
from torch.compiler import is_dynamo_compiling

from polymp import weights
from polymp.backends.torch.autocast.dtype_names import NAMES
from polymp.backends.torch.compat import distributed
from polymp.backends.torch.snapshot import AsyncCopy
from polymp.backends.torch.weights.low_weights import LowOptimizer
from polymp.errors import LowWeightsWarning
from polymp.mailbox import Mailbox
from polymp.weights import LostUpdates

# The first step that is looked at, if `every` is no less: a warm-up has begun by then.
FIRST = 100
# Values of each parameter that are looked at, spread evenly.
VALUES = 2**11
INSTEAD = "optimizer = polymp.torch.low_weights(optimizer)"

_LOW = (torch.bfloat16, torch.float16)


class Sample:
    """Values of the low parameters of an optimizer before a step."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.names: list[tuple[str, str]] = []  # of the parameters that are looked at, and dtypes
        self._found = getattr(optimizer, "found_inf", None)
        # Of each parameter: itself, the bits of its values, and whether these have a gradient.
        self._before: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        if isinstance(optimizer, LowOptimizer):  # it loses nothing
            return
        for at, group in enumerate(optimizer.param_groups):
            if isinstance(group.get("lr"), float) and group["lr"] == 0:
                continue
            known = group.get("param_names") or ()
            for number, p in enumerate(group["params"]):
                name = known[number] if number < len(known) else f"parameter {number} of group {at}"
                if p.dtype in _LOW and p.grad is not None and p.grad.layout is torch.strided:
                    self.names.append((name, NAMES[p.dtype]))
                    grad = _some(p.grad)
                    updated = (grad != 0) & grad.isfinite()
                    self._before.append((p, _some(p).view(torch.int16).clone(), updated))

    def counts(self) -> torch.Tensor | None:
        """Return updates and lost updates of each parameter: int64 [n, 2]; None without any."""
        rows = []
        for p, before, updated in self._before:
            if self._found is not None:  # a fused optimizer that skips
                updated = updated & (self._found.to(updated.device) == 0)
            lost = updated & (_some(p).view(torch.int16) == before)
            rows.append(torch.stack([updated.sum(), lost.sum()]))
        device = rows[0].device if rows else None
        return torch.stack([row.to(device) for row in rows]) if rows else None

    def records(self, counts: torch.Tensor) -> list[LostUpdates]:
        """Return a record for each parameter, of counts as `counts` made them."""
        return [
            LostUpdates(*named, *numbers)
            for named, numbers in zip(self.names, counts.tolist(), strict=True)
        ]


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
        self._sample: Sample | None = None
        self._mailbox: Mailbox[Sample] = Mailbox()  # counts of samples
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
                self._sample = Sample(optimizer)

    def _after(self, *_: object) -> None:
        if is_dynamo_compiling():
            return
        for counts, sample in self._mailbox.taken():
            self.records = sample.records(counts)
            if not self._warned and weights.share(self.records) >= weights.TOO_MANY:
                self._warned = True
                text = weights.message(self.records, INSTEAD)
                warnings.warn(text, LowWeightsWarning, stacklevel=2)
        if self._sample is None:
            return
        with torch.no_grad():
            counts = self._sample.counts()
        if counts is not None:
            self._mailbox.post(AsyncCopy(counts), self._sample)
        self._sample = None
