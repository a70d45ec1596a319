"""`explain`: its counts against counts by hand, its rows against the policy's own answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export

import polymp
from polymp.backends.jax.diagnostics.explain import traced
from polymp.diagnostics.call_record import BACKWARD, FORWARD, ruled
from polymp.dtypes import FORMATS
from polymp.errors import PolicyWarning
from polymp.jax import GradScaler, autocast, explain
from polymp.rules.row import LOW, Rule
from tests.jax.autocast.test_random_policies import MINE, arguments, function, mine
from tests.support import random_policies as programs
from tests.support.jax.scaler_tools import bits, by_optax
from tests.support.sizes import size

X, W = jnp.ones((4, 8)), jnp.ones((8, 8)) / 8


def casts(program: Any) -> list[int]:
    """Bytes of every cast in a program without loops, those inside of products too."""
    found = []

    def cast(v: Any, new: Any) -> None:
        old, new = v.aval.dtype, np.dtype(new)
        if old != new and {old.name, new.name} <= {*FORMATS} and not hasattr(v, "val"):
            found.append(v.aval.size * (old.itemsize + new.itemsize))

    for eqn in program.eqns:
        assert eqn.primitive.name not in ("scan", "while"), "counted once here"
        if eqn.primitive.name == "polymp_contraction":
            for v in eqn.invars[:2]:
                cast(v, eqn.params["spec"].run)
            continue
        if eqn.primitive.name == "convert_element_type":
            cast(eqn.invars[0], eqn.params["new_dtype"])
        for inner in jax.tree.leaves([*eqn.params.values()]):
            if hasattr(inner, "eqns"):
                found += casts(inner)
    return found


def attention(q: Any, w: Any) -> Any:
    x = (q @ w).reshape(4, 2, 4)[None]
    return jax.nn.dot_product_attention(x, x, x).sum()


def convolution(x: Any, w: Any) -> Any:
    image = jnp.broadcast_to(x[None, :, :, None], (2, 4, 8, 4))
    kernel = jnp.broadcast_to(w[:3, :3, None, None], (3, 3, 2, 6))
    y = jax.lax.conv_general_dilated(
        image, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=2,
    )  # fmt: skip
    return jax.nn.relu(y).mean()


def layers(x: Any, w: Any) -> Any:
    x = jax.nn.gelu(jax.nn.softmax(x @ w) @ w)
    return optax.softmax_cross_entropy_with_integer_labels(x, jnp.arange(4)).mean()


def rematerialised(x: Any, w: Any) -> Any:
    return jax.checkpoint(lambda x: jnp.exp(jnp.sin(x @ w)))(x).sum()


def branches(x: Any, w: Any) -> Any:
    return jax.lax.cond(x.sum() > 0, lambda x: jnp.exp(x @ w), lambda x: x, x).sum()


FUNCTIONS = (attention, convolution, layers, rematerialised, branches)


def trained(fn: Callable[..., Any], low: str, policy: str) -> Callable[..., Any]:
    return jax.value_and_grad(autocast(fn, dtype=low, policy=policy), argnums=(0, 1))


@pytest.mark.parametrize(
    ("low", "policy"), [("bfloat16", "amp"), ("float16", "lean"), ("bfloat16", "torch-cuda")]
)
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_casts_and_their_bytes_are_those_in_the_program(fn: Any, low: str, policy: str) -> None:
    step = trained(fn, low, policy)
    by_hand = casts(jax.make_jaxpr(step)(X, W))
    report = explain(step, X, W)
    assert len(by_hand) > 2
    assert (report.casts, report.cast_bytes) == (len(by_hand), sum(by_hand))
    assert (report.low, report.policy) == (low, policy)
    directions = {call.direction for call in report if call.casts}
    assert {FORWARD, BACKWARD} <= directions


@pytest.fixture(scope="module")
def registered() -> Iterator[None]:
    with programs.vocabulary_put_back():
        polymp.register_op(MINE, "fp32", jax=mine)
        yield


@pytest.mark.usefixtures("registered")
@settings(max_examples=size(5, 15))
@given(st.integers(0, 10_000))
def test_random_programs_under_random_policies(seed: int) -> None:
    """Casts as counted, and every row that ruled is the policy's for that module."""
    policy, low, fn = programs.policy(seed), LOW[seed % 2], function(seed)
    if programs.contradicts(policy, programs.program(seed)):
        return
    wrapped = autocast(fn, dtype=low, policy=policy)
    try:
        by_hand = casts(jax.make_jaxpr(wrapped)(arguments(seed)))
    except polymp.errors.ForbiddenOpError:
        with pytest.raises(polymp.errors.ForbiddenOpError):
            explain(wrapped, arguments(seed))
        return
    report = explain(wrapped, arguments(seed))
    assert (report.casts, report.cast_bytes) == (len(by_hand), sum(by_hand))
    ruled = [call for call in report if call.row is not None]
    for call in ruled:
        assert call.row == policy.at(call.module).winner(call.op, low, call.spelling), call
        assert call.rule == str(call.row.rule)
    for path, call in programs.calls(programs.program(seed)):
        row = policy.at(path).winner(call.op, low, "")
        if call.op in ("exp", "linear", "softmax") and row and row.rule is not Rule.PARTS:
            assert (path, call.op) in {(each.module, each.op) for each in ruled}


MINE_SCOPED = polymp.policy("amp").override(
    scopes={"head": {"softmax": "keep", "linear": "fp32"}, "body.*": {"exp": "lower"}}
)


class Net(nnx.Module):
    def __init__(self) -> None:
        self.head = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.body = nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(1))])

    def __call__(self, x: Any) -> Any:
        return jnp.exp(self.body[0](self.head(x))).sum()

    def other(self, x: Any) -> Any:
        return self.head(x)


class Written(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(8, name="body")(jnp.exp(linen.Dense(8, name="head")(x))).sum()


@pytest.mark.parametrize("of", ["module", "method", "argument", "linen"])
def test_modules_are_called_by_their_paths(of: str) -> None:
    net = Net()
    fn, args, paths = {
        "module": (net, (X,), ["head", "body.0"]),
        "method": (net.other, (X,), ["head"]),
        "argument": (lambda model, x: model(x), (net, X), ["head", "body.0"]),
        "linen": (Written().apply, (Written().init(jax.random.key(0), X), X), ["head", "body"]),
    }[of]
    told = pytest.warns(PolicyWarning, match="'Written'") if of == "linen" else nullcontext()
    with told:  # linen's paths begin with the class
        report = polymp.explain(fn, *args, dtype="bfloat16", policy=MINE_SCOPED)
    linears = report.of("linear")
    assert [call.module.removeprefix("Written.") for call in linears] == paths
    if of != "linen":
        assert [call.rule for call in linears] == ["fp32", "lower"][: len(linears)]


def batched(x: Any, w: Any) -> Any:
    return jnp.matmul(x[None] + jnp.ones((3, 1, 1)), jnp.stack([w] * 3)).sum()


FLOPS: dict[str, tuple[int, Callable[[Any, Any], Any]]] = {
    "linear": (2 * 4 * 8 * 8, lambda x, w: (x @ w).sum()),
    "batched": (2 * 3 * 4 * 8 * 8, batched),
    "conv": (2 * (2 * 2 * 4 * 6) * (4 // 2) * 9, convolution),
    "attention": (2 * 4 * 8 * 8 + 2 * 2 * (2 * 4 * 4 * 4), attention),
}  # fmt: skip


@pytest.mark.parametrize("region", [False, True], ids=["no region", "region"])
@pytest.mark.parametrize("name", FLOPS)
def test_flops_are_those_of_the_formulas(name: str, region: bool) -> None:
    flops, fn = FLOPS[name]
    inside = autocast(fn, dtype="bfloat16", enabled=region)
    assert sum(explain(inside, X, W).flops.values()) == flops
    report = explain(jax.value_and_grad(inside, argnums=(0, 1)), X, W)
    by_direction = {
        d: sum(c.flops for c in report if c.direction == d) for d in (FORWARD, BACKWARD)
    }
    assert by_direction == {FORWARD: flops, BACKWARD: 2 * flops}
    assert set(report.flops) == {"bfloat16" if region else "float32"}


def test_what_is_kept_is_what_the_backward_pass_reads() -> None:
    """As much as what jax.vjp holds, its arguments aside, whatever calls and loops are round."""

    def loss(x: Any, w: Any) -> Any:
        return jnp.exp(jnp.tanh(x @ w) @ w).sum()

    def looped(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda h, _: (jnp.sin(h @ w), None), x, None, length=5)[0].sum()

    def held(fn: Any) -> int:
        made = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(fn, *args)[1]))(X, W).jaxpr
        arrays = {id(v): v.aval for v in made.outvars if v not in made.invars}
        return sum(a.size * 4 for a in arrays.values() if a.dtype == np.float32)

    for fn in (loss, jax.jit(loss), looped, jax.jit(looped), autocast(loss, dtype="bfloat16")):
        report = explain(jax.grad(fn, argnums=(0, 1)), X, W)
        assert report.kept == held(fn) > 0
        assert {call.direction for call in report if call.kept} == {FORWARD}
    assert {c.op for c in explain(jax.grad(looped), X, W) if c.kept} >= {"cos"}
    assert explain(loss, X, W).kept == 0, "there is no backward pass"


def test_a_whole_train_step() -> None:
    """With optax and the scaler: FLOPs as by hand, and every pass is there."""
    optimizer, scaler = optax.adamw(1e-3), GradScaler()

    def step(w: Any, state: Any, scaler: Any, x: Any) -> Any:
        region = autocast(lambda w: layers(x, w), dtype="float16")
        grads = jax.grad(lambda w: scaler.scale(region(w)))(w)
        return scaler.step(grads, by_optax(optimizer), w, state)

    args = W, optimizer.init(W), scaler, X
    report = explain(step, *args)
    product = 2 * 4 * 8 * 8  # of two, whose backward passes have three: none is for x
    assert report.flops == {"float16": (2 + 3) * product}
    assert sum(c.flops for c in report if c.direction == FORWARD) == 2 * product
    assert report.calls == explain(jax.jit(step), *args).calls
    outside = [c for c in report if not c.region]
    assert {"sqrt", "isfinite"} <= {c.op for c in outside}, "the optimizer and the scaler"


def test_explaining_leaves_nothing_behind() -> None:
    """Not in the program, not in caches: neither before nor after a first call."""
    for called_before in (False, True):
        fn, fresh = (jax.jit(trained(partial(layers), "bfloat16", "amp")) for _ in range(2))
        expected = bits(fresh(X, W))
        if called_before:
            fn(X, W)
        one, two = explain(fn, X, W), explain(fn, X, W)
        assert one.calls == two.calls
        assert len(one) > 5, "also of what was compiled before"
        assert bits(fn(X, W)) == expected
        assert "polymp:call" not in fn.lower(X, W).as_text(debug_info=True)
        text = jax.make_jaxpr(fn)(X, W).jaxpr.pretty_print(name_stack=True, source_info=False)
        assert "polymp:call" not in text
    found = traced(fn, (X, W), {})
    marked = found.closed.jaxpr.pretty_print(name_stack=True, source_info=False)
    assert "polymp:call" in marked, "it would be seen"


SYMBOLIC = {
    "layers": (lambda x, w: jax.nn.gelu(jax.nn.softmax(x @ w) @ w), ("b, 8", "8, 8")),
    "convolution": (
        lambda x: jax.lax.conv(x, jnp.ones((3, 3, 2, 2)), (1, 1), "SAME"),
        ("b, 3, h, h",),
    ),
    "scan": (lambda x, w: jax.lax.scan(lambda c, r: (c + r, r @ w), x[0], x), ("b, 8", "8, 8")),
    "batched": (lambda x, w: jnp.einsum("bti,ij->btj", jnp.exp(x), w), ("b, t, 8", "8, 8")),
}


@pytest.mark.parametrize("name", SYMBOLIC)
@pytest.mark.parametrize("policy", ["amp", "fp8"])
def test_a_symbolic_size_counts_as_one(name: str, policy: str) -> None:
    fn, shapes = SYMBOLIC[name]
    scope = export.SymbolicScope()
    sizes = [export.symbolic_shape(shape, scope=scope) for shape in shapes]
    types = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]

    def loss(*xs: Any) -> Any:
        return sum(out.sum() for out in jax.tree.leaves(fn(*xs)))

    region = autocast(loss, policy=policy)
    for each in (region, jax.grad(region)):
        report = explain(each, *types)
        symbols = " = ".join(s for s in "bth" if any(s in shape for shape in shapes))
        assert f"(FLOPs and bytes for {symbols} = 1): " in str(report)
        assert report.flops["bfloat16"] > 0


ROWS = {
    "an operand is float64": lambda: jnp.ones((4, 8), "float64") @ W,
    "an operand is int32": lambda: jnp.ones((4, 8), jnp.int32) @ W,
    "its result is to be complex64": lambda: jnp.matmul(W, W, preferred_element_type="complex64"),
    "it asks for the precision HIGHEST": lambda: jnp.matmul(W, W, precision="highest"),
    "it asks for the precision BF16_BF16_F32_X3": lambda: jnp.matmul(
        W, W, precision="BF16_BF16_F32_X3"
    ),
}


@pytest.mark.parametrize("why", ROWS)
def test_why_a_product_with_rule_lower_is_not_lowered(why: str) -> None:
    run = "float64" if "float64" in why else "float32"
    with jax.enable_x64(run == "float64"):
        report = explain(ROWS[why], dtype="bfloat16")
        wide = explain(ROWS[why], policy={"rules": {"all": "fp32"}})
    (call,) = (call for call in report.calls if call.rule == "lower")
    assert (call.run, call.fallback) == (run, why)
    assert f"fallbacks: 1 because {why}" in str(report)
    assert f"lower, run in {run}: {why}" in ruled(call)
    # By a row that says float32, there is nothing to give a reason for.
    assert not wide.fallbacks


@pytest.mark.parametrize(
    ("fn", "kwargs", "error", "message"),
    [
        (3, {}, TypeError, "^explain(fn, *args) needs a function or a module, got 3. Give the "
         "function and its arguments, not what it returned.$"),
        (layers, {"dtype": "half precision"}, (TypeError, ValueError), "half precision"),
        (layers, {"policy": "ampere"}, polymp.errors.PolicyError, "ampere"),
    ],
)  # fmt: skip
def test_what_cannot_be_explained(fn: Any, kwargs: Any, error: Any, message: str) -> None:
    with pytest.raises(error) as raised:
        explain(fn, X, W, **kwargs)
    whole = message.startswith("^")
    assert str(raised.value) == message.strip("^$") if whole else message in str(raised.value)


def test_a_product_in_8_bits_that_a_vmap_around_the_region_batches_is_shown_as_it_runs() -> None:
    def product(w: Any, x: Any) -> Any:
        return x @ w

    w, x = jnp.ones((32, 32)), jnp.ones((4, 16, 32))
    outside = jax.vmap(autocast(product, policy="fp8"), (None, 0))
    inside = autocast(jax.vmap(product, (None, 0)), policy="fp8")
    for fn, run in ((outside, "bfloat16"), (inside, "float8_e4m3fn")):
        (call,) = explain(fn, w, x).calls
        wide = fn is outside
        assert (call.run, bool(call.recipe), bool(call.fallback)) == (run, not wide, wide)
