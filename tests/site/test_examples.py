"""The examples from end to end: both frameworks learn the same from the same weights.

One small run of each, with what it prints, saves and draws, and what compare.py makes of both; then
runs that cannot work, and the examples for several ranks and of parity.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import need

need("jax")
need("torch")
for name in ("flax", "matplotlib", "numpy", "optax", "rich", "tqdm"):
    pytest.importorskip(name, reason=f"the examples need {name}")

import jax  # noqa: E402
import torch  # noqa: E402
from jax import numpy as jnp  # noqa: E402
from matplotlib.image import imread  # noqa: E402

from tests.support import examples  # noqa: E402
from tests.support.decisions import recording  # noqa: E402
from tests.support.examples import TINY, falls  # noqa: E402
from tests.support.sizes import size  # noqa: E402

COLUMNS = (
    "dtype|loss|against fp32|tokens per s|saved, MiB|peak, MiB|steps skipped|final scale".split("|")
)
UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}  # the largest error of one rounding
DTYPES = list(UNIT)
FRAMEWORK = pytest.mark.parametrize("framework", ["torch", "jax"])


@pytest.fixture(scope="module")
def parts() -> Iterator[argparse.Namespace]:
    """The examples' modules, torch on one thread as in the script."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    names = ("job", "report", "picture", "train_torch", "train_jax", "compare", "compare_models")
    try:
        with examples.modules(*names) as found:
            yield found
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> argparse.Namespace:
    """A small run of all three dtypes in each framework: what JAX printed, what both saved."""
    folder = tmp_path_factory.mktemp("trained")
    found = argparse.Namespace(folder=folder)
    for framework in ("torch", "jax"):
        script = f"train_{framework}.py"
        threads = ["--threads", "1"] if framework == "torch" else []
        argv = [*TINY, *threads, "--quiet", "--out", folder / f"{framework}.png"]
        done = examples.run(script, *argv)
        assert (done.returncode, done.stderr) == (0, "")
        figures = json.loads((folder / f"{framework}.json").read_text())
        runs = {one["dtype"]: one for one in figures["runs"]}
        setattr(found, framework, argparse.Namespace(out=done.stdout, figures=figures, runs=runs))
    return found


@pytest.fixture(scope="module")
def compared(trained: argparse.Namespace) -> argparse.Namespace:
    """Run compare.py on the figures of that run, and return its output and folder."""
    folder = trained.folder
    files = ("--torch", folder / "torch.json", "--jax", folder / "jax.json")
    done = examples.run("compare.py", *files, "--out", folder / "both.png")
    assert (done.returncode, done.stderr) == (0, "")
    return argparse.Namespace(out=done.stdout, folder=folder)


def noise(dtype: str) -> float:
    """How far apart, relatively, rounding alone may bring the losses of one step.

    A byte's loss has about 16 roundings in a row behind it: five products, the norms, activation
    and softmax between them, the sums of the residual stream, and the loss. Both frameworks round
    the same weights to the same numbers; what else is rounded to the dtype differs from byte to
    byte, so that it adds up, and averages out over the 256 bytes, like independent noise. What is
    rounded to float32 may differ in one direction: in the order of a sum, say.
    """
    return math.sqrt(16) * UNIT[dtype] / math.sqrt(8 * 32) + 16 * UNIT["fp32"]


def bounds(dtype: str, losses: Sequence[float], parameters: int) -> list[float]:
    """How far apart rounding may bring the losses of the first steps.

    AdamW moves a parameter by at most twice the learning rate, 0.01, in the wrong direction, and
    only where the gradient is as small as its error. So a step adds at most 2 * 0.01 times the sum
    of those errors, and that sum is at most noise times root(parameters), for the gradient's norm
    is clipped to 1.
    """
    step = 2 * 0.01 * math.sqrt(parameters)
    return [noise(dtype) * (loss + step * number) for number, loss in enumerate(losses)]


def agree(dtype: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if the first six losses lie as close as rounding in the dtype leaves them."""
    losses, others = one["train_loss"][:6], other["train_loss"][:6]
    limits = bounds(dtype, losses, one["parameters"])
    pairs = zip(losses, others, limits, strict=True)
    return all(abs(a - b) <= limit for a, b, limit in pairs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_frameworks_take_the_same_first_steps(trained: argparse.Namespace, dtype: str) -> None:
    assert agree(dtype, trained.torch.runs[dtype], trained.jax.runs[dtype])


@FRAMEWORK
def test_the_scaler_grows_skips_and_backs_off(trained: argparse.Namespace, framework: str) -> None:
    runs = getattr(trained, framework).runs
    fp16 = runs["fp16"]
    pairs = zip(fp16["scale"], fp16["scale"][1:], strict=False)
    steps = [after / before for before, after in pairs]
    assert fp16["scale"][0] == 2.0**16
    assert len(steps) == 60
    assert set(steps) == {0.5, 1.0, 2.0}
    assert fp16["skipped"] == [step for step, change in enumerate(steps, 1) if change == 0.5]
    for name in ("fp32", "bf16"):
        assert runs[name]["scale"] == runs[name]["skipped"] == []


@FRAMEWORK
def test_low_dtypes_hold_fewer_bytes(trained: argparse.Namespace, framework: str) -> None:
    runs = getattr(trained, framework).runs
    memory = {name: one["peak_memory"] for name, one in runs.items()}
    # Parameters, and two numbers for each in the optimizer, are float32 in every dtype.
    least = 3 * 4 * runs["fp32"]["parameters"]
    assert least < memory["bf16"] < memory["fp32"]
    assert least < memory["fp16"] < memory["fp32"]
    saved = {name: one["saved"] for name, one in runs.items()}
    assert 0 < saved["fp16"] <= saved["bf16"] < 0.8 * saved["fp32"]
    assert all(memory[name] >= least + saved[name] for name in runs)


@pytest.mark.parametrize(
    ("features", "sizes", "said"),
    [
        ({"avx2", "avx512_bf16"}, "LARGE", "has instructions for bfloat16 products: avx512_bf16."),
        ({"avx2"}, "SHORT", "to save memory, and little or no time. On processors that have them"),
        (None, "SHORT", "does not list the processor's instructions for bfloat16."),
    ],
)  # fmt: skip
def test_the_processor_decides_how_much_is_trained(
    parts: Any, monkeypatch: pytest.MonkeyPatch, features: Any, sizes: str, said: str
) -> None:
    monkeypatch.setattr(parts.job, "processor", lambda: ("a CPU", features))
    assert parts.job.default_sizes() == getattr(parts.job, sizes)
    assert said in parts.job.speed_of_bfloat16()


def test_the_example_shows_and_saves_what_the_torch_one_does(
    trained: argparse.Namespace, parts: Any
) -> None:
    theirs, ours = trained.torch.figures, trained.jax.figures
    assert theirs.keys() == ours.keys()
    assert theirs["text"] == ours["text"]
    assert ours["framework"] == f"jax {jax.__version__}"
    assert ours["device"] == "CPU"
    assert ours["memory"] in trained.jax.out
    assert theirs["settings"].keys() - ours["settings"].keys() == {"threads"}
    for name in ("torch", "jax"):
        found = getattr(trained, name)
        header, *rows = examples.rows(found.out)
        assert header == COLUMNS
        assert [row[:2] for row in rows] == [
            [dtype, f"{one['loss']:.4f}"] for dtype, one in found.runs.items()
        ]
        assert parts.job.speed_of_bfloat16() in found.out
        assert imread(trained.folder / f"{name}.png").shape == (1140, 1500, 4)


def test_the_comparison_shows_both_side_by_side(
    trained: argparse.Namespace, compared: argparse.Namespace
) -> None:
    header, frameworks, *rows = examples.rows(compared.out)
    assert header == ["", "fp32", "fp32", "bf16", "bf16", "fp16", "fp16"]
    assert frameworks == ["", *["torch", "JAX"] * 3]
    both = (trained.torch, trained.jax)
    runs = [one.runs[dtype] for dtype in DTYPES for one in both]
    cells = {first: rest for first, *rest in rows}
    assert cells["loss after"] == [f"{run['loss']:.4f}" for run in runs]
    assert cells["steps skipped"] == [str(len(run["skipped"])) for run in runs]
    scales = [f"2^{math.log2(run['scale'][-1]):g}" for run in runs[4:]]
    assert cells["final scale"] == [*"----", *scales]
    assert all(one.figures["memory"] in compared.out for one in both)
    assert compared.out.startswith((compared.folder / "both.txt").read_text(encoding="utf-8"))


@FRAMEWORK
def test_all_dtypes_learn_as_much_from_the_same_weights(
    trained: argparse.Namespace, framework: str
) -> None:
    runs = getattr(trained, framework).runs
    assert list(runs) == DTYPES
    theirs = trained.torch.runs["fp32"]
    for one in runs.values():
        assert falls(one)
        assert one["train_loss"][0] == pytest.approx(theirs["train_loss"][0], rel=1e-3)
        assert one["loss"] == pytest.approx(theirs["loss"], rel=0.02)
        assert one["parameters"] == theirs["parameters"]
    # Each computes in its own dtype: the losses agree, their last digits do not.
    assert len({tuple(one["train_loss"][:6]) for one in runs.values()}) == 3


def losses(parts: Any, *argv: str) -> Any:
    flags = parts.job.parser("train_torch.py", "", parts.job.SMALL)
    args = parts.job.arguments(flags, [*TINY, *argv, "--quiet"])
    text = parts.job.read(None, args.context)
    return parts.train_torch.train("fp16", text, args, torch.device("cpu"))


def test_the_seed_and_the_learning_rate_decide_the_run(parts: Any) -> None:
    one, again, other = (
        losses(parts, "--steps", "3", "--seed", seed).train_loss for seed in ("1", "1", "2")
    )
    assert one == again != other
    assert not falls(vars(losses(parts, "--lr", "1e-9"))), "it falls without learning"


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


def test_bytes_saved_are_what_the_backward_pass_needs_besides_the_parameters(parts: Any) -> None:
    model, x = torch.nn.Linear(10, 1, bias=False), torch.ones(4, 10)
    params = {"a": jnp.ones(10), "b": jnp.ones(10)}
    for forward, saved in (
        (lambda: model.weight.sum(), 0),
        (lambda: (model.weight * model.weight).sum(), 0),  # the parameter itself
        (lambda: model(x).sum(), 4 * 40),
        (lambda: model.weight.half().sin().sum(), 2 * 10),
    ):
        assert parts.train_torch.bytes_saved(model, forward) == saved
    for loss, saved in (
        (lambda p: p["a"].sum() + p["b"].sum(), 0),
        (lambda p: (p["a"] * p["b"]).sum(), 0),
        (lambda p: jnp.sin(p["a"]).sum(), 4 * 10),
        (lambda p: jnp.sin(p["a"].astype(jnp.float16)).sum(), 2 * 10),
    ):
        assert parts.train_jax.bytes_saved(params, loss) == saved


def test_bytes_of_a_compiled_step_count_what_is_donated_once(parts: Any) -> None:
    for donated, held in (((0,), 4000), ((), 8000)):
        step = jax.jit(lambda x: x + 1, donate_argnums=donated)
        assert parts.train_jax.bytes_compiled(step.lower(jnp.ones(1000)).compile()) == held


@pytest.mark.gpu
@FRAMEWORK
def test_on_a_gpu(framework: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available() or (framework == "jax" and jax.default_backend() != "gpu"):
        pytest.skip("needs a CUDA GPU")
    device = {"torch": "cuda", "jax": "gpu"}[framework]
    given = ("--device", device, "--quiet", "--out", tmp_path / "x.png")
    done = examples.run(f"train_{framework}.py", *TINY, *given)
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads((tmp_path / "x.json").read_text())
    assert all(falls(one) and one["peak_memory"] > 0 for one in figures["runs"])


# --- what cannot work gets one line, before anything is trained or written ------------------------

DTYPE_NAMES = "give one or more of fp32,bf16,fp16, each once, with commas and no spaces"
FILES = ("--torch", "{tmp}/torch.json", "--jax", "{tmp}/jax.json")
OTHER_JOB = "Run both examples with the same arguments."
BAD: tuple[tuple[str, str, str], ...] = (
    ("train_torch.py", "--text {tmp}/none.txt",
     "--text '{tmp}/none.txt' cannot be read: No such file or directory. "
     "Give the path of a text file."),
    ("train_torch.py", "--text {tmp}/short --context 32",
     "--text '{tmp}/short' has 329 bytes, and --context 32 needs 330 or more. "
     "Give a longer text or a smaller --context."),
    ("train_torch.py", "--device tpu", "--device 'tpu' is not known. Use cpu, cuda or cuda:N."),
    ("train_torch.py", "--device cuda",
     f"--device 'cuda' needs a CUDA GPU, and torch {torch.__version__} finds none. "
     "Use --device cpu."),
    ("train_torch.py", "--dtypes fp32,fp8",
     f"argument --dtypes: got 'fp32,fp8', {DTYPE_NAMES}"),
    ("train_torch.py", "--steps 0", "argument --steps: got '0', give a whole number from 1 up"),
    ("train_torch.py", "--steps", "argument --steps: expected one argument"),
    ("train_torch.py", "--lr nan", "argument --lr: got 'nan', give a number above 0"),
    ("train_torch.py", "--width 50 --heads 3",
     "--width 50 cannot be split over --heads 3. Give a --width that is a multiple of 3."),
    ("train_torch.py", "--out {tmp}/curves.pdf",
     "--out '{tmp}/curves.pdf' does not end in .png. Give the path of a PNG file."),
    ("train_torch.py", "--out {tmp}/short/x.png",
     "--out '{tmp}/short/x.png' cannot be written: Not a directory. Choose another path."),
    ("train_torch.py", "--text {tmp}/long --context 32 --json {tmp}/long",
     "--json '{tmp}/long' would overwrite --text. Choose another path."),
    ("train_torch.py", "--step 3", "unknown arguments: --step 3. See train_torch.py --help."),
    ("train_jax.py", "--device gpu",
     f"--device 'gpu' needs a GPU, and jax {jax.__version__} finds none. Use --device cpu."),
    ("compare.py", "--jax {tmp}/none.json",
     "--jax '{tmp}/none.json' cannot be read: No such file or directory. Run train_jax.py first."),
    ("compare.py", "--jax {tmp}/short",
     "--jax '{tmp}/short' does not hold the figures of train_jax.py. Run it again."),
    ("compare.py", "--jax {tmp}/torch.json",
     "--jax '{tmp}/torch.json' holds figures of torch 2.0. Give those of train_jax.py."),
    ("compare.py", "--jax {tmp}/longer.json",
     f"the figures are of different jobs: steps is 60 in torch's and 61 in JAX's. {OTHER_JOB}"),
    ("compare.py", "--jax {tmp}/x.txt",
     "the table '{tmp}/x.txt' would overwrite --jax. Choose another path."),
)  # fmt: skip


def figures(framework: str, steps: int = 60, chance: float = 3.0, loss: float | None = 2.0) -> str:
    one = {
        "dtype": "fp16",
        "parameters": 1,
        "train_loss": [2.0, loss],
        "held_out": [[0, 3.0], [2, loss]],
        "seconds": [1.0, 1.0],
        "scale": [4.0, 4.0, 2.0],
        "skipped": [2],
        "saved": 1,
        "peak_memory": 1,
    }
    made_by = {"framework": framework, "device": "CPU", "memory": "all"}
    settings = {"steps": steps, "batch": 1, "context": 1, "out": framework, "text": framework}
    settings |= {"threads": 1} if framework.startswith("torch") else {}
    text = {"name": "words", "chance": chance}
    return json.dumps({**made_by, "settings": settings, "text": text, "runs": [one]})


@pytest.mark.parametrize(("script", "argv", "message"), BAD)
def test_a_bad_argument_gets_one_line_and_writes_nothing(
    parts: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    argv: str,
    message: str,
) -> None:
    for name, text in (
        ("short", "x" * 329),
        ("long", "x" * 330),
        ("torch.json", figures("torch 2.0")),
        ("jax.json", figures("jax 0.1")),
        ("x.txt", figures("jax 0.1")),
        ("longer.json", figures("jax 0.1", steps=61)),
    ):
        (tmp_path / name).write_text(text)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    example = getattr(parts, script.removesuffix(".py"))
    if script != "compare.py":
        monkeypatch.setattr(example, "train", lambda *_: pytest.fail("it trained"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(jax, "devices", no_gpu)
    given = ("--out", "{tmp}/x.png", *(FILES if script == "compare.py" else ()), *argv.split())
    with pytest.raises(SystemExit) as stop:
        example.main([part.format(tmp=tmp_path) for part in given])
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert said.err == f"{script}: error: {message.format(tmp=tmp_path)}\n"
    assert said.out == ""
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def no_gpu(kind: str) -> list[str]:
    """`jax.devices` on a machine without a GPU."""
    if kind != "cpu":
        raise RuntimeError(f"Unknown backend: '{kind}' requested")
    return ["cpu"]


def test_a_gpu_that_cannot(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    monkeypatch.setattr(jax, "devices", lambda kind: [f"{kind} 0", f"{kind} 1"])
    in_torch, in_jax = parts.train_torch.find_device, parts.train_jax.find_device
    for call, message in (
        (lambda: in_torch("cuda:2", ["fp32"]),
         "--device 'cuda:2' is not here: torch finds cuda:0 to cuda:1. Use one of these."),
        (lambda: in_torch("cuda:1", ["fp32", "bf16"]),
         "--dtypes 'fp32,bf16': this GPU has no bfloat16. Leave bf16 out."),
        (lambda: in_jax("gpu:2"),
         "--device 'gpu:2' is not here: jax finds gpu:0 to gpu:1. Use one of these."),
    ):  # fmt: skip
        with pytest.raises(parts.job.BadArgument) as bad:
            call()
        assert str(bad.value) == message
    assert in_torch("cuda:1", ["fp16"]) == torch.device("cuda:1")
    assert [in_jax(name) for name in ("gpu", "gpu:1")] == ["gpu 0", "gpu 1"]


MISSING = (
    ("train_torch.py", "numpy", "torch,examples"),
    ("train_jax.py", "jax", "jax,examples"),
    ("compare.py", "numpy", "examples"),
)


@pytest.mark.parametrize(("script", "package", "extras"), MISSING)
def test_a_missing_package_is_named_and_the_process_ends_with_2(
    script: str, package: str, extras: str
) -> None:
    done = examples.run(script, python=("-S",))  # without site-packages
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"{script}: error: the package '{package}' is missing. Run "
        f"pip install -e '.[{extras}]' at the top of the repository.\n"
    )


# --- the example for several ranks, started as its first lines say --------------------------------

LINE = re.compile(r"step +(\d+)  loss +([\d.]+)  scale +([\d.]+)  skipped (yes|no)")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.long
def test_an_overflow_on_the_last_rank_is_skipped_by_all() -> None:
    settings = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    argv = "--overflow-at", 5, "--steps", 12, "--width", 32
    done = examples.run("train_ranks.py", *argv, python=TORCHRUN, **settings)
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


# --- the worked example of parity: one transformer in torch and in flax ---------------------------

SIZES = argparse.Namespace(
    batch=1, context=4, width=8, layers=1, heads=2, seed=0, steps=size(3, 10), lr=0.1
)  # fmt: skip


@pytest.mark.long  # the fixture `trained` has the same models' losses
@pytest.mark.parametrize("name", ["fp32", "fp16"])
def test_the_models_are_the_same_forward_backward_and_in_training(parts: Any, name: str) -> None:
    text = parts.job.read(None, SIZES.context)
    with recording():
        once, trained = parts.compare_models.compare(name, text, SIZES)
    weights = parts.job.first_weights(text.alphabet, SIZES)
    assert [gap.what for gap in once.gaps] == [
        "result",
        *(f"gradient of input[0][{weight!r}]" for weight in sorted(weights)),
    ]
    low = [gap.tolerance for gap in (once.gaps[0], trained.gaps[0])]
    print(f"\n{name}: loss within {low[0]:.2g}, {SIZES.steps} steps within {low[1]:.2g}; "
          f"tolerance / error {once.margin:.1f} and {trained.margin:.1f}")  # fmt: skip
    assert 1 < once.margin
    assert 1 < trained.margin
    assert max(low) < {"fp32": 1e-4, "bf16": 0.05, "fp16": 0.01}[name]
