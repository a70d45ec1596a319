"""Policies on top of others: `Policy.over`, `Policy.override`."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polymp.rules.policy import Policy
from polymp.rules.policy_files import load
from polymp.rules.row import LOW, Apply, Row, Rule
from polymp.rules.vocabulary import vocabulary
from tests.support.policy_rows import (
    PATTERN,
    QUESTIONS,
    RULES,
    a_policy,
    expected,
    refusal,
    selects,
)


@st.composite
def two_policies(draw):
    question = draw(st.sampled_from(QUESTIONS))
    own, base = (draw(a_policy(name, question, st.just(""))) for name in ("own", "base"))
    return own, base, question


def stacked(own, base, question):
    """The rule after `own.over(base)`: own rows are heard first, defaults when all have spoken."""
    op, _, spelling = question
    for policy, hows in ((own, (3, 2, 1)), (base, (3, 2, 1)), (own, (0,)), (base, (0,))):
        rows = [row for row in policy.rows if selects(row, op, spelling) in hows]
        found = expected(Policy("part", tuple(rows)), question, "")
        if found:
            return policy.name, *found[:2]
    return None


@settings(max_examples=300)
@given(two_policies())
def test_own_rows_win_over_those_of_the_policy_below(case):
    own, base, question = case
    marked = [Policy(p.name, tuple(_of(row, p.name) for row in p.rows)) for p in (own, base)]
    row = marked[0].over(marked[1]).winner(*question)
    found = row and (row.source, row.of, row.rule)
    assert found == stacked(own, base, question)


def _of(row, source):
    return Row(row.of, row.rule, row.dtype, row.scope, source=source)


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
    both = own.over(base)
    assert both == Policy(
        "own",
        (
            Row("class:softmax", Rule.FP32_KEEP),
            Row("softmax", Rule.LOWER, scope="head"),
            Row("exp", Rule.FP32),
            Row("default", Rule.KEEP),
        ),
    )
    everything = Policy("own", (Row("default", Rule.FP32),)).over(base)
    assert len(everything.rows) == len(base.rows), "a default replaces a default only"


@pytest.mark.parametrize("low", LOW)
def test_a_class_in_one_dtype_replaces_its_ops_in_that_dtype(low):
    policy = load("torch-cuda").override(rules={"class:softmax": {low: "lower"}})
    (other,) = set(LOW) - {low}
    for op in ("softmax", "log_softmax", "logsumexp"):
        assert policy.why(op, low).rule is Rule.LOWER, "the override has no effect"
        assert policy.why(op, other).rule is Rule.FP32
    assert policy.winner("softmax", other).apply is Apply.DTYPE_ARGUMENT


# --- override -------------------------------------------------------------------------------------


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


def test_override_of_a_class_and_of_an_op_in_it():
    policy = load("amp").override(fp32=["softmax"], lower=["class:softmax"])
    assert policy.why("softmax", "float16").rule is Rule.FP32
    assert policy.why("log_softmax", "float16").rule is Rule.LOWER


HERE = "override of policy 'amp'"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"fp32": ["softmax"], "lower": ["softmax"]},
            "gives 'softmax' two rules: lower and fp32. Keep one.",
        ),
        (
            {"fp32": ["softmax"], "rules": {"softmax": "keep"}},
            "gives 'softmax' two rules: fp32 and keep. Keep one.",
        ),
        ({"fp32": "softmax"}, ": fp32='softmax' is not a list of ops. Write fp32=['softmax']."),
        ({"keep": 3}, ": keep=3 is not a list of ops. Write keep=[3]."),
        ({"keep": [3]}, ": keep has 3; ops are named by strings."),
        (
            {"fp32": ["layr_norm"]},
            ": no op 'layr_norm'. Did you mean layer_norm, nuclear_norm, rms_norm?",
        ),
        ({"fp32": ["fft"]}, ": no op 'fft'. The class is written class:fft."),
        (
            {"fp32": ["dot_general"]},
            ": no op 'dot_general'. It is a spelling of 'matmul'; alone it is written "
            "jax:dot_general.",
        ),
        ({"fp32": ["mm.out"]}, ": no op 'mm.out'. Did you mean mm?"),
        (
            {"fp32": ["flax:mm"]},
            ": 'flax:mm' is not an op. Names with a colon are class:NAME, aten:OVERLOAD and "
            "jax:PRIMITIVE.",
        ),
        (
            {"fp32": ["class:matmull"]},
            ": no class 'matmull'. Did you mean matmul? "
            f"Classes: {', '.join(sorted(vocabulary().kinds))}.",
        ),
        ({"rules": 3}, ": rules must be a table from op to rule, got 3."),
        ({"rules": {"mm": "lo"}}, f": rule 'lo' for op 'mm' is not one of {RULES}."),
        ({"rules": {"mm": None}}, ": op 'mm' has None, which is neither a rule nor a table."),
        ({"scopes": 3}, ": scopes must be a table from pattern to rules, got 3."),
        (
            {"scopes": {"*.head": "fp32"}},
            ": scopes.*.head must be a table from op to rule, got 'fp32'.",
        ),
        ({"scopes": {"head/mm": {"mm": "fp32"}}}, f": 'head/mm' {PATTERN}"),
        (
            {"scopes": {"*.head": {"mm": "lo"}}},
            f": rule 'lo' for op 'mm' is not one of {RULES}.",
        ),
    ],
)
def test_override_refuses(words, message):
    space = "" if message.startswith(":") else " "
    assert refusal(load("amp").override, **words) == HERE + space + message
