"""The magnitudes of every op's result and of every gradient of a run.

The backends measure, on the device, and make these records of an `Audit`; `magnitudes` knows what a
dtype would make of the numbers. Nothing here knows a framework.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from polymp import text_table
from polymp.diagnostics.call_record import BACKWARD, Call
from polymp.diagnostics.magnitudes import Magnitudes, joined
from polymp.rules.row import Row, Rule

# The share of the values of an op, or of all gradients, that is too much to become zero.
MANY = 0.5


class Measured(NamedTuple):
    """The results of one op call site, or one parameter's gradient, over all steps."""

    op: str  # its name in the vocabulary, or the framework's own name; "gradient" for a parameter's
    spelling: str  # the framework's own name, with a prefix; "" for a parameter's gradient
    module: str  # path of the module it was called in; of a gradient, the parameter's name
    source: str  # file and line of the user's code: "train.py:12"
    direction: str  # "forward", "backward" or "recompute"
    region: str  # the low dtype of the region it ran in, "" outside
    row: Row | None  # of the policy, that decided; None if the policy has no row for the op
    run: str  # dtype of the results
    magnitudes: Magnitudes  # of the results; of scaled gradients, divided by the scale
    # Constants of the program that are zero or 1 in its dtype: (1e-12,) for `x + 1e-12`.
    numbers: tuple[float, ...] = ()


def together(many: Sequence[Measured]) -> Measured:
    """The first of some results, with what was counted of all of them."""
    return many[0]._replace(
        magnitudes=joined(m.magnitudes for m in many),
        numbers=tuple(sorted({number for m in many for number in m.numbers})),
    )


class Operand(NamedTuple):
    """One input of an op; an audit knows dtype, shape and largest magnitude, `locate` the rest."""

    dtype: str  # its dtype
    shape: tuple[int, ...]  # its dimensions
    smallest: float  # the smallest magnitude that is not zero; 0 if there is none
    largest: float  # the largest finite magnitude
    zeros: float  # share of zeros, from 0 to 1
    inf: float  # share of Inf and -Inf; NaN if all that is known is that there are some
    nan: float  # share of NaN; likewise
    name: str = ""  # of a parameter or an argument, if it is one; "" for what the program made
    negative: float = 0.0  # share of negative numbers

    @classmethod
    def measured(
        cls, dtype: str, shape: Sequence[int], numbers: Sequence[float], name: str
    ) -> "Operand":
        """One from its fields after the shape, the name aside; `smallest` is Inf if it is none."""
        smallest, largest, zeros, inf, nan, negative = numbers
        smallest = smallest if math.isfinite(smallest) else 0.0
        return cls(dtype, tuple(shape), smallest, largest, zeros, inf, nan, name, negative)

    @classmethod
    def of_ends(
        cls, dtype: str, shape: Sequence[int], ends: Sequence[float], name: str
    ) -> "Operand":
        """One of which the ends of its values are all that is known."""
        largest = max(map(abs, filter(math.isfinite, ends)), default=0.0)
        some = 1.0 if math.prod(shape) == 1 else math.nan
        inf, nan = (some if any(map(is_so, ends)) else 0.0 for is_so in (math.isinf, math.isnan))
        return cls(dtype, tuple(shape), 0.0, largest, 0.0, inf, nan, name)

    def __str__(self) -> str:
        parts = [f"{self.dtype}{list(self.shape)}"]
        if self.largest:
            start = f"from {_size(self.smallest)} " if self.smallest else "up "
            parts.append(f"|x| {start}to {_size(self.largest)}")
        shares = (
            ("negative", self.negative),
            ("zero", self.zeros),
            ("Inf", self.inf),
            ("NaN", self.nan),
        )
        parts += [f"{_percent(share)} {what}" for what, share in shares if share]
        return f"{self.name}: {', '.join(parts)}" if self.name else ", ".join(parts)


def operand_numbers(xp: Any, values: Any) -> Any:
    """Return the numbers of `Operand.measured`, float32 [6]; `xp` has the functions of numpy."""
    size = xp.abs(values)
    finite, one, zero = xp.isfinite(size), xp.ones_like(size), xp.zeros_like(size)
    some = xp.where(finite & (size > 0), size, xp.inf)
    most = xp.where(finite, size, zero)
    kinds = (size == 0, xp.isinf(size), xp.isnan(size), values < 0)
    shares = [xp.mean(xp.where(kind, one, zero)) for kind in kinds]
    return xp.stack([xp.min(some), xp.max(most), *shares])


def _size(x: float) -> str:
    """Return a magnitude in three digits; in nine next to 1, past which acos is NaN."""
    return f"{x:.9g}" if f"{x:.3g}" == "1" else f"{x:.3g}"


def _percent(share: float) -> str:
    return "some" if math.isnan(share) else "all" if share == 1 else text_table.share(share)


class Fault(NamedTuple):
    """The op at which a run's numbers broke; `print` shows it with its inputs and its row."""

    op: str  # its name in the vocabulary, or the framework's own
    spelling: str  # the framework's own name, with a prefix
    module: str  # path of the module it was called in
    source: str  # file and line of the user's code
    direction: str  # "forward", "backward", "recompute", or "update" for what an optimizer does
    # "overflow" (its dtype turned a value that float32 holds into Inf), "underflow" (into zero),
    # "saturation" (into 1), "number" (a constant of the program is zero in its dtype), "input" (an
    # argument or parameter was not finite), "index" (one is out of range, and was filled with NaN),
    # "inside" (ops in it were not looked at, as in a shard_map), or "operation" (its result is not
    # finite in float32 either; of bfloat16, and of what writes in place, that was not tried).
    kind: str
    run: str  # the dtype that it ran in
    row: Row | None  # of the policy, that decided; None if the policy has no row for the op
    inputs: tuple[Operand, ...]  # of the op
    found: str  # "Inf" or "NaN", whichever came first, and the op where it did if it is another
    why: str  # a sentence on the cause
    region: str = ""  # the low dtype of the region it ran in, "" outside
    remedy: str = ""  # what helps, and whether it was tried, in sentences; "" if nothing was

    @classmethod
    def of(
        cls,
        call: Call,
        cause: tuple[str, str],
        run: str,
        inputs: Iterable[Operand],
        found: str,
        first: Call | None,
    ) -> "Fault":
        """That of a call, from kind and why; `first` is the call of `found`, if it is another."""
        if first is not None:
            at = f" in {first.module}" if first.module else ""
            found = f"{found}, of {first.op}{at} {first.source}".rstrip()
        kind, why = cause
        place = call.op, call.spelling, call.module, call.source, call.direction
        return cls(*place, kind, run, call.row, tuple(inputs), found, why, call.region)

    def __str__(self) -> str:
        module = f" in module {self.module!r}" if self.module else ""
        place = f"{module} at {self.source}" if self.source else module
        by = ", its forward by" if self.direction == BACKWARD else ", by"
        rule = f"{by} the row {self.row}" if self.row else ""
        run = self.run
        if self.row is not None and self.row.rule is Rule.FP32_KEEP:
            run = f"float32, with its result in {run}"
        _, then, first = self.found.partition(", of ")
        broke = f"; then {self.found}" if then and first else ""
        lines = [
            f"{self.op} ({self.spelling}){place}, {self.direction}, ran in {run}{rule}",
            f"  {self.kind}: {self.why}{broke}",
            *(f"  input {i}: {operand}" for i, operand in enumerate(self.inputs)),
            *([f"  {self.remedy}"] if self.remedy else []),
        ]
        return "\n".join(lines)
