"""The examples from end to end: both frameworks learn the same from the same weights.

One small run of each, with what it prints, saves and draws, and what compare.py makes of both.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.conftest import need

need("jax")
need("torch")
for name in ("flax", "matplotlib", "numpy", "optax", "rich", "tqdm"):
    pytest.importorskip(name, reason=f"the examples need {name}")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from matplotlib.image import imread  # noqa: E402

from tests.support import examples  # noqa: E402
from tests.support.examples import TINY, count, falls  # noqa: E402

COLUMNS = [
    "dtype",
    "loss",
    "against fp32",
    "tokens per s",
    "saved, MiB",
    "peak, MiB",
    "steps skipped",
    "final scale",
]
UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}  # the largest error of one rounding
DTYPES = list(UNIT)
FRAMEWORK = pytest.mark.parametrize("framework", ["torch", "jax"])


@pytest.fixture(scope="module")
def parts() -> Iterator[argparse.Namespace]:
    with examples.modules("job", "report", "picture", "compare") as found:
        yield found


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


def agree(dtype: str, one: dict[str, Any], other: dict[str, Any], shift: int = 0) -> bool:
    """True if the first six losses lie as close as rounding in the dtype leaves them."""
    losses, others = one["train_loss"][:6], other["train_loss"][shift : 6 + shift]
    limits = bounds(dtype, losses, one["parameters"])
    pairs = zip(losses, others, limits, strict=True)
    return all(abs(a - b) <= limit for a, b, limit in pairs)


def test_float32_losses_agree_before_the_first_step(trained: argparse.Namespace) -> None:
    theirs, ours = (one.runs["fp32"]["held_out"][0] for one in (trained.torch, trained.jax))
    assert theirs[0] == ours[0] == 0
    assert ours[1] == pytest.approx(theirs[1], rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_frameworks_take_the_same_first_steps(trained: argparse.Namespace, dtype: str) -> None:
    assert agree(dtype, trained.torch.runs[dtype], trained.jax.runs[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_that_they_take_the_same_steps_is_no_matter_of_course(
    trained: argparse.Namespace, dtype: str
) -> None:
    theirs, ours = trained.torch.runs[dtype], trained.jax.runs[dtype]
    assert not agree(dtype, theirs, ours, shift=1)
    assert not agree("fp32", trained.torch.runs["bf16"], trained.jax.runs["fp32"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_frameworks_learn_as_much(trained: argparse.Namespace, dtype: str) -> None:
    theirs, ours = trained.torch.runs[dtype], trained.jax.runs[dtype]
    assert falls(ours)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.02)
    assert ours["parameters"] == theirs["parameters"]


def test_each_dtype_computes_in_its_own_way(trained: argparse.Namespace) -> None:
    assert len({tuple(one["train_loss"][:6]) for one in trained.jax.runs.values()}) == 3


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


@FRAMEWORK
def test_the_gains_and_the_processor_are_named(
    trained: argparse.Namespace, parts: Any, framework: str
) -> None:
    found = getattr(trained, framework)
    base = found.runs["fp32"]
    for name in ("bf16", "fp16"):
        run = found.runs[name]
        speed = run["tokens_per_second"] / base["tokens_per_second"]
        assert (
            f"{name}: {speed:.2f} times the tokens per s of fp32, "
            f"{run['saved'] / base['saved']:.2f} times the bytes saved for backward\n"
        ) in found.out
    assert parts.job.speed_of_bfloat16() in found.out


@pytest.mark.parametrize(
    ("features", "sizes", "said"),
    [
        ({"avx2", "avx512_bf16"}, "LARGE", "has instructions for bfloat16 products: avx512_bf16."),
        ({"avx2"}, "SHORT", "to save memory, but no time. On processors that have them"),
        (None, "SHORT", "is not known: this system does not list CPU features."),
    ],
)  # fmt: skip
def test_the_processor_decides_how_much_is_trained(
    parts: Any, monkeypatch: pytest.MonkeyPatch, features: Any, sizes: str, said: str
) -> None:
    monkeypatch.setattr(parts.job.doctor, "processor", lambda: ("a CPU", features))
    assert parts.job.default_sizes() == getattr(parts.job, sizes)
    assert said in parts.job.speed_of_bfloat16()


def test_the_example_shows_and_saves_what_the_torch_one_does(trained: argparse.Namespace) -> None:
    theirs, ours = trained.torch.figures, trained.jax.figures
    assert theirs.keys() == ours.keys()
    assert theirs["text"] == ours["text"]
    assert ours["framework"] == f"jax {jax.__version__}"
    assert ours["device"] == "CPU"
    assert ours["memory"] in trained.jax.out
    assert theirs["settings"].keys() - ours["settings"].keys() == {"threads"}
    (header, *rows), (other, *_) = map(examples.rows, (trained.jax.out, trained.torch.out))
    assert header == other
    assert [row[:2] for row in rows] == [
        [name, f"{one['loss']:.4f}"] for name, one in trained.jax.runs.items()
    ]
    assert imread(trained.folder / "jax.png").shape == (1140, 1500, 4)


def test_the_comparison_shows_both_side_by_side(
    trained: argparse.Namespace, compared: argparse.Namespace
) -> None:
    pairs = [(trained.torch.runs[name], trained.jax.runs[name]) for name in DTYPES]
    (both,) = {one["parameters"] for pair in pairs for one in pair}
    assert f"{both:,} parameters, pydoc_data.topics, torch" in compared.out
    header, frameworks, *rows = examples.rows(compared.out)
    assert header == ["", "fp32", "fp32", "bf16", "bf16", "fp16", "fp16"]
    assert frameworks == ["", *["torch", "JAX"] * 3]

    def above(base: float, loss: float) -> str:
        return f"{100 * (loss / base - 1):+z.2f} %"

    flat = [one for pair in pairs for one in pair]
    bases = [one["loss"] for one in pairs[0]] * 2
    assert rows == [
        ["loss before", *(f"{one['held_out'][0][1]:.5f}" for one in flat)],
        ["loss after", *(f"{one['loss']:.4f}" for one in flat)],
        [
            "against fp32",
            *"--",
            *(above(b, one["loss"]) for b, one in zip(bases, flat[2:], strict=True)),
        ],
        [
            "against torch",
            *(cell for pair in pairs for cell in ("-", above(*(one["loss"] for one in pair)))),
        ],
        ["tokens per s", *(f"{one['tokens_per_second']:,.0f}" for one in flat)],
        ["saved, MiB", *(f"{one['saved'] / 2**20:,.2f}" for one in flat)],
        ["memory, MiB", *(f"{one['peak_memory'] / 2**20:,.2f}" for one in flat)],
        ["steps skipped", *(str(len(one["skipped"])) for one in flat)],
        ["final scale", *"----", *(f"2^{math.log2(one['scale'][-1]):g}" for one in pairs[2])],
    ]
    for name, one in (("torch", trained.torch), ("JAX", trained.jax)):
        assert f"memory of {name}: {one.figures['memory']}\n" in compared.out
    assert "torch on 1 thread, JAX on every core\n" in compared.out
    saved = f"saved {compared.folder / 'both.png'} and {compared.folder / 'both.txt'}\n"
    assert compared.out == (compared.folder / "both.txt").read_text(encoding="utf-8") + saved


def test_the_picture_of_both_has_every_line(
    compared: argparse.Namespace, parts: argparse.Namespace
) -> None:
    pixels = np.round(imread(compared.folder / "both.png")[..., :3] * 255).astype(int)
    assert pixels.shape == (1260, 1800, 3)
    wide = parts.compare.UNDER["color"]
    panels = [pixels[200:660, left : left + 460] for left in (110, 700, 1290)]
    for panel, dtype in zip(panels, DTYPES, strict=True):
        for colour in (wide, parts.compare.OVER[dtype]["color"]):
            assert count(panel, colour) > 100
    assert count(panels[0], parts.compare.OVER["bf16"]["color"]) == 0
    for colour in (look["color"] for look in parts.picture.LOOKS.values()):
        assert count(pixels[840:1170, 110:880], colour) > 100
    for colour in (wide, parts.compare.OVER["fp16"]["color"]):
        assert count(pixels[840:1170, 1000:], colour) > 100


def test_the_loss_falls_in_every_dtype(trained: argparse.Namespace) -> None:
    assert list(trained.torch.runs) == ["fp32", "bf16", "fp16"]
    assert [falls(one) for one in trained.torch.runs.values()] == [True] * 3


def test_all_dtypes_start_alike_and_end_close(trained: argparse.Namespace) -> None:
    base = trained.torch.runs["fp32"]
    for one in trained.torch.runs.values():
        assert one["train_loss"][0] == pytest.approx(base["train_loss"][0], rel=1e-3)
        assert one["loss"] == pytest.approx(base["loss"], rel=0.02)
        assert one["parameters"] == base["parameters"]
    # Each computes in its own dtype: the losses agree, their last digits do not.
    assert len({one["train_loss"][1] for one in trained.torch.runs.values()}) == 3


def test_the_table_shows_what_the_file_says(trained: argparse.Namespace) -> None:
    header, *rows = examples.rows(trained.torch.out)
    assert header == COLUMNS
    base = trained.torch.runs["fp32"]["loss"]
    assert rows == [
        [
            name,
            f"{one['loss']:.4f}",
            "-" if name == "fp32" else f"{100 * (one['loss'] / base - 1):+z.2f} %",
            f"{one['tokens_per_second']:,.0f}",
            f"{one['saved'] / 2**20:.2f}",
            f"{one['peak_memory'] / 2**20:.2f}",
            str(len(one["skipped"])),
            f"2^{math.log2(one['scale'][-1]):g}" if name == "fp16" else "-",
        ]
        for name, one in trained.torch.runs.items()
    ]
    assert f"{trained.torch.runs['fp32']['parameters']:,} parameters" in trained.torch.out


def test_the_file_says_what_was_run(trained: argparse.Namespace) -> None:
    figures = trained.torch.figures
    assert figures["framework"] == f"torch {torch.__version__}"
    assert figures["device"] == "CPU"
    assert figures["settings"]["steps"] == 60
    assert figures["settings"]["dtypes"] == ["fp32", "bf16", "fp16"]
    assert figures["text"]["name"] == "pydoc_data.topics"
    assert 3 < figures["text"]["chance"] < 4
    for one in figures["runs"]:
        assert len(one["train_loss"]) == len(one["seconds"]) == 60
        assert [step for step, _ in one["held_out"]] == list(range(0, 61, 6))
        assert one["loss"] == one["held_out"][-1][1]


def test_the_picture_is_a_png_with_a_line_for_each_dtype(
    trained: argparse.Namespace, parts: Any
) -> None:
    path = trained.folder / "torch.png"
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    pixels = np.round(imread(path)[..., :3] * 255).astype(int)
    assert pixels.shape == (1140, 1500, 3)
    losses, gaps, scale = pixels[180:600, 150:], pixels[800:1040, 150:700], pixels[800:1040, 900:]
    fp32, bf16, fp16 = (look["color"] for look in parts.picture.LOOKS.values())
    for panel, colours in ((losses, (fp32, bf16, fp16)), (gaps, (bf16, fp16)), (scale, (fp16,))):
        for colour in colours:
            assert count(panel, colour) > 100
    assert count(scale, bf16) == count(pixels, "#010203") == 0
