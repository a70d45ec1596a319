"""The results of `assert_parity`: the arrays that were compared, and the error if they differ."""

from collections.abc import Sequence
from typing import NamedTuple

from polymp.diagnostics.rounding import Gap
from polymp.errors import escaped


class ParityError(AssertionError):
    """Two functions differ in their structure, dtypes, values or gradients.

    Args:
        text: the message.
        op: see below.
        side_by_side: see below.
        gaps: see below.
        dtype: see below.

    Attributes:
        op: name of the first op that differs, in the vocabulary; "" if it is not known, as where
            results have other shapes.
        side_by_side: the calls of that op on both sides, as a table; "" likewise.
        gaps: the arrays that were compared, with errors and tolerances; () where dtypes differ.
        dtype: the dtype in which they differ: that of the regions, or "float32".
    """

    def __init__(
        self,
        text: str,
        op: str = "",
        side_by_side: str = "",
        gaps: Sequence[Gap] = (),
        dtype: str = "",
    ) -> None:
        super().__init__(text)
        self.dtype: str = dtype
        self.op: str = op
        self.side_by_side: str = side_by_side
        self.gaps: tuple[Gap, ...] = tuple(gaps)


class Parity(NamedTuple):
    """The result of `assert_parity`: errors and tolerances of all arrays, which are within.

    Attributes:
        gaps: each result and gradient: error and tolerance.
        dtypes: of the results, by path.
        calls: how many forward calls each side made.
        float32: the same of the comparison in float32 that came first; () if there was none.
    """

    gaps: tuple[Gap, ...]
    dtypes: dict[str, str]
    calls: tuple[int, int]
    float32: tuple[Gap, ...] = ()

    @property
    def margin(self) -> float:
        """How many times larger the tolerance is than the error, where that is least."""
        return min((gap.margin for gap in self.gaps), default=float("inf"))

    def __str__(self) -> str:
        return escaped("\n".join(map(str, self.gaps)))
