"""The magnitudes of a tensor's values, and the shares of them that a dtype cannot hold.

    bins of |x| -> Magnitudes -> shares that overflow, vanish, become subnormal

The bins are those of float32's own bits: the exponent and the first four digits after the point,
which is where every dtype of `polymp.dtypes` ends but for the last 1/4096 of float16's range.
The backends count, on the device; here counts become shares.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from polymp.dtypes import FORMATS
from polymp.dtypes import name as dtype_name

# Bits of float32 below the ones that name a bin, and how many bins there are: sign aside.
SHIFT = 19
BINS = 4096

# The dtypes whose ranges an audit compares values with.
NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")

# The bin of Inf; those of finite numbers are before it, those of NaN after it.
INF = 4080


def lower_edge(bin: int) -> float:
    """The smallest magnitude in a bin; 0 for the first, which holds zero too."""
    exponent, digits = divmod(bin, 16)
    if exponent == 0:
        return math.ldexp(digits / 16, -126)
    return math.ldexp(1 + digits / 16, exponent - 127)


_EDGES = tuple(lower_edge(bin) for bin in range(INF))


class Shares(NamedTuple):
    """The shares of values, from 0 to 1, that rounding to a dtype would change."""

    overflow: float  # would be Inf, or NaN in a dtype without Inf; Inf and NaN themselves count
    underflow: float  # would be zero and are not
    subnormal: float  # would keep fewer digits than the dtype has, and are not zero


class Magnitudes(NamedTuple):
    """Counts of the magnitudes in one tensor or several."""

    values: int  # how many values there were
    counted: int  # how many of them are in the bins; the others were skipped at even distances
    bins: tuple[int, ...]  # counts by the bits of |x|, `BINS` of them
    # The largest finite magnitude; of all values, not only of those counted. Where some are not
    # finite: of those counted, rounded down to where their bin begins.
    largest: float
    inf: bool = False  # True if a value was Inf or -Inf
    nan: bool = False  # True if a value was NaN
    # Share of values that are Inf in float16 and finite in float32, of the same inputs.
    burst: float = 0.0
    # Share of values that are zero in float16 and not in float32, of the same inputs.
    vanished: float = 0.0
    # The share of those and, of gradients, of zeros that earlier ones led to, about.
    gone: float = 0.0
    # The largest finite magnitude in float32 where float16 made Inf; 0 if none was seen.
    wide: float = 0.0

    @classmethod
    def measured(
        cls,
        values: int,
        bins: tuple[int, ...],
        ends: Sequence[float],
        burst: float,
        vanished: float,
        wide: float,
    ) -> "Magnitudes":
        """Those of tensors, from counts in bins, and the ends of the values of each tensor."""
        finite, nan = [abs(x) for x in ends if math.isfinite(x)], any(map(math.isnan, ends))
        largest = max(finite, default=0.0)
        if len(finite) < len(ends):  # such an end says no more; the bins do
            largest = max([largest, *(lower_edge(b) for b in range(INF) if bins[b])])
        inf = any(map(math.isinf, ends)) or (nan and bins[INF] > 0)
        return cls(values, sum(bins), bins, largest, inf, nan, burst, vanished, wide=wide)

    def __repr__(self) -> str:
        words = "".join(f", {k}" for k in ("inf", "nan") if getattr(self, k))
        return f"Magnitudes({self.values} values, largest {self.largest:.3g}{words})"

    def shares(self, dtype: object, scale: float = 1.0) -> Shares:
        """Return the shares of values that a dtype cannot hold, multiplied by `scale`.

        Bins are sixteenths of a power of two, and dtypes end where bins do; so the shares of the
        counted values are exact, but for values just at an end, such as 65520 to 65536 in float16,
        which count as finite. Values below 2**-130 are in the first bin, and count as zero.
        """
        target = FORMATS[dtype_name(dtype)]
        # Half a step beyond the largest number rounds up; half of the smallest rounds to zero.
        top = target.max + math.ldexp(1.0, math.frexp(target.max)[1] - 2 - target.mantissa)
        bottom = target.smallest_subnormal / 2
        over = sum(self.bins[INF:]) + self._between(top / scale, math.inf)
        under = self._between(_EDGES[1], bottom / scale)
        small = self._between(max(bottom / scale, _EDGES[1]), target.smallest_normal / scale)
        total = max(self.counted, 1)
        return Shares(over / total, under / total, small / total)

    def _between(self, low: float, high: float) -> int:
        """How many finite values are in the bins that begin in [low, high)."""
        return sum(self.bins[bisect_left(_EDGES, low) : bisect_left(_EDGES, high)])

    def unmasked(self) -> "Magnitudes":
        """The same values without Inf, where that is a mask's."""
        if not (self.inf or self.bins[INF]):
            return self
        bins, kept = (*self.bins[:INF], 0, *self.bins[INF + 1 :]), self.counted - self.bins[INF]
        return self._replace(bins=bins, counted=kept, inf=False, burst=0.0)

    def scaled(self, factor: float) -> "Magnitudes":
        """The same values, multiplied by a power of two.

        What leaves float32's range stays in the first bin that is not of zeros, or in the last of
        finite numbers; below float32's normal numbers bins are wider.
        """
        if factor == 1:
            return self
        moved = [0] * BINS
        moved[0], moved[INF:] = self.bins[0], self.bins[INF:]
        for edge, count in zip(_EDGES[1:], self.bins[1:INF], strict=True):
            if count:
                moved[max(bisect_right(_EDGES, edge * factor) - 1, 1)] += count
        return self._replace(
            bins=tuple(moved), largest=self.largest * factor, wide=self.wide * factor
        )


def joined(many: Iterable[Magnitudes]) -> Magnitudes:
    """Return the counts of several tensors together."""
    found = [*many]
    if len(found) == 1:
        return found[0]
    values = sum(m.values for m in found)
    burst, vanished, gone = (
        sum(getattr(m, name) * m.values for m in found) / max(values, 1)
        for name in ("burst", "vanished", "gone")
    )
    return Magnitudes(
        values,
        sum(m.counted for m in found),
        tuple(map(sum, zip(*(m.bins for m in found), strict=True))),
        max(m.largest for m in found),
        any(m.inf for m in found),
        any(m.nan for m in found),
        burst,
        vanished,
        gone,
        max(m.wide for m in found),
    )


def followed(made: Iterable[tuple[Magnitudes | float, Iterable[int]]]) -> list[float]:
    """Return the share `gone` of results, each with the places of the gradients that it reads."""
    # Where a share g of the values that were to come is gone, so is a share g of the values that
    # are made of one each, besides those that are zero in any case; none is gone that is not zero.
    # A result that was not measured is the share of its values that vanished.
    found, gone = list[float](), list[float]()  # `gone`: of what would not be zero
    for m, inputs in made:
        came = max((gone[at] for at in inputs if at < len(gone)), default=0.0)
        if isinstance(m, float):
            share, there = max(m, came), 1 - max(m, came)
        else:
            zeros = m.bins[0] / max(m.counted, 1)
            there = 1 - zeros
            more = there * came / (1 - came) if came < 1 else 1.0
            share = min(m.vanished + more, max(zeros, m.vanished))
        found.append(share)
        gone.append(share / (there + share) if share else 0.0)
    return found
