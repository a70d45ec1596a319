"""The rewrite keeps the rest of a program, and decides some dtypes that no table shows.

A test looks at the rewritten program, at its results' dtypes, or at numbers that only the right
rule gives.
"""

import cProfile
import functools
from collections.abc import Callable
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
from jax.interpreters import mlir

from polymp.jax import autocast, upper
from tests.support.jax.walker import Site, equations

X = jnp.linspace(-1.0, 1.0, 16, dtype=jnp.float32).reshape(4, 4)
W = jnp.cos(jnp.arange(16.0)).reshape(4, 4)
AUTO = jax.sharding.AxisType.Auto
half = partial(autocast, dtype=jnp.float16)


def named(name: str, fn: Any, *args: Any) -> list[Site]:
    """The equations of that name, at every depth, in a program."""
    return [op for op in equations(jax.make_jaxpr(fn)(*args)) if op.op == name]


def dtypes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.dtype.name, tree)


def test_what_no_table_names_gets_its_declared_dtypes():
    bits = autocast(lambda x, w: lax.bitcast_convert_type(x @ w, jnp.int32))(X, W)
    assert bits.shape == (4, 4)
    assert bits.dtype == jnp.int32


def test_a_mask_of_the_smallest_float32_is_clamped_and_a_row_of_it_is_uniform():
    def f(x, w):
        return jax.nn.softmax(jnp.where(jnp.zeros((4, 4), bool), x @ w, jnp.finfo("float32").min))

    for dtype in (jnp.float16, jnp.bfloat16):
        assert np.array_equal(autocast(f, dtype=dtype)(X, W), np.full((4, 4), 0.25, np.float32))


def test_a_scalar_argument_never_promotes_an_array_and_is_not_rounded():
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
def test_a_constant_counts_as_the_number_it_is(small):
    zero = jnp.zeros((4, 4))
    out = half(lambda x, w: (x @ w) / (x @ w + small))(zero, W)
    assert np.array_equal(out, zero)
    spread = half(lambda x, w: jnp.where(x > 2, x @ w, jnp.full((4, 4), -6e4) * 2))(X, W)
    assert np.array_equal(spread, np.full((4, 4), -12e4))


def test_branches_by_platform_survive():
    def f(x, w):
        return lax.platform_dependent(x @ w, cpu=lambda a: a + 1, default=lambda a: a - 1)

    got, plain = jax.jit(autocast(f))(X, W), f(X, W)
    assert got.dtype == jnp.bfloat16
    assert np.abs(np.float32(got) - plain).max() < 0.05


def test_a_jitted_function_keeps_its_name_and_settings_and_is_rewritten_once():
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


def test_two_functions_may_share_a_body_and_not_a_rule():
    def twice(x):
        return 2 * x

    ten, hundred = jax.custom_jvp(twice), jax.custom_jvp(twice)
    ten.defjvp(lambda p, t: (twice(*p), 10 * t[0]))
    hundred.defjvp(lambda p, t: (twice(*p), 100 * t[0]))
    grad = jax.grad(autocast(lambda x: (ten(x) + hundred(x)).sum()))
    assert np.array_equal(grad(X), np.full((4, 4), 110))


def test_a_parameters_gradient_is_not_rounded_by_a_rule_either():
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


def test_a_sum_over_devices_keeps_its_dtype_and_no_cast_moves_through_it():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AUTO,))

    def loss(w, x):
        def body(x, w):
            return lax.psum((x @ w).astype(jnp.float32).sum(), "d")

        specs = (jax.P("d"), jax.P())
        return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=jax.P())(x, w)

    found = list(equations(jax.make_jaxpr(jax.grad(autocast(loss)))(W, X)))
    assert {op.operands for op in found if op.op.startswith("psum")} == {("float32",)}
    assert {op.params.get("run", "bfloat16") for op in found} == {"bfloat16"}
    assert any(op.op == "polymp_contraction" for op in found)


def test_python_sees_the_dtypes_as_written_and_a_disabled_region_shows_others():
    seen = []

    def kernel(x):
        seen.append(x.dtype.name)
        return x * 2

    as_written = autocast(kernel, enabled=False)
    out = autocast(lambda x, w: (kernel(x @ w), as_written((x @ w).astype(jnp.float16))))(X, W)
    assert seen == ["float32", "float16"]
    assert dtypes(out) == ("bfloat16", "float16")


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
def test_an_error_of_cudnn_about_dtypes_says_what_to_write():
    q = jnp.ones((2, 128, 4, 64))
    with pytest.raises(NotImplementedError, match="Q must be fp16/bf16") as caught:
        autocast(attend, dtype=jnp.float16)(q, q, q)
    (note,) = notes(caught.value)
    assert note == (
        "polymp.jax.autocast traces a function in the dtypes as written, and casts afterwards; "
        "cuDNN's kernels ask for low ones before that. Cast around the call: "
        "autocast(functools.partial(jax.nn.dot_product_attention, implementation='cudnn'), "
        "enabled=False)(*(x.astype('float16') for x in (query, key, value)))."
    )
    line = note.partition("Cast around the call: ")[2].removesuffix(".")
    names = {"autocast": autocast, "functools": functools, "jax": jax}

    def as_written(query, key, value):
        return eval(line, names | {"query": query, "key": key, "value": value})

    for fn in (as_written, autocast(as_written)):
        assert jax.eval_shape(fn, q, q, q).dtype == jnp.float16

    def not_yet(*qkv):
        raise NotImplementedError("not yet")

    def of_60(q, k, v):
        low = (x[..., :60].astype(jnp.float16) for x in (q, k, v))
        return autocast(attend, enabled=False)(*low)

    for fn, words in (
        (attend, "Q must be"),
        (autocast(attend, enabled=False), "Q must be"),
        (autocast(of_60), "head dim"),
        (autocast(not_yet), "not yet"),
    ):
        with pytest.raises(NotImplementedError, match=words) as other:
            fn(q, q, q)
        assert notes(other.value) == []


def test_only_arrays_are_traced_and_everything_else_stays_itself():
    def f(x, flag, scale, name, nothing, fn):
        assert flag is True
        assert isinstance(scale, float)
        return {"y": fn(x @ x) * scale, "name": name, "nothing": nothing, "flag": flag}

    out = autocast(f)(X, True, 0.5, "a name", None, jnp.tanh)
    assert out["y"].dtype == jnp.bfloat16
    assert (out["name"], out["nothing"], out["flag"]) == ("a name", None, True)


def test_ordered_effects_keep_their_order_and_see_declared_dtypes():
    seen = []

    def f(x, w):
        low = x @ w
        jax.debug.callback(lambda a: seen.append(("first", a.dtype.name)), low, ordered=True)
        jax.debug.callback(lambda a: seen.append(("second", a.dtype.name)), low * 2, ordered=True)
        return low

    jax.block_until_ready(jax.jit(autocast(f))(X, W))
    jax.effects_barrier()
    assert seen == [("first", "float32"), ("second", "float32")]


def test_a_scatter_carries_its_update_in_its_own_dtype():
    def f(x, w):
        low = x @ w
        return low.at[0].add(low[1]), low.at[0].max(low[1]), low.at[0].mul(low[1])

    runs = {"scatter-add": "float32", "scatter-max": "bfloat16", "scatter-mul": "bfloat16"}
    for name, dtype in runs.items():  # what adds up does so in float32
        (op,) = named(name, autocast(f), X, W)
        assert op.results == (dtype,)
        update = op.params["update_jaxpr"]
        if update is not None:
            assert {str(v.aval.dtype) for v in update.invars} == {dtype}
    assert dtypes(jax.jit(autocast(f))(X, W)) == ("bfloat16",) * 3


def test_names_and_contexts_of_equations_are_kept_and_marks_are_not():
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
    marked = jax.grad(lambda x: autocast(lambda x: upper(x @ W) * 2)(x).sum())
    for program in (jax.make_jaxpr(autocast(f, enabled=False))(X, W), jax.make_jaxpr(marked)(X)):
        assert "polymp" not in str(program).replace("polymp_contraction", "")


def test_a_primitive_with_an_unknown_program_inside_runs_as_written_and_is_named_once():
    p = core.Primitive("mystery")
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
    assert caught[0].filename == __file__, "the line of the caller"
    assert out.dtype == jnp.float32


def chain(x: jax.Array, blocks: int) -> jax.Array:
    """A contraction, ops in float32 and others; five equations a block."""
    for _ in range(blocks):
        x = lax.tanh(lax.dot(x, W)) + lax.exp(-x)
    return x


def calls(work: Callable[[], Any]) -> int:
    """How many Python functions are called meanwhile."""
    profile = cProfile.Profile(builtins=False)
    profile.runcall(work)
    return sum(entry.callcount for entry in profile.getstats())


def added(blocks: int) -> int:
    """The calls that a region adds to the trace of a chain."""

    def traced(region: Callable[..., Any]) -> int:
        return calls(lambda: jax.make_jaxpr(region(partial(chain, blocks=blocks)))(X))

    first, second = (traced(half) - traced(partial) for _ in range(2))
    return min(first, second)  # jax's caches are full by then


def test_the_work_grows_with_the_equations() -> None:
    """The second half of a chain takes no more than the first; a call for each pair would."""
    few, many = added(40), added(80)
    assert 0.5 * few < many - few <= 1.01 * few
    pairs = [calls(lambda n=n: [chain(X, 0) for _ in range(n * n)]) for n in (40, 80)]
    assert many + pairs[1] - few - pairs[0] > 1.01 * (few + pairs[0])
