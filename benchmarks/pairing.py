"""The base of every benchmark here: programs measured in turn, and ratios of their medians.

Programs that are compared run in one process, one after the other, many rounds; each round starts
with another one, so that a machine which slows down slows them all. What counts is the ratio of
the medians. The middle half of the paired ratios, one of each round, stands beside it.

A record, as `save` writes it to benchmarks/results, is read by speed_page.py:

    part, device, date    also in its name: <date>-<part>-<device>.json
    machine               see `machine`
    tables                title -> rows, each as `Row` has it; ratios, to be compared with bars
    lists                 optional: title -> rows, as mappings of columns; shown as they are
    missing               optional: what could not be measured -> why
    reasons               optional: what of a row whose bar is missed -> why it is
    notes                 optional: sentences about how it was measured
    unmeasured            optional: what of a row that is missing -> its bar
    host_sync             optional: a program -> what it waits for on a GPU; "" for nothing
    missed                what of each row whose bar is missed

and whatever else a benchmark wants to keep.
"""

import dataclasses
import importlib.metadata
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # also where polymp is not installed
import polymp
from polymp.backends import MULTIPLY_BFLOAT16, processor

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"

Timed = Callable[[], float]  # runs a program once; returns the seconds that count


@dataclass(frozen=True)
class Row:
    """One comparison: ours against a base, and the bar it is held to.

    Attributes:
        what: "program: ours / base", as a rule. No two rows of a record have the same.
        base: the median of the base, in `unit`.
        ours: the median of ours, in `unit`.
        ratio: ours / base; less is better.
        low: the lower quartile of the paired ratios.
        high: the upper one.
        bar: the most that `ratio` may be, if anything.
        unit: of `base` and `ours`.
    """

    what: str
    base: float
    ours: float
    ratio: float
    low: float
    high: float
    bar: float | None = None
    unit: str = "ms"

    @property
    def met(self) -> bool | None:
        """Whether the ratio is at most the bar; None without one. NaN meets none."""
        return None if self.bar is None else self.ratio <= self.bar


def timed(
    program: Callable[[], Any],
    inner: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    finish: Callable[[], Any] | None = None,
) -> Timed:
    """A program as `measure` wants it.

    Args:
        program: what to run.
        inner: how often, for one figure: the mean.
        clock: `time.process_time` for the processor time of all threads, which other programs on
            the machine disturb least.
        finish: waits for what the program has started, as `torch.cuda.synchronize` does; it is
            called before the first look at the clock, too.
    """

    def once() -> float:
        if finish is not None:
            finish()
        start = clock()
        for _ in range(inner):
            program()
        if finish is not None:
            finish()
        return (clock() - start) / inner

    return once


def measure(programs: dict[str, Timed], rounds: int, warm: int = 3) -> dict[str, list[float]]:
    """Times in milliseconds of programs that run in turn; each round starts with another one.

    Args:
        programs: by name.
        rounds: how many figures for each.
        warm: how often each runs before, in turn, to compile and to settle.

    Returns:
        As many figures as there are rounds, for each name; the i-th ones belong together.
    """
    names = list(programs)
    for name in names * warm:
        programs[name]()
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(programs[name]() * 1e3)
    return times


def in_processes(function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """Results of calls, in their order, from a process for each core; not for what is timed.

    Args:
        function: of a module that can be imported.
        calls: the arguments of each.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        yield from pool.map(function, *zip(*calls, strict=True))


def row(
    what: str,
    base: Sequence[float],
    ours: Sequence[float],
    bar: float | None = None,
    unit: str = "ms",
) -> Row:
    """The ratio of the medians of paired figures, and the quartiles of the paired ratios.

    Raises:
        ValueError: there are no figures, or not as many of one as of the other.
    """
    if not base or len(base) != len(ours):
        raise ValueError(f"{what}: {len(ours)} figures of ours and {len(base)} of the base")
    ratios = sorted(o / b for o, b in zip(ours, base, strict=True))
    a, b = statistics.median(base), statistics.median(ours)
    quarter = len(ratios) // 4
    return Row(what, a, b, b / a, ratios[quarter], ratios[-1 - quarter], bar, unit)


def missed(rows: Iterable[Row]) -> list[str]:
    """The names of the rows that miss their bar."""
    return [r.what for r in rows if r.met is False]


def machine(*packages: str, device: str = "cpu") -> dict[str, Any]:
    """The machine and the versions of a measurement.

    Args:
        packages: names of distributions whose versions are kept, if they are installed; polymp's
            always is.
        device: "cpu", or "cuda" (JAX's "gpu" too) for the name of the GPU; torch or jax, whichever
            is imported, is asked for it, or else nvidia-smi.

    Returns:
        kind, architecture (with the CPU's features that multiply bfloat16), cores (that this
        process may use), load (of the last five minutes), python and versions.
    """
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["polymp"] = polymp.__version__
    kind, features = processor()
    low = [name for name in MULTIPLY_BFLOAT16 if name in (features or ())]
    return {
        "kind": kind if device == "cpu" else _gpu(),
        "architecture": ", ".join([platform.machine(), *low]),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[1], 1),
        "python": platform.python_version(),
        "versions": found,
    }


def _gpu() -> str:
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    if jax is not None:
        return str(jax.devices()[0].device_kind)
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return said.partition("\n")[0]


def save(
    part: str,
    device: str,
    data: dict[str, Any],
    out: Path | None = None,
    date: str = "",
    folder: Path = RESULTS,
) -> Path:
    """Write a record, dataclasses as their fields; see the top of this file.

    Args:
        part: the benchmark, as "torch-speed".
        device: "cpu" or "cuda"; JAX's "gpu" is "cuda" here, so that one column has both. A CPU
            with AMX has a record of its own, "amx".
        data: machine, tables, and the rest.
        out: the file; by default one in `folder`, by date, part and device.
        date: of the figures, as "2026-11-22"; by default today's.
        folder: where a record without `out` goes.

    Raises:
        ValueError: two rows have the same `what`, or a reason is given for a row that is not there.
    """
    device = "cuda" if device == "gpu" else device
    if device == "cpu" and "amx_bf16" in (processor()[1] or ()):
        device = "amx"
    rows = [r for table in data.get("tables", {}).values() for r in table]
    names = [r.what for r in rows]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{part}: more than one row for {', '.join(sorted(twice))}")
    known = {*names, *data.get("unmeasured", ())}
    if unknown := set(data.get("reasons", ())) - known:
        raise ValueError(f"{part}: a reason, but no row, for {', '.join(sorted(unknown))}")
    date = date or f"{datetime.now(UTC):%Y-%m-%d}"
    path = out or folder / f"{date}-{part}-{device}.json"
    record = {"part": part, "device": device, "date": date, **data, "missed": missed(rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2, default=plain) + "\n")
    return path


def plain(value: Any) -> dict[str, Any]:
    """A dataclass as its fields, for `json.dumps`; raises TypeError for anything else."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise TypeError(f"no JSON for {value!r}")
    return dataclasses.asdict(value)


def show(title: str, rows: Sequence[Any]) -> None:
    """Print rows as a table, ratios first, and whether bars are met.

    Dataclasses of any other kind are printed with a column for each field.
    """
    if not rows:
        return
    from rich.console import Console  # here, so that measuring needs no package
    from rich.table import Table

    table = Table(title=title)
    if isinstance(rows[0], Row):
        columns: Sequence[str] = ("what", "ratio", "middle half", "bar", "", "base", "ours", "unit")
        cells = [_cells(r) for r in rows]
    else:
        names = [field.name for field in dataclasses.fields(rows[0])]
        columns = [name.replace("_", " ") for name in names]
        cells = [[_cell(getattr(r, name)) for name in names] for r in rows]
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for line in cells:
        table.add_row(*line)
    Console(width=130).print(table)


def _cells(r: Row) -> list[str]:
    verdict = {None: "", True: "met", False: "missed"}[r.met]
    bar = "" if r.bar is None else f"{r.bar:.2f}"
    spread = f"{r.low:.3f} - {r.high:.3f}"
    return [r.what, f"{r.ratio:.3f}", spread, bar, verdict, number(r.base), number(r.ours), r.unit]


def number(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case dict():
            return ", ".join(f"{n} {name}" for name, n in value.items())
        case float():
            return number(value)
        case int():
            return f"{value:,}"
    return str(value)
