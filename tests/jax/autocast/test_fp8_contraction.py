"""Products in 8 bits: values and gradients against numpy, under every transformation of jax."""

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from polymp import fp8
from polymp.backends.jax.autocast.fp8_contraction import VERBS, quantised
from polymp.backends.jax.diagnostics.instrument import peak
from polymp.dtypes import FORMATS
from polymp.fp8 import RECIPES
from polymp.jax import autocast
from tests.support import fp8_numpy
from tests.support.jax import eight_devices, forms, hlo
from tests.support.jax.fp8_models import NAMES, batch, layers, loss, policy, product
from tests.support.sizes import size

PARAMS = layers()
X = jnp.concatenate([batch() * scale for scale in (1, 3, 9, 27)])
COUNT = len(X)


def off(one: Any, other: Any) -> float:
    """The largest difference, in parts of the largest number of an array."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    both = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in both)


def by_shards(both: Callable[..., Any]) -> Any:
    """The body of a shard_map: each device scales its own part of the batch."""
    each = [both(PARAMS, x[None]) for x in X]
    losses, grads = zip(*each, strict=True)
    of_params = jax.tree.map(lambda *leaves: sum(leaves) / COUNT, *[g[0] for g in grads])
    of_x = jnp.concatenate([g[1] for g in grads]) / COUNT
    return sum(one.astype(jnp.float32) for one in losses) / COUNT, (of_params, of_x)


def on_mesh(name: str) -> None:
    seen: dict[str, float] = {}
    fn = autocast(loss, policy=policy(name))
    both = jax.jit(jax.value_and_grad(fn, (0, 1)))
    whole, shards = both(PARAMS, X), by_shards(both)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((COUNT,), ("d",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
            x = jax.device_put(X, NamedSharding(mesh, P("d")))
            seen[f"mesh-{kind.name}"] = off(both(params, x), whole)
    mesh = jax.make_mesh((COUNT,), ("d",), axis_types=(AxisType.Auto,))
    for body, way in ((fn, "around"), (loss, "inside")):
        mapped = jax.shard_map(
            lambda params, x, body=body: jax.lax.pmean(body(params, x), "d"),
            mesh=mesh,
            in_specs=(P(), P("d")),
            out_specs=P(),
        )
        mapped = mapped if way == "around" else autocast(mapped, policy=policy(name))
        made = jax.jit(jax.value_and_grad(mapped, (0, 1)))(PARAMS, X)
        seen[f"shard_map-{way}"] = off(made, shards)
    seen["one scale or eight"] = off(whole, shards)
    print(json.dumps(seen))


BF16 = FORMATS["bfloat16"].eps / 2


def run(recipe, fn=loss):
    return jax.value_and_grad(autocast(fn, policy=policy(recipe)), (0, 1))


def same(one, other):
    """How many arrays of two results differ in some bit."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return sum(not np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def numbers(*shapes):
    keys = jax.random.split(jax.random.key(3), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("turned", [False, True], ids=["x @ w", "w.T @ x.T"])
@pytest.mark.parametrize("name", NAMES)
def test_result_and_gradients_are_those_of_numpy(name, turned):
    x, w, g = numbers((48, 64), (64, 32), (48, 32))
    x, g = x.astype(jnp.bfloat16), g.astype(jnp.bfloat16)

    def fn(x, w):
        x = -x  # no argument: else it would count as the weight, as the second of two of them
        made = jnp.einsum("kn,mk->nm", w, x).T if turned else x @ w
        return made.astype(jnp.float32)

    made, pull = jax.vjp(autocast(fn, policy=policy(name)), -x, w)
    of_x, of_w = pull(g.astype(made.dtype))
    of_x = -of_x
    recipe = RECIPES[name]
    x, w, g = (np.asarray(a) for a in (x, w, g))
    want = product(x, w, recipe, "result", ("activation", "weight"))
    assert off(made, want) <= 1.01 * BF16
    want = product(g, w.T, recipe, "input_gradient", ("gradient", "weight"))
    assert of_x.dtype == jnp.bfloat16
    assert off(of_x, want) <= 1.01 * BF16
    assert of_w.dtype == jnp.float32
    if recipe.weight_gradient_high:
        want = x.astype(np.float64).T @ g.astype(np.float64)
    else:
        want = product(x.T, g, recipe, "weight_gradient", ("activation", "gradient"))
    # With scales by row, as torch: in bfloat16 on its way. Else a parameter's is not rounded.
    assert off(of_w, want) <= (1.01 * BF16 if recipe.scaling == "row" else 1e-6)
    rounded = of_w.astype(jnp.bfloat16).astype(jnp.float32)
    assert np.array_equal(of_w, rounded) is (recipe.scaling == "row")
    assert off(of_w, x.astype(np.float64).T @ g.astype(np.float64)) <= 0.1


def test_the_comparison_finds_another_format_or_scale():
    x, w = (np.asarray(a) for a in numbers((48, 64), (64, 32)))
    roles = ("activation", "weight")
    want = product(x, w, RECIPES["tensorwise"], "result", roles)
    assert off(product(x, w, RECIPES["rowwise"], "result", roles), want) > 1e-3
    assert off(product(x, w, RECIPES["tensorwise"], "result", ("gradient", "weight")), want) > 1e-3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("scale", [1.0, 100.0, 2.0**16])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_a_scaled_loss_are_finite(name, scale):
    params, x = layers(), batch()
    plain = jax.grad(autocast(loss, policy=policy(name)))(params, x)
    scaled = jax.grad(lambda p, x: autocast(loss, policy=policy(name))(p, x) * scale)(params, x)
    assert off(jax.tree.map(lambda g: g / scale, scaled), plain) <= (0 if scale != 100 else 0.1)


# XLA's float32 products, which other forms use, add up in another order in another program.
one_order = forms.lowered_as("row_by_row")


@one_order
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
def test_jit_scan_and_remat_change_no_bit(name):
    params, x = layers(), batch()
    plain = run(name)(params, x)

    def remat(policy):
        layer = jax.checkpoint(lambda h, w: jnp.tanh(h @ w), policy=policy)
        return lambda params, x: loss(params, x, layer)

    def scanned(params, x):
        *names, last = sorted(params)
        stacked = jnp.stack([params[name] for name in names])

        def fold(h, _):
            return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, stacked)[0]

        return loss({"all": stacked, "last": params[last]}, x, fold)

    ways = {
        "jit": jax.jit(run(name)),
        "remat": jax.jit(run(name, remat(None))),
        "saved dots": jax.jit(run(name, remat(jax.checkpoint_policies.dots_saveable))),
        "scan": jax.jit(run(name, scanned)),
    }
    wrong = {way: same(fn(params, x), plain) for way, fn in ways.items()}
    assert not any(wrong.values())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
def test_under_vmap_products_run_as_lower(name):
    """Their operands are still those that are saved in 8 bits: gradients are off by less."""
    xs = jnp.stack([batch(), 3 * batch() + 1, batch() ** 3])
    many = jax.tree.map(lambda w: jnp.stack([w, 2 * w, -w]), layers())
    fn, lean = (autocast(loss, policy=p) for p in (policy(name), "lean"))
    for params, at in ((layers(), None), (many, 0)):
        assert same(*(jax.vmap(f, (at, 0))(params, xs) for f in (lean, fn))) == 0
        exact, ours = (jax.vmap(jax.grad(f), (at, 0))(params, xs) for f in (lean, fn))
        each = [params if at is None else jax.tree.map(lambda w, i=i: w[i], many) for i in range(3)]
        in_8_bits = [jax.grad(fn)(p, x) for p, x in zip(each, xs, strict=True)]
        in_8_bits = jax.tree.map(lambda *leaves: jnp.stack(leaves), *in_8_bits)
        assert 0 < off(ours, exact) < off(in_8_bits, exact)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_of_a_vmapped_function_sums_over_the_batch(name):
    params, xs = layers(), jnp.stack([batch(), batch() ** 3])

    def grads(fn):
        return jax.grad(lambda p, xs: jax.vmap(fn, (None, 0))(p, xs).sum(), (0, 1))(params, xs)

    assert same(*(grads(autocast(loss, policy=p)) for p in (policy(name), "lean"))) == 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
def test_forward_mode(name):
    params, x = layers(), batch()
    fn = autocast(loss, policy=policy(name))
    moves = jax.tree.map(lambda w: 0.1 * w, params)
    made, tangent = jax.jvp(fn, (params, x), (moves, x))
    assert made == fn(params, x)
    of_params, of_x = jax.grad(fn, (0, 1))(params, x)
    dots = jax.tree.map(lambda g, t: (g * t).sum(), (of_params, of_x), (moves, x))
    assert float(tangent) == pytest.approx(float(sum(jax.tree.leaves(dots))), rel=0.05)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_a_second_derivative_is_refused(name):
    params, x = layers(), batch()
    grad = jax.grad(autocast(loss, policy=policy(name)))
    with pytest.raises(NotImplementedError, match="first derivative only"):
        jax.jvp(grad, (params, x), (params, x))
    lean = jax.grad(autocast(loss, policy="lean"))  # what the message says to write
    assert np.isfinite(jax.tree.leaves(jax.jvp(lean, (params, x), (params, x)))[0]).all()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
def test_a_custom_rule_with_products_has_its_derivative(name):
    @jax.custom_jvp
    def twice(h, w):
        return jnp.tanh(h @ w) @ w

    @twice.defjvp
    def _(primals, tangents):
        (h, w), (dh, dw) = primals, tangents
        inner = jnp.tanh(h @ w)
        moved = (1 - inner**2) * (dh @ w + h @ dw)
        return inner @ w, moved @ w + inner @ dw

    def by_jax(h, w):
        return jnp.tanh(h @ w) @ w

    params, x = layers(), batch()
    ours, plain = (
        jax.grad(autocast(lambda p, x, f=f: loss(p, x, f), policy=policy(name)))(params, x)
        for f in (twice, by_jax)
    )
    assert off(ours, plain) <= 0.15


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
def test_sharded_programs(name):
    """A mesh has the scales of the whole array; a shard_map has those of each device's part."""
    seen = eight_devices.run("tests.jax.autocast.test_fp8_contraction", name)
    apart = seen.pop("one scale or eight")
    assert max(seen.values()) <= 1e-2, "the loss is rounded to bfloat16 before it is added up"
    assert max(seen[way] for way in seen if way.startswith("mesh")) <= 1e-5
    if name == "tensorwise":
        assert apart > 1e-2, "the check can tell them apart"


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("name", NAMES)
def test_the_lowered_program_multiplies_8_bit_operands(name, platform):
    exported = jax.export.export(jax.jit(run(name)), platforms=[platform])(layers(), batch())
    text = exported.mlir_module()
    low, gradient = "f8E4M3FN", "f8E5M2" if name == "tensorwise" else "f8E4M3FN"
    found = hlo.in_stablehlo("dot_general", text)
    forward = [(low, low, "f32")] * 3
    backward = [d for d in found if gradient in d] if name == "tensorwise" else found[3:]
    assert found[:3] == forward
    eights = [d for d in found if d[0].startswith("f8") and d[1].startswith("f8")]
    high = 3 if name == "rowwise_gw_hp" else 0
    assert len(eights) == 9 - high
    assert len(found) - len(eights) == high, "the weight's gradient"
    assert len(backward) == 6
    # Forward may add up in the matrix units alone; gradients are precise, as in torchao.
    assert text.count("precision = [HIGHEST, HIGHEST]") == 6 - high
    assert all(d[2] == "f32" for d in eights)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_scales_of_a_tensor_are_scalars_behind_the_product(platform):
    """XLA makes them part of its gemm: gemm_rewriter.cc, MatchFp8Param and F8ScaleD."""
    fn = autocast(lambda x, w: x @ w, policy="fp8")
    args = jax.ShapeDtypeStruct((32, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64, 48), jnp.float32)
    lines = jax.export.export(jax.jit(fn), platforms=[platform])(*args).mlir_module().splitlines()
    at = next(i for i, line in enumerate(lines) if "stablehlo.dot_general" in line)
    made = lines[at].split("=")[0].strip()
    behind = " ".join(lines[at + 1 : at + 20])
    for _ in range(2):
        line = next(one for one in lines[at:] if "stablehlo.multiply" in one and made in one)
        factor = line.split("stablehlo.multiply")[1].split(",")[1].split(":")[0].strip()
        spread = next(one for one in lines if one.strip().startswith(f"{factor} ="))
        assert "broadcast_in_dim" in spread
        assert "(tensor<f32>)" in spread, "a scalar"
        made = line.split("=")[0].strip()
    assert "stablehlo.convert" in behind


if __name__ == "__main__":
    with forms.lowered_as("row_by_row"):  # on several devices it is in any case
        on_mesh(sys.argv[1])


# --- Quantisation with JAX's verbs, against the same formulas with those of numpy and ml_dtypes ---


EIGHTS = ("float8_e4m3fn", "float8_e5m2")
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
@pytest.mark.parametrize("format", EIGHTS)
@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.filterwarnings("ignore:overflow")
def test_the_bits_are_those_of_ml_dtypes(kind, format):
    values = every_bfloat16() if kind == "bfloat16" else float32_values(size(10**5, 10**6))
    ours = jax.jit(lambda x, scale: fp8.quantised(VERBS, x, scale, format))
    wrong = 0
    for scale in SCALES:
        want = fp8.quantised(fp8_numpy.VERBS, values, scale, format)
        wrong += differ(np.asarray(ours(values, scale)), want)
    assert wrong == 0
    other = fp8.quantised(fp8_numpy.VERBS, values, np.float32(0.75), format)
    assert differ(np.asarray(ours(values, np.float32(0.7))), other), "the check finds nothing"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("role", ["activation", "weight", "gradient"])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_operands_and_scales_are_those_of_numpy(name, role):
    random = np.random.default_rng(1)
    rows = random.standard_normal((200, 8)) * np.exp(random.uniform(-40, 40, (200, 1)))
    rows[:5] = np.array([[0, 1e-12, 1e-13, np.inf, np.nan]]).T
    for dtype in (np.float32, ml_dtypes.bfloat16):
        array = rows.astype(dtype)
        for axis in (None, (0,), (1,), (0, 1)):
            args = array, RECIPES[name], role, axis
            want = fp8.scale_of(fp8_numpy.VERBS, *args)
            for run in (fp8.scale_of, jax.jit(fp8.scale_of, static_argnums=(0, 2, 3, 4))):
                found = np.asarray(run(VERBS, *args))
                assert found.shape == want.shape
                assert differ(found, np.asarray(want)) == 0
            if axis is not None:
                values = fp8.quantised(fp8_numpy.VERBS, array, want, args[1].format_of(role))
                low = jax.jit(lambda x, rest=args[1:]: quantised(x, *rest))(array)
                assert differ(np.asarray(low.values), values) == 0


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
