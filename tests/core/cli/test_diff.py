"""`polymp diff`: the ops whose rules differ, and the rows."""

import re
from pathlib import Path

import pytest

from polymp.cli import policies
from polymp.rules import policy_files, scopes
from polymp.rules.row import LOW
from polymp.rules.vocabulary import vocabulary
from tests.support.commands import table


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
    assert rows < 25
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
