"""`locate` and `audit` in both frameworks: what they say of the same functions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

from polymp import text_table
from polymp.diagnostics.audit import Audit
from polymp.diagnostics.audit_records import Fault
from tests.conftest import need
from tests.support.regions import audited, region
from tests.support.reports import operand


def backend(fw: ModuleType) -> Any:
    return import_module(f"polymp.{fw.name}")


def fault_of(fw: ModuleType, fn: Callable[..., Any], *args: Any) -> Fault:
    fault: Fault | None = backend(fw).locate(fn, *args)
    assert fault is not None
    return fault


def test_a_healthy_call_has_no_fault(fw: ModuleType, capsys: Any) -> None:
    x = fw.array(np.ones(3))
    assert backend(fw).locate(lambda x: fw.xp.exp(x) * 2, x) is None
    assert capsys.readouterr().err == "locate: no op made an Inf or NaN of finite numbers\n"


def test_what_an_op_was_given_is_exact(fw: ModuleType) -> None:
    def f(x: Any) -> Any:
        return x * (x + 1)

    x = fw.array([0.0, 300.0, -1e-3, 200.0], "float16")
    y = fw.array([math.inf, 300.0, math.nan, 0.0], "float16")
    fault = fault_of(fw, f, x)
    line = f"test_locate_and_audit.py:{f.__code__.co_firstlineno + 1}"
    assert (fault.op, fault.kind, fault.run, fault.source) == ("mul", "overflow", "float16", line)
    names = ["a", "b"] if fw.name == "jax" else ["an argument (float16 4)"] * 2
    first = "x" if fw.name == "jax" else names[0]
    assert fault.inputs == (operand(x, first), operand(x + 1))
    for one, other in zip(audited(fw.name, f, x).fault.inputs, fault.inputs, strict=True):
        assert (one.dtype, one.shape, one.largest) == (other.dtype, other.shape, other.largest)
    fault = fault_of(fw, lambda a, b: a * b, x, y)
    assert fault.kind == "input"
    assert f"{names[1]} is not finite" in fault.why
    assert fault.inputs == (operand(x, names[0]), operand(y, names[1]))


def test_what_is_no_function_is_refused(fw: ModuleType) -> None:
    with pytest.raises(TypeError, match=r"^locate\(\w+, \*args\) needs a function, got 3\."):
        backend(fw).locate(3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_probability_that_a_low_dtype_rounds_to_1(fw: ModuleType, dtype: str) -> None:
    """Also beside one near 0, of which 1 - p is 1."""
    functions: Any = import_module("torch" if fw.name == "torch" else "jax.numpy")
    sigmoid = import_module("torch" if fw.name == "torch" else "jax.nn").sigmoid
    fault = fault_of(fw, lambda x: functions.log(1 - sigmoid(x)), fw.array([-9.0, 9.0], dtype))
    assert (fault.op, fault.kind) == ("sigmoid", "saturation")


@pytest.mark.parametrize(
    ("values", "inf", "nan"),
    [([1.0, -3.0], False, False), ([1.0, math.inf], True, False), ([-math.inf, 2.0], True, False),
     ([math.nan, 5.0], False, True), ([math.nan, math.inf, 7.0], True, True)],
)  # fmt: skip
def test_inf_and_nan_are_told_apart(
    fw: ModuleType, values: list[float], inf: bool, nan: bool
) -> None:
    (row,) = audited(fw.name, lambda x: x * 1.5, fw.array(values)).results
    assert (row.magnitudes.inf, row.magnitudes.nan) == (inf, nan)
    top = 1.5 * max(abs(x) for x in values if math.isfinite(x))
    assert row.magnitudes.largest == top


def test_what_float16_loses_is_told_from_what_was_zero_or_infinite_anyway(fw: ModuleType) -> None:
    x = fw.array([0.0, 1e-6, 300.0, 1.0], "float16")
    (row,) = audited(fw.name, lambda x: x * x, x).results
    assert (row.magnitudes.burst, row.magnitudes.vanished) == (0.25, 0.25)
    found = audited(fw.name, lambda x, zeros: x / zeros, x, fw.array(np.zeros(4), "float16"))
    assert found.results[0].magnitudes.burst == 0.0, "Inf in float32, too"
    fault = audited(fw.name, lambda x: 1 / (x * 0.5 * 1e-3 * 1e-3), x[2:] * 1e-4).fault
    assert (fault.op, fault.kind) == ("mul", "underflow"), "the last of three on a line"


def test_of_large_arrays_extremes_are_of_all_values_and_shares_of_a_sample(fw: ModuleType) -> None:
    name = {"torch": "values", "jax": "instrument"}[fw.name]
    sample = import_module(f"polymp.backends.{fw.name}.diagnostics.{name}").SAMPLE
    x = np.ones(3 * sample + 1)
    x[1] = 1e5  # not in the sample
    said = audited(fw.name, lambda x: x * 1.5, fw.array(x)).results[0].magnitudes
    assert (said.values, said.largest) == (x.size, 1.5e5)
    assert sample / 2 < said.counted <= sample
    assert said.shares("float16").overflow == 0


def test_float64_beyond_float32_is_finite(fw: ModuleType) -> None:
    with fw.wide():
        found = audited(fw.name, lambda x: x * 2, fw.array([1e300] * 2, "float64"))
        (row,) = found.results
    assert found.fault is None
    assert (row.run, row.magnitudes.largest, row.magnitudes.inf) == ("float64", 2e300, False)


SEEN = np.tri(4, dtype=bool)


def _filled(fw: ModuleType, s: Any) -> Any:
    if fw.name == "torch":
        return s.masked_fill(fw.array(~SEEN, "bool"), -math.inf)
    return import_module("jax.lax").select(SEEN, s, fw.xp.full_like(s, -math.inf))


MASKED: dict[str, Callable[[ModuleType, Any], Any]] = {
    "filled": _filled,
    "where": lambda fw, s: fw.xp.where(fw.array(SEEN, "bool"), s, -math.inf),
    "add": lambda fw, s: s + fw.array(np.where(SEEN, 0.0, -math.inf), fw.dtype(s)),
    "put": lambda fw, s: fw.ops["index_put"](
        s.reshape(-1), fw.array(-math.inf, fw.dtype(s)), fw.array(np.flatnonzero(~SEEN), "int")
    ).reshape(s.shape),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mask", MASKED)
def test_the_infinities_of_a_mask_are_no_values_of_a_healthy_model(
    fw: ModuleType, mask: str, dtype: str
) -> None:
    """They are in no row, and put none in front; those that a dtype made are, and do."""
    random = np.random.default_rng(0)
    x, w = (fw.array(random.standard_normal((4, 4))) for _ in range(2))

    def step(size: float) -> Audit:
        def loss(w: Any) -> Any:
            masked = MASKED[mask](fw, (x @ w) * size)
            return (fw.ops["softmax"](masked) ** 2).sum()

        return audited(fw.name, region(fw.name, dtype)(lambda w: fw.grad(loss, w)[1]), w)

    found = step(1.0)
    assert not [m for m in found.results if m.magnitudes.inf or m.magnitudes.shares(dtype).overflow]
    assert "Inf" not in str(found).partition("here")[2]
    assert found.fault is None
    asked = found.suggest()  # without a scaler, small gradients vanish in float16
    assert (asked.rules, asked.scopes, asked.dtype) == ({}, {}, None)
    if dtype == "float16" and fw.name == "torch":  # JAX multiplies in float32 before a softmax
        assert [m.op for m in step(1e6).results if m.magnitudes.burst] == ["mul"]


@pytest.mark.parametrize("taken", ["tanh", "sigmoid", "clamp"])
def test_an_overflow_that_an_op_takes_up_is_in_its_row(fw: ModuleType, taken: str) -> None:
    run = region(fw.name, "float16", "amp")(lambda x: fw.ops[taken](x @ x.mT))
    found = audited(fw.name, run, fw.array(np.full((4, 64), 400.0)))
    product = found.results[0].magnitudes
    assert found.fault is None
    assert product.inf
    assert product.burst == product.shares("float16").overflow == 1
    assert {"torch": "matmul", "jax": "linear"}[fw.name] in found.suggest("amp").rules


WEIGHTS = ((32, 64), (64, 64), (64, 4))


class Audited(NamedTuple):
    """An audit, and by its own gradients the share of zeros in those of the weights."""

    audit: Audit
    zeros: float


@functools.cache
def trained(framework: str, dtype: str, factor: float) -> Audited:
    """A step of three layers in which the loss is multiplied by a factor before the backward."""
    need(framework)
    random = np.random.default_rng(0)
    weights = [random.standard_normal(s).astype(np.float32) / s[0] ** 0.5 for s in WEIGHTS]
    x = random.standard_normal((16, 32)).astype(np.float32)
    if framework == "torch":
        import torch

        import polymp.torch

        ws = [torch.tensor(w, requires_grad=True) for w in weights]
        with polymp.torch.audit() as audit:
            with polymp.torch.autocast("cpu", getattr(torch, dtype)):
                a, b, c = ws
                y = (torch.tensor(x) @ a).tanh() @ b @ c
                loss = torch.nn.functional.cross_entropy(y, torch.arange(16) % 4)
            (loss * factor).backward()
        gradients = [w.grad.numpy() for w in ws if w.grad is not None]
    else:
        import jax
        import optax

        import polymp.jax

        @functools.partial(polymp.jax.autocast, dtype=dtype)
        def loss(ws: Any, x: Any) -> Any:
            a, b, c = ws
            y = jax.numpy.tanh(x @ a) @ b @ c
            return optax.losses.softmax_cross_entropy_with_integer_labels(
                y, np.arange(16) % 4
            ).mean()

        audited = polymp.jax.audit(jax.grad(lambda ws, x: loss(ws, x) * factor))
        gradients, audit = list(map(np.asarray, audited(weights, x))), audited.audit
    return Audited(audit, float(np.mean([(g == 0).mean() for g in gradients])))


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("factor", [1e-6, 3e-8, 1e-10])
def test_gradients_that_float16_made_zero_are_no_healthy_ones(
    framework: str, factor: float
) -> None:
    low = trained(framework, "float16", factor)
    assert low.zeros > 0.3, "nothing vanished"
    lost = low.audit.lost_gradients()
    assert lost > 0.5
    said = text_table.share(lost)
    assert f"gradients that become zero in float16: {said} unscaled" in str(low.audit)
    suggestion = low.audit.suggest()
    assert suggestion.reasons[0].startswith(f"gradients: {said} of the values")
    assert suggestion.init_scale is not None, suggestion
    tried = trained(framework, "float16", factor * suggestion.init_scale)
    assert tried.zeros < 0.01
    assert tried.audit.fault is None


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_what_would_vanish_in_float16_is_said_where_it_did_not_run(framework: str) -> None:
    audit = trained(framework, "bfloat16", 1e-6).audit
    suggestion = audit.suggest()
    assert not suggestion, "a run in bfloat16 needs nothing"
    said, fits = text_table.share(audit.lost_gradients()), audit.fitting_scale()
    assert suggestion.reasons[0].startswith(f"gradients: {said} of the values")
    assert fits is not None
    assert f"a loss scale of 2.0**{math.log2(fits):g};" in suggestion.reasons[0]
    assert not trained(framework, "bfloat16", 1.0).audit.suggest().reasons
