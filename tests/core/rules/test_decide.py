"""The dtypes that each rule decides, and what a region without casts or in float16 may not have."""

import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import polymp
from polymp.cli import main
from polymp.dtypes import FORMATS, widest
from polymp.errors import PolicyError
from polymp.rules.policy import Decision, Policy, Region
from polymp.rules.policy_files import load
from polymp.rules.row import Row, Rule
from tests.support.policy_rows import DTYPE, MINE, NAMES, over, refusal, region

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
    ("layer_norm", ["bfloat16", "float16"], "float16",
        Decision(Rule.FP32_KEEP, "float32", "float32")),
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
]  # fmt: skip


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
    assert over(Policy("p", (Row("mm", Rule.KEEP),)), rowwise).fp8 == "rowwise"
    assert load("amp").override(fp8=["class:matmul"], recipe="rowwise").fp8 == "rowwise"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: load("amp").override(recipe="rowwise"), f"fp8 = 'rowwise' {NO_ROWS}"),
        (lambda: FP8_ROWS.override(recipe="row"),
            "fp8 = 'row' is not one of tensorwise, rowwise, rowwise_gw_hp."),
        (lambda: FP8_ROWS.override(fp8="rowwise"), "fp8='rowwise' is a recipe. Write recipe="),
        (lambda: FP8_ROWS.override(fp8=["softmax"]),
            "rule fp8 for op 'softmax' is for matrix products alone: linear, matmul, mm, addmm and "
            "others of class:matmul. Write lower."),
        (lambda: FP8_ROWS.override(rules={"linear": {"fp16": "fp8"}}),
            "rule fp8 for op 'linear' is for bfloat16 regions, not for float16. Write "
            'bfloat16 = "fp8".'),
    ],
)  # fmt: skip
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
    policy = load("fp8").without_fp8("head", "blocks.0.up")
    assert policy.name == "fp8"
    for path, rule in (("head", "lower"), ("blocks.0.up", "lower"), ("blocks.0.down", "fp8")):
        assert policy.why("linear", "bf16", path).rule == rule
        assert policy.why("mm", "bf16", path).rule == rule
    assert refusal(load("amp").without_fp8, "head") == (
        "without_fp8(): policy 'amp' runs no product in 8 bits. Take policy 'fp8', or one with "
        "rows of rule fp8."
    )
    assert refusal(load("fp8").without_fp8, ["head"]).startswith(
        "without_fp8() takes paths of modules, got ['head']. Write each as an argument of its own"
    )


@pytest.mark.parametrize("op", [row.of for row in MINE.rows])
def test_a_disabled_region_casts_nothing(op):
    assert MINE.decide(op, ["float32"], region(enabled=False)) == Decision(Rule.PARTS)


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


# --- The key `few_rows` of a policy: where it comes from, and what it says ------------------------


def test_the_key_is_kept_inherited_and_part_of_what_a_policy_is():
    few = polymp.policy({"name": "few", "extends": "amp", "few_rows": 32})
    assert few != polymp.policy({"name": "few", "extends": "amp"})
    assert polymp.policy("amp").few_rows == 0
    for same in (
        few.override(fp32=["gelu"]),
        few.override(scopes={"*.head": {"linear": "fp32"}}).at("net.head"),
        polymp.policy({"name": "other", "extends": few}),
        pickle.loads(pickle.dumps(few)),
    ):
        assert same.few_rows == 32
    assert polymp.policy({"name": "none", "extends": few, "few_rows": 0}).few_rows == 0


@pytest.mark.parametrize("value", [-1, True, "4", 2.5])
def test_what_is_no_number_of_rows_is_refused(value):
    with pytest.raises(PolicyError) as error:
        polymp.policy({"name": "few", "extends": "amp", "few_rows": value})
    assert str(error.value) == (
        f"policy 'few': few_rows = {value!r} is not a number of rows. Write few_rows = 32, or 0 to "
        "run products of any size by their rows."
    )


def test_a_comparison_of_policies_lists_the_products(capsys, tmp_path):
    file = tmp_path / "few.toml"
    file.write_text('extends = "amp"\nfew_rows = 32\n')
    main(["diff", "amp", str(file)])
    out = capsys.readouterr().out
    assert "addmm" in out
    assert "lower (few_rows = 32)" in out
    assert "conv" not in out
