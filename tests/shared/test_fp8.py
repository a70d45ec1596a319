"""Products in 8 bits in both frameworks: the same results. Of operands, numpy has the bits."""

import importlib

import numpy as np
import pytest

import polymp
from polymp.fp8 import RECIPES
from polymp.testing import ParityError, assert_parity
from tests.conftest import FRAMEWORKS, need


@pytest.fixture(scope="module", autouse=True)
def _both():
    need(*FRAMEWORKS)


def policy(recipe):
    return polymp.policy("fp8").override(recipe=recipe)


def numbers(*shapes):
    random = np.random.default_rng(0)
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


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
    for one, other in zip(theirs, ours, strict=True):
        error = np.abs(one - other).max() / np.abs(one).max()
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
    assert found.calls[0] == found.calls[1]


@pytest.mark.parametrize(
    ("region", "said"), [(policy("rowwise"), "by other recipes"), ("lean", "in other dtypes")]
)
def test_parity_tells_products_in_8_bits_apart(region, said):
    import jax.numpy as jnp

    import polymp.jax

    def fn(x, w, v):
        with polymp.jax.autocast(policy=region):
            h = x @ w.T
        return jnp.tanh(h) @ v.T

    with pytest.raises(ParityError, match=f"^the two functions run {said}") as error:
        assert_parity(torch_layers, fn, numbers(*SIZES), policy="fp8", float32_first=False)
    assert error.value.op == "linear"
    assert ("rowwise" in error.value.side_by_side) is (region != "lean")


@pytest.mark.long
def test_parity_notices_operands_that_are_quantised_otherwise(monkeypatch):
    from polymp.backends.jax.autocast import fp8_contraction

    verbs = fp8_contraction.VERBS
    smaller = verbs._replace(cast=lambda x, format: verbs.cast(0.95 * x, format))
    monkeypatch.setattr(fp8_contraction, "VERBS", smaller)
    arrays = numbers((64, 64), (80, 64), (32, 80))  # sizes that nothing was compiled for
    with pytest.raises(ParityError, match="compute other values"):
        assert_parity(torch_layers, jax_layers, arrays, policy="fp8", float32_first=False)


STEPS, CUT = 6, 3


def run(framework, *args):
    return importlib.import_module(f"tests.support.{framework}.fp8_models").Run(*args)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_run_goes_on_from_a_checkpoint(framework, recipe, tmp_path):
    whole = run(framework, policy(recipe))
    history = [whole.step(number) for number in range(STEPS)]
    first = run(framework, policy(recipe))
    assert [first.step(number) for number in range(CUT)] == history[:CUT]
    first.save(tmp_path / "half")
    second = run(framework, policy(recipe), 1)  # other weights
    second.load(tmp_path / "half")
    assert second.bits() == first.bits()
    rest = [second.step(number) for number in range(CUT, STEPS)]
    assert rest == history[CUT:]
    if recipe == "tensorwise":
        for part in ("model", "optimizer", "scaler"):
            other = run(framework, policy(recipe), 1)
            other.load(tmp_path / "half", without=part)
            found = [other.step(number) for number in range(CUT, STEPS)]
            assert found != rest, f"without {part} it is another run"
