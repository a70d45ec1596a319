"""The key `few_rows` of a policy: where it comes from, and what it says."""

import pickle

import pytest

import polymp
from polymp.cli import main
from polymp.errors import PolicyError
from polymp.rules import policy_files
from polymp.rules.policy import why_float32


def test_a_product_of_more_rows_has_no_reason():
    assert why_float32(4, 5) == why_float32(0, 1) == why_float32(4, float("inf")) == ""
    why = "casting the float32 parameter takes longer than {} (few_rows = 4)"
    assert why_float32(4, 4) == why.format("4 rows")
    assert why_float32(4, 1) == why.format("1 row")


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


def test_a_file_holds_the_key(tmp_path):
    few = polymp.policy({"name": "few", "extends": "amp", "few_rows": 32})
    file = tmp_path / "few.toml"
    file.write_text(policy_files.to_toml(few))
    assert polymp.policy(str(file)) == few


@pytest.mark.parametrize("value", [-1, True, "4", 2.5])
def test_what_is_no_number_of_rows_is_refused(value):
    with pytest.raises(PolicyError) as error:
        polymp.policy({"name": "few", "extends": "amp", "few_rows": value})
    assert str(error.value) == (
        f"policy 'few': few_rows = {value!r} is not a number of rows. Write few_rows = 32, or 0 to "
        "run products of any size by their rows."
    )


def test_a_comparison_of_policies_lists_the_products(capsys, tmp_path):
    few = polymp.policy({"name": "few", "extends": "amp", "few_rows": 32})
    file = tmp_path / "few.toml"
    file.write_text(policy_files.to_toml(few))
    main(["diff", "amp", str(file)])
    out = capsys.readouterr().out
    assert "addmm" in out
    assert "lower (few_rows = 32)" in out
    assert "conv" not in out
