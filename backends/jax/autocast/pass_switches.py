"""Which passes are on: each can be switched off, for tests.

    bias_fold   a parameter added to a contraction's result takes its dtype  as adds are planned
    sharing     a computed value is cast once for all who read it low         as reads are planned
    pull_up     what float32 ops alone read is computed in float32            backwards, at the end
    pull_down   a layout that low ops alone read is made of low numbers       backwards, at the end

The first two are parts of `op_handlers` and `frame`, the other two are in `passes`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

import jax

from polymp.backends.jax import compat


class Pass(StrEnum):
    """The passes, by name."""

    BIAS_FOLD = "bias_fold"
    SHARING = "sharing"
    PULL_UP = "pull_up"
    PULL_DOWN = "pull_down"


# The passes that are switched off. Part of the key of every trace, as `regions.AMBIENT` is.
_OFF: compat.Context[frozenset[str]] = jax.make_user_context(frozenset())


def off() -> frozenset[str]:
    """The names of the passes that are switched off here."""
    return _OFF.value


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Plan what is traced meanwhile, in this thread, without some passes: for tests and experts."""
    if unknown := [name for name in names if name not in list(Pass)]:
        raise ValueError(
            f"without({', '.join(map(repr, names))}): {', '.join(map(repr, unknown))} is no pass. "
            f"The passes are {', '.join(Pass)}."
        )
    with _OFF(off().union(map(str, names))):
        yield
