"""Regions inside functions that torch.compile takes whole, against the same run eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from polymp.torch import autocast
from tests.support.torch.compiled import (
    AS_OBJECT,
    KEEPS_RELU,
    Count,
    Net,
    assert_same,
    dtypes,
    one_region,
    product,
)
from tests.support.torch.version_changes import VERSION

pytestmark = pytest.mark.usefixtures("left_as_found")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PRODUCT = product()


def nested(net: Net, x: torch.Tensor) -> Any:
    with autocast("cpu", dtype=BF16):
        a = net(x)
        with autocast("cpu", dtype=FP16):
            b = net(x)
            with autocast("cpu", enabled=False):
                c = net(x)
            with autocast("cpu"):
                d = net(x)
        e = net(x)
    return a, b, c, d, e, net(x)


def decorated(net: Net, x: torch.Tensor) -> Any:
    @autocast("cpu", dtype=FP16)
    def inner(t: torch.Tensor) -> torch.Tensor:
        return net(t)

    return inner(x), net(x)


def conditional(net: Net, x: torch.Tensor) -> Any:
    with autocast("cpu", dtype=BF16, enabled=x.shape[0] > 100):
        a = net(x)
    with autocast("cpu", dtype=BF16, enabled=x.shape[0] < 100):
        return a, net(x)


def caught(net: Net, x: torch.Tensor) -> Any:
    try:
        with autocast("cpu", dtype=FP16):
            a = net(x)
            raise ValueError("on purpose")
    except ValueError:
        return a, net(x)


def in_a_loop(net: Net, x: torch.Tensor) -> Any:
    results = []
    for dtype in (FP16, BF16):
        with autocast("cpu", dtype=dtype):
            results.append(net(x))
    return results


def in_region(**given: Any) -> Callable[..., Any]:
    def function(net: Net, x: torch.Tensor) -> Any:
        with autocast("cpu", dtype=FP16, **given):
            seen = torch.relu(net.first(x)), net.first(x)
        return *seen, net.first(x)

    return function


def no_grad(net: Net, x: torch.Tensor) -> Any:
    with autocast("cpu", dtype=FP16):
        with torch.no_grad():
            a = net(x)
        return net(x + a), net(x)


def policies_nested(net: Net, x: torch.Tensor) -> Any:
    with autocast("cpu", dtype=FP16, policy=AS_OBJECT):
        a = torch.relu(net.first(x))
        with autocast("cpu", dtype=FP16, policy=KEEPS_RELU):
            b = torch.relu(net.first(x))
        with autocast("cpu", dtype=BF16):
            c = torch.relu(net.first(x))
        d = net.first(x)
    return a, b, c, d


AS_DICT = {"name": "d", "rules": {"linear": "lower", "relu": "fp32"}}
INSIDE: dict[str, tuple[Callable[..., Any], list[torch.dtype]]] = {
    "one region": (one_region, [FP16, FP32]),
    "nested": (nested, [BF16, FP16, FP32, FP16, BF16, FP32]),
    "decorated": (decorated, [FP16, FP32]),
    "conditional": (conditional, [FP32, BF16]),
    "caught": (caught, [FP16, FP32]),
    "in a loop": (in_a_loop, [FP16, BF16]),
    "uncached": (in_region(cache_enabled=False), [FP16, FP16, FP32]),
    "no_grad": (no_grad, [FP16, FP16]),
    "policy as dict": (in_region(policy=AS_DICT), [FP32, FP16, FP32]),
    "policy as object": (in_region(policy=AS_OBJECT), [FP16, FP32, FP32]),
    "policy by name": (in_region(policy="torch-cpu"), [FP16, FP16, FP32]),
    "policies nested": (policies_nested, [FP16, FP32, BF16, FP32]),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "title",
    [t for t in INSIDE if VERSION >= (2, 12) or t not in ("policy as object", "policies nested")],
)
def test_inside_a_compiled_function(title: str, count: Count, net: Net, x: torch.Tensor) -> None:
    function, expected = INSIDE[title]
    compiled = torch.compile(function, fullgraph=True, backend=count)
    result, eager = compiled(net, x), function(net, x)
    assert dtypes(result) == expected
    assert_same(result, eager, net)
    compiled(net, x)
    assert count.graphs == 1


def test_an_exception_leaves_a_compiled_region(count: Count, net: Net, x: torch.Tensor) -> None:
    def function(x: torch.Tensor, fails: bool) -> Any:
        with autocast("cpu", dtype=FP16):
            y = net(x)
            if fails:
                raise ArithmeticError("on purpose")
        return y, net(x)

    compiled = torch.compile(function, backend=count)
    for _ in range(2):
        with torch.no_grad():
            with pytest.raises(ArithmeticError, match="on purpose"):
                compiled(x, True)
            assert not torch.is_autocast_enabled("cpu")
            assert_same(compiled(x, False), function(x, False))


def custom_function(net: Net, x: torch.Tensor) -> Any:
    with autocast("cpu", dtype=FP16):
        one = PRODUCT(x, net.first.weight)
    with autocast("cpu", dtype=FP16, policy="amp"):
        return (one + PRODUCT(x, net.first.weight),)


def half_first(net: Net, x: torch.Tensor) -> torch.Tensor:
    with autocast("cpu", dtype=FP16):
        return net.first(x)


def region_in_a_checkpoint(net: Net, x: torch.Tensor) -> Any:
    return (checkpoint(half_first, net, x, use_reentrant=False),)


def region_in_a_branch(net: Net, x: torch.Tensor) -> Any:
    def branch(t: torch.Tensor) -> torch.Tensor:
        return half_first(net, t)

    return (torch.cond(x.sum() > 0, branch, branch, (x,)),)


def checkpoint_in_a_region(net: Net, x: torch.Tensor) -> Any:
    with autocast("cpu", dtype=FP16):
        return (checkpoint(net.first, x, use_reentrant=False),)


def region_in_vmap(net: Net, x: torch.Tensor) -> Any:
    """`linear` with a bias is float32 in it, as under torch.autocast; `mm` is low."""

    def product(row: torch.Tensor) -> torch.Tensor:
        with autocast("cpu", dtype=FP16):
            return row[None] @ net.first.weight.mT

    return (torch.func.vmap(product)(x),)


HIGHER_ORDER = (
    checkpoint_in_a_region,
    region_in_vmap,
    custom_function,
    region_in_a_checkpoint,
    region_in_a_branch,
)


@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'>:DeprecationWarning")
@pytest.mark.parametrize("function", HIGHER_ORDER, ids=lambda f: f.__name__)
def test_in_functions_that_are_graphs_of_their_own(function, count, net, x) -> None:
    result = torch.compile(function, fullgraph=True, backend=count)(net, x)
    assert dtypes(result) == [FP16]
    assert_same(result, function(net, x), net)
