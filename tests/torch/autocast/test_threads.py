"""Regions in threads, and in replicas as DataParallel runs them: a thread starts outside."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from polymp.torch import autocast

pytestmark = pytest.mark.usefixtures("left_as_found")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def mm(x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `torch.mm(x, w)` gives in a region of that low dtype, by hand."""
    return torch.mm(x.to(dtype), w.to(dtype))


def in_thread(function: Callable[[], Any]) -> Any:
    """What `function` returns in a thread of its own, or raises."""
    return in_threads([function])[0]


def in_threads(functions: list[Callable[[], Any]]) -> list[Any]:
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def work(at: int) -> None:
        try:
            results[at] = functions[at]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return [results[at] for at in range(len(functions))]


def test_a_thread_starts_outside(x: torch.Tensor, w: torch.Tensor) -> None:
    with autocast("cpu", dtype=FP16):
        assert in_thread(lambda: torch.mm(x, w).dtype) is FP32
        assert torch.mm(x, w).dtype is FP16


def test_threads_at_once_keep_to_their_own_regions(x: torch.Tensor, w: torch.Tensor) -> None:
    """One weight, one step at a time for all: nobody may see another's region or another's cast."""
    arguments = ({"dtype": BF16}, {"dtype": FP16}, {"enabled": False}, {"dtype": FP16})
    dtypes = (BF16, FP16, FP32, FP16)
    steps = threading.Barrier(len(arguments), timeout=60)

    def work(given: dict[str, Any]) -> list[torch.Tensor]:
        seen = []
        for _ in range(3):
            steps.wait()
            with autocast("cpu", **given):
                steps.wait()
                seen.append(torch.mm(x, w))
                steps.wait()
                seen.append(torch.mm(x, w))
            steps.wait()
        return seen

    with autocast("cpu", dtype=BF16):
        torch.mm(x, w)
        results = in_threads([lambda given=given: work(given) for given in arguments])
        assert torch.equal(torch.mm(x, w), mm(x, w, BF16))
    for dtype, seen in zip(dtypes, results, strict=True):
        assert len(seen) == 6
        assert all(torch.equal(y, mm(x, w, dtype)) for y in seen)


def test_one_object_and_one_decorated_function_for_all_threads(
    x: torch.Tensor, w: torch.Tensor
) -> None:
    region = autocast("cpu", dtype=FP16)
    steps = threading.Barrier(4, timeout=60)

    @region
    def function() -> torch.dtype:
        steps.wait()
        return torch.mm(x, w).dtype

    def work() -> list[torch.dtype]:
        seen = [function()]
        with region:
            seen.append(function())
        steps.wait()
        return [*seen, torch.mm(x, w).dtype]

    assert in_threads([work] * 4) == [[FP16, FP16, FP32]] * 4


def test_gradients_of_a_region_from_another_thread(x: torch.Tensor, w: torch.Tensor) -> None:
    def loss() -> torch.Tensor:
        with autocast("cpu", dtype=FP16):
            return torch.mm(x, w).float().square().sum()

    here = torch.autograd.grad(loss(), w)[0]
    forward_there = torch.autograd.grad(in_thread(loss), w)[0]
    made_here = loss()
    backward_there = in_thread(lambda: torch.autograd.grad(made_here, w)[0])
    assert torch.equal(here, forward_there)
    assert torch.equal(here, backward_there)


def test_a_region_is_left_in_the_thread_that_entered_it() -> None:
    region = autocast("cpu", dtype=FP16)
    with region:

        def leave() -> None:
            with pytest.raises(RuntimeError, match="not open in this thread"):
                region.__exit__(None, None, None)

        in_thread(leave)
        assert torch.is_autocast_enabled("cpu")


def test_a_thread_that_ends_inside_a_region_harms_nobody(x: torch.Tensor, w: torch.Tensor) -> None:
    def die() -> None:
        autocast("cpu", dtype=FP16).__enter__()
        torch.mm(x, w)

    in_thread(die)
    for dtype in (BF16, FP16):
        with autocast("cpu", dtype=dtype):
            assert torch.equal(torch.mm(x, w), mm(x, w, dtype))
            with torch.no_grad():
                w.mul_(2)
            assert torch.equal(torch.mm(x, w), mm(x, w, dtype))


class Decorated(nn.Module):
    """A model that opens its region in `forward`, as the recipes ask for under DataParallel."""

    def __init__(self, amp: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)
        self.seen: list[torch.dtype] = []
        self.amp, self.dtype = amp, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        @self.amp("cpu", dtype=self.dtype)
        def run() -> torch.Tensor:
            h = self.first(x)
            self.seen.append(h.dtype)
            return self.second(torch.relu(h))

        return run()


def replica(model: nn.Module) -> nn.Module:
    """A copy whose weights are copies that pass gradients on, as DataParallel makes them."""
    twin = copy.deepcopy(model)
    for ours, theirs in zip(twin.modules(), model.modules(), strict=True):
        for name, parameter in theirs._parameters.items():
            del ours._parameters[name]
            setattr(ours, name, parameter.clone())
    return twin


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_replicas_in_threads_with_a_decorated_forward(dtype: torch.dtype) -> None:
    def run(amp: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, x = Decorated(amp, dtype), torch.randn(6, 8)
        twins = [replica(model) for _ in range(2)]
        work = [lambda m=m, part=part: m(part) for m, part in zip(twins, x.chunk(2), strict=True)]
        y = torch.cat(in_threads(work))
        assert [twin.seen for twin in twins] == [[dtype], [dtype]]
        assert y.dtype is dtype
        y.float().square().sum().backward()
        return [y.detach(), *(p.grad for p in model.parameters())]

    assert all(map(torch.equal, run(autocast), run(torch.autocast)))


def test_data_parallel_without_a_gpu_is_the_model(x: torch.Tensor) -> None:
    model = nn.DataParallel(Decorated(autocast, FP16))
    assert model(x).dtype is FP16
    with autocast("cpu", dtype=BF16):
        assert nn.DataParallel(model.module.first)(x).dtype is BF16
