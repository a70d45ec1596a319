"""The walker of jaxprs finds what is wrong, wherever it stands, and lets pass what is not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

from tests.support.jax.walker import CONTRACTIONS, FLOAT32, equations, violations

X = jnp.ones((3, 3), jnp.float32)
H = jnp.ones((3, 3), jnp.bfloat16)

contraction_p = Primitive("polymp_contraction")  # what the backend emits, without the backend


@contraction_p.def_abstract_eval
def _(x: Any, y: Any, *, run: str, out: str, of: str, params: Any) -> Any:
    return jax.core.ShapedArray((x.shape[0], y.shape[1]), jnp.dtype(out))


def ours(x: Any, y: Any, run: str = "bfloat16", out: str = "bfloat16") -> Any:
    return contraction_p.bind(x, y, run=run, out=out, of="dot_general", params=())


def rules(fn: Callable[..., Any], *args: Any, run: str = "bfloat16") -> set[str]:
    return {v.rule for v in violations(jax.make_jaxpr(fn)(*args), run)}


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "acos": lax.acos,
    "asin": lax.asin,
    "cosh": lax.cosh,
    "cumprod": lax.cumprod,
    "cumsum": lax.cumsum,
    "cumlogsumexp": lax.cumlogsumexp,
    "erf_inv": lax.erf_inv,
    "exp": lax.exp,
    "exp2": lax.exp2,
    "expm1": lax.expm1,
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "log": lax.log,
    "log1p": lax.log1p,
    "pow": lambda x: lax.pow(x, x),
    "reduce_prod": lambda x: lax.reduce_prod_p.bind(x, axes=(0,), out_sharding=None),
    "reduce_sum": lambda x: lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None),
    "rsqrt": lax.rsqrt,
    "sinh": lax.sinh,
    "square": lax.square,
    "tan": lax.tan,
}


def test_every_float32_function_has_a_row_here():
    assert set(FUNCTIONS) == set(FLOAT32)


@pytest.mark.parametrize("name", FLOAT32)
def test_a_float32_function_of_a_low_value_is_found(name):
    found = violations(jax.make_jaxpr(FUNCTIONS[name])(H), "bfloat16")
    assert [(v.rule, v.site.op) for v in found] == [("float32", name)]
    assert rules(FUNCTIONS[name], H.astype(jnp.float16), run="float16") == {"float32"}
    assert rules(FUNCTIONS[name], X) == set()
    assert rules(lambda x: FUNCTIONS[name](x.astype(jnp.float32)), H) == set()


CONTRACTS: dict[str, Callable[[Any], Any]] = {
    "dot_general": lambda x: x @ x,
    "conv_general_dilated": lambda x: lax.conv(x[None, None], x[None, None], (1, 1), "SAME"),
    "ragged_dot_general": lambda x: lax.ragged_dot(x, x[None], jnp.array([3], jnp.int32)),
}


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_contraction_left_in_float32_is_found(name):
    found = violations(jax.make_jaxpr(CONTRACTS[name])(X), "bfloat16")
    assert [v.rule for v in found] == ["low"]
    assert found[0].site.op in CONTRACTIONS
    assert rules(CONTRACTS[name], H) == set()
    assert rules(CONTRACTS[name], jnp.ones((3, 3), jnp.int32)) == set()


def test_one_float32_operand_is_enough():
    mixed = partial(lax.dot_general, dimension_numbers=(((1,), (0,)), ((), ())))
    assert rules(mixed, H, X) == {"low"}


# Every place where an equation can hide.


@jax.custom_jvp
def with_jvp(x: jax.Array) -> jax.Array:
    return bad(x)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0] * 2))


@jax.custom_vjp
def with_vjp(x: jax.Array) -> jax.Array:
    return bad(x)


with_vjp.defvjp(lambda x: (with_vjp(x), x), lambda x, g: (g * x,))


def bad(x: jax.Array) -> jax.Array:
    """A contraction in float32 and an exponential in bfloat16."""
    return (x @ x) * jnp.exp(x.astype(jnp.bfloat16)).astype(jnp.float32)


def sharded(x: jax.Array) -> jax.Array:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = PartitionSpec()
    return jax.shard_map(bad, mesh=mesh, in_specs=whole, out_specs=whole)(x)


PLACES: dict[str, Callable[[Any], Any]] = {
    "flat": bad,
    "jit": jax.jit(bad),
    "scan": lambda x: lax.scan(lambda c, _: (bad(c), None), x, None, length=2)[0],
    "fori": lambda x: lax.fori_loop(0, 2, lambda _, c: bad(c), x),
    "while_body": lambda x: lax.while_loop(lambda c: c[0, 0] < 2, bad, x),
    "while_test": lambda x: lax.while_loop(lambda c: bad(c)[0, 0] < 2, lambda c: c + 1, x),
    "cond": lambda x: lax.cond(x[0, 0] > 0, bad, lambda x: x, x),
    "switch": lambda x: lax.switch(2, (jnp.sin, jnp.cos, bad), x),
    "remat": jax.checkpoint(bad),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "shard_map": sharded,
    "vmap": lambda x: jax.vmap(bad)(x[None]),
    "map": lambda x: lax.map(bad, x[None]),
    "named_call": jax.named_call(bad),
    "associative_scan": lambda x: lax.associative_scan(
        lambda a, b: jax.vmap(bad)(a) + b, jnp.stack([x, x, x])
    ),
    "deep": jax.jit(lambda x: jax.checkpoint(
        lambda x: lax.scan(lambda c, _: (lax.cond(True, bad, bad, c), None), x, None, length=1)[0]
    )(x)),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_wrong_equations_are_found_wherever_they_hide(place):
    assert {"low", "float32"} <= rules(PLACES[place], X)


@pytest.mark.parametrize("place", sorted({*PLACES} - {"while_body", "while_test", "fori"}))
def test_and_in_their_gradients(place):
    grad = jax.grad(lambda x: jnp.sum(PLACES[place](x)))
    if place in ("custom_jvp", "custom_vjp"):  # their rules are other functions
        assert {v.site.transposed for v in violations(jax.make_jaxpr(grad)(X), "float16")} <= {
            False
        }
        return
    found = violations(jax.make_jaxpr(grad)(X), "bfloat16")
    assert any(v.rule == "low" and v.site.transposed for v in found)


# What may stay as it is.


def kernel(x: Any, y: Any) -> None:
    y[...] = jnp.exp(x[...] @ x[...])


ALLOWED: dict[str, Callable[[Any], Any]] = {
    "highest": lambda x: jnp.matmul(x, x, precision=lax.Precision.HIGHEST),
    "high": lambda x: jnp.matmul(x, x, precision="high"),
    "solve": lambda x: jnp.linalg.solve(x, x),
    "inv": jnp.linalg.inv,
    "expm": jax.scipy.linalg.expm,
    "custom_linear_solve": lambda x: lax.custom_linear_solve(
        lambda v: x @ v, x[0], lambda mv, b: mv(b), symmetric=True
    ),
    "pallas": lambda x: pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct((3, 3), jnp.float32), interpret=True
    )(x),
    "complex": lambda x: (x + 1j) @ x.astype(jnp.complex64),
    "off": lambda x: jax.named_scope("as_written")(bad)(x),
    "off_scan": lambda x: jax.named_scope("as_written")(PLACES["scan"])(x),
    "ours": lambda x: ours(x, x.astype(jnp.bfloat16)),
    "ours_wide": lambda x: ours(x, x, out="float32"),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_left_alone_is_no_violation(name):
    assert rules(ALLOWED[name], X) == set()


@pytest.mark.parametrize("name", ["solve", "inv", "expm", "off", "off_scan"])
def test_nor_is_its_gradient(name):
    assert rules(jax.grad(lambda x: jnp.sum(ALLOWED[name](x))), X + jnp.eye(3)) == set()


def test_a_helper_of_ones_own_with_an_innocent_name_is_not_left_alone():
    @jax.jit
    def solver(x: jax.Array) -> jax.Array:
        return bad(x)

    assert rules(solver, X) == {"low", "float32"}


# Contractions of the backend, and what became narrower.


def test_a_contraction_in_a_dtype_that_is_not_the_regions_is_found():
    assert rules(lambda x: ours(x, x), X, run="float16") == {"foreign"}
    assert rules(lambda x: ours(x, x, out="float16"), X) == {"foreign"}
    assert rules(lambda x: ours(x, x, run="float32", out="float32"), X) == {"foreign"}


def test_a_contraction_of_float64_or_complex_operands_is_found():
    with jax.enable_x64(True):
        x = np.ones((3, 3))
        assert rules(lambda x: ours(x, x), x) == {"narrow"}
        assert rules(lambda x: ours(x + 1j, x), x) == {"narrow"}
        assert rules(lambda x: x @ x, x) == set()


def test_a_cast_to_fewer_digits_is_found():
    with jax.enable_x64(True):
        x = np.ones(3)
        for narrow in ("float32", "bfloat16", "float16"):
            assert rules(lambda x, to=narrow: x.astype(to), x) == {"narrow"}
        assert rules(lambda x: x.astype(np.complex64), x + 1j) == {"narrow"}
        assert rules(lambda x: x.astype(np.complex128), x) == set()
        assert rules(lambda x: x.astype(np.float64), X) == set()


def test_a_low_difference_under_an_exponential_is_found():
    def rounded_shift(x: jax.Array) -> jax.Array:
        return jnp.exp((x - lax.reduce_max(x, (0,))).astype(jnp.float32))

    def exact_shift(x: jax.Array) -> jax.Array:
        return jnp.exp(x.astype(jnp.float32) - lax.reduce_max(x, (0,)).astype(jnp.float32))

    assert rules(rounded_shift, H) == {"shift"}
    assert rules(jax.jit(rounded_shift), H) == {"shift"}
    assert rules(exact_shift, H) == set()


def test_a_gradients_own_sums_of_low_cotangents_pass_and_a_programs_do_not():
    def loss(b: jax.Array) -> jax.Array:
        y = jnp.broadcast_to(b.astype(jnp.bfloat16), (4, 3))
        return FUNCTIONS["reduce_sum"](y.astype(jnp.float32).reshape(12))

    jaxpr = jax.make_jaxpr(jax.grad(loss))(X[0])
    low = [s for s in equations(jaxpr) if s.op == "reduce_sum" and "bfloat16" in s.operands]
    assert len(low) == 1
    assert low[0].transposed
    assert violations(jaxpr, "bfloat16", gradient=True) == []
    assert [v.rule for v in violations(jaxpr, "bfloat16")] == ["float32"]
    forward = jax.make_jaxpr(FUNCTIONS["reduce_sum"])(H)
    assert [v.rule for v in violations(forward, "bfloat16", gradient=True)] == ["float32"]


def test_a_gradients_own_reciprocals_and_narrowings_pass_and_a_programs_do_not():
    with jax.enable_x64(True):
        x = jnp.ones(3, jnp.float32)
        wide = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(x.astype(np.float64) / 3)))(x)
        assert violations(wide, "bfloat16", gradient=True) == []
        assert {v.rule for v in violations(wide, "bfloat16")} == {"narrow"}
    quotient = jax.make_jaxpr(jax.grad(lambda x: lax.div(H[0, 0], x)))(H[1, 1])
    assert violations(quotient, "bfloat16", gradient=True) == []
    assert {v.rule for v in violations(quotient, "bfloat16")} == {"float32"}
    power = jax.make_jaxpr(jax.grad(lambda x: jnp.exp(x)))(H[0, 0])
    assert {v.rule for v in violations(power, "bfloat16", gradient=True)} == {"float32"}


def test_an_equation_says_where_it_stands():
    found = violations(jax.make_jaxpr(PLACES["deep"])(X), "bfloat16")
    assert {v.site.where.split("(")[0] for v in found} == {"jit"}
    assert all("scan/cond" in v.site.where for v in found)
    text = str(next(v for v in found if v.rule == "low"))
    assert text.startswith("low: dot_general (float32, float32) -> float32 in jit(")
