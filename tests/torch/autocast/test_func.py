"""torch.func's transforms in regions: without a policy, what torch.autocast does, bit for bit.

The transforms take composite ops apart, and batching rules put other ops in their place, before
autocast sees them. Under a policy with another rule for an op than torch, that must not change in
which dtype the op runs.
"""

from __future__ import annotations

import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import (
    functional_call,
    functionalize,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)

from tests.support import forks
from tests.support.sizes import size

pytestmark = [
    pytest.mark.usefixtures("left_as_found"),
    # Ops without a batching rule run one by one, which torch says each time.
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr"),  # of torch.func.linearize
    # The first forward-mode derivative scripts its decompositions.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOW = (BF16, FP16)

Op = Callable[[torch.Tensor], torch.Tensor]

_made = torch.Generator().manual_seed(0)
W, B = torch.randn(6, 6, generator=_made), torch.randn(6, generator=_made)
ROWS = torch.randn(3, 4, 6, generator=_made)
IMAGES = torch.randn(3, 2, 2, 8, 8, generator=_made)
KERNEL, BIAS = torch.randn(4, 2, 3, 3, generator=_made), torch.randn(4, generator=_made)

torch.manual_seed(0)
FIRST, LAST = nn.Linear(6, 6), nn.Linear(6, 6)
BILINEAR, CONV, GRU = nn.Bilinear(6, 6, 5), nn.Conv1d(4, 3, 2), nn.GRU(6, 5)
LAYER, GROUP, RMS = nn.LayerNorm(6), nn.GroupNorm(2, 4), nn.RMSNorm(6)
INSTANCE, BATCH = nn.InstanceNorm1d(4, affine=True), nn.BatchNorm1d(6).eval()
PLACES = torch.tensor([0, 2, 1])


def between(op: Op) -> Op:
    """The op between two linear layers: its input is low, and a float32 result is cast again."""
    return lambda t: LAST(op(FIRST(t)))


def rows_set(t: torch.Tensor) -> torch.Tensor:
    rows = torch.zeros_like(t, dtype=t.dtype) + 0 * t
    rows[:3] = t[1:]
    return rows


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
    # Between layers: forward derivatives of ops with mixed inputs have other dtypes than results.
    "layers with LayerNorm": (between(LAYER), ROWS),
    "layers with GroupNorm": (between(lambda t: GROUP(t[None])[0]), ROWS),
    "layers with InstanceNorm": (between(lambda t: INSTANCE(t[None])[0]), ROWS),
    "layers with BatchNorm": (between(BATCH), ROWS),
    "layers with RMSNorm": (between(RMS), ROWS),
    "Bilinear": (lambda t: BILINEAR(t, t) * FIRST(t)[:, :5], ROWS),
    "Conv1d": (lambda t: CONV(BATCH(t)), ROWS),
    "GRU": (lambda t: GRU(FIRST(t))[0], ROWS),
    "lerp": (between(lambda t: torch.lerp(t, t * 2, 0.3)), ROWS),
    "dot of low": (lambda t: torch.dot(FIRST(t)[0], LAYER(FIRST(t))[1].to(FIRST(t).dtype)), ROWS),
    "index_put": (lambda t: LAST(t.index_put((PLACES,), FIRST(t)[:3].float())), ROWS),
    "scatter": (lambda t: LAST(t.scatter(0, PLACES[None], FIRST(t)[:1, :3].float())), ROWS),
    "index_add": (between(lambda t: t.index_add(0, PLACES, t[:3])), ROWS),
    "rows set": (between(rows_set), ROWS),
    "add_": (between(lambda t: t.add_(1)), ROWS),
    "mul_": (between(lambda t: t.mul_(0.3).div_(t.detach() + 9).sub_(2)), ROWS),
    "relu_": (between(F.relu_), ROWS),
    "copy_": (lambda t: LAST(torch.zeros_like(t).copy_(FIRST(t))), ROWS),
    "std": (lambda t: FIRST(t).std(0) @ W, ROWS),
}


PLAIN = list(OPS).index("layers with LayerNorm")


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
        "jacfwd": lambda: jacfwd(op)(one),
        "hessian": lambda: hessian(loss)(one),
        "linearize": lambda: linearize(op, one)[1](one),
        "functionalize": lambda: functionalize(op)(one),
    }


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 2),
    "normalised": lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)),
    "convolution": lambda: nn.Sequential(nn.Conv1d(4, 3, 2), nn.Flatten(0), nn.Linear(15, 2)),
}


def ensembles() -> dict[tuple[str, str], Callable[[], Any]]:
    """Three models at once by `stack_module_state`, and derivatives by the weights."""
    ways: dict[tuple[str, str], Callable[[], Any]] = {}
    for title, make in MODELS.items():
        torch.manual_seed(5)
        models = [make() for _ in range(3)]
        weights, _ = stack_module_state(models)  # type: ignore[arg-type]
        weights = {name: w.detach() for name, w in weights.items()}
        one = {name: w[0] for name, w in weights.items()}

        def call(w: Any, t: torch.Tensor, model: nn.Module = models[0]) -> Any:
            return functional_call(model, w, t)

        def loss(w: Any, t: torch.Tensor, call: Any = call) -> torch.Tensor:
            return call(w, t).float().square().sum()

        ways |= {
            (title, "ensemble"): lambda w=weights, f=call: vmap(f, (0, None))(w, ROWS[0]),
            (title, "its grad"): lambda w=weights, f=loss: vmap(grad(f), (0, None))(w, ROWS[0]),
            (title, "per sample"): lambda w=one, f=loss: vmap(grad(f), (None, 0))(w, ROWS),
            (title, "jvp"): lambda w=one, f=call: jvp(lambda v: f(v, ROWS[0]), (w,), (w,)),
            (title, "hessian"): lambda w=one, f=loss: hessian(lambda v: f(v, ROWS[0]))(w),
        }
    return ways


Outcome = tuple[str, Any]
EVERY = size(7, 3)  # one in so many ways of an op


def outcome(run: Callable[[], Any]) -> Outcome:
    try:
        leaves = torch.utils._pytree.tree_leaves(run())
    except (RuntimeError, NotImplementedError) as error:
        return "error", str(error).partition("\n")[0]
    return "ok", [(str(t.dtype), t.double().tolist()) for t in leaves]


def outcomes(autocast: Any, first: int = 0, **options: Any) -> dict[tuple[str, str], Outcome]:
    """The outcomes of every op in some of the ways; every other in float16."""
    runs = {
        (title, way): run
        for row, (title, (op, batch)) in enumerate(OPS.items())
        for column, (way, run) in enumerate(transformed(op, batch).items())
        if row >= first and (row + column) % EVERY == 1
    }
    results: dict[tuple[str, str], Outcome] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for at, (key, run) in enumerate((runs | ensembles()).items()):
            with autocast("cpu", dtype=LOW[at % 2], **options):
                results[key] = outcome(run)
    return results


def differing(found: dict[Any, Any], expected: dict[Any, Any]) -> list[Any]:
    assert found.keys() == expected.keys()
    return [key for key in found if repr(found[key]) != repr(expected[key])]  # NaN equals NaN


@pytest.mark.sized
def test_without_a_policy_transforms_do_what_they_do_under_torch(without_polymp: Any) -> None:
    from polymp.torch import autocast

    for policy in ("amp", "matmul", "lean"):  # so that there are Python kernels for many ops
        with autocast("cpu", policy=policy):
            F.linear(ROWS[0], W)
    _, expected = without_polymp
    assert sum(kind == "ok" for kind, _ in expected.values()) > 0.9 * len(expected)
    assert differing(outcomes(autocast), expected) == []


@pytest.mark.sized
@pytest.mark.parametrize("policy", ["amp", "lean", "matmul"])
def test_under_a_policy_no_transform_fails_that_torch_can_do(policy, without_polymp) -> None:
    from polymp.torch import autocast

    _, expected = without_polymp
    found = outcomes(autocast, first=PLAIN, policy=policy)
    failed = {key for key in found if expected[key][0] != found[key][0] == "error"}
    assert failed == set()


@pytest.mark.parametrize(
    "policy",
    [
        None,
        pytest.param(
            "amp",
            marks=pytest.mark.xfail(
                raises=RuntimeError,
                reason="torch computes the tangent of std in the region, where `sum` returns "
                "float32; beside the low result, the next product refuses it. The rules of "
                "torch-cuda alone do the same, and torch.autocast, too, for layer_norm on a CPU.",
            ),
        ),
    ],
)
def test_std_in_forward_mode_without_a_transform(policy: str | None) -> None:
    from polymp.torch import autocast

    with torch.autograd.forward_ad.dual_level(), autocast("cpu", dtype=BF16, policy=policy):
        t = torch.autograd.forward_ad.make_dual(ROWS[0], torch.ones_like(ROWS[0]))
        assert OPS["std"][0](t).dtype is BF16


# Rules that torch's table does not have, for which the op has to be cast as a whole.
WIDE = ("class:matmul", "class:convolution", "class:attention", "layer_norm")
OTHER_RULES = {
    "name": "other rules",
    "rules": dict.fromkeys(WIDE, "fp32") | {"class:loss": "lower"},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("title", list(OPS)[:PLAIN:2])
def test_under_other_rules_dtypes_are_those_of_the_plain_call(title, dtype) -> None:
    from polymp.torch import autocast

    op, batch = OPS[title]
    seen: list[torch.dtype] = []

    def watched(t: torch.Tensor) -> torch.Tensor:
        y = op(t)
        seen.append(y.dtype)
        return y

    with autocast("cpu", dtype=dtype, policy=OTHER_RULES):
        plain = op(batch[0]).dtype
        for way, run in transformed(watched, batch).items():
            seen.clear()
            try:
                run()
            except RuntimeError as error:  # a derivative that torch lacks
                if isinstance(error, NotImplementedError) or "not implemented" in str(error):
                    continue
                raise
            assert set(seen) == {plain}, way


def test_a_region_inside_the_transformed_function() -> None:
    from polymp.torch import autocast

    def function(t: torch.Tensor) -> torch.Tensor:
        with autocast("cpu", dtype=FP16):
            y = F.linear(t, W)
            assert y.dtype is FP16
        assert F.linear(t, W, B).dtype is FP32
        return y.float().square().sum()

    with autocast("cpu", dtype=FP16):
        expected = vmap(grad(lambda t: F.linear(t, W).float().square().sum()))(ROWS)
    assert torch.equal(vmap(grad(function))(ROWS), expected)


def test_a_disabled_region_and_a_policy_count_in_a_transformation() -> None:
    from polymp.torch import autocast

    def linear(t: torch.Tensor) -> torch.Tensor:
        return F.linear(t, W)

    with autocast("cpu", dtype=FP16):
        with autocast("cpu", enabled=False):
            assert vmap(linear)(ROWS).dtype is FP32
        with autocast("cpu", dtype=FP16, policy={"name": "none", "rules": {"linear": "fp32"}}):
            assert vmap(linear)(ROWS).dtype is FP32
            assert grad(lambda t: linear(t).sum())(ROWS[0]).dtype is FP32
        assert vmap(linear)(ROWS).dtype is FP16


COMPARED = ("vmap", "grad", "jvp", "vmap of grad")


def plain_results() -> dict[tuple[str, str], Outcome]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            (title, way): outcome(transformed(op, batch)[way])
            for title, (op, batch) in OPS.items()
            for way in COMPARED
        }


def main(path: str) -> None:
    assert not any(name.startswith("polymp") for name in sys.modules)
    Path(path).write_bytes(pickle.dumps((plain_results(), outcomes(torch.autocast))))


@pytest.fixture(scope="module")
def without_polymp(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found, printed = (tmp_path_factory.mktemp("func") / name for name in ("found", "printed"))
    call = forks.Call(__name__, "main", (str(found),), str(printed), strict=False)
    assert forks.run(forks.TORCH, [call]) == [0], printed.read_text()[-2000:]
    return pickle.loads(found.read_bytes())


def test_outside_regions_nothing_changes(without_polymp: Any) -> None:
    from polymp.torch import autocast

    expected, _ = without_polymp
    with autocast("cpu"):  # what polymp installs, it installs now at the latest
        vmap(OPS["linear"][0])(ROWS)
    found = plain_results()
    assert len(found) == len(COMPARED) * len(OPS)
    assert differing(found, expected) == []
    with autocast("cpu"):
        assert differing(plain_results(), expected) != []


@pytest.mark.parametrize("policy", ["amp", "lean", "matmul", "torch-cpu"])
def test_per_sample_gradients_of_a_region_inside(policy: str) -> None:
    """vmap takes a linear layer apart into ops that have rows of their own."""
    from polymp.torch import autocast

    def loss(w: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with autocast("cpu", BF16, policy=policy):
            return F.mse_loss(F.linear(x[None], w, b)[0], x)

    found = vmap(grad(loss), (None, None, 0))(W, B, ROWS[0])
    expected = torch.stack([grad(loss)(W, B, x) for x in ROWS[0]])
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.01)
