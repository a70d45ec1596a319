"""The torch example: a small run from end to end, its parts, and every bad argument."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import need

need("torch")
for name in ("matplotlib", "numpy", "rich", "tqdm"):
    pytest.importorskip(name, reason=f"the examples need {name}")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from matplotlib.image import imread  # noqa: E402

from tests.support import examples  # noqa: E402
from tests.support.examples import EXAMPLES, ROOT, TINY, falls  # noqa: E402

PARTS = ("job", "report", "picture", "train_torch")


def run(*argv: object, **how: Any) -> Any:
    return examples.run("train_torch.py", *argv, **how)


@pytest.fixture(scope="module")
def parts() -> Iterator[argparse.Namespace]:
    """The example's modules, on one thread as in the script."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with examples.modules(*PARTS) as found:
            yield found
    finally:
        torch.set_num_threads(threads)


def arguments(parts: Any, *argv: str) -> argparse.Namespace:
    flags = parts.job.parser("train_torch.py", "", parts.job.SMALL)
    return parts.job.arguments(flags, [*argv, "--quiet"])


def test_that_the_loss_falls_is_no_matter_of_course(parts: Any) -> None:
    args = arguments(parts, *TINY, "--lr", "1e-9")
    text = parts.job.read(None, args.context)
    one = parts.train_torch.train("fp32", text, args, torch.device("cpu"))
    assert not falls(vars(one))


@pytest.mark.long  # test_examples_trained.py runs the same script
def test_another_text_one_dtype_and_a_progress_bar(tmp_path: Path) -> None:
    text = tmp_path / "a [b] $c$ :smile:.txt"
    text.write_text("to be or not to be, that is the question. " * 40)
    done = run(
        *TINY, "--steps", 2, "--dtypes", "bfloat16", "--text", text, "--out", tmp_path / "x.png"
    )
    assert done.returncode == 0
    assert "bf16: 100%" in done.stderr
    assert f"parameters learn {text.name}, 2 times 256 bytes" in done.stdout
    assert f"saved {tmp_path / 'x.png'} and {tmp_path / 'x.json'}" in done.stdout
    assert len(json.loads((tmp_path / "x.json").read_text())["runs"]) == 1


def test_bytes_saved_are_what_the_backward_pass_needs_besides_the_parameters(parts: Any) -> None:
    model = torch.nn.Linear(10, 1, bias=False)

    def saved(forward: Any) -> int:
        return parts.train_torch.bytes_saved(model, forward)

    x = torch.ones(4, 10)
    assert saved(lambda: model.weight.sum()) == 0
    assert saved(lambda: (model.weight * model.weight).sum()) == 0  # the parameter itself
    assert saved(lambda: model(x).sum()) == 4 * 40
    assert saved(lambda: model.weight.half().sin().sum()) == 2 * 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    done = run(*TINY, "--device", "cuda", "--quiet", "--out", tmp_path / "x.png")
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads((tmp_path / "x.json").read_text())
    assert figures["device"] == torch.cuda.get_device_name()
    assert all(falls(one) and one["peak_memory"] > 0 for one in figures["runs"])


def test_the_seed_decides_the_run(parts: Any) -> None:
    def losses(seed: str) -> list[float]:
        args = arguments(parts, *TINY, "--steps", "3", "--seed", seed)
        text = parts.job.read(None, args.context)
        return parts.train_torch.train("fp16", text, args, torch.device("cpu")).train_loss

    assert losses("1") == losses("1") != losses("2")


def test_a_run_that_diverges_is_still_shown(
    parts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*TINY, "--steps", "4", "--lr", "1e30", "--quiet", "--out", str(tmp_path / "x.png")]
    parts.train_torch.main(argv)
    assert "nan" in capsys.readouterr().out
    runs = json.loads((tmp_path / "x.json").read_text())["runs"]
    assert [one["loss"] for one in runs] == [None] * 3
    assert runs[2]["skipped"] == [2, 3, 4]
    assert imread(tmp_path / "x.png").shape == (1140, 1500, 4)


def test_batches_are_runs_of_the_training_text(parts: Any) -> None:
    args = arguments(parts, *TINY, "--steps", "5")
    text = parts.job.read(None, args.context)
    train = text.train.astype(np.uint8).tobytes()
    found = list(parts.job.batches(text, args))
    assert [numbers.shape for numbers in found] == [(8, 33)] * 5
    assert all(row.astype(np.uint8).tobytes() in train for numbers in found for row in numbers)
    again = parts.job.batches(text, args)
    assert all(map(np.array_equal, found, again))


@pytest.mark.parametrize(("size", "context"), [(20, 1), (490, 48), (4321, 48), (510, 50)])
def test_a_tenth_is_held_out(parts: Any, tmp_path: Path, size: int, context: int) -> None:
    path = tmp_path / "text"
    path.write_bytes((b"ab" * size)[:size])
    text = parts.job.read(path, context)
    assert (len(text.train), len(text.held_out)) == (size - size // 10, size // 10)
    args = argparse.Namespace(context=context, held_out=128)
    shape = parts.job.held_out(text, args).shape
    assert shape[0] == min(128, size // 10 - context)
    assert shape[1] == context + 1


def test_chance_is_the_entropy_of_the_bytes(parts: Any, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"aabbccdd" * 1000)
    assert parts.job.read(path, 8).chance == pytest.approx(math.log(4), rel=1e-3)


def test_the_learning_rate_rises_and_falls(parts: Any) -> None:
    args = argparse.Namespace(lr=2.0, steps=100)
    rates = [parts.job.learning_rate(step, args) for step in range(100)]
    assert rates[0] == pytest.approx(2.0 / 5)
    assert rates.index(max(rates)) == 4
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, rel=0.01)


def test_smooth_follows_slowly_and_leaves_gaps(parts: Any) -> None:
    smooth = parts.picture.smooth
    assert smooth([3.0] * 100) == pytest.approx([3.0] * 100)
    assert smooth([1.0, 2.0]) == [1.0, 2.0]  # a short run is shown as it is
    step = smooth([0.0] * 100 + [1.0] * 100)
    assert 0 < step[100] < 0.5 < step[120] < 1
    assert [math.isnan(value) for value in smooth([1.0, math.inf, math.nan, 1.0])] == [
        False,
        True,
        True,
        False,
    ]


WHOLE = "give a whole number from"
BAD: tuple[tuple[list[str], str], ...] = (
    (
        ["--text", "{tmp}/none.txt"],
        "--text '{tmp}/none.txt' cannot be read: No such file or directory. "
        "Give the path of a text file.",
    ),
    (
        ["--text", "{tmp}"],
        "--text '{tmp}' cannot be read: Is a directory. Give the path of a text file.",
    ),
    (
        ["--text", "{tmp}/short", "--context", "32"],
        "--text '{tmp}/short' has 329 bytes, and --context 32 needs 330 or more. "
        "Give a longer text or a smaller --context.",
    ),
    (
        ["--device", "tpu"],
        "--device 'tpu' is not known. Use cpu, cuda or cuda:N.",
    ),
    (
        ["--device", "cuda"],
        f"--device 'cuda' needs a CUDA GPU, and torch {torch.__version__} finds none. "
        "Use --device cpu.",
    ),
    (
        ["--dtypes", "fp32,fp8"],
        "argument --dtypes: got 'fp32,fp8', give one or more of fp32,bf16,fp16, each once, "
        "with commas and no spaces",
    ),
    (
        ["--dtypes", "bf16,bf16"],
        "argument --dtypes: got 'bf16,bf16', give one or more of fp32,bf16,fp16, each once, "
        "with commas and no spaces",
    ),
    (
        ["--dtypes", ""],
        "argument --dtypes: got '', give one or more of fp32,bf16,fp16, each once, "
        "with commas and no spaces",
    ),
    (["--steps", "0"], f"argument --steps: got '0', {WHOLE} 1 up"),
    (["--steps", "-3"], f"argument --steps: got '-3', {WHOLE} 1 up"),
    (["--steps", "1.5"], f"argument --steps: got '1.5', {WHOLE} 1 up"),
    (["--steps", "ten"], f"argument --steps: got 'ten', {WHOLE} 1 up"),
    (["--steps"], "argument --steps: expected one argument"),
    (["--batch", "0"], f"argument --batch: got '0', {WHOLE} 1 up"),
    (["--context", "0"], f"argument --context: got '0', {WHOLE} 1 up"),
    (["--layers", "0"], f"argument --layers: got '0', {WHOLE} 1 up"),
    (["--threads", "0"], f"argument --threads: got '0', {WHOLE} 1 up"),
    (["--seed", "-1"], f"argument --seed: got '-1', {WHOLE} 0 up"),
    (["--seed", "9" * 30], f"argument --seed: got '{'9' * 30}', {WHOLE} 0 up"),
    (["--lr", "0"], "argument --lr: got '0', give a number above 0"),
    (["--lr", "nan"], "argument --lr: got 'nan', give a number above 0"),
    (["--lr", "fast"], "argument --lr: got 'fast', give a number above 0"),
    (
        ["--width", "50", "--heads", "3"],
        "--width 50 cannot be split over --heads 3. Give a --width that is a multiple of 3.",
    ),
    (
        ["--out", "{tmp}/curves.pdf"],
        "--out '{tmp}/curves.pdf' does not end in .png. Give the path of a PNG file.",
    ),
    (
        ["--out", "{tmp}/short/x.png"],
        "--out '{tmp}/short/x.png' cannot be written: Not a directory. Choose another path.",
    ),
    (
        ["--out", "{tmp}/folder.png"],
        "--out '{tmp}/folder.png' cannot be written: Is a directory. Choose another path.",
    ),
    (
        ["--text", "{tmp}/long", "--context", "32", "--json", "{tmp}/long"],
        "--json '{tmp}/long' would overwrite --text. Choose another path.",
    ),
    (
        ["--json", "{tmp}/x.png"],
        "--json '{tmp}/x.png' would overwrite --out. Choose another path.",
    ),
    (["--step", "3"], "unknown arguments: --step 3. See train_torch.py --help."),
    (["quick"], "unknown arguments: quick. See train_torch.py --help."),
)


@pytest.mark.parametrize(("argv", "message"), BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_a_bad_argument_gets_one_line_before_any_training(
    parts: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    message: str,
) -> None:
    (tmp_path / "short").write_bytes(b"x" * 329)
    (tmp_path / "long").write_bytes(b"x" * 330)
    (tmp_path / "folder.png").mkdir()
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(parts.train_torch, "train", lambda *_: pytest.fail("it trained"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        parts.train_torch.main(
            ["--out", f"{tmp_path}/x.png", *(part.format(tmp=tmp_path) for part in argv)]
        )
    assert stop.value.code == 2
    told = capsys.readouterr()
    assert told.err == f"train_torch.py: error: {message.format(tmp=tmp_path)}\n"
    assert told.out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_a_bad_argument_ends_the_process_with_2() -> None:
    done = run("--device", "tpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "train_torch.py: error: --device 'tpu' is not known. Use cpu, cuda or cuda:N.\n"
    )


def test_a_missing_package_is_named() -> None:
    done = run(python=("-S",))  # without site-packages
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "train_torch.py: error: the package 'numpy' is missing. Run "
        "pip install -e '.[torch,examples]' at the top of the repository.\n"
    )


@pytest.mark.parametrize(
    ("device", "dtypes", "message"),
    [
        (
            "cuda:2",
            "fp32",
            "--device 'cuda:2' is not here: torch finds cuda:0 to cuda:1. Use one of these.",
        ),
        ("cuda:1", "fp32,bf16", "--dtypes 'fp32,bf16': this GPU has no bfloat16. Leave bf16 out."),
    ],
)
def test_a_gpu_that_cannot(
    parts: Any, monkeypatch: pytest.MonkeyPatch, device: str, dtypes: str, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    with pytest.raises(parts.job.BadArgument) as bad:
        parts.train_torch.find_device(device, dtypes.split(","))
    assert str(bad.value) == message
    assert parts.train_torch.find_device("cuda:1", ["fp16"]) == torch.device("cuda:1")


def test_looking_whether_an_output_can_be_written_changes_nothing(
    parts: Any, tmp_path: Path
) -> None:
    old = tmp_path / "old.png"
    old.write_bytes(b"kept")
    parts.job.check_outputs(arguments(parts, "--out", str(old)))
    assert old.read_bytes() == b"kept"
    assert list(tmp_path.iterdir()) == [old]


# --- the example for several ranks, started as its first lines say --------------------------------

LINE = re.compile(r"step +(\d+)  loss +([\d.]+)  scale +([\d.]+)  skipped (yes|no)")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run_ranks(*argv: object, by: tuple[str, ...] = TORCHRUN) -> Any:
    settings = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, *by, str(EXAMPLES / "train_ranks.py"), *map(str, argv)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**environment, **settings},
    )


def test_an_overflow_on_the_last_rank_is_skipped_by_all() -> None:
    done = run_ranks("--overflow-at", 5, "--steps", 12, "--width", 32)
    assert done.returncode == 0, done.stderr
    *lines, end = done.stdout.splitlines()
    assert end == "parameters are finite on all 2 ranks"
    cells = [match.groups() for match in map(LINE.fullmatch, lines) if match]
    assert [int(step) for step, *_ in cells] == list(range(12)) == list(range(len(lines)))
    assert [at for at, (*_, skipped) in enumerate(cells) if skipped == "yes"] == [5]
    scales = [float(scale) for _, _, scale, _ in cells]
    assert scales == [1024.0] * 3 + [2048.0] * 2 + [1024.0] * 4 + [2048.0] * 3
    losses = [float(loss) for _, loss, *_ in cells]
    assert losses[-1] < losses[0] / 2


@pytest.mark.long  # other examples say as much of bad arguments
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            (),
            "this is one rank of several. Start it with "
            "torchrun --nproc-per-node 2 examples/train_ranks.py",
        ),
        (
            ("--steps", 3, "--overflow-at", 3),
            "--overflow-at 3 is never reached: the steps are 0 to 2. Give one of these, or more "
            "--steps.",
        ),
    ],
)
def test_what_is_said_of_a_start_that_cannot_work(argv: Any, said: str) -> None:
    done = run_ranks(*argv, by=())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"train_ranks.py: error: {said}\n"
