"""Parameters that travel between devices: rounded before they go, if only low ops read them.

A program that gathers its sharded parameters itself, with `all_gather` or `reshard`, gathers them
in the format they are stored in. Where contractions are all that reads the result, it is rounded in
any case; rounded before, it is half the bytes and the same numbers. Its gradient goes back as it
always does, in float32: nothing is rounded before devices add it up.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from polymp.backends.jax.autocast import op_facts
from polymp.backends.jax.autocast.frame import Frame
from polymp.backends.jax.autocast.plan import Cast, Kind, Step
from polymp.backends.jax.autocast.values import LOW

# Send the elements of one array to other devices, and change none of them.
TRAVELS = frozenset({"all_gather", "all_gather_invariant", "all_to_all", "ppermute", "reshard"})

_WIDE = "float32"


def round_before(frame: Frame) -> None:
    """Have parameters rounded before they travel, where contractions alone read them afterwards."""
    steps = frame.steps
    if not any(step.eqn.primitive.name in TRAVELS for step in steps):
        return
    reads: dict[Any, set[str]] = {}  # the formats in which a variable is read in the end

    def note(atom: Any, formats: set[str]) -> None:
        if not isinstance(atom, Literal):
            reads.setdefault(atom, set()).update(formats)

    for atom in frame.jaxpr.outvars:
        note(atom, {_WIDE})
    for at in range(len(steps) - 1, -1, -1):
        step = steps[at]
        formats = _formats(step, reads)
        travels = step.kind is Kind.BIND and step.eqn.primitive.name in TRAVELS
        if travels and len(formats) == 1 and formats <= LOW:
            (operand,) = step.operands
            if type(operand) is not Cast and frame.known(operand).is_parameter:
                steps[at] = step._replace(kind=Kind.ROUND, low=formats.pop())
        for operand in step.operands:
            if type(operand) is Cast:
                note(operand.atom, {operand.format})
            else:
                note(operand, formats)


def _formats(step: Step, reads: dict[Any, set[str]]) -> set[str]:
    """The formats in which a step, or what reads its result, reads its operands."""
    if step.kind is Kind.CONTRACT and step.low:
        return {step.low}
    moves = op_facts.LAYOUT | TRAVELS
    if step.kind is Kind.BIND and step.eqn.primitive.name in moves and step.returns is None:
        (var,) = step.eqn.outvars
        return reads.get(var, set())
    return {_WIDE}


def rounded_first(step: Step, values: Sequence[Any], bind: Any, cast: Any) -> Sequence[Any]:
    """The result of a step, whose operand is rounded first; its derivative is that of the step.

    Args:
        step: of kind ROUND.
        values: of its operand.
        bind: makes the results of the step's primitive.
        cast: makes an array in another format.
    """
    low, (out,) = step.low, step.writes

    def moved(x: Any) -> Any:
        (result,) = bind(step, [x])
        return result

    @jax.custom_jvp
    def rounded(x: Any) -> Any:
        return cast(moved(cast(x, low)), out)

    @rounded.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return rounded(*primals), moved(*tangents)

    return [rounded(*values)]
