"""Measured equations, and where the values that they read come from."""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import numpy as np

from polymp.backends.jax.diagnostics.sites import Site


class Event(NamedTuple):
    """Facts about a measured equation before it runs.

    Attributes:
        site: the equation, where it stands.
        inputs: events whose results it reads.
        outside: inputs of the program that it reads, by their places.
        later: events of the same loop whose results it reads one round later.
        loops: around it, the outermost first: where each stands, and whether it is a `while`.
        dtype: of its results; "" if they are no floats.
        given: True if it reads an infinite number of the program.
        group: of the call that it ends; None of any other.
    """

    site: Site
    inputs: tuple[int, ...]
    outside: tuple[int, ...]
    later: tuple[int, ...]
    loops: tuple[tuple[tuple[int, ...], bool], ...]
    dtype: str
    given: bool
    group: int | None


class Origin(NamedTuple):
    """Where a value of the program comes from: events, inputs, and what loops carry around."""

    events: frozenset[int] = frozenset()
    outside: frozenset[int] = frozenset()
    given: bool = False
    carried: frozenset[tuple[tuple[int, ...], int]] = frozenset()

    @classmethod
    def of_all(cls, many: "Iterable[Origin]") -> "Origin":
        """Where what is made of several values comes from."""
        events, outside, given, carried = zip(*many, strict=True)
        return cls(
            frozenset().union(*events),
            frozenset().union(*outside),
            any(given),
            frozenset().union(*carried),
        )


NOWHERE = Origin()


class Tracked(NamedTuple):
    """A value of the twin, and where it comes from."""

    value: jax.Array
    origin: Origin


def tracked(values: Iterable[jax.Array], origins: Iterable[Origin]) -> list[Tracked]:
    """Values with where they come from."""
    return list(map(Tracked, values, origins))


def values_of(many: Iterable[Tracked]) -> list[jax.Array]:
    """The values alone."""
    return [x.value for x in many]


def origins_of(many: Iterable[Tracked]) -> list[Origin]:
    """Where they come from alone."""
    return [x.origin for x in many]


def of_number(x: jax.Array) -> Tracked:
    """A number of the program."""
    number = np.asarray(x)
    infinite = number.dtype.kind == "f" and not np.isfinite(number).all()
    return Tracked(x, Origin(given=infinite))
