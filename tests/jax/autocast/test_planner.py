"""The rules by which the rewrite keeps its books: one test for each, named after what it protects.

A test looks at the rewritten program, at its results' dtypes, or at numbers that only the right
rule gives.
"""

import functools
import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo as fused_attention
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core

from polymp.jax import autocast, call_in, lower, upper
from tests.support.jax.walker import Site, equations

X = jnp.linspace(-1.0, 1.0, 16, dtype=jnp.float32).reshape(4, 4)
W = jnp.cos(jnp.arange(16.0)).reshape(4, 4)
AUTO = jax.sharding.AxisType.Auto
half = partial(autocast, dtype=jnp.float16)


def ops(fn: Any, *args: Any) -> list[Site]:
    return list(equations(jax.make_jaxpr(fn)(*args)))


def named(found: list[Site], name: str) -> list[Site]:
    return [op for op in found if op.op == name]


def dtypes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.dtype.name, tree)


def test_rule_1_operands_that_are_declared_alike_stay_alike():
    def f(x, w):
        low = x @ w
        return (
            jnp.concatenate([low, jnp.exp(x)]),
            jnp.where(x > 0, low, jnp.exp(x)),
            jnp.clip(low, jnp.exp(x), 3.0),
            jnp.zeros((4, 4)).at[0].set(low[0]),
            low + low,
        )

    assert dtypes(autocast(f)(X, W)) == ("float32",) * 4 + ("bfloat16",)


def test_rule_1_what_no_table_names_gets_its_declared_dtypes():
    bits = autocast(lambda x, w: lax.bitcast_convert_type(x @ w, jnp.int32))(X, W)
    assert bits.shape == (4, 4)
    assert bits.dtype == jnp.int32
    found = ops(autocast(lambda x, w: jnp.linalg.cholesky(x @ w + 9 * jnp.eye(4))), X, W)
    (cholesky,) = named(found, "cholesky")
    assert cholesky.operands == cholesky.results == ("float32",)


def test_rule_2_numbers_never_promote_not_even_through_a_jitted_helper():
    def f(x, w):
        low = x @ w
        return low * 0.5, low + np.float32(3), jnp.where(x > 0, low, 0.0), jnp.maximum(low, 0.1)

    assert dtypes(autocast(f)(X, W)) == ("bfloat16",) * 4


def test_rule_2_a_mask_of_the_smallest_float32_is_clamped_and_a_row_of_it_is_uniform():
    def f(x, w):
        return jax.nn.softmax(jnp.where(jnp.zeros((4, 4), bool), x @ w, jnp.finfo("float32").min))

    for dtype in (jnp.float16, jnp.bfloat16):
        assert np.array_equal(autocast(f, dtype=dtype)(X, W), np.full((4, 4), 0.25, np.float32))


@pytest.mark.parametrize("number", [1e-12, 1e6])
def test_rule_2_a_number_that_float16_cannot_hold_promotes_instead(number):
    out = half(lambda x, w: (x @ w) * number)(X, W)
    assert out.dtype == jnp.float32
    assert np.count_nonzero(out) > 8
    assert np.isfinite(out).all()
    assert autocast(lambda x, w: (x @ w) * number)(X, W).dtype == jnp.bfloat16


def test_rule_2_a_scalar_argument_never_promotes_an_array_and_is_not_rounded():
    def f(x, w, s):
        low = x @ w
        return low * s, low[0, 0] * s, low * (2 * s), jnp.where(x > 0, low, s)

    out = half(f)(X, W, jnp.float32(1e-6))
    assert dtypes(out) == ("float16", "float32", "float16", "float16")
    # float16 holds 1e-6 as 9.54e-7: the product is rounded, the scalar before it is not.
    low = np.float32(half(jnp.matmul)(X, W))
    assert np.array_equal(out[0], (low * np.float32(1e-6)).astype(np.float16))
    assert np.isfinite(half(lambda x, w, s: x @ w * s / s)(X, W, jnp.float32(2.0**16))).all()


@pytest.mark.parametrize("small", [np.float32(1e-12), jnp.float32(1e-12), 1e-12])
def test_rule_2_a_constant_counts_as_the_number_it_is(small):
    zero = jnp.zeros((4, 4))
    out = half(lambda x, w: (x @ w) / (x @ w + small))(zero, W)
    assert np.array_equal(out, zero)
    spread = half(lambda x, w: jnp.where(x > 2, x @ w, jnp.full((4, 4), -6e4) * 2))(X, W)
    assert np.array_equal(spread, np.full((4, 4), -12e4))


def test_rule_1_integers_in_a_product_are_left_alone():
    many = jnp.full((4, 4), 1001)
    dims = (((1,), (0,)), ((), ()))
    out = autocast(lambda n, x: lax.dot_general(n, x, dims, preferred_element_type=jnp.float32))
    assert np.array_equal(out(many, jnp.ones((4, 4))), np.full((4, 4), 4004, np.float32))


def test_rule_1_fp32_keep_holds_for_products_too():
    keep = {"rules": {"linear": "fp32_keep"}}
    low = X.astype(jnp.bfloat16)
    assert autocast(jnp.matmul, policy=keep)(low, low).dtype == jnp.bfloat16
    found = ops(autocast(jnp.matmul, policy=keep), low, low)
    assert named(found, "dot_general")[0].operands == ("float32", "float32")


def test_rule_3_an_accumulator_that_was_asked_for_stays_and_the_one_jnp_fills_in_does_not():
    def f(x, w):
        low = x.astype(jnp.bfloat16)
        return jnp.dot(low, low, preferred_element_type=jnp.float32), jnp.dot(x, w)

    assert dtypes(autocast(f)(X, W)) == ("float32", "bfloat16")


def test_rule_3_the_backward_contractions_are_as_low_as_the_forward_ones():
    grad = jax.grad(lambda x, w: autocast(lambda x, w: jnp.tanh(x @ w) @ w)(x, w).sum(), (0, 1))
    found = ops(grad, X, W)
    contractions = named(found, "polymp_contraction")
    assert len(contractions) == 6
    assert {op.params["run"] for op in contractions} == {"bfloat16"}
    assert not named(found, "dot_general")


def test_rule_4_a_bias_does_not_promote_and_any_other_parameter_does():
    b = jnp.ones(4)

    def f(x, w, b):
        return x @ w + b, (x @ w).reshape(8, 2) + b[:2], (x @ w) * b, x @ w + x @ w + b

    assert dtypes(autocast(f)(X, W, b)) == ("bfloat16", "bfloat16", "float32", "bfloat16")
    conv = autocast(lambda x, w, b: lax.conv(x[None, None], w[None, None], (1, 1), "SAME") + b)
    assert conv(X, W, b).dtype == jnp.bfloat16


def test_rule_5_a_carry_is_never_narrower_than_its_start_and_has_one_dtype():
    def scan(mark):
        return autocast(lambda c: lax.scan(lambda c, _: (c @ W, c), mark(c), None, length=2))(X)

    assert dtypes(scan(lambda c: c)) == ("float32", "float32")
    assert dtypes(scan(lower)) == ("bfloat16", "bfloat16")

    def swap(a, b, w):  # b's dtype reaches a one round later
        body = lambda _, s: (s[1], s[0] @ w)  # noqa: E731
        return lax.fori_loop(0, 3, body, (lower(a), lower(b)))

    assert dtypes(autocast(swap)(X, X, W)) == ("bfloat16", "bfloat16")
    assert dtypes(autocast(lambda a, b, w: lax.fori_loop(0, 3, lambda _, s: (s[1], s[0]), (
        lower(a), b)))(X, X, W)) == ("float32", "float32")  # fmt: skip


def test_rule_6_branches_meet_in_the_widest_dtype_and_numbers_follow():
    def f(p, x, w):
        low = x @ w
        return (
            lax.cond(p, lambda: low, lambda: jnp.exp(x)),
            lax.cond(p, lambda: low, lambda: 2 * low),
            lax.switch(0, [lambda: (low, 1.0), lambda: (jnp.exp(x), low[0, 0])]),
        )

    assert dtypes(autocast(f)(True, X, W)) == ("float32", "bfloat16", ("float32", "bfloat16"))
    assert dtypes(autocast(f)(jnp.array(True), X, W)) == dtypes(autocast(f)(True, X, W))


def test_rule_6_branches_by_platform_survive():
    def f(x, w):
        return lax.platform_dependent(x @ w, cpu=lambda a: a + 1, default=lambda a: a - 1)

    got, plain = jax.jit(autocast(f))(X, W), f(X, W)
    assert got.dtype == jnp.bfloat16
    assert np.abs(np.float32(got) - plain).max() < 0.05


def test_rule_7_a_jitted_function_keeps_its_name_and_settings_and_is_rewritten_once():
    inner = jax.jit(lambda x, w: jnp.tanh(x @ w), donate_argnums=(), keep_unused=True)

    def f(x, w):
        return inner(inner(x, w), w) + inner(x, w)

    def calls(fn: Any) -> list[Any]:
        return [e for e in jax.make_jaxpr(fn)(X, W).eqns if e.primitive.name == "jit"]

    before, after = calls(f), calls(autocast(f))
    assert len(before) == len(after) == 3
    for old, new in zip(before, after, strict=True):
        for key in old.params.keys() - {"jaxpr"}:
            assert old.params[key] == new.params[key], key
    bodies = [call.params["jaxpr"] for call in after]
    assert bodies[0] is bodies[2]
    assert bodies[0] is not bodies[1]  # the second takes a low argument


def test_rule_9_two_functions_may_share_a_body_and_not_a_rule():
    def twice(x):
        return 2 * x

    ten, hundred = jax.custom_jvp(twice), jax.custom_jvp(twice)
    ten.defjvp(lambda p, t: (twice(*p), 10 * t[0]))
    hundred.defjvp(lambda p, t: (twice(*p), 100 * t[0]))
    grad = jax.grad(autocast(lambda x: (ten(x) + hundred(x)).sum()))
    assert np.array_equal(grad(X), np.full((4, 4), 110))


def test_rule_9_a_parameters_gradient_is_not_rounded_by_a_rule_either():
    @jax.custom_jvp
    def forward(x, w):
        return x @ w

    @forward.defjvp
    def _(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        return x @ w, dx @ w + x @ dw

    @jax.custom_vjp
    def reverse(x, w):
        return x @ w

    reverse.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, ct: (ct @ r[1].T, r[0].T @ ct))
    for fn in (jnp.matmul, forward, reverse):
        grad = jax.grad(lambda w, fn=fn: jnp.sin(autocast(fn)(X, w)).sum())(W)
        assert not np.array_equal(grad, grad.astype(jnp.bfloat16).astype(jnp.float32))


def test_rule_9_a_rule_runs_in_the_region_of_the_call():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, ct: (ct @ r[1].T, r[0].T @ ct))

    def f(x, w):
        with half():
            return product(x, w)

    found = named(ops(jax.grad(lambda x, w: autocast(f)(x, w).sum(), (0, 1)), X, W),
                  "polymp_contraction")  # fmt: skip
    assert [op.params["run"] for op in found] == ["float16"] * 3


def test_rule_10_a_sum_over_devices_keeps_its_dtype_and_no_cast_moves_through_it():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AUTO,))

    def loss(w, x):
        def body(x, w):
            return lax.psum((x @ w).astype(jnp.float32).sum(), "d")

        specs = (jax.P("d"), jax.P())
        return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=jax.P())(x, w)

    found = ops(jax.grad(autocast(loss)), W, X)
    sums = [op for op in found if op.op.startswith("psum")]
    assert sums
    assert all(op.operands == ("float32",) for op in sums)
    assert {op.params["run"] for op in named(found, "polymp_contraction")} == {"bfloat16"}


def test_rule_11_off_means_as_written_and_upper_marks_what_a_trace_cannot_show():
    def f(x, w):
        low = x @ w
        with autocast(enabled=False):
            written = low * 2
        return low.astype(jnp.float32) * 2, upper(low) * 2, written

    assert dtypes(autocast(f)(X, W)) == ("bfloat16", "float32", "float32")
    marked = jax.make_jaxpr(jax.grad(lambda x: autocast(lambda x: upper(x @ W) * 2)(x).sum()))(X)
    assert "polymp:upper" not in str(marked)


def test_rule_12_python_sees_the_dtypes_as_written_and_call_in_shows_others():
    seen = []

    def kernel(x):
        seen.append(x.dtype.name)
        return x * 2

    out = autocast(lambda x, w: (kernel(x @ w), call_in(kernel, jnp.float16)(x @ w)))(X, W)
    assert seen == ["float32", "float16"]
    assert dtypes(out) == ("bfloat16", "float16")
    assert call_in(kernel, jnp.float16)(X).dtype == jnp.float16  # a real cast, region or not


@pytest.fixture
def cudnn_there(monkeypatch):
    """jax asks for a library and a device that only a GPU's build has; here it finds both."""
    monkeypatch.setattr(fused_attention, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused_attention, "check_compute_capability", lambda capability: True)


def notes(error):
    """Our notes of an error; jax has its own."""
    return [note for note in getattr(error, "__notes__", []) if "polymp" in note]


def attend(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")


@pytest.mark.usefixtures("cudnn_there")
def test_rule_12_an_error_of_cudnn_about_dtypes_says_what_to_write():
    q = jnp.ones((2, 128, 4, 64))
    with pytest.raises(NotImplementedError, match="Q must be fp16/bf16") as caught:
        autocast(attend, dtype=jnp.float16)(q, q, q)
    (note,) = notes(caught.value)
    assert note == (
        "polymp.jax.autocast traces a function in the dtypes as written, and casts afterwards; "
        "cuDNN's kernels ask for low ones before that. Cast around the call: "
        "call_in(functools.partial(jax.nn.dot_product_attention, implementation='cudnn'), "
        "jax.numpy.float16)(query, key, value)."
    )
    line = note.partition("Cast around the call: ")[2].removesuffix(".")
    names = {"call_in": call_in, "functools": functools, "jax": jax}

    def as_written(query, key, value):
        return eval(line, names | {"query": query, "key": key, "value": value})

    for fn in (as_written, autocast(as_written)):
        assert jax.eval_shape(fn, q, q, q).dtype == jnp.float16

    with pytest.raises(NotImplementedError) as outside:
        attend(q, q, q)
    with pytest.raises(NotImplementedError) as off:
        autocast(attend, enabled=False)(q, q, q)
    with pytest.raises(NotImplementedError, match="head dim") as shapes:
        autocast(call_in(attend, jnp.float16))(*[q[..., :60]] * 3)
    for error in (outside.value, off.value, shapes.value):
        assert notes(error) == []


def test_rule_12_other_errors_are_left_alone():
    def wrong(x):
        raise NotImplementedError("not yet")

    with pytest.raises(NotImplementedError) as caught:
        autocast(wrong)(X)
    assert notes(caught.value) == []


def test_rule_13_only_arrays_are_traced_and_everything_else_stays_itself():
    def f(x, flag, scale, name, nothing, fn):
        assert flag is True
        assert isinstance(scale, float)
        return {"y": fn(x @ x) * scale, "name": name, "nothing": nothing, "flag": flag}

    out = autocast(f)(X, True, 0.5, "a name", None, jnp.tanh)
    assert out["y"].dtype == jnp.bfloat16
    assert (out["name"], out["nothing"], out["flag"]) == ("a name", None, True)


def test_rule_13_closed_over_tracers_are_differentiated():
    grad = jax.grad(lambda w: autocast(lambda x: (x @ w).sum())(X))(W)
    assert np.abs(grad - jax.grad(lambda w: (X @ w).sum())(W)).max() < 0.05


def test_rule_14_the_state_of_an_nnx_module_survives():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    model.calls = nnx.Variable(jnp.array(0))

    def loss(model, x):
        model.calls[...] += 1
        return model(x @ W).sum()

    _ = nnx.jit(nnx.value_and_grad(autocast(loss)))(model, X)
    _ = autocast(loss)(model, X)
    assert model.calls[...] == 2
    assert model.mean[...].dtype == jnp.float32
    assert np.abs(model.mean[...]).max() > 0


def test_rule_15_gradients_of_a_wrapped_loss_have_the_parameters_dtype():
    def loss(w, x):
        return jnp.tanh(x @ w).sum()

    assert jax.grad(autocast(loss))(W, X).dtype == jnp.float32
    # The other order runs the derivative's own ops, whose results come as they are.
    assert autocast(jax.grad(loss))(W, X).dtype == jnp.bfloat16
    assert autocast(jax.grad(autocast(loss)))(W, X).dtype == jnp.bfloat16


def test_rule_16_results_come_in_the_dtype_they_were_computed_in():
    out = autocast(lambda x, w: (x @ w, jnp.exp(x @ w), x, 3))(X, W)
    assert dtypes(out[:3]) == ("bfloat16", "float32", "float32")
    assert out[3] == 3


def test_rule_17_what_is_not_float32_or_below_is_left_alone():
    key = jax.random.key(0)

    def f(x, w, n, key, z):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return x @ w, n @ n, keep, jax.random.split(key), z @ z, jax.random.normal(key, (2,))

    n, z = jnp.arange(16).reshape(4, 4), X + 1j * W
    got, plain = autocast(f)(X, W, n, key, z), f(X, W, n, key, z)
    assert got[0].dtype == jnp.bfloat16
    for a, b in zip(got[1:], plain[1:], strict=True):
        assert a.dtype == b.dtype
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            assert np.array_equal(a, b)
    with jax.enable_x64(True):
        wide = autocast(lambda x: (x @ x, x.astype(jnp.float32) @ x.astype(jnp.float32)))(
            np.float64(X)
        )
    assert dtypes(wide) == ("float64", "bfloat16")


def test_rule_17_ordered_effects_keep_their_order_and_see_declared_dtypes():
    seen = []

    def f(x, w):
        low = x @ w
        jax.debug.callback(lambda a: seen.append(("first", a.dtype.name)), low, ordered=True)
        jax.debug.callback(lambda a: seen.append(("second", a.dtype.name)), low * 2, ordered=True)
        return low

    jax.block_until_ready(jax.jit(autocast(f))(X, W))
    jax.effects_barrier()
    assert seen == [("first", "float32"), ("second", "float32")]


def test_rule_18_a_scatter_carries_its_update_in_its_own_dtype():
    def f(x, w):
        low = x @ w
        return low.at[0].add(low[1]), low.at[0].max(low[1]), low.at[0].mul(low[1])

    found = ops(autocast(f), X, W)
    runs = {"scatter-add": "float32", "scatter-max": "bfloat16", "scatter-mul": "bfloat16"}
    for name, dtype in runs.items():  # what adds up does so in float32
        (op,) = named(found, name)
        assert op.results == (dtype,)
        update = op.params["update_jaxpr"]
        if update is not None:
            assert {str(v.aval.dtype) for v in update.invars} == {dtype}
    assert dtypes(jax.jit(autocast(f))(X, W)) == ("bfloat16",) * 3


def test_rule_19_names_and_contexts_of_equations_are_kept_and_marks_are_not():
    def f(x, w):
        with jax.named_scope("layer"), half():
            y = x @ w
        with jax.named_scope("head"), set_xla_metadata(group="mine"):
            return jnp.sin(y)

    eqns = jax.make_jaxpr(autocast(f))(X, W).eqns
    contraction, sine = (e for e in eqns if e.primitive.name in ("polymp_contraction", "sin"))
    assert str(contraction.source_info.name_stack) == "layer"
    assert str(sine.source_info.name_stack) == "head"
    assert contraction.ctx.xla_metadata is None
    assert sine.ctx.xla_metadata == {"group": "mine"}
    assert "polymp" not in str(jax.make_jaxpr(autocast(f, enabled=False))(X, W)).replace(
        "polymp_contraction", ""
    )


def test_rule_20_a_change_of_weakness_is_no_cast():
    def f(x, w):
        return lax.convert_element_type(x @ w, jnp.float32) * 2

    found = ops(autocast(f), X, W)
    assert not named(found, "convert_element_type")
    assert autocast(f)(X, W).dtype == jnp.bfloat16


def test_rule_21_the_products_inside_linear_algebra_are_not_the_users():
    a = 4 * jnp.eye(4) + 0.1 * W

    def f(a, x):
        return jnp.linalg.solve(a, x), jnp.linalg.inv(a), jnp.linalg.det(a), jnp.linalg.norm(x)

    found = ops(autocast(f), a, X)
    assert not named(found, "polymp_contraction")
    for got, plain in zip(autocast(f)(a, X), f(a, X), strict=True):
        assert got.dtype == jnp.float32
        assert np.array_equal(got, plain)


def test_a_primitive_with_an_unknown_program_inside_runs_as_written_and_is_named_once():
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    p = Primitive("mystery")
    inner = jax.make_jaxpr(lambda x: x @ x)(X)
    run = core.jaxpr_as_fun(inner)
    p.def_impl(lambda x, *, inner: run(x)[0])
    p.def_abstract_eval(lambda x, *, inner: x)
    mlir.register_lowering(p, mlir.lower_fun(lambda x, *, inner: run(x)[0], False))

    def f(x):
        return p.bind(p.bind(x @ x, inner=inner), inner=inner)

    with pytest.warns(UserWarning, match="does not know") as caught:
        out = autocast(f)(X)
    assert [str(w.message) for w in caught] == [
        "polymp.jax.autocast does not know the primitive 'mystery': the program inside it runs in "
        "the dtypes it is written in."
    ]
    assert out.dtype == jnp.float32


def test_what_has_no_program_inside_is_no_reason_to_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = autocast(lambda x: jnp.fft.fft(x @ x).real)(X)
    assert out.dtype == jnp.float32
