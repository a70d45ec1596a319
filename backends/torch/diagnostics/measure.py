"""Magnitudes of the values of tensors, measured on their device without waiting for it.

A measurement is a few small tensors; the host reads all of them at once when a run is over.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from polymp.backends.torch.autocast import dtype_names
from polymp.backends.torch.compat import dispatcher, modes
from polymp.backends.torch.diagnostics.op_kinds import float_tensors
from polymp.diagnostics.magnitudes import BINS, INF, SHIFT, Magnitudes, lower_edge
from polymp.dtypes import FORMATS

# About so many values of a larger tensor are counted in bins, evenly spaced.
SAMPLE = 4096


class Range(NamedTuple):
    """The smallest and the largest value of a tensor; NaN if it holds one. 0-dim tensors."""

    low: torch.Tensor
    high: torch.Tensor


def measurable(t: Any) -> bool:
    """Return whether an object is a float tensor that has values in memory."""
    return (
        isinstance(t, torch.Tensor)
        and t.is_floating_point()
        and t.layout is torch.strided
        and dtype_names.NAMES[t.dtype] in FORMATS
        and t.numel() > 0
        and t.device.type != "meta"
        and modes.is_plain(t)
    )


def range_of(t: torch.Tensor) -> Range:
    """Measure the range of a tensor's values."""
    return Range(*torch.aminmax(comparable(t)))


def comparable(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor, cast to float32 if torch cannot compare values of its dtype."""
    return t if t.element_size() > 1 else t.to(torch.float32)


def numbers(ends: Sequence[torch.Tensor]) -> list[float]:
    """Read 0-dim tensors as numbers, by one transfer for each device and dtype."""
    groups: dict[Any, list[int]] = {}
    for at, x in enumerate(ends):
        groups.setdefault((x.device, x.dtype), []).append(at)
    found = [0.0] * len(ends)
    for places in groups.values():
        values = torch.stack([ends[at] for at in places]).tolist()
        for at, value in zip(places, values, strict=True):
            found[at] = value
    return found


class Lost(NamedTuple):
    """The values of a tensor that are finite or not zero in float32, and Inf or zero in float16.

    Attributes:
        wide: the range of the values in float32.
        both: int64 [2], how many of the compared values became Inf, and how many zero.
        looked_at: how many values were compared.
        values: how many there are.
    """

    wide: Range
    both: torch.Tensor
    looked_at: int
    values: int

    @classmethod
    def of(cls, wide: torch.Tensor, low: torch.Tensor) -> "Lost":
        """Compare a tensor in float32 with the same in float16."""
        some, few = sample(wide), sample(low)
        burst = (few.isinf() & some.isfinite()).sum()
        vanished = ((few == 0) & (some != 0)).sum()
        return cls(range_of(wide), torch.stack((burst, vanished)), few.numel(), low.numel())

    @staticmethod
    def read(many: "Sequence[Lost]") -> "Iterator[tuple[bool, float]]":
        """Yield for each whether all was finite in float32, and the share that became zero."""
        if not many:
            return
        ranges = iter(numbers([x for lost in many for x in lost.wide]))
        counts = torch.stack([lost.both.cpu() for lost in many]).tolist()
        for lost, (_, vanished) in zip(many, counts, strict=True):
            finite = math.isfinite(next(ranges)) & math.isfinite(next(ranges))
            yield finite, vanished / lost.looked_at


def sample(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values in one row; of a large tensor about `SAMPLE`, evenly spaced."""
    flat = t.reshape(-1)
    return flat if flat.numel() <= SAMPLE else flat[:: -(-flat.numel() // SAMPLE)]


class Bins:
    """Counts of magnitudes, and of values that float16 has lost, added up over tensors.

    Args:
        device: of the tensors.

    Attributes:
        values: how many values there were.
        counted: how many of them are in the bins.
    """

    def __init__(self, device: torch.device) -> None:
        self.values: int = 0
        self.counted: int = 0
        self.ranges: list[Range] = []
        self._bins = torch.zeros(BINS, dtype=torch.int32, device=device)
        self.lost: list[Lost] = []

    def add(self, t: torch.Tensor, found: Range) -> None:
        """Count a tensor's values.

        Args:
            t: a measurable tensor.
            found: its range.
        """
        self.ranges.append(found)
        some = sample(t)
        self.values += t.numel()
        self.counted += some.numel()
        places = _bins_of(some)
        self._bins.index_add_(0, places, _ones(t.device)[: len(places)])  # bincount would wait

    def magnitudes(self) -> Magnitudes:
        """Return what was counted. Waits for the device."""
        ranges = numbers([x for pair in self.ranges for x in pair])
        finite = [abs(x) for x in ranges if math.isfinite(x)]
        bins = tuple(self._bins.tolist())
        largest, nan = max(finite, default=0.0), any(map(math.isnan, ranges))
        if len(finite) < len(ranges):  # such a range has no largest finite value; the bins do
            largest = max([largest, *(lower_edge(b) for b in range(INF) if bins[b])])
        lost = [x.both for x in self.lost]
        burst, vanished = torch.stack(lost).sum(0).tolist() if lost else (0, 0)
        total = max(sum(x.looked_at for x in self.lost), 1)
        return Magnitudes(
            self.values,
            self.counted,
            bins,
            largest,
            any(map(math.isinf, ranges)) or (nan and bins[INF] > 0),
            nan,
            burst / total,
            vanished / total,
        )


def _bins_of(t: torch.Tensor) -> torch.Tensor:
    """Return the bin of each value; int32 of the shape of t."""
    if t.dtype is torch.bfloat16:  # the upper half of a float32
        places = t.view(torch.int16).to(torch.int32).bitwise_right_shift_(SHIFT - 16)
    else:
        places = t.to(torch.float32).view(torch.int32).bitwise_right_shift(SHIFT)
    return places.bitwise_and_(BINS - 1)  # without the sign


@cache
def _ones(device: torch.device) -> torch.Tensor:
    return torch.ones(SAMPLE, dtype=torch.int32, device=device)


def in_float16(
    func: torch._ops.OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    results: list[torch.Tensor],
) -> Lost | None:
    """Return the values that float16 lost in an op, by running it on the same inputs in float32.

    None for an op that writes into its arguments, draws random numbers or has no float32 form.
    """
    if dispatcher.writes(func) or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    args, kwargs = _widened(args), _widened(kwargs)
    try:
        wide = [t for t in float_tensors(func(*args, **kwargs)) if measurable(t)]
    except (RuntimeError, TypeError, ValueError):
        return None
    if not wide or wide[0].shape != results[0].shape:
        return None
    return Lost.of(wide[0], results[0])


def _widened(tree: object) -> Any:
    """Replace float16 by float32 in an op's arguments."""
    if isinstance(tree, torch.Tensor):
        return tree.to(torch.float32) if tree.dtype is torch.float16 else tree
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(_widened, tree))
    if isinstance(tree, dict):
        return {key: _widened(value) for key, value in tree.items()}
    return torch.float32 if tree is torch.float16 else tree
