"""Updates that rounding takes away: weights that keep their bits though they have a gradient.

A low weight that an optimizer writes directly moves by at least one last place or not at all. The
share of weights with a gradient that is not 0, and whose step has changed no bit, says how much of
the training is lost.
"""

from collections.abc import Iterable
from typing import NamedTuple

# A warning is given from this share of all updates on.
TOO_MANY = 0.1


class LostUpdates(NamedTuple):
    """The updates of one parameter in a step, and how many of them were lost."""

    name: str  # of the parameter
    dtype: str  # its dtype, by its full name
    updates: int  # elements whose gradient is not 0
    lost: int  # those of them that the step left as they were

    @property
    def share(self) -> float:
        """The part of the updates that were lost, from 0 to 1."""
        return self.lost / self.updates if self.updates else 0.0


def share(records: Iterable[LostUpdates]) -> float:
    """Return the part of all updates that were lost, from 0 to 1."""
    records = list(records)
    updates = sum(each.updates for each in records)
    return sum(each.lost for each in records) / updates if updates else 0.0


def worst(records: Iterable[LostUpdates], count: int) -> list[LostUpdates]:
    """Return the records with the largest share of lost updates, the largest first."""
    lost = [each for each in records if each.updates]
    return sorted(lost, key=lambda each: (-each.share, -each.updates))[:count]


def message(records: Iterable[LostUpdates], instead: str, *, gradients: bool = True) -> str:
    """Return the warning about a step that lost updates."""
    records = list(records)
    most = (f"{each.name} ({each.dtype}) {each.share:.0%}" for each in worst(records, 3))
    seen = "the gradient is not 0, and " if gradients else ""
    return (
        f"{share(records):.0%} of the updates of low weights were rounded away in this step: "
        f"{seen}the weight keeps its bits, because the update is below half of its last place. "
        f"Most in: {', '.join(most)}. Such weights hardly learn. Write {instead}, which keeps the "
        "rest of each weight beside it."
    )
