"""Products in 8 bits in both frameworks: the same bits of operands, the same results."""

import ml_dtypes
import numpy as np
import pytest

import polymp
from polymp.fp8 import quantise
from polymp.fp8.recipes import RECIPES
from polymp.testing import ParityError, assert_parity
from tests.conftest import need

ROLES = ("activation", "weight", "gradient")


@pytest.fixture(scope="module", autouse=True)
def _both():
    need("torch")
    need("jax")


def policy(recipe):
    return polymp.policy("fp8").override(recipe=recipe)


def numbers(*shapes):
    random = np.random.default_rng(0)
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


def in_torch(x, recipe, role, axis):
    import torch

    from polymp.backends.torch.autocast.fp8_product import VERBS

    low = x.dtype == ml_dtypes.bfloat16
    t = torch.from_numpy(x.astype(np.float32)).to(torch.bfloat16 if low else torch.float32)
    scale = quantise.scale_of(VERBS, t, recipe, role, axis)
    made = quantise.quantised(VERBS, t, scale, recipe.format_of(role))
    return made.view(torch.uint8).numpy(), scale.numpy()


def in_jax(x, recipe, role, axis):
    import jax

    from polymp.backends.jax.autocast.fp8_operands import quantised

    axes = (0, 1) if axis is None else (axis,)
    made = jax.jit(lambda x: quantised(x, recipe, role, axes))(x)
    return np.asarray(made.values).view(np.uint8), np.asarray(made.scale)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", RECIPES)
def test_operands_have_the_same_bits(name, role):
    recipe, differ = RECIPES[name], 0
    (x,) = numbers((256, 128))
    x *= np.exp(np.random.default_rng(1).uniform(-30, 20, (256, 1))).astype(np.float32)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        for axis in (None, 0, 1):
            one = in_torch(x.astype(dtype), recipe, role, axis)
            other = in_jax(x.astype(dtype), recipe, role, axis)
            differ += np.count_nonzero(one[0] != other[0])
            assert np.array_equal(one[1].ravel(), other[1].ravel()), "scales"
    print(f"{name}, {role}: {differ} of {6 * x.size} numbers differ")
    assert differ == 0


@pytest.mark.parametrize("name", RECIPES)
def test_a_product_and_its_gradients_are_the_same(name):
    import jax
    import jax.numpy as jnp
    import torch

    import polymp.jax
    import polymp.torch

    x, w, g = numbers((64, 128), (48, 128), (64, 48))
    t, u = (torch.from_numpy(a).requires_grad_() for a in (x, w))
    with polymp.torch.autocast("cpu", policy=policy(name)):
        made = torch.nn.functional.linear(t, u)
    made.backward(torch.from_numpy(g).to(torch.bfloat16))
    theirs = [a.detach().float().numpy() for a in (made, t.grad, u.grad)]

    fn = polymp.jax.autocast(lambda x, w: x @ w.T, policy=policy(name))
    out, pull = jax.vjp(fn, jnp.asarray(x), jnp.asarray(w))
    ours = [np.asarray(a, np.float32) for a in (out, *pull(jnp.asarray(g, jnp.bfloat16)))]
    for what, one, other in zip(("result", "of x", "of w"), theirs, ours, strict=True):
        error = np.abs(one - other).max() / np.abs(one).max()
        print(f"{name}, {what}: {error:.1e}")
        assert error <= 1e-6


SIZES = (64, 64), (48, 64), (32, 48)  # x, and the weights of two layers


def torch_layers(x, w, v):
    import torch

    return torch.nn.functional.linear(torch.tanh(torch.nn.functional.linear(x, w)), v)


def jax_layers(x, w, v):
    import jax.numpy as jnp

    return jnp.tanh(x @ w.T) @ v.T


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", RECIPES)
def test_parity_of_two_layers(name):
    found = assert_parity(torch_layers, jax_layers, numbers(*SIZES), policy=policy(name))
    print(f"{name}\n{found}")
    assert found.calls[0] == found.calls[1]


def test_parity_tells_a_product_in_8_bits_from_one_in_bfloat16():
    import polymp.jax

    def first_in_bfloat16(x, w, v):
        import jax.numpy as jnp

        with polymp.jax.autocast(policy="lean"):
            h = x @ w.T
        return jnp.tanh(h) @ v.T

    with pytest.raises(ParityError) as error:
        assert_parity(
            torch_layers,
            first_in_bfloat16,
            numbers(*SIZES),
            policy="fp8",
            float32_first=False,
        )
    print(error.value)
    assert error.value.op in ("linear", "matmul")


def other_recipe(x, w, v):
    """The first product by another recipe; its dtypes are the same."""
    import jax.numpy as jnp

    import polymp.jax

    with polymp.jax.autocast(policy=policy("rowwise")):
        h = x @ w.T
    return jnp.tanh(h) @ v.T


def other_number(x, w, v):
    import jax.numpy as jnp

    return jnp.tanh(x @ w.T) @ v.at[0, 0].multiply(1.5).T


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (
            other_recipe,
            "the two functions run by other recipes",
        ),
        (other_number, "in float32, without a region: the two functions compute other values"),
    ],
)
def test_parity_notices_a_planted_fault(fn, message):
    first = fn is not other_recipe
    with pytest.raises(ParityError) as error:
        assert_parity(torch_layers, fn, numbers(*SIZES), policy="fp8", float32_first=first)
    print(error.value)
    assert str(error.value).startswith(message)
    assert error.value.op in ("linear", "mm")
    assert ("rowwise" in error.value.side_by_side) == (fn is other_recipe)


def test_parity_notices_operands_that_are_quantised_otherwise(monkeypatch):
    """A fault inside of the products themselves: in JAX, operands are too small by 5 %."""
    from polymp.backends.jax.autocast import fp8_operands

    verbs = fp8_operands.VERBS
    smaller = verbs._replace(cast=lambda x, format: verbs.cast(0.95 * x, format))
    monkeypatch.setattr(fp8_operands, "VERBS", smaller)
    arrays = numbers((64, 64), (80, 64), (32, 80))  # sizes that nothing was compiled for
    with pytest.raises(ParityError) as error:
        assert_parity(torch_layers, jax_layers, arrays, policy="fp8", float32_first=False)
    print(error.value)
    assert "compute other values" in str(error.value)
