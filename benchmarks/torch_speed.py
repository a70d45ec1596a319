"""How fast torch programs run in every precision and every wrapper, and what memory they take.

Each way of each workload runs in a process of its own, which is asked for a run in its turn; the
ratio of the medians is what counts, and the middle half of the paired ratios stands beside it. On a
CPU with one thread it is processor time, else the clock on the wall. Peak memory is measured in
further processes, as `workloads_torch.peak` says. On a GPU its own clock counts, and memory and
kernels of every run are measured, and what waits for the GPU is named. What cannot be run is
recorded with the reason.

    pip install -r benchmarks/requirements-torch.txt     # accelerate, Lightning Fabric
    python benchmarks/torch_speed.py                     # about 5 minutes on two cores
    python benchmarks/torch_speed.py --workloads "mlp 1,lora" --threads 1 --out some.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pairing import Row, machine, measure, missed, row, save, show
from ways_torch import COMPILED, GRAPHED
from workloads_torch import LARGE, SMALL, Size

BASE, HAND = "torch.autocast", "by hand"
WIDE = "by hand, float32 gradients"  # what accumulation has by hand, with autocast's gradients
# What is left of frozen weights, and of a region, if nothing of polymp runs: the floor of both.
LOW, ONE = "torch.autocast, low weights", "torch.autocast, one region"
USUAL = ("fp32", HAND, BASE, "polymp")
FROZEN = "frozen"
HALVES = ("torch.autocast, float16, GradScaler", "polymp, float16, GradScaler")
WRAPPERS = ("accelerate", "Lightning Fabric")
PEERS = (*WRAPPERS, "TransformerEngine", "Apex O1")  # run by the interpreter of --peers
MEMORY = "memory"

# Of workers on a CPU. Memory that a program frees stays in its process, as it does with jemalloc
# and tcmalloc. With glibc's defaults it depends on what ran before whether the system has to clear
# the memory of each cast, which takes longer than the cast. Compiling takes no further processes.
SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
# Where memory is measured, it leaves the process: a peak is then of what is in use.
FOR_PEAKS = SETTINGS | {"MALLOC_MMAP_THRESHOLD_": str(2**16)}


@dataclass(frozen=True)
class Plan:
    """A workload and the way it is measured.

    Attributes:
        title: of its table; `Size` goes in.
        ways: those beside fp32, by hand, torch.autocast and polymp.
        compiled: those that are also measured compiled.
        inner: runs for one figure.
        threads: on a CPU; the bars are those of one thread.
        devices: where it is measured unless it is asked for by name.
    """

    title: str
    ways: tuple[str, ...]
    compiled: tuple[str, ...] = ()
    inner: int = 1
    threads: tuple[int, ...] = (1,)
    devices: tuple[str, ...] = ("cpu", "cuda")


TRAIN = (*HALVES, *WRAPPERS, "Apex O1")
PLANS = {
    **{
        f"mlp {batch}": Plan(
            f"MLP: {{linears}} x Linear({{features}}), batch {batch}, inference",
            (FROZEN, LOW, *WRAPPERS, "TransformerEngine") if batch == 1 else (FROZEN,),
            ("fp32", HAND, BASE, "polymp", FROZEN, LOW) if batch == 1 else (),
            5,
            (1, 2) if batch == 1 else (1,),
        )
        for batch in (1, 8, 32, 64)
    },
    "train": Plan(
        "Language model: a train step of {sequences} x {context} tokens",
        TRAIN,
        ("fp32", HAND, BASE, "polymp"),
    ),
    "train deep": Plan(
        "Language model, {deep_layers} layers of width {deep_width}: a train step of {batch} x "
        "{context} tokens",
        TRAIN,
        ("fp32", HAND, BASE, "polymp"),
        devices=("cuda",),
    ),
    **{
        name: Plan(
            f"Language model: {{batch}} microbatches of 1 x {{{tokens}}} tokens and a step",
            (WIDE, ONE, *WRAPPERS),
            threads=threads,
        )
        for name, tokens, threads in (
            ("accumulate", "context", (1, 2)),
            ("accumulate short", "short", (1,)),
        )
    },
    **{
        name: Plan(f"Language model: {{decoded}} tokens decoded one by one, {where}", (FROZEN, LOW))
        for name, where in (("decode", "a region for each"), ("generate", "in one region"))
    },
    "convnet train": Plan("Convnet: a train step of {images} x 3 x 32 x 32", ()),
    "convnet": Plan("Convnet: one picture, inference", (FROZEN, LOW), inner=5),
    **{
        name: Plan(
            f"LoRA: a step of 1 x {{{tokens}}} tokens, adapters of rank {{rank}} on attention",
            (FROZEN,),
            threads=threads,
        )
        for name, tokens, threads in (("lora", "context", (1, 2)), ("lora short", "short", (1,)))
    },
}
PEAKS = {"mlp 1": (HAND, "polymp", FROZEN), "decode": (HAND, "polymp", FROZEN)}

BARS = {
    f"mlp 1: {FROZEN} / {BASE}": 0.35,
    **{f"{name}: {FROZEN} / {HAND}": 1.05 for name in ("mlp 1", "decode", "convnet")},
    **{f"{name}: frozen / {BASE}": 0.70 for name in ("lora", "lora short")},
    f"train: polymp / {BASE}": 1.02,
    f"peak memory, mlp 1: frozen / {BASE}": 0.55,
    f"peak memory, decode: frozen / {BASE}": 0.55,
}

NOTES = (
    'The low dtype is bfloat16. In the rows "by hand", trained weights also have a float32 master '
    "copy.",
    "On a CPU the times are processor time of one thread, unless the row names a number of "
    "threads.",
    "The language model is that of examples/train_torch.py with {layers} layers, {heads} heads and "
    "width {width}, unless the title says otherwise. Decoding uses a cache of keys and values. "
    "Every step uses fused AdamW.",
    "Each program runs in its own process; the processes run alternately.",
    "On a CPU, memory that a program frees stays in its process, as it does with jemalloc or "
    "tcmalloc. With glibc's defaults, large casts can take several times as long: the system then "
    "clears their memory each time.",
)


class Failed(Exception):
    """A worker could not do what it was asked; the text says why."""


class Worker:
    """A process that runs programs in one way; see `workloads_torch.main`."""

    def __init__(
        self, way: str, device: str, size: Size, python: str, settings: dict[str, str] = SETTINGS
    ) -> None:
        self.way = way
        self.said = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [python, str(Path(__file__).parent / "workloads_torch.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
            text=True,
            env=os.environ | (settings if device == "cpu" else {}),
        )
        self.send(way=way, device=device, size=asdict(size))

    def send(self, **request: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `receive` says why
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def receive(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            self.said.seek(0)
            last = self.said.read().strip().rpartition("\n")[2]
            raise Failed(f"its process ended with exit code {code}: {last}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer["is"]

    def ask(self, **request: Any) -> Any:
        self.send(**request)
        return self.receive()

    def seconds(self) -> float:
        return float(self.ask(do="run"))

    def close(self) -> None:
        self.process.communicate()
        self.said.close()


class Bench:
    """Workers by way, and what has been found.

    Attributes:
        tables: title -> rows.
        missing: what could not be measured -> why.
        host_sync: on a GPU, workload and way -> what it waited for; "" if nothing.
        versions: of packages, by way.
    """

    def __init__(
        self,
        device: str,
        size: Size,
        rounds: int,
        threads: Sequence[int],
        peers: str,
        compiler: str,
    ) -> None:
        self.device, self.size, self.rounds, self.threads = device, size, rounds, threads
        self.peers, self.compiler = peers, compiler
        self.workers: dict[str, Worker] = {}
        self.tables: dict[str, list[Row]] = {}
        self.missing: dict[str, str] = {}
        self.host_sync: dict[str, str] = {}
        self.versions: dict[str, dict[str, str]] = {}

    def worker(self, way: str) -> Worker:
        if way not in self.workers:
            python = self.peers if way in PEERS else sys.executable
            self.workers[way] = Worker(way, self.device, self.size, python)
        return self.workers[way]

    def lost(self, what: str, way: str, error: Failed) -> None:
        self.missing[f"{what}: {way}"] = str(error)
        if self.workers[way].process.poll() is not None:
            self.workers.pop(way).close()

    def made(self, name: str, ways: Sequence[str], threads: int, inner: int) -> list[Worker]:
        """Workers that have the workload, all of them asked before the first has answered."""
        asked = [self.worker(way) for way in ways]
        for worker in asked:
            worker.send(do="make", workload=name, threads=threads, inner=inner)
        ready = []
        for worker in asked:
            try:
                self.versions[worker.way] = worker.receive()
                ready.append(worker)
            except Failed as error:
                self.lost(name, worker.way, error)
        return ready

    def workload(self, name: str, plan: Plan) -> None:
        """Measure a workload in all ways, eager and compiled, and show it."""
        self.eager(name, plan)
        if self.compiler:
            self.compiled(name, plan)
        title = self.title(plan)
        show(title, self.tables[title])

    def title(self, plan: Plan) -> str:
        return plan.title.format(**asdict(self.size))

    def eager(self, name: str, plan: Plan, usual: tuple[str, ...] = USUAL) -> None:
        """Measure a workload in all ways, and on a GPU look inside.

        Args:
            name: of the workload.
            plan: of it, with its own ways.
            usual: the ways of every workload.
        """
        rows = self.tables.setdefault(self.title(plan), [])
        chosen = [n for n in plan.threads if n in self.threads]
        for threads in chosen if self.device == "cpu" else [1]:
            what = name if threads == 1 else f"{name}, {threads} threads"
            ways = (*usual, *plan.ways)
            if threads > 1:  # wrappers are there for their overhead, which one thread has
                ways = tuple(way for way in ways if way not in PEERS)
            ready = self.made(name, ways, threads, plan.inner)
            rows += compared(what, self.times(ready))
            if self.device == "cuda":
                rows += self.inside(name, ready)
            self.drop(ready)

    def compiled(self, name: str, plan: Plan, suffix: str = COMPILED) -> None:
        """Measure a workload compiled, in those ways in which it is planned to be."""
        rows = self.tables.setdefault(self.title(plan), [])
        ready = self.made(name, [way + suffix for way in plan.compiled], 1, plan.inner)
        rows += compared(name, self.times(ready))
        if self.device == "cuda":
            rows += self.inside(name, ready)
        self.drop(ready, close=True)

    def times(self, ready: Sequence[Worker]) -> dict[str, list[float]]:
        return measure({w.way: w.seconds for w in ready}, self.rounds, 2) if ready else {}

    def inside(self, name: str, ready: Sequence[Worker]) -> list[Row]:
        """Kernels and memory of a run on a GPU; and what of a run waits for it."""
        asked = {
            "kernels": (f"kernels, {name}", "kernels", 1.0),
            "memory": (f"peak memory, {name}", "MB", 1e6),
        }
        rows = []
        for do, (what, unit, divide) in asked.items():
            found: dict[str, list[float]] = {}
            for worker in ready:
                try:
                    found[worker.way] = [worker.ask(do=do) / divide]
                except Failed as error:
                    self.missing[f"{what}: {worker.way}"] = str(error)
            rows += compared(what, found, unit)
        for worker in ready:
            try:
                self.host_sync[f"{name}: {worker.way}"] = worker.ask(do="host_sync")
            except Failed as error:
                self.missing[f"waits, {name}: {worker.way}"] = str(error)
        return rows

    def peak(self, name: str, ways: Sequence[str]) -> list[Row]:
        """Peak memory, in a new process for each way."""
        found: dict[str, list[float]] = {}
        for way in (BASE, *ways):
            worker = Worker(way, self.device, self.size, sys.executable, FOR_PEAKS)
            try:
                found[way] = [worker.ask(do="peak", workload=name) / 1e6]
            except Failed as error:
                self.missing[f"peak memory, {name}: {way}"] = str(error)
            worker.close()
        return compared(f"peak memory, {name}", found, "MB")

    def drop(self, workers: Sequence[Worker], close: bool = False) -> None:
        for worker in workers:
            worker.ask(do="drop")
            if close:
                self.workers.pop(worker.way).close()

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def compared(what: str, found: dict[str, list[float]], unit: str = "ms") -> list[Row]:
    """A row for each way beside torch.autocast, and for what is kept beside the module by hand.

    Compiled ways are compared with the compiled ones, and with eager torch.autocast nowhere.
    """
    rows = []
    suffix = next((s for s in (GRAPHED, COMPILED) if any(w.endswith(s) for w in found)), "")
    for base, ways in ((BASE, found), (HAND, [way + suffix for way in (FROZEN, LOW)])):
        for way in ways:
            if way in found and base + suffix in found and way != base + suffix:
                name = f"{what}: {way} / {base}{suffix}"
                rows.append(row(name, found[base + suffix], found[way], BARS.get(name), unit))
    for ours, theirs in (reversed(HALVES), (ONE, WIDE)):
        if theirs in found and ours in found:
            name = f"{what}: {ours} / {theirs}"
            rows.append(row(name, found[theirs], found[ours], BARS.get(name), unit))
    return rows


def unmeasured(bench: Bench) -> dict[str, float]:
    """Bars of what was asked for that have no row."""
    whats = {r.what for rows in bench.tables.values() for r in rows}
    asked = {what.partition(":")[0] for what in whats}
    asked |= {what.partition(":")[0] for what in bench.missing}
    return {w: bar for w, bar in BARS.items() if w.partition(":")[0] in asked and w not in whats}


def main() -> int:
    """Run what was asked for, print the tables, save them as JSON; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", default="", help="all of the device's, or some of: "
                        + ", ".join((*PLANS, MEMORY)))  # fmt: skip
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=12, help="paired rounds")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2],
                        help="on a CPU: 1 alone where other programs keep it busy")  # fmt: skip
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON",
                        help="an interpreter that has requirements-torch.txt")  # fmt: skip
    parser.add_argument("--eager", action="store_true", help="leave compiled programs out")
    parser.add_argument("--small", action="store_true", help="tiny models: to see that it runs")
    parser.add_argument("--out", type=Path, help="JSON file; default: results/ by date and device")
    args = parser.parse_args()
    usual = [name for name, plan in PLANS.items() if args.device in plan.devices]
    usual += [MEMORY] if args.device == "cpu" else []  # on a GPU every workload has its own
    names = args.workloads.split(",") if args.workloads else usual
    if args.small and args.out is None:
        parser.error("--small: give --out, as its figures are not to be kept with the others")
    if unknown := set(names) - {*PLANS, MEMORY}:
        parser.error(f"--workloads: {', '.join(sorted(unknown))} is none of {', '.join(PLANS)}, "
                     f"{MEMORY}")  # fmt: skip
    compiler = "" if args.eager else shutil.which(os.environ.get("CXX", "g++")) or ""
    size = SMALL if args.small else LARGE if args.device == "cuda" else Size()
    bench = Bench(args.device, size, args.rounds, args.threads, args.peers, compiler)
    if not compiler:
        why = "--eager was asked for" if args.eager else "no C++ compiler is there"
        bench.missing["compiled programs"] = why
    try:
        for name in names:
            if name in PLANS:
                bench.workload(name, PLANS[name])
    finally:
        bench.close()
    if MEMORY in names and args.device == "cpu":
        title = "Peak memory of inference"
        bench.tables[title] = [r for name, ways in PEAKS.items() for r in bench.peak(name, ways)]
        show(title, bench.tables[title])
    return report(bench, args.out)


def report(bench: Bench, out: Path | None) -> int:
    """Print what is missing and what is missed, and save it all."""
    missing = once_a_way(bench.missing)
    lost = missed(r for rows in bench.tables.values() for r in rows)
    for what, why in missing.items():
        print(f"Not measured: {what}: {why}")
    print(f"Bars missed: {'; '.join(lost) or 'none'}.")
    gone = unmeasured(bench)
    print(f"Bars not measured: {'; '.join(gone) or 'none'}.")
    where = machine("torch", device=bench.device)
    here = where["versions"]
    notes = [note.format(**asdict(bench.size)) for note in NOTES]
    for way, there in bench.versions.items():
        if there["torch"] != here["torch"]:
            notes.append(f"{way} ran with torch {there['torch']}.")
        where["versions"] = there | where["versions"]
    record = {
        "machine": where,
        "size": bench.size,
        "rounds": bench.rounds,
        "compiler": bench.compiler and "inductor",
        "tables": bench.tables,
        "host_sync": bench.host_sync,
        "missing": missing,
        "unmeasured": gone,
        "notes": notes,
    }
    save("torch-speed", bench.device, record, out)
    return int(bool(lost or gone))


def once_a_way(missing: dict[str, str]) -> dict[str, str]:
    """The figures that are missing, by way and reason, with their workloads."""
    found: dict[tuple[str, str], list[str]] = {}
    for what, why in missing.items():
        name, _, way = what.rpartition(": ")
        found.setdefault((way, why), []).append(name)
    return {
        f"{way} ({', '.join(filter(None, names))})" if any(names) else way: why
        for (way, why), names in found.items()
    }


if __name__ == "__main__":
    sys.exit(main())
