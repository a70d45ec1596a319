"""The products of a JAX program, by hand, and running them again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from polymp.backends.jax.speed.product_bench import ProductBench
from polymp.backends.jax.speed.products import products_of
from polymp.diagnostics.call_record import BACKWARD, FORWARD
from polymp.speed.advice import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, HELD, Product

PARAMS = {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 4))}
X = jnp.ones((8, 16))


def loss(params: Any, x: Any) -> Any:
    return jnp.mean(jax.nn.relu(x @ params["up"]) @ params["down"])


def told(products: list[Product]) -> dict[tuple[Any, ...], int]:
    return {(p.shape, p.direction, p.casts, p.weights): p.times for p in products}


FORWARDS = {
    ("8x16x32", FORWARD, 8 * 16 + 16 * 32, 16 * 32): 1,
    ("8x32x4", FORWARD, 32 * 4, 32 * 4): 1,
}


def test_a_gradient_has_the_products_of_its_backward_pass() -> None:
    assert told(products_of(loss, (PARAMS, X)).products) == FORWARDS
    found = products_of(jax.grad(loss), (PARAMS, X))
    assert found.left_out == {}
    assert {key: n for key, n in told(found.products).items() if key[1] == FORWARD} == FORWARDS
    backward = [p for p in found.products if p.direction == BACKWARD]
    assert len(backward) == 3  # no gradient of the input is asked for
    assert sum(p.flops * p.times for p in backward) == 2 * 8 * (16 * 32 + 2 * 32 * 4)


def test_products_in_a_loop_count_as_often_as_it_runs() -> None:
    def deep(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=5)[0]

    found = products_of(deep, (jnp.ones((8, 8)), jnp.ones((4, 8))))
    assert sum(p.times for p in found.products) == 5
    assert {p.shape for p in found.products} == {"4x8x8"}


def test_a_convolution_and_a_batch() -> None:
    def run(w: Any, x: Any) -> Any:
        made = jax.lax.conv_general_dilated(
            x, w, (1, 1), "VALID", dimension_numbers=("NCHW", "OIHW", "NCHW"), feature_group_count=2
        )
        return jnp.einsum("bij,bkj->bik", made[:, 0], made[:, 1])

    conv, batch = products_of(run, (jnp.ones((6, 2, 3, 3)), jnp.ones((2, 4, 8, 8)))).products
    assert (conv.op, conv.shape) == ("conv", "2 of 72x18x3")
    assert conv.flops == 2 * 2 * 72 * 18 * 3
    assert (batch.op, batch.shape) == ("matmul", "2 of 6x6x6")


def test_what_stays_in_float32_is_left_out_with_its_flops() -> None:
    def mixed(w: Any, x: Any) -> Any:
        from polymp.jax import autocast

        return autocast(lambda x, w: x @ w, enabled=False)(x, w) @ w

    found = products_of(mixed, (jnp.ones((8, 8)), jnp.ones((4, 8))))
    assert [p.shape for p in found.products] == ["4x8x8"]
    assert found.left_out == {"dot_general, not lowered": 2 * 4 * 8 * 8}


def test_an_nnx_module() -> None:
    model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    (product,) = products_of(model, (jnp.ones((4, 8)),)).products
    assert product.shape == "4x8x16"


# Running them again


@pytest.fixture(scope="module")
def bench() -> ProductBench:
    return ProductBench()


def test_a_linear_layer_has_the_cast_of_its_weight(bench: ProductBench) -> None:
    product = bench.linear(4, 8, 16)
    assert (product.shape, product.casts, product.weights) == ("4x8x16", 8 * 16, 8 * 16)
    for way in (FLOAT32, BFLOAT16, FLOAT16, BFLOAT16 + HELD):
        assert bench.able(product, way)
        assert bench.made(product, way)(2) >= 0


def test_every_product_of_a_program_runs_in_every_way(bench: ProductBench) -> None:
    for product in products_of(jax.grad(loss), (PARAMS, X)).products:
        for way in bench.ways:
            if bench.able(product, way):
                assert bench.made(product, way)(1) >= 0
        assert bench.able(product, BFLOAT16 + HELD) == (product.weights > 0)


def test_operands_come_as_they_do_in_the_program(bench: ProductBench) -> None:
    from polymp.backends.jax.speed.product_bench import _operands

    kernel = bench.linear(4, 8, 16).call

    def dtypes(way: str) -> list[str]:
        return [x.dtype.name for x in _operands(kernel, way)]

    assert dtypes(FLOAT32) == [FLOAT32, FLOAT32]
    assert dtypes(BFLOAT16) == [BFLOAT16, FLOAT32]
    assert dtypes(FLOAT16) == [FLOAT16, FLOAT32]
    assert dtypes(BFLOAT16 + HELD) == [BFLOAT16, BFLOAT16]
    assert dtypes(FLOAT8) == [BFLOAT16, FLOAT32]


def test_float8_compiles_or_a_reason_is_given(bench: ProductBench) -> None:
    assert (FLOAT8 in bench.ways) != (FLOAT8 in bench.lacking)
    if bench.device == "cpu":
        assert bench.lacking[FLOAT8] == "XLA computes float8 products on CPUs in wider dtypes"
    assert bench.made(bench.linear(16, 16, 16), FLOAT8)(1) >= 0
