"""The command line: what each command says, as JSON and as a table, and its exit code.

Answers are compared with the policy's own. What `doctor` says of a machine is tested on machines
that are made up, and that it sees this one in a process of its own.
"""

import importlib
import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from polymp import cli, versions
from polymp.cli import doctor, policies
from polymp.cli.doctor import Device, Engine, Facts, Framework
from polymp.rules import policy_files, scopes
from polymp.rules.row import LOW
from polymp.rules.vocabulary import vocabulary
from tests.conftest import need
from tests.site.test_package import HEAVY, loaded_after
from tests.support import processes
from tests.support.blocks import ROOT, read
from tests.support.dtype_spellings import NAMES

MINE = """\
extends = "amp"
[rules]
softmax = "fp32_keep"
tanh = "fp32"
exp = { float16 = "fp32", bfloat16 = "keep" }
"aten:max.dim" = "keep"
[scopes."*.lm_head"]
linear = "fp32"
[scopes."block[ab].attn"]
softmax = "fp32"
"""


@pytest.fixture
def polymp(capsys, tmp_path, monkeypatch):
    """Runs a command in a folder with mine.toml, 80 columns wide: (exit code, stdout, stderr)."""
    (tmp_path / "mine.toml").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def run(*argv):
        code = cli.main(argv)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def answer(polymp):
    """Runs a command with --json and returns the data."""

    def run(*argv, code=0):
        found, out, err = polymp(*argv, "--json")
        assert found == code, err
        return json.loads(out)

    return run


def process(*argv, blocked=(), cwd=ROOT, **env):
    """The command in a process of its own, in which some modules cannot be imported."""
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
    code += f"from polymp.cli import main; sys.exit(main({argv!r}))"
    return processes.python("-c", code, code=None, cwd=cwd, env={"COLUMNS": "80", **env})


# policies


def test_policies_lists_all_that_are_shipped(polymp, answer):
    listed = answer("policies")["policies"]
    assert [p["name"] for p in listed] == list(policy_files.shipped())
    by_name = {p["name"]: p for p in listed}
    assert by_name["lean"] == {
        "name": "lean",
        "summary": policy_files.summary("lean"),
        "rows": len(policy_files.load("lean").rows),
        "extends": "amp",
    }
    assert by_name["matmul"]["extends"] is None
    code, out, err = polymp("policies")
    assert (code, err) == (0, "")
    head, _, *lines = out.splitlines()
    assert head.split() == ["name", "rows", "extends", "summary"]
    first = {line.split()[0]: line.split()[1] for line in lines if not line.startswith(" ")}
    assert first == {p["name"]: str(p["rows"]) for p in listed}


# show


@pytest.mark.parametrize("name", ["amp", "matmul", "mine.toml"])
@pytest.mark.parametrize("scope", ["", "model.lm_head.proj", "blocka.attn"])
def test_show_says_what_the_policy_says(name, scope, answer):
    shown = answer("show", name, "--scope", scope) if scope else answer("show", name)
    policy = policy_files.load(name)
    assert sorted(e["op"] for e in shown["ops"]) == sorted(vocabulary().ops)
    for entry in shown["ops"]:
        for low in LOW:
            why = policy.why(entry["op"], low, scope)
            assert entry["rules"][low] == why.rule
            assert (entry["rows"][low] or {}).get("of") == (why.row.of if why.row else None)
            assert (entry["rows"][low] or {}).get("scope", "") == (why.row.scope if why.row else "")
        assert entry["class"] == vocabulary().ops[entry["op"]].kind


def test_the_scopes_of_the_test_above_matter(answer):
    def rules(*scope):
        return [e["rules"] for e in answer("show", "mine.toml", *scope)["ops"]]

    assert rules() != rules("--scope", "lm_head") != rules("--scope", "blocka.attn") != rules()


def table(out: str) -> dict[str, list[str]]:
    """Cells of a table's lines by the first of them; none of the cells may have two spaces."""
    lines = [re.split(r" {2,}", line.strip()) for line in out.splitlines()]
    return {first: rest for first, *rest in lines if rest}


def test_show_draws_every_op_under_its_class(polymp):
    code, out, err = polymp("show", "mine.toml")
    assert (code, err) == (0, "")
    top, silent = out.split("no row: ")
    cells = table(top)
    assert cells["softmax"] == ["fp32_keep", "mine.toml"]
    assert cells["linear"] == ["lower", "torch-cuda"]
    assert top.index("class:softmax") < top.index("  softmax ")
    assert re.search(r"  exp +float16: fp32 +mine.toml\n +bfloat16: keep\n", top)
    assert "--scope PATH shows the rows for modules: *.lm_head, block[ab].attn" in out
    assert "fp32_keep: runs in float32, and returns the widest input dtype\n" in top
    words = set(re.findall(r"\w+", top)) | set(re.findall(r"\w+", silent))
    assert vocabulary().ops.keys() <= words
    assert "relu" in re.findall(r"\w+", silent)
    ruled = [op for op in vocabulary().ops if policy_files.load("mine.toml").why(op, "float16").row]
    assert f"{len(ruled)} of {len(vocabulary().ops)} ops have a row" in out


def test_show_of_a_class_and_of_a_dtype(polymp, answer):
    shown = answer("show", "matmul", "--op", "class:softmax", "--dtype", "float16")
    assert [e["op"] for e in shown["ops"]] == [op.name for op in vocabulary().members("softmax")]
    assert all(e["rules"] == {"float16": "fp32"} for e in shown["ops"])
    _, out, _ = polymp("show", "matmul", "--op", "class:softmax")
    assert table(out)["softmax"] == ["fp32", "default, matmul"]


def test_show_takes_every_name_of_a_dtype(answer, polymp, capsys):
    asked = ("show", "mine.toml", "--op", "exp", "--dtype")
    for low in LOW:
        for spelling in (low, *NAMES[low]):
            assert answer(*asked, spelling) == answer(*asked, low)
    with pytest.raises(SystemExit, match=r"^2$"):
        polymp(*asked, "fp32")
    assert " ".join(capsys.readouterr().err.split()).endswith(
        "error: argument --dtype: dtype 'fp32' is not accepted here. "
        "Write float16 (fp16), bfloat16 (bf16), or such a dtype of torch, jax or numpy."
    )


def test_show_of_one_op(polymp, answer):
    asked = ("show", "mine.toml", "--op", "softmax")
    shown, op = answer(*asked), vocabulary().ops["softmax"]
    policy = policy_files.load("mine.toml")
    assert shown["why"] == {low: str(policy.why("softmax", low)) for low in LOW}
    assert shown["rules"] == dict.fromkeys(LOW, "fp32_keep")
    assert (shown["aten"], shown["functions"]) == (list(op.aten), list(op.functions))
    _, out, _ = polymp(*asked)
    why = "fp32_keep (runs in float32, and returns the widest input dtype), by the row softmax"
    assert f"float16 {why} = fp32_keep, mine.toml bfloat16 {why}" in " ".join(out.split())
    assert table(out)["torch"] == ["softmax.int"]
    assert "jax.nn.softmax" in out
    assert vocabulary().kinds["softmax"].split()[0] in out
    inside = answer(*asked, "--scope", "blockb.attn")
    assert inside["rules"] == dict.fromkeys(LOW, "fp32")
    assert inside["rows"]["float16"]["scope"] == "block[ab].attn"


def test_show_of_an_op_with_a_note(polymp, answer):
    note = answer("show", "amp", "--op", "mm")["note"]
    assert note == vocabulary().ops["mm"].note != ""
    _, out, _ = polymp("show", "amp", "--op", "mm")
    assert table(out)["note"] == [note]
    assert table(out)["jax"] == [f"becomes {', '.join(vocabulary().ops['mm'].traces)}"]


def test_show_of_a_spelling(answer):
    assert answer("show", "mine.toml", "--op", "aten:max.dim")["rules"] == dict.fromkeys(
        LOW, "keep"
    )
    assert answer("show", "mine.toml", "--op", "aten:max")["rules"] == dict.fromkeys(LOW, "parts")


def test_what_looks_like_markup_is_shown_as_it_is(polymp):
    _, out, _ = polymp("show", "mine.toml", "--op", "softmax", "--scope", "blocka.attn")
    assert "softmax in 'block[ab].attn' = fp32" in " ".join(out.split())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_show_on_a_device_lists_the_ops_that_need_a_kernel(device, answer, polymp):
    need("torch")
    native = importlib.import_module("polymp.backends.torch.autocast.torch_table")
    policy = policy_files.load("mine.toml")
    shown = answer("show", "mine.toml", "--device", device)
    agree = {
        op
        for op in native.kernels(device) | native.table(policy, "float16").keys()
        if all(native.agrees(device, policy, op, low) for low in LOW)
    }
    listed = {e["aten"]: e for e in shown["differ"]}
    assert shown["compiled"] == len(native.kernels(device)) > 90
    assert "tanh" in listed
    assert "mm" in agree
    assert not agree & listed.keys()
    assert agree | listed.keys() >= native.kernels(device)
    assert listed["tanh"]["torch"]["float16"]["rule"] == "parts"
    assert listed["tanh"]["policy"]["float16"]["rule"] == "fp32"
    _, out, _ = polymp("show", "mine.toml", "--device", device)
    assert f"run with a kernel of polymp's: {len(listed)}\n" in out
    assert table(out)["tanh"] == ["parts", "fp32", "mine.toml"]


def test_show_on_a_device_says_what_differs_in_equal_rules(polymp):
    need("torch")
    _, out, _ = polymp("show", "amp", "--device", "cuda", "--op", "addcmul")
    assert table(out)["addcmul"] == ["widest (raise)", "widest (widen)", "torch-cuda"]
    assert "widest where float16 meets bfloat16: (widen) runs in float32" in out


@pytest.mark.parametrize("device", cli.DEVICES)
def test_torchs_own_policy_needs_no_kernel(device, polymp, answer):
    need("torch")
    assert answer("show", f"torch-{device}", "--device", device)["differ"] == []
    _, out, _ = polymp("show", f"torch-{device}", "--device", device)
    assert out.endswith("no op differs: all run with torch's own kernels, at torch's own speed\n")


def test_the_devices_are_those_that_torch_has_tables_for():
    need("torch")
    assert (
        importlib.import_module("polymp.backends.torch.autocast.torch_table").DEVICES == cli.DEVICES
    )


# diff


def test_diff_of_equal_policies(polymp, answer):
    assert answer("diff", "amp", "amp") == {
        "policies": ["amp", "amp"],
        "same": True,
        "differences": [],
    }
    assert polymp("diff", "amp", "amp") == (0, "amp and amp: no difference\n", "")


@pytest.mark.parametrize(("one", "other"), [("amp", "matmul"), ("mine.toml", "torch-cpu")])
def test_diff_lists_every_op_whose_rule_differs(one, other, answer):
    found = answer("diff", one, other, code=1)
    a, b = policy_files.load(one), policy_files.load(other)
    rules = {
        (op, low): [a.why(op, low).rule, b.why(op, low).rule]
        for op in vocabulary().ops
        for low in LOW
    }
    listed = {
        (d["op"], d["dtype"]): [r["rule"] for r in d["rules"]]
        for d in found["differences"]
        if not d["scope"] and ":" not in d["op"] and d["rules"][0]["rule"] != d["rules"][1]["rule"]
    }
    assert listed == {key: both for key, both in rules.items() if both[0] != both[1]}
    assert len(listed) > 20


def test_diff_draws_rules_and_rows(polymp):
    code, out, err = polymp("diff", "mine.toml", "amp")
    assert (code, err) == (1, "")
    cells = table(out)
    assert re.search(r"^softmax +fp32_keep +fp32, torch-cuda$", out, re.MULTILINE)
    assert cells["exp (bfloat16)"] == ["keep", "fp32, torch-cuda"]
    assert "exp (float16)" not in cells
    assert cells["linear"] == ["fp32, in *.lm_head", "lower, torch-cuda", "*.lm_head"]
    assert cells["aten:max.dim"] == ["keep", "parts, no row"]


def test_many_ops_that_differ_alike_share_a_line(polymp, answer, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "one.toml").write_text('extends = "amp"\nrules.all = "fp32"')
    _, out, _ = polymp("diff", "amp", "one.toml")
    count = len({d["op"] for d in answer("diff", "amp", "one.toml", code=1)["differences"]})
    assert count > 200
    rows = int(re.search(rf"ops that differ: {count}, in (\d+) rows; --all lists each", out)[1])
    assert rows < 20
    _, every, _ = polymp("diff", "amp", "one.toml", "--all")
    assert f"ops that differ: {count}\n" in every
    assert len(every.splitlines()) >= count
    more = [int(number) for number in re.findall(r"and (\d+) more", out)]
    assert len(more) >= 4
    assert rows + sum(more) + 2 * len(more) == count, "three are named beside them"


@pytest.mark.parametrize(("alias", "name"), [("list", "policies"), ("compare", "diff")])
def test_names_that_are_guessed_first(alias, name, polymp):
    given = ("amp", "lean") if name == "diff" else ()
    assert polymp(alias, *given) == polymp(name, *given)
    assert polymp(alias, *given, "--json") == polymp(name, *given, "--json")


def pair(folder: Path, one: str, other: str) -> tuple[str, str]:
    for name, text in (("one", one), ("other", other)):
        (folder / f"{name}.toml").write_text(text)
    return "one.toml", "other.toml"


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        ('halves = "raise"\nrules.add = "widest"', 'rules.add = "widest"', "add "),
        ('halves = "raise"\nrules.add = "fp32"', 'rules.add = "fp32"', ""),
        (
            'rules.softmax = { rule = "fp32", apply = "dtype_argument" }',
            'rules.softmax = "fp32"',
            "softmax ",
        ),
        ('rules."class:softmax" = "fp32"', 'rules."default" = "parts"', "logsumexp softmax "),
        ('rules.softmax = "parts"', "", ""),
        ('rules."aten:max.dim" = "keep"', "", "aten:max.dim "),
        ('rules."aten:max.dim" = "keep"\nrules.max = "keep"', 'rules.max = "keep"', ""),
        ('scopes."a[b-d].*".add = "fp32"', 'scopes."a[b-d].*".add = "keep"', "add a[b-d].*"),
        ('scopes."[!a].b".add = "fp32"', "", "add [!a].b"),
        # Equal outside of the scope and row by row inside it; but a class there leaves an op alone.
        (
            'rules.exp = "fp32"\nscopes.a."class:power" = "keep"',
            'rules."class:power" = "fp32"\nscopes.a."class:power" = "keep"',
            "exp a",
        ),
    ],
)
def test_what_counts_as_a_difference(one, other, differ, answer, tmp_path):
    found = answer("diff", *pair(tmp_path, one, other), code=int(bool(differ)))
    listed = {f"{d['op']} {d['scope']}" for d in found["differences"]}
    if "logsumexp" in differ:
        assert {f"{name} " for name in differ.split()} <= listed
        assert all(vocabulary().ops[name.strip()].kind == "softmax" for name in listed)
    elif differ.startswith("exp"):
        assert differ in listed
    else:
        assert listed == ({differ} if differ else set())


@pytest.mark.parametrize("pattern", ["*.lm_head", "a.[bc].d", "x[!abc]y", "?[0-9].*", "[!a-z]"])
def test_a_scope_is_looked_into_by_a_path_that_it_matches(pattern):
    assert scopes.depth(pattern, policies.path_inside(pattern))


# check


def test_check_of_a_policy_that_both_accept(polymp, answer):
    need("torch"), need("jax")
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


def test_check_refuses_what_the_backends_refuse(polymp, answer, tmp_path):
    need("torch"), need("jax")
    (tmp_path / "bad.toml").write_text(BAD)
    said = answer("check", "bad.toml", code=1)["backends"]
    code = """if True:
        import polymp, polymp.torch, polymp.jax, json, sys, torch
        doors = {
            "torch": lambda p: polymp.torch.autocast("cpu", torch.bfloat16, policy=p),
            "jax": lambda p: polymp.jax.autocast(policy=p),
        }
        bad, refused = polymp.policy("bad.toml"), json.load(sys.stdin)
        for name, door in doors.items():
            plain = [r for r in bad.rows if not r.scope]
            keep = [r for r in plain if r.of not in [e["row"]["of"] for e in refused[name]]]
            door(polymp.Policy("kept", tuple(keep)))
            for row in set(plain) - set(keep):
                try:
                    door(polymp.Policy("one", (row, *keep)))
                except polymp.PolicyError:
                    print(name, row.of)
    """
    found = processes.run(code, input=json.dumps(said), cwd=tmp_path)
    scoped = {"aten:mul_.Tensor", "jax:callback"}
    expected = {f"{name} {of}" for name, ofs in REFUSED.items() for of in ofs if of not in scoped}
    assert set(found.splitlines()) == expected


def test_check_installs_no_kernel(polymp):
    need("torch")
    kernels = importlib.import_module("polymp.backends.torch.autocast.kernel_registry")
    before = {device: kernels.installed(device) for device in cli.DEVICES}
    assert polymp("check", "lean", "--backend", "torch")[0] == 0
    assert {device: kernels.installed(device) for device in cli.DEVICES} == before


def test_check_of_a_file_that_is_wrong(polymp, answer, tmp_path):
    (tmp_path / "wrong.toml").write_text('rules.sofmax = "fp32"')
    why = "wrong.toml: no op 'sofmax'. Did you mean softmax"
    code, out, err = polymp("check", "wrong.toml")
    assert (code, out) == (1, "wrong.toml: wrong, so that no row was checked\n")
    assert err.startswith(f"polymp: {why}")
    data = answer("check", "wrong.toml", code=1)
    assert (data["ok"], data["backends"]) == (False, {})
    assert data["errors"] == [err.removeprefix("polymp: ").rstrip("\n")]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            'softmax = { float32 = "fp32" }',
            "unknown key 'float32' for op 'softmax'. Did you",
        ),
        ('softmax = { fp61 = "fp32" }', "unknown key 'fp61' for op 'softmax'. Known: rule, apply"),
        ('softmax.int = "fp32"', 'quote the name of an overload: "aten:softmax.int" = "fp32".'),
        ("", 'wrong.toml has no rows. Write rows below [rules], or extends = "amp".'),
    ],
)
def test_check_says_what_is_wrong(text, why, polymp, tmp_path):
    (tmp_path / "wrong.toml").write_text(f"[rules]\n{text}\n")
    code, out, err = polymp("check", "wrong.toml")
    assert (code, out) == (1, "wrong.toml: wrong, so that no row was checked\n")
    assert err.removeprefix("polymp: ").removeprefix("wrong.toml: ").startswith(why)


def test_check_takes_a_short_name_of_a_dtype(polymp, tmp_path):
    (tmp_path / "short.toml").write_text('rules.softmax = { fp16 = "fp32" }')
    assert polymp("check", "short.toml")[::2] == (0, "")


HEADS = """
def in_torch():
    import torch
    return torch.nn.ModuleDict({"head": torch.nn.Linear(2, 2)}), (torch.ones(1, 2),)

def in_jax():
    import jax
    def f(x):
        with jax.named_scope("head"):
            return x @ x
    return f, (jax.numpy.ones((2, 2)),)
"""


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_check_of_a_model_names_paths_that_match_nothing(
    framework, polymp, answer, tmp_path, monkeypatch
):
    need(framework)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"headed_{framework}.py").write_text(HEADS)
    model = f"headed_{framework}:in_{framework}"
    argv = ("check", "scoped.toml", "--backend", framework, "--model", model)
    policy = 'extends = "amp"\nscopes."head".linear = "fp32"\n'
    (tmp_path / "scoped.toml").write_text(policy)
    code, out, err = polymp(*argv)
    assert (code, err) == (0, "")
    assert out.endswith(f"{model}: paths of rules: all match modules\n")
    (tmp_path / "scoped.toml").write_text(policy + 'scopes."*.haed".linear = "fp32"\n')
    code, out, err = polymp(*argv)
    assert (code, err) == (1, f"polymp: '*.haed' matches no module of {model}: "
                              "did you mean '*.head'?\n")  # fmt: skip
    assert out.endswith(f"{model}: paths of rules: 1 of 2 match no module\n")
    found = {each["scope"]: each["matches"] for each in answer(*argv, code=1)["scopes"]}
    assert found == {"head": 1, "*.haed": 0}
    assert polymp(*argv[:1], "amp", *argv[2:])[1].endswith(f"{model}: no rule by path\n")


def test_check_without_frameworks():
    run = process("check", "amp", blocked=("torch", "jax"))
    rows = len(policy_files.load("amp").rows)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == (
        f"amp: {rows} rows\ntorch: not installed, not checked\njax: not installed, not checked\n"
    )
    run = process("check", "amp", "--backend", "jax", blocked=("jax",))
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "polymp: backend 'jax' needs the jax package: pip install 'polymp[jax]'.\n"


# doctor: machines that are made up

TORCH, JAX = Framework("torch", "2.13.0+cpu", "", "cpu"), Framework("jax", "0.10.2", "", "cpu")
XEON = frozenset("avx2 avx512f avx512_bf16 avx512_fp16 amx_bf16".split())
FULL = Engine("cpu", 127, {"default": 0, "amp": 182, "lean": 211})


NONE: dict[str, str] = {}


def facts(*devices, frameworks=(TORCH, JAX), engines=(FULL,), nvidia=False, libraries=NONE):
    return Facts("Linux x86_64", "3.11.7", frameworks, devices, engines, nvidia, libraries)


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


# doctor: libraries


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
    assert re.search(r"optax +0\.2\.8 +>=0\.2\.8,<0\.3 +polymp\.jax\.scaled\(optimizer\)", out)


# doctor: this machine


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


# doctor: what it measures

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


def test_the_oldest_and_the_newest_versions_are_pinned_for_test_versions():
    for name, (first, end) in versions.SUPPORTED.items():
        for which, expected in (("oldest", first), ("newest", (end[0], end[1] - 1))):
            pins = (ROOT / f"constraints-{which}.txt").read_text()
            found = re.search(rf"^{name}==(.*?)( ;|$)", pins, re.MULTILINE)
            assert versions.parts(found[1])[: len(expected)] == expected


# All commands


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_script_is_this_function():
    module, _, name = project()["scripts"]["polymp"].partition(":")
    assert getattr(importlib.import_module(module), name) is cli.main


def test_python_dash_m():
    run = processes.python("-m", "polymp", "diff", "amp", "lean", "--json", code=1)
    assert json.loads(run.stdout)["policies"] == ["amp", "lean"]


COMMANDS = [
    ("policies",),
    ("show", "amp"),
    ("show", "lean", "--op", "softmax"),
    ("diff", "amp", "lean"),
]


@pytest.mark.parametrize("argv", COMMANDS, ids=lambda argv: argv[0])
def test_policies_are_looked_at_without_a_framework(argv):
    loaded = loaded_after(silently(argv))
    assert "polymp" in loaded
    assert not loaded & HEAVY


def silently(argv):
    """A statement that runs a command and prints nothing."""
    return (
        "import contextlib, io; from polymp.cli import main\n"
        f"with contextlib.redirect_stdout(io.StringIO()): main({argv!r})"
    )


def test_the_check_above_sees_an_import():
    need("torch")
    argv = ("show", "amp", "--device", "cpu", "--op", "mm")
    assert "torch" in loaded_after(silently(argv))


@pytest.mark.parametrize("argv", COMMANDS, ids=lambda argv: argv[0])
def test_json_needs_no_rich(argv):
    run = process(*argv, "--json", blocked=("rich",))
    assert json.loads(run.stdout)
    assert run.stderr == ""
    run = process(*argv, blocked=("rich",))
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        "polymp: tables need the rich package: pip install 'polymp[cli]', or --json.\n"
    )


@pytest.mark.parametrize("argv", COMMANDS, ids=lambda argv: argv[0])
def test_rich_is_imported_for_tables_alone(argv):
    assert "rich" not in loaded_after(silently((*argv, "--json")))
    assert "rich" in loaded_after(silently(argv))


@pytest.mark.parametrize("argv", COMMANDS, ids=lambda argv: argv[0])
def test_tables_fit_80_columns_and_have_no_colours_in_a_pipe(argv, polymp):
    _, out, _ = polymp(*argv)
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    assert all(line == line.rstrip() for line in out.splitlines())


def test_the_check_above_sees_width_and_colours(polymp, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert max(map(len, polymp("policies")[1].splitlines())) > 80
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" in polymp("policies")[1]


def test_tables_in_plain_ascii():
    run = process("show", "amp", "--op", "class:softmax", PYTHONIOENCODING="ascii")
    assert (run.returncode, run.stderr) == (0, "")
    assert re.search(r"softmax +\| fp32", run.stdout)


@pytest.mark.parametrize("flags", [("show", "amp"), ("show", "amp", "--json")], ids=len)
def test_a_reader_that_leaves_early_is_no_error(flags):
    command = [sys.executable, "-m", "polymp", *flags]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait() == 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("show", "ampp"), "no policy 'ampp'. Did you mean amp?"),
        (("show", "no.toml"), "cannot read policy file 'no.toml': No such file or directory."),
        (("show", "amp", "--op", "sofmax"), "--op: no op 'sofmax'. Did you mean softmax"),
        (("show", "amp", "--op", "class:fff"), "--op: no class 'fff'. Did you mean fft?"),
        (("show", "amp", "--op", "default"), "--op: neither the vocabulary nor policy 'amp' has"),
        (("show", "amp", "--op", "aten:zzz"), "--op: neither the vocabulary nor policy 'amp' has"),
        (("show", "amp", "--scope", "a/b"), "--scope: 'a/b' is no pattern of module paths."),
        (("diff", "amp", "no"), "no policy 'no'."),
    ],
)
@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["table", "json"])
def test_an_error_is_one_line(argv, said, flags, polymp):
    code, out, err = polymp(*argv, *flags)
    assert (code, out) == (2, "")
    assert err.startswith(f"polymp: {said}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "argv", [(), ("shw",), ("show",), ("diff", "amp"), ("show", "amp", "--device", "tpu")]
)
def test_bad_arguments(argv, polymp, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        polymp(*argv)
    assert "polymp" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", "policies", "show", "diff", "check", "doctor"])
def test_help_has_the_exit_codes(command, polymp, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        polymp(*command.split(), "--help")
    assert cli.EXIT in capsys.readouterr().out


# The page about it

PAGE = read(ROOT / "docs/command-line.md")
EXAMPLES = [
    block
    for block in PAGE
    if block.language == "console" and "$ polymp" in block.code and block.kind != "skip"
]


def examples():
    for block in EXAMPLES:
        command, _, shown = block.code.partition("\n")
        yield pytest.param(command.removeprefix("$ polymp ").split(), shown, id=command[9:])


@pytest.mark.parametrize(("argv", "shown"), list(examples()))
def test_the_page_shows_what_is_printed(argv, shown, polymp, tmp_path):
    if "--device" in argv or argv[0] == "check":
        need("torch"), need("jax")
    if "--device" in argv and not metadata.version("torch").startswith("2.13"):
        pytest.skip("the page shows what torch 2.13 has")
    for block in PAGE:
        if block.kind == "file":
            (tmp_path / block.value).write_text(block.code)
    _, out, err = polymp(*argv)
    assert (out, err) == (shown, "")


def test_the_page_has_an_example_of_each_command():
    shown = {block.code.split()[2] for block in PAGE if "$ polymp" in block.code}
    assert shown == {"policies", "show", "diff", "check", "doctor"}
