"""`locate` in JAX: the op that is named, its round in a loop, and what it was given."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import polymp
from polymp.backends.jax.diagnostics import instrument
from polymp.backends.jax.diagnostics.explain import traced
from polymp.diagnostics.audit_records import Fault
from polymp.diagnostics.blame import CONSTANT
from polymp.diagnostics.call_record import FORWARD
from polymp.jax import GradScaler, audit, autocast, locate, lower
from tests.support import processes
from tests.support.reports import operand
from tests.support.sizes import LONG

F16 = jnp.float16


def line_of(fn: Callable[..., Any], after: int = 1) -> str:
    return f"test_locate.py:{fn.__code__.co_firstlineno + after}"


def fault_of(fn: Callable[..., Any], *args: Any) -> Fault:
    fault = locate(fn, *args)
    assert fault is not None
    return fault


def test_the_module_and_the_row_are_named() -> None:
    net = nnx.Sequential(nnx.Linear(3, 2, use_bias=False, rngs=nnx.Rngs(0)), jnp.reciprocal)
    net.layers[0].kernel[...] = jnp.full((3, 2), 6e4)
    fault = fault_of(autocast(net, dtype=F16), jnp.full((2, 3), 6e4))
    assert (fault.op, fault.module, fault.kind) == ("linear", "layers.0", "overflow")
    assert fault.region == "float16"
    assert fault.row is not None
    assert ", by the row linear = lower, policies/torch-cuda.toml\n" in str(fault)
    assert fault.found.startswith("Inf")


def test_backward_ops_are_named_with_their_line() -> None:
    def f(x: Any) -> Any:
        y = jnp.sin(x * F16(1e3))
        return (y * F16(1e3)).sum()

    fault = fault_of(jax.grad(f), jnp.zeros(2, F16))
    assert (fault.direction, fault.source, fault.kind) == ("backward", line_of(f), "overflow")
    assert (fault.op, fault.inputs[0].largest) == ("mul", 1e3)


def test_a_gradient_that_a_scaler_skips_is_found() -> None:
    def step(scaler: Any, x: Any) -> Any:
        grad = jax.grad(lambda x: scaler.scale((x * x).sum()))(x)
        grad, finite = scaler.unscale(grad)
        return jnp.where(finite, x - grad, x)

    assert locate(step, GradScaler(2.0**10), jnp.ones(2, F16)) is None
    fault = fault_of(step, GradScaler(2.0**16), jnp.full(2, 8.0, F16))
    assert fault.run == "float16"


def test_what_nothing_uses_breaks_nothing() -> None:
    step = lambda x: (jnp.log(x - x), jnp.sqrt(x).sum())[1]  # noqa: E731
    assert locate(step, jnp.ones(3)) is None
    assert fault_of(step, -jnp.ones(3)).op == "sqrt"


# Loops


def in_while(x: Any) -> Any:
    return lax.while_loop(
        lambda c: c[0] < 4, lambda c: (c[0] + 1, c[1] * c[1].dtype.type(100)), (0, x)
    )[1]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_a_while_loop_is_named_and_what_it_was_given(dtype: Any) -> None:
    x = jnp.array([1e35, 2.0, 0.0]).astype(dtype) if dtype != F16 else jnp.array([1, 2, 0], F16)
    fault = fault_of(lambda x: in_while(x * 1), x)
    assert (fault.op, fault.kind, fault.source) == ("while", "inside", line_of(in_while))
    assert "Locate in the function that is a round of it" in str(fault)
    assert operand(x) in fault.inputs
    assert locate(in_while, jnp.zeros(3, dtype)) is None
    fault = fault_of(in_while, x * jnp.nan)
    assert (fault.kind, fault.why) == ("input", "x is not finite before any op runs")


def carried(c: Any, _: Any) -> Any:
    h = c * F16(2)  # is infinite a round later
    return jnp.exp(h), None


def test_what_a_round_before_had_left_is_not_to_blame() -> None:
    x = jnp.full(2, 0.2, F16)

    def scanned(x: Any) -> Any:
        return lax.scan(carried, x, None, length=6)[0]

    def nested(x: Any) -> Any:
        def outer(c: Any, _: Any) -> Any:
            return lax.scan(carried, c, None, length=2)[0], None

        return lax.scan(outer, x, None, length=3)[0]

    h = x
    while bool(jnp.isfinite(jnp.exp(h * 2)).all()):
        h = jnp.exp(h * 2)
    for f in (scanned, nested):
        fault = fault_of(f, x)
        assert (fault.op, fault.kind, fault.source) == ("exp", "overflow", line_of(carried, 2))
        assert fault.inputs[0].largest == float((h * 2).max()), f.__name__


def test_the_backward_of_a_scan_breaks_where_it_first_does() -> None:
    """It runs from the last round to the first."""

    def f(w: Any, x: Any) -> Any:
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)
        return h.astype(jnp.float32).sum() * 1e4

    w, x = jnp.full((4, 3, 3), 100.0) / 9, jnp.zeros((2, 3))
    fault = fault_of(jax.grad(autocast(f, dtype=F16)), w, x)
    assert (fault.op, fault.direction, fault.kind) == ("linear", "backward", "overflow")
    assert (fault.inputs[0].smallest, fault.inputs[0].largest) == (1e4, 1e4)


@pytest.mark.parametrize(("value", "op"), [(0, "log"), (1, "div")])
def test_the_op_that_broke_in_a_branch_is_named(value: int, op: str) -> None:
    def branches(x: Any) -> Any:
        return lax.cond(x.sum() == 0, lambda x: jnp.log(x), lambda x: x / 0, x)

    fault = fault_of(branches, jnp.full(2, value, F16))
    assert (fault.op, fault.kind) == (op, "operation")


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("op", [jax.nn.softmax, jax.nn.log_softmax, jax.nn.standardize])
def test_what_overflows_is_the_cause_and_not_the_op_that_reads_it(op: Any, gradients: bool) -> None:
    """On CPUs Inf - Inf is a NaN with a sign; those that exp makes of it have one, too."""

    def f(x: Any) -> Any:
        return op(x @ x.T).sum()

    x = jnp.full((8, 8), 1e20).at[::2].multiply(-1)
    fault = fault_of(jax.value_and_grad(f) if gradients else f, x)
    assert (fault.op, fault.kind, fault.found) == ("linear", "operation", "Inf")
    assert not any(x.inf or x.nan for x in fault.inputs)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (1e5, "an input of it is beyond float16's largest number when it is cast"),
        (3e2, "its result is beyond float16's largest number, 65504; in float32 it is finite"),
    ],
)
def test_an_input_that_overflows_in_its_cast_is_told_from_a_result(value: float, why: str) -> None:
    f = autocast(lambda x: x @ jnp.full((8, 8), 90000 / value), dtype=F16)
    x = jnp.full((4, 8), value)
    measured = audit(f)
    measured(x)
    assert measured.audit.fault is not None
    assert measured.audit.fault.why == fault_of(f, x).why == why


def test_a_gradient_that_overflows_is_not_put_down_to_the_inputs_of_its_op() -> None:
    f = autocast(lambda x: (x @ x / (jnp.abs(x @ x) + 1e-9)).sum(), dtype=F16)
    gradient, x = jax.grad(f), jnp.zeros((2, 2))
    audited = audit(gradient)
    audited(x)
    fault = fault_of(gradient, x)
    assert audited.audit.fault is not None
    assert (fault.op, fault.kind, fault.direction) == ("div", "overflow", "backward")
    assert fault.why == audited.audit.fault.why
    assert fault.why.startswith("its result is beyond float16's largest number")


ROUNDED = """
import jax, jax.numpy as jnp
from polymp.jax import locate

def log_of_a_difference(w, x):
    return jnp.log(1 - jnp.tanh(x @ w) ** 2).sum()

def root_of_a_difference(w, x):
    h = jnp.full((4, 8), 1.0) * w.sum() * 0.1 + 0 * x
    return jnp.sqrt((h**2).mean(-1) - h.mean(-1) ** 2).sum()

for f, seed in (log_of_a_difference, 1), (root_of_a_difference, 1), (root_of_a_difference, 2):
    loss, keys = jax.jit(f), map(jax.random.key, (seed, 100 + seed))
    w, x = (jax.random.normal(key, (n, 8)) for key, n in zip(keys, (8, 4)))
    assert (locate(loss, w, x) is None) == jnp.isfinite(loss(w, x)), (f, seed)
"""


def test_numbers_that_rounding_breaks_are_located_as_the_program_rounds() -> None:
    """In a copy that is compiled quickly the first two are finite, and the third breaks."""
    processes.run(ROUNDED, env={"XLA_FLAGS": ""})  # else all is compiled quickly here


def test_a_copy_that_stays_finite_is_not_called_healthy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instrument.MeasuredCall, "not_finite", lambda *_: {0})
    assert locate(lambda x: x * 2, jnp.ones(3)) is None
    assert "they round differently" in capsys.readouterr().err


def test_checks_of_jax_for_nan_do_not_stop_it() -> None:
    with jax.debug_nans(True), jax.debug_infs(True):
        assert fault_of(jnp.log, -jnp.ones(3)).op == "log"


def branching(w: Any) -> Any:
    return w if w.sum() > 0 else -w


def test_errors_of_jax_name_the_line_of_the_function() -> None:
    line = branching.__code__.co_firstlineno
    with pytest.raises(jax.errors.TracerBoolConversionError, match=f"test_locate.py:{line} for"):
        autocast(branching)(jnp.ones(3))


@pytest.mark.parametrize("fn", [branching, jax.jit(branching), lambda w: branching(w)])
@pytest.mark.parametrize("looked_at", [locate, polymp.jax.explain, lambda fn, x: audit(fn)(x)])
def test_a_function_that_reads_values_is_told_what_to_return(looked_at: Any, fn: Any) -> None:
    line = branching.__code__.co_firstlineno + 1
    with pytest.raises(TypeError) as raised:
        looked_at(fn, jnp.ones(3))
    said = str(raised.value)
    assert f"Python reads the value of an array at test_locate.py:{line}, as float(loss)" in said
    assert said.endswith("Return the loss as an array, or give the part that jax.jit can trace.")


def test_nan_of_a_mask_is_told() -> None:
    def f(x: Any) -> Any:
        masked = jnp.where(x > 0, x, -jnp.inf)
        return masked - masked.max()

    assert locate(f, jnp.ones(3)) is None
    x = jnp.ones(3)
    assert locate(lambda x: jax.nn.softmax(jnp.where(x > 2, x, -jnp.inf).at[0].set(1.0)), x) is None
    fault = fault_of(f, -x)
    assert (fault.op, fault.kind) == ("sub", "operation")
    assert "infinities that the program has" in fault.why


# What it leaves alone


def test_nothing_runs_but_the_twin() -> None:
    calls = []

    def f(x: Any) -> Any:
        calls.append(isinstance(x, jax.core.Tracer))
        return x * 2

    locate(f, jnp.ones(2))
    assert calls == [True]
    x = jnp.zeros(2)
    donating = jax.jit(lambda x: 1 / x, donate_argnums=0)
    assert locate(donating, x) is not None
    assert not x.is_deleted()


def test_traced_code_is_refused() -> None:
    with pytest.raises(TypeError, match="called by code that is traced"):
        jax.jit(lambda x: locate(jnp.sin, x))(1.0)


def test_the_twin_of_locate_is_small_and_compiles_with_quick_options():
    """Nearly all of the first call is compiling: what it need not know is left out."""

    def loss(w: Any, x: Any) -> Any:
        for _ in range(4):
            x = jnp.tanh(autocast(jnp.matmul)(x, w))
        return (x**2).mean()

    w, x = jax.device_put((jnp.eye(16) / 2, jnp.ones((8, 16))), jax.devices("cpu")[0])
    step = jax.jit(jax.grad(loss))
    call = traced(step, (w, x), {})
    plain, small = (instrument.MeasuredCall(call, once=once) for once in (False, True))
    equations = [len(jax.make_jaxpr(p.twin().run)([w, x]).eqns) for p in (plain, small)]
    assert equations[1] < 0.7 * equations[0]
    options = instrument.quick_options([w, x])
    assert options is not None
    assert options["xla_backend_optimization_level"] == 0
    assert all(np.size(fact.sample) == 0 for fact in small.twin().run([w, x])[0])


# What only a derivative breaks


def the_norm(x: Any) -> Any:
    return jnp.linalg.norm(x)


def the_root(x: Any) -> Any:
    return jnp.sqrt(x).sum()


@pytest.mark.parametrize(("f", "op"), [(the_norm, "norm"), (the_root, "sqrt")])
def test_a_derivative_that_breaks_alone_is_its_op_s(f: Any, op: str) -> None:
    x = jnp.zeros(3)
    inside = autocast(f, dtype=F16)
    assert locate(inside, x) is None
    fault = fault_of(jax.value_and_grad(inside), x)
    assert (fault.op, fault.direction, fault.source) == (op, "backward", line_of(f))
    assert fault.inputs[0] == operand(x, "x")
    if op == "norm":  # then the loss comes first
        fault = fault_of(jax.grad(autocast(lambda x: (x / the_norm(x)).sum(), dtype=F16)), x)
        assert (fault.op, fault.direction) == ("div", "forward")


def test_an_audit_of_gradients_measures_the_op_s_result() -> None:
    audited = audit(jax.grad(autocast(lambda x: jnp.square(jnp.sqrt(x)).sum(), dtype=F16)))
    audited(jnp.full(3, 1e-4))
    largest = {m.op: m.magnitudes.largest for m in audited.audit.results if m.direction == FORWARD}
    assert largest["sqrt"] == pytest.approx(1e-2, rel=1e-2)  # its derivative is 50


# Indices


@pytest.mark.parametrize("low", [None, jnp.bfloat16])
def test_an_index_out_of_range_is_named_with_its_module(low: Any) -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.emb = nnx.Embed(10, 4, rngs=nnx.Rngs(0))

        def __call__(self, at: Any) -> Any:
            return self.emb(at).astype(jnp.float32).sum()

    def taken(x: Any, at: Any) -> Any:
        return jnp.take(x, at, axis=0).sum()

    at = jnp.array([1, 12])
    for fn, args, module in ((taken, (jnp.ones((10, 4)), at), ""), (Net(), (at,), "emb")):
        called = fn if low is None else autocast(fn, dtype=low)
        fault = fault_of(called if module else jax.value_and_grad(called), *args)
        assert fault.why == "an index is outside 0..9: take filled with NaN"
        assert (fault.kind, fault.module) == ("index", module)
        assert fault.source.startswith("test_locate.py")
    audited = audit(autocast(taken, dtype=F16))
    audited(jnp.ones((10, 4)), at)
    assert "an index is outside 0..9" in str(audited.audit.suggest())


BAD = jnp.array([1, -20])
OUTSIDE: list[tuple[Any, str]] = [
    (lambda t: t.at[12, 1].get(mode="fill"), "shape [10, 4]: get"),
    (lambda t: jnp.take(t, BAD, axis=0), "0..9: take"),
    (lambda t: jnp.take_along_axis(t, BAD[:, None] * -1, 0), "0..9: take_along_axis"),
    (
        lambda t: lax.gather(
            t, BAD[:, None], lax.GatherDimensionNumbers((1,), (0,), (0,)), (1, 4), mode="fill"
        ),
        "0..9: gather",
    ),
]


@pytest.mark.parametrize(("fn", "why"), OUTSIDE, ids=[why for _, why in OUTSIDE])
def test_the_range_that_an_index_is_outside_of_is_named(fn: Any, why: str) -> None:
    fault = fault_of(jax.jit(fn), jnp.ones((10, 4)))
    assert (fault.kind, fault.why) == ("index", f"an index is outside {why} filled with NaN")


@pytest.mark.parametrize("after", [lambda u: u, lambda u: u / 2, jnp.cumsum, optax.tree.norm])
def test_an_optimizer_that_breaks_is_blamed_whoever_reads_its_update(after: Any) -> None:
    tx, w = optax.adam(0.01), jnp.array([0, 1, 2], F16)  # whose eps is 0 in float16
    fault = fault_of(lambda w, state: after(tx.update(w, state, w)[0]), w, tx.init(w))
    assert (fault.op, fault.kind, fault.run) == ("div", "number", "float16")
    assert "scale_by_adam's eps is zero in float16" in fault.remedy
    assert [one.zeros > 0 for one in fault.inputs] == [True, True]


# What rounds to 1


def saturates(z: Any) -> Any:
    return -jnp.log(1 - jax.nn.sigmoid(z).astype(jnp.bfloat16)).mean()


def rounds_a_bound(z: Any) -> Any:
    p = jax.nn.sigmoid(z).astype(jnp.bfloat16)
    return -jnp.log1p(-jnp.clip(p, 1e-7, 1 - 1e-7)).mean()


def rounds_by_policy(z: Any) -> Any:
    return -jnp.log(1 - jax.nn.sigmoid(z)).mean()


def test_an_optimizer_s_root_of_a_negative_number_needs_other_code() -> None:
    """No smaller step helps there: it is a number of the schedule."""
    schedule = optax.scale_by_schedule(lambda count: jnp.sqrt(count - 1.0))
    fault: Any = locate(jax.jit(schedule.update), jnp.ones(2), schedule.init(jnp.ones(2)))
    assert (fault.op, fault.direction, fault.kind) == ("sqrt", "update", "operation")
    assert fault.remedy.startswith("Change the code")


def test_what_lower_marks_is_told_as_a_cast() -> None:
    audited = audit(autocast(lambda x: (1 / lower(x * 1e-9)).sum(), dtype=F16))
    fault = fault_of(audited.fn, jnp.ones(3))
    assert (fault.op, fault.kind, fault.run) == ("to", "underflow", "float16")
    assert "breaks at the cast test_locate.py:" in fault.remedy
    audited(jnp.ones(3))
    assert not audited.audit.suggest().rules, "a policy leaves it"


@pytest.mark.parametrize("gradients", [False, True])
def test_what_becomes_1_in_a_low_dtype_is_a_cause(gradients: bool) -> None:
    z = jnp.array([-8.0, 3.0, 8.0, 7.0])
    lowered = {"extends": "amp", "rules": {"all": "lower"}}
    for fn, kind in ((saturates, "saturation"), (rounds_a_bound, "number")):
        fault = fault_of(jax.value_and_grad(fn) if gradients else fn, z)
        assert (fault.op, fault.kind, fault.run) == ("to", kind, "bfloat16")
    inside = autocast(rounds_by_policy, dtype=jnp.bfloat16, policy=lowered)
    fault = fault_of(jax.value_and_grad(inside) if gradients else inside, z)
    assert (fault.op, fault.kind) == ("sigmoid", "saturation")
    assert fault.why == "its largest result is 1 in bfloat16, and below 1 in float32"
    fault = fault_of(rounds_by_policy, z * 10)  # in float32, too: nothing that a dtype does
    assert (fault.op, fault.kind) == ("log", "operation")


# What keeps a value from 0 or 1, and vanishes in a low dtype, with the op to blame.
VANISHES: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "bound": (lambda h: h / jnp.maximum(jnp.abs(h), 1e-9), "div", "underflow"),
    "add": (lambda h: h / (jnp.abs(h) + 1e-9), "add", "number"),
    "fill": (lambda h: jnp.log(jnp.where(h > 0, h, 1e-9)), "log", "underflow"),
    "reciprocal": (lambda h: 1 / (h + 1e-9), "add", "number"),
    "rsqrt": (lambda h: lax.rsqrt(h + 1e-12), "add", "number"),
    "upper bound": (
        lambda h: jnp.log1p(-jnp.minimum(jax.nn.sigmoid(h + 20), 1 - 1e-6)),
        "neg",
        "saturation",
    ),
}


@pytest.mark.parametrize("case", VANISHES)
def test_a_constant_that_vanishes_is_blamed_and_the_rows_help(case: str) -> None:
    fn, op, kind = VANISHES[case]
    policy: Any = polymp.policy({"extends": "amp", "rules": {"all": "lower"}})
    dtype, w, zeros = "float16", jnp.ones((4, 4)), jnp.zeros((8, 4))

    def loss(w: Any) -> Any:
        return fn(zeros @ w).sum()

    assert jnp.isfinite(loss(w))
    fault = fault_of(autocast(loss, dtype=dtype, policy=policy), w)
    assert (fault.op, fault.kind, fault.run) == (op, kind, "float16")
    assert fault.why.endswith("it is cast to float16") == (kind != "number")
    for _ in range(2):  # numbers beyond float16 are seen once nothing breaks before
        step = audit(autocast(loss, dtype=dtype, policy=policy))
        if jnp.isfinite(step(w)):
            break
        asked = step.audit.suggest(policy)
        policy, dtype = asked.apply(policy), asked.dtype or dtype
    assert jnp.isfinite(autocast(loss, dtype=dtype, policy=policy)(w))


def test_a_constant_that_nothing_hangs_on_is_not_blamed() -> None:
    policy = {"extends": "amp", "rules": {"all": "lower"}}

    def fn(x: Any) -> Any:
        return jnp.log((x - x) * 0 + (x + 1e-9) * 0)

    fault = fault_of(autocast(fn, dtype="float16", policy=policy), jnp.ones(4))
    assert (fault.op, fault.kind) == ("log", "operation")


def test_arguments_beside_modules_go_by_the_names_of_their_parameters() -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.parts = nnx.List([nnx.Linear(3, 2, rngs=nnx.Rngs(0))])

        def __call__(self, x: Any) -> Any:
            return self.parts[0](x)

    def step(model: Net, batch: Any) -> Any:
        return model(batch["x"]).sum()

    net, bad = Net(), jnp.full((4, 3), jnp.nan)
    fault = locate(step, net, {"x": bad})
    assert fault.why.startswith("batch['x'] is not finite")
    assert fault.inputs[1].name == "model.parts[0].kernel"
    fault = locate(net, bad)
    assert fault.why.startswith("x is not finite")
    assert fault.inputs[1].name == "self.parts[0].kernel"


# What the program has that is not finite


def test_a_captured_array_with_nan_is_an_input() -> None:
    weight = jnp.array([1.0, jnp.nan, 2.0])

    def fn(x: Any) -> Any:
        return (x * weight).sum()

    loop = jax.jit(lambda x: lax.map(fn, x[None]).sum())
    for whole in (fn, jax.jit(fn), jax.jit(jax.value_and_grad(autocast(fn))), loop):
        fault = fault_of(whole, jnp.ones(3))
        assert (fault.op, fault.kind, fault.found) == ("mul", "input", "NaN")
        assert fault.why == "a captured array (float32[3]) is not finite before any op runs"
    scale = jnp.float32(jnp.nan)
    assert "a captured array (float32[])" in fault_of(jax.jit(lambda x: x * scale), X).why
    held = jax.new_ref(weight)
    fault = fault_of(lambda x: x * held[...], jnp.ones(3))
    assert "a captured array (Ref{float32[3]})" in fault.why


def test_what_is_written_into_a_reference_is_not_put_down_to_what_reads_it() -> None:
    def write(x: Any) -> Any:
        held = jax.new_ref(x)
        held[...] = jnp.log(-x)
        return held[...] * 2

    def add_up(x: Any) -> Any:
        total = jax.new_ref(x)

        def turn(carry: Any, n: Any) -> Any:
            total[...] = total[...] * 2 + jnp.log(1 - n)
            return carry + total[...], None

        return lax.scan(turn, x, jnp.arange(3.0))[0]

    for fn in (write, jax.jit(write), autocast(write), add_up):
        assert fault_of(fn, jnp.ones(3)).op == "log"
        (audited := polymp.jax.audit(fn))(jnp.ones(3))
        assert audited.audit.left_out.keys() == {"on references, which jax.new_ref makes"}


def test_infinities_of_a_captured_array_may_be_those_of_a_mask() -> None:
    mask = jnp.array([[0.0, 0.0], [-jnp.inf, -jnp.inf]])
    fault = fault_of(jax.jit(lambda x: jax.nn.softmax(x + mask).sum()), jnp.ones((2, 2)))
    assert (fault.op, fault.found) == ("sub", "NaN")
    assert "from infinities that the program has as constants" in fault.why


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


@pytest.mark.sized
@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_what_the_program_has_that_is_not_finite_is_put_down_to_it(
    dtype: str | None, wrapped: str
) -> None:
    def region(f: Any) -> Any:
        return WRAPPED[wrapped](autocast(f, dtype=dtype) if dtype else f)

    turns = [*NOT_FINITE.items()]
    at = [*WRAPPED].index(wrapped)  # in `make test` a third of them, each in one of the cases
    for name, (fn, op) in turns if LONG else turns[at::3]:

        def turn(total: Any, x: Any, w: Any, fn: Any = fn) -> Any:
            return total + fn(jnp.outer(x, x) @ w).sum()

        def scan(w: Any, turn: Any = turn) -> Any:
            return lax.scan(lambda c, x: (turn(c, x, w), None), jnp.float32(0), X)[0]

        for whole in (lambda w, fn=fn: fn(X @ w).sum(), scan):
            fault = fault_of(region(whole), jnp.ones((4, 4)))
            assert (fault.op, fault.kind) == (op, "operation"), name
            assert "constant" in fault.why, name

    def stale(w: Any, state: Any) -> Any:
        return lax.scan(lambda c, x: (c * 0.9 + (x @ w).sum(), None), state, X)[0]

    fault = fault_of(region(stale), jnp.ones((4, 4)), jnp.float32(jnp.nan))
    assert (fault.kind, fault.why) == ("input", "state is not finite before any op runs")


def test_what_breaks_in_a_shard_map_is_put_down_to_it() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    spec = jax.sharding.PartitionSpec("d")
    mapped = jax.shard_map(lambda x: jnp.exp(x * 1000), mesh=mesh, in_specs=spec, out_specs=spec)
    fault = fault_of(lambda x: mapped(x).sum(), jnp.ones(4))
    assert (fault.op, fault.kind, fault.found) == ("shard_map", "inside", "Inf")
    assert locate(lambda x: mapped(x).sum(), -jnp.ones(4)) is None
    assert fault.remedy.endswith("if it has collectives, in jax.vmap(function, axis_name=...).")
    in_vmap = jax.vmap(lambda x: lax.psum(jnp.exp(x * 1000), "d"), axis_name="d")
    assert fault_of(in_vmap, jnp.ones((1, 4))).op == "exp"


def test_an_infinite_loss_is_put_down_to_the_constant_that_it_is_made_of() -> None:
    def rows(h: jax.Array) -> jax.Array:
        return (h @ h).at[:, 2].set(jnp.inf)

    def loss(h: jax.Array) -> jax.Array:
        return rows(h).sum()

    low = jax.jit(autocast(loss, dtype=jnp.float16))
    for fn in (loss, jax.value_and_grad(loss), low):
        fault = fault_of(fn, jnp.ones((4, 4)))
        assert (fault.kind, fault.why) == ("operation", CONSTANT)
    remedy = fault_of(lambda h: (h * jnp.inf).sum(), jnp.ones(4, jnp.float16)).remedy
    assert remedy.startswith("Use a constant that is finite in float16, or run mul in float32.")
    audited = audit(rows)  # which may be a mask that it returns
    audited(jnp.ones((4, 4)))
    assert audited.audit.fault is None
    assert locate(rows, jnp.ones((4, 4))) is None


def test_functions_of_another_framework_are_not_called_healthy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    numpys = np.zeros(3)
    assert locate(lambda: np.add(numpys, 1.0)) is None
    assert locate(lambda x: (x // 0).sum(), jnp.arange(3)) is None
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert all(line.startswith("locate: JAX ran no op on floats in this call") for line in said)


@pytest.mark.parametrize("tool", ["audit", "explain", "locate"])
def test_arguments_are_free_when_a_tool_has_ended(tool: str) -> None:
    """None waits for Python's collector, which may come many steps later."""
    step = jax.jit(jax.grad(autocast(lambda w, x: jnp.tanh(x @ w).sum())))

    def looked_at() -> int:
        w, x = jnp.full((4, 4), jnp.inf), jnp.ones((2, 4))
        if tool == "audit":
            (audited := polymp.jax.audit(step))(w, x)
            assert audited.audit.steps == 1
        else:
            getattr(polymp.jax, tool)(step, w, x)
        del w, x
        return len(jax.live_arrays())

    looked_at()
    gc.collect()
    gc.disable()
    try:
        assert len({looked_at() for _ in range(3)}) == 1
    finally:
        gc.enable()


def test_other_loss_scales_are_tried_without_compiling_again() -> None:
    """The step with other arrays is the program that was compiled to find the fault."""
    x = jnp.ones((2, 4))
    events: list[str] = []

    def step(scaler: GradScaler, w: jax.Array) -> Any:
        loss = autocast(lambda w: (x @ w).sum(), dtype="float16")
        return scaler.step(jax.grad(lambda w: scaler.scale(loss(w)))(w), lambda g, w: w - g, w)

    def listener(event: str, *_: object, **__: object) -> None:
        events.append(event)

    def compiled(scale: float, divisor: int) -> int:
        events.clear()
        fault: Any = locate(step, GradScaler(init_scale=scale), jnp.ones((4, 4)))
        assert f"Divide the loss scale by {divisor}," in fault.remedy
        return sum("backend_compile" in event for event in events)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        compiled(2.0**16, 2)  # with all that is compiled once in a process
        assert 0 < compiled(2.0**30, 2**15) < 12  # of which two are twins; six scales are tried
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def test_an_input_that_a_loop_reads_in_a_later_round_is_named() -> None:
    def swapping(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.scan(lambda c, _: ((c[1], c[0]), jnp.sin(c[0])), (a, b), None, length=2)[1]

    fault = fault_of(swapping, jnp.float32(1), jnp.float32(jnp.inf))
    assert (fault.kind, fault.why) == ("input", "b is not finite before any op runs")
