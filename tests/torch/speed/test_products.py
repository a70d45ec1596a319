"""The products of a torch model, by hand and by the counts of `explain`, and running them again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from polymp.backends.torch.speed.product_bench import ProductBench
from polymp.backends.torch.speed.products import device_of, products_of
from polymp.diagnostics.call_record import BACKWARD, FORWARD
from polymp.speed.advice import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, HELD, Product
from polymp.torch import explain
from tests.support.torch.models import MODELS
from tests.support.torch.onednn import need_lstm

pytestmark = pytest.mark.usefixtures("left_as_found")
WAYS = (FLOAT32, BFLOAT16, FLOAT16, BFLOAT16 + HELD)


def told(products: list[Product]) -> dict[tuple[Any, ...], int]:
    return {(p.shape, p.direction, p.casts, p.weights): p.times for p in products}


def test_a_training_step_has_three_products_for_each_linear_layer() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4, bias=False))
    x = torch.randn(8, 16, requires_grad=True)
    found = products_of(model, (x,))
    assert found.left_out == {}
    assert told(found.products) == {
        # The input, the weight and the bias are cast.
        ("8x16x32", FORWARD, 8 * 16 + 16 * 32 + 32, 16 * 32 + 32): 1,
        ("8x32x4", FORWARD, 32 * 4, 32 * 4): 1,  # relu has a low result
        # The gradient of an activation, and that of a weight, which is cast to float32.
        ("8x4x32", BACKWARD, 0, 0): 1,
        ("4x8x32", BACKWARD, 4 * 32, 0): 1,
        ("8x32x16", BACKWARD, 8 * 16, 0): 1,  # the input is float32, and so is its gradient
        ("32x8x16", BACKWARD, 32 * 16, 0): 1,
    }
    for product in found.products:
        assert product.flops == 2 * product.m * product.k * product.n


@pytest.mark.parametrize("change", ["eval", "frozen"])
def test_without_training_there_is_no_backward_pass(change: str) -> None:
    model = nn.Linear(16, 32)
    if change == "eval":
        model.eval()
    else:
        model.requires_grad_(False)
    (product,) = products_of(model, (torch.randn(8, 16),)).products
    assert (product.direction, product.shape) == (FORWARD, "8x16x32")
    assert product.weights == 16 * 32 + 32
    assert model.weight.grad is None


def test_equal_products_are_counted() -> None:
    shared, other = (nn.Linear(8, 8, bias=False).requires_grad_(False) for _ in range(2))
    found = products_of(nn.Sequential(shared, shared, other), (torch.randn(4, 8),))
    assert told(found.products) == {
        ("4x8x8", FORWARD, 32 + 64, 64): 1,  # the input is cast, too
        ("4x8x8", FORWARD, 64, 64): 2,
    }


def test_a_cast_that_is_kept_counts_once() -> None:
    layer = nn.Linear(8, 8, bias=False)  # the region keeps the cast of what needs gradients
    found = products_of(nn.Sequential(layer, layer), (torch.randn(4, 8),)).products
    assert [p.casts for p in found if p.direction == FORWARD] == [32 + 64, 0]


def test_a_convolution_is_the_product_that_it_amounts_to() -> None:
    model = nn.Conv2d(4, 6, 3, groups=2, bias=False)
    forward, backward = products_of(model, (torch.randn(2, 4, 8, 8),)).products
    assert (forward.op, forward.shape) == ("conv", "2 of 72x18x3")
    assert forward.flops == 2 * 2 * 72 * 18 * 3
    assert forward.casts == 2 * 4 * 8 * 8 + 6 * 2 * 9
    assert (backward.flops, backward.direction) == (forward.flops, BACKWARD)  # of the weight alone
    assert backward.casts == 6 * 2 * 9


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return nn.functional.scaled_dot_product_attention(x, x, x), x.double() @ x.double().mT


def test_what_is_left_out_has_its_flops() -> None:
    left = products_of(Attention(), (torch.randn(1, 2, 8, 16),)).left_out
    assert set(left) == {"scaled_dot_product_flash_attention_for_cpu", "bmm, not lowered"}
    assert left["bmm, not lowered"] == 2 * 2 * 8 * 16 * 8


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("title", MODELS)
def test_flops_are_those_that_explain_counts(title: str) -> None:
    if title == "LSTM":
        need_lstm(BF16)
    torch.manual_seed(0)
    model, inputs = MODELS[title]()
    model.eval()
    with torch.no_grad():
        report = explain(model, *inputs, dtype="bfloat16")
    found = products_of(model, inputs)
    assert {p.direction for p in found.products} <= {FORWARD}
    own = sum(p.flops * p.times for p in found.products)
    assert own + sum(found.left_out.values()) == sum(report.flops.values())


def test_the_model_is_not_changed_but_for_its_gradients() -> None:
    model = nn.Linear(4, 4)
    before = [p.detach().clone() for p in model.parameters()]
    products_of(model, (torch.randn(2, 4),))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert device_of(model) == device_of(nn.ReLU()) == "cpu"


# Running them again


@pytest.fixture(scope="module")
def bench() -> ProductBench:
    return ProductBench("cpu")


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """Names of ops with the dtypes of their first operand and result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[tuple[str, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        results = made if isinstance(made, tuple) else (made,)
        first = next((t for t in results if isinstance(t, torch.Tensor)), None)
        if first is not None and first.is_floating_point():
            name = func.overloadpacket.__name__
            if name not in ("t", "transpose", "empty", "uniform_", "as_strided"):
                self.ops.append((name, args[0].dtype, first.dtype))
        return made


def ran(bench: ProductBench, product: Product, way: str) -> list[tuple[str, Any, Any]]:
    run = bench.made(product, way)
    with Seen() as seen:
        assert run(1) >= 0
    return seen.ops


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def test_a_linear_layer_runs_with_the_cast_of_its_weight(bench: ProductBench) -> None:
    product = bench.linear(4, 8, 16)
    assert (product.shape, product.casts, product.weights) == ("4x8x16", 8 * 16, 8 * 16)
    assert ran(bench, product, FLOAT32) == [("mm", F32, F32)]
    assert ran(bench, product, BFLOAT16) == [("_to_copy", F32, BF16), ("mm", BF16, BF16)]
    assert ran(bench, product, FLOAT16) == [("_to_copy", F32, F16), ("mm", F16, F16)]
    assert ran(bench, product, BFLOAT16 + HELD) == [("mm", BF16, BF16)]


def test_a_gradient_of_a_weight_is_cast_to_float32(bench: ProductBench) -> None:
    found = products_of(nn.Linear(16, 32, bias=False), (torch.randn(8, 16),)).products
    (product,) = (p for p in found if p.direction == BACKWARD)
    assert not bench.able(product, BFLOAT16 + HELD)
    assert ran(bench, product, FLOAT32) == [("mm", F32, F32)]
    assert ran(bench, product, BFLOAT16) == [("mm", BF16, BF16), ("_to_copy", BF16, F32)]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("title", MODELS)
def test_every_product_of_a_model_runs_in_every_way(bench: ProductBench, title: str) -> None:
    if title == "LSTM":
        need_lstm(BF16)
    torch.manual_seed(0)
    model, inputs = MODELS[title]()
    for product in products_of(model, inputs).products:
        for way in WAYS:
            if bench.able(product, way):
                kernel = [op for op in ran(bench, product, way) if op[0] != "_to_copy"]
                assert len(kernel) == 1
                assert kernel[0][1] == {FLOAT32: F32, FLOAT16: F16}.get(way, BF16)


def test_float8_runs_where_torch_has_it_or_a_reason_is_given(bench: ProductBench) -> None:
    assert (FLOAT8 in bench.ways) != (FLOAT8 in bench.lacking)
    if FLOAT8 in bench.ways:
        ops = [name for name, *_ in ran(bench, bench.linear(16, 16, 16), FLOAT8)]
        assert ops == ["_to_copy", "_to_copy", "_scaled_mm"]
    assert not bench.able(bench.linear(16, 16, 16)._replace(batch=2), FLOAT8)


def test_a_dtype_that_fails_is_lacking_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("torch._scaled_mm needs compute capability 8.9\nand more")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    bench = ProductBench("cpu")
    assert FLOAT8 not in bench.ways
    assert bench.lacking[FLOAT8] == "torch._scaled_mm needs compute capability 8.9"


def test_one_thread_while_it_measures(bench: ProductBench) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with bench:
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
