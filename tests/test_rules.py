"""Policies: loading, errors, value equality, and the one decision."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymp import rules
from polymp.dtypes import FORMATS, widest
from polymp.errors import PolicyError
from polymp.region import Region
from polymp.rules import Apply, Decision, Policy, Row, Rule

LOW = st.sampled_from(["float16", "bfloat16"])
NAMES = st.sampled_from(list(FORMATS))

MINE = Policy.from_dict(
    {
        "name": "mine",
        "rules": {
            "mm": "lower",
            "exp": "fp32",
            "layer_norm": "fp32_keep",
            "add.Tensor": "widest",
            "relu": "keep",
            "bce": {"rule": "forbid", "instead": "bce_with_logits"},
        },
    }
)


def region(low="float16", enabled=True):
    return Region("torch", "cpu", enabled, low, True, MINE)


@pytest.mark.parametrize(
    ("op", "formats", "low", "expected"),
    [
        ("mm", ["float32", "float32"], "bfloat16", Decision(Rule.LOWER, "bfloat16")),
        ("mm", ["float16", "float32"], "bfloat16", Decision(Rule.LOWER, "bfloat16")),
        ("exp", ["float16"], "float16", Decision(Rule.FP32, "float32")),
        ("layer_norm", ["float16"], "float16", Decision(Rule.FP32_KEEP, "float32", "float16")),
        ("layer_norm", ["float32"], "float16", Decision(Rule.FP32_KEEP, "float32", "float32")),
        ("layer_norm", [], "float16", Decision(Rule.FP32_KEEP, "float32")),
        ("add.Tensor", ["float16", "float16"], "float16", Decision(Rule.WIDEST, "float16")),
        ("add.Tensor", ["float16", "float32"], "float16", Decision(Rule.WIDEST, "float32")),
        ("add.Tensor", ["float64", "float16"], "float16", Decision(Rule.WIDEST, "float16")),
        ("add.Tensor", ["bfloat16"], "float16", Decision(Rule.WIDEST, "float32")),
        ("add.Tensor", [], "float16", Decision(Rule.WIDEST, "float16")),
        ("relu", ["float32"], "float16", Decision(Rule.KEEP)),
        ("unlisted", ["float32"], "float16", Decision(Rule.KEEP)),
        ("bce", ["float16"], "float16", Decision(Rule.FORBID)),
    ],
)
def test_decide(op, formats, low, expected):
    assert MINE.decide(op, formats, region(low)) == expected


@pytest.mark.parametrize("op", MINE.table)
def test_a_disabled_region_keeps_everything(op):
    assert MINE.decide(op, ["float32"], region(enabled=False)) == Decision(Rule.KEEP)


@given(low=LOW, formats=st.lists(NAMES, max_size=4))
def test_widest_holds_every_input_but_float64(low, formats):
    run = MINE.decide("add.Tensor", formats, region(low)).run
    assert run == widest([low, *(f for f in formats if f != "float64")])


@given(low=LOW, formats=st.lists(NAMES, max_size=4))
def test_halves_raise_refuses_a_second_half_only_before_a_float32(low, formats):
    strict = Policy("strict", (Row("add", Rule.WIDEST),), halves="raise")
    decision = strict.decide("add", formats, region(low))
    seen = [f for f in formats if f != "float64"]
    before = seen[: seen.index("float32")] if "float32" in seen else seen
    assert (decision.rule is Rule.FORBID) == any(f != low for f in before)


def test_policies_are_values():
    again = Policy("mine", tuple(reversed(MINE.rows)))
    assert again == MINE
    assert hash(again) == hash(MINE)
    assert Policy("mine", MINE.rows[1:]) != MINE
    assert {again: 1}[MINE] == 1
    with pytest.raises(AttributeError):
        MINE.name = "yours"  # type: ignore[misc]


def test_load_takes_a_name_a_path_data_or_a_policy(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text('halves = "raise"\n[rules]\nmm = "lower"\n"sum.dim_IntList" = "fp32"\n')
    own = rules.load(path)
    assert (
        own
        == rules.load(str(path))
        == Policy("own", (Row("mm", Rule.LOWER), Row("sum.dim_IntList", Rule.FP32)), "raise")
    )
    assert rules.load(own) is own
    assert rules.load({"rules": {"mm": "lower"}}) == Policy("unnamed", (Row("mm", Rule.LOWER),))
    assert rules.load("torch-cpu").table["prod"].rule is Rule.FP32


def test_every_shipped_policy_loads_under_its_name():
    assert rules.shipped() == ("amp", "torch-cpu", "torch-cuda", "torch-mps", "torch-xpu")
    for name in rules.shipped():
        assert rules.load(name).name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[rules]\nmatmul = "lo"\n',
            "{p}: rule 'lo' for op 'matmul' is not one of "
            "lower, fp32, fp32_keep, widest, keep, forbid.",
        ),
        (
            '[rules]\nmm = { rule = "fp32", apply = "magic" }\n',
            "{p}: apply 'magic' for op 'mm' is not one of cast, dtype_argument, append_dtype.",
        ),
        (
            '[rules]\nmm = { rule = "lower", apply = "append_dtype" }\n',
            "{p}: apply append_dtype for op 'mm' needs rule fp32, not lower.",
        ),
        ("[rules]\nmm = 3\n", "{p}: op 'mm' has 3, which is neither a rule nor a table."),
        ("rules = 3\n", "{p}: rules must be a table from op to rule, got 3."),
        (
            '[rulez]\nmm = "lower"\n',
            "{p}: unknown key 'rulez'. Did you mean rules? Known: name, summary, halves, rules.",
        ),
        (
            '[rules]\nmm = { rul = "fp32" }\n',
            "{p}: unknown key 'rul' for op 'mm'. Did you mean rule? Known: rule, apply, instead.",
        ),
        (
            '[rules]\nsoftmax.int = "fp32"\n',
            '{p}: quote the name of the op: "softmax.int" = "fp32".',
        ),
        ('halves = "drop"\n', "policy 'own': halves = 'drop' is not one of widen, raise."),
        (
            "[rules\n",
            "{p} is not TOML: Expected ']' at the end of a table declaration "
            "(at line 1, column 7).",
        ),
    ],
)
def test_a_bad_file_names_file_op_and_value(tmp_path, text, message):
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(PolicyError) as error:
        rules.load(path)
    assert str(error.value) == message.format(p=path)


def test_a_missing_file_and_a_missing_name(tmp_path):
    with pytest.raises(PolicyError) as error:
        rules.load(tmp_path / "no.toml")
    no_file = f"cannot read policy file '{tmp_path / 'no.toml'}': No such file or directory."
    assert str(error.value) == no_file
    with pytest.raises(PolicyError) as error:
        rules.load("torch-cdua")
    assert str(error.value) == (
        "no policy 'torch-cdua'. Did you mean torch-cuda, torch-cpu, torch-xpu? "
        "Shipped: amp, torch-cpu, torch-cuda, torch-mps, torch-xpu; a file's name ends in .toml."
    )


def test_two_rules_for_one_op():
    with pytest.raises(PolicyError) as error:
        Policy("twice", (Row("mm", Rule.LOWER), Row("mm", Rule.FP32)))
    assert str(error.value) == ("policy 'twice' gives op 'mm' two rules: fp32 and lower. Keep one.")


def test_a_row_applies_by_cast_unless_it_says_otherwise():
    assert rules.load("torch-cuda").table["softmax.int"].apply is Apply.DTYPE_ARGUMENT
    assert rules.load("torch-cuda").table["exp"].apply is Apply.CAST
