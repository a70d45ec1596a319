"""`audit`: the function itself runs, and what is measured beside it is what numpy counts."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, auto_axes

from polymp.backends.jax.diagnostics import instrument
from polymp.backends.jax.diagnostics.audit import short_names
from polymp.jax import GradScaler, audit, autocast, locate
from tests.support.jax.scaler_tools import bits
from tests.support.reports import magnitudes

X = jnp.array([[0.5, -2.0, 3.0], [1.0, 0.25, -0.125]])
W = jnp.arange(12.0).reshape(3, 4) / 8 - 0.5


def rows(audited: Any, direction: str = "forward") -> dict[str, Any]:
    """Magnitudes by op, of one direction."""
    return {r.op: r.magnitudes for r in audited.audit.results if r.direction == direction}


def told(fn: Callable[..., Any], *args: Any) -> dict[str, Any]:
    audited = audit(fn)
    audited(*args)
    return rows(audited)


def loss(params: Any, x: Any) -> Any:
    h = jnp.tanh(x @ params["w"])
    return jnp.mean((h @ params["v"]) ** 2)


PARAMS = {"w": W, "v": W.T[:, :2]}


# Results


def test_the_function_itself_runs_and_once() -> None:
    calls = []

    def f(x: Any) -> Any:
        calls.append(isinstance(x, jax.core.Tracer))
        return x * 2

    audited = audit(f)
    audited(X), audited(X + 1)
    assert calls == [True, False, False], "traced once; then run, each time, and not as a twin"
    assert audited.__name__ == "f"


def test_donated_arguments_survive_the_measuring() -> None:
    audited = audit(jax.jit(lambda x: x * 3, donate_argnums=0))
    x = X + 0
    assert bits(audited(x)) == bits(X * 3)
    assert x.is_deleted(), "by the function itself"
    assert rows(audited)["mul"].largest == 9.0


def test_flax_modules_are_changed_once() -> None:
    model, other = (nnx.BatchNorm(3, rngs=nnx.Rngs(0)) for _ in range(2))
    audited = audit(lambda model, x: model(x).sum())
    for x in (X, X * 2):
        assert bits(audited(model, x)) == bits(other(x).sum())
    assert bits(nnx.state(model)) == bits(nnx.state(other))
    assert audited.audit.steps == 2


# Numbers


def test_the_numbers_are_those_of_the_values() -> None:
    x = jnp.array([0.0, -3.5, 1e-6, 6e4, 7e-30, 0.3])

    def f(x: Any) -> Any:
        doubled = x * 2
        cosines = jnp.cos(doubled)
        return cosines * 1e3

    audited = audit(f)
    audited(x)
    made = x * 2, jnp.cos(x * 2), jnp.cos(x * 2) * 1e3
    for row, values in zip(audited.audit.results, made, strict=True):
        said, exact = row.magnitudes, magnitudes(values)
        assert said.bins[1:] == exact.bins[1:]
        assert (said.values, said.counted) == (6, 6)
        assert said.largest == pytest.approx(exact.largest, rel=1e-6)


def test_float8_empty_and_other_arrays() -> None:
    audited = audit(lambda a, b, c, d: (a.astype(jnp.float8_e5m2), b * 2, c * 2, d + 1))
    audited(X, jnp.ones((0, 2)), jnp.ones(2, jnp.complex64), jnp.ones(2, jnp.int32))
    found = [(row.op, row.run, row.magnitudes.largest) for row in audited.audit.results]
    assert found == [("to", "float8_e5m2", 3.0), ("mul", "complex64", 2.0)]


def test_complex_numbers_are_measured_by_their_parts() -> None:
    """The magnitude itself would be Inf where both parts are finite."""
    audited = audit(lambda x: lax.complex(x, -2 * x) * 2)
    audited(jnp.full(3, 8e37))
    said = rows(audited)["mul"]
    assert (said.largest, said.inf, said.counted) == (pytest.approx(3.2e38), False, 6)
    audited(jnp.full(3, 1e38))
    assert (audited.audit.fault.op, audited.audit.fault.found) == ("mul", "Inf")


# Control flow


def test_a_scan_is_measured_over_all_rounds() -> None:
    def f(x: Any) -> Any:
        return lax.scan(lambda c, _: (c * -2, jnp.sin(c)), x, None, length=4)

    said = told(f, X)
    carried = np.concatenate([X * (-2.0) ** n for n in range(1, 5)])
    assert said["mul"].bins == magnitudes(carried).bins
    assert (said["mul"].largest, said["mul"].values) == (48.0, 24)
    sines = np.sin(np.concatenate([X * (-2.0) ** n for n in range(4)]))
    assert said["sin"].largest == pytest.approx(np.abs(sines).max())


def test_a_while_loop_has_no_rows_inside_and_is_looked_at() -> None:
    def f(x: Any) -> Any:
        return lax.while_loop(lambda c: c.sum() < 1e30, lambda c: c * 1e20, x) * 2

    audited = audit(f)
    audited(X)
    assert {*rows(audited)} == {"mul"}
    fault = audited.audit.fault
    assert fault is not None
    assert (fault.op, fault.kind) == ("while_loop", "inside")
    assert "\nnot measured: 2 calls in a while loop\n" in str(audited.audit)
    assert audited.audit.left_out == {"in a while loop": 2}
    audited = audit(lambda x: lax.while_loop(lambda c: c.sum() > 1, lambda c: c / 2, x))
    audited(X)
    assert not audited.audit.suggest()


def test_what_did_not_run_is_absent() -> None:
    audited = audit(lambda p, x: lax.cond(p, jnp.exp, jnp.sin, x))
    audited(True, X)
    assert {*rows(audited)} == {"exp"}
    audited(False, X)
    assert {*rows(audited)} == {"exp", "sin"}
    assert told(lambda x: lax.while_loop(lambda c: c.sum() > 1e9, jnp.exp, x), X) == {}
    assert told(lambda x: lax.scan(lambda c, _: (c * 2, None), x, None, length=0), X) == {}
    assert told(lambda: 1.0) == {}


def test_loops_in_branches_in_loops() -> None:
    def body(c: Any, n: Any) -> Any:
        down = lambda c: lax.fori_loop(0, n, lambda _, c: c * 0.5, c)  # noqa: E731
        return lax.cond(n % 2 == 0, lambda c: c * 4, down, c), None

    said = told(lambda x: lax.scan(body, x, jnp.arange(4)), X)["mul"]
    assert said.largest == 3 * 4 * 0.5 * 4
    assert said.values >= said.counted > 0


def test_inside_vmap_remat_and_shard_map() -> None:
    said = told(jax.vmap(lambda row: jnp.exp(row)), X)["exp"]
    assert said.largest == pytest.approx(math.exp(3), rel=1e-6)
    audited = audit(jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.exp(x)))(x).sum()))
    audited(X)
    again = rows(audited, "recompute")["exp"]
    assert again.largest == pytest.approx(math.exp(3), rel=1e-6)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
    spec = PartitionSpec("i")
    sharded = jax.shard_map(lambda x: jnp.exp(x), mesh=mesh, in_specs=spec, out_specs=spec)
    audited = audit(lambda x: sharded(x) * 2)
    assert bits(audited(X)) == bits(sharded(X) * 2)
    assert rows(audited)["mul"].largest == pytest.approx(2 * math.exp(3), rel=1e-6)
    assert audited.audit.left_out == {"in a shard_map": 1}


def test_loops_branches_and_others_are_measured_without_a_bit_of_change() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
    spec = PartitionSpec("i")
    sharded = jax.shard_map(lambda x: x * 3, mesh=mesh, in_specs=spec, out_specs=spec)

    @autocast(dtype=jnp.bfloat16)
    def f(w: Any, x: Any) -> Any:
        h = x @ w
        h, _ = lax.scan(lambda c, n: (c @ w[:, :4].T @ w * n, None), h, jnp.arange(1.0, 4.0))
        h = lax.fori_loop(0, 3, lambda _, c: c * jnp.bfloat16(0.3), h.astype(jnp.bfloat16))
        h = lax.cond(h.sum() > 1e9, lambda h: h, lambda h: h * jnp.bfloat16(1.1), h)
        h = sharded(h) + jax.random.uniform(jax.random.key(0), h.shape, jnp.bfloat16)
        h = lax.bitcast_convert_type(lax.bitcast_convert_type(h, jnp.uint16) | 1, jnp.bfloat16)
        return jax.checkpoint(lambda h: jnp.sum(jnp.tanh(h @ w.T) ** 2))(h / 64)

    step = jax.value_and_grad(f)
    audited = audit(step)
    assert bits(audited(W, X)) == bits(step(W, X))
    assert {"linear", "mul", "tanh"} <= {m.op for m in audited.audit.results}


@pytest.mark.parametrize("set_mesh", [False, True], ids=["plain", "set_mesh"])
def test_types_that_say_how_arrays_are_divided_change_nothing(set_mesh: bool) -> None:
    mesh = jax.make_mesh((1, 1), ("rows", "columns"), axis_types=(AxisType.Explicit,) * 2)

    def step(x: Any, w: Any, tanh: Any = jnp.tanh) -> Any:
        h = lax.cond(w.sum() > 0, jnp.sin, lambda h: jnp.sin(h + 1), x @ w)
        last, _ = lax.scan(lambda c, _: (c * 3e2, c.sum()), tanh(h), None, length=2)
        return last, jnp.zeros(3) + 1, x * 1j

    x, w = np.linspace(-2, 2, 128 * 32).reshape(128, 32), np.eye(32, 16)
    specs = (x, PartitionSpec("rows")), (w, PartitionSpec(None, "columns"))
    own = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in specs]
    low = partial(autocast, dtype="float16")
    (plain := audit(low(step)))(x, w)
    with jax.set_mesh(mesh) if set_mesh else nullcontext():
        if set_mesh:
            spec = PartitionSpec("rows", "columns")
            step = partial(step, tanh=auto_axes(jnp.tanh, out_sharding=spec))
        (audited := audit(low(step)))(*own)
        fault = locate(low(step), *own)
    assert rows(audited) == rows(plain)
    assert fault is not None
    assert (fault.op, fault.kind) == ("mul", "overflow")


def test_derivatives_by_hand_are_the_ones_that_run() -> None:
    @jax.custom_vjp
    def f(x: Any) -> Any:
        return jnp.exp(x)

    f.defvjp(lambda x: (jnp.exp(x), x), lambda x, g: (g * 1000,))

    @jax.custom_jvp
    def h(x: Any) -> Any:
        return jnp.sin(x)

    h.defjvp(lambda primals, tangents: (h(*primals), tangents[0] * 500))
    for fn, largest in ((f, 1000.0), (h, 500.0)):
        audited = audit(jax.grad(lambda x, fn=fn: fn(x).sum()))
        grads = audited(X)
        assert float(jnp.abs(grads).max()) == largest
        (gradient,) = audited.audit.gradients
        assert gradient.magnitudes.largest == largest


def test_what_a_gradient_keeps_inside_of_a_call_is_no_result_of_it() -> None:
    softmax = autocast(lambda x: (jax.nn.softmax(x) ** 2).sum(), dtype="bfloat16")
    audited = audit(jax.grad(softmax))
    audited(X)
    said = {r.op: r.magnitudes for r in audited.audit.results if r.direction == "forward"}
    assert (said["softmax"].values, said["softmax"].largest < 1) == (X.size, True)


def carried(x: Any) -> Any:
    return lax.scan(lambda c, _: (c + 1, jnp.sin(c * x)), x, None, length=3)[1]


def summed(x: Any) -> Any:
    return lax.scan(lambda c, row: (c + jnp.tanh(row).sum(), None), 0.0, x)[0]


@pytest.mark.parametrize("fn", [jax.nn.softmax, jax.nn.gelu, carried, summed])
def test_what_a_derivative_computes_for_itself_is_no_result(fn: Any) -> None:
    """But one that only the next round of a loop reads is, and one that a program alone makes."""

    def loss(x: Any) -> Any:
        out = fn(x)
        return (out**2).mean() if out.shape else out

    assert told(lambda x: (jnp.exp(x), x + 1)[1], X).keys() == {"exp", "add"}
    alone = told(loss, X)
    assert told(jax.value_and_grad(loss), X).keys() == alone.keys()
    assert told(jax.grad(loss), X).keys() == alone.keys()


# The infinities of masks


@pytest.mark.parametrize("mean", [False, True])
def test_a_bound_beyond_float16_hides_no_overflow(mean: bool) -> None:
    """In float16 it is 65504; if a sum in float32 reads it, the bound itself."""

    @autocast(dtype="float16")
    def bounded(x: Any) -> Any:
        least = jnp.minimum((x @ x.T).astype(jnp.float32), 1e5)
        return jnp.mean(least) if mean else least

    audited = audit(bounded)
    audited(jnp.full((4, 64), 400.0))
    fault = audited.audit.fault
    assert fault is not None
    assert (fault.op, fault.kind) == ("linear", "overflow")
    assert "linear" in audited.audit.suggest().rules


# Loss scalers


def updated(grads: Any, w: Any) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads)


def unscaled(loss: Any, scaler: Any, w: Any) -> Any:
    grads, finite = scaler.unscale(jax.grad(lambda w: scaler.scale(loss(w)))(w))
    return updated(grads, w), scaler.update(finite)


SCALED: dict[str, Any] = {
    "step": lambda loss, scaler, w: scaler.step(
        jax.grad(lambda w: scaler.scale(loss(w)))(w), updated, w
    ),
    "unscale": unscaled,
    "value_and_grad": lambda loss, scaler, w: scaler.value_and_grad(loss)(w),
}


@pytest.mark.parametrize("low", [True, False])
@pytest.mark.parametrize("how", SCALED)
def test_what_a_scaler_computes_has_no_rows_and_what_it_calls_has(how: str, low: bool) -> None:
    def loss(w: Any) -> Any:
        return jnp.exp(w).sum()

    of = autocast(loss, dtype="float16") if low else loss
    audited = audit(lambda scaler, w: SCALED[how](of, scaler, w))
    audited(GradScaler(1024.0), jnp.ones((4, 4)))
    own = {"mul", "sub"} if how == "unscale" else set()
    assert {*rows(audited)} == {"exp", "sum"} | own
    assert all(m.source for m in audited.audit.results)


# Gradients


@pytest.mark.parametrize("scale", [1.0, 2.0**12])
def test_gradients_have_names_and_are_jax_grads_divided_by_the_scale(scale: float) -> None:
    @autocast(policy={"rules": {"all": "fp32"}})
    def scanned(p: Any, x: Any) -> Any:
        return loss(p, lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x + p["b"], p["rows"])[0])

    params = PARAMS | {"b": X[0], "rows": jnp.stack([W[:, :3], W[:, 1:]])}
    audited = audit(lambda scaler, p, x: SCALED["step"](lambda p: scanned(p, x), scaler, p))
    audited(GradScaler(scale), params, X)
    assert audited.audit.scale == scale
    found = {g.module: g.magnitudes for g in audited.audit.gradients}
    assert {*found} == {*params}
    for name, values in jax.grad(scanned)(params, X).items():
        assert found[name].largest == pytest.approx(float(jnp.abs(values).max()), rel=1e-5)
        assert (found[name].values, found[name].counted) == (values.size, values.size)


def test_gradients_of_layers_are_named_as_the_layers_are_and_folded() -> None:
    net = nnx.Sequential(*(nnx.Linear(3, 3, rngs=nnx.Rngs(0)) for _ in range(4)))
    audited = audit(nnx.jit(nnx.value_and_grad(lambda net, x: net(x).sum())))
    audited(net, X)
    a = audited.audit
    owners = {m.module.rpartition(".")[0] for m in a.gradients}
    assert owners == {f"layers.{i}" for i in range(4)}
    assert owners == {m.module for m in a.results if m.direction == "forward" and m.module}
    assert str(a).count("layers.* x4") == 3  # forward, backward, and gradients of parameters


def test_a_scaler_that_scales_nothing_has_no_scale() -> None:
    """It is given, and `scaler.scale` is forgotten: the gradients have the scale 1."""

    @jax.jit
    def step(scaler: Any, params: Any, x: Any) -> Any:
        grads = jax.grad(autocast(lambda p: loss(p, x) * 1e-7, dtype=jnp.float16))(params)
        return scaler.step(grads, lambda g, p: jax.tree.map(jnp.subtract, p, g), params)

    audited = audit(step)
    audited(GradScaler(2.0**12), PARAMS, X)
    assert audited.audit.scale == 1


# Names of gradients


SHORT = {
    "[0][1]['layers'][0]['up']['kernel'].value": "layers.0.up.kernel",
    "params['layers'][2]['w']": "layers.2.w",
    "['params']['Dense_0']['bias']": "Dense_0.bias",
    ".layers[2].up.bias": "layers.2.up.bias",
    "['mlp/~/linear_1']['b']": "mlp.linear_1.b",
    "[1]['w']": "w",
    "args[0]['w']": "w",
    "w": "w",
    "[0]": "[0]",
    "params[0]": "params[0]",
    "result": "result",
}
ALIKE = [  # which keep what tells them apart
    (["[0]['gen']['h']['w']", "[0]['dis']['h']['w']"], ["gen.h.w", "dis.h.w"]),
    (["[1][0]['w']", "[1][1]['w']"], ["[1][0]['w']", "[1][1]['w']"]),
    (["p['w']", "q['w']"], ["p['w']", "q['w']"]),
    (["[0]", "[1]"], ["[0]", "[1]"]),
    (["[0]['w'].value", "[1]['w'].value"], ["[0]['w']", "[1]['w']"]),
]


@pytest.mark.parametrize(
    ("texts", "names"), [*(([text], [name]) for text, name in SHORT.items()), *ALIKE]
)
def test_expressions_become_names(texts: list[str], names: list[str]) -> None:
    found = short_names({at: [text] for at, text in enumerate(texts)})
    assert [name for (name,) in found.values()] == names


def test_a_gradient_that_went_to_several_arrays() -> None:
    """A weight counts and its moments do not; two parameters are both named."""
    texts = ["[0]['h']['w']", "[1][0].mu['h']['w']", "[1][0].nu['h']['w']"]
    assert short_names({3: texts}) == {3: ["h.w"]}
    assert short_names({3: ["[1]['a']", "[1]['b']"]}) == {3: ["a", "b"]}


# Calls


def test_types_are_traced_once_and_values_measured_anew() -> None:
    traces = []

    def f(x: Any, mode: Any = "a") -> Any:
        if isinstance(x, jax.core.Tracer):
            traces.append((x.dtype.name, mode))
        return x * (2 if mode == "a" else mode)

    audited = audit(f)
    low = X.astype(jnp.float16)
    for x, mode in ((X, "a"), (X * 10, "a"), (low, "a"), (X, 1), (X, 1.0), (X, True)):
        audited(x, mode)
    audited(X * 100)
    assert traces[:5] == [("float32", "a"), ("float16", "a"), ("float32", 1), ("float32", 1.0),
                          ("float32", True)]  # fmt: skip
    assert max(r.magnitudes.largest for r in audited.audit.results) == 600.0
    assert audited.audit.steps == 7
    assert audited.audit is audited.audit, "reading does not measure again"
    assert "7 calls measured" in repr(audited)


def test_static_arguments_and_what_cannot_be_hashed() -> None:
    audited = audit(jax.jit(lambda x, n: x * n, static_argnums=1))
    audited(X, 2), audited(X, 5)
    assert rows(audited)["mul"].largest == 15.0

    @dataclass
    class Config:
        factor: float

    audited = audit(lambda x, config: x * config.factor)
    audited(X, Config(2.0)), audited(X, Config(7.0))
    assert rows(audited)["mul"].largest == 21.0


def test_a_traced_call_is_refused() -> None:
    audited = audit(loss)
    with pytest.raises(TypeError, match="was called by code that is traced, where there are no"):
        jax.jit(audited)(PARAMS, X)
    with pytest.raises(TypeError, match=r"polymp.jax.audit\(jax.jit\(step\)\)"):
        jax.grad(audited)(PARAMS, X)
    with pytest.raises(TypeError, match=r"audit\(fn\) needs a function, got 3."):
        audit(3)  # type: ignore[arg-type]


def test_an_audit_before_any_call_says_that_the_function_has_to_be_called() -> None:
    text = " ".join(str(audit(loss).audit).split())
    assert "call the function that polymp.jax.audit returns" in text


def test_an_error_of_the_function_comes_through_and_the_measurement_stays() -> None:
    def f(x: Any) -> Any:
        if not isinstance(x, jax.core.Tracer):
            raise ValueError("mine")
        return x * 2

    audited = audit(f)
    with pytest.raises(ValueError, match="mine"):
        audited(X)
    assert rows(audited)["mul"].largest == 6.0


def test_the_first_step_that_breaks_is_the_one_told_of() -> None:
    audited = audit(lambda x: jnp.log(x))
    line = sys._getframe().f_lineno - 1
    audited(jnp.ones(2)), audited(-jnp.ones(2)), audited(jnp.full(2, jnp.nan))
    fault = audited.audit.fault
    assert fault is not None
    assert (fault.op, fault.kind, fault.source) == ("log", "operation", f"test_audit.py:{line}")
    assert fault.inputs[0][:4] == ("float32", (2,), 0.0, 1.0)


def test_a_wrong_peak_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracles above compare with numpy: half of it would not pass."""
    monkeypatch.setattr(instrument, "peak", lambda *arrays: jnp.float32(1.0))
    assert told(lambda x: x * 2, X)["mul"].largest != 6.0


def test_shares_are_of_the_rounds_in_which_a_branch_was_taken() -> None:
    def step(x: jax.Array) -> jax.Array:
        def once(c: jax.Array) -> jax.Array:
            return (c.astype(jnp.float16) * jnp.float16(1e-4)).astype(jnp.float32) + c

        def turn(c: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            return lax.cond(i == 0, once, lambda c: c, c), None

        return lax.scan(turn, x, jnp.arange(10))[0].sum()

    audited = audit(step)
    audited(jnp.full(8, 1e-5))
    (product,) = (m for m in audited.audit.results if m.op == "mul")
    assert product.magnitudes.vanished == 1.0
    assert product.magnitudes.values == 8


def test_a_constant_that_the_dtype_makes_zero_is_named() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        h = x @ w
        return (h / ((h * h).sum() + 1e-12)).sum()

    audited = audit(autocast(step, dtype="float16", policy={"rules": {"all": "lower"}}))
    audited(jnp.ones((4, 4)), jnp.ones((4, 4)))
    (added,) = (m for m in audited.audit.results if m.op == "add")
    assert added.numbers == (1e-12,)
    assert audited.audit.suggest().rules == {"add": "fp32"}
