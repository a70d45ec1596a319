"""Operands of 8-bit products: as they are, in 8 bits, or both; and each one's part in a product."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.interpreters import ad

from polymp.backends.jax.autocast.fp8_quantise import (
    Quantised,
    dequantised,
    is_quantised,
    scale_axes,
)
from polymp.fp8.recipes import ACTIVATION, GRADIENT, RECIPES, WEIGHT, Recipe


class Operand(NamedTuple):
    """An operand's part in a product in 8 bits.

    Attributes:
        role: "activation", "weight" or "gradient".
        given: True for a parameter, which is saved for the backward pass as it is.
        own: the dimensions that vmap batches it by: each element of a batch has its own scales.
        shared: True if it also comes in 8 bits, in the form that is saved for the backward pass,
            which several products share.
    """

    role: str
    given: bool = False
    own: tuple[int, ...] = ()
    shared: bool = False


class Shared(NamedTuple):
    """An operand as it is, and in 8 bits.

    Attributes:
        wide: as it is.
        low: in 8 bits.
    """

    wide: jax.Array
    low: Quantised


# An operand: as it is, in 8 bits, or both.
Value = jax.Array | Quantised | Shared


class In8Bits(NamedTuple):
    """How a product runs in 8 bits.

    Attributes:
        recipe: the name of the one in force.
        lhs: the first operand's part.
        rhs: the second operand's part.
        trial: True for a product that runs in the low dtype, as without rule fp8, and says what its
            operands would be in 8 bits, so that an audit can measure what they would lose.
    """

    recipe: str
    lhs: Operand
    rhs: Operand
    trial: bool = False

    @property
    def rules(self) -> Recipe:
        """The formats and scales of the recipe."""
        return RECIPES[self.recipe]

    @property
    def format(self) -> str:
        """The 8-bit format of the product, by that of its gradient, if it has one, or operands."""
        roles = (self.lhs.role, self.rhs.role)
        return self.rules.format_of(GRADIENT if GRADIENT in roles else roles[0])

    @property
    def both(self) -> tuple[Operand, Operand]:
        """The parts of the two operands."""
        return self.lhs, self.rhs

    @property
    def role_of_result(self) -> str:
        """The role of what has the result's shape in the transposes: a gradient, as a rule."""
        roles = {self.lhs.role, self.rhs.role}
        return next(role for role in (GRADIENT, ACTIVATION, WEIGHT) if role not in roles)

    def axes(self, at: int, ndim: int, summed: Sequence[int], other: str = "") -> tuple[int, ...]:
        """The dimensions along which a scale of an operand is computed."""
        roles = self.both[at].role, other or self.both[1 - at].role
        return scale_axes(ndim, self.rules, roles, summed, self.both[at].own)

    def axes_when_saved(self, at: int, ndim: int, params: Mapping[str, Any]) -> tuple[int, ...]:
        """The same for the product with the gradient, which sums over the other dimensions."""
        contracted, batch = params["dimension_numbers"]
        free = [d for d in range(ndim) if d not in (*contracted[at], *batch[at])]
        return self.axes(at, ndim, free, self.role_of_result)


def main(x: Value) -> jax.Array:
    """The array of an operand that has a derivative, if one has."""
    return x.values if isinstance(x, Quantised) else x.wide if isinstance(x, Shared) else x


def as_wide(x: Value) -> jax.Array:
    """An operand in float32."""
    if isinstance(x, Quantised):
        return dequantised(*x, "float32")
    return main(x).astype("float32")


def operands_of(flat: Sequence[Any], how: In8Bits) -> list[Any]:
    """The two operands, each with what comes with it."""
    rest = iter(flat[2:])
    operands: list[Any] = []
    for x, part in zip(flat, how.both, strict=False):
        if part.shared:
            operands.append(Shared(x, Quantised(next(rest), next(rest))))
        elif not ad.is_undefined_primal(x) and is_quantised(x):
            operands.append(Quantised(x, next(rest)))
        else:
            operands.append(x)
    return operands


def flattened(lhs: Value, rhs: Value, how: In8Bits) -> tuple[list[jax.Array], In8Bits]:
    """The arrays of two operands, and how a product of these runs; see `operands_of`."""
    rest: list[jax.Array] = []
    parts = []
    for x, part in zip((lhs, rhs), how.both, strict=True):
        if isinstance(x, Quantised):
            rest.append(x.scale)
        elif isinstance(x, Shared):
            rest += x.low
        parts.append(part._replace(shared=isinstance(x, Shared)))
    return [main(lhs), main(rhs), *rest], how._replace(lhs=parts[0], rhs=parts[1])
