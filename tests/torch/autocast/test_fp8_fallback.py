"""Products with rule fp8 that run as under rule lower: no error, the same bits, and the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polymp
from polymp.backends.torch.autocast import fp8_ops
from polymp.torch import autocast, explain
from tests.support.torch.fp8_models import policy

X, W = torch.randn(32, 64), torch.randn(48, 64)
SPARSE = torch.eye(64).to_sparse()

FALLBACKS = {
    "odd rows": (lambda: F.linear(X[:31], W), "m = 31 is not a multiple of 16"),
    "odd sum": (lambda: F.linear(X[:, :40], W[:, :40]), "k = 40 is not a multiple of 16"),
    "odd columns": (lambda: F.linear(X, W[:17]), "n = 17 is not a multiple of 16"),
    "small": (lambda: X[:8, :8] @ W[:8, :8], "m = 8 is not a multiple of 16"),
    "a vector": (lambda: F.linear(X[0], W), "m = 1 is not a multiple of 16"),
    "times a vector": (lambda: X @ W[0], "n = 1 is not a multiple of 16"),
    "nothing": (lambda: X[:0] @ W.t(), "m = 0: there is nothing to multiply"),
    "a batch": (
        lambda: X.view(2, 16, 64) @ W.t().expand(2, 64, 48),
        "it is a batch of 2 products, which no 8-bit kernel takes",
    ),
    "float64": (
        lambda: X.double() @ W.double().t(),
        "an operand is float64, which is not quantised to 8 bits",
    ),
    "integers": (
        lambda: X.long() @ W.long().t(),
        "an operand is int64, which is not quantised to 8 bits",
    ),
    "complex": (
        lambda: X.cfloat() @ W.cfloat().t(),
        "an operand is complex64, which is not quantised to 8 bits",
    ),
    "sparse": (lambda: torch.mm(SPARSE, W.t()), "an operand is sparse"),
}


def falls_back(call: Any, reason: str, policy: Any = "fp8") -> None:
    """A call has a reason in `explain`, and runs as under lean."""
    with explain() as report, autocast("cpu", policy=policy):
        y = call()
    told = [(c.recipe, c.fallback) for c in report if c.rule == "fp8"]
    assert told == [("", reason)]
    assert report.fallbacks == {reason: 1}
    assert f"1 as lower: {reason}" in " ".join(str(report).split())
    with autocast("cpu", policy="lean"):
        expected = call()
    assert y.dtype is expected.dtype
    assert torch.equal(y, expected)


@pytest.mark.parametrize("name", FALLBACKS)
def test_a_call_that_falls_back_runs_as_under_lean(name):
    falls_back(*FALLBACKS[name])


# A device's name and compute capability, the recipe, and why its products do not run in 8 bits.
DEVICES = [
    ("xpu", None, "tensorwise", "polymp has no 8-bit products on xpu"),
    ("mps", None, "tensorwise", "polymp has no 8-bit products on mps"),
    (
        "cuda",
        (8, 0),
        "tensorwise",
        "the GPU has compute capability 8.0; 8-bit products need 8.9 or newer",
    ),
    (
        "cuda",
        (12, 0),
        "rowwise",
        "rowwise kernels fail on GPUs of compute capability 12.0; use recipe tensorwise",
    ),
    (
        "cuda",
        (9, 0),
        "tensorwise",
        "k = 64, n = 48 is so small that 8 bits are slower than bfloat16",
    ),
]


@pytest.mark.parametrize(("device", "capability", "recipe", "reason"), DEVICES)
def test_a_device_that_cannot(device, capability, recipe, reason, monkeypatch):
    """The call runs here; that the device is another one is what the rules are told."""
    rules = fp8_ops.recipes.why_not

    def why_not(product, recipe):
        return rules(product._replace(device=device, capability=capability), recipe)

    monkeypatch.setattr(fp8_ops.recipes, "why_not", why_not)
    falls_back(lambda: F.linear(X, W), reason, policy(recipe))


@pytest.mark.parametrize("device", ["xpu", "mps"])
def test_a_report_for_a_device_that_cannot(device):
    report = explain(nn.Linear(64, 64), torch.randn(32, 64), policy="fp8", device=device)
    (call,) = report.of("linear")
    assert (call.rule, call.recipe, call.run) == ("fp8", "", "bfloat16")
    assert call.fallback == f"polymp has no 8-bit products on {device}"


OTHERS = {
    "bmm": lambda: torch.bmm(X[None], W.t()[None]),
    "einsum": lambda: torch.einsum("ik,jk->ij", X, W),
    "mv": lambda: torch.mv(W, X[0]),
}


@pytest.mark.parametrize("op", OTHERS)
def test_products_without_an_8_bit_kernel(op):
    own = polymp.policy("lean").override(fp8=["class:matmul"])
    reason = f"{op} has no 8-bit product; linear, matmul, mm and addmm have one"
    falls_back(OTHERS[op], reason, own)


def test_a_tensor_of_other_tensors():
    two = pytest.importorskip(
        "torch.testing._internal.two_tensor", reason="torch has no such class"
    )
    x = two.TwoTensor(X, X)
    with explain() as report, autocast("cpu", policy="fp8"):
        y = F.linear(x, W)
    reason = "an operand is a TwoTensor, whose numbers are in other tensors"
    assert reason in report.fallbacks
    with autocast("cpu", policy="lean"):
        assert torch.equal(y.a, F.linear(X, W))


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_derivatives_in_forward_mode():
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(X, torch.ones_like(X))
        falls_back(lambda: F.linear(x, W), "forward-mode derivatives are computed")


def test_transforms_of_torch_func_fall_back():
    def loss(w):
        return F.linear(X, w).float().square().sum()

    def of_others(bias, factor=1):
        return (F.linear(X, W, bias) * factor).float().square().sum()

    def both():
        return (
            torch.func.grad(loss)(W),
            torch.vmap(lambda x: F.linear(x, W))(X.view(2, 16, 64)),
            torch.func.grad(of_others)(torch.zeros(48)),
            torch.func.grad(of_others, 1)(None, torch.ones(())),
        )

    with explain() as report, autocast("cpu", policy="fp8"):
        found = both()
    assert set(report.fallbacks) == {"it runs inside a transform of torch.func"}
    with autocast("cpu", policy="lean"):
        assert all(torch.equal(a, b) for a, b in zip(found, both(), strict=True))
