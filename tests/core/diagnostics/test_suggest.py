"""Suggestions for measured data: rows, another dtype, a loss scale, or nothing."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

import polymp
from polymp.diagnostics.audit import FIRST_SCALE, Audit, Suggestion
from polymp.diagnostics.audit_records import Fault, Measured, Operand
from polymp.diagnostics.blame import CAST, UNTRIED_WIDE
from polymp.errors import PolicyError
from polymp.rules.row import Row, Rule
from polymp.scaling import LARGEST
from tests.conftest import need
from tests.support import reports
from tests.support.reports import magnitudes

LOWER, LINEAR = Row("matmul", Rule.LOWER), Row("linear", Rule.LOWER)


def measured(op: str = "matmul", module: str = "attention", **told: Any) -> Measured:
    """A result; in float16, of values round 1, unless told otherwise."""
    lost = {name: told.pop(name) for name in ("burst", "vanished", "inf", "nan") if name in told}
    values = magnitudes(told.pop("values", (1.0,)), **lost)
    return reports.measured(op, module, values, **{"source": "net.py:3", **told})


def fault(kind: str, op: str = "matmul", module: str = "attention", **told: Any) -> Fault:
    given = {"spelling": f"aten:{op}", "source": "net.py:3", "why": "It broke.", "row": None}
    known = {"op": op, "module": module, "kind": kind, "inputs": ()}
    return reports.fault()._replace(**(known | given | told))


def audit(
    *results: Measured, fault: Fault | None = None, scale: float = 1.0, gradients: Any = ()
) -> Audit:
    a = reports.audit(list(results), list(gradients), scale, steps=1)
    a.fault = fault
    return a


def suggest(a: Audit, base: Any = "amp") -> Suggestion:
    return a.suggest(base)


def gradient(*values: float) -> Measured:
    return reports.gradient("head.weight", values)._replace(run="float32")


def test_nothing_is_suggested_where_nothing_is_wrong() -> None:
    found = suggest(audit(measured(), gradients=[gradient(1e-3, 0.0)]))
    assert not found
    assert found == Suggestion()
    assert str(found) == "# Nothing to change."
    assert found.apply("amp") == polymp.policy("amp")


def test_an_op_that_overflows_runs_in_float32_in_its_module() -> None:
    found = suggest(audit(measured(burst=0.25), measured("softmax")))
    assert (found.rules, found.scopes) == ({}, {"attention": {"matmul": "fp32"}})
    assert found.reasons == (
        "matmul in attention net.py:3: 25% of its values are Inf in float16 and are not in "
        "float32.",
    )
    policy = found.apply("amp")
    assert policy.why("matmul", "float16", "attention").rule is Rule.FP32
    assert policy.why("matmul", "float16", "head").rule is Rule.LOWER


def test_a_fault_that_was_not_measured_is_enough() -> None:
    found = suggest(audit(fault=fault("overflow")))
    assert found.scopes == {"attention": {"matmul": "fp32"}}
    assert found.reasons == ("matmul in attention net.py:3: It broke.",)


@pytest.mark.parametrize(
    ("told", "of"),
    [
        ({"op": "bmm", "spelling": "aten:bmm", "row": LOWER}, "matmul"),  # which was decided for
        ({"op": "bmm", "row": Row("class:matmul", Rule.LOWER)}, "bmm"),  # and not its class
        ({"op": "_weird", "spelling": "aten:_weird"}, "aten:_weird"),  # without a name of ours
    ],
)
def test_the_op_that_a_row_is_for(told: dict[str, Any], of: str) -> None:
    assert suggest(audit(measured(burst=0.5, **told))).scopes == {"attention": {of: "fp32"}}


@pytest.mark.parametrize(
    "spelling",
    ["aten:_to_copy", "jax:convert_element_type", "mine.f", "", "aten:w.out", "aten:w_.Tensor"],
)
def test_what_no_row_can_speak_of_is_told(spelling: str) -> None:
    found = suggest(audit(measured("_weird", spelling=spelling, burst=0.5)))
    assert not found
    assert found.reasons[0].endswith(
        "change the program. locate tries which ops before it help in float32."
    )


@pytest.mark.parametrize(("spelling", "wide"), [("pow", "give pow the rule"), ("pow_", "run pow")])
def test_no_row_is_named_for_an_op_in_place(spelling: str, wide: str) -> None:
    fell = fault("operation", "pow", spelling=f"aten:{spelling}.Scalar", why=UNTRIED_WIDE)
    assert f"Look at its inputs, or {wide}" in suggest(audit(fault=fell)).reasons[0]


@pytest.mark.parametrize(
    ("module", "scope"),
    [
        ("a.0.b", "a.0.b"),
        ("a.b[0]", "a.b[[]0]"),
        ("a*", "a[*]"),
        ("net/~/linear", ""),
        ("a..b", ""),
        ("", ""),
    ],
)
def test_a_module_becomes_a_pattern_that_matches_it_alone(module: str, scope: str) -> None:
    found = suggest(audit(measured(module=module, burst=0.5)))
    rows = {"matmul": "fp32"}
    assert (found.rules, found.scopes) == ((rows, {}) if not scope else ({}, {scope: rows}))
    assert found.apply("amp").why("matmul", "float16", module).rule is Rule.FP32


def test_what_would_round_the_same_numbers_again_runs_in_float32_too() -> None:
    up = measured("linear", "mlp.up", burst=0.1, inf=True)
    down = measured("linear", "mlp.down", nan=True, row=LINEAR)
    beside = measured("linear", "head", nan=True, row=LINEAR)
    rows = {"linear": "fp32"}
    found = suggest(audit(up, measured("relu", "mlp", inf=True), down, beside))
    assert found.scopes == {"mlp.up": rows, "mlp.down": rows}
    assert found.reasons[1].startswith("linear in mlp.down net.py:3: it reads the values that")
    assert suggest(audit(down, up, beside)).scopes == {"mlp.up": rows}
    bounded = measured("layer_norm", "mlp.norm", nan=True, run="float32")
    assert suggest(audit(up, bounded, down)).scopes == {"mlp.up": rows}
    finite = measured("linear", "mlp.down", row=LINEAR)
    assert suggest(audit(up, finite)).scopes == {"mlp.up": rows}
    inner = measured("linear", "mlp.up.low", nan=True, row=LINEAR)
    assert suggest(audit(up, inner, down)).scopes == {"mlp.up": rows, "mlp.up.low": rows}


def test_modules_that_are_alike_share_a_pattern() -> None:
    rows = [measured(module=f"blocks.{i}.attention", burst=0.5) for i in range(3)]
    found = suggest(audit(*rows))
    assert found.scopes == {"blocks.*.attention": {"matmul": "fp32"}}
    assert suggest(audit(*rows[:2])).scopes.keys() == {"blocks.0.attention", "blocks.1.attention"}


def test_many_places_that_overflow_are_too_many_for_rows() -> None:
    ops = [measured("linear", name, burst=0.1) for name in ("start", "down", "head")]
    found = suggest(audit(*ops))
    assert (found.dtype, found.rules, found.scopes) == ("bfloat16", {}, {})
    assert found.reasons[0].startswith("3 of 3 ops that run in float16 give Inf")
    assert suggest(audit(*ops[:2])).dtype is None
    assert found.apply("amp") == polymp.policy("amp")


def test_what_overflows_on_the_way_in_is_beyond_rows() -> None:
    broke = fault("overflow", "linear", "start", why=CAST.format("float16"))
    found = suggest(audit(measured("linear", "start", inf=True), fault=broke))
    assert found.dtype == "bfloat16"
    assert "its inputs are beyond float16's range, and bfloat16 holds them" in found.reasons[0]
    broke = broke._replace(why="It broke.")  # in values that the sample does not have
    found = suggest(audit(measured("linear", "start", inf=True), fault=broke))
    assert found.scopes == {"start": {"linear": "fp32"}}


def test_a_parameter_beyond_float16_is_beyond_rows() -> None:
    weight = Operand("float32", (4, 4), 1.0, 7e4, 0.0, 0.0, 0.0, "start.weight")
    found = suggest(audit(fault=fault("overflow", "linear", "start", inputs=(weight,))))
    assert found.dtype == "bfloat16"
    assert "start.weight holds 7e+04, and float16 ends at 65504" in found.reasons[0]
    within = weight._replace(largest=65504.0)
    found = suggest(audit(fault=fault("overflow", "linear", "start", inputs=(within,))))
    assert found.scopes == {"start": {"linear": "fp32"}}


def test_an_op_that_loses_most_of_its_values_or_a_number_runs_in_float32() -> None:
    assert suggest(audit(measured("mul", vanished=0.6))).scopes == {"attention": {"mul": "fp32"}}
    assert not suggest(audit(measured("mul", vanished=0.4)))
    found = suggest(audit(measured("add", "norm", numbers=(1e-12,))))
    assert found.scopes == {"norm": {"add": "fp32"}}
    assert "the number 1e-12 is zero in float16" in found.reasons[0]


@pytest.mark.parametrize("kind", ["underflow", "number"])
def test_the_fault_alone_is_mended_if_it_lost_values(kind: str) -> None:
    others = measured("exp", "head", vanished=0.9)
    found = suggest(audit(others, fault=fault(kind, "add", "norm")))
    assert found.scopes == {"norm": {"add": "fp32"}}


def test_what_lost_values_on_the_way_to_an_underflow_runs_in_float32_too() -> None:
    rows = [measured("mul", vanished=0.9), measured("exp", vanished=0.3), measured("mean")]
    found = suggest(audit(*rows, fault=fault("underflow", "mean")))
    assert found.scopes == {"attention": {"mean": "fp32", "mul": "fp32"}}


def test_data_that_are_no_numbers_are_told_and_nothing_is_changed() -> None:
    bad = Operand("float32", (8, 4), 0.1, 2.0, 0.0, 0.0, 0.03, "x")
    broke = fault("input", inputs=(bad,), why="'x' is not finite")
    found = suggest(audit(measured(burst=0.5), fault=broke))
    assert not found
    assert found.reasons == (
        "matmul in attention net.py:3: 'x' is not finite. Look at the data or the parameters.",
    )
    assert str(found).endswith("# No row, dtype or loss scale to change.")


def test_a_quotient_of_zeros_is_told_and_only_what_made_them_is_mended() -> None:
    found = suggest(audit(fault=fault("operation", "div", found="NaN")))
    assert not found
    assert "of these inputs div has no finite result in float32 either." in found.reasons[0]
    rows = [measured("mul", vanished=1.0), measured("rsqrt", source="net.py:4", run="float32")]
    broke = fault("operation", "rsqrt", source="net.py:4")
    assert suggest(audit(*rows, fault=broke)).scopes == {"attention": {"mul": "fp32"}}
    assert not suggest(audit(*reversed(rows), fault=broke))


def test_where_no_scale_is_known_a_broken_gradient_asks_for_the_scaler() -> None:
    broke = fault("overflow", direction="backward", why="its result is beyond")
    assert (
        suggest(audit(fault=broke)).reasons[-1] == "If the loss is scaled, give audit the scaler."
    )
    assert len(suggest(audit(fault=broke._replace(direction="forward"))).reasons) == 1


def test_gradients_that_vanish_get_the_scale_that_fits() -> None:
    a = audit(measured(), gradients=[gradient(2.0**-30, 2.0**-32, 0.0)])
    found = suggest(a)
    assert found.init_scale == a.fitting_scale() == 2.0**44
    assert found.reasons[0].startswith("gradients: 100 % of the values that are not zero are zero")
    assert not suggest(audit(measured(), gradients=[gradient(2.0**-30)], scale=2.0**20))
    assert not suggest(audit(measured(region="bfloat16"), gradients=[gradient(2.0**-30)]))
    found = suggest(audit(measured(), gradients=[gradient(2.0**-125)]))
    assert found.init_scale == LARGEST, "a scaler takes no larger one"


def test_gradients_that_an_op_made_zero_count_as_lost() -> None:
    told = {"direction": "backward", "values": (2.0**-20, 0.0, 0.0, 0.0)}
    a = audit(measured("linear", "head", vanished=0.75, **told))
    assert a.suggest().init_scale == a.fitting_scale() == 2.0**34
    assert not audit(measured("linear", "head", vanished=0.2, **told)).suggest()
    zeros = measured("linear", "body", values=(0.0,), direction="backward")
    gone = zeros._replace(magnitudes=zeros.magnitudes._replace(gone=1.0))
    for last, words in ((zeros, "overflows: 2.0**34"), (gone, "overflows: at most 2.0**34")):
        assert words in str(audit(*a.results, last)), "how large it would be is not known"


def test_without_a_scale_an_op_whose_gradients_vanish_gets_one() -> None:
    told = {"direction": "backward", "region": ""}
    healthy = measured("linear", "head", values=(1e-3,) * 10, **told)
    one = measured("linear", "body", values=(1e-3, 0.0, 0.0), vanished=0.4, **told)
    found = audit(healthy, one).suggest()
    assert found.init_scale == audit(healthy, one).fitting_scale() == 2.0**24
    assert found.reasons == (
        "linear in body net.py:3, backward: 40% of its values are zero in float16 at a loss scale "
        "of 1; try 2.0**24.",
    )
    assert not audit(healthy, one, scale=2.0**10).suggest()
    elsewhere = {**told, "run": "bfloat16"}
    one = measured("linear", "body", values=(1e-3, 0.0, 0.0), vanished=0.4, **elsewhere)
    assert not audit(measured("linear", "head", **elsewhere), one).suggest()


def test_what_float16_would_make_inf_is_told_of_a_run_in_other_dtypes() -> None:
    large: dict[str, Any] = {"values": (1.0, 1e6), "run": "bfloat16", "region": "bfloat16"}
    first = measured("mul", "head", run="bfloat16", region="")
    found = audit(first, measured("linear", "head", **large)).suggest()
    assert not found
    assert found.reasons == (
        "linear in head net.py:3: it holds 1e+06, and float16 ends at 65504; this run is in other "
        "dtypes.",
    )
    assert str(found).endswith("# No row, dtype or loss scale to change.")
    (why,) = audit(first, gradients=[gradient(1.0, 7e4)]).suggest().reasons
    assert why.startswith("gradient in head.weight, backward: it holds 7e+04")
    wide = measured("sum", "head", **large | {"run": "float32"})
    assert audit(first, wide).suggest() == Suggestion(), "a region of float16 has it in float32"
    assert audit(first, wide._replace(region="")).suggest().reasons
    assert audit(measured(), wide._replace(region="")).suggest() == Suggestion()


def test_gradients_that_are_all_zero_get_a_first_scale_and_bfloat16_if_none_fits() -> None:
    found = suggest(audit(measured(), gradients=[gradient(0.0, 0.0)]))
    assert found.init_scale == FIRST_SCALE
    assert not suggest(audit(measured(), gradients=[gradient(0.0, 0.0)], scale=2.0**10))
    wide = gradient(1e4, *([1e-9] * 9))
    found = suggest(audit(measured(), gradients=[wide]))
    assert (found.dtype, found.init_scale) == ("bfloat16", None)


def test_gradients_that_overflow_get_a_lower_scale() -> None:
    back = measured("linear", "head", direction="backward", burst=0.1, values=(2.0**10,))
    found = suggest(audit(measured(), back, scale=2.0**16))
    assert found.init_scale == 2.0**4
    assert not found.scopes
    broke = fault("overflow", "linear", "head", direction="backward")
    assert suggest(audit(measured(), fault=broke, scale=2.0**16)).init_scale == 2.0**15
    assert suggest(audit(back)).scopes == {"head": {"linear": "fp32"}}


def test_an_op_that_a_row_has_in_float32_already_is_left_to_the_program() -> None:
    had = polymp.policy("amp").override(scopes={"attention": {"matmul": "fp32"}})
    row = had.why("matmul", "float16", "attention").row
    a = audit(measured(burst=0.5, row=row))
    found = suggest(a, base=had)
    assert not found
    assert found == a.suggest(base=had)
    assert found.reasons[0].endswith("says float32 already: change the program.")
    assert a.suggest() == suggest(a, base="amp") != found


def test_a_policy_that_is_none_is_refused() -> None:
    with pytest.raises(PolicyError, match="ampp"):
        suggest(audit(measured()), base="ampp")


def test_the_text_is_a_part_of_a_policy_file() -> None:
    rows = measured("exp", "", burst=0.5), measured(module="blocks.0", burst=0.5)
    found = suggest(audit(*rows), base="torch-cpu")
    data = tomllib.loads(str(found))
    assert data == {"rules": {"exp": "fp32"}, "scopes": {"blocks.0": {"matmul": "fp32"}}}
    assert polymp.policy({"extends": "torch-cpu", **data}).rows == found.apply("torch-cpu").rows
    scopes = {path: {"exp": "fp32"} for path in ('a"b', "a\\b", "ä b", "a\nb", "\x7f", "\x01")}
    assert tomllib.loads(str(Suggestion(scopes=scopes))) == {"rules": {}, "scopes": scopes}
    whole = Suggestion(dtype="bfloat16", init_scale=1024.0, reasons=("one\ntwo",))
    assert str(whole) == (
        "# one two\n# Compute in bfloat16.\n# Start with a loss scale of 1024.\n"
        "# Not tried: change this, and audit again."
    )
    assert tomllib.loads(str(whole)) == {}


@pytest.mark.parametrize("base", ["amp", "lean", "matmul", "torch-cpu"])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_backends_take_what_is_suggested(framework: str, base: str) -> None:
    need(framework)
    spelled = {"torch": "aten:_weight_norm_interface", "jax": "jax:clamp"}[framework]
    ops = ["matmul", "linear", "exp", "softmax", "mul", "add", "div", "sum", "sqrt"]
    rows = [measured(op, "m", burst=0.5) for op in ops[:1]]
    rows += [measured(op, "m", vanished=0.9) for op in ops[1:]]
    rows += [measured("none", "", spelling=spelled, vanished=0.9)]
    policy = suggest(audit(*rows), base=base).apply(base)
    assert {row.of for row in policy.rows if row.scope == "m"} == set(ops)
    if framework == "torch":
        from polymp.backends.torch.autocast import torch_table as torch_checks

        torch_checks.check(policy, "cpu", "float16")
    else:
        from polymp.backends.jax.autocast import api as jax_checks

        jax_checks.check(policy)
    for op in ops:
        assert policy.why(op, "float16", "m").rule is Rule.FP32
