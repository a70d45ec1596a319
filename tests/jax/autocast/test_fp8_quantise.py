"""Quantisation with JAX's verbs, against the same formulas with those of numpy and ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from polymp.backends.jax.autocast.fp8_operands import VERBS, dequantised, quantised, scale_axes
from polymp.backends.jax.diagnostics.measures import peak
from polymp.fp8 import quantise
from polymp.fp8.recipes import RECIPES
from tests.support import fp8_numpy
from tests.support.sizes import size

FORMATS = ("float8_e4m3fn", "float8_e5m2")
SCALES = np.float32([1, 2**-20, 2**30, 448 / 3, 57344 / 7, 1e-3, 0.1, 1e14, np.nan])


def every_bfloat16() -> np.ndarray:
    return np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)


def float32_values(count: int) -> np.ndarray:
    """Of all exponents, in equal parts; and those half way between two 8-bit numbers."""
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, count, np.uint64).astype(np.uint32).view(np.float32)
    low = np.arange(2**8, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    halves = (np.sort(low[np.isfinite(low)])[1:] + np.sort(low[np.isfinite(low)])[:-1]) / 2
    beside = [np.nextafter(halves, np.float32(side)) for side in (-np.inf, np.inf)]
    return np.concatenate([bits, halves, *beside, np.float32([np.inf, -np.inf, np.nan, -0.0])])


def differ(ours: np.ndarray, theirs: np.ndarray) -> int:
    """How many numbers have other bits; all NaNs are one."""
    nan = [np.isnan(x.astype(np.float32)) for x in (ours, theirs)]
    bits = [x.view(np.uint8) if x.itemsize == 1 else x.view(np.uint32) for x in (ours, theirs)]
    return int(np.count_nonzero((nan[0] != nan[1]) | (~nan[0] & (bits[0] != bits[1]))))


@pytest.mark.sized
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.filterwarnings("ignore:overflow")
def test_the_bits_are_those_of_ml_dtypes(kind, format):
    values = every_bfloat16() if kind == "bfloat16" else float32_values(size(10**5, 10**6))
    ours = jax.jit(lambda x, scale: quantise.quantised(VERBS, x, scale, format))
    wrong = 0
    for scale in SCALES:
        want = quantise.quantised(fp8_numpy.VERBS, values, scale, format)
        wrong += differ(np.asarray(ours(values, scale)), want)
    print(f"{kind} to {format}: {len(values)} values x {len(SCALES)} scales, {wrong} differ")
    assert wrong == 0
    other = quantise.quantised(fp8_numpy.VERBS, values, np.float32(0.75), format)
    assert differ(np.asarray(ours(values, np.float32(0.7))), other), "the check finds nothing"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("role", ["activation", "weight", "gradient"])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_scales_are_those_of_numpy(name, role):
    random = np.random.default_rng(1)
    rows = random.standard_normal((200, 8)) * np.exp(random.uniform(-40, 40, (200, 1)))
    rows[:5] = np.array([[0, 1e-12, 1e-13, np.inf, np.nan]]).T
    for dtype in (np.float32, ml_dtypes.bfloat16):
        array = rows.astype(dtype)
        for axis in (None, 1, (0, 1)):
            args = array, RECIPES[name], role, axis
            want = quantise.scale_of(fp8_numpy.VERBS, *args)
            for run in (quantise.scale_of, jax.jit(quantise.scale_of, static_argnums=(0, 2, 3, 4))):
                found = np.asarray(run(VERBS, *args))
                assert found.shape == want.shape
                assert differ(found, np.asarray(want)) == 0


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", RECIPES)
def test_inf_and_nan_spoil_what_shares_their_scale(name, bad):
    x = jnp.ones((4, 8), jnp.bfloat16).at[2, 5].set(bad)
    axes = scale_axes(2, RECIPES[name], ("activation", "weight"), (1,), ())
    values, scale = quantised(x, RECIPES[name], "activation", axes)
    back = np.asarray(dequantised(values, scale, "float32"))
    assert np.isnan(back[2]).all()
    rows = [np.isnan(back[row]).all() for row in (0, 1, 3)]
    assert rows == [RECIPES[name].scaling == "tensor"] * 3


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_one_bad_number_in_a_large_array_spoils_its_scale(dtype, bad):
    """XLA on CPUs loses a NaN in the maximum of a large float32 array."""
    x = jnp.ones((64, 64), dtype).at[3, 5].set(bad)
    low = jax.jit(lambda x: quantised(x, RECIPES["tensorwise"], "activation", (0, 1)))(x)
    assert np.isnan(low.scale).all()
    assert np.isnan(low.values.astype(jnp.float32)).all()
    assert np.isnan(jax.jit(peak)(x)) if np.isnan(bad) else np.isinf(jax.jit(peak)(x))


@pytest.mark.parametrize("op", [jnp.exp, jnp.sqrt, jnp.square, jnp.abs])
def test_a_nan_with_a_sign_spoils_a_scale(op):
    """On CPUs Inf - Inf is such a NaN, and XLA leaves out the abs of what is never negative."""

    @jax.jit
    def scale_and_peak(x):
        y = op(x - jnp.max(x, -1, keepdims=True))
        return quantised(y, RECIPES["tensorwise"], "activation", (0, 1)).scale, peak(y)

    scale, most = scale_and_peak(jnp.full((8, 8), jnp.inf).at[:, ::2].multiply(-1))
    assert np.isnan(scale).all()
    assert np.isnan(most)


def test_the_axes_of_a_scale():
    tensor, row, high = RECIPES["tensorwise"], RECIPES["rowwise"], RECIPES["rowwise_gw_hp"]
    result, backward = ("activation", "weight"), ("weight", "gradient")
    assert scale_axes(3, tensor, result, (2,), ()) == (0, 1, 2)
    assert scale_axes(3, tensor, result, (2,), (0,)) == (1, 2)
    assert scale_axes(3, tensor, result, (0, 1), (0,)) == (0, 1, 2), "it sums over the batch"
    assert scale_axes(3, row, result, (2,), (0,)) == (2,)
    assert scale_axes(2, row, backward, (1,), ()) == (1,)
    assert scale_axes(2, high, backward, (1,), ()) == (0, 1)
