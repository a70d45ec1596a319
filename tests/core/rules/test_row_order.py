"""Which of several rows for an op wins, and how `Policy.why` says it."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polymp.errors import PolicyError
from polymp.rules import policy as policy_module
from polymp.rules import row as row_module
from polymp.rules.policy import Policy
from polymp.rules.policy_files import load
from polymp.rules.row import LOW, Row, Rule
from polymp.rules.vocabulary import Op, Vocabulary
from tests.support.policy_rows import (
    CASES,
    MINE,
    NAMES,
    QUESTIONS,
    a_policy,
    answer,
    expected,
    over,
    refusal,
    region,
    selects,
)
from tests.support.sizes import size


@settings(max_examples=size(40, 250))
@given(CASES)
def test_the_most_specific_row_wins(case):
    assert answer(*case) == expected(*case)


@settings(max_examples=size(20, 100))
@given(CASES, st.lists(NAMES, max_size=3))
def test_the_decision_is_that_of_the_row_that_wins(case, dtypes):
    policy, (op, low, spelling), path = case
    found = expected(*case)
    if found == "conflict":
        with pytest.raises(PolicyError, match="neither pattern is the more exact"):
            policy.decide(op, dtypes, region(low, scope=path), spelling)
        return
    alone = Policy("alone", (Row("mm", Rule(found[1])),) if found else ())
    decision = policy.decide(op, dtypes, region(low, scope=path), spelling)
    assert decision == alone.decide("mm", dtypes, region(low))


# Rows, as `str` writes them up to the rule: which one wins for softmax.int in float16 at "a.b".
WINNERS = {
    "default, class:softmax": "class:softmax",
    "default in 'a', class:softmax": "class:softmax",
    "class:softmax, class:softmax in 'a'": "class:softmax in 'a'",
    "class:softmax in 'a', softmax": "softmax",
    "softmax, aten:softmax.int": "aten:softmax.int",
    "aten:softmax.int, softmax in 'a'": "softmax in 'a'",
    "aten:softmax.int, softmax (float16) in 'a'": "softmax (float16) in 'a'",
    "softmax in 'a', aten:softmax.int in 'a'": "aten:softmax.int in 'a'",
    "softmax, softmax (float16)": "softmax (float16)",
    "softmax (float16), softmax in 'a'": "softmax in 'a'",
    "class:softmax (float16), softmax": "softmax",
    "softmax (float16), aten:softmax.int": "aten:softmax.int",
    "softmax in 'a', softmax in 'a.b'": "softmax in 'a.b'",
    "aten:softmax.int in 'a', softmax in 'a.b'": "softmax in 'a.b'",
    "softmax in 'a', class:softmax in 'a.b'": "softmax in 'a'",
    "softmax in 'a', softmax in 'a.c'": "softmax in 'a'",
    "softmax (bfloat16), softmax in 'a.c'": "",
}


def entry(rows):
    """The policy, question and path of an entry of the table above; every row has another rule."""
    read = []
    rules = [rule for rule in Rule if rule is not Rule.FP8]  # which softmax cannot have
    for text, rule in zip(rows.split(", "), rules, strict=False):
        name, _, scope = text.partition(" in ")
        of, _, low = name.partition(" ")
        read.append(Row(of, rule, low.strip("()"), scope.strip("'")))
    return Policy("p", tuple(read)), ("softmax", "float16", "aten:softmax.int"), "a.b"


@pytest.mark.parametrize("rows", WINNERS)
def test_the_row_that_wins_for_softmax(rows):
    policy, question, path = entry(rows)
    row = policy.at(path).winner(*question)
    assert ("" if row is None else str(row).partition(" = ")[0]) == WINNERS[rows]


def test_an_op_without_a_row_has_the_rule_it_was_registered_with(monkeypatch):
    mine = Vocabulary(
        {"custom": "Of users."},
        [
            Op("spmm", "custom", aten=("lib::spmm",), rule="lower"),
            Op("bare", "custom", aten=("lib::bare",)),
        ],
    )
    for module in (policy_module, row_module):
        monkeypatch.setattr(module, "vocabulary", lambda: mine)
    rest = Row("default", Rule.FP32)
    assert Policy("p", (rest,)).winner("spmm", "float16") == Row("spmm", Rule.LOWER)
    assert Policy("p", (rest,)).winner("bare", "float16") == rest
    assert Policy("p", ()).winner("bare", "float16") is None
    for of in ("spmm", "aten:lib::spmm", "class:custom"):
        own = Row(of, Rule.KEEP)
        assert Policy("p", (rest, own)).winner("spmm", "float16", "aten:lib::spmm") == own
    why = Policy("p", ()).why("spmm", "float16")
    assert str(why) == (
        "spmm in float16: lower (runs in the region's dtype), by the row spmm = lower, register_op"
    )


def test_why_is_a_sentence():
    policy = load({"name": "p", "extends": "torch-cuda", "scopes": {"*.head": {"linear": "fp32"}}})
    why = policy.why("linear", "bfloat16", "model.head.proj")
    assert str(why) == (
        "linear in bfloat16 at 'model.head.proj': fp32 (runs in float32), "
        "by the row linear in '*.head' = fp32, policy 'p'"
    )
    assert why.rule is Rule.FP32
    assert why.row == Row("linear", Rule.FP32, scope="*.head")
    assert str(policy.why("linear", "bfloat16", "model.body")) == (
        "linear in bfloat16 at 'model.body': lower (runs in the region's dtype), "
        "by the row linear = lower, policies/torch-cuda.toml"
    )
    assert str(policy.why("aten:softmax.int", "float16")) == (
        "aten:softmax.int in float16: fp32 (runs in float32), by the row softmax = fp32, "
        "policies/torch-cuda.toml"
    )


def test_why_of_a_row_for_one_dtype():
    policy = load({"name": "p", "rules": {"class:softmax": {"float16": "fp32"}}})
    assert str(policy.why("softmax", "float16")) == (
        "softmax in float16: fp32 (runs in float32), "
        "by the row class:softmax (float16) = fp32, policy 'p'"
    )
    why = policy.why("softmax", "bfloat16", "a")
    assert (why.row, why.rule) == (None, Rule.PARTS)
    assert str(why) == (
        "softmax in bfloat16 at 'a': policy 'p' has no row for it, so it runs in its inputs' "
        "dtypes, and the ops inside it by their own rows"
    )


def test_a_policy_is_checked_where_it_is_unpickled(monkeypatch):
    with monkeypatch.context() as patch:
        for module in (policy_module, row_module):
            words = Vocabulary({}, [Op("mine", "custom")])
            patch.setattr(module, "vocabulary", lambda words=words: words)
        saved = pickle.dumps(Policy("p", (Row("mine", Rule.FP32),)))
    with pytest.raises(PolicyError, match="policy 'p': no op 'mine'"):
        pickle.loads(saved)


def test_why_of_what_is_no_op():
    assert refusal(MINE.why, "sofmax", "float16").startswith(
        "why(): no op 'sofmax'. Did you mean softmax"
    )
    assert refusal(MINE.why, "softmax.int", "float16") == (
        "why(): no op 'softmax.int'. It is a spelling of 'softmax'; "
        "alone it is written aten:softmax.int."
    )


# --- Policies on top of others: `extends`, `Policy.override` --------------------------------------


@st.composite
def two_policies(draw):
    question = draw(st.sampled_from(QUESTIONS))
    own, base = (draw(a_policy(name, question, st.just(""))) for name in ("own", "base"))
    return own, base, question


def stacked(own, base, question):
    """The rule of `own` over `base`: own rows are heard first, defaults when all have spoken."""
    op, _, spelling = question
    for policy, hows in ((own, (3, 2, 1)), (base, (3, 2, 1)), (own, (0,)), (base, (0,))):
        rows = [row for row in policy.rows if selects(row, op, spelling) in hows]
        found = expected(Policy("part", tuple(rows)), question, "")
        if found:
            return policy.name, *found[:2]
    return None


@settings(max_examples=size(30, 150))
@given(two_policies())
def test_own_rows_win_over_those_of_the_policy_below(case):
    own, base, question = case
    row = over(own, base).winner(*question)
    found = row and ("own" if row.source else "base", row.of, row.rule)
    assert found == stacked(own, base, question)


def test_a_row_for_a_class_replaces_rows_for_its_ops_and_their_spellings():
    base = Policy(
        "base",
        (
            Row("softmax", Rule.FP32),
            Row("log_softmax", Rule.FP32, "float16"),
            Row("aten:logsumexp", Rule.KEEP),
            Row("class:softmax", Rule.LOWER),
            Row("softmax", Rule.LOWER, scope="head"),
            Row("exp", Rule.FP32),
            Row("default", Rule.KEEP),
        ),
        halves="raise",
    )
    own = Policy("own", (Row("class:softmax", Rule.FP32_KEEP),))
    both = over(own, base)
    assert both == Policy(
        "own",
        (
            Row("class:softmax", Rule.FP32_KEEP),
            Row("softmax", Rule.LOWER, scope="head"),
            Row("exp", Rule.FP32),
            Row("default", Rule.KEEP),
        ),
    )
    everything = over(Policy("own", (Row("default", Rule.FP32),)), base)
    assert len(everything.rows) == len(base.rows), "a default replaces a default only"


def test_a_row_for_an_op_replaces_those_for_its_spellings():
    spelled = [Row(of, Rule.KEEP) for of in ("aten:softmax.int", "jax:dot_general:unbatched")]
    own = Policy("own", (Row("softmax", Rule.FP32), Row("linear", Rule.FP32)))
    assert over(own, Policy("base", (*spelled, Row("aten:mm", Rule.KEEP)))) == Policy(
        "own", (*own.rows, Row("aten:mm", Rule.KEEP))
    )


@pytest.mark.parametrize("low", LOW)
def test_a_class_in_one_dtype_replaces_its_ops_in_that_dtype(low):
    policy = load("torch-cuda").override(rules={"class:softmax": {low: "lower"}})
    (other,) = set(LOW) - {low}
    for op in ("softmax", "log_softmax", "logsumexp"):
        assert policy.why(op, low).rule is Rule.LOWER, "the override has no effect"
        assert policy.why(op, other).rule is Rule.FP32


def test_override_by_each_of_its_words():
    amp = load("amp")
    mine = amp.override(
        fp32=["gelu"],
        keep=("layer_norm",),
        lower={"class:fft"},
        widest=["add"],
        fp32_keep=["softmax"],
        parts=["linear"],
        rules={"exp": {"float16": "fp32", "bfloat16": "lower"}, "mm": "keep"},
        scopes={"*.lm_head": {"linear": "fp32"}},
    )
    found = {row.key: row.rule for row in mine.rows if row not in amp.rows}
    assert found == {
        ("", "gelu", ""): Rule.FP32,
        ("", "layer_norm", ""): Rule.KEEP,
        ("", "class:fft", ""): Rule.LOWER,
        ("", "add", ""): Rule.WIDEST,
        ("", "softmax", ""): Rule.FP32_KEEP,
        ("", "linear", ""): Rule.PARTS,
        ("", "exp", "float16"): Rule.FP32,
        ("", "exp", "bfloat16"): Rule.LOWER,
        ("", "mm", ""): Rule.KEEP,
        ("*.lm_head", "linear", ""): Rule.FP32,
    }
    assert {row.source for row in mine.rows if row not in amp.rows} == {"override of policy 'amp'"}
    assert (mine.name, mine.halves) == ("amp*", amp.halves)
    assert load("amp") == amp, "the policy itself stays"


def test_override_names_its_result():
    amp = load("amp")
    assert amp.override().rows == amp.rows
    assert amp.override().override().name == "amp*"
    assert amp.override(name="mine").name == "mine"
    assert load("torch-cpu").override().halves == "raise"


HERE = "override of policy 'amp'"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"fp32": ["softmax"], "lower": ["softmax"]},
            "gives 'softmax' two rules: lower and fp32. Keep one."),
        ({"fp32": ["softmax"], "rules": {"softmax": "keep"}},
            "gives 'softmax' two rules: fp32 and keep. Keep one."),
        ({"fp32": "softmax"}, ": fp32='softmax' is not a list of ops. Write fp32=['softmax']."),
        ({"keep": 3}, ": keep=3 is not a list of ops. Write keep=[3]."),
        ({"keep": [3]}, ": keep has 3; ops are named by strings."),
    ],
)  # fmt: skip
def test_override_refuses(words, message):
    """And whatever a file may not have: tests/core/rules/test_policy_files.py."""
    space = "" if message.startswith(":") else " "
    assert refusal(load("amp").override, **words) == HERE + space + message
