"""Facts about values before they exist, and about the numbers that a program holds.

A value has two dtypes: the *declared* one, that of the traced program, and the *actual* one, that
the plan gives it. Nothing here makes an array or knows an equation.
"""

from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any, ClassVar, NamedTuple, SupportsFloat

import jax
import numpy as np

from polymp.backends.jax.compat.programs import Atom
from polymp.dtypes import FORMATS

# What autocast may touch. float64 and anything else keeps its declared dtype.
ELIGIBLE = frozenset({"float32", "bfloat16", "float16"})
LOW = frozenset({"bfloat16", "float16"})


class Origin(Enum):
    """Where a value comes from, as far as the plan cares.

    COMPUTED  from anything else
    GIVEN     an argument or constant, or a layout of one: a parameter, as a rule
    LITERAL   a number in the program
    MASK      a choice among numbers in the program: bools, converted, are zeros and ones
    INTEGER   an array of integers, converted, and sums and products of those with whole numbers
    """

    COMPUTED = 0
    GIVEN = 1
    LITERAL = 2
    MASK = 3
    INTEGER = 4

    # Each is one object; Enum's own hashes the name, in Python.
    __hash__: ClassVar[Callable[[Any], int]] = object.__hash__


class Known(NamedTuple):
    """Facts about a value before it exists.

    Attributes:
        dtype: its actual dtype; None for what autocast leaves alone.
        origin: where it comes from.
        product: True for the low result of a contraction, to which a bias may be added.
        numbers: the few that its elements are, where those are known: one of a literal, zero and
            one of bools. Of integers, which may be any, these stand for a mask's.
    """

    dtype: str | None
    origin: Origin = Origin.COMPUTED
    product: bool = False
    numbers: tuple[float, ...] = ()

    @property
    def number(self) -> float | None:
        """The literal's number, as long as every element is that number."""
        return self.numbers[0] if self.origin is Origin.LITERAL and self.numbers else None

    @property
    def is_chosen(self) -> bool:
        """True for what no float array went into: numbers in the program, bools and integers."""
        return self.origin in _CHOSEN

    @property
    def is_parameter(self) -> bool:
        """True for what is given in float32: a parameter, as a rule."""
        return self.dtype == "float32" and self.origin is Origin.GIVEN


_CHOSEN = frozenset({Origin.LITERAL, Origin.MASK, Origin.INTEGER})


@cache
def name_of(dtype: object) -> str | None:
    """The name of a dtype, if autocast may touch it."""
    name = getattr(dtype, "name", None)
    return name if name in ELIGIBLE else None


def declared(atom: Atom) -> str | None:
    """The declared dtype of a variable or literal, if autocast may touch it."""
    return name_of(getattr(atom.aval, "dtype", None))


def fixed(atom: Atom) -> bool:
    """True for an operand whose dtype autocast never changes: float64, complex, float8."""
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, np.inexact) and not name_of(dtype)


def fits(number: float, dtype: str) -> bool:
    """True if a literal stays in the dtype's normal range, and next to 1 does not become 1."""
    size = abs(float(number))
    target = FORMATS[dtype]
    if size != 1 == abs(in_dtype(number, dtype)):
        return False
    return size == 0 or not np.isfinite(size) or target.smallest_normal <= size <= target.max


def number_of(value: Any) -> float | None:
    """The number of a scalar literal; None if it is no real number, or one that equals another."""
    try:
        number = float(value)
    except TypeError:
        return None
    return None if number == 0 and np.signbit(number) else number  # 0.0 == -0.0


@cache
def literal(dtype: str | None, number: float | None) -> Known:
    """The facts about a number in the program."""
    return Known(dtype, Origin.LITERAL, numbers=() if number is None else (number,))


def in_dtype(value: SupportsFloat, dtype: str) -> "np.number[Any]":
    """A literal in a dtype; a finite one stays finite."""
    number = float(value)
    largest = FORMATS[dtype].max
    if np.isfinite(number):
        number = min(max(number, -largest), largest)
    scalar: np.number[Any] = np.asarray(number, np.dtype(dtype)).flat[0]
    return scalar
