"""Faults of the past: masks in `assert_parity`, lines in shard_map, records of records."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import polymp
import polymp.jax
from polymp.diagnostics.blame import CONSTANT
from polymp.diagnostics.rounding import gap
from polymp.jax import explain
from polymp.testing import ParityError, assert_parity

torch = pytest.importorskip("torch")


def _in_torch(q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -math.inf).softmax(-1) @ v


def _in_jax(factor: float) -> Any:
    def attention(q: Any, k: Any, v: Any) -> Any:
        scores = q @ jnp.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1]) * factor
        earlier = jnp.tril(jnp.ones((q.shape[-2], q.shape[-2]), bool))
        return jax.nn.softmax(jnp.where(earlier, scores, -jnp.inf), -1) @ v

    return attention


MASKED: dict[str, Any] = {
    "add": lambda s: s + jnp.triu(jnp.full((4, 4), -jnp.inf), 1),
    "scatter": lambda s: s.at[jnp.triu_indices(4, 1)].set(-jnp.inf),
}


@pytest.mark.parametrize(("mask", "dtype"), [("add", "float16"), ("scatter", "bfloat16")])
def test_the_infinities_of_a_mask_are_no_values_of_a_healthy_model(mask: str, dtype: str) -> None:
    @polymp.jax.autocast(dtype=dtype)
    def loss(w: Any, x: Any) -> Any:
        return (jax.nn.softmax(MASKED[mask](x @ w)) ** 2).sum()

    step = polymp.jax.audit(jax.grad(loss))
    step(jnp.eye(4), jnp.ones((4, 4)))
    found = step.audit
    assert not [m for m in found.results if m.magnitudes.inf or m.magnitudes.shares(dtype).overflow]
    assert found.fault is None
    asked = found.suggest()  # without a scaler, small gradients vanish in float16
    assert (asked.rules, asked.scopes, asked.dtype) == ({}, {}, None)


def test_a_mask_of_inf_leaves_a_tolerance_to_hold_values_to() -> None:
    random = np.random.default_rng(0)
    inputs = [random.standard_normal((2, 6, 8)).astype(np.float32) for _ in range(3)]
    found = assert_parity(_in_torch, _in_jax(1.0), inputs, dtype="float16", probes=4)
    assert all(0 < g.tolerance < 0.1 for g in found.gaps)
    assert all(g.error > 0 for g in found.gaps[1:])  # values were compared
    with pytest.raises(ParityError, match="compute other values"):
        assert_parity(_in_torch, _in_jax(1.5), inputs, dtype="float16", probes=4)


def test_what_no_probe_tells_the_change_of_is_not_passed_over() -> None:
    one, unknown = np.array([1.0, 2.0]), np.array([0.1, np.nan])
    assert gap("result", one, one + np.array([0.0, 1.0]), unknown).part
    assert not gap("result", one, one, unknown).part


def test_lines_in_shard_map_in_a_region_are_the_users() -> None:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))

    def layer(w: Any, x: Any) -> Any:
        return jax.lax.psum(jnp.exp(x @ w), "d")

    mapped = jax.shard_map(layer, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    report = explain(mapped, jnp.ones((4, 4)), jnp.ones((2, 4)), dtype="bfloat16")
    line = layer.__code__.co_firstlineno + 1
    assert {c.op for c in report} >= {"linear", "exp"}
    assert {c.source for c in report} == {f"test_records_and_masks.py:{line}"}


# --- locate ---------------------------------------------------------------------------------------


def test_a_captured_array_that_is_not_finite_is_an_input() -> None:
    weight = jnp.array([1.0, jnp.nan, 2.0])
    fault = polymp.jax.locate(lambda x: (x * weight).sum(), jnp.ones(3))
    assert fault is not None
    assert (fault.op, fault.kind, fault.found) == ("mul", "input", "NaN")
    assert "a captured array (float32[3]) is not finite" in fault.why


NOT_FINITE: dict[str, Any] = {
    "set": (lambda h: h.at[:, 2].set(jnp.inf) * 0, "mul"),
    "set to NaN": (lambda h: h.at[0].set(jnp.nan), "scatter"),
    "where": (lambda h: jnp.where(h > 3, jnp.inf, h) * 0, "mul"),
    "full": (lambda h: h + jnp.full((4,), jnp.nan), "add"),
}
WRAPPED: dict[str, Any] = {
    "forward": lambda f: f,
    "gradient": jax.value_and_grad,
    "jit": lambda f: jax.jit(jax.value_and_grad(f)),
}
X = jnp.arange(40.0).reshape(10, 4)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_what_the_program_has_that_is_not_finite_is_put_down_to_it(
    dtype: str | None, wrapped: str
) -> None:
    def region(f: Any) -> Any:
        return WRAPPED[wrapped](polymp.jax.autocast(f, dtype=dtype) if dtype else f)

    for name, (fn, op) in NOT_FINITE.items():

        def turn(total: Any, x: Any, w: Any, fn: Any = fn) -> Any:
            return total + fn(jnp.outer(x, x) @ w).sum()

        def scan(w: Any, turn: Any = turn) -> Any:
            return jax.lax.scan(lambda c, x: (turn(c, x, w), None), jnp.float32(0), X)[0]

        for whole in (lambda w, fn=fn: fn(X @ w).sum(), scan):
            fault = polymp.jax.locate(region(whole), jnp.ones((4, 4)))
            assert fault is not None
            assert (fault.op, fault.kind) == (op, "operation"), name
            assert "constant" in fault.why, name

    def stale(w: Any, state: Any) -> Any:
        return jax.lax.scan(lambda c, x: (c * 0.9 + (x @ w).sum(), None), state, X)[0]

    fault = polymp.jax.locate(region(stale), jnp.ones((4, 4)), jnp.float32(jnp.nan))
    assert fault is not None
    assert (fault.kind, fault.why) == ("input", "state is not finite before any op runs")


def test_what_breaks_in_a_shard_map_is_put_down_to_it() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    spec = jax.sharding.PartitionSpec("d")
    mapped = jax.shard_map(lambda x: jnp.exp(x * 1000), mesh=mesh, in_specs=spec, out_specs=spec)
    fault = polymp.jax.locate(lambda x: mapped(x).sum(), jnp.ones(4))
    assert fault is not None
    assert (fault.op, fault.kind, fault.found) == ("shard_map", "operation", "Inf")
    assert polymp.jax.locate(lambda x: mapped(x).sum(), -jnp.ones(4)) is None


def test_an_infinite_result_is_put_down_to_the_constant_that_it_is_made_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def rows(h: jax.Array) -> jax.Array:
        return (h @ h).at[:, 2].set(jnp.inf)

    def loss(h: jax.Array) -> jax.Array:
        return rows(h).sum()

    low = jax.jit(polymp.jax.autocast(loss, dtype=jnp.float16))
    for fn in (loss, jax.value_and_grad(loss), low, rows, lambda h: rows(h).sum(0)):
        fault = polymp.jax.locate(fn, jnp.ones((4, 4)))
        assert fault is not None
        assert (fault.kind, fault.why) == ("operation", CONSTANT)
    assert "are finite" not in capsys.readouterr().err
    audited = polymp.jax.audit(rows)  # which may be a mask that it returns
    audited(jnp.ones((4, 4)))
    assert audited.audit.fault is None
