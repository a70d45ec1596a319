"""How fast small JAX programs of all kinds run under autocast, beside float32.

The programs are the corpus on which autocast is tested: networks of several libraries, loops,
branches, solvers, and functions with derivative rules of their own. Each is jitted with its
gradient and compiled four times, twice in float32 and twice under autocast; which comes first
changes from program to program. All four run in turn, in a process of their own: what else a
process holds moves a program of 30 us by up to a half. The ratio is that of the medians of both
autocast programs and of both float32 ones; the ratio of the two float32 programs shows how noisy a
row is. A program of 30 us runs a fifth faster or slower after another compilation: all is compiled
and measured `--passes` times, and of each program the pass with the median ratio counts.

    python benchmarks/jax_corpus.py                     # about 15 minutes on two cores
    python benchmarks/jax_corpus.py --programs mlp,cnn --out /tmp/some.json
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from pairing import Row, machine, measure, missed, row, save, show

from polymp.jax import autocast

os.environ.setdefault("KERAS_BACKEND", "jax")
sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.jax.corpus import Program, corpus
from tests.support.jax.corpus_runs import problem

EACH_BAR, MEDIAN_BAR = 1.1, 1.0
FIGURE = 2e-3  # seconds that a figure takes at least
TITLE = "Small programs of all kinds: results and gradients"
FULL, OURS = ("float32", "float32 again"), ("autocast", "autocast again")
COMPILED = (FULL[0], OURS[0], FULL[1], OURS[1])


class Running:
    """A program with its gradient, compiled, that runs several times for a figure."""

    def __init__(
        self, program: Program, fn: Callable[..., Any], clock: Callable[[], float]
    ) -> None:
        self.x64, self.clock = program.x64, clock
        with jax.enable_x64(self.x64):
            it = problem(program.name)
            leaves, _ = it.inputs()
            self.args = leaves, jnp.float32(1)
            self.compiled = jax.jit(partial(it.graded(fn))).lower(*self.args).compile()
            jax.block_until_ready(self.compiled(*self.args))
            self.inner = 1
            self.inner = max(1, round(FIGURE / min(self() for _ in range(5))))

    def __call__(self) -> float:
        with jax.enable_x64(self.x64):
            start = self.clock()
            for _ in range(self.inner):
                jax.block_until_ready(self.compiled(*self.args))
            return (self.clock() - start) / self.inner


def measured(name: str, rounds: int, clock: Callable[[], float], first: int) -> tuple[Row, Row]:
    """The rows of a program: autocast / float32, and float32 again / float32.

    Args:
        name: of a program of the corpus.
        rounds: how many figures each compiled program gives.
        clock: what a figure is read from.
        first: which of `COMPILED` is compiled first, by number.
    """
    corpus()  # in a process of its own
    program, fn = problem(name).program, problem(name).fn
    made = {}
    for kind in COMPILED[first:] + COMPILED[:first]:
        made[kind] = Running(program, autocast(fn) if kind in OURS else fn, clock)
    ms = measure({kind: made[kind] for kind in COMPILED}, rounds, warm=1)
    times = {kind: [1e3 * t for t in ms[kind]] for kind in COMPILED}
    plain, ours = ([t for kind in kinds for t in times[kind]] for kinds in (FULL, OURS))
    what = f"{program.name}: {{}} / float32"
    return (
        row(what.format("autocast"), plain, ours, EACH_BAR, "us"),
        row(what.format("float32 again"), *(times[kind] for kind in FULL), None, "us"),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for, print the tables, save them as JSON; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", default="", help="some of the corpus, by name")
    parser.add_argument("--rounds", type=int, default=31, help="paired rounds")
    parser.add_argument("--passes", type=int, default=3, help="odd: how often all is compiled")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall",
                        help="processor: the time of all threads, for a busy machine")  # fmt: skip
    parser.add_argument("--out", type=Path, help="JSON file; default: results/ by date and device")
    args = parser.parse_args(argv)
    known = {program.name: program for program in corpus()}
    names = args.programs.split(",") if args.programs else list(known)
    if unknown := set(names) - set(known):
        parser.error(f"--programs: the corpus has no {', '.join(sorted(unknown))}")
    asked = [known[name] for name in names]
    there = [program for program in asked if not program.missing()]
    lost = {p.name: f"{p.needs} is not installed" for p in asked if p.missing()}
    clock = time.process_time if args.clock == "processor" else time.perf_counter
    tries: dict[str, list[tuple[Row, Row]]] = {program.name: [] for program in there}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["jax_corpus", *sorted({p.needs for p in there} - {"jax"})])
    for turn in range(args.passes):
        with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
            for i, program in enumerate(there, start=turn):
                which = program.name, args.rounds, clock, i % len(COMPILED)
                ours, again = pool.submit(measured, *which).result()
                tries[program.name].append((ours, again))
                print(f"{ours.ratio:6.2f} {again.ratio:6.2f}  {program.name}", flush=True)
    pairs = [
        sorted(each, key=lambda pair: pair[0].ratio)[len(each) // 2] for each in tries.values()
    ]
    middle = [statistics.median(r.ratio for r in rows) for rows in zip(*pairs, strict=True)]
    of_all = f"median of {len(there)} programs: {{}} / float32"
    rows = [
        row(of_all.format("autocast"), [1.0], [middle[0]], MEDIAN_BAR, ""),
        row(of_all.format("float32 again"), [1.0], [middle[1]], None, ""),
        *(r for pair in pairs for r in pair),
    ]
    show(TITLE, rows)
    print(f"Bars missed: {'; '.join(missed(rows)) or 'none'}.")
    device = jax.default_backend()
    packages = ("jax", "jaxlib", *sorted({program.needs for program in there} - {"jax"}))
    record = {
        "machine": machine(*packages, device=device),
        "clock": args.clock,
        "rounds": args.rounds,
        "passes": args.passes,
        "tables": {TITLE: rows},
        "missing": lost,
    }
    save("jax-corpus", device, record, args.out)
    return int(bool(missed(rows)))


if __name__ == "__main__":
    sys.exit(main())
