"""`polymp doctor`: what it says of made-up machines, and that it sees this one."""

import json
import re
import sys
from importlib import metadata

import pytest

from polymp import backends, versions
from polymp.cli import doctor
from tests.conftest import need
from tests.support.blocks import ROOT
from tests.support.commands import JAX, TORCH, facts, process, table


@pytest.fixture
def told(answer, monkeypatch):
    """Returns what `doctor --json` prints on a machine made up."""

    def found(machine, code=0):
        monkeypatch.setattr(doctor, "gather", lambda: machine)
        return answer("doctor", code=code)

    return found


@pytest.mark.parametrize(
    ("torch", "jax", "problems"),
    [
        ("2.11.0", "0.11.4", []),
        ("2.15.1+cu132", "", []),
        ("", "0.10.2", []),
        ("", "0.10.0", ["jax 0.10.0 is not supported: pip install 'jax>=0.10.2,<0.12'."]),
        ("2.10.2", "0.10.2", ["torch 2.10.2 is not supported: pip install 'torch>=2.11,<2.16'."]),
        (
            "2.16.0a0",
            "0.10.2",
            ["torch 2.16.0a0 is not supported: pip install 'torch>=2.11,<2.16'."],
        ),
        ("2.13.0", "0.9.1", ["jax 0.9.1 is not supported: pip install 'jax>=0.10.2,<0.12'."]),
        (
            "",
            "",
            ["neither torch nor jax is installed: pip install 'polymp[torch]' or 'polymp[jax]'."],
        ),
    ],
)
def test_versions(torch, jax, problems, told):
    machine = facts(TORCH | {"version": torch}, JAX | {"version": jax})
    found = told(machine, code=int(bool(problems)))
    assert found["problems"] == problems
    assert found["ok"] is not bool(problems)


def test_a_broken_framework_is_a_problem_and_an_unused_gpu_is_noted(told):
    broken = TORCH | {"problem": "ImportError: libc10.so: cannot open shared object file"}
    assert told(facts(broken, JAX), code=1)["problems"] == [
        "torch 2.13.0+cpu does not work: ImportError: libc10.so: cannot open shared object file"
    ]
    found = told(facts(TORCH | {"devices": ["cpu", "NVIDIA H100"]}, JAX, nvidia=True))
    assert found["ok"]
    assert found["notes"] == [
        "an NVIDIA driver is loaded, but jax sees no GPU: is it a build for CPUs?"
    ]
    assert told(facts())["notes"] == []


def test_doctor_draws_what_it_found(polymp, monkeypatch):
    machine = facts(TORCH | {"version": "2.9.1", "devices": ["cpu", *["Tesla T4"] * 2]}, JAX)
    monkeypatch.setattr(doctor, "gather", lambda: machine)
    monkeypatch.setattr(backends, "processor", lambda: ("EPYC", {"sse", "avx512_bf16"}))
    code, out, err = polymp("doctor")
    assert (code, err) == (1, "")
    assert "\nEPYC, instructions for bfloat16: avx512_bf16\ntorch 2.9.1: cpu, Tesla T4 x2\n" in out
    assert "\njax 0.10.2: cpu\n\n" in out
    assert "problem: torch 2.9.1 is not supported: pip install 'torch>=2.11,<2.16'.\n" in out
    assert "nothing is wrong" not in out
    monkeypatch.setattr(doctor, "gather", facts)
    monkeypatch.setattr(backends, "processor", lambda: ("Zen 3", {"avx2"}))
    code, out, _ = polymp("doctor")
    assert code == 0
    assert "\nZen 3, instructions for bfloat16: none\n" in out
    monkeypatch.setattr(backends, "processor", lambda: ("CPU", None))
    assert "\nCPU\n" in polymp("doctor")[1]
    assert out.endswith("nothing is wrong\n")


def test_doctor_sees_this_machine():
    need("torch", "jax")
    run = process("doctor", "--json")
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(run.stdout)
    assert {f["name"]: f["version"] for f in found["frameworks"]} == {
        name: metadata.version(name) for name in ("torch", "jax")
    }
    assert all(f["devices"] for f in found["frameworks"])


@pytest.mark.parametrize(
    ("kind", "names"), [("cuda", ["cpu", "GPU 0", "GPU 1"]), ("mps", ["cpu", "mps", "mps"])]
)
def test_the_devices_of_torch(kind, names, monkeypatch):
    need("torch")
    import torch

    device = torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", "GPU {}".format)
    monkeypatch.setattr(doctor, "_jax_devices", list)
    assert doctor.gather()[0][0]["devices"] == names


def test_doctor_where_nothing_is_installed():
    run = process("doctor", "--json", blocked=("torch", "jax"))
    found = json.loads(run.stdout)
    assert run.returncode == 1
    assert [f["version"] for f in found["frameworks"]] == ["", ""]
    assert found["problems"] == [
        "neither torch nor jax is installed: pip install 'polymp[torch]' or 'polymp[jax]'."
    ]


def test_the_oldest_and_the_newest_versions_are_pinned_for_test_versions():
    for name, bounds in versions.SUPPORTED.items():
        first, end = map(versions.parts, bounds.split(","))
        for which, expected in (("oldest", first), ("newest", (end[0], end[1] - 1))):
            pins = (ROOT / f"constraints-{which}.txt").read_text()
            found = re.search(rf"^{name}==(.*?)( ;|$)", pins, re.MULTILINE)
            assert versions.parts(found[1])[: len(expected)] == expected


# --- `polymp doctor --model`: the times of a step in each dtype, and models that it refuses -------


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

def leaves():
    raise SystemExit(0)

low = lambda: (nn.Linear(3, 3).half(), (torch.ones(2, 3).half(),))
"""
JAX_MODELS = """\
import jax
import jax.numpy as jnp

def example():
    grad = jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w)))
    return grad, (jnp.ones((8, 16)), jnp.ones((4, 8)))

low = lambda: (jnp.tanh, (jnp.ones((4, 8), "bfloat16"),))

def module():
    from flax import nnx

    return nnx.Linear(8, 16, rngs=nnx.Rngs(0)), (jnp.ones((4, 8)),)
"""


@pytest.fixture
def models(polymp, tmp_path, monkeypatch):
    """Puts the modules mt and mj, and two that cannot be imported, into the current folder."""
    (tmp_path / "mt.py").write_text(TORCH_MODELS)
    (tmp_path / "mj.py").write_text(JAX_MODELS)
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "exiting.py").write_text("raise SystemExit(0)\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield polymp
    for name in ("mt", "mj", "broken", "exiting"):
        sys.modules.pop(name, None)


@pytest.fixture
def times(models, answer, monkeypatch):
    """Returns the times that `doctor --json` prints for a model."""
    monkeypatch.setattr(doctor, "BUDGET", 0.5)
    return lambda model: answer("doctor", "--model", model)["step"]


@pytest.mark.parametrize(
    ("model", "framework", "passes"),
    [
        ("mt:example", "torch", "forward and backward"),
        ("mt.py:evaluated", "torch", "forward"),
        ("mj:example", "jax", "one call, compiled"),
        ("mj:module", "jax", "one call, compiled"),
    ],
)
def test_doctor_times_the_step_of_a_model(model, framework, passes, times):
    need("torch", "jax")
    step = times(model)
    assert (step["framework"], step["model"], step["passes"]) == (framework, model, passes)
    assert [*step["seconds"]] == ["float32", "bfloat16", "float16"]
    assert all(seconds > 0 for seconds in step["seconds"].values())
    for dtype, ratio in step["ratio"].items():
        assert ratio == step["seconds"][dtype] / step["seconds"]["float32"]
    assert step["use"] in step["seconds"]
    assert step["rounds"] >= 3
    assert step["lacking"] == {}


def test_a_dtype_that_the_model_does_not_run_in_is_left_out(times):
    need("torch")
    step = times("mt:only_float32")
    assert [*step["seconds"]] == ["float32"]
    why = "NameError: name 'fail' is not defined (mt.py:28)"
    assert step["lacking"] == {"bfloat16": why, "float16": why}
    assert step["use"] == "float32"


@pytest.mark.parametrize(
    ("bfloat16", "float16", "use"),
    [
        (0.5, 0.45, "bfloat16"),
        (0.5, 0.35, "float16"),
        (1.1, 0.7, "float16"),
        (0.96, 1.3, "float32"),
        (0.5, None, "bfloat16"),
        (None, 0.9, "float16"),
        (None, None, "float32"),
    ],
)
def test_the_advised_dtype(bfloat16, float16, use):
    ratios = {"float32": 1.0, "bfloat16": bfloat16, "float16": float16}
    assert doctor.advised({d: ratio for d, ratio in ratios.items() if ratio})[0] == use


HOW = (
    "Return (model, inputs): a torch module and the tuple of its inputs, or a JAX function and "
    "the tuple of its arguments. A single input x is the tuple (x,)."
)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "mt",
            "this is not MODULE:FUNCTION, as train:example for the function example in ",
        ),
        ("a/mt.py", "this is not MODULE:FUNCTION"),
        ("a/mt.py:example", "ModuleNotFoundError: No module named 'a'"),
        ("mt:", "this is not MODULE:FUNCTION"),
        ("none_such:example", "ModuleNotFoundError: No module named 'none_such'"),
        ("mt.inner:example", "ModuleNotFoundError: No module named 'mt.inner'"),
        ("broken:example", "ModuleNotFoundError: No module named 'nothing_of_that_name' (broken"),
        ("mt:exampel", "AttributeError: module 'mt' has no attribute 'exampel'"),
        ("mt:model_alone", f"model_alone() returned Linear. {HOW}"),
        ("mt:three", f"three() returned (Linear, tuple, int). {HOW}"),
        ("mt:no_model", f"no_model() returned (Tensor, tuple). {HOW}"),
        ("mt:input_alone", f"input_alone() returned (Linear, Tensor). {HOW}"),
        ("mt:fails", "ValueError: no data (mt.py:34)"),
        ("mt:leaves", "SystemExit: 0"),
        ("exiting:example", "SystemExit: 0"),
        ("mt:low", "a parameter is float16. Return it in float32, for autocast to lower."),
        ("mj:low", "an argument is bfloat16. Return it in float32"),
        ("mt:wrong_shape", "calling the model on its inputs failed: RuntimeError: mat1 and mat2"),
    ],
)
@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["table", "json"])
def test_a_model_that_cannot_be_timed(model, said, flags, models):
    need("jax" if model == "mj:low" else "torch")
    code, out, err = models("doctor", "--model", model, *flags)
    assert (code, out) == (2, "")
    assert err.startswith(f"polymp: --model {model}: ")
    assert said in err
    assert err.count("\n") == 1


PRINTING = """
import torch
print("loaded")

def works():
    print("made")
    return torch.nn.Linear(2, 2), (torch.ones(1, 2),)
"""


def test_what_a_model_prints_is_no_part_of_the_answer(polymp, tmp_path, monkeypatch):
    need("torch")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "printing.py").write_text(PRINTING)
    monkeypatch.setattr(doctor, "BUDGET", 0.1)
    code, out, err = polymp("doctor", "--model", "printing:works", "--json")
    assert (code, json.loads(out)["ok"], err) == (0, True, "loaded\nmade\n")


def test_doctor_draws_the_times(polymp, monkeypatch):
    step = {
        "framework": "torch",
        "device": "cpu",
        "model": "m:f",
        "passes": "forward",
        "rounds": 7,
        "seconds": {"float32": 8e-3, "bfloat16": 5.5e-3},
        "ratio": {"float32": 1.0, "bfloat16": 0.6875},
        "use": "bfloat16",
        "why": "because",
        "lacking": {"float16": "RuntimeError: none here"},
    }
    monkeypatch.setattr(doctor, "timed", lambda *asked: step)
    monkeypatch.setattr(doctor, "gather", facts)
    code, out, err = polymp("doctor", "--model", "m:f")
    assert (code, err) == (0, "")
    assert "m:f in torch on cpu, forward: median of 7 rounds\n" in out
    cells = table(out)
    assert cells["float32"] == ["8.000 ms", "1.00"]
    assert cells["bfloat16"] == ["5.500 ms", "0.69"]
    assert "\nuse bfloat16: because\n" in out
    assert "float16 does not run: RuntimeError: none here\n" in out
    assert out.endswith("nothing is wrong\n")
    assert max(map(len, out.splitlines())) <= 80
