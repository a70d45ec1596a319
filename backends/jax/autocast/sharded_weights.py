"""Parameters that travel between devices: rounded before they go, if only low ops read them.

A program that gathers its sharded parameters itself, with `all_gather` or `reshard`, gathers them
in the dtype they are stored in. Where contractions are all that reads the result, it is rounded in
any case; rounded before, it is half the bytes and the same numbers. Its gradient goes back in
float32 as before: nothing is rounded before devices add it up.
"""

from collections.abc import Callable, Sequence

import jax
from jax.extend.core import Literal

from polymp.backends.jax import compat
from polymp.backends.jax.autocast import op_facts
from polymp.backends.jax.autocast.frame import Frame
from polymp.backends.jax.autocast.plan import Cast, Kind, Step
from polymp.backends.jax.autocast.values import LOW
from polymp.backends.jax.compat.programs import Atom, ClosedProgram
from polymp.backends.jax.jaxprs import CALLS

# Send the elements of one array to other devices, and change none of them.
TRAVELS = frozenset({"all_gather", "all_gather_invariant", "all_to_all", "ppermute", "reshard"})

_WIDE = "float32"


def round_before(frame: Frame) -> None:
    """Have parameters rounded before they travel, where contractions alone read them afterwards."""
    steps = frame.steps
    if not any(step.eqn.primitive.name in TRAVELS for step in steps):
        return
    reads = _reads(frame.closed, steps)
    for at, step in enumerate(steps):
        if step.kind is not Kind.BIND or step.eqn.primitive.name not in TRAVELS:
            continue
        (operand,), (var,) = step.operands, step.eqn.outvars
        dtypes = reads.get(var, set())
        if len(dtypes) == 1 and dtypes <= LOW and type(operand) is not Cast:
            if frame.known(operand).is_parameter:
                (low,) = dtypes
                steps[at] = step._replace(kind=Kind.ROUND, low=low)


def _reads(jaxpr: ClosedProgram, steps: Sequence[Step]) -> dict[Atom, set[str]]:
    """By variable of a planned program, the dtypes in which it is read in the end."""
    reads: dict[Atom, set[str]] = {}

    def note(atom: Atom, dtypes: set[str]) -> None:
        if not isinstance(atom, Literal):
            reads.setdefault(atom, set()).update(dtypes)

    for atom in compat.opened(jaxpr)[0].outvars:
        note(atom, {_WIDE})
    for step in reversed(steps):
        for operand, dtypes in zip(step.operands, _dtypes(step, reads), strict=True):
            if type(operand) is Cast:
                note(operand.atom, {operand.dtype})
            else:
                note(operand, dtypes)
    return reads


_MOVES = op_facts.LAYOUT | TRAVELS


def _dtypes(step: Step, reads: dict[Atom, set[str]]) -> Sequence[set[str]]:
    """By operand of a step, the dtypes in which it, or what reads its result, reads it."""
    name, dtypes = step.eqn.primitive.name, {_WIDE}
    if name in CALLS and step.inside is not None:
        (plan,) = step.inside.plans
        inside = _reads(plan.jaxpr, plan.steps)
        return [inside.get(var, set()) for var in compat.binders(plan.jaxpr)[1]]
    if step.kind is Kind.CONTRACT and step.low:
        dtypes = {step.low}
    elif step.kind in (Kind.BIND, Kind.ROUND) and name in _MOVES and step.returns is None:
        (var,) = step.eqn.outvars
        dtypes = reads.get(var, set())
    return [dtypes] * len(step.operands)


def rounded_first(
    step: Step,
    values: Sequence[object],
    bind: Callable[[Step, Sequence[object]], Sequence[object]],
    cast: Callable[[object, str], object],
) -> Sequence[object]:
    """The result of a step, whose operand is rounded first; its derivative is that of the step."""
    low, (out,) = step.low, step.writes
    assert low is not None
    assert out is not None

    def moved(x: object) -> object:
        (result,) = bind(step, [x])
        return result

    @jax.custom_jvp
    def rounded(x: object) -> object:
        return cast(moved(cast(x, low)), out)

    @rounded.defjvp
    def _(primals: Sequence[object], tangents: Sequence[object]) -> tuple[object, object]:
        return rounded(*primals), moved(*tangents)

    return [rounded(*values)]
