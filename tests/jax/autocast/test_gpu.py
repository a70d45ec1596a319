"""On a real GPU: dtypes, what XLA makes of products and convolutions, and steps without waits.

Everything here is skipped where jax has no GPU. What is lowered for GPUs, and needs none, is in
test_contraction.py.
"""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from polymp.backends.jax.autocast.contraction import contract, spec_of
from polymp.jax import GradScaler, autocast, lower
from tests.shared.test_cases import computed, too_far, valued
from tests.support import frameworks
from tests.support.cases import OPS, Op
from tests.support.jax import hlo
from tests.support.jax.scaler_tools import bits, by_optax

PLATFORM = "gpu"
LOW = ("bfloat16", "float16")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != PLATFORM, reason="needs a GPU and jax for it"),
]


def compiled(fn: Any, *args: Any) -> str:
    return jax.jit(fn).lower(*args).compile().as_text()


@pytest.fixture
def fw() -> ModuleType:
    return frameworks.load("jax")


@pytest.mark.parametrize("op", [op for op in OPS if valued(op)], ids=lambda op: op.name)
def test_shared_ops_have_the_dtypes_and_values_of_the_table(fw: ModuleType, op: Op) -> None:
    rows = valued(op)
    exact, results = computed(fw, op, rows)
    assert [dtype for dtype, _ in results] == [case.jax for case in rows]
    far = [
        too_far(case, "jax", dtype, result, exact)
        for case, (dtype, result) in zip(rows, results, strict=True)
    ]
    assert [words for words in far if words] == []


NHWC = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
IMAGES = (8, 32, 32, 64)
CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "3x3": (IMAGES, (3, 3, 64, 64), NHWC),
    "strided": (IMAGES, (3, 3, 64, 64), NHWC | {"window_strides": (2, 2)}),
    "grouped": (IMAGES, (3, 3, 8, 64), NHWC | {"feature_group_count": 8}),
    "1d": ((8, 128, 64), (3, 64, 64), {"dimension_numbers": ("NHC", "HIO", "NHC")}),
    "nchw": ((8, 64, 32, 32), (64, 64, 3, 3), {}),
}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_and_both_gradients_run_low(name: str, low: str) -> None:
    """By the dtypes in the program that XLA compiled, and near the values in float32."""
    left, right, options = CONVOLUTIONS[name]
    options = {"window_strides": (1,) * (len(left) - 2), "padding": "SAME", **options}
    keys = jax.random.split(jax.random.key(0))
    x, w = jax.random.normal(keys[0], left), jax.random.normal(keys[1], right)

    def conv(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, **options)

    def both(fn: Any) -> Any:
        def run(x: Any, w: Any) -> Any:
            y, pull = jax.vjp(fn, x, w)
            return y, *pull(jax.random.normal(keys[0], y.shape).astype(y.dtype))

        return run

    ours = both(autocast(conv, dtype=jnp.dtype(low)))
    ran = [c for c in hlo.contractions(compiled(ours, x, w)) if "conv" in c.kind]
    assert len(ran) >= 3, "forward and both gradients"
    assert {(*c.operands, c.result) for c in ran} == {(low,) * 3}
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(both(conv))(x, w)
    for got, true in zip(jax.jit(ours)(x, w), exact, strict=True):
        size = float(jnp.linalg.norm(true))
        assert float(jnp.linalg.norm(got.astype(jnp.float32) - true)) < 0.02 * size


# What one rounding to nearest may change, relative to the result.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("out", ["low", "float32"])
def test_a_long_sum_is_added_up_in_float32(low: str, out: str) -> None:
    """Over 2**18 terms a kernel may split the sum, and round the parts to the result's dtype."""
    length = 2**18
    keys = jax.random.split(jax.random.key(0))
    # All of one sign: what is lost in each addition shows.
    x = jax.random.uniform(keys[0], (64, length), minval=0.5, maxval=1.5) / 512
    w = jax.random.uniform(keys[1], (length, 64), minval=0.5, maxval=1.5) / 512
    out = low if out == "low" else out
    dims = ((1,), (0,)), ((), ())
    params = {"dimension_numbers": dims, "precision": None, "out_sharding": None}

    @jax.jit
    def run(x: Any, w: Any) -> Any:
        return contract(spec_of(lax.dot_general_p, params, low, out), x, w)

    got = run(x, w)
    rounded = [np.asarray(a.astype(low)).astype(np.float64) for a in (x, w)]
    exact = rounded[0] @ rounded[1]
    error = (np.abs(np.asarray(got).astype(np.float64) - exact) / exact).max()
    assert got.dtype == out
    # One rounding of the result, and a sum in float32 of up to 2**10 blocks, each rounded.
    assert error < 1.01 * ROUNDING[out] + 2.0**10 * ROUNDING["float32"]


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
def test_what_devices_computed_of_one_product_is_rounded_once() -> None:
    mesh = jax.make_mesh((2,), ("t",), axis_types=(AxisType.Auto,))
    x = jax.random.normal(jax.random.key(3), (64, 4096))
    w = jax.random.normal(jax.random.key(4), (4096, 64))
    args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((x, P(None, "t")), (w, P("t")))]
    run = autocast(lambda x, w: lower(x @ w))
    sums = re.findall(r"= \(?(\w+)\[[^=]* all-reduce(?:-start)?\(", compiled(run, *args))
    exact = [np.asarray(a.astype("bfloat16")).astype(np.float64) for a in (x, w)]
    true = exact[0] @ exact[1]
    error = np.abs(np.asarray(jax.jit(run)(*args)).astype(np.float64) - true) / np.abs(true).max()
    assert sums == ["f32"], f"added up in {sums}, off by {error.max():.2g}"
    assert error.max() <= 1.01 * ROUNDING["bfloat16"]


@pytest.mark.parametrize("low", LOW)
def test_cudnn_attention_is_called_with_low_arguments(low: str) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (2, 128, 256))
    ws = [jax.random.normal(key, (256, 256)) / 16 for key in keys[1:]]

    def attention(implementation: str) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            return jax.nn.dot_product_attention(q, k, v, implementation=implementation)

        def attend_low(*qkv: Any) -> Any:
            return autocast(attend, enabled=False)(*(x.astype(low) for x in qkv))

        inner = attend_low if implementation == "cudnn" else attend

        def loss(ws: Any, x: Any) -> Any:
            q, k, v = ((x @ w).reshape(2, 128, 4, 64) for w in ws)
            # A sum: gradients of a mean are too small for float16 without a scaler.
            return (inner(q, k, v).astype(jnp.float32) ** 2).sum()

        return loss

    ours = jax.value_and_grad(autocast(attention("cudnn"), dtype=jnp.dtype(low)))
    text = compiled(ours, ws, x)
    assert "__cudnn$fmha" in text
    assert "__cudnn$fmhaSoftmaxBackward" in text
    value, grads = jax.jit(ours)(ws, x)
    exact, true = jax.jit(jax.value_and_grad(attention("xla")))(ws, x)
    assert abs(value - exact) < 0.02 * exact
    for got, want in zip(grads, true, strict=True):
        assert got.dtype == jnp.float32
        assert jnp.linalg.norm(got - want) < 0.05 * jnp.linalg.norm(want)


def test_cudnn_attention_on_float32_says_what_to_write() -> None:
    q = jnp.ones((2, 128, 4, 64))
    attend = autocast(lambda q: jax.nn.dot_product_attention(q, q, q, implementation="cudnn"))
    with pytest.raises(NotImplementedError) as caught:
        attend(q)
    assert any("enabled=False" in note for note in caught.value.__notes__)


ADAM = optax.adam(1e-3)


def train_step(params: Any, state: Any, scaler: GradScaler, x: Any, bad: Any) -> Any:
    @autocast(dtype=jnp.float16)
    def loss_fn(params: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"]) ** 2)

    grads = jax.grad(lambda params: scaler.scale(loss_fn(params)) * bad)(params)
    (params, state), scaler, finite = scaler.step(grads, by_optax(ADAM), params, state)
    return params, state, scaler, finite


def start() -> tuple[Any, ...]:
    params = {"w": jnp.ones((512, 1024)) / 512, "v": jnp.ones((1024, 256)) / 1024}
    return params, ADAM.init(params), GradScaler(2.0**10, growth_interval=10)


def test_steps_move_nothing_to_the_host_and_skip_by_themselves() -> None:
    run = jax.jit(train_step, donate_argnums=(0, 1, 2))
    carry, x = start(), jnp.ones((32, 512))
    good, bad = jnp.float32(1), jnp.float32(jnp.inf)
    *carry, finite = run(*carry, x, good)
    jax.block_until_ready(carry)
    seen = [finite]
    with jax.transfer_guard("disallow"):
        for at in range(50):
            *carry, finite = run(*carry, x, bad if at == 20 else good)
            seen.append(finite)
    assert [bool(f) for f in seen] == [at != 21 for at in range(51)]
    assert float(carry[2].state.scale) == 2.0 ** (10 + 2 - 1 + 2)


def test_the_compiled_step_has_no_conditional_and_reuses_the_donated_state() -> None:
    run = jax.jit(train_step, donate_argnums=(0, 1, 2))
    carry = start()
    x, one = jnp.ones((32, 512)), jnp.float32(1)
    program = run.lower(*carry, x, one).compile()
    assert " conditional(" not in program.as_text()
    sizes = program.memory_analysis()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(carry))
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(carry[0]))
    assert sizes.alias_size_in_bytes >= held
    assert sizes.temp_size_in_bytes < 3 * weights, "gradients and casts, no second state"


def test_a_skipped_step_leaves_every_bit() -> None:
    run = jax.jit(train_step)
    params, state, scaler = start()
    x = jnp.ones((32, 512))
    params, state, scaler, _ = run(params, state, scaler, x, jnp.float32(1))
    new, after, _, finite = run(params, state, scaler, x, jnp.float32(jnp.nan))
    assert not finite
    assert bits((new, after)) == bits((params, state))
