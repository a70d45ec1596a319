"""Regions together with torch's own tools: its checkpoints, torch.jit, and its autocast class."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from polymp.torch import autocast
from tests.support.processes import in_thread
from tests.support.torch.compiled import mm, short

pytestmark = pytest.mark.usefixtures("left_as_found")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOW = (BF16, FP16)
OFF: dict[str, Any] = {"enabled": False}


KEEPS_TANH = {"name": "keeps_tanh", "rules": {"linear": "lower", "tanh": "fp32"}}


def checkpointed(
    amp: Any, kind: bool | None, where: str, **arguments: Any
) -> tuple[list[Any], list[torch.Tensor]]:
    """Dtypes seen by the block, and loss and gradients.

    `kind` is `use_reentrant`, or None for no checkpoint; `where` is the place of the backward: "in"
    the region, "outside", in "another", in a "thread".
    """
    torch.manual_seed(0)
    first, second, x = nn.Linear(8, 8), nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    seen: list[Any] = []

    def block(t: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(first(t))
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), h.dtype))
        with amp("cpu", enabled=False):
            h = h * torch.mm(t, t.mT).sum()
        return second(h)

    with contextlib.ExitStack() as stack:
        with amp("cpu", **arguments) as _:
            y = block(x) if kind is None else checkpoint(block, x, use_reentrant=kind)
            loss = y.float().square().sum()
            if where == "in":
                loss.backward()
        if where == "another":
            other = BF16 if arguments.get("dtype") is FP16 else FP16
            stack.enter_context(amp("cpu", dtype=other))
        if where == "thread":
            in_thread(loss.backward)
        elif where != "in":
            loss.backward()
    leaves = [x, *first.parameters(), *second.parameters()]
    return seen, [loss.detach(), *(leaf.grad for leaf in leaves)]


PLACES = ("in", "outside", "another", "thread")


RULED = {"dtype": FP16, "policy": KEEPS_TANH}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    "arguments",
    [{"dtype": BF16}, {"dtype": FP16}, OFF, RULED],
    ids=["bf16", "fp16", "off", "policy"],
)
def test_checkpoint_recomputes_in_the_region(arguments, reentrant, where) -> None:
    seen, ours = checkpointed(autocast, reentrant, where, **arguments)
    amp = autocast if arguments is RULED else torch.autocast
    expected, plain = checkpointed(amp, None, where, **arguments)
    assert seen == expected * 2
    assert all(map(torch.equal, ours, plain))


def test_gradients_of_another_region_are_seen() -> None:
    runs = [checkpointed(autocast, None, "outside", **a)[1] for a in ({"dtype": FP16}, OFF)]
    assert not any(map(torch.equal, *runs))


def seen_by(
    op: Callable[[torch.Tensor], torch.Tensor],
    run: Callable[..., torch.Tensor],
    forward: Any,
    backward: contextlib.AbstractContextManager[Any],
) -> list[torch.dtype]:
    """The dtypes of an op in a block that is computed again; with the policy of the forward."""
    seen: list[torch.dtype] = []

    def block(t: torch.Tensor) -> torch.Tensor:
        h = op(t)
        seen.append(h.dtype)
        return h * h

    with autocast("cpu", dtype=FP16, policy=forward):
        y = run(block, torch.randn(4, 8, requires_grad=True))
    with backward:
        y.sum().backward()
    return seen


def tanh_of_product(t: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.mm(t, t.mT))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_recomputes_without_the_policy_around_backward(reentrant: bool) -> None:
    run = partial(checkpoint, use_reentrant=reentrant)
    around = autocast("cpu", dtype=FP16, policy=KEEPS_TANH)
    assert seen_by(tanh_of_product, run, None, around) == [FP16, FP16]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_checkpoints_keep_the_policy(reentrant: bool) -> None:
    again = partial(checkpoint, use_reentrant=reentrant)

    def run(block: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return again(lambda t: again(block, t) + 1, x)

    seen = seen_by(tanh_of_product, run, KEEPS_TANH, contextlib.nullcontext())
    assert len(seen) >= 2
    assert set(seen) == {FP32}


@pytest.mark.parametrize("reentrant", [True, False])
def test_functions_under_vmap_are_recomputed_as_they_ran(reentrant: bool) -> None:
    layer, run = nn.Linear(8, 8), partial(checkpoint, use_reentrant=reentrant)
    product = torch.vmap(lambda row: torch.mm(row[None], layer.weight.mT)[0])
    policy = {"rules": {"class:matmul": "lower"}}
    assert set(seen_by(product, run, policy, contextlib.nullcontext())) == {FP16}


@pytest.mark.parametrize("outer", [autocast, torch.autocast], ids=["ours outside", "torch outside"])
@pytest.mark.parametrize("given", [{"dtype": BF16}, {"dtype": FP16}, {}, OFF], ids=short)
def test_regions_of_ours_and_of_torch_nest(outer, given, x, w) -> None:
    inner = torch.autocast if outer is autocast else autocast
    at = FP32 if given == OFF else given.get("dtype", FP16)
    with outer("cpu", dtype=FP16, cache_enabled=False):
        assert torch.equal(torch.mm(x, w), mm(x, w, FP16))
        with inner("cpu", **given):
            assert torch.equal(torch.mm(x, w), mm(x, w, at))
            with outer("cpu", dtype=FP16):
                assert torch.equal(torch.mm(x, w), mm(x, w, FP16))
            assert torch.equal(torch.mm(x, w), mm(x, w, at))
        assert torch.equal(torch.mm(x, w), mm(x, w, FP16))
    assert torch.equal(torch.mm(x, w), mm(x, w, FP32))


@pytest.fixture
def _jit_is_deprecated() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit")
        yield


@pytest.mark.usefixtures("_jit_is_deprecated")
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("place", ["around", "inside", "decorated"])
def test_a_jit_trace_holds_the_casts(place, dtype, x, w) -> None:
    weight = w.detach()

    def trace(amp: Any) -> Any:
        def plain(t: torch.Tensor) -> torch.Tensor:
            return torch.mm(t, weight).relu()

        def opens(t: torch.Tensor) -> torch.Tensor:
            with amp("cpu", dtype=dtype, cache_enabled=False):
                return plain(t)

        if place == "around":
            with amp("cpu", dtype=dtype, cache_enabled=False):
                return torch.jit.trace(plain, (x,))
        decorated = amp("cpu", dtype=dtype, cache_enabled=False)(plain)
        return torch.jit.trace(opens if place == "inside" else decorated, (x,))

    ours, theirs = trace(autocast), trace(torch.autocast)
    assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours(x), mm(x, weight, dtype).relu())
    kinds = [[node.kind() for node in traced.graph.nodes()] for traced in (ours, theirs)]
    assert kinds[0] == kinds[1]


def doubled(t: torch.Tensor) -> torch.Tensor:
    return t + t


@pytest.mark.usefixtures("_jit_is_deprecated")
def test_script_refuses_a_decorated_function_in_torch_s_words() -> None:
    messages = []
    for amp in (autocast, torch.autocast):
        with pytest.raises(RuntimeError) as caught:
            torch.jit.script(amp("cpu")(doubled))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "@autocast() decorator is not supported in script mode" in messages[0]
