"""Regions: which are equal."""

from polymp.rules.policy import Policy, Region
from polymp.rules.row import Row, Rule


def test_regions_of_another_policy_or_scope_are_others():
    fp32, low = (Policy("p", (Row("mm", rule),)) for rule in (Rule.FP32, Rule.LOWER))
    plain, other, inner = (
        Region("torch", "cpu", True, "float16", True, policy, scope)
        for policy, scope in ((fp32, ""), (low, ""), (fp32, "head"))
    )
    again = Region("torch", "cpu", True, "float16", True, Policy("p", low.rows))
    assert again == other
    assert len({plain, other, inner, again}) == 3
