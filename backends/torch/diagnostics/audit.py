"""`audit`: how large the numbers of a run are, op by op, and where the first bad one comes from.

    with polymp.torch.audit(model) as a:
        for x, y in batches: step(x, y)
    print(a); a.plot("audit.png"); print(a.suggest())

`AuditValues` measures; here its measurements become the records of an `Audit`.
"""

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from polymp import progress
from polymp.backends.torch.autocast import fp8_ops
from polymp.backends.torch.autocast.fp8_product import VERBS
from polymp.backends.torch.diagnostics.measure import Tally
from polymp.backends.torch.diagnostics.op_call import OpCall, Own, numbers_in
from polymp.backends.torch.diagnostics.op_stream import OpStream, Subscriber
from polymp.backends.torch.diagnostics.values import AuditValues
from polymp.diagnostics.audit import Audit
from polymp.diagnostics.audit_records import Measured, largest_error, together
from polymp.diagnostics.call_record import BACKWARD
from polymp.diagnostics.fp8_loss import Fp8Loss, Measurement, losses
from polymp.diagnostics.magnitudes import Magnitudes, followed
from polymp.fp8 import loss
from polymp.fp8.recipes import (
    INPUT_GRADIENT,
    RECIPES,
    RESULT,
    WEIGHT_GRADIENT,
    Recipe,
    recipe_of,
)
from polymp.rules import decision_log, policy_files
from polymp.rules.region import Region
from polymp.rules.row import Rule
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
    Where a loss of one value is followed by its backward pass, the audit estimates by how much each
    op's own rounding changes the loss: the errors of low results are kept, in bfloat16, until their
    gradients are there, which takes as many bytes as these results.

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
    found, seen = Audit(), AuditValues(model, scaler, rounding)
    found.rounding = rounding
    losses: Fp8Losses | None = None
    if fp8 is not None:
        found.fp8 = recipe_of(fp8, "audit()").name
        losses = Fp8Losses(RECIPES[found.fp8])
    hear = [each for each in (seen, seen.rounding, losses) if each is not None]
    stream = OpStream(model, *hear, counts=False, floats=numbers_in, title="audit")
    try:
        with stream:
            yield found
    finally:
        with Own():
            _fill(found, seen)
            found.fp8_losses = () if losses is None else losses.losses()


def _fill(audit: Audit, seen: AuditValues) -> None:
    """Read what was measured into an audit. Waits for the device."""
    scales = [float(s) for s in seen.scales]
    audit.scale = scales[-1]
    audit.fault = seen.fault()  # first: it tells the infinities of masks from others
    audit.steps = max(len(seen.passes), bool(seen.events))
    total = len(seen.sites) + len(seen.gradients)
    with progress.line("audit, reading", total, "tensor") as line:
        passes = seen.rounding.effects.passes if seen.rounding is not None else 0
        audit.results = _results(seen.sites, scales, passes, line)
        audit.gradients = _gradients(seen.gradients, scales, line)
    audit.lost_updates = lost_updates.joined(
        record
        for sample, counts in seen.samples
        if counts is not None
        for record in sample.records(counts)
    )


def _results(
    sites: Mapping[tuple[Any, ...], Tally],
    scales: Sequence[float],
    passes: int,
    line: progress.Line,
) -> list[Measured]:
    found: dict[tuple[Any, ...], list[Measured]] = {}
    made = [site.magnitudes() for site in sites.values()]
    gone = followed((m, site.reads) for m, site in zip(made, sites.values(), strict=True))
    for (key, site), counts, share in zip(sites.items(), made, gone, strict=True):
        line.step()
        at, op, spelling, place, direction, region, row, run = key
        magnitudes = _without(scales[at], counts._replace(gone=share))
        measured = Measured(
            op, spelling, place.module, place.source, direction, region, row, run,
            magnitudes, tuple(sorted(site.numbers)), _largest(site.rounding), _largest(site.drift),
            sum(map(float, site.effects)) / passes if site.effects else None,
            site.sums_nothing - {None} == {True},
        )  # fmt: skip
        found.setdefault(key[1:], []).append(measured)
    return list(map(together, found.values()))


def _largest(pairs: Sequence[torch.Tensor]) -> float | None:
    return largest_error(torch.stack([pair.cpu() for pair in pairs]).tolist() if pairs else ())


def _without(scale: float, magnitudes: Magnitudes) -> Magnitudes:
    """Divide magnitudes by a loss scale, unless it is 0, which torch.amp's may become."""
    return magnitudes.scaled(1 / scale) if scale else magnitudes


def _gradients(
    found: dict[tuple[str, int], Tally], scales: list[float], line: progress.Line
) -> list[Measured]:
    by_name: dict[str, list[Measured]] = {}
    for (name, at), tally in found.items():
        line.step()
        magnitudes, drift = _without(scales[at], tally.magnitudes()), _largest(tally.drift)
        measured = Measured(
            "gradient", "", name, "", BACKWARD, "", None, "float32", magnitudes, drift=drift
        )
        by_name.setdefault(name, []).append(measured)
    return list(map(together, by_name.values()))


# The losses of products, were they in 8 bits, measured while a program runs in bfloat16.
#
# Where a product is called, its operands are measured as they come in; its gradient is when the
# backward pass reaches it. Only what `polymp.fp8.recipes` lets run in 8 bits is measured.
#
# By product, the axis of each operand that is summed over, of arrays as in `fp8_product`.
_SUMMED = {RESULT: (1, 1), INPUT_GRADIENT: (1, 0), WEIGHT_GRADIENT: (0, 0)}


class Fp8Losses(Subscriber):
    """Measurements of what the products of a run would lose in 8 bits."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._policy = policy_files.load("fp8")
        self._measured: list[tuple[tuple[str, str, str], str, torch.Tensor]] = []

    def _is_tried(
        self, entry: decision_log.Entry, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        """Return whether a product that runs low would run in 8 bits by the policy `fp8`."""
        if entry.decision.rule is not Rule.LOWER:
            return False
        row = self._policy.winner(entry.op, entry.low, entry.spelling)
        if row is None or row.rule is not Rule.FP8:
            return False
        region = Region("torch", "", True, entry.low, False)
        name = entry.spelling.removeprefix("aten:")
        return not fp8_ops.why_not(name, region, self._recipe, args, kwargs)

    def computed(self, entry: decision_log.Entry, op_call: OpCall, given: Any, result: Any) -> None:
        """Measure a call, and have its gradient measured."""
        args, kwargs = given
        if op_call.direction == BACKWARD or not self._is_tried(entry, args, kwargs):
            return
        with torch.no_grad():
            parts = fp8_ops.parts_of(entry.spelling.removeprefix("aten:"), args, kwargs)
            x, weight = parts.x.detach(), parts.weight.detach()
        site = op_call.op, op_call.place.module, op_call.place.source
        self._measure(site, RESULT, x, weight)
        if result.requires_grad:
            turned = parts.weight._base  # of an operand of `mm`, which is turned here
            wants_weight = parts.weight.requires_grad or (
                turned is not None and turned.requires_grad
            )
            wants = parts.x.requires_grad, wants_weight
            versions = x._version, weight._version
            result.register_hook(partial(self._gradient, site, x, weight, wants, versions))

    def _gradient(
        self,
        site: tuple[str, str, str],
        x: torch.Tensor,
        weight: torch.Tensor,
        wants: tuple[bool, bool],
        versions: tuple[int, int],
        gradient: torch.Tensor,
    ) -> None:
        """Measure the products of a backward pass, unless an operand was written since."""
        if wants[0] and weight._version == versions[1]:
            self._measure(site, INPUT_GRADIENT, gradient, weight)
        if wants[1] and x._version == versions[0] and not self._recipe.weight_gradient_high:
            self._measure(site, WEIGHT_GRADIENT, gradient, x)

    def _measure(
        self, site: tuple[str, str, str], product: str, one: torch.Tensor, other: torch.Tensor
    ) -> None:
        axes = _SUMMED[product]
        with Own(), torch.no_grad():
            operands = [
                loss.Operand(
                    array.reshape(-1, array.shape[-1]),
                    role,
                    self._recipe.scale_axis(product, role, axis),
                    (axis,),
                )
                for array, role, axis in zip((one, other), loss.ROLES[product], axes, strict=True)
            ]
            numbers = loss.product_loss(VERBS, self._recipe, operands, _product(*axes))
            self._measured.append((site, product, torch.stack(numbers)))

    def losses(self) -> list[Fp8Loss]:
        """Return what each call site would lose. Waits for the device."""
        return losses(
            self._recipe,
            (
                Measurement(site, product, loss.ROLES[product], numbers.tolist())
                for site, product, numbers in self._measured
            ),
        )


def _product(one: int, other: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A product that sums over an axis of each operand."""
    return lambda a, b: torch.tensordot(a, b, ([one], [other]))
