"""Records of runs of a made-up model: layers of `norm`, `linear`, `gelu` and `add`, in numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from polymp.diagnostics.run_record import (
    INPUT,
    RESULT,
    Options,
    RecordedArray,
    RecordedStep,
    RecordWriter,
    RunRecord,
    Summaries,
)

SIZE = 16


def summary(array: Any) -> tuple[tuple[float, ...], int, int]:
    """The values of one array, how many elements are zero, and how many are not finite."""
    one = Summaries()
    one.add(array)
    return one.read()[0]


HEADER = {
    "framework": "torch",
    "versions": {"torch": "2.13.0"},
    "model": "Model",
    "device": "cpu",
    "threads": 1,
    "probes": 8,
    "modules": [],
    "rank": 0,
    "ranks": 1,
}
# One call of a run: name, module, what it makes of what it reads, and the places of these.
Call = tuple[str, str, Callable[..., Any], tuple[int, ...]]


def calls(layers: int, module: str = "blocks.{}", epsilon: float = 1e-5) -> list[Call]:
    """The model: its input and, for each layer, its weight and four calls."""
    made: list[Call] = [("operand 1 of norm", "", lambda: normal(0, 8), ())]
    last = 0
    for layer in range(layers):
        path, at = module.format(layer), len(made)
        made += [
            ("weight", f"{path}.linear", lambda seed=layer + 1: normal(seed, SIZE) / SIZE**0.5, ()),
            ("layer_norm", f"{path}.norm", lambda x: normed(x, epsilon), (last,)),
            ("linear", f"{path}.linear", lambda w, x: x @ w, (at, at + 1)),
            ("gelu", f"{path}.gelu", lambda x: x / (1 + np.exp(-1.702 * x)), (at + 2,)),
            ("add", path, lambda x, y: x + y, (last, at + 3)),
        ]
        last = at + 4
    return made


def normal(seed: int, rows: int) -> Any:
    return np.random.default_rng(seed).standard_normal((rows, SIZE))


def normed(x: Any, epsilon: float) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)


def ran(program: Sequence[Call], seed: int, roundoff: float) -> list[Any]:
    rng = np.random.default_rng(seed)
    arrays: list[Any] = []
    for _, _, fn, reads in program:
        x = fn(*(arrays[r] for r in reads))
        if reads:
            x = x * (1 + roundoff * rng.uniform(-1, 1, x.shape))
        arrays.append(x)
    return arrays


def arrays(
    program: Sequence[Call], seed: int = 0, dtype: str = "float32", probes: int = 8
) -> list[RecordedArray]:
    roundoff = {"float32": 2.0**-24, "bfloat16": 2.0**-9}[dtype]
    base = ran(program, seed, roundoff)
    moved = [ran(program, 1000 + 100 * seed + k, roundoff) for k in range(probes)]
    made = []
    for at, (name, module, _, reads) in enumerate(program):
        values, zeros, bad = summary(base[at])
        changes = [np.subtract(summary(run[at])[0], values) for run in moved]
        spread = tuple(np.sqrt(np.mean(np.square(changes), 0)).tolist()) if probes else ()
        made.append(
            RecordedArray(
                kind=RESULT if reads else INPUT,
                name=name if reads or "operand" in name else f"{module}.{name}",
                module=module,
                source=f"model.py:{10 + at}" if reads else "",
                direction="forward",
                rule="",
                inputs=(dtype,) * len(reads),
                run=dtype,
                dtype=dtype,
                shape=base[at].shape,
                zeros=zeros,
                bad=bad,
                own=roundoff / 3**0.5 if reads else 0.0,
                reads=reads,
                values=values,
                spread=spread,
            )
        )
    return made


def record(
    *steps: Sequence[RecordedArray],
    name: str = "one.rec",
    numbers: Sequence[int] = (),
    **header: Any,
) -> RunRecord:
    """A record of steps, as `run_record.read` returns it."""
    numbered = zip(numbers or range(len(steps)), steps, strict=True)
    made = tuple(RecordedStep(n, tuple(each), {}, {}) for n, each in numbered)
    return RunRecord(HEADER | header, made, name)


def written(path: Path, made: RunRecord) -> Path:
    """The path of a file with the record."""
    header = dict(made.header)
    options = Options(path, header.pop("probes"), tuple(header.pop("modules")), 1, None)
    writer = RecordWriter(options, lambda: header)
    for step in made.steps:
        writer.write(step)
    return path


@cache
def pair(layers: int = 4, epsilon: float = 1e-5) -> tuple[RunRecord, RunRecord]:
    """Two runs, the other one with another epsilon in its norms."""
    other = record(arrays(calls(layers, epsilon=epsilon), 2), name="other.rec")
    return record(arrays(calls(layers), 1)), other
