"""`polymp doctor`: what it says of made-up machines, and that it sees this one."""

import importlib
import json
import re
from importlib import metadata

import pytest

from polymp import cli, versions
from polymp.cli import doctor
from polymp.cli.doctor import Device, Engine, Framework
from tests.conftest import need
from tests.support.blocks import ROOT
from tests.support.commands import process, project, table
from tests.support.machines import FULL, JAX, TORCH, XEON, facts


@pytest.mark.parametrize(
    ("device", "use", "why"),
    [
        (doctor.cpu("torch", "Xeon", XEON), "bfloat16", "no gradient scaler"),
        (doctor.cpu("torch", "Graviton 2", frozenset({"asimdhp"})), "float16", "use a GradScaler"),
        (doctor.cpu("torch", "M2", frozenset({"FEAT_BF16", "FEAT_FP16"})), "bfloat16", "range"),
        (doctor.cpu("torch", "Skylake", frozenset({"avx512f"})), "", "stay in float32"),
        (doctor.cpu("torch", "half", frozenset({"avx512_fp16"})), "", "stay in float32"),
        (doctor.cpu("torch", "?", None), "bfloat16", "speed unknown"),
        (doctor.gpu("torch", "H100", (9, 0)), "bfloat16", "no gradient scaler"),
        (doctor.gpu("jax", "A100", (8, 0)), "bfloat16", "no gradient scaler"),
        (doctor.gpu("torch", "T4", (7, 5)), "float16", "use a GradScaler"),
        (doctor.gpu("torch", "V100", (7, 0)), "float16", "ends at 65504"),
        (doctor.gpu("torch", "P40", (6, 1)), "", "stay in float32"),
        (Device("jax", "tpu", "TPU v5", True, False, "a TPU"), "bfloat16", "no gradient scaler"),
    ],
    ids=lambda value: value.name.replace(" ", "") if isinstance(value, Device) else None,
)
def test_the_dtype_to_use(device, use, why):
    found, reason = doctor.advice(device)
    assert found == use
    assert why in reason
    [told] = doctor.diagnose(facts(device))["devices"]
    assert (told["use"], told["why"], told["by"]) == (use, reason, device.by)


def test_what_shows_that_a_dtype_is_fast():
    assert doctor.cpu("torch", "Xeon", XEON).by == "amx_bf16, avx512_bf16, avx512_fp16"
    assert doctor.cpu("torch", "old", frozenset({"avx2"})).by == "no bf16 or fp16 instructions"
    assert doctor.gpu("torch", "H100", (9, 0)).by == "compute capability 9.0"


@pytest.mark.parametrize(
    ("torch", "jax", "problems"),
    [
        ("2.11.0", "0.11.4", []),
        ("2.15.1+cu132", "", []),
        ("", "0.10.2", []),
        ("", "0.10.0", ["jax 0.10.0 is not supported: install jax 0.10.2 to 0.11."]),
        ("2.10.2", "0.10.2", ["torch 2.10.2 is not supported: install torch 2.11 to 2.15."]),
        ("2.16.0a0", "0.10.2", ["torch 2.16.0a0 is not supported: install torch 2.11 to 2.15."]),
        ("2.13.0", "0.9.1", ["jax 0.9.1 is not supported: install jax 0.10.2 to 0.11."]),
        (
            "",
            "",
            ["neither torch nor jax is installed: pip install 'polymp[torch]' or 'polymp[jax]'."],
        ),
        (
            "of unknown version",
            "",
            ["torch of unknown version is not supported: install torch 2.11 to 2.15."],
        ),
    ],
)
def test_versions(torch, jax, problems):
    machine = facts(frameworks=(Framework("torch", torch), Framework("jax", jax)))
    found = doctor.diagnose(machine)
    assert found["problems"] == problems
    assert found["ok"] is not bool(problems)


def test_a_broken_framework_is_a_problem():
    broken = TORCH._replace(problem="ImportError: libc10.so: cannot open shared object file")
    assert doctor.diagnose(facts(frameworks=(broken, JAX)))["problems"] == [
        "torch 2.13.0+cpu does not work: ImportError: libc10.so: cannot open shared object file"
    ]


def test_drift_and_an_unused_gpu_are_noted():
    engine = Engine("cuda", 120, {"default": 0}, ["newop"], ["oldop", "older"])
    found = doctor.diagnose(
        facts(doctor.gpu("torch", "H100", (9, 0)), engines=(FULL, engine), nvidia=True)
    )
    assert found["ok"]
    assert found["notes"] == [
        "an NVIDIA driver is loaded, but jax sees no GPU: is it a build for CPUs?",
        "the table torch-cuda has no row for newop: they run by torch's own kernels.",
        "the table torch-cuda has rows without a kernel in torch, oldop, older: not cast.",
    ]
    assert doctor.diagnose(facts())["notes"] == []


def test_doctor_draws_what_it_found(polymp, monkeypatch):
    engine = Engine("cuda", 120, {"default": 0, "amp": 21, "lean": 86}, ["newop"], ["oldop"])
    machine = facts(
        doctor.cpu("torch", "Xeon", XEON),
        doctor.gpu("jax", "Tesla T4", (7, 5)),
        doctor.gpu("torch", "P40", (6, 1)),
        frameworks=(TORCH._replace(version="2.9.1"), JAX),
        engines=(FULL, engine),
    )
    monkeypatch.setattr(doctor, "gather", lambda: machine)
    code, out, err = polymp("doctor")
    assert (code, err) == (1, "")
    assert re.search(r"torch +2\.9\.1 +torch 2\.11 to 2\.15 +cpu\n", out)
    assert re.search(r"torch cpu +bfloat16 +bfloat16\n", out)
    assert re.search(r"jax cuda +float16 +float16\n", out)
    assert re.search(r"torch cuda +none +float32\n", out)
    cells = table(out)
    assert cells["cpu"] == ["127", "0", "182", "211", "none"]
    assert cells["cuda"] == ["120", "0", "21", "86", "+newop, -oldop"]
    assert "problem: torch 2.9.1 is not supported: install torch 2.11 to 2.15.\n" in out
    assert "nothing is wrong" not in out
    monkeypatch.setattr(doctor, "gather", facts)
    code, out, _ = polymp("doctor")
    assert code == 0
    assert out.endswith("nothing is wrong\n")


def test_libraries_are_listed_with_their_line():
    found = doctor.diagnose(facts(libraries={"keras": "3.15.1", "lightning": "2.4.0"}))
    assert found["ok"]
    assert found["notes"] == [
        "polymp is not tested with lightning 2.4.0, but with lightning>=2.5,<2.7."
    ]
    keras, lightning = found["libraries"]
    assert keras == {
        "name": "keras",
        "version": "3.15.1",
        "framework": "jax",
        "tested": ">=3.15,<3.16",
        "supported": True,
        "adapter": "polymp.keras",
        "line": 'polymp.keras.use(model, policy="lean")',
    }
    assert not lightning["supported"]


def test_doctor_draws_libraries(polymp, monkeypatch):
    machine = facts(libraries={"keras": "3.15.1", "optax": "0.2.8"})
    monkeypatch.setattr(doctor, "gather", lambda: machine)
    _, out, _ = polymp("doctor")
    assert re.search(r"keras +3\.15\.1 +>=3\.15,<3\.16 +polymp\.keras\.use\(model", out)
    assert re.search(r"optax +0\.2\.8 +>=0\.2\.8,<0\.3 +scaler\.step", out)


def test_doctor_sees_this_machine():
    need("torch"), need("jax")
    run = process("doctor", "--json")
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(run.stdout)
    assert {f["name"]: f["version"] for f in found["frameworks"]} == {
        name: metadata.version(name) for name in ("torch", "jax")
    }
    assert {d["framework"] for d in found["devices"]} == {"torch", "jax"}
    native = importlib.import_module("polymp.backends.torch.autocast.torch_table")
    for engine in found["engines"]:
        assert engine["compiled"] == len(native.kernels(engine["device"]))
        assert [engine["new"], engine["gone"]] == list(native.drift(engine["device"]))
        assert engine["ours"]["default"] == 0 < engine["ours"]["matmul"]
    assert [e["device"] for e in found["engines"]] == list(cli.DEVICES)


def test_doctor_where_nothing_is_installed():
    run = process("doctor", "--json", blocked=("torch", "jax"))
    found = json.loads(run.stdout)
    assert run.returncode == 1
    assert [f["version"] for f in found["frameworks"]] == ["", ""]
    assert found["problems"] == [
        "neither torch nor jax is installed: pip install 'polymp[torch]' or 'polymp[jax]'."
    ]


def test_the_versions_are_those_that_can_be_installed():
    extras = project()["optional-dependencies"]
    for name in versions.SUPPORTED:
        assert f"{name}{versions.bounds(name)}" in extras[name]


def test_the_oldest_and_the_newest_versions_are_pinned_for_test_versions():
    for name, (first, end) in versions.SUPPORTED.items():
        for which, expected in (("oldest", first), ("newest", (end[0], end[1] - 1))):
            pins = (ROOT / f"constraints-{which}.txt").read_text()
            found = re.search(rf"^{name}==(.*?)( ;|$)", pins, re.MULTILINE)
            assert versions.parts(found[1])[: len(expected)] == expected
