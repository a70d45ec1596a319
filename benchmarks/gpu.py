"""Everything that only a GPU can show, in one call that fits a clock: `make gpu`.

Runs the steps of gpu_steps/plan.py, the most worthwhile first, as many as fit. Each has a budget,
a line on the screen, and its result on disk as soon as it has ended. Needs no environment of its
own: it takes the torch and the jax of the interpreter that runs it, and records what is missing.

    make gpu                                 # 9 minutes
    make gpu ARGS=--resume                   # goes on with the steps that have not run
    make gpu ARGS=--page                     # records and pages of what there is; runs nothing
    make gpu DEVICE=cpu                      # a dry run at tiny sizes; its figures mean nothing
    python benchmarks/gpu.py --needs         # packages to bring along, for Python 3.12
    python benchmarks/gpu.py --list          # the steps and their budgets
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import feature_costs
import speed_page
from gpu_steps.journal import Entry, Journal, Status, save_records
from gpu_steps.plan import RIVALS, STEPS, Step
from pairing import RESULTS, ROOT

HERE = Path(__file__).parent
LEFT = 3.0  # seconds that are kept to end a process and to say so


class Worker:
    """A process that runs steps; see gpu_steps/worker.py.

    Args:
        device: "cuda" or "cpu".
        log: a file for what it prints.
    """

    def __init__(self, device: str, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gpu_steps.worker", device],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env=environment(device),
                start_new_session=True,
            )

    def ask(self, step: Step, seconds: float) -> tuple[Status, str, dict[str, Any]]:
        """Run a step: its status, the reason if it failed, and its record."""
        process = self.process
        assert process.stdin is not None
        assert process.stdout is not None
        request = json.dumps({"run": step.run, "args": step.args}) + "\n"
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(request.encode())
            process.stdin.flush()
        if not select.select([process.stdout], [], [], seconds)[0]:
            self.kill()
            return "failed", f"it took longer than {seconds:.0f} seconds", {}
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            self.kill()
            return "failed", f"its process ended with exit code {process.wait()}", {}
        answer = json.loads(line)
        if "error" in answer:
            return "failed", answer["error"], {}
        return "done", "", answer["is"]

    def kill(self) -> None:
        """End it and everything that it started, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def environment(device: str) -> dict[str, str]:
    """Variables of every process: where to import from, and as much memory as is used."""
    found = dict(os.environ)
    before = [found["PYTHONPATH"]] if found.get("PYTHONPATH") else []
    found["PYTHONPATH"] = os.pathsep.join([str(HERE), str(ROOT), *before])
    found |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        found |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
        found.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    found.setdefault("XLA_FLAGS", "")  # tests would set others, to compile in less time
    return found


class Call:
    """One call: the steps that are left, a clock, and the journal.

    Args:
        device: "cuda" or "cpu".
        minutes: how long it may take.
        journal: where results go.
    """

    def __init__(self, device: str, minutes: float, journal: Journal) -> None:
        self.device, self.journal = device, journal
        self.started = time.monotonic()
        self.end = self.started + 60 * minutes
        self.workers: dict[str, Worker] = {}  # by the name of the process

    def left(self) -> float:
        return self.end - time.monotonic() - LEFT

    def run(self, steps: Sequence[Step]) -> None:
        """Run what fits, in order. A step that is cut short by the clock is left for later."""
        try:
            for at, step in enumerate(steps):
                head = f"[{at + 1:2}/{len(steps)}] {self.clock()}  {step.name}: "
                if why := step.absent(self.device):
                    self.ended(head, Entry(step.name, step.part, "absent", 0.0, why))
                elif self.left() < min(step.seconds / 2, 30):
                    print(f"{head}no time left for it", flush=True)
                else:
                    self.one(head, step)
                if all(step.process != later.process for later in steps[at + 1 :]):
                    self.close(step.process)
        finally:
            for name in list(self.workers):
                self.close(name)

    def one(self, head: str, step: Step) -> None:
        print(head, end="", flush=True)
        start = time.monotonic()
        allowed = min(step.seconds, self.left())
        if step.process not in self.workers:
            log = self.journal.path.with_suffix(".log")
            self.workers[step.process] = Worker(self.device, log)
        status, why, record = self.workers[step.process].ask(step, allowed)
        took = round(time.monotonic() - start, 1)
        if status == "failed":
            self.close(step.process)  # whatever state it is in, the next step starts anew
            if allowed < step.seconds and took >= allowed:
                print("cut short by the clock", flush=True)
                return
        self.ended("", Entry(step.name, step.part, status, took, why, record))

    def ended(self, head: str, entry: Entry) -> None:
        self.journal.add(entry)
        took = f", {entry.seconds:.1f} s" if entry.seconds else ""
        print(f"{head}{entry.status}{took}{': ' if entry.why else ''}{entry.why}", flush=True)

    def close(self, name: str) -> None:
        if name in self.workers:
            self.workers.pop(name).kill()

    def clock(self) -> str:
        spent = round(time.monotonic() - self.started)
        return f"{spent // 60}:{spent % 60:02}"


def to_do(journal: Journal) -> list[Step]:
    """Steps without an entry, then those that failed: another time may be luckier."""
    new = [step for step in STEPS if step.name not in journal.entries]
    failed = [s for s in STEPS if s not in new and journal.entries[s.name].status == "failed"]
    return [*new, *failed]


def write_page(journal: Journal, device: str) -> None:
    """Make the records of what the journal has, and the pages that show them."""
    real = device == "cuda"
    folder = RESULTS if real else journal.path.parent / "results"
    for path in save_records(journal.entries.values(), device, folder):
        print(f"saved {path}")
    if real:
        speed_page.write(RESULTS, speed_page.REASONS, speed_page.PAGE, speed_page.README)
        feature_costs.write()
    else:
        page = journal.path.parent / "speed.md"
        page.write_text(speed_page.page(folder, journal.path.parent / "no reasons"))
        print(f"saved {page}")


def needs() -> Iterator[str]:
    """Packages that steps use and this interpreter lacks, with exact versions."""
    pins = {}
    for path in (ROOT / "constraints.txt", *sorted(HERE.glob("requirements-*.txt"))):
        for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", path.read_text(), re.MULTILINE):
            pins[name.lower().replace("_", "-")] = version
    wanted = dict.fromkeys(name for step in STEPS for name in step.needs)
    for name in (*wanted, *RIVALS):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pin = pins.get(name.lower())
            yield f"{name}=={pin}" if pin else name


def gpu_there() -> bool:
    """Whether an NVIDIA driver shows a GPU, without asking torch or jax."""
    seen = ("/proc/driver/nvidia/version", "/dev/nvidia0")
    return any(Path(path).exists() for path in seen) or shutil.which("nvidia-smi") is not None


def main(argv: Sequence[str] | None = None) -> int:
    """Do what was asked; 1 if a step has failed, 2 for bad arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all steps; %(default)g")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu",
                        help="folder of the journal and the log; build/gpu")  # fmt: skip
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT",
                        help="steps whose name holds one of these, in their order")  # fmt: skip
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--resume", action="store_true", help="go on with the journal in --out")
    what.add_argument("--fresh", action="store_true", help="drop the journal in --out")
    what.add_argument("--page", action="store_true", help="make records and pages; run nothing")
    what.add_argument("--needs", action="store_true", help="list packages that are missing here")
    what.add_argument("--list", action="store_true", help="list the steps")
    args = parser.parse_args(argv)
    if args.list:
        for step in STEPS:
            print(f"{step.seconds:4} s  {step.name}")
        print(f"{sum(s.seconds for s in STEPS):4} s  at most")
        return 0
    if args.needs:
        print(*needs(), sep="\n")
        return 0
    path = args.out / f"gpu-{args.device}.jsonl"
    journal = Journal(path)
    if args.page:
        if not journal.entries:
            parser.error(f"--page: {path} has no steps. Run make gpu first, or name its --out.")
        write_page(journal, args.device)
        return 0
    if args.device == "cuda" and not gpu_there():
        parser.error("there is no NVIDIA GPU here. Write --device cpu for a dry run.")
    if journal.entries and not (args.resume or args.fresh):
        parser.error(
            f"{path} has {len(journal.entries)} of {len(STEPS)} steps. "
            "Write --resume to go on with it, or --fresh to drop it."
        )
    if args.fresh:
        path.unlink(missing_ok=True)
        journal = Journal(path)
    left = to_do(journal)
    steps = list({s.name: s for text in args.only for s in left if text in s.name}.values())
    if not steps and any(args.only):
        texts = ", ".join(map(repr, args.only))
        parser.error(f"--only {texts}: no step that is left has it in its name; see --list.")
    call = Call(args.device, args.minutes, journal)
    call.run(steps)
    failed = [e.step for e in journal.entries.values() if e.status == "failed"]
    gone = len(STEPS) - len(journal.entries)
    print(f"{len(journal.entries)} of {len(STEPS)} steps in {path}, {call.clock()} minutes.")
    if failed:
        print(f"Failed: {'; '.join(failed)}. --resume runs them once more.")
    if gone:
        print(f"{gone} steps are left: --resume goes on; --page shows what there is.")
    else:
        write_page(journal, args.device)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
