"""Whether `polymp doctor` is right: its ratios and its advice against a measurement of its own.

For twelve linear layers, `polymp doctor --shapes` says in one process what bfloat16 and float16
take of float32's time, and which dtype to use. Later, another process measures the same layers in
turn, in a region as a user has it. Held to bars are how far the ratios are from each other, and
what the advised dtype takes of float32's time. A second run of doctor has too little time to
measure all of them, so that it predicts the others; how far off these are is held to what doctor
says of itself. The measurement is made by several processes, and how far one of them is from the
others is the floor: no prediction can be closer. On a CPU it is processor time, in torch of one
thread.

    python benchmarks/advice.py                          # about a minute for each framework
    python benchmarks/advice.py --framework torch --small --out some.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from pairing import Row, machine, measure, missed, row, save, show, timed

from polymp.speed import product_times

SHAPES = (
    (1, 768, 3072), (1, 2048, 2048), (4, 1024, 4096), (16, 512, 2048),  # few rows
    (32, 64, 64), (64, 64, 64), (128, 128, 128),  # small
    (512, 512, 512), (1024, 1024, 1024),  # square
    (512, 512, 2048), (256, 2048, 512), (2048, 64, 256),  # wide
)  # fmt: skip
SMALL = ((1, 64, 64), (16, 64, 32), (64, 64, 64))
LOW = ("bfloat16", "float16")
RIGHT, HARMLESS = 1.20, 1.05
STATED = -1.0  # the bar is how far off doctor says that the ratio may be
NAMES = {"torch": "PyTorch", "jax": "JAX"}
PROCESSES = 3  # of the measurement
FIGURE = 16e-3  # seconds that a figure of it takes at least
SCARCE = 2.0  # seconds, too few to measure all

NOTES = (
    'A layer "1x768x3072" has 1 row, 768 inputs and 3,072 outputs. Its activation is in the low '
    "dtype; its float32 weight is cast at each call.",
    "`polymp doctor --shapes` predicts the time in one process. Afterwards three other processes "
    "measure it in a region.",
    "To show how far the three processes differ, the figure of each is compared with that of the "
    "other two. The table has the largest difference. A prediction cannot be expected to be closer "
    "than that.",
    "On a CPU the times are processor time: in PyTorch of one thread, in JAX of all threads.",
)

Figures = dict[str, list[float]]


def text(shape: Sequence[int]) -> str:
    """A shape as doctor takes it."""
    return "x".join(map(str, shape))


def doctor(framework: str, shapes: Sequence[Sequence[int]], seconds: float) -> dict[str, Any]:
    """Run doctor in a process of its own."""
    said = _process(
        "-m", "polymp", "doctor", "--json", "--framework", framework,
        "--shapes", ",".join(map(text, shapes)), "--seconds", str(seconds),
    )  # fmt: skip
    (found,) = said["measurements"]
    return dict(found)


def apart(framework: str, shapes: Sequence[Sequence[int]], rounds: int) -> list[dict[str, Figures]]:
    """Milliseconds by shape and dtype, of each of the processes that measure a third.

    Where memory comes from differs between processes; in products of few rows, which have to wait
    for memory, that is up to half of the time.
    """
    argv = (
        str(Path(__file__)), "--apart", framework, "--rounds", str(-(-rounds // PROCESSES)),
        "--shapes", ",".join(map(text, shapes)),
    )  # fmt: skip
    return [_process(*argv) for _ in range(PROCESSES)]


def together(parts: Sequence[dict[str, Figures]]) -> dict[str, Figures]:
    """The figures of several processes as one measurement."""
    return {
        shape: {way: [t for part in parts for t in part[shape][way]] for way in figures}
        for shape, figures in parts[0].items()
    }


def floor(framework: str, parts: Sequence[dict[str, Figures]]) -> list[Row]:
    """How far the ratio that one process measured is from that of the others: the farthest one."""
    rows = []
    for shape, figures in parts[0].items():
        for low in LOW:
            if low not in figures:
                continue
            apart = []
            for part in parts:
                others = together([other for other in parts if other is not part])[shape]
                one = row(shape, part[shape]["float32"], part[shape][low])
                rest = row(shape, others["float32"], others[low])
                apart.append(sorted((one.ratio, rest.ratio)))
            less, more = max(apart, key=lambda pair: pair[1] / pair[0])
            off = more / less
            what = f"{framework} {shape}, {low}: a process / the others"
            rows.append(Row(what, less, more, off, off, off, None, "of float32"))
    return rows


def _process(*argv: str) -> dict[str, Any]:
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.getenv("PYTHONPATH"))))
    run = subprocess.run(
        [sys.executable, *argv],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )
    if not run.stdout:
        raise RuntimeError(f"{' '.join(argv)} failed:\n{run.stderr}")
    return dict(json.loads(run.stdout))


class Layer:
    """A linear layer in a dtype, in the region of a framework.

    Attributes:
        run: runs it.
        finish: waits until it has run; None where it has by then.
        region: that it runs in.
    """

    def __init__(self, framework: str, shape: Sequence[int], dtype: str) -> None:
        self.run, self.finish, self.region = getattr(self, framework)(shape, dtype)

    def torch(self, shape: Sequence[int], dtype: str) -> tuple[Any, ...]:
        import torch

        from polymp.torch import autocast

        m, k, n = shape
        device = _device("torch")
        own = getattr(torch, dtype)
        x, weight = (torch.randn(s, device=device) for s in ((m, k), (n, k)))
        x = x.to(own)
        region = nullcontext() if dtype == "float32" else autocast(device, own)
        finish = torch.cuda.synchronize if device == "cuda" else None
        return lambda: torch.nn.functional.linear(x, weight), finish, region

    def jax(self, shape: Sequence[int], dtype: str) -> tuple[Any, ...]:
        import jax

        from polymp.jax import autocast

        m, k, n = shape
        keys = jax.random.split(jax.random.key(0), 2)
        x, weight = (
            jax.random.normal(key, s) for key, s in zip(keys, ((m, k), (k, n)), strict=True)
        )
        x = x.astype(dtype)

        def product(x: Any, weight: Any) -> Any:
            return x @ weight

        program = jax.jit(product if dtype == "float32" else autocast(product, dtype=dtype))
        last: list[Any] = []

        def run() -> None:
            last[:] = [program(x, weight)]

        return run, lambda: jax.block_until_ready(last), nullcontext()


def measured(framework: str, shape: Sequence[int], rounds: int) -> Figures:
    """A layer in every dtype, in turn."""
    if framework == "torch":
        import torch

        torch.set_num_threads(1)
    clock = time.process_time if _device(framework) == "cpu" else time.perf_counter
    programs = {}
    for dtype in ("float32", *LOW):
        layer = Layer(framework, shape, dtype)
        once = partial(timed, layer.run, clock=clock, finish=layer.finish)
        with layer.region:
            first = min(once(1)() for _ in range(4))
        programs[dtype] = _warm(layer, once(max(1, round(FIGURE / max(first, 1e-7)))))
    return measure(programs, rounds)


def _warm(layer: Layer, once: Callable[[], float]) -> Callable[[], float]:
    """A figure with the layer's numbers in the caches, not those of what ran before."""

    def figure() -> float:
        with layer.region:
            layer.run()
            return once()

    return figure


def _device(framework: str) -> str:
    if framework == "torch":
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    import jax

    return str(jax.default_backend())


def differences(
    framework: str, said: dict[str, Any], found: dict[str, Figures], bar: float | None
) -> list[Row]:
    """How far the ratios that doctor says are from those that were measured, either way."""
    rows = []
    for product in said["products"]:
        shape = text([product[size] for size in "mkn"])
        for low in LOW:
            if low not in product["ratio"]:
                continue
            right = row(shape, found[shape]["float32"], found[shape][low])
            told = product["ratio"][low]
            off = sorted(max(told / r, r / told) for r in (right.low, right.high))
            less, more = sorted((told, right.ratio))
            own = product["spread"][low][1] / told if bar == STATED else bar
            what = f"{framework} {shape}, {low}: larger / smaller"
            rows.append(Row(what, less, more, more / less, *off, own, "of float32"))
    return rows


def advised(
    framework: str, said: dict[str, Any], found: dict[str, Figures], bar: float | None
) -> list[Row]:
    """Rows of the dtypes that doctor advises, beside float32."""
    rows = []
    for product in said["products"]:
        shape = text([product[size] for size in "mkn"])
        own = found[shape][product["use"]]
        what = f"{framework} {shape}, {product['use']}: advised / float32"
        rows.append(row(what, found[shape]["float32"], own, bar))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for, print the tables, save them as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--framework", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--rounds", type=int, default=21, help="paired rounds of the measurement")
    parser.add_argument(
        "--seconds", type=float, default=product_times.BUDGET, help="that doctor has, at first"
    )
    parser.add_argument("--small", action="store_true", help="a try-out: small, with no bars")
    parser.add_argument("--out", type=Path, help="JSON file; default: results/ by date and device")
    parser.add_argument("--apart", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--shapes", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.apart:
        given = {s: [int(n) for n in s.split("x")] for s in args.shapes.split(",")}
        print(json.dumps({s: measured(args.apart, n, args.rounds) for s, n in given.items()}))
        return 0
    records = [held(f, args.rounds, args.seconds, args.small) for f in args.framework]
    tables = {title: rows for record in records for title, rows in record["tables"].items()}
    for title, rows in tables.items():
        show(title, rows)
    device = records[0]["device"]
    record = {
        "machine": machine("torch", "jax", "jaxlib", device=device),
        "rounds": args.rounds,
        "tables": tables,
        "notes": NOTES,
        "directly": {name: got for record in records for name, got in record["directly"].items()},
    }
    path = save("advice", device, record, args.out)
    every = [r for rows in tables.values() for r in rows]
    print(f"Saved {path}. Missed: {', '.join(missed(every)) or 'none'}.")
    return 0


def held(framework: str, rounds: int, seconds: float, small: bool) -> dict[str, Any]:
    """Hold doctor to a measurement of a framework: its device, tables, and shapes.

    Args:
        framework: "torch" or "jax".
        rounds: paired rounds of the measurement.
        seconds: that doctor has, at first.
        small: a try-out, with few shapes and no bars.
    """
    shapes = SMALL if small else SHAPES
    right, harmless, stated = (None, None, None) if small else (RIGHT, HARMLESS, STATED)
    name = NAMES[framework]
    said = doctor(framework, shapes, 0.5 if small else seconds)
    scarce = said if small else doctor(framework, shapes, SCARCE)
    parts = apart(framework, shapes, rounds)
    found = together(parts)
    scarce = scarce | {"products": [p for p in scarce["products"] if not p["measured"]]}
    again = [_renamed(r, f"in {SCARCE} s, ") for r in differences(framework, scarce, found, stated)]
    return {
        "device": said["device"],
        "tables": {
            f"{name}: predicted against measured": differences(framework, said, found, right),
            f"{name}: the advised dtype": advised(framework, said, found, harmless),
            f"{name}: predicted against measured, without time to measure all": again,
            f"{name}: the floor, one process of the measurement against the others": floor(
                framework, parts
            ),
        },
        "directly": {framework: [p["shape"] for p in said["products"] if p["measured"]]},
    }


def _renamed(r: Row, start: str) -> Row:
    return Row(start + r.what, r.base, r.ours, r.ratio, r.low, r.high, r.bar, r.unit)


if __name__ == "__main__":
    sys.exit(main())
