"""Policies as values: which row wins, what it decides, and what becomes of rows that are edited."""

import pickle
import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polymp.dtypes import FORMATS, widest
from polymp.errors import PolicyError
from polymp.rules import policy as rules
from polymp.rules.answers import Decision
from polymp.rules.fp8_ends import kept_lower
from polymp.rules.policy import Policy
from polymp.rules.policy_files import load
from polymp.rules.region import Region
from polymp.rules.row import LOW, Apply, Row, Rule
from polymp.rules.vocabulary import Op, Vocabulary, vocabulary
from tests.core.rules.test_scopes import deepest

DTYPE = st.sampled_from(LOW)
NAMES = st.sampled_from([*FORMATS, "float8_e4m3fnuz"])  # the last one dtypes lacks

MINE = Policy(
    "mine",
    (
        Row("mm", Rule.LOWER),
        Row("linear", Rule.FP8, "bfloat16"),
        Row("exp", Rule.FP32),
        Row("layer_norm", Rule.FP32_KEEP),
        Row("add", Rule.WIDEST),
        Row("index_copy", Rule.FIRST),
        Row("relu", Rule.KEEP),
        Row("sigmoid", Rule.PARTS),
        Row("binary_cross_entropy", Rule.FORBID, instead="mse_loss"),
    ),
)


def region(low="float16", *, enabled=True, scope=""):
    return Region("torch", "cpu", enabled, low, True, MINE, scope)


def refusal(call, *args, **kwargs):
    """Return the message of the PolicyError that a call has to raise."""
    with pytest.raises(PolicyError) as error:
        call(*args, **kwargs)
    return str(error.value)


# --- what a rule decides --------------------------------------------------------------------------

DECISIONS = [
    ("mm", ["float32", "float32"], "bfloat16", Decision(Rule.LOWER, "bfloat16")),
    ("mm", ["float16", "float32"], "bfloat16", Decision(Rule.LOWER, "bfloat16")),
    ("mm", [], "float16", Decision(Rule.LOWER, "float16")),
    ("linear", ["float32", "float32"], "bfloat16", Decision(Rule.FP8, "bfloat16")),
    ("linear", ["float32"], "float16", Decision(Rule.PARTS)),
    ("exp", ["float16"], "float16", Decision(Rule.FP32, "float32")),
    ("exp", ["float64"], "float16", Decision(Rule.FP32, "float32")),
    ("layer_norm", ["float16"], "float16", Decision(Rule.FP32_KEEP, "float32", "float16")),
    ("layer_norm", ["float32"], "float16", Decision(Rule.FP32_KEEP, "float32", "float32")),
    (
        "layer_norm",
        ["bfloat16", "float16"],
        "float16",
        Decision(Rule.FP32_KEEP, "float32", "float32"),
    ),
    ("layer_norm", ["float64"], "float16", Decision(Rule.FP32_KEEP, "float32")),
    ("layer_norm", [], "float16", Decision(Rule.FP32_KEEP, "float32")),
    ("add", ["float16", "float16"], "float16", Decision(Rule.WIDEST, "float16")),
    ("add", ["float16", "float32"], "float16", Decision(Rule.WIDEST, "float32")),
    ("add", ["float64", "float16"], "float16", Decision(Rule.WIDEST, "float16")),
    ("add", ["bfloat16"], "float16", Decision(Rule.WIDEST, "float32")),
    ("add", [], "float16", Decision(Rule.WIDEST, "float16")),
    ("index_copy", ["float32", "float16"], "float16", Decision(Rule.FIRST, "float32")),
    ("index_copy", ["bfloat16", "float32"], "float16", Decision(Rule.FIRST, "bfloat16")),
    ("index_copy", ["float64", "float16"], "float16", Decision(Rule.FIRST, "float64")),
    ("index_copy", [], "float16", Decision(Rule.FIRST)),
    ("relu", ["float32"], "float16", Decision(Rule.KEEP)),
    ("sigmoid", ["float32"], "float16", Decision(Rule.PARTS)),
    ("tanh", ["float32"], "float16", Decision(Rule.PARTS)),  # which has no row
    ("binary_cross_entropy", ["float16"], "float16", Decision(Rule.FORBID)),
]


@pytest.mark.parametrize(("op", "dtypes", "low", "expected"), DECISIONS)
def test_decide(op, dtypes, low, expected):
    assert MINE.decide(op, dtypes, region(low)) == expected
    row = MINE.winner(op, low)
    assert row is None or MINE.apply(row, dtypes, low) == expected


FP8_ROWS = Policy("mine", (Row("linear", Rule.FP8), Row("exp", Rule.FP32)))
NO_ROWS = (
    "is for rows with rule fp8, and there are none. Write such a row, as "
    'linear = "fp8", or extends = "fp8".'
)


def test_the_recipe_of_a_policy():
    assert (FP8_ROWS.fp8, MINE.fp8, load("amp").fp8) == ("tensorwise", "tensorwise", "")
    rowwise = FP8_ROWS.override(recipe="rowwise", keep=["relu"])
    assert rowwise.fp8 == rowwise.at("a.b").fp8 == pickle.loads(pickle.dumps(rowwise)).fp8
    assert rowwise != FP8_ROWS.override(keep=["relu"])
    assert rowwise.override(fp8=["mm"]).fp8 == "rowwise"
    assert rowwise.override(lower=["class:matmul"]).fp8 == ""
    assert Policy("p", (Row("mm", Rule.KEEP),)).over(rowwise).fp8 == "rowwise"
    assert load("amp").override(fp8=["class:matmul"], recipe="rowwise").fp8 == "rowwise"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: load("amp").override(recipe="rowwise"), f"fp8 = 'rowwise' {NO_ROWS}"),
        (
            lambda: FP8_ROWS.override(recipe="row"),
            "fp8 = 'row' is not one of tensorwise, rowwise, rowwise_gw_hp.",
        ),
        (lambda: FP8_ROWS.override(fp8="rowwise"), "fp8='rowwise' is a recipe. Write recipe="),
        (
            lambda: FP8_ROWS.override(fp8=["softmax"]),
            "rule fp8 for op 'softmax' is for matrix products alone: linear, matmul, mm, addmm and "
            "others of class:matmul. Write lower.",
        ),
        (
            lambda: FP8_ROWS.override(rules={"linear": {"fp16": "fp8"}}),
            "rule fp8 for op 'linear' is for bfloat16 regions, not for float16. Write "
            'bfloat16 = "fp8".',
        ),
    ],
)
def test_a_recipe_or_an_fp8_row_that_cannot_be(make, message):
    found = refusal(make)
    assert re.match(r"override of policy '\w+': ", found), found
    assert message in found


def test_a_float16_region_has_no_8_bit_products():
    message = refusal(Region, "torch", "cpu", True, "float16", True, FP8_ROWS)
    assert message == (
        "autocast(): policy 'mine' runs products in 8 bits, which needs a region of dtype "
        "bfloat16, not float16: the results and gradients of 8-bit products are bfloat16, whose "
        "range no gradient leaves. Write bfloat16, or a policy without rule fp8."
    )
    Region("torch", "cpu", False, "float16", True, FP8_ROWS)  # disabled
    Region("torch", "cpu", True, "float16", True, MINE)  # whose row is for bfloat16


def test_modules_that_are_kept_out_of_8_bits():
    policy = kept_lower(load("fp8"), ["head", "blocks[0].up"], "here")
    assert policy.name == "fp8"
    for path, rule in (("head", "lower"), ("blocks[0].up", "lower"), ("blocks[0].down", "fp8")):
        assert policy.why("linear", "bf16", path).rule == rule
        assert policy.why("mm", "bf16", path).rule == rule
    assert refusal(kept_lower, load("amp"), ["head"], "here") == (
        "here: policy 'amp' runs no product in 8 bits. Give policy 'fp8', or one with rows of rule "
        "fp8."
    )
    assert refusal(kept_lower, load("fp8"), ["", "head"], "here") == (
        "here: the first or the last product is called outside of all submodules, so that no "
        "module path is for it alone. Write Policy.override(scopes={...}) for the modules that are "
        "to stay in bfloat16."
    )


def test_every_rule_is_decided_above():
    assert {decision.rule for *_, decision in DECISIONS} == set(Rule)


@pytest.mark.parametrize("op", [row.of for row in MINE.rows])
def test_a_disabled_region_casts_nothing(op):
    assert MINE.decide(op, ["float32"], region(enabled=False)) == Decision(Rule.PARTS)


def test_decide_hears_the_spelling_the_dtype_and_the_scope():
    policy = Policy(
        "p",
        (
            Row("sum", Rule.FP32),
            Row("sum", Rule.LOWER, "bfloat16"),
            Row("aten:sum.dim_IntList", Rule.KEEP),
            Row("sum", Rule.FP32_KEEP, scope="head"),
            Row("aten:brand_new", Rule.LOWER),
        ),
    )

    def rule(op, low, scope="", spelling=""):
        return policy.decide(op, ["float32"], region(low, scope=scope), spelling).rule

    assert rule("sum", "float16") is Rule.FP32
    assert rule("sum", "bfloat16") is Rule.LOWER
    assert rule("sum", "float16", spelling="aten:sum.dim_IntList") is Rule.KEEP
    assert rule("sum", "float16", scope="head.norm") is Rule.FP32_KEEP
    assert rule("", "float16", spelling="aten:brand_new") is Rule.LOWER
    assert rule("", "float16", spelling="aten:brand_old") is Rule.PARTS


@given(DTYPE, st.lists(NAMES, max_size=4))
def test_widest_holds_every_input_but_float64_and_unknown_ones(low, dtypes):
    run = MINE.decide("add", dtypes, region(low)).run
    assert run == widest([low, *(f for f in dtypes if f in FORMATS and f != "float64")])


@given(DTYPE, st.lists(NAMES, max_size=4))
def test_fp32_keep_returns_the_widest_input(low, dtypes):
    kept = [f for f in dtypes if f in FORMATS and f != "float64"]
    out = widest(kept) if kept else None
    assert MINE.decide("layer_norm", dtypes, region(low)) == (Rule.FP32_KEEP, "float32", out)


@given(DTYPE, st.lists(NAMES, max_size=4))
def test_halves_raise_refuses_a_second_low_dtype_only_before_a_float32(low, dtypes):
    strict = Policy("strict", (Row("add", Rule.WIDEST),), halves="raise")
    decision = strict.decide("add", dtypes, region(low))
    seen = [f for f in dtypes if f != "float64"]
    before = seen[: seen.index("float32")] if "float32" in seen else seen
    assert (decision.rule is Rule.FORBID) == any(f != low for f in before)


# --- which row wins -------------------------------------------------------------------------------

KINDS = {"softmax": "softmax", "log_softmax": "softmax", "sum": "reduction", "mm": "matmul"}
SPELLINGS = {
    "aten:softmax.int": "softmax",
    "aten:log_softmax.int": "log_softmax",
    "aten:sum": "sum",
    "aten:sum.dim_IntList": "sum",
    "jax:reduce_sum": "sum",
    "aten:mm": "mm",
    "aten:brand_new": "",
}
SELECTORS = [*KINDS, *SPELLINGS, *sorted({f"class:{kind}" for kind in KINDS.values()}), "default"]
PATTERNS = ["*", "a", "b", "a.b", "*.b", "a.*", "?.b", "a.?", "*.a.b"]
PATHS = ["", "a", "b", "a.b", "a.c", "a.b.c", "c.a.b", "b.b"]


# What is asked: op, dtype, spelling.
QUESTIONS = [
    *((op, low, "") for op in KINDS for low in LOW),
    *((op, low, spelling) for spelling, op in SPELLINGS.items() for low in LOW),
]


PRODUCTS = ("class:matmul", "mm", "linear", "matmul", "aten:mm", "jax:dot_general")


def a_row(of, rule, low, scope):
    """A row; rule fp8 only where there can be one."""
    if rule is Rule.FP8 and (of not in PRODUCTS or low == "float16"):
        rule = Rule.LOWER
    return Row(of, rule, low, scope)


def a_policy(name, question, scopes):
    """A policy in which nearly all rows are for the ops that are asked about."""
    op, _, spelling = question
    near = [name for name in (op, spelling, f"class:{KINDS.get(op)}") if name in SELECTORS]
    row = st.builds(
        a_row,
        st.sampled_from([*near * 3, "default", *SELECTORS]),
        st.sampled_from(Rule),
        st.sampled_from(["", "", *LOW]),
        scopes,
    )
    rows = st.lists(row, max_size=6, unique_by=lambda row: row.key)
    return rows.map(lambda rows: Policy(name, tuple(rows)))


@st.composite
def cases(draw):
    question, path = draw(st.sampled_from(QUESTIONS)), draw(st.sampled_from(PATHS))
    there = [pattern for pattern in PATTERNS if deepest(list(pattern), path)]
    scopes = st.sampled_from(["", *there, *there, *PATTERNS])
    return draw(a_policy("random", question, scopes)), question, path


CASES = cases()


def test_the_names_above_are_the_vocabulary_s():
    assert {op: vocabulary().ops[op].kind for op in KINDS} == KINDS
    for spelling, name in SPELLINGS.items():
        op = vocabulary().op_of(spelling)
        assert (op.name if op else "") == name


def rank(row, path):
    """How far in and how exact a row's scope is; None where it does not hold."""
    if not row.scope:
        return 0, 0
    depth = deepest(list(row.scope), path)
    return (depth, sum(c not in "*?" for c in row.scope)) if depth else None


def selects(row, op, spelling):
    """3 for the spelling, 2 for the op, 1 for its class, 0 for what is left; None for others."""
    order = ("default" if op else None, f"class:{KINDS.get(op)}", op or None, spelling or None)
    return order.index(row.of) if row.of in order else None


def by_design(how, rank, low):
    """An op over a class over the rest; then the scope, a spelling over its op, the dtype."""
    return min(how, 2), rank, how, low


def expected(policy, question, path, order=by_design):
    """Return `describe` of the strongest row; None for no row, "conflict" for a tie."""
    op, dtype, spelling = question
    ranks = {row.key: rank(row, path) for row in policy.rows}
    there = [row for row in policy.rows if ranks[row.key]]
    for one in there:
        for two in there:
            same = (one.of, one.dtype, ranks[one.key]) == (two.of, two.dtype, ranks[two.key])
            if same and one.rule is not two.rule:
                return "conflict"
    found = [
        (order(how, ranks[row.key], bool(row.dtype)), describe(row, path))
        for row in there
        if row.dtype in ("", dtype) and (how := selects(row, op, spelling)) is not None
    ]
    return max(found)[1] if found else None


def describe(row, path):
    """All but the dtype: where a row loses one of two dtypes, it may be left with the other."""
    return row.of, row.rule.value, rank(row, path)


def answer(policy, question, path):
    try:
        row = policy.at(path).winner(*question)
    except PolicyError:
        return "conflict"
    return row and describe(row, path)


@settings(max_examples=500)
@given(CASES)
def test_the_most_specific_row_wins(case):
    assert answer(*case) == expected(*case)


@settings(max_examples=200)
@given(CASES, st.lists(NAMES, max_size=3))
def test_what_is_decided_is_what_the_winner_says(case, dtypes):
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


def told(rows):
    """The policy, question and path of an entry of the table above; every row has another rule."""
    read = []
    rules = [rule for rule in Rule if rule is not Rule.FP8]  # which softmax cannot have
    for text, rule in zip(rows.split(", "), rules, strict=False):
        name, _, scope = text.partition(" in ")
        of, _, low = name.partition(" ")
        read.append(Row(of, rule, low.strip("()"), scope.strip("'")))
    return Policy("p", tuple(read)), ("softmax", "float16", "aten:softmax.int"), "a.b"


@pytest.mark.parametrize("rows", WINNERS)
def test_specificity(rows):
    policy, question, path = told(rows)
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
        rows for rows in WINNERS if expected(*told(rows)) != expected(*told(rows), ORDERS[wrong])
    ]
    assert told_apart


@pytest.mark.parametrize("rows", WINNERS)
def test_the_design_s_order_is_that_of_the_table(rows):
    policy, _, path = case = told(rows)
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


def test_a_registered_op_has_its_own_rule_where_no_row_speaks_of_it(monkeypatch):
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


# --- why ------------------------------------------------------------------------------------------


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


def test_why_where_a_row_speaks_of_one_dtype():
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


# --- inside a module ------------------------------------------------------------------------------


def scoped(*rows):
    return Policy("p", rows)


def test_at_where_nothing_is_scoped_is_the_policy():
    assert MINE.at("a.b") is MINE
    assert MINE.scopes == ()


def test_at_is_one_object_for_all_modules_in_which_the_same_rows_hold():
    policy = scoped(Row("mm", Rule.FP32, scope="head"), Row("mm", Rule.LOWER))
    assert policy.scopes == ("head",)
    inside = policy.at("head")
    assert inside is policy.at("head.a") is policy.at("head.b")
    assert policy.at("body") is policy.at("") is not inside
    assert inside.winner("mm", "float16") == Row("mm", Rule.FP32, scope="head")
    assert policy.at("body").winner("mm", "float16") == Row("mm", Rule.LOWER)
    assert policy.winner("mm", "float16") == Row("mm", Rule.LOWER), "outside of all modules"
    assert inside.at("body") is inside
    assert (inside.name, inside.halves) == ("p", policy.halves)
    strict = Policy("strict", (Row("add", Rule.WIDEST, scope="head"),), "raise")
    assert strict.at("head").decide("add", ["bfloat16"], region()).rule is Rule.FORBID
    assert inside.scopes == ()


def test_at_in_nested_modules():
    policy = scoped(
        Row("mm", Rule.FP32, scope="*.head"),
        Row("mm", Rule.LOWER, scope="*.head.inner"),
        Row("exp", Rule.FP32, scope="*.head"),
    )
    assert policy.at("m.head").winner("mm", "float16").rule is Rule.FP32
    assert policy.at("m.head.inner.a").winner("mm", "float16").rule is Rule.LOWER
    assert policy.at("m.head.inner.a").winner("exp", "float16").rule is Rule.FP32
    assert policy.at("m").winner("exp", "float16") is None


def test_at_where_two_patterns_say_as_much():
    one, two = Row("mm", Rule.FP32, scope="a.?"), Row("mm", Rule.LOWER, scope="?.b")
    tied = scoped(one, two)
    assert refusal(tied.at, "a.b.c") == (
        "policy 'p' at 'a.b.c': '?.b' gives 'mm' lower and 'a.?' gives it fp32, and neither "
        "pattern is the more exact. Make one of them longer."
    )
    assert tied.at("a.c").winner("mm", "float16") == one
    assert tied.at("c.b").winner("mm", "float16") == two
    agreed = scoped(one, Row("mm", Rule.FP32, scope="?.b"), Row("exp", Rule.KEEP, scope="?.b"))
    assert agreed.at("a.b").winner("mm", "float16").rule is Rule.FP32
    assert agreed.at("a.b").winner("exp", "float16").rule is Rule.KEEP
    dtypes = scoped(one, Row("mm", Rule.LOWER, "float16", scope="?.b"))
    assert dtypes.at("a.b").winner("mm", "float16").rule is Rule.LOWER
    assert dtypes.at("a.b").winner("mm", "bfloat16").rule is Rule.FP32


# --- policies that stand on others ----------------------------------------------------------------


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
def test_over_hears_its_own_rows_before_those_below(case):
    own, base, question = case
    marked = [Policy(p.name, tuple(_of(row, p.name) for row in p.rows)) for p in (own, base)]
    row = marked[0].over(marked[1]).winner(*question)
    found = row and (row.source, row.of, row.rule)
    assert found == stacked(own, base, question)


def _of(row, source):
    return Row(row.of, row.rule, row.dtype, row.scope, source=source)


def test_a_class_replaces_what_was_said_of_its_ops_and_their_spellings():
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


def test_override_may_speak_of_a_class_and_of_an_op_in_it():
    policy = load("amp").override(fp32=["softmax"], lower=["class:softmax"])
    assert policy.why("softmax", "float16").rule is Rule.FP32
    assert policy.why("log_softmax", "float16").rule is Rule.LOWER


HERE = "override of policy 'amp'"
ALL = "lower, fp8, fp32, fp32_keep, widest, first, keep, forbid, parts"
PATTERN = (
    "is no pattern of module paths. Write names joined by dots, such as "
    '"*.lm_head" or "blocks.*.attn"; * stands for any characters.'
)


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
        ({"rules": {"mm": "lo"}}, f": rule 'lo' for op 'mm' is not one of {ALL}."),
        ({"rules": {"mm": None}}, ": op 'mm' has None, which is neither a rule nor a table."),
        ({"scopes": 3}, ": scopes must be a table from pattern to rules, got 3."),
        (
            {"scopes": {"*.head": "fp32"}},
            ": scopes.*.head must be a table from op to rule, got 'fp32'.",
        ),
        ({"scopes": {"head/mm": {"mm": "fp32"}}}, f": 'head/mm' {PATTERN}"),
        (
            {"scopes": {"*.head": {"mm": "lo"}}},
            f": rule 'lo' for op 'mm' is not one of {ALL}.",
        ),
    ],
)
def test_override_refuses(words, message):
    space = "" if message.startswith(":") else " "
    assert refusal(load("amp").override, **words) == HERE + space + message


# --- rows that never matched ----------------------------------------------------------------------


def test_unused_are_the_rows_that_ruled_no_op():
    policy = scoped(
        Row("mm", Rule.LOWER),
        Row("exp", Rule.FP32, "float16"),
        Row("exp", Rule.FP32, "bfloat16"),
        Row("mm", Rule.FP32, scope="*.haed"),
        Row("class:fft", Rule.FP32),
    )
    report = SimpleNamespace(
        rows=lambda: [Row("mm", Rule.LOWER), Row("exp", Rule.FP32, "float16", source="elsewhere")]
    )
    assert policy.unused(report) == (
        Row("class:fft", Rule.FP32),
        Row("exp", Rule.FP32, "bfloat16"),
        Row("mm", Rule.FP32, scope="*.haed"),
    )
    nothing = SimpleNamespace(rows=list)
    assert policy.unused(nothing) == policy.rows
    everything = SimpleNamespace(rows=lambda: policy.rows)
    assert policy.unused(everything) == ()
    otherwise = SimpleNamespace(rows=lambda: [Row("mm", Rule.KEEP)])
    assert policy.unused(otherwise) == policy.rows, "the row of another policy"


# --- values ---------------------------------------------------------------------------------------


def test_policies_are_values():
    again = Policy("mine", tuple(reversed(MINE.rows)))
    assert again == MINE
    assert hash(again) == hash(MINE)
    assert Policy("mine", MINE.rows[1:]) != MINE
    assert Policy("yours", MINE.rows) != MINE
    assert Policy("mine", MINE.rows, "raise") != MINE
    assert {again: 1}[MINE] == 1
    with pytest.raises(AttributeError):
        MINE.name = "yours"
    MINE.winner("mm", "float16")
    strict = Policy("strict", (Row("mm", Rule.FP32, scope="head"),), "raise")
    for policy in (MINE, strict, strict.at("head")):
        assert pickle.loads(pickle.dumps(policy)) == policy
    assert strict.at("head") != strict


def test_rows_are_values_whatever_their_source():
    row = Row("mm", "lower", source="one.toml")
    assert row == Row("mm", Rule.LOWER, source="two.toml")
    assert row.rule is Rule.LOWER
    assert Row("sum", "fp32", apply="dtype_argument").apply is Apply.DTYPE_ARGUMENT
    assert str(row) == "mm = lower, one.toml"
    assert str(Row("mm", Rule.FP32, "float16", "*.head")) == "mm (float16) in '*.head' = fp32"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mm", "lo"), f"a policy's row: rule 'lo' for op 'mm' is not one of {ALL}."),
        (
            ("mm", "fp32", "float32"),
            "a policy's row: op 'mm': dtype 'float32' is not accepted here. "
            "Write float16 (fp16), bfloat16 (bf16), or such a dtype of torch, jax or numpy.",
        ),
        (
            ("mm", "fp32", "", "", "magic"),
            "a policy's row: apply 'magic' for op 'mm' is not one of "
            "cast, dtype_argument, append_dtype.",
        ),
    ],
)
def test_a_row_that_cannot_be(arguments, message):
    assert refusal(Row, *arguments) == message


@pytest.mark.parametrize(
    ("rows", "halves", "message"),
    [
        (
            (Row("mm", Rule.LOWER), Row("mm", Rule.FP32)),
            "widen",
            "policy 'p' gives 'mm' two rules: lower and fp32. Keep one.",
        ),
        (
            (Row("mm", Rule.LOWER, scope="a"), Row("mm", Rule.FP32, scope="a")),
            "widen",
            "policy 'p' gives 'mm' in 'a' two rules: lower and fp32. Keep one.",
        ),
        ((Row("bnm", Rule.LOWER),), "widen", "policy 'p': no op 'bnm'. Did you mean bmm?"),
        ((Row("mm", Rule.LOWER, scope="a."),), "widen", f"policy 'p': 'a.' {PATTERN}"),
        ((), "drop", "policy 'p': halves = 'drop' is not one of widen, raise."),
    ],
)
def test_a_policy_that_cannot_be(rows, halves, message):
    assert refusal(Policy, "p", rows, halves) == message


@pytest.mark.parametrize("twice", [True, False])
def test_a_row_is_there_once(twice):
    row = Row("mm", Rule.LOWER)
    other = row if twice else Row("mm", Rule.LOWER)
    assert refusal(Policy, "p", (row, other)) == (
        "policy 'p' gives 'mm' two rules: lower and lower. Keep one."
    )


# --- the names that rows may have -----------------------------------------------------------------

WORDS = Vocabulary(
    {"matmul": "Products.", "softmax": "Exponentials."},
    [
        Op("linear", "matmul", aten=("linear",), jax=("dot_general:unbatched",)),
        Op("mm", "matmul", aten=("mm",), traces=("linear",)),
        Op("softmax", "softmax", aten=("softmax.int",), functions=("jax.nn.softmax",)),
    ],
)


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        ("mm", "mm", True),
        ("mm", "class:matmul", True),
        ("aten:mm", "mm", True),
        ("aten:mm", "class:matmul", True),
        ("jax:dot_general:unbatched", "linear", True),
        ("class:matmul", "mm", False),
        ("mm", "aten:mm", False),
        ("mm", "class:softmax", False),
        ("aten:mm", "linear", False),
        ("mm", "default", False),
        ("default", "default", True),
        ("aten:brand_new", "default", False),
        ("aten:brand_new", "aten:brand_new", True),
    ],
)
def test_what_a_selector_speaks_of(inner, outer, expected):
    assert WORDS.within(inner, outer) is expected


def test_an_op_by_each_of_its_names():
    assert WORDS.of_aten("softmax.int") == "softmax"
    assert WORDS.of_aten("softmax") == ""
    assert WORDS.of_jax("dot_general:unbatched") == "linear"
    assert WORDS.functions == {"jax.nn.softmax": "softmax"}
    assert WORDS.op_of("aten:softmax.int") is WORDS.ops["softmax"]
    assert WORDS.op_of("class:softmax") is None
    assert [op.name for op in WORDS.members("matmul")] == ["linear", "mm"]


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (
            Op("mm", "custom"),
            "op 'mm' is in the vocabulary already: it cannot be registered as 'mm'. "
            "Give it a rule in a policy instead.",
        ),
        (
            Op("mine", "custom", aten=("lib::mine", "mm")),
            "aten op 'mm' is in the vocabulary already, as 'mm': it cannot be registered as "
            "'mine'. Give it a rule in a policy instead.",
        ),
        (
            Op("mine", "custom", jax=("dot_general:unbatched",)),
            "primitive 'dot_general:unbatched' is in the vocabulary already, as 'linear': it "
            "cannot be registered as 'mine'. Give it a rule in a policy instead.",
        ),
        (
            Op("mine", "custom", functions=("jax.nn.softmax",)),
            "function 'jax.nn.softmax' is in the vocabulary already, as 'softmax': it cannot be "
            "registered as 'mine'. Give it a rule in a policy instead.",
        ),
    ],
)
def test_nothing_is_registered_twice(op, message):
    words = Vocabulary(WORDS.kinds, WORDS.ops.values())
    assert refusal(words.register, op) == message
    assert (words.ops, words.registered) == (WORDS.ops, []), "a part of it was registered"
    assert words.of_aten("lib::mine") == ""


def test_a_registered_op_is_an_op():
    words = Vocabulary(WORDS.kinds, WORDS.ops.values())
    words.register(Op("mine", "custom", aten=("lib::mine",), rule="lower"))
    assert words.registered == ["mine"]
    assert words.of_aten("lib::mine") == "mine"
    assert words.within("aten:lib::mine", "class:custom")
    words.check("class:custom", "here")
    assert refusal(words.check, "min", "here") == "here: no op 'min'. Did you mean mine?"


def test_an_op_is_registered_in_one_framework_after_the_other():
    words = Vocabulary(WORDS.kinds, WORDS.ops.values())
    words.register(Op("mine", "custom", aten=("lib::mine",), rule="lower"))
    words.register(Op("mine", "custom", jax=("mine_p",), rule="lower"))
    both = Op("mine", "custom", aten=("lib::mine",), jax=("mine_p",), rule="lower")
    assert words.op_of("aten:lib::mine") == words.op_of("jax:mine_p") == words.ops["mine"] == both
    for other in (
        Op("mine", "custom", functions=("lib.mine",), rule="lower"),  # a second one in JAX
        Op("mine", "custom", aten=("lib::other",), rule="fp32"),
    ):
        with pytest.raises(PolicyError, match=r"^op 'mine' is in the vocabulary already: "):
            words.register(other)
    half = Vocabulary(WORDS.kinds, WORDS.ops.values())
    half.register(Op("mine", "custom", aten=("lib::mine",), rule="lower"))
    with pytest.raises(PolicyError, match="as 'mine'"):
        half.register(Op("mine", "custom", jax=("mine_p",), rule="fp32"))
