"""The losses of products, were they in 8 bits, measured while a program runs in bfloat16.

Where a product is called, its operands are measured as they come in; its gradient is when the
backward pass reaches it. Only what `polymp.fp8.fallback` lets run in 8 bits is measured.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from polymp.backends.torch.autocast import fp8_ops
from polymp.backends.torch.autocast.fp8_operand import VERBS
from polymp.backends.torch.diagnostics.magnitude_tracer import MagnitudeTracer
from polymp.backends.torch.diagnostics.op_call import OpCall
from polymp.backends.torch.diagnostics.own_ops import Own
from polymp.diagnostics.call_record import BACKWARD
from polymp.diagnostics.fp8_loss import Fp8Loss, Measurement, losses
from polymp.fp8 import loss
from polymp.fp8.recipes import (
    INPUT_GRADIENT,
    RECIPES,
    RESULT,
    WEIGHT_GRADIENT,
    Recipe,
)
from polymp.rules import decision_log, policy_files
from polymp.rules.region import Region
from polymp.rules.row import Rule

# By product, the axis of each operand that is summed over, of arrays as in `fp8_product`.
_SUMMED = {RESULT: (1, 1), INPUT_GRADIENT: (1, 0), WEIGHT_GRADIENT: (0, 0)}


class Fp8Tracer(MagnitudeTracer):
    """A tracer of magnitudes that also measures what products would lose in 8 bits.

    Args:
        recipe: its name.
        model: as in `MagnitudeTracer`.
        scaler: likewise.

    Attributes:
        fp8: what was measured.
    """

    def __init__(self, recipe: str, model: nn.Module | None = None, scaler: Any = None) -> None:
        super().__init__(model, scaler)
        self.fp8 = Fp8Losses(RECIPES[recipe], self.off)

    def around(self, entry: decision_log.Entry, run: Callable[..., Any], *args: object) -> Any:
        depth = len(self._open)

        def measured(*args: Any) -> Any:
            result = run(*args)
            if len(self._open) > depth and self.fp8.is_tried(entry, args[-2], args[-1]):
                self.fp8.call(self._open[-1], entry, args[-2], args[-1], result)
            return result

        return super().around(entry, measured, *args)


class Fp8Losses:
    """Measurements of what the products of a run would lose in 8 bits.

    Args:
        recipe: that is tried.
        off: autocast's dispatch keys, for `Own`.
    """

    def __init__(self, recipe: Recipe, off: torch._C.DispatchKeySet) -> None:
        self._recipe = recipe
        self._off = off
        self._policy = policy_files.load("fp8")
        self._measured: list[tuple[tuple[str, str, str], str, torch.Tensor]] = []

    def is_tried(
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

    def call(
        self,
        op_call: OpCall,
        entry: decision_log.Entry,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: torch.Tensor,
    ) -> None:
        """Measure a call, and have its gradient measured."""
        if op_call.direction == BACKWARD:
            return
        with Own(self._off), torch.no_grad():
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
        with Own(self._off), torch.no_grad():
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
