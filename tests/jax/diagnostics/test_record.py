"""`record`: the function itself runs, and its arrays are summed up as numpy does it."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import lax

import polymp
from polymp.backends.jax.diagnostics.perturb import rounds_operands
from polymp.diagnostics import run_record
from polymp.diagnostics.run_record import RecordedArray
from polymp.jax import GradScaler, autocast, record, scoped
from tests.shared import test_record_faults as faults
from tests.support import run_records
from tests.support.decoder import Config
from tests.support.jax.scaler_tools import bits

LAYERS, WIDTH = 3, 8


def rows(fn: Callable[..., Any], *args: Any, probes: int = 0, **options: Any) -> Any:
    recorded = record(None, fn, probes=probes, **options)
    recorded(*args)
    return recorded.record.steps[0].arrays


def kinds(found: Any, kind: str) -> dict[str, RecordedArray]:
    return {row.name: row for row in found if row.kind == kind}


def moved(row: RecordedArray) -> float:
    """The spread of an array, as its projections have it."""
    return float(np.sqrt(np.mean(np.square(row.spread[run_record.PROJECTIONS]))))


def block(h: Any, w: Any) -> Any:
    with jax.named_scope("block"):
        return h + jnp.tanh(h @ w["w"] + w["b"])


def scanned(params: Any, x: Any) -> Any:
    h, _ = lax.scan(lambda h, w: (block(h, w), None), x, params)
    return jnp.mean(h**2)


def unrolled(params: Any, x: Any) -> Any:
    h = x
    for at in range(LAYERS):
        h = block(h, jax.tree.map(lambda a: a[at], params))  # noqa: B023
    return jnp.mean(h**2)


def parameters() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(LAYERS, WIDTH, WIDTH)) * WIDTH**-0.5
    params = {"w": w.astype(np.float32), "b": np.zeros((LAYERS, WIDTH), np.float32)}
    return jax.tree.map(jnp.asarray, params), jnp.asarray(rng.normal(size=(4, WIDTH)), np.float32)


def adam_step(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, state: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, state = optax.adam(1e-2).update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


# Numbers


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    bad = rng.normal(size=100).astype(np.float32)
    bad[:5] = np.inf, -np.inf, np.nan, 0.0, -0.0
    return {
        "float32": rng.normal(size=(3, 50)).astype(np.float32),
        "float16": rng.normal(size=(3, 50)).astype(np.float16),
        "bfloat16": rng.normal(size=(3, 50)).astype(ml_dtypes.bfloat16),
        "scalar": np.float32(3.25),
        "empty": np.zeros((0, 3), np.float32),
        "bad": bad,
        "all bad": np.full(3, np.nan, np.float32),
        "one block": rng.normal(size=4096).astype(np.float32),
        "blocks": rng.normal(size=(3, 5000)).astype(np.float32),
        "huge": rng.uniform(-3e38, 3e38, 5000).astype(np.float32),
        "tiny": (rng.uniform(1, 9, 5000) * 1e-30).astype(np.float32),
        "offset": (rng.normal(size=5000) * 1e-3 + 1).astype(np.float32),
        "integers": rng.integers(-(2**31), 2**31 - 1, 5000).astype(np.int32),
        "bools": np.array([True, False, True]),
        # Beyond what is summed up in numpy.
        "large": rng.normal(size=(3, 2**17)).astype(np.float32),
        "large and bad": np.tile(np.append(bad, 1.0).astype(np.float16), 2**13),
        "large integers": np.arange(2**19, dtype=np.int32),
    }


def test_numbers_are_those_of_the_definition() -> None:
    def fn(given: Any) -> Any:
        return {name: x * jnp.float32(1) for name, x in given.items()}

    found = kinds(rows(fn, arrays()), "input")
    for name, x in arrays().items():
        row, (values, zeros, bad) = found[f"given['{name}']"], run_records.summary(x)
        np.testing.assert_allclose(row.values, values, 1e-14, 1e-14 * max(map(abs, values)))
        assert (row.zeros, row.bad, row.shape, row.dtype) == (zeros, bad, x.shape, x.dtype.name)


def test_a_change_of_an_array_is_summed_up_as_it_is() -> None:
    old = {n: x for n, x in arrays().items() if np.issubdtype(x.dtype, np.floating) and x.size}
    del old["all bad"], old["huge"]
    for name, x in old.items():
        found = rows(lambda x: x * 1.5, jnp.asarray(x), probes=2)
        (row,) = (r for r in found if r.kind == "result" and r.name == "mul")
        size = np.sqrt(np.mean(np.square(row.spread)))
        assert 0 < size < 2 * float(jnp.finfo(x.dtype).eps) * row.values[0], name


# Rows


def test_a_scan_has_the_rows_of_the_same_model_unrolled() -> None:
    graded = (jax.value_and_grad(fn, (0, 1)) for fn in (scanned, unrolled))
    one, other = (rows(fn, *parameters(), probes=16) for fn in graded)
    # Unrolled, jax.grad pads the gradients of slices, and adds them up.
    summed = [(LAYERS, WIDTH), (LAYERS, WIDTH, WIDTH)]
    other = [r for r in other if r.kind != "result" or r.shape not in summed]
    assert len(one) == len(other) > 40
    for a, b in zip(one, other, strict=True):
        assert (a[:3], a[4:10]) == (b[:3], b[4:10])
        np.testing.assert_allclose(a.values, b.values, 1e-4, 1e-6)
        assert moved(a) == moved(b) == 0 or 0.4 < moved(a) / moved(b) < 2.5
    assert [r.module for r in one if r.name == "tanh"] == ["block"] * LAYERS


def test_layers_that_are_stacked_for_a_scan_raise_no_alarm() -> None:
    """The biases of their ends, stacked, are zeros of the size of those in the middle of one."""
    params, x = parameters()
    wide = {"v": jnp.tile(params["w"], 3), "c": jnp.zeros((LAYERS, LAYERS * WIDTH))}

    def layer(h: Any, w: Any) -> Any:
        return h + jnp.tanh(h @ w["v"] + w["c"]) @ w["v"].T + w["b"]

    def recorded(loss: Callable[..., Any], params: Any) -> Any:
        step = record(None, adam_step(loss))
        step(params, optax.adam(1e-2).init(params), x)
        return step.record

    def scan(by: float) -> Callable[..., Any]:
        def loss(layers: Any, x: Any) -> Any:
            return by * jnp.mean(lax.scan(lambda h, w: (layer(h, w), None), x, layers)[0] ** 2)

        return loss

    stacked = {"b": params["b"], **wide}
    layers = [jax.tree.map(lambda a: a[at], stacked) for at in range(LAYERS)]  # noqa: B023
    one = recorded(lambda w, x: jnp.mean(functools.reduce(layer, w, x) ** 2), layers)
    for by in (1.0, 1.001):
        found = polymp.compare(one, recorded(scan(by), stacked))
        assert found.explained == (by == 1.0), str(found)


def test_a_reversed_scan_runs_backwards() -> None:
    def fn(x: Any) -> Any:
        return lax.scan(lambda c, x: (c, x * 2), 0.0, x, reverse=True)[1]

    found = rows(fn, jnp.arange(1.0, 4.0))
    assert [r.values[0] for r in found if r.name == "mul"] == [6.0, 4.0, 2.0]
    assert kinds(found, "result")["result"].reads == (1, 2, 3)


def test_reads_are_the_rows_that_made_the_operands() -> None:
    def fn(x: Any, w: Any) -> Any:
        h = jax.jit(jnp.exp)(x.T.reshape(2, 3))
        return jnp.sum(jnp.sin(w) * h.astype(jnp.bfloat16).astype(jnp.float32)[:1])

    found = rows(fn, jnp.ones((3, 2)), jnp.ones(3))
    assert [(r.kind, r.name, r.reads) for r in found] == [
        ("input", "x", ()), ("result", "exp", (0,)), ("input", "w", ()), ("result", "sin", (2,)),
        ("result", "to", (1,)), ("result", "to", (4,)), ("result", "mul", (3, 5)),
        ("result", "sum", (6,)), ("result", "result", (7,)),
    ]  # fmt: skip


def test_inputs_are_integers_and_constants_too() -> None:
    table = jnp.arange(12.0).reshape(4, 3)
    found = rows(lambda at, x: x[at] * table[0], jnp.array([2, 0]), table)
    inputs = kinds(found, "input")
    assert inputs["at"].dtype == "int32"
    assert inputs["at"].values[:2] == (2.0, 2**0.5)
    assert inputs["constant 1"].shape == (4, 3)
    (product,) = (r for r in found if r.name == "mul")
    assert {found[at].name for at in product.reads} >= {"constant 1"}


def test_an_update_has_the_name_of_its_argument() -> None:
    params, x = parameters()
    state = optax.adam(1e-2).init(params)
    step = jax.jit(adam_step(scanned))
    found = rows(step, params, state, x, probes=2)
    new, new_state, _ = step(params, state, x)
    updates = kinds(found, "update")
    assert set(updates) == {"params['w']", "params['b']"} | {
        f"state[0].{of}['{name}']" for of in ("mu", "nu") for name in "wb"
    }
    for row, change in (
        (updates["params['w']"], np.asarray(new["w"]) - np.asarray(params["w"])),
        (updates["state[0].mu['b']"], np.asarray(new_state[0].mu["b"])),
    ):
        np.testing.assert_allclose(row.values, run_records.summary(change)[0], 1e-3, 1e-5)
        assert moved(row) > 0
    assert "sqrt" not in kinds(found, "result")  # of the optimizer
    assert kinds(found, "result")["result[2]"].shape == ()


def test_a_gradient_has_the_name_of_its_argument() -> None:
    found = rows(jax.grad(scanned), *parameters())
    assert set(kinds(found, "gradient")) == {"params['w']", "params['b']"}
    assert not kinds(found, "update")

    def plain(w: Any, x: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(scanned)(w, x))

    assert set(kinds(rows(plain, *parameters()), "update")) == {"w['w']", "w['b']"}


def test_loops_and_branches() -> None:
    def fn(x: Any, going: Any) -> Any:
        h = lax.cond(going, jnp.sin, jnp.cos, x)
        return lax.while_loop(lambda h: jnp.sum(h) < 100, lambda h: jnp.exp(h) * 2, h)

    recorded = record(None, fn, probes=4)
    x = jnp.ones(3)
    assert bits(recorded(x, True)) == bits(fn(x, True))
    (step,) = recorded.record.steps
    names = [r.name for r in step.arrays if r.kind == "result"]
    assert names == ["sin", "while_loop", "result"]
    assert step.left_out == {"in a while loop": 3}
    assert moved(step.arrays[-2]) > 10 * moved(step.arrays[1]) > 0


# Module paths


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(4, name="out")(jnp.tanh(linen.Dense(8, name="first")(x)))


def test_module_paths_and_names_of_parameters() -> None:
    x = jnp.ones((2, 8))
    model = Linen()
    params = model.init(jax.random.key(0), x)
    found = rows(lambda params, x: model.apply(params, x), params, x)
    products = [r.module for r in found if r.name == "linear"]
    assert products == ["Linen.first", "Linen.out"]
    assert "params['params']['out']['kernel']" in kinds(found, "input")

    def net() -> Any:
        return nnx.Sequential(*(nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for _ in range(2)))

    found = rows(lambda model, x: model(x), net(), x, modules=["layers.1"])
    assert [r.module for r in found if r.name == "linear"] == ["layers.1"]
    assert {f"model.layers[{at}].kernel" for at in range(2)} <= set(kinds(found, "input"))

    for each, paths in ((net(), {""}), (scoped(net()), {"layers.0", "layers.1"})):
        graph, state = nnx.split(each)
        found = rows(lambda state, x, graph=graph: nnx.merge(graph, state)(x), state, x)
        assert {r.module for r in found if r.name == "linear"} == paths

    mlp = equinox.nn.MLP(8, 4, 8, 1, key=jax.random.key(0))
    found = rows(equinox.filter_jit(lambda mlp, x: mlp(x)), mlp, x[0])
    assert "linear" in {r.name for r in found}


# Spreads


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_run_in_float64_differs_by_less_than_six_spreads(dtype: Any) -> None:
    fn = autocast(unrolled, dtype=dtype) if dtype else unrolled
    params, x = parameters()
    low = rows(jax.value_and_grad(fn), params, x, probes=16)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: a.astype(np.float64), (params, x))
        exact = {k: r for k, r in last(rows(jax.value_and_grad(unrolled), *wide)).items()}
    assert set(last(low)) == set(exact)
    for name, row in last(low).items():
        off = np.abs(np.subtract(row.values, exact[name].values))
        assert off.max() > 0, name
        assert np.all(off <= 6 * max(row.spread)), name


def last(found: Any) -> dict[str, RecordedArray]:
    return {r.name: r for r in found if r.kind == "gradient" or r.name.startswith("result")}


def test_a_product_that_rounds_its_operands_says_so() -> None:
    """By its precision and the device; tests on a GPU show that rounding explains what it does."""

    def to(device: Any, precision: Any = None, dtype: Any = jnp.float32) -> str:
        x = jnp.ones((2, 2), dtype)
        eqn = jax.make_jaxpr(lambda x: lax.dot(x, x, precision=precision))(x).eqns[0]
        return rounds_operands(eqn, device)

    gpu, old = (SimpleNamespace(platform="gpu", compute_capability=of) for of in ("9.0", "7.5"))
    tpu, cpu = (SimpleNamespace(platform=name, compute_capability="") for name in ("tpu", "cpu"))
    assert (to(gpu), to(gpu, "high"), to(gpu, "highest")) == ("tf32", "tf32", "")
    assert (to(old), to(cpu), to(gpu, dtype=jnp.bfloat16)) == ("", "", "")
    assert (to(tpu), to(tpu, ("default", "highest")), to(tpu, "highest")) == (*["bfloat16"] * 2, "")
    assert to(old, lax.DotAlgorithmPreset.TF32_TF32_F32) == "tf32"


def test_a_mask_is_the_same_in_all_probes() -> None:
    def fn(x: Any, key: Any) -> Any:
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x * 2, 0)

    found = rows(fn, jnp.full((512, 512), 0.3), jax.random.key(0), probes=16)
    assert all(moved(r) == 0 for r in found if r.name not in ("mul", "where", "result"))
    assert 0 < moved(found[-1]) < 1e-6
    (drawn,) = (r for r in rows(lambda k: jax.random.normal(k, (64,)), jax.random.key(0), probes=2)
                if r.kind == "result" and r.name == "result")  # fmt: skip
    assert moved(drawn) > 0  # by the function that made them normal


CHOICES: dict[str, Any] = {
    "count": lambda h: (h > 0).astype(jnp.bfloat16).sum(-1, keepdims=True),
    "product": lambda h: (h > 0).astype(h.dtype) @ jnp.ones((8, 8)),
    "sums": lambda h: jax.ops.segment_sum(jnp.ones(5), h.argmax(-1), 8),
    "largest": lambda h: h >= jax.ops.segment_max(h, jnp.arange(5) // 2, 5),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_by_what_is_not_rounded_hides_no_bug(choice: str) -> None:
    x, *weights = (jax.random.normal(jax.random.key(at), (n, 8)) for at, n in enumerate((5, 8, 8)))

    def run(scale: float) -> Any:
        def fn(x: Any) -> Any:
            h = x @ weights[0]
            return (h * CHOICES[choice](h).astype(int) * scale) @ weights[1]

        recorded = record(None, fn)
        recorded(x)
        return recorded.record

    first = polymp.compare(run(1.0), run(1.3)).first
    assert first is not None
    assert first.array.name == "mul"


# Calls


def test_results_are_what_they_are_without(tmp_path: Path) -> None:
    params, x = parameters()
    state = optax.adam(1e-2).init(params)
    step = jax.jit(adam_step(autocast(scanned)), donate_argnums=(0, 1))
    want = step(*jax.tree.map(jnp.copy, (params, state)), x)
    recorded = record(tmp_path / "run.rec", step, probes=2)
    assert bits(recorded(params, state, x)) == bits(want)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    assert recorded.record == run_record.read(tmp_path / "run.rec")


def test_modules_are_changed_in_place_once() -> None:
    def made() -> Any:
        rngs = nnx.Rngs(0)
        return nnx.Sequential(nnx.Linear(8, 1, rngs=rngs), nnx.BatchNorm(1, rngs=rngs))

    def step(model: Any, x: Any) -> Any:
        value, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 3))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model, nnx.Param), gradients))
        return value

    x = jax.random.normal(jax.random.key(0), (4, 8))
    model, other = made(), made()
    found = rows(step, model, x)
    step(other, x)
    assert bits(nnx.state(model)) == bits(nnx.state(other))
    assert {"model.layers[0].kernel", "model.layers[1].mean"} <= set(kinds(found, "update"))


def test_an_optimizer_in_a_branch_of_a_scaler() -> None:
    optimizer = optax.adam(1e-2)

    def step(scaler: Any, params: Any, state: Any, x: Any) -> Any:
        def update(gradients: Any, params: Any, state: Any) -> Any:
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        gradients = jax.grad(lambda p: scaler.scale(scanned(p, x)))(params)
        return scaler.step(gradients, update, params, state)

    params, x = parameters()
    given = GradScaler(), params, optimizer.init(params), x
    found = rows(step, *given, probes=2)
    updates = kinds(found, "update")
    assert {"params['w']", "params['b']", "state[0].mu['w']"} <= set(updates)
    # The new weight is rounded, by a share of itself.
    assert moved(updates["params['w']"]) > 1e-8 * kinds(found, "input")["params['w']"].values[1]


def test_every_and_steps(tmp_path: Path) -> None:
    path = tmp_path / "run.rec"
    recorded = record(path, lambda x: x * 2, probes=0, every=2, steps=2)
    for at in range(7):
        assert recorded(jnp.float32(at)) == 2 * at
    assert [s.number for s in run_record.read(path).steps] == [0, 2]
    assert recorded.record.header["framework"] == "jax"


def test_an_error_of_the_function_passes() -> None:
    def fn(x: Any) -> Any:
        if not isinstance(x, jax.core.Tracer) and x > 1:
            raise KeyError("x")
        return x * 2

    recorded = record(None, fn, probes=0)
    recorded(jnp.float32(1))
    with pytest.raises(KeyError):
        recorded(jnp.float32(2))
    recorded(jnp.float32(1))
    assert [s.number for s in recorded.record.steps] == [0, 2]


def test_only_functions_are_recorded_and_not_in_traced_code() -> None:
    with pytest.raises(TypeError, match="needs a function, got 3"):
        record(None, 3)
    with pytest.raises(TypeError, match=r"got None\. Write wrapped = record\(path, jax\.jit\(step"):
        record("run.rec")
    with pytest.raises(TypeError, match="Record the outermost function"):
        jax.jit(record(None, jnp.sin))(jnp.ones(3))


def test_updates_of_other_names_and_order_are_paired_by_their_parameters() -> None:
    part, net, turned = (namedtuple("Tree", names) for names in ("b", "one two", "two one"))

    def loss(net: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x * net.one.b) * net.two.b) ** 2)

    def by_hand(own: Any, state: Any, x: Any, rate: float = 1e-2) -> Any:
        (m, v, last), (value, g) = state, jax.value_and_grad(loss)(own, x)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, g)
        one, two = 1 - 0.9 ** (last + 1), 1 - 0.999 ** (last + 1)
        change = jax.tree.map(lambda m, v: rate * m / one / ((v / two) ** 0.5 + 1e-8), m, v)
        return jax.tree.map(jnp.subtract, own, change), (m, v, last + 1), value

    one, two, x = jax.random.normal(jax.random.key(0), (3, 80))
    first, own = net(part(one), part(two)), turned(part(two), part(one))
    (optimizer := record(None, adam_step(loss)))(first, optax.adam(1e-2).init(first), x)
    for rate in (1e-2, 2e-2):
        hand = record(None, functools.partial(by_hand, rate=rate))
        hand(own, (*jax.tree.map(jnp.zeros_like, (own, own)), jnp.zeros(())), x)
        found = polymp.compare(optimizer.record, hand.record)
        assert found.explained == (rate == 1e-2), str(found)


def _two_steps(jitted: bool, edit: float = 0.0) -> run_record.RunRecord:
    """Two steps of a training; between them a weight is changed by `edit`."""
    params, x = parameters()
    state, step = optax.adam(1e-2).init(params), adam_step(unrolled)
    recorded = record(None, jax.jit(step) if jitted else step)
    for _ in range(2):
        params, state, _ = recorded(params, state, x)
        params = {**params, "w": params["w"] + edit}
    made: run_record.RunRecord = recorded.record
    return made


def test_a_second_step_begins_with_weights_that_jit_has_rounded_in_another_way() -> None:
    """The function itself makes them, and not the program that is recorded."""
    jitted = _two_steps(True)
    found = polymp.compare(jitted, _two_steps(False))
    assert found.explained, str(found)
    found = polymp.compare(jitted, _two_steps(True, edit=1e-3))
    assert found.first is not None
    assert (found.step, found.first.array.name) == (1, "params['w']"), str(found)


def test_a_sum_of_zero_has_no_rounding_relative_to_itself() -> None:
    x = jnp.array([1.0, 2.0, 3.0, 6.0])
    recorded = record(None, lambda x: jnp.sum(x - x.mean()))
    recorded(x)
    last = recorded.record.steps[0].arrays[-1]
    assert (last.values[run_record.RMS], last.own) == (0.0, 0.0)


# On a GPU, against a CPU and, on the GPU, against torch


CONFIG = Config(layers=2, layer=1)


def test_a_product_whose_terms_cancel_raises_no_alarm_in_a_region_without_probes() -> None:
    def fn(x: Any) -> Any:
        return (x - x.mean(0)).T @ jnp.ones((64, 3))

    both = [record(None, f, probes=0) for f in (fn, autocast(fn))]
    for recorder in both:
        recorder(jax.random.normal(jax.random.key(0), (64, 8)))
    assert polymp.compare(*(recorder.record for recorder in both)).explained


def test_what_is_read_by_noise_alone_is_no_difference() -> None:
    """The gradient of the mean in a variance sums what it negates, to zero, in one of two ways."""
    a, x = (jax.random.normal(jax.random.key(n), s) for n, s in enumerate([(16, 32), (8, 16)]))

    def loss(a: Any, x: Any) -> Any:
        h = x @ a / 4
        return jnp.mean((h * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5) - jnp.cos(h)) ** 2)

    both = [record(None, jax.jit(jax.grad(f))) for f in (loss, autocast(loss))]
    for recorder in both:
        recorder(a, x)
    assert polymp.compare(*(recorder.record for recorder in both)).explained


def test_a_mean_of_means_is_no_difference_and_a_gradient_of_zeros_is_named_so() -> None:
    def gradient(f: Any) -> run_record.RunRecord:
        recorder = record(None, jax.jit(jax.grad(f)))
        recorder(jax.random.normal(jax.random.key(0), (8, 4)))
        return recorder.record

    means = gradient(lambda x: jax.vmap(lambda row: jnp.sin(row).mean())(x).mean())
    assert polymp.compare(means, gradient(lambda x: jnp.sin(x).mean())).explained
    with pytest.raises(polymp.errors.RecordError, match="All results of 'other' are zero"):
        polymp.compare(means, gradient(lambda x: lax.stop_gradient(x).mean()))


def test_a_product_whose_terms_cancel_is_moved_by_these() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 4096)), jnp.float32)
    x -= x.mean(-1, keepdims=True)
    alone, probed = (rows(lambda x: x @ jnp.ones(4096), x, probes=n) for n in (0, 16))
    one, other = (next(r for r in found if r.name == "linear") for found in (alone, probed))
    size = one.own * one.values[run_record.RMS]
    assert moved(other) / 3 < size < moved(other) * 3


def on_a_gpu(test: Any) -> Any:
    needs = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU and jax for it")
    return pytest.mark.gpu(needs(test))


def on_gpu(low: str, precision: str | None = "highest") -> run_record.RunRecord:
    with jax.default_matmul_precision(precision):
        return faults.recorded("nnx", 0, config=CONFIG._replace(low=low))


@on_a_gpu
@pytest.mark.parametrize(
    ("low", "precision"), [("", "highest"), ("", None), ("bfloat16", "highest")]
)
def test_a_gpu_and_a_cpu_raise_no_alarm(low: str, precision: str | None) -> None:
    """Also where the GPU may take TF32."""
    with jax.default_device(jax.devices("cpu")[0]):
        cpu = faults.recorded("nnx", 0, config=CONFIG._replace(low=low))
    comparison = polymp.compare(on_gpu(low, precision), cpu)
    assert comparison.explained, str(comparison)
    assert max(faults.shares(comparison)) > 0, "the two are one"


@on_a_gpu
def test_both_frameworks_on_a_gpu_raise_no_alarm() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU for torch")
    theirs = faults.recorded("torch", 0, config=CONFIG, device="cuda")
    comparison = polymp.compare(on_gpu(""), theirs)
    assert comparison.explained, str(comparison)


def test_products_of_8_bit_floats_and_references() -> None:
    def step(x: Any, w: Any) -> Any:
        total = jax.new_ref(jnp.zeros(()))
        low = (each.astype(jnp.float8_e4m3fn) for each in (x, w))
        total[...] += jnp.sum(lax.dot(*low, preferred_element_type=jnp.float32))
        return 2 * total[...]

    for probes in (0, 2):
        recorded = record(None, step, probes=probes)
        assert recorded(jnp.ones((4, 8)), jnp.ones((8, 4))) == 256
        (found,) = recorded.record.steps
        names = [a.name for a in found.arrays]
        assert names == ["x", "to", "w", "to", "linear", "sum", "add", "mul", "result"]
        assert found.arrays[names.index("mul")].reads == (names.index("add"),)
        assert sum(found.left_out.values()) == 4


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["plain", "jitted"])
def test_references_of_the_caller_are_written_into_once(jit: Any) -> None:
    calls, x = jax.new_ref(jnp.zeros(())), jnp.full((2, 2), -1.0)

    @jit
    def step(x: Any) -> Any:
        calls[...] += 1
        return jnp.log(x).sum()  # not finite, so that the program itself may run to find out why

    recorded, audited = record(None, step, probes=2), polymp.jax.audit(step)
    recorded(x), audited(x)
    for fault in (polymp.jax.locate(step, x), audited.audit.fault):
        assert fault is not None
        assert fault.op == "log"
    assert calls[...] == 2


def test_a_module_with_a_dict_is_recorded() -> None:
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    model.options = {"a": 1}
    recorded = record(None, lambda model, x: model(x))
    recorded(model, jnp.ones((1, 2)))
    assert recorded.record.steps


@pytest.mark.parametrize("count", [16, 300])  # numpy tells how far 16 x 16 numbers are moved
def test_masks_of_other_numbers_are_no_difference_and_hide_none(count: int) -> None:
    x = jax.random.normal(jax.random.key(0), (count, count)) / 4

    def run(value: float, same: Any = lambda x: x, future: int = 0) -> run_record.RunRecord:
        seen = np.tri(count, k=future, dtype=bool)
        recorded = record(None, lambda x: jax.nn.softmax(jnp.where(seen, same(x @ x), value)) @ x)
        recorded(x)
        return recorded.record

    ours = run(-1e9)
    for value in (-np.inf, float(jnp.finfo("float32").min)):
        found = polymp.compare(ours, run(value, lambda x: jnp.log(jnp.exp(x))))
        assert found.explained, str(found)
        assert polymp.compare(ours, run(value, future=1)).first.array.name == "constant 1"
