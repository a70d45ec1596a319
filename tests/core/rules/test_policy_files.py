"""Reading and writing policies: every place they come from, and every fault by its whole text."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polymp.errors import PolicyError
from polymp.rules import policy_files
from polymp.rules.policy import Policy
from polymp.rules.policy_files import load
from polymp.rules.row import Row, Rule
from polymp.rules.vocabulary import vocabulary
from tests.support.policy_rows import PATTERN, RULES, as_data
from tests.support.sizes import size

SHIPPED = ("amp", "fp8", "lean", "matmul", "torch-cpu", "torch-cuda", "torch-mps", "torch-xpu")

OWN = """
summary = "Mine."
halves = "raise"
[rules]
linear = "lower"
softmax = { float16 = "fp32", bfloat16 = "lower" }
"class:fft" = { rule = "keep", float16 = "fp32" }
"aten:sum.dim_IntList" = "fp32"
binary_cross_entropy = { rule = "forbid", instead = "mse_loss" }
default = "widest"
[scopes."*.lm_head"]
linear = "fp32"
"class:matmul" = { bfloat16 = "keep" }
"""

ROWS = (
    Row("linear", Rule.LOWER),
    Row("softmax", Rule.FP32, "float16"),
    Row("softmax", Rule.LOWER, "bfloat16"),
    Row("class:fft", Rule.KEEP),
    Row("class:fft", Rule.FP32, "float16"),
    Row("aten:sum.dim_IntList", Rule.FP32),
    Row("binary_cross_entropy", Rule.FORBID, instead="mse_loss"),
    Row("default", Rule.WIDEST),
    Row("linear", Rule.FP32, scope="*.lm_head"),
    Row("class:matmul", Rule.KEEP, "bfloat16", "*.lm_head"),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(source):
    with pytest.raises(PolicyError) as error:
        load(source)
    return str(error.value)


def test_a_file_by_path_by_string_and_as_data(folder):
    path = folder / "own.toml"
    path.write_text(OWN)
    own = load(path)
    assert own == Policy("own", ROWS, "raise")
    assert {row.source for row in own.rows} == {str(path)}
    assert load(str(path)) == load("own.toml") == load(Path("own.toml")) == own
    assert load(own) is own
    named = folder / "named.toml"
    named.write_text('name = "another"\n[rules]\n')
    assert load(named) == Policy("another", ())


def test_data():
    data = {"name": "mine", "rules": {"mm": "lower", "exp": {"float16": Rule.FP32}}}
    assert load(data) == Policy("mine", (Row("mm", Rule.LOWER), Row("exp", Rule.FP32, "float16")))
    assert {row.source for row in load(data).rows} == {"policy 'mine'"}
    assert load({"rules": {}}) == Policy("unnamed", ())
    assert load({"scopes": {"a.*": {"mm": "keep"}}}).rows == (Row("mm", Rule.KEEP, scope="a.*"),)


def test_the_shipped_ones_load_under_their_names():
    assert policy_files.shipped() == SHIPPED
    for name in SHIPPED:
        policy = load(name)
        assert policy.name == name
        assert policy.rows, "an empty policy"
        assert load(name) is policy, "read twice"
        assert policy_files.summary(name).endswith(".")
        assert {row.source for row in policy.rows} <= {
            f"policies/{other}.toml" for other in SHIPPED
        }


def test_a_shipped_one_is_what_its_file_says(folder):
    copy = folder / "torch-cpu.toml"
    copy.write_text(policy_files.text("torch-cpu"))
    assert load(copy) == load("torch-cpu")
    assert load("torch-cpu").why("mm", "float16").row == Row("mm", Rule.LOWER)
    assert load("torch-cpu").halves == "raise"
    assert load("amp").halves == "widen"


def test_extending_a_shipped_one():
    amp = load("amp")
    own = load({"name": "own", "extends": "amp", "rules": {"class:softmax": "lower"}})
    gone = {row.of for row in set(amp.rows) - set(own.rows)}
    assert gone >= {"softmax", "log_softmax", "logsumexp"}
    assert {vocabulary().ops[op].kind for op in gone} == {"softmax"}
    assert set(own.rows) - set(amp.rows) == {Row("class:softmax", Rule.LOWER)}
    assert own.why("exp", "float16").row.source == "policies/torch-cuda.toml"
    assert own.why("softmax", "float16").row.source == "policy 'own'"
    assert load({"extends": amp}).rows == amp.rows


def test_the_recipe_is_inherited_and_can_be_changed():
    assert load("fp8").fp8 == "tensorwise"
    assert load({"extends": "fp8"}).fp8 == "tensorwise"
    rowwise = load({"extends": "fp8", "fp8": "rowwise"})
    assert rowwise.fp8 == "rowwise"
    assert load({"extends": rowwise, "rules": {"bmm": "fp8"}}).fp8 == "rowwise"
    assert load({"extends": "lean", "rules": {"mm": "fp8"}}).fp8 == "tensorwise"
    assert refusal({"extends": "fp8", "fp8": "row"}) == (
        "policy 'unnamed': fp8 = 'row' is not one of tensorwise, rowwise, rowwise_gw_hp."
    )


def test_halves_are_inherited_and_can_be_changed():
    assert load({"extends": "torch-cuda"}).halves == "raise"
    assert load({"extends": "torch-cuda", "halves": "widen"}).halves == "widen"
    assert load({"rules": {}}).halves == "widen"


def test_extending_a_file_beside(folder):
    (folder / "deep").mkdir()
    (folder / "base.toml").write_text('[rules]\nmm = "lower"\nexp = "fp32"\n')
    (folder / "deep" / "mid.toml").write_text('extends = "../base.toml"\n[rules]\nexp = "keep"\n')
    (folder / "top.toml").write_text('extends = "deep/mid.toml"\n[rules]\nlog = "fp32"\n')
    expected = (Row("mm", Rule.LOWER), Row("exp", Rule.KEEP), Row("log", Rule.FP32))
    data = {"name": "top", "extends": "deep/mid.toml", "rules": {"log": "fp32"}}
    assert load("top.toml") == load(data) == Policy("top", expected)
    absolute = folder / "deep" / "absolute.toml"
    absolute.write_text(f'extends = "{(folder / "base.toml").as_posix()}"\n')
    assert load(absolute).rows == load("base.toml").rows


def test_extending_itself(folder):
    (folder / "one.toml").write_text('extends = "two.toml"\n')
    (folder / "two.toml").write_text('extends = "one.toml"\n')
    (folder / "self.toml").write_text('extends = "./self.toml"\n')
    message = "policy file {!r} extends itself, by way of its base."
    one, own = message.format(str(folder / "one.toml")), message.format(str(folder / "self.toml"))
    two = f"{folder / 'two.toml'}: extends = 'one.toml': "
    assert refusal("one.toml") == f"one.toml: extends = 'two.toml': {two}{one}"
    assert refusal("self.toml") == f"self.toml: extends = './self.toml': {own}"
    (folder / "both.toml").write_text('extends = "ends.toml"\n')
    (folder / "ends.toml").write_text('[rules]\nmm = "lower"\n')
    assert load("both.toml").rows == load("ends.toml").rows, "a chain is no circle"


@pytest.mark.parametrize(
    ("extends", "message"),
    [
        ({"rules": {}},
            "policy 'own': extends = {'rules': {}} is not the name or path of a policy."),
        ("no.toml",
            "policy 'own': extends = 'no.toml': cannot read policy file 'no.toml': No such file or "
            "directory."),
        ("ampp",
            "policy 'own': extends = 'ampp': no policy 'ampp'. Did you mean amp? Shipped: "
            f"{', '.join(SHIPPED)}; a file's name ends in .toml."),
    ],
)  # fmt: skip
def test_extending_what_is_not_there(folder, extends, message):
    assert refusal({"name": "own", "extends": extends}) == message


ALONE = "op 'mm' has rules for dtypes alone; put the rest there."
KEYS = "name, summary, extends, halves, fp8, few_rows, rules, scopes"
FAULTS = {
    '[rules]\nmm = "lo"\n': f"rule 'lo' for op 'mm' is not one of {RULES}.",
    '[rules]\nmm = { float16 = "lo" }\n': f"float16 'lo' for op 'mm' is not one of {RULES}.",
    '[rules]\nmm = { rule = ["fp32"] }\n': f"rule ['fp32'] for op 'mm' is not one of {RULES}.",
    '[rules]\nmm = { float16 = "fp32", instead = "bmm" }\n': ALONE,
    '[rules]\nmm = { rule = "fp32", instead = "bmm" }\n': (
        "instead 'bmm' for op 'mm' needs rule forbid, not fp32."
    ),
    "[rules]\nmm = 3\n": "op 'mm' has 3, which is neither a rule nor a table.",
    '[rules]\nmm = { instead = "bmm" }\n': (
        "no rule for op 'mm'. Write a rule, or one for a dtype."
    ),
    "rules = 3\n": "rules must be a table from op to rule, got 3.",
    "scopes = 3\n": "scopes must be a table from pattern to rules, got 3.",
    '[scopes]\na = "fp32"\n': "scopes.a must be a table from op to rule, got 'fp32'.",
    '[scopes."a."]\nmm = "fp32"\n': f"'a.' {PATTERN}",
    '[scopes.a]\nmm = "lo"\n': f"rule 'lo' for op 'mm' is not one of {RULES}.",
    '[scopes.a]\nlayr_norm = "fp32"\n': (
        "no op 'layr_norm'. Did you mean layer_norm, nuclear_norm, rms_norm?"
    ),
    '[rulez]\nmm = "lower"\n': f"unknown key 'rulez'. Did you mean rules? Known: {KEYS}.",
    "colour = 1\n": f"unknown key 'colour'. Known: {KEYS}.",
    '[rules]\nmm = { rul = "fp32" }\n': (
        "unknown key 'rul' for op 'mm'. Did you mean rule? Known: rule, instead, float16, bfloat16."
    ),
    '[rules]\nmm = { float32 = "fp32" }\n': (
        "unknown key 'float32' for op 'mm'. Did you mean float16, bfloat16? "
        "Known: rule, instead, float16, bfloat16."
    ),
    '[rules]\nmm = { fp61 = "fp32" }\n': (
        "unknown key 'fp61' for op 'mm'. Known: rule, instead, float16, bfloat16."
    ),
    '[rules]\nsum.dim_IntList = "fp32"\n': (
        'quote the name of an overload: "aten:sum.dim_IntList" = "fp32".'
    ),
    '[rules]\nsoftmax.int = "fp32"\n': (
        'quote the name of an overload: "aten:softmax.int" = "fp32".'
    ),
    '[rules]\nsofmax = "fp32"\n': "no op 'sofmax'. Did you mean softmax, fmax, log_softmax?",
    '[rules]\nnn.softmax = "fp32"\n': "no op 'nn'. `polymp show amp` lists the ops.",
    '[rules]\n"softmax.int" = "fp32"\n': (
        "no op 'softmax.int'. It is a spelling of 'softmax'; alone it is written aten:softmax.int."
    ),
    '[rules]\n"mm.out" = "fp32"\n': "no op 'mm.out'. Did you mean mm?",
    '[rules]\ndot_general = "fp32"\n': (
        "no op 'dot_general'. It is a spelling of 'matmul'; alone it is written jax:dot_general."
    ),
    '[rules]\nfft = "fp32"\n': "no op 'fft'. The class is written class:fft.",
    '[rules]\n"class:fit" = "fp32"\n': (
        f"no class 'fit'. Did you mean fft? Classes: {', '.join(sorted(vocabulary().kinds))}."
    ),
    '[rules]\n"tf:mm" = "fp32"\n': (
        "'tf:mm' is not an op. Names with a colon are class:NAME, aten:OVERLOAD and jax:PRIMITIVE."
    ),
    '[rules]\nmm = { rule = "forbid", instead = "bnm" }\n': (
        "instead for op 'mm': no op 'bnm'. Did you mean bmm?"
    ),
    "extends = 3\n": "extends = 3 is not the name or path of a policy.",
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_in_a_file_is_said_with_file_op_and_value(folder, text):
    Path("own.toml").write_text(text)
    assert refusal("own.toml") == f"own.toml: {FAULTS[text]}"


@pytest.mark.parametrize(
    "data",
    [
        {"rules": {3: "fp32"}},
        {"scopes": {3: {"mm": "fp32"}}},
        {"scopes": {"a": {3: "fp32"}}},
        {"rules": {"mm": {3: "fp32"}}},
        {3: "fp32"},
    ],
    ids=str,
)
def test_a_key_that_is_no_name_is_refused(data):
    message = refusal({"name": "own"} | data)
    assert message.startswith("policy 'own': ")
    assert "3" in message


def test_a_fault_that_is_not_in_a_table(folder):
    Path("own.toml").write_text('name = "mine"\n')
    why = 'has no rows. Write rows below [rules], or extends = "amp".'
    assert refusal("own.toml") == f"own.toml {why}"
    Path("own.toml").write_text('halves = "drop"\n[rules]\n')
    assert refusal("own.toml") == "policy 'own': halves = 'drop' is not one of widen, raise."
    Path("own.toml").write_text("[rules\n")
    assert refusal("own.toml") == (
        "own.toml is not TOML: Expected ']' at the end of a table declaration "
        "(at line 1, column 7)."
    )
    Path("own.toml").write_bytes(b'name = "\xff"\n')
    assert refusal("own.toml") == "cannot read policy file 'own.toml': it is not UTF-8."


def test_a_byte_order_mark_is_no_part_of_a_policy(folder):
    Path("own.toml").write_bytes(b'\xef\xbb\xbf[rules]\nexp = "fp32"\n')
    assert load("own.toml").why("exp", "float16").rule == "fp32"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('extends = "a\\u0000b.toml"', "'.*a\\\\x00b.toml': embedded null byte"),
        ("x = " + "[" * 2000, "own.toml: a number or the nesting of brackets is too long.$"),
        ("few_rows = " + "9" * 5000, "own.toml: a number or the nesting of brackets is too long.$"),
        (f'rules.{"k" * 100_000} = "fp32"', "own.toml: no op 'k+ ... k+'. `polymp show amp`"),
        ('rules."\\u001b[31mexp" = "fp32"', r"own.toml: no op '\\x1b\[31mexp'"),
    ],
    ids=["NUL", "brackets", "digits", "long key", "control characters"],
)
def test_hostile_content_is_refused_shortly(folder, text, why):
    Path("own.toml").write_text(text)
    message = refusal("own.toml")
    assert re.search(why, message), message
    assert len(message) < 1100
    assert message.isprintable()


@pytest.mark.parametrize("path", ["own\ud800.toml", "a\0.toml", "circle.toml"], ids=ascii)
def test_a_path_that_no_file_can_have(folder, path):
    Path("circle.toml").symlink_to("circle.toml")
    message = refusal(path)
    assert message.startswith(f"cannot read policy file {path!r}: ")
    assert message.isprintable()


def test_what_is_no_policy(folder):
    path = folder / "no.toml"
    assert refusal(path) == f"cannot read policy file {str(path)!r}: No such file or directory."
    Path("dir.toml").mkdir()
    assert re.fullmatch(r"cannot read policy file 'dir\.toml': .+\.", refusal("dir.toml"))
    for wrong in (None, 3, ["amp"], b"amp"):
        assert refusal(wrong) == (
            f"a policy is a Policy, a name, the path of a TOML file or a dict, not {wrong!r}."
        )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("torch-cdua", " Did you mean torch-cuda, torch-cpu, torch-xpu?"),
        ("AMP", ""),
        ("vocabulary", ""),
        ("../policies/amp", ""),
        ("", ""),
    ],
)
def test_an_unknown_name(name, hint):
    assert refusal(name) == (
        f"no policy {name!r}.{hint} Shipped: {', '.join(SHIPPED)}; a file's name ends in .toml."
    )


SELECTORS = [
    *("mm", "linear", "softmax", "sum", "class:matmul", "class:softmax", "default"),
    *("aten:sum.dim_IntList", "aten:mylib::my_op", "jax:exp", "jax:dot_general:unbatched"),
]
PATTERNS = ["", "*", "*.lm_head", "blocks.*.attn", "blocks.[0-3]", 'a"b', "a\\b", "ä b"]
NAMES = st.text(st.characters(codec="utf-8"), max_size=8)


@st.composite
def rows(draw):
    rule = draw(st.sampled_from(Rule))
    instead = draw(st.sampled_from(["", "mse_loss", "l1_loss"])) if rule is Rule.FORBID else ""
    of, scope = draw(st.sampled_from(SELECTORS)), draw(st.sampled_from(PATTERNS))
    low = draw(st.sampled_from(["", "float16", "bfloat16"]))
    if rule is Rule.FP8 and (of not in ("mm", "linear", "class:matmul") or low == "float16"):
        rule = Rule.LOWER
    return Row(of, rule, low, scope, instead)


POLICIES = st.builds(
    lambda name, rows, halves, fp8, few: Policy(name, tuple(rows), halves, fp8=fp8, few_rows=few),
    NAMES,
    st.lists(rows(), max_size=10, unique_by=lambda row: row.key),
    st.sampled_from(["widen", "raise"]),
    st.sampled_from(["", "tensorwise", "rowwise", "rowwise_gw_hp"]),
    st.sampled_from([0, 32]),
)


@settings(max_examples=size(15, 100))
@given(POLICIES)
def test_data_is_read_as_the_policy_that_it_is_of(policy):
    assert load(as_data(policy)) == policy
