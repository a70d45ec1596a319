"""`polymp doctor --measure`: what it measures, and what it refuses to measure."""

import sys

import pytest

from polymp import cli
from polymp.cli import doctor
from tests.conftest import need
from tests.support.commands import process, table
from tests.support.machines import XEON, facts

TORCH_MODELS = """\
import torch
from torch import nn

def example():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (torch.ones(4, 8),)

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

def without_products():
    return nn.ReLU(), (torch.ones(2, 4),)

def fails():
    raise ValueError("no data")
"""
JAX_MODELS = """\
import jax
import jax.numpy as jnp

def example():
    grad = jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w)))
    return grad, (jnp.ones((8, 16)), jnp.ones((4, 8)))
"""
WAYS = ["float32", "bfloat16", "float16"]


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


def measure(answer, *argv):
    """Return the measurements that `doctor --json` prints."""
    found = answer("doctor", "--seconds", "0.5", *argv)
    assert found["ok"]
    return found["measurements"]


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_doctor_measures_shapes(framework, answer):
    need("torch"), need("jax")
    argv = ("--shapes", "4x8x16,1x32x8", "--framework", framework)
    (found,) = measure(answer, *argv)
    assert set(found) == {
        *("framework", "device", "model", "clock", "took", "casts", "products", "ratio", "use"),
        *("why", "more", "left_out", "flops", "lacking"),
    }
    assert (found["framework"], found["model"], found["left_out"]) == (framework, "", {})
    assert [p["shape"] for p in found["products"]] == ["4x8x16", "1x32x8"]
    for product in found["products"]:
        assert set(product) == {
            *("op", "batch", "m", "k", "n", "shape", "flops", "values", "casts", "weights"),
            *("direction", "times", "measured", "seconds", "ratio", "spread", "use"),
        }
        assert [way for way in product["seconds"] if way in WAYS] == WAYS
        assert all(took > 0 for took in product["seconds"].values())
        assert product["ratio"]["float32"] == 1
        assert product["casts"] == product["weights"] == product["k"] * product["n"]
        assert product["use"] in WAYS
    assert any(product["measured"] for product in found["products"])
    assert found["flops"] == 2 * (4 * 8 * 16 + 32 * 8)
    assert found["use"] in WAYS
    assert "float8_e4m3fn" in {*found["ratio"], *found["lacking"]}


def test_doctor_measures_in_both_frameworks_and_in_torch_by_default(answer):
    need("torch"), need("jax")
    for argv in (("--framework", "torch", "jax"), ("--framework", "torch", "--framework", "jax")):
        found = measure(answer, "--shapes", "4x8x16", *argv)
        assert [m["framework"] for m in found] == ["torch", "jax"]
    (found,) = measure(answer, "--measure")
    assert found["framework"] == "torch"
    assert len(found["products"]) > 3


def test_doctor_measures_a_model_of_each_framework(models, answer):
    need("torch"), need("jax")
    (found,) = measure(answer, "--model", "mt:example")
    assert (found["framework"], found["model"]) == ("torch", "mt:example")
    forward = [p for p in found["products"] if p["direction"] == "forward"]
    assert [p["shape"] for p in forward] == ["4x8x16", "4x16x4"]
    assert len(found["products"]) == 5  # the input needs no gradient
    (found,) = measure(answer, "--model", "mj:example")
    assert found["framework"] == "jax"
    assert [p["direction"] for p in found["products"]] == ["forward", "backward"]


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
        ("mt:exampel", "module 'mt' has no function 'exampel'. It has example, model_alone, "),
        ("mt:model_alone", f"model_alone() returned Linear. {HOW}"),
        ("mt:three", f"three() returned a tuple of 3. {HOW}"),
        ("mt:no_model", f"no_model() returned Tensor for a model. {HOW}"),
        ("mt:input_alone", f"returned Tensor for the inputs. {HOW} A single input x is the tuple"),
        ("mt:fails", "fails() failed: ValueError: no data (mt.py:26)"),
        ("mt:wrong_shape", "calling the model on its inputs failed: RuntimeError: mat1 and mat2"),
        ("mt:without_products", "no matrix product or convolution of the model runs in bfloat16"),
    ],
)
def test_a_model_that_cannot_be_measured(model, said, models):
    need("torch")
    code, out, err = models("doctor", "--model", model)
    assert (code, out) == (2, "")
    assert err.startswith(f"polymp: --model {model}: ")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--framework", "jax"), "--framework: nothing is measured without --measure, "),
        (("--seconds", "2"), "--seconds: nothing is measured without --measure, --model or "),
        (
            ("--model", "mt:example", "--framework", "jax"),
            "--framework jax: the model of --model mt:example is a torch module. Leave --framework",
        ),
    ],
)
def test_options_of_measuring_that_do_not_fit(argv, said, models):
    need("torch"), need("jax")
    code, out, err = models("doctor", *argv)
    assert (code, out) == (2, "")
    assert err.startswith(f"polymp: {said}")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--shapes", "12x3"), "'12x3' is no shape of a linear layer. Write rows x inputs x out"),
        (("--shapes", "1x2x3,0x1x2"), "'0x1x2' is no shape of a linear layer."),
        (("--shapes", "1x2x3,"), "'' is no shape of a linear layer."),
        (("--measure", "--seconds", "0.1"), "'0.1' is no number of seconds from 0.5 to 600."),
        (("--measure", "--seconds", "long"), "'long' is no number of seconds from 0.5 to 600."),
        (("--measure", "--shapes", "1x2x3"), "not allowed with argument --measure"),
        (("--measure", "--framework", "keras"), "invalid choice: 'keras'"),
    ],
)
def test_arguments_of_measuring_that_cannot_be_read(argv, said, polymp, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        polymp("doctor", *argv)
    assert said in capsys.readouterr().err


def test_a_framework_that_is_missing():
    run = process("doctor", "--measure", "--framework", "jax", blocked=("jax",))
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "polymp: backend 'jax' needs the jax package: pip install 'polymp[jax]'.\n"


def product(shape, measured=True, direction="forward", times=1, **low):
    ratios = {"float32": 1.0, **low}
    return {
        "op": "matmul",
        "shape": shape,
        "direction": direction,
        "times": times,
        "measured": measured,
        "seconds": {way: r * 2e-3 for way, r in ratios.items()},
        "ratio": ratios,
        "use": "bfloat16",
    }


def test_doctor_draws_what_it_measured(polymp, monkeypatch):
    rows = [
        product("8x8x8", bfloat16=0.5, **{"bfloat16, weights cast before": 0.25}),
        product("16x8x8", False, "backward", 3, bfloat16=0.75),
    ]
    measured = {
        "framework": "torch",
        "device": "cpu",
        "model": "m:f",
        "clock": "processor time of one thread",
        "took": 1.25,
        "casts": "all of them",
        "products": rows,
        "ratio": {"float32": {"ratio": 1.0}, "bfloat16": {"ratio": 0.6875},
                  "bfloat16, weights cast before": {"ratio": 0.625}},
        "use": "bfloat16",
        "why": "Because.",
        "more": ["And more."],
        "left_out": {"attention": 300},
        "flops": 700,
        "lacking": {"float8_e4m3fn": "none here"},
    }  # fmt: skip
    monkeypatch.setattr(cli.measurement, "measured", lambda *asked: [measured] * 2)
    monkeypatch.setattr(doctor, "gather", lambda: facts(doctor.cpu("torch", "Xeon", XEON)))
    code, out, err = polymp("doctor", "--measure")
    assert (code, err) == (0, "")
    said = "torch on cpu, processor time of one thread: 1 of 2 products measured in 1.2 s\n"
    assert out.count(said) == 2
    cells = table(out)
    assert cells["8x8x8"] == ["1", "2 ms", "0.50", "0.25", "bfloat16"]
    assert cells["16x8x8"] == ["3", "~2 ms", "0.75", "bfloat16"]
    assert cells["all 2"] == ["4", "8 ms", "0.69", "0.62", "bfloat16"]
    assert "\nuse bfloat16: Because.\nAnd more.\n" in out
    assert "not among the products: attention, 30 % of all FLOPs\n" in out
    assert "float8_e4m3fn: not measured: none here\n" in out
    assert "fast dtypes" not in out, "what the hardware says is not to argue with what was measured"
    assert out.endswith("nothing is wrong\n")
    assert max(map(len, out.splitlines())) <= 80
