"""Operands in 8 bits that several products of a program read: quantised and saved once.

The queries, keys and values of attention are products of one activation. Each of them would
quantise it, and save it for the backward pass.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from polymp.backends.jax.autocast.fp8_operands import In8Bits, Shared, flattened
from polymp.backends.jax.autocast.fp8_quantise import Quantised, fp8_quantise_p, quantise_params
from polymp.backends.jax.autocast.plan import Cast, Plan, Step
from polymp.backends.jax.compat.programs import Atom
from polymp.fp8.recipes import WEIGHT


class _Form(NamedTuple):
    """An operand in the form in which it is saved; equal for operands that are the same."""

    atom: Atom
    recipe: str
    role: str
    axes: tuple[int, ...]


class SharedOperands:
    """The shared operands of one run of a plan.

    Args:
        plan: that runs.
    """

    def __init__(self, plan: Plan) -> None:
        if "shared in 8 bits" not in plan.made:
            counts = Counter(form for step in plan.steps for _, form in _forms(step))
            several = frozenset(form for form, count in counts.items() if count > 1)
            plan.made["shared in 8 bits"] = several
        self._several: frozenset[_Form] = plan.made["shared in 8 bits"]
        self._made: dict[_Form, Quantised] = {}

    def operands(self, step: Step, values: Sequence[Any], put: Any) -> tuple[list[Any], In8Bits]:
        """The arrays of a product in 8 bits, and how it runs."""
        assert step.in_8_bits is not None
        both: list[Any] = list(values)
        for at, form in _forms(step) if self._several else ():
            if form not in self._several:
                continue
            if form not in self._made:
                params = quantise_params(*form[1:])
                self._made[form] = Quantised(*put(fp8_quantise_p, (values[at],), params))
            both[at] = Shared(values[at], self._made[form])
        return flattened(both[0], both[1], step.in_8_bits)

    def drop(self, atom: Atom) -> None:
        """Forget what was made of a variable that no later step reads."""
        for form in [form for form in self._made if form.atom is atom]:
            del self._made[form]


def _forms(step: Step) -> Iterator[tuple[int, _Form]]:
    """The operands of a step that are saved in 8 bits, by their places."""
    how = step.in_8_bits
    if how is None or how.trial:
        return
    for at, operand in enumerate(step.operands):
        part, other = how.both[at], how.both[1 - at]
        high = how.rules.weight_gradient_high and other.role == WEIGHT
        if part.given or high or type(operand) is Cast or type(operand) is Literal:
            continue
        axes = how.axes_when_saved(at, len(operand.aval.shape), step.eqn.params)
        yield at, _Form(operand, how.recipe, part.role, axes)
