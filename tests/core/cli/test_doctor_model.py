"""`polymp doctor --model`: the times of a step in each dtype, and models that it refuses."""

import sys

import pytest

from polymp.cli import doctor, model_times
from tests.conftest import need
from tests.support.commands import table
from tests.support.machines import XEON, facts

TORCH_MODELS = """\
import torch
from torch import nn

def example():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (torch.ones(4, 8),)

def evaluated():
    model, inputs = example()
    return model.eval(), inputs

def model_alone():
    return nn.Linear(3, 3)

def input_alone():
    return nn.Linear(3, 3), torch.ones(2, 3)

def three():
    return nn.Linear(3, 3), (torch.ones(2, 3),), 1

def no_model():
    return torch.ones(2), (torch.ones(2, 3),)

def wrong_shape():
    return nn.Linear(3, 3), (torch.ones(2, 4),)

class OnlyFloat32(nn.Module):
    def forward(self, x):
        return x.double() if torch.is_autocast_enabled("cpu") and fail() else x

def only_float32():
    return OnlyFloat32(), (torch.ones(2, 4),)

def fails():
    raise ValueError("no data")
"""
JAX_MODELS = """\
import jax
import jax.numpy as jnp

def example():
    grad = jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w)))
    return grad, (jnp.ones((8, 16)), jnp.ones((4, 8)))

def module():
    from flax import nnx

    return nnx.Linear(8, 16, rngs=nnx.Rngs(0)), (jnp.ones((4, 8)),)
"""


@pytest.fixture
def models(polymp, tmp_path, monkeypatch):
    """Puts the modules mt and mj, and one that cannot be imported, into the current folder."""
    (tmp_path / "mt.py").write_text(TORCH_MODELS)
    (tmp_path / "mj.py").write_text(JAX_MODELS)
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield polymp
    for name in ("mt", "mj", "broken"):
        sys.modules.pop(name, None)


def time_model(answer, model):
    """Return the times that `doctor --json` prints for a model."""
    data = answer("doctor", "--seconds", "0.5", "--model", model)
    assert data["ok"]
    return data["step"]


@pytest.mark.parametrize(
    ("model", "framework", "passes"),
    [
        ("mt:example", "torch", "forward and backward"),
        ("mt:evaluated", "torch", "forward"),
        ("mj:example", "jax", "one call, compiled"),
        ("mj:module", "jax", "one call, compiled"),
    ],
)
def test_doctor_times_the_step_of_a_model(model, framework, passes, models, answer):
    need("torch"), need("jax")
    step = time_model(answer, model)
    assert (step["framework"], step["model"], step["passes"]) == (framework, model, passes)
    assert [*step["seconds"]] == ["float32", "bfloat16", "float16"]
    assert all(seconds > 0 for seconds in step["seconds"].values())
    for dtype, ratio in step["ratio"].items():
        assert ratio["low"] <= ratio["high"]
        assert ratio["ratio"] == step["seconds"][dtype] / step["seconds"]["float32"]
    assert step["use"] in step["seconds"]
    assert step["rounds"] >= 3
    assert step["lacking"] == {}


def test_a_dtype_that_the_model_does_not_run_in_is_left_out(models, answer):
    need("torch")
    step = time_model(answer, "mt:only_float32")
    assert [*step["seconds"]] == ["float32"]
    why = "NameError: name 'fail' is not defined (mt.py:28)"
    assert step["lacking"] == {"bfloat16": why, "float16": why}
    assert step["use"] == "float32"


@pytest.mark.parametrize(
    ("bfloat16", "float16", "use"),
    [
        ((0.5, 0.6), (0.45, 0.5), "bfloat16"),
        ((0.5, 0.6), (0.35, 0.4), "float16"),
        ((1.1, 1.2), (0.7, 0.8), "float16"),
        ((0.96, 0.97), (1.3, 1.4), "float32"),
        ((0.8, 1.1), (1.3, 1.4), "float32"),
        ((0.5, 0.6), None, "bfloat16"),
        (None, (0.9, 0.95), "float16"),
    ],
)
def test_the_advised_dtype(bfloat16, float16, use):
    both = {"bfloat16": bfloat16, "float16": float16}
    ratios = {d: {"ratio": r[0], "low": r[0], "high": r[1]} for d, r in both.items() if r}
    assert model_times.advised(ratios)[0] == use


HOW = (
    "Return (model, inputs): a torch module and the tuple of its inputs, or a JAX function and "
    "the tuple of its arguments."
)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "mt",
            "this is not MODULE:FUNCTION, as train:example for the function example in ",
        ),
        ("mt.py:example", "train.py. Write mt:example."),
        ("a/mt.py", "train.py. Write a.mt:example."),
        ("mt:", "this is not MODULE:FUNCTION"),
        ("none_such:example", "there is no module 'none_such', neither installed nor in "),
        ("mt.inner:example", "there is no module 'mt.inner', neither installed nor in "),
        ("broken:example", "importing broken failed: ModuleNotFoundError: No module named 'noth"),
        ("mt:exampel", "module 'mt' has no function 'exampel'. It has example, evaluated, model_"),
        ("mt:model_alone", f"model_alone() returned Linear. {HOW}"),
        ("mt:three", f"three() returned a tuple of 3. {HOW}"),
        ("mt:no_model", f"no_model() returned Tensor for a model. {HOW}"),
        ("mt:input_alone", f"returned Tensor for the inputs. {HOW} A single input x is the tuple"),
        ("mt:fails", "fails() failed: ValueError: no data (mt.py:34)"),
        ("mt:wrong_shape", "calling the model on its inputs failed: RuntimeError: mat1 and mat2"),
    ],
)
def test_a_model_that_cannot_be_timed(model, said, models):
    need("torch")
    code, out, err = models("doctor", "--model", model)
    assert (code, out) == (2, "")
    assert err.startswith(f"polymp: --model {model}: ")
    assert said in err
    assert err.count("\n") == 1


def test_seconds_without_a_model(polymp):
    assert polymp("doctor", "--seconds", "2") == (
        2,
        "",
        "polymp: --seconds: nothing is timed without --model.\n",
    )


@pytest.mark.parametrize("seconds", ["0.1", "long"])
def test_seconds_that_cannot_be_read(seconds, polymp, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        polymp("doctor", "--model", "mt:example", "--seconds", seconds)
    assert f"{seconds!r} is no number of seconds from 0.5 to 600." in capsys.readouterr().err


def test_doctor_draws_the_times(polymp, monkeypatch):
    step = {
        "framework": "torch",
        "device": "cpu",
        "model": "m:f",
        "passes": "forward",
        "took": 1.25,
        "rounds": 7,
        "seconds": {"float32": 8e-3, "bfloat16": 5.5e-3},
        "ratio": {"bfloat16": {"ratio": 0.6875, "low": 0.65, "high": 0.7}},
        "use": "bfloat16",
        "why": "because",
        "lacking": {"float16": "RuntimeError: none here"},
    }
    monkeypatch.setattr(model_times, "timed", lambda *asked: step)
    monkeypatch.setattr(doctor, "gather", lambda: facts(doctor.cpu("torch", "Xeon", XEON)))
    code, out, err = polymp("doctor", "--model", "m:f")
    assert (code, err) == (0, "")
    assert "m:f in torch on cpu, forward: 7 rounds in 1.2 s\n" in out
    cells = table(out)
    assert cells["float32"] == ["8 ms", "1"]
    assert cells["bfloat16"] == ["5.5 ms", "0.69", "(0.65 to 0.70)"]
    assert "\nuse bfloat16: because\n" in out
    assert "float16 does not run: RuntimeError: none here\n" in out
    assert "fast dtypes" not in out, "what the hardware says is not to argue with what was measured"
    assert out.endswith("nothing is wrong\n")
    assert max(map(len, out.splitlines())) <= 80
