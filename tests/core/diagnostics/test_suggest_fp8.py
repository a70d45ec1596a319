"""Which products a suggestion keeps in bfloat16: the criterion, the text, the errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import polymp
from polymp.diagnostics.audit import Audit
from polymp.diagnostics.fp8_loss import Measurement, losses
from polymp.errors import PolicyError
from polymp.fp8.recipes import RECIPES
from polymp.rules.row import Rule

E4M3 = 0.0236  # the error of rounding alone


def measured(module: str, activation: float = 0.026, op: str = "linear") -> Measurement:
    numbers = (0.25, activation, 0.0, 0.026, 0.037)
    return Measurement((op, module, "net.py:3"), "result", ("activation", "weight"), numbers)


def audit(*found: Measurement, recipe: str = "rowwise") -> Audit:
    a = Audit()
    a.fp8, a.steps = recipe, 1
    a.fp8_losses = losses(RECIPES[recipe], found)
    return a


def test_a_site_has_the_numbers_of_its_worst_call():
    back = Measurement(
        ("linear", "a", "net.py:3"), "input_gradient", ("weight", "gradient"), (0, 0.5, 0, 0.1, 0.2)
    )
    nan = measured("a", float("nan"))
    (one,) = losses(RECIPES["rowwise"], [measured("a"), measured("a", 0.9), nan, back])
    assert {role: each.error for role, each in one.operands.items()} == {
        "activation": 0.9,
        "weight": 0.5,
        "gradient": 0.1,
    }
    assert one.results == {"result": 0.037, "input_gradient": 0.2}
    assert one.worst.of == "activation"
    assert one.worst.times == pytest.approx(0.9 / E4M3, rel=0.01)


def test_the_product_whose_error_is_beyond_the_limit_stays(tmp_path: Path):
    a = audit(measured("blocks.0"), measured("blocks.1", 0.5), measured("head", 0.06))
    suggestion = a.suggest(fp8=True)
    assert suggestion.scopes == {"blocks.1": {"linear": "lower"}, "head": {"linear": "lower"}}
    assert suggestion.reasons[0] == (
        "linear in blocks.1 net.py:3: its activation would be off by 50 %, 21.2 times as much as "
        "by rounding alone, 2.4 %; 25 % of its values would become zero."
    )
    assert a.suggest(fp8=True, limit=3.0).scopes == {"blocks.1": {"linear": "lower"}}
    assert not a.suggest(fp8=True, limit=30.0)

    path = tmp_path / "mine.toml"
    path.write_text(str(suggestion))
    loaded = polymp.policy(path)
    assert loaded.fp8 == "rowwise"
    assert loaded.scopes == ("blocks.1", "head")
    for policy in (loaded, suggestion.apply("fp8")):
        rules = [policy.why("linear", "bf16", f"{name}").rule for name in ("blocks.0", "blocks.1")]
        assert rules == [Rule.FP8, Rule.LOWER]


def test_the_text_of_nothing_is_a_policy_with_the_recipe(tmp_path: Path):
    suggestion = audit(measured("a"), recipe="rowwise_gw_hp").suggest(fp8=True)
    assert not suggestion
    assert str(suggestion) == '# Nothing to change.\nextends = "fp8"\nfp8 = "rowwise_gw_hp"'
    path = tmp_path / "mine.toml"
    path.write_text(str(suggestion))
    assert polymp.policy(path).fp8 == "rowwise_gw_hp"
    assert suggestion.apply("fp8").fp8 == "rowwise_gw_hp"


def test_a_module_inside_keeps_its_8_bits(tmp_path: Path):
    suggestion = audit(measured("mlp", 0.9), measured("mlp.up")).suggest(fp8=True)
    path = tmp_path / "mine.toml"
    path.write_text(str(suggestion))
    policy = polymp.policy(path)
    assert [policy.why("linear", "bf16", scope).rule for scope in ("mlp", "mlp.up", "mlp.x")] == [
        Rule.LOWER, Rule.FP8, Rule.LOWER,
    ]  # fmt: skip


def test_a_product_outside_of_modules_has_a_reason_and_no_row():
    suggestion = audit(measured("", 0.9)).suggest(fp8=True)
    assert not suggestion
    assert "No row can be for it alone, because it is called outside of all modules" in str(
        suggestion
    )


@pytest.mark.parametrize(
    ("a", "given", "error", "message"),
    [
        (
            Audit(),
            {},
            ValueError,
            "suggest(fp8=True) needs an audit with the losses of a recipe: write audit(..., "
            "fp8='tensorwise').",
        ),
        (
            audit(),
            {},
            ValueError,
            "suggest(fp8=True): no product was measured. Audit steps in a bfloat16 region whose "
            "policy has no rule fp8; `explain` under policy 'fp8' says which products cannot run "
            "in 8 bits, and why.",
        ),
        (
            audit(measured("a")),
            {"limit": 0},
            ValueError,
            "suggest(fp8=True, limit=0): write a number above 0, such as 2.",
        ),
        (
            audit(measured("a")),
            {"base": "amp"},
            PolicyError,
            "suggest(fp8=True): policy 'amp' runs no product in 8 bits. Give base='fp8', or a "
            "policy with rows of rule fp8.",
        ),
    ],
)
def test_a_suggestion_that_cannot_be_made(a, given, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        a.suggest(fp8=True, **given)


def test_the_table():
    a = audit(*(measured(f"blocks.{at}") for at in range(4)), measured("head", 0.9))
    text = a.table(width=100)
    assert "-- products in 8 bits, by recipe rowwise" in text
    assert "rounding alone, 2.4 in e4m3" in " ".join(text.split())
    assert [line.split() for line in text.splitlines() if "linear" in line] == [
        ["linear", "net.py:3", "2.6/25", "2.6", "3.7", "1.11"],
        ["linear", "net.py:3", "90/25", "2.6", "3.7", "38.1"],
    ]
    assert "blocks.* x4" in text
    assert "blocks.3" in a.table(width=100, fold=False)
    assert "no product that ran in bfloat16 would run in 8 bits" in audit().table(width=100)
    assert "8 bits" not in Audit().table()
    assert a.to_dict()["fp8_losses"][0]["operands"]["weight"] == {
        "format": "float8_e4m3fn", "zero": 0.0, "error": 0.026,
    }  # fmt: skip
