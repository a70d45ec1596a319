"""Every place of the JAX backend that takes a dtype takes it by any of its names."""

import jax
import jax.numpy as jnp
import pytest

import polymp.jax
from polymp.jax import GradScaler, autocast
from tests.support.dtype_spellings import spellings

X = jnp.ones((2, 2))


def product(x: jax.Array) -> jax.Array:
    return x @ x


@pytest.mark.parametrize("given", spellings("float16"), ids=repr)
def test_a_dtype_by_any_of_its_names(given: object) -> None:
    assert autocast(product, dtype=given)(X).dtype == jnp.float16
    assert autocast(polymp.jax.call_in(product, given))(X).dtype == jnp.float16
    assert GradScaler(dtype=given).enabled
    assert not GradScaler(dtype="bf16").enabled
    (call,) = polymp.jax.explain(product, X, dtype=given).of("linear")
    assert call.run == "float16"
    pins = polymp.jax.pin({"w": X, "v": X}, "fp32", ["w"])
    assert pins.dtype == "float32"
    converted = pins.to({"w": X, "v": X}, given)
    assert (converted["w"].dtype, converted["v"].dtype) == (jnp.float32, jnp.float16)


@pytest.mark.parametrize("given", ["int8", "fp17", int, None, 16, jnp.int32], ids=repr)
def test_what_is_no_float_dtype_is_refused(given: object) -> None:
    with pytest.raises(TypeError, match="float dtype"):
        autocast(product, dtype=given)
    with pytest.raises(TypeError, match="float dtype"):
        polymp.jax.pin({"w": X}, "float32").to({"w": X}, given)
