"""The losses of a run's products, were they in 8 bits: a record for each call site.

    measurements of the backends -> Fp8Loss, a record for each call site -> worst

`polymp.fp8.loss` defines what is measured. Nothing here knows a framework.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from polymp.fp8 import loss
from polymp.fp8.recipes import RECIPES, Recipe

# How many times the error of rounding alone an error may be, unless a user says otherwise.
LIMIT = 2.0


class Measurement(NamedTuple):
    """One product at one call."""

    site: tuple[str, str, str]  # name of the op, path of its module, file and line
    product: str  # "result", "input_gradient" or "weight_gradient"
    roles: tuple[str, str]  # of its two operands
    numbers: Sequence[float]  # five, as `polymp.fp8.loss.product_loss` has them


class OperandLoss(NamedTuple):
    """The loss of an operand; numbers are those of the call that would lose most."""

    format: str  # the 8-bit format
    zero: float  # share of values that would become zero
    # The norm of the difference over the norm, mean over the rows that are summed over.
    error: float


class Worst(NamedTuple):
    """The error of a call site that is largest beside that of rounding alone."""

    of: str  # what has it: an operand's role or a product
    error: float  # the error
    expected: float  # that of rounding alone

    @property
    def times(self) -> float:
        """How many times larger the error is than that of rounding alone."""
        return self.error / self.expected


class Fp8Loss(NamedTuple):
    """The loss of the products of one call site, were they in 8 bits."""

    op: str  # its name in the vocabulary
    module: str  # path of the module it was called in
    source: str  # file and line of the user's code
    recipe: str  # name of the recipe
    # By role, "activation", "weight" and "gradient"; no gradient without a backward pass. An
    # operand of two products has the larger of its two errors.
    operands: Mapping[str, OperandLoss]
    # By product, "result", "input_gradient" and "weight_gradient", the norm of the difference over
    # the norm; the product alone, without a bias.
    results: Mapping[str, float]

    @property
    def worst(self) -> Worst:
        """The error that is largest beside that of rounding alone."""
        return max(self._errors(), key=lambda found: found.times)

    def _errors(self) -> Iterator[Worst]:
        for role, operand in self.operands.items():
            yield Worst(role, operand.error, loss.rounding_error(operand.format))
        for product, error in self.results.items():
            expected = loss.product_rounding_error(RECIPES[self.recipe], product)
            yield Worst(product, error, expected)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        operands = {role: operand._asdict() for role, operand in self.operands.items()}
        return self._asdict() | {"operands": operands, "results": dict(self.results)}


def losses(recipe: Recipe, measured: Iterable[Measurement]) -> list[Fp8Loss]:
    """Return what each call site would lose: in all its calls, that of the one that loses most."""
    sites: dict[tuple[str, str, str], Fp8Loss] = {}
    for site, product, roles, numbers in measured:
        found = sites.setdefault(site, Fp8Loss(*site, recipe.name, {}, {}))
        operands, results = dict(found.operands), dict(found.results)
        for role, zero, error in zip(roles, numbers[0:4:2], numbers[1:4:2], strict=True):
            known = operands.get(role, OperandLoss(recipe.format_of(role), 0.0, 0.0))
            operands[role] = known._replace(
                zero=_larger(known.zero, zero), error=_larger(known.error, error)
            )
        results[product] = _larger(results.get(product, 0.0), numbers[4])
        sites[site] = found._replace(operands=operands, results=results)
    return list(sites.values())


def together(many: Sequence[Fp8Loss]) -> Fp8Loss:
    """The first of some losses of equal modules, with the largest numbers of all of them."""
    operands = {
        role: OperandLoss(
            first.format,
            max(one.operands[role].zero for one in many),
            max(one.operands[role].error for one in many),
        )
        for role, first in many[0].operands.items()
    }
    results = {product: max(one.results[product] for one in many) for product in many[0].results}
    return many[0]._replace(operands=operands, results=results)


def _larger(known: float, number: float) -> float:
    return max(known, float(number)) if math.isfinite(number) else known
