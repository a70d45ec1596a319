"""A record of a run in a file: of each array that its calls make, a few numbers, not the array.

    RecordWriter(options, described).write(step)     one line of JSON for each step
    read(path) -> RunRecord

An array is summed up by `VALUES` numbers in float64: four that do not depend on the order of its
elements, some projections, which do, and some of its elements. A projection is the sum of all
elements, each with a sign that depends on its place alone, over the root of their number: its
square is, in the mean over signs, the array's mean square. So any difference between two arrays
shows in a projection as large as its root mean square: `compare` needs no arrays.

`spread` has, for the same numbers, how far rounding moves them: the root mean square change over
the probes, runs whose every result was moved by its rounding (`rounding`); of the magnitude, that
of the largest element, and of projections, that of all. Nothing here knows a framework.
"""

import base64
import json
import math
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polymp.diagnostics.page import replacing
from polymp.errors import RecordError, brief
from polymp.rules import scopes
from polymp.versions import __version__

FORMAT = 5  # of the file; a reader refuses files of another

# The numbers of an array, by place; each is of its finite elements, the others count as 0.
AMAX, RMS, MEAN, MEAN_MAGNITUDE = range(4)
ORDERLESS = slice(0, 4)  # these four
PROJECTIONS = slice(4, 12)
ELEMENTS = slice(12, 20)
VALUES = 20
MOST = 1e30  # of `RecordedArray.terms` and shares of spreads: its square is a float, too
BLOCK = 4096  # elements in a block; a sign is one of its block times one of the place in it

# Kinds of arrays.
INPUT, RESULT, GRADIENT, UPDATE = "input", "result", "gradient", "update"

# Of compiled code only the results of a whole graph are recorded, as those of an op of this name;
# it is the reason for the other calls that are left out, too.
COMPILED = "compiled"
# Why probes do not know some results, whose spread is Inf.
FAILS = "ops that fail in probes"


class RecordedArray(NamedTuple):
    """One array of a run."""

    # INPUT: an array that no recorded call made, a parameter among them. RESULT: the first float
    # result of a call. GRADIENT: of a parameter, after the step. UPDATE: the change of a parameter,
    # or of a running mean.
    kind: str
    # The op in the vocabulary, or the framework's name of it; of others the name of the array: the
    # path of a parameter, or "operand 1 of linear".
    name: str
    module: str  # path of the module that the call is in; "" outside of all
    source: str  # file and line: "train.py:12"; "" if not known
    direction: str  # "forward", "backward" or "recompute"
    rule: str  # that the call ran by; "" outside of regions
    inputs: tuple[str, ...]  # dtypes of the call's float inputs
    run: str  # dtype that it computed in
    dtype: str  # of the array
    shape: tuple[int, ...]
    zeros: int  # how many elements are zero
    bad: int  # how many are Inf, NaN or a mask's: see `masks_as_inf`
    own: float  # how far the call's own rounding moves an element, relative to `RMS`; 0 of inputs
    reads: tuple[int, ...]  # places of the recorded arrays that the call reads
    values: tuple[float, ...]  # VALUES numbers
    spread: tuple[float, ...] = ()  # the same; () without probes, Inf if it is not known
    # Without probes, of a sum: the size of its terms, which may cancel, relative to `RMS`, or 1.
    terms: float = 1.0

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class RecordedStep(NamedTuple):
    """One step of a run."""

    number: int
    arrays: tuple[RecordedArray, ...]  # inputs where they are first read, then as the calls ran
    # Of the optimizers that stepped: "AdamW 1" -> {"lr": 1e-3, "eps": 1e-8, ...}.
    settings: Mapping[str, Mapping[str, Any]]
    left_out: Mapping[str, int]  # reason -> number of calls that are not in `arrays`


class RunRecord(NamedTuple):
    """A record that was read."""

    # "framework", "versions", "model", "device", "threads", "probes", "modules", "rank", "ranks"
    header: Mapping[str, Any]
    steps: tuple[RecordedStep, ...]  # those that were written whole, in order
    name: str = "record"  # of its file, for messages
    cut: bool = False  # True if the file ends in a step that is not whole


@cache
def signs(blocks: int) -> tuple[Any, Any]:
    """Ones, for a sum, and the signs of projections: [9, blocks] and [9, BLOCK], each 1 or -1."""
    # Element i of an array has, in projection k, the sign of its block times that of its place in
    # it: `one[k, i // BLOCK] * other[k, i % BLOCK]`.
    count = PROJECTIONS.stop - PROJECTIONS.start
    x = np.arange(blocks * count + BLOCK * count, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)  # splitmix64
    bits = ((x >> np.uint64(63)).astype(np.float64) * 2 - 1).reshape(-1, count)
    outer, inner = (np.insert(each.T, 0, 1, 0) for each in (bits[BLOCK:], bits[:BLOCK]))
    return np.ascontiguousarray(outer), np.ascontiguousarray(inner)


@cache
def places(count: int) -> Any:
    """The places of the elements that are kept of an array, in row-major order."""
    most = ELEMENTS.stop - ELEMENTS.start
    return np.arange(most) * (count - 1) // (most - 1)


class Summaries:
    """The values of numpy arrays, how many elements are zero, and how many are not finite."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._scales: list[float] = []
        self._elements: list[Any] = []
        # By their width: blocks of many arrays are summed up together, for of small arrays a call
        # of numpy takes longer than the sums.
        self._rows: dict[int, _Rows] = {}

    def add(self, array: Any) -> int:
        """Add a numpy array, which may be written afterwards; the place of its summary."""
        row, at = array.reshape(-1), len(self._sizes)
        size, scale = len(row), 1.0
        if row.dtype == np.float64:  # squares of other dtypes are in its range
            top = np.abs(row).max(initial=0.0, where=np.isfinite(row))
            if top and not 1e-120 < top < 1e120:
                row, scale = row / top, float(top)
        self._sizes.append(size)
        self._scales.append(scale)
        self._elements.append(row[places(size)] if size else _NO_ELEMENTS)
        width = _SHORT if size <= _SHORT else BLOCK
        if width not in self._rows:
            self._rows[width] = _Rows(width)
        self._rows[width].add(row, at)
        return at

    def read(self) -> list[tuple[tuple[float, ...], int, int]]:
        """The summaries of all."""
        if not self._sizes:
            return []
        found, padded = np.zeros((len(self._sizes), _SUMS)), np.array(self._sizes)
        for rows in self._rows.values():
            of, sums = rows.read()
            starts = np.flatnonzero(np.diff(of, prepend=-1))
            found[of[starts]] = np.add.reduceat(sums, starts)
            found[of[starts], 0] = np.maximum.reduceat(sums[:, 0], starts)
            padded[of[starts]] = np.diff(starts, append=len(of)) * rows.width
        sizes = np.maximum(self._sizes, 1)
        top, square, total = found[:, :3].T
        projections, magnitude = found[:, 3:-3] / np.sqrt(sizes)[:, None], found[:, -3]
        ends = np.stack([top, np.sqrt(square / sizes), total / sizes, magnitude / sizes], 1)
        elements = np.nan_to_num(np.array(self._elements, np.float64), posinf=0.0, neginf=0.0)
        values = np.concatenate([ends, projections, elements], 1)
        with np.errstate(over="ignore"):  # of the largest numbers of float64
            values *= np.array(self._scales)[:, None]
        zeros, bad = found[:, -2:].T.astype(int)
        zeros -= bad + padded - self._sizes
        return [*zip(map(tuple, values.tolist()), zeros.tolist(), bad.tolist(), strict=True)]


_SHORT = 256  # elements of the arrays that wait for others in shorter rows than a block
_TOGETHER = 24 * BLOCK  # elements that are summed up together, while a processor's cache has them
_SUMS = 14  # top, square, sum, projections, sum of magnitudes, zeros, bad
_NO_ELEMENTS = np.zeros(ELEMENTS.stop - ELEMENTS.start)


class _Rows:
    """Blocks of arrays that wait to be summed up, and the sums of those that were."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._waiting = np.empty((_TOGETHER // width, width))
        self._count = 0  # rows that wait
        self._of: list[tuple[int, int]] = []  # arrays, and how many rows each has
        self._sums: list[Any] = []

    def add(self, row: Any, array: int) -> None:
        """Add the blocks of an array."""
        blocks = max(-(-len(row) // self.width), 1)
        self._of.append((array, blocks))
        start = 0
        while start < blocks:
            end = min(blocks, start + len(self._waiting) - self._count)
            part = row[start * self.width : end * self.width]
            room = self._waiting[self._count : self._count + end - start].reshape(-1)
            room[: len(part)], room[len(part) :] = part, 0.0
            self._count, start = self._count + end - start, end
            if self._count == len(self._waiting):
                self._sum_up()

    def _sum_up(self) -> None:
        """Sum up what waits."""
        wide = self._waiting[: self._count]
        sums = np.zeros((self._count, _SUMS))
        sums[:, 1] = _squares(wide)
        if not math.isfinite(sums[:, 1].sum()):
            finite = np.isfinite(wide)
            sums[:, -1] = self.width - np.count_nonzero(finite, axis=1)
            wide[~finite] = 0.0
            sums[:, 1] = _squares(wide)
        sums[:, 2:-3] = wide @ signs(1)[1].T[: self.width]
        sizes = np.abs(wide, out=wide)
        sums[:, 0], sums[:, -3] = sizes.max(1), sizes @ np.ones(self.width)
        if not sizes.min(1).all():
            sums[:, -2] = np.count_nonzero(sizes == 0, axis=1)
        self._sums.append(sums)
        self._count = 0

    def read(self) -> tuple[Any, Any]:
        """The array of each row, and its sums."""
        if self._count:
            self._sum_up()
        (arrays, rows), sums = np.array(self._of, int).T, np.concatenate(self._sums)
        block = np.arange(len(sums)) - np.repeat(np.cumsum(rows) - rows, rows)  # of each row
        sums[:, 2:-3] *= signs(1 << int(block.max()).bit_length())[0].T[block]
        return np.repeat(arrays, rows), sums


def _squares(rows: Any) -> Any:
    """The sum of the squares of each row, in the order of BLAS."""
    return (rows[:, None] @ rows[:, :, None])[:, 0, 0]


# The largest number of a mask, and the largest magnitude of the scores beside it.
MASKED, _SCORES = -8e3, 1e3


def masks_as_inf(x: Any, xp: Any, number: bool = False) -> Any:
    """An array of the forward pass in which the numbers of a mask, such as -1e9, are -Inf."""
    # They mean the same, and scores that are added to them lose all digits. An array has others
    # beside them, or else is a `number`; log-likelihoods may be as large.
    masked = x <= MASKED
    others = xp.amax(xp.abs(xp.where(masked, 0, x)))
    mask = (others <= _SCORES) & (number | ~masked.all())
    return xp.where(masked & mask, -math.inf, x)


# The same with the functions of a framework, `xp`: of an array on a device, and how far that is
# moved. All is relative to the largest magnitude, so that no square leaves the range of its dtype.


class Looks(NamedTuple):
    """The signs that rows of one length are multiplied by, and places of elements, as arrays."""

    outer: Any  # [9, blocks or more]: `signs`
    inner: Any  # [9, BLOCK]
    places: Any  # [8]


def looks_of(count: int) -> Looks:
    """`Looks` of rows of so many numbers, in numpy."""
    return Looks(*signs(1 << (count // BLOCK).bit_length()), places(count))


def _projected(x: Any, looks: Looks) -> Any:
    """The sum of a row, and its projections, not divided yet: [9]."""
    whole, outer, inner = len(x) // BLOCK, looks.outer.T, looks.inner.T
    end = x[whole * BLOCK :]
    found = (end @ inner[: len(end)]) * outer[whole]
    if whole:
        blocks = x[: whole * BLOCK].reshape(whole, BLOCK)
        found = found + ((blocks @ inner) * outer[:whole]).sum(0)
    return found


def sums_of(x: Any, looks: Looks, xp: Any) -> Any:
    """The values of a row, and how many are zero and not finite: [VALUES + 2]."""
    count, finite = x.shape[-1], xp.isfinite(x)
    counts = xp.stack([(x == 0).sum(), (~finite).sum()])
    x = xp.where(finite, x, 0)
    top = xp.amax(xp.abs(x))
    scale = xp.where(top > 0, top, 1)
    one = x / scale
    total = _projected(one, looks)
    ends = [top / scale, xp.sqrt(xp.mean(one * one)), total[0] / count, xp.mean(xp.abs(one))]
    numbers = xp.concatenate([xp.stack(ends), total[1:] / math.sqrt(count)]) * scale
    return xp.concatenate([numbers, x[looks.places], counts])


def changes(x: Any, by: Any, places: Any, xp: Any) -> Any:
    """How far a row is moved in others, relative to its largest magnitude: sums, a row of each."""
    # `by` has the differences of the numbers, for differences of sums lose digits. Both are finite;
    # what is not is not moved. Where the framework can, `by` is written into: to get other memory
    # takes longer than the sums.
    largest = xp.argmax(xp.abs(x))
    top = xp.abs(x[largest])
    scale = xp.where(top > 0, top, 1)
    x = x / scale
    by /= scale
    norm = xp.linalg.vector_norm(by, axis=-1)
    ends = [by[..., largest], norm, xp.sum(by, -1), by @ xp.sign(x), by @ x]
    return xp.concatenate([xp.stack(ends, -1), by[..., places]], -1)


def spread(sums: Any, values: Sequence[float], size: int) -> tuple[float, ...]:
    """The root mean square movement of the `values` of an array, over the rows of its `changes`."""
    changed, top = np.empty((len(sums), VALUES)), values[AMAX] or 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        largest, norm, total, magnitude, along = sums[:, :5].T.astype(np.float64)
        changed[:, AMAX], changed[:, ELEMENTS] = largest, sums[:, 5:]
        changed[:, MEAN], changed[:, MEAN_MAGNITUDE] = total / size, magnitude / size
        changed[:, PROJECTIONS] = norm[:, None] / math.sqrt(size)  # in the mean over signs
        rms, longer = values[RMS] / top, (norm**2 + 2 * along) / size
        sizes = rms + np.sqrt(np.clip(rms**2 + longer, 0, None))
        changed[:, RMS] = longer / np.where(sizes > 0, sizes, 1)
        found = np.sqrt((changed**2).mean(0)) * top
    # It is not known if numbers of the runs are so far apart that float32 has no squares of them.
    return tuple(found.tolist()) if np.isfinite(found).all() else (math.inf,) * VALUES


# --- files ---------------------------------------------------------------------------------------


class Options(NamedTuple):
    """The options of `record`, checked."""

    path: Path | None
    probes: int
    modules: tuple[str, ...]
    every: int
    steps: int | None


def checked(path: Any, probes: Any, modules: Any, every: Any, steps: Any) -> Options:
    """The options of `record`."""
    if type(probes) is not int or probes:
        _check_number("probes", probes, 2, ", or 0 for none")
    _check_number("every", every, 1)
    if steps is not None:
        _check_number("steps", steps, 1, ", or None for all")
    several = isinstance(modules, Collection) and not isinstance(modules, str)
    if not several or not all(isinstance(pattern, str) for pattern in modules):
        raise TypeError(
            f"record(modules={brief(modules)}): write a list of patterns of module paths, "
            "such as ['blocks.*.attn']."
        )
    for pattern in modules:
        scopes.check(pattern, "record(modules=)")
    return Options(_checked_path(path), probes, tuple(modules), every, steps)


def _check_number(option: str, number: Any, least: int, other: str = "") -> None:
    if type(number) is not int or number < least:
        kind = ValueError if type(number) is int else TypeError
        given = f"{option}={brief(number)}"
        raise kind(f"record({given}): write a whole number from {least} on{other}.")


def _checked_path(path: Any) -> Path | None:
    if path is None:
        return None
    if not isinstance(path, (str, PathLike)):
        raise TypeError(
            f"record(path, ...): {brief(path)} is no path. Write the path of the file "
            "first, or None to keep the record in memory."
        )
    whole = Path(path)
    if whole.is_dir():
        raise RecordError(f"record({str(path)!r}): this is a folder. Write the path of a file.")
    if not whole.resolve().parent.is_dir():
        raise RecordError(
            f"record({str(path)!r}): there is no folder {str(whole.parent)!r}. Make it first."
        )
    return whole


def for_rank(path: str | PathLike[str], rank: int, ranks: int) -> Path:
    """The path of a rank's own record: "run.rank3.rec" of "run.rec", the path itself of one."""
    whole = Path(path)
    return whole if ranks == 1 else whole.with_name(f"{whole.stem}.rank{rank}{whole.suffix}")


class RecordWriter:
    """Writes a record, a line for each step; a kill leaves the steps that were written."""

    def __init__(self, options: Options, described: Callable[[], dict[str, Any]]) -> None:
        self._options = options
        # Makes the header, but for what is in the options, when the first step is whole; a file
        # that is at the path is replaced then.
        self._described = described
        self._header: dict[str, Any] = {}
        self._file: Path | None = None
        self._steps: list[RecordedStep] = []  # without a path
        self._begun = self.written = 0

    def begin(self) -> int | None:
        """The number of the step that begins; None if it is not to be recorded."""
        number, self._begun = self._begun, self._begun + 1
        every, most = self._options.every, self._options.steps
        return None if number % every or (most is not None and self.written >= most) else number

    def write(self, step: RecordedStep) -> None:
        """Add a step; warns if it has no calls."""
        if not step.left_out and not any(a.kind == RESULT for a in step.arrays):
            warnings.warn(
                f"record: step {step.number} has no op calls. What runs in another thread, in "
                "another framework, or outside of the recorder's block, is not recorded.",
                stacklevel=3,
            )
        if not self._header:
            own = {"probes": self._options.probes, "modules": list(self._options.modules)}
            self._header = self._described() | own
        if self._options.path is None:
            self._steps.append(step)
        elif self._file is None:
            file = for_rank(self._options.path, self._header["rank"], self._header["ranks"])
            header = {"polymp record": FORMAT, "polymp": __version__, **self._header}
            with replacing(file) as beside:
                beside.write_text(json.dumps(header) + "\n" + _line(step), encoding="utf-8")
            self._file = file
        else:
            line = _line(step)
            with self._file.open("a", encoding="utf-8") as opened:
                opened.write(line)
                opened.flush()
                os.fsync(opened.fileno())
        self.written += 1

    @property
    def record(self) -> RunRecord:
        """The record so far; of a path, as it was written."""
        if self._file is not None:
            return read(self._file)
        return RunRecord(self._header, tuple(self._steps))


def _line(step: RecordedStep) -> str:
    arrays = step.arrays
    texts: defaultdict[str, int] = defaultdict(lambda: len(texts))  # each once
    at = texts.__getitem__
    # As text: Python's garbage collector would go through lists of lists, and through all else.
    rows = [
        f"[{[*map(at, a[:6] + a[7:9])]},{[*map(at, a.inputs)]},{[*a.shape]},{a.zeros},{a.bad},"
        f"{[*a.reads]}]"
        for a in arrays
    ]
    values = np.array([a.values for a in arrays], "<f8").reshape(-1, VALUES)
    spread = np.array([a.spread or (math.nan,) * VALUES for a in arrays]).reshape(-1, VALUES)
    shares = np.where(np.isinf(spread), spread, np.minimum(spread / _largest(values), MOST))
    data = {
        "step": step.number,
        "settings": step.settings,
        "left out": step.left_out,
        "texts": list(texts),
        "values": _packed(values),
        "own": _packed(np.array([(a.own, a.terms) for a in arrays], "<f4")),
        "spread": _packed(shares.astype("<f4")),
    }
    line = json.dumps(data, separators=(",", ":"), allow_nan=True)
    return f'{line[:-1]},"arrays":[{",".join(rows).replace(" ", "")}]}}\n'


def _largest(values: Any) -> Any:
    """Of which spreads are a share in a file: float32 has not the range of float64."""
    return np.where(values[:, [AMAX]], values[:, [AMAX]], 1.0)


def _packed(numbers: Any) -> str:
    return base64.b64encode(numbers.tobytes()).decode()


def read(path: str | PathLike[str]) -> RunRecord:
    """Read a record, without a last step that is not whole. Nothing in a file is run."""
    name = Path(path).name
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise RecordError(f"{str(path)!r}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise RecordError(f"{name!r} is no record of polymp: it is no text in UTF-8.") from None
    first, *lines = text.split("\n")
    try:
        header = json.loads(first)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or "polymp record" not in header:
        raise RecordError(
            f"{name!r} is no record of polymp: it does not begin as one. Records are written by "
            "polymp.torch.record and polymp.jax.record."
        )
    if header["polymp record"] != FORMAT:
        raise RecordError(
            f"{name!r} is a record of format {header['polymp record']!r}, by polymp "
            f"{header.get('polymp')!r}; this is polymp {__version__}, which reads format {FORMAT}. "
            "Record the run again, or compare with the version that wrote it."
        )
    for key, of in _HEADER.items():
        if not isinstance(header.get(key) or of(), of):
            raise RecordError(f"{name!r} is damaged in line 1: {key} is {header[key]!r}.")
    steps = []
    for at, line in enumerate(lines[:-1], 2):
        try:
            steps.append(_step(line))
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            said = f"{type(error).__name__}: {str(error)[:200]}"
            raise RecordError(f"{name!r} is damaged in line {at}: {said}.") from None
    if not steps:
        raise RecordError(
            f"{name!r} has no whole step: the run ended before its first recorded step did."
        )
    return RunRecord(header, tuple(steps), name, cut=bool(lines[-1]))


# Of the header, what is not text.
_HEADER = {"versions": dict, "modules": list, "probes": int, "rank": int, "ranks": int}
_LARGEST = 2**63  # sizes are below


def _step(line: str) -> RecordedStep:
    data = json.loads(line)
    texts, rows = data["texts"], data["arrays"]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a name is no text")
    values = _unpacked(data["values"], "<f8", len(rows) * VALUES).reshape(-1, VALUES)
    spread = _unpacked(data["spread"], "<f4", len(rows) * VALUES).reshape(-1, VALUES)
    spread = spread * _largest(values)
    own = _unpacked(data["own"], "<f4", 2 * len(rows)).reshape(-1, 2).tolist()
    arrays = []
    for at, (named, dtypes, shape, zeros, bad, reads) in enumerate(rows):
        counts = (zeros, bad, *shape, *reads, *named)
        if not all(isinstance(n, int) and 0 <= n < _LARGEST for n in counts):
            raise TypeError(f"array {at} has a size or a place that is no number")
        if any(r >= at for r in reads):
            raise ValueError(f"array {at} reads one that comes later")
        *call, run, dtype = [texts[i] for i in named]
        inputs, numbers = tuple(texts[i] for i in dtypes), tuple(values[at].tolist())
        moved = () if math.isnan(spread[at][0]) else tuple(spread[at].tolist())
        rest = tuple(shape), zeros, bad, own[at][0], tuple(reads), numbers, moved, own[at][1]
        arrays.append(RecordedArray(*call, inputs, run, dtype, *rest))  # type: ignore[call-arg]
    number, settings, left_out = data["step"], data["settings"], data["left out"]
    tables = (settings, left_out, *settings.values())
    if not isinstance(number, int) or not all(isinstance(table, dict) for table in tables):
        raise TypeError("a step has no number, no settings or no list of what it left out")
    if not all(isinstance(count, int) for count in left_out.values()):
        raise TypeError("a number of calls that are left out is no number")
    return RecordedStep(number, tuple(arrays), settings, left_out)


def _unpacked(text: str, dtype: str, count: int) -> Any:
    numbers = np.frombuffer(base64.b64decode(text, validate=True), dtype)
    if numbers.size != count:
        raise ValueError(f"{numbers.size} numbers where {count} belong")
    return numbers


def selected(paths: Iterable[str], patterns: Sequence[str]) -> frozenset[str]:
    """The module paths that one of some patterns matches; all without patterns."""
    return frozenset(p for p in paths if not patterns or any(scopes.depth(s, p) for s in patterns))


def check_matched(patterns: Sequence[str], paths: Collection[str], model: str) -> None:
    """Refuse patterns of which one matches none of a model's module paths."""
    for pattern in patterns:
        if not selected(["", *paths], [pattern]):
            hint = scopes.hint(pattern, paths, "it has no modules with names.")
            raise RecordError(f"record(modules=): {pattern!r} matches no module of {model}: {hint}")
