"""`explain` in both frameworks: the same op under the same policy has the same row and dtypes."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import polymp
from polymp.diagnostics.call_record import BACKWARD, FORWARD
from polymp.diagnostics.report import Report
from tests.conftest import FRAMEWORKS, need
from tests.support import examples, forks, frameworks

# Ops that are one op in both frameworks, and the shapes of their arguments.
ONE, TWO = ((4, 8),), ((4, 8), (4, 8))
OPS: dict[str, tuple[tuple[int, ...], ...]] = {
    "linear without bias": ((4, 8), (8, 8)),
    "matmul": ((2, 4, 8), (2, 8, 3)),
    **dict.fromkeys("exp log tanh sum softmax log_softmax cumsum sin rsqrt erf".split(), ONE),
    **dict.fromkeys("add mul maximum".split(), TWO),
}


def function(fw: ModuleType, op: str) -> Callable[..., Any]:
    if fw.name == "jax" and op in ("sum", "cumsum"):  # jax.numpy's cast by themselves
        import jax

        sums = {"sum": lambda x: jax.lax.reduce_sum(x, (0, 1)), "cumsum": jax.lax.cumsum}
        return sums[op]
    found: Callable[..., Any] = fw.ops[op]
    return found


def explained(fw: ModuleType, op: str, low: str, policy: str, inputs: str) -> Any:
    rng = np.random.default_rng(0)
    arrays = [fw.array(rng.uniform(1, 2, shape), inputs) for shape in OPS[op]]
    report = polymp.explain(function(fw, op), *arrays, dtype=low, policy=policy)
    assert (report.low, report.policy) == (low, policy)
    calls = [call for call in report if call.op == op.partition(" ")[0]]
    (call,) = calls or [None]
    return call


@pytest.mark.parametrize(
    ("low", "policy", "inputs"),
    [
        ("bfloat16", "amp", "float32"),
        ("bfloat16", "lean", "low"),
        ("float16", "torch-cuda", "low"),
        ("float16", "lean", "float32"),
    ],
)
def test_an_op_has_the_same_row_and_dtypes_in_both(low: str, policy: str, inputs: str) -> None:
    need(*FRAMEWORKS)
    table = polymp.policy(policy)
    for op in OPS:
        given = low if inputs == "low" else inputs
        torch, jax = (explained(frameworks.load(n), op, low, policy, given) for n in FRAMEWORKS)
        assert torch is not None
        assert jax is not None
        assert torch.row == jax.row == table.why(torch.op, low).row, op
        assert torch.rule == jax.rule, op
        assert torch.run == jax.run, op
        assert torch.inputs == jax.inputs == (given,) * len(OPS[op]), op
        assert torch.outputs == jax.outputs, op
        if torch.rule != "fp32_keep":  # else torch's kernel may widen by itself, without a cast
            assert torch.casts == jax.casts, op
            assert torch.cast_bytes == jax.cast_bytes, op
        assert torch.flops == jax.flops, op
        assert (torch.backend, jax.backend) == ("torch", "jax")


def both() -> list[tuple[Report, Report]]:
    """The examples' models under one policy: forward, and with the backward pass of a loss."""
    need(*FRAMEWORKS)
    import jax
    import jax.numpy as jnp
    import torch
    from flax import nnx

    from polymp.jax import autocast

    sizes, shape = (50, 16, 16, 2, 2), (2, 17)
    with examples.modules("train_torch") as found:
        module = found.train_torch.Transformer(*sizes)
        loss_in_torch = found.train_torch.loss_on
    with examples.modules("train_jax") as found:
        model = found.train_jax.Transformer(*sizes, nnx.Rngs(0))
        loss_in_jax = found.train_jax.loss_on
    tokens, numbers = torch.zeros(shape, dtype=torch.int64), jnp.zeros(shape, "int32")
    with polymp.torch.explain(model=module) as trained:
        with polymp.torch.autocast("cpu", policy="amp"):
            loss = loss_in_torch(module, tokens)
        loss.backward()
    graph, params = nnx.split(model)
    region = autocast(lambda p: loss_in_jax(nnx.merge(graph, p), numbers))
    given = {"dtype": "bfloat16", "policy": "amp"}
    in_torch = polymp.explain(module, tokens[:, :-1], **given)
    in_jax = polymp.explain(model, numbers[:, :-1], **given)
    return [(in_torch, in_jax), (trained, polymp.explain(jax.grad(region), params))]


def test_the_examples_models_agree() -> None:
    """FLOPs to the last one, by module where the modules are known; backward twice forward."""
    (torch, jax), (trained, grad) = both()
    assert torch.flops == jax.flops
    assert set(torch.flops) == {"bfloat16"}

    def by_module(report: Report, drop: str = "") -> dict[str, int]:
        found: dict[str, int] = {}
        for call in report:
            if call.flops:
                at = call.module.replace(drop, "") if drop else call.module
                found[at] = found.get(at, 0) + call.flops
        return found

    assert by_module(torch) == by_module(jax, "layers.")
    assert {"head", "blocks.0.qkv", "blocks.1.down", "blocks.0"} <= by_module(torch).keys()
    assert {c.rule for c in torch.of("linear")} == {c.rule for c in jax.of("linear")} == {"lower"}
    assert {c.run for c in torch.of("layer_norm")} == {c.run for c in jax.of("layer_norm")}

    def linears(report: Report, direction: str) -> int:
        return sum(c.flops for c in report.of("linear") if c.direction == direction)

    for report in (trained, grad):
        assert linears(report, BACKWARD) == 2 * linears(report, FORWARD) > 0
    assert linears(trained, FORWARD) == linears(grad, FORWARD)


def test_explain_goes_to_the_framework_of_what_it_gets(fw: ModuleType) -> None:
    x = fw.array(np.ones((4, 8)), "float32")
    for args, kwargs in (((x,), {}), (([{"x": x}],), {}), ((), {"x": x})):
        report = polymp.explain(lambda *a, **k: fw.ops["exp"](x), *args, **kwargs)
        assert {call.backend for call in report} == {fw.name}
        assert report.title == "<lambda>"


def test_a_report_needs_no_door_to_be_imported() -> None:
    """In a process of its own: a region's compiled kernels tell nothing, ours take their place."""
    need("torch")
    code = (
        "import torch, polymp\n"
        "x = torch.randn(5, 8, requires_grad=True)\n"
        "report = polymp.explain(torch.matmul, x, x.detach().T, dtype='bfloat16')\n"
        "print([(call.op, call.casts) for call in report])\n"
    )
    assert forks.program(code) == "[('matmul', 2)]\n"


# --- `catch` of both frameworks: its arguments, and the class that it wraps no method of ----------


@pytest.fixture(params=FRAMEWORKS)
def catch(request: pytest.FixtureRequest) -> Any:
    need(request.param)
    return import_module(f"polymp.{request.param}").catch


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"every": 0}, ValueError,
         "catch(every=...) is a number of steps, a positive int, got 0"),
        ({"every": 2.0}, TypeError,
         "catch(every=...) is a number of steps, a positive int, got 2.0"),
        ({"every": True}, TypeError,
         "catch(every=...) is a number of steps, a positive int, got True"),
        ({"on_bad": "stop"}, ValueError, "catch(on_bad=...) is 'raise' or 'report', got 'stop'"),
    ],
)  # fmt: skip
def test_wrong_arguments(
    catch: Any, kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        catch(print, **kwargs)


def test_a_result_instead_of_the_function(catch: Any) -> None:
    for given, got in (([1.5], "1.5"), ([], "None")):  # as a decorator it has options alone
        with pytest.raises(TypeError) as raised:
            catch(*given, every=10)
        assert str(raised.value) == (
            f"catch(step) needs the function that does a training step, got {got}. Give the "
            "function, not what it returned, with options, too: step = catch(step, every=10)."
        )


def test_a_method_that_is_wrapped_in_its_class(catch: Any) -> None:
    class Wrapped:
        @catch
        def step(self, x: Any) -> Any:
            return x

    assert Wrapped.step.reports == []
    with pytest.raises(TypeError) as raised:
        Wrapped().step(1.0)
    assert str(raised.value) == (
        "catch wraps a function, or the method of one object, and Wrapped.step was wrapped in its "
        "class. Remove the decorator, and write in __init__: self.step = catch(self.step)"
    )
