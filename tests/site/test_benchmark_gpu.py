"""benchmarks/gpu.py: steps that end with a result on disk, whatever becomes of the call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import need
from tests.support import gpu_steps, processes
from tests.support.benchmarks import benchmark
from tests.support.blocks import ROOT

JOURNAL = "gpu-cpu.jsonl"


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    need("rich")
    return benchmark("gpu")


@pytest.fixture(scope="module")
def journal() -> ModuleType:
    return benchmark("gpu_steps.journal")


@pytest.fixture(scope="module")
def plan() -> ModuleType:
    return benchmark("gpu_steps.plan")


# --- the dry run ----------------------------------------------------------------------------------


@pytest.mark.long
def test_the_dry_run(tmp_path: Path, plan: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Every step that makes sense on a CPU, at tiny sizes; and the page that is made of them."""
    for name in ("torch", "jax", "flax", "optax", "matplotlib", "rich", "tqdm"):
        need(name)
    done = processes.python("benchmarks/gpu.py", "--device", "cpu", "--out", tmp_path, code=None)
    log = (tmp_path / "gpu-cpu.log").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log[-3000:]
    with capsys.disabled():
        print(f"\ndry run of make gpu: {done.stdout.strip().splitlines()[len(plan.STEPS)]}")
    entries = {e["step"]: e for e in map(json.loads, (tmp_path / JOURNAL).read_text().splitlines())}
    assert entries.keys() == {step.name for step in plan.STEPS}
    for step in plan.STEPS:
        entry = entries[step.name]
        wanted = "absent" if step.cuda or not step.dry else "done"
        assert (entry["status"], bool(entry["why"])) == (wanted, wanted == "absent"), step.name
    page = (tmp_path / "speed.md").read_text()
    for text in ("## PyTorch", "## JAX", "## Every op on a GPU", "### Tests that need a GPU"):
        assert text in page
    ops = entries["ops, torch"]["record"]["lists"]["Ops on this device, against torch.autocast"]
    assert [line["different"] for line in ops] == [0, 0]
    assert all(line["same bits"] == line["calls"] > 50 for line in ops)


def test_every_code_of_a_step_is_in_the_dry_run_or_needs_cuda(plan: ModuleType) -> None:
    dry = {step.run for step in plan.STEPS if step.dry and not step.cuda}
    assert {step.run for step in plan.STEPS if not step.cuda} == dry
    names = [step.name for step in plan.STEPS]
    assert len(set(names)) == len(names)


def test_steps_name_functions_that_are_there(plan: ModuleType) -> None:
    need("torch")
    need("jax")
    for step in plan.STEPS:
        module, _, function = step.run.partition(":")
        assert callable(getattr(benchmark(module), function)), step.name


class Event:
    """torch.cuda.Event, as if a millisecond passed between any two."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return 1.0


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the calls of torch.cuda that the steps make, so that they run without a GPU."""
    import torch

    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1_000_000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 6_000_000)
    monkeypatch.setattr(torch.cuda, "Event", Event)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("stand_in")
def test_recurrent_layers_of_a_gpu_on_a_stand_in() -> None:
    for name in ("torch", "jax"):
        need(name)
    import torch

    from tests.support.torch.onednn import need_lstm

    need_lstm(torch.bfloat16)
    here = benchmark("gpu_steps.worker").Here("cpu", small=True)
    rows, _ = benchmark("gpu_steps.torch_questions").recurrent(here)["lists"].values()
    assert len(rows) == 6
    assert all(row["same bits as torch.autocast"] for row in rows[::3])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("stand_in")
def test_steps_that_need_cuda_run_on_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their code, at tiny sizes on a CPU; not what it measures."""
    for name in ("torch", "jax", "optax", "matplotlib", "tqdm"):
        need(name)
    import torch

    here = benchmark("gpu_steps.worker").Here("cpu", small=True)
    scaler = benchmark("gpu_steps.torch_scaler")
    capturable = (torch.optim.AdamW, {"foreach": True})  # torch has the other for accelerators
    monkeypatch.setitem(scaler.OPTIMIZERS, "AdamW, capturable", capturable)
    found = {
        "launches": scaler.launches(here, (2,)),
        "undone": scaler.undone_steps(here, 1),
        "reads": benchmark("gpu_steps.jax_questions").host_reads(here),
    }
    rows = {name: next(iter(result["lists"].values())) for name, result in found.items()}
    assert {name: len(lines) for name, lines in rows.items()} == {
        "launches": 6, "undone": 3, "reads": 3,
    }  # fmt: skip
    assert rows["undone"][0]["peak memory, MB"] == 5.0

    workloads = benchmark("workloads_torch")
    assert workloads.timed_by_events(lambda: None, 1)() == pytest.approx(1e-3 / 10)
    program = workloads.make("train", "polymp", workloads.SMALL, "cpu")
    assert workloads.allocated(program, 1_000_000) == 5_000_000
    assert workloads.kernels(program) == 0
    assert workloads.host_sync(program) == ""

    exactness = benchmark("gpu_steps.exactness")
    ops = ["mm", "acos"]
    real = exactness.outcomes(ops, "cpu", lambda low: torch.autocast("cpu", low))
    line, *_ = exactness.fake_against(ops, real)["Fake tensors against real ones"]
    assert line["calls"] == line["the same"] + line["different"] + line["raise with data alone"]
    assert line["the same"] > 0, "mm is low on both devices"
    assert line["different"] > 0, "acos is float32 on CUDA alone"


# --- killed and resumed ---------------------------------------------------------------------------


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.gpu_steps", str(folder), *arguments]
    path = os.pathsep.join((str(ROOT / "benchmarks"), str(ROOT)))
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def until(true: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not true():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return status == "Z"


@pytest.mark.one_in(3)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("at", [0, 1, 3], ids=["in the first step", "in the second", "in the last"])
def test_killed_it_goes_on_where_it_was_and_the_page_is_whole(tmp_path: Path, at: int) -> None:
    need("rich")
    names = gpu_steps.NAMES
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        for name in names if folder is whole else names[:at]:
            (folder / f"{name}.go").touch()
    call = started(killed)
    began = killed / f"{names[at]}.began"
    until(lambda: began.exists() and began.read_text() != "", call)
    call.send_signal(signal.SIGKILL)
    call.communicate()
    assert len((killed / JOURNAL).read_text().splitlines() if at else ()) == at
    worker = int(began.read_text())
    while not gone(worker):  # it ends with the call, in the middle of its step
        time.sleep(0.01)
    if at:  # the write of an entry that was cut short
        with (killed / JOURNAL).open("a") as file:
            file.write('{"step": "' + names[at])
    for name in names:
        (killed / f"{name}.began").unlink(missing_ok=True)
        (killed / f"{name}.go").touch()
    for folder, arguments in ((killed, ["--resume"]), (whole, [])):
        call = started(folder, *arguments)
        said, _ = call.communicate()
        assert call.returncode == 0, said
    again = [name for name in names if (killed / f"{name}.began").exists()]
    assert again == list(names[at:]), "a step that had ended ran again, or one was left out"
    for name in ("speed.md", *(p.relative_to(whole) for p in whole.glob("results/*.json"))):
        assert (killed / name).read_text() == (whole / name).read_text()
    assert all(f"| {name}: ours / base |" in (killed / "speed.md").read_text() for name in names)


# --- one step -------------------------------------------------------------------------------------


@pytest.fixture
def call(gpu: ModuleType, journal: ModuleType, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def run(*steps: Any, minutes: float = 1.0) -> dict[str, Any]:
        made = gpu.Call("cpu", minutes, journal.Journal(tmp_path / JOURNAL))
        made.run(steps)
        return dict(journal.Journal(tmp_path / JOURNAL).entries)

    return run


def step(plan: ModuleType, name: str, run: str, seconds: int = 60, **more: Any) -> Any:
    return plan.Step(name, "part", f"tests.support.gpu_steps:{run}", seconds, "one", **more)


def test_a_step_that_raises_dies_or_takes_too_long_costs_no_other(
    plan: ModuleType, call: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    given = {"folder": str(tmp_path), "name": "x"}
    entries = call(
        step(plan, "raises", "fail"),
        step(plan, "dies", "die"),
        step(plan, "holds", "measure", 1, args=given | {"holds": True}),
        step(plan, "lacks", "measure", needs=("no_such_package",)),
        step(plan, "ends", "measure", args=given),
    )
    assert {e.step: (e.status, e.why) for e in entries.values()} == {
        "raises": ("failed", "ValueError: no such thing"),
        "dies": ("failed", "its process ended with exit code 7"),
        "holds": ("failed", "it took longer than 1 seconds"),
        "lacks": ("absent", "no_such_package is not installed"),
        "ends": ("done", ""),
    }


def test_what_the_clock_leaves_no_time_for_is_left(
    plan: ModuleType, call: Callable[..., dict[str, Any]], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    given = {"folder": str(tmp_path), "name": "x", "holds": True}
    entries = call(
        step(plan, "long", "measure", 60, args=given),
        step(plan, "cut", "measure", 3, args=given),
        minutes=5 / 60,
    )
    assert entries == {}
    said = capsys.readouterr().out
    assert "long: no time left for it" in said
    assert "cut: cut short by the clock" in said


def test_what_failed_comes_last(gpu: ModuleType, journal: ModuleType, tmp_path: Path) -> None:
    made = journal.Journal(tmp_path / JOURNAL)
    first, second, *_ = gpu.STEPS
    made.add(journal.Entry(first.name, first.part, "failed", 1.0, "why"))
    made.add(journal.Entry(second.name, second.part, "done", 1.0))
    assert gpu.to_do(made) == [*gpu.STEPS[2:], first]


# --- journal and records --------------------------------------------------------------------------


def test_a_torn_line_is_dropped(journal: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / JOURNAL
    made = journal.Journal(path)
    made.add(journal.Entry("a", "part", "done", 1.0, record={"tables": {}}))
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole + whole.replace(b'"a"', b'"b"')[:cut])
        assert list(journal.Journal(path).entries) == (["a"] if cut < len(whole) else ["a", "b"])
        assert path.read_bytes() == whole


def test_records_of_the_same_part_are_put_together(journal: ModuleType) -> None:
    def entry(name: str, **record: Any) -> Any:
        return journal.Entry(name, "part", "done", 1.0, record=record)

    (record,) = journal.put_together([
        entry("a", tables={"T": [{"what": 1}]}, notes=["n"], machine={"versions": {"torch": "2"}}),
        entry("b", tables={"T": [{"what": 2}]}, notes=["n"], machine={"versions": {"jax": "1"}}),
        journal.Entry("c", "part", "failed", 1.0, "it fell over"),
    ]).values()  # fmt: skip
    assert record["tables"] == {"T": [{"what": 1}, {"what": 2}]}
    assert record["notes"] == ["n"]
    assert record["machine"] == {"versions": {"torch": "2", "jax": "1"}}
    assert record["missing"] == {"c": "it fell over"}


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--page"], "has no steps. Run make gpu first, or name its --out."),
        (
            ["--only", "flying"],
            "--only 'flying': no step that is left has it in its name; see --list.",
        ),
        (["--resume", "--fresh"], "--fresh: not allowed with argument --resume"),
    ],
)
def test_bad_arguments_say_what_to_write(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str],
    said: str,
) -> None:  # fmt: skip
    with pytest.raises(SystemExit) as caught:
        gpu.main(["--device", "cpu", "--out", str(tmp_path), *arguments])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_journal_is_not_overwritten_by_accident(
    gpu: ModuleType, journal: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal.Journal(tmp_path / JOURNAL).add(journal.Entry("machine", "gpu-machine", "done", 1.0))
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu", "--out", str(tmp_path)])
    said = capsys.readouterr().err
    assert f"has 1 of {len(gpu.STEPS)} steps. Write --resume to go on with it, or --fresh" in said


def test_without_a_gpu_it_says_so(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(gpu, "gpu_there", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main(["--out", str(tmp_path)])
    assert (
        "there is no NVIDIA GPU here. Write --device cpu for a dry run." in capsys.readouterr().err
    )


def test_what_is_missing_is_named_with_its_version(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        raise gpu.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(gpu.importlib.metadata, "version", version)
    assert gpu.main(["--needs"]) == 0
    said = capsys.readouterr().out.split()
    pins = (ROOT / "constraints.txt").read_text().split()
    assert {line for line in said if line.startswith(("jmp==", "hypothesis==", "flax=="))} <= set(
        pins
    )
    assert {"accelerate==1.15.0", "jaxamp==0.0.4", "mixed-precision-for-JAX==0.1.8"} <= set(said)
    assert all("==" in line for line in said)


# --- exactness: it can fail -----------------------------------------------------------------------


def test_a_wrong_bit_or_dtype_is_noticed() -> None:
    need("torch")
    exactness = benchmark("gpu_steps.exactness")
    run_ops = exactness.run_ops
    seen = exactness.Seen("float32", (1,), (1,), False, False, "torch.strided", b"\0\0\x80\x3f")
    case = run_ops.Case("mm", 0, "all float32", "bfloat16")

    def compared(**changes: Any) -> dict[str, int]:
        wrong = exactness.replace(seen, **changes)
        right, other = ({case: exactness.Outcome((value,))} for value in (seen, wrong))
        line, rows = exactness.against(right, right, other)
        assert len(rows) == line["different"]
        return dict(line)

    assert compared()["same bits"] == 1
    assert compared(bits=b"\1\0\x80\x3f")["different"] == 1
    assert compared(dtype="float16")["different"] == 1
