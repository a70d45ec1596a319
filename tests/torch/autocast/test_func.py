"""torch.func's transforms in regions: an op has the dtype that the plain call has.

The transforms take composite ops apart, and batching rules put other ops in their place, before
autocast sees them; that must not change in which dtype an op runs.
"""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

pytestmark = [
    pytest.mark.usefixtures("left_as_found"),
    # Ops without a batching rule run one by one, which torch says each time.
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    # The first forward-mode derivative scripts its decompositions.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]

ROOT = Path(__file__).parents[3]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOW = (BF16, FP16)

Op = Callable[[torch.Tensor], torch.Tensor]

_made = torch.Generator().manual_seed(0)
W, B = torch.randn(6, 6, generator=_made), torch.randn(6, generator=_made)
ROWS = torch.randn(3, 4, 6, generator=_made)
IMAGES = torch.randn(3, 2, 2, 8, 8, generator=_made)
KERNEL, BIAS = torch.randn(4, 2, 3, 3, generator=_made), torch.randn(4, generator=_made)

# Title -> the op on one example, and a batch of three examples.
OPS: dict[str, tuple[Op, torch.Tensor]] = {
    "linear": (lambda t: F.linear(t, W, B), ROWS),
    "linear without bias": (lambda t: F.linear(t, W), ROWS),
    "matmul": (lambda t: torch.matmul(t, W), ROWS),
    "mm": (lambda t: torch.mm(t, W), ROWS),
    "addmm": (lambda t: torch.addmm(B, t, W), ROWS),
    "addbmm": (lambda t: torch.addbmm(t, t[None, :, :4], torch.ones(1, 4, 6)), ROWS),
    "baddbmm": (lambda t: torch.baddbmm(t[None], t[None, :, :4], torch.ones(1, 4, 6)), ROWS),
    "einsum": (lambda t: torch.einsum("ij,jk->ik", t, W), ROWS),
    "tensordot": (lambda t: torch.tensordot(t, W, 1), ROWS),
    "multi_dot": (lambda t: torch.linalg.multi_dot([t, W, W]), ROWS),
    "vecdot": (lambda t: torch.linalg.vecdot(t, t), ROWS),
    "bilinear": (lambda t: F.bilinear(t, t, torch.ones(5, 6, 6), torch.ones(5)), ROWS),
    "two layers": (lambda t: F.linear(torch.relu(F.linear(t, W, B)), W, B), ROWS),
    "conv2d": (lambda t: F.conv2d(t, KERNEL, BIAS), IMAGES),
    "conv2d, padding by name": (lambda t: F.conv2d(t, KERNEL, BIAS, padding="same"), IMAGES),
    "conv_transpose2d": (
        lambda t: F.conv_transpose2d(t, torch.ones(2, 3, 3, 3), torch.ones(3)),
        IMAGES,
    ),
    "attention": (lambda t: F.scaled_dot_product_attention(t[None], t[None], t[None]), ROWS),
    "prelu": (lambda t: F.prelu(t, torch.tensor(0.1)), ROWS),
    "cross_entropy": (lambda t: F.cross_entropy(t, torch.arange(4)), ROWS),
    "mse_loss": (lambda t: F.mse_loss(t, t * 2), ROWS),
    "huber_loss": (lambda t: F.huber_loss(t, t * 2), ROWS),
    "bce with logits": (lambda t: F.binary_cross_entropy_with_logits(t, torch.ones(4, 6)), ROWS),
    "layer_norm": (lambda t: F.layer_norm(t, (6,)), ROWS),
    "batch_norm": (lambda t: F.batch_norm(t, None, None, training=True), ROWS),
    "softmax of half": (lambda t: F.softmax(t.half(), -1), ROWS),
    "cat of mixed": (lambda t: torch.cat([t, t.to(torch.get_autocast_dtype("cpu"))]), ROWS),
    "fft": (lambda t: torch.fft.rfft(t).abs(), ROWS),
    "inverse": (lambda t: torch.linalg.inv(t @ t.mT + torch.eye(4)), ROWS),
    "pad": (lambda t: F.pad(t[None], (1, 1), mode="reflect"), ROWS),
    "prod of half": (lambda t: t.half().prod(), ROWS),
    "avg_pool3d": (lambda t: F.avg_pool3d(t[None], 2), IMAGES),
    # No rule for these ops, and batching rules that are made of ops with one.
    "mv": (lambda t: torch.mv(t, B), ROWS),
    "dot": (lambda t: torch.dot(t[0], t[1]), ROWS),
}


def transformed(op: Op, batch: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Ways to run the op on examples; each way calls it on something of one example's shape."""
    one = batch[0]

    def loss(t: torch.Tensor) -> torch.Tensor:
        return op(t).float().square().sum()

    return {
        "vmap": lambda: vmap(op)(batch),
        "grad": lambda: grad(loss)(one),
        "vjp": lambda: vjp(loss, one)[1](torch.tensor(1.0))[0],
        "jvp": lambda: jvp(loss, (one,), (torch.ones_like(one),))[1],
        "jacrev": lambda: jacrev(loss)(one),
        "vmap of grad": lambda: vmap(grad(loss))(batch),
        "grad of vmap": lambda: grad(lambda b: vmap(op)(b).float().square().sum())(batch),
        "grad of grad": lambda: grad(lambda t: grad(loss)(t).square().sum())(one),
        "vmap of vmap": lambda: vmap(vmap(op))(torch.stack([batch, batch])),
        "jvp of grad": lambda: jvp(grad(loss), (one,), (one,))[1],
    }


WAYS = tuple(transformed(OPS["linear"][0], ROWS))


def seen_by(op: Op, batch: torch.Tensor, way: str) -> tuple[list[torch.dtype], torch.Tensor]:
    """Dtypes that the op's results have inside the transformation, and what that returns."""
    seen: list[torch.dtype] = []

    def watched(t: torch.Tensor) -> torch.Tensor:
        y = op(t)
        seen.append(y.dtype)
        return y

    return seen, transformed(watched, batch)[way]()


@pytest.fixture(params=LOW, ids=str)
def region(request: pytest.FixtureRequest) -> Any:
    from polymp.torch import autocast  # here, for the reference process does without it

    return autocast("cpu", dtype=request.param)


@pytest.mark.parametrize("title", OPS)
def test_dtypes_are_those_of_the_plain_call(title: str, region: Any) -> None:
    op, batch = OPS[title]
    for way in WAYS:
        missing = None
        with region:
            plain = op(batch[0]).dtype
            try:
                seen, result = seen_by(op, batch, way)
            except RuntimeError as error:
                missing = type(error), re.escape(str(error).partition("\n")[0])
        if missing:  # a derivative that torch lacks, in regions or not
            with pytest.raises(missing[0], match=missing[1]):
                seen_by(op, batch, way)
            continue
        assert seen
        assert set(seen) == {plain}, way
        if "jvp" not in way and way not in ("vmap", "vmap of vmap"):
            assert result.dtype is FP32, way


@pytest.mark.parametrize("title", OPS)
def test_values_and_gradients_are_near_those_of_plain_calls(title: str, region: Any) -> None:
    """Values not bit for bit: a batch is another product, and a bias is added after rounding."""
    op, batch = OPS[title]
    with region:
        plain = [op(t) for t in batch]
        batched = vmap(op)(batch)
        leaf = batch[0].clone().requires_grad_()
        (expected,) = torch.autograd.grad(op(leaf).float().sum(), leaf, create_graph=True)
        found = grad(lambda t: op(t).float().sum())(batch[0])
    tolerance = 4 * torch.finfo(region.fast_dtype).eps
    torch.testing.assert_close(batched, torch.stack(plain), rtol=tolerance, atol=4 * tolerance)
    if title == "bce with logits":  # torch takes this one apart otherwise, in regions or not
        torch.testing.assert_close(found, expected)
    else:
        assert torch.equal(found, expected)


def test_a_model_called_with_other_weights(region: Any) -> None:
    torch.manual_seed(0)
    model, twin = (nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)) for _ in range(2))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    x = ROWS[0]
    with region:
        assert torch.equal(functional_call(twin, weights, x), model(x))

        def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            y = functional_call(twin, weights, x)
            assert y.dtype is region.fast_dtype
            return y.float().square().sum()

        gradients = grad(loss)(weights, x)
        per_sample = vmap(grad(loss), (None, 0))(weights, x)
    with region:
        plain = torch.autograd.grad(model(x).float().square().sum(), list(model.parameters()))
    assert all(map(torch.equal, gradients.values(), plain))
    assert {g.dtype for g in per_sample.values()} == {FP32}
    tolerance = 8 * torch.finfo(region.fast_dtype).eps
    for name, together in gradients.items():
        torch.testing.assert_close(
            per_sample[name].sum(0), together, rtol=tolerance, atol=8 * tolerance
        )


def test_an_ensemble_of_models(region: Any) -> None:
    torch.manual_seed(0)
    models = [nn.Linear(6, 2) for _ in range(3)]
    weights, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    with region:
        y = vmap(lambda p, b, t: functional_call(models[0], (p, b), t), (0, 0, None))(
            weights, buffers, ROWS[0]
        )
        plain = torch.stack([model(ROWS[0]) for model in models])
    assert y.dtype is plain.dtype is region.fast_dtype
    tolerance = 4 * torch.finfo(region.fast_dtype).eps
    torch.testing.assert_close(y, plain, rtol=tolerance, atol=4 * tolerance)


def test_second_derivatives_are_float32(region: Any) -> None:
    def loss(t: torch.Tensor) -> torch.Tensor:
        y = F.linear(torch.tanh(F.linear(t, W, B)), W, B)
        assert y.dtype is region.fast_dtype
        return y.float().square().sum()

    x = ROWS[0, 0]
    with region:
        second = {"hessian": hessian(loss)(x), "jacrev": jacrev(jacrev(loss))(x)}
        second["jacfwd"] = jacfwd(grad(loss))(x)
    for found in second.values():
        assert found.dtype is FP32
        torch.testing.assert_close(found, second["hessian"], rtol=0.1, atol=1.0)
    exact = hessian(lambda t: F.linear(torch.tanh(F.linear(t, W, B)), W, B).square().sum())(x)
    assert not torch.equal(second["hessian"], exact)


def test_a_region_inside_the_transformed_function(region: Any) -> None:
    def function(t: torch.Tensor) -> torch.Tensor:
        with region:
            y = F.linear(t, W, B)
            assert y.dtype is region.fast_dtype
        assert F.linear(t, W, B).dtype is FP32
        return y.float().square().sum()

    with region:
        expected = vmap(grad(lambda t: F.linear(t, W, B).float().square().sum()))(ROWS)
    assert torch.equal(vmap(grad(function))(ROWS), expected)
    with region:
        assert vmap(lambda t: F.linear(t, W, B))(ROWS).dtype is region.fast_dtype


def test_a_disabled_region_and_a_policy_count_in_a_transformation() -> None:
    from polymp.torch import autocast

    def linear(t: torch.Tensor) -> torch.Tensor:
        return F.linear(t, W, B)

    with autocast("cpu", dtype=FP16):
        with autocast("cpu", enabled=False):
            assert vmap(linear)(ROWS).dtype is FP32
        with autocast("cpu", dtype=FP16, policy={"name": "none", "rules": {"linear": "fp32"}}):
            assert vmap(linear)(ROWS).dtype is FP32
            assert grad(lambda t: linear(t).sum())(ROWS[0]).dtype is FP32
        assert vmap(linear)(ROWS).dtype is FP16


# --- outside regions -----------------------------------------------------------------------------


COMPARED = ("vmap", "grad", "jvp", "vmap of grad")


def plain_results() -> dict[tuple[str, str], Any]:
    """Every op in some ways, in whatever region there is: bits, or the exception."""
    results: dict[tuple[str, str], Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for title, (op, batch) in OPS.items():
            for way in COMPARED:
                try:
                    y = transformed(op, batch)[way]()
                    results[title, way] = str(y.dtype), y.double().tolist()
                except NotImplementedError as error:
                    results[title, way] = str(error)
    return results


def torch_dtypes() -> set[tuple[str, str]]:
    """Op and way where the dtypes in a region of torch's own are not those of the plain call."""
    different = set()
    with warnings.catch_warnings(), torch.autocast("cpu", dtype=FP16):
        warnings.simplefilter("ignore")
        for title in ("linear", "conv2d"):
            op, batch = OPS[title]
            for way in WAYS:
                if set(seen_by(op, batch, way)[0]) != {op(batch[0]).dtype}:
                    different.add((title, way))
    return different


@pytest.fixture(scope="module")
def without_polymp() -> Any:
    """The results, and where torch's own dtypes differ, from a process without polymp."""
    code = (
        "import pickle, sys; "
        "from tests.torch.autocast.test_func import plain_results, torch_dtypes; "
        "assert not any(name.startswith('polymp') for name in sys.modules); "
        "sys.stdout.buffer.write(pickle.dumps((plain_results(), torch_dtypes())))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return pickle.loads(done.stdout)


def test_outside_regions_nothing_changes(without_polymp: Any) -> None:
    from polymp.torch import autocast

    expected, _ = without_polymp
    with autocast("cpu"):  # what polymp installs, it installs now at the latest
        vmap(OPS["linear"][0])(ROWS)
    found = plain_results()
    assert len(found) == len(COMPARED) * len(OPS)
    assert [key for key in found if found[key] != expected[key]] == []
    with autocast("cpu"):
        inside = plain_results()
    assert [key for key in inside if inside[key] != expected[key]] != []


def test_torch_alone_takes_linear_apart(without_polymp: Any) -> None:
    _, different = without_polymp
    batched = {(op, way) for op, way in different if "vmap" in way}
    assert ("linear", "vmap") in batched
    assert batched == different
