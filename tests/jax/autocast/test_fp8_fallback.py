"""Products with rule fp8 that run as under rule lower: no error, the same bits, and the reason."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, sparse

import polymp
from polymp.jax import autocast, explain
from tests.support.jax.fp8_models import NAMES, policy


def ones(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


X, W = ones(32, 64), ones(64, 48)

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
    assert f"1 as lower: {why}" in " ".join(str(report).split())
    want = autocast(fn, policy="lean")(*args)
    assert found.dtype == want.dtype
    assert np.array_equal(found, want)
    print(f"{call.run}: {call.fallback}")


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


# --- sparse arrays --------------------------------------------------------------------------------

SPARSE = sparse.BCOO.fromdense(
    jnp.where(jax.random.normal(jax.random.key(0), (32, 64)) > 1, 2, 0.0)
)


def test_a_product_of_sparse_arrays_has_no_row():
    """It is a primitive of its own, in the operands' dtypes under every policy."""

    def net(s, w):
        return s @ w

    report = explain(autocast(net, policy="fp8"), SPARSE, W)
    (call,) = report.of("jax:bcoo_dot_general")
    assert (call.rule, call.recipe, call.run) == ("no row", "", "float32")
    found = autocast(net, policy="fp8")(SPARSE, W)
    assert np.array_equal(found, SPARSE.todense() @ W)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_under_sparsify_a_product_runs_as_lower(name, jitted):
    """A region sees a dense array: the rule of sparsify comes after it."""

    def once(s, w):
        return jnp.tanh(s @ w).astype(jnp.float32)

    def twice(s, w):  # two products of one operand, which is quantised once for both
        return (jnp.tanh(s @ w) + s @ (2 * w)).astype(jnp.float32)

    for fn in (once, twice):
        found, want = (
            sparse.sparsify(autocast(fn, policy=each)) for each in (policy(name), "lean")
        )
        if jitted:
            found, want = jax.jit(found), jax.jit(want)
        assert np.array_equal(found(SPARSE, W), want(SPARSE, W))
        of_w, expected = (jax.grad(lambda w, f=f: f(SPARSE, w).sum())(W) for f in (found, want))
        assert np.array_equal(of_w, expected)


def test_sparsify_of_a_gradient():
    def loss(w, s):
        return jnp.tanh(s @ w).sum().astype(jnp.float32)

    grads = [
        sparse.sparsify(jax.grad(autocast(loss, policy=each)))(W, SPARSE)
        for each in ("fp8", "lean")
    ]
    ours, theirs = (g.todense() if isinstance(g, sparse.JAXSparse) else g for g in grads)
    assert np.abs(ours - theirs).max() <= 0.1 * np.abs(theirs).max()


def test_checkify_reports_a_nan_of_a_product():
    fn = checkify.checkify(autocast(jnp.matmul, policy="fp8"), errors=checkify.nan_checks)
    assert fn(X, W)[0].get() is None
    assert "nan generated by primitive" in fn(X.at[3, 5].set(jnp.nan), W)[0].get()
