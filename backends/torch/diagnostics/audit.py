"""`audit`: how large the numbers of a run are, op by op, and where the first bad one comes from.

    with polymp.torch.audit(model) as a:
        for x, y in batches: step(x, y)
    print(a); a.to_html("audit.html"); print(a.suggest())

`AuditValues` measures; here its measurements become the records of an `Audit`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn as nn

from polymp.backends.torch.diagnostics.measure import Tally
from polymp.backends.torch.diagnostics.op_call import Own, numbers_in
from polymp.backends.torch.diagnostics.op_stream import OpStream
from polymp.backends.torch.diagnostics.values import AuditValues
from polymp.diagnostics.audit import Audit
from polymp.diagnostics.audit_records import Measured, together
from polymp.diagnostics.magnitudes import followed
from polymp.errors import brief


def audit(
    model: nn.Module | None = None,
    scaler: object = None,
) -> "AuditBlock":
    """Measure the values of a few real steps: of every op's result, and of every gradient.

        with polymp.torch.audit(model, scaler) as a:
            for x, y in batches:
                train_step(x, y)
        print(a)                     # largest magnitudes, shares that a dtype would lose
        a.to_html("audit.html")      # the same rows, to sort and to filter
        policy = a.suggest().apply("amp")

    The steps compute the same bits as without. A step takes up to twice as long, more if its ops
    are tiny. The host reads nothing from the device before the block ends. Largest magnitudes,
    Inf and NaN are of all values; shares are of up to 4,096 values of each tensor, spread evenly.

    To tell values that float16 makes zero from zeros, a float16 op runs once more, in float32, on
    the same inputs, at one of sixteen calls at its site.

    Args:
        model: its modules and parameters are called by their names; without it modules are called
            by their paths in the outermost one that runs, and parameters have no gradients in the
            audit.
        scaler: the loss scaler in use, polymp's or torch.amp's: gradients are reported without its
            scale.

    Returns:
        A context manager; it yields the audit, which is filled when the block ends, with an error,
        too.

    Raises:
        TypeError: `model` is no module, or `scaler` no loss scaler.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"audit(model) needs a torch.nn.Module, got {brief(model)}. It is a context "
            "manager: write `with audit(model) as a:` around the step."
        )
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise TypeError(
            "audit(model, scaler) is a context manager around steps, and needs the loss scaler in "
            f"use, a GradScaler, got {brief(scaler)}."
        )
    return AuditBlock(model, scaler)


class AuditBlock(Audit):
    """An audit of its own block, filled when the block ends."""

    def __init__(self, model: nn.Module | None, scaler: object) -> None:
        super().__init__()
        self._entered = False
        self._seen = AuditValues(model, scaler)
        self._stream = OpStream(model, self._seen, counts=False, floats=numbers_in)

    def __enter__(self) -> Audit:
        if self._entered:
            raise RuntimeError("This audit is of one block, and was entered before: make another.")
        self._entered = True
        self._stream.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._stream.__exit__(*error)
        finally:
            with Own():
                _fill(self, self._seen)
            del self._seen, self._stream


def _fill(audit: Audit, seen: AuditValues) -> None:
    """Read what was measured into an audit. Waits for the device."""
    scales = [float(s) for s in seen.scales]
    audit.scale = scales[-1]
    audit.fault = seen.fault()  # first: it tells the infinities of masks from others
    audit.steps = max(len(seen.passes), bool(seen.events))
    rows = _measured(seen.sites, scales)
    audit.results = [m for m in rows if m.spelling]
    audit.gradients = [m for m in rows if not m.spelling]


def _measured(sites: Mapping[tuple[Any, ...], Tally], scales: Sequence[float]) -> list[Measured]:
    found: dict[tuple[Any, ...], list[Measured]] = {}
    made = [site.magnitudes() for site in sites.values()]
    gone = followed((m, site.reads) for m, site in zip(made, sites.values(), strict=True))
    for (key, site), counts, share in zip(sites.items(), made, gone, strict=True):
        at, op, spelling, place, direction, region, row, run = key
        counts = counts._replace(gone=share)
        if scales[at]:  # torch.amp's may become 0
            counts = counts.scaled(1 / scales[at])
        measured = Measured(
            op, spelling, place.module, place.source, direction, region, row, run,
            counts, tuple(sorted(site.numbers)),
        )  # fmt: skip
        found.setdefault(key[1:], []).append(measured)
    return list(map(together, found.values()))
