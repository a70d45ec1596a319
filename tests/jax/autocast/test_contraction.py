"""The contraction: low operands, float32 sums, and gradients rounded as often as promised.

The reference is the plain primitive in float64, of the same rounded operands: products of two low
values are exact in float32, so all that may differ is the order of the sum and the one rounding of
the result.
"""

import itertools
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export, lax
from jax.ad_checkpoint import checkpoint_name

from polymp.backends.jax.autocast import contraction
from polymp.backends.jax.autocast.contraction import contract, spec_of
from polymp.dtypes import FORMATS
from polymp.jax import autocast, explain
from tests.support.jax import forms, hlo
from tests.support.jax.walker import OURS, equations
from tests.support.sizes import size

LOW = ("bfloat16", "float16")
SIZES = (1, 2, 3, 5, 8, 33)


def rounded(x: Any, dtype: str) -> np.ndarray:
    """The array as the low dtype holds it, in float64."""
    return np.asarray(x).astype(jnp.dtype(dtype)).astype(np.float64)


def dot(lhs, rhs, dims, run="bfloat16", out="float32"):
    params = {"dimension_numbers": dims, "precision": None, "out_sharding": None}
    return contract(spec_of(lax.dot_general_p, params, run, out), lhs, rhs)


def close(got: Any, true: Any, length: int) -> None:
    """Within the rounding of a float32 sum of `length` terms, and of the result's own dtype.

    A sum of n terms in any order errs by at most (n - 1) u sum|terms|; here the largest result
    stands for the sum of sizes, times a headroom of 8 for cancellation.
    """
    u = FORMATS["float32"].eps / 2
    own = FORMATS[got.dtype.name].eps / 2
    scale = np.abs(true).max(initial=0) + FORMATS[got.dtype.name].smallest_normal
    error = np.abs(np.asarray(got, np.float64) - true).max(initial=0)
    assert error <= (8 * length * u + 1.01 * own) * scale


def with_gradients(fn: Any) -> Any:
    """As one program: the value of two operands and the gradients of both by a cotangent."""

    @jax.jit
    def both(lhs, rhs, ct):
        value, pull = jax.vjp(fn, lhs, rhs)
        return value, *pull(ct)

    return both


@st.composite
def products(draw):
    """Shapes and dimension numbers of a product, every order of dimensions included."""
    groups = {name: draw(st.lists(st.sampled_from(SIZES), max_size=2)) for name in "bclr"}
    lhs = [(name, i, s) for name in "bcl" for i, s in enumerate(groups[name])]
    rhs = [(name, i, s) for name in "bcr" for i, s in enumerate(groups[name])]
    lhs, rhs = draw(st.permutations(lhs)), draw(st.permutations(rhs))

    def places(dims: Any, name: str) -> tuple[int, ...]:
        return tuple(dims.index((name, i, s)) for i, s in enumerate(groups[name]))

    dims = (places(lhs, "c"), places(rhs, "c")), (places(lhs, "b"), places(rhs, "b"))
    turn = draw(st.permutations(range(len(groups["b"] + groups["l"] + groups["r"]))))
    dtypes = draw(st.tuples(*[st.sampled_from(("float32", "low"))] * 2))
    length = int(np.prod(groups["c"], initial=1))
    shapes = [s for *_, s in lhs], [s for *_, s in rhs]
    return shapes, dims, tuple(turn), dtypes, length, draw(st.integers(0, 2**16))


@settings(max_examples=size(12, 40))
@given(products(), st.sampled_from(LOW), st.booleans())
def test_any_product_and_both_gradients(product, run, low_out):
    (left, right), dims, turn, dtypes, length, seed = product
    random = np.random.default_rng(seed)
    dtypes = [run if f == "low" else f for f in dtypes]
    lhs, rhs = (
        jnp.asarray(random.standard_normal(shape, np.float32).astype(jnp.dtype(f)))
        for shape, f in zip((left, right), dtypes, strict=True)
    )
    out = run if low_out else "float32"

    def ours(lhs, rhs):  # a transpose around a product is what XLA on CPU folds into it
        return dot(lhs, rhs, dims, run, out).transpose(turn)

    def plain(lhs, rhs):
        return lax.dot_general(lhs, rhs, dims).transpose(turn)

    with jax.enable_x64(True):
        true, pull = jax.vjp(plain, rounded(lhs, run), rounded(rhs, run))
        ct = np.cos(np.asarray(true)).astype(jnp.dtype(out))
        wanted = [np.asarray(grad) for grad in pull(jnp.asarray(rounded(ct, run)))]
    value, *grads = with_gradients(ours)(lhs, rhs, ct)
    assert (value.dtype, *(g.dtype for g in grads)) == (out, *dtypes)
    close(value, np.asarray(true), length)
    for grad, want in zip(grads, wanted, strict=True):
        close(grad, want, value.size)


def test_the_reference_tells_a_low_sum_from_a_float32_one():
    lhs, rhs = jnp.ones((1, 4096)), jnp.full((4096, 1), 1 / 64)
    dims = (((1,), (0,)), ((), ()))
    close(dot(lhs, rhs, dims), np.array([[64.0]]), 4096)
    total = np.zeros((), jnp.bfloat16)
    for _ in range(4096):
        total = (total + np.asarray(1 / 64, jnp.bfloat16)).astype(jnp.bfloat16)
    with pytest.raises(AssertionError):
        close(jnp.asarray(total.astype(np.float32)), np.array(64.0), 1)


@pytest.mark.parametrize(
    ("feature", "size", "low"),
    [("avx512_bf16", 128, True), ("avx512_bf16", 32, False), ("avx2", 128, False)],
)
def test_operands_are_low_where_the_processor_gains_by_it(feature, size, low, monkeypatch):
    monkeypatch.setattr(contraction, "processor", lambda: ("a CPU", frozenset({feature})))
    x = jnp.ones((size, size))
    text = jax.jit(autocast(lambda x, y: x @ y)).lower(x, x).as_text()
    (product,) = [line for line in text.splitlines() if "dot_general" in line]
    assert ("bf16" in product) == low, product


@pytest.mark.parametrize("feature", ["avx512_bf16", "avx2"])
def test_a_tiny_product_calls_no_kernel(feature, monkeypatch):
    """But of a vector, which XLA multiplies in a loop by itself."""
    monkeypatch.setattr(contraction, "processor", lambda: ("a CPU", frozenset({feature})))
    fn = autocast(lambda x, y: x @ y)
    for rows, calls in ((1, 1), (2, 0), (8, 0), (16, 1)):
        args = jnp.ones((rows, 8)), jnp.ones((8, 16))
        assert jax.jit(fn).lower(*args).as_text().count("dot_general") == calls


@pytest.fixture(params=forms.OF_CPUS)
def form(request):
    with forms.lowered_as(request.param):
        yield


@pytest.mark.usefixtures("form")
@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", [*forms.OF_CPUS, "multiplied"], indirect=True)
@pytest.mark.parametrize("turned", [False, True], ids=["as it is", "transposed"])
@pytest.mark.parametrize("dims", [(((1,), (0,)), ((), ())), (((1,), (1,)), ((), ()))], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 8, 128, 129])
def test_every_form_of_a_product_gives_the_same_sums(rows, dims, turned):
    """Whole numbers, whose sums are exact in any order: forms for few rows and for many agree.

    What the low dtype cannot hold is added to them: a form that leaves out a rounding shows it.
    """
    random = np.random.default_rng(rows)
    few = random.integers(-8, 9, (rows, 48))
    other = random.integers(-8, 9, (48, 1400) if dims[0][1] == (0,) else (1400, 48))
    want = few @ (other if dims[0][1] == (0,) else other.T)
    low = [jnp.asarray(x * (1 + 2**-10), "float32") for x in (few, other.T if turned else other)]

    @partial(jax.jit, static_argnames="out")
    def product(few, other, out):
        return dot(few, other.T if turned else other, dims, out=out)

    @jax.jit
    def other_way_round(few, other):
        swapped = (dims[0][::-1], dims[1])
        return dot(other.T if turned else other, few, swapped)

    assert np.array_equal(product(*low, out="float32"), want)
    assert np.array_equal(product(*low, out="bfloat16"), want.astype(jnp.bfloat16))
    assert np.array_equal(other_way_round(*low), want.T)


@pytest.mark.usefixtures("form")
def test_the_other_operand_of_one_row_is_read_where_it_lies():
    """No copy and no cast of the weights, transposed or not; the sum is float32."""
    for turned in (False, True):
        weights = jax.ShapeDtypeStruct((400, 720), jnp.bfloat16)
        row = jax.ShapeDtypeStruct((1, 720 if turned else 400), jnp.bfloat16)

        def product(x, w, turned=turned):
            return dot(x, w.T if turned else w, PAIR, out="bfloat16")

        text = jax.jit(product).lower(row, weights).compile(hlo.AS_FOR_USERS).as_text()
        made = [op for body in hlo.read(text).values() for op in body.values()]
        large = {op.opcode for op in made if int(np.prod(op.shape)) == 400 * 720}
        assert large <= {"parameter", "bitcast"}, text
        assert hlo.summary(text) == {"bfloat16 x bfloat16 -> float32": 1}


PAIR = (((1,), (0,)), ((), ()))
X = jax.random.normal(jax.random.key(0), (6, 5))
W = jax.random.normal(jax.random.key(1), (5, 4))


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 1), (2, 1)])
def test_a_batch_on_any_axis_is_the_products_one_by_one(axes):
    x = X if axes[0] is None else jnp.stack([X, -X, 2 * X], axes[0])
    w = W if axes[1] is None else jnp.stack([W, 3 * W, -W], axes[1])
    got = jax.vmap(lambda x, w: dot(x, w, PAIR), axes)(x, w)

    def at(a, axis, i):
        return a if axis is None else jnp.take(a, i, axis)

    for i in range(3):
        assert np.allclose(got[i], dot(at(x, axes[0], i), at(w, axes[1], i), PAIR), rtol=1e-6)


def test_a_product_of_a_value_and_itself():
    x = jnp.ones((256, 256)).at[0, 1].set(3)
    value, dx, _ = with_gradients(lambda x, y: dot(x, x, PAIR) + dot(x.T, y, PAIR))(x, x, x)
    plain = np.asarray(x)  # whole numbers: every sum is exact
    assert np.array_equal(value, plain @ plain + plain.T @ plain)
    assert np.array_equal(dx, plain @ plain.T + plain.T @ plain + plain @ plain.T)


CONVOLUTIONS = {
    "nchw": ((2, 4, 6, 6), (8, 4, 3, 3), {"padding": "SAME"}),
    "nhwc": ((2, 6, 6, 4), (3, 3, 4, 8), {"padding": "VALID", "dimension_numbers":
             ("NHWC", "HWIO", "NHWC")}),
    "strided": ((2, 4, 7, 7), (8, 4, 3, 3), {"padding": "SAME", "window_strides": (2, 2)}),
    "grouped": ((2, 4, 6, 6), (8, 2, 3, 3), {"padding": "SAME", "feature_group_count": 2}),
    "depthwise": ((2, 4, 6, 6), (4, 1, 3, 3), {"padding": "SAME", "feature_group_count": 4}),
    "in batches": ((4, 4, 6, 6), (8, 4, 3, 3), {"padding": "SAME", "batch_group_count": 2}),
    "transposed": ((2, 4, 5, 5), (8, 4, 3, 3), {"padding": ((1, 2), (1, 2)), "lhs_dilation":
                   (2, 2)}),
    "dilated": ((2, 4, 8, 8), (8, 4, 3, 3), {"padding": "SAME", "rhs_dilation": (2, 2)}),
    "1d": ((2, 4, 9), (8, 4, 3), {"padding": "SAME", "window_strides": (1,)}),
    "3d": ((1, 2, 4, 4, 4), (3, 2, 2, 2, 2), {"padding": "SAME", "window_strides": (1, 1, 1)}),
}  # fmt: skip
IN_TURN = [*zip(CONVOLUTIONS, itertools.cycle(LOW), strict=False)]


def convolution(name, run):
    """A convolution, ours of its equation, and arguments: a low array, a parameter, a cotangent."""
    *shapes, settings = CONVOLUTIONS[name]
    settings = {"window_strides": (1, 1), **settings}
    random = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(random.standard_normal(s, np.float32)) for s in shapes)
    lhs, low = lhs.astype(run), rhs.astype(run)

    def plain(lhs, rhs):
        return lax.conv_general_dilated(lhs, rhs, **settings)

    (eqn,) = jax.make_jaxpr(plain)(lhs, low).eqns

    def ours(lhs, rhs, out):
        return contract(spec_of(eqn.primitive, eqn.params, run, out), lhs, rhs)

    return plain, ours, (lhs, rhs, jnp.cos(plain(lhs, low).astype(jnp.float32)))


def close_convolution(got, plain, args, run):
    with jax.enable_x64(True):
        true = with_gradients(plain)(*(rounded(x, run) for x in args))
    for one, want, length in zip(got, true, (args[1].size,) * 2 + (got[0].size,), strict=True):
        close(one, np.asarray(want), length)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "run"), IN_TURN)
def test_any_convolution_and_both_gradients(name, run):
    plain, ours, (lhs, rhs, ct) = convolution(name, run)
    ours = partial(ours, out=run)
    got = with_gradients(ours)(lhs, rhs, ct.astype(run))
    assert [x.dtype for x in got] == [run, run, "float32"]
    close_convolution(got, plain, (lhs, rhs, ct), run)
    batched = jax.vmap(jax.jit(ours), (0, None))(jnp.stack([lhs, -lhs]), rhs)
    assert np.array_equal(batched[0], got[0])
    assert np.array_equal(batched[1], -got[0])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "run"), IN_TURN)
def test_convolutions_have_one_dtype_on_gpus(name, run):
    """XLA has no others there."""
    _, ours, args = convolution(name, run)
    both = with_gradients(partial(ours, out="float32"))
    short = {"bfloat16": "bf16", "float16": "f16"}[run]
    for platform in ("cuda", "rocm"):
        module = export.export(both, platforms=[platform])(*args).mlir_module()
        assert hlo.in_stablehlo("convolution", module) == [(short,) * 3] * 3
    module = export.export(both, platforms=["tpu"])(*args).mlir_module()
    results = sorted(result for *_, result in hlo.in_stablehlo("convolution", module))
    assert results == [short, "f32", "f32"], "the first operand is low, so is its gradient"


@pytest.mark.one_in(2)
@forms.lowered_as("convolutions_low")
@pytest.mark.parametrize(("name", "run"), [IN_TURN[at] for at in (0, 2, 3, 8)])
def test_convolutions_round_once_on_gpus(name, run):
    plain, ours, args = convolution(name, run)
    options = {"xla_allow_excess_precision": False}  # or XLA on CPU leaves the rounding out
    both = jax.jit(with_gradients(partial(ours, out="float32")), compiler_options=options)
    got = both(*args)
    assert [x.dtype for x in got] == ["float32", run, "float32"]
    assert all(np.array_equal(x.astype(run), x) for x in got), "more than the low dtype holds"
    close_convolution([x.astype(run) for x in got], plain, args, run)


def test_a_ragged_product_and_both_gradients():
    weights, sizes = jnp.stack([W, 2 * W, -W]), jnp.array([2, 3, 1])
    (*_, eqn) = jax.make_jaxpr(lax.ragged_dot)(X, weights, sizes).eqns
    spec = spec_of(eqn.primitive, eqn.params, "bfloat16", "float32")
    ours = with_gradients(lambda x, w: contract(spec, x, w, sizes))
    plain = with_gradients(lambda x, w: lax.ragged_dot(x, w, sizes))
    args = X, weights, jnp.ones((6, 4))
    low = [jnp.asarray(rounded(x, "bfloat16"), jnp.float32) for x in args]
    for got, want in zip(ours(*args), plain(*low), strict=True):
        close(got, np.asarray(want, np.float64), 8)


SAVEABLE = jax.checkpoint_policies
POLICIES = {
    "nothing": SAVEABLE.nothing_saveable,
    "everything": SAVEABLE.everything_saveable,
    "dots": SAVEABLE.dots_saveable,
    "dots without batch": SAVEABLE.dots_with_no_batch_dims_saveable,
    "these names": SAVEABLE.save_only_these_names("h"),
    "any but these names": SAVEABLE.save_any_names_but_these("h"),
    "anything except these names": SAVEABLE.save_anything_except_these_names("h"),
    "both": SAVEABLE.save_from_both_policies(
        SAVEABLE.dots_saveable, SAVEABLE.save_only_these_names("h")
    ),
    "offload dots": SAVEABLE.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "save and offload names": SAVEABLE.save_and_offload_only_these_names(
        names_which_can_be_saved=["h"], names_which_can_be_offloaded=[],
        offload_src="device", offload_dst="pinned_host",
    ),
    "one's own": lambda of, *_, **how: of.name == "dot_general" and how["precision"] is None,
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_treat_it_as_the_product_it_stands_for(policy, batched):
    dims = (((2,), (1,)), ((0,), (0,))) if batched else PAIR
    x, w = (X[None], W[None]) if batched else (X, W)

    def plain(x, w):
        return lax.dot_general(x, w, dims)

    def gradient(product, region=lambda fn: fn):
        def block(x, w):
            return jnp.sin(checkpoint_name(jnp.sin(product(x, w)), "h")).sum()

        grad = jax.grad(region(jax.checkpoint(block, policy=POLICIES[policy])), (0, 1))
        names = [site.op for site in equations(jax.make_jaxpr(grad)(x, w))]
        counts = Counter("product" if n in ("dot_general", OURS) else n for n in names)
        return counts, jax.jit(grad)(x, w)

    counts, values = gradient(plain)
    for ours, low in (gradient(lambda x, w: dot(x, w, dims)), gradient(plain, autocast)):
        for name in ("product", "sin", "device_put"):
            assert counts[name] == ours[name]
        for a, b in zip(low, values, strict=True):
            assert np.abs(a - b).max() < 0.1 * np.abs(b).max()


def test_units_of_gpus_round_their_sum_once():
    """No float32 result goes through memory."""
    text = export.export(jax.jit(lambda x: dot(x, W, PAIR, out="bfloat16")), platforms=["cuda"])(X)
    (line,) = [line for line in text.mlir_module().splitlines() if "stablehlo.dot_general" in line]
    assert "-> tensor<6x4xbf16>" in line


def test_shapes_that_do_not_fit_are_jaxs_own_error():
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        dot(X, X, PAIR)


def test_an_operand_of_length_zero():
    got = jax.jit(jax.grad(lambda w: dot(jnp.zeros((0, 5)), w, PAIR).sum()))(W)
    assert np.array_equal(got, np.zeros_like(W))
    assert dot(jnp.zeros((3, 0)), jnp.zeros((0, 2)), PAIR).tolist() == [[0, 0]] * 3


ANGLES, RATES = 65536.0 + jnp.arange(8.0), jnp.linspace(0.1, 1.0, 4)
# Products that sum over nothing, of two vectors of float32.
UNSUMMED = {
    "einsum b,bd->bd": lambda n, d: jnp.einsum("b,bd->bd", n, jnp.tile(d, (8, 1))),
    "two of them": lambda n, d: jnp.einsum("nab,abd->nd", n[:, None, None], d[None, None]),
    "batched": lambda n, d: jax.vmap(lambda one: jnp.tensordot(one, d, 0))(n),
    "dot_general": lambda n, d: lax.dot_general(n, d, (((), ()), ((), ()))),
    "ragged_dot": lambda n, d: lax.ragged_dot(n[:, None], d[None, None], jnp.array([8])),
    "convolution": lambda n, d: lax.conv_general_dilated(
        n[None, :, None], d[None, None], (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
    )[0],
    "convolution channel by channel": lambda n, d: lax.conv_general_dilated(
        jnp.tile(n[None, None, :, None], 4), d[None, None, None], (1, 1), "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=4,
    )[0, 0],
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", UNSUMMED)
@pytest.mark.parametrize("policy", ["amp", "lean", "fp8"])
def test_a_product_that_sums_over_nothing_is_a_multiplication(name: str, policy: str) -> None:
    fn = UNSUMMED[name]
    region = autocast(lambda *xs: jnp.cos(fn(*xs)), policy=policy)
    assert np.array_equal(region(ANGLES, RATES), jnp.cos(fn(ANGLES, RATES)))
    low = ANGLES.astype(jnp.bfloat16), RATES.astype(jnp.bfloat16)
    assert autocast(fn, policy=policy)(*low).dtype == jnp.bfloat16
    wide = jax.grad(lambda *xs: autocast(fn, policy=policy)(*xs).sum(), (0, 1))(ANGLES, RATES)
    plain = jax.grad(lambda *xs: fn(*xs).sum(), (0, 1))(ANGLES, RATES)
    assert all(map(np.array_equal, wide, plain))


def test_a_multiplication_follows_the_row_of_mul() -> None:
    def linear(x: Any, w: Any) -> Any:
        return x @ w

    x, w = jnp.ones((8, 1)), jnp.ones((1, 4))
    assert autocast(linear)(x, w).dtype == jnp.float32
    for row in ("mul", "jax:dot_general:unsummed"):
        assert autocast(linear, policy={"rules": {row: "lower"}})(x, w).dtype == jnp.bfloat16
    assert autocast(linear)(jnp.ones((8, 2)), jnp.ones((2, 4))).dtype == jnp.bfloat16
    assert [call.op for call in explain(linear, x, w, dtype="bfloat16").calls] == ["mul"]


X2, W2, GROUPS = jnp.ones((8, 4)), jnp.ones((4, 4)), jnp.array([3, 5])
MATRICES, RAGGED = (
    jnp.stack([W2, W2]),
    lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0]),
)
IMAGES = X2[None, None], W2[None, None], (1, 1), "SAME"
# Products that take a `preferred_element_type`.
PREFERRED = {
    "dot": partial(lax.dot, X2, W2),
    "dot_general": partial(lax.dot_general, X2, W2, PAIR),
    "jnp.dot": partial(jnp.dot, X2, W2),
    "matmul": partial(jnp.matmul, X2, W2),
    "vecdot": partial(jnp.vecdot, X2, X2),
    "inner": partial(jnp.inner, X2, W2),
    "einsum": partial(jnp.einsum, "ij,jk", X2, W2),
    "tensordot": partial(jnp.tensordot, X2, W2, 1),
    "ragged_dot": partial(lax.ragged_dot, X2, MATRICES, GROUPS),
    "ragged_dot_general": partial(lax.ragged_dot_general, X2, MATRICES, GROUPS, RAGGED),
    "conv": partial(lax.conv, *IMAGES),
    "conv_general_dilated": partial(lax.conv_general_dilated, *IMAGES),
}
FLOAT32 = (jnp.float32, np.float32, "float32", "f4", jnp.dtype("float32"), np.dtype("f4"))


@pytest.mark.parametrize("name", PREFERRED)
def test_a_dtype_is_the_same_however_it_is_spelled(name: str) -> None:
    for dtype in FLOAT32:
        run = autocast(partial(PREFERRED[name], preferred_element_type=dtype))
        assert run().dtype == jnp.bfloat16, dtype
