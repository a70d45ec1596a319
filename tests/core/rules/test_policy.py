"""Policies and rows as values: equality, module paths, and rows that never applied."""

import pickle
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import polymp
from polymp.errors import PolicyError
from polymp.rules import scopes
from polymp.rules.policy import Policy
from polymp.rules.row import Row, Rule
from tests.support.policy_rows import (
    ANY_PATH,
    MINE,
    ONE,
    PARTS,
    RULES,
    deepest,
    refusal,
    region,
)
from tests.support.sizes import size


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


def test_at_where_two_patterns_are_equally_exact():
    one, two = Row("mm", Rule.FP32, scope="a.?"), Row("mm", Rule.LOWER, scope="?.b")
    tied = scoped(one, two)
    assert refusal(tied.at, "a.b.c") == (
        "policy 'p' at 'a.b.c': '?.b' gives 'mm' lower and 'a.?' gives it fp32, and neither "
        "pattern is the more exact. Make one of them longer."
    )
    assert tied.at("a.c").winner("mm", "float16") == one
    assert tied.at("c.b").winner("mm", "float16") == two


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


def test_a_rule_that_is_none_is_told_with_those_that_are() -> None:
    with pytest.raises(TypeError, match=r"got fp16, .*: lower, fp8, fp32.* write lower=\[op\]\."):
        polymp.policy("amp").override(fp16=["linear"])  # type: ignore[arg-type]


def test_rows_are_values_whatever_their_source():
    row = Row("mm", "lower", source="one.toml")
    assert row == Row("mm", Rule.LOWER, source="two.toml")
    assert row.rule is Rule.LOWER
    assert str(row) == "mm = lower, one.toml"
    assert str(Row("mm", Rule.FP32, "float16", "*.head")) == "mm (float16) in '*.head' = fp32"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mm", "lo"), f"a policy's row: rule 'lo' for op 'mm' is not one of {RULES}."),
        (("mm", "fp32", "float32"),
            "a policy's row: op 'mm': dtype 'float32' is not accepted here. "
            "Write float16 (fp16), bfloat16 (bf16), or such a dtype of torch, jax or numpy."),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be(arguments, message):
    """The other faults of a row are in test_policy_files.py, as a file has them."""
    assert refusal(Row, *arguments) == message


@pytest.mark.parametrize(
    ("rows", "halves", "message"),
    [
        ((Row("mm", Rule.LOWER), Row("mm", Rule.FP32)), "widen",
            "policy 'p' gives 'mm' two rules: lower and fp32. Keep one."),
        ((Row("mm", Rule.LOWER, scope="a"), Row("mm", Rule.FP32, scope="a")), "widen",
            "policy 'p' gives 'mm' in 'a' two rules: lower and fp32. Keep one."),
        ((Row("mm", Rule.LOWER), Row("mm", Rule.LOWER)), "widen",
            "policy 'p' gives 'mm' two rules: lower and lower. Keep one."),
    ],
)  # fmt: skip
def test_a_policy_that_cannot_be(rows, halves, message):
    assert refusal(Policy, "p", rows, halves) == message


# Scopes against a matcher that tries every way: what matches, how deep, and who outranks whom


@settings(max_examples=size(80, 500))
@given(PARTS, ANY_PATH)
def test_depth_is_what_trying_every_way_finds(parts, path):
    assert scopes.depth("".join(parts), path) == deepest(parts, path)


def test_case_counts_and_a_pattern_is_no_regular_expression():
    assert scopes.depth("Attn", "attn") == scopes.depth("a+b", "aab") == 0


@settings(max_examples=size(40, 250))
@given(st.lists(PARTS, max_size=5, unique_by="".join), ANY_PATH)
def test_the_strongest_pattern_is_the_deepest_then_the_one_with_most_plain_characters(many, path):
    by_text = {"".join(parts): parts for parts in many}
    expected = {
        pattern: (depth, sum(part != "*" and part not in ONE for part in parts))
        for pattern, parts in by_text.items()
        if (depth := deepest(parts, path))
    }
    found = scopes.ranked(by_text, path)
    assert {pattern: rank for rank, pattern in found} == expected
    assert [rank for rank, _ in found] == sorted(expected.values()), "the weakest come first"


PATHLESS = ["", "model/lm_head", ".lm_head", "lm_head.", "*.", ".", "a[].b", "a[!]", "a.[0-3"]


@pytest.mark.parametrize("pattern", PATHLESS)
def test_a_pattern_of_no_module_is_refused(pattern):
    with pytest.raises(PolicyError) as error:
        scopes.check(pattern, "own.toml")
    assert str(error.value) == (
        f"own.toml: {pattern!r} is no pattern of module paths. Write names joined by dots, such as "
        '"*.lm_head" or "blocks.*.attn"; * stands for any characters.'
    )


@given(PARTS, ANY_PATH)
def test_a_pattern_that_matches_is_not_refused(parts, path):
    pattern = "".join(parts)
    if not pattern.startswith(".") and not pattern.endswith(".") and scopes.depth(pattern, path):
        assert scopes.check(pattern, "own.toml") is None


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.lm_haed", ("*.lm_head",)),
        ("decoder.layer.0", ("decoder.layers.0",)),
        ("*.layers.0.atn", ("*.layers.0.attn",)),
        ("xyz", ()),
    ],
)
def test_the_nearest_patterns_match_modules(pattern: str, expected: tuple[str, ...]) -> None:
    paths = ["", "decoder", "decoder.layers", "decoder.layers.0", "decoder.layers.0.attn"]
    found = scopes.nearest(pattern, [*paths, "decoder.lm_head"])
    assert found[:1] == expected


@pytest.mark.parametrize("rows", [{"all": "lower"}, {"default": "lower"}, {"all": "widest"}])
def test_rows_for_all_ops_that_lower_mean_float32_without_low_kernels(rows: dict[str, str]) -> None:
    policy = polymp.policy({"rules": rows})
    for op in ("linalg_inv", "fft_fft"):
        why = policy.why(op, "bfloat16")
        assert why.row.rule == "fp32"
        assert "where there are no kernels for low dtypes" in str(why)
    assert policy.why("add", "bfloat16").row.of in rows
    named = policy.override(rules={"class:fft": "lower"})
    assert named.why("fft_fft", "float16").row.rule == "lower"


def test_a_row_is_used_if_a_part_of_it_or_what_it_means_decided() -> None:
    """In a module that has a row for the other dtype; and for an op without low kernels."""
    scopes = {"head": {"softmax": {"float16": "lower"}}}
    split = polymp.policy({"rules": {"softmax": "fp32"}, "scopes": scopes})
    below = polymp.policy({"rules": {"softmax": "fp32"}})
    over = below.override(rules={"softmax": {"float16": "lower"}})
    for policy, op, unused in (
        (split, "softmax", ["softmax (float16) in 'head'"]),
        (over, "softmax", ["softmax (float16)"]),
        (polymp.policy({"rules": {"all": "lower"}}), "fft_fft", []),
    ):
        row = policy.at("head").winner(op, "bfloat16")
        assert row is not None
        found = policy.unused([SimpleNamespace(row=row)])
        assert [row.of + row.where for row in found] == unused
        assert len(policy.unused([])) == len(policy.rows)
