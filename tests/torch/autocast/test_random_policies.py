"""Random policies and random programs in torch: what ran is what `Policy.decide` says.

The programs, and how a run is judged, are `tests.support.random_policies`; a process of its own
runs them: `run_random_policies`. Each call is judged bit for bit against casts made by hand.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from tests.support import forks
from tests.support.random_policies import WRONG
from tests.support.sizes import size

POLICIES = size(50, 500)
COMPILED = size(4, 30)  # half of them with AOT autograd; each costs as much as 20 eager programs
PAIRS = size(2, 12)  # under A, B, A and under B, A, B

pytestmark = pytest.mark.sized


@cache
def ran(what: str, count: int) -> dict[str, Any]:
    program = f"from tests.support.torch.run_random_policies import main; main({what!r}, {count})"
    found: dict[str, Any] = json.loads(forks.program(program))
    print(f"\n{what}: { {key: value for key, value in found.items() if key not in ('wrong',)} }")
    return found


def test_what_ran_is_what_the_policies_decide() -> None:
    found = ran("eager", POLICIES)
    assert found["wrong"] == []
    assert sum(found["seen"].values()) == POLICIES
    assert found["seen"]["list"] > POLICIES / 2
    assert {"ForbiddenOpError", "PolicyError"} <= found["seen"].keys()


def test_what_was_recorded_is_what_the_policies_decide() -> None:
    assert ran("eager", POLICIES)["recorded"] == []


@pytest.mark.parametrize("name", WRONG)
def test_a_decision_made_otherwise_is_noticed(name: str) -> None:
    assert ran("eager", POLICIES)["noticed"][name] > POLICIES / 25


def test_the_values_of_another_policy_are_noticed() -> None:
    """A graph that is used under a policy it was not made for."""
    assert ran("eager", POLICIES)["stale"] > POLICIES * 0.4


def test_compiled_programs_do_what_the_policies_decide() -> None:
    """As one graph, which a second call uses again."""
    found = ran("compiled", COMPILED)
    assert found["wrong"] == []
    assert found["seen"].keys() == {"list, 1 graphs"}
    assert found["seen"]["list, 1 graphs"] > COMPILED / 2


def test_a_graph_made_under_one_policy_is_not_used_under_another() -> None:
    """One compiled model under A, B and A again, and B, A, B: two graphs each, right each time."""
    found = ran("reused", PAIRS)
    assert found["wrong"] == []
    assert found["graphs"] == {"2": PAIRS}
    assert found["differ"] >= PAIRS / 4
