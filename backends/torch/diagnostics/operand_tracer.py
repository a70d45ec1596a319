"""The tracer of `locate`: it measures the inputs of the ops that may be at fault.

The host reads the range of each result as soon as it is there. Most ops are not at fault, and their
inputs need no measurement.
"""

import math
from collections.abc import Sequence

import torch

from polymp.backends.torch.compat import dispatcher
from polymp.backends.torch.compat.storage import storage_key
from polymp.backends.torch.diagnostics.fault import NOTHING, Event, operand
from polymp.backends.torch.diagnostics.measure import Range, measurable, sample
from polymp.backends.torch.diagnostics.op_call import Ran
from polymp.backends.torch.diagnostics.own_ops import Own
from polymp.backends.torch.diagnostics.value_tracer import ValueTracer


class OperandTracer(ValueTracer):
    """A tracer that measures the inputs of ops that may be at fault.

    An op may be at fault if its result is not finite, or if its dtype made a value or a number
    zero: see `polymp.diagnostics.blame`.
    """

    title = "locate"

    def inputs(self, ran: Ran) -> list[torch.Tensor]:
        if not ran.facts.writes:
            return ran.reads
        written = {*map(storage_key, dispatcher.written(ran.func, ran.args, ran.kwargs))}
        with Own(self.off):  # afterwards they have other values
            return [t.clone() if storage_key(t) in written else t for t in ran.reads]

    def compares(self, event: Event, results: list[torch.Tensor], ranges: Sequence[Range]) -> bool:
        # Else float16 has made no value Inf, and none of those that are compared zero or 1.
        few = [sample(t) for t in results[:1]]
        return not _finite(ranges) or any(bool(((t == 0) | (t == 1)).any()) for t in few)

    def noted(
        self,
        event: Event,
        results: list[torch.Tensor],
        ranges: Sequence[Range],
        inputs: list[torch.Tensor],
    ) -> Event:
        lost = event.lost is not None and bool(event.lost.both.any())
        if not (lost or event.numbers) and _finite(ranges):
            return event
        measured = tuple(operand(t) if measurable(t) else NOTHING for t in inputs)
        return event._replace(operands=measured)


def _finite(ranges: Sequence[Range]) -> bool:
    return all(math.isfinite(x) for found in ranges for x in found)
