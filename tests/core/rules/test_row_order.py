"""Which of several rows for an op wins, and how `Policy.why` says it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polymp.errors import PolicyError
from polymp.rules import policy as rules
from polymp.rules.policy import Policy
from polymp.rules.policy_files import load
from polymp.rules.row import Row, Rule
from polymp.rules.vocabulary import Op, Vocabulary, vocabulary
from tests.support.policy_rows import (
    CASES,
    KINDS,
    MINE,
    NAMES,
    SPELLINGS,
    answer,
    describe,
    expected,
    refusal,
    region,
)


def test_the_names_of_these_tests_are_in_the_vocabulary():
    assert {op: vocabulary().ops[op].kind for op in KINDS} == KINDS
    for spelling, name in SPELLINGS.items():
        op = vocabulary().op_of(spelling)
        assert (op.name if op else "") == name


@settings(max_examples=500)
@given(CASES)
def test_the_most_specific_row_wins(case):
    assert answer(*case) == expected(*case)


@settings(max_examples=200)
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


ORDERS = {
    "a class as good as an op": lambda how, rank, low: (0, rank, how, low),
    "no op over its class": lambda how, rank, low: (how == 0, rank, -how, low),
    "an op over its spelling": lambda how, rank, low: (min(how, 2), rank, -how, low),
    "a spelling over every scope": lambda how, rank, low: (how, rank, low),
    "the dtype before the spelling": lambda how, rank, low: (min(how, 2), rank, low, how),
    "the dtype before the scope": lambda how, rank, low: (min(how, 2), low, rank, how),
    "any dtype before one": lambda how, rank, low: (min(how, 2), rank, how, not low),
    "the outermost scope": lambda how, rank, low: (min(how, 2), [-r for r in rank], how, low),
    "no scope over one": lambda how, rank, low: (min(how, 2), rank == (0, 0), rank, how, low),
    "the default over a class": lambda how, rank, low: (min(how, 2) or 1.5, rank, how, low),
}


@pytest.mark.parametrize("wrong", ORDERS)
def test_a_wrong_winner_is_noticed(wrong):
    told_apart = [
        rows for rows in WINNERS if expected(*entry(rows)) != expected(*entry(rows), ORDERS[wrong])
    ]
    assert told_apart


@pytest.mark.parametrize("rows", WINNERS)
def test_the_table_shows_the_documented_order(rows):
    policy, _, path = case = entry(rows)
    found = [
        describe(row, path) for row in policy.rows if str(row).startswith(f"{WINNERS[rows]} = ")
    ]
    assert expected(*case) == (found[0] if found else None)


def test_a_missed_conflict_is_noticed():
    rows = Row("mm", Rule.FP32, scope="a.?"), Row("mm", Rule.KEEP, scope="?.b")
    case = Policy("p", rows), ("mm", "float16", ""), "a.b"
    assert expected(*case) == "conflict"
    agreed = Policy("p", (rows[0], Row("mm", Rule.FP32, scope="?.b"))), *case[1:]
    assert expected(*agreed) == ("mm", "fp32", (3, 2))


def test_an_op_without_a_row_has_the_rule_it_was_registered_with(monkeypatch):
    mine = Vocabulary(
        {"custom": "Of users."},
        [
            Op("spmm", "custom", aten=("lib::spmm",), rule="lower"),
            Op("bare", "custom", aten=("lib::bare",)),
        ],
    )
    monkeypatch.setattr(rules, "vocabulary", lambda: mine)
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


def test_why_of_what_is_no_op():
    assert refusal(MINE.why, "sofmax", "float16").startswith(
        "why(): no op 'sofmax'. Did you mean softmax"
    )
    assert refusal(MINE.why, "softmax.int", "float16") == (
        "why(): no op 'softmax.int'. It is a spelling of 'softmax'; "
        "alone it is written aten:softmax.int."
    )
