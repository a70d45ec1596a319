"""Random policies and random programs in torch: what ran is what `Policy.decide` says.

The programs, and how a run is judged, are `tests.support.random_policies`; a process of its own
runs them. Each call is judged bit for bit against casts made by hand.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polymp
from polymp import Policy
from polymp.errors import PolicyError
from polymp.rules.row import LOW
from polymp.torch import autocast, scoped
from tests.support import forks
from tests.support import random_policies as given
from tests.support.decisions import Decisions, recording
from tests.support.frameworks import in_torch as fw
from tests.support.random_policies import MINE, SIZE, WRONG, Call, Framework, Module
from tests.support.sizes import size
from tests.support.torch.compiled import Count


@torch.library.custom_op("random_policies::mine", mutates_args=())
def mine(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y + x


@mine.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.promote_types(x.dtype, y.dtype))


OPS: dict[str, Any] = {
    "exp": torch.exp,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "neg": torch.neg,
    "sin": torch.sin,
    "softmax": lambda x: torch.softmax(x, -1),
    "cumsum": lambda x: torch.cumsum(x, 1),
    "add": torch.add,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "atan2": torch.atan2,
    "linear": F.linear,
    MINE: mine,
}


def same(one: torch.Tensor, other: torch.Tensor, op: str) -> bool:
    return torch.equal(one, other) or torch.allclose(one, other, 0, 0, equal_nan=True)


FRAMEWORK = Framework(OPS, fw.dtype, fw.cast, True, same)


class Place(nn.Module):
    """A module of a program; takes the values made so far and adds its own."""

    def __init__(self, it: Module) -> None:
        super().__init__()
        self.body = [item if isinstance(item, Call) else item.name for item in it.body]
        for item in it.body:
            if isinstance(item, Module):
                self.add_module(item.name, Place(item))

    def forward(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        for item in self.body:
            if isinstance(item, str):
                values = self.get_submodule(item)(values)
            else:
                values = [*values, OPS[item.op](*[values[at] for at in item.args])]
        return values


def arguments(seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE) / 2]


def opened(model: nn.Module, policy: Policy, low: str, stack: ExitStack, by_scope: bool) -> None:
    dtype = getattr(torch, low)
    if by_scope or policy.scopes:
        stack.enter_context(scoped(model, policy))
        stack.enter_context(autocast("cpu", dtype))
    else:
        stack.enter_context(autocast("cpu", dtype, policy=policy))


def run_of(
    model: nn.Module, policy: Policy, low: str, values: Any, by_scope: bool, call: Any
) -> Any:
    with ExitStack() as stack:
        try:
            opened(model, policy, low, stack, by_scope)
            return call(values)
        except (PolicyError, RuntimeError) as error:
            return error


def mistakes(*run: Any, decide: Any = given.decide) -> list[str]:
    return given.mistakes(*run, FRAMEWORK, arguments, decide)


def cases(count: int) -> Any:
    for seed in range(count):
        low = LOW[seed % 2]
        yield seed, low, given.policy(seed), Place(given.program(seed)), seed % 6 == 0


def eager(count: int) -> dict[str, Any]:
    """Programs run in eager torch; the same again, recorded."""
    wrong, seen, noticed, recorded = [], Counter[str](), Counter[str](), []
    for seed, low, policy, model, by_scope in cases(count):
        found = run_of(model, policy, low, arguments(seed), by_scope, model)
        wrong += mistakes(seed, policy, low, found)
        seen[type(found).__name__] += 1
        if not given.contradicts(policy, given.program(seed)):
            for name, decide in WRONG.items():
                noticed[name] += bool(mistakes(seed, policy, low, found, decide=decide))
    with recording() as it:
        for seed, low, policy, model, by_scope in cases(count):
            start = len(it)
            found = run_of(model, policy, low, arguments(seed), by_scope, model)
            if isinstance(found, Exception):
                continue
            judged = given.judged(given.program(seed), policy, low, found, FRAMEWORK)
            if said(it, start) != judged.decisions:
                recorded.append(f"{seed}: {said(it, start)} recorded, not {judged.decisions}")
    return {"wrong": wrong, "seen": seen, "noticed": noticed, "recorded": recorded}


def said(it: Decisions, start: int) -> list[Any]:
    return [(e.op, e.decision) for e in it.entries[start:]]


def compiled(count: int) -> dict[str, Any]:
    wrong, seen = [], Counter[str]()
    for seed, low, policy, model, by_scope in cases(count):
        torch._dynamo.reset()
        backend = Count()
        call = torch.compile(model, backend=backend, fullgraph=True)
        if isinstance(run_of(model, policy, low, arguments(seed), by_scope, model), Exception):
            continue  # what raises is no graph
        found = run_of(model, policy, low, arguments(seed), by_scope, call)
        wrong += mistakes(seed, policy, low, found)
        again = run_of(model, policy, low, arguments(seed), by_scope, call)
        wrong += mistakes(seed, policy, low, again)
        seen[f"{type(found).__name__}, {backend.graphs} graphs"] += 1
    return {"wrong": wrong, "seen": seen}


def reused(count: int) -> dict[str, Any]:
    """One compiled program under a policy, another, and the first again; in both orders."""
    wrong, graphs, differ = [], Counter[int](), 0
    rng = random.Random(0)
    while sum(graphs.values()) < count:
        seed = rng.randrange(10_000)
        low, by_scope = LOW[seed % 2], bool(seed % 3)
        model, values = Place(given.program(seed)), arguments(seed)
        one, other = given.policy(seed), given.policy(seed + 10_000)
        alone = [run_of(model, p, low, values, by_scope, model) for p in (one, other)]
        if any(isinstance(found, Exception) for found in alone):
            continue
        differ += bool(mistakes(seed, other, low, alone[0]))
        for order in ([one, other, one], [other, one, other]):
            torch._dynamo.reset()
            backend = Count()
            call = torch.compile(model, backend=backend, fullgraph=True)
            for policy in order:
                found = run_of(model, policy, low, values, by_scope, call)
                wrong += mistakes(seed, policy, low, found)
            graphs[backend.graphs] += 1
    return {"wrong": wrong, "graphs": graphs, "differ": differ}


def main(what: str, count: int) -> None:
    torch.set_num_threads(1)
    with given.vocabulary_put_back():
        polymp.register_op(MINE, "fp32", torch=mine)
        functions = {"eager": eager, "compiled": compiled, "reused": reused}
        print(json.dumps(functions[what](count)))


POLICIES = size(50, 100)
COMPILED = size(4, 8)  # each costs as much as 20 eager programs
PAIRS = size(2, 4)  # under A, B, A and under B, A, B

pytestmark = pytest.mark.sized


@cache
def ran(what: str, count: int) -> dict[str, Any]:
    program = f"from tests.torch.autocast.test_random_policies import main; main({what!r}, {count})"
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


def test_compiled_programs_do_what_the_policies_decide() -> None:
    """As one graph, which a second call uses again."""
    found = ran("compiled", COMPILED)
    assert found["wrong"] == []
    assert found["seen"].keys() == {"list, 1 graphs"}
    assert found["seen"]["list, 1 graphs"] > COMPILED / 2


def test_a_graph_made_under_one_policy_is_not_used_under_another() -> None:
    """One compiled model under A, B and A again, and B, A, B: two graphs each, right each time.

    In a quarter of them at least, the values of one policy are noticed under the other.
    """
    found = ran("reused", PAIRS)
    assert found["wrong"] == []
    assert found["graphs"] == {"2": PAIRS}
    assert found["differ"] >= PAIRS / 4
