"""`explain`: where each call was written, in which direction it runs, and how often."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from polymp.diagnostics.call_record import BACKWARD, FORWARD, RECOMPUTE
from polymp.diagnostics.report import Report
from polymp.jax import autocast, explain
from tests.support.reports import line_of, only

X, W = jnp.ones((4, 8)), jnp.ones((8, 8)) / 8
LENGTH = 5


def graded(fn: Callable[..., Any]) -> Report:
    return explain(jax.grad(autocast(fn), argnums=(0, 1)), X, W)


def layer(x: Any, w: Any) -> Any:
    with jax.named_scope("layer"):
        y = x @ w
        y = jax.nn.softmax(y)
    return jnp.sin(y).sum()


def test_backward_calls_carry_the_scope_and_the_line_of_their_forward() -> None:
    report = graded(layer)
    for op, text in (("linear", "x @ w"), ("softmax", "jax.nn.softmax")):
        forward, backward = only(report, op, FORWARD), only(report, op, BACKWARD)
        assert forward.module == backward.module == "layer"
        assert forward.source == backward.source == line_of(layer, text)
        assert forward.row == backward.row is not None
    softmax = only(report, "softmax", FORWARD)
    dtypes = ("bfloat16",), "float32", ("float32",)
    assert (softmax.inputs, softmax.run, softmax.outputs) == dtypes
    assert softmax.casts == 1, "its cast is its own, wherever it stands in the program"
    assert only(report, "linear", BACKWARD).outputs == ("float32",), "of a parameter"
    assert only(report, "sin", FORWARD).module == ""


def test_loops_say_how_often_and_cast_constants_once() -> None:
    def looped(x: Any, w: Any) -> Any:
        def body(h: Any, _: Any) -> Any:
            return jnp.tanh(h @ w), None

        return jax.lax.scan(body, x, None, length=LENGTH)[0].sum()

    for report in (explain(looped, X, W, dtype="bfloat16"), graded(looped)):
        linear = only(report, "linear", FORWARD)
        assert (linear.times, linear.flops) == (LENGTH, LENGTH * 2 * 4 * 8 * 8)
        assert dict(linear.saved) == {"hoisted": LENGTH - 1}, "the weight is cast once"
        assert linear.casts == 1 + LENGTH
        assert linear.cast_bytes == (8 * 8 + LENGTH * 4 * 8) * (4 + 2)
        assert only(report, "tanh", FORWARD).times == LENGTH
        assert linear.source == line_of(looped, "h @ w")
    assert only(report, "linear", BACKWARD).times == LENGTH
    assert only(report, "linear", BACKWARD).flops == 2 * linear.flops
    assert report.saved["hoisted"] >= LENGTH - 1


def test_while_and_cond() -> None:
    def program(x: Any, w: Any) -> Any:
        x = jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (jnp.cos(c[0]), c[1] + 1), (x, 0))[0]
        return jax.lax.cond(x.sum() > 0, lambda x: jnp.exp(x @ w), lambda x: jnp.tan(x), x)

    report = explain(program, X, W, dtype="bfloat16")
    assert only(report, "cos", FORWARD).times == 1, "how often is not known"
    assert only(report, "exp", FORWARD).rule == "fp32"
    assert only(report, "tan", FORWARD).run == "float32"
    assert only(report, "linear", FORWARD).run == "bfloat16"


def test_what_is_rematerialised_is_a_recomputation() -> None:
    def program(x: Any, w: Any) -> Any:
        return jax.checkpoint(lambda x, w: jnp.sin(jax.nn.softmax(x @ w)))(x, w).sum()

    report = graded(program)
    for op in ("linear", "softmax"):
        calls = {c.direction: c for c in report.of(op)}
        assert calls.keys() == {FORWARD, RECOMPUTE, BACKWARD}
        assert calls[RECOMPUTE].row == calls[FORWARD].row is not None
        assert calls[RECOMPUTE].source == calls[FORWARD].source
    assert not [c for c in explain(program, X, W, dtype="bfloat16") if c.direction != FORWARD]


@jax.custom_vjp
def scaled(x: Any) -> Any:
    return jnp.cos(x)


def scaled_forward(x: Any) -> Any:
    return jnp.cos(x), x


def scaled_backward(x: Any, g: Any) -> Any:
    return (jnp.tan(x) * g,)


scaled.defvjp(scaled_forward, scaled_backward)


@jax.custom_jvp
def bent(x: Any) -> Any:
    return jnp.cosh(x)


@bent.defjvp
def bent_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    return bent(x), jnp.sinh(x) * t


def test_rules_of_the_user_s_own_have_their_own_lines() -> None:
    def program(x: Any, w: Any) -> Any:
        return scaled(bent(x @ w)).sum()

    plain, region = explain(jax.grad(program), X, W), graded(program)
    assert only(plain, "cosh", FORWARD).source == line_of(bent.fun, "cosh")
    assert only(plain, "sinh", FORWARD).source == line_of(bent_jvp, "sinh")
    # A rule that is traced when a program is transformed has, in jax, the line of its call.
    assert only(plain, "tan", BACKWARD).source == line_of(program, "scaled")
    for op in ("cosh", "sinh", "tan"):
        (call,) = region.of(op)
        assert call.source == line_of(program, "scaled")
    for report in (plain, region):
        (cos,) = report.of("cos")
        assert cos.direction == FORWARD
        assert cos.source in (line_of(scaled_forward, "cos"), line_of(scaled.fun, "cos"),
                              line_of(program, "scaled"))  # fmt: skip


def test_a_library_s_function_has_the_line_that_calls_it() -> None:
    def program(x: Any) -> Any:
        x = jnp.linalg.norm(x, axis=-1)
        return jnp.var(x)

    report = explain(program, X)
    assert {c.source for c in report} == {line_of(program, "norm"), line_of(program, "var")}


def wave(x: Any) -> Any:
    return jnp.sin(x)


class Layer(linen.Module):
    @linen.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        return wave(x), None


@pytest.mark.parametrize(
    ("lift", "args"),
    [(partial(linen.scan, length=3), [None]), (linen.remat, []), (linen.jit, [])],
    ids=["scan", "remat", "jit"],
)
def test_code_in_a_lifted_module_has_its_own_lines(lift: Any, args: list[Any]) -> None:
    def loss(x: Any) -> Any:
        return lift(Layer)().apply({}, x, *args)[0].sum()

    report = explain(jax.grad(autocast(loss)), X)
    assert {call.source for call in report.of("sin")} == {line_of(wave, "jnp.sin")}


def test_the_backward_of_what_is_rematerialised_has_the_path_of_the_forward() -> None:
    class Outer(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.remat(Layer)(name="inner")(x)[0]

    def loss(x: Any) -> Any:
        return linen.Sequential([Outer(), Outer()]).apply({}, x).sum()

    modules = {f"Sequential.layers_{at}.inner" for at in range(2)}
    calls = [*explain(jax.grad(autocast(loss)), X)]
    for direction in (FORWARD, BACKWARD):
        inner = {c.module for c in calls if c.direction == direction and "inner" in c.module}
        assert inner == modules


def test_scopes_around_a_gradient_are_kept() -> None:
    def energy(x: Any) -> Any:
        with jax.named_scope("net"):
            return wave(x).sum()

    def around(name: str, fn: Any) -> Any:
        def scoped(x: Any) -> Any:
            with jax.named_scope(name):
                return jax.grad(fn)(x)

        return scoped

    of_both = explain(autocast(around("net", energy)), X)
    assert {c.module for c in of_both.of("sin")} == {"net.net"}
    again = explain(autocast(around("train", jax.checkpoint(energy))), X)
    assert {c.module for c in again} == {"train.net"}


def test_code_in_a_step_that_a_library_compiles_has_its_own_lines_and_modules() -> None:
    of_eqx = eqx.nn.Sequential([eqx.nn.Linear(8, 8, key=jax.random.key(0)), eqx.nn.Lambda(wave)])
    of_nnx = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), wave)
    loss = autocast(lambda model, x: model(x).sum())
    for report in (
        explain(eqx.filter_jit(eqx.filter_value_and_grad(loss)), of_eqx, X[0]),
        explain(nnx.jit(nnx.value_and_grad(loss)), of_nnx, X[0]),
    ):
        assert {call.source for call in report.of("sin")} == {line_of(wave, "jnp.sin")}
        assert {call.module for call in report.of("linear")} == {"layers.0"}


def test_lines_in_shard_map_in_a_region_are_the_users() -> None:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))

    def layer(w: Any, x: Any) -> Any:
        return jax.lax.psum(jnp.exp(x @ w), "d")

    mapped = jax.shard_map(layer, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    report = explain(mapped, jnp.ones((4, 4)), jnp.ones((2, 4)), dtype="bfloat16")
    assert {c.op for c in report} >= {"linear", "exp"}
    assert {c.source for c in report} == {line_of(layer, "exp")}


def test_functions_that_are_called_twice_are_told_apart() -> None:
    @jax.jit
    def shared(x: Any) -> Any:
        return jnp.exp(x @ W)

    def program(x: Any) -> Any:
        with jax.named_scope("one"):
            x = shared(x)
        with jax.named_scope("two"):
            x = shared(shared(x))
        return x.sum()

    report = explain(program, X, dtype="float16")
    assert [(c.module, c.times) for c in report.of("linear")] == [("one", 1), ("two", 2)]
    assert [(c.module, c.times) for c in report.of("exp")] == [("one", 1), ("two", 2)]
    backward = [
        c for c in explain(jax.grad(autocast(program)), X).of("exp") if c.direction == BACKWARD
    ]
    assert {c.module: c.times for c in backward} == {"one": 1, "two": 2}


def test_vmap_keeps_calls_and_their_rows() -> None:
    one = explain(layer, X, W, dtype="bfloat16")
    fn = autocast(layer, dtype="bfloat16")
    for report in (
        explain(jax.vmap(fn, (0, None)), X[None], W),
        explain(jax.vmap(layer, (0, None)), X[None], W, dtype="bfloat16"),
    ):
        assert report.flops == one.flops
        rows = {(c.op, c.module, c.row) for c in report if c.row}
        assert rows >= {(c.op, c.module, c.row) for c in one if c.op == "softmax"}
    each = explain(jax.vmap(jax.grad(fn, argnums=1), (0, None)), X[None], W)
    assert {c.direction for c in each.of("softmax")} == {FORWARD, BACKWARD}


def test_regions_are_the_program_s_own() -> None:
    def program(x: Any) -> Any:
        x = jnp.sin(x)
        x = autocast(lambda x: x @ W, dtype="float16")(x)
        x = autocast(lambda x: (x @ W).astype("float32"), dtype="bfloat16")(x)
        return autocast(lambda x: x @ W, enabled=False)(x.astype("float32"))

    report = explain(program, X)
    products = [c for c in report if c.flops]
    assert [c.region for c in products] == ["float16", "bfloat16", ""]
    assert [c.run for c in products] == ["float16", "bfloat16", "float32"]
    assert [c.rule for c in products] == ["lower", "lower", ""]
    assert (only(report, "sin", FORWARD).region, report.low) == ("", "float16")
    (cast,) = report.of("to")
    assert cast.casts == 1
    assert cast.source == line_of(program, "enabled=False")
    nothing = explain(jnp.sin, X)
    assert (nothing.low, nothing.policy, nothing.casts) == ("", "", 0)


@pytest.mark.parametrize("name", ["body", "scan", "cond", "checkpoint"])
def test_a_module_may_have_a_name_that_jax_has_for_something(name: str) -> None:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dense(8, name=name)(x)

    written = Net()
    (linear,) = explain(written.apply, written.init(jax.random.key(0), X), X).of("linear")
    assert linear.module == f"Net.{name}"
    model = nnx.Dict({name: nnx.Linear(8, 8, rngs=nnx.Rngs(0))})
    (linear,) = explain(lambda model, x: model[name](x), model, X).of("linear")
    assert linear.module == name
