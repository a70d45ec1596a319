"""`polymp check`: what each backend refuses, and paths of modules that match nothing."""

import importlib
from contextlib import suppress
from functools import partial

import pytest

from polymp.rules import policy_files
from polymp.rules.vocabulary import vocabulary
from tests.conftest import need
from tests.support.commands import process


def test_check_of_a_policy_that_both_accept(polymp, answer):
    need("torch", "jax")
    rows = len(policy_files.load("mine.toml").rows)
    assert polymp("check", "mine.toml") == (
        0,
        f"mine.toml: {rows} rows\ntorch: accepts all rows\njax: accepts all rows\n",
        "",
    )
    assert answer("check", "mine.toml") == {
        "policy": "mine.toml",
        "ok": True,
        "rows": rows,
        "backends": {"torch": [], "jax": []},
        "errors": [],
    }


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("name", policy_files.shipped())
def test_every_shipped_policy_is_accepted(name, backend, polymp):
    need(backend)
    code, out, err = polymp("check", name, "--backend", backend)
    assert (code, err, out.splitlines()[1:]) == (0, "", [f"{backend}: accepts all rows"])


# By backend, the rows that it refuses.
BAD = """\
[rules]
linear = "lower"
mm = "lower"
"class:softmax" = "keep"
"aten:add_.Tensor" = "lower"
"aten:nosuch" = "lower"
"jax:nosuch" = "lower"
one_minus_square = "fp32"
linalg_inv = "lower"
[scopes."*.head"]
"aten:mul_.Tensor" = "fp32"
"jax:callback" = "keep"
"""
REFUSED = {
    "torch": [
        "aten:add_.Tensor",
        "aten:mul_.Tensor",
        "aten:nosuch",
        "linalg_inv",
        "one_minus_square",
    ],
    "jax": ["jax:callback", "jax:nosuch", "linalg_inv"],
}


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_check_names_each_row_that_a_backend_refuses(backend, polymp, answer, tmp_path):
    need(backend)
    (tmp_path / "bad.toml").write_text(BAD)
    code, out, err = polymp("check", "bad.toml", "--backend", backend)
    assert code == 1
    assert out == f"bad.toml: 10 rows\n{backend}: refuses {len(REFUSED[backend])}\n"
    for of in REFUSED[backend]:
        [line] = [line for line in err.splitlines() if f"[{of}" in line]
        assert line.startswith("polymp: policy 'bad'")
        assert f"{of.partition(':')[2] or of!r}" in line
    data = answer("check", "bad.toml", "--backend", backend, code=1)
    assert sorted(r["row"]["of"] for r in data["backends"][backend]) == REFUSED[backend]
    assert data["errors"] == [line.removeprefix("polymp: ") for line in err.splitlines()]


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ('rules."class:fft" = "lower"', ["class:fft"]),
        ('rules."class:fft" = { bfloat16 = "lower" }', ["class:fft"]),
        ('rules."class:fft" = { float16 = "lower" }', []),  # GPUs have these
        ('scopes."a[bc].*".fft_fft = "widest"', ["fft_fft"]),
        ('rules.trace = "lower"', []),  # put together from ops with low kernels
        ('rules.linalg_inv = "lower"\nrules.fft_fft = "fp32_keep"', ["linalg_inv"]),
        ('extends = "amp"\nrules."class:linear_algebra" = "lower"', ["class:linear_algebra"]),
    ],
)
def test_check_asks_for_a_low_kernel_on_any_device(text, refused, answer, tmp_path):
    need("torch")
    (tmp_path / "low.toml").write_text(text)
    said = answer("check", "low.toml", "--backend", "torch", code=int(bool(refused)))
    assert [r["row"]["of"] for r in said["backends"]["torch"]] == refused
    assert all("float16 kernel of" in r["why"] for r in said["backends"]["torch"])


def test_a_row_that_leaves_the_ops_without_a_low_kernel_to_others_is_accepted(answer, tmp_path):
    need("torch")
    others = [op.name for op in vocabulary().members("fft")]
    lines = ['"class:fft" = "lower"', *(f'{name} = "fp32"' for name in others)]
    for kept, refused in ((lines, []), (lines[:-1], ["class:fft"])):
        (tmp_path / "low.toml").write_text("[rules]\n" + "\n".join(kept))
        said = answer("check", "low.toml", "--backend", "torch", code=int(bool(refused)))
        assert [r["row"]["of"] for r in said["backends"]["torch"]] == refused


def test_check_refuses_what_the_backends_refuse(answer, tmp_path):
    need("torch", "jax")
    import polymp.jax
    import polymp.torch

    (tmp_path / "bad.toml").write_text(BAD)
    said = answer("check", "bad.toml", code=1)["backends"]
    doors = {"torch": partial(polymp.torch.autocast, "cpu"), "jax": polymp.jax.autocast}
    plain = [row for row in polymp.policy("bad.toml").rows if not row.scope]
    found = set()
    for name, door in doors.items():
        refused = [row for row in plain if row.of in {e["row"]["of"] for e in said[name]}]
        keep = tuple(row for row in plain if row not in refused)
        door(policy=polymp.Policy("kept", keep))
        for row in refused:
            with suppress(polymp.PolicyError):
                door(policy=polymp.Policy("one", (row, *keep)))
                continue
            found.add(f"{name} {row.of}")
    scoped = {"aten:mul_.Tensor", "jax:callback"}
    expected = {f"{name} {of}" for name, ofs in REFUSED.items() for of in ofs if of not in scoped}
    assert found == expected


def test_check_installs_no_kernel(polymp):
    need("torch")
    kernels = importlib.import_module("polymp.backends.torch.autocast.kernel_registry")
    devices = "cpu", "cuda", "mps", "xpu"
    before = [kernels.installed(device) for device in devices]
    assert polymp("check", "lean", "--backend", "torch")[0] == 0
    assert [kernels.installed(device) for device in devices] == before


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('rules.sofmax = "fp32"', "wrong.toml: no op 'sofmax'. Did you mean softmax"),
        ("[rules]", 'wrong.toml has no rows. Write rows below [rules], or extends = "amp".'),
    ],
)
def test_check_of_a_file_that_is_wrong(text, why, polymp, answer, tmp_path):
    """tests/core/rules/test_policy_files.py lists all that can be wrong."""
    (tmp_path / "wrong.toml").write_text(text)
    code, out, err = polymp("check", "wrong.toml")
    assert (code, out) == (1, "wrong.toml: wrong, so that no row was checked\n")
    assert err.startswith(f"polymp: {why}")
    data = answer("check", "wrong.toml", code=1)
    assert (data["ok"], data["backends"]) == (False, {})
    assert data["errors"] == [err.removeprefix("polymp: ").rstrip("\n")]


def test_check_without_frameworks():
    run = process("check", "amp", blocked=("torch", "jax"))
    rows = len(policy_files.load("amp").rows)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == (
        f"amp: {rows} rows\ntorch: not installed, not checked\njax: not installed, not checked\n"
    )
    run = process("check", "amp", "--backend", "jax", blocked=("jax",))
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "polymp: polymp.jax needs the jax package: pip install 'polymp[jax]'.\n"
