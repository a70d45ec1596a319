"""`polymp policies` and `polymp show`, as JSON and as a table, compared with the policy itself."""

import re
from pathlib import Path

import pytest

from polymp.rules import policy_files
from polymp.rules.row import LOW
from polymp.rules.vocabulary import vocabulary
from tests.support.commands import table


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


def test_show_of_a_class(polymp, answer):
    shown = answer("show", "matmul", "--op", "class:softmax")
    assert [e["op"] for e in shown["ops"]] == [op.name for op in vocabulary().members("softmax")]
    assert all(e["rules"] == dict.fromkeys(LOW, "fp32") for e in shown["ops"])
    _, out, _ = polymp("show", "matmul", "--op", "class:softmax")
    assert table(out)["softmax"] == ["fp32", "default, matmul"]


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


# --- `polymp diff`: the ops whose rules differ, and the rows --------------------------------------


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


def test_ops_that_differ_alike_share_a_row(polymp, answer, tmp_path):
    (tmp_path / "one.toml").write_text('extends = "amp"\nrules.all = "fp32"')
    _, out, _ = polymp("diff", "amp", "one.toml")
    ops = {d["op"] for d in answer("diff", "amp", "one.toml", code=1)["differences"]}
    assert f"ops that differ: {len(ops)}\n" in out
    assert ops <= {*re.findall(r"[^\s,]+", out)}, "each is named"
    sides = [line.split("  ", 1)[1].strip() for line in out.splitlines()[4:] if "  fp32" in line]
    assert len(sides) == len({*sides}) < 40


def pair(folder: Path, one: str, other: str) -> tuple[str, str]:
    for name, text in (("one", one), ("other", other)):
        (folder / f"{name}.toml").write_text(text)
    return "one.toml", "other.toml"


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        ('halves = "raise"\nrules.add = "widest"', 'rules.add = "widest"', "add "),
        ('halves = "raise"\nrules.add = "fp32"', 'rules.add = "fp32"', ""),
        ('rules."class:softmax" = "fp32"', 'rules."default" = "parts"', "logsumexp softmax "),
        ('rules.softmax = "parts"', "[rules]", ""),
        ('rules."aten:max.dim" = "keep"', "[rules]", "aten:max.dim "),
        ('rules."aten:max.dim" = "keep"\nrules.max = "keep"', 'rules.max = "keep"', ""),
        ('scopes."a[b-d].*".add = "fp32"', 'scopes."a[b-d].*".add = "keep"', "add a[b-d].*"),
        ('scopes."[!a].b".add = "fp32"', "[rules]", "add [!a].b"),
        ('scopes."?[!a-z].*".add = "fp32"', "[rules]", "add ?[!a-z].*"),
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
