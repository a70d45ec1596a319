"""`audit`: how large the numbers of a run are, op by op, and where the first bad one comes from.

    with polymp.torch.audit(model) as a:
        for x, y in batches: step(x, y)
    print(a); a.plot("audit.png"); print(a.suggest())

`MagnitudeTracer` measures; here its measurements become the records of an `Audit`.
"""

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.nn as nn

from polymp import progress
from polymp.backends.torch.diagnostics.fp8_losses import Fp8Tracer
from polymp.backends.torch.diagnostics.magnitude_tracer import MagnitudeTracer, Site
from polymp.backends.torch.diagnostics.measure import Bins
from polymp.backends.torch.diagnostics.own_ops import Own
from polymp.backends.torch.diagnostics.rounding_errors import RoundingErrors, largest
from polymp.diagnostics.audit import Audit
from polymp.diagnostics.audit_records import Measured, together
from polymp.diagnostics.call_record import BACKWARD
from polymp.diagnostics.magnitudes import Magnitudes, followed
from polymp.fp8.recipes import recipe_of
from polymp.weights import lost_updates


@contextmanager
def audit(
    model: nn.Module | None = None,
    scaler: object = None,
    *,
    fp8: str | None = None,
    rounding: bool = False,
) -> Iterator[Audit]:
    """Measure the values of a few real steps: of every op's result, and of every gradient.

        with polymp.torch.audit(model, scaler) as a:
            for x, y in batches:
                train_step(x, y)
        print(a)                     # largest magnitudes, shares that a dtype would lose
        a.plot("audit.png")          # a row for each layer, against the ranges of the dtypes
        policy = a.suggest().apply("amp")

    The steps compute the same bits as without. A step takes up to twice as long, more if its ops
    are tiny. The host reads nothing from the device before the block ends. Largest magnitudes,
    Inf and NaN are of all values; shares are of up to 4,096 values of each tensor, spread evenly.

    To tell values that float16 makes zero from zeros, a float16 op runs once more, in float32, on
    the same inputs, at one of sixteen calls at its site.

    Of parameters in a low dtype the audit says which updates were rounded away: `low_weights` keeps
    them.

    With `fp8=`, the audit also measures what the products of bfloat16 regions would lose in 8 bits:
    those that the policy `fp8` would run so. Each of them is computed twice more, in float32, and
    the activations are kept until the backward pass.

    With `rounding=True`, the audit also measures rounding errors: of each op in a low dtype,
    against the same op in float32 on the same inputs before casts, and of each result, against the
    same step in float32. An op runs up to twice more, and its results are kept in float32 as well.

    Args:
        model: its modules and parameters are called by their names; without it modules are called
            by their paths in the outermost one that runs, and parameters have no gradients in the
            audit.
        scaler: the loss scaler in use, polymp's or torch.amp's: gradients are reported without its
            scale.
        fp8: name of the recipe to try: "tensorwise", "rowwise" or "rowwise_gw_hp"; None for none.
        rounding: True to measure rounding errors.

    Yields:
        The audit, which is filled when the block ends, with an error, too.

    Raises:
        TypeError: `model` is no module, or `scaler` no loss scaler.
        PolicyError: there is no such recipe.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"audit(model) needs a torch.nn.Module, got {reprlib.repr(model)}.")
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise TypeError(
            f"audit(model, scaler) needs the loss scaler in use, a GradScaler, got {scaler!r}."
        )
    found = Audit()
    tracer = MagnitudeTracer(model, scaler)
    if fp8 is not None:
        found.fp8 = recipe_of(fp8, "audit()").name
        tracer = Fp8Tracer(found.fp8, model, scaler)
    found.rounding = rounding
    tracer.rounding = RoundingErrors() if rounding else None
    try:
        with tracer:
            yield found
    finally:
        with Own(tracer.off):
            _fill(found, tracer)


def _fill(audit: Audit, tracer: MagnitudeTracer) -> None:
    """Read what was measured into an audit. Waits for the device."""
    scales = [float(s) for s in tracer.scales]
    audit.scale = scales[-1]
    audit.fault = tracer.fault()  # first: it tells the infinities of masks from others
    audit.steps = max(len(tracer.passes), bool(tracer.events))
    total = len(tracer.sites) + len(tracer.gradients)
    with progress.line("audit, reading", total, "tensor") as line:
        audit.results = _results(tracer.sites, scales, line)
        audit.gradients = _gradients(tracer.gradients, scales, line)
    audit.lost_updates = lost_updates.joined(
        record
        for sample, counts in tracer.samples
        if counts is not None
        for record in sample.records(counts)
    )
    if isinstance(tracer, Fp8Tracer):
        audit.fp8_losses = tracer.fp8.losses()


def _results(
    sites: Mapping[tuple[Any, ...], Site], scales: Sequence[float], line: progress.Line
) -> list[Measured]:
    found: dict[tuple[Any, ...], list[Measured]] = {}
    made = [site.bins.magnitudes() for site in sites.values()]
    gone = followed((m, site.reads) for m, site in zip(made, sites.values(), strict=True))
    for (key, site), counts, share in zip(sites.items(), made, gone, strict=True):
        line.step()
        at, op, spelling, place, direction, region, row, run = key
        magnitudes = _without(scales[at], counts._replace(gone=share))
        measured = Measured(
            op, spelling, place.module, place.source, direction, region, row, run,
            magnitudes, tuple(sorted(site.numbers)),
            largest(site.bins.rounding), largest(site.bins.drift),
            site.sums_nothing - {None} == {True},
        )  # fmt: skip
        found.setdefault(key[1:], []).append(measured)
    return list(map(together, found.values()))


def _without(scale: float, magnitudes: Magnitudes) -> Magnitudes:
    """Divide magnitudes by a loss scale, unless it is 0, which torch.amp's may become."""
    return magnitudes.scaled(1 / scale) if scale else magnitudes


def _gradients(
    found: dict[tuple[str, int], Bins], scales: list[float], line: progress.Line
) -> list[Measured]:
    by_name: dict[str, list[Measured]] = {}
    for (name, at), bins in found.items():
        line.step()
        magnitudes, drift = _without(scales[at], bins.magnitudes()), largest(bins.drift)
        measured = Measured(
            "gradient", "", name, "", BACKWARD, "", None, "float32", magnitudes, drift=drift
        )
        by_name.setdefault(name, []).append(measured)
    return list(map(together, by_name.values()))
