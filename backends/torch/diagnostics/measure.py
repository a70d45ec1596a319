"""Magnitudes of the values of tensors, measured on their device without waiting for it.

A measurement is a few small tensors; the host reads all of them at once when a run is over.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from polymp.backends.torch.autocast import dtype_names
from polymp.backends.torch.compat import modes
from polymp.diagnostics.magnitudes import BINS, SHIFT, Magnitudes
from polymp.dtypes import FORMATS

# About so many values of a larger tensor are counted in bins, evenly spaced.
SAMPLE = 4096


def measurable(t: Any) -> bool:
    """Return whether an object is a float tensor that has values in memory."""
    return (
        isinstance(t, torch.Tensor)
        and t.dtype in _MEASURED
        and t.layout is torch.strided
        and t.numel() > 0
        and not t.is_meta
        and modes.is_plain(t)
    )


_MEASURED = frozenset(t for t, name in dtype_names.NAMES.items() if name in FORMATS or t.is_complex)


def real(t: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor's numbers as real ones; another tensor as it is."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def comparable(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor, cast to float32 if torch cannot compare values of its dtype."""
    return real(t) if t.element_size() > 1 else t.to(torch.float32)


class RangeTable:
    """The ends of the values of tensors, called by their numbers.

    A number is no object of its own for Python's garbage collector, as a range is: there are tens
    of thousands of them. Ends on a GPU wait until they are read, all at once.
    """

    def __init__(self) -> None:
        self._ends: list[float] = []  # two for each number
        # By device and dtype, ends that wait, and the numbers that they are of.
        self._waiting = defaultdict[Any, tuple[list[int], list[torch.Tensor]]](lambda: ([], []))
        self.meant: Collection[int] = ()  # whose infinities are a mask's, once that is known

    def add(self, t: torch.Tensor) -> int:
        """Measure the smallest and the largest value, NaN if there is one; return their number."""
        return self._keep(*torch.aminmax(comparable(t)))

    def add_each(self, tensors: Sequence[torch.Tensor]) -> range:
        """Measure tensors; return their numbers, no object for the garbage collector either."""
        for t in tensors:
            self.add(t)
        size = len(self._ends) // 2
        return range(size - len(tensors), size)

    def add_all(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        """Measure tensors; on a GPU all at once, and their largest magnitudes alone."""
        own = list(map(comparable, tensors))
        if all(t.is_cpu for t in own):  # where torch 2.13 takes 25 times as long for these norms
            return list(map(self.add, own))
        return [self._keep(x, x) for x in torch._foreach_norm(own, math.inf)]

    def _keep(self, low: torch.Tensor, high: torch.Tensor) -> int:
        number = len(self._ends) // 2
        if low.is_cpu:
            self._ends += (low.item(), high.item())
        else:
            numbers, ends = self._waiting[low.device, low.dtype]
            numbers.append(number)
            ends += (low, high)
            self._ends += (0.0, 0.0)
        return number

    def read(self, ranges: Iterable[int]) -> list[float]:
        """Return both ends of ranges, one after the other. Waits for the device."""
        for numbers, waiting in filter(any, self._waiting.values()):
            read = torch.stack(waiting).tolist()  # one transfer
            for at, low, high in zip(numbers, read[::2], read[1::2], strict=True):
                self._ends[2 * at : 2 * at + 2] = low, high
            numbers.clear()
            waiting.clear()
        return [x for at in ranges for x in self._ends[2 * at : 2 * at + 2]]


class Lost(NamedTuple):
    """The values of a tensor that are finite or not zero in float32, and Inf or zero in float16."""

    wide: int  # the range of the values in float32, by number
    both: torch.Tensor  # int64 [2], how many of the compared values became Inf, and how many zero
    looked_at: int  # how many values were compared

    @classmethod
    def of(cls, wide: torch.Tensor, low: torch.Tensor, ranges: RangeTable) -> "Lost":
        """Compare a tensor in float32 with the same in float16."""
        some, few = sample(wide), sample(low)
        burst = (few.isinf() & some.isfinite()).sum()
        vanished = ((few == 0) & (some != 0)).sum()
        return cls(ranges.add(wide), torch.stack((burst, vanished)), few.numel())

    @staticmethod
    def read(many: "Sequence[Lost]") -> list[list[int]]:
        """Return `both` of some. Waits for the device."""
        found: list[list[int]] = torch.stack([x.both.cpu() for x in many]).tolist() if many else []
        return found


def sample(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values in one row; of a large tensor about `SAMPLE`, evenly spaced."""
    t = real(t)
    size = t.numel()
    every = max(-(-size // SAMPLE), 1)
    if t.is_contiguous():  # then one op is enough, at half the time
        return t.as_strided((-(-size // every),), (every,))
    return t.reshape(-1)[::every]


def bins_of(values: torch.Tensor) -> torch.Tensor:
    """Return the bins of float32 values, int32, in the memory of the values."""
    return values.view(torch.int32).bitwise_right_shift_(SHIFT).bitwise_and_(BINS - 1)  # no sign


class BinTable:
    """Counts of magnitudes by their bins, in a row for each that asks for one.

    Samples wait until there are many, and are counted together: an op on one of them takes longer
    to call than to compute. They wait in memory that is used again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows = 0
        self._counts: torch.Tensor | None = None
        with torch.inference_mode(False):  # else no op outside of it could write these tensors
            self._waiting = torch.empty(_TOGETHER, dtype=torch.float32, device=device)
        self._end = 0  # of what waits
        self._sizes: list[int] = []  # of the samples that wait
        self._firsts: list[int] = []  # for each of them, where its row begins in the table

    def new_row(self) -> int:
        """Return the number of a row that is not used yet."""
        self._rows += 1
        return self._rows - 1

    def add(self, row: int, t: torch.Tensor) -> None:
        """Count the magnitudes in a sample of a measurable tensor."""
        some = sample(t)
        size = some.numel()
        if self._end + size > _TOGETHER:
            self._count()
        end = self._end + size
        self._waiting[self._end : end].copy_(some)
        self._sizes.append(size)
        self._firsts.append(row * BINS)
        self._end = end

    def _count(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            if self._counts is None or len(self._counts) < self._rows:
                old, rows = self._counts, max(2 * self._rows, 256)
                self._counts = torch.zeros(rows, BINS, dtype=torch.int32, device=self._device)
                if old is not None:
                    self._counts[: len(old)] = old
            places = bins_of(self._waiting[: self._end])
            torch._foreach_add_(places.split(self._sizes), self._firsts)
            ones = torch.ones(1, dtype=torch.int32, device=self._device).expand(len(places))
            self._counts.view(-1).index_add_(0, places, ones)  # bincount would wait
        self._end = 0
        self._sizes, self._firsts = [], []

    def read(self, row: int) -> tuple[int, ...]:
        """Return the counts in a row. Waits for the device."""
        if self._end:
            self._count()
        return (0,) * BINS if self._counts is None else tuple(self._counts[row].tolist())


# Values that are counted together: 1 MB.
_TOGETHER = 2**17


class Tally:
    """Measurements of the results at an op call site, or of a gradient, added up."""

    def __init__(self, table: BinTable, ranges: RangeTable, number: int) -> None:
        self.number = number  # of the op call site in one backward pass, or outside of them
        self.values: int = 0
        self.ranges: list[int] = []  # of the tensors, by number
        self.lost: list[Lost] = []  # of those that were compared with float32
        self.numbers: set[float] = set()  # in the program, that the dtype made zero
        self.reads: set[int] = set()  # of gradients, the sites whose results they were made of
        self._table, self._row = table, table.new_row()
        self._ranges = ranges

    def add(self, t: torch.Tensor, found: int) -> None:
        """Count a tensor's values."""
        self.ranges.append(found)
        self.values += t.numel()
        self._table.add(self._row, t)

    def magnitudes(self) -> Magnitudes:
        """Return what was counted. Waits for the device."""
        burst, vanished = map(sum, zip(*Lost.read(self.lost), strict=True)) if self.lost else (0, 0)
        ends = map(abs, self._ranges.read(x.wide for x in self.lost))
        total = max(sum(x.looked_at for x in self.lost), 1)
        found = Magnitudes.measured(
            self.values,
            self._table.read(self._row),
            self._ranges.read(self.ranges),
            burst / total,
            vanished / total,
            max(filter(math.isfinite, ends), default=0.0) if burst else 0.0,
        )
        rest = self._ranges.read(n for n in self.ranges if n not in self._ranges.meant)
        return found if not all(map(math.isfinite, rest)) else found.unmasked()


class _Memory(NamedTuple):
    """The memory of a tensor, as twins have it."""

    of: Any  # a reference to it
    dtype: torch.dtype  # of the tensor
    numbers: torch.Tensor  # [*rows, values in it]


_SWEEP = 64  # tensors after which twins of freed ones are let go


class Twins:
    """Other numbers in place of tensors, by the memory that these are on; let go with it.

    They lie in memory as the tensor does, so that views of it have views of them.

    Args:
        rows: shape of the numbers for one of the tensor's: [8] for eight of them.
    """

    def __init__(self, *rows: int) -> None:
        self._rows = rows
        self._memory: dict[int, _Memory] = {}  # by key

    def of(self, t: torch.Tensor) -> torch.Tensor | None:
        """Return the numbers of a tensor, [*rows, *t.shape]; None if it has no others."""
        known = self._memory.get(modes.storage_key(t))
        if known is None or known.dtype is not t.dtype:
            return None
        size = known.numbers.shape[-1]
        if t.untyped_storage().nbytes() // t.element_size() != size:  # it was resized
            return None
        strides = *(size for _ in self._rows), *t.stride()
        return known.numbers.as_strided((*self._rows, *t.shape), strides, t.storage_offset())

    def begun(self, t: torch.Tensor) -> torch.Tensor:
        """Return the numbers of a tensor, its own if it has no others yet; they may be written."""
        if (found := self.of(t)) is not None:
            return found
        size = t.untyped_storage().nbytes() // t.element_size()
        flat = t.detach().as_strided((size,), (1,), 0)
        self._keep(t, flat.expand(*self._rows, size).clone())
        return self.begun(t)

    def put(self, t: torch.Tensor, numbers: torch.Tensor) -> None:
        """Give a tensor other numbers, whose memory may be written from now on."""
        if t.is_contiguous() and t.untyped_storage().nbytes() == t.numel() * t.element_size():
            self._keep(t, numbers.reshape(*self._rows, -1).contiguous())
        else:
            self.begun(t).copy_(numbers)

    def _keep(self, t: torch.Tensor, numbers: torch.Tensor) -> None:
        if len(self._memory) % _SWEEP == 0:
            self._memory = {k: it for k, it in self._memory.items() if not it.of.expired()}
        memory = _Memory(modes.storage_reference(t), t.dtype, numbers)
        self._memory[modes.storage_key(t)] = memory

    def forget(self, found: Iterable[torch.Tensor]) -> None:
        """Note that tensors have no other numbers."""
        for t in found:
            self._memory.pop(modes.storage_key(t), None)
