"""The pytest plugin `polymp.testing.records`, in processes of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import need
from tests.support import forks

TORCH = """\
import torch
from torch import nn

EPSILON = 1e-5
MODEL = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, eps=EPSILON), nn.Linear(8, 2))
with torch.no_grad():
    for p in MODEL.parameters():
        p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape))


def test_step(polymp_record):
    for _ in range(2):
        with polymp_record(MODEL):
            MODEL(torch.linspace(-1, 2, 32).reshape(4, 8)).sum().backward()


def test_without_a_fixture():
    pass
"""

JAX = """\
import jax
import jax.numpy as jnp
import pytest

EPSILON = 1e-5


def loss(w, x):
    h = x @ w
    return jnp.sum(jnp.tanh(h) / jnp.sqrt(h * h + EPSILON))


@pytest.mark.parametrize("start", [-1, -2])  # of one shape: what is recorded is compiled once
def test_step(polymp_record, start):
    w = jnp.linspace(start, 2, 16).reshape(4, 4)
    assert polymp_record(jax.grad(loss))(w, jnp.ones((3, 4))).shape == (4, 4)
"""


AROUND = """\


@pytest.fixture
def recorded(polymp_record):
    with polymp_record(MODEL):
        yield


def test_step(recorded):
    MODEL(torch.linspace(-1, 2, 32).reshape(4, 8)).sum().backward()
"""


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with a test file for one framework."""
    framework = getattr(request, "param", "torch")
    need(framework)
    text = {"torch": TORCH, "jax": JAX}[framework]
    (tmp_path / "test_model.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    return tmp_path


def run(folder: Path, *options: str, code: int = 0) -> str:
    printed = folder / "printed"
    call = forks.Call(__name__, "pytest_in", (str(folder), *options), str(printed))
    env = {"COLUMNS": "100", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    forks.run(forks.BOTH, [call._replace(env=env, strict=False)])
    out = printed.read_text()
    assert out.endswith(f"exit code {code}\n"), out
    return out


def pytest_in(folder: str, *options: str) -> None:
    os.chdir(folder)
    plugins = ("-p", "polymp.testing.records", "-p", "no:cacheprovider")
    print(f"exit code {pytest.main(['-q', *plugins, *options]):d}")


@pytest.mark.parametrize("folder", ["torch", "jax"], indirect=True)
def test_records_are_written_and_compared(folder: Path) -> None:
    count = 1 if "torch" in (folder / "test_model.py").read_text() else 2
    run(folder)
    assert {path.name for path in folder.iterdir() if path.is_dir()} <= {"__pycache__"}
    run(folder, "--polymp-record=a/before")
    names = sorted(path.name for path in (folder / "a/before").iterdir())
    assert len(names) == count
    assert all(name.startswith("test_model.py-test_step") for name in names)

    out = run(folder, "--polymp-against=a/before")
    word = "record" if count == 1 else "records"
    assert f"polymp: {count} {word} compared with a/before\n" in out
    assert "2 passed" in out

    model = folder / "test_model.py"
    model.write_text(model.read_text().replace("EPSILON = 1e-5", "EPSILON = 1e-2"))
    out = run(folder, "--polymp-against=a/before", "--polymp-record=after", code=1)
    assert "ROUNDING DOES NOT EXPLAIN" in out
    assert "a/before (" in out
    assert " and this run (" in out
    assert f"{count} failed" in out
    assert sorted(path.name for path in (folder / "after").iterdir()) == names


def test_a_test_without_an_earlier_record_is_not_compared_and_the_summary_says_so(
    folder: Path,
) -> None:
    (folder / "empty").mkdir()
    out = run(folder, "--polymp-against=empty")
    assert "polymp: 0 records compared with empty\n" in out
    assert "polymp: empty has no record of test_model.py::test_step" in out


def test_a_test_may_change_into_another_folder(folder: Path) -> None:
    model = folder / "test_model.py"
    moved = "test_step(polymp_record, monkeypatch):\n    monkeypatch.chdir('/')\n"
    model.write_text(model.read_text().replace("test_step(polymp_record):\n", moved))
    run(folder, "--polymp-record=before")
    assert "1 record compared with before\n" in run(folder, "--polymp-against=before")


def test_an_earlier_record_that_is_damaged_fails_the_test(folder: Path) -> None:
    run(folder, "--polymp-record=before")
    for path in (folder / "before").iterdir():
        path.write_text("{}")
    out = run(folder, "--polymp-against=before", code=1)
    assert "is no record of polymp" in out


def test_a_test_that_fails_by_itself_is_not_compared(folder: Path) -> None:
    run(folder, "--polymp-record=before")
    model = folder / "test_model.py"
    model.write_text(f"{model.read_text()}    raise RuntimeError('its own')\n")
    out = run(folder, "--polymp-against=before", code=1)
    assert "RuntimeError: its own" in out
    assert "polymp: " not in out.replace("polymp: 0 records", "").replace("polymp: 1 record ", "")


@pytest.mark.parametrize("folder", ["torch"], indirect=True)
def test_a_fixture_may_record_the_test_that_it_is_around(folder: Path) -> None:
    model = folder / "test_model.py"
    start, _ = TORCH.split("\n\ndef test_step")
    model.write_text(f"import pytest\n{start}{AROUND}")
    run(folder, "--polymp-record=before")
    assert "1 record compared" in run(folder, "--polymp-against=before")
    model.write_text(model.read_text().replace("1e-5", "1e-2"))
    assert "ROUNDING DOES NOT EXPLAIN" in run(folder, "--polymp-against=before", code=1)


@pytest.mark.parametrize("folder", ["torch"], indirect=True)
def test_a_recorder_without_a_step_fails_the_test(folder: Path) -> None:
    model = folder / "test_model.py"
    model.write_text(
        model.read_text().replace("with polymp_record(MODEL)", "if polymp_record(MODEL)")
    )
    run(folder)
    out = run(folder, "--polymp-record=before", code=1)
    assert "recorded no step: use `with polymp_record(model):`; in JAX, call" in out


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text("def test(): pass\n")
    out = run(tmp_path, "--polymp-against=gone", code=4)
    assert "ERROR: --polymp-against: there is no folder 'gone'." in out
    (tmp_path / "same").mkdir()
    out = run(tmp_path, "--polymp-against=same", "--polymp-record=./same", code=4)
    assert "--polymp-record and --polymp-against are one folder" in out
    out = run(tmp_path, "--polymp-record=test_nothing.py", code=4)
    assert "--polymp-record='test_nothing.py': File exists. Write the path of a folder." in out
