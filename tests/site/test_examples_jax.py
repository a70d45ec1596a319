"""The JAX example, and the comparison: both frameworks learn the same from the same weights."""

from __future__ import annotations

import argparse
import json
import math
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
import numpy as np  # noqa: E402
from jax import numpy as jnp  # noqa: E402
from matplotlib.image import imread  # noqa: E402

from tests.support import examples  # noqa: E402
from tests.support.examples import TINY, count, falls  # noqa: E402

UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}  # the largest error of one rounding
DTYPES = list(UNIT)


@pytest.fixture(scope="module")
def parts() -> Iterator[argparse.Namespace]:
    with examples.modules("job", "report", "picture", "train_jax", "compare") as found:
        yield found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> argparse.Namespace:
    """A small run of all three dtypes in each framework: what JAX printed, what both saved."""
    folder = tmp_path_factory.mktemp("trained")
    found = argparse.Namespace(folder=folder)
    for framework in ("torch", "jax"):
        script = f"train_{framework}.py"
        done = examples.run(script, *TINY, "--quiet", "--out", folder / f"{framework}.png")
        assert (done.returncode, done.stderr) == (0, "")
        figures = json.loads((folder / f"{framework}.json").read_text())
        runs = {one["dtype"]: one for one in figures["runs"]}
        setattr(found, framework, argparse.Namespace(out=done.stdout, figures=figures, runs=runs))
    return found


@pytest.fixture(scope="module")
def compared(trained: argparse.Namespace) -> argparse.Namespace:
    """What compare.py made of that run."""
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


def test_the_scaler_grows_skips_and_backs_off(trained: argparse.Namespace) -> None:
    fp16 = trained.jax.runs["fp16"]
    pairs = zip(fp16["scale"], fp16["scale"][1:], strict=False)
    steps = [after / before for before, after in pairs]
    assert fp16["scale"][0] == 2.0**16
    assert len(steps) == 60
    assert set(steps) == {0.5, 1.0, 2.0}
    assert fp16["skipped"] == [step for step, change in enumerate(steps, 1) if change == 0.5]
    for name in ("fp32", "bf16"):
        assert trained.jax.runs[name]["scale"] == trained.jax.runs[name]["skipped"] == []


def test_low_dtypes_hold_fewer_bytes(trained: argparse.Namespace) -> None:
    memory = {name: one["peak_memory"] for name, one in trained.jax.runs.items()}
    # Parameters, and two numbers for each in the optimizer, are float32 in every dtype.
    least = 3 * 4 * trained.jax.runs["fp32"]["parameters"]
    assert least < memory["bf16"] < memory["fp32"]
    assert least < memory["fp16"] < memory["fp32"]


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
        ["tokens/s", *(f"{one['tokens_per_second']:,.0f}" for one in flat)],
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


def test_the_first_weights_are_the_seed_s(parts: argparse.Namespace) -> None:
    def weights(seed: str) -> dict[str, np.ndarray]:
        args = parts.job.arguments(parts.job.parser("x", ""), [*TINY, "--seed", seed])
        return parts.job.first_weights(7, args)

    one, again, other = weights("1"), weights("1"), weights("2")
    assert all(np.array_equal(one[name], again[name]) for name in one)
    drawn = [name for name in one if not np.array_equal(one[name], other[name])]
    assert drawn == [name for name in one if "norm" not in name]
    assert {values.dtype for values in one.values()} == {np.dtype("float32")}
    assert {name: list(one[name].shape) for name in drawn if "blocks" not in name} == {
        "bytes.weight": [7, 16],
        "places.weight": [32, 16],
        "head.weight": [16, 7],
    }
    assert np.abs(one["blocks.0.down.weight"]).max() == pytest.approx(64**-0.5, rel=0.01)


def test_bytes_held_are_parameters_state_and_what_the_backward_pass_needs(
    parts: argparse.Namespace,
) -> None:
    params, state = {"a": jnp.ones(10), "b": jnp.ones(10)}, jnp.zeros(5)

    def held(forward: Any) -> int:
        return parts.train_jax.bytes_held(params, state, forward)

    assert held(lambda p: p["a"].sum() + p["b"].sum()) == 4 * 25
    assert held(lambda p: (p["a"] * p["b"]).sum()) == 4 * 25  # each of them, and they count once
    assert held(lambda p: jnp.sin(p["a"]).sum()) == 4 * 35
    assert held(lambda p: jnp.sin(p["a"].astype(jnp.float16)).sum()) == 4 * 25 + 2 * 10


def test_bytes_of_a_compiled_step_count_what_is_donated_once(parts: argparse.Namespace) -> None:
    def size(donated: tuple[int, ...]) -> int:
        step = jax.jit(lambda x: x + 1, donate_argnums=donated)
        return parts.train_jax.bytes_compiled(step.lower(jnp.ones(1000)).compile())

    assert size((0,)) == 4000
    assert size(()) == 8000


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("needs a CUDA GPU")
    done = examples.run(
        "train_jax.py", *TINY, "--device", "gpu", "--quiet", "--out", tmp_path / "x.png"
    )
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads((tmp_path / "x.json").read_text())
    assert figures["device"] == jax.devices()[0].device_kind
    assert all(falls(one) and one["peak_memory"] > 0 for one in figures["runs"])


BAD_TRAINING: tuple[tuple[list[str], str], ...] = (
    (["--device", "tpu"], "--device 'tpu' is not known. Use cpu, gpu or gpu:N."),
    (["--device", "gpu:"], "--device 'gpu:' is not known. Use cpu, gpu or gpu:N."),
    (
        ["--device", "gpu"],
        f"--device 'gpu' needs a GPU, and jax {jax.__version__} finds none. Use --device cpu.",
    ),
    (
        ["--text", "{tmp}/none.txt"],
        "--text '{tmp}/none.txt' cannot be read: No such file or directory. "
        "Give the path of a text file.",
    ),
    (
        ["--width", "50", "--heads", "3"],
        "--width 50 cannot be split over --heads 3. Give a --width that is a multiple of 3.",
    ),
    (["--steps", "0"], "argument --steps: got '0', give a whole number from 1 up"),
    (["--threads", "1"], "unknown arguments: --threads 1. See train_jax.py --help."),
)


@pytest.mark.parametrize(
    ("argv", "message"), BAD_TRAINING, ids=[" ".join(argv) for argv, _ in BAD_TRAINING]
)
def test_a_bad_argument_gets_one_line_before_any_training(
    parts: argparse.Namespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(parts.train_jax, "train", lambda *_: pytest.fail("it trained"))
    monkeypatch.setattr(jax, "devices", lambda kind: [jax.local_devices()[0]] * known(kind))
    argv = ["--out", f"{tmp_path}/x.png", *(part.format(tmp=tmp_path) for part in argv)]
    with pytest.raises(SystemExit) as stop:
        parts.train_jax.main(argv)
    assert stop.value.code == 2
    told = capsys.readouterr()
    assert told.err == f"train_jax.py: error: {message.format(tmp=tmp_path)}\n"
    assert told.out == ""
    assert list(tmp_path.iterdir()) == []


def known(kind: str) -> int:
    """As jax.devices on a machine without a GPU: how many there are of a kind."""
    if kind != "cpu":
        raise RuntimeError(f"Unknown backend: '{kind}' requested")
    return 1


def test_a_gpu_that_is_not_here(parts: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda kind: [f"{kind} 0", f"{kind} 1"])
    with pytest.raises(parts.job.BadArgument) as bad:
        parts.train_jax.find_device("gpu:2")
    assert str(bad.value) == (
        "--device 'gpu:2' is not here: jax finds gpu:0 to gpu:1. Use one of these."
    )
    assert parts.train_jax.find_device("gpu:1") == "gpu 1"
    assert parts.train_jax.find_device("gpu") == "gpu 0"


BAD_COMPARISON: tuple[tuple[list[str], str], ...] = (
    (
        ["--torch", "{tmp}/none.json"],
        "--torch '{tmp}/none.json' cannot be read: No such file or directory. "
        "Run train_torch.py first.",
    ),
    (
        ["--jax", "{tmp}/none.json"],
        "--jax '{tmp}/none.json' cannot be read: No such file or directory. "
        "Run train_jax.py first.",
    ),
    (
        ["--jax", "{tmp}/words.txt"],
        "--jax '{tmp}/words.txt' does not hold the figures of train_jax.py. Run it again.",
    ),
    (
        ["--jax", "{tmp}/list.json"],
        "--jax '{tmp}/list.json' does not hold the figures of train_jax.py. Run it again.",
    ),
    (
        ["--jax", "{tmp}/torch.json"],
        "--jax '{tmp}/torch.json' holds figures of torch 2.0. Give those of train_jax.py.",
    ),
    (
        ["--jax", "{tmp}/longer.json"],
        "the figures are of different jobs: steps is 60 in torch's and 61 in JAX's. "
        "Run both examples with the same arguments.",
    ),
    (
        ["--jax", "{tmp}/other text.json"],
        "the figures are of different jobs: chance is 3.0 in torch's and 3.5 in JAX's. "
        "Run both examples with the same arguments.",
    ),
    (
        ["--out", "{tmp}/both.pdf"],
        "--out '{tmp}/both.pdf' does not end in .png. Give the path of a PNG file.",
    ),
    (
        ["--jax", "{tmp}/x.txt"],
        "the table '{tmp}/x.txt' would overwrite --jax. Choose another path.",
    ),
    (
        ["--out", "{tmp}/words.txt/x.png"],
        "--out '{tmp}/words.txt/x.png' cannot be written: Not a directory. Choose another path.",
    ),
    (["--step", "3"], "unknown arguments: --step 3. See compare.py --help."),
)


def figures(framework: str, steps: int = 60, chance: float = 3.0, loss: float | None = 2.0) -> str:
    """A file as an example saves it."""
    one = {
        "dtype": "fp16",
        "parameters": 1,
        "train_loss": [2.0, loss],
        "held_out": [[0, 3.0], [2, loss]],
        "seconds": [1.0, 1.0],
        "scale": [4.0, 4.0, 2.0],
        "skipped": [2],
        "peak_memory": 1,
    }
    made_by = {"framework": framework, "device": "CPU", "memory": "all"}
    settings = {"steps": steps, "batch": 1, "context": 1, "out": framework, "text": framework}
    settings |= {"threads": 1} if framework.startswith("torch") else {}
    text = {"name": "words", "chance": chance}
    return json.dumps({**made_by, "settings": settings, "text": text, "runs": [one]})


def test_runs_that_diverged_in_one_dtype_are_still_compared(
    parts: argparse.Namespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch.json").write_text(figures("torch 2.0", loss=None))
    (tmp_path / "jax.json").write_text(figures("jax 0.1"))
    files = ["--torch", "{tmp}/torch.json", "--jax", "{tmp}/jax.json", "--out", "{tmp}/x.png"]
    parts.compare.main([part.format(tmp=tmp_path) for part in files])
    cells = {name: rest for name, *rest in examples.rows(capsys.readouterr().out)}
    assert cells["loss after"] == ["nan", "2.0000"]
    assert cells["against torch"] == ["-", "+nan %"]
    assert cells["against fp32"] == ["-", "-"]
    assert imread(tmp_path / "x.png").shape == (1260, 1800, 4)


@pytest.mark.parametrize(
    ("argv", "message"), BAD_COMPARISON, ids=[" ".join(argv) for argv, _ in BAD_COMPARISON]
)
def test_what_cannot_be_compared_gets_one_line(
    parts: argparse.Namespace,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    message: str,
) -> None:
    (tmp_path / "torch.json").write_text(figures("torch 2.0"))
    (tmp_path / "jax.json").write_text(figures("jax 0.1"))
    (tmp_path / "x.txt").write_text(figures("jax 0.1"))
    (tmp_path / "longer.json").write_text(figures("jax 0.1", steps=61))
    (tmp_path / "other text.json").write_text(figures("jax 0.1", chance=3.5))
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "words.txt").write_text("no figures")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    files = ["--torch", "{tmp}/torch.json", "--jax", "{tmp}/jax.json", "--out", "{tmp}/x.png"]
    with pytest.raises(SystemExit) as stop:
        parts.compare.main([part.format(tmp=tmp_path) for part in (*files, *argv)])
    assert stop.value.code == 2
    told = capsys.readouterr()
    assert told.err == f"compare.py: error: {message.format(tmp=tmp_path)}\n"
    assert told.out == ""
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("script", "argv", "message"),
    [
        ("train_jax.py", ("--device", "tpu"), BAD_TRAINING[0][1]),
        (
            "compare.py",
            ("--torch", "none.json"),
            "--torch 'none.json' cannot be read: No such file or directory. "
            "Run train_torch.py first.",
        ),
    ],
)
def test_what_is_bad_ends_the_process_with_2(
    script: str, argv: tuple[str, ...], message: str
) -> None:
    done = examples.run(script, *argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{script}: error: {message}\n"


@pytest.mark.parametrize(
    ("script", "package", "extras"),
    [("train_jax.py", "jax", "jax,examples"), ("compare.py", "numpy", "examples")],
)
def test_a_missing_package_is_named(script: str, package: str, extras: str) -> None:
    done = examples.run(script, python=("-S",))  # without site-packages
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"{script}: error: the package '{package}' is missing. Run "
        f"pip install -e '.[{extras}]' at the top of the repository.\n"
    )
