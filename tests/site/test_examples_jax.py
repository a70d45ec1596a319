"""The JAX example, and the comparison: both frameworks learn the same from the same weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
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

from polymp.testing import ParityError, assert_parity  # noqa: E402
from tests.support import examples  # noqa: E402
from tests.support.decisions import recording  # noqa: E402
from tests.support.examples import TINY, falls  # noqa: E402
from tests.support.sizes import size  # noqa: E402


@pytest.fixture(scope="module")
def parts() -> Iterator[argparse.Namespace]:
    with examples.modules("job", "report", "picture", "train_jax", "compare") as found:
        yield found


def test_the_first_weights_are_the_seed_s(parts: argparse.Namespace) -> None:
    def weights(seed: str) -> dict[str, np.ndarray]:
        args = parts.job.arguments(
            parts.job.parser("x", "", parts.job.SMALL), [*TINY, "--seed", seed]
        )
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


def test_bytes_saved_are_what_the_backward_pass_needs_besides_the_parameters(
    parts: argparse.Namespace,
) -> None:
    params = {"a": jnp.ones(10), "b": jnp.ones(10)}

    def saved(forward: Any) -> int:
        return parts.train_jax.bytes_saved(params, forward)

    assert saved(lambda p: p["a"].sum() + p["b"].sum()) == 0
    assert saved(lambda p: (p["a"] * p["b"]).sum()) == 0  # the parameters themselves
    assert saved(lambda p: jnp.sin(p["a"]).sum()) == 4 * 10
    assert saved(lambda p: jnp.sin(p["a"].astype(jnp.float16)).sum()) == 2 * 10


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
        "saved": 1,
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


@pytest.mark.one_in(2)
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


# --- the worked example of parity: one transformer in torch and in flax ---------------------------

SIZES = argparse.Namespace(
    batch=1, context=4, width=8, layers=1, heads=2, seed=0, steps=size(3, 10), lr=0.1
)  # fmt: skip


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with (
        examples.modules("compare_models", "train_torch", "train_jax", "job") as found,
        recording(),
    ):
        yield SimpleNamespace(it=found.compare_models, job=found.job)


@pytest.mark.long  # test_examples_trained.py compares the same models' losses
@pytest.mark.parametrize("name", ["fp32", "fp16"])
def test_the_models_are_the_same_forward_backward_and_in_training(example: Any, name: str) -> None:
    text = example.job.read(None, SIZES.context)
    once, trained = example.it.compare(name, text, SIZES)
    weights = example.job.first_weights(text.alphabet, SIZES)
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


@pytest.mark.long  # tests/shared/test_parity_cases.py plants as much into smaller models
def test_a_model_that_differs_in_one_weight_is_noticed(example: Any) -> None:
    text = example.job.read(None, SIZES.context)
    weights = example.job.first_weights(text.alphabet, SIZES)
    tokens = next(example.job.batches(text, SIZES))
    ours = example.it.torch_loss(SIZES, text.alphabet)
    theirs = example.it.jax_loss(SIZES, text.alphabet)

    def off(weights: Any, tokens: Any) -> Any:
        return theirs({**weights, "norm.weight": weights["norm.weight"] * 1.1}, tokens)

    with pytest.raises(ParityError) as caught:
        assert_parity(ours, off, [weights, tokens], dtype="bfloat16", probes=2)
    assert caught.value.op == "layer_norm"
