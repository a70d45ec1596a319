"""The remedy that `locate` gives: it was tried, so that whoever writes it has a step that works."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import polymp
from polymp.diagnostics.audit_records import Fault
from polymp.rules.policy import Policy
from tests.conftest import FRAMEWORKS, need
from tests.support import frameworks
from tests.support.regions import audited, region
from tests.support.sizes import size

TRIED = "the rule fp32, with which this step was tried and is finite"
CODE = "Change the code: this step was tried with all ops in float32, and is not finite either."


def located(framework: str, fn: Callable[..., Any], low: str, policy: Any, x: Any) -> Fault | None:
    """The fault of a function in a region."""
    locate = import_module(f"polymp.{framework}").locate
    fault: Fault | None = locate(region(framework, low, policy)(fn), x)
    return fault


def written(policy: Policy, said: str) -> Policy:
    """A policy with the rows of a remedy, as a user reads them off."""
    found = re.search(r"ive (.+?) the rule fp32(?: in module '(.+?)')?, with which", said)
    assert found is not None, said
    rows = dict.fromkeys(found[1].split(" and "), "fp32")
    return policy.override(scopes={found[2]: rows}) if found[2] else policy.override(rules=rows)


class Broken(NamedTuple):
    name: str
    run: Callable[[Any, Any], Any]  # of the framework's functions and a low array
    values: tuple[float, ...]
    low: str
    says: str  # what the remedy is


def masked(xp: Any, x: Any) -> Any:
    """Scores of a row that is masked as a whole."""
    scores = xp.exp(x) - math.inf
    return xp.exp(scores - scores) * 2


BROKEN = (
    Broken("an overflow", lambda xp, x: xp.exp(3 * x), (4.0, 1.0), "float16", f"Give exp {TRIED}."),
    Broken("two of them", lambda xp, x: 2 * xp.exp(xp.exp(x) + 9), (0.9, 1.0), "float16",
           f"Give exp {TRIED}."),
    Broken("a difference of what is rounded", lambda xp, x: xp.log(xp.exp(x) - 1), (1e-3, 1.0),
           "bfloat16", f"Give [a-z]+ {TRIED}."),
    Broken("a logarithm of less than 0", lambda xp, x: xp.log(x), (-1.0, 2.0), "float16", CODE),
    Broken("a row without a number", masked, (1.0, 2.0), "float16", CODE),
)  # fmt: skip


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_what_is_said_was_tried(fw: ModuleType, case: Broken) -> None:
    """The rows that are named make the step finite; without them, float32 does not."""
    policy = polymp.policy("amp").override(keep=["exp", "mul", "add", "log"])
    one, x = fw.array(np.eye(2)), fw.array(case.values)

    def fn(x: Any) -> Any:
        return case.run(fw.xp, x @ one)

    fault = located(fw.name, fn, case.low, policy, x)
    assert fault is not None
    assert re.match(case.says, fault.remedy), str(fault)
    assert str(fault).endswith(f"  {fault.remedy}")
    if case.says == CODE:
        assert not np.isfinite(fw.numbers(fn(x))).all()
    else:
        assert located(fw.name, fn, case.low, written(policy, fault.remedy), x) is None


def test_a_dtype_that_the_program_asks_for_is_told_from_that_of_a_region(fw: ModuleType) -> None:
    fault = located(
        fw.name, lambda x: fw.cast((x @ x) * 1e3, "float16") * 1, "float16", "amp",
        fw.array(20 * np.eye(2)),
    )  # fmt: skip
    assert fault is not None
    how = r"With all ops in float32 this step was tried, and breaks at the cast \w+\.py:\d+, "
    what = r"where the program itself asks for float16: change that, or use bfloat16\. "
    assert re.fullmatch(how + what + r"That was not tried\.", fault.remedy), str(fault)


@pytest.mark.parametrize(("x", "how"), [(3e2, "Run mul in float32"), (1e6, "Leave this cast out")])
def test_without_a_region_nothing_is_tried(fw: ModuleType, x: Any, how: str) -> None:
    """No rule would hold there, and `audit` suggests none."""
    args = (lambda x: (y := fw.cast(x, "float16")) * y), fw.array([x])
    fault = import_module(f"polymp.{fw.name}").locate(*args)
    assert fault.remedy == f"{how}, or use bfloat16. That was not tried."
    assert not (found := audited(fw.name, *args).suggest())
    assert found.reasons[0].endswith(" There the program itself asks for float16: change that.")


def test_a_mask_that_is_added_is_no_fault_and_hides_none(fw: ModuleType, capsys: Any) -> None:
    """-1e9 is -Inf in float16, and a softmax makes 0 of it, as of the number it was."""
    xp, one, x = fw.xp, fw.array(np.eye(3)), fw.array([[1.0, 2.0, 3.0]])
    softmax = import_module("torch" if fw.name == "torch" else "jax.nn").softmax
    low = "float16" if fw.name == "torch" else "float32"  # JAX warns of a number that is not low

    def fn(x: Any, factor: float = 1.0) -> Any:
        h = x @ one
        p = softmax(h + fw.cast(h > 2, low) * -1e9, -1)
        return xp.sum(p * (x * factor @ one))

    assert located(fw.name, fn, "float16", "amp", x) is None
    capsys.readouterr()
    fault = located(fw.name, lambda x: fn(x, 1e5), "float16", "amp", x)
    assert fault is not None
    assert fault.op in ("matmul", "linear"), str(fault)
    assert TRIED in fault.remedy


def test_a_step_that_is_another_one_when_it_is_called_again_is_told(fw: ModuleType) -> None:
    factors = iter([1e5, 1.0, 1.0, 1.0])

    def fn(x: Any) -> Any:
        return (x @ x * next(factors)) @ x

    fault = located(fw.name, fn, "float16", "amp", fw.array(np.eye(2)))
    assert fault is not None
    assert fault.remedy.startswith("Called again, the step did not break in this way"), str(fault)


def test_a_loss_scale_that_is_too_large_is_no_fault_of_an_op(fw: ModuleType) -> None:
    """The scale is tried first, and ops of the forward pass are tried apart from it."""
    backend, w = import_module(f"polymp.{fw.name}"), fw.array(np.full((2, 2), 0.5))
    ran = region(fw.name, "float16", "amp")

    def locate(scale: float, factor: float) -> Fault:
        if fw.name == "torch":
            scaler = backend.GradScaler("cpu", init_scale=scale)

            def step(w: Any) -> None:
                w = w.detach().requires_grad_()
                scaler.scale(ran(lambda w: (w * factor @ w).float().sum())(w)).backward()

            fault = backend.locate(step, w)
        else:
            import jax

            loss = ran(lambda w: (w * factor @ w).sum())
            step = jax.grad(lambda w, scaler: scaler.scale(loss(w)))
            fault = backend.locate(step, w, backend.GradScaler(init_scale=scale))
        assert fault is not None
        return fault  # type: ignore[no-any-return]

    fault = locate(2.0**18, 1.0)
    assert fault.direction == "backward"
    assert re.match(r"Divide the loss scale by \d+, with which this step was tried", fault.remedy)
    fault = locate(2.0**18, 1e6)
    assert fault.direction == "forward"
    assert re.match(r"Give (linear|matmul) the rule fp32\.? ?[W,]", fault.remedy), str(fault)


# Of a random program, each op and what it is called in a policy.
OPS: dict[str, Callable[[Any, Any], Any]] = {
    "exp": lambda xp, x: xp.exp(x),
    "log": lambda xp, x: xp.log(x),
    "sqrt": lambda xp, x: xp.sqrt(x),
    "tanh": lambda xp, x: xp.tanh(x),
    "mul": lambda xp, x: x * 300,
    "square": lambda xp, x: x * x,
    "sub": lambda xp, x: 1 - x,
    "div": lambda xp, x: 1 / x,
    "matmul": lambda xp, x: x @ x,
    "sum": lambda xp, x: x * xp.sum(x),
}  # fmt: skip


def promises_kept(framework: str, program: Sequence[str], low: str, scale: float) -> str:
    """Say which promise of a remedy is broken; "" if none is."""
    fw = frameworks.load(framework)
    policy = polymp.policy("amp").override(keep=["exp", "mul", "add", "sub", "log", "sum", "div"])
    x = fw.array(scale * np.array([[0.3, 1.7], [0.9, 0.2]]))

    def fn(x: Any) -> Any:
        for op in ("matmul", *program):
            x = OPS[op](fw.xp, x)
        return x

    fault = located(framework, fn, low, policy, x)
    if fault is None or not fault.region:
        return ""
    wide = np.isfinite(fw.numbers(fn(x))).all()
    if TRIED in fault.remedy:
        if (again := located(framework, fn, low, written(policy, fault.remedy), x)) is not None:
            return f"with the rows, it is not finite either:\n{fault}\n{again}"
        return ""
    if fault.remedy.startswith(CODE[:20]) and wide:
        return f"it is finite in float32:\n{fault}"
    return "" if fault.remedy else f"nothing is said:\n{fault}"


@pytest.mark.parametrize("framework", FRAMEWORKS)
@given(
    program=st.lists(st.sampled_from(sorted(OPS)), min_size=2, max_size=6),
    low=st.sampled_from(["float16", "bfloat16"]),
    scale=st.sampled_from([1.0, 4.0, 30.0]),
)
@settings(max_examples=size(8, 30))
def test_of_random_programs(framework: str, program: list[str], low: str, scale: float) -> None:
    need(framework)
    assert promises_kept(framework, program, low, scale) == ""


def test_a_remedy_that_was_not_tried_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    need("torch")
    replay = import_module("polymp.backends.torch.diagnostics.locate")
    monkeypatch.setattr(replay, "tried", lambda fault, *_: fault._replace(remedy=untrue))
    untrue = f"Give log {TRIED}."
    assert promises_kept("torch", ["sub", "log"], "float16", 30.0)
    untrue = CODE
    assert promises_kept("torch", ["exp", "mul"], "float16", 4.0)
