"""Products in 8 bits: the bits of torchao, the casts of ml_dtypes, and what falls back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import polymp
from polymp.backends.torch.autocast import fp8_product
from polymp.backends.torch.autocast.fp8_product import VERBS, Quantisation, of_activation
from polymp.fp8 import RECIPES, quantised, scale_of
from polymp.torch import autocast, explain
from tests.support.fp8_numpy import DTYPES
from tests.support.fp8_numpy import VERBS as NUMPY
from tests.support.sizes import size
from tests.support.torch.fp8_models import policy

AO = {"tensorwise": "tensorwise", "rowwise": "rowwise", "rowwise_gw_hp": "rowwise_with_gw_hp"}


def run(recipe, x, weight, gradient, forward=None):
    """The result and both gradients of a product; by default ours, in a region."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    if forward is None:
        with autocast("cpu", policy=policy(recipe)):
            y = F.linear(x, weight)
    else:
        y = forward(x, weight)
    y.backward(gradient.to(y.dtype))
    return y.detach(), x.grad, weight.grad


def of_torchao(recipe):
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    def forward(x, weight):
        layer = torch.nn.Linear(*weight.shape[::-1], bias=False).to(weight.dtype)
        layer.weight = torch.nn.Parameter(weight.detach())
        layer = Float8Linear.from_float(layer, Float8LinearConfig.from_recipe_name(AO[recipe]))
        layer.weight = torch.nn.Parameter(torch.empty(0))
        del layer._parameters["weight"]
        layer.weight = weight
        return layer(x)

    return forward


def operands(dtype, shape, outputs, seed=0, spread=3.0):
    """An activation, a weight and a gradient whose rows are of very different sizes."""
    made = torch.Generator().manual_seed(seed)

    def draw(*shape, by):
        array = torch.randn(*shape, generator=made)
        return array * torch.exp(spread * torch.randn(shape[by], generator=made)).unsqueeze(
            -1 if by == -2 else 0
        )

    x = draw(*shape, by=-1).to(dtype)
    weight = draw(outputs, shape[-1], by=-2).to(dtype)
    gradient = (draw(*shape[:-1], outputs, by=-1) * 1e-3).bfloat16()
    return x, weight, gradient


SHAPES = [((32, 64), 48), ((2, 16, 16), 128), ((4, 3, 16, 32), 16)]


@pytest.mark.sized
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(size(1, 4)))
@pytest.mark.parametrize(("shape", "outputs"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bits_of_torchao(recipe, dtype, shape, outputs, seed, monkeypatch):
    """Result and gradients, bit for bit.

    Of float32 operands, torchao's result is float32, and ours is that, rounded to the region's.
    """
    if recipe == "tensorwise" and fp8_product._onednn_is_slow():
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    given = operands(dtype, shape, outputs, seed)
    theirs = run(recipe, *given, of_torchao(recipe))
    ours = run(recipe, *given)
    assert torch.equal(ours[0], theirs[0].bfloat16())
    assert ours[1].dtype is dtype
    assert torch.equal(ours[1], theirs[1])
    if recipe == "rowwise_gw_hp" and dtype is torch.float32:  # a product in bfloat16, not float32
        low = run(recipe, given[0].bfloat16(), given[1].bfloat16(), given[2], of_torchao(recipe))
        assert torch.equal(ours[2], low[2].float())
    else:
        assert torch.equal(ours[2], theirs[2])


@pytest.mark.parametrize("recipe", RECIPES)
def test_float16_operands_have_the_bits_of_their_float32_copies(recipe):
    """Rounded to float16, as torchao's results above are to float32."""
    x, weight, gradient = operands(torch.float16, (2, 16, 64), 48, spread=1.0)
    result, *gradients = run(recipe, x, weight, gradient)
    wide, *wide_gradients = run(recipe, x.float(), weight.float(), gradient)
    assert torch.equal(result, wide)
    assert all(map(torch.equal, gradients, [g.half() for g in wide_gradients]))


@pytest.mark.filterwarnings("ignore")
def test_the_comparison_notices_a_fault(monkeypatch):
    given = operands(torch.bfloat16, (64, 64), 64)
    theirs = run("rowwise", *given, of_torchao("rowwise"))
    monkeypatch.setattr(fp8_product.fp8, "inverse", lambda scale: 1 / scale * (1 + 2**-7))
    assert not any(map(torch.equal, run("rowwise", *given), theirs))


SCALES = (1.0, 0.5, 448.0, 1e-3, 3.7, 2.0**-20, 2.0**20, 1.2345e-10, 9.87e8)


def bits(array):
    return array.view(np.uint8)


@pytest.mark.sized
@pytest.mark.filterwarnings("ignore:overflow|invalid value:RuntimeWarning")
@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("scale", SCALES)
def test_every_bfloat16_and_many_float32_are_quantised_as_ml_dtypes_casts(scale, format):
    halves = np.arange(2**16, dtype=np.uint16)
    random = np.random.default_rng(int(scale)).integers(0, 2**32, size(20_000, 10**6), np.uint32)
    for raw, theirs, ours in (
        (halves, halves.view(ml_dtypes.bfloat16), torch.from_numpy(halves).view(torch.bfloat16)),
        (random, random.view(np.float32), torch.from_numpy(random.view(np.float32))),
    ):
        expected = quantised(NUMPY, theirs, np.float32(scale), format)
        found = quantised(VERBS, ours, torch.tensor(scale), format)
        nan = np.isnan(expected.astype(np.float32))
        found = found.view(torch.uint8).numpy()
        assert np.array_equal(found[~nan], bits(expected)[~nan]), raw.dtype
        assert np.isnan(found.view(DTYPES[format]).astype(np.float32)[nan]).all()
        # An Inf is clipped here: that it becomes NaN is the scale's part.
        assert nan.sum() == np.isnan(theirs.astype(np.float32)).sum()


@pytest.mark.sized
@pytest.mark.parametrize("role", ["activation", "weight", "gradient"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_have_the_bits_of_numpy(dtype, recipe, role):
    recipe = RECIPES[recipe]
    for seed in range(size(20, 200)):
        made = torch.Generator().manual_seed(seed)
        array = torch.randn(8, 16, generator=made) * 10.0 ** float(seed % 9 - 6)
        array = array.to(dtype)
        array[seed % 8] = 0 if seed % 3 else array[seed % 8]
        for axis in (None, 0, 1):
            ours = scale_of(VERBS, array, recipe, role, axis)
            theirs = scale_of(NUMPY, array.float().numpy(), recipe, role, axis)
            assert ours.dtype is torch.float32
            assert np.array_equal(ours.numpy(), theirs)
            assert ours.shape == theirs.shape


def test_a_default_dtype_of_float64_changes_nothing():
    array = torch.randn(8, 16)
    torch.set_default_dtype(torch.float64)
    try:
        assert scale_of(VERBS, array, RECIPES["rowwise"], "weight", 1).dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


X, W = torch.randn(32, 64), torch.randn(48, 64)
C = torch.randn(48)
CALLS = {
    "linear": lambda: F.linear(X, W),
    "linear, bias": lambda: F.linear(X, W, C),
    "linear, by name": lambda: F.linear(input=X, weight=W, bias=C),
    "linear, more dimensions": lambda: F.linear(X.view(2, 16, 64), W),
    "mm": lambda: torch.mm(X, W.t()),
    "matmul": lambda: X @ W.t(),
    "matmul, column-major": lambda: X.t().contiguous().t() @ W.t().contiguous(),
    "matmul, more dimensions": lambda: X.view(2, 16, 64) @ W.t(),
    "addmm": lambda: torch.addmm(C, X, W.t()),
    "addmm, factors": lambda: torch.addmm(C, X, W.t(), beta=2, alpha=0.5),
    "addmm, nothing added": lambda: torch.addmm(C * torch.nan, X, W.t(), beta=0),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_in_8_bits(call):
    with explain() as report, autocast("cpu", policy="fp8"):
        y = CALLS[call]()
    (call_site,) = (c for c in report if c.rule == "fp8")
    assert (call_site.recipe, call_site.fallback) == ("tensorwise", "")
    assert y.dtype is torch.bfloat16
    right = CALLS[call]()
    assert y.shape == right.shape
    error = (y.float() - right).norm() / right.norm()
    assert 1e-3 < error < 0.06, "it is in 8 bits, and right"


ADDED = {  # a term, what is called with it, and the factor of its gradient
    "a bias": ((48,), lambda c: F.linear(X, W, c), 1),
    "a bias, compiled": ((48,), torch.compile(lambda c: F.linear(X, W, c), backend="aot_eager"), 1),
    "a row, with factors": ((48,), lambda c: torch.addmm(c, X, W.t(), beta=0.5, alpha=3), 0.5),
    "a column": ((32, 1), lambda c: torch.addmm(c, X, W.t()), 1),
    "a number": ((1,), lambda c: torch.addmm(c, X, W.t()), 1),
    "a matrix": ((32, 48), lambda c: torch.addmm(c, X, W.t()), 1),
}


@pytest.mark.parametrize("inside", [False, True], ids=["", "backward in the region"])
@pytest.mark.parametrize("call", ADDED)
def test_the_gradient_of_what_is_added_is_summed_once_and_rounded(call, inside):
    shape, added, factor = ADDED[call]
    c, gradient = torch.randn(shape).requires_grad_(), torch.randn(32, 48).bfloat16()
    with autocast("cpu", policy="fp8"):
        y = added(c)
        if inside:
            y.backward(gradient)
    if not inside:
        y.backward(gradient)
    right = gradient.float().sum_to_size(shape).bfloat16().float() * factor
    assert c.grad.dtype is torch.float32
    assert torch.equal(c.grad, right)


def test_a_second_derivative_is_refused():
    x = X.clone().requires_grad_()
    with autocast("cpu", policy="fp8"):
        y = F.linear(x, W)
    (gradient,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_a_region_without_a_dtype_is_bfloat16():
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        assert autocast("cpu", policy="fp8").fast_dtype is torch.bfloat16
    finally:
        torch.set_autocast_dtype("cpu", torch.bfloat16)


def test_a_float16_region_is_refused():
    with pytest.raises(polymp.errors.PolicyError, match="needs a region of dtype bfloat16"):
        autocast("cpu", torch.float16, policy="fp8")


def test_an_activation_is_quantised_once_until_it_is_written():
    how = Quantisation(RECIPES["tensorwise"], "activation", None)
    x = torch.randn(32, 64)
    first = of_activation(x, how)
    assert of_activation(x, how).array is first.array
    x.mul_(2)
    assert of_activation(x, how).scale != first.scale
    again = of_activation(x, how)
    x.data = torch.randn(32, 64)
    assert of_activation(x, how).array is not again.array
