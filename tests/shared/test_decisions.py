"""`explain` reports what the policy decided and what ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import polymp
from polymp.dtypes import widest
from polymp.errors import PolicyWarning
from polymp.rules.row import LOW, Rule
from tests.support.regions import region

X = np.linspace(0.1, 1.2, 12).reshape(3, 4)
POLICY = polymp.policy(
    {
        "name": "reported",
        "rules": {
            "class:matmul": "lower",
            "exp": "fp32",
            "softmax": {"float16": "fp32", "bfloat16": "fp32_keep"},
            "add": "widest",
            "class:reduction": "fp32_keep",
            "tanh": "keep",
            "fft_fft": "parts",
            "erfinv": "fp32",
        },
    }
)
# Ops of which the vocabulary has one in both frameworks, here in a row, with a value each.
STEPS = ("linear without bias", "exp", "softmax", "tanh", "add", "sum of rows")


def steps(fw: Any) -> Callable[[Any, Any], list[Any]]:
    """A function that returns the result of every step."""

    def run(x: Any, w: Any) -> list[Any]:
        made = [fw.ops["linear without bias"](x, w)]
        for name in STEPS[1:]:
            args = [made[-1], made[0]] if name == "add" else [made[-1]]
            made.append(fw.ops[name](*args))
        return made

    return run


def arguments(fw: Any) -> list[Any]:
    return [fw.array(X, "float32"), fw.array(X[:, :4], "float32")]


def report_of(fw: Any, low: str, policy: Any, fn: Callable[..., Any], *args: Any) -> Any:
    """The report of a call in a region."""
    return polymp.explain(region(fw.name, low, policy)(fn), *args)


@pytest.mark.parametrize("low", LOW)
def test_calls_are_what_ran(fw: Any, low: str) -> None:
    results = [fw.dtype(y) for y in region(fw.name, low, POLICY)(steps(fw))(*arguments(fw))]
    report = report_of(fw, low, POLICY, steps(fw), *arguments(fw))
    calls = [call for call in report if call.row is not None and call.rule != Rule.PARTS]
    assert [call.op for call in calls] == ["linear", "exp", "softmax", "tanh", "add", "sum"]
    for call, result in zip(calls, results, strict=True):
        assert (call.op, call.outputs) == (call.op, (result,))
        assert (call.backend, call.region, call.module) == (fw.name, low, "")
        assert call.row == POLICY.winner(call.op, low)
        decision = POLICY.apply(call.row, call.inputs, low)
        assert call.outputs == (decision.out or decision.run or widest(call.inputs),)
    arrived = [call.inputs for call in calls]
    assert arrived[1:4] == [(low,), ("float32",), (results[2],)]
    assert arrived[0] == ("float32", "float32")


def test_unused_rows_are_those_that_ruled_nothing(fw: Any) -> None:
    report = report_of(fw, "float16", POLICY, steps(fw), *arguments(fw))
    unused = {(row.of, row.dtype) for row in POLICY.unused(report)}
    assert unused == {("erfinv", ""), ("fft_fft", ""), ("softmax", "bfloat16")}
    nothing = report_of(fw, "float16", POLICY, lambda x: x, fw.array(X, "float32"))
    assert POLICY.unused(nothing) == POLICY.rows
    other = POLICY.override(name="other", fp32=["erfinv"])
    assert len(other.unused(report)) >= len(unused) - 1


def test_a_scope_that_never_matched_is_unused(fw: Any) -> None:
    """A typo in a pattern."""
    policy = POLICY.override(
        name="scoped", scopes={"*.head": {"exp": "lower"}, "*.haed": {"exp": "lower"}}
    )
    rows = _unused_in_torch(policy) if fw.name == "torch" else _unused_in_jax(fw, policy)
    assert "*.haed" in {row.scope for row in rows}
    assert "*.head" not in {row.scope for row in rows}


def _unused_in_torch(policy: polymp.Policy) -> Any:
    import torch
    from torch import nn

    from polymp.torch import autocast, scoped

    class Head(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp()

    model = nn.Sequential()
    model.add_module("head", Head())
    with pytest.warns(PolicyWarning, match=r"'\*\.haed': did you mean '\*\.head'\?"):
        handle = scoped(model, policy)
    with handle, polymp.torch.explain() as report, autocast("cpu"):
        assert model(torch.ones(3)).dtype is torch.bfloat16
    return policy.unused(report)


def _unused_in_jax(fw: Any, policy: polymp.Policy) -> Any:
    import jax

    def run(x: Any) -> Any:
        with jax.named_scope("head"):
            return fw.ops["exp"](x)

    with pytest.warns(PolicyWarning, match=r"'\*\.haed': did you mean '\*\.head'\?"):
        report = report_of(fw, "bfloat16", policy, run, fw.array(X, "float32"))
    (call,) = report.of("exp")
    assert (call.outputs, call.module) == (("bfloat16",), "head")
    return policy.unused(report)


def test_a_policy_first_used_in_an_explanation_works_after_it(torch: Any) -> None:
    x = torch.tensor(X, dtype=torch.bfloat16)
    low = torch.bfloat16
    first = {"name": "first", "rules": {"bmm": "fp32", "cdist": "keep", "quantile": "keep"}}
    with polymp.torch.explain() as report, polymp.torch.autocast("cpu", policy=first):
        assert torch.bmm(x[None], x.t()[None]).dtype is torch.float32
    assert len(report.of("bmm")) == 1
    for policy, dtype in ((first, torch.float32), ("torch-cpu", low), (None, low), ("amp", low)):
        with polymp.torch.autocast("cpu", policy=policy):
            assert torch.bmm(x[None], x.t()[None]).dtype is dtype
            assert torch.cdist(x.float(), x.float()).dtype is torch.float32


def test_a_number_beside_a_tensor_is_explained_like_any_op(torch: Any) -> None:
    """A kernel of ours is given the number, where a compiled one is given a tensor."""
    x = torch.tensor(X, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "x % 2": lambda: x % 2,
        "x % 0.3": lambda: x % 0.3,
        "fmod": lambda: torch.fmod(x, 2),
        "copysign": lambda: torch.copysign(x, -1.0),
        "xlogy": lambda: torch.xlogy(2, x),
        "take_along_dim": lambda: torch.take_along_dim(x, torch.tensor([[0], [1], [-1]]), 1),
        "integers": lambda: torch.arange(5) % 2,
    }
    for name, call in calls.items():
        with polymp.torch.autocast("cpu"):
            wanted = call()
            with polymp.torch.explain():
                got = call()
        assert got.dtype is wanted.dtype, name
        assert torch.equal(got, wanted), name
