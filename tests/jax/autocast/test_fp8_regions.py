"""Regions with products in 8 bits: what is told, what is saved, and faults, which all show."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import checkify, sparse

import polymp
from polymp.backends.jax.autocast import fp8_contraction
from polymp.jax import GradScaler, autocast, explain, freeze, locate, lower
from tests.support.jax.fp8_models import NAMES, Llama, batch, layers, loss, policy
from tests.support.jax.hlo import residual_bytes
from tests.support.sizes import LONG, size

X, W = jnp.ones((32, 64)), jnp.ones((64, 48))


def test_one_product_of_a_model_in_8_bits_is_told():
    report = explain(jax.grad(autocast(loss, policy=policy("rowwise"))), layers(), batch())
    products = report.of("linear")
    assert {(call.recipe, call.run) for call in products} == {("rowwise", "float8_e4m3fn")}
    assert set(report.flops) == {"float8_e4m3fn"}


def test_freeze_leaves_the_weights_of_8_bit_products():
    params, fn = layers() | {"w3": jnp.ones((64, 40))}, autocast(loss, policy="fp8")
    serve, served = freeze(fn, params, batch())
    assert set(serve.stored) == {"['w3']"}, "which falls back"
    assert "quantises it to 8 bits" in serve.kept["['w0']"]
    assert serve(served, batch()) == fn(params, batch())


BAD = (np.inf, -np.inf, np.nan)
PLACES = [
    (operand, layer, value)
    for operand in ("activation", "weight", "gradient")
    for layer in range(3)
    for value in BAD
] + [("activation", 1, value) for value in BAD]  # 30 for each recipe, the last in another row


@jax.custom_vjp
def planted(h, _):
    return h


planted.defvjp(
    lambda h, bad: (h, bad), lambda bad, g: (g + bad.astype(g.dtype), jnp.zeros_like(bad))
)


def model(params, x, plants):
    """Three layers; relu makes 0 of -Inf, so that nothing but the product would show it."""
    h = lower(x)
    for at, name in enumerate(sorted(params)):
        h = h + plants["activation"][at].astype(h.dtype)
        h = planted(h @ (params[name] + plants["weight"][at]), plants["gradient"][at])
        h = jax.nn.relu(h)
    return jnp.mean(h.astype(jnp.float32) ** 2)


def nothing():
    x, w = jnp.zeros((3, 2, 32, 64)), jnp.zeros((3, 64, 64))
    return {"activation": x, "weight": w, "gradient": x}


def plants(number):
    operand, layer, value = PLACES[number]
    at = (layer, 3, 5) if operand == "weight" else (layer, number % 2, 3 + number // 27, 5)
    found = nothing()
    return found | {operand: found[operand].at[at].set(value)}


@cache
def step(recipe):
    def run(params, x, plants):
        scaler = GradScaler(init_scale=8.0)
        fn = autocast(model, policy=policy(recipe))
        grads = jax.grad(lambda p: scaler.scale(fn(p, x, plants)))(params)
        return scaler.unscale(grads)

    return jax.jit(run)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("recipe", NAMES)
def test_the_scaler_sees_every_planted_inf_and_nan(recipe):
    seen = [not step(recipe)(layers(), batch(), plants(i))[1] for i in range(len(PLACES))]
    assert all(seen)
    assert step(recipe)(layers(), batch(), nothing())[1], "without a fault none is seen"


@pytest.mark.sized
@pytest.mark.one_in(3)
@pytest.mark.parametrize("recipe", NAMES)
def test_locate_sees_every_planted_inf_and_nan(recipe):
    numbers = range(NAMES.index(recipe), len(PLACES), size(15, 9))
    faults = [locate(step(recipe), layers(), batch(), plants(i)) for i in numbers]
    assert all(fault is not None for fault in faults)
    if LONG:
        assert locate(step(recipe), layers(), batch(), nothing()) is None


def test_a_scale_that_is_not_poisoned_hides_an_inf(monkeypatch):
    """The checks above can fail: with a finite scale, a clipped Inf is a number like others."""
    bare = fp8_contraction.VERBS._replace(
        amax=lambda x, axis: jnp.nan_to_num(fp8_contraction._amax(x, axis), posinf=1, nan=1),
        clip=lambda x, low, high: jnp.nan_to_num(jnp.clip(x, low, high)),
    )
    monkeypatch.setattr(fp8_contraction, "VERBS", bare)
    step.cache_clear()
    try:
        seen = [not step("tensorwise")(layers(), batch(), plants(i))[1] for i in (9, 10)]
        assert not all(seen)
    finally:
        step.cache_clear()


def test_bytes_saved_by_a_block_of_a_llama():
    graph, params = nnx.split(Llama(256, 704, 8))
    inputs = params, jnp.ones((2, 128, 256))  # of a block inside a model, x has a gradient, too

    def saved(policy):
        block = autocast(lambda xs: nnx.merge(graph, xs[0])(lower(xs[1])), policy=policy)
        return residual_bytes(block, inputs)

    found = {name: saved(policy(name)) / saved("amp") for name in NAMES}
    assert max(found["tensorwise"], found["rowwise"]) <= 0.65
    assert found["rowwise_gw_hp"] <= saved("lean") / saved("amp"), "activations are bfloat16"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
def test_a_small_model_trains_as_in_bfloat16(name):
    def trained(chosen):
        def mean(params, x):
            return loss(params, x) + jnp.mean((x @ params["w0"] - x) ** 2)

        fn = jax.jit(jax.value_and_grad(autocast(mean, policy=chosen)))
        params = layers()
        for _ in range(60):
            _, grads = fn(params, batch())
            params = jax.tree.map(lambda w, g: w - 2.0 * g, params, grads)
        return float(mean(params, batch()))

    start = float(loss(layers(), batch()) + jnp.mean((batch() @ layers()["w0"] - batch()) ** 2))
    losses = trained("lean"), trained(policy(name))
    assert losses[1] < start / 10
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


# Products with rule fp8 that run as under rule lower: no error, the same bits, and the reason


def ones(*shape, dtype=jnp.float32):
    return jnp.asarray(np.ones(shape), dtype)  # compiles nothing


FALLBACKS = {
    "m is odd": (jnp.matmul, (ones(33, 64), W), "m = 33 is not a multiple of 16"),
    "k is odd": (jnp.matmul, (ones(32, 40), ones(40, 48)), "k = 40 is not a multiple of 16"),
    "n is odd": (jnp.matmul, (X, ones(64, 10)), "n = 10 is not a multiple of 16"),
    "a row": (jnp.matmul, (ones(64), W), "m = 1 is not a multiple of 16"),
    "small": (jnp.matmul, (ones(2, 4), ones(4, 8)), "m = 2 is not a multiple of 16"),
    "empty": (jnp.matmul, (ones(0, 64), W), "m = 0: there is nothing to multiply"),
    "integers": (jnp.matmul, (ones(32, 64, dtype=int), ones(64, 48, dtype=int)),
                 "an operand is int32, which is not quantised to 8 bits"),
    "complex": (jnp.matmul, (ones(32, 64, dtype=complex), ones(64, 48, dtype=complex)),
                "an operand is complex64, which is not quantised to 8 bits"),
    "a batch": (jnp.matmul, (ones(3, 32, 64), ones(3, 64, 48)),
                "it is a batch of 3 products, which no 8-bit kernel takes"),
    "groups": (jax.lax.ragged_dot, (X, ones(2, 64, 48), jnp.array([16, 16])),
               "JAX's ragged_dot_general has no form in 8 bits"),
}  # fmt: skip


def falls_back(fn, args, why, policy="fp8"):
    """A product has a reason in `explain`, and runs as under lean."""
    with jax.default_matmul_precision("default"):
        report = explain(autocast(fn, policy=policy), *args)
        found = autocast(fn, policy=policy)(*args)
    (call,) = report
    assert (call.rule, call.recipe, call.fallback) == ("fp8", "", why)
    assert report.fallbacks == {why: 1}
    assert f"fallbacks: 1 because {why}" in " ".join(str(report).split())
    want = autocast(fn, policy="lean")(*args)
    assert found.dtype == want.dtype
    assert np.array_equal(found, want)


@pytest.mark.parametrize("case", FALLBACKS)
def test_a_fallback_runs_as_lower_and_says_why(case):
    falls_back(*FALLBACKS[case], polymp.policy("fp8").override(rules={"grouped_mm": "fp8"}))


def test_float64_falls_back():
    with jax.enable_x64(True):
        args = ones(32, 64, dtype=jnp.float64), ones(64, 48, dtype=jnp.float64)
        falls_back(jnp.matmul, args, "an operand is float64, which is not quantised to 8 bits")
        assert autocast(jnp.matmul, policy="fp8")(*args).dtype == jnp.float64


def test_sizes_that_are_symbols_fall_back():
    (rows,) = jax.export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, 64), jnp.float32)
    exported = jax.export.export(jax.jit(autocast(jnp.matmul, policy="fp8")))(x, W)
    assert exported.call(X, W).dtype == jnp.bfloat16
    assert "f8E4M3FN" not in exported.mlir_module()


DEVICES = [
    (("cuda", (8, 0)), "the GPU has compute capability 8.0; 8-bit products need 8.9 or newer"),
    (("tpu", None), "polymp has no 8-bit products on tpu"),
    (("rocm", None), "polymp has no 8-bit products on rocm"),
    (("cuda", (9, 0)), "k = 64, n = 48 is so small that 8 bits are slower than bfloat16"),
]


@pytest.mark.parametrize(("device", "why"), DEVICES)
def test_a_device_that_cannot(monkeypatch, device, why):
    """The product runs here; that the device is another one is what the rules are told."""
    monkeypatch.setattr("polymp.backends.jax.compat.device_type", lambda: device)
    falls_back(jnp.matmul, (X, W), why)


def test_a_product_of_sparse_arrays_has_no_row():
    """It is a primitive of its own, in the operands' dtypes under every policy."""
    dense = np.where(np.random.default_rng(0).standard_normal((32, 64)) > 1, 2, 0).astype("float32")
    matrix = sparse.BCOO.fromdense(dense)

    def net(s, w):
        return s @ w

    report = explain(autocast(net, policy="fp8"), matrix, W)
    (call,) = report.of("jax:bcoo_dot_general")
    assert (call.rule, call.recipe, call.run) == ("no row", "", "float32")
    found = autocast(net, policy="fp8")(matrix, W)
    assert np.array_equal(found, matrix.todense() @ W)


def test_checkify_reports_a_nan_of_a_product():
    fn = checkify.checkify(autocast(jnp.matmul, policy="fp8"), errors=checkify.nan_checks)
    assert fn(X, W)[0].get() is None
    assert "nan generated by primitive" in fn(X.at[3, 5].set(jnp.nan), W)[0].get()
